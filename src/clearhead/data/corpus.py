"""`open_data`: from a plan to the examples it names, to train on and to validate on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from clearhead.data.cells import Row, bytes_of, key_parts, lowered, names_of
from clearhead.data.columns import SHAPES, check_roles
from clearhead.data.corpora import CORPORA, Embedded
from clearhead.data.examples import Corpus, Images, Labelled, Rows, Shape
from clearhead.data.files import digest, listing
from clearhead.data.guess import Source, find_source, same_way
from clearhead.data.layout import Layout, lay_out, read_documents, read_examples
from clearhead.data.pictures import Pictures, read_pictures, spaced
from clearhead.data.plan import DataPlan, Task
from clearhead.data.split import key_of, percent, split_keys
from clearhead.data.tables import counted, listed
from clearhead.data.text import Stream, look, size_of, split_text, stream
from clearhead.errors import InputError, nearest

VERSION = 4  # of the readers: raised when the same files would give other examples
PICTURES = ("folders", "idx", "npz")
T = TypeVar("T")


def open_data(plan: DataPlan, split: bool = True) -> Corpus:
    """The examples that a plan names. Formats, columns and the split are guessed where the plan leaves them open, and said.

    With `split=False` nothing is set apart: all examples are to validate on, none to train on. Of pictures that come in two
    parts, those are taken that are meant for it.
    """
    _check(plan)
    if (embedded := _embedded(plan)) is not None:
        return _open_embedded(plan, embedded, split)
    source = find_source(plan, plan.paths, CORPORA)
    held = same_way(source, find_source(plan, plan.validation)) if plan.validation else None
    source = _apart(source, held)
    if held is not None and held.format != source.format:
        way_out = f"both must be of one format; if they are, --set data.format={source.format}"
        raise InputError(f"the data is {source.format} and the validation files are {held.format}: {way_out}")
    mark = digest(
        [*source.files, *(held.files if held else ())], _settings(plan), source.format, str(len(source.files))
    )
    if source.format in PICTURES:
        _check_shape(plan, "images", str(source.files[0]))
        return _open_pictures(plan, source, held, mark, split)
    layout, said = lay_out(plan, source, held.files if held else ())
    _check_shape(plan, layout.shape, str(source.files[0]))
    if layout.shape == "text":
        return _open_text(plan, layout, source, held, mark, said, split)
    return _open_rows(plan, layout, source, held, mark, said, split)


def task_of(plan: DataPlan, corpus: Corpus) -> Task:
    """The task the plan asks for, else the one that goes with the shape of the examples."""
    if plan.task is not None:
        if SHAPES[plan.task] != corpus.shape:
            raise InputError(f"task {plan.task} needs {SHAPES[plan.task]}, and the data holds {corpus.shape}")
        return plan.task
    return next(task for task, shape in SHAPES.items() if shape == corpus.shape)


def _check(plan: DataPlan) -> None:
    if not plan.paths:
        raise InputError(
            f"no data is named: name files, a folder, or an embedded corpus ({', '.join(CORPORA)})"
        )
    check_roles(plan.columns)


def _check_shape(plan: DataPlan, shape: Shape, what: str) -> None:
    if plan.task is not None and SHAPES[plan.task] != shape:
        raise InputError(f"task {plan.task} needs {SHAPES[plan.task]}, and {what} holds {shape}")
    if plan.lowercase not in (False, True) and shape != "pairs":
        raise InputError(
            f"lowercase {plan.lowercase!r} lowers one side of pairs, and the data holds {shape}: set it to true or false"
        )


def _settings(plan: DataPlan) -> str:
    """Everything in a plan that changes the examples; the task alone does not."""
    names = ("format", "columns", "header", "pattern", "lowercase", "validation_share", "max_examples")
    wanted = {name: getattr(plan, name) for name in names} | {
        "columns": dict(plan.columns),
        "held": len(plan.validation),
    }
    return json.dumps([VERSION, wanted], sort_keys=True)


def _apart(source: Source, held: Source | None) -> Source:
    """The training files without those to validate on, which a folder or a glob may hold too."""
    if held is None:
        return source
    theirs = {path.resolve() for path in held.files}
    own = tuple(path for path in source.files if path.resolve() not in theirs)
    if not own or (source.format == "parallel" and len(own) < 2):
        raise InputError(f"{source.files[0]} is named to train on and to validate on: leave it out of one")
    left_out = len(source.files) - len(own)
    said = (f"{counted(left_out, 'validation file')} left out of training",) if left_out else ()
    return dataclasses.replace(source, files=own, said=(*source.said, *said))


# Text -------------------------------------------------------------------------------------------------------------------


def _open_text(
    plan: DataPlan,
    layout: Layout,
    source: Source,
    held: Source | None,
    mark: str,
    said: list[str],
    split: bool,
) -> Corpus:
    whole = stream(partial(read_documents, layout, source.files), bool(plan.lowercase), plan.max_examples)
    if held is None:
        return _text_corpus(plan, whole, mark, said, _empty(source), split)
    validation = stream(partial(read_documents, layout, held.files), bool(plan.lowercase), plan.max_examples)
    for part, files in ((whole, source), (validation, held)):
        if not look(part).documents:
            raise InputError(_empty(files))
    return Corpus("text", whole, validation, (), mark, tuple(said), size_of(whole))


def _empty(source: Source) -> str:
    return (
        f"{source.files[0]} is empty: there is no text in it"
        if len(source.files) == 1
        else "all files are empty: there is no text in them"
    )


def _text_corpus(
    plan: DataPlan, whole: Stream, mark: str, said: list[str], empty: str, split: bool
) -> Corpus:
    if not split:
        if not look(whole).documents:
            raise InputError(empty)
        return Corpus("text", [], whole, (), mark, tuple(said), 0)
    train, validation, sentence = split_text(whole, plan.validation_share, empty)
    return Corpus("text", train, validation, (), mark, (*said, sentence), size_of(train))


# Rows -------------------------------------------------------------------------------------------------------------------


def _open_rows(
    plan: DataPlan,
    layout: Layout,
    source: Source,
    held: Source | None,
    mark: str,
    said: list[str],
    split: bool,
) -> Corpus:
    rows, empty = _read(plan, layout, source)
    if empty:
        said.append(f"{counted(empty, 'row')} with an empty text left out")
    if (
        plan.header is None
        and layout.format in ("tsv", "csv")
        and layout.shape == "labels"
        and not layout.header
    ):
        said += _lone_first([row.label for row in rows if isinstance(row, Labelled)])
    if held is None:
        return _rows_corpus(plan, layout.shape, rows, mark, said, split)
    validation, empty = _read(plan, layout, held)
    if empty:
        said.append(f"{counted(empty, 'row')} to validate on with an empty text left out")
    known = _names(layout.shape, rows)
    if layout.shape == "labels":
        _judge([name for row in rows for name in names_of(row)])
    for row in validation:
        unknown = next((name for name in names_of(row) if name not in known), None)
        if unknown is not None:
            place = next(
                place
                for place, other in read_examples(layout, held.files)
                if other is not None and lowered(other, plan.lowercase) == row
            )
            noun = "tag" if layout.shape == "tags" else "label"
            raise InputError(
                f"{place}: the {noun} {unknown!r} does not occur in the training data, which has {listed(known)}"
            )
    said += _shared(
        [key_of(*key_parts(row)) for row in rows], [key_of(*key_parts(row)) for row in validation]
    )
    return _rows_made(layout.shape, rows, validation, mark, said)


def _shared(train: Sequence[int], validation: Sequence[int]) -> list[str]:
    """A word on examples that are on both sides, by their keys."""
    shared = sum(map(set(train).__contains__, validation))
    return (
        [f"{shared:,} of {len(validation):,} inputs to validate on are in the training data too"]
        if shared
        else []
    )


def _read(plan: DataPlan, layout: Layout, source: Source) -> tuple[list[Row], int]:
    read = [row for _, row in islice(read_examples(layout, source.files), plan.max_examples)]
    rows = [lowered(row, plan.lowercase) for row in read if row is not None]
    if not rows:
        why = f"every one of its {counted(len(read), 'row')} has an empty text; choose columns with --set data.columns=..."
        raise InputError(
            f"{source.files[0]} is empty: there is no example in it"
            if not read
            else f"{source.files[0]}: {why}"
        )
    return rows, len(read) - len(rows)


def _rows_corpus(
    plan: DataPlan, shape: Shape, rows: Sequence[Row], mark: str, said: list[str], split: bool
) -> Corpus:
    """Set apart a share of the rows for validation."""
    if not split:
        return _rows_made(shape, [], rows, mark, said)
    names = [names_of(row) for row in rows] if shape in ("labels", "tags") else None
    if shape == "labels":
        _judge([name for own in names or () for name in own])
    validates = split_keys([key_of(*key_parts(row)) for row in rows], plan.validation_share, names)
    said.append(f"{percent(plan.validation_share)} of the examples for validation, chosen by their content")
    return _rows_made(shape, _side(rows, validates, False), _side(rows, validates, True), mark, said)


def _lone_first(names: Sequence[str]) -> list[str]:
    """A word on a first row that may be a header after all, where the others tell a label from it."""
    alone = names[0] not in names[1:] and len(set(names)) * 2 < len(names)
    return (
        [f"no other row has the label {names[0]!r} of the first: if that is a header, --set data.header=true"]
        if alone
        else []
    )


def _judge(names: Sequence[str]) -> None:
    """Refuse labels that tell nothing."""
    classes = set(names)
    if len(classes) == 1 and len(names) > 1:
        raise InputError(
            f"every example has the label {names[0]!r}: there is nothing to tell apart; choose another column with --set data.columns=..."
        )
    if len(classes) == len(names) and len(names) > 1:
        raise InputError(
            f"the {len(names):,} examples have as many labels: choose another column with --set data.columns=..., "
            "or --set data.task=seq2seq to write the target out"
        )


def _judge_pictures(names: Sequence[str]) -> None:
    """Refuse classes that tell nothing."""
    way_out = "lay out a folder for each class, several pictures in each"
    if len(set(names)) == 1:
        raise InputError(
            f"every picture is of the class {names[0]!r}: there is nothing to tell apart; {way_out}"
        )
    if len(set(names)) == len(names):
        raise InputError(
            f"each of the {len(names):,} pictures is of a class of its own: there is nothing to learn a class from; {way_out}"
        )


def _rows_made(
    shape: Shape, rows: Sequence[Row], validation: Sequence[Row], mark: str, said: list[str]
) -> Corpus:
    names = _names(shape, [*rows, *validation])
    if names:
        said.append(
            f"{counted(len(names), 'tag') if shape == 'tags' else _classes(len(names))}: {listed(names)}"
        )
    if rows and shape == "labels" and len(names) * 2 > len(rows):
        said.append(f"{len(names):,} classes for {len(rows):,} examples: is this a label?")
    said.append(
        f"{counted(len(rows), 'example')} to train on, {len(validation):,} to validate on"
        if rows
        else counted(len(validation), "example")
    )
    # The shape says which of the kinds of rows all of them are.
    return Corpus(
        shape, cast(Rows, rows), cast(Rows, validation), names, mark, tuple(said), sum(map(bytes_of, rows))
    )


def _classes(count: int) -> str:
    return "1 class" if count == 1 else f"{count:,} classes"


def _side(items: Sequence[T], validates: Sequence[bool], side: bool) -> list[T]:
    return [item for item, held in zip(items, validates) if held is side]


def _names(shape: Shape, rows: Iterable[Row]) -> tuple[str, ...]:
    names = sort_names({name for row in rows for name in names_of(row)})
    return ("O", *(name for name in names if name != "O")) if "O" in names and shape == "tags" else names


def sort_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of classes in order: as numbers if all are, else by letters."""
    names = set(names)
    numbers = all(re.fullmatch("0|[1-9][0-9]{0,8}", name) for name in names)
    return tuple(sorted(names, key=int) if numbers else sorted(names))


