"""Random bodies of every API, answered together: each as the same body alone, on a server of its own."""

from __future__ import annotations

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.serve import mixes
from tests.serve.served import serving

DRAWN = ("id", "call_id", "model", "created", "created_at", "completed_at", "usage")
PARAMETERS = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
FUNCTION = {"name": "lamp", "description": "Switch it", "parameters": PARAMETERS}


def some(draw: random.Random, **values: list[Any]) -> dict[str, Any]:
    """Return about a third of these fields, each with one of its values."""
    return {name: draw.choice(among) for name, among in values.items() if draw.random() < 0.35}


def drawn_body(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a route, and a body for it."""
    text = " ".join(
        draw.choice(["Once", "upon", "a", "time", "123", "é"]) for _ in range(draw.randint(1, 12))
    )
    common = {"temperature": draw.choice([0, 0.7, 1.3]), "seed": draw.randint(0, 9)}
    common |= some(draw, top_p=[0.8], min_p=[0.05], top_k=[9, -1], logit_bias=[{"65": 4, "66": -100}])
    common |= some(draw, repetition_penalty=[1.3], no_repeat_ngram=[3], stop_token_ids=[[40, 70, 90]])
    path = draw.choice(["completions", "chat/completions", "responses", "messages", "embeddings"])
    most, asked = draw.randint(1, 25), [{"role": "user", "content": text}]
    held = draw.random() < 0.3  # to a schema, or to call a tool
    if held:
        for name in ("stop_token_ids", "no_repeat_ngram", "logit_bias"):  # they may leave no token
            common.pop(name, None)
        most = 60
    tools = held and draw.random() < 0.6
    if path == "completions":
        body = {**common, "prompt": [text, text[:5]] if draw.random() < 0.3 else text, "max_tokens": most}
        body |= some(draw, n=[2, 3], logprobs=[0, 3], stop=["e", ["a", "7"]], stream=[True])
        body |= {} if body.get("stream") else some(draw, best_of=[3], echo=[True])
        return path, body | ({"regex": "[a-z]{3}[0-9]{2}"} if held else {})
    if path == "chat/completions":
        body = {**common, "messages": asked, "max_tokens": most, **some(draw, n=[2], stream=[True])}
        body |= {"logprobs": True, "top_logprobs": 2} if draw.random() < 0.3 else {}
        body |= {"tools": [{"type": "function", "function": FUNCTION}]} if tools else {}
        body |= {"tool_choice": "required", "parallel_tool_calls": False} if tools else {}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        return path, body | ({"response_format": form} if held and not tools else {})
    if path == "responses":
        body = {**common, "input": text, "max_output_tokens": most, **some(draw, instructions=["Be brief."])}
        body |= {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"} if tools else {}
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        return path, body | ({"text": form} if held and not tools else some(draw, top_logprobs=[2]))
    if path == "messages":
        own = {"name": "lamp", "input_schema": PARAMETERS}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        body = {**common, "messages": asked, "max_tokens": most, **some(draw, system=["Be brief."])}
        return path, body | (
            {"tools": [own], "tool_choice": choice} if tools else some(draw, stop_sequences=[["e"]])
        )
    return path, {"input": draw.choice([text, [text, "b"], [[65, 66]]]), **some(draw, dimensions=[3, 8])}


def plain(value: Any) -> Any:
    """The same without what is drawn anew for each answer; embeddings to the digits that they agree in."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name not in DRAWN}
    return [plain(one) for one in value] if isinstance(value, list) else value


def joined(events: str) -> list[Any]:
    """What the choices of a stream say: their texts, calls and ends, however it was cut into events."""
    said: dict[int, dict[str, Any]] = {}
    for line in events.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            own = said.setdefault(choice["index"], {"text": "", "end": None, "logprobs": 0})
            delta = choice.get("delta", {"content": choice.get("text")})
            calls = [call["function"] for call in delta.get("tool_calls", ())]
            own["text"] += (delta.get("content") or "") + "".join(
                call.get("name", "") + call["arguments"] for call in calls
            )
            own["end"] = choice["finish_reason"] or own["end"]
    return sorted(said.items())


def answer(address: str, path: str, body: dict[str, Any], model: str) -> Any:
    """Ask a model; return what is comparable of its answer."""
    raw, kind = json.dumps({**body, "model": model}).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{address}/v1/{path}", raw, kind), timeout=120
    ) as found:
        text = found.read().decode()
    return joined(text) if body.get("stream") else plain(json.loads(text))


def near(one: Any, other: Any) -> bool:
    """Whether two answers are the same, their numbers to 1e-4."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-4
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(near(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(near, one, other))
    return one == other


@pytest.mark.slow
def test_bodies_of_every_api_in_company_are_answered_as_alone(talker):
    draw = random.Random("company")
    bodies = [drawn_body(draw) for _ in range(30)]
    limits = Limits(block=8, tokens=48, running=6, waiting=200)
    company = {
        "plain": ServeEngine(talker, limits),
        "draft": ServeEngine(talker, limits, draft=mixes.near(talker)),
        "small pool": ServeEngine(talker, replace(limits, cache_tokens=600)),
    }
    alone = ServeEngine(talker, Limits(lookup=0))
    with serving({**company, "alone": alone}) as address, ThreadPoolExecutor(12) as several:
        wanted = [answer(address, *given, "alone") for given in bodies]
        for name, server in company.items():
            together = several.map(lambda given, name=name: answer(address, *given, name), bodies)
            for given, expected, found in zip(bodies, wanted, together):
                assert near(found, expected), (name, given, found, expected)
            assert server.stats.ended.total() > 20, name
