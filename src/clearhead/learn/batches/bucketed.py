"""Batches of rows of unequal length: examples of similar length share a batch, as wide as its longest row.

Shapes: N examples, B rows, T tokens of a row, S tokens of the source.
"""

from abc import abstractmethod
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from clearhead.learn.batches.batch import IGNORE, Batch, Batches
from clearhead.learn.batches.batching import Setting, blank, tensor
from clearhead.learn.batches.even import ORDER, generator
from clearhead.learn.batches.rows import Buckets, Ints, frame_rows, lay, ragged, share_room


class Bucketed(Batches):
    """Examples of similar length in one batch; each example exactly once an epoch."""

    def __init__(self, setting: Setting, *sizes: Ints) -> None:
        """Group examples by `sizes`: their tokens [N] on each side, as they will be in a row."""
        self.setting, self.sizes, plan = setting, sizes, setting.plan
        self.buckets = Buckets(np.stack(sizes, axis=1), plan.batch_size, plan.batch_tokens)
        self.per_epoch = len(self.buckets)
        self.order = lru_cache(maxsize=1)(self._order)
        self.waste = self.buckets.waste(self.order(0)[0])

    def _order(self, epoch: int) -> tuple[Ints, Ints]:
        training, seed = self.setting.training, self.setting.seed
        return self.buckets.order(generator(seed, ORDER, epoch) if training else None)

    def at(self, index: int) -> Batch:
        """See `Batches.at`."""
        epoch, number = divmod(index, self.per_epoch)
        examples, batches = self.order(epoch if self.setting.training else 0)
        batch = batches[number]
        return self._build(examples[self.buckets.cuts[batch] : self.buckets.cuts[batch + 1]])

    @abstractmethod
    def _build(self, numbers: Ints) -> Batch:
        """Make the batch of the examples with these numbers."""


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
        length, self.frame = setting.length, setting.encoded.frame
        self.bos, self.eos = setting.need("bos"), setting.need("eos")
        room = setting.room(self.frame, "a source")
        source, target = setting.encoded.stretches("source"), setting.encoded.stretches("target")
        self.source, self.fed, self.asked = source.cut(room), target.cut(length - 1), target.cut(length)
        self.whole = target.lengths < length
        cut_sources = cut_note(source.lengths > room, "sources", length)
        self.notes = cut_sources + cut_note(~self.whole, "targets", length)
        super().__init__(setting, self.source.lengths + self.frame.size, self.fed.lengths + 1)

    def _build(self, numbers: Ints) -> Batch:
        source, source_mask = blank(self.sizes[0][numbers], self.setting.pad)
        frame_rows(self.frame, [self.source.take(numbers)], source)
        asked, whole = self.asked.take(numbers), self.whole[numbers]
        decoder, mask = blank(self.sizes[1][numbers], self.setting.pad)
        targets = np.full_like(decoder, IGNORE)
        decoder[:, 0] = self.bos
        lay(decoder, 1, self.fed.take(numbers))
        lay(targets, 0, asked)
        targets[whole, asked.lengths[whole]] = self.eos
        return Batch(
            tensor(decoder), tensor(targets), mask, tensor(source), source_mask, numbers=tensor(numbers)
        )


class LabelBatches(Bucketed):
    """A text, or two, framed; the target is a class, or a number."""

    def __init__(self, setting: Setting) -> None:
        encoded, paired = setting.encoded, np.asarray(setting.encoded["paired"])
        self.paired, self.labels, self.frames = paired, encoded["labels"], (encoded.frame, encoded.pair_frame)
        first, second = encoded.stretches("first"), encoded.stretches("second")
        single = np.minimum(first.lengths, setting.room(encoded.frame, "a text"))
        room = setting.room(encoded.pair_frame, "two texts") if paired.any() else 0
        one, two = share_room(first.lengths, second.lengths, room)
        self.first = first.cut(np.where(paired, one, single))
        self.second = second.cut(np.where(paired, two, 0))
        texts = self.first.lengths + self.second.lengths
        self.notes = cut_note(texts < first.lengths + second.lengths, "examples", setting.length)
        used = zip(self.frames, (~paired, paired))
        self.typed = any(frame.typed for frame, rows in used if rows.any())
        super().__init__(setting, texts + np.where(paired, encoded.pair_frame.size, encoded.frame.size))

    def _build(self, numbers: Ints) -> Batch:
        ids, mask = blank(self.sizes[0][numbers], self.setting.pad)
        types = np.zeros_like(ids) if self.typed else None
        paired = self.paired[numbers]
        for frame, chosen, texts in (
            (self.frames[0], ~paired, [self.first]),
            (self.frames[1], paired, [self.first, self.second]),
        ):
            parts = [text.take(numbers[chosen]) for text in texts]
            frame_rows(frame, parts, ids, types, np.flatnonzero(chosen))
        more = {} if types is None else {"types": tensor(types)}
        return Batch(tensor(ids), tensor(self.labels[numbers]), mask, numbers=tensor(numbers), **more)


