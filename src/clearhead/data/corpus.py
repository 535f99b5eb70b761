"""`open_data`: from a plan to its `Corpus`, the examples to train on and to validate on.

Files are found (`formats`), laid out (`layout`), read and split. Whatever the plan leaves open is guessed,
with a note.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import cast

from clearhead.data.columns import check_roles
from clearhead.data.corpora import CORPORA, Embedded
from clearhead.data.examples import (
    IMAGES,
    LABELS,
    PAIRS,
    TEXT,
    Corpus,
    Example,
    Labelled,
    Shape,
)
from clearhead.data.files import digest, listing
from clearhead.data.formats import Source, find_source, same_way
from clearhead.data.layout import Layout, lay_out
from clearhead.data.pictures import Pictures, read_pictures, spaced
from clearhead.data.plan import DataPlan
from clearhead.data.sides import given_corpus, pictures_corpus, rows_corpus, text_corpus
from clearhead.data.tables import counted
from clearhead.data.text import look, stream
from clearhead.errors import InputError, nearest, refuse

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
    refuse(
        not plan.paths,
        f"no data is named: name files, a folder, or an embedded corpus ({', '.join(CORPORA)})",
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
        return pictures_corpus(plan, train, test, fingerprint, [*source.notes, *notes], split)
    layout, notes = lay_out(plan, source, wanted, others)
    _check_shape(plan, layout.shape, wanted, str(first))
    if layout.shape is not TEXT:
        return _open_rows(plan, layout, source, validation, fingerprint, notes, split)
    whole, test_text = (
        stream(partial(layout.documents, files), bool(plan.lowercase), plan.max_examples)
        for files in (source.files, others)
    )
    if validation is None:
        return text_corpus(plan, whole, fingerprint, notes, _empty(source), split)
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
    refuse(
        validation.format != source.format,
        f"the data is {source.format} and the validation files are {validation.format}"
        f": both must be of one format; if they are, --set data.format={source.format}",
    )
    left_out = len(source.files) - len(own)
    note = (f"{counted(left_out, 'validation file')} left out of training",) if left_out else ()
    return dataclasses.replace(source, files=own, notes=(*source.notes, *note))


# Text ------------------------------------------------------------------------------------------------------


def _empty(source: Source) -> str:
    one = f"{source.files[0]} is empty: there is no text in it"
    return one if len(source.files) == 1 else "all files are empty: there is no text in them"


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
        return rows_corpus(plan, layout.shape, rows, fingerprint, notes, split)
    test, places = _read(plan, layout, validation, notes, "to validate on with an empty text")
    return given_corpus(layout.shape, rows, test, places, fingerprint, notes)


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


# Embedded corpora ------------------------------------------------------------------------------------------


@listing()
def _embedded(plan: DataPlan) -> Embedded | None:
    """Return the embedded corpus a plan names.

    A file or folder of that name comes first, unless the plan differs.
    """
    name = plan.paths[0]
    refuse(
        plan.format == "corpus" and name not in CORPORA,
        f"there is no embedded corpus {name!r}{nearest(name, CORPORA)}; there are {', '.join(CORPORA)}",
    )
    free = plan.format is None and not Path(name).expanduser().exists()
    return CORPORA.get(name) if len(plan.paths) == 1 and (free or plan.format == "corpus") else None


def _open_embedded(plan: DataPlan, embedded: Embedded, wanted: Shape | None, split: bool) -> Corpus:
    refuse(
        plan.validation,
        f"the corpus {embedded.name} sets apart a share of itself: validation files do not go with it",
    )
    _check_shape(plan, embedded.shape, wanted, f"the corpus {embedded.name}")
    content, notes = embedded.load(), [f"the embedded corpus {embedded.name}: {embedded.sentence}"]
    if isinstance(content, Pictures):
        content = content.take(spaced(len(content.names), plan.max_examples))
        fingerprint = _hash(plan, [content.pixels.tobytes(), *(name.encode() for name in content.names)])
        return pictures_corpus(plan, content, None, fingerprint, notes, split)
    if isinstance(content, list):
        some: Sequence[Example] = content[: plan.max_examples]
        rows = [row.lowered(plan.lowercase) if plan.lowercase else row for row in some]
        fingerprint = _hash(plan, (repr(dataclasses.astuple(cast(Labelled, row))).encode() for row in rows))
        return rows_corpus(plan, embedded.shape, rows, fingerprint, notes, split)
    whole = stream(content, bool(plan.lowercase), plan.max_examples)
    fingerprint = _hash(plan, (chunk.text.encode() for chunk in whole))
    return text_corpus(plan, whole, fingerprint, notes, "the standard library has no sources here", split)


def _hash(plan: DataPlan, parts: Iterable[bytes]) -> str:
    total = hashlib.sha256(_settings(plan).encode())
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()