# Pictures ---------------------------------------------------------------------------------------------------------------


def _open_pictures(plan: DataPlan, source: Source, held: Source | None, mark: str, split: bool) -> Corpus:
    train, validation, said = read_pictures(source, plan.max_examples)
    if held is not None:
        validation = read_pictures(held, plan.max_examples)[0]
    names = [*train.names, *(validation.names if validation else ())]
    mark = hashlib.sha256(
        "\0".join([mark, *names]).encode()
    ).hexdigest()  # folders name the classes: no file says them
    return _pictures_corpus(plan, train, validation, mark, [*source.said, *said], split)


def _pictures_corpus(
    plan: DataPlan, train: Pictures, validation: Pictures | None, mark: str, said: list[str], split: bool
) -> Corpus:
    if not split:
        whole = validation or train
        names = sort_names(whole.names)
        return Corpus(
            "images",
            _images(_part(whole, [False] * len(whole.names), True), names),
            _images(whole, names),
            names,
            mark,
            tuple(said),
            0,
        )
    _judge_pictures(train.names)
    if validation is None:
        keys = [key_of(picture.tobytes()) for picture in train.pixels]
        validates = split_keys(keys, plan.validation_share, [(name,) for name in train.names])
        said.append(
            f"{percent(plan.validation_share)} of the pictures for validation, chosen by their content"
        )
        train, validation = _part(train, validates, False), _part(train, validates, True)
    else:
        said += _shared(
            [key_of(picture.tobytes()) for picture in train.pixels],
            [key_of(picture.tobytes()) for picture in validation.pixels],
        )
    if train.pixels.shape[1:] != validation.pixels.shape[1:]:
        sizes = (" x ".join(map(str, part.pixels.shape[1:])) for part in (train, validation))
        raise InputError(
            "the pictures to train on are {} and those to validate on {}: bring all to one size first".format(
                *sizes
            )
        )
    names = sort_names(train.names)
    unknown = next((i for i, name in enumerate(validation.names) if name not in names), None)
    if unknown is not None:
        place, name = validation.places[unknown], validation.names[unknown]
        raise InputError(
            f"{place}: the label {name!r} does not occur in the training data, which has {listed(names)}"
        )

    size = " x ".join(map(str, train.pixels.shape[1:]))
    said += [
        f"{_classes(len(names))}: {listed(names)}",
        f"pictures of {size}: {len(train.names):,} to train on, {len(validation.names):,} to validate on",
    ]
    return Corpus("images", _images(train, names), _images(validation, names), names, mark, tuple(said), 0)


