"""`open_corpus`: from a plan to its `Corpus`, the examples to train on and to validate on.

Files are found (`formats`), laid out (`layout`) and read. Those to validate on are named by the user, or a
share is set apart by content. Whatever the plan leaves open is guessed, with a note.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.errors import InputError, refuse
from clearhead.learn.data import corpora, formats, pictures, tables
from clearhead.learn.data.examples import (
    Chunk,
    Corpus,
    Example,
    Images,
    Labelled,
    Pair,
    Picture,
    Rows,
    RowType,
    Tagged,
)
from clearhead.learn.data.files import digest, encoding_notes
from clearhead.learn.data.layout import MISSING, Layout, check_roles, lay_out
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.data.split import (
    Stream,
    joined,
    key_of,
    look,
    near_key,
    normal,
    percent,
    split_keys,
    split_text,
    stream,
)

VERSION = 5  # of the readers: raised when the same files would give other examples
MANY_WORDS = 100  # from which on tags that are many, too, are doubted
PICTURES = ("folders", "idx", "npz")
Placed = tuple[str, Example]  # a row with its place for messages
Sides = tuple[Rows, Rows, tuple[str, ...], int]  # training, validation, names of classes, bytes to train on


def open_corpus(plan: DataPlan, wanted: RowType | None = None, split: bool = True) -> Corpus:
    """Open the data that a plan names; what it leaves open is detected, each time with a note.

    `wanted` is the class of examples that the task needs. Without `split` all examples are to validate on,
    none to train on; of pictures with a validation part, that part.
    """
    refuse(
        not plan.paths,
        f"no data is named: name files, a folder, or an embedded corpus ({', '.join(corpora.CORPORA)})",
    )
    check_roles(plan.columns)
    embedded = corpora.embedded_corpus(plan)
    if embedded is not None:
        return _open_embedded(plan, embedded, wanted, split)
    source, others = formats.find_source(plan, plan.paths, wanted, corpora.CORPORA), None
    if plan.validation:
        others = formats.same_way(source, formats.find_source(plan, plan.validation, wanted))
        source = _apart(source, others)
    first, more = source.files[0], others.files if others else ()
    fingerprint = digest([*source.files, *more], _settings(plan), source.format, str(len(source.files)))
    if source.format in PICTURES:
        _check_rows(plan, Picture, wanted, first)
        refuse(
            plan.bad_rows == "skip",
            "data.bad_rows=skip is for texts and tables: remove pictures that are damaged",
        )
        refuse(
            plan.image_size is not None and not split,
            "data.image_size is for training: a trained model prepares pictures by its own settings",
        )
        most, side = plan.max_examples, plan.image_size
        train, validation, notes = pictures.read_pictures(source, most, side, files=not split)
        if others is not None:
            side = side if isinstance(train.pixels, list) or not train.cropped else train.pixels.shape[1]
            validation = pictures.read_pictures(others, most, side)[0]
        # Folders name the classes: no file does.
        names = [*train.names, *(validation.names if validation else ())]
        fingerprint = hashlib.sha256("\0".join([fingerprint, *names]).encode()).hexdigest()
        notes = [*source.notes, *notes]
        return _corpus(Picture, _picture_sides(plan, train, validation, notes, split), fingerprint, notes)
    how = tables.Reading(plan.encoding, plan.bad_rows == "skip")
    encodings = encoding_notes((*source.files, *more), plan.encoding) if source.format != "arrow" else []
    layout, notes = lay_out(plan, source, how, wanted, more)
    notes += encodings
    _check_rows(plan, layout.row, wanted, first)
    if layout.row is Chunk:
        texts = [_read_text(plan, layout, each.files) for each in (source, others) if each]
        sides = _text_sides(plan, *texts, notes=notes, split=split)
    else:
        with _guessed(layout):
            rows = _read_rows(plan, layout, source.files, notes, layout.row.LACKING)
            if layout.row is Labelled and layout.names and not layout.header:
                notes += _missed_header([row.names()[0] for _, row in rows])
            lacking = f"to validate on {layout.row.LACKING}"
            given_rows = _read_rows(plan, layout, more, notes, lacking) if more else None
            sides = _row_sides(plan, layout.row, rows, given_rows, notes, split)
    return _corpus(layout.row, sides, fingerprint, [*notes, *how.notes(sides)])


@contextmanager
def _guessed(layout: Layout) -> Iterator[None]:
    """Say with what fails in tagged words which columns were taken: another choice may be what it needs."""
    try:
        yield
    except InputError as error:
        if layout.tags is None:
            raise
        way_out = """--set data.columns='{words = "1", tags = "2"}'"""
        raise InputError(f"{error} ({layout.tags.note}; if that is wrong, {way_out})") from None


def _corpus(row_type: RowType, sides: Sides, fingerprint: str, notes: Sequence[str]) -> Corpus:
    train, validation, names, size = sides
    stamp = f"{VERSION}:{fingerprint}"  # a resumed run tells other data from another way of reading it
    return Corpus(row_type.PLURAL, train, validation, names, stamp, tuple(notes), size)


def place_of(plan: DataPlan, wanted: RowType | None, name: str) -> str:
    """Return where a label first occurs in the files of a plan; "" for pictures and embedded corpora."""
    if plan.paths[0] in corpora.CORPORA or wanted is Picture:
        return ""
    source = formats.find_source(plan, plan.paths, wanted)
    how = tables.Reading(plan.encoding, plan.bad_rows == "skip")
    rows = lay_out(plan, source, how, wanted)[0].examples(source.files)
    return next((place for place, row in rows if row is not None and name in row.names()), "")


def _check_rows(plan: DataPlan, row_type: RowType, wanted: RowType | None, what: object) -> None:
    if wanted is not None and wanted is not row_type:
        raise InputError(f"task {plan.task} needs {wanted.PLURAL}, and {what} holds {row_type.PLURAL}")
    refuse(
        plan.lowercase not in (False, True) and row_type is not Pair,
        f"lowercase {plan.lowercase!r} lowers one side of pairs, and the data holds {row_type.PLURAL}"
        ": set it to true or false",
    )


def _settings(plan: DataPlan) -> str:
    """Return everything in a plan that changes the examples, as JSON; the task alone does not."""
    names = ("format", "header", "pattern", "lowercase", "validation_share", "max_examples")
    wanted = {name: getattr(plan, name) for name in names}
    wanted |= {"columns": dict(plan.columns), "held": len(plan.validation)}
    wanted |= {"bad_rows": "skip"} if plan.bad_rows == "skip" else {}
    chosen = {"image_size": plan.image_size, "encoding": plan.encoding}
    wanted |= {name: value for name, value in chosen.items() if value is not None}
    return json.dumps([VERSION, wanted], sort_keys=True)


# Reading ---------------------------------------------------------------------------------------------------


def _apart(source: formats.Source, validation: formats.Source) -> formats.Source:
    """Return the training files without the validation files, which a folder or a glob may hold too."""
    theirs = {path.resolve() for path in validation.files}
    own = tuple(path for path in source.files if path.resolve() not in theirs)
    refuse(
        not own or (source.format == "parallel" and len(own) < 2),
        f"{source.files[0]} is named to train on and to validate on: leave it out of one",
    )
    refuse(
        validation.format != source.format,
        f"the data is {source.format} and the validation files are {validation.format}"
        f": both must be of one format; if they are, --set data.format={source.format}",
    )
    left_out = len(source.files) - len(own)
    note = (f"{tables.counted(left_out, 'validation file')} left out of training",) if left_out else ()
    return source._replace(files=own, notes=(*source.notes, *note))


def _read_text(plan: DataPlan, layout: Layout, files: Sequence[Path]) -> Stream:
    one = f"{files[0]} is empty: there is no text in it"
    empty = one if len(files) == 1 else "all files are empty: there is no text in them"
    return stream(partial(layout.documents, files), bool(plan.lowercase), plan.max_examples, empty)


def _read_rows(
    plan: DataPlan, layout: Layout, files: Sequence[Path], notes: list[str], what: str
) -> list[Placed]:
    """Read the rows of files; a note says how many were left out."""
    read = list(islice(layout.examples(files), plan.max_examples))
    layout.how.notes(read)
    rows = [(place, row) for place, row in read if row is not None]
    refuse(not read, f"{files[0]} is empty: there is no example in it")
    refuse(
        not rows,
        f"{files[0]}: no row but {tables.counted(len(read), 'row')} {layout.row.LACKING}"
        "; choose columns with --set data.columns=...",
    )
    if len(rows) < len(read):
        notes.append(f"{tables.counted(len(read) - len(rows), 'row')} {what} left out")
    return [(place, row.lowered(plan.lowercase) if plan.lowercase else row) for place, row in rows]


def _missed_header(labels: Sequence[str]) -> list[str]:
    """Return a note where the first row of a table without a header has a label that no other has."""
    first, *others = labels
    note = f"no other row has the label {first!r} of the first: if that is a header, --set data.header=true"
    return [note] if first not in others and len({*labels}) * 2 < len(labels) else []


def _open_embedded(plan: DataPlan, embedded: corpora.Embedded, wanted: RowType | None, split: bool) -> Corpus:
    refuse(
        plan.validation,
        f"the corpus {embedded.name} sets apart a share of itself: validation files do not go with it",
    )
    _check_rows(plan, embedded.row, wanted, f"the corpus {embedded.name}")
    content, notes = embedded.load(), [f"the embedded corpus {embedded.name}: {embedded.sentence}"]
    parts: Iterable[bytes]
    if isinstance(content, pictures.Pictures):
        content = content.take(pictures.spaced(len(content.names), plan.max_examples))
        parts = [np.asarray(content.pixels).tobytes(), *(name.encode() for name in content.names)]
        sides = _picture_sides(plan, content.sided(plan.image_size if split else None), None, notes, split)
    elif isinstance(content, list):
        some: Sequence[Any] = content[: plan.max_examples]
        rows = [("", row.lowered(plan.lowercase) if plan.lowercase else row) for row in some]
        parts = (repr(dataclasses.astuple(row)).encode() for _, row in rows)
        sides = _row_sides(plan, embedded.row, rows, None, notes, split)
    else:
        empty = "the standard library has no sources here"
        whole = stream(content, bool(plan.lowercase), plan.max_examples, empty)
        parts = (chunk.text.encode() for chunk in whole)
        sides = _text_sides(plan, whole, notes=notes, split=split)
    total = hashlib.sha256(_settings(plan).encode())
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return _corpus(embedded.row, sides, total.hexdigest(), notes)


# Sides: a share is set apart for validation, unless the user or the data set gives what to validate on ------


def _text_sides(
    plan: DataPlan, whole: Stream, other: Stream | None = None, *, notes: list[str], split: bool
) -> Sides:
    if other is None and split:
        train, validation, note = split_text(whole, plan.validation_share)
        notes.append(note)
        return train, validation, (), train.size()
    look(whole)
    if other is None:
        return [], whole, (), 0
    look(other)
    return whole, other, (), whole.size()


def _row_sides(
    plan: DataPlan,
    row_type: RowType,
    placed: list[Placed],
    validation: list[Placed] | None,
    notes: list[str],
    split: bool,
) -> Sides:
    rows = [row for _, row in placed]
    names = [row.names() for row in rows]
    if row_type is Labelled and (split or validation):
        _check_labels([name for own in names for name in own])
    train, test = list[Example](), rows
    if validation:
        train, test = rows, [row for _, row in validation]
        named = ((place, name) for place, row in validation for name in row.names())
        _check_known(_names(row_type, rows), named, "tag" if row_type is Tagged else "label")
        keys = _keys([*train, *test])
        notes += _shared(keys[: len(train)], keys[len(train) :])
    elif split:
        keys = _keys(rows)
        near = len({key_of(*row.key()) for row in rows}) - len(set(keys))
        validates = _chosen(plan, keys, names if any(names) else (), "examples", notes)
        if near:
            notes.append(
                f"{tables.counted(near, 'near-duplicate')}: like another example but for case, spaces, "
                "Unicode form or the order of a pair; they stay on one side"
            )
        train, test = ([row for row, own in zip(rows, validates) if own is side] for side in (False, True))
    known = _names(row_type, [*train, *test])
    missing = [name for name in known if name.lower() in MISSING] if row_type is Labelled else []
    if missing:
        count = sum(row.names()[0] in missing for row in (*train, *test))
        notes.append(
            f"{tables.counted(count, 'row')} with the label {tables.listed(missing)}, taken as a class: "
            "remove them if their label is missing"
        )
    if known:
        notes.append(
            f"{tables.counted(len(known), 'tag' if row_type is Tagged else 'class')}: {tables.listed(known)}"
        )
    if train and row_type is Labelled and len(known) * 2 > len(train):
        notes.append(f"{len(known):,} classes for {len(train):,} examples: is this a label?")
    words = sum(len(row.names()) for row in train) if row_type is Tagged else 0
    if words > MANY_WORDS and len(known) * 5 > words:
        notes.append(f"{len(known):,} tags for {words:,} words: is this the column of the tags?")
    both = f"{tables.counted(len(train), 'example')} to train on, {len(test):,} to validate on"
    notes.append(both if train else tables.counted(len(test), "example"))
    return train, test, known, sum(row.size() for row in train)


def _picture_sides(
    plan: DataPlan,
    train: pictures.Pictures,
    validation: pictures.Pictures | None,
    notes: list[str],
    split: bool,
) -> Sides:
    if not split:
        validation = validation or train
        known = sort_names(validation.names)
        return _numbered(train.take([]), known), _numbered(validation, known), known, 0
    way_out = "lay out a folder for each class, several pictures in each"
    refuse(
        len(set(train.names)) == 1,
        f"every picture is of the class {train.names[0]!r}: there is nothing to tell apart; {way_out}",
    )
    refuse(
        len(set(train.names)) == len(train.names),
        f"each of the {len(train.names):,} pictures is of a class of its own"
        f": there is nothing to learn a class from; {way_out}",
    )
    if validation is None:
        names = [(name,) for name in train.names]
        validates = np.array(_chosen(plan, train.keys(), names, "pictures", notes))
        train, validation = (train.take(np.flatnonzero(validates == side)) for side in (False, True))
    else:
        notes += _shared(train.keys(), validation.keys())
    known = sort_names(train.names)
    _check_known(known, zip(validation.sources, validation.names), "label")
    sides = _numbered(train, known), _numbered(validation, known)
    size, other = (" x ".join(map(str, part.shape)) for part in sides)
    refuse(
        size != other,
        f"the pictures to train on are {size} and those to validate on {other}: bring all to one size, "
        f"such as --set data.image_size={min(sides[0].shape[:2])}",
    )
    counts = f"{len(train.names):,} to train on, {len(validation.names):,} to validate on"
    notes += [
        f"{tables.counted(len(known), 'class')}: {tables.listed(known)}",
        f"pictures of {size}: {counts}",
    ]
    return *sides, known, 0


def _numbered(part: pictures.Pictures, names: Sequence[str]) -> Images:
    numbers = {name: number for number, name in enumerate(names)}
    return Images(part.pixels, np.array([numbers[name] for name in part.names], np.int64), part.cropped)


def _chosen(
    plan: DataPlan, keys: Sequence[int], names: Sequence[Sequence[str]], what: str, notes: list[str]
) -> list[bool]:
    """Return for each example whether it validates, with a note."""
    validates = split_keys(keys, plan.validation_share, names)
    real = percent(sum(validates) / len(keys))
    notes.append(f"{real} of the {what} for validation, chosen by their content")
    return validates


def _keys(rows: Sequence[Example]) -> list[int]:
    """Return a number for each row that near-duplicates share, and so do a pair and the same one swapped."""
    pairs = [key_of(*sorted(map(normal, pair))) if (pair := row.pair_key()) else None for row in rows]
    keys = [near_key(*row.key()) for row in rows]
    return joined(keys, pairs) if any(pair is not None for pair in pairs) else keys


def _shared(train: Sequence[int], validation: Sequence[int]) -> list[str]:
    """Return a note on examples that are on both sides, by their keys."""
    shared = sum(map(set(train).__contains__, validation))
    both = f"{shared:,} of {len(validation):,} inputs to validate on are in the training data too"
    return [both] if shared else []


def _check_known(known: Sequence[str], named: Iterable[tuple[str, str]], noun: str) -> None:
    """Refuse names, given with their places, that the training data does not have."""
    for place, name in named:
        if name not in known:
            raise InputError(
                f"{place}: the {noun} {name!r} does not occur in the training data, "
                f"which has {tables.listed(known)}"
            )


def _check_labels(names: Sequence[str]) -> None:
    classes, way_out = len(set(names)), "choose another column with --set data.columns=..."
    refuse(
        classes == 1 < len(names),
        f"every example has the label {names[0]!r}: there is nothing to tell apart; {way_out}",
    )
    refuse(
        classes == len(names) > 1,
        f"the {len(names):,} examples have as many labels: {way_out}, "
        "or --set data.task=seq2seq to write the target out",
    )


def _names(row_type: RowType, rows: Iterable[Example]) -> tuple[str, ...]:
    names = sort_names({name for row in rows for name in row.names()})
    return ("O", *(name for name in names if name != "O")) if "O" in names and row_type is Tagged else names


def sort_names(names: Iterable[str]) -> tuple[str, ...]:
    """Sort the names of classes: as numbers if all are numbers, else by letters."""
    names = set(names)
    numbers = all(re.fullmatch("0|[1-9][0-9]{0,8}", name) for name in names)
    return tuple(sorted(names, key=int) if numbers else sorted(names))
