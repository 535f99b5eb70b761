"""What generation keeps belongs to one model object: it is neither copied nor pickled, nor shown."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

import clearhead as ch
from clearhead.run.kernels.library import library
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


def test_a_copy_has_its_own_weights(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert other.generate("hello", 8).ids != model.generate("hello", 8).ids


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
