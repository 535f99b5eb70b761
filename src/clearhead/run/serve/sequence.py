"""One request as the engine sees it: its tokens, its block tables, how far it is, whom it tells."""

import json
import threading
import time
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.core.config import TABLES
from clearhead.core.transformer import Transformer
from clearhead.errors import RequestError, refuse
from clearhead.learn.tasks.generation import Hooks, Prompt, asked_for, generation_of, prompts_of, stream_of
from clearhead.learn.tasks.images import ImagePrompt
from clearhead.learn.tasks.results import Generation
from clearhead.run.bundle import Bundle
from clearhead.run.generate.decode import check_request
from clearhead.run.generate.diffusion import Denoiser, Unmasked
from clearhead.run.generate.request import DEFAULTS, OPTIONS, UNUSED
from clearhead.run.generate.sequence import Drafter, Prompts, Proposal, Sampler, Sequence, argmax, logprobs_of
from clearhead.run.generate.stream import agreed
from clearhead.run.serve.adapters import Adapter
from clearhead.run.serve.kv_cache import Chunk, Group, Pool, PrefixKey, States, Table, chain
from clearhead.variants.kinds import denoises

OnUpdate = Callable[["ServedSequence", str], None]  # called with each new text that is final, and at the end

LEARNED = 0.25  # how far one more draft token moves the share of those accepted


@dataclass(frozen=True)
class ServeOptions:
    """What a request may say of how it is served, besides the options of a generation."""

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


class DraftTokens:
    """The draft tokens of one sequence, and how often they were right."""

    def __init__(self, drafter: Drafter, share: float = 0.0) -> None:
        """`share`: how many are assumed to be right until some were compared."""
        self.drafter, self.share = drafter, share
        self.start, self.found = 0, list[int]()  # the position of the first, and the tokens
        self.read = 0  # how many of them the step verifies
        self.without = 0  # steps since there were any, where they are not made in each

    def compare(self, tokens: list[int]) -> None:
        """Compare the last ones with what came."""
        for draft, came in zip(self.found, tokens[self.start :]):
            self.share += LEARNED * ((draft == came) - self.share)
            if draft != came:
                break
        self.start, self.read, self.found = len(tokens), 0, []