def _images(part: Pictures, names: Sequence[str]) -> Images:
    numbers = {name: number for number, name in enumerate(names)}
    return Images(part.pixels, np.array([numbers[name] for name in part.names], np.int64))


def _part(whole: Pictures, validates: Sequence[bool], side: bool) -> Pictures:
    chosen = np.array(validates) == side
    return Pictures(
        whole.pixels[chosen], _side(whole.names, validates, side), _side(whole.places, validates, side)
    )


# Embedded corpora -------------------------------------------------------------------------------------------------------


@listing()
def _embedded(plan: DataPlan) -> Embedded | None:
    """The embedded corpus a plan names; a file or folder of that name comes first, unless the plan says otherwise."""
    name = plan.paths[0]
    if plan.format == "corpus" and name not in CORPORA:
        raise InputError(
            f"there is no embedded corpus {name!r}{nearest(name, CORPORA)}; there are {', '.join(CORPORA)}"
        )
    free = plan.format is None and not Path(name).expanduser().exists()
    return CORPORA.get(name) if len(plan.paths) == 1 and (free or plan.format == "corpus") else None


def _open_embedded(plan: DataPlan, embedded: Embedded, split: bool) -> Corpus:
    shape = SHAPES[embedded.task]
    if plan.validation:
        raise InputError(
            f"the corpus {embedded.name} sets apart a share of itself: validation files do not go with it"
        )
    _check_shape(plan, shape, f"the corpus {embedded.name}")
    content, said = embedded.load(), [f"the embedded corpus {embedded.name}: {embedded.sentence}"]
    if isinstance(content, Pictures):
        chosen = spaced(len(content.names), plan.max_examples)
        content = Pictures(
            content.pixels[chosen], [content.names[i] for i in chosen], [content.places[i] for i in chosen]
        )
        mark = _mark(plan, [content.pixels.tobytes(), *(name.encode() for name in content.names)])
        return _pictures_corpus(plan, content, None, mark, said, split)
    if isinstance(content, list):
        rows = [lowered(row, plan.lowercase) for row in content[: plan.max_examples]]
        return _rows_corpus(
            plan, shape, rows, _mark(plan, (repr(tuple(row)).encode() for row in rows)), said, split
        )
    whole = stream(content, bool(plan.lowercase), plan.max_examples)
    return _text_corpus(
        plan,
        whole,
        _mark(plan, (chunk.text.encode() for chunk in whole)),
        said,
        "the standard library has no sources here",
        split,
    )


def _mark(plan: DataPlan, parts: Iterable[bytes]) -> str:
    total = hashlib.sha256(_settings(plan).encode())
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()
