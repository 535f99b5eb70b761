"""Find which column plays which role: by name where there are names, by content where there are none."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from clearhead.data.examples import LABELS, PAIRS, QUESTIONS, TAGS, TEXT, Shape
from clearhead.data.tables import Record, listed
from clearhead.errors import InputError, nearest, refuse

GUESSED = (QUESTIONS, TAGS, LABELS, PAIRS, TEXT)  # shapes in the order in which they are looked for
# Names that columns of each role go by, the likeliest first.
NAMES: dict[str, tuple[str, ...]] = {
    "text": (
        *("text", "sentence", "sentence1", "text1", "premise", "question1", "review", "content", "document"),
        *(
            "article",
            "body",
            "comment",
            "tweet",
            "message",
            "utterance",
            "story",
            "question",
            "title",
            "name",
        ),
    ),
    "pair": ("pair", "sentence2", "text2", "hypothesis", "question2", "text_pair"),
    "label": (
        *("label", "labels", "class", "category", "gold_label", "sentiment"),
        *("stars", "rating", "score", "topic", "intent", "y"),
    ),
    "source": (
        *("source", "src", "input", "prompt", "instruction"),
        *("question", "article", "document", "text", "sentence"),
    ),
    "target": (
        *("target", "tgt", "output", "completion", "response"),
        *("summary", "highlights", "translation", "answer"),
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
# The name that pandas, and clearhead, give to an unnamed column.
_UNNAMED = re.compile(r"unnamed:? \d+(\.\d+)?", re.IGNORECASE)
MOST_CLASSES = 1000


# Headers ---------------------------------------------------------------------------------------------------


def has_header(rows: Sequence[Sequence[str]], columns: Mapping[str, str]) -> bool:
    """Return True if the first of some rows names the columns."""
    first = [cell.strip() for cell in rows[0]]
    named = [cell for cell in first if cell]
    given = any(name in first and not name.isdigit() for name in columns.values())
    certain = given or any(map(_UNNAMED.fullmatch, first))
    if certain or not may_name_columns(first):
        return certain
    known = len({cell.lower() for cell in named} & _KNOWN)
    if len(set(named)) < len(named):
        return known >= 2  # `read_table` refuses names given twice; equal words may be an example
    below = [[row[i].strip() for row in rows[1:] if len(row) > i] for i in range(len(first))]
    return known >= min(2, len(first)) or _above_numbers(first, below) or _above_labels(first, below)


def may_name_columns(row: Sequence[str]) -> bool:
    """Return True if every cell of a row could be the name of a column."""
    return all(_NAME.fullmatch(cell.strip()) for cell in row if cell.strip())


def _above_numbers(first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Return True if a column holds only numbers below its first cell.

    Where the first cell is empty, the column must be the index that pandas writes.
    """
    return any(
        bool(cells)
        and all(map(_NUMBER.fullmatch, cells))
        and (bool(name) or (i == 0 and len(set(cells)) == len(cells)))
        for i, (name, cells) in enumerate(zip(first, below))
    )


