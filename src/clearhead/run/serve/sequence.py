"""One request as the engine sees it: its tokens, its block tables, how far it is, whom it tells."""

import json
import math
import threading
import time
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.learn.tasks.generation import (
    Hooks,
    Prompt,
    asked_for,
    generation_of,
    prompts_of,
    stream_of,
)
from clearhead.learn.tasks.results import Generation
from clearhead.run.bundle import Bundle
from clearhead.run.generate.decode import (
    Chooser,
    Continuation,
    agreed,
    check_request,
    report,
    turns_by_length,
)
from clearhead.run.generate.request import DEFAULTS, OPTIONS
from clearhead.run.generate.sampling import argmax
from clearhead.run.generate.speculate import Drafter
from clearhead.run.serve.kv_cache import Group, Pool, PrefixKey, States, Table, chain

LEARNED = 0.25  # how far one more draft token moves the share of those accepted


class DraftTokens:
    """The draft tokens of one sequence, and how often they were right."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.share = drafter, 0.0
        self.start, self.found = 0, list[int]()  # the position of the first, and the tokens
        self.read = 0  # how many of them the step verifies

    def look(self, tokens: list[int], most: int) -> None:
        """Compare the last ones with what came, and propose up to `most` tokens behind `tokens`."""
        for draft, came in zip(self.found, tokens[self.start :]):
            self.share += LEARNED * ((draft == came) - self.share)
            if draft != came:
                break
        self.start, self.read = len(tokens), 0
        self.found = self.drafter.propose(tokens, most, _nothing).tokens

    def at(self, position: int) -> int | None:
        """Return the draft token at a position that this step verifies; None: there is none."""
        return self.found[position - self.start] if self.start <= position < self.start + self.read else None

    def end(self, tokens: list[int]) -> tuple[int, int]:
        """End a step; return how many were verified, and how many of them `tokens` has."""
        read, self.read = self.read, 0
        return read, agreed(self.found[:read], tokens[self.start :])


def _nothing() -> Tensor:
    return torch.zeros(1)  # what is looked up is not drawn


OnUpdate = Callable[["Sequence", str], None]  # called with each new text that is final, and at the end


@dataclass(frozen=True)
class ServeOptions:
    """What a request may say of how it is served, beside the options of a generation."""

    salt: str = ""  # requests with another salt share no blocks with this one
    prompt_logprobs: int | None = (
        None  # report the prompt's tokens, with so many of the best at each position
    )
    prefill_only: bool = False  # compute the prompt, and generate nothing
    adapter: str = ""  # its name; "": the model itself
    inside: tuple[str, ...] = ()  # activations to see of the whole text, by name or pattern, and "lens"


@dataclass
class Times:
    """When what happened, by `time.monotonic()`."""

    arrived: float = field(default_factory=time.monotonic)
    begun: float | None = None
    first: float | None = None  # the first new token
    last: float | None = None  # the latest
    ended: float | None = None
    gaps: list[float] = field(default_factory=list)  # between new tokens

    def write(self) -> None:
        """Note a new token."""
        now = time.monotonic()
        if self.last is not None:
            self.gaps.append(now - self.last)
        self.first, self.last = self.first or now, now


class Sequence:
    """One request: its tokens, block tables, state and result."""

    def __init__(
        self,
        m: Bundle,
        prompt: Prompt,
        options: Mapping[str, Any],
        serving: ServeOptions,
        on_update: OnUpdate | None = None,
    ) -> None:
        """Check what is asked and encode the prompt; `on_update` is called from the engine's thread."""
        for name, value in options.items():
            refuse(
                name in OPTIONS and not OPTIONS[name].served and value not in (DEFAULTS[name], None),
                f"{name} {value} is not served: the engine decides how texts are generated: leave it out",
            )
        request, (text,), ends = asked_for(m, [prompt], options, Hooks(cancel=self._is_cancelled))
        refuse(
            request.overflow in ("slide", "stream"),
            f'overflow "{request.overflow}" is not served: choose refuse or window',
        )
        self.request, self.serving, self.on_update = request, serving, on_update
        self.prompts = prompts_of(m, [text])
        check_request(m.model, request, self.prompts, ends)
        self.row = Continuation(list(self.prompts.ids[0]))
        self.tokens = list(self.row.prompt)  # the prompt, and the new ones
        self.sources = 0 if self.prompts.source is None else self.prompts.source.shape[1]
        self.stream = stream_of(m, self.prompts, 0, request.stop)
        self.chooser = Chooser(m.model, request, self.prompts, ends, [self.row])
        self.ends = replace(ends, on_token=self._on_token)
        self.times = Times()
        self.prompt_logprobs: list[float] = []
        self.prompt_alternatives: list[list[tuple[int, float]]] = []
        self.result: Generation | None = None
        self.error: Exception | None = None
        self.after: Sequence | None = None  # begin when this one, which has the same prompt, has read it
        self.inside: dict[str, Any] | None = None  # what was asked for, ready for JSON
        self.number = 0  # of this request, in the order of arrival
        self.cached = 0  # tokens of the prompt that were found in the pool
        self.preempted = 0  # how often
        self.placed = False  # whether it is among those that run
        self.drafts: DraftTokens | None = None  # once there were any
        self._cancelled, self._done, self._new = False, threading.Event(), ""
        self.tables: dict[Group, Table] = {}
        self.names: list[PrefixKey] = []
        self.restart()

    def restart(self) -> None:
        """Forget what was read, and give back the room for it."""
        for table in self.tables.values():
            table.clear()
        self.read = self.planned = 0  # tokens whose keys are there; with those of the step in progress
        self.states: States = {}
        self.encoded = not self.sources
        if not self._prompt_kept:  # else they may be told at any time
            self.prompt_logprobs, self.prompt_alternatives = [], []

    def place(self, pool: Pool) -> None:
        """Make the tables of this request, and the names under which its prompt is found."""
        self.tables = {group: Table(pool, group) for group in pool.blocks}

    def name(self, size: int, shares: bool) -> None:
        """Name the full blocks of the prompt, if blocks may be shared."""
        apart = json.dumps([self.serving.adapter, self.serving.salt])  # what differs in it shares nothing
        self.names = chain(apart, self.row.prompt, size) if shares and not self.sources else []

    def name_blocks(self, start: int, stop: int, size: int) -> None:
        """Let others find the full blocks of the prompt among tokens `start` to `stop`, which were read."""
        for number in range(start // size, min(stop // size, len(self.names))):
            for table in self.tables.values():
                block = table.ids[number] if number < len(table.ids) else None
                if block is not None:
                    table.blocks.name(block, self.names[number])

    def adopt(self, most: int) -> int:
        """Share the blocks of the prompt that are in the pool, up to `most`; return how many they are."""
        known = (n for n in range(most, 0, -1) if self.names and self._knows(n))
        found = next(known, 0)
        for table in self.tables.values():
            table.adopt(self.names[:found])
        return found

    def _knows(self, count: int) -> bool:
        return all(table.knows(self.names[:count]) for table in self.tables.values())

    def take_free(self, tokens: int) -> bool:
        """Take the blocks for so many tokens if all of them are free."""
        own = [table for group, table in self.tables.items() if group is not None]
        if any(table.missing(tokens) > table.blocks.available for table in own):
            return False
        for table in own:
            table.extend(tokens)
        return True

    @property
    def most(self) -> int:
        """New tokens at most."""
        return 0 if self.serving.prefill_only else self.request.max_new_tokens

    @property
    def decoding(self) -> bool:
        """Return True when the next step runs the last token, and nothing else."""
        return self.read >= len(self.row.prompt) and self.read == len(self.tokens) - 1

    @property
    def prefilling(self) -> bool:
        """Return True until the prompt is computed, or the request has ended."""
        return not self.done and self.read < len(self.row.prompt)

    def next_chunk(self, size: int) -> tuple[int, int]:
        """Return where the next tokens to run together begin and end.

        The prompt is prefilled in chunks that end where blocks do, and new tokens run one by one, so that
        the shapes that attention sees never depend on other requests, nor on having been preempted.
        """
        start, whole = self.planned, len(self.row.prompt)
        return start, min((start // size + 1) * size, whole) if start < whole else start + 1

    def draft_at(self, position: int) -> int | None:
        """Return the draft token of this step at a position; None: the text has one there already."""
        return None if self.drafts is None else self.drafts.at(position)

    def tokens_at(self, start: int, stop: int) -> list[int]:
        """Return the tokens that a step runs: of the text, or a draft token behind it."""
        draft = self.draft_at(start)
        return self.tokens[start:stop] if draft is None else [draft]

    def stands(self, stop: int) -> bool:
        """Return whether what the step has run up to `stop` is the text so far: no rejected draft token."""
        return (
            not self.done and stop == len(self.tokens) and self.draft_at(stop - 1) in (None, self.tokens[-1])
        )

    def end_drafts(self) -> tuple[int, int]:
        """Drop the keys of rejected draft tokens; return how many were verified, and how many accepted."""
        if self.drafts is None or not self.drafts.read:
            return 0, 0
        self.read = self.planned = min(self.read, len(self.tokens) - 1)
        return self.drafts.end(self.tokens)

    def cancel(self) -> None:
        """Cancel the request; the engine frees its room at its next step."""
        self._cancelled = True

    def _is_cancelled(self) -> bool:
        return self._cancelled

    @property
    def done(self) -> bool:
        """Return True once there is a result or an error."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Generation:
        """Wait for the result, and return it; raise what went wrong."""
        if not self._done.wait(timeout):
            raise TimeoutError("the request has not ended yet")
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def _on_token(self, number: int, row: Continuation) -> str | None:
        self.tokens.append(row.ids[-1])
        if self.stream is None:
            return None
        self._new = self.stream.push(row.ids[-1])
        return "stop" if self.stream.stopped_by is not None else None

    def add(self, logits: Tensor, chosen: Tensor | None = None, runs: int = 1) -> bool:
        """Write the next token, after logits [1, V]; return False when the text has ended.

        `runs`: 0 where another token came from the same run of the model.
        """
        chosen = self.chooser.choose(logits, [0]) if chosen is None else chosen
        if self.request.reports:
            report(logits, chosen.to(logits.device), [self.row], self.request.alternatives)
        self.times.write()
        self._new, before = "", len(self.row.ids)
        goes_on = self.ends.go_on(0, self.row, int(chosen), self.row.steps + runs, self.ends.reason())
        if self.on_update is not None and len(self.row.ids) > before:
            self.on_update(self, self._new)
        return goes_on and len(self.row.ids) < self.most

    @property
    def prompt_tokens(self) -> int:
        """Tokens to read: the prompt's, and its source's."""
        return len(self.row.prompt) + self.sources

    @property
    def _prompt_kept(self) -> bool:
        return len(self.prompt_alternatives) >= len(self.row.prompt) - 1

    def keep_prompt(self, logits: Tensor, start: int) -> None:
        """Keep the log-probabilities of the prompt's tokens behind place `start`: logits [T, V]."""
        best = self.serving.prompt_logprobs
        following = self.row.prompt[start + 1 : start + 1 + len(logits)]
        if best is None or not following or self._prompt_kept:
            return
        values = logits[: len(following)].float().log_softmax(-1)
        index = torch.tensor(following, device=values.device)[:, None]
        self.prompt_logprobs += values.gather(-1, index)[:, 0].tolist()
        top = values.topk(best, dim=-1)
        self.prompt_alternatives += [
            list(zip(ids, found)) for ids, found in zip(top.indices.tolist(), top.values.tolist())
        ]

    def end(self, reason: str | None = None, error: Exception | None = None) -> None:
        """Give back the room, make the result, and tell of it."""
        self.row.stop_reason = reason or self.row.stop_reason
        rest = "" if self.stream is None else self.stream.finish()
        self.result, self.error = generation_of(self.row, self.request, self.stream), error
        self.times.ended = time.monotonic()
        for table in self.tables.values():
            table.clear()
        self.states = {}
        self._done.set()
        if self.on_update is not None:
            self.on_update(self, rest)


def check_served(model: Transformer) -> None:
    """Refuse a model that the engine cannot run."""
    refuse(
        min(model.config.main.capacities) < 1,
        "a model whose layers take some tokens alone (depth_capacity) is not served: use generate",
    )
    refuse(
        turns_by_length(model),
        "a model whose rotary angles depend on the length of a call (rope_scaling dynamic, longrope) is not "
        "served: use generate",
    )


def plain_greedy(seqs: abc.Sequence[Sequence], logits: Tensor) -> list[Tensor | None]:
    """Return the best token of each text [1] that takes it without a rule: logits [B, V] at once."""
    best = argmax(logits)[:, None]  # B 1
    finite = logits.gather(-1, best).isnan().logical_not()[:, 0].tolist()
    best = best.cpu()  # at once, and not one by one
    return [token if fine and _takes_the_best(seq) else None for seq, token, fine in zip(seqs, best, finite)]


def _takes_the_best(seq: Sequence) -> bool:
    asked = seq.request
    return asked.temperature == 0 and not asked.looks_back and not asked.restricts


def blocks_for(tokens: int, size: int) -> int:
    """Return how many blocks hold so many tokens."""
    return math.ceil(tokens / size)
