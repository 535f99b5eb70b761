"""What is asked of a generation, as one value: how tokens are chosen, searched for, stopped and reported.

The keywords of `Model.generate`, the options of the command and a JSON object all become a `Request` through
`make_request`, or by its constructor. Everything below reads the request. This file needs no PyTorch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from clearhead.core.config.typed import check_types, shaped
from clearhead.errors import ConfigError, InputError, nearest, refuse

MAX_NEW_TOKENS = 50
SINKS = 4  # first tokens that a text that streams keeps; more change little (StreamingLLM)
POSITIVE = math.ulp(0.0)  # the smallest number above 0
FROM_0, FROM_1 = "must be a whole number, 0 or more", "must be a whole number, 1 or more"
# Of each field the least and the greatest value, and what is allowed, in words.
BOUNDS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, math.inf, "is negative: 0 is greedy, 1 the model's own distribution"),
    "top_k": (0, math.inf, FROM_0),
    "top_p": (POSITIVE, 1, "is outside (0, 1]: 1 keeps every token"),
    "min_p": (0, 1, "is outside [0, 1]: 0 keeps every token"),
    "typical_p": (POSITIVE, 1, "is outside (0, 1]: 1 keeps every token"),
    "repetition_penalty": (POSITIVE, math.inf, "must be above 0: 1 is off"),
    "no_repeat_ngram": (0, math.inf, FROM_0),
    "no_repeat_source_ngram": (0, math.inf, FROM_0),
    "min_new_tokens": (0, math.inf, FROM_0),
    "min_length": (0, math.inf, FROM_0),
    "seed": (-(2**63), 2**64 - 1, "does not fit into 64 bits: choose a number from 0 to 2**64 - 1"),
    "max_new_tokens": (1, math.inf, FROM_1),
    "num_beams": (1, math.inf, FROM_1),
    "num_return": (1, math.inf, FROM_1),
    "num_beam_groups": (1, math.inf, FROM_1),
    "length_penalty": (-20, 20, "is outside [-20, 20]: it is an exponent, 1 takes the mean"),
    "lookup": (0, math.inf, FROM_0),
    "draft_tokens": (1, math.inf, FROM_1),
    "sinks": (0, math.inf, FROM_0),
    "early_exit": (POSITIVE, 1, "is outside (0, 1]: it is a probability, and at 1 no layer is skipped"),
    "exit_from": (1, math.inf, FROM_1),
    "stream_window": (1, math.inf, FROM_1),
}
# Fields that may be given as any sequence.
SEQUENCES = {"allowed", "banned", "banned_first", "banned_sequences", "forced_last", "stop", "stop_tokens"}
FORMS = ("json_schema", "regex", "grammar")  # what a text may be held to
# What needs a text before its end.
WATCHED = ("stop", "logprobs", "alternatives", "reuse", "lookup", *FORMS)
SEARCH = ("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy and change nothing."""

    temperature: float = 0.0  # 0: the best token; 1: the model's own distribution
    top_k: int = 0  # keep the k best tokens; 0: all
    top_p: float = 1.0  # keep the best tokens that together hold this much probability; 1: all
    min_p: float = 0.0  # keep tokens with this share of the best one's probability; 0: all
    typical_p: float = 1.0  # keep the tokens nearest to the expected surprise, up to this probability; 1: all
    repetition_penalty: float = 1.0  # above 1: make tokens of the prompt and of the text less likely
    presence_penalty: float = 0.0  # subtract from the logit of every token that was generated
    frequency_penalty: float = 0.0  # subtract for each time a token was generated
    no_repeat_ngram: int = 0  # never write the same n tokens twice; 0: off
    allowed: tuple[int, ...] | None = None  # ids of the only tokens to choose from
    banned: tuple[int, ...] = ()  # ids of tokens that are never chosen
    banned_first: tuple[int, ...] = ()  # ids of tokens that no text begins with
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # sequences of ids that are never completed
    no_repeat_source_ngram: int = 0  # never write n tokens of the source, or of the prompt; 0: off
    min_new_tokens: int = 0  # new tokens before a text may end
    min_length: int = 0  # tokens of prompt and text before it may end; min_new_tokens goes before it
    forced_first: int | None = None  # id of the first new token, after a prompt of one token
    forced_last: tuple[int, ...] = ()  # ids of which one is written where a text has its full length
    json_schema: str | Mapping[str, Any] | None = None  # write JSON of this schema, without white space
    regex: str | None = None  # write a text that this regular expression matches as a whole
    grammar: str | None = None  # write a text of this grammar, in the notation of Lark or GBNF

    def __post_init__(self) -> None:
        for name in SEQUENCES & vars(self).keys():
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif value is not None:
                listed = value.tolist() if hasattr(value, "tolist") else list(value)
                object.__setattr__(self, name, shaped(listed, tuple))
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        try:
            check_types(self)
        except ConfigError as error:
            raise InputError(str(error)) from None
        for name, (least, most, allowed) in BOUNDS.items():
            value = getattr(self, name, None)
            refuse(value is not None and not least <= value <= most, f"{name} {value} {allowed}")
        refuse(() in self.banned_sequences, "banned_sequences has an empty one: give each one id at least")
        refuse(
            self.allowed is not None and set(self.allowed) <= set(self.banned),
            "allowed minus banned leaves no token to choose from",
        )
        forms = [name for name in FORMS if getattr(self, name) is not None]
        refuse(len(forms) > 1, f"{' and '.join(forms)} were given: a text has one form")
        refuse(
            forms and self.forced_last,
            f"forced_last with {', '.join(forms)} would end a text before its form does: leave one out",
        )

    @property
    def form(self) -> tuple[str, str] | None:
        """The form that a text is held to: which of the three fields, and its value."""
        return next(((name, getattr(self, name)) for name in FORMS if getattr(self, name) is not None), None)

    @property
    def restricts(self) -> bool:
        """Return True where a row may be left without any token."""
        removed = (self.banned, self.banned_first, self.banned_sequences, self.forced_last, self.min_length)
        ngrams = (self.no_repeat_ngram, self.no_repeat_source_ngram, self.min_new_tokens)
        chosen = (self.allowed, self.forced_first, self.form)
        return any(one is not None for one in chosen) or any((*removed, *ngrams))

    @property
    def looks_back(self) -> bool:
        """Return True where a rule depends on the tokens so far."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        ngrams = (self.no_repeat_ngram, self.no_repeat_source_ngram)
        longer = any(len(ids) > 1 for ids in self.banned_sequences)
        return longer or self.repetition_penalty != 1 or any((*penalties, *ngrams))


@dataclass(frozen=True, kw_only=True)
class Request(Sampling):
    """One generation: sampling, search, stopping, limits, reports and speed."""

    max_new_tokens: int = MAX_NEW_TOKENS  # new tokens of each text at most
    seed: int = 0  # seed of the draws of each text
    num_beams: int = 1  # search for the best text with this many beams; 1: no search
    num_return: int = 1  # how many of the best beams to give
    length_penalty: float = 1.0  # of beams: above 0 favours long texts, below 0 short ones
    early_stopping: bool | Literal["never"] = False  # of beams: end once enough are found; never: no loss
    num_beam_groups: int = 1  # of beams: groups, each kept from the tokens of those before it
    diversity_penalty: float = 0.0  # of groups: subtract for each beam of an earlier group with the token
    renormalize: bool = False  # of beams: log-probabilities add up to 1 again after penalties and bans
    stop: tuple[str, ...] = ()  # texts that end the generation; they are not part of the result
    stop_tokens: tuple[int | str, ...] = ()  # further tokens that end the generation, by name or id
    seconds: float | None = None  # stop after this time
    # A text too long for the model: refuse it, cut its prompt (window), read its last tokens anew for each
    # token (slide), or keep its first and its last ones alone (stream).
    overflow: Literal["refuse", "window", "slide", "stream"] = "refuse"
    sinks: int | None = None  # of stream: how many of the first tokens to keep; default: 4
    stream_window: int | None = None  # of stream: tokens to keep, sinks too; default: the model's positions
    logprobs: bool = False  # report the log-probability of each new token
    alternatives: int = 0  # report so many of the best tokens at each step
    reuse: bool = False  # keep what is read: the next prompt is read from where it differs
    lookup: int = 0  # guess so many tokens at a time from the text itself: the same text, sooner; 0: off
    draft_tokens: int = 4  # how many tokens a draft model guesses at a time
    compile: bool | None = None  # compile the step of a token; None: only record it, on a GPU; False: neither
    cache: Literal["int8"] | None = None  # keep keys and values in 8 bits: a quarter of the memory of float32
    early_exit: float | None = None  # skip the layers left once the best token is more probable than this
    exit_from: int | None = None  # of early_exit: ask first after so many layers; default: half

    def __post_init__(self) -> None:
        refuse(
            self.overflow not in ("refuse", "window", "slide", "stream"),
            f'overflow "{self.overflow}" is not known: choose slide, stream, refuse or window',
        )
        refuse(self.cache not in (None, "int8"), f'cache "{self.cache}" is not known: choose int8')
        super().__post_init__()
        for name in ("sinks", "stream_window"):
            value = getattr(self, name)
            refuse(
                value is not None and self.overflow != "stream",
                f'{name} {value} with overflow "{self.overflow}": it belongs to overflow "stream"',
            )
        refuse(
            self.num_return > self.num_beams,
            f"num_return {self.num_return} is more than num_beams {self.num_beams}: raise num_beams",
        )
        refuse(
            self.num_beams % self.num_beam_groups,
            f"num_beams {self.num_beams} is not divisible by num_beam_groups {self.num_beam_groups}: "
            "change one of them",
        )
        refuse(
            self.diversity_penalty < 0 or (self.diversity_penalty and self.num_beam_groups == 1),
            f"diversity_penalty {self.diversity_penalty} must be 0 or more, "
            "and needs num_beam_groups above 1",
        )
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
            value = getattr(self, name)
            refuse(
                self.num_beams > 1 and value != getattr(Sampling, name),
                f"{name} {value} with num_beams {self.num_beams}: "
                "beam search draws nothing, so leave one of them out",
            )
        refuse(
            self.exit_from is not None and self.early_exit is None,
            f"exit_from {self.exit_from} without early_exit: say how certain the model must be to leave",
        )
        self.check_hooks()

    def check_hooks(self, **hooks: object) -> None:
        """Refuse what does not go together; `hooks` are options that are not data, such as `on_text`."""
        watched = {name: getattr(self, name) for name in WATCHED} | hooks
        for name, value in watched.items():
            refuse(
                self.num_beams > 1 and value not in (None, False, 0, ()),
                f"{name} with num_beams {self.num_beams}: beams are known only at the end, "
                "so leave one of them out",
            )
        beams, draft = self.num_beams > 1, hooks.get("draft")
        whole = {"num_beams": beams, "lookup": self.lookup, "reuse": self.reuse, "draft": draft}
        for name, value in whole.items():
            refuse(
                self.overflow == "stream" and value not in (None, False, 0),
                f'{name} with overflow "stream", which forgets what it needs: leave one of them out',
            )
            refuse(
                self.early_exit is not None and value not in (None, False, 0),
                f"{name} with early_exit, which skips layers that it needs: leave one of them out",
            )
            refuse(
                self.cache is not None and value not in (None, False, 0),
                f'{name} with cache "{self.cache}", which it has no form for: leave one of them out',
            )
        others = {
            "early_exit": self.early_exit,
            "compile": self.compile,
            "overflow": self.overflow == "stream",
        }
        for name, value in others.items():
            refuse(
                self.cache is not None and value not in (None, False),
                f'{name} {getattr(self, name)} with cache "{self.cache}": leave one of them out',
            )
        refuse(
            self.early_exit is not None and self.compile,
            "compile with early_exit, whose layers are chosen on the host: leave one of them out",
        )
        refuse(
            self.lookup and draft is not None,
            "lookup and draft both guess what comes next: choose one of them",
        )

    @property
    def group_size(self) -> int:
        """Beams of each group."""
        return self.num_beams // self.num_beam_groups

    @property
    def reports(self) -> bool:
        """Return True where log-probabilities are reported."""
        return self.logprobs or self.alternatives > 0


class RequestOptions(TypedDict, total=False):
    """Fields of `Request` as keywords, with what each may be given as."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram: int
    allowed: Sequence[int] | None
    banned: Sequence[int]
    banned_first: Sequence[int]
    banned_sequences: Sequence[Sequence[int]]
    no_repeat_source_ngram: int
    min_new_tokens: int
    min_length: int
    forced_first: int | None
    forced_last: Sequence[int]
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    seed: int
    early_stopping: bool | Literal["never"]
    num_beam_groups: int
    diversity_penalty: float
    renormalize: bool
    stop: str | Sequence[str]
    stop_tokens: Sequence[int | str]
    seconds: float | None
    overflow: Literal["refuse", "window", "slide", "stream"]
    sinks: int | None
    stream_window: int | None
    logprobs: bool
    alternatives: int
    reuse: bool
    lookup: int
    draft_tokens: int
    compile: bool | None
    cache: Literal["int8"] | None
    early_exit: float | None
    exit_from: int | None


def make_request(options: Mapping[str, Any]) -> Request:
    """Make a request of options by name, and name the nearest one where a name is unknown."""
    known = sorted(entry.name for entry in fields(Request))
    for name in options:
        if name not in known:
            raise InputError(
                f'unknown option "{name}"{nearest(name, known)}: generate takes {", ".join(known)}'
            )
    return Request(**options)
