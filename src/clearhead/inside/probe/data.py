"""What probes are trained on: words with a label each, texts with one, or images with one; and which of them are for testing.

    items, name = read_items("en_ewt-ud-dev.conllu", "feats.Number")    # a treebank: one label per word
    items, name = read_items("reviews.tsv")                             # one label per text

Items are split whole: a sentence is never on both sides, nor are two sentences of the same text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clearhead.data.corpora import CORPORA
from clearhead.data.examples import Images, Labelled, Tagged
from clearhead.data.files import expand
from clearhead.data.formats import format_of
from clearhead.data.plan import DataPlan
from clearhead.data.split import key_of
from clearhead.data.tables import counted
from clearhead.data.conll import tag_columns
from clearhead.data.treebank import Sentence, Span, TreeWord, locate, read_treebank
from clearhead.errors import InputError, nearest
from clearhead.tasks.corpus import open_examples

COLUMNS = ("upos", "xpos", "deprel", "relation", "arc", "lemma", "feats.NAME")
FARTHEST = 4  # words to a governor that are told apart; farther ones are one class on either side

Data: TypeAlias = str | Path | Sequence[Sentence] | Sequence[Tagged] | Sequence[Labelled] | Images


@dataclass(frozen=True, eq=False)
class Item:
    """A sentence whose words have labels; or a text, a pair of texts or an image that has one label."""

    forms: tuple[str, ...]  # of the words; of a text, the text itself
    labels: tuple[str | None, ...]  # one for each; None: this word is not probed
    text: str = ""
    spans: tuple[Span, ...] | None = None  # characters of each word; None: the item is probed as a whole
    pair: str | None = None
    image: NDArray[np.uint8] | None = None  # H W C

    @property
    def key(self) -> int:
        """Equal for items of the same content."""
        return key_of(self.text, self.pair or "", b"" if self.image is None else self.image.tobytes())

    @property
    def count(self) -> int:
        """How many labels it brings."""
        return sum(label is not None for label in self.labels)

    @property
    def unit(self) -> str:
        """What has the labels: words, texts or images."""
        return "words" if self.spans is not None else "texts" if self.image is None else "images"


def read_items(data: Data, column: str | None = None) -> tuple[list[Item], str]:
    """Items from a file, or from examples in memory; and the name of what they are labelled by.

    Args:
        data: a treebank (CoNLL-U), words with tags, texts with labels, images in folders of their class; or such examples.
        column: of a treebank: upos, xpos, deprel, relation (deprel without subtypes), arc (where the governor stands), lemma or
            feats.NAME; None: upos. Other data has one column of labels, and takes none.
    """
    rows: Any = _read(str(data), column) if isinstance(data, str | Path) else data
    if isinstance(rows, Images):
        if column is not None:
            raise _no_column(column, "images of classes")
        made = [Item(("",), (str(label),), image=pixels) for pixels, label in zip(rows.pixels, rows.labels)]
        return [dataclasses.replace(item, forms=(f"{item.key:x}",)) for item in made], "class"
    if not rows:
        raise InputError("there are no examples: give one at least")
    first = rows[0]
    known = {Sentence: "sentences of a treebank", Tagged: "words with tags", Labelled: "texts with labels"}
    if type(first) not in known or any(type(one) is not type(first) for one in rows):
        raise InputError(
            f"probes take {', '.join(known.values())}, one kind at a time, or a file; not {type(first).__name__}"
        )
    if isinstance(first, Sentence):
        label = _labeller(column or "upos")
        return [_of_tree(sentence, label) for sentence in rows], column or "upos"
    if column is not None:
        raise _no_column(column, known[type(first)])
    if isinstance(first, Tagged):
        return [_tagged(row) for row in rows], "tag"
    return [Item((row.text,), (row.label,), row.text, pair=row.pair) for row in rows], "label"


def _read(path: str, column: str | None) -> Data:
    """The examples of a file or folder, by what it looks like."""
    files = [] if path in CORPORA else expand([path], CORPORA)
    if files and all(format_of(file) == "conll" for file in files) and tag_columns(files[0], {})[0].universal:
        _labeller(column or "upos")  # a wrong name is said before the file is read
        return [sentence for file in files for sentence in read_treebank(file)]
    corpus, _ = open_examples(DataPlan(paths=(path,)), split=False)
    if corpus.shape not in ("tags", "labels", "images"):
        raise InputError(
            f"{path} holds {corpus.shape}, which has no labels: probes take a treebank, tagged words, or texts or images with labels"
        )
    rows: Any = corpus.validation
    return rows if isinstance(rows, Images) else list(rows)


def _no_column(column: str, what: str) -> InputError:
    return InputError(f'column "{column}" is for a treebank (CoNLL-U), and these are {what}: leave it out')


def _tagged(row: Tagged) -> Item:
    text = " ".join(row.words)
    return Item(row.words, row.tags, text, locate(row.words, text))


def _of_tree(sentence: Sentence, label: Callable[[Sentence, int], str | None]) -> Item:
    forms = tuple(word.form for word in sentence.words)
    spans = sentence.spans or locate(forms, sentence.text)
    if spans is None:
        raise InputError(
            f"the words do not make up the text: {' '.join(forms)[:60]!r} against {sentence.text[:60]!r}"
        )
    return Item(forms, tuple(label(sentence, place) for place in range(len(forms))), sentence.text, spans)


def _labeller(column: str) -> Callable[[Sentence, int], str | None]:
    """What reads one column of one word; "_" is no label."""
    if column == "arc":
        return lambda sentence, place: governor(sentence.words[place], place)
    if column.startswith("feats.") and len(column) > len("feats."):
        name = column.removeprefix("feats.")
        return lambda sentence, place: _feature(sentence.words[place], name)
    if column not in COLUMNS or column == "feats.NAME":
        raise InputError(
            f'there is no column "{column}" to probe{nearest(column, COLUMNS)}: choose from {", ".join(COLUMNS)}'
        )
    return lambda sentence, place: _cell(str(getattr(sentence.words[place], column)))


def _cell(value: str) -> str | None:
    return None if value == "_" else value


def _feature(word: TreeWord, name: str) -> str | None:
    """The value of a feature such as Number; None for words without it."""
    cells = (cell.partition("=") for cell in word.feats.split("|"))
    return next((value for own, _, value in cells if own == name), None)


def governor(word: TreeWord, place: int) -> str:
    """Where a word's governor stands: "root", or how many words to the left (-2) or to the right (+1), far ones together."""
    if word.head == 0:
        return "root"
    away = word.head - 1 - place
    return (
        f"{'+' if away > 0 else '-'}{abs(away)}"
        if abs(away) <= FARTHEST
        else f"{'+' if away > 0 else '-'}far"
    )


