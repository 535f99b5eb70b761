"""The figures of an evaluation: metrics by name, with their intervals."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clearhead.errors import MissingExtraError
from clearhead.evaluation.metrics import METRICS, Counts, Metric, Values, perplexity, sacrebleu_metric


@dataclass
class Figures:
    """Figures by name, added one after the other; intervals are of 95 %, by resampling the examples."""

    seed: int
    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)  # sacreBLEU's: they make a figure comparable
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, predicted: Values, wanted: Values, metric: Metric | None = None) -> None:
        """Add a metric of all examples; `metric` None: the one that `METRICS` has by this name."""
        found = (metric or METRICS[name]).measure(predicted, wanted, self.seed)
        self.metrics[name] = found.value
        if found.interval is not None:
            self.intervals[name] = found.interval
        if found.signature:
            self.signatures[name] = found.signature

    def derive(self, name: str, base: str, of: Callable[[float], float]) -> None:
        """Add a figure that grows with another one; so does its interval."""
        self.metrics[name] = of(self.metrics[base])
        if base in self.intervals:
            low, high = self.intervals[base]
            self.intervals[name] = (of(low), of(high))

    def loss(self, counts: Counts, with_perplexity: bool) -> None:
        """Add the mean loss, from loss and number of targets of each example; for text, perplexity too."""
        self.add("loss", *counts.T)
        if with_perplexity:
            self.derive("perplexity", "loss", perplexity)

    def bits(self, tokens: int, n_bytes: int, characters: int) -> None:
        """Add bits per byte and per character of a text, from the mean loss of its tokens."""

        def bits_per(size: int, loss: float) -> float:
            return loss / math.log(2) * tokens / size

        self.derive("bits_per_byte", "loss", functools.partial(bits_per, n_bytes))
        self.derive("bits_per_character", "loss", functools.partial(bits_per, characters))

    def classes(self, predicted: Sequence[int], wanted: Sequence[int]) -> None:
        """Add accuracy, and the mean of F1 over classes."""
        self.add("accuracy", predicted, wanted)
        self.add("macro_f1", predicted, wanted)

    def tags(self, predicted: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> None:
        """Add the accuracy of tags and, where they begin with B- and I-, figures of whole spans."""
        self.add("accuracy", predicted, wanted, METRICS["word_accuracy"])
        if any(tag[:2] in ("B-", "I-") for row in wanted for tag in row):
            for name in ("span_f1", "span_precision", "span_recall"):
                self.add(name, predicted, wanted)

    def spans(self, predicted: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        """Add figures of answers as SQuAD has them: the share that is right, and F1 over words."""
        self.add("exact", predicted, references, METRICS["answer_exact"])
        self.add("token_f1", predicted, references, METRICS["answer_f1"])

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
        self.add("token_error", predicted, references, METRICS["word_error" if spaced else "token_error"])
        bleus = {"bleu": False, "bleu_lowercase": True} if lowercase else {"bleu": False}
        try:
            for name, lower in bleus.items():
                metric = sacrebleu_metric("BLEU", tokenize=tokenize, lowercase=lower)
                self.add(name, predicted, references, metric)
            self.add("chrf", predicted, references)
        except MissingExtraError as error:
            self.notes.append(str(error))
