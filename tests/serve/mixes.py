"""Random mixes of requests, served together, against each request by itself."""

from __future__ import annotations

import copy
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import clearhead as ch
from clearhead.learn.tasks.generation import asked_for, prompts_of
from clearhead.run.generate.beam import beam_search
from clearhead.run.generate.decode import steps_back
from clearhead.run.generate.request import OPTIONS
from clearhead.run.kernels.lora import add_lora, merge
from clearhead.run.serve.adapters import Updates, updates_of
from clearhead.run.serve.batch import run_batch
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.sequence import ServeOptions
from tests import harness

V = 256  # one token for each byte
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
SHAPES: dict[str, dict] = {
    "learned": {"max_positions": 128},
    "rope-gqa": dict(positions="rope", n_kv_heads=2, norm="rmsnorm", activation="silu", gated=True),
    "alibi": {"positions": "alibi"},
    "windows": {"positions": "rope", "attention": ("window(6)", "full")},
    "sinks": {"positions": "rope", "attention": ("window(5, sinks=2)",)},
    "capped": {"positions": "rope", "attention_softcap": 5.0, "attention_sink": True},
    "states": {"positions": "none", "attention": ("gated-delta", "full")},
    "linear": {"positions": "none", "attention": ("linear(elu)",)},
    "experts": {"positions": "rope", "n_experts": 4, "n_active_experts": 2},
    "state spaces": {"positions": "none", "attention": ("mamba2(d_state=5)", "conv")},
    "hybrid": {"positions": "rope", "attention": ("hybrid(d_state=5, attention_in=1.2)", "full")},
    "latent": {**harness.LATENT, **harness.GROUPED_EXPERTS},
    "relative": {"family": "encoder-decoder", "positions": "relative", "norm": "rmsnorm"},
    "translator": {"family": "encoder-decoder", "positions": "sinusoidal"},
}


def model(shape: str, tokenizer, **changes) -> ch.Model:
    """A scrambled micro model that reads bytes."""
    given = {"vocab_size": V, "max_positions": 128, **SHAPES[shape], **changes}
    m = ch.Model(harness.build(**given), tokenizer)
    m.special["eos"] = 10
    return m


def options(draw: random.Random) -> dict:
    """The options of one request."""
    made: dict = {"max_new_tokens": draw.randint(1, 30)}
    if draw.random() < 0.5:
        made |= {"temperature": draw.choice([0.7, 1.0, 1.5]), "seed": draw.randint(0, 9)}
        made |= draw.choice([{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}])
    if draw.random() < 0.3:
        made |= draw.choice([{"repetition_penalty": 1.4}, {"no_repeat_ngram": 2}, {"frequency_penalty": 0.5}])
    if draw.random() < 0.2:
        made["logit_bias"] = {draw.randrange(V): draw.uniform(-9, 9) for _ in range(draw.randint(1, 40))}
    if draw.random() < 0.3:
        made["stop"] = [chr(draw.randint(32, 126)) for _ in range(3)]
    if draw.random() < 0.3:
        made |= {"logprobs": True, "alternatives": draw.randint(0, 3)}
    return made


HELD = (  # what answers are held to
    {"regex": "[a-z]{2,9}( [0-9]{1,3}){1,2}"},
    {"json_schema": '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'},
    {"grammar": 'start: "yes" | "no" ("!")+'},
)


def further_options(draw: random.Random) -> dict:
    """Options that `options` leaves out: what ends a text, what holds it to a grammar, how it is reported."""
    if draw.random() < 0.3:  # these may leave no token together with what else is drawn below
        return {**draw.choice(HELD), "no_repeat_ngram": 0, "logit_bias": ()}
    made = {}
    for name, values in {
        "typical_p": (0.5, 0.9),
        "min_new_tokens": (2, 9),
        "stop_tokens": ([40, 65, 70, 90, 100, 120],),
        "presence_penalty": (-0.5, 1.0),
        "seconds": (1e6,),
        "skip_special_tokens": (False,),
        "lookup": (0, 2),
    }.items():
        if draw.random() < 0.25:
            made[name] = draw.choice(values)
    return made


def prompts(draw: random.Random, count: int) -> list[list[int]]:
    """Prompts, some of which begin alike."""
    shared = [draw.randrange(11, 250) for _ in range(40)]
    made = []
    for _ in range(count):
        start = shared[: draw.choice([0, 0, 4, 9, 24, 40])]
        made.append(start + [draw.randrange(11, 250) for _ in range(draw.randint(1, 30))])
    return made


