"""Commands that go step by step: tokens, from a text to its tokens; trace, from tokens to predictions."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

import clearhead as ch
from clearhead.app.commands.common import (
    Folder,
    Json,
    Pair,
    Target,
    TokenIds,
    Tokenizer,
    is_gguf_file,
    load_model,
    option,
    show_result,
    token_ids,
)
from clearhead.app.report import Cell, count, size, table
from clearhead.errors import CheckpointError, refuse
from clearhead.hub.tokens import TokenKind, TokensPlan

if TYPE_CHECKING:
    import tokenizers
    from rich.table import Table
    from rich.text import Text

    from clearhead.hub.tokens.text import Stages, TextStages
    from clearhead.inside.trace import Prediction, TraceRow, TraceStep

WIDTH = 190  # columns, where the output is no terminal
DETAILS = {  # headings, and the width of the terminal that each needs
    "formula": 165,
    "shape": 80,
    "is": 100,
    "first values": 125,
    "mean ± std": 145,
    "range": 185,
}


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
    from clearhead.hub.tokens.text import stages

    if model is not None:
        tokenizer, which = _read_tokenizer(model), str(model)
    else:
        tokenizer, which = _make_tokenizer(text, kind)
    seen = stages(tokenizer, text, pair)
    body = {"tokenizer": which, "vocab_size": tokenizer.get_vocab_size(), **seen.to_dict()}
    show_result(body, json, _stage_parts(seen, f"{which}, {tokenizer.get_vocab_size():,} tokens"))


def _read_tokenizer(model: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a model directory, or of a file."""
    from tokenizers import Tokenizer

    from clearhead.hub.tokenizer import load_tokenizer

    if model.is_file() and not is_gguf_file(model):
        try:
            return Tokenizer.from_file(str(model))
        except Exception as error:
            raise CheckpointError(f"{model} is no tokenizer: {str(error).splitlines()[0][:200]}") from None
    refuse(
        not model.is_dir() and not is_gguf_file(model),
        f"{model} is no file and no directory: name a model directory or a tokenizer.json",
        CheckpointError,
    )
    found = load_tokenizer(model)
    if found is None:
        raise CheckpointError(f"{model} has no tokenizer: add tokenizer.json, or leave --model out")
    return found


def _make_tokenizer(text: str, kind: TokenKind | None) -> tuple[tokenizers.Tokenizer, str]:
    """Return a tokenizer of bytes, or one trained on the text, and in words which it is."""
    from clearhead.hub.tokens.training import GENERATOR, byte_tokenizer, train_tokenizer

    if kind in (None, "byte"):
        return byte_tokenizer(), "the bytes of UTF-8" + ("" if kind else ", as no --model is given")
    made = train_tokenizer([text], TokensPlan(kind=kind), GENERATOR, len(text.encode("utf-8", "replace")))
    return made, f"kind {kind}, trained on this text alone"


def _stage_parts(seen: Stages, title: str) -> Iterator[Any]:
    """Show the first three stages of each text, and the last of both together."""
    yield f"tokenizer: {title}"
    texts = {"": seen.text} if seen.pair is None else {"\ntext A": seen.text, "\ntext B": seen.pair}
    for heading, part in texts.items():
        if heading:
            yield heading
        normalised = "unchanged" if part.normalised == part.text else part.normalised
        yield _visible("1. normalise", ("text", "normalised"), [(part.text, normalised)])
        pieces = (
            (str(number), piece.text, *_source(piece, part)) for number, piece in enumerate(part.pieces)
        )
        yield _visible("2. pre-split", (">piece", "as the model reads it", ">offsets", "from"), pieces)
        made = ((str(one.piece), one.token, str(one.id), *_source(one, part)) for one in part.tokens)
        yield _visible("3. subword model", (">piece", "token", ">id", ">offsets", "from"), made)
    sources = {None: None, 0: seen.text, 1: seen.pair}
    final = ((one.token, str(one.id), str(one.type), *_source(one, sources[one.text])) for one in seen.final)
    yield _visible("4. post-process", ("token", ">id", ">type", ">offsets", "from"), final)


def _source(place: Any, part: TextStages | None) -> tuple[str, str]:
    """Return the offsets of a token and the text there, which is empty for one that post-processing added."""
    return f"{place.start}:{place.end}", "" if part is None else part.text[place.start : place.end]


