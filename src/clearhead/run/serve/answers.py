"""From requests to JSON and server-sent events: the seqs of a body, followed from the event loop."""

import asyncio
import contextlib
import functools
import itertools
import json
import math
import time
import uuid
from collections import abc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from clearhead.errors import refuse
from clearhead.hub.tokens.answers import AnswerParser, Part, ReadAnswer
from clearhead.hub.tokens.chat import ChatTemplate
from clearhead.hub.tokens.text import decoded
from clearhead.learn.tasks.generation import ChatTurn, Prompt, chat_template, turn_of
from clearhead.run.bundle import Bundle
from clearhead.run.generate.grammar import check_constraint
from clearhead.run.generate.request import CONSTRAINTS
from clearhead.run.generate.stream import PARTIAL, TextStream, TokenText, TokenTexts
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.protocol import MOST_INPUTS, ChatBody, CompletionBody, error_body, finish_reason
from clearhead.run.serve.sequence import ServedSequence, ServeOptions
from clearhead.run.serve.status import Metrics

DEFAULT_TOKENS = 16  # of a completion, as OpenAI's
LOOK = 0.2  # seconds between two looks at whether the client is still there


def choices_of(engine: ServeEngine, name: str, body: CompletionBody | ChatBody, owner: str = "") -> "Choices":
    """Return what a body asks for; one `owner` shares its cached prefixes."""
    if isinstance(body, ChatBody):
        return chat_choices(engine, name, body, owner)
    options, best, echo = body.options(), body.best, bool(body.echo)
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    refuse(most == 0 and not echo, "max_tokens 0 generates nothing: ask for 1 or more, or for echo")
    refuse(echo and body.suffix, "echo with suffix: the prompt has tokens around it: leave echo out")
    refuse(engine.m.tokenizer is None, "this model has no tokenizer: it cannot be served as text")
    options["max_new_tokens"] = max(1, most)
    serving = replace(
        _serving(engine, name, body, owner), prompt_logprobs=best if echo else None, prefill_only=most == 0
    )
    seeds = body.seeds(body.candidates)
    return Choices(engine, name, body.prompts(), options, seeds, serving, best, echo, body.n or 1)


def chat_choices(engine: ServeEngine, name: str, body: ChatBody, owner: str = "") -> "ChatChoices":
    """Return what a conversation asks for."""
    refuse(
        body.max_tokens is not None and body.max_completion_tokens is not None,
        "max_tokens and max_completion_tokens are the same: give one of them",
    )
    turn = chat_turn(engine.m, body)
    room = max(1, engine.longest - len(turn.ids))
    most = body.max_completion_tokens or body.max_tokens or room
    options = turn.options | {"max_new_tokens": min(most, room) if body.fits else most}
    serving, seeds = _serving(engine, name, body, owner), body.seeds(body.n or 1)
    return ChatChoices(engine, name, [turn.prompt], options, seeds, serving, body.best, turn=turn)


def chat_turn(m: Bundle, body: ChatBody) -> ChatTurn:
    """Return the answer to come in a conversation."""
    more = template_options(chat_template(m), body)
    return turn_of(m, body.checked_messages(), more, body.options(), body.choice_of_tools(), files=False)


def template_options(template: ChatTemplate, body: ChatBody) -> dict[str, Any]:
    """Return what the chat template is given besides the messages and tools; effort as it knows it."""
    more, effort = dict(body.chat_template_kwargs or {}), body.reasoning_effort
    if effort is None:
        return more
    if template.reads("reasoning_effort"):
        return more | {"reasoning_effort": effort}
    switch = "enable_thinking"
    refuse(
        effort != "none" and not template.reads(switch),
        f'reasoning_effort "{effort}": the chat template of this model does not take it: leave it out',
    )
    return {switch: effort != "none"} | more if template.reads(switch) else more


def _serving(engine: ServeEngine, name: str, body: CompletionBody | ChatBody, owner: str) -> ServeOptions:
    salt, adapter = f"{owner}:{body.cache_salt or ''}", name if name in engine.adapter_names else ""
    return ServeOptions(salt, adapter=adapter, inside=tuple(body.inside or ()))


class EventQueue:
    """What is new of each choice since it was last read: a slow reader gets fewer and longer events."""

    def __init__(self) -> None:
        self._new: dict[int, tuple[str, int, bool]] = {}
        self._any = asyncio.Event()

    def put(self, number: int, text: str, count: int, ended: bool) -> None:
        """Add to what is new of a choice: its text, its tokens so far, whether it has ended."""
        self._new[number] = (self._new.get(number, ("",))[0] + text, count, ended)
        self._any.set()

    async def get(self) -> "Update":
        """Wait for an event; return what is new of a choice."""
        await self._any.wait()
        number = next(iter(self._new))
        news = self._new.pop(number)
        if not self._new:
            self._any.clear()
        return Update(number, *news)


