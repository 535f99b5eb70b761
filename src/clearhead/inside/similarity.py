"""How alike two texts are to a model: the cosine of their vectors, and of their tokens, each with each.

    found = similarity(m, "A dog runs", "The cat sleeps")
    found.cosine                        # of the two vectors that `embed` gives
    found.tokens[0], found.states       # [T, S] cosines of last hidden states

Shapes: T tokens of the first text, S of the second, D model.
"""

from dataclasses import dataclass

import torch.nn.functional as nnf
from torch import Tensor

from clearhead.inside import inputs, results
from clearhead.learn.tasks.reading import embed


@dataclass(frozen=True)
class Similarity(results.Result):
    """Two texts, side by side."""

    cosine: float
    tokens: tuple[tuple[str, ...], tuple[str, ...]]
    states: Tensor  # [T, S]


def similarity(m: inputs.AnyModel, text: str, other: str) -> Similarity:
    """Return how alike two texts are to a model that embeds texts; each is read by itself."""
    m = inputs.as_model(m)
    vectors = nnf.normalize(embed(m, [text, other]).double(), dim=-1)
    read = [inputs.prepare(m, one) for one in (text, other)]
    hidden = [prepared.record("hidden", logits="none")[0].hidden[0] for prepared in read]
    first, second = (nnf.normalize(x.double().cpu(), dim=-1) for x in hidden)
    labels = (read[0].tokens.labels, read[1].tokens.labels)
    return Similarity(float(vectors[0] @ vectors[1]), labels, (first @ second.T).float())