class TagBatches(Bucketed):
    """The tokens of words, framed; the target is a tag at the first token of each word."""

    def __init__(self, setting: Setting) -> None:
        encoded, self.frame = setting.encoded, setting.encoded.frame
        room = setting.room(self.frame, "words")
        words = encoded.stretches("ids")
        self.words, self.tags = words.cut(room), words.cut(room)._replace(values=encoded["targets"])
        longer, lost = words.lengths > room, 0
        if longer.any():
            sentence, place = ragged(words.lengths)
            tagged = encoded["targets"][words.starts[sentence] + place] != IGNORE
            lost = int(((place >= room) & tagged).sum())
        self.notes = cut_note(longer, "sentences", setting.length, f": {lost:,} words have no tag")
        super().__init__(setting, self.words.lengths + self.frame.size)

    def _build(self, numbers: Ints) -> Batch:
        ids, mask = blank(self.sizes[0][numbers], self.setting.pad)
        targets = np.full_like(ids, IGNORE)
        begins = frame_rows(self.frame, [self.words.take(numbers)], ids)
        lay(targets, begins[0], self.tags.take(numbers))
        return Batch(tensor(ids), tensor(targets), mask, numbers=tensor(numbers))


class AnswerBatches(Bucketed):
    """A question and a window of its context, framed; the targets are the answer's first and last token.

    Both are 0 where the window has no answer. A long context makes several windows, which overlap by the
    plan's stride. `numbers` of a batch are those of windows; `found` says what they mean.
    """

    example: Ints

    def __init__(self, setting: Setting) -> None:
        encoded, self.frame = setting.encoded, setting.encoded.pair_frame
        room = setting.room(self.frame, "a question and its context")
        question, context = encoded.stretches("question"), encoded.stretches("context")
        short = question.cut(room // 2)
        self.notes = cut_note(question.lengths > short.lengths, "questions", room // 2)
        rooms = np.maximum(1, room - short.lengths)
        steps = rooms - np.minimum(setting.plan.stride, rooms // 2)
        # Of each window: its example, and its number within the example.
        self.example, window = ragged(1 + np.maximum(0, (context.lengths - rooms + steps - 1) // steps))
        self.begin = window * steps[self.example]  # its first token of the context
        count = np.minimum(rooms[self.example], context.lengths[self.example] - self.begin)
        self.question = short.take(self.example)
        self.context = context._replace(starts=context.starts[self.example] + self.begin, lengths=count)
        answers = np.asarray(encoded["answer"])
        places = answers[self.example] - self.begin[:, None]  # windows 2
        answered = answers[:, 0] >= 0
        inside = answered[self.example] & (places[:, 0] >= 0) & (places[:, 1] < count)
        lost = answered & (np.bincount(self.example, inside) == 0)
        if lost.any():
            more = "are in no window as a whole, and count as none: raise data.stride or data.max_length"
            self.notes += (f"{int(lost.sum()):,} of {len(lost):,} answers {more}",)
        # The column of a row at which the context begins.
        self.text_begin = self.question.lengths + sum(map(len, self.frame.special[:2]))
        self.targets = np.where(inside[:, None], places + self.text_begin[:, None], 0)
        super().__init__(setting, self.question.lengths + count + self.frame.size)

    def _build(self, numbers: Ints) -> Batch:
        ids, mask = blank(self.sizes[0][numbers], self.setting.pad)
        types = np.zeros_like(ids) if self.frame.typed else None
        frame_rows(self.frame, [self.question.take(numbers), self.context.take(numbers)], ids, types)
        more = {} if types is None else {"types": tensor(types)}
        return Batch(tensor(ids), tensor(self.targets[numbers]), mask, numbers=tensor(numbers), **more)

    def found(self, window: int, first: int, last: int) -> tuple[int, tuple[int, int] | None]:
        """Return the example of a window, and the characters of its context under some tokens of the row.

        The tokens go from `first` to `last`. None stands for tokens that are not in the context.
        """
        example, begin = int(self.example[window]), int(self.text_begin[window])
        if not begin <= first <= last < begin + int(self.context.lengths[window]):
            return example, None
        place, characters = int(self.context.starts[window]) - begin, self.setting.encoded["characters"]
        return example, (int(characters[place + first, 0]), int(characters[place + last, 1]))
