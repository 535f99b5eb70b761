"""The fast copy computes what the model computes, and leaves the model alone."""

import pytest
import torch

import clearhead as ch
from clearhead.fast.prepare import prepared
from clearhead.generate.decode import greedy

CONFIGS = {
    "decoder": ch.preset("micro-decoder"),
    "grouped, gated": ch.preset("micro-decoder").replace(
        n_kv_heads=1, positions="rope", norm="rmsnorm", gated=True, bias=False
    ),
    "experts": ch.preset("micro-decoder").replace(n_experts=4, gated=True),
    "encoder-decoder": ch.preset("micro-encoder-decoder"),
    "encoder": ch.preset("micro-encoder"),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 9), (2, 1), (5, 1), (8, 11)])
def test_the_copy_equals_the_model(name, rows, length):
    torch.manual_seed(0)
    model = ch.Transformer(CONFIGS[name].replace(d_model=48, n_heads=4)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fast = prepared(model)
    ids = torch.randint(model.config.vocab_size, (rows, length))
    more = (
        {"source": torch.randint(model.config.vocab_size, (rows, 6))}
        if model.encoder is not None and model.decoder is not None
        else {}
    )
    with torch.inference_mode():
        assert (fast(ids, **more).logits - model(ids, **more).logits).abs().max() <= 1e-5
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_copy_generates_the_same_tokens():
    torch.manual_seed(0)
    model = ch.Transformer(CONFIGS["grouped, gated"]).eval()
    ids = torch.randint(model.config.vocab_size, (4, 5))
    assert torch.equal(greedy(prepared(model), ids, 20), greedy(model, ids, 20))
