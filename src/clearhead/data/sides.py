"""From what was read to a `Corpus`: text, rows or pictures to train on and to validate on, with notes."""

import re
from collections.abc import Iterable, Sequence

import numpy as np

from clearhead.data.examples import LABELS, TAGS, Corpus, Example, Images, Shape
from clearhead.data.pictures import Pictures
from clearhead.data.plan import DataPlan
from clearhead.data.split import key_of, percent, split_keys
from clearhead.data.tables import counted, listed
from clearhead.data.text import Stream, look, split_text
from clearhead.errors import InputError, refuse


def text_corpus(
    plan: DataPlan, whole: Stream, fingerprint: str, notes: Sequence[str], empty: str, split: bool
) -> Corpus:
    """Set a share of a text apart for validation; `empty` is the error where there is none."""
    if not split:
        look(whole, empty)
        return Corpus("text", [], whole, (), fingerprint, tuple(notes), 0)
    train, validation, note = split_text(whole, plan.validation_share, empty)
    return Corpus("text", train, validation, (), fingerprint, (*notes, note), train.size())


# Rows ------------------------------------------------------------------------------------------------------


def given_corpus(
    shape: Shape,
    rows: Sequence[Example],
    validation: Sequence[Example],
    places: Sequence[str],
    fingerprint: str,
    notes: list[str],
) -> Corpus:
    """Return rows to train on and rows to validate on that the user set apart; `places` are of the latter."""
    if shape is LABELS:
        _check_labels([name for row in rows for name in row.names()])
    noun = "tag" if shape is TAGS else "label"
    _check_known(_names(shape, rows), (row.names() for row in validation), places, noun)
    notes += _shared(_keys(rows), _keys(validation))
    return _finished(shape, rows, validation, fingerprint, notes)


def _keys(rows: Iterable[Example]) -> list[int]:
    return [key_of(*row.key()) for row in rows]


def _shared(train: Sequence[int], validation: Sequence[int]) -> list[str]:
    """Return a note on examples that are on both sides, by their keys."""
    shared = sum(map(set(train).__contains__, validation))
    both = f"{shared:,} of {len(validation):,} inputs to validate on are in the training data too"
    return [both] if shared else []


def _check_known(
    known: Sequence[str], names: Iterable[Sequence[str]], places: Iterable[str], noun: str
) -> None:
    """Refuse names among those to validate on that the training data does not have."""
    for own, place in zip(names, places):
        unknown = next((name for name in own if name not in known), None)
        if unknown is not None:
            raise InputError(
                f"{place}: the {noun} {unknown!r} does not occur in the training data, "
                f"which has {listed(known)}"
            )


def rows_corpus(
    plan: DataPlan, shape: Shape, rows: Sequence[Example], fingerprint: str, notes: list[str], split: bool
) -> Corpus:
    """Set a share of the rows apart for validation."""
    if not split:
        return _finished(shape, [], rows, fingerprint, notes)
    names = [row.names() for row in rows]
    if shape is LABELS:
        _check_labels([name for own in names for name in own])
    validates = split_keys(_keys(rows), plan.validation_share, names if any(names) else ())
    notes.append(f"{percent(plan.validation_share)} of the examples for validation, chosen by their content")
    train, test = ([row for row, held in zip(rows, validates) if held is side] for side in (False, True))
    return _finished(shape, train, test, fingerprint, notes)


def _check_labels(names: Sequence[str]) -> None:
    """Refuse labels that say nothing."""
    classes, way_out = len(set(names)), "choose another column with --set data.columns=..."
    if classes == 1 < len(names):
        raise InputError(
            f"every example has the label {names[0]!r}: there is nothing to tell apart; {way_out}"
        )
    if classes == len(names) > 1:
        raise InputError(
            f"the {len(names):,} examples have as many labels: {way_out}, "
            "or --set data.task=seq2seq to write the target out"
        )


def _finished(
    shape: Shape, rows: Sequence[Example], validation: Sequence[Example], fingerprint: str, notes: list[str]
) -> Corpus:
    names = _names(shape, [*rows, *validation])
    if names:
        count = counted(len(names), "tag") if shape is TAGS else _classes(len(names))
        notes.append(f"{count}: {listed(names)}")
    if rows and shape is LABELS and len(names) * 2 > len(rows):
        notes.append(f"{len(names):,} classes for {len(rows):,} examples: is this a label?")
    sides = f"{counted(len(rows), 'example')} to train on, {len(validation):,} to validate on"
    notes.append(sides if rows else counted(len(validation), "example"))
    size = sum(row.size() for row in rows)
    return Corpus(shape.name, rows, validation, names, fingerprint, tuple(notes), size)


def _classes(count: int) -> str:
    return "1 class" if count == 1 else f"{count:,} classes"


def _names(shape: Shape, rows: Iterable[Example]) -> tuple[str, ...]:
    names = sort_names({name for row in rows for name in row.names()})
    return ("O", *(name for name in names if name != "O")) if "O" in names and shape is TAGS else names


def sort_names(names: Iterable[str]) -> tuple[str, ...]:
    """Sort the names of classes: as numbers if all are numbers, else by letters."""
    names = set(names)
    numbers = all(re.fullmatch("0|[1-9][0-9]{0,8}", name) for name in names)
    return tuple(sorted(names, key=int) if numbers else sorted(names))


# Pictures --------------------------------------------------------------------------------------------------


def pictures_corpus(
    plan: DataPlan,
    train: Pictures,
    validation: Pictures | None,
    fingerprint: str,
    notes: list[str],
    split: bool,
) -> Corpus:
    """Set a share of the pictures apart for validation, unless the data has a part for it."""
    if not split:
        validation, train = validation or train, train.take([])
        return _pictures_finished(train, validation, sort_names(validation.names), fingerprint, notes)
    way_out = "lay out a folder for each class, several pictures in each"
    if len(set(train.names)) == 1:
        raise InputError(
            f"every picture is of the class {train.names[0]!r}: there is nothing to tell apart; {way_out}"
        )
    if len(set(train.names)) == len(train.names):
        raise InputError(
            f"each of the {len(train.names):,} pictures is of a class of its own"
            f": there is nothing to learn a class from; {way_out}"
        )
    if validation is None:
        names = [(name,) for name in train.names]
        validates = np.array(split_keys(train.keys(), plan.validation_share, names))
        notes.append(
            f"{percent(plan.validation_share)} of the pictures for validation, chosen by their content"
        )
        train, validation = (train.take(np.flatnonzero(validates == side)) for side in (False, True))
    else:
        notes += _shared(train.keys(), validation.keys())
    size, other = (" x ".join(map(str, part.pixels.shape[1:])) for part in (train, validation))
    refuse(
        size != other,
        f"the pictures to train on are {size} and those to validate on {other}: bring all to one size first",
    )
    known = sort_names(train.names)
    _check_known(known, ((name,) for name in validation.names), validation.places, "label")
    counts = f"{len(train.names):,} to train on, {len(validation.names):,} to validate on"
    notes += [f"{_classes(len(known))}: {listed(known)}", f"pictures of {size}: {counts}"]
    return _pictures_finished(train, validation, known, fingerprint, notes)


def _pictures_finished(
    train: Pictures, validation: Pictures, names: tuple[str, ...], fingerprint: str, notes: Sequence[str]
) -> Corpus:
    numbers = {name: number for number, name in enumerate(names)}
    first, second = (
        Images(part.pixels, np.array([numbers[name] for name in part.names], np.int64))
        for part in (train, validation)
    )
    return Corpus("images", first, second, names, fingerprint, tuple(notes), 0)
