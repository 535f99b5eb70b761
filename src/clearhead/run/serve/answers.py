"""From requests to JSON and server-sent events: the seqs of a body, followed from the event loop."""

import asyncio
import base64
import contextlib
import functools
import itertools
import json
import math
import time
import uuid
from collections import abc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch.nn.functional as nnf
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from torch import Tensor

from clearhead.errors import ClearheadError, RequestError, refuse
from clearhead.hub.sentences import Sentences
from clearhead.hub.tokens.text import decoded
from clearhead.learn.tasks import reading
from clearhead.learn.tasks.generation import turn_of
from clearhead.run.bundle import Bundle
from clearhead.run.generate.grammar import check_constraint
from clearhead.run.generate.request import CONSTRAINTS
from clearhead.run.generate.stream import PARTIAL, TextStream, TokenText, TokenTexts
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.protocol import MOST_INPUTS, ChatBody, CompletionBody, finish_reason
from clearhead.run.serve.sequence import ServedSequence, ServeOptions
from clearhead.run.serve.status import Metrics

DEFAULT_TOKENS = 16  # of a completion, as OpenAI's
LOOK = 0.2  # seconds between two looks at whether the client is still there


def choices_of(engine: ServeEngine, name: str, body: CompletionBody | ChatBody, owner: str = "") -> "Choices":
    """Return what a body asks for; one `owner` shares its cached prefixes."""
    prompts: abc.Sequence[str | list[int]]
    best, echo, options = body.best, False, body.options()
    if isinstance(body, ChatBody):
        refuse(
            body.max_tokens is not None and body.max_completion_tokens is not None,
            "max_tokens and max_completion_tokens are the same: give one of them",
        )
        template = body.chat_template_kwargs or {}
        ids, options = turn_of(engine.m, body.checked_messages(), template, options)
        most = body.max_completion_tokens or body.max_tokens or max(1, engine.longest - len(ids))
        prompts = [ids]
    else:
        most, echo = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens, bool(body.echo)
        refuse(most == 0 and not echo, "max_tokens 0 generates nothing: ask for 1 or more, or for echo")
        refuse(engine.m.tokenizer is None, "this model has no tokenizer: it cannot be served as text")
        prompts = body.prompts()
    serving = ServeOptions(
        f"{owner}:{body.cache_salt or ''}",
        best if echo else None,
        most == 0,
        name if name in engine.adapters else "",
        tuple(body.inside or ()),
    )
    options["max_new_tokens"], chat = max(1, most), isinstance(body, ChatBody)
    wanted = body.n or 1
    seeds = body.seeds(body.candidates if isinstance(body, CompletionBody) else wanted)
    return Choices(engine, name, chat, prompts, options, seeds, serving, best, echo, wanted)


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
    wanted: int | None = None  # choices of each prompt that are given, the most probable; None: all
    cited: dict[str, Any] = field(default_factory=dict)  # said once, in the answer or in the first event
    seqs: list[ServedSequence] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)  # characters of each choice that are out
    reports: dict[int, "LogprobReport"] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.events = EventQueue()
        if self.best is not None:
            self.options |= {"logprobs": True, "alternatives": self.best}
        if self.wanted is not None and self.wanted < len(self.seeds):
            self.options["logprobs"] = True
        choices = len(self.prompts) * len(self.seeds)
        refuse(
            choices > MOST_INPUTS,
            f"{len(self.prompts)} prompts with {len(self.seeds)} choices each: "
            f"at most {MOST_INPUTS} texts in one request",
        )
        refuse(
            choices > 1 and self.serving.inside, f"inside is given for one text, and {choices} are asked for"
        )

    def submit(
        self, on_update: Callable[[int, ServedSequence, str], None] | None = None, admitted: bool = False
    ) -> None:
        """Submit every choice of every prompt, or none; `on_update` is called from the engine.

        `admitted`: the engine keeps room for this request.
        """
        for name in self.options.keys() & CONSTRAINTS:
            check_constraint((name, self.options[name]))
        try:
            for prompt in self.prompts:
                first: ServedSequence | None = None
                for seed in self.seeds:
                    tell = None if on_update is None else partial(on_update, len(self.seqs))
                    given = self.options | {"seed": seed}
                    joined = admitted or bool(self.seqs)
                    seq = self.engine.submit(prompt, given, self.serving, tell, first, joined)
                    first = first or seq
                    self.seqs.append(seq)
        except BaseException:
            self.cancel()
            raise

    async def begin(self, metrics: Metrics, stream: bool) -> None:
        """Submit an admitted request from a thread; follow tokens and ends in a queue of this event loop."""
        loop = asyncio.get_running_loop()

        def on_update(number: int, seq: ServedSequence, new: str) -> None:
            if seq.done:
                metrics.keep(seq)
            if not stream and not seq.done:
                return  # waking the loop for each token takes time from the engine
            loop.call_soon_threadsafe(self.events.put, number, new, len(seq.ids), seq.done)

        await run_in_threadpool(self.submit, on_update, admitted=True)

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
        numbers = enumerate(self.given())
        choices = [{**self._choice(number, self.seqs[number]), "index": at} for at, number in numbers]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.usage()}

    def given(self) -> list[int]:
        """Return the numbers of the choices that are given: of each prompt, the most probable per token."""

        def worth(number: int) -> float:
            values = self.seqs[number].logprobs
            return sum(values) / len(values) if values else -math.inf

        starts, each = range(0, len(self.seqs), len(self.seeds)), len(self.seeds)
        rows = [list(range(start, start + each)) for start in starts]
        if self.wanted is not None and self.wanted < each:
            rows = [sorted(row, key=worth, reverse=True)[: self.wanted] for row in rows]
        return [number for row in rows for number in row]

    def _choice(self, number: int, seq: ServedSequence) -> dict[str, Any]:
        """Return a choice as the chunks of a stream would tell it, put together."""
        found = seq.wait(0)
        *chunks, last = self._chunks(number, found.text or "", len(found.ids), True)
        made: dict[str, Any] = {"index": number, "finish_reason": last.pop("finish_reason")}
        if self.chat:
            content = "".join(chunk["delta"]["content"] for chunk in chunks)
            made["message"] = {"role": "assistant", "content": content, "refusal": None}
        else:
            made["text"] = "".join(chunk["text"] for chunk in chunks)
        made["logprobs"] = functools.reduce(join_reports, (chunk["logprobs"] for chunk in chunks), None)
        if self.best is not None:
            made["logprobs"] = made["logprobs"] or self.reports[number].nothing()
        return made | {name: last[name] for name in last if name == "inside"}

    def _chunks(self, number: int, new: str, count: int, ended: bool) -> Iterator[dict[str, Any]]:
        """Yield what is new of a choice: its text, of so many tokens so far, and its end."""
        seq, key = self.seqs[number], "delta" if self.chat else "text"

        def chunk(content: Any, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
            return {"index": number, key: content, "logprobs": logprobs, "finish_reason": None}

        first = number not in self.lengths
        echoed = decoded(self.engine.m.text_tokenizer, seq.prompt) if self.echo and first else ""
        if first:
            self.lengths[number] = len(echoed)
            if self.best is not None:
                own = echoed if self.echo else None
                self.reports[number] = LogprobReport(self.engine.m, seq, self.chat, own)
        report = self.reports.get(number)
        if self.echo and first:  # the log-probabilities of its prompt are known by now
            yield chunk(echoed, None if report is None else report.prompt())
        self.lengths[number] += len(new)
        logprobs = None if report is None else report.next(count, self.lengths[number], ended)
        if new or logprobs is not None:
            yield chunk({"content": new} if self.chat else new, logprobs)
        if ended:
            last = chunk({} if self.chat else "") | {"finish_reason": finish_reason(seq.stop_reason)}
            if seq.inside is not None:
                last["inside"], seq.inside = seq.inside, None  # it is large, and told once
            yield last

    async def stream(self, usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events, as they come; a client that goes away cancels what is left."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        more: dict[str, Any] = {"usage": None} if usage else {}

        def event(choices: list[dict[str, Any]], **named: Any) -> str:
            return f"data: {json.dumps({**self._head(kind), 'choices': choices, **more, **named})}\n\n"

        try:
            start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            for number in range(len(self.seqs) if self.chat else 0):
                yield event([{"index": number, **start}])
            left = len(self.seqs)
            while left:
                number, new, count, ended = await self.events.get()
                error = self.seqs[number].error
                if ended and error is not None:
                    raise error
                for chunk in self._chunks(number, new, count, ended):
                    yield event([chunk])
                left -= ended
            if usage:
                yield event([], usage=self.usage())
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield f"data: {json.dumps(error_body(error))}\n\n"
        finally:
            self.cancel()

    def _head(self, kind: str) -> dict[str, Any]:
        cited, self.cited = self.cited, {}
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **cited}

    def usage(self) -> dict[str, Any]:
        """Return the numbers of prompt and new tokens."""
        asked = {id(seq.after or seq): seq for seq in self.seqs}.values()  # choices share a prompt
        read, cached = sum(seq.prompt_tokens for seq in asked), sum(seq.cached for seq in asked)
        made = sum(len(seq.ids) for seq in self.seqs)
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made, **details}


