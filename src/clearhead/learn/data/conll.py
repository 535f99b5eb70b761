"""CoNLL: a word and its columns on each line, an empty line between sentences.

Tagged words become records. A treebank in CoNLL-U becomes sentences whose words each name their head, the
word that governs them. A tree is made of syntactic words. Most are one stretch of the text. French "du" is
one stretch and two words, and an empty node, a word that was left out, has no stretch and no place in the
tree. `spans` are the characters of the sentence's text that belong to each word.

Tagging schemes are how the tags of words spell spans, such as B-PER I-PER for one PER.

| scheme | a span is tagged |
| --- | --- |
| IO | I I I |
| IOB1 | I I I, its first word B only right after a span of the same type (CoNLL-2003's own files) |
| IOB2 | B I I, also called BIO |
| IOE1 | I I I, its last word E only right before a span of the same type |
| IOE2 | I I E |
| IOBES | B I E, or S for one word |
| BILOU | B I L, or U for one word |

A tag is a prefix, a hyphen and a type; the type may be left out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from clearhead.errors import InputError, nearest, refuse
from clearhead.learn.data.files import full_lines, missing, read_lines
from clearhead.learn.data.tables import STRICT, Reading, Record, counted, shorten

CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
SAMPLE = 1000  # lines among which the first with words is looked for
_NUMBER = re.compile(r"\d+([-.]\d+)?")  # 8; 8-9: a word written together; 8.1: a word left out


class TagColumns(NamedTuple):
    """How the lines of a CoNLL file are split, and which cells hold words and tags."""

    n_cells: int
    tabs: bool  # between cells; otherwise any white space
    universal: bool  # CoNLL-U
    words: int
    tags: int
    note: str  # which columns these are, with an example of each

    def skips(self, line: str, row: list[str], first: bool) -> bool:
        """Return True for comments, document separators and lines of CoNLL-U that hold no word.

        `first`: no word of the sentence has been read yet. Later lines may begin with a word such as #tag.
        """
        whole = len(row) == self.n_cells
        if self.universal:
            return line.startswith("#") or (whole and ("-" in row[0] or "." in row[0]))
        return row[0] == "-DOCSTART-" or (line.startswith("#" if first else "# ") and not whole)


def tag_columns(path: Path, columns: Mapping[str, str], encoding: str | None = None) -> TagColumns:
    """Find the columns of a file from its first line with words."""
    lines = islice(full_lines(path, encoding), SAMPLE)
    full = [line for _, line in lines if not line.startswith("# ")]
    refuse(not full, f"{path} is empty: there is no tagged word in it")
    first = next((line for line in full if not line.startswith("#")), full[0])  # #word may be a word
    tabs = "\t" in first
    row = cells(first, tabs)
    universal = len(row) == len(CONLLU) and tabs and bool(_NUMBER.fullmatch(row[0]))
    names = CONLLU if universal else tuple(str(number) for number in range(1, len(row) + 1))
    refuse(len(row) < 2, f"{path} has one column: each line needs a word and its tag, not {shorten(first)}")
    usual = {"words": "form", "tags": "upos"} if universal else {"words": names[0], "tags": names[-1]}
    chosen = {role: columns.get(role, name) for role, name in usual.items()}
    for name in chosen.values():
        refuse(
            name.lower() not in names,
            f"{path} has no column {name!r}{nearest(name, names)}; it has {', '.join(names)}",
        )
    words, tags = (names.index(name.lower()) for name in chosen.values())
    note = f"words from column `{names[words]}` ({row[words]}), tags from `{names[tags]}` ({row[tags]})"
    note = f"{'CoNLL-U' if universal else f'{len(row)} columns'}: {note}"
    return TagColumns(len(row), tabs, universal, words, tags, note)


def cells(line: str, tabs: bool) -> list[str]:
    """Split a line at tabs, or at blanks.

    Other white space, such as a no-break space, may stand in a word.
    """
    return [cell.strip() for cell in line.split("\t")] if tabs else re.split("[ \t]+", line.strip())


def sentence_blocks(path: Path, encoding: str | None = None) -> Iterator[Iterable[tuple[int, str]]]:
    """Yield the numbered lines of each sentence."""
    blocks = groupby(read_lines(path, encoding=encoding), lambda numbered: bool(numbered[1].strip()))
    return (block for full, block in blocks if full)


def read_tagged(path: Path, columns: TagColumns, how: Reading = STRICT) -> Iterator[Record]:
    """Yield the words and tags of each sentence, with the place of its first word."""

    def records(block: Iterable[tuple[int, str]]) -> Iterator[Record]:
        pairs: list[tuple[str, str]] = []
        begin = ""
        for number, line in block:
            place, row = f"{path}, line {number}", cells(line, columns.tabs)
            if columns.skips(line, row, first=not pairs):
                continue
            if len(row) != columns.n_cells:
                width = f"{counted(len(row), 'column')} in place of {columns.n_cells}"
                raise InputError(f"{place} has {width}: {shorten(line)}")
            word, tag = row[columns.words], row[columns.tags]
            if not word or not tag:
                raise InputError(f"{place} has no {'tag' if word else 'word'}: {shorten(line)}")
            begin = begin or place
            pairs.append((word, tag))
        if pairs:
            yield Record(begin, dict(zip(("words", "tags"), zip(*pairs))))

    return how.sift(sentence_blocks(path, how.encoding), records)


# Treebanks --------------------------------------------------------------------------------------------------


Span = tuple[int, int]
_WORD, _RANGE, _EMPTY = re.compile(r"[1-9]\d*"), re.compile(r"([1-9]\d*)-([1-9]\d*)"), re.compile(r"\d+\.\d+")
_TEXT = re.compile(r"#\s*text\s*=\s?(.*)")


@dataclass(frozen=True)
class TreeWord:
    """One word of a tree. `head` is the number of a word, counted from 1; 0: this word is the root."""

    form: str
    lemma: str
    upos: str
    xpos: str
    feats: str
    head: int
    deprel: str
    misc: str = "_"
    space_after: bool = True

    @property
    def relation(self) -> str:
        """Return the relation to the head without its subtype: "nmod" for "nmod:poss"."""
        return self.deprel.partition(":")[0]


@dataclass(frozen=True)
class Sentence:
    """A text and the tree over its words."""

    words: tuple[TreeWord, ...]
    text: str
    spans: tuple[Span, ...] = ()  # characters of `text` of each word; words written as one may share theirs


def read_treebank(path: Path, limit: int | None = None) -> list[Sentence]:
    """Return the sentences of a CoNLL-U file, plain or `.gz`; at most `limit` of them."""
    if not path.exists():
        raise missing(path)
    refuse(limit is not None and limit < 1, f"limit {limit} leaves no sentence: ask for 1 or more")
    sentences = (_sentence(path, block) for block in sentence_blocks(path))
    trees = list(islice(filter(None, sentences), limit))
    refuse(
        not trees,
        f"{path} holds no sentence: a CoNLL-U file has lines of {len(CONLLU)} columns, one for each word",
    )
    return trees


def _sentence(path: Path, block: Iterable[tuple[int, str]]) -> Sentence | None:
    """Read the lines of a sentence: words, stretches of several words, empty nodes; None without words."""
    words, lines, text = list[TreeWord](), list[int](), None
    units: list[tuple[str, bool, int, int, int]] = []  # form, space after it, first and last word, line
    for number, line in block:
        if line.startswith("#"):
            matched = _TEXT.fullmatch(line)
            text = matched[1] if matched else text
            continue
        place, cells, following = f"{path}, line {number}", line.split("\t"), len(words) + 1
        if len(cells) != len(CONLLU):
            raise InputError(
                f"{place} has {counted(len(cells), 'column')} in place of {len(CONLLU)}, between tabs: "
                f"{shorten(line)}"
            )
        name, form, lemma, upos, xpos, feats, head, deprel, _, misc = cells
        ranged, space = _RANGE.fullmatch(name), "SpaceAfter=No" not in misc.split("|")
        if _EMPTY.fullmatch(name):
            continue
        if ranged:
            first, last = int(ranged[1]), int(ranged[2])
            refuse(
                first != following or last < first,
                f"{place} joins words {name}, and the next word is {following}: {shorten(line)}",
            )
            units.append((form, space, first, last, number))
            continue
        if not _WORD.fullmatch(name) or int(name) != following:
            raise InputError(
                f'{place} has the number "{name}" where word {following} was to come: {shorten(line)}'
            )
        refuse(not form, f"{place} has no word: {shorten(line)}")
        if not re.fullmatch(r"\d+", head):
            raise InputError(f'{place} has the head "{head}", which is no word\'s number: {shorten(line)}')
        words.append(TreeWord(form, lemma, upos, xpos, feats, int(head), deprel, misc, space_after=False))
        lines.append(number)
        if not units or units[-1][3] < following:  # what is written together is mostly one word
            units.append((form, space, following, following, number))
    return _closed(path, words, lines, units, text) if words else None


def _closed(
    path: Path,
    words: list[TreeWord],
    lines: list[int],
    units: list[tuple[str, bool, int, int, int]],
    text: str | None,
) -> Sentence:
    """Return the whole sentence; its heads must be words of it, and its text is made of its words."""
    whole = f"the sentence has {counted(len(words), 'word')}"
    for own, (word, line) in enumerate(zip(words, lines), 1):
        where = f'{path}, line {line}: word {own} "{word.form}"'
        refuse(word.head == own, f"{where} has itself as its head")
        refuse(word.head > len(words), f"{where} has the head {word.head}, and {whole}")
    *_, first, last, line = units[-1]
    refuse(last > len(words), f"{path}, line {line} joins words {first}-{last}, and {whole}")
    forms = [form for form, *_ in units]
    stretches = None if text is None else locate(forms, text)
    if text is None or stretches is None:
        text = "".join(form + (" " if space else "") for form, space, *_ in units).rstrip()
        stretches = locate(forms, text)
    assert stretches is not None
    spans = list[Span]()
    for (form, space, first, last, _), place in zip(units, stretches):
        words[last - 1] = replace(words[last - 1], space_after=space)
        own_forms = [word.form for word in words[first - 1 : last]]
        # Words that spell what is written have their own letters, else all of them share the stretch.
        spelled = "".join(own_forms) == form
        letters = pairwise(accumulate(map(len, own_forms), initial=place[0]))
        spans += letters if spelled else [place] * len(own_forms)
    return Sentence(tuple(words), text, tuple(spans))


def locate(words: Iterable[str], text: str) -> tuple[Span, ...] | None:
    """Return the characters of each word in a text of these words and white space; None for other texts."""
    spans, start = [], 0
    for word in words:
        while start < len(text) and text[start].isspace() and not text.startswith(word, start):
            start += 1
        if not text.startswith(word, start):
            return None
        spans.append((start, start + len(word)))
        start += len(word)
    return None if text[start:].strip() else tuple(spans)


# Tagging schemes --------------------------------------------------------------------------------------------


PREFIXED = re.compile(r"([BIESLU])(?:-(.+))?", re.DOTALL)
UNTYPED = "_"  # the type of spans whose tags have none
FIRST, LAST = frozenset("BSU"), frozenset("ESLU")  # prefixes of a word that begins or ends a span for certain
Found = tuple[str, int, int]  # type, first and last place of a span


@dataclass(frozen=True)
class Rules:
    """Which neighbours begin, continue and end a span: pairs of prefixes, those of seqeval's strict mode.

    After a pair, = and ! ask for the same type and for another one; a point stands for any prefix.
    """

    starts: str
    continues: str
    ends: str

    def allow(self, name: str, before: tuple[str, str], word: tuple[str, str]) -> bool:
        """Return True if a word may follow the one before it in this way; each is a prefix and a type."""
        same = "=" if before[1] == word[1] else "!"
        pairs = (before[0] + word[0], "." + word[0], before[0] + ".")
        rules = getattr(self, name).split()
        return any(rule[:2] in pairs and rule[2:] in ("", same) for rule in rules)


WHOLE = "BI= BE= BL= II= IE= IL="  # how a span goes on that has a first and a last word
RULES = {
    "IOB1": Rules("OI II! BI IB= BB=", "BI= II=", "II! IO IB BO BI! BB="),
    "IOB2": Rules(".B", "BI= II=", "IO II! IB BO BI! BB"),
    # As seqeval has it, E is never the first word of a span, so that figures agree.
    "IOE1": Rules("OI II! EI EE=", "II= IE=", "II! IO IE! EI= EE="),
    "IOE2": Rules("OI OE EI EE II! IE!", "II= IE=", "E."),
    "IOBES": Rules(".B .S", WHOLE, "S. E."),
    "BILOU": Rules(".B .U", WHOLE, "U. L."),
}
RULES["IO"] = RULES["IOB1"]
PREFIXES = {"IO": "I", "IOB2": "BI", "IOE2": "IE", "IOBES": "BIES", "BILOU": "BILU"}  # the first that fits


@dataclass(frozen=True)
class Tagging:
    """The scheme of some tags; "" where none has a prefix, and each tag other than O is a span of its own."""

    scheme: str = ""
    prefixes: str = ""  # of the scheme, whether each occurs or not

    def split(self, tag: str) -> tuple[str, str]:
        """Return prefix and type of a tag; O has no type, and a tag without a prefix is a type."""
        match = PREFIXED.fullmatch(tag)
        if match is None or match[1] not in self.prefixes:
            return ("O", "") if tag == "O" else ("", tag)
        return match[1], match[2] or UNTYPED

    def spans(self, tags: Sequence[str]) -> set[Found]:
        """Return type, first and last place of each span of a sentence, strictly by the scheme."""
        outside, rules = ("O", ""), RULES.get(self.scheme, RULES["IOB2"])
        words = [*map(self.split, tags), outside]
        spans: set[Found] = {(kind, at, at) for at, (prefix, kind) in enumerate(words) if not prefix}
        words = [word if word[0] else outside for word in words]
        place = 0
        while place < len(tags):
            first, before = place, words[place - 1] if place else outside
            place += 1
            if rules.allow("starts", before, words[first]):
                while rules.allow("continues", words[place - 1], words[place]):
                    place += 1
                if rules.allow("ends", words[place - 1], words[place]):
                    spans.add((words[first][1], first, place - 1))
        return spans

    def joined(self, tags: Sequence[str]) -> list[Found]:
        """Return the spans of tags that a model chose, also where they break the scheme, in their order.

        Neighbours of one type are a span, unless a prefix begins or ends one between them.
        """
        spans: list[Found] = []
        before = ("O", "")
        for place, (prefix, kind) in enumerate(map(self.split, tags)):
            if prefix != "O":
                if before[1] == kind and prefix not in FIRST and before[0] not in LAST:
                    spans[-1] = (kind, spans[-1][1], place)
                else:
                    spans.append((kind, place, place))
            before = prefix, kind
        return spans


def by_labels(labels: Iterable[str]) -> Tagging:
    """Return the scheme of some tags as far as their prefixes show it."""
    tags = {*labels} - {"O"}
    matches = {match for match in map(PREFIXED.fullmatch, tags) if match is not None}
    prefixes = {match[1] for match in matches}
    named = next((name for name, letters in PREFIXES.items() if prefixes <= {*letters}), "")
    if len(matches) < len(tags) or not named:
        # Some tags are types, as E-mail may stand next to Phone: only B- and I- are surely prefixes.
        prefixes = {tag[0] for tag in tags if tag[:2] in ("B-", "I-") and tag[2:]}
        named = "IOB2" if "B" in prefixes else "IO"
    return Tagging(named, PREFIXES["IOB2" if named == "IO" else named]) if prefixes else Tagging()


def recognise(sentences: Iterable[Sequence[str]]) -> Tagging:
    """Return the scheme of tagged sentences: by the prefixes, and by how most spans begin or end."""
    rows = [*sentences]
    tagging = by_labels({tag for row in rows for tag in row})
    if tagging.scheme == "IOB2" and _mostly_inside(rows, tagging, "B"):
        return replace(tagging, scheme="IOB1")
    if tagging.scheme == "IOE2" and _mostly_inside([row[::-1] for row in rows], tagging, "E"):
        return replace(tagging, scheme="IOE1")
    return tagging


def _mostly_inside(rows: Iterable[Sequence[str]], tagging: Tagging, letter: str) -> bool:
    """Return True if more spans that follow none of their type begin with I than with this letter."""
    inside = marked = 0
    for row in rows:
        before = ""
        for prefix, kind in map(tagging.split, row):
            if kind != before:
                inside, marked = inside + (prefix == "I"), marked + (prefix == letter)
            before = kind
    return inside > marked
