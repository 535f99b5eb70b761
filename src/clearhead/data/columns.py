"""Which column plays which role: by name where there are names, by content where there are none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from clearhead.data.examples import Shape
from clearhead.data.plan import Task
from clearhead.data.tables import Record, listed
from clearhead.errors import InputError, nearest

# The roles of each shape, those it must have and those it may have; in the order in which shapes are looked for.
ROLES: dict[Shape, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "questions": (("question", "context", "answer"), ("start",)),
    "tags": (("words", "tags"), ()),
    "labels": (("text", "label"), ("pair",)),
    "pairs": (("source", "target"), ()),
    "text": (("text",), ()),
}
SHAPES: dict[Task, Shape] = {
    "lm": "text",
    "mlm": "text",
    "denoise": "text",
    "seq2seq": "pairs",
    "classify": "labels",
    "tag": "tags",
    "answer": "questions",
    "image": "images",
}
# Names that columns of each role go by, the likeliest first.
NAMES: dict[str, tuple[str, ...]] = {
    "text": (
        *(
            "text",
            "sentence",
            "sentence1",
            "text1",
            "premise",
            "question1",
            "review",
            "content",
            "document",
            "article",
            "body",
        ),
        *("comment", "tweet", "message", "utterance", "story", "question", "title", "name"),
    ),
    "pair": ("pair", "sentence2", "text2", "hypothesis", "question2", "text_pair"),
    "label": (
        "label",
        "labels",
        "class",
        "category",
        "gold_label",
        "sentiment",
        "stars",
        "rating",
        "score",
        "topic",
        "intent",
        "y",
    ),
    "source": (
        "source",
        "src",
        "input",
        "prompt",
        "instruction",
        "question",
        "article",
        "document",
        "text",
        "sentence",
    ),
    "target": (
        "target",
        "tgt",
        "output",
        "completion",
        "response",
        "summary",
        "highlights",
        "translation",
        "answer",
    ),
    "words": ("words", "tokens", "forms"),
    "tags": ("tags", "ner_tags", "pos_tags", "upos", "ner", "pos", "labels"),
    "question": ("question", "query"),
    "context": ("context", "passage", "paragraph"),
    "answer": ("answer", "answers", "answers.text"),
    "start": ("answer_start", "start", "answers.answer_start"),
}
LANGUAGES = frozenset(
    ("en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "no", "fi", "pl", "cs", "sk", "ru", "uk")
    + ("bg", "ro", "hu", "el", "tr", "ar", "he", "fa", "hi", "zh", "ja", "ko", "vi", "id", "th")
)
_IDS = frozenset(("id", "idx", "index", "guid"))
_KNOWN = frozenset(name for names in NAMES.values() for name in names) | LANGUAGES | _IDS
_NUMBER = re.compile(r"\s*[-+]?\d+([.,]\d+)?\s*")
_NAME = re.compile(r"[A-Za-z_][\w .-]{0,30}")
_UNNAMED = re.compile(
    r"unnamed:? \d+(\.\d+)?", re.IGNORECASE
)  # what pandas calls a column without a name, and what read_table does
MOST_CLASSES = 1000


def check_roles(columns: Mapping[str, str]) -> None:
    """Refuse roles that no shape has."""
    for role in columns:
        if role not in NAMES:
            raise InputError(
                f"data.columns knows no role {role!r}{nearest(role, NAMES)}; roles are {', '.join(NAMES)}"
            )


def has_header(rows: Sequence[Sequence[str]], columns: Mapping[str, str]) -> bool:
    """Does the first of some rows name the columns?"""
    first = [cell.strip() for cell in rows[0]]
    if any(name in first and not name.isdigit() for name in columns.values()):
        return True
    if any(_UNNAMED.fullmatch(cell) for cell in first):
        return True
    if not may_name_columns(first):
        return False
    named = [cell for cell in first if cell]
    known = len({cell.lower() for cell in named} & _KNOWN)
    if len(set(named)) < len(named):
        return (
            known >= 2
        )  # names given twice are a mistake that read_table tells; equal words may be an example
    columns_below = [[row[i].strip() for row in rows[1:] if len(row) > i] for i in range(len(first))]
    return (
        known >= min(2, len(first))
        or _above_numbers(first, columns_below)
        or _above_labels(first, columns_below)
    )


def may_name_columns(row: Sequence[str]) -> bool:
    """Could every cell of a row be the name of a column?"""
    return all(_NAME.fullmatch(cell.strip()) for cell in row if cell.strip())


def _above_numbers(first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Does a column hold only numbers, save for its first cell? Without a name it must be the index that pandas writes."""
    return any(
        bool(cells)
        and all(_NUMBER.fullmatch(cell) for cell in cells)
        and (bool(name) or (i == 0 and len(set(cells)) == len(cells)))
        for i, (name, cells) in enumerate(zip(first, below))
    )


