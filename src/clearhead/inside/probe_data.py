"""What probes are trained and tested on: words, texts or images with a label each, and their vectors.

    items, name = read_items("en_ewt-ud-dev.conllu", "feats.Number")    # a treebank: one label per word
    items, name = read_items("reviews.tsv")                             # one label per text

Items are split whole: a sentence is never on both sides, nor are two sentences of the same text. The states
of all layers are recorded batch by batch and pooled at once; only the pooled vectors are kept, as float32
numbers in memory, or, where they are many, in a temporary memory-mapped file.

Shapes: B batch, T tokens, D model, L depths (the embedding and every block), N labels.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.errors import refuse, refuse_unknown
from clearhead.hub.preprocessor import to_pixels
from clearhead.inside import inputs, names
from clearhead.inside.alignments import align, word_matrices
from clearhead.inside.results import Floats, on_cpu
from clearhead.learn.batches.ragged import by_length, padded
from clearhead.learn.data import conll, corpora, files, formats, plan, split, tables
from clearhead.learn.data.conll import Sentence, Span, TreeWord, locate, read_treebank
from clearhead.learn.data.examples import Images, Labelled, Tagged
from clearhead.learn.data.pictures import content
from clearhead.learn.tasks.images import patch_names
from clearhead.learn.tasks.table import open_examples
from clearhead.run.api import Model

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
        kind not in KINDS or (first is not rows and any(type(row) is not kind for row in rows)),
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
    paths = [] if path in corpora.CORPORA else files.expand([path], corpora.CORPORA)
    words = paths and all(formats.format_of(file) == "conll" for file in paths)
    if words and conll.tag_columns(paths[0], {}).universal:
        _labeller(column or "upos")  # a wrong name is refused before the file is read
        return [sentence for file in paths for sentence in read_treebank(file)]
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
    """Return a function that reads one column of a word at a position; "_" is no label."""
    if column == "arc":
        return governor
    name = column.removeprefix("feats.")
    if name and name != column:
        return lambda word, place: dict(
            cell.split("=", 1) for cell in word.feats.split("|") if "=" in cell
        ).get(name)
    refuse_unknown("column", column, COLUMNS)
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


# Vectors ----------------------------------------------------------------------------------------------------


BATCH_TOKENS = 4096  # of a batch, padding included
BATCH_NUMBERS = 1 << 26  # in the states of a batch, all depths together
IN_MEMORY = 1 << 31  # bytes of vectors; more go into a file
POOLS = ("mean", "first", "last")


@dataclass(frozen=True)
class ProbeInput:
    """What the model reads of one item, and where the things to probe are in it."""

    ids: tuple[int, ...]  # of the stack that is probed; () for an image
    positions: tuple[tuple[int, ...], ...]  # tokens of each word, text or image
    types: tuple[int, ...] = ()
    source: tuple[int, ...] = ()  # what the encoder reads while the decoder is probed
    image: NDArray[np.uint8] | Path | None = None

    def __len__(self) -> int:
        return max(len(self.ids), len(self.source)) if self.image is None else len(self.positions[0])


@dataclass(frozen=True, eq=False)
class Vectors:
    """The vectors of N things at L depths, with what they are."""

    layers: Floats  # L N D
    forms: tuple[str, ...]  # N
    labels: tuple[str, ...]  # N
    items: NDArray[np.int64]  # N: the number of the item that each belongs to
    lost: int  # things without a token: cut off, or not spelled


def stack_of(m: Model, stack: str | None) -> tuple[str, str]:
    """Return the stack that is probed, "encoder" or "decoder", and the prefix of its activations."""
    specs = m.config.stacks
    there = [name for name in ("encoder", "decoder") if getattr(m.config, name) is not None]
    stack = stack or there[0]
    refuse(stack not in there, f'stack "{stack}" is not there: this model has {" and ".join(there)}')
    refuse(
        specs[0].input not in (("tokens", "patches") if len(specs) == 1 else ("tokens",)),
        f"this model reads {specs[0].input}, "
        "and probes take a model of text, or one of images without a decoder",
    )
    return stack, specs[there.index(stack)].prefix


def vectors_of(
    m: Model,
    items: Sequence[ProbeItem],
    stack: str,
    prefix: str,
    pool: str,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Vectors:
    """Return the vectors of every labelled thing of some items, in their order.

    Args:
        m: the model.
        items: whose words, or which themselves, are probed.
        stack: "encoder" or "decoder". While the decoder of two stacks is probed, the encoder reads the same
            text.
        prefix: of the activations of that stack.
        pool: the vector of a thing with several tokens: their mean, the first or the last.
        on_progress: told how many items are done.
    """
    rows = [_row(m, item, stack) for item in items]
    kept = [
        [place for place, label in enumerate(item.labels) if label is not None and row.positions[place]]
        for item, row in zip(items, rows)
    ]
    first = np.cumsum([0, *map(len, kept)])
    spec = names.spec_of(m.config, "encoder" if prefix else "self")
    taps, width, done = names.states(spec), m.config.d_model, 0  # from the embedding up
    layers = _room((len(taps), int(first[-1]), width))
    most = min(BATCH_TOKENS, BATCH_NUMBERS // (len(taps) * width))
    for some in by_length(list(map(len, rows)), lambda count, longest: count * longest <= most):
        states = _recorded(m, [rows[row] for row in some], bool(prefix), taps)
        for place, row in enumerate(some):
            if kept[row]:
                own = torch.stack([state[place] for state in states])  # L T D
                positions = [rows[row].positions[word] for word in kept[row]]
                layers[:, first[row] : first[row + 1]] = _pooled(own, positions, pool)
        done += len(some)
        on_progress(done)
    things = [(item, place) for item, positions in zip(items, kept) for place in positions]
    return Vectors(
        layers,
        tuple(item.forms[place] for item, place in things),
        tuple(str(item.labels[place]) for item, place in things),
        np.repeat(np.arange(len(items)), [len(positions) for positions in kept]),
        sum(item.count for item in items) - len(things),
    )


def _row(m: Model, item: ProbeItem, stack: str) -> ProbeInput:
    """Return the tokens of one item."""
    kinds = ("images", "text") if m.model.main.spec.input == "patches" else ("text", "images")
    refuse(
        kinds[0] != ("text" if item.image is None else "images"),
        f"this model reads {kinds[0]}, and the data holds {kinds[1]}",
    )
    if item.image is not None:
        return ProbeInput((), (tuple(range(len(patch_names(m.config)))),), image=item.image)
    if item.spans is not None:
        words = align(m, item.forms, item.text, item.spans)
        row, special = ProbeInput(words.ids, words.words, words.types), words.special
    else:
        prepared = inputs.prepare_first(m, item.text, item.pair)
        tokens = prepared.first_tokens
        types = () if prepared.types is None else tuple(prepared.types[0].tolist())
        row, special = ProbeInput(tokens.ids, (tuple(range(len(tokens))),), types), tokens.special
    if stack == "encoder" or m.model.encoder is None:
        return row
    # The decoder of two stacks reads the same text after its start, without the special tokens.
    start = m.start_ids
    own = [place for place, mark in enumerate(special) if not mark][: m.max_length - len(start)]
    moved = {place: number for number, place in enumerate(own, len(start))}
    positions = tuple(
        tuple(moved[place] for place in positions if place in moved) for positions in row.positions
    )
    return ProbeInput((*start, *(row.ids[place] for place in own)), positions, source=row.ids)


def _recorded(m: Model, rows: Sequence[ProbeInput], feeds: bool, taps: Sequence[str]) -> list[Tensor]:
    """Return the states [B, T, D] of each depth; `feeds`: the probed stack is an encoder before a decoder."""
    ids = [row.ids for row in rows]
    if rows[0].image is not None:
        pixels = [to_pixels(row.image, m.config, m.images) for row in rows if row.image is not None]
        arguments = {"ids": torch.stack(pixels).to(next(m.model.parameters()))}
    elif feeds:
        arguments = inputs.padded_rows(m, [m.start_ids] * len(rows), ids)
    else:
        arguments = inputs.padded_rows(m, ids, [row.source for row in rows] if rows[0].source else ())
        if m.config.n_types > 1 and rows[0].types and not rows[0].source:
            arguments["types"] = padded([row.types for row in rows], 0, arguments["ids"].device)
    seen = inputs.recorded(m.model, taps, **arguments)
    return [seen[tap] for tap in taps]


def _pooled(states: Tensor, positions: Sequence[tuple[int, ...]], pool: str) -> Floats:
    """Pool states [L, T, D] over the tokens of N things: [L, N, D]."""
    if pool == "mean":
        last = max(max(tokens) for tokens in positions) + 1  # the rest is padding
        _, mean_of = word_matrices([positions], last)  # 1 N T
        return on_cpu(mean_of.to(states.device) @ states[:, :last].float()).numpy()
    return on_cpu(states[:, [tokens[0 if pool == "first" else -1] for tokens in positions]]).numpy()


def _room(shape: tuple[int, int, int]) -> Floats:
    """Return an array of zeros; a large one lies in a temporary file, which is gone when the array is."""
    if 4 * int(np.prod(shape)) <= IN_MEMORY or not shape[1]:
        return np.zeros(shape, np.float32)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, np.float32, "w+", shape=shape)
