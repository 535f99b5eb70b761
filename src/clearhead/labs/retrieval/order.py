"""The best of many scores, the nearest of many vectors, and one ranking of two.

N passages, D width of a vector, Q queries.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

FUSED = 60  # added to a rank before its reciprocal is summed
SCORES = 2**24  # that are in memory at a time


def best(scores: NDArray[Any], k: int, lowest: float = -np.inf) -> dict[int, float]:
    """Return the k best of the passages that score `lowest` or more, the earlier first of equal ones."""
    kept = np.flatnonzero(scores >= lowest)
    if len(kept) > k:  # all that score as well as the k-th
        kept = kept[scores[kept] >= np.partition(scores[kept], -k)[-k]]
    order = kept[np.argsort(-scores[kept], kind="stable")][:k]
    return dict(zip(order.tolist(), scores[order].tolist()))


def nearest_rows(asked: NDArray[np.float32], vectors: NDArray[np.float32], k: int) -> list[dict[int, float]]:
    """Return the k rows of vectors [N, D] with the largest products with each of asked [Q, D], as `best`."""
    known, found = torch.from_numpy(vectors), list[dict[int, float]]()
    step = max(1, SCORES // max(1, len(known)))
    for start in range(0, len(asked), step):
        scores = torch.from_numpy(asked[start : start + step]) @ known.T  # Q N, on all threads, as is `topk`
        most = scores.topk(min(k + 1, len(known)))  # one more, to see what equals the last
        for place, (values, rows) in enumerate(zip(most.values.tolist(), most.indices.tolist())):
            alike = len({*values}) < len(values)  # `topk` returns equal ones in any order
            found.append(best(scores[place].numpy(), k) if alike else dict(zip(rows[:k], values[:k])))
    return found


def fuse(rankings: Sequence[dict[int, float]]) -> dict[int, float]:
    """Return the sum of 1 / (60 + rank) of each passage over several rankings, best first."""
    total: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, start=1):
            total[number] = total.get(number, 0.0) + 1 / (FUSED + rank)
    return dict(sorted(total.items(), key=lambda one: (-one[1], one[0])))
