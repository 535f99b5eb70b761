"""Batches of rows of one length: windows over a text, masked or with spans taken out, and packed documents.

Shapes: B rows, T tokens of a row, S tokens of the source, N tokens of the text.
"""

import math
from itertools import count
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from clearhead.errors import refuse
from clearhead.learn.batches.batch import IGNORE, OFFSET, Batch, FixedRows, generator
from clearhead.learn.batches.encoding import Setting
from clearhead.learn.batches.ragged import Ints, Stretches, blank, frame_rows, lay, pack, ragged

CHECKED = 2**20  # tokens looked at together
MASKED, REPLACED = 0.8, 0.1  # of the tokens chosen for masking; the others stay as they are


class TextWindows(FixedRows):
    """Windows over a text, here for predicting the next token: each holds T tokens and the one that follows.

    Training: the windows of an epoch lie side by side from a random offset below one window, in random order.
    So every token is a target about once an epoch: those before the offset not at all, and those under the
    last window, which is moved back to end with the text, perhaps twice. Windows drawn with replacement would
    miss more than a third.

    Validation: side by side from the first token on. Every token but the first is a target once. The last row
    is padded.
    """

    overlap = 1  # tokens that a window shares with the next

    def __init__(self, setting: Setting, step: int | None = None) -> None:
        """Make windows that advance by `step` tokens, or by as many as the text has."""
        self.ids, self.pad = setting.encoded["ids"], setting.pad
        self.token_dropout = setting.plan.token_dropout
        step, usable, training = step or setting.length, len(self.ids) - self.overlap, setting.training
        refuse(
            usable < 1,
            f"the {setting.side} text has {len(self.ids)} tokens, too few to learn from: give more text",
        )
        if usable < step and training:
            could = f"the text has {len(self.ids):,} tokens and rows could have {step:,}"
            self.notes = (f"{could}: each row is the whole text",)
        self.step = min(step, usable)
        self.width = self.step + self.overlap
        n_rows = usable // self.step if training else math.ceil(usable / self.step)
        super().__init__(n_rows, setting.rows(self.step), setting.seed, training)
        if not training:
            self.waste = 1 - usable / (self.n_rows * self.step)

    def positions(self, epoch: int, numbers: Ints) -> Ints:
        """Return the first token of each window."""
        if not self.training:
            return numbers * self.step
        offset = int(generator(self.seed, OFFSET, epoch).integers(self.step))
        return np.minimum(offset + numbers * self.step, len(self.ids) - self.width)

    def read(self, starts: Ints) -> tuple[Ints, Ints]:
        """Return the tokens of windows, padded [B, width], and how many of each are real [B]."""
        lengths = np.minimum(self.width, len(self.ids) - starts)
        if lengths.min() == self.width:
            return sliding_window_view(self.ids, self.width)[starts].astype(np.int64), lengths
        rows, _ = blank(lengths, self.pad)
        lay(rows, 0, Stretches(self.ids, starts, lengths))
        return rows, lengths

    def _build(self, positions: Ints, random: np.random.Generator) -> Batch:
        rows, lengths = self.read(positions)
        real = np.arange(rows.shape[1] - 1) < lengths[:, None] - 1
        targets = np.where(real, rows[:, 1:], IGNORE)
        mask = None if real.all() else real
        return Batch.of(ids=self.noisy(rows[:, :-1], random), targets=targets, mask=mask, numbers=positions)

    def noisy(self, ids: Ints, random: np.random.Generator) -> Ints:
        """Replace a share of the tokens that are read in training by others of the text, drawn at random."""
        if not (self.training and self.token_dropout):
            return ids
        chosen = random.random(ids.shape) < self.token_dropout
        return np.where(chosen, self.ids[random.integers(len(self.ids), size=ids.shape)], ids)


class MaskedWindows(TextWindows):
    """Windows over a text, framed, with some tokens masked: these are the targets."""

    overlap = 0

    def __init__(self, setting: Setting) -> None:
        encoded = setting.encoded
        self.frame, self.share, self.mask_id = encoded.frame, setting.plan.mask_share, setting.need("mask")
        super().__init__(setting, setting.room(self.frame, "text"))
        special = [*encoded.specials, *setting.special.values()]
        self.hideable = ~np.isin(np.arange(encoded.vocab_size), special)
        self.ordinary = np.flatnonzero(self.hideable)
        starts = range(0, len(self.ids), CHECKED)
        refuse(
            not any(self.hideable[self.ids[start : start + CHECKED]].any() for start in starts),
            f"every word of the {setting.side} text is unknown to the tokenizer, so there is nothing to "
            "guess: "
            "give more text",
        )

    def _build(self, positions: Ints, random: np.random.Generator) -> Batch:
        lengths = np.minimum(self.width, len(self.ids) - positions)
        rows, mask = blank(lengths + self.frame.size, self.pad)
        frame_rows(self.frame, [Stretches(self.ids, positions, lengths)], rows)
        free = self.hideable[rows] & (True if mask is None else mask)
        seen, targets = mask_tokens(rows, free, self.share, self.mask_id, self.ordinary, random)
        return Batch.of(ids=seen, targets=targets, mask=mask, numbers=positions)