# Log-probabilities ------------------------------------------------------------------------------------------


class LogprobReport:
    """What is reported of the tokens of one choice, and how much of it was."""

    def __init__(self, m: Bundle, seq: ServedSequence, chat: bool, echoed: str | None) -> None:
        """`echoed`: the text of the prompt, where the answer begins with it."""
        assert seq.stream is not None
        self.seq, self.chat, self.shown = seq, chat, 0
        self.texts = TokenTexts(TextStream(m.text_tokenizer, seq.stream.context))
        self.start = len(echoed or "")  # where the next token begins in the answer
        self._prompt = None
        if echoed is not None and not chat:
            self._prompt = TokenTexts(TextStream(m.text_tokenizer))
            tops = [{}, *map(dict, seq.prompt_alternatives)] if seq.prompt_alternatives else []
            for number, token in enumerate(seq.prompt):
                self._prompt.push(token, tops[number] if tops else {})
            self._prompt.finish()

    def prompt(self) -> dict[str, Any] | None:
        """Return what is reported of the prompt, once."""
        found, self._prompt = self._prompt, None
        if found is None:
            return None
        starts = [0, *itertools.accumulate(len(token.text) for token in found.tokens)][:-1]
        return completion_logprobs(
            found.tokens, [None, *self.seq.prompt_logprobs], found.alternatives, starts
        )

    def next(self, count: int, length: int, ended: bool) -> dict[str, Any] | None:
        """Return what is reported of the tokens since the last call; None where there are none.

        `count`: tokens so far. `length`: characters of the answer that are out. What a stop string has cut
        off is not reported, and what may still be is not yet.
        """
        row, texts = self.seq, self.texts
        for number in range(texts.read, count):
            texts.push(row.ids[number], dict(row.alternatives[number]) if row.alternatives else {})
        if ended:
            texts.finish()
        tokens, starts, first = list[TokenText](), list[int](), self.shown
        for token in texts.tokens[first:]:
            left = length - self.start
            cut = ended and row.stop_reason == "stop"
            if (cut and left <= 0 and (token.text or left < 0)) or (not ended and len(token.text) > left):
                break
            own = token.text[:left] if cut else token.text
            tokens.append(token if own == token.text else TokenText(token.id, own, own.encode()))
            starts.append(self.start)
            self.start += len(own)
        self.shown += len(tokens)
        values, tops = row.logprobs[first : self.shown], texts.alternatives[first : self.shown]
        return self._reported(tokens, values, tops, starts) if tokens else None

    def nothing(self) -> dict[str, Any]:
        """Return the report of an answer without tokens."""
        return self._reported([], [], [], [])

    def _reported(
        self,
        tokens: abc.Sequence[TokenText],
        values: abc.Sequence[float],
        tops: abc.Sequence[list[tuple[TokenText, float]]],
        starts: list[int],
    ) -> dict[str, Any]:
        if self.chat:
            content = [
                {**one.entry(value), "top_logprobs": [other.entry(v) for other, v in top]}
                for one, value, top in zip(tokens, values, tops)
            ]
            return {"content": content, "refusal": None}
        return completion_logprobs(tokens, values, tops, starts)


