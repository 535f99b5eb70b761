"""Reranking: how well each of several texts answers a query, best first.

A model of pairs (a cross-encoder: a classifier with one class) reads the query together with each text. Any
other model that embeds compares the angles of vectors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.errors import refuse
from clearhead.learn.tasks import reading
from clearhead.learn.tasks.results import Ranked
from clearhead.run.bundle import Bundle


def reads_pairs(m: Bundle) -> bool:
    """Return whether the model reads query and text together; refuse a classifier of several classes."""
    pairs = m.config.head == "classifier"
    refuse(
        pairs and m.config.n_classes != 1,
        f"this model tells {m.config.n_classes} classes apart: one that reranks has one",
    )
    return pairs


def rerank(
    m: Bundle, query: str, texts: Sequence[str], top: int | None = None, batch_size: int = 32
) -> list[Ranked]:
    """Return the texts with their scores, the best first; see `Model.rerank`."""
    refuse(not isinstance(query, str), f"rerank was given the query {query!r:.60}: it takes one text")
    refuse(isinstance(texts, str), "rerank was given one text: give a list of texts to choose from")
    refuse(top is not None and top < 1, f"top {top} must be 1 or more")
    if reads_pairs(m):
        found = reading.classify(m, [(query, text) for text in texts], batch_size)
        return ranked([one.probability for one in found], texts, top)
    return ranked(cosines(reading.embed(m, [query, *texts], batch_size)), texts, top)


def cosines(vectors: Tensor | Sequence[Tensor]) -> list[float]:
    """Return the cosine of the angle between the first vector and each other one: [1 + N, D] -> N numbers."""
    query, *others = (row / row.norm().clamp(min=1e-12) for row in vectors)
    return [float(torch.dot(query, other)) for other in others]


def ranked(scores: Sequence[float], texts: Sequence[str], top: int | None = None) -> list[Ranked]:
    """Return each text with its score, the best first; of equal ones, the first given."""
    order = sorted(range(len(scores)), key=lambda n: -scores[n])[: top or len(scores)]
    return [Ranked(n, texts[n], scores[n]) for n in order]