def repeating(draw: random.Random, count: int) -> list[list[int]]:
    """Prompts that say the same again and again, some of which begin alike."""
    phrases = [[draw.randrange(11, 250) for _ in range(draw.randint(1, 4))] for _ in range(3)]
    return [draw.choice(phrases) * draw.randint(3, 9) + draw.choice(phrases) for _ in range(count)]


def near(m: ch.Model, noise: float = 0.02) -> ch.Model:
    """A draft model that mostly gives the same tokens."""
    other, draw = copy.deepcopy(m), torch.Generator().manual_seed(3)
    for weight in other.model.parameters():
        weight.data += noise * torch.randn(weight.shape, generator=draw).to(weight) * weight.abs().mean()
    return other


def change(
    engine: ServeEngine,
    draw: random.Random,
    loaded: dict[str, ch.Model],
    tuned: list[tuple[Updates, ch.Model]],
) -> None:
    """Load an adapter under a name, or in place of one, or unload it, or do nothing."""
    name, what = draw.choice("ab"), draw.randint(0, 2)
    if what < 2:
        updates, model = draw.choice(tuned)
        engine.load_adapter(name, updates, replace=True)
        loaded[name] = model
    elif name in loaded:
        engine.unload_adapter(name)
        del loaded[name]


def limits(draw: random.Random, gpu: bool = False, **more: Any) -> Limits:
    """The limits of an engine, some of them tight."""
    # On a GPU the kernels take blocks of 16 and more; smaller ones go another way.
    block = draw.choice([8, 16, 32] if gpu else [2, 4, 8])
    longest = 70 + 30 + block
    return Limits(
        tokens=draw.choice([4, 16, 64]),
        running=draw.choice([2, 4, 8]),
        block=block,
        cache_tokens=draw.choice([longest, 2 * longest, 8 * longest]),
        **more,
    )


def mixed(
    m: ch.Model,
    seed: int,
    guessing: bool = False,
    exact: bool = False,
    draft: ch.Model | None = None,
    cache: str | None = None,
    tuned: list[tuple[Updates, ch.Model]] | None = None,
    engine: ServeEngine | None = None,
    most: float = 1e-4,
    every: bool = False,
) -> ServeEngine:
    """Serve a random mix, and compare each request that was not cancelled with the same one alone.

    `guessing`: texts repeat themselves, and every guess is read, however little it pays; so are those of a
    `draft` model. `cache`: how keys are kept, in the engine and alone. `tuned`: adapters and the models
    with them, of which one is loaded under a name, or unloaded, before a request comes. `engine`: of the
    same model, split over processes. `most`: the largest difference of log-probabilities. `every`: draw
    further options, too.
    """
    draw = random.Random(seed)
    own = limits(draw, next(m.model.parameters()).is_cuda, exact=exact, cache=cache)
    own = replace(own, draft_tokens=draw.choice([1, 3, 6])) if draft else own
    engine, served = engine or ServeEngine(m, own, draft=draft), []
    if guessing or draft:
        engine.speculation.price.of_one_more = lambda *given: -1.0
    texts = (repeating if guessing else prompts)(draw, draw.randint(2, 8))
    late = draw.randint(0, len(texts))
    models, loaded = [], {"": m}  # of each request the one it means; of each name the one it means now
    for number, text in enumerate(texts):
        if number >= late:  # they come while others run
            for _ in range(draw.randint(0, 4)):
                engine.step()
        asked = options(draw) | (further_options(draw) if every else {})
        if guessing and "temperature" in asked:
            asked["temperature"] = draw.choice([0.05, 0.3, 1.0])
        if tuned:
            change(engine, draw, loaded, tuned)
        salt = draw.choice(["", "", "a"])
        serving = ServeOptions(salt=salt, adapter=draw.choice([*loaded]) if tuned else "")
        models.append(loaded[serving.adapter])
        served.append((text, asked, engine.submit(text, asked, serving)))
    cancelled = {draw.randrange(len(served))} if draw.random() < 0.3 else set()
    turn = 0
    while engine.busy:
        turn += 1
        if turn == 3:
            for number in cancelled:
                served[number][2].cancel()
        engine.step()
        assert turn < 5000
    for number, (text, asked, seq) in enumerate(served):
        found = seq.wait(0)
        if number in cancelled and found.stop_reason == "cancelled":
            continue
        asked.pop("lookup", None)  # `generate` would draft so, too: alone it is plain decoding
        alone = models[number].generate(text, num_beams=1, cache=cache, **asked)
        same = (found.ids, found.text, found.stop_reason) == (alone.ids, alone.text, alone.stop_reason)
        assert same, f"seed {seed}, request {number}: {found} served, {alone} alone"
        if alone.logprobs is not None:
            # A key that differs in its last bit may be rounded to the next of 255 codes.
            near = 1e-2 if cache and next(m.model.parameters()).dtype != torch.float64 else most
            assert max((abs(a - b) for a, b in zip(found.logprobs, alone.logprobs)), default=0) < near
    assert engine.pool is not None
    assert engine.pool.used == 0
    return engine


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


