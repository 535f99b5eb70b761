"""One request has one answer: from `generate`, the engine, a file of requests, and a beam of one."""

from __future__ import annotations

import pytest

from tests.serve import mixes


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["rope-gqa", "windows", "states", "latent", "translator"])
def test_every_way_to_ask_gives_one_answer(shape, byte_tokenizer):
    m = mixes.model(shape, byte_tokenizer)
    for seed in range(2):
        engine = mixes.asked_every_way(m, seed)  # which compares the answers
        assert len(engine.finished) == 5 and not engine.busy
