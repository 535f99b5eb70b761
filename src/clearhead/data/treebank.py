"""Treebanks in CoNLL-U: sentences whose words each name the word that governs them.

A syntactic word is what a tree is made of. Mostly it is a stretch of the text; "du" in French is one stretch and two
words, and a word that was left out (an empty node) has no stretch and no place in the tree. `spans` say which
characters of the sentence's text stand behind each word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path

from clearhead.data.files import missing, read_lines
from clearhead.data.tables import counted, shorten
from clearhead.data.tags import CONLLU
from clearhead.errors import InputError

Span = tuple[int, int]
_WORD, _RANGE, _EMPTY = re.compile(r"[1-9]\d*"), re.compile(r"([1-9]\d*)-([1-9]\d*)"), re.compile(r"\d+\.\d+")
_TEXT = re.compile(r"#\s*text\s*=\s?(.*)")


@dataclass(frozen=True)
class Word:
    """One word of a tree. `head` counts the sentence's words from 1; 0: this word is the root."""

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
        """The relation to the governor without its subtype: "nmod" for "nmod:poss"."""
        return self.deprel.partition(":")[0]


@dataclass(frozen=True)
class Sentence:
    """A text and the tree over its words."""

    words: tuple[Word, ...]
    text: str
    spans: tuple[
        Span, ...
    ] = ()  # characters of `text` behind each word; words written as one share theirs where it cannot be cut


@dataclass
class _Open:
    """A sentence while its lines are read."""

    words: list[Word] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)  # of each word
    joined: dict[int, tuple[int, str, bool, int]] = field(
        default_factory=dict
    )  # by first word: last word, form, space, line
    text: str | None = None


@dataclass(frozen=True)
class _Stretch:
    """Words that are written as one."""

    form: str
    words: list[Word]
    space: bool  # behind it


def read_treebank(path: Path, limit: int | None = None) -> list[Sentence]:
    """The sentences of a CoNLL-U file, plain or `.gz`; the first `limit` of them where that is given."""
    if not path.exists():
        raise missing(path)
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit} leaves no sentence: ask for 1 or more")
    found = []
    for sentence in _sentences(path):
        found.append(sentence)
        if len(found) == limit:
            break
    if not found:
        raise InputError(
            f"{path} holds no sentence: a CoNLL-U file has lines of {len(CONLLU)} columns, one for each word"
        )
    return found


def _sentences(path: Path) -> Iterator[Sentence]:
    now = _Open()
    for number, line in read_lines(path):
        if not line.strip():
            if now.words:
                yield _closed(path, now)
            now = _Open()
        elif line.startswith("#"):
            matched = _TEXT.fullmatch(line)
            now.text = matched[1] if matched else now.text
        else:
            _read_line(path, number, line, now)
    if now.words:
        yield _closed(path, now)


def _read_line(path: Path, number: int, line: str, now: _Open) -> None:
    """One word, one stretch of several words, or one empty node, added to the sentence."""
    cells = line.split("\t")
    place = f"{path}, line {number}"
    if len(cells) != len(CONLLU):
        raise InputError(
            f"{place} has {counted(len(cells), 'column')} in place of {len(CONLLU)}, between tabs: {shorten(line)}"
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
    now.words.append(Word(form, lemma, upos, xpos, feats, int(head), deprel, misc, space))
    now.lines.append(number)


def _closed(path: Path, now: _Open) -> Sentence:
    """The whole sentence, with heads that are words of it and a text that its words are found in."""
    count = len(now.words)
    for own, (word, line) in enumerate(zip(now.words, now.lines), 1):
        if word.head > count or word.head == own:
            fault = (
                "itself as its head"
                if word.head == own
                else f"the head {word.head}, and the sentence has {counted(count, 'word')}"
            )
            raise InputError(f'{path}, line {line}: word {own} "{word.form}" has {fault}')
    stretches = _stretches(path, now)
    forms = [stretch.form for stretch in stretches]
    text, places = now.text, None if now.text is None else locate(forms, now.text)
    if text is None or places is None:
        text = "".join(stretch.form + " " * stretch.space for stretch in stretches).rstrip()
        places = locate(forms, text)
    assert places is not None
    words, spans = list[Word](), list[Span]()
    for stretch, place in zip(stretches, places):
        *inner, last = stretch.words
        words += [
            *(replace(word, space_after=False) for word in inner),
            replace(last, space_after=stretch.space),
        ]
        spans += _cut(place, stretch)
    return Sentence(tuple(words), text, tuple(spans))


def _stretches(path: Path, now: _Open) -> list[_Stretch]:
    """What is written together: mostly a word each."""
    found, start = list[_Stretch](), 0
    while start < len(now.words):
        word = now.words[start]
        last, form, space, line = now.joined.get(start + 1, (start + 1, word.form, word.space_after, 0))
        if last > len(now.words):
            raise InputError(
                f"{path}, line {line} joins words {start + 1}-{last}, and the sentence has {counted(len(now.words), 'word')}"
            )
        found.append(_Stretch(form, now.words[start:last], space))
        start = last
    return found


def _cut(place: Span, stretch: _Stretch) -> list[Span]:
    """The spans of words written as one: their own letters where these add up to what is written, else all of it for each."""
    forms = [word.form for word in stretch.words]
    if "".join(forms) != stretch.form:
        return [place] * len(forms)
    ends = list(accumulate(map(len, forms), initial=place[0]))
    return list(pairwise(ends))


def locate(words: Iterable[str], text: str) -> tuple[Span, ...] | None:
    """Where words stand in a text that is made of nothing else but them and white space; None where it is not."""
    spans, start = [], 0
    for word in words:
        while start < len(text) and text[start].isspace() and not text.startswith(word, start):
            start += 1
        if not text.startswith(word, start):
            return None
        spans.append((start, start + len(word)))
        start += len(word)
    return None if text[start:].strip() else tuple(spans)
