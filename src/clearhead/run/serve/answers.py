"""From requests to JSON and server-sent events: the seqs of a body, followed from the event loop."""

import asyncio
import base64
import contextlib
import json
import time
import uuid
from collections import abc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from torch import Tensor

from clearhead.errors import ClearheadError, refuse
from clearhead.hub.tokens.text import decoded
from clearhead.learn.tasks import reading
from clearhead.learn.tasks.chat import turn_of
from clearhead.run.bundle import Bundle
from clearhead.run.generate.grammar import check_constraint
from clearhead.run.generate.request import CONSTRAINTS
from clearhead.run.generate.stream import TextStream
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.protocol import MOST_INPUTS, ChatBody, CompletionBody, finish_reason
from clearhead.run.serve.sequence import Sequence, ServeOptions
from clearhead.run.serve.status import Metrics

DEFAULT_TOKENS = 16  # of a completion, as OpenAI's
LOOK = 0.2  # seconds between two looks at whether the client is still there


def completion(engine: ServeEngine, name: str, body: CompletionBody, owner: str = "") -> "Choices":
    """Return what a body of `/v1/completions` asks for; one `owner` shares its cached prefixes."""
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    refuse(most == 0 and not body.echo, "max_tokens 0 generates nothing: ask for 1 or more, or for echo")
    refuse(engine.m.tokenizer is None, "this model has no tokenizer: it cannot be served as text")
    salt = f"{owner}:{body.cache_salt or ''}"
    adapter = name if name in engine.adapters else ""
    serving = ServeOptions(
        salt, body.logprobs if body.echo else None, most == 0, adapter, tuple(body.inside or ())
    )
    options, seeds = body.options() | {"max_new_tokens": max(1, most)}, body.seeds(body.n or 1)
    return Choices(
        engine, name, False, body.prompts(), options, seeds, serving, body.logprobs, bool(body.echo)
    )


def conversation(engine: ServeEngine, name: str, body: ChatBody, owner: str = "") -> "Choices":
    """Return what a body of `/v1/chat/completions` asks for; one `owner` shares its cached prefixes."""
    refuse(
        body.max_tokens is not None and body.max_completion_tokens is not None,
        "max_tokens and max_completion_tokens are the same: give one of them",
    )
    most = body.max_completion_tokens or body.max_tokens or 0
    ids, options = turn_of(engine.m, body.messages, body.chat_template_kwargs or {}, body.options())
    options["max_new_tokens"] = most or max(1, engine.longest - len(ids))
    adapter = name if name in engine.adapters else ""
    salt = f"{owner}:{body.cache_salt or ''}"
    serving = ServeOptions(salt, None, False, adapter, tuple(body.inside or ()))
    return Choices(engine, name, True, [ids], options, body.seeds(body.n or 1), serving, body.best)


class EventQueue:
    """What is new of each choice since it was last read: a slow reader gets fewer and longer events."""

    def __init__(self) -> None:
        self._new: dict[int, tuple[str, int, bool]] = {}
        self._any = asyncio.Event()

    def put(self, number: int, text: str, count: int, ended: bool) -> None:
        """Add to what is new of a choice: its text, its tokens so far, whether it has ended."""
        self._new[number] = (self._new.get(number, ("",))[0] + text, count, ended)
        self._any.set()

    async def get(self) -> tuple[int, str, int, bool]:
        """Wait for an event; return a choice's number and what is new of it."""
        await self._any.wait()
        number = next(iter(self._new))
        news = self._new.pop(number)
        if not self._new:
            self._any.clear()
        return number, *news


