"""Batches of rows of unequal length: examples of like length share a batch, which is as wide as its longest row.

Shapes: N examples, B rows, T tokens of a row, S tokens of the source.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.batches.batch import IGNORE, Batch, Batches
from clearhead.batches.encoded import Encoded
from clearhead.batches.even import ORDER, generator, need, room_in, tensor
from clearhead.batches.rows import Buckets, Ints, Part, frame_rows, lay, ragged, share_room
from clearhead.data.plan import DataPlan


class Bucketed(Batches):
    """Examples of like length in one batch; each example exactly once an epoch."""

    def __init__(self, sizes: Ints, plan: DataPlan, pad: int, seed: int, training: bool) -> None:
        """`sizes` [N, sides]: the tokens of each example as they will stand in a row."""
        self.buckets = Buckets(sizes, plan.batch_size, plan.batch_tokens)
        self.pad, self.seed, self.training = pad, seed, training
        self.per_epoch = len(self.buckets)
        self.order = lru_cache(maxsize=1)(self._order)
        self.waste = self.buckets.waste(self.order(0)[0])

    def _order(self, epoch: int) -> tuple[Ints, Ints]:
        return self.buckets.order(generator(self.seed, ORDER, epoch) if self.training else None)

    def at(self, index: int) -> Batch:
        """See `Batches.at`."""
        epoch, number = divmod(index, self.per_epoch)
        examples, batches = self.order(epoch if self.training else 0)
        batch = batches[number]
        return self.build(examples[self.buckets.cuts[batch] : self.buckets.cuts[batch + 1]])

    @abstractmethod
    def build(self, numbers: Ints) -> Batch:
        """The batch of the examples with these numbers."""

    def blank(self, lengths: Ints) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """Padding for rows of the given lengths [B, T], and `mask` where some of it will stay."""
        real = np.arange(int(lengths.max())) < lengths[:, None]
        return np.full(real.shape, self.pad, dtype=np.int64), {} if real.all() else {"mask": tensor(real)}


def starts_and_lengths(encoded: Encoded, name: str) -> tuple[Ints, Ints]:
    """Where each row of a ragged column begins, and how long it is."""
    offsets = np.asarray(encoded[f"{name}_offsets"])
    return offsets[:-1], np.diff(offsets)


def cut_said(longer: NDArray[np.bool_], what: str, length: int, more: str = "") -> tuple[str, ...]:
    """A sentence on how many examples were cut, if any."""
    count = int(longer.sum())
    return (
        (f"{count:,} of {len(longer):,} {what} are longer than {length:,} tokens and were cut{more}",)
        if count
        else ()
    )


class Pairs(Bucketed):
    """A source for the encoder; for the decoder bos and the target, whose targets are the target and eos.

    A target that is cut has no eos: the model is not to learn to stop there.
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
        self.encoded, self.frame = encoded, encoded.frame
        self.bos, self.eos = need(special, "bos", "seq2seq"), need(special, "eos", "seq2seq")
        room = room_in(length, self.frame, "a source")
        self.source_starts, source = starts_and_lengths(encoded, "source")
        self.target_starts, target = starts_and_lengths(encoded, "target")
        self.source_lengths, self.target_lengths = (
            np.minimum(source, room),
            np.minimum(target + 1, length),
        )  # eos is one
        self.whole = target + 1 <= length
        self.said = cut_said(source > room, "sources", length) + cut_said(~self.whole, "targets", length)
        sizes = np.stack([self.source_lengths + self.frame.size, self.target_lengths], axis=1)
        super().__init__(sizes, plan, special.get("pad", 0), seed, training)

    def build(self, numbers: Ints) -> Batch:
        """See `Bucketed.build`."""
        lengths = self.source_lengths[numbers]
        source, mask = self.blank(lengths + self.frame.size)
        frame_rows(self.frame, [Part(self.encoded["source"], self.source_starts[numbers], lengths)], source)

        lengths, whole, starts = (
            self.target_lengths[numbers],
            self.whole[numbers],
            self.target_starts[numbers],
        )
        decoder, more = self.blank(lengths)
        targets = np.full_like(decoder, IGNORE)
        decoder[:, 0] = self.bos
        lay(decoder, np.ones_like(starts), Part(self.encoded["target"], starts, lengths - 1))
        lay(targets, np.zeros_like(starts), Part(self.encoded["target"], starts, lengths - whole))
        targets[whole, lengths[whole] - 1] = self.eos
        more |= {f"source_{name}": value for name, value in mask.items()}
        return Batch(tensor(decoder), tensor(targets), source=tensor(source), numbers=tensor(numbers), **more)


class Labels(Bucketed):
    """A text, or two, framed; the target is a class."""

    def __init__(
        self,
        encoded: Encoded,
        length: int,
        plan: DataPlan,
        special: Mapping[str, int],
        seed: int,
        training: bool,
    ) -> None:
        self.encoded, self.frames = encoded, (encoded.frame, encoded.pair_frame)
        self.paired = np.asarray(encoded["paired"])
        self.first_starts, first = starts_and_lengths(encoded, "first")
        self.second_starts, second = starts_and_lengths(encoded, "second")
        single = np.minimum(first, room_in(length, self.frames[0], "a text"))
        both = (
            share_room(first, second, room_in(length, self.frames[1], "two texts"))
            if self.paired.any()
            else (first, second)
        )
        self.first_lengths, self.second_lengths = (
            np.where(self.paired, both[0], single),
            np.where(self.paired, both[1], 0),
        )
        self.said = cut_said(self.first_lengths + self.second_lengths < first + second, "examples", length)
        self.typed = any(
            frame.typed for frame, used in zip(self.frames, (~self.paired, self.paired)) if used.any()
        )
        self.lengths = (
            self.first_lengths
            + self.second_lengths
            + np.where(self.paired, self.frames[1].size, self.frames[0].size)
        )
        super().__init__(self.lengths[:, None], plan, special.get("pad", 0), seed, training)

    def build(self, numbers: Ints) -> Batch:
        """See `Bucketed.build`."""
        ids, more = self.blank(self.lengths[numbers])
        types = np.zeros_like(ids) if self.typed else None
        for frame, chosen in zip(self.frames, (~self.paired[numbers], self.paired[numbers])):
            rows, examples = np.flatnonzero(chosen), numbers[chosen]
            parts = [Part(self.encoded["first"], self.first_starts[examples], self.first_lengths[examples])]
            if frame is self.frames[1]:
                parts.append(
                    Part(self.encoded["second"], self.second_starts[examples], self.second_lengths[examples])
                )
            frame_rows(frame, parts, ids, types, rows)
        if types is not None:
            more["types"] = tensor(types)
        return Batch(tensor(ids), tensor(self.encoded["labels"][numbers]), numbers=tensor(numbers), **more)


