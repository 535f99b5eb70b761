"""Batches of rows of unequal length: examples of similar length share a batch, as wide as its longest row.

Shapes: N examples, B rows, T tokens of a row, S tokens of the source.
"""

from abc import abstractmethod
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.batches.batch import IGNORE, Batch, Batches
from clearhead.batches.batching import Setting, tensor
from clearhead.batches.even import ORDER, generator
from clearhead.batches.rows import Buckets, Ints, Stretches, frame_rows, lay, ragged, share_room


class Bucketed(Batches):
    """Examples of similar length in one batch; each example exactly once an epoch."""

    def __init__(self, setting: Setting, *sizes: Ints) -> None:
        """Group examples by `sizes`: their tokens [N] on each side, as they will be in a row."""
        plan = setting.plan
        self.buckets = Buckets(np.stack(sizes, axis=1), plan.batch_size, plan.batch_tokens)
        self.encoded, self.pad, self.seed, self.training = (
            setting.encoded,
            setting.pad,
            setting.seed,
            setting.training,
        )
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
        return self._build(examples[self.buckets.cuts[batch] : self.buckets.cuts[batch + 1]])

    @abstractmethod
    def _build(self, numbers: Ints) -> Batch:
        """Make the batch of the examples with these numbers."""

    def blank(self, lengths: Ints) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """Return padding for rows of the given lengths [B, T], and `mask` where some of it will stay."""
        real = np.arange(int(lengths.max())) < lengths[:, None]
        return np.full(real.shape, self.pad, dtype=np.int64), {} if real.all() else {"mask": tensor(real)}


def cut_note(longer: NDArray[np.bool_], what: str, length: int, more: str = "") -> tuple[str, ...]:
    """Return a note on how many examples were cut, if any."""
    count = int(longer.sum())
    note = f"{count:,} of {len(longer):,} {what} are longer than {length:,} tokens and were cut{more}"
    return (note,) if count else ()


class PairBatches(Bucketed):
    """A source for the encoder; for the decoder bos and the target, whose targets are the target and eos.

    A target that is cut has no eos: the model must not learn to stop there.
    """

    def __init__(self, setting: Setting) -> None:
        encoded, length, self.frame = setting.encoded, setting.length, setting.encoded.frame
        self.bos, self.eos = setting.need("bos"), setting.need("eos")
        room = setting.room(self.frame, "a source")
        self.source_starts, source = encoded.stretches("source")
        self.target_starts, target = encoded.stretches("target")
        self.source_lengths = np.minimum(source, room)
        self.target_lengths = np.minimum(target + 1, length)  # with eos
        self.whole = target + 1 <= length
        self.notes = cut_note(source > room, "sources", length) + cut_note(~self.whole, "targets", length)
        super().__init__(setting, self.source_lengths + self.frame.size, self.target_lengths)

    def _build(self, numbers: Ints) -> Batch:
        lengths = self.source_lengths[numbers]
        source, mask = self.blank(lengths + self.frame.size)
        part = Stretches(self.encoded["source"], self.source_starts[numbers], lengths)
        frame_rows(self.frame, [part], source)
        lengths, whole = self.target_lengths[numbers], self.whole[numbers]
        starts = self.target_starts[numbers]
        decoder, more = self.blank(lengths)
        targets = np.full_like(decoder, IGNORE)
        decoder[:, 0] = self.bos
        lay(decoder, np.ones_like(starts), Stretches(self.encoded["target"], starts, lengths - 1))
        lay(targets, np.zeros_like(starts), Stretches(self.encoded["target"], starts, lengths - whole))
        targets[whole, lengths[whole] - 1] = self.eos
        more |= {f"source_{name}": value for name, value in mask.items()}
        return Batch(tensor(decoder), tensor(targets), source=tensor(source), numbers=tensor(numbers), **more)


class LabelBatches(Bucketed):
    """A text, or two, framed; the target is a class, or a number."""

    def __init__(self, setting: Setting) -> None:
        encoded, length = setting.encoded, setting.length
        single_frame, pair_frame = self.frames = encoded.frame, encoded.pair_frame
        self.paired = np.asarray(encoded["paired"])
        self.first_starts, first = encoded.stretches("first")
        self.second_starts, second = encoded.stretches("second")
        single, both = np.minimum(first, setting.room(single_frame, "a text")), (first, second)
        if self.paired.any():
            both = share_room(first, second, setting.room(pair_frame, "two texts"))
        self.first_lengths = np.where(self.paired, both[0], single)
        self.second_lengths = np.where(self.paired, both[1], 0)
        texts = self.first_lengths + self.second_lengths
        self.notes = cut_note(texts < first + second, "examples", length)
        used = zip(self.frames, (~self.paired, self.paired))
        self.typed = any(frame.typed for frame, rows in used if rows.any())
        self.lengths = texts + np.where(self.paired, pair_frame.size, single_frame.size)
        super().__init__(setting, self.lengths)

    def _build(self, numbers: Ints) -> Batch:
        ids, more = self.blank(self.lengths[numbers])
        types = np.zeros_like(ids) if self.typed else None
        for frame, chosen in zip(self.frames, (~self.paired[numbers], self.paired[numbers])):
            some = numbers[chosen]
            parts = [
                Stretches(self.encoded["first"], self.first_starts[some], self.first_lengths[some]),
                Stretches(self.encoded["second"], self.second_starts[some], self.second_lengths[some]),
            ]
            frame_rows(
                frame, parts if frame is self.frames[1] else parts[:1], ids, types, np.flatnonzero(chosen)
            )
        if types is not None:
            more["types"] = tensor(types)
        return Batch(tensor(ids), tensor(self.encoded["labels"][numbers]), numbers=tensor(numbers), **more)