def _above_labels(first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Does a column hold labels that all come again, save for its first cell, and does the first text differ from the others?

    A rare label may stand in the first row by chance, but hardly beside a text of one or two words, less than half as long as usual.
    """
    counts = [Counter(cells) for cells in below]
    labels = any(
        bool(name) and name not in count and 2 <= len(count) <= MOST_CLASSES and min(count.values()) > 1
        for name, count in zip(first, counts)
    )
    lengths = [(median(map(len, cells)), len(name)) for name, cells in zip(first, below) if name and cells]
    usual, own = max(lengths, default=(0, 0))
    return labels and own * 2 < usual and all(len(name.split()) < 3 for name in first)


def choose_columns(
    records: Sequence[Record], columns: Mapping[str, str], task: Task | None, named: bool
) -> tuple[Shape, dict[str, str]]:
    """Shape and column of each role; `records` are the first ones, `named` says whether columns have names."""
    names = list(dict.fromkeys(name for record in records for name in record.cells))
    if not names:
        raise InputError(
            f"{records[0].place} has no field, nor have those after it: there is nothing to learn from"
        )
    if task == "image":
        raise InputError("task image needs pictures: a folder for each class, an idx pair or an npz file")
    given = {role: find_column(column, names, records[0].place) for role, column in columns.items()}
    wanted = SHAPES.get(task) if task else _shape_of_roles(given)
    for shape in [wanted] if wanted else ROLES:
        if set(given) <= {*ROLES[shape][0], *ROLES[shape][1]}:
            roles = (
                _by_name(shape, records, names, given) if named else _by_content(shape, records, names, given)
            )
            if roles is not None:
                return shape, roles
    need = " and ".join(ROLES[wanted][0]) if wanted else "text, text and label, or source and target"
    shape = wanted or "labels"
    likely = _by_content(shape, records, names, given) or {
        role: names[min(i, len(names) - 1)] for i, role in enumerate(ROLES[shape][0])
    }
    example = ", ".join(f'{role} = "{listed([column])}"' for role, column in likely.items())
    raise InputError(
        f"{records[0].place}: which columns hold {need}? There are {listed(names)}; say it, such as --set data.columns='{{{example}}}'"
    )


def find_column(column: str, names: Sequence[str], place: str) -> str:
    """The column of this name, or the one that ends in it after a dot."""
    if column in names:
        return column
    inner = [name for name in names if name.endswith(f".{column}")]
    if len(inner) == 1:
        return inner[0]
    raise InputError(f"{place}: no column {column!r}{nearest(column, names)}; there are {listed(names)}")


def _shape_of_roles(given: Mapping[str, str]) -> Shape | None:
    """The shape that the given roles belong to, if there is no doubt."""
    fits = [
        shape
        for shape, (needed, more) in ROLES.items()
        if set(given) <= {*needed, *more} and set(needed) <= set(given)
    ]
    partly = [shape for shape, (needed, more) in ROLES.items() if set(given) <= {*needed, *more}]
    if given and not partly:
        raise InputError(f"data.columns names roles that do not go together: {', '.join(given)}")
    return fits[0] if given and fits else partly[0] if given and len(partly) == 1 else None


def _by_name(
    shape: Shape, records: Sequence[Record], names: Sequence[str], given: Mapping[str, str]
) -> dict[str, str] | None:
    needed, more = ROLES[shape]
    low = {name.lower(): name for name in reversed(names)}
    roles = dict(given)
    # Roles with few names of their own choose first: `text` would take almost anything.
    for role in sorted({*needed, *more} - set(given), key=lambda role: (len(NAMES[role]), role)):
        free = (low[name] for name in NAMES[role] if name in low and low[name] not in roles.values())
        if (column := next(free, None)) is not None:
            roles[role] = column
    left = [name for name in names if name not in roles.values()]
    if shape == "pairs" and not roles:
        languages = [name for name in left if name.lower().rpartition(".")[2] in LANGUAGES]
        roles = dict(zip(("source", "target"), languages)) if len(languages) == 2 else {}
    telling = [name for name in left if name.lower() not in _IDS and not _UNNAMED.fullmatch(name)]
    if (
        shape == "labels"
        and set(roles) == {"text"}
        and len(telling) == 1
        and _few_values(records, telling[0])
    ):
        roles["label"] = telling[0]
    if shape == "text" and not roles and len(left) == 1:
        roles["text"] = left[0]
    return (
        {role: roles[role] for role in (*needed, *more) if role in roles}
        if set(needed) <= set(roles)
        else None
    )


def _by_content(
    shape: Shape, records: Sequence[Record], names: Sequence[str], given: Mapping[str, str]
) -> dict[str, str] | None:
    """Columns without names: the one with few values is the label, the longest of the others the text; pairs are the first two texts."""
    needed, more = ROLES[shape]
    roles = dict(given)
    left = [name for name in names if name not in roles.values()]
    if shape == "labels" and len(left) > 1 and "label" not in roles:
        few = [name for name in reversed(left) if _few_values(records, name)]
        if few:
            roles["label"] = min(few, key=lambda name: _gaps_and_values(records, name))
            left.remove(roles["label"])
    if shape == "labels" and left and "label" in roles and "text" not in roles:
        roles["text"] = max(
            left, key=lambda name: sum(len(str(record.cells.get(name))) for record in records)
        )
    if shape == "pairs" and not roles:
        texts = [
            name
            for name in left
            if not all(_NUMBER.fullmatch(str(record.cells.get(name))) for record in records)
        ]
        roles = dict(zip(("source", "target"), texts))
    if shape == "text" and not roles and len(left) == 1:
        roles["text"] = left[0]
    return (
        {role: roles[role] for role in (*needed, *more) if role in roles}
        if set(needed) <= set(roles)
        else None
    )


def _few_values(records: Sequence[Record], name: str) -> bool:
    """Does a column look like labels: some values, most of them more than once?"""
    values = {str(record.cells.get(name)) for record in records}
    return 2 <= len(values) <= min(MOST_CLASSES, (len(records) + 1) // 2)


def _gaps_and_values(records: Sequence[Record], name: str) -> tuple[bool, int]:
    """How unlike labels a column is: one with empty cells more than any other, then one with many values."""
    values = {str(record.cells.get(name)).strip() for record in records}
    return "" in values, len(values)


def value_of(record: Record, column: str) -> Any:
    """The cell of a record, which must be there."""
    if column not in record.cells:
        raise InputError(
            f"{record.place} has no field {column!r}{nearest(column, record.cells)}; it has {listed(record.cells) or 'none'}"
        )
    return record.cells[column]
