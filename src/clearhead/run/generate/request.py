"""Every option of a generation, stated once: its type, default, bounds, help, and its name in each front end.

A field of `Request` is the declaration. From it come the keywords of `Model.generate` (`RequestOptions`,
compared with it by a test), the flags of the command (`app/commands/common.py`), the fields of an HTTP body
(`run/serve/protocol.py`), the rules of a model's own (`own_rules.py`), what is refused, and the table
of the documentation. Generation and serving read the request alone. This file needs no PyTorch.

Shapes: B rows, V vocabulary.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from clearhead.errors import ConfigError, InputError, check_types, nearest, refuse, shaped

if TYPE_CHECKING:
    from torch import Tensor

SINKS = 4  # first tokens that a text that streams keeps; more change little (StreamingLLM)
ANSWER_TOKENS = 512  # new tokens of a chat's answer at most, where the caller does not say
REMOVED = float("-inf")  # the logit of a token that must not be chosen
GROUPS = {  # of options, by what they are about, in the order of the command's help
    "sampling": "How the next token is drawn.",
    "stopping": "When a text ends.",
    "beam": "Beam search for the most probable text, in place of sampling.",
    "repetition": "Penalties on tokens that were generated before.",
    "token": "Tokens that must, or must not, be generated.",
    "structured": "Structured output: JSON schema, regular expression or grammar.",
    "infilling": "Fill-in-the-middle, by models of code.",
    "diffusion": "Denoising, by masked and block diffusion language models.",
    "overflow": "Texts longer than the model's context.",
    "speculative": "Speculative decoding: the same text in fewer steps.",
    "speed": "Compilation, KV cache quantization, early exit; only early exit may change the text.",
}


class Bounds(NamedTuple):
    """The least and the greatest value of an option, and what is allowed, in words."""

    least: float
    most: float
    rule: str
    above: bool = False  # the least value itself is not allowed

    def allow(self, value: float) -> bool:
        """Return True for a value within the bounds."""
        return (self.least < value if self.above else self.least <= value) and value <= self.most


MOST = 2**53  # of tokens, beams and the like: what every reader of JSON takes for the same number
FROM_0 = Bounds(0, MOST, "must be a whole number, 0 or more, up to 2**53")
FROM_1 = Bounds(1, MOST, "must be a whole number, 1 or more, up to 2**53")
SHARE = Bounds(0, 1, "is outside (0, 1]: 1 keeps every token", above=True)
PENALTY = Bounds(-100, 100, "is outside [-100, 100]: 0 is off")
BIAS = Bounds(-100, 100, "is outside [-100, 100]: -100 all but bans a token, 100 all but forces it")


class Option(NamedTuple):
    """What an option declares besides its type and its default."""

    help: str
    group: str = ""  # of GROUPS; "": the command does not have it
    bounds: Bounds | None = None
    flag: str = ""  # its name in the command, where that is another
    http: str = ""  # its name in the body of an HTTP request; "": none
    own: str = ""  # its name in generation_config.json; "": that file does not decide it
    unserved: str = ""  # why a server refuses it in a request, and what to do; "": it does not
    keep: "Callable[[Tensor, Any], Tensor] | None" = None  # removes tokens from logits [B, V] / temperature


def option(default: Any, help: str, group: str = "", bounds: Bounds | None = None, **more: Any) -> Any:
    """Declare an option of a generation: a field with its default and an `Option`."""
    return field(default=default, metadata={"option": Option(help, group, bounds, **more)})


# Which tokens of a distribution may be drawn. No row is left empty; all but typical keep its best token.


def keep_top_k(logits: "Tensor", k: int) -> "Tensor":
    """Keep the k best tokens, and those equal to the k-th: [B, V] -> [B, V]."""
    if k < 1 or k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k, dim=-1).values[..., -1:], REMOVED)


def keep_top_p(logits: "Tensor", p: float) -> "Tensor":
    """Keep the fewest best tokens that together hold probability p: [B, V] -> [B, V]."""
    if p >= 1:
        return logits
    ordered, index = logits.sort(dim=-1, descending=True)
    return _keep(logits, index, ordered.double().softmax(-1), p)


def keep_min_p(logits: "Tensor", p: float) -> "Tensor":
    """Keep tokens with at least p times the best one's probability: [B, V] -> [B, V]."""
    if p <= 0:
        return logits
    least = logits.amax(-1, keepdim=True).double() + math.log(p)
    return logits.masked_fill(logits.double() < least, REMOVED)