class ServedSequence(Sequence):
    """A sequence in the engine: its block tables, state and result."""

    prompts: Prompts  # without its images once it has ended

    def __init__(
        self,
        m: Bundle,
        prompt: Prompt,
        options: Mapping[str, Any],
        serving: ServeOptions,
        on_update: OnUpdate | None = None,
        longest: int | None = None,
        like: "ServedSequence | None" = None,
    ) -> None:
        """Check what is asked and encode the prompt; `on_update` is called from the engine's thread.

        `options` are `served_options`. `longest`: the context length; default: the model's own. `like`: one
        of the same prompt, whose images need not be encoded again.
        """
        self._cancelled, self._done = threading.Event(), threading.Event()
        request, (text,), ends = asked_for(m, [prompt], options, Hooks(cancel=self._cancelled))
        refuse(
            request.overflow in ("slide", "stream"),
            f'overflow "{request.overflow}" is not served: choose refuse or window',
        )
        self.request, self.serving, self.on_update = request, serving, on_update
        if isinstance(prompt, ImagePrompt):  # before its images are encoded
            check_length(len(text), 0, self.most, longest or m.max_length)
            check_request(m.model, request, Prompts([text]), ends)
        encoded = None if like is None else like.prompts
        if encoded is None or encoded.vectors is None:
            encoded = prompts_of(m, [text], [prompt])
        self.prompts = encoded
        self.pictured = self.prompts.vectors is not None
        self.sources = 0 if self.prompts.source is None else self.prompts.source.shape[1]
        check_length(len(self.prompts.ids[0]), self.sources, self.most, longest or m.max_length)
        if not denoises(m.config):
            check_request(m.model, request, self.prompts, ends)
        stream = partial(stream_of, m, request, self.prompts)
        self.sampler = Sampler(m.model, request, replace(ends, stream=stream))
        super().__init__(self.sampler, self.prompts)
        self.denoising: Iterator[Unmasked] = iter(())  # of a diffusion model: its steps
        if denoises(m.config):
            refuse(
                serving != ServeOptions(salt=serving.salt),
                "a diffusion model is asked for texts alone: leave prompt_logprobs, inside and adapters out",
            )
            self.denoising = Denoiser(m.engine.runner(), request, self, m.mask_id).steps()
        self.times = Times()
        self.prompt_logprobs: list[float] = []
        self.prompt_alternatives: list[list[tuple[int, float]]] = []
        self.result: Generation | None = None
        self.error: Exception | None = None
        self.adapter: Adapter | None = None  # what its name meant when the request came
        self.after: ServedSequence | None = None  # begin when this one has read the same prompt
        self.inside: dict[str, Any] | None = None  # what was asked for, ready for JSON
        self.number = 0  # of this request, in the order of arrival
        self.cached = 0  # tokens of the prompt that were found in the pool
        self.preempted = 0  # how often
        self.placed = False  # whether it is among those that run
        bounds = [options[name] for name in ("lookup", "draft_tokens") if options.get(name) is not None]
        self.most_drafts = min(bounds, default=None)  # draft tokens of a step; None: the engine decides
        self.tables: dict[Group, Table] = {}
        self.names: list[PrefixKey] = []
        self.restart()

    def restart(self) -> None:
        """Forget what was read, and give back the room for it."""
        for table in self.tables.values():
            table.clear()
        self.drafts: DraftTokens | None = None  # once there were any
        self.read = self.planned = 0  # tokens whose keys are there; with those of the step in progress
        self.states: States = {}
        self.encoded = not self.sources
        if not self._prompt_kept:  # else they may be told at any time
            self.prompt_logprobs, self.prompt_alternatives = [], []

    def place(self, pool: Pool, shares: bool) -> None:
        """Make the tables of this request, and name the full blocks of its prompt, if they may be shared."""
        self.tables = {group: Table(pool, group) for group in pool.blocks}
        adapter = 0 if self.adapter is None else self.adapter.number
        apart = json.dumps([adapter, self.serving.salt])  # what differs in it shares nothing
        self.names = chain(apart, self.prompts.keys(0), pool.size) if shares and not self.sources else []

    def name_blocks(self, start: int, stop: int, size: int) -> None:
        """Let others find the full blocks of the prompt among tokens `start` to `stop`, which were read."""
        for number in range(start // size, min(stop // size, len(self.names))):
            for table in self.tables.values():
                block = table.ids[number] if number < len(table.ids) else None
                if block is not None:
                    table.blocks.name(block, self.names[number])

    def adopt(self, most: int) -> int:
        """Share the blocks of the prompt that are in the pool, up to `most`; return how many they are."""
        tables, found = self.tables.values(), most if self.names else 0
        while found and not all(table.knows(self.names[:found]) for table in tables):
            found -= 1
        for table in tables:
            table.adopt(self.names[:found])
        return found

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
        return self.read >= len(self.prompt) and self.read == len(self.tokens) - 1

    @property
    def prefilling(self) -> bool:
        """Return True until the prompt is computed, or the request has ended."""
        return not self.done and self.read < len(self.prompt)

    def next_chunk(self, size: int) -> "Chunk[ServedSequence]":
        """Return the next tokens to run together.

        The prompt is prefilled in chunks that end where blocks do, and new tokens run one by one, so that
        the shapes that attention sees never depend on other requests, nor on having been preempted.
        """
        start, whole = self.planned, len(self.prompt)
        stop = min((start // size + 1) * size, whole) if start < whole else start + 1
        return Chunk(self, start, stop)

    def tokens_at(self, start: int, stop: int) -> list[int]:
        """Return the tokens that a step runs: of the text, or a draft token after it."""
        if start < len(self.tokens) or self.drafts is None:
            return self.tokens[start:stop]
        return self.drafts.found[start - len(self.tokens) :][:1]

    @property
    def proposal(self) -> Proposal:
        """The draft tokens that this step verifies."""
        return Proposal([] if self.drafts is None else self.drafts.found[: self.drafts.read])

    def end_drafts(self) -> tuple[int, int]:
        """Drop the keys of rejected draft tokens; return how many were verified, and how many accepted."""
        if self.drafts is None or not self.drafts.read:
            return 0, 0
        self.read = self.planned = min(self.read, len(self.tokens) - 1)
        read, drafts = self.proposal.tokens, self.drafts
        drafts.read, self.drafts = 0, None if self.done else drafts
        return len(read), agreed(read, self.tokens[drafts.start :])

    def cancel(self) -> None:
        """Cancel the request; the engine frees its room at its next step."""
        self._cancelled.set()

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

    def add(self, token: int, steps: int, reason: str | None = None) -> bool:
        """Add a token, and tell of it."""
        self.times.write()
        before = len(self.ids)
        goes_on = super().add(token, steps, reason)
        if self.on_update is not None and len(self.ids) > before:
            self.on_update(self, self.new)
        return goes_on

    @property
    def prompt_tokens(self) -> int:
        """Tokens to read: the prompt's, and its source's."""
        return len(self.prompt) + self.sources

    @property
    def _prompt_kept(self) -> bool:
        return len(self.prompt_alternatives) >= len(self.prompt) - 1

    def keep_prompt(self, logits: Tensor, start: int) -> None:
        """Keep the log-probabilities of the prompt's tokens after position `start`: logits [T, V]."""
        best = self.serving.prompt_logprobs
        following = self.prompt[start + 1 : start + 1 + len(logits)]
        if best is None or not following or self._prompt_kept:
            return
        tokens = torch.tensor(following, device=logits.device)
        values, others = logprobs_of(logits[: len(following)], tokens, best)
        self.prompt_logprobs += values
        self.prompt_alternatives += others

    def end(self, reason: str | None = None, error: Exception | None = None) -> None:
        """Give back the room, make the result, and tell of it."""
        self.stop_reason = reason or self.stop_reason
        rest = "" if self.stream is None else self.stream.finish()
        text = None if self.stream is None else self.stream.text
        self.result, self.error = generation_of(self, self.request, text), error
        self.times.ended = time.monotonic()
        for table in self.tables.values():
            table.clear()
        self.vectors, self.prompts = None, replace(self.prompts, vectors=None)
        self.denoising = iter(())
        self.states, self.adapter = {}, None  # the server remembers requests that have ended
        if self.drafts is not None and not self.drafts.read:  # else they are counted first
            self.drafts = None
        self._done.set()
        if self.on_update is not None:
            self.on_update(self, rest)


Plan = list[Chunk[ServedSequence]]  # what a step runs


def served_options(options: Mapping[str, Any], cache: str | None) -> dict[str, Any]:
    """Return the options of a request without `cache`, which holds for the whole engine.

    Refuse what no engine does for one request, and another cache than the engine's.
    """
    for name, value in options.items():
        nothing = (cache, None) if name == "cache" else (DEFAULTS.get(name), *UNUSED)
        why = OPTIONS[name].unserved if name in OPTIONS else ""
        refuse(why and value not in nothing, f"{name} {value} is not served: {why}")
    return {name: value for name, value in options.items() if name != "cache"}


def check_length(prompt: int, sources: int, new: int, longest: int) -> None:
    """Refuse a text that does not fit into the context; `sources`: tokens that an encoder reads."""
    if max(prompt + new, sources) > longest:
        raise RequestError(  # litellm knows OpenAI's words, and not its code
            f"this model's maximum context length is {longest} tokens, and the request has "
            f"{prompt + sources} in its prompt and asks for {new}: shorten one of them, or start the server "
            "with a larger --max-model-len, if the model can have it",
            "context_length_exceeded",
        )


def check_served(model: Transformer, longest: int) -> None:
    """Refuse a model that the engine cannot run, or not with a context of so many tokens."""
    positions = model.config.max_positions
    refuse(
        model.config.positions in TABLES and longest > positions,
        f"--max-model-len {longest} is more than the {positions} positions of this model's table: lower it",
    )
    refuse(
        min(model.config.main.capacities) < 1,
        "a model whose layers take some tokens alone (depth_capacity) is not served: use generate",
    )
    refuse(
        model.config.main.recalls,
        "a model whose tokens read the one before them (smear_gate, bigrams) is not served: use generate",
    )
    refuse(
        model.config.rotates_by_length,
        "a model whose rotary angles depend on the length of a call (rope_scaling dynamic, longrope) is not "
        "served: use generate",
    )


def plain_greedy(seqs: abc.Sequence[ServedSequence], logits: Tensor) -> list[Tensor | None]:
    """Return the best token of each text [1] that takes it without a rule: logits [B, V] at once."""
    best = argmax(logits)[:, None]  # B 1
    finite = logits.gather(-1, best).isnan().logical_not()[:, 0].tolist()
    best = best.cpu()  # at once, and not one by one
    takes = [fine and seq.sampler.plain_greedy for seq, fine in zip(seqs, finite)]
    return [token if fine else None for token, fine in zip(best, takes)]
