"""Embedding: texts that are similar get vectors that are similar.

Pairs and triplets learn by telling the positive text from all others of the batch, by a softmax of cosines.
Pairs with a score learn its order: the cosine of a pair must exceed that of every pair with a lower score.
Each row holds the texts of one example as documents that do not see each other: an anchor, what is similar
to it, perhaps what is not.

Shapes: N examples, B rows, T tokens of a row, K texts of a row, D model.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.core.heads import pool
from clearhead.errors import ConfigError, refuse
from clearhead.hub.sentences import Sentences
from clearhead.learn.batches.batch import Batch, Bucketed, cut_note
from clearhead.learn.batches.encoding import Columns, Encoder, Setting, characters, flat, groups
from clearhead.learn.batches.ragged import Ints, frame_rows
from clearhead.learn.data.examples import Corpus, Example
from clearhead.learn.data.tables import Record
from clearhead.learn.evaluation.metrics import METRICS, Counts, Judged
from clearhead.learn.losses import Answered
from clearhead.learn.recipe import GeneratePlan, Recipe, TrainPlan
from clearhead.learn.tasks.task import Answers, Scored, Task, sampled
from clearhead.run.api import Model
from clearhead.run.bundle import Bundle

TEXTS = ("anchor", "positive", "negative")
POOLED = ("cls", "mean", "last")  # poolings that can be trained
CHUNK = 1024  # anchors compared with all texts at a time


@dataclass(frozen=True, slots=True)
class Similar(Example):
    """Two texts that are alike, perhaps one that is not, or how alike the two are."""

    PLURAL, OPTIONAL, TEXTS = "similar texts", ("negative", "score"), TEXTS
    KEY = ("anchor",)
    NEEDED = PAIRED = ("anchor", "positive")
    anchor: str
    positive: str
    negative: str | None = None
    score: float | None = None

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`. A score may be a number written as text."""
        texts = [record.text(roles[role]).strip() if role in roles else None for role in TEXTS]
        score = None
        if "score" in roles:
            value = record.value(roles["score"])
            try:
                score = float(value)
            except (TypeError, ValueError):
                score = math.nan
            refuse(
                not math.isfinite(score) or isinstance(value, bool),
                f"{record.place}: the score in `{roles['score']}` must be a number, not {value!s:.40}",
            )
        anchor, positive, negative = texts
        empty = not anchor or not positive or negative == ""
        return None if empty else cls(str(anchor), str(positive), negative, score)

    def asked(self) -> tuple[str, ...]:
        """Return the anchor."""
        return (self.anchor,)


class SimilarBatches(Bucketed):
    """The texts of an example in each row, each framed as if alone; the targets are keys of candidates."""

    def __init__(self, setting: Setting) -> None:
        encoded, self.frame = setting.encoded, setting.encoded.frame
        room = setting.room(self.frame, "a text")
        several = bool(np.asarray(encoded["several"]).any())
        whole = [encoded.stretches(name) for name in TEXTS[: 3 if several else 2]]
        self.texts = [setting.cut(text, room) for text in whole]
        longer = np.logical_or.reduce([text.lengths > room for text in whole])
        self.notes = cut_note(longer, "examples", setting.length)
        self.keys, self.scores = np.asarray(encoded["keys"]), np.asarray(encoded["scores"])
        if setting.training and np.isnan(self.scores).all():
            refuse(
                len(self.keys) < 2 or setting.plan.batch_size < 2,
                "the other rows of a batch are what a text is told from: set data.batch_size to 2 or more",
            )
        sizes = [text.lengths + self.frame.size for text in self.texts]
        super().__init__(setting, np.sum(sizes, axis=0))

    def _fill(self, ids: Ints, numbers: Ints) -> dict[str, Any]:
        documents = np.full_like(ids, -1)
        begin = np.zeros(len(numbers), dtype=np.int64)
        for text in (text.take(numbers) for text in self.texts):
            frame_rows(self.frame, [text], ids, at=begin)
            documents += np.arange(ids.shape[1]) >= begin[:, None]
            begin = begin + text.lengths + self.frame.size
        return {"targets": self.keys[numbers], "documents": documents, "scores": self.scores[numbers]}


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def text_vectors(hidden: Tensor, batch: Batch, pooling: str) -> Tensor:
    """Return the vector of each text of each row, of length one: states [B, T, D] -> [B, K, D]."""
    assert batch.documents is not None
    real = torch.ones_like(batch.documents, dtype=torch.bool) if batch.mask is None else batch.mask
    count = int(batch.documents.max()) + 1
    pooled = [pool(wide(hidden), real & (batch.documents == number), pooling) for number in range(count)]
    return nnf.normalize(torch.stack(pooled, 1), dim=-1)