def ways(served: dict[str, ch.Model]) -> dict[tuple[str, str], Callable[[int], ServeEngine]]:
    """Every way in which a model of each shape can be served, as functions of a seed: see `mixed`."""
    found: dict[tuple[str, str], Callable[[int], ServeEngine]] = {}
    for shape, m in served.items():
        exact = copy.deepcopy(m)
        exact.model.double()
        targets = [("q",), ("out",)] if shape == "latent" else [("q", "v"), ("out",)]
        others = [tuned(m, number, each) for number, each in enumerate(targets)]
        pairs = [(updates_of(m.model, other.model, "x"), other) for other in others]
        found[shape, "plain"] = partial(mixed, m, every=True)
        found[shape, "draft of the text"] = partial(mixed, m, guessing=True, every=True)
        if steps_back(m.model):
            found[shape, "draft model"] = partial(mixed, m, draft=near(m), every=True)
        found[shape, "keys in 8 bits"] = partial(mixed, exact, cache="int8", every=True)
        found[shape, "every way to ask"] = partial(asked_every_way, m)
        found[shape, "adapters"] = partial(mixed, m, tuned=pairs, every=True)
    return found


def asked_every_way(m: ch.Model, seed: int) -> ServeEngine:
    """Ask a few random requests as `generate`, of an engine, in a file, and greedy ones as a beam of one."""
    draw = random.Random(seed)
    plain, *texts = prompts(draw, 5)
    asked = [(plain, {"max_new_tokens": 12}), *((text, options(draw)) for text in texts)]
    engine = ServeEngine(m, limits(draw))
    served = [engine.submit(text, wanted) for text, wanted in asked]
    while engine.busy:
        engine.step()
    rows = [{"prompt": text, "temperature": 0, **_as_body(wanted)} for text, wanted in asked]
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        given.write_text("\n".join(map(json.dumps, rows)))
        assert len(list(run_batch(ServeEngine(m, limits(draw)), "m", given, out))) == len(rows)
        lines = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, out.open())}
    for number, ((text, wanted), seq) in enumerate(zip(asked, served), start=1):
        alone, found = m.generate(text, num_beams=1, **wanted), seq.wait(0)
        said = f"seed {seed}, request {number}: {wanted}"
        assert (found.ids, found.text, found.stop_reason) == (alone.ids, alone.text, alone.stop_reason), said
        (choice,) = lines[f"line-{number}"]["choices"]
        assert choice["text"] == alone.text, said
        assert choice["finish_reason"] == ("length" if alone.stop_reason == "length" else "stop"), said
        # Beams add up log-probabilities, which a repetition penalty changes otherwise than logits.
        if wanted.get("temperature") or wanted.keys() & {"stop", "logprobs", "repetition_penalty"}:
            continue
        # A beam of one that takes its first end is greedy decoding.
        request, texts, ends = asked_for(m, [text], {**wanted, "num_beams": 1})
        request = replace(request, early_stopping=True)
        ((best,),) = beam_search(m.model, request, prompts_of(m, texts), ends)
        assert (best.ids, best.stop_reason) == (alone.ids, alone.stop_reason), said
    return engine


def _as_body(wanted: dict) -> dict:
    """Options of `generate` as fields of a completion."""
    names = {name: stated.http or name for name, stated in OPTIONS.items()}
    body = {names[name]: value for name, value in wanted.items()}
    if body.pop(names["alternatives"], None) is not None or "logprobs" in body:
        body["logprobs"] = wanted.get("alternatives", 0)
    return body
