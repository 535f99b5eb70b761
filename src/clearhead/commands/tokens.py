"""The command `tokens`: what a tokenizer makes of a text, stage by stage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from clearhead.commands.common import Json, show_result
from clearhead.errors import CheckpointError, InputError
from clearhead.tokens.plan import TokenKind, TokensPlan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from tokenizers import Tokenizer

    from clearhead.tokens.stages import Stages, TextStages


def tokens(
    text: Annotated[Positional[str], arg(metavar="TEXT", help="the text; - reads it from stdin")],
    model: Annotated[
        Path | None, arg(metavar="DIR|FILE", help="a model directory, or a tokenizer.json")
    ] = None,
    kind: Annotated[
        TokenKind | None, arg(help="without a model: a tokenizer of this kind, trained on the text itself")
    ] = None,
    pair: Annotated[str | None, arg(help="a second text that belongs to the first")] = None,
    json: Json = False,
) -> None:
    """How a text becomes tokens, in four stages: normalise, pre-split, subword model, post-process; with ids and offsets.

    For example:
      clearhead tokens "Hello  wörld" --model my-model/
      clearhead tokens "a rose is a rose is a rose" --kind bpe
      clearhead tokens "Who?" --pair "Me." --model bert/ --json
      clearhead tokens - --model my-model/tokenizer.json < text.txt
    """
    from clearhead.tokens.stages import stages

    text = sys.stdin.read() if text == "-" else text
    if not text:
        raise InputError("the text is empty: give some, or pipe it in and write - in its place")
    tokenizer, which = _tokenizer(text, model, kind)
    seen = stages(tokenizer, text, pair)
    body = {"tokenizer": which, "vocab_size": tokenizer.get_vocab_size(), **seen.to_dict()}
    show_result(
        body, json, lambda console: _show(console, seen, f"{which}, {tokenizer.get_vocab_size():,} tokens")
    )


def _tokenizer(text: str, model: Path | None, kind: TokenKind | None) -> tuple[Tokenizer, str]:
    """The tokenizer asked for, and in words which it is."""
    from clearhead.hub.tokenizer import load_tokenizer
    from clearhead.tokens.training import GENERATOR, byte_tokenizer, train_tokenizer

    if model is not None:
        if kind is not None:
            raise InputError(
                f"--kind {kind} trains a tokenizer and --model {model} has one: give one of the two"
            )
        if model.is_file():
            return _from_file(model), str(model)
        if not model.is_dir():
            raise CheckpointError(
                f"{model} is no file and no directory: name a model directory or a tokenizer.json"
            )
        found = load_tokenizer(model)
        if found is None:
            raise CheckpointError(f"{model} has no tokenizer: add tokenizer.json, or leave --model out")
        return found, str(model)
    if kind in (None, "byte"):
        return byte_tokenizer(), "the bytes of UTF-8" + ("" if kind else ", as no --model is given")
    return train_tokenizer(
        [text], TokensPlan(kind=kind), GENERATOR, len(text.encode("utf-8", "replace"))
    ), f"kind {kind}, trained on this text alone"


def _from_file(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} is no tokenizer: {str(error).splitlines()[0][:200]}") from None


def _show(console: Console, seen: Stages, title: str) -> None:
    console.print(f"tokenizer: {title}", highlight=False, markup=False)
    for number, part in enumerate([seen.text] if seen.pair is None else [seen.text, seen.pair]):
        if seen.pair is not None:
            console.print(f"\ntext {'AB'[number]}")
        _show_text(console, part)
    rows = [(each.token, str(each.id), str(each.type), _span(each), _from(each, seen)) for each in seen.final]
    console.print(_table("4. post-process", ("token", "id", "type", "offsets", "from"), rows))


def _show_text(console: Console, part: TextStages) -> None:
    same = part.normalised == part.text
    console.print(
        _table(
            "1. normalise", ("text", "normalised"), [(part.text, "unchanged" if same else part.normalised)]
        )
    )
    pieces = [
        (str(number), piece.text, _span(piece), part.text[piece.start : piece.end])
        for number, piece in enumerate(part.pieces)
    ]
    console.print(_table("2. pre-split", ("piece", "as the model reads it", "offsets", "from"), pieces))
    made = [
        (str(each.piece), each.token, str(each.id), _span(each), part.text[each.start : each.end])
        for each in part.tokens
    ]
    console.print(_table("3. subword model", ("piece", "token", "id", "offsets", "from"), made))


def _span(place: Any) -> str:
    return f"{place.start}:{place.end}"


def _from(token: Any, seen: Stages) -> str:
    """The text behind a final token; nothing behind one that post-processing put there."""
    if token.text is None:
        return ""
    part = seen.pair if token.text == 1 and seen.pair is not None else seen.text
    return part.text[token.start : token.end]


def _table(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from clearhead.tokens.labels import visible

    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in ("id", "type", "offsets", "piece") else "left",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table