class TagBatches(Bucketed):
    """The tokens of words, framed; the target is a tag at the first token of each word."""

    def __init__(self, setting: Setting) -> None:
        encoded, self.frame = setting.encoded, setting.encoded.frame
        room = setting.room(self.frame, "words")
        self.starts, lengths = encoded.stretches("ids")
        self.lengths, longer, lost = np.minimum(lengths, room), lengths > room, 0
        if longer.any():
            sentence, place = ragged(lengths)
            tagged = encoded["targets"][self.starts[sentence] + place] != IGNORE
            lost = int(((place >= room) & tagged).sum())
        self.notes = cut_note(longer, "sentences", setting.length, f": {lost:,} words have no tag")
        super().__init__(setting, self.lengths + self.frame.size)

    def _build(self, numbers: Ints) -> Batch:
        starts, lengths = self.starts[numbers], self.lengths[numbers]
        ids, more = self.blank(lengths + self.frame.size)
        targets = np.full_like(ids, IGNORE)
        begins = frame_rows(self.frame, [Stretches(self.encoded["ids"], starts, lengths)], ids)
        lay(targets, begins[0], Stretches(self.encoded["targets"], starts, lengths))
        return Batch(tensor(ids), tensor(targets), numbers=tensor(numbers), **more)


class AnswerBatches(Bucketed):
    """A question and a window of its context, framed; the targets are the answer's first and last token.

    Both are 0 where the window has no answer. A long context makes several windows, which overlap by the
    plan's stride. `numbers` of a batch are those of windows; `found` says what they mean.
    """

    example: Ints

    def __init__(self, setting: Setting) -> None:
        encoded, self.frame = setting.encoded, setting.encoded.pair_frame
        room = setting.room(self.frame, "a question and its context")
        self.question_starts, question = encoded.stretches("question")
        self.context_starts, context = encoded.stretches("context")
        self.question_lengths = np.minimum(question, room // 2)
        self.notes = cut_note(question > self.question_lengths, "questions", room // 2)
        rooms = np.maximum(1, room - self.question_lengths)
        steps = rooms - np.minimum(setting.plan.stride, rooms // 2)
        # Of each window: its example, and its number within the example.
        self.example, window = ragged(1 + np.maximum(0, (context - rooms + steps - 1) // steps))
        self.begin = window * steps[self.example]  # its first token of the context
        self.count = np.minimum(rooms[self.example], context[self.example] - self.begin)
        answers = np.asarray(encoded["answer"])
        places = answers[self.example] - self.begin[:, None]  # windows 2
        answered = answers[:, 0] >= 0
        inside = answered[self.example] & (places[:, 0] >= 0) & (places[:, 1] < self.count)
        lost = answered & (np.bincount(self.example, inside) == 0)
        if lost.any():
            more = "are in no window as a whole, and count as none: raise data.stride or data.max_length"
            self.notes += (f"{int(lost.sum()):,} of {len(lost):,} answers {more}",)
        # The column of a row at which the context begins.
        self.text_begin = (
            self.question_lengths[self.example] + len(self.frame.before) + len(self.frame.between)
        )
        self.targets = np.where(inside[:, None], places + self.text_begin[:, None], 0)
        self.lengths = self.question_lengths[self.example] + self.count + self.frame.size
        super().__init__(setting, self.lengths)

    def _build(self, numbers: Ints) -> Batch:
        example, encoded = self.example[numbers], self.encoded
        ids, more = self.blank(self.lengths[numbers])
        types = np.zeros_like(ids) if self.frame.typed else None
        begins = self.context_starts[example] + self.begin[numbers]
        question = Stretches(
            encoded["question"], self.question_starts[example], self.question_lengths[example]
        )
        context = Stretches(encoded["context"], begins, self.count[numbers])
        frame_rows(self.frame, [question, context], ids, types)
        if types is not None:
            more["types"] = tensor(types)
        return Batch(tensor(ids), tensor(self.targets[numbers]), numbers=tensor(numbers), **more)

    def found(self, window: int, first: int, last: int) -> tuple[int, tuple[int, int] | None]:
        """Return the example of a window, and the characters of its context under some tokens of the row.

        The tokens go from `first` to `last`. None stands for tokens that are not in the context.
        """
        example, begin = int(self.example[window]), int(self.text_begin[window])
        if not begin <= first <= last < begin + int(self.count[window]):
            return example, None
        place = int(self.context_starts[example] + self.begin[window]) - begin
        characters = self.encoded["characters"]
        return example, (int(characters[place + first, 0]), int(characters[place + last, 1]))