def ranking_losses(vectors: Tensor, keys: Tensor, scale: float, judged: bool = False) -> Tensor:
    """Return the loss of each row [B]: its positive among the positives and negatives of all [B, K, D].

    `keys` [B, 2] tell the texts of candidates: one that is a row's own positive again is no wrong answer.
    `judged`: the mean over the wrong answers in place of their sum, see `mean_excess`.
    """
    rows = len(vectors)
    candidates = vectors[:, 1:].transpose(0, 1).flatten(0, 1)  # (K - 1)·B D: positives, then negatives
    logits = scale * vectors[:, 0] @ candidates.T  # B (K-1)·B
    names = keys.T[: vectors.shape[1] - 1].flatten()
    same = names[None, :] == keys[:, :1]
    same[torch.arange(rows), torch.arange(rows)] = False
    own = torch.arange(rows, device=vectors.device)
    if judged:
        apart = logits - logits[own, own][:, None]
        return mean_excess(apart, ~same & (torch.arange(logits.shape[1], device=own.device) != own[:, None]))
    return nnf.cross_entropy(logits.masked_fill(same, -torch.inf), own, reduction="none")


def order_loss(vectors: Tensor, scores: Tensor, scale: float, judged: bool = False) -> Tensor:
    """Return log(1 + Σ exp(scale · (cosine of a less alike pair - that of a more alike one))), CoSENT: [].

    `judged`: the mean in place of the sum, see `mean_excess`.
    """
    cosines = scale * (vectors[:, 0] * vectors[:, 1]).sum(-1)  # B
    apart = cosines[:, None] - cosines[None, :]  # less alike, more alike
    wrong = apart[scores[:, None] < scores[None, :]]
    if judged:
        return mean_excess(wrong, torch.ones_like(wrong, dtype=torch.bool))
    return torch.cat([wrong.new_zeros(1), wrong]).logsumexp(0)


def mean_excess(differences: Tensor, wrong: Tensor) -> Tensor:
    """Return log(1 + the mean over the wrong ones of exp(difference)): [..., N], [..., N] -> [...].

    Unlike a sum, which a loss in training has, it does not grow with the number of texts in a batch: chance
    is log 2 in any. Where nothing is wrong, it is 0.
    """
    total = differences.masked_fill(~wrong, -torch.inf).logsumexp(-1)
    return nnf.softplus(total - wrong.sum(-1).clamp(min=1).log())