# Two sides --------------------------------------------------------------------------------------------------------------


def split_items(items: Sequence[Item], share: float, seed: int) -> tuple[list[Item], list[Item]]:
    """Items to train on and about `share` of them to test on; items of the same content stay together."""
    if not 0 < share < 1:
        raise InputError(f"test_share {share} must lie between 0 and 1")
    keys = sorted({item.key for item in items})
    if len(keys) < 2:
        raise InputError("one sentence cannot be split: give two that differ at least, or a file to test on")
    count = min(max(1, round(share * len(keys))), len(keys) - 1)
    held = {keys[place] for place in np.random.default_rng(seed).permutation(len(keys))[:count].tolist()}
    return [item for item in items if item.key not in held], [item for item in items if item.key in held]


def apart(train: Sequence[Item], test: Sequence[Item]) -> tuple[list[Item], int]:
    """The items to train on that are not among those to test on, and how many were left out."""
    theirs = {item.key for item in test}
    kept = [item for item in train if item.key not in theirs]
    if not kept:
        raise InputError("every sentence to train on is among those to test on: name two different files")
    return kept, len(train) - len(kept)


def choose_items(items: Sequence[Item], most: int, seed: int, side: str) -> tuple[list[Item], str | None]:
    """Whole items, drawn by `seed`, until they bring `most` labels or all are taken; and a sentence where some were left out.

    Of the last one so many labels are left unread that there are `most` exactly.
    """
    if most < 1:
        raise InputError(f"{most} words are too few to {side} on: ask for 1 or more")
    total = sum(item.count for item in items)
    if not total:
        raise InputError(f"no word to {side} on has a label: choose another column")
    if total <= most:
        return [item for item in items if item.count], None
    chosen, left = list[Item](), most
    for place in np.random.default_rng(seed).permutation(len(items)).tolist():
        item = items[place]
        if item.count and left:
            item = item if item.count <= left else _first(item, left)
            chosen.append(item)
            left -= item.count
    whole = f", from {counted(len(chosen), 'sentence')}" if chosen[0].unit == "words" else ""
    return chosen, f"to {side} on: {most:,} of {total:,} {chosen[0].unit}{whole}, drawn at random"


def _first(item: Item, count: int) -> Item:
    """The same item with its first `count` labels only."""
    labels = list[str | None]()
    for label in item.labels:
        labels.append(label if count > 0 else None)
        count -= label is not None
    return dataclasses.replace(item, labels=tuple(labels))