def _visible(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table in which spaces and line breaks can be seen."""
    from clearhead.hub.tokens.text import visible

    return table(title, headings, ([visible(cell) for cell in row] for row in rows))


def trace(
    folder: Folder,
    given: Annotated[
        Positional[str],
        option("what the model reads: a text, or the path of an image", metavar="TEXT|IMAGE"),
    ],
    target: Target = None,
    pair: Pair = None,
    depth: Annotated[
        int | None, option("1: stacks, 2: blocks, 3: sublayers, 4: all steps (default; with --layer: 2)")
    ] = None,
    layer: Annotated[int | None, option("open this block in full")] = None,
    top: Annotated[int, option("candidates to show")] = 5,
    why: Annotated[bool, option("say beside each step why it is there")] = False,
    ids: TokenIds = False,
    tokenizer: Tokenizer = None,
    json: Json = False,
) -> None:
    """Follow the forward pass, step by step: shapes, values, parameters, FLOPs, bytes, time, predictions.

    For example:
      clearhead trace my-model/ "The cat sat on the"
      clearhead trace my-model/ "The cat sat on the" --layer 3 --why
      clearhead trace my-translator/ "Ein Hund schläft" --target "A dog" --depth 3
      clearhead trace my-vit/ photo.png --json
    """
    refuse(
        depth not in (None, 1, 2, 3, 4),
        f"depth {depth} is not known: 1 shows stacks, 2 blocks, 3 sublayers, 4 all steps",
    )
    model = load_model(folder, tokenizer=tokenizer)
    seen = ch.trace(model, token_ids(given) if ids else given, target, pair, top, keep_values=False)
    rows = seen.rows(depth or (4 if layer is None else 2), layer)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH

    def parts() -> Iterator[Any]:
        yield steps_table(seen, rows, width, why)
        yield _dim("; ".join(f"{letter} {meaning}" for letter, meaning in seen.legend.items()))
        shown = _shown(seen, model.config, model.special.get("mask"))
        if shown:
            yield _predictions_table(shown, model.config)
        yield _dim(f"walked step by step and run as one, the results differ by {seen.difference:.1e} at most")

    show_result(seen.to_dict(), json, parts(), width=width)


def steps_table(seen: ch.Trace, rows: tuple[TraceRow, ...], width: int, why: bool = False) -> Table:
    """Show each row of the tree, groups with their sums; a narrow terminal gets fewer columns."""
    details = [heading for heading, needed in DETAILS.items() if width >= needed]
    headings = ["step", *details, ">parameters", ">FLOPs", ">bytes", ">ms", *(["why"] if why else [])]
    lines: list[Sequence[Cell]] = []
    for row in rows:
        step = row.step
        name = "  " * (row.level - 1) + row.title
        values = _details(step) if step else dict.fromkeys(details, "")
        cells = [values[heading] for heading in details]
        sums = (count(number) if number else "" for number in (row.parameters, row.flops))
        reason = [[(step.why if step else "", "dim")]] if why else []
        lines.append(
            [
                name if step else [(name, "bold")],
                *cells,
                *sums,
                size(row.bytes),
                f"{row.seconds * 1000:.3f}",
                *reason,
            ]
        )
    totals = (f"{seen.parameters:,}", count(seen.flops), size(seen.bytes), f"{seen.seconds * 1000:.3f}")
    lines += [(), [[("total", "bold")], *[""] * len(details), *totals]]
    made = _open_table("the forward pass, step by step", headings, lines)
    for column in made.columns:
        column.no_wrap = column.header not in ("formula", "why")
        column.overflow = "ellipsis"
    return made


def _open_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    """Return a table with no lines between its columns."""
    from rich import box

    return table(title, headings, rows, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)


def _dim(line: str) -> Text:
    from rich.text import Text

    return Text(line, style="dim")


def _details(step: TraceStep) -> dict[str, str]:
    """Return what stands in the columns of DETAILS."""
    peek = step.peek
    numbers = ["hidden" if value < -1e38 else f"{value:.4g}" for value in peek.first[:3]]
    words, more = (step.sample[:6], len(step.sample) > 6) if step.sample else (numbers, prod(step.shape) > 3)
    return {
        "formula": step.formula,
        "shape": step.symbols,
        "is": " ".join(map(str, step.shape)),
        "first values": " ".join(words) + (" …" if more else ""),
        "mean ± std": "" if peek.mean is None or peek.std is None else f"{peek.mean:.3g} ± {peek.std:.3g}",
        "range": "" if peek.min is None or peek.max is None else f"{peek.min:.3g} … {peek.max:.3g}",
    }


def _shown(seen: ch.Trace, config: ch.ModelConfig, mask: int | None) -> list[Prediction]:
    """Return the predictions worth a line: what comes next, what stands behind a mask, or all there are."""
    if config.head == "lm" and config.family == "decoder":
        return list(seen.predictions[-1:])
    masked = [one for one in seen.predictions if mask is not None and one.id == mask]
    return masked if config.head == "mlm" and masked else list(seen.predictions)


def _predictions_table(predictions: list[Prediction], config: ch.ModelConfig) -> Table:
    """Show what the head finds likely; for an encoder-decoder one line for each token it writes."""
    rows = [
        (
            one.at if one.position is None else f"{one.position} {one.at}",
            one.chosen.label,
            f"{one.chosen.probability:.4f}",
            "  ".join(f"{choice.label} {choice.probability:.4f}" for choice in one.candidates),
        )
        for one in predictions
    ]
    if config.head != "lm":
        return _open_table("what the head says", ("at", "says", ">probability", "candidates"), rows)
    title = "token by token" if config.family == "encoder-decoder" else "what comes next"
    return _open_table(title, ("after", "writes", ">probability", "candidates"), rows)
