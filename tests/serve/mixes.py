"""Random mixes of requests, served together, against each request by itself."""

from __future__ import annotations

import random

import clearhead as ch
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
    if draw.random() < 0.3:
        made["stop"] = [chr(draw.randint(32, 126)) for _ in range(3)]
    if draw.random() < 0.3:
        made |= {"logprobs": True, "alternatives": draw.randint(0, 3)}
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


def limits(draw: random.Random, gpu: bool = False, exact: bool = False) -> Limits:
    """The limits of an engine, some of them tight."""
    # On a GPU the kernels take blocks of 16 and more; smaller ones go another way.
    block = draw.choice([8, 16, 32] if gpu else [2, 4, 8])
    longest = 70 + 30 + block
    return Limits(
        tokens=draw.choice([4, 16, 64]),
        running=draw.choice([2, 4, 8]),
        block=block,
        cache_tokens=draw.choice([longest, 2 * longest, 8 * longest]),
        exact=exact,
    )


def mixed(
    m: ch.Model,
    seed: int,
    guessing: bool = False,
    exact: bool = False,
    engine: ServeEngine | None = None,
    most: float = 1e-4,
) -> ServeEngine:
    """Serve a random mix, and compare each request that was not cancelled with the same one alone.

    `guessing`: texts repeat themselves, and every guess is read, however little it pays. `engine`: of the
    same model, split over processes. `most`: the largest difference of log-probabilities.
    """
    draw = random.Random(seed)
    own = limits(draw, next(m.model.parameters()).is_cuda, exact)
    engine, served = engine or ServeEngine(m, own), []
    if guessing:
        engine.speculation.price.of_one_more = lambda rows, tokens: -1.0
    texts = (repeating if guessing else prompts)(draw, draw.randint(2, 8))
    late = draw.randint(0, len(texts))
    for number, text in enumerate(texts):
        if number >= late:  # they come while others run
            for _ in range(draw.randint(0, 4)):
                engine.step()
        asked = options(draw)
        if guessing and "temperature" in asked:
            asked["temperature"] = draw.choice([0.05, 0.3, 1.0])
        served.append(
            (text, asked, engine.submit(text, asked, ServeOptions(salt=draw.choice(["", "", "a"]))))
        )
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
        alone = m.generate(text, num_beams=1, **asked)
        same = (found.ids, found.text, found.stop_reason) == (alone.ids, alone.text, alone.stop_reason)
        assert same, f"seed {seed}, request {number}: {found} served, {alone} alone"
        if alone.logprobs is not None:
            assert max((abs(a - b) for a, b in zip(found.logprobs, alone.logprobs)), default=0) < most
    assert engine.pool is not None
    assert engine.pool.used == 0
    return engine
