"""Adapters by name: each request of a step may have its own, and is as with the merged model alone."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import clearhead as ch
from clearhead.app.commands import serve as commands
from clearhead.errors import InputError, RequestError
from clearhead.hub.peft import RankUpdate, write_adapter
from clearhead.run.serve.adapters import open_adapter, updates_of
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.sequence import ServeOptions
from tests.serve import mixes
from tests.serve.mixes import tuned
from tests.serve.served import serving
from tests.serve.test_http import call

PROMPT = list(range(20, 60))


@pytest.mark.parametrize("shape", ["rope-gqa", "windows", "states", "translator"])
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
    engine = commands._engine(folder, Limits(), "cpu", None, adapters={"polite": tmp_path / "run"})
    assert {a.shape[0] for a, _ in engine.adapters["polite"].updates.values()} == {2}
    with pytest.raises(InputError, match='--adapter "x" must be NAME=DIR'):
        commands.serve(folder, adapter=("x",))
    with pytest.raises(InputError, match="two models are called a"):
        commands.serve(folder, model=(f"a={folder}",), adapter=(f"a={folder}",))


# Adapters that come and go ----------------------------------------------------------------------------------


def peft_folder(folder, m: ch.Model, seed: int):
    """A directory of PEFT's with a random update of two layers of each block."""
    draw, adapter = torch.Generator().manual_seed(seed), {}
    for name, part in m.model.named_modules():
        if name.endswith(("attention.q", "feedforward.up")):
            a, b = (
                torch.randn(size, generator=draw) for size in ((2, part.in_features), (part.out_features, 2))
            )
            adapter[name] = RankUpdate(a, b, 0.7)
    write_adapter(folder, adapter, m.config, m.described().architecture)
    return folder


def merged(m: ch.Model, folder) -> ch.Model:
    """The model with an adapter of PEFT's in its weights."""
    other = copy.deepcopy(m)
    other.adapters.add("x", folder)
    other.adapters.use("x", merged=True)
    return other


def test_a_request_keeps_the_adapter_that_its_name_meant_when_it_came(byte_tokenizer, tmp_path):
    """Loaded, replaced and unloaded between steps; blocks of one are never those of the next of its name."""
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.special.clear()
    folders = [peft_folder(tmp_path / str(seed), m, seed) for seed in (1, 2)]
    first, second = (merged(m, folder) for folder in folders)
    engine = ServeEngine(m, Limits(block=8, cache_tokens=144))
    options, asks = {"max_new_tokens": 30}, ServeOptions(adapter="x")

    def ask(serving: ServeOptions = asks):
        seq = engine.submit(PROMPT, options, serving)
        for _ in range(3):
            engine.step()
        return seq

    plain = ask(ServeOptions())
    with pytest.raises(RequestError, match='no adapter is called "x"'):
        ask()
    engine.load_adapter("x", open_adapter(m, "x", folders[0]))
    old, same = ask(), ask()
    with pytest.raises(InputError, match='is called "x" already'):
        engine.load_adapter("x", {})
    engine.load_adapter("x", open_adapter(m, "x", folders[1]), replace=True)
    new = ask()
    engine.unload_adapter("x")
    with pytest.raises(RequestError, match='no adapter is called "x"') as refused:
        ask()
    assert (refused.value.code, refused.value.status) == ("model_not_found", 404)
    while engine.busy:
        engine.step()
    assert engine.stats.preempted > 0
    wanted = [model.generate(PROMPT, num_beams=1, **options).ids for model in (m, first, second)]
    assert [seq.wait(0).ids for seq in (plain, old, new)] == wanted
    assert same.wait(0).ids == wanted[1]
    assert len({*map(tuple, wanted)}) == 3
    assert (same.cached, new.cached) == (32, 0)
    with pytest.raises(RequestError, match='no adapter is called "x"'):
        engine.unload_adapter("x")


