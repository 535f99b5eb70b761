"""HNSW: a graph of near vectors, so that a search looks at some of them in place of all.

The library is usearch. The graph proposes passages, and their exact scores rank them. N passages, D width of
a vector, Q queries.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import MissingExtraError

LINKS, ADDING, SEARCHING = 16, 128, 128  # of each vector; candidates when one is added; when one is sought


def make_graph(vectors: Sequence[NDArray[np.float32]]) -> bytes:
    """Return the graph of vectors of length one [N, D], which come in blocks."""
    graph = library()(
        ndim=vectors[0].shape[1], metric="ip", dtype="f16", connectivity=LINKS, expansion_add=ADDING
    )
    count = 0
    for some in vectors:
        graph.add(np.arange(count, count + len(some)), some)
        count += len(some)
    return bytes(graph.save())


def read_graph(raw: bytes) -> Any:
    """Return a graph to search."""
    return library().restore(raw)


def near(graph: Any, asked: NDArray[np.float32], k: int) -> list[list[int]]:
    """Return at least k passages, or all, that may be nearest to each vector [Q, D]."""
    most = min(max(2 * k, SEARCHING), len(graph))
    graph.expansion_search = most
    return [sorted(graph.search(row, most).keys.tolist()) for row in asked]


def library() -> Any:
    """Return the class of graphs; refuse where the library is missing."""
    try:
        from usearch.index import Index
    except ImportError:
        raise MissingExtraError("search by HNSW needs usearch: pip install 'clearhead[search]'") from None
    return Index