class Embed(Task):
    """A vector for a text."""

    name = "embed"
    row = Similar
    batches = SimilarBatches
    guessed = False
    head = "embedding"
    families = ("decoder",)
    reads = "states"
    metrics = ("loss", "pearson", "spearman", "mrr", "ndcg")
    command = "embed {folder} TEXT"
    pooling = "mean"  # of the states of a text
    scale = 20.0  # of cosines
    widths: tuple[int, ...] = ()  # of the first numbers of vectors, which are vectors that learn too

    def encode(self, rows: Iterable[Similar], encoder: Encoder) -> Iterator[Columns]:
        """Encode the texts of each example, a key of each that may be a candidate, and the score or NaN."""
        for group in groups(rows, characters):
            texts = {name: [getattr(row, name) for row in group] for name in TEXTS}
            keys = [[_key(row.positive), _key(row.negative or "")] for row in group]
            refuse(
                any((row.negative is None) != (group[0].negative is None) for row in group),
                "some rows have a negative text and some have none: give all one, or leave the column out",
            )
            yield {
                **{name: flat(encoder.ids(text or "" for text in texts[name])) for name in TEXTS},
                "several": np.array([row.negative is not None for row in group]),
                "keys": np.array(keys, dtype=np.int64).reshape(-1, 2),
                "scores": np.array([row.score for row in group], np.float32),  # None becomes NaN
            }

    def ready(self, loaded: Bundle, recipe: Recipe, corpus: Corpus) -> str:
        """Give a model that has none a way to make one vector of a text."""
        if loaded.sentences is None:
            loaded.sentences = Sentences("mean", normalise=True)
        how = loaded.sentences
        kinds = {"sparse": "a sparse vector (SPLADE)", "tokens": "a vector for each token (ColBERT)"}
        kind = kinds.get(how.kind)
        refuse(
            kind,
            f"{loaded.folder} makes {kind} of a text, and the task embed is of one vector: take another "
            "encoder, or a copy of the directory without the files of these vectors",
        )
        extra = [*([how.pooling] if how.pooling not in POOLED else []), *(layer.kind for layer in how.layers)]
        refuse(
            extra,
            f"{loaded.folder} makes a text's vector by {', '.join(extra)}, which training does not: "
            f"it takes one pooling of {', '.join(POOLED)}, and Normalize",
        )
        refuse(
            how.prompt is not None or how.lowercase,
            f"{loaded.folder} puts a prompt before every text, or lowers it, which training does not: "
            "remove default_prompt_name and do_lower_case",
        )
        length = ", of length one" if how.normalise else ""
        return f"a text's vector is the {how.pooling} of its states{length}"

    def settled(self, plan: TrainPlan, loaded: Bundle, corpus: Corpus) -> Self:
        """Take the pooling of the model and the scale of the recipe."""
        super().settled(plan, loaded, corpus)
        refuse(
            plan.label_smoothing,
            f"train.label_smoothing {plan.label_smoothing} is not for embed: set it to 0",
            ConfigError,
        )
        pooling = loaded.sentences.pooling if loaded.sentences else "mean"
        most = loaded.config.d_model
        wrong = next((width for width in plan.widths if not 0 < width < most), None)
        refuse(
            wrong is not None,
            f"train.widths {wrong} is no part of a vector of {most} numbers: choose 1 to {most - 1}",
            ConfigError,
        )
        return self.with_values(pooling=pooling, scale=plan.scale, widths=plan.widths)

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the loss of states [B, T, D], summed over the rows and over the widths."""
        vectors = text_vectors(outputs, batch, self.pooling)
        cut = [nnf.normalize(vectors[..., :width], dim=-1) for width in self.widths]
        return torch.stack([self._losses(each, batch, judged=False).sum() for each in (vectors, *cut)]).sum()

    def row_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each row by whole vectors, comparable between batch sizes: see `mean_excess`."""
        return self._losses(text_vectors(outputs, batch, self.pooling), batch, judged=True)

    def _losses(self, vectors: Tensor, batch: Batch, judged: bool) -> Tensor:
        scores = batch.scores
        assert scores is not None
        if bool(scores.isnan().any()):
            return ranking_losses(vectors, batch.targets, self.scale, judged)
        return order_loss(vectors, scores, self.scale, judged).expand(len(batch))

    def answers(self, outputs: Tensor, batch: Batch) -> Answered:
        """Return (cosine, anchor's vector) and (score, positive's vector) of each row."""
        vectors, scores = text_vectors(outputs, batch, self.pooling).double().cpu(), batch.scores
        assert scores is not None
        cosine = (vectors[:, 0] * vectors[:, 1]).sum(-1)
        expected = torch.cat([scores.double().cpu()[:, None], vectors[:, 1]], 1)
        return torch.cat([cosine[:, None], vectors[:, 0]], 1).tolist(), expected.tolist()

    def score(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """Measure correlations of scored pairs; of others, how well the positive is found among all texts."""
        rows, wanted = np.array(predicted, dtype=np.float64), np.array(expected, dtype=np.float64)
        if not np.isnan(wanted[:, 0]).any():
            cosines, scores = rows[:, :1].tolist(), wanted[:, :1].tolist()
            return {name: (METRICS[name], cosines, scores) for name in ("pearson", "spearman")}
        # Equal texts count as one: an anchor with several positives is one query.
        (anchors, query), (texts, own) = (_distinct(side[:, 1:]) for side in (rows, wanted))
        relevant: list[dict[int, float]] = [{} for _ in anchors]
        for number, text in zip(query.tolist(), own.tolist()):
            relevant[number][text] = 1.0
        ranked: list[list[int]] = []
        for start in range(0, len(anchors), CHUNK):
            order = np.argsort(-(anchors[start : start + CHUNK] @ texts.T), axis=1, kind="stable")
            ranked += order[:, :10].tolist()
        return {name: (METRICS[name], ranked, relevant) for name in ("mrr", "ndcg")}

    def judge(self, judged: Judged) -> list[str]:
        """See `Task.judge`."""
        super().judge(judged)
        return [f"{row[0]:.4f}" for row in judged.predicted]

    def sample(self, loaded: Model, row: Similar, plan: GeneratePlan, seed: int) -> str:
        """Return the cosine of a pair."""
        anchor, positive = nnf.normalize(loaded.embed([row.anchor, row.positive]), dim=-1)
        wanted = row.positive if row.score is None else f"{row.positive}: {row.score:g}"
        return sampled(row.anchor, f"{float(anchor @ positive):.2f}", wanted)


def _distinct(vectors: Counts) -> tuple[Counts, NDArray[np.int64]]:
    """Return the vectors that differ, in their order, and of each one its number among these."""
    _, first, group = np.unique(vectors.round(6), axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return vectors[first[order]], np.argsort(order)[group.reshape(-1)]
