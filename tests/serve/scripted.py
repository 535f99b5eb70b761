"""What tests of APIs share: answers whose parts are written down, and the fields that a client knows."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import typing
from types import SimpleNamespace

import pytest
from pydantic import BaseModel, ValidationError

from clearhead.hub.tokens.answers import Part
from clearhead.run.serve.answers import Update

# An answer that thinks, says, calls twice, and says more.
PARTS = [
    Part("reasoning", "It is about "),
    Part("reasoning", "weather."),
    Part("content", "I look "),
    Part("content", "it up."),
    Part("call", "weather", 0),
    Part("arguments", '{"city": ', 0),
    Part("arguments", '"Oslo"}', 0),
    Part("call", "time", 1),
    Part("arguments", "{}", 1),
    Part("content", "Wait."),
]


class ScriptedChoices:
    """Stands for `ChatChoices`: the text of an update is how many parts it brings."""

    model, created, cited = "writer", 1, {}

    def __init__(self, parts=PARTS, reason: str = "tool_calls", stopped_by: str | None = None, error=None):
        self.left, self.reason, self.error = list(parts), reason, error
        self.options = {"max_new_tokens": 50}
        stream = SimpleNamespace(stopped_by=stopped_by)
        result = SimpleNamespace(text=str(len(parts)), ids=[])
        self.seqs = [SimpleNamespace(stream=stream, wait=lambda seconds: result)]
        self.cancelled = False

    def parts(self, number: int, text: str, ended: bool) -> list[Part]:
        new, self.left = self.left[: int(text)], self.left[int(text) :]
        return new

    def call_id(self, number: int, call: int) -> str:
        return f"call_{call}"

    def finish_reason(self, number: int) -> str:
        return self.reason

    def usage(self) -> dict:
        details = {"prompt_tokens_details": {"cached_tokens": 16}}
        more = {"completion_tokens_details": {"reasoning_tokens": 4}}
        return {"prompt_tokens": 20, "completion_tokens": 9, "total_tokens": 29, **details, **more}

    def cancel(self) -> None:
        self.cancelled = True

    async def finish(self, request) -> None:
        pass

    async def follow(self):
        draw = random.Random(3)
        while self.left:
            some = draw.randint(1, 3)
            if self.error is not None and len(self.left) < 4:
                raise self.error
            yield Update(0, str(some), 0, some >= len(self.left))


def read_events(stream) -> list[dict]:
    """The events of a stream, as they are sent."""

    async def read() -> list[str]:
        return [one async for one in stream]

    events = []
    for text in asyncio.run(read()):
        name, data = text.strip().split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def without_ids(value):
    """The same without what is drawn anew for each answer."""
    if isinstance(value, dict):
        drawn = ("id", "completed_at")
        return {name: without_ids(one) for name, one in value.items() if name not in drawn}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def fields_of(name: str) -> set[str]:
    """The fields of a type of a client, those of its bases too."""
    module, _, cls = name.rpartition(".")
    found = getattr(importlib.import_module(module), cls)
    return set(found.model_fields) if issubclass(found, BaseModel) else set(typing.get_type_hints(found))


def check_fields(model: type, least: dict, fields: set[str], works: set[str]) -> None:
    """Each field works, asks for nothing with the values that are listed, or is refused by its name."""
    known = {field.alias or name for name, field in model.model_fields.items()}
    unused, no_ops = getattr(model, "unused", ()), getattr(model, "no_ops", {})
    assert fields & known == works
    same = model.model_validate(least).model_dump()
    for name in fields - known:
        if name in unused:
            assert model.model_validate({**least, name: {"any": 1}}).model_dump() == same
            continue
        for value in (None, *no_ops[name]) if name in no_ops else ():
            assert model.model_validate({**least, name: value}).model_dump() == same
        with pytest.raises(ValidationError) as refused:
            model.model_validate({**least, name: 2})
        assert [(one["type"], one["loc"]) for one in refused.value.errors()] == [("extra_forbidden", (name,))]
