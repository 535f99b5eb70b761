"""Decide how the files of a source are read: which format, whether a header, which column plays which role.

Columns are found by name where there are names, by content where there are none. The first file that is not
blank decides; tables may differ in having a header.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

from clearhead.errors import InputError, nearest, refuse
from clearhead.learn.data import conll, tables
from clearhead.learn.data.examples import (
    Chunk,
    Conversation,
    Example,
    Labelled,
    Pair,
    Picture,
    Preference,
    Question,
    RowType,
    Tagged,
)
from clearhead.learn.data.files import blank, read_blocks
from clearhead.learn.data.formats import LANGUAGES, Source
from clearhead.learn.data.given import read_arrow
from clearhead.learn.data.plan import DataPlan

# Names of columns, and whether the first row of a table has them --------------------------------------------

# Names that columns of each role go by, the likeliest first.
NAMES: dict[str, tuple[str, ...]] = {
    role: tuple(" ".join(names.split()).split(", "))
    for role, names in {
        "text": """
            text, sentence, sentence1, text1, premise, question1, review, content, document, article,
            body, comment, tweet, message, utterance, story, question, title, name, satz, kommentar,
            bewertungstext, texte, phrase, commentaire, avis, texto, frase, comentario, reseña, testo,
            recensione, tekst, zin, zdanie, metin, текст, предложение, отзыв, комментарий, речення,
            відгук, κείμενο, نص, النص, טקסט, पाठ, वाक्य, ข้อความ, văn bản, 文本, 文字, 句子, 内容, 评论, 本文,
            テキスト, 文, 텍스트, 문장""",
        "pair": "pair, sentence2, text2, hypothesis, question2, text_pair",
        "label": """
            label, labels, class, category, gold_label, sentiment, stars, rating, score, topic, intent, y,
            klasse, kategorie, bewertung, étiquette, classe, catégorie, note, etiqueta, clase, categoría,
            etichetta, categoria, rótulo, etykieta, klasa, etiket, метка, класс, категория, оценка, мітка,
            клас, ετικέτα, تصنيف, الفئة, תווית, लेबल, श्रेणी, ป้ายกำกับ, nhãn, 标签, 标记, 类别, 情感, ラベル,
            分類, カテゴリ, 레이블, 라벨, 분류""",
        "source": "source, src, input, prompt, instruction, question, article, document, text, sentence",
        "target": "target, tgt, output, completion, response, summary, highlights, translation, answer",
        "words": "words, tokens, forms",
        "tags": "tags, ner_tags, pos_tags, upos, ner, pos, labels",
        "question": "question, query",
        "context": "context, passage, paragraph",
        "answer": "answer, answers, answers.text",
        "start": "answer_start, start, answers.answer_start",
        "messages": "messages, conversations, conversation, dialogue",
        "prompt": "prompt, instruction",
        "completion": "completion, response, output",
        "input": "input, context",
        "system": "system, system_prompt",
        "tools": "tools, functions",
        "anchor": "anchor, query, question, sentence1, text1, premise, text, sentence, claim",
        "positive": """
            positive, pos, passage, document, sentence2, text2, hypothesis, pair, answer, context""",
        "negative": "negative, neg, hard_negative",
        "score": "score, similarity, similarity_score, label",
        "chosen": "chosen",
        "rejected": "rejected",
    }.items()
}
IDS = frozenset(("id", "idx", "index", "guid"))
_KNOWN = frozenset(name for names in NAMES.values() for name in names) | LANGUAGES | IDS
_NUMBER = re.compile(r"\s*[-+]?\d+([.,]\d+)?\s*")
# The name that pandas, and clearhead, give to an unnamed column.
UNNAMED = re.compile(r"unnamed:? \d+(\.\d+)?", re.IGNORECASE)
MOST_CLASSES = 1000
LONGEST = 100  # letters of a column's name
_COUNTS = frozenset(("#", "№"))  # names without a letter
MISSING = frozenset(("n/a", "na", "nan", "none", "null", "nil", "missing"))
# Signs that names have more often than labels.
_WRITTEN = re.compile(r"[()\[\]{}<>/\\|_#=（）［］【】「」／｜]|[a-z][A-Z]|[:：]$")


def has_header(rows: Sequence[Sequence[str]], columns: Mapping[str, str]) -> bool:
    """Return True if the first of some rows names the columns."""
    first = [cell.strip() for cell in rows[0]]
    named = [cell for cell in first if cell]
    chosen = any(name in first and not name.isdigit() for name in columns.values())
    certain = chosen or any(map(UNNAMED.fullmatch, first))
    if certain or not may_name_columns(first):
        return certain
    known = len({cell.lower() for cell in named} & _KNOWN)
    if len(set(named)) < len(named):
        return known >= 2  # `read_table` refuses names given twice; equal words may be an example
    below = _below(rows)
    return known >= min(2, len(first)) or _above_numbers(first, below) or _above_labels(first, below)


def may_name_columns(row: Sequence[str]) -> bool:
    """Return True if every cell of a row could be the name of a column, in any language."""
    return all(map(_may_name, filter(None, map(str.strip, row))))


def repeats_a_label(rows: Sequence[Sequence[str]]) -> bool:
    """Return True if the first row has a label that others of its column have too."""
    counts = map(Counter, _below(rows))
    return any(count[name.strip()] > 0 and _labels(count) for name, count in zip(rows[0], counts))


def all_numbers(cells: Iterable[str]) -> bool:
    """Return True if every cell is a number."""
    return all(map(_NUMBER.fullmatch, cells))


def numbers_rows(cells: Sequence[str]) -> bool:
    """Return True if a column only tells rows apart: no letters, and no value twice, as numbers and dates."""
    return len(set(cells)) == len(cells) and not any(map(_has_letters, cells))


def _below(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the columns without their first cells."""
    return [[row[i].strip() for row in rows[1:] if len(row) > i] for i in range(len(rows[0]))]


