"""Read treebanks in CoNLL-U: sentences whose words each name their head, the word that governs them.

A tree is made of syntactic words. Most are one stretch of the text. French "du" is one stretch and two words,
and an empty node, a word that was left out, has no stretch and no place in the tree. `spans` are the
characters of the sentence's text that belong to each word.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path

from clearhead.data.files import missing, read_lines
from clearhead.data.tables import CONLLU, counted, shorten
from clearhead.errors import InputError, refuse

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


@dataclass
class _Open:
    """A sentence while its lines are read."""

    words: list[TreeWord] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)  # of each word
    # By the first of words that are written as one: last word, form, space, line.
    joined: dict[int, tuple[int, str, bool, int]] = field(default_factory=dict)
    text: str | None = None


def read_treebank(path: Path, limit: int | None = None) -> list[Sentence]:
    """Return the sentences of a CoNLL-U file, plain or `.gz`; at most `limit` of them."""
    if not path.exists():
        raise missing(path)
    refuse(limit is not None and limit < 1, f"limit {limit} leaves no sentence: ask for 1 or more")
    found = list(islice(_sentences(path), limit))
    refuse(
        not found,
        f"{path} holds no sentence: a CoNLL-U file has lines of {len(CONLLU)} columns, one for each word",
    )
    return found


def _sentences(path: Path) -> Iterator[Sentence]:
    for _, block in groupby(read_lines(path), lambda numbered: bool(numbered[1].strip())):
        now = _Open()
        for number, line in block:
            if line.startswith("#"):
                matched = _TEXT.fullmatch(line)
                now.text = matched[1] if matched else now.text
            elif line.strip():
                _read_line(path, number, line, now)
        if now.words:
            yield _closed(path, now)


def _read_line(path: Path, number: int, line: str, now: _Open) -> None:
    """Add a line to the sentence: a word, a stretch of several words, or an empty node."""
    cells = line.split("\t")
    place = f"{path}, line {number}"
    if len(cells) != len(CONLLU):
        raise InputError(
            f"{place} has {counted(len(cells), 'column')} in place of {len(CONLLU)}, between tabs: "
            f"{shorten(line)}"
        )
    name, form, lemma, upos, xpos, feats, head, deprel, _, misc = cells
    space = "SpaceAfter=No" not in misc.split("|")
    following = len(now.words) + 1
    if _EMPTY.fullmatch(name):
        return
    if ranged := _RANGE.fullmatch(name):
        first, last = int(ranged[1]), int(ranged[2])
        if first != following or last < first:
            raise InputError(f"{place} joins words {name}, and the next word is {following}: {shorten(line)}")
        now.joined[first] = (last, form, space, number)
        return
    if not _WORD.fullmatch(name) or int(name) != following:
        raise InputError(
            f'{place} has the number "{name}" where word {following} was to come: {shorten(line)}'
        )
    if not form:
        raise InputError(f"{place} has no word: {shorten(line)}")
    if not re.fullmatch(r"\d+", head):
        raise InputError(f'{place} has the head "{head}", which is no word\'s number: {shorten(line)}')
    now.words.append(TreeWord(form, lemma, upos, xpos, feats, int(head), deprel, misc, space))
    now.lines.append(number)


def _closed(path: Path, now: _Open) -> Sentence:
    """Return the whole sentence; its heads must be words of it, and its text is made of its words."""
    count = len(now.words)
    for own, (word, line) in enumerate(zip(now.words, now.lines), 1):
        if word.head > count or word.head == own:
            there = f"the head {word.head}, and the sentence has {counted(count, 'word')}"
            fault = "itself as its head" if word.head == own else there
            raise InputError(f'{path}, line {line}: word {own} "{word.form}" has {fault}')
    forms, spaces, stretches, start = list[str](), list[bool](), list[list[TreeWord]](), 0
    while start < count:  # what is written together: mostly a word each
        word = now.words[start]
        last, form, space, line = now.joined.get(start + 1, (start + 1, word.form, word.space_after, 0))
        if last > count:
            raise InputError(
                f"{path}, line {line} joins words {start + 1}-{last}, and the sentence has "
                f"{counted(count, 'word')}"
            )
        forms.append(form)
        spaces.append(space)
        stretches.append(now.words[start:last])
        start = last
    text, places = now.text, None if now.text is None else locate(forms, now.text)
    if text is None or places is None:
        text = "".join(form + (" " if space else "") for form, space in zip(forms, spaces)).rstrip()
        places = locate(forms, text)
    assert places is not None
    words, spans = list[TreeWord](), list[Span]()
    for form, space, stretch, place in zip(forms, spaces, stretches, places):
        *inner, final = stretch
        words += [*(replace(word, space_after=False) for word in inner), replace(final, space_after=space)]
        # Words that spell what is written have their own letters, else all of them share the stretch.
        lengths = [len(word.form) for word in stretch]
        spelled = "".join(word.form for word in stretch) == form
        spans += pairwise(accumulate(lengths, initial=place[0])) if spelled else [place] * len(stretch)
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
