"""Embedding: texts that are alike get vectors that are alike.

Pairs and triplets learn by telling the positive text from all others of the batch, by a softmax of cosines.
Pairs with a score learn its order: the cosine of a pair must exceed that of every pair with a lower score.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.core.heads import pool
from clearhead.errors import ConfigError, refuse
from clearhead.hub.sentences import Sentences
from clearhead.hub.tokens.training import READER
from clearhead.learn.batches.batch import Batch
from clearhead.learn.batches.batching import Batching
from clearhead.learn.batches.vectors import ALIKE, Alike, AlikeBatches, encode_alike
from clearhead.learn.evaluation.judgement import Judgement
from clearhead.learn.evaluation.metrics import METRICS, Counts
from clearhead.learn.losses import Answered, Objective
from clearhead.learn.recipe import GeneratePlan, Recipe, TrainPlan
from clearhead.learn.tasks.entries.regression import CORRELATIONS
from clearhead.learn.tasks.spec import ENCODER, Answers, TaskSpec, sampled
from clearhead.run.api import Model
from clearhead.run.bundle import Bundle

POOLED = ("cls", "mean", "last")  # poolings that can be trained
CHUNK = 1024  # anchors compared with all texts at a time


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


def similarity(pooling: str = "mean", scale: float = 20.0) -> Objective:
    """Return the objective of texts that are alike; what is judged does not grow with the batch."""

    def losses(hidden: Tensor, batch: Batch, judged: bool) -> Tensor:
        vectors, scores = text_vectors(hidden, batch, pooling), batch.scores
        assert scores is not None
        if bool(scores.isnan().any()):
            return ranking_losses(vectors, batch.targets, scale, judged)
        return order_loss(vectors, scores, scale, judged).expand(len(batch))

    def said(hidden: Tensor, batch: Batch) -> Answered:
        vectors, scores = text_vectors(hidden, batch, pooling).double().cpu(), batch.scores
        assert scores is not None
        cosine = (vectors[:, 0] * vectors[:, 1]).sum(-1)
        meant = torch.cat([scores.double().cpu()[:, None], vectors[:, 1]], 1)
        return torch.cat([cosine[:, None], vectors[:, 0]], 1).tolist(), meant.tolist()

    def loss(hidden: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        return losses(hidden, batch, judged=False).sum()

    return Objective(loss, said, "states", lambda hidden, batch: losses(hidden, batch, judged=True))


def _objective(plan: TrainPlan, loaded: Bundle) -> Objective:
    refuse(
        plan.label_smoothing,
        f"train.label_smoothing {plan.label_smoothing} is not for embed: set it to 0",
        ConfigError,
    )
    return similarity(loaded.sentences.pooling if loaded.sentences else "mean", plan.scale)


def _ready(loaded: Bundle, recipe: Recipe) -> str:
    """Give a model that has none a way to make one vector of a text."""
    if loaded.sentences is None:
        loaded.sentences = Sentences("mean", normalise=True)
    how = loaded.sentences
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
    return f"a text's vector is the {how.pooling} of its states{', of length one' if how.normalise else ''}"


def _figures_of(said: Answers, meant: Answers) -> dict[str, tuple[list[object], list[object]]]:
    """Return predictions and what was wanted by metric: of scored pairs cosines, of others rankings."""
    found, wanted = np.array(said, dtype=np.float64), np.array(meant, dtype=np.float64)
    if not np.isnan(wanted[:, 0]).any():
        return {"scored": (found[:, :1].tolist(), wanted[:, :1].tolist())}
    # Equal texts count as one: an anchor with several positives is one query.
    (anchors, query), (texts, own) = (_distinct(vectors[:, 1:]) for vectors in (found, wanted))
    relevant: list[dict[int, float]] = [{} for _ in anchors]
    for place, text in zip(query.tolist(), own.tolist()):
        relevant[place][text] = 1.0
    ranked: list[object] = []
    for start in range(0, len(anchors), CHUNK):
        order = np.argsort(-(anchors[start : start + CHUNK] @ texts.T), axis=1, kind="stable")
        ranked += order[:, :10].tolist()
    return {"ranked": (ranked, [*relevant])}


def _distinct(vectors: Counts) -> tuple[Counts, NDArray[np.int64]]:
    """Return the vectors that differ, in their order, and of each one its place among these."""
    _, first, group = np.unique(vectors.round(6), axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return vectors[first[order]], np.argsort(order)[group.reshape(-1)]


def _scores(predicted: Answers, wanted: Answers, labels: Sequence[str]) -> dict[str, float]:
    ((kind, (said, meant)),) = _figures_of(predicted, wanted).items()
    if kind == "ranked":
        return {name: METRICS[name](said, meant) for name in ("mrr", "ndcg")}
    return {name: metric(said, meant) for name, metric in CORRELATIONS.items()}


def _figures(judgement: Judgement) -> list[str]:
    """Add correlations of scored pairs; of others, how well the positive is found among all of the data."""
    ((kind, (said, meant)),) = _figures_of(judgement.said, judgement.meant).items()
    if kind == "ranked":
        for name in ("mrr", "ndcg"):
            judgement.figures.add(name, said, meant)
    else:
        for name, metric in CORRELATIONS.items():
            judgement.figures.add(name, said, meant, metric)
    return [f"{row[0]:.4f}" for row in judgement.said]


def _compared(loaded: Model, row: Alike, plan: GeneratePlan, seed: int) -> str:
    one, other = nnf.normalize(loaded.embed([row.anchor, row.positive]), dim=-1)
    wanted = row.positive if row.score is None else f"{row.positive}: {row.score:g}"
    return sampled(row.anchor, f"{float(one @ other):.2f}", wanted)


TASKS = (
    TaskSpec(
        name="embed",
        batching=Batching("embed", ALIKE, encode_alike, AlikeBatches),
        tokens=READER,
        guessed=False,
        head="embedding",
        usual=ENCODER,
        families=("decoder",),
        objective=similarity(),
        objective_for=_objective,
        ready=_ready,
        metrics=("loss", "pearson", "spearman", "mrr", "ndcg"),
        scores=_scores,
        command="embed {folder} TEXT",
        sample=_compared,
        figures=_figures,
    ),
)
