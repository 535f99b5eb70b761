"""What probes are trained and tested on: words, texts or images with a label each.

    items, name = read_items("en_ewt-ud-dev.conllu", "feats.Number")    # a treebank: one label per word
    items, name = read_items("reviews.tsv")                             # one label per text

Items are split whole: a sentence is never on both sides, nor are two sentences of the same text.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import nearest, refuse
from clearhead.learn.data import corpora, files, formats, plan, split, tables
from clearhead.learn.data.examples import Images, Labelled, Tagged
from clearhead.learn.data.pictures import content
from clearhead.learn.data.treebank import Sentence, Span, TreeWord, locate, read_treebank
from clearhead.learn.tasks.table import open_examples

COLUMNS = ("upos", "xpos", "deprel", "relation", "arc", "lemma", "feats.NAME")
FARTHEST = 4  # words to a governor that are told apart; farther ones are one class on either side
KINDS: dict[type, str] = {
    Sentence: "sentences of a treebank",
    Tagged: "words with tags",
    Labelled: "texts with labels",
    Images: "images of classes",
}

Data: TypeAlias = str | Path | Sequence[Sentence] | Sequence[Tagged] | Sequence[Labelled] | Images


@dataclass(frozen=True, eq=False)
class ProbeItem:
    """A sentence whose words have labels; or a text, a pair of texts or an image that has one label."""

    forms: tuple[str, ...]  # of the words; of a text, the text itself
    labels: tuple[str | None, ...]  # one for each; None: this word is not probed
    text: str = ""
    spans: tuple[Span, ...] | None = None  # characters of each word; None: the item is probed as a whole
    pair: str | None = None
    image: NDArray[np.uint8] | Path | None = None  # H W C, or its file

    @property
    def key(self) -> int:
        """Equal for items of the same content."""
        return split.key_of(self.text, self.pair or "", b"" if self.image is None else content(self.image))

    @property
    def count(self) -> int:
        """How many labels it brings."""
        return sum(label is not None for label in self.labels)

    @property
    def unit(self) -> str:
        """What has the labels: words, texts or images."""
        return "words" if self.spans is not None else "texts" if self.image is None else "images"


def read_items(data: Data, column: str | None = None) -> tuple[list[ProbeItem], str]:
    """Return items from a file, or from examples in memory, and the name of what they are labelled by.

    Args:
        data: a treebank (CoNLL-U), words with tags, texts with labels, images in folders of their class; or
            such examples.
        column: of a treebank: upos, xpos, deprel, relation (deprel without subtypes), arc (where the governor
            stands), lemma or feats.NAME; None: upos. Other data has one column of labels, and takes none.
    """
    rows: Any = _read(str(data), column) if isinstance(data, str | Path) else data
    first = rows if isinstance(rows, Images) else next(iter(rows), None)
    refuse(first is None, "there are no examples: give one at least")
    kind = type(first)
    refuse(
        kind not in KINDS or (first is not rows and any(type(one) is not kind for one in rows)),
        f"probes take {', '.join(list(KINDS.values())[:3])}, one kind at a time, or a file; "
        f"not {kind.__name__}",
    )
    if kind is Sentence:
        label = _labeller(column or "upos")
        return [_of_tree(sentence, label) for sentence in rows], column or "upos"
    refuse(
        column is not None,
        f'column "{column}" is for a treebank (CoNLL-U), and these are {KINDS[kind]}: leave it out',
    )
    if kind is Images:
        return [
            ProbeItem((f"{split.key_of('', '', content(pixels)):x}",), (str(label),), image=pixels)
            for pixels, label in zip(rows.pixels, rows.labels)
        ], "class"
    if kind is Tagged:
        texts = [" ".join(row.words) for row in rows]
        return [
            ProbeItem(row.words, row.tags, text, locate(row.words, text)) for row, text in zip(rows, texts)
        ], "tag"
    return [ProbeItem((row.text,), (row.label,), row.text, pair=row.pair) for row in rows], "label"


def _read(path: str, column: str | None) -> Data:
    """Return the examples of a file or folder, by what it looks like."""
    found = [] if path in corpora.CORPORA else files.expand([path], corpora.CORPORA)
    words = found and all(formats.format_of(file) == "conll" for file in found)
    if words and tables.tag_columns(found[0], {})[0].universal:
        _labeller(column or "upos")  # a wrong name is refused before the file is read
        return [sentence for file in found for sentence in read_treebank(file)]
    corpus, _ = open_examples(plan.DataPlan(paths=(path,)), split=False)
    refuse(
        corpus.shape not in ("tags", "labels", "images"),
        f"{path} holds {corpus.shape}, which has no labels: "
        "probes take a treebank, tagged words, or texts or images with labels",
    )
    rows: Any = corpus.validation
    return rows if isinstance(rows, Images) else list(rows)


def _of_tree(sentence: Sentence, label: Callable[[TreeWord, int], str | None]) -> ProbeItem:
    forms = tuple(word.form for word in sentence.words)
    spans = sentence.spans or locate(forms, sentence.text)
    refuse(
        spans is None,
        f"the words do not make up the text: {' '.join(forms)[:60]!r} against {sentence.text[:60]!r}",
    )
    labels = (label(word, place) for place, word in enumerate(sentence.words))
    return ProbeItem(forms, tuple(labels), sentence.text, spans)


def _labeller(column: str) -> Callable[[TreeWord, int], str | None]:
    """Return a function that reads one column of a word at a place; "_" is no label."""
    if column == "arc":
        return governor
    name = column.removeprefix("feats.")
    if name and name != column:
        return lambda word, place: dict(
            cell.split("=", 1) for cell in word.feats.split("|") if "=" in cell
        ).get(name)
    refuse(
        column not in COLUMNS,
        f'there is no column "{column}" to probe{nearest(column, COLUMNS)}: choose from {", ".join(COLUMNS)}',
    )
    return lambda word, place: None if getattr(word, column) == "_" else str(getattr(word, column))


def governor(word: TreeWord, place: int) -> str:
    """Return where a word's governor stands: "root", or words to the left (-2) or to the right (+1, +far)."""
    if word.head == 0:
        return "root"
    away = word.head - 1 - place
    return f"{away:+d}" if abs(away) <= FARTHEST else ("+far" if away > 0 else "-far")


