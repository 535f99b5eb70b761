"""Tasks of single tokens: the tag of each word, and the span of a context that answers a question.

Shapes: N examples, B rows, T tokens of a row, C tags.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Encoding
from torch import Tensor

from clearhead.errors import refuse
from clearhead.learn.batches.batch import IGNORE, Batch, Bucketed, cut_note
from clearhead.learn.batches.encoding import Columns, Encoder, Setting, characters, flat, groups
from clearhead.learn.batches.ragged import Ints, frame_rows, lay, ragged
from clearhead.learn.data.conll import by_labels, recognise
from clearhead.learn.data.examples import Corpus, Question, Tagged
from clearhead.learn.evaluation.metrics import METRICS, Judged, span_counts
from clearhead.learn.losses import Answered
from clearhead.learn.recipe import GeneratePlan
from clearhead.learn.tasks.reading import tag
from clearhead.learn.tasks.task import Answers, ClassTask, Scored, Task, sampled
from clearhead.run.api import Model


class TagBatches(Bucketed):
    """The tokens of words, framed; the target is a tag at the first token of each word."""

    def __init__(self, setting: Setting) -> None:
        encoded, self.frame = setting.encoded, setting.encoded.frame
        room = setting.room(self.frame, "words")
        words = encoded.stretches("ids")
        self.words = setting.cut(words, room)
        self.tags = self.words._replace(values=encoded["targets"])
        longer, lost = words.lengths > room, 0
        if longer.any():
            tagged, kept = (
                int((encoded["targets"][rows.starts[sentence] + position] != IGNORE).sum())
                for rows in (words, self.words)
                for sentence, position in [ragged(rows.lengths)]
            )
            lost = tagged - kept
        self.notes = cut_note(longer, "sentences", setting.length, f": {lost:,} words have no tag")
        super().__init__(setting, self.words.lengths + self.frame.size)

    def _fill(self, ids: Ints, numbers: Ints) -> dict[str, Any]:
        targets = np.full_like(ids, IGNORE)
        begins = frame_rows(self.frame, [self.words.take(numbers)], ids)
        lay(targets, begins[0], self.tags.take(numbers))
        return {"targets": targets}


class Tag(ClassTask):
    """A tag for each word."""

    name = "tag"
    row = Tagged
    batches = TagBatches
    head = "tagger"
    pooled = False
    metrics = ("loss", "accuracy", "span_f1")
    pretrain = redraws = True
    command = "tag {folder} TEXT"

    def remarks(self, corpus: Corpus) -> list[str]:
        """Say how the tags of the validation data spell spans, if they do."""
        rows = cast(Sequence[Tagged], corpus.validation)
        scheme = recognise([row.tags for row in rows]).scheme
        return [f"the tags follow {scheme}: span_f1 counts spans strictly by it"] if scheme else []

    def encode(self, rows: Iterable[Tagged], encoder: Encoder) -> Iterator[Columns]:
        """Encode the tokens of each word; the first has the word's tag as its target, the others IGNORE.

        `lost` counts the words without a token. A tag that the model does not have is no target.
        """
        for group in groups(rows, characters):
            for row in group:
                refuse(
                    len(row.words) != len(row.tags),
                    f"a sentence has {len(row.words)} words and {len(row.tags)} tags: "
                    f"each word needs one ({row.words[:5]})",
                )
            words = iter(encoder.ids(word for row in group for word in row.words))
            sentences = [[next(words) for _ in row.words] for row in group]
            targets: list[int] = []
            for row, sentence in zip(group, sentences):
                for name, ids in zip(row.tags, sentence):
                    number = encoder.numbers.get(name, IGNORE)
                    targets += [number, *[IGNORE] * (len(ids) - 1)][: len(ids)]
            yield {
                "ids": flat([list(chain(*sentence)) for sentence in sentences]),
                "targets": np.array(targets, dtype=np.int32),
                "lost": np.array(sum(not ids for ids in chain(*sentences)), dtype=np.int64),
            }

    def answers(self, outputs: Tensor, batch: Batch) -> Answered:
        """Return the best tags of each row's words, and the right ones."""
        has_target = batch.targets != IGNORE
        best, right = (
            [row[where].tolist() for row, where in zip(rows, has_target)]
            for rows in (outputs.argmax(-1), batch.targets)
        )
        return best, right

    def default_metric(self, labels: Sequence[str]) -> str:
        """Return F1 of spans where the tags have prefixes that make some."""
        tagging = by_labels(labels)
        return "span_f1" if all(tagging.split(name)[0] for name in labels) else "accuracy"

    def score(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """Measure accuracy over words, and F1 of whole spans."""
        flat, wanted = ([answer for row in rows for answer in row] for rows in (predicted, expected))
        tags, right = ([[labels[index] for index in row] for row in rows] for rows in (predicted, expected))
        return {"accuracy": (METRICS["accuracy"], flat, wanted), "span_f1": (METRICS["span_f1"], tags, right)}

    def missing(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> str:
        """Say where the data has spans and none is predicted."""
        named = [[[labels[index] for index in row] for row in rows] for rows in (predicted, expected)]
        _, n_predicted, wanted = span_counts(*named).sum(0)
        if n_predicted or not wanted:
            return ""
        return f"no span is predicted, and {wanted:,.0f} are wanted: train longer, or set train.class_weights"

    def judge(self, judged: Judged) -> list[str]:
        """Add accuracy and, for tags with prefixes, F1 of whole spans; words that were cut off count too."""
        sentences = tag(judged.loaded, [row.words for row in judged.rows])
        tags = [[word.label for word in sentence.words] for sentence in sentences]
        wanted = [row.tags for row in judged.rows]
        judged.add("accuracy", tags, wanted, "word_accuracy")
        if recognise(wanted).scheme:
            for name in ("span_f1", "span_precision", "span_recall"):
                judged.add(name, tags, wanted)
        return [" ".join(row) for row in tags]

    def sample(self, loaded: Model, row: Tagged, plan: GeneratePlan, seed: int) -> str:
        """Return the words with their predicted tags."""
        tags: Any = loaded.tag(list(row.words))
        named = [f"{word}/{tag.label}" for word, tag in zip(row.words, tags.words)]
        return f"{' '.join(named)}  ({' '.join(row.tags)})"


# Answers in a context ---------------------------------------------------------------------------------------


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
        short = setting.cut(question, room // 2)
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
        positions = answers[self.example] - self.begin[:, None]  # windows 2
        answered = answers[:, 0] >= 0
        inside = answered[self.example] & (positions[:, 0] >= 0) & (positions[:, 1] < count)
        lost = answered & (np.bincount(self.example, inside) == 0)
        if lost.any():
            more = "are in no window as a whole, and count as none: raise data.stride or data.max_length"
            self.notes += (f"{int(lost.sum()):,} of {len(lost):,} answers {more}",)
        # The column of a row at which the context begins.
        self.text_begin = self.question.lengths + sum(map(len, self.frame.special[:2]))
        self.targets = np.where(inside[:, None], positions + self.text_begin[:, None], 0)
        super().__init__(setting, self.question.lengths + count + self.frame.size)

    def _fill(self, ids: Ints, numbers: Ints) -> dict[str, Any]:
        types = np.zeros_like(ids) if self.frame.typed else None
        frame_rows(self.frame, [self.question.take(numbers), self.context.take(numbers)], ids, types)
        return {"targets": self.targets[numbers], "types": types}

    def found(self, window: int, first: int, last: int) -> tuple[int, tuple[int, int] | None]:
        """Return the example of a window, and the characters of its context under some tokens of the row.

        The tokens go from `first` to `last`. None stands for tokens that are not in the context.
        """
        example, begin = int(self.example[window]), int(self.text_begin[window])
        if not begin <= first <= last < begin + int(self.context.lengths[window]):
            return example, None
        start, spans = int(self.context.starts[window]) - begin, self.setting.encoded["characters"]
        return example, (int(spans[start + first, 0]), int(spans[start + last, 1]))


class AnswerQuestions(Task):
    """Find the part of a context that answers a question."""

    name = "answer"
    row = Question
    batches = AnswerBatches
    head = "span"
    pooled = False
    metrics = ("loss", "exact")
    metric = "exact"
    command = "answer {folder} QUESTION CONTEXT"

    def encode(self, rows: Iterable[Question], encoder: Encoder) -> Iterator[Columns]:
        """Encode questions, contexts with the characters of each token, and the ends of the answer.

        (-1, -1) stands for no answer.
        """
        for group in groups(rows, characters):
            texts = [row.context for row in group]
            contexts = encoder.tokenizer.encode_batch(texts, add_special_tokens=False)
            offsets = [span for encoding in contexts for span in encoding.offsets]
            yield {
                "question": flat(encoder.ids(row.question for row in group)),
                "context": flat([encoding.ids for encoding in contexts]),
                "characters": np.array(offsets, dtype=np.int32).reshape(-1, 2),
                "answer": np.array(list(map(_answer, group, contexts)), dtype=np.int64),
            }

    def answers(self, outputs: Tensor, batch: Batch) -> Answered:
        """Return the best first and last token of each row's answer, and the right ones."""
        hidden = None if batch.mask is None else ~batch.mask[..., None]
        scores = outputs if hidden is None else outputs.masked_fill(hidden, -torch.inf)
        return scores.argmax(1).tolist(), batch.targets.tolist()

    def score(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """Measure how often both ends of the answer are right."""
        return {"exact": (METRICS["accuracy"], predicted, expected)}

    def judge(self, judged: Judged) -> list[str]:
        """Add exact match and F1 over words, as SQuAD has them.

        The model may find no answer where that is right for some questions.
        """
        questions, contexts = zip(*judged.asked)
        none = any("" in answers for answers in judged.references)
        results: Any = judged.loaded.answer(list(questions), list(contexts), none=none)
        texts = [answer.text for answer in results]
        judged.add("exact", texts, judged.references, "answer_exact")
        judged.add("token_f1", texts, judged.references, "answer_f1")
        return texts

    def sample(self, loaded: Model, row: Question, plan: GeneratePlan, seed: int) -> str:
        """Return the predicted answer."""
        answer: Any = loaded.answer(row.question, row.context)
        return sampled(row.question, answer.text, row.answer)


def _answer(row: Question, encoding: Encoding) -> tuple[int, int]:
    """Return the first and last token that hold a character of the answer."""
    end = row.start + len(row.answer)
    refuse(
        row.context[row.start : end] != row.answer,
        f'the answer "{row.answer:.40}" does not stand at character {row.start} of its context: '
        "correct its start",
    )
    inside = [
        position
        for position, (first, last) in enumerate(encoding.offsets)
        if first < end and last > row.start
    ]
    return (inside[0], inside[-1]) if inside and row.answer else (-1, -1)
