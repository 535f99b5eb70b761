"""Read treebanks in CoNLL-U: sentences whose words each name their head, the word that governs them.

A tree is made of syntactic words. Most are one stretch of the text. French "du" is one stretch and two words,
and an empty node, a word that was left out, has no stretch and no place in the tree. `spans` are the
characters of the sentence's text that belong to each word.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path

from clearhead.errors import InputError, refuse
from clearhead.learn.data.files import missing, read_lines
from clearhead.learn.data.tables import CONLLU, counted, shorten

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
    blocks = groupby(read_lines(path), lambda numbered: bool(numbered[1].strip()))
    sentences = (_sentence(path, block) for full, block in blocks if full)
    found = list(islice(filter(None, sentences), limit))
    refuse(
        not found,
        f"{path} holds no sentence: a CoNLL-U file has lines of {len(CONLLU)} columns, one for each word",
    )
    return found


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
    places = None if text is None else locate(forms, text)
    if text is None or places is None:
        text = "".join(form + (" " if space else "") for form, space, *_ in units).rstrip()
        places = locate(forms, text)
    assert places is not None
    spans = list[Span]()
    for (form, space, first, last, _), place in zip(units, places):
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
