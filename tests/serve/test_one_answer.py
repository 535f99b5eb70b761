"""One request has one answer: from `generate`, the engine, a file of requests, and a beam of one."""

from __future__ import annotations

import pytest

from tests.serve import mixes


@pytest.mark.parametrize("shape", ["rope-gqa", "windows", "states", "latent"])
def test_every_way_to_ask_gives_one_answer(shape, byte_tokenizer, tmp_path):
    m = mixes.model(shape, byte_tokenizer)
    beams = sum(mixes.asked_every_way(m, seed, tmp_path) for seed in range(4))
    assert beams > 0  # some were greedy, and could be asked as a beam
