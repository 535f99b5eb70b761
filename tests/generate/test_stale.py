"""The fast copy follows the model, whatever changes it: no edit leaves `generate` with old weights."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.run.generate.decode import Prompts, decode
from clearhead.run.generate.request import Request
from clearhead.run.kernels.parts import fingerprint

PROMPTS = [[1, 2, 3], [4, 5, 6]]
SHAPES = {
    "plain": ch.preset("micro-decoder").replace(vocab_size=61),
    "gated": ch.preset("micro-decoder").replace(
        vocab_size=61, gated=True, norm="rmsnorm", tie_embeddings=False
    ),
}


def by_numpy(weight: torch.nn.Parameter) -> None:
    weight.detach().numpy()[...] = torch.randn(weight.shape).numpy()


def averaged(weight: torch.nn.Parameter) -> None:
    weight.data.mul_(0.5).add_(torch.randn(weight.shape), alpha=0.5)


def exchanged(weight: torch.nn.Parameter) -> None:
    """Two rows change places: every sum of the weight stays as it was."""
    weight.data[[0, 1]] = weight.data[[1, 0]]


EDITS = {
    "copy_": lambda weight: weight.data.copy_(torch.randn(weight.shape)),
    "average": averaged,
    "numpy": by_numpy,
    "rows": exchanged,
    "set_": lambda weight: setattr(weight, "data", torch.randn(weight.shape)),
    "in place": lambda weight: torch.nn.init.normal_(weight),
}


def same_as_the_model_itself(m: ch.Model) -> None:
    for prompts in (PROMPTS, PROMPTS[:1]):
        wanted = [row.ids for row in decode(m.model, Request(max_new_tokens=8), Prompts(prompts))]
        assert [made.ids for made in m.generate(prompts, 8)] == wanted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "edit", [pytest.param(name, marks=pytest.mark.cpu) if name == "numpy" else name for name in EDITS]
)
def test_weights_may_be_edited_in_any_way(shape, edit):
    torch.manual_seed(0)
    m = ch.Model(ch.Transformer(SHAPES[shape]).eval())
    same_as_the_model_itself(m)
    for name, weight in m.model.named_parameters():
        if weight.ndim == 2 and "blocks.1" not in name:
            EDITS[edit](weight)
            same_as_the_model_itself(m)


def test_options_of_a_part_may_be_edited():
    torch.manual_seed(0)
    m = ch.Model(ch.Transformer(SHAPES["gated"]).eval())
    block = m.model.decoder.blocks[0]
    first = m.generate([1, 2, 3], 8).ids
    weight = block.attention.out.weight
    other = torch.nn.Linear(*reversed(weight.shape)).to(weight.device)
    edits = {
        "scale": lambda: setattr(block.attention, "scale", 3.0),
        "softcap": lambda: setattr(block.attention, "softcap", 0.1),
        "activation": lambda: setattr(block.feedforward, "activation", torch.sin),
        "eps": lambda: setattr(block.attention_residual.before, "eps", 2.0),
        "forward": lambda: setattr(block.feedforward, "forward", lambda x, tap=None: -x),
        "part": lambda: setattr(block.attention, "out", other),
        "q's forward": lambda: setattr(block.attention.q, "forward", lambda x: x * 0),
    }
    for edit in edits.values():
        edit()
        same_as_the_model_itself(m)
    assert m.generate([1, 2, 3], 8).ids != first


def test_a_prefix_is_not_kept_over_an_edit():
    torch.manual_seed(0)
    m = ch.Model(ch.Transformer(SHAPES["plain"]).eval())
    m.generate([1, 2, 3, 4, 5], 4, reuse=True)
    for weight in m.model.parameters():
        weight.data.copy_(torch.randn(weight.shape))
    assert m.generate([1, 2, 3, 4, 5], 8, reuse=True).ids == m.generate([1, 2, 3, 4, 5], 8).ids


def test_a_fingerprint_sees_a_bit_and_an_exchange():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for shape in ((5, 7), (4, 8), (3, 2, 6), (9,)):
            weight = torch.randn(shape).to(dtype)
            before = fingerprint(weight)
            assert torch.equal(fingerprint(weight.clone()), before)
            changed = weight.clone()
            changed.view(-1)[0] = torch.nextafter(weight.view(-1)[0].float(), torch.tensor(9.0)) + 1e-2
            assert not torch.equal(fingerprint(changed), before)
            assert not torch.equal(fingerprint(weight.flip(-1)), before)
