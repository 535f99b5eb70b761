"""Batches of rows of one length: windows over a text, packed documents, pictures.

Shapes: B rows, T tokens of a row, S tokens of the source, N tokens of the text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from clearhead.batches.augment import augment, mix
from clearhead.batches.batch import IGNORE, Batch, Batches
from clearhead.batches.encoded import Encoded
from clearhead.batches.objectives import corrupt_spans, mask_tokens, noise_sizes
from clearhead.batches.rows import Frame, Ints, Part, frame_rows, lay, pack, ragged
from clearhead.data.plan import DataPlan
from clearhead.errors import InputError

CHECKED = 2**20  # tokens looked at together
ORDER, OFFSET, BATCH = range(3)  # what random numbers are drawn for: no two share theirs


def generator(seed: int, purpose: int, number: int) -> np.random.Generator:
    """Random numbers that follow from the seed, what they are for, and the number of the epoch or batch."""
    return np.random.default_rng((seed % 2**64, purpose, number))


def tensor(array: NDArray[Any]) -> Tensor:
    """Whole numbers or truth values as a model takes them."""
    return torch.from_numpy(array if array.dtype == np.bool_ else array.astype(np.int64))


def need(special: Mapping[str, int], role: str, task: str) -> int:
    """The id of a special token that a task cannot do without."""
    if role not in special:
        have = ", ".join(special) or "none at all"
        raise InputError(
            f"{task} needs a {role} token, and the tokenizer has {have}: train one for this task, or choose another task"
        )
    return special[role]


def room_in(length: int, frame: Frame, what: str) -> int:
    """Tokens of a row that the frame leaves to the text."""
    if length <= frame.size:
        raise InputError(
            f"rows of {length} tokens have no room for {what} beside {frame.size} special tokens: raise data.max_length"
        )
    return length - frame.size


def rows_of(plan: DataPlan, tokens: int) -> int:
    """How many rows of so many tokens a batch holds."""
    return plan.batch_size if plan.batch_tokens is None else max(1, plan.batch_tokens // tokens)


class EvenRows(Batches):
    """Rows of one length. Training batches all hold as many: one that begins at the end of an epoch goes on into the next."""

    def __init__(self, n_rows: int, rows: int, seed: int, training: bool) -> None:
        """`n_rows` rows in all, `rows` of them in a batch."""
        self.n_rows, self.rows = n_rows, min(rows, n_rows)
        self.per_epoch = -(-n_rows // self.rows)
        self.seed, self.training = seed, training
        self.order = lru_cache(maxsize=2)(self._order)  # a batch may need two epochs

    def _order(self, epoch: int) -> Ints:
        return generator(self.seed, ORDER, epoch).permutation(self.n_rows)

    def at(self, index: int) -> Batch:
        """See `Batches.at`."""
        random = generator(self.seed, BATCH, index)
        if not self.training:
            start = index % self.per_epoch * self.rows
            return self.build(self.places(0, np.arange(start, min(start + self.rows, self.n_rows))), random)
        epoch, start = divmod(index * self.rows, self.n_rows)
        places = self.places(epoch, self.order(epoch)[start : start + self.rows])
        if missing := self.rows - len(places):
            places = np.append(places, self.places(epoch + 1, self.order(epoch + 1)[:missing]))
        return self.build(places, random)

    def places(self, epoch: int, numbers: Ints) -> Ints:
        """Where the rows with these numbers are in this epoch."""
        return numbers

    @abstractmethod
    def build(self, places: Ints, random: np.random.Generator) -> Batch:
        """The batch of the rows at these places."""


class Windows(EvenRows):
    """Windows over a text; here for the next token: each holds T tokens and the one that follows.

    Training: the windows of an epoch lie side by side from a random offset of less than one window, in random order. So
    every token is a target about once an epoch (those before the offset not at all, those under the last window, which is
    pulled back to end with the text, perhaps twice), while windows drawn freely, with replacement, would miss more than a third of them.
    Validation: side by side from the first token on; every token but the first is a target once; the last row is padded.
    """

    overlap = 1  # tokens that a window shares with the next

    def __init__(
        self,
        encoded: Encoded,
        step: int,
        plan: DataPlan,
        special: Mapping[str, int],
        seed: int,
        training: bool,
    ) -> None:
        """Windows that advance by `step` tokens, or by as many as the text has."""
        self.ids, self.pad = encoded["ids"], special.get("pad", 0)
        usable = len(self.ids) - self.overlap
        if usable < 1:
            raise InputError(
                f"the {'training' if training else 'validation'} text has {len(self.ids)} tokens, too few to learn from: give more text"
            )
        if usable < step and training:
            self.said = (
                f"the text has {len(self.ids):,} tokens and rows could have {step:,}: each row is the whole text",
            )
        self.step = min(step, usable)
        self.width = self.step + self.overlap
        super().__init__(
            usable // self.step if training else -(-usable // self.step),
            rows_of(plan, self.step),
            seed,
            training,
        )
        if not training:
            self.waste = 1 - usable / (self.n_rows * self.step)

    def places(self, epoch: int, numbers: Ints) -> Ints:
        """The first token of each window."""
        if not self.training:
            return numbers * self.step
        offset = int(generator(self.seed, OFFSET, epoch).integers(self.step))
        return np.minimum(offset + numbers * self.step, len(self.ids) - self.width)

    def read(self, starts: Ints) -> tuple[Ints, Ints]:
        """The tokens of windows, padded [B, width], and how many of each are real [B]."""
        lengths = np.minimum(self.width, len(self.ids) - starts)
        if lengths.min() == self.width:
            return sliding_window_view(self.ids, self.width)[starts].astype(np.int64), lengths
        rows = np.full((len(starts), int(lengths.max())), self.pad, dtype=np.int64)
        lay(rows, np.zeros_like(starts), Part(self.ids, starts, lengths))
        return rows, lengths

    def build(self, places: Ints, random: np.random.Generator) -> Batch:
        """See `EvenRows.build`."""
        rows, lengths = self.read(places)
        real = np.arange(rows.shape[1] - 1) < lengths[:, None] - 1
        whole = bool(real.all())
        targets = rows[:, 1:] if whole else np.where(real, rows[:, 1:], IGNORE)
        return Batch(
            tensor(rows[:, :-1]),
            tensor(targets),
            mask=None if whole else tensor(real),
            numbers=tensor(places),
        )


class MaskedWindows(Windows):
    """Windows over a text, framed, some of their tokens hidden: the targets are those."""

    overlap = 0

    def __init__(
        self,
        encoded: Encoded,
        length: int,
        plan: DataPlan,
        special: Mapping[str, int],
        seed: int,
        training: bool,
    ) -> None:
        """Rows of `length` tokens, the frame's included."""
        self.frame, self.share, self.mask_id = encoded.frame, plan.mask_share, need(special, "mask", "mlm")
        super().__init__(encoded, room_in(length, self.frame, "text"), plan, special, seed, training)
        self.hideable = np.ones(encoded.vocab_size, dtype=np.bool_)
        self.hideable[
            [token for token in (*encoded.specials, *special.values()) if token < encoded.vocab_size]
        ] = False
        self.ordinary = np.flatnonzero(self.hideable)
        if not any(
            self.hideable[self.ids[start : start + CHECKED]].any()
            for start in range(0, len(self.ids), CHECKED)
        ):
            side = "training" if training else "validation"
            raise InputError(
                f"every word of the {side} text is unknown to the tokenizer, so there is nothing to guess: give more text"
            )

    def build(self, places: Ints, random: np.random.Generator) -> Batch:
        """See `EvenRows.build`."""
        lengths = np.minimum(self.width, len(self.ids) - places)
        total = lengths + self.frame.size
        real = np.arange(total.max()) < total[:, None]
        rows = np.full(real.shape, self.pad, dtype=np.int64)
        frame_rows(self.frame, [Part(self.ids, places, lengths)], rows)
        seen, targets = mask_tokens(
            rows, self.hideable[rows] & real, self.share, self.mask_id, self.ordinary, random
        )
        return Batch(
            tensor(seen), tensor(targets), mask=None if real.all() else tensor(real), numbers=tensor(places)
        )