def _may_name(cell: str) -> bool:
    """Return True for one short line with letters, no sentence, that does not say "missing"."""
    sentence = cell.endswith((".", "!", "。", "！", "…")) or ". " in cell or "! " in cell
    named = _has_letters(cell) and cell.isprintable() and cell.lower() not in MISSING
    return cell in _COUNTS or (named and len(cell) <= LONGEST and not sentence)


def _has_letters(cell: str) -> bool:
    return any(map(str.isalpha, cell))


def _above_numbers(first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Return True if a column holds numbers, dates or signs below its first cell, and no letters.

    Where the first cell is empty, the column must be the index that pandas writes.
    """
    return any(
        bool(cells)
        and not any(map(_has_letters, cells))
        and (all(cells) if name else i == 0 and len(set(cells)) == len(cells) and all_numbers(cells))
        for i, (name, cells) in enumerate(zip(first, below))
    )


def _labels(count: Counter[str]) -> bool:
    """Return True if a column holds labels: some values, each more than once."""
    return 2 <= len(count) <= MOST_CLASSES and min(count.values()) > 1


def _above_labels(first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Return True if a column of labels has another first cell, in a row that is unlike the others.

    A rare label may stand in the first row by chance. But hardly next to a text of one or two words that is
    at most half as long as usual, nor where it is much longer than the labels, uses a word for labels, or
    has signs that names have and the labels have not.
    """
    labels = {
        name: count for name, count in zip(first, map(Counter, below)) if name not in count and _labels(count)
    }
    lengths = [(median(map(len, cells)), len(name)) for name, cells in zip(first, below) if name and cells]
    if not any(labels) or not lengths:
        return False
    usual, own = max(lengths)
    short = own * 2 <= usual and all(len(name.split()) < 3 for name in first)
    return short or any(
        (len(name) > 15 and len(name) > 2 * max(map(len, count)))
        or any(word in NAMES["label"] for word in re.findall(r"\w\w+", name.lower()))
        or (_WRITTEN.search(name) and not any(map(_WRITTEN.search, count)))
        for name, count in labels.items()
    )


# The layout of a source -------------------------------------------------------------------------------------


SAMPLE = 1000  # rows from which columns are guessed
# Classes of rows in the order in which they are looked for
GUESSED: tuple[RowType, ...] = (Preference, Conversation, Question, Tagged, Labelled, Pair, Chunk)
# Formats whose rows are of one class
_FIXED: dict[str, RowType] = {"text": Chunk, "conll": Tagged, "parallel": Pair}


Row = TypeVar("Row")


class Layout(NamedTuple):
    """How the files of a source are read."""

    format: str
    row: RowType
    roles: Mapping[str, str]
    header: bool = False
    # Columns of the first table, for tables that differ in having a header; (): none may.
    names: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    tags: conll.TagColumns | None = None
    how: tables.Reading = tables.STRICT

    def documents(self, files: Sequence[Path]) -> Iterator[Iterable[str]]:
        """Yield the documents of text files, each in blocks: a file is one, else a record is one."""
        if self.format == "text":
            return (read_blocks(path, self.how.encoding) for path in files)
        return ((text,) for _, text in self._read(files, lambda record: record.text(self.roles["text"])))

    def examples(self, files: Sequence[Path]) -> Iterator[tuple[str, Example | None]]:
        """Yield the examples with their places; None where a text is empty."""
        return self._read(files, lambda record: self.row.read(record, self.roles))

    def _read(self, files: Sequence[Path], read: Callable[[tables.Record], Row]) -> Iterator[tuple[str, Row]]:
        return self.how.sift(self._records(files), lambda record: [(record.place, read(record))])

    def _records(self, files: Sequence[Path]) -> Iterator[tables.Record]:
        if self.format == "parallel":
            yield from tables.read_parallel(files, self.how.encoding)
            return
        for path in files:
            if self.tags is not None:
                records = conll.read_tagged(path, self.tags, self.how)
            elif self.pattern is not None:
                records = tables.read_matches(path, self.pattern, self.how)
            elif self.format == "jsonl":
                records = tables.read_json(path, self.how)
            elif self.format == "arrow":
                records = (tables.Record(place, tables.flat(row, place)) for place, row in read_arrow(path))
            else:
                unlike = self.unlike(path)
                names = self.names if unlike else ()
                records = tables.read_table(path, self.format, self.header != unlike, names, self.how)
            for number, record in enumerate(records):
                for column in self.roles.values() if number == 0 and self.header else ():
                    find_column(column, list(record.cells), f"{path}")
                yield record

    def unlike(self, path: Path) -> bool:
        """Return True if a table surely differs from the first in having a header, or in having none."""
        rows = _sample(path, self.format, SAMPLE, self.how.encoding) if self.names else []
        if not rows or len(rows[0]) != len(self.names):
            return False
        if not self.header:
            return has_header(rows, {})
        known = set(self.names) & set(tables.column_names(rows[0], header=True))
        return not known and (not may_name_columns(rows[0]) or repeats_a_label(rows))


def lay_out(
    plan: DataPlan,
    source: Source,
    how: tables.Reading,
    wanted: RowType | None,
    validation: Sequence[Path] = (),
) -> tuple[Layout, list[str]]:
    """Decide how files are read -> the layout, and a note for each choice, also about `validation` files."""
    notes, format = list(source.notes), source.format
    first = next((path for path in source.files if not blank(path, how.encoding)), source.files[0])
    if format in _FIXED:
        row = _FIXED[format]
        roles = {} if row is Chunk else {role: role for role in row.NEEDED}
        unused = [role for role in plan.columns if role not in roles]
        if unused:
            notes.append(f"data.columns is not used for {', '.join(unused)}, as the format is {format}")
        tags = conll.tag_columns(first, plan.columns, how.encoding) if row is Tagged else None
        notes += [tags.note] if tags else []
        return Layout(format, row, roles, tags=tags, how=how), notes
    table = format in ("tsv", "csv")
    rows = _sample(first, format, SAMPLE, how.encoding) if table else []
    header = table and bool(has_header(rows, plan.columns) if plan.header is None and rows else plan.header)
    names = tables.column_names(rows[0], header) if rows and plan.header is None else ()
    pattern = None if plan.pattern is None else _pattern(plan.pattern)
    draft = Layout(format, Chunk, {}, header, names, pattern, how=how)
    records = list(islice(draft._records(source.files), SAMPLE))
    how.notes(records)
    refuse(not records, f"{first} is empty: there is no row in it" + (" below the header" if header else ""))
    refuse(
        wanted is Picture,
        f"task {plan.task} needs pictures: a folder for each class, an idx pair or an npz file"
        f"; {first} is {format}",
    )
    row, roles = choose_columns(records, plan.columns, wanted, named=header or not table)
    width = tables.counted(len(records[0].cells), "field" if format == "jsonl" else "column")
    headed = f" {'with' if header else 'without'} a header" if table else ""
    named = tables.listed(f"{role} from `{column}`" for role, column in roles.items())
    notes.append(f"{width}{headed}: {named}")
    unlike = [path.name for path in (*source.files, *validation) if draft.unlike(path)]
    if unlike:
        notes.append(
            f"{'no' if header else 'a'} header in {tables.listed(unlike)}"
            f": columns taken in the order of {first.name}"
        )
    return draft._replace(row=row, roles=roles), notes


def _sample(path: Path, format: str, most: int, encoding: str | None) -> list[list[str]]:
    return [row for _, row in islice(tables.read_rows(path, format, encoding), most)]


def _pattern(written: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(written)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"the pattern {written!r} is no regular expression: {error}") from None
    refuse(
        not pattern.groupindex,
        f"the pattern {written!r} has no named groups: write them as (?P<source>...) and (?P<target>...)",
    )
    return pattern


# Roles -----------------------------------------------------------------------------------------------------


def check_roles(columns: Mapping[str, str]) -> None:
    """Refuse roles that no row has."""
    for role in columns:
        refuse(
            role not in NAMES,
            f"data.columns knows no role {role!r}{nearest(role, NAMES)}; roles are {', '.join(NAMES)}",
        )


def choose_columns(
    records: Sequence[tables.Record], columns: Mapping[str, str], wanted: RowType | None, named: bool
) -> tuple[RowType, dict[str, str]]:
    """Return the class of the rows and the column of each role.

    `records` are the first rows, `columns` what the user chose, `wanted` is the class that the task needs
    (None: detected), and `named` says whether the columns have names.
    """
    names, place = list(dict.fromkeys(name for record in records for name in record.cells)), records[0].place
    cells = {name: [str(record.cells.get(name)) for record in records] for name in names}
    refuse(not names, f"{place} has no field, nor have those after it: there is nothing to learn from")
    chosen = {role: find_column(column, names, place) for role, column in columns.items()}
    wanted = wanted or _row_of_roles(chosen)
    find = _by_name if named else _by_content
    for row in (wanted,) if wanted else GUESSED:
        if set(chosen) <= set(row.roles()):
            alone = row is Chunk and not chosen and len(names) == 1
            columns_by_role = {"text": names[0]} if alone else find(row, cells, chosen)
            if row.complete(columns_by_role):
                return row, row.ordered(columns_by_role)
    unnamed = any(map(UNNAMED.fullmatch, names))
    for row in (wanted or Labelled, Pair) if named and not unnamed and not chosen else ():
        columns_by_role = _by_content(row, cells, _by_name(row, cells, chosen))
        clear = row is not Pair or sum(not all_numbers(some) for some in cells.values()) == 2
        if wanted in (None, row) and clear and row.complete(columns_by_role):
            return row, row.ordered(columns_by_role)
    row = wanted or Labelled
    columns_by_role = _by_content(row, cells, chosen)
    if not row.complete(columns_by_role):
        columns_by_role = {role: names[min(i, len(names) - 1)] for i, role in enumerate(row.NEEDED)}
    need = "text, text and label, or source and target"
    if wanted:
        need = ", or ".join(" and ".join(roles) for roles in (wanted.NEEDED, wanted.INSTEAD) if roles)
    columns_by_role = row.ordered(columns_by_role)
    example = ", ".join(f'{role} = "{tables.listed([name])}"' for role, name in columns_by_role.items())
    raise InputError(
        f"{place}: which columns hold {need}? There are {tables.listed(names)}; say it, such as "
        f"--set data.columns='{{{example}}}'"
    )


def find_column(column: str, names: Sequence[str], place: str) -> str:
    """Return the column of this name, or the only one that ends in it after a dot."""
    inner = [name for name in names if name.endswith(f".{column}")]
    refuse(
        column not in names and len(inner) != 1,
        f"{place}: no column {column!r}{nearest(column, names)}; there are {tables.listed(names)}",
    )
    return column if column in names else inner[0]


def _row_of_roles(chosen: Mapping[str, str]) -> RowType | None:
    """Return the class of rows that the given roles belong to, if there is no doubt."""
    partly = [row for row in GUESSED if set(chosen) <= set(row.roles())]
    whole = [row for row in partly if row.complete(chosen)]
    refuse(chosen and not partly, f"data.columns names roles that do not go together: {', '.join(chosen)}")
    certain = whole or (partly if len(partly) == 1 else [])
    return certain[0] if chosen and certain else None


def _by_name(row: RowType, cells: Mapping[str, Sequence[str]], chosen: Mapping[str, str]) -> dict[str, str]:
    low, roles = {name.lower(): name for name in reversed(list(cells))}, dict(chosen)
    # Roles with few names of their own choose first: `text` would take almost anything.
    for role in sorted(set(row.roles()) - set(chosen), key=lambda role: (len(NAMES[role]), role)):
        free = [low[name] for name in NAMES[role] if name in low and low[name] not in roles.values()]
        roles |= {role: free[0]} if free else {}
    left = [name for name in cells if name not in roles.values()]
    if row is Pair and not roles:
        languages = [name for name in left if name.lower().rpartition(".")[2] in LANGUAGES]
        roles = dict(zip(row.NEEDED, languages)) if len(languages) == 2 else {}
    telling = [
        name
        for name in left
        if name.lower() not in IDS and not UNNAMED.fullmatch(name) and not numbers_rows(cells[name])
    ]
    if "label" in row.NEEDED and set(roles) == {"text"} and len(telling) == 1:
        roles |= {"label": telling[0]} if _like_labels(row, cells[telling[0]]) else {}
    return roles


def _by_content(
    row: RowType, cells: Mapping[str, Sequence[str]], chosen: Mapping[str, str]
) -> dict[str, str]:
    """Find columns without names.

    The label is the column that looks like one, best without gaps and with few values; the text is the
    longest of the others. Pairs are the first two texts.
    """
    roles = dict(chosen)
    left = [name for name in cells if name not in roles.values()]
    if "label" in row.NEEDED and len(left) > 1 and "label" not in roles:
        values = {name: {cell.strip() for cell in cells[name]} for name in reversed(left)}
        few = [name for name in values if _like_labels(row, cells[name])]
        if few:
            roles["label"] = min(few, key=lambda name: ("" in values[name], len(values[name])))
            left.remove(roles["label"])
    if "label" in row.NEEDED and left and "label" in roles and "text" not in roles:
        roles["text"] = max(left, key=lambda name: sum(map(len, cells[name])))
    if row is Pair and not roles:
        texts = (name for name in left if not all_numbers(cells[name]))
        roles = dict(zip(row.NEEDED, texts))
    return roles


def _like_labels(row: RowType, cells: Sequence[str]) -> bool:
    """Return True if a column looks like labels: some values, most of them more than once; or numbers."""
    few = 2 <= len(set(cells)) <= min(MOST_CLASSES, (len(cells) + 1) // 2)
    return few if row is Labelled else all_numbers(cells)