@dataclass
class Choices:
    """The texts that one body asks for: what to submit, the seqs, and their answer."""

    engine: ServeEngine
    model: str
    chat: bool
    prompts: abc.Sequence[str | list[int]]
    options: dict[str, Any]
    seeds: list[int]  # of the choices of each prompt
    serving: ServeOptions
    best: int | None = None  # tokens reported at each step; None: nothing is reported
    echo: bool = False
    cited: dict[str, Any] = field(default_factory=dict)  # said once, in the answer or in the first event
    seqs: list[Sequence] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.events = EventQueue()
        self.offsets: dict[int, TextOffsets] = {}  # by choice
        if self.best is not None:
            self.options |= {"logprobs": True, "alternatives": self.best}
        choices = len(self.prompts) * len(self.seeds)
        refuse(
            choices > MOST_INPUTS,
            f"{len(self.prompts)} prompts with {len(self.seeds)} choices each: "
            f"at most {MOST_INPUTS} texts in one request",
        )
        refuse(
            choices > 1 and self.serving.inside, f"inside is given for one text, and {choices} are asked for"
        )

    def submit(self, on_update: Callable[[int, Sequence, str], None] | None = None) -> None:
        """Submit every choice of every prompt, or none; `on_update` is called from the engine."""
        for name in self.options.keys() & CONSTRAINTS:
            check_constraint((name, self.options[name]))
        try:
            for prompt in self.prompts:
                first: Sequence | None = None
                for seed in self.seeds:
                    tell = None if on_update is None else partial(on_update, len(self.seqs))
                    given = self.options | {"seed": seed}
                    seq = self.engine.submit(prompt, given, self.serving, tell, first, bool(self.seqs))
                    first = first or seq
                    self.seqs.append(seq)
        except BaseException:
            self.cancel()
            raise

    async def begin(self, metrics: Metrics, stream: bool) -> None:
        """Submit from a thread, and follow the seqs in a queue of this event loop: their tokens, or ends."""
        loop = asyncio.get_running_loop()

        def on_update(number: int, seq: Sequence, new: str) -> None:
            if seq.done:
                metrics.keep(seq)
            if not stream and not seq.done:
                return  # waking the loop for each token takes time from the engine
            loop.call_soon_threadsafe(self.events.put, number, new, len(seq.row.ids), seq.done)

        await run_in_threadpool(self.submit, on_update)

    def cancel(self) -> None:
        """End what has not ended: nobody reads it."""
        for seq in self.seqs:
            seq.cancel()

    async def whole(self, request: Request) -> dict[str, Any]:
        """Wait for every choice, as long as the client does; return the answer."""
        left, looked = len(self.seqs), time.monotonic()
        try:
            while left:
                with contextlib.suppress(TimeoutError):
                    left -= (await asyncio.wait_for(self.events.get(), LOOK))[3]
                if time.monotonic() - looked > LOOK:
                    refuse(await request.is_disconnected(), "the client has gone")
                    looked = time.monotonic()
        finally:
            self.cancel()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the answer, once every seq has ended."""
        choices = [self._choice(number, seq) for number, seq in enumerate(self.seqs)]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.usage()}

    def _choice(self, number: int, seq: Sequence) -> dict[str, Any]:
        found = seq.wait(0)
        made: dict[str, Any] = {"index": number, "finish_reason": finish_reason(found.stop_reason)}
        if self.chat:
            made["message"] = {"role": "assistant", "content": found.text, "refusal": None}
        else:
            made["text"] = self._echoed(seq) + (found.text or "")
        made["logprobs"] = self._logprobs(number, seq, 0, len(found.ids), self.echo)
        if seq.inside is not None:
            made["inside"], seq.inside = seq.inside, None  # it is large, and told once
        return made

    def _echoed(self, seq: Sequence) -> str:
        return decoded(self.engine.m.text_tokenizer, seq.row.prompt) if self.echo else ""

    async def stream(self, usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events, as they come; a client that goes away cancels what is left."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        more: dict[str, Any] = {"usage": None} if usage else {}

        def event(choices: list[dict[str, Any]], **named: Any) -> str:
            return f"data: {json.dumps({**self._head(kind), 'choices': choices, **more, **named})}\n\n"

        try:
            for number in range(len(self.seqs) if self.chat else 0):
                yield event([self._chunk(number, {"role": "assistant", "content": ""})])
            shown, left, echoes = [0] * len(self.seqs), len(self.seqs), {*range(len(self.seqs) * self.echo)}
            while left:
                number, new, count, ended = await self.events.get()
                seq = self.seqs[number]
                if ended and seq.error is not None:
                    raise seq.error
                if number in echoes:  # its log-probabilities are known by now
                    echoes.remove(number)
                    yield event([self._chunk(number, self._echoed(seq), seq, prompt=True)])
                if new or (self.best is not None and count > shown[number]):
                    content = {"content": new} if self.chat else new
                    yield event([self._chunk(number, content, seq, shown[number], count)])
                    shown[number] = count
                if ended:
                    left -= 1
                    last = self._chunk(number, {} if self.chat else "")
                    last["finish_reason"] = finish_reason(seq.row.stop_reason)
                    if seq.inside is not None:
                        last["inside"], seq.inside = seq.inside, None
                    yield event([last])
            if usage:
                yield event([], usage=self.usage())
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield f"data: {json.dumps(error_body(error))}\n\n"
        finally:
            self.cancel()

    def _chunk(
        self,
        number: int,
        content: Any,
        seq: Sequence | None = None,
        start: int = 0,
        stop: int = 0,
        prompt: bool = False,
    ) -> dict[str, Any]:
        logprobs = None if seq is None else self._logprobs(number, seq, start, stop, prompt)
        return {
            "index": number,
            "delta" if self.chat else "text": content,
            "logprobs": logprobs,
            "finish_reason": None,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        cited, self.cited = self.cited, {}
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **cited}

    def usage(self) -> dict[str, Any]:
        """Return the numbers of prompt and new tokens."""
        asked = {id(seq.after or seq): seq for seq in self.seqs}.values()  # choices share a prompt
        read, cached = sum(seq.prompt_tokens for seq in asked), sum(seq.cached for seq in asked)
        made = sum(len(seq.row.ids) for seq in self.seqs)
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made, **details}

    def _logprobs(
        self, number: int, seq: Sequence, start: int, stop: int, prompt: bool
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of new tokens `start` to `stop`; of the prompt first, if asked for."""
        if self.best is None:
            return None
        m, row = self.engine.m, seq.row
        ids, values = row.ids[start:stop], list[float | None](row.logprobs[start:stop])
        best = [dict(one) for one in row.alternatives[start:stop]] or [{} for _ in ids]
        if self.chat:
            content = [
                {**_entry(m, token, value), "top_logprobs": [_entry(m, t, v) for t, v in tops.items()]}
                for token, value, tops in zip(ids, values, best)
            ]
            return {"content": content, "refusal": None}
        offsets = self.offsets.setdefault(number, TextOffsets(m, 0 if self.echo else len(row.prompt)))
        begin = offsets.of(row.prompt + row.ids[:stop], 0 if prompt else len(row.prompt) + start)
        if prompt:
            ids = row.prompt + ids
            values = [None, *seq.prompt_logprobs, *values]
            best = [{}, *map(dict, seq.prompt_alternatives), *best]
        return {
            "tokens": [token_text(m, token) for token in ids],
            "token_logprobs": values,
            "top_logprobs": [
                None if value is None else {token_text(m, t): v for t, v in [*tops.items(), (token, value)]}
                for token, value, tops in zip(ids, values, best)
            ],
            "text_offset": begin,
        }