class NoisyWindows(Windows):
    """Windows over a text with spans cut out: the encoder reads what is left, the decoder is to say what is missing."""

    overlap = 0

    def __init__(
        self,
        encoded: Encoded,
        length: int,
        plan: DataPlan,
        special: Mapping[str, int],
        seed: int,
        training: bool,
    ) -> None:
        """Windows as long as they can be while neither side takes more than `length` tokens."""
        self.frame, self.plan, self.sentinels = (
            encoded.frame,
            plan,
            np.array(encoded.sentinels, dtype=np.int64),
        )
        self.bos, self.eos = need(special, "bos", "denoise"), need(special, "eos", "denoise")
        if not len(self.sentinels):
            raise InputError(
                "denoise needs sentinels, <extra_id_0> and so on, and the tokenizer has none: train one for this task"
            )
        step = 1
        if max(self._sizes(step)) > length:
            raise InputError(
                f"rows of {length} tokens are too short for denoise, which needs {max(self._sizes(step))}: raise data.max_length"
            )
        while max(self._sizes(step + 1)) <= length:
            step += 1
        super().__init__(encoded, step, plan, special, seed, training)

    def _sizes(self, step: int) -> tuple[int, int]:
        """Tokens of source and target that `step` tokens of text become."""
        noise, spans = noise_sizes(step, self.plan.mask_share, self.plan.span_length, len(self.sentinels))
        return step - noise + spans + self.frame.size, noise + spans + 1

    def build(self, places: Ints, random: np.random.Generator) -> Batch:
        """See `EvenRows.build`."""
        rows, lengths = self.read(places)
        sizes = np.array([self._sizes(length) for length in lengths.tolist()])  # B 2
        width, target_width = sizes.max(0)
        source = np.full((len(rows), width), self.pad, dtype=np.int64)
        decoder = np.full((len(rows), target_width), self.pad, dtype=np.int64)
        targets = np.full_like(decoder, IGNORE)
        decoder[:, 0] = self.bos
        for length in np.unique(lengths).tolist():  # one, but for the last row of a validation text
            chosen = np.flatnonzero(lengths == length)
            noise, spans = noise_sizes(
                length, self.plan.mask_share, self.plan.span_length, len(self.sentinels)
            )
            left, missing = corrupt_spans(rows[chosen, :length], noise, self.sentinels[:spans], random)
            starts = np.arange(len(chosen)) * left.shape[1]
            part = Part(left.reshape(-1), starts, np.full(len(chosen), left.shape[1]))
            frame_rows(self.frame, [part], source, rows=chosen)
            decoder[chosen, 1 : missing.shape[1] + 1] = missing
            targets[chosen, : missing.shape[1]] = missing
            targets[chosen, missing.shape[1]] = self.eos
        masks = {}
        if lengths.min() < lengths.max():
            masks = {
                "mask": np.arange(target_width) < sizes[:, 1:],
                "source_mask": np.arange(width) < sizes[:, :1],
            }
        more = {name: tensor(mask) for name, mask in masks.items()}
        return Batch(tensor(decoder), tensor(targets), source=tensor(source), numbers=tensor(places), **more)


