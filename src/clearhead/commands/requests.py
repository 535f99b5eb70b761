"""The options of `clearhead generate`, as a request that the model's own settings may still complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Fixed, SuppressFixed

from clearhead.commands.common import option
from clearhead.generate.request import Request


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
