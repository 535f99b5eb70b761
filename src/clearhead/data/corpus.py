"""`open_data`: from a plan to its `Corpus`, the examples to train on and to validate on.

Files are found (`formats`), laid out (`layout`), read and split. Whatever the plan leaves open is guessed,
with a note.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np

from clearhead.data.columns import check_roles
from clearhead.data.corpora import CORPORA, Embedded
from clearhead.data.examples import (
    IMAGES,
    LABELS,
    PAIRS,
    TAGS,
    TEXT,
    Corpus,
    Example,
    Images,
    Labelled,
    Shape,
)
from clearhead.data.files import digest, listing
from clearhead.data.formats import Source, find_source, same_way
from clearhead.data.layout import Layout, lay_out
from clearhead.data.pictures import Pictures, read_pictures, spaced
from clearhead.data.plan import DataPlan
from clearhead.data.split import key_of, percent, split_keys
from clearhead.data.tables import counted, listed
from clearhead.data.text import Stream, look, split_text, stream
from clearhead.errors import InputError, nearest

VERSION = 4  # of the readers: raised when the same files would give other examples
PICTURES = ("folders", "idx", "npz")


def open_corpus(plan: DataPlan, wanted: Shape | None = None, split: bool = True) -> Corpus:
    """Open the data that a plan names.

    Args:
        plan: formats, columns and the split are guessed where it leaves them open, each with a note.
        wanted: the shape of examples that the task needs; None: guessed.
        split: False: all examples are to validate on, none to train on; of pictures with a validation part,
            that part.
    """
    if not plan.paths:
        raise InputError(
            f"no data is named: name files, a folder, or an embedded corpus ({', '.join(CORPORA)})"
        )
    check_roles(plan.columns)
    if (embedded := _embedded(plan)) is not None:
        return _open_embedded(plan, embedded, wanted, split)
    source = find_source(plan, plan.paths, wanted, CORPORA)
    validation = None
    if plan.validation:
        validation = same_way(source, find_source(plan, plan.validation, wanted))
        source = _apart(source, validation)
    first, others = source.files[0], validation.files if validation else ()
    fingerprint = digest([*source.files, *others], _settings(plan), source.format, str(len(source.files)))
    if source.format in PICTURES:
        _check_shape(plan, IMAGES, wanted, str(first))
        train, test, notes = read_pictures(source, plan.max_examples)
        if validation is not None:
            test = read_pictures(validation, plan.max_examples)[0]
        names = [*train.names, *(test.names if test else ())]  # folders name the classes: no file holds them
        fingerprint = hashlib.sha256("\0".join([fingerprint, *names]).encode()).hexdigest()
        return _pictures_corpus(plan, train, test, fingerprint, [*source.notes, *notes], split)
    layout, notes = lay_out(plan, source, wanted, others)
    _check_shape(plan, layout.shape, wanted, str(first))
    if layout.shape is not TEXT:
        return _open_rows(plan, layout, source, validation, fingerprint, notes, split)
    whole, test_text = (
        stream(partial(layout.documents, files), bool(plan.lowercase), plan.max_examples)
        for files in (source.files, others)
    )
    if validation is None:
        return _text_corpus(plan, whole, fingerprint, notes, _empty(source), split)
    look(whole, _empty(source))
    look(test_text, _empty(validation))
    return Corpus("text", whole, test_text, (), fingerprint, tuple(notes), whole.size())


def place_of(plan: DataPlan, wanted: Shape | None, name: str) -> str:
    """Return where a label first occurs in the files of a plan; "" for pictures and embedded corpora."""
    if plan.paths[0] in CORPORA or wanted is IMAGES:
        return ""
    source = find_source(plan, plan.paths, wanted)
    layout, _ = lay_out(plan, source, wanted)
    rows = layout.examples(source.files)
    return next((place for place, row in rows if row is not None and name in row.names()), "")


def _check_shape(plan: DataPlan, shape: Shape, wanted: Shape | None, what: str) -> None:
    if wanted is not None and wanted is not shape:
        raise InputError(f"task {plan.task} needs {wanted.name}, and {what} holds {shape.name}")
    if plan.lowercase not in (False, True) and shape is not PAIRS:
        raise InputError(
            f"lowercase {plan.lowercase!r} lowers one side of pairs, and the data holds {shape.name}"
            ": set it to true or false"
        )


def _settings(plan: DataPlan) -> str:
    """Return everything in a plan that changes the examples, as JSON; the task alone does not."""
    names = ("format", "header", "pattern", "lowercase", "validation_share", "max_examples")
    wanted = {name: getattr(plan, name) for name in names}
    wanted |= {"columns": dict(plan.columns), "held": len(plan.validation)}
    return json.dumps([VERSION, wanted], sort_keys=True)


def _apart(source: Source, validation: Source) -> Source:
    """Return the training files without the validation files, which a folder or a glob may hold too."""
    theirs = {path.resolve() for path in validation.files}
    own = tuple(path for path in source.files if path.resolve() not in theirs)
    if not own or (source.format == "parallel" and len(own) < 2):
        raise InputError(f"{source.files[0]} is named to train on and to validate on: leave it out of one")
    if validation.format != source.format:
        raise InputError(
            f"the data is {source.format} and the validation files are {validation.format}"
            f": both must be of one format; if they are, --set data.format={source.format}"
        )
    left_out = len(source.files) - len(own)
    note = (f"{counted(left_out, 'validation file')} left out of training",) if left_out else ()
    return dataclasses.replace(source, files=own, notes=(*source.notes, *note))


# Text ------------------------------------------------------------------------------------------------------


def _empty(source: Source) -> str:
    one = f"{source.files[0]} is empty: there is no text in it"
    return one if len(source.files) == 1 else "all files are empty: there is no text in them"


def _text_corpus(
    plan: DataPlan, whole: Stream, fingerprint: str, notes: Sequence[str], empty: str, split: bool
) -> Corpus:
    if not split:
        look(whole, empty)
        return Corpus("text", [], whole, (), fingerprint, tuple(notes), 0)
    train, validation, note = split_text(whole, plan.validation_share, empty)
    return Corpus("text", train, validation, (), fingerprint, (*notes, note), train.size())


# Rows ------------------------------------------------------------------------------------------------------


def _open_rows(
    plan: DataPlan,
    layout: Layout,
    source: Source,
    validation: Source | None,
    fingerprint: str,
    notes: list[str],
    split: bool,
) -> Corpus:
    rows, _ = _read(plan, layout, source, notes, "with an empty text")
    table = layout.format in ("tsv", "csv")
    if table and plan.header is None and layout.shape is LABELS and not layout.header:
        label, *others = (cast(Labelled, row).label for row in rows)
        if label not in others and len({label, *others}) * 2 < len(rows):
            notes.append(
                f"no other row has the label {label!r} of the first: "
                "if that is a header, --set data.header=true"
            )
    if validation is None:
        return _rows_corpus(plan, layout.shape, rows, fingerprint, notes, split)
    test, places = _read(plan, layout, validation, notes, "to validate on with an empty text")
    known = _names(layout.shape, rows)
    if layout.shape is LABELS:
        _check_labels([name for row in rows for name in row.names()])
    for row, place in zip(test, places):
        unknown = next((name for name in row.names() if name not in known), None)
        if unknown is not None:
            noun = "tag" if layout.shape is TAGS else "label"
            raise InputError(
                f"{place}: the {noun} {unknown!r} "
                f"does not occur in the training data, which has {listed(known)}"
            )
    notes += _shared(_keys(rows), _keys(test))
    return _finished(layout.shape, rows, test, fingerprint, notes)


def _read(
    plan: DataPlan, layout: Layout, source: Source, notes: list[str], what: str
) -> tuple[list[Example], list[str]]:
    """Read the rows of a source -> the rows and their places; a note says how many were left out."""
    read = list(islice(layout.examples(source.files), plan.max_examples))
    found = [(row, place) for place, row in read if row is not None]
    if not read:
        raise InputError(f"{source.files[0]} is empty: there is no example in it")
    if not found:
        raise InputError(
            f"{source.files[0]}: every one of its {counted(len(read), 'row')} has an empty text"
            "; choose columns with --set data.columns=..."
        )
    if len(found) < len(read):
        notes.append(f"{counted(len(read) - len(found), 'row')} {what} left out")
    rows = [row.lowered(plan.lowercase) if plan.lowercase else row for row, _ in found]
    return rows, [place for _, place in found]


def _keys(rows: Iterable[Example]) -> list[int]:
    return [key_of(*row.key()) for row in rows]


def _shared(train: Sequence[int], validation: Sequence[int]) -> list[str]:
    """Return a note on examples that are on both sides, by their keys."""
    shared = sum(map(set(train).__contains__, validation))
    both = f"{shared:,} of {len(validation):,} inputs to validate on are in the training data too"
    return [both] if shared else []


def _rows_corpus(
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


def _pictures_corpus(
    plan: DataPlan,
    train: Pictures,
    validation: Pictures | None,
    fingerprint: str,
    notes: list[str],
    split: bool,
) -> Corpus:
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
    if size != other:
        raise InputError(
            f"the pictures to train on are {size} and those to validate on {other}"
            ": bring all to one size first"
        )
    known = sort_names(train.names)
    for name, place in zip(validation.names, validation.places):
        if name not in known:
            raise InputError(
                f"{place}: the label {name!r} does not occur in the training data, which has {listed(known)}"
            )
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


# Embedded corpora ------------------------------------------------------------------------------------------


@listing()
def _embedded(plan: DataPlan) -> Embedded | None:
    """Return the embedded corpus a plan names.

    A file or folder of that name comes first, unless the plan differs.
    """
    name = plan.paths[0]
    if plan.format == "corpus" and name not in CORPORA:
        raise InputError(
            f"there is no embedded corpus {name!r}{nearest(name, CORPORA)}; there are {', '.join(CORPORA)}"
        )
    free = plan.format is None and not Path(name).expanduser().exists()
    return CORPORA.get(name) if len(plan.paths) == 1 and (free or plan.format == "corpus") else None


def _open_embedded(plan: DataPlan, embedded: Embedded, wanted: Shape | None, split: bool) -> Corpus:
    if plan.validation:
        raise InputError(
            f"the corpus {embedded.name} sets apart a share of itself: validation files do not go with it"
        )
    _check_shape(plan, embedded.shape, wanted, f"the corpus {embedded.name}")
    content, notes = embedded.load(), [f"the embedded corpus {embedded.name}: {embedded.sentence}"]
    if isinstance(content, Pictures):
        content = content.take(spaced(len(content.names), plan.max_examples))
        fingerprint = _hash(plan, [content.pixels.tobytes(), *(name.encode() for name in content.names)])
        return _pictures_corpus(plan, content, None, fingerprint, notes, split)
    if isinstance(content, list):
        some: Sequence[Example] = content[: plan.max_examples]
        rows = [row.lowered(plan.lowercase) if plan.lowercase else row for row in some]
        fingerprint = _hash(plan, (repr(dataclasses.astuple(cast(Labelled, row))).encode() for row in rows))
        return _rows_corpus(plan, embedded.shape, rows, fingerprint, notes, split)
    whole = stream(content, bool(plan.lowercase), plan.max_examples)
    fingerprint = _hash(plan, (chunk.text.encode() for chunk in whole))
    return _text_corpus(plan, whole, fingerprint, notes, "the standard library has no sources here", split)


def _hash(plan: DataPlan, parts: Iterable[bytes]) -> str:
    total = hashlib.sha256(_settings(plan).encode())
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()