# Two sides --------------------------------------------------------------------------------------------------


def split_items(
    items: Sequence[ProbeItem], share: float, seed: int
) -> tuple[list[ProbeItem], list[ProbeItem]]:
    """Return items to train on and about `share` to test on; items of the same content stay together."""
    refuse(not 0 < share < 1, f"test_share {share} must lie between 0 and 1")
    keys = sorted({item.key for item in items})
    refuse(len(keys) < 2, "one sentence cannot be split: give two that differ at least, or a file to test on")
    count = min(max(1, round(share * len(keys))), len(keys) - 1)
    test = {keys[place] for place in np.random.default_rng(seed).permutation(len(keys))[:count].tolist()}
    return [item for item in items if item.key not in test], [item for item in items if item.key in test]


def apart(train: Sequence[ProbeItem], test: Sequence[ProbeItem]) -> tuple[list[ProbeItem], int]:
    """Return the items to train on that are not among those to test on, and how many were left out."""
    theirs = {item.key for item in test}
    kept = [item for item in train if item.key not in theirs]
    refuse(not kept, "every sentence to train on is among those to test on: name two different files")
    return kept, len(train) - len(kept)


def choose_items(
    items: Sequence[ProbeItem], most: int, seed: int, side: str
) -> tuple[list[ProbeItem], str | None]:
    """Return whole items, drawn by `seed`, with `most` labels in all, and a note where some were left out.

    Of the last one only so many labels are kept that there are `most` exactly.
    """
    refuse(most < 1, f"{most} words are too few to {side} on: ask for 1 or more")
    total = sum(item.count for item in items)
    refuse(not total, f"no word to {side} on has a label: choose another column")
    if total <= most:
        return [item for item in items if item.count], None
    chosen, left = list[ProbeItem](), most
    for place in np.random.default_rng(seed).permutation(len(items)).tolist():
        labels = items[place].labels
        kept = [number for number, label in enumerate(labels) if label is not None][:left]
        if kept:
            unread = (None,) * (len(labels) - kept[-1] - 1)
            chosen.append(dataclasses.replace(items[place], labels=labels[: kept[-1] + 1] + unread))
            left -= len(kept)
    whole = f", from {tables.counted(len(chosen), 'sentence')}" if chosen[0].unit == "words" else ""
    return chosen, f"to {side} on: {most:,} of {total:,} {chosen[0].unit}{whole}, drawn at random"