def _above_labels(first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Return True if a column of repeated labels has another first cell, beside an unusual first text.

    A rare label may stand in the first row by chance, but hardly beside a text of one or two words, less than
    half as long as usual.
    """
    labels = any(
        bool(name) and name not in count and 2 <= len(count) <= MOST_CLASSES and min(count.values()) > 1
        for name, count in zip(first, map(Counter, below))
    )
    lengths = [(median(map(len, cells)), len(name)) for name, cells in zip(first, below) if name and cells]
    usual, own = max(lengths, default=(0, 0))
    return labels and own * 2 < usual and all(len(name.split()) < 3 for name in first)


# Roles -----------------------------------------------------------------------------------------------------


def check_roles(columns: Mapping[str, str]) -> None:
    """Refuse roles that no shape has."""
    for role in columns:
        refuse(
            role not in NAMES,
            f"data.columns knows no role {role!r}{nearest(role, NAMES)}; roles are {', '.join(NAMES)}",
        )


def choose_columns(
    records: Sequence[Record], columns: Mapping[str, str], wanted: Shape | None, named: bool
) -> tuple[Shape, dict[str, str]]:
    """Return the shape of the data and the column of each role.

    Args:
        records: the first rows.
        columns: role = column, as far as the user chose.
        wanted: the shape that the task needs; None: guessed.
        named: whether the columns have names.
    """
    names = list(dict.fromkeys(name for record in records for name in record.cells))
    place = records[0].place
    refuse(not names, f"{place} has no field, nor have those after it: there is nothing to learn from")
    given = {role: find_column(column, names, place) for role, column in columns.items()}
    wanted = wanted or _shape_of_roles(given)
    find = _by_name if named else _by_content
    for shape in (wanted,) if wanted else GUESSED:
        if set(given) <= set(shape.roles):
            alone = shape is TEXT and not given and len(names) == 1
            found = {"text": names[0]} if alone else find(shape, records, names, given)
            if set(shape.needed) <= set(found):
                return shape, {role: found[role] for role in shape.roles if role in found}
    shape = wanted or LABELS
    found = _by_content(shape, records, names, given)
    if not set(shape.needed) <= set(found):
        found = {role: names[min(i, len(names) - 1)] for i, role in enumerate(shape.needed)}
    need = " and ".join(wanted.needed) if wanted else "text, text and label, or source and target"
    example = ", ".join(f'{role} = "{listed([found[role]])}"' for role in shape.roles if role in found)
    raise InputError(
        f"{place}: which columns hold {need}? There are {listed(names)}; say it, such as "
        f"--set data.columns='{{{example}}}'"
    )


def find_column(column: str, names: Sequence[str], place: str) -> str:
    """Return the column of this name, or the only one that ends in it after a dot."""
    inner = [name for name in names if name.endswith(f".{column}")]
    refuse(
        column not in names and len(inner) != 1,
        f"{place}: no column {column!r}{nearest(column, names)}; there are {listed(names)}",
    )
    return column if column in names else inner[0]


def _shape_of_roles(given: Mapping[str, str]) -> Shape | None:
    """Return the shape that the given roles belong to, if there is no doubt."""
    partly = [shape for shape in GUESSED if set(given) <= set(shape.roles)]
    whole = [shape for shape in partly if set(shape.needed) <= set(given)]
    refuse(given and not partly, f"data.columns names roles that do not go together: {', '.join(given)}")
    certain = whole or (partly if len(partly) == 1 else [])
    return certain[0] if given and certain else None


def _by_name(
    shape: Shape, records: Sequence[Record], names: Sequence[str], given: Mapping[str, str]
) -> dict[str, str]:
    low, roles = {name.lower(): name for name in reversed(names)}, dict(given)
    # Roles with few names of their own choose first: `text` would take almost anything.
    for role in sorted(set(shape.roles) - set(given), key=lambda role: (len(NAMES[role]), role)):
        free = [low[name] for name in NAMES[role] if name in low and low[name] not in roles.values()]
        roles |= {role: free[0]} if free else {}
    left = [name for name in names if name not in roles.values()]
    if shape is PAIRS and not roles:
        languages = [name for name in left if name.lower().rpartition(".")[2] in LANGUAGES]
        roles = dict(zip(shape.needed, languages)) if len(languages) == 2 else {}
    telling = [name for name in left if name.lower() not in _IDS and not _UNNAMED.fullmatch(name)]
    if "label" in shape.needed and set(roles) == {"text"} and len(telling) == 1:
        roles |= {"label": telling[0]} if _like_labels(shape, records, telling[0]) else {}
    return roles


def _by_content(
    shape: Shape, records: Sequence[Record], names: Sequence[str], given: Mapping[str, str]
) -> dict[str, str]:
    """Find columns without names.

    The label is the column that looks like one, the text the longest of the others. Pairs are the first two
    texts.
    """
    roles = dict(given)
    left = [name for name in names if name not in roles.values()]
    if "label" in shape.needed and len(left) > 1 and "label" not in roles:
        few = [name for name in reversed(left) if _like_labels(shape, records, name)]
        if few:
            roles["label"] = min(few, key=lambda name: _gaps_and_values(records, name))
            left.remove(roles["label"])
    if "label" in shape.needed and left and "label" in roles and "text" not in roles:
        lengths = {name: sum(len(str(record.cells.get(name))) for record in records) for name in left}
        roles["text"] = max(left, key=lengths.__getitem__)
    if shape is PAIRS and not roles:
        roles = dict(zip(shape.needed, (name for name in left if not _numeric(records, name))))
    return roles


def _like_labels(shape: Shape, records: Sequence[Record], name: str) -> bool:
    """Return True if a column looks like labels: some values, most of them more than once; or numbers."""
    values = {str(record.cells.get(name)) for record in records}
    few = 2 <= len(values) <= min(MOST_CLASSES, (len(records) + 1) // 2)
    return few if shape is LABELS else _numeric(records, name)


def _numeric(records: Sequence[Record], name: str) -> bool:
    return all(_NUMBER.fullmatch(str(record.cells.get(name))) for record in records)


def _gaps_and_values(records: Sequence[Record], name: str) -> tuple[bool, int]:
    """Return how unlike labels a column is: whether it has empty cells, and its number of values."""
    values = {str(record.cells.get(name)).strip() for record in records}
    return "" in values, len(values)