class Packed(EvenRows):
    """Whole documents packed into rows of T tokens, none of which sees another; a document longer than that is cut into windows.

    Each document begins with the bos token, so that its first token is a target too; no target crosses documents.
    """

    def __init__(
        self,
        encoded: Encoded,
        length: int,
        plan: DataPlan,
        special: Mapping[str, int],
        seed: int,
        training: bool,
    ) -> None:
        self.ids, self.pad, self.width = encoded["ids"], special.get("pad", 0), length
        self.bos = need(special, "bos", "isolated packing")
        offsets = np.asarray(encoded["ids_offsets"])
        counts = -(-np.diff(offsets) // length)  # windows of each document
        documents, window = ragged(counts)
        self.starts = offsets[:-1][documents] + window * length  # of each piece: its first target
        self.first = window == 0
        self.lengths = np.minimum(length, offsets[1:][documents] - self.starts)
        row_of, n_rows = pack(self.lengths, length)
        self.members = np.argsort(row_of, kind="stable")  # pieces, row after row
        self.row_starts = np.append(0, np.cumsum(np.bincount(row_of, minlength=n_rows)))
        super().__init__(n_rows, rows_of(plan, length), seed, training)
        self.waste = 1 - len(self.ids) / (n_rows * length)

    def build(self, places: Ints, random: np.random.Generator) -> Batch:
        """See `EvenRows.build`."""
        counts = self.row_starts[places + 1] - self.row_starts[places]  # documents of each row
        row, number = ragged(counts)
        piece = self.members[self.row_starts[places][row] + number]
        lengths = self.lengths[piece]
        before = np.cumsum(lengths) - lengths  # tokens of the pieces before each
        place = np.repeat(self.starts[piece] - before, lengths) + np.arange(
            lengths.sum()
        )  # of each target in the text
        inputs = self.ids[place - 1]
        inputs[before[self.first[piece]]] = self.bos
        real = (
            np.arange(self.width) < np.bincount(row, weights=lengths)[:, None]
        )  # pieces fill each row from the left, in order
        ids = np.full(real.shape, self.pad, dtype=np.int64)
        targets = np.full_like(ids, IGNORE)
        documents = np.repeat(counts[:, None] - 1, self.width, axis=1)  # padding counts with the last one
        ids[real], targets[real], documents[real] = inputs, self.ids[place], np.repeat(number, lengths)
        return Batch(
            tensor(ids),
            tensor(targets),
            mask=tensor(real),
            documents=tensor(documents),
            numbers=tensor(places),
        )


class Pictures(EvenRows):
    """Pictures and their classes: pixels on a scale of 0 to 1, less the mean of each channel, divided by its deviation."""

    def __init__(self, encoded: Encoded, plan: DataPlan, seed: int, training: bool) -> None:
        self.pixels, self.labels = encoded["pixels"], encoded["labels"]
        self.scale = (1 / (255 * encoded["std"])).astype(np.float32)[:, None, None]  # C 1 1
        self.shift = (encoded["mean"] / encoded["std"]).astype(np.float32)[:, None, None]
        self.changes = plan.augment if training else ()
        super().__init__(len(self.labels), plan.batch_size, seed, training)

    def build(self, places: Ints, random: np.random.Generator) -> Batch:
        """See `EvenRows.build`."""
        pixels = np.ascontiguousarray(self.pixels[places].transpose(0, 3, 1, 2)).astype(np.float32)  # B C H W
        pixels *= self.scale
        pixels -= self.shift
        pixels = augment(pixels, self.changes, random)
        targets = tensor(self.labels[places])
        if "mix" in self.changes:
            pixels, shares = mix(pixels, self.labels[places], random)
            targets = torch.from_numpy(shares)
        return Batch(torch.from_numpy(np.ascontiguousarray(pixels)), targets, numbers=tensor(places))