def test_adapters_come_and_go_while_the_thread_takes_steps(byte_tokenizer, tmp_path):
    m = mixes.model("windows", byte_tokenizer)
    m.special.clear()
    folders = [peft_folder(tmp_path / str(seed), m, seed) for seed in (1, 2)]
    models = [merged(m, folder) for folder in folders]
    updates = [open_adapter(m, "x", folder) for folder in folders]
    engine = ServeEngine(m, Limits(block=8, waiting=500))
    wanted = [model.generate(PROMPT, 4, num_beams=1).ids for model in (m, *models)]
    engine.start()
    found: list[tuple[int, object]] = []

    def come_and_go(which: int) -> None:
        for number in range(15):
            name = f"{which}-{number % 2}"
            engine.load_adapter(name, updates[which])
            found.append(
                (1 + which, engine.submit(PROMPT, {"max_new_tokens": 4}, ServeOptions(adapter=name)))
            )
            found.append((0, engine.submit(PROMPT, {"max_new_tokens": 4})))
            engine.unload_adapter(name)

    threads = [threading.Thread(target=come_and_go, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert [seq.wait(60).ids for _, seq in found] == [wanted[which] for which, _ in found]
        assert len(found) == 60
    finally:
        engine.close()
    assert not engine.adapters


def test_adapters_are_loaded_over_http_where_the_server_allows_it(byte_tokenizer, tmp_path):
    m = mixes.model("rope-gqa", byte_tokenizer)
    tuned(m, 1, ("q", "v")).save(run := tmp_path / "run")
    folder = peft_folder(tmp_path / "peft", m, 2)
    body = {"model": "polite", "prompt": "Hello", "max_tokens": 6, "temperature": 0}
    load = {"lora_name": "polite", "lora_path": str(folder)}
    key = {"Authorization": "Bearer k"}
    started = ServeEngine(m, adapters={"polite": open_adapter(m, "polite", folder)})
    with serving({"m": started}) as at:
        wanted = call(at, "/v1/completions", body)[2]["choices"]
        status, _, answer = call(at, "/v1/load_lora_adapter", load)
        assert (status, "--allow-adapter-loading" in answer["error"]["message"]) == (403, True)
        assert call(at, "/v1/unload_lora_adapter", {"lora_name": "polite"})[0] == 403
    with serving({"m": ServeEngine(m)}, keys=["k"], adapter_loading=True) as at:
        assert call(at, "/v1/load_lora_adapter", load)[0] == 401
        assert call(at, "/v1/completions", body, **key)[0] == 404
        assert call(at, "/v1/load_lora_adapter", load, **key)[0] == 200
        cards = call(at, "/v1/models", **key)[2]["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("m", None), ("polite", "m")]
        assert call(at, "/v1/completions", body, **key)[2]["choices"] == wanted
        refused = [
            (load, 400, 'lora_name "polite" is taken'),
            ({**load, "lora_name": "m", "load_inplace": True}, 400, 'lora_name "m" is taken'),
            ({**load, "lora_name": "x", "lora_path": str(tmp_path / "none")}, 404, "is no directory"),
            ({**load, "lora_name": "x", "lora_path": str(tmp_path)}, 400, "config.json"),
            ({**load, "lora_name": "x", "model": "polite"}, 400, 'adapter "polite"'),
            ({"lora_name": "x"}, 400, "lora_path"),
        ]
        for wrong, status, line in refused:
            found = call(at, "/v1/load_lora_adapter", wrong, **key)
            assert (found[0], line in found[2]["error"]["message"]) == (status, True), found
        assert (
            call(at, "/v1/load_lora_adapter", {**load, "lora_path": str(run), "load_inplace": True}, **key)[0]
            == 200
        )
        replaced = call(at, "/v1/completions", body, **key)[2]["choices"]
        assert replaced[0]["text"] == ch.load(run).generate("Hello", 6, num_beams=1).text
        status, _, answer = call(at, "/v1/embeddings", {"model": "polite", "input": "a"}, **key)
        assert (status, "for text" in answer["error"]["message"]) == (400, True)
        assert call(at, "/v1/unload_lora_adapter", {"lora_name": "polite"}, **key)[0] == 200
        gone = call(at, "/v1/completions", body, **key)
        assert (gone[0], gone[2]["error"]["code"]) == (404, "model_not_found")
        assert call(at, "/v1/unload_lora_adapter", {"lora_name": "polite"}, **key)[0] == 404
        assert [one["id"] for one in call(at, "/v1/models", **key)[2]["data"]] == ["m"]


@pytest.mark.parametrize(("shape", "layer"), [("experts", "experts.0.up"), ("rope-gqa", "head.out")])
def test_a_layer_that_sees_no_rows_of_a_step_takes_no_adapter(shape, layer, byte_tokenizer):
    m = mixes.model(shape, byte_tokenizer)
    name, part = next((key, one) for key, one in m.model.named_modules() if key.endswith(layer))
    update = torch.ones(1, part.in_features), torch.ones(part.out_features, 1)
    with pytest.raises(InputError, match=f"adapter x updates {name}, which cannot take an adapter"):
        ServeEngine(m).load_adapter("x", {name: update})


@pytest.mark.parametrize(("shape", "seed"), [("rope-gqa", 5), ("windows", 8), ("translator", 3)])
def test_a_mix_with_adapters_that_come_and_go_equals_each_merged_model_alone(shape, seed, byte_tokenizer):
    m = mixes.model(shape, byte_tokenizer)
    models = [tuned(m, 1, ("q", "v")), tuned(m, 2, ("out", "up", "down"))]
    pairs = [(updates_of(m.model, other.model, "x"), other) for other in models]
    engine = mixes.mixed(m, seed, tuned=pairs, draft=mixes.near(m))
    assert engine.adapter_names and engine.stats.drafted > 0
