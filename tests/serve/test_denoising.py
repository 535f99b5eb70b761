"""Diffusion models behind the server: the tokens of generate, block by block, many requests at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

import clearhead as ch
from clearhead.errors import InputError
from clearhead.run.serve.batch import run_batch
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests import harness
from tests.serve import mixes
from tests.serve.served import serving
from tests.serve.test_http import call

ASKED: list[dict[str, Any]] = [
    {"max_new_tokens": 12, "temperature": 0.0},
    {"max_new_tokens": 9, "temperature": 0.0, "denoising_steps": 3, "mask_schedule": "cosine"},
    {"max_new_tokens": 11, "temperature": 0.8, "seed": 4, "unmasking": "random", "logprobs": True},
    {"max_new_tokens": 20, "temperature": 1.0, "seed": 5, "stop": ["e"]},
]


def denoiser(attention: str) -> ch.Model:
    """A diffusion model of bytes with random weights."""
    tokenizer = harness.byte_tokenizer(special=("<mask>",))
    m = mixes.model(
        "rope-gqa",
        tokenizer,
        family="encoder",
        head="lm",
        attention=attention,
        vocab_size=tokenizer.get_vocab_size(),
    )
    m.special["mask"] = tokenizer.token_to_id("<mask>")
    m.settings["chat_template"] = mixes.TEMPLATE
    return m


@pytest.fixture(scope="module", params=["full", "block-causal(4)"])
def model(request) -> ch.Model:
    return denoiser(request.param)


def test_served_tokens_are_those_of_generate(model):
    """Requests that run at once, more than may run together, and one that is cancelled."""
    engine = ServeEngine(model, Limits(running=2))
    parts: list[list[str]] = [[] for _ in ASKED]
    seqs = [
        engine.submit(f"text {n}", options, on_update=lambda seq, new, n=n: parts[n].append(new))
        for n, options in enumerate(ASKED)
    ]
    gone = engine.submit("gone", ASKED[0])
    gone.cancel()
    while engine.busy:
        engine.step()
    for n, (seq, options) in enumerate(zip(seqs, ASKED)):
        alone, served = model.generate(f"text {n}", **options), seq.wait()
        assert (served.ids, served.text, served.stop_reason, served.steps, served.logprobs) == (
            alone.ids, alone.text, alone.stop_reason, alone.steps, alone.logprobs,
        )  # fmt: skip
        assert "".join(parts[n]) == alone.text
    assert gone.wait().stop_reason == "cancelled" and engine.exact


def test_it_answers_over_http_and_in_batch_files(model, tmp_path):
    body = {"prompt": "Once", "max_tokens": 10, "temperature": 0.7, "seed": 3, "denoising_steps": 2}
    alone = model.generate("Once", 10, temperature=0.7, seed=3, denoising_steps=2)
    with serving({"m": ServeEngine(model)}) as address:
        answer = call(address, "/v1/completions", body)[2]
        assert answer["choices"][0]["text"] == alone.text
        assert answer["usage"]["completion_tokens"] == len(alone.ids)
        lines = call(address, "/v1/completions", {**body, "stream": True})[2].split("\n\n")
        chunks = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
        assert "".join(chunks) == alone.text
        talk = [{"role": "user", "content": "Hi"}]
        asked = {"messages": talk, "max_tokens": 6, "temperature": 0}
        answer = call(address, "/v1/chat/completions", asked)[2]
        assert answer["choices"][0]["message"]["content"] == model.chat(talk, 6, temperature=0.0).text
        for more, says in (
            ({"repetition_penalty": 1.2}, "repetition"),
            ({"echo": True, "logprobs": 1}, "logprobs"),
        ):
            status, _, answer = call(address, "/v1/completions", {**body, **more})
            assert status == 400 and says in answer["error"]["message"]
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(json.dumps(body))
    list(run_batch(ServeEngine(model), "m", given, out))
    assert json.loads(out.read_text())["response"]["body"]["choices"][0]["text"] == alone.text


def test_what_builds_on_an_order_is_refused(model):
    with pytest.raises(InputError, match="leave out draft models"):
        ServeEngine(model, draft=model)
    with pytest.raises(InputError, match="for diffusion models"):
        ServeEngine(mixes.model("rope-gqa", harness.byte_tokenizer())).submit("x", {"denoising_steps": 3})
