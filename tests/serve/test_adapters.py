"""Adapters by name: each request of a step may have its own, and is as with the merged model alone."""

from __future__ import annotations

import copy

import pytest
import torch

import clearhead as ch
from clearhead.app.commands import serve as commands
from clearhead.errors import InputError
from clearhead.learn.training.weights import add_lora
from clearhead.run.kernels.lora import merge
from clearhead.run.serve.adapters import updates_of
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.sequence import ServeOptions
from tests.serve import mixes
from tests.serve.served import serving
from tests.serve.test_http import call

PROMPT = list(range(20, 60))


def tuned(m: ch.Model, seed: int, targets: tuple[str, ...]) -> ch.Model:
    """The same model with a low-rank update, merged as a run of training leaves it."""
    other = copy.deepcopy(m)
    add_lora(other.model, 2, 4.0, targets)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in other.model.named_parameters():
        if name.endswith((".a", ".b")):
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.6
    merge(other.model)
    return other


@pytest.mark.parametrize("shape", ["rope-gqa", "windows", "translator"])
def test_a_mix_of_adapters_equals_each_merged_model_alone(shape, byte_tokenizer):
    m = mixes.model(shape, byte_tokenizer)
    m.special.clear()
    models = {"": m, "one": tuned(m, 1, ("q", "v")), "two": tuned(m, 2, ("out", "up", "down"))}
    adapters = {name: updates_of(m.model, other.model, name) for name, other in models.items() if name}
    assert {a.shape[0] for updates in adapters.values() for a, _ in updates.values()} == {2}
    engine = ServeEngine(m, Limits(block=8, tokens=32, cache_tokens=200), adapters)
    seqs = []
    for number in range(9):
        name = ["", "one", "two"][number % 3]
        options = {"max_new_tokens": 9, "temperature": 0.8 * (number > 4), "seed": number}
        text = PROMPT[: 40 - number // 3]
        seqs.append((name, text, options, engine.submit(text, options, ServeOptions(adapter=name))))
        engine.step()
    while engine.busy:
        engine.step()
    found = [seq.wait(0).ids for *_, seq in seqs]
    assert found == [models[name].generate(text, num_beams=1, **given).ids for name, text, given, _ in seqs]
    assert len({tuple(ids) for ids in found[:3]}) == 3  # the adapters matter
    assert engine.pool.used == 0


def test_blocks_are_not_shared_between_adapters(byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    engine = ServeEngine(m, Limits(block=8), {"one": updates_of(m.model, tuned(m, 1, ("k",)).model, "one")})
    cached = []
    for name in ("", "one", "one", ""):
        seq = engine.submit(PROMPT, {"max_new_tokens": 1}, ServeOptions(adapter=name))
        while engine.busy:
            engine.step()
        cached.append(seq.cached)
    assert cached == [0, 0, 32, 32]


def test_what_is_no_adapter_is_refused_by_name(byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    for layer, message in (
        ("blocks.1.attention.q", "by rank 16, which is no low-rank update"),
        ("head.out", "differs from the model in .*: serve it as a model of its own"),
    ):
        other = copy.deepcopy(m)
        name = next(one for one, _ in other.model.named_modules() if one.endswith(layer))
        weight = other.model.get_submodule(name).weight
        weight.data = weight + torch.randn(weight.shape)
        with pytest.raises(InputError, match=message):
            updates_of(m.model, other.model, "wide")
    broken = tuned(m, 1, ("q",))
    next(one for name, one in broken.model.named_parameters() if "attention.q" in name).data[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"adapter bad has NaN or infinite numbers in .*attention.q"):
        updates_of(m.model, broken.model, "bad")
    with pytest.raises(InputError, match="other layers"):
        updates_of(m.model, mixes.model("alibi", byte_tokenizer).model, "other")
    engine = ServeEngine(m)
    with pytest.raises(InputError, match='no adapter is called "x"'):
        engine.submit(PROMPT, {}, ServeOptions(adapter="x"))


def test_an_adapter_is_a_model_over_http(byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    other = tuned(m, 1, ("q", "v"))
    engine = ServeEngine(m, adapters={"polite": updates_of(m.model, other.model, "polite")})
    body = {"prompt": "Hello", "max_tokens": 6, "temperature": 0}
    with serving({"m": engine}) as at:
        assert [one["id"] for one in call(at, "/v1/models")[2]["data"]] == ["m", "polite"]
        for name, alone in (("m", m), ("polite", other)):
            found = call(at, "/v1/completions", {**body, "model": name})[2]
            assert found["model"] == name
            assert found["choices"][0]["text"] == alone.generate("Hello", 6, num_beams=1).text
        inside = call(at, "/v1/completions", {**body, "model": "polite", "inside": ["lens"]})
    assert inside[0] == 400
    assert "adapter" in inside[2]["error"]["message"]


def test_the_command_opens_adapters_and_names_what_is_wrong(byte_tokenizer, tmp_path):
    m = mixes.model("rope-gqa", byte_tokenizer)
    tuned(m, 1, ("q", "v")).save(tmp_path / "run")
    m.save(folder := tmp_path / "m")
    engine = commands._engine(folder, Limits(), "cpu", None, {"polite": tmp_path / "run"})
    assert {a.shape[0] for a, _ in engine.adapters["polite"].values()} == {2}
    with pytest.raises(InputError, match='--adapter "x" must be NAME=DIR'):
        commands.serve(folder, adapter=("x",))
    with pytest.raises(InputError, match="two models are called a"):
        commands.serve(folder, model=(f"a={folder}",), adapter=(f"a={folder}",))
