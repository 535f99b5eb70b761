"""The best of many scores, and one ranking of two."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FUSED = 60  # added to a rank before its reciprocal is summed


def best(scores: NDArray[Any], k: int, lowest: float = -np.inf) -> dict[int, float]:
    """Return the k best of the passages that score `lowest` or more, the earlier first of equal ones."""
    kept = np.flatnonzero(scores >= lowest)
    if len(kept) > k:  # all that score as well as the k-th
        kept = kept[scores[kept] >= np.partition(scores[kept], -k)[-k]]
    order = kept[np.argsort(-scores[kept], kind="stable")][:k]
    return dict(zip(order.tolist(), scores[order].tolist()))


def fuse(rankings: Sequence[dict[int, float]]) -> dict[int, float]:
    """Return the sum of 1 / (60 + rank) of each passage over several rankings, best first."""
    total: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, start=1):
            total[number] = total.get(number, 0.0) + 1 / (FUSED + rank)
    return dict(sorted(total.items(), key=lambda one: (-one[1], one[0])))
