"""The command `tokens`: what a tokenizer makes of a text, stage by stage."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from clearhead.commands.common import Json, option, show_result
from clearhead.errors import CheckpointError, refuse
from clearhead.report import table
from clearhead.tokens.plan import TokenKind, TokensPlan

if TYPE_CHECKING:
    from rich.table import Table
    from tokenizers import Tokenizer

    from clearhead.tokens.stages import Stages, TextStages


def tokens(
    text: Annotated[Positional[str], option("the text; - reads it from stdin", metavar="TEXT")],
    model: Annotated[
        Path | None, option("a model directory, or a tokenizer.json", metavar="DIR|FILE")
    ] = None,
    kind: Annotated[
        TokenKind | None, option("without a model: a tokenizer of this kind, trained on the text itself")
    ] = None,
    pair: Annotated[str | None, option("a second text that belongs to the first")] = None,
    json: Json = False,
) -> None:
    """Show how a text becomes tokens, in four stages: normalise, pre-split, subword model, post-process.

    For example:
      clearhead tokens "Hello  wörld" --model my-model/
      clearhead tokens "a rose is a rose is a rose" --kind bpe
      clearhead tokens "Who?" --pair "Me." --model bert/ --json
      clearhead tokens - --model my-model/tokenizer.json < text.txt
    """
    text = sys.stdin.read() if text == "-" else text
    refuse(not text, "the text is empty: give some, or pipe it in and write - in its place")
    refuse(
        model is not None and kind is not None,
        f"--kind {kind} trains a tokenizer and --model {model} has one: give one of the two",
    )
    from clearhead.tokens.stages import stages

    if model is not None:
        tokenizer, which = _read(model), str(model)
    else:
        tokenizer, which = _make(text, kind)
    seen = stages(tokenizer, text, pair)
    body = {"tokenizer": which, "vocab_size": tokenizer.get_vocab_size(), **seen.to_dict()}
    show_result(body, json, _parts(seen, f"{which}, {tokenizer.get_vocab_size():,} tokens"))


def _read(model: Path) -> Tokenizer:
    """Return the tokenizer of a model directory, or of a file."""
    from tokenizers import Tokenizer

    from clearhead.hub.tokenizer import load_tokenizer

    if model.is_file():
        try:
            return Tokenizer.from_file(str(model))
        except Exception as error:
            raise CheckpointError(f"{model} is no tokenizer: {str(error).splitlines()[0][:200]}") from None
    if not model.is_dir():
        raise CheckpointError(
            f"{model} is no file and no directory: name a model directory or a tokenizer.json"
        )
    found = load_tokenizer(model)
    if found is None:
        raise CheckpointError(f"{model} has no tokenizer: add tokenizer.json, or leave --model out")
    return found


def _make(text: str, kind: TokenKind | None) -> tuple[Tokenizer, str]:
    """Return a tokenizer of bytes, or one trained on the text, and in words which it is."""
    from clearhead.tokens.training import GENERATOR, byte_tokenizer, train_tokenizer

    if kind in (None, "byte"):
        return byte_tokenizer(), "the bytes of UTF-8" + ("" if kind else ", as no --model is given")
    length = len(text.encode("utf-8", "replace"))
    made = train_tokenizer([text], TokensPlan(kind=kind), GENERATOR, length)
    return made, f"kind {kind}, trained on this text alone"


def _parts(seen: Stages, title: str) -> Iterator[Any]:
    yield f"tokenizer: {title}"
    yield from _text_parts(seen.text, "" if seen.pair is None else "\ntext A")
    if seen.pair is not None:
        yield from _text_parts(seen.pair, "\ntext B")
    rows = [(each.token, str(each.id), str(each.type), _span(each), _from(each, seen)) for each in seen.final]
    yield _table("4. post-process", ("token", ">id", ">type", ">offsets", "from"), rows)


def _text_parts(part: TextStages, title: str) -> Iterator[Any]:
    """Show the first three stages of one text."""
    if title:
        yield title
    normalised = "unchanged" if part.normalised == part.text else part.normalised
    yield _table("1. normalise", ("text", "normalised"), [(part.text, normalised)])
    pieces = [
        (str(number), piece.text, _span(piece), part.text[piece.start : piece.end])
        for number, piece in enumerate(part.pieces)
    ]
    yield _table("2. pre-split", (">piece", "as the model reads it", ">offsets", "from"), pieces)
    made = [
        (str(each.piece), each.token, str(each.id), _span(each), part.text[each.start : each.end])
        for each in part.tokens
    ]
    yield _table("3. subword model", (">piece", "token", ">id", ">offsets", "from"), made)


def _span(place: Any) -> str:
    return f"{place.start}:{place.end}"


def _from(token: Any, seen: Stages) -> str:
    """Return the text behind a final token, which is empty for one that post-processing added."""
    if token.text is None:
        return ""
    part = seen.pair if token.text == 1 and seen.pair is not None else seen.text
    return part.text[token.start : token.end]


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table in which spaces and line breaks can be seen."""
    from clearhead.tokens.labels import visible

    return table(title, headings, ([visible(cell) for cell in row] for row in rows))