class Tags(Bucketed):
    """The pieces of words, framed; the target is a tag at the first piece of each word."""

    def __init__(
        self,
        encoded: Encoded,
        length: int,
        plan: DataPlan,
        special: Mapping[str, int],
        seed: int,
        training: bool,
    ) -> None:
        self.encoded, self.frame = encoded, encoded.frame
        room = room_in(length, self.frame, "words")
        self.starts, lengths = starts_and_lengths(encoded, "ids")
        self.lengths = np.minimum(lengths, room)
        longer = lengths > room
        lost = 0
        if longer.any():
            sentence, place = ragged(lengths)
            lost = int(
                ((place >= room) & (encoded["targets"][self.starts[sentence] + place] != IGNORE)).sum()
            )
        self.said = cut_said(longer, "sentences", length, f": {lost:,} words have no tag")
        super().__init__(
            (self.lengths + self.frame.size)[:, None], plan, special.get("pad", 0), seed, training
        )

    def build(self, numbers: Ints) -> Batch:
        """See `Bucketed.build`."""
        starts, lengths = self.starts[numbers], self.lengths[numbers]
        ids, more = self.blank(lengths + self.frame.size)
        targets = np.full_like(ids, IGNORE)
        begins = frame_rows(self.frame, [Part(self.encoded["ids"], starts, lengths)], ids)
        lay(targets, begins[0], Part(self.encoded["targets"], starts, lengths))
        return Batch(tensor(ids), tensor(targets), numbers=tensor(numbers), **more)


class Answers(Bucketed):
    """A question and a window of its context, framed; the targets are the answer's first and last token, 0 and 0 where it has none.

    A long context makes several windows, which overlap by the plan's stride. `numbers` of a batch are those of windows;
    `found` says what they mean.
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
        self.encoded, self.frame = encoded, encoded.pair_frame
        room = room_in(length, self.frame, "a question and its context")
        self.question_starts, question = starts_and_lengths(encoded, "question")
        self.context_starts, context = starts_and_lengths(encoded, "context")
        self.question_lengths = np.minimum(question, room // 2)
        self.said = cut_said(question > self.question_lengths, "questions", room // 2)
        rooms = np.maximum(1, room - self.question_lengths)
        steps = rooms - np.minimum(plan.stride, rooms // 2)
        counts = 1 + np.maximum(0, -(-(context - rooms) // steps))
        self.example, window = ragged(counts)  # of each window
        self.begin = window * steps[self.example]  # its first token of the context
        self.count = np.minimum(rooms[self.example], context[self.example] - self.begin)
        answers = np.asarray(encoded["answer"])
        first, last = answers[self.example, 0] - self.begin, answers[self.example, 1] - self.begin
        inside = (answers[self.example, 0] >= 0) & (first >= 0) & (last < self.count)
        lost = (answers[:, 0] >= 0) & (np.bincount(self.example, inside) == 0)
        if lost.any():
            more = "are in no window as a whole, and count as none: raise data.stride or data.max_length"
            self.said += (f"{int(lost.sum()):,} of {len(lost):,} answers {more}",)
        self.text_begin = (
            len(self.frame.before) + len(self.frame.between) + self.question_lengths[self.example]
        )  # column of the context
        self.targets = np.where(inside[:, None], np.stack([first, last], 1) + self.text_begin[:, None], 0)
        self.lengths = self.question_lengths[self.example] + self.count + self.frame.size
        super().__init__(self.lengths[:, None], plan, special.get("pad", 0), seed, training)

    def build(self, numbers: Ints) -> Batch:
        """See `Bucketed.build`."""
        example = self.example[numbers]
        ids, more = self.blank(self.lengths[numbers])
        types = np.zeros_like(ids) if self.frame.typed else None
        question = Part(
            self.encoded["question"], self.question_starts[example], self.question_lengths[example]
        )
        context = Part(
            self.encoded["context"], self.context_starts[example] + self.begin[numbers], self.count[numbers]
        )
        frame_rows(self.frame, [question, context], ids, types)
        if types is not None:
            more["types"] = tensor(types)
        return Batch(tensor(ids), tensor(self.targets[numbers]), numbers=tensor(numbers), **more)

    def found(self, window: int, first: int, last: int) -> tuple[int, tuple[int, int] | None]:
        """The example a window belongs to, and the characters of its context from token `first` to `last` of the row; None: not in it."""
        example, begin = int(self.example[window]), int(self.text_begin[window])
        if not begin <= first <= last < begin + int(self.count[window]):
            return example, None
        place = int(self.context_starts[example] + self.begin[window]) - begin
        characters = self.encoded["characters"]
        return example, (int(characters[place + first, 0]), int(characters[place + last, 1]))