def completion_logprobs(
    tokens: abc.Sequence[TokenText],
    values: abc.Sequence[float | None],
    alternatives: abc.Sequence[list[tuple[TokenText, float]]],
    starts: list[int],
) -> dict[str, Any]:
    """Return log-probabilities as `/v1/completions` reports them."""
    tops = zip(tokens, values, alternatives)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": list(values),
        "top_logprobs": [
            None if value is None else dict(_named(token, value, others)) for token, value, others in tops
        ],
        "text_offset": starts,
    }


def _named(
    chosen: TokenText, value: float, others: abc.Sequence[tuple[TokenText, float]]
) -> Iterator[tuple[str, float]]:
    """Yield a name for each token, no two alike: its text, else its bytes, else its number."""
    taken = {chosen.text}
    for token, logprob in others:
        name = chosen.text if token.id == chosen.id else token.text
        if token.id != chosen.id and (not name or PARTIAL in name):
            name = "bytes:" + "".join(f"\\x{value:02x}" for value in token.bytes)
        if token.id != chosen.id and name in taken:
            name = f"token_id:{token.id}"
        taken.add(name)
        yield name, logprob
    if all(token.id != chosen.id for token, _ in others):
        yield chosen.text, value


def join_reports(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return two reports as one."""
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


# Errors and embeddings --------------------------------------------------------------------------------------


CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # by status, as OpenAI has them


def error_body(error: BaseException, status: int = 400) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    mine = isinstance(error, ClearheadError)
    line = str(error) if mine else f"something went wrong: {type(error).__name__}"
    kind = "invalid_request_error" if mine else "server_error"
    param, code = getattr(error, "param", None), getattr(error, "code", CODES.get(status))
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}


TOGETHER = 64  # vectors that are written at once
SPECIAL = 8  # tokens that are put around a text at most

Embedded = tuple[Tensor, int]  # the vector [D] of a text, and how many tokens were read of it


@lru_cache(maxsize=64)
def embedding(prompt: str | None) -> Any:
    """Return the function for the name of a prompt: requests with the same function share a call."""
    return partial(_embed, prompt)


def _embed(prompt: str | None, m: Bundle, texts: abc.Sequence[str | list[int]]) -> list[Embedded]:
    vectors, counts = reading.embed_counted(m, texts, prompt=prompt)
    refuse(
        not vectors.isfinite().all(),
        "the model gave a vector with NaN or infinite numbers: its weights are broken",
    )
    if m.sentences is None:  # a model of sentences says itself whether its vectors have length 1
        vectors = nnf.normalize(vectors, dim=-1)
    return list(zip(vectors, counts))


def check_dimensions(m: Bundle, dimensions: int | None) -> None:
    """Refuse to cut vectors to more numbers than they have."""
    width = (m.sentences or Sentences()).width(m.config.d_model)
    if dimensions is not None and dimensions > width:
        line = f"dimensions {dimensions}: a vector of this model has {width} numbers: choose 1 to {width}"
        raise RequestError(line, None, param="dimensions")


def cut(found: abc.Sequence[Embedded], dimensions: int | None) -> abc.Sequence[Embedded]:
    """Return the first numbers of each vector, scaled to length 1 (Matryoshka); None: vectors as they are."""
    if dimensions is None:
        return found
    return [(nnf.normalize(vector[..., :dimensions], dim=-1), count) for vector, count in found]


def check_lengths(m: Bundle, texts: abc.Sequence[str | list[int]], prompt: str | None) -> None:
    """Refuse a text that the model cannot read whole."""
    before = "" if m.sentences is None else m.sentences.before(prompt)
    for number, text in enumerate(texts):
        if (
            isinstance(text, str)
            and len((before + text).encode("utf-8", "replace")) + SPECIAL <= m.max_length
        ):
            continue  # no token is shorter than a byte
        (ids,) = reading.rows_of(m, [text], prompt, cut=False)
        if len(ids) > m.max_length:
            raise RequestError(
                f"this model's maximum context length is {m.max_length} tokens, and input {number} has "
                f"{len(ids)}: shorten it, or send truncate: true",
                "context_length_exceeded",
                param="input",
            )


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