class NoisyWindows(TextWindows):
    """Windows over a text with spans taken out.

    The encoder reads the rest, the decoder writes what is missing.
    """

    overlap = 0

    def __init__(self, setting: Setting) -> None:
        """Make windows as long as possible while neither side has more than `length` tokens."""
        self.plan, self.frame = setting.plan, setting.encoded.frame
        self.sentinels = np.array(setting.encoded.sentinels, dtype=np.int64)
        self.bos, self.eos = setting.need("bos"), setting.need("eos")
        refuse(
            not len(self.sentinels),
            f"{setting.encoded.task} needs sentinels, <extra_id_0> and so on, and the tokenizer has "
            "none: "
            "train one for this task",
        )
        least = max(self._sizes(1))
        refuse(
            least > setting.length,
            f"rows of {setting.length} tokens are too short for {setting.encoded.task}, which needs {least}: "
            "raise data.max_length",
        )
        super().__init__(setting, next(n for n in count(1) if max(self._sizes(n + 1)) > setting.length))

    def _noise(self, length: int) -> tuple[int, int]:
        return noise_sizes(length, self.plan.mask_share, self.plan.span_length, len(self.sentinels))

    def _sizes(self, length: int) -> tuple[int, int]:
        """Return how many tokens of source and target `length` tokens of text become."""
        noise, spans = self._noise(length)
        return length - noise + spans + self.frame.size, noise + spans + 1

    def _build(self, positions: Ints, random: np.random.Generator) -> Batch:
        rows, lengths = self.read(positions)
        sizes = np.array([self._sizes(length) for length in lengths.tolist()])  # B 2
        source, source_mask = blank(sizes[:, 0], self.pad)
        decoder, mask = blank(sizes[:, 1], self.pad)
        targets = np.full_like(decoder, IGNORE)
        decoder[:, 0] = self.bos
        for length in np.unique(lengths).tolist():  # one, except for the last row of a validation text
            chosen = np.flatnonzero(lengths == length)
            noise, spans = self._noise(length)
            left, missing = corrupt_spans(rows[chosen, :length], noise, self.sentinels[:spans], random)
            kept, taken = left.shape[1], missing.shape[1]
            part = Stretches(left.reshape(-1), np.arange(len(chosen)) * kept, np.full(len(chosen), kept))
            frame_rows(self.frame, [part], source, rows=chosen)
            decoder[chosen, 1 : taken + 1] = missing
            targets[chosen, :taken] = missing
            targets[chosen, taken] = self.eos
        sides = {"source": source, "source_mask": source_mask}
        return Batch.of(ids=decoder, targets=targets, mask=mask, numbers=positions, **sides)


class PackedRows(FixedRows):
    """Chunks packed into rows of T tokens, none of which sees another; the targets of each go with it."""

    def __init__(self, setting: Setting, inputs: Stretches, targets: Stretches) -> None:
        self.inputs, self.targets, self.pad, self.width = inputs, targets, setting.pad, setting.length
        row_of, n_rows = pack(inputs.lengths, self.width)
        self.members = np.argsort(row_of, kind="stable")  # chunks, row after row
        self.row_starts = np.append(0, np.cumsum(np.bincount(row_of, minlength=n_rows)))
        super().__init__(n_rows, setting.rows(self.width), setting.seed, setting.training)
        self.waste = 1 - float(inputs.lengths.sum()) / (n_rows * self.width)

    def _build(self, positions: Ints, random: np.random.Generator) -> Batch:
        counts = np.diff(self.row_starts)[positions]  # chunks of each row
        row, number = ragged(counts)
        chunk = self.members[self.row_starts[positions][row] + number]
        inputs, targets = self.inputs.take(chunk), self.targets.take(chunk)
        before = np.cumsum(inputs.lengths) - inputs.lengths  # tokens of the chunks before each
        at = before - before[np.cumsum(counts) - counts][row]  # the column at which each begins
        ids = np.full((len(positions), self.width), self.pad, dtype=np.int64)
        wanted = np.full_like(ids, IGNORE)
        documents = np.repeat(counts[:, None] - 1, self.width, axis=1)  # padding counts with the last one
        lay(ids, at, inputs, row)
        lay(wanted, at, targets, row)
        lay(documents, at, Stretches(np.repeat(number, inputs.lengths), before, inputs.lengths), row)
        self.begin(ids, row, at, chunk)
        tokens = np.bincount(row, weights=inputs.lengths, minlength=len(positions))
        real = np.arange(self.width) < tokens[:, None]
        return Batch.of(ids=ids, targets=wanted, mask=real, documents=documents, numbers=positions)

    def begin(self, ids: Ints, row: Ints, at: Ints, chunk: Ints) -> None:
        """Change the first token of chunks, which begin in these rows and columns of `ids` [B, T]."""


