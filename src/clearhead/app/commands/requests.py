"""The options of `clearhead generate`, as a request that the model's own settings may still complete.

`CommandRequest` is the request, and `GroupedRequest` the same fields in groups, as the help shows them.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Fixed, OmitArgPrefixes, SuppressFixed

from clearhead.app.commands.common import option
from clearhead.run.generate.request import Request, Sampling

# By the name of a group: what its options are about, and their fields.
GROUPS = {
    "sampling": ("How the next token is drawn.", "temperature top_k top_p min_p typical_p seed"),
    "length": (
        "Where a text ends.",
        "max_new_tokens min_new_tokens min_length stop stop_tokens seconds",
    ),
    "beam": (
        "Search for the most probable text, in place of drawing.",
        "num_beams num_return length_penalty early_stopping num_beam_groups diversity_penalty",
    ),
    "repetition": (
        "What was written becomes less probable.",
        "repetition_penalty presence_penalty frequency_penalty no_repeat_ngram no_repeat_source_ngram",
    ),
    "token": (
        "Tokens that must, or must not, be written.",
        "allowed banned banned_first forced_first forced_last",
    ),
    "format": ("What the text as a whole looks like.", "json_schema regex grammar"),
    "overflow": ("Texts longer than the model reads.", "overflow sinks stream_window"),
    "speed": (
        "The same text, sooner; early exits may change it.",
        "lookup draft_tokens compile cache early_exit exit_from",
    ),
}


@dataclass(frozen=True, kw_only=True)
class CommandRequest(Request):
    """A request as the command's options give it; the help of an option is the comment beside its field.

    Options that are None are the model's own, as far as generation_config.json has them.
    """

    num_beams: Annotated[
        int | None,
        option("search with this many beams; 1: no search; default: the model's own", name="beams"),
    ] = None  # type: ignore[assignment]
    length_penalty: Annotated[
        float | None,
        option("of beams: above 0 favours long texts, below 0 short ones; default: the model's own"),
    ] = None  # type: ignore[assignment]
    early_stopping: Annotated[
        bool | Literal["never"] | None,
        option("of beams: end once enough are found; never: no loss; default: the model's own"),
    ] = None  # type: ignore[assignment]
    repetition_penalty: Annotated[
        float | None,
        option("above 1: make tokens of the prompt and of the text less likely; default: the model's own"),
    ] = None  # type: ignore[assignment]
    no_repeat_ngram: Annotated[
        int | None, option("never write the same n tokens twice; default: the model's own")
    ] = None  # type: ignore[assignment]
    no_repeat_source_ngram: Annotated[
        int | None, option("never write n tokens of the source, or of the prompt; default: the model's own")
    ] = None  # type: ignore[assignment]
    overflow: Annotated[
        Literal["refuse", "window", "slide", "stream"] | None,
        option(
            "a text too long: refuse it, cut its prompt (window), read its last tokens anew (slide), "
            "or keep its first and last ones (stream); default: slide if positions are learned, else refuse"
        ),
    ] = None  # type: ignore[assignment]
    min_new_tokens: Annotated[
        int | None, option("new tokens before a text may end; default: the model's own")
    ] = None  # type: ignore[assignment]
    min_length: Annotated[
        int | None, option("tokens of prompt and text before it may end; default: the model's own")
    ] = None  # type: ignore[assignment]
    stop_tokens: Annotated[
        tuple[str, ...], option("further tokens that end the generation, by name", name="stop-token")
    ] = ()
    json_schema: Annotated[str | None, option("write JSON of this schema, without white space")] = None
    compile: Annotated[
        bool | None, option("compile the step of a token; default: only record it, on a GPU")
    ] = None
    banned_sequences: SuppressFixed[Fixed[tuple[tuple[int, ...], ...]]] = ()
    renormalize: SuppressFixed[Fixed[bool]] = False
    logprobs: SuppressFixed[Fixed[bool]] = False
    alternatives: SuppressFixed[Fixed[int]] = 0
    reuse: SuppressFixed[Fixed[bool]] = False  # between the calls of one process

    def __post_init__(self) -> None:
        """Check nothing yet: some values are the model's."""

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        usual = vars(CommandRequest())
        return {name: value for name, value in vars(self).items() if value != usual[name]}


def _comments() -> dict[str, str]:
    """Return the comment beside each field of a request, which is the help of its option."""
    source = inspect.getsource(Sampling) + inspect.getsource(Request)
    return dict(re.findall(r"^ {4}(\w+): .*  # (.+)$", source, re.MULTILINE))


def _group(name: str, about: str, names: str) -> Any:
    """Return a dataclass of some fields of a request, as options."""
    hints, comments = get_type_hints(CommandRequest, include_extras=True), _comments()
    usual, entries = vars(CommandRequest()), []
    for one in names.split():
        hint = hints[one]
        described = hint if get_origin(hint) is Annotated and get_args(hint)[1:] else None
        entries.append((one, described or Annotated[hint, option(comments[one])], field(default=usual[one])))
    return make_dataclass(name, entries, frozen=True, kw_only=True, namespace={"__doc__": about})


_CLASSES = {name: _group(name, about, names) for name, (about, names) in GROUPS.items()}


_UNPREFIXED: Any = get_args(OmitArgPrefixes[int])[1]  # flags of a group without its name in front


class _Grouped:
    """What `GroupedRequest` can do."""

    def request(self) -> CommandRequest:
        """Return all groups as one request."""
        return CommandRequest(
            **{name: value for group in vars(self).values() for name, value in vars(group).items()}
        )


GroupedRequest: Any = make_dataclass(
    "GroupedRequest",
    [(name, Annotated[kind, _UNPREFIXED], field(default=kind())) for name, kind in _CLASSES.items()],
    bases=(_Grouped,),
    frozen=True,
    kw_only=True,
)


def options_with(**defaults: Any) -> Any:
    """Return the options of a request, with other defaults of some fields."""
    groups = {
        name: kind(**{one: defaults[one] for one in vars(kind()) if one in defaults})
        for name, kind in _CLASSES.items()
    }
    return GroupedRequest(**groups)
