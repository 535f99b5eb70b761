"""Vectors of words, texts and images at every depth: what probes read.

The states of all layers are recorded batch by batch, pooled at once, and only the pooled vectors are kept: as float32
numbers in memory, or, where they are many, in a temporary file that memory is mapped to.

Shapes: B batch, T tokens, D model, L depths (the embedding and every block), N things probed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.bundle import Model
from clearhead.errors import InputError
from clearhead.hub.pixels import to_pixels
from clearhead.inside.heads.words import align
from clearhead.inside.inputs import prepare
from clearhead.inside.probe.data import Item
from clearhead.model.taps import record
from clearhead.model.transformer import evaluating

Floats = NDArray[np.float32]
OnProgress = Callable[[str, int, int], None]
BATCH_TOKENS = 4096  # of a batch, padding included
BATCH_NUMBERS = 1 << 26  # in the states of a batch, all depths together
IN_MEMORY = 1 << 31  # bytes of vectors; more go into a file
POOLS = ("mean", "first", "last")


@dataclass(frozen=True)
class Row:
    """What the model reads of one item, and where the things to probe are in it."""

    ids: tuple[int, ...]  # of the stack that is probed; () for an image
    places: tuple[tuple[int, ...], ...]  # tokens of each thing
    types: tuple[int, ...] = ()
    source: tuple[int, ...] = ()  # what the encoder reads while the decoder is probed
    image: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return max(len(self.ids), len(self.source))


@dataclass(frozen=True, eq=False)
class Vectors:
    """The vectors of N things at L depths, with what they are."""

    layers: Floats  # L N D
    forms: tuple[str, ...]  # N
    labels: tuple[str, ...]  # N
    items: NDArray[np.int64]  # N: the number of the item that each belongs to
    lost: int  # things without a token: cut off, or not spelled


def stack_of(m: Model, stack: str | None) -> tuple[str, str]:
    """The stack that is probed, "encoder" or "decoder", and the prefix of its activations."""
    both = m.model.encoder is not None and m.model.decoder is not None
    there = [name for name in ("encoder", "decoder") if getattr(m.model, name) is not None]
    stack = stack or there[0]
    if stack not in there:
        raise InputError(f'stack "{stack}" is not there: this model has {" and ".join(there)}')
    plan = m.config.encoder if stack == "encoder" else m.config.decoder
    first = m.config.encoder or m.config.decoder
    assert plan is not None and first is not None
    if first.input not in ("tokens", "patches") or (both and first.input != "tokens"):
        raise InputError(
            f"this model reads {first.input}, and probes take a model of text, or one of images without a decoder"
        )
    return stack, plan.prefix


def depths(m: Model, prefix: str) -> list[str]:
    """The activations that are probed, from the embedding up."""
    plan = m.config.encoder if prefix else (m.config.decoder or m.config.encoder)
    assert plan is not None
    return [f"{prefix}embedding", *(f"{prefix}blocks.{layer}.resid_post" for layer in range(plan.n_layers))]


def vectors_of(
    m: Model,
    items: Sequence[Item],
    stack: str,
    prefix: str,
    pool: str,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Vectors:
    """The vectors of every labelled thing of some items, in their order.

    Args:
        m: the model.
        items: whose words, or which themselves, are probed.
        stack: "encoder" or "decoder". While the decoder of two stacks is probed, the encoder reads the same text.
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
    taps = depths(m, prefix)
    width = m.model.config.d_model
    layers = _room((len(taps), int(first[-1]), width))
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    done = 0
    for some in _batches(
        order, [_size(m, row) for row in rows], min(BATCH_TOKENS, BATCH_NUMBERS // (len(taps) * width))
    ):
        states = _recorded(m, [rows[row] for row in some], bool(prefix), taps)
        for place, row in enumerate(some):
            if kept[row]:
                own = torch.stack([state[place] for state in states])  # L T D
                layers[:, first[row] : first[row + 1]] = _pooled(
                    own, [rows[row].places[word] for word in kept[row]], pool
                )
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


def _row(m: Model, item: Item, stack: str) -> Row:
    """The tokens of one item."""
    patches = m.model.main.spec.input == "patches"
    if patches != (item.image is not None):
        raise InputError(
            f"this model reads {'images' if patches else 'text'}, and the data holds {'text' if patches else 'images'}"
        )
    if item.image is not None:
        tokens = m.config.n_patches + m.config.class_token
        return Row((), (tuple(range(tokens)),), image=item.image)
    if item.spans is not None:
        words = align(m, item.forms, item.text, item.spans)
        row = Row(words.ids, words.words, words.types)
        special = words.special
    else:
        start = m._start() if m.config.family == "encoder-decoder" else None
        prepared = prepare(m, item.text, target=start, pair=item.pair)
        tokens_read = prepared.source_tokens or prepared.tokens
        types = () if prepared.types is None else tuple(prepared.types[0].tolist())
        row, special = Row(tokens_read.ids, (tuple(range(len(tokens_read))),), types), tokens_read.special
    return _written(m, row, special) if stack == "decoder" and m.model.encoder is not None else row


def _written(m: Model, row: Row, special: Sequence[bool]) -> Row:
    """The same text as the decoder of two stacks reads it: after its beginning, without the special tokens."""
    start = m._start()
    own = [place for place, mark in enumerate(special) if not mark][: m.max_length - len(start)]
    moved = {place: number for number, place in enumerate(own, len(start))}
    places = tuple(tuple(moved[place] for place in places if place in moved) for places in row.places)
    return Row((*start, *(row.ids[place] for place in own)), places, source=row.ids)


def _size(m: Model, row: Row) -> int:
    return len(row) or m.config.n_patches + m.config.class_token


def _batches(order: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Rows of like length together, so many that their tokens are `most` with padding; a longer row is alone."""
    made: list[list[int]] = []
    for row in order:  # shortest first, so a row is as long as any before it
        if made and (len(made[-1]) + 1) * sizes[row] <= most:
            made[-1].append(row)
        else:
            made.append([row])
    return made


@torch.inference_mode()
def _recorded(m: Model, rows: Sequence[Row], feeds: bool, taps: Sequence[str]) -> list[Tensor]:
    """The states [B, T, D] of each depth, on the model's device. `feeds`: the probed stack is an encoder before a decoder."""
    weight = next(m.model.parameters())
    given: dict[str, Any] = {"logits": "none"}
    if rows[0].image is not None:
        main = torch.stack(
            [to_pixels(row.image, m.config, m.images) for row in rows if row.image is not None]
        ).to(weight)
    else:
        pad, device = m.special.get("pad", 0), weight.device
        main, given["mask"] = _padded([row.ids for row in rows], pad, device)
        if feeds:
            given |= {"source": main, "source_mask": given.pop("mask")}
            main = torch.tensor([m._start()] * len(rows), device=device)
        elif rows[0].source:
            given["source"], given["source_mask"] = _padded([row.source for row in rows], pad, device)
        if m.config.n_types > 1 and rows[0].types and "source" not in given:
            given["types"] = _padded([row.types for row in rows], 0, device)[0]
    with evaluating(m.model), record(m.model, *taps) as seen:
        m.model(main, **given)
    return [seen[tap] for tap in taps]


def _padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T], padded on the right; a row without tokens gets one of padding."""
    length = max(1, *map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows], device=device)
    mask = torch.tensor([[slot < max(1, len(row)) for slot in range(length)] for row in rows], device=device)
    return ids, mask


def _pooled(states: Tensor, places: Sequence[tuple[int, ...]], pool: str) -> Floats:
    """States [L, T, D] and the tokens of N things -> [L, N, D]."""
    if pool != "mean":
        end = 0 if pool == "first" else -1
        return _numpy(states[:, [tokens[end] for tokens in places]])
    last = max(max(tokens) for tokens in places) + 1  # what lies behind is padding
    mean = torch.zeros(len(places), last, device=states.device)  # N T
    for number, tokens in enumerate(places):
        mean[number, list(tokens)] = 1 / len(tokens)
    return _numpy(mean @ states[:, :last].float())


def _numpy(x: Tensor) -> Floats:
    return x.float().cpu().numpy()


def _room(shape: tuple[int, int, int]) -> Floats:
    """An array of zeros; a large one lies in a temporary file, which is gone when the array is."""
    if 4 * int(np.prod(shape)) <= IN_MEMORY or not shape[1]:
        return np.zeros(shape, np.float32)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, np.float32, "w+", shape=shape)