def keep_typical(logits: "Tensor", p: float) -> "Tensor":
    """Keep the tokens nearest to the expected surprise, up to probability p: [B, V] -> [B, V]."""
    if p >= 1:
        return logits
    log_probability = logits.double().log_softmax(-1)
    probability = log_probability.exp()
    expected = -(probability * log_probability.masked_fill(probability == 0, 0.0)).sum(-1, keepdim=True)
    index = (-log_probability - expected).abs().argsort(dim=-1, stable=True)
    return _keep(logits, index, probability.gather(-1, index), p)


def _keep(logits: "Tensor", index: "Tensor", probability: "Tensor", p: float) -> "Tensor":
    """Keep the tokens at `index` [B, V] until their `probability` [B, V] adds up to p; the first always."""
    kept = probability.cumsum(-1) - probability < p  # what the tokens before each hold
    kept[..., 0] = True
    return logits.masked_fill(~kept.new_zeros(kept.shape).scatter(-1, index, kept), REMOVED)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation: sampling, search, stopping, limits, reports and speed.

    The defaults are greedy and change nothing.
    """

    # fmt: off
    temperature: float = option(
        0.0, "0: the best token; 1: the model's own distribution", "sampling",
        Bounds(0, 100, "is outside [0, 100]: 0 is greedy, 1 the model's own distribution"),
        http="temperature",
    )
    top_k: int = option(
        0, "keep the k best tokens; 0: all", "sampling", FROM_0, http="top_k", keep=keep_top_k
    )
    top_p: float = option(
        1.0, "keep the best tokens that together hold this much probability; 1: all", "sampling", SHARE,
        http="top_p", keep=keep_top_p,
    )
    min_p: float = option(
        0.0, "keep tokens with this share of the best one's probability; 0: all", "sampling",
        Bounds(0, 1, "is outside [0, 1]: 0 keeps every token"), http="min_p", keep=keep_min_p,
    )
    typical_p: float = option(
        1.0, "keep the tokens nearest to the expected surprise, up to this probability; 1: all", "sampling",
        SHARE, http="typical_p", keep=keep_typical,
    )
    seed: int = option(
        0, "seed of the draws of each text", "sampling",
        Bounds(-(2**63), 2**64 - 1, "does not fit into 64 bits: choose a number from 0 to 2**64 - 1"),
        http="seed",
    )

    max_new_tokens: int = option(50, "new tokens of each text at most", "stopping", FROM_1, http="max_tokens")
    min_new_tokens: int = option(
        0, "new tokens before a text may end", "stopping", FROM_0, http="min_tokens", own="min_new_tokens"
    )
    min_length: int = option(
        0, "tokens of prompt and text before it may end; min_new_tokens goes before it", "stopping", FROM_0,
        own="min_length",
    )
    stop: tuple[str, ...] = option(
        (), "texts that end the generation; they are not part of the result", "stopping", http="stop",
        own="stop_strings",
    )
    stop_tokens: tuple[int | str, ...] = option(
        (), "further tokens that end the generation, by name or id", "stopping", flag="stop-token",
        http="stop_token_ids",
    )
    seconds: float | None = option(
        None, "stop after this time", "stopping",
        Bounds(0, math.inf, "is negative: give a number of seconds"), http="seconds", own="max_time",
    )

    num_beams: int = option(
        1, "search for the best text with this many beams; 1: no search", "beam", FROM_1, flag="beams",
        own="num_beams", unserved="texts of a server grow by one token at a time: ask generate for beams",
    )
    num_return: int = option(
        1, "how many of the best beams to give", "beam", FROM_1,
        unserved="a server has no beams: send n for several texts",
    )
    length_penalty: float = option(
        1.0, "of beams: above 0 favours long texts, below 0 short ones", "beam",
        Bounds(-20, 20, "is outside [-20, 20]: it is an exponent, 1 takes the mean"), own="length_penalty",
    )
    early_stopping: bool | Literal["never"] = option(
        False, "of beams: end once enough are found; never: no loss", "beam", own="early_stopping"
    )
    num_beam_groups: int = option(
        1, "of beams: groups, each kept from the tokens of those before it", "beam", FROM_1,
        own="num_beam_groups",
    )
    diversity_penalty: float = option(
        0.0, "of groups: subtract for each beam of an earlier group with the token", "beam",
        Bounds(0, 100, "is outside [0, 100]: 0 is off"), own="diversity_penalty",
    )
    renormalize: bool = option(
        False, "of beams: log-probabilities add up to 1 again after penalties and bans",
        own="renormalize_logits",
    )

    repetition_penalty: float = option(
        1.0, "above 1: make tokens of the prompt and of the text less likely", "repetition",
        Bounds(0, 100, "must be above 0, and at most 100: 1 is off", above=True),
        http="repetition_penalty", own="repetition_penalty",
    )
    presence_penalty: float = option(
        0.0, "subtract from the logit of every token that was generated", "repetition", PENALTY,
        http="presence_penalty",
    )
    frequency_penalty: float = option(
        0.0, "subtract for each time a token was generated", "repetition", PENALTY, http="frequency_penalty"
    )
    no_repeat_ngram: int = option(
        0, "never generate the same n tokens twice; 0: off", "repetition", FROM_0, http="no_repeat_ngram",
        own="no_repeat_ngram_size",
    )
    no_repeat_source_ngram: int = option(
        0, "never generate n tokens of the source, or of the prompt; 0: off", "repetition", FROM_0,
        own="encoder_no_repeat_ngram_size",
    )

    allowed: tuple[int, ...] | None = option(None, "ids of the only tokens to choose from", "token")
    banned: tuple[int, ...] = option(
        (), "ids of tokens that are never chosen", "token", own="suppress_tokens"
    )
    banned_first: tuple[int, ...] = option(
        (), "ids of tokens that no text begins with", "token", own="begin_suppress_tokens"
    )
    banned_sequences: tuple[tuple[int, ...], ...] = option(
        (), "sequences of ids that are never completed", own="bad_words_ids"
    )
    logit_bias: tuple[tuple[int, float], ...] = option(
        (), "add to the logits of tokens, by id; from -100, which all but bans, to 100", "token",
        http="logit_bias",
    )
    forced_first: int | None = option(
        None, "id of the first new token, after a prompt of one token", "token", own="forced_bos_token_id"
    )
    forced_last: tuple[int, ...] = option(
        (), "ids of which one is generated where a text has its full length", "token",
        own="forced_eos_token_id",
    )

    json_schema: str | Mapping[str, Any] | None = option(
        None, "generate JSON of this schema, without white space", "structured", http="json_schema"
    )
    regex: str | None = option(
        None, "generate a text that this regular expression matches as a whole", "structured", http="regex"
    )
    grammar: str | None = option(
        None, "generate a text of this grammar, in the notation of Lark or GBNF", "structured", http="grammar"
    )
    tool_calls: str | None = option(None, "generate calls of tools; `Model.chat` states it by its `tools`")
    skip_special_tokens: bool = option(
        True, "leave special tokens out of the text", http="skip_special_tokens"
    )

    suffix: str | None = option(
        None, "the text that follows: generate what stands between the prompt and it", "infilling",
        http="suffix",
    )

    denoising_steps: int | None = option(
        None, "runs of the model for each block of masks; default: one for each token", "diffusion", FROM_1,
        http="denoising_steps",
    )
    unmasking: Literal["confidence", "random"] = option(
        "confidence", "which tokens a step keeps: the most probable ones, or any; others are masked again",
        "diffusion", http="unmasking",
    )
    mask_schedule: Literal["linear", "cosine"] = option(
        "linear", "how many tokens a step keeps: as many in each (linear), or few at first (cosine)",
        "diffusion", http="mask_schedule",
    )
    block_length: int | None = option(
        None, "tokens that are denoised together; default: all, or those that the model was built for",
        "diffusion", FROM_1, http="block_length",
    )

    overflow: Literal["refuse", "window", "slide", "stream"] = option(
        "refuse", "a text too long for the model: refuse it, cut its prompt (window), compute its last "
        "tokens anew for each token (slide), or keep its first and its last ones alone (stream)", "overflow",
    )
    sinks: int | None = option(
        None, "of stream: how many of the first tokens to keep; default: 4", "overflow", FROM_0
    )
    stream_window: int | None = option(
        None, "of stream: tokens to keep, sinks too; default: the model's positions", "overflow", FROM_1
    )

    logprobs: bool = option(False, "report the log-probability of each new token")
    alternatives: int = option(0, "report so many of the best tokens at each step")
    reuse: bool = option(
        False, "keep the cache: the next prompt is computed from where it differs; a server always does"
    )
    lookup: int = option(
        0, "prompt lookup: draft this many tokens at a time from the text itself; 0: off", "speculative",
        FROM_0, http="lookup",
    )
    draft_tokens: int = option(
        4, "tokens that --draft proposes at a time", "speculative", FROM_1, http="draft_tokens"
    )
    compile: bool | None = option(
        None, "torch.compile the decode step; default: only capture a CUDA graph, on a GPU", "speed",
        unserved="a server decides how its steps run: leave it out",
    )
    cache: Literal["int8"] | None = option(
        None, "quantize the KV cache to 8 bits: a quarter of the memory of float32", "speed",
        unserved="a server keeps all keys in one way: start it with --cache int8",
    )
    early_exit: float | None = option(
        None, "skip the layers left once the best token is more probable than this", "speed",
        Bounds(0, 1, "is outside (0, 1]: it is a probability, and at 1 no layer is skipped", above=True),
        unserved="the texts of a step of a server go through all layers together: ask generate for it",
    )
    exit_from: int | None = option(
        None, "of early_exit: ask first after so many layers; default: half", "speed", FROM_1
    )
    # fmt: on

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        for name in SEQUENCES:
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif isinstance(value, Iterable):
                listed = value.tolist() if hasattr(value, "tolist") else list(value)
                object.__setattr__(self, name, shaped(listed, tuple))
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        try:
            check_types(self)
        except ConfigError as error:
            raise InputError(str(error)) from None
        for name, stated in OPTIONS.items():
            value = getattr(self, name)
            if stated.bounds is not None and value is not None:
                refuse(not stated.bounds.allow(value), f"{name} {value} {stated.bounds.rule}")
        self._check_needs()
        self.check_hooks()

    def _check_needs(self) -> None:
        """Refuse an option without what it needs."""
        refuse(() in self.banned_sequences, "banned_sequences has an empty one: give each one id at least")
        for token, bias in self.logit_bias:
            refuse(not BIAS.allow(bias), f"logit_bias {bias} of token {token} {BIAS.rule}")
        refuse(
            self.allowed is not None and set(self.allowed) <= set(self.banned),
            "allowed minus banned leaves no token to choose from",
        )
        for name in ("sinks", "stream_window"):
            value = getattr(self, name)
            refuse(
                value is not None and self.overflow != "stream",
                f'{name} {value} with overflow "{self.overflow}": it belongs to overflow "stream"',
            )
        refuse(
            self.suffix and self.overflow != "refuse",
            f'suffix with overflow "{self.overflow}": a prompt with a suffix is never cut: leave one out',
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
            self.diversity_penalty and self.num_beam_groups == 1,
            f"diversity_penalty {self.diversity_penalty} needs num_beam_groups above 1",
        )
        refuse(
            self.exit_from is not None and self.early_exit is None,
            f"exit_from {self.exit_from} without early_exit: say how certain the model must be to leave",
        )

    def check_hooks(self, **hooks: object) -> None:
        """Refuse options that exclude each other; `hooks` are those that are not data, such as `on_text`."""
        in_use = {name: value for name, value in vars(self).items() if value not in (DEFAULTS[name], *UNUSED)}
        in_use |= {name: value for name, value in hooks.items() if value is not None}
        if self.overflow != "stream":
            in_use.pop("overflow", None)
        for name, others, why in CONFLICTS:
            for other in others if name in in_use else ():
                value = in_use[name]
                shown = "" if name in hooks else f' "{value}"' if isinstance(value, str) else f" {value}"
                refuse(
                    other != name and other in in_use,
                    f"{other} with {name}{shown}: {why}: leave one of them out",
                )

    @property
    def constraint(self) -> tuple[str, str] | None:
        """What the whole text is held to: which of the three options, and its value."""
        return next(
            ((name, getattr(self, name)) for name in CONSTRAINTS if getattr(self, name) is not None), None
        )

    @property
    def restricts(self) -> bool:
        """Return True where a row may be left without any token."""
        removed = (self.banned, self.banned_first, self.banned_sequences, self.forced_last, self.min_length)
        ngrams = (self.no_repeat_ngram, self.no_repeat_source_ngram, self.min_new_tokens)
        chosen = (self.allowed, self.forced_first, self.constraint)
        return any(value is not None for value in chosen) or any((*removed, *ngrams))

    @property
    def looks_back(self) -> bool:
        """Return True where a rule depends on the tokens so far."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        ngrams = (self.no_repeat_ngram, self.no_repeat_source_ngram)
        longer = any(len(ids) > 1 for ids in self.banned_sequences)
        return longer or self.repetition_penalty != 1 or any((*penalties, *ngrams))

    @property
    def plain_greedy(self) -> bool:
        """Return True where the best token is taken, without any rule."""
        return not (self.temperature or self.logit_bias or self.looks_back or self.restricts)

    @property
    def group_size(self) -> int:
        """Beams of each group."""
        return self.num_beams // self.num_beam_groups

    @property
    def reports(self) -> bool:
        """Return True where log-probabilities are reported."""
        return self.logprobs or self.alternatives > 0


