"""`Judgement`: what an evaluation knows of a model and its examples when a task adds its `Figures`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from clearhead.errors import MissingExtraError
from clearhead.learn.batches.padding import by_length
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.evaluation.metrics import METRICS, Metric, Values, ratio_of, sacrebleu_metric
from clearhead.run.api import Model

OnProgress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is
SOURCES = 32  # sources to be translated at a time, where no number of rows is asked for


@dataclass(frozen=True)
class ClassFigures:
    """How well one class is found."""

    label: str
    precision: float  # of those taken for it, the share that is right
    recall: float  # of its examples, the share that is found
    f1: float
    examples: int
    predicted: int


@dataclass(frozen=True)
class ClassCounts:
    """How often each class was taken for each: `confusion[wanted][predicted]`, in the order of `labels`."""

    labels: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]  # [C, C]

    def __iter__(self) -> Iterator[ClassFigures]:
        """Yield the figures of each class; 0 where nothing can be divided."""
        for place, (label, row) in enumerate(zip(self.labels, self.confusion)):
            right, examples, predicted = row[place], sum(row), sum(one[place] for one in self.confusion)
            sums = ((right, predicted), (right, examples), (2 * right, examples + predicted))
            precision, recall, f1 = (ratio_of(np.array(one, np.float64)) for one in sums)
            yield ClassFigures(label, precision, recall, f1, examples, predicted)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {"labels": self.labels, "confusion": self.confusion, "figures": [asdict(one) for one in self]}


def count_classes(said: Sequence[int], meant: Sequence[int], labels: Sequence[str]) -> ClassCounts:
    """Count how often each class was taken for each."""
    counts = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(counts, (np.array(meant, np.int64), np.array(said, np.int64)), 1)
    return ClassCounts(tuple(labels), tuple(map(tuple, counts.tolist())))


@dataclass
class Figures:
    """Figures by name, added one after the other; intervals are of 95 %."""

    seed: int
    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)  # sacreBLEU's: they make a figure comparable
    notes: list[str] = field(default_factory=list)
    classes: ClassCounts | None = None  # of tasks that choose one of several classes

    def add(self, name: str, predicted: Values, wanted: Values, metric: Metric | str = "") -> None:
        """Add a metric of all examples; `metric` is one, or its name in `METRICS` where that differs."""
        metric = METRICS[metric or name] if isinstance(metric, str) else metric
        found = metric.measure(predicted, wanted, self.seed)
        self.metrics[name] = found.value
        self.intervals |= {} if found.interval is None else {name: found.interval}
        self.signatures |= {name: found.signature} if found.signature else {}

    def derive(self, name: str, base: str, of: Callable[[float], float]) -> None:
        """Add a figure that grows with another one; so does its interval."""
        self.metrics[name] = of(self.metrics[base])
        if base in self.intervals:
            low, high = self.intervals[base]
            self.intervals[name] = (of(low), of(high))

    def spans(self, predicted: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        """Add figures of answers as SQuAD has them: the share that is right, and F1 over words."""
        self.add("exact", predicted, references, "answer_exact")
        self.add("token_f1", predicted, references, "answer_f1")

    def texts(
        self,
        predicted: Sequence[str],
        references: Sequence[Sequence[str]],
        tokenize: str | None,
        lowercase: bool,
    ) -> None:
        """Add the share of exact matches, edits per token of the reference, BLEU and chrF."""
        self.add("exact", predicted, references)
        spaced = any(" " in one.strip() for given in references for one in given)
        if not spaced:
            self.notes.append("no target has a space: token_error counts characters")
        self.add("token_error", predicted, references, "word_error" if spaced else "token_error")
        try:
            for name in ("bleu", "bleu_lowercase") if lowercase else ("bleu",):
                bleu = sacrebleu_metric("BLEU", tokenize=tokenize, lowercase=name == "bleu_lowercase")
                self.add(name, predicted, references, bleu)
            self.add("chrf", predicted, references)
        except MissingExtraError as error:
            self.notes.append(str(error))


@dataclass
class Judgement:
    """One evaluation."""

    loaded: Model
    plan: DataPlan
    rows: Any  # the examples
    figures: Figures
    # What the caller of `evaluate` chooses
    tokenize: str | None  # sacreBLEU's tokenizer
    lowercase: bool
    generation: dict[str, Any]  # options of `translate`
    on_progress: OnProgress
    # What is found
    asked: Sequence[tuple[str, ...]] = ()  # where answers are texts: the distinct questions or sources
    references: Sequence[list[str]] = ()  # and all right answers to each
    said: list[list[Any]] = field(default_factory=list)  # of each row, as `Objective.answers` has it
    meant: list[list[Any]] = field(default_factory=list)
    tokens: int = 0  # of the text
    unknown: int = 0  # of these, unknown to the tokenizer

    def write(self) -> list[str]:
        """Generate an output for each source; those of similar length share a batch."""
        loaded, options, written = self.loaded, self.generation, [""] * len(self.asked)
        ids = loaded.encode([source for (source,) in self.asked], loaded.max_length)
        size = self.plan.batch_size if self.plan.batch_tokens is None else SOURCES
        groups = by_length(list(map(len, ids)), lambda rows, longest: rows <= size)
        for number, places in enumerate(groups, start=1):
            given: Any = [ids[place] for place in places]
            for place, one in zip(places, loaded.translate(given, **options)):
                written[place] = one.text or ""
            self.on_progress("writing", min(number * size, len(ids)), len(ids))
        return written
