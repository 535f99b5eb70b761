"""Generation in half precision: two ways to compute may differ by a rounding, never by more.

Tokens need not be equal there. Every token that was chosen must be, in one fresh pass over the whole row, as
good as the best within the rounding of the dtype; the score of a beam must be that of a fresh pass.
"""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.inside.checks.rows import TOLERANCE
from tests.generate.test_decode import SHAPES, START, STOP, model_of, prompts_of

WAYS = dict(plain={}, lookup={"lookup": 4}, compiled={"compile": True}, beams={"num_beams": 3})
COUNT = 16


def pytest_generate_tests(metafunc):
    if metafunc.config.getoption("--device"):
        dtypes = [metafunc.config.getoption("--dtype")]
    else:
        dtypes = ["bfloat16", "float16"]
    ways = [way for way in WAYS if way != "compiled" or metafunc.config.getoption("--device")]
    metafunc.parametrize("dtype", dtypes)
    metafunc.parametrize("way", ways)
    metafunc.parametrize("shape", SHAPES)


def fresh_log_probabilities(model: ch.Transformer, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """Return [T, V] for the tokens after the prompt, from one pass without a cache."""
    device, both = next(model.parameters()).device, model.encoder is not None
    fed = [START] if both else prompt
    more = {"source": torch.tensor([prompt], device=device)} if both else {}
    with torch.no_grad():
        logits = model(torch.tensor([fed + ids], device=device), **more).logits[0, len(fed) - 1 : -1]
    return logits.float().log_softmax(-1).cpu()


@pytest.mark.ledger("G2", "G3")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_every_token_is_as_good_as_the_best(shape, way, dtype, byte_tokenizer, differences):
    model = model_of(shape).to(getattr(torch, dtype))
    m = ch.Model(model, byte_tokenizer, special={"eos": STOP, "decoder_start": START})
    prompts = prompts_of()
    allowed = TOLERANCE[getattr(torch, dtype)] * 4  # logits of these models are up to about 4
    for prompt, made in zip(prompts, m.generate(prompts, COUNT, **WAYS[way])):
        ids = made.ids + ([STOP] if made.stop_reason == "eos" else [])
        found = fresh_log_probabilities(model, prompt, ids)
        chosen = found.gather(1, torch.tensor(ids)[:, None].cpu())[:, 0]
        if way == "beams":
            lost = abs(float(chosen.sum()) / len(ids) - made.score)
        else:
            lost = float((found.max(-1).values - chosen).max())
        differences.worst[way] = max(lost, differences.worst.get(way, 0.0))
        assert lost <= allowed
