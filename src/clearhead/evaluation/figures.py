"""Figures with their intervals: what a model said, weighed against what was wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import MissingExtraError
from clearhead.evaluation import metrics
from clearhead.evaluation.metrics import Counts

RESAMPLES = 1000


@dataclass
class Figures:
    """Figures by name, gathered one after the other; the interval holds 95 % of those of sets drawn from the same examples."""

    seed: int
    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)  # sacreBLEU's, that make a figure comparable
    said: list[str] = field(default_factory=list)

    def add(self, name: str, counts: Counts, of: Callable[[Counts], float], signature: str = "") -> None:
        """A figure of summed counts; of a single example there is no interval."""
        self.metrics[name] = of(counts.sum(0))
        if len(counts) > 1:
            self.intervals[name] = metrics.bootstrap(counts, of, self.seed, RESAMPLES)
        if signature:
            self.signatures[name] = signature

    def derive(self, name: str, base: str, of: Callable[[float], float]) -> None:
        """A figure that grows with another one, and its interval with that one's."""
        self.metrics[name] = of(self.metrics[base])
        if base in self.intervals:
            low, high = self.intervals[base]
            self.intervals[name] = (of(low), of(high))

    def loss(self, counts: Counts, perplexity: bool) -> None:
        """The mean loss of a target, from loss and targets of each example; for words, perplexity too."""
        self.add("loss", counts, metrics.ratio_of)
        if perplexity:
            self.derive("perplexity", "loss", lambda loss: metrics.perplexity(loss, 1))

    def bits(self, tokens: int, n_bytes: int, characters: int) -> None:
        """Bits per byte and per character of a text, whose tokens have the mean loss that was found."""
        for name, size in (("bits_per_byte", n_bytes), ("bits_per_character", characters)):
            self.derive(name, "loss", lambda loss, size=size: loss / math.log(2) * tokens / size)  # type: ignore[misc]

    def classes(self, said: Sequence[int], meant: Sequence[int], n_classes: int) -> None:
        """Accuracy, and the mean over classes of F1."""
        self.add("accuracy", metrics.accuracy_counts(said, meant), metrics.ratio_of)
        predicted, wanted = np.array(said), np.array(meant)
        self.metrics["macro_f1"] = _macro_f1(predicted, wanted, n_classes)
        if len(wanted) > 1:  # not by counts of every example and class: there may be thousands of classes
            random = np.random.default_rng(self.seed)
            draws = (random.integers(len(wanted), size=len(wanted)) for _ in range(RESAMPLES))
            found = [_macro_f1(predicted[drawn], wanted[drawn], n_classes) for drawn in draws]
            low, high = np.quantile(found, [0.025, 0.975])
            self.intervals["macro_f1"] = (float(low), float(high))

    def tags(self, said: Sequence[Sequence[str]], meant: Sequence[Sequence[str]]) -> None:
        """The share of words with the right tag; where tags begin with B- and I-, whole spans too. Sentences are drawn, not words."""
        pairs = zip(said, meant)
        right = [(sum(a == b for a, b in zip(row, wanted)), len(wanted)) for row, wanted in pairs]
        self.add("accuracy", np.array(right, dtype=np.float64), metrics.ratio_of)
        if any(tag[:2] in ("B-", "I-") for row in meant for tag in row):
            counts = metrics.span_counts(said, meant)
            self.add("span_f1", counts, metrics.f1_of)
            self.add("span_precision", counts[:, [0, 1]], metrics.ratio_of)
            self.add("span_recall", counts[:, [0, 2]], metrics.ratio_of)

    def spans(self, said: Sequence[str], meant: Sequence[Sequence[str]]) -> None:
        """Answers as SQuAD judges them: those that are right, and F1 over their words."""
        counts = metrics.answer_counts(said, meant)
        self.add("exact", counts[:, [0, 2]], metrics.ratio_of)
        self.add("token_f1", counts[:, [1, 2]], metrics.ratio_of)

    def texts(
        self, said: Sequence[str], meant: Sequence[Sequence[str]], tokenize: str | None, lowercase: bool
    ) -> None:
        """The share of texts that are one of their references, edits per token of the reference, BLEU and chrF."""
        self.add("exact", metrics.exact_counts(said, meant), metrics.ratio_of)
        spaced = any(" " in one.strip() for given in meant for one in given)
        tokens: Callable[[str], list[str]] = str.split if spaced else list
        if not spaced:
            self.said.append("no target has a space: token_error counts characters")
        counts = metrics.error_counts(
            [tokens(text) for text in said], [[tokens(one) for one in given] for given in meant]
        )
        self.add("token_error", counts, metrics.ratio_of)
        try:
            for lower in (False, True) if lowercase else (False,):
                name, whole = (
                    "bleu_lowercase" if lower else "bleu",
                    metrics.bleu(said, meant, tokenize, lower),
                )
                self.add(
                    name, metrics.bleu_counts(said, meant, tokenize, lower), metrics.bleu_of, whole.signature
                )
            self.add(
                "chrf", metrics.chrf_counts(said, meant), metrics.chrf_of, metrics.chrf(said, meant).signature
            )
        except MissingExtraError as error:
            self.said.append(str(error))


def _macro_f1(predicted: NDArray[np.int64], wanted: NDArray[np.int64], n_classes: int) -> float:
    """From numbers of classes."""
    hits = np.bincount(wanted[predicted == wanted], minlength=n_classes)
    sums = np.stack(
        [hits, np.bincount(predicted, minlength=n_classes), np.bincount(wanted, minlength=n_classes)], 1
    )
    return metrics.macro_f1_of(sums.reshape(-1).astype(np.float64))