@dataclass(frozen=True)
class Update:
    """What is new of a choice: its text, its tokens so far, whether it has ended."""

    number: int
    text: str
    count: int
    ended: bool


@dataclass
class Choices:
    """The texts that one body asks for: what to submit, the seqs, and their answer to `/v1/completions`."""

    prefix: ClassVar[str] = "cmpl"
    kinds: ClassVar[tuple[str, str]] = (
        "text_completion",
        "text_completion",
    )  # of an answer, of a stream's events

    engine: ServeEngine
    model: str
    prompts: abc.Sequence[Prompt]
    options: dict[str, Any]
    seeds: list[int]  # of the choices of each prompt
    serving: ServeOptions
    best: int | None = None  # tokens reported at each step; None: nothing is reported
    echo: bool = False
    wanted: int | None = None  # choices of each prompt that are given, the most probable; None: all
    cited: dict[str, Any] = field(default_factory=dict)  # once, in the answer or in the first event
    seqs: list[ServedSequence] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)  # characters of each choice that are out
    reports: dict[int, "LogprobReport"] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
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
                    options = self.options | {"seed": seed}
                    joined = admitted or bool(self.seqs)
                    seq = self.engine.submit(prompt, options, self.serving, tell, first, joined)
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

    async def follow(self) -> AsyncIterator[Update]:
        """Yield what is new of the choices as it comes; cancel what is left when nobody follows any more."""
        left = len(self.seqs)
        try:
            while left:
                update = await self.events.get()
                error = self.seqs[update.number].error
                if update.ended and error is not None:
                    raise error
                yield update
                left -= update.ended
        finally:
            self.cancel()

    async def finish(self, request: Request) -> None:
        """Wait for every choice, as long as the client does."""
        left, looked = len(self.seqs), time.monotonic()
        try:
            while left:
                with contextlib.suppress(TimeoutError):
                    left -= (await asyncio.wait_for(self.events.get(), LOOK)).ended
                if time.monotonic() - looked > LOOK:
                    refuse(await request.is_disconnected(), "the client has gone")
                    looked = time.monotonic()
        finally:
            self.cancel()

    async def whole(self, request: Request) -> dict[str, Any]:
        """Wait for every choice; return the answer."""
        await self.finish(request)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the answer, once every seq has ended."""
        numbers = enumerate(self.given())
        choices = [{**self._choice(number, self.seqs[number]), "index": at} for at, number in numbers]
        return {**self._head(self.kinds[0]), "choices": choices, "usage": self.usage()}

    def finish_reason(self, number: int) -> str:
        """Return OpenAI's word for why a choice has ended."""
        return finish_reason(self.seqs[number].stop_reason)

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
        result = seq.wait(0)
        *chunks, last = self._chunks(Update(number, result.text or "", len(result.ids), True))
        choice: dict[str, Any] = {"index": number, "finish_reason": last.pop("finish_reason")}
        choice |= self._joined(number, chunks)
        choice["logprobs"] = functools.reduce(join_reports, (chunk["logprobs"] for chunk in chunks), None)
        if self.best is not None:
            choice["logprobs"] = choice["logprobs"] or self.reports[number].nothing()
        return choice | {name: last[name] for name in last if name == "inside"}

    def _joined(self, number: int, chunks: abc.Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what the chunks of a choice say, put together."""
        return {"text": "".join(chunk["text"] for chunk in chunks)}

    def _new_fields(self, update: Update) -> list[dict[str, Any]]:
        """Return the new text of a choice as the fields of chunks; none where nothing is new."""
        return [{"text": update.text}] if update.text else []

    nothing: ClassVar[dict[str, Any]] = {"text": ""}  # fields of a chunk that says nothing
    ending: ClassVar[dict[str, Any]] = {"text": ""}  # and of the last one

    def _chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        """Yield what is new of a choice as chunks of a stream, and its end."""
        number = update.number
        seq = self.seqs[number]

        def chunk(fields: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
            return {"index": number, **fields, "logprobs": logprobs, "finish_reason": None}

        first = number not in self.lengths
        echoed = decoded(self.engine.m.text_tokenizer, seq.prompt) if self.echo and first else ""
        if first:
            self.lengths[number] = len(echoed)
            if self.best is not None:
                own = echoed if self.echo else None
                chat = isinstance(self, ChatChoices)
                self.reports[number] = LogprobReport(self.engine.m, seq, chat, own)
        report = self.reports.get(number)
        if self.echo and first:  # the log-probabilities of its prompt are known by now
            yield chunk({"text": echoed}, None if report is None else report.prompt())
        self.lengths[number] += len(update.text)
        logprobs = None if report is None else report.next(update.count, self.lengths[number], update.ended)
        chunks = self._new_fields(update)
        for fields in chunks or ([self.nothing] if logprobs is not None else []):
            yield chunk(fields, logprobs)
            logprobs = None  # told once
        if update.ended:
            last = chunk(self.ending) | {"finish_reason": self.finish_reason(number)}
            if seq.inside is not None:
                last["inside"], seq.inside = seq.inside, None  # it is large, and told once
            yield last

    def _first(self) -> list[dict[str, Any]]:
        """Return the chunks that a stream begins with."""
        return []

    async def stream(self, usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events, as they come; a client that goes away cancels what is left."""
        more: dict[str, Any] = {"usage": None} if usage else {}

        def event(choices: list[dict[str, Any]], **named: Any) -> str:
            head = self._head(self.kinds[1])
            return f"data: {json.dumps({**head, 'choices': choices, **more, **named})}\n\n"

        try:
            for chunk in self._first():
                yield event([chunk])
            async for update in self.follow():
                for chunk in self._chunks(update):
                    yield event([chunk])
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
        prompted = {id(seq.after or seq): seq for seq in self.seqs}.values()  # choices share a prompt
        read, cached = sum(seq.prompt_tokens for seq in prompted), sum(seq.cached for seq in prompted)
        generated = sum(len(seq.ids) for seq in self.seqs)
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return {
            "prompt_tokens": read,
            "completion_tokens": generated,
            "total_tokens": read + generated,
            **details,
        }


@dataclass
class ChatChoices(Choices):
    """Answers of a conversation, as `/v1/chat/completions` has them: content, reasoning and tool calls."""

    prefix: ClassVar[str] = "chatcmpl"
    kinds: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")
    nothing: ClassVar[dict[str, Any]] = {"delta": {"content": ""}}
    ending: ClassVar[dict[str, Any]] = {"delta": {}}

    turn: ChatTurn = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parsers: dict[int, AnswerParser | None] = {}
        self._parts: dict[int, list[Part]] = {}  # of each choice, so far
        self._ids: dict[tuple[int, int], str] = {}

    def parts(self, number: int, text: str, ended: bool) -> list[Part]:
        """Return what the new text of a choice adds: content, reasoning, calls and their arguments."""
        if number not in self._parsers:
            self._parsers[number] = self.turn.parser()
        parser = self._parsers[number]
        if parser is None:
            parts = [Part("content", text)] if text else []
        else:
            parts = [*parser.push(text), *(parser.finish() if ended else ())]
        self._parts.setdefault(number, []).extend(parts)
        return parts

    def call_id(self, number: int, call: int) -> str:
        """Return the id of a call of a choice."""
        return self._ids.setdefault((number, call), self.turn.form.new_id())

    def read(self, number: int) -> ReadAnswer:
        """Return what a choice says so far."""
        return ReadAnswer.of(self._parts.get(number, []), lambda call: self.call_id(number, call))

    def finish_reason(self, number: int) -> str:
        """Return OpenAI's word for why a choice has ended; a call that is cut off is none."""
        reason = super().finish_reason(number)
        called = any(part.kind == "call" for part in self._parts.get(number, ()))
        return "tool_calls" if called and reason == "stop" else reason

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens, with those of reasoning where there was any."""
        usage, encode = super().usage(), self.engine.m.text_tokenizer.encode
        thought = [self.read(number).reasoning for number in self._parts]
        count = sum(len(encode(text, add_special_tokens=False).ids) for text in thought if text)
        return usage | ({"completion_tokens_details": {"reasoning_tokens": count}} if count else {})

    def _new_fields(self, update: Update) -> list[dict[str, Any]]:
        parts = self.parts(update.number, update.text, update.ended)
        return [{"delta": self._delta(update.number, part)} for part in parts]

    def _delta(self, number: int, part: Part) -> dict[str, Any]:
        """Return one part as the delta of a chunk."""
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        if part.kind == "arguments":
            return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}
        function = {"name": part.text, "arguments": ""}
        whole = {"index": part.call, "id": self.call_id(number, part.call), "type": "function"}
        return {"tool_calls": [{**whole, "function": function}]}

    def _first(self) -> list[dict[str, Any]]:
        start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [{"index": number, **start} for number in range(len(self.seqs))]

    def _joined(self, number: int, chunks: abc.Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"message": {**self.read(number).message, "refusal": None}}


# Log-probabilities ------------------------------------------------------------------------------------------


class LogprobReport:
    """What is reported of the tokens of one choice, and how much of it was."""

    def __init__(self, m: Bundle, seq: ServedSequence, chat: bool, echoed: str | None) -> None:
        """`echoed`: the text of the prompt, where the answer begins with it."""
        assert seq.stream is not None
        self.seq, self.chat, self.shown = seq, chat, 0
        self.texts = TokenTexts(TextStream(m.text_tokenizer, seq.stream.context, (), seq.stream.skips))
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
                {**token.entry(value), "top_logprobs": [other.entry(v) for other, v in top]}
                for token, value, top in zip(tokens, values, tops)
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
        if token.id != chosen.id and token.bytes and (not name or PARTIAL in name):
            name = "bytes:" + "".join(f"\\x{value:02x}" for value in token.bytes)
        if token.id != chosen.id and (not name or name in taken):
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