class PackedDocuments(PackedRows):
    """Whole documents packed into rows of T tokens, none of which sees another.

    Longer ones are cut into windows. Each document begins with the bos token, so that its first token is a
    target too. No target crosses documents.
    """

    def __init__(self, setting: Setting) -> None:
        length, whole = setting.length, setting.encoded.stretches("ids")
        self.bos = setting.need("bos", "isolated packing")
        documents, window = ragged((whole.lengths + length - 1) // length)
        starts = whole.starts[documents] + window * length  # of each chunk: its first target
        self.first = window == 0
        lengths = np.minimum(length, (whole.starts + whole.lengths)[documents] - starts)
        targets = Stretches(whole.values, starts, lengths)
        super().__init__(setting, targets._replace(starts=starts - 1), targets)

    def begin(self, ids: Ints, row: Ints, at: Ints, chunk: Ints) -> None:
        """Begin each document with bos; what was there is the end of the document before it."""
        first = self.first[chunk]
        ids[row[first], at[first]] = self.bos


# What a batch hides from the model --------------------------------------------------------------------------


def mask_tokens(
    ids: Ints,
    hideable: NDArray[np.bool_],
    share: float,
    mask_id: int,
    ordinary: Ints,
    random: np.random.Generator,
) -> tuple[Ints, Ints]:
    """Mask a share of the tokens that may be masked -> what the model reads, and its targets, both [B, T].

    Each `hideable` token [B, T] is chosen with probability `share`, and one in a row where chance chose none.
    Of the chosen, 80 % become the mask, 10 % a token drawn from `ordinary`, 10 % stay: any token may be a
    wrong one.
    """
    draw = np.where(hideable, random.random(ids.shape), np.inf)
    chosen = draw < share
    chosen[np.arange(len(ids)), draw.argmin(1)] |= np.isfinite(draw.min(1))
    targets = np.where(chosen, ids, IGNORE)
    fate = random.random(ids.shape)
    seen = np.where(chosen & (fate < MASKED), mask_id, ids)
    replaced = chosen & (fate >= MASKED) & (fate < MASKED + REPLACED)
    seen[replaced] = ordinary[random.integers(len(ordinary), size=int(replaced.sum()))]
    return seen, targets


def noise_sizes(length: int, share: float, span_length: float, sentinels: int) -> tuple[int, int]:
    """Return how many of `length` tokens are taken out, and in how many spans."""
    noise = min(max(1, round(length * share)), max(1, length - 1))
    return noise, min(max(1, round(noise / span_length)), noise, length - noise + 1, sentinels)


def corrupt_spans(rows: Ints, noise: int, sentinels: Ints, random: np.random.Generator) -> tuple[Ints, Ints]:
    """Take spans out of rows [B, T] -> the source, and the target.

    In the source a sentinel replaces each span; in the target each sentinel is followed by its span. `noise`
    tokens of each row are taken out, in as many spans as there are `sentinels`, so all rows keep one length.
    Between two spans at least one token stays. Lengths and positions of the spans are uniform over all ways
    to choose them.
    """
    (n, length), spans = rows.shape, len(sentinels)
    cut = _parts(n, noise, spans, random)  # B spans
    kept = _parts(n, length - noise + 2, spans + 1, random)  # B spans+1
    kept[:, [0, -1]] -= 1  # the ends may be empty
    lengths = np.empty((n, 2 * spans + 1), dtype=np.int64)
    lengths[:, 0::2], lengths[:, 1::2] = kept, cut
    numbers = np.tile(np.arange(2 * spans + 1), n)
    stretch = np.repeat(numbers, lengths.reshape(-1)).reshape(n, length)  # odd: taken out
    hidden = stretch % 2 == 1
    first = hidden.copy()
    first[:, 1:] &= stretch[:, 1:] != stretch[:, :-1]
    sentinel = sentinels[np.minimum(stretch // 2, spans - 1)]
    source = np.where(first, sentinel, rows)[~hidden | first].reshape(n, -1)
    target = np.stack([sentinel, rows], -1)[np.stack([first, hidden], -1)].reshape(n, -1)
    return source, target


def _parts(n: int, total: int, parts: int, random: np.random.Generator) -> Ints:
    """Draw `n` ways to write `total` as a sum of `parts` numbers of 1 or more, uniformly: [n, parts]."""
    cuts: NDArray[Any] = np.argsort(random.random((n, total - 1)), axis=1)[:, : parts - 1] + 1
    return np.diff(np.sort(cuts, axis=1), axis=1, prepend=0, append=total)
