"""Whether the first row of a table names its columns, in any language, and the names that columns go by."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from clearhead.learn.data.formats import LANGUAGES

# Names that columns of each role go by, the likeliest first.
NAMES: dict[str, tuple[str, ...]] = {
    "text": (
        *("text", "sentence", "sentence1", "text1", "premise", "question1", "review", "content", "document"),
        *("article", "body", "comment", "tweet", "message", "utterance", "story"),
        *("question", "title", "name"),
        *("satz", "kommentar", "bewertungstext", "texte", "phrase", "commentaire", "avis"),
        *("texto", "frase", "comentario", "reseña", "testo", "recensione", "tekst", "zin", "zdanie", "metin"),
        *(
            "текст",
            "предложение",
            "отзыв",
            "комментарий",
            "речення",
            "відгук",
            "κείμενο",
            "نص",
            "النص",
            "טקסט",
        ),
        *(
            "पाठ",
            "वाक्य",
            "ข้อความ",
            "văn bản",
            "文本",
            "文字",
            "句子",
            "内容",
            "评论",
            "本文",
            "テキスト",
            "文",
            "텍스트",
            "문장",
        ),
    ),
    "pair": ("pair", "sentence2", "text2", "hypothesis", "question2", "text_pair"),
    "label": (
        *("label", "labels", "class", "category", "gold_label", "sentiment"),
        *("stars", "rating", "score", "topic", "intent", "y"),
        *("klasse", "kategorie", "bewertung", "étiquette", "classe", "catégorie", "note"),
        *(
            "etiqueta",
            "clase",
            "categoría",
            "etichetta",
            "categoria",
            "rótulo",
            "etykieta",
            "klasa",
            "etiket",
        ),
        *("метка", "класс", "категория", "оценка", "мітка", "клас", "ετικέτα", "تصنيف", "الفئة", "תווית"),
        *(
            "लेबल",
            "श्रेणी",
            "ป้ายกำกับ",
            "nhãn",
            "标签",
            "标记",
            "类别",
            "情感",
            "ラベル",
            "分類",
            "カテゴリ",
            "레이블",
            "라벨",
            "분류",
        ),
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
    "messages": ("messages", "conversations", "conversation", "dialogue"),
    "prompt": ("prompt", "instruction"),
    "completion": ("completion", "response", "output"),
    "input": ("input", "context"),
    "system": ("system", "system_prompt"),
    "tools": ("tools", "functions"),
    "anchor": ("anchor", "query", "question", "sentence1", "text1", "premise", "text", "sentence", "claim"),
    "positive": (
        *("positive", "pos", "passage", "document", "sentence2", "text2", "hypothesis", "pair"),
        *("answer", "context"),
    ),
    "negative": ("negative", "neg", "hard_negative"),
    "score": ("score", "similarity", "similarity_score", "label"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
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
    given = any(name in first and not name.isdigit() for name in columns.values())
    certain = given or any(map(UNNAMED.fullmatch, first))
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
    return any(
        count[name.strip()] > 0 and _labels(count) for name, count in zip(rows[0], map(Counter, _below(rows)))
    )


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

    A rare label may stand in the first row by chance. But hardly beside a text of one or two words that is at
    most half as long as usual, nor where it is much longer than the labels, uses a word for labels, or has
    signs that names have and the labels have not.
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