def token_text(m: Bundle, token: int) -> str:
    """Return how one token reads by itself."""
    return decoded(m.text_tokenizer, [token], special=True)


def _entry(m: Bundle, token: int, value: float | None) -> dict[str, Any]:
    text = token_text(m, token)
    return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace"))}


class TextOffsets:
    """Where the text of each token begins, followed as it grows; the first `skipped` do not count."""

    def __init__(self, m: Bundle, skipped: int) -> None:
        self._stream, self._skipped = TextStream(m.text_tokenizer), skipped
        self._read = self._length = 0

    def of(self, ids: list[int], start: int) -> list[int]:
        """Return where tokens `start` and later begin; what an earlier call was given is not read again."""
        found = []
        for place in range(self._read, len(ids)):
            if place >= start:
                found.append(self._length)
            new = self._stream.push(ids[place])
            self._length += len(new) if place >= self._skipped else 0
        self._read = len(ids)
        return found


def error_body(error: BaseException) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    mine = isinstance(error, ClearheadError)
    line = str(error) if mine else f"something went wrong: {type(error).__name__}"
    kind = "invalid_request_error" if mine else "server_error"
    return {"error": {"message": line, "type": kind, "param": None, "code": None}}


TOGETHER = 64  # vectors that are written at once

Embedded = tuple[Tensor, int]  # the vector [D] of a text, and how many tokens were read of it


@lru_cache(maxsize=64)
def embedding(prompt: str | None) -> Any:
    """Return the function for the name of a prompt: requests with the same function share a call."""
    return partial(_embed, prompt)


def _embed(prompt: str | None, m: Bundle, texts: abc.Sequence[str]) -> list[Embedded]:
    vectors, counts = reading.embed_counted(m, texts, prompt=prompt)
    refuse(
        not vectors.isfinite().all(),
        "the model gave a vector with NaN or infinite numbers: its weights are broken",
    )
    return list(zip(vectors, counts))


def written(model: str, found: abc.Sequence[Embedded], as_base64: bool) -> Iterator[str]:
    """Yield the answer chunk by chunk, so that no copy of all vectors is ever held."""
    yield '{"object": "list", "data": ['
    for at in range(0, len(found), TOGETHER):
        rows = [
            json.dumps(
                {
                    "object": "embedding",
                    "index": at + n,
                    "embedding": _base64(row) if as_base64 else row.tolist(),
                }
            )
            for n, (row, _) in enumerate(found[at : at + TOGETHER])
        ]
        yield (", " if at else "") + ", ".join(rows)
    read = sum(count for _, count in found)
    usage = {"prompt_tokens": read, "total_tokens": read}
    yield f'], "model": {json.dumps(model)}, "usage": {json.dumps(usage)}}}'


def _base64(row: Tensor) -> str:
    return base64.b64encode(row.numpy().astype("<f4", copy=False).tobytes()).decode()
