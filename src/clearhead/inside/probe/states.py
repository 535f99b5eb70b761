"""Vectors of words, texts and images at every depth: what probes read.

The states of all layers are recorded batch by batch, pooled at once, and only the pooled vectors are kept: as
float32 numbers in memory, or, where they are many, in a temporary file that memory is mapped to.

Shapes: B batch, T tokens, D model, L depths (the embedding and every block), N things probed.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.errors import refuse
from clearhead.hub.preprocessor import to_pixels
from clearhead.inside import inputs, names
from clearhead.inside.heads.alignments import align, word_matrices
from clearhead.inside.probe.data import ProbeItem
from clearhead.inside.results import Floats, on_cpu
from clearhead.learn.batches.padding import by_length, padded, real_tokens
from clearhead.run.api import Model

OnProgress = Callable[[str, int, int], None]
BATCH_TOKENS = 4096  # of a batch, padding included
BATCH_NUMBERS = 1 << 26  # in the states of a batch, all depths together
IN_MEMORY = 1 << 31  # bytes of vectors; more go into a file
POOLS = ("mean", "first", "last")


@dataclass(frozen=True)
class ProbeInput:
    """What the model reads of one item, and where the things to probe are in it."""

    ids: tuple[int, ...]  # of the stack that is probed; () for an image
    places: tuple[tuple[int, ...], ...]  # tokens of each thing
    types: tuple[int, ...] = ()
    source: tuple[int, ...] = ()  # what the encoder reads while the decoder is probed
    image: NDArray[np.uint8] | Path | None = None

    def __len__(self) -> int:
        return max(len(self.ids), len(self.source)) if self.image is None else len(self.places[0])


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


def depths(m: Model, prefix: str) -> list[str]:
    """Return the activations that are probed, from the embedding up."""
    return names.states(names.spec_of(m.config, "encoder" if prefix else "self"))


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
        [place for place, label in enumerate(item.labels) if label is not None and row.places[place]]
        for item, row in zip(items, rows)
    ]
    first = np.cumsum([0, *map(len, kept)])
    taps, width, done = depths(m, prefix), m.config.d_model, 0
    layers = _room((len(taps), int(first[-1]), width))
    most = min(BATCH_TOKENS, BATCH_NUMBERS // (len(taps) * width))
    for some in by_length(list(map(len, rows)), lambda count, longest: count * longest <= most):
        found = _recorded(m, [rows[row] for row in some], bool(prefix), taps)
        for place, row in enumerate(some):
            if kept[row]:
                own = torch.stack([state[place] for state in found])  # L T D
                places = [rows[row].places[word] for word in kept[row]]
                layers[:, first[row] : first[row + 1]] = _pooled(own, places, pool)
        done += len(some)
        on_progress(done)
    things = [(item, place) for item, places in zip(items, kept) for place in places]
    return Vectors(
        layers,
        tuple(item.forms[place] for item, place in things),
        tuple(str(item.labels[place]) for item, place in things),
        np.repeat(np.arange(len(items)), [len(places) for places in kept]),
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
        return ProbeInput((), (tuple(range(len(inputs.patch_names(m.config)))),), image=item.image)
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
    places = tuple(tuple(moved[place] for place in places if place in moved) for places in row.places)
    return ProbeInput((*start, *(row.ids[place] for place in own)), places, source=row.ids)


def _recorded(m: Model, rows: Sequence[ProbeInput], feeds: bool, taps: Sequence[str]) -> list[Tensor]:
    """Return the states [B, T, D] of each depth; `feeds`: the probed stack is an encoder before a decoder."""
    pad, device = m.special.get("pad", 0), inputs.device_of(m.model)
    given: dict[str, Any] = {}
    if rows[0].image is not None:
        pixels = [to_pixels(row.image, m.config, m.images) for row in rows if row.image is not None]
        main = torch.stack(pixels).to(next(m.model.parameters()))
    else:
        ids, sources = [row.ids for row in rows], [row.source for row in rows]
        main, given["mask"] = padded(ids, pad, device), real_tokens(ids, device)
        if feeds:
            given = {"source": main, "source_mask": given["mask"]}
            main = torch.tensor([m.start_ids] * len(rows), device=device)
        elif rows[0].source:
            given |= {"source": padded(sources, pad, device), "source_mask": real_tokens(sources, device)}
        elif m.config.n_types > 1 and rows[0].types:
            given["types"] = padded([row.types for row in rows], 0, device)
    seen = inputs.recorded(m.model, taps, main, **given)
    return [seen[tap] for tap in taps]


def _pooled(states: Tensor, places: Sequence[tuple[int, ...]], pool: str) -> Floats:
    """Pool states [L, T, D] over the tokens of N things: [L, N, D]."""
    if pool == "mean":
        last = max(max(tokens) for tokens in places) + 1  # what lies behind is padding
        _, mean_of = word_matrices([places], last)  # 1 N T
        return on_cpu(mean_of.to(states.device) @ states[:, :last].float()).numpy()
    return on_cpu(states[:, [tokens[0 if pool == "first" else -1] for tokens in places]]).numpy()


def _room(shape: tuple[int, int, int]) -> Floats:
    """Return an array of zeros; a large one lies in a temporary file, which is gone when the array is."""
    if 4 * int(np.prod(shape)) <= IN_MEMORY or not shape[1]:
        return np.zeros(shape, np.float32)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, np.float32, "w+", shape=shape)