class RequestOptions(TypedDict, total=False):
    """The fields of `Request` as keywords, for editors and type checkers; a sequence may be any."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    seed: int
    min_new_tokens: int
    min_length: int
    stop: str | Sequence[str]
    stop_tokens: Sequence[int | str]
    seconds: float | None
    early_stopping: bool | Literal["never"]
    num_beam_groups: int
    diversity_penalty: float
    renormalize: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram: int
    no_repeat_source_ngram: int
    allowed: Sequence[int] | None
    banned: Sequence[int]
    banned_first: Sequence[int]
    banned_sequences: Sequence[Sequence[int]]
    logit_bias: Mapping[int, float]
    forced_first: int | None
    forced_last: Sequence[int]
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    tool_calls: str | None
    skip_special_tokens: bool
    suffix: str | None
    denoising_steps: int | None
    unmasking: Literal["confidence", "random"]
    mask_schedule: Literal["linear", "cosine"]
    block_length: int | None
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


Sampling = Request  # its former name, for those who only sample
OPTIONS: dict[str, Option] = {entry.name: entry.metadata["option"] for entry in fields(Request)}
DEFAULTS: dict[str, Any] = {entry.name: entry.default for entry in fields(Request)}
UNUSED = (None, False, 0, ())  # values that ask for nothing
SEQUENCES = [entry.name for entry in fields(Request) if "tuple[" in str(entry.type)]
FILTERS = {name: stated.keep for name, stated in OPTIONS.items() if stated.keep is not None}  # in this order
DRAWING = ("temperature", *FILTERS)
CONSTRAINTS = [name for name, stated in OPTIONS.items() if stated.group == "structured"] + ["tool_calls"]
DIFFUSION = [name for name, stated in OPTIONS.items() if stated.group == "diffusion"]
SEARCH = [name for name, stated in OPTIONS.items() if stated.group == "beam" and stated.own]
NGRAMS = ("no_repeat_ngram", "no_repeat_source_ngram")
HOOKS = ("on_text", "cancel", "draft")  # what a generation calls or runs; none of it is data
WATCHED = ("stop", "logprobs", "alternatives", "reuse", "lookup", *CONSTRAINTS, *HOOKS)
WHOLE = ("num_beams", "lookup", "reuse", "draft")  # what needs every key of a cache that steps back
# An option, those that it excludes, and why.
CONFLICTS: list[tuple[str, Sequence[str], str]] = [
    ("num_beams", WATCHED, "beams are known only at the end"),
    ("num_beams", DRAWING, "beam search draws nothing"),
    ("overflow", WHOLE, "the cache forgets what it needs"),
    ("early_exit", WHOLE, "layers that it needs are skipped"),
    ("early_exit", ["compile"], "layers are chosen on the host"),
    ("cache", (*WHOLE, "early_exit", "compile", "overflow"), "it works on keys and values as they are"),
    ("draft", ["lookup"], "both propose draft tokens"),
    *((name, CONSTRAINTS, "a text is held to one of them") for name in CONSTRAINTS),
    *((name, ["forced_last"], "it could end a text before it is complete") for name in CONSTRAINTS),
]


def make_request(options: Mapping[str, Any]) -> Request:
    """Make a request of options by name, and name the nearest one where a name is unknown."""
    for name in options:
        if name not in OPTIONS:
            known = sorted(OPTIONS)
            raise InputError(
                f'unknown option "{name}"{nearest(name, known)}: generate takes {", ".join(known)}'
            )
    return Request(**options)
