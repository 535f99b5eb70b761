"""Ranking of passages: by the words they share with a query (BM25), by their vectors, by both.

A posting is a word, as 64 bits of its hash, a passage that has it, and how often. Postings are sorted by
word, so that those of one word are one slice. A query's vector is compared with all, or with
those that HNSW proposes, a graph of near vectors (usearch); exact scores rank these.

N passages, P postings, D width of a vector, Q queries.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.errors import MissingExtraError

WORD = re.compile(r"[^\W_]+")
K1, B = 0.9, 0.4  # how soon repetition stops to count, and how much length does


class Postings(NamedTuple):
    """The words of some passages; or the tokens of the vocabulary that they have a weight of."""

    words: NDArray[np.uint64 | np.uint32]  # P, sorted; hashes of words, or ids of tokens
    rows: NDArray[np.int32]  # P, numbers of passages
    counts: NDArray[np.int32 | np.float32]  # P; or weights
    lengths: NDArray[np.int32]  # N, words of each passage

    def of(self, word: int) -> slice:
        """Return where the postings of a word are."""
        value = self.words.dtype.type(word)
        return slice(*(int(np.searchsorted(self.words, value, side)) for side in ("left", "right")))


def post(texts: Iterable[str]) -> Postings:
    """Return the postings of texts."""
    rows: list[tuple[int, int, int]] = []
    lengths = []
    for number, text in enumerate(texts):
        words = words_of(text)
        lengths.append(len(words))
        rows += [(word, number, count) for word, count in Counter(words).items()]
    columns: Any = zip(*sorted(rows)) if rows else ((), (), ())
    words, numbers, counts = columns
    return Postings(
        np.array(words, np.uint64),
        np.array(numbers, np.int32),
        np.array(counts, np.int32),
        np.array(lengths, np.int32),
    )


def words_of(text: str) -> list[int]:
    """Return the hashes of a text's words, letters and digits in lower case."""
    return [_hash(word) for word in WORD.findall(text.lower())]


@lru_cache(maxsize=2**18)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def join(parts: Sequence[Postings]) -> Postings:
    """Return the postings of several parts as one; passages are numbered through."""
    starts = np.cumsum([0, *(len(part.lengths) for part in parts)])
    words, counts, lengths = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("words", "counts", "lengths")
    )
    rows = np.concatenate([part.rows + np.int32(start) for part, start in zip(parts, starts)])
    order = np.argsort(words, kind="stable")
    return Postings(words[order], rows[order], counts[order], lengths)


def bm25(postings: Postings, query: str) -> NDArray[np.float64]:
    """Return the score of every passage: [N]."""
    total, mean = len(postings.lengths), float(postings.lengths.mean()) or 1.0
    scores = np.zeros(total)
    for word, times in Counter(words_of(query)).items():
        place = postings.of(word)
        rows, counts = postings.rows[place], postings.counts[place]
        weight = times * math.log(1 + (total - len(rows) + 0.5) / (len(rows) + 0.5))
        scores[rows] += weight * counts / (counts + K1 * (1 - B + B * postings.lengths[rows] / mean))
    return scores


def dot_products(postings: Postings, tokens: Sequence[int], weights: Sequence[float]) -> NDArray[np.float64]:
    """Return the dot product of a sparse vector with that of every passage: [N]."""
    scores = np.zeros(len(postings.lengths))
    for token, weight in zip(tokens, weights):
        place = postings.of(token)
        scores[postings.rows[place]] += np.float64(weight) * postings.counts[place]
    return scores


# Vectors --------------------------------------------------------------------------------------------------


FUSED = 60  # added to a rank before its reciprocal is summed
SCORES = 2**24  # that are in memory at a time
TINY = 1e-30  # below every score of BM25, and dot product of weights, that is not 0


def best(scores: NDArray[Any], k: int, lowest: float = -np.inf) -> dict[int, float]:
    """Return the k best of the passages that score `lowest` or more, the earlier first of equal ones."""
    kept = np.flatnonzero(scores >= lowest)
    if len(kept) > k:  # all that score as well as the k-th
        kept = kept[scores[kept] >= np.partition(scores[kept], -k)[-k]]
    order = kept[np.argsort(-scores[kept], kind="stable")][:k]
    return dict(zip(order.tolist(), scores[order].tolist()))


def nearest_rows(
    queries: NDArray[np.float32], vectors: NDArray[np.float32], k: int
) -> list[dict[int, float]]:
    """Return the k rows of vectors [N, D] with the largest dot products with each query [Q, D], as `best`."""
    known, rankings = torch.from_numpy(vectors), list[dict[int, float]]()
    step = max(1, SCORES // max(1, len(known)))
    for start in range(0, len(queries), step):
        scores = torch.from_numpy(queries[start : start + step]) @ known.T  # Q N, on all threads
        most = scores.topk(min(k + 1, len(known)))  # one more, to see what equals the last
        for place, (values, rows) in enumerate(zip(most.values.tolist(), most.indices.tolist())):
            alike = len({*values}) < len(values)  # `topk` returns equal ones in any order
            rankings.append(best(scores[place].numpy(), k) if alike else dict(zip(rows[:k], values[:k])))
    return rankings


def fuse(rankings: Sequence[dict[int, float]]) -> dict[int, float]:
    """Return the sum of 1 / (60 + rank) of each passage over several rankings, best first."""
    total: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, start=1):
            total[number] = total.get(number, 0.0) + 1 / (FUSED + rank)
    return dict(sorted(total.items(), key=lambda ranked: (-ranked[1], ranked[0])))


# HNSW -----------------------------------------------------------------------------------------------------


LINKS, ADDING, SEARCHING = 16, 128, 128  # of each vector; candidates when one is added; when one is sought


def make_hnsw(vectors: Sequence[NDArray[np.float32]]) -> bytes:
    """Return the graph of vectors of length one [N, D], which come in blocks."""
    graph = hnsw_library()(
        ndim=vectors[0].shape[1], metric="ip", dtype="f16", connectivity=LINKS, expansion_add=ADDING
    )
    count = 0
    for some in vectors:
        graph.add(np.arange(count, count + len(some)), some)
        count += len(some)
    return bytes(graph.save())


def read_hnsw(raw: bytes) -> Any:
    """Return a graph to search."""
    return hnsw_library().restore(raw)


def search_hnsw(graph: Any, queries: NDArray[np.float32], k: int) -> list[list[int]]:
    """Return at least k passages, or all, that may be nearest to each vector [Q, D]."""
    most = min(max(2 * k, SEARCHING), len(graph))
    graph.expansion_search = most
    return [sorted(graph.search(row, most).keys.tolist()) for row in queries]


def hnsw_library() -> Any:
    """Return the class of graphs; refuse where the library is missing."""
    try:
        from usearch.index import Index
    except ImportError:
        raise MissingExtraError("search by HNSW needs usearch: pip install 'clearhead[search]'") from None
    return Index
