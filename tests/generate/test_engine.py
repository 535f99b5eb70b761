"""What generation keeps belongs to one model object: it is neither copied nor pickled, nor shown."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

import clearhead as ch
from clearhead.run.generate.decode import decode
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Prompts
from clearhead.run.kernels.library import library
from clearhead.run.kernels.parts import fingerprint
from clearhead.run.quant.apply import quantize_model
from tests.harness import build


@pytest.fixture
def model(byte_tokenizer) -> ch.Model:
    return ch.Model(build(vocab_size=256, positions="rope"), byte_tokenizer, special={"eos": 5})


@pytest.mark.parametrize(
    "copied",
    [
        lambda m: pickle.loads(pickle.dumps(m)),
        copy.deepcopy,
        copy.copy,
        dataclasses.replace,
    ],
    ids=["pickle", "deepcopy", "copy", "replace"],
)
def test_a_used_model_is_copied_without_its_engine(copied, model):
    wanted = model.generate("hello", 8, reuse=True)
    assert model.engine.copy is not None and model.engine.prefix is not None
    other = copied(model)
    assert type(other) is ch.Model
    assert other.engine is not model.engine and other.engine.copy is None and other.engine.prefix is None
    assert other.special == model.special and "_engine" not in repr(other)
    assert other.generate("hello", 8) == model.generate("hello", 8) == wanted


def test_a_loaded_model_is_pickled(model, tmp_path):
    model.save(tmp_path / "model")
    loaded = ch.load(tmp_path / "model")
    wanted = loaded.generate("hello", 8)
    again = pickle.loads(pickle.dumps(loaded))
    assert again.generate("hello", 8) == wanted
    again.save(tmp_path / "again")
    assert ch.load(tmp_path / "again").generate("hello", 8) == wanted


def test_the_engine_follows_the_model(model):
    before = model.generate("hello", 8)
    first = model.engine
    assert model.engine is first
    model.model = build(seed=1, vocab_size=256, positions="rope")
    assert model.generate("hello", 8).ids != before.ids
    assert model.engine is not first


@pytest.mark.cpu
@pytest.mark.skipif(library() is None, reason="no C compiler, or other threads than GNU's")
def test_texts_are_read_by_the_fast_copy_on_a_cpu(model, monkeypatch):
    """`embed` and `score` give the model's own numbers, after weights changed too, and follow its hooks."""
    texts = ["hello", "a text read beside it", "hello you"]
    fast = model.embed(texts), model.score(texts[1]).total
    assert model.engine.copy is not None and model.engine.reader() is model.engine.copy
    with monkeypatch.context() as plain:
        plain.setattr(type(model.engine), "reader", lambda engine: engine.model)
        assert (model.embed(texts) - fast[0]).abs().max() <= 1e-6
        assert model.score(texts[1]).total == pytest.approx(fast[1], abs=1e-5)
    model.model.main.blocks[0].feedforward.down.weight.data.mul_(3)
    assert (model.embed(texts) - fast[0]).abs().max() > 1e-3
    with ch.edit(model.model, {"blocks.1.feedforward.out": torch.zeros_like}):
        assert model.engine.reader() is model.model
    few = ch.Model(quantize_model(model.model, ch.QuantPlan(8, method="rtn")).model, model.tokenizer)
    assert few.engine.reader() is few.model  # its copy would round what it reads


# The fast copy follows the model, whatever changes it ------------------------------------------------------


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
