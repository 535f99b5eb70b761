"""From records to examples: cells are checked, trimmed and lowered."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from clearhead.data.columns import value_of
from clearhead.data.examples import Labelled, Pair, Question, Shape, Tagged
from clearhead.data.tables import Record, shorten
from clearhead.errors import InputError

Row = Pair | Labelled | Tagged | Question
_WHOLE = re.compile(
    r"-?[0-9]+\.0+"
)  # what spreadsheets and pandas make of whole numbers beside a missing one


def text_of(record: Record, column: str) -> str:
    """A cell that must be text."""
    value = value_of(record, column)
    if not isinstance(value, str):
        raise InputError(f"{record.place}: `{column}` must be text, not {shorten(str(value))}")
    return value


def label_of(record: Record, column: str) -> str:
    """A cell that names a class: text, or a number or truth value as JSON may have it; 1.0 is 1, however it is written."""
    value = value_of(record, column)
    number = isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    if not (number or (isinstance(value, str) and value.strip())):
        raise InputError(
            f"{record.place}: the label in `{column}` must be text or a number, not {shorten(str(value))}"
        )
    label = str(value).lower() if number else value.strip()
    return label.partition(".")[0] if _WHOLE.fullmatch(label) else label


def make_row(shape: Shape, roles: Mapping[str, str], record: Record) -> Row | None:
    """The example that a record holds; None where a text of it is empty."""
    if shape == "pairs":
        source, target = (text_of(record, roles[role]).strip() for role in ("source", "target"))
        return Pair(source, target) if source and target else None
    if shape == "labels":
        text = text_of(record, roles["text"]).strip()
        pair = text_of(record, roles["pair"]).strip() if "pair" in roles else None
        return Labelled(text, label_of(record, roles["label"]), pair) if text else None
    if shape == "tags":
        words, tags = (_words(record, roles[role]) for role in ("words", "tags"))
        if len(words) != len(tags):
            raise InputError(f"{record.place} has {len(words)} words and {len(tags)} tags")
        return Tagged(words, tags) if words else None
    return _question(roles, record)


def lowered(row: Row, which: bool | Literal["source", "target"]) -> Row:
    """The example with its letters lowered: all of them, or those of one side of a pair; labels and tags stay."""
    if not which:
        return row
    match row:
        case Pair():
            return Pair(
                row.source if which == "target" else row.source.lower(),
                row.target if which == "source" else row.target.lower(),
            )
        case Labelled():
            return Labelled(row.text.lower(), row.label, row.pair and row.pair.lower())
        case Tagged():
            return Tagged(tuple(word.lower() for word in row.words), row.tags)
        case Question():  # some letters change their length, so the place is counted anew
            return Question(
                row.question.lower(),
                row.context.lower(),
                row.answer.lower(),
                len(row.context[: row.start].lower()),
            )


def _words(record: Record, column: str) -> tuple[str, ...]:
    value = value_of(record, column)
    items = value.split() if isinstance(value, str) else value
    if not isinstance(items, list) or not all(
        isinstance(item, str | int) and str(item).strip() for item in items
    ):
        raise InputError(f"{record.place}: `{column}` must be a list of words, not {shorten(str(value))}")
    return tuple(str(item).strip() for item in items)


def _question(roles: Mapping[str, str], record: Record) -> Question | None:
    question = text_of(record, roles["question"]).strip()
    context = text_of(record, roles["context"])
    answer, start = next(_answers(roles, record), ("", 0))
    if not question or not context.strip():
        return None
    found = context.find(answer)
    start = found if start is None else start
    if start < 0 or context[start : start + len(answer)] != answer:
        where = f"at character {start} of the context, but at {found}" if found >= 0 else "in the context"
        raise InputError(f"{record.place}: the answer {shorten(answer)} is not {where}")
    return Question(question, context, answer, start)


def _answers(roles: Mapping[str, str], record: Record) -> Iterator[tuple[str, int | None]]:
    """The answers a record offers, with their places where it gives them: one, a list, or a list of objects."""
    answers = record.cells.get(roles["answer"])
    starts = record.cells.get(roles.get("start", ""))
    for number, answer in enumerate(answers if isinstance(answers, list) else [answers]):
        start: Any = starts[number] if isinstance(starts, list) and number < len(starts) else starts
        text: Any = answer
        if isinstance(answer, dict):
            text, start = answer.get("text"), answer.get("answer_start")
        if text is None:
            continue
        if isinstance(start, str):  # CSV has only text
            start = start.strip().partition(".")[0] if _WHOLE.fullmatch(start.strip()) else start.strip()
            start = int(start) if start.isdecimal() and len(start) < 10 else start or None
        if not isinstance(text, str) or not (start is None or type(start) is int):
            raise InputError(
                f"{record.place}: an answer is text with a whole number for its start, not {shorten(f'{text}, {start}')}"
            )
        yield (text, start) if text else ("", 0)


def key_parts(row: Row) -> tuple[str, ...]:
    """What a model is shown of an example: rows that share it must not be parted between training and validation."""
    match row:
        case Pair():
            return (row.source,)
        case Labelled():
            return (row.text, row.pair or "")
        case Tagged():
            return row.words
        case Question():
            return (row.context,)


def names_of(row: Row) -> tuple[str, ...]:
    """The label or the tags of an example."""
    return (row.label,) if isinstance(row, Labelled) else row.tags if isinstance(row, Tagged) else ()


def bytes_of(row: Row) -> int:
    """Bytes of the text of an example."""
    match row:
        case Pair():
            texts: tuple[str, ...] = (row.source, row.target)
        case Labelled():
            texts = (row.text, row.pair or "")
        case Tagged():
            texts = row.words
        case Question():
            texts = (row.question, row.context)
    return sum(len(text.encode()) for text in texts)
