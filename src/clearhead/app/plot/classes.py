"""A picture of what a classifier takes for what."""

import numpy as np

from clearhead.app.plot.canvas import Figure, heatmap
from clearhead.learn.evaluation.metrics import ClassCounts

WRITTEN = 12  # classes up to which the shares are written into the cells


def draw_confusion(counts: ClassCounts, title: str) -> Figure:
    """Draw the confusion matrix: of the examples of each class (a row), the share taken for each."""
    matrix = np.array(counts.confusion, dtype=float)
    totals = matrix.sum(1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.full_like(matrix, np.nan), where=totals > 0)
    names = [f"{label} ({int(total):,})" for label, total in zip(counts.labels, totals[:, 0])]
    return heatmap(
        shares,
        names,
        counts.labels,
        title,
        "share of the examples of a class",
        "class, number of examples",
        "taken for",
        low=0,
        high=1,
        numbers=len(counts.labels) <= WRITTEN,
    )
