"""Vectors of passages, as an index stores and searches them; ranking by words (BM25), by vectors, by both.

A passage has one vector, a sparse one, or one for each of its tokens. Vectors are stored in float32, those
of tokens in float16. Sparse ones are inverted: for each token of the vocabulary, the passages that have it.
A query's vector is compared with all, or with those that HNSW proposes, a graph of near vectors (usearch);
exact scores rank these.

A posting is a word, as 64 bits of its hash, a passage that has it, and how often. Postings are sorted by
word, so that those of one word are one slice.

N passages, P postings, D width of a vector, M tokens of all passages, Q queries, or tokens of one.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.errors import MissingExtraError
from clearhead.hub.retrievers import SparseVector
from clearhead.hub.sentences import Kind
from clearhead.learn.tasks.vectors import room_of, rows_of
from clearhead.run.api import Model

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


PROMPTS = {"query": ("query",), "passage": ("passage", "document")}  # names of prompts, by what is embedded
Side = Literal["query", "passage"]
Arrays = dict[str, NDArray[Any]]
Vectors = NDArray[np.float32]
Ranking = dict[int, float]  # numbers of passages, best first, and their scores
QUERIES = 32  # whose tokens are compared with those of passages at a time


def kind_of(model: Model) -> Kind:
    """Return what an embedder makes of a text: one vector, a sparse one, or one for each token."""
    return "dense" if model.sentences is None else model.sentences.kind


def prompt_of(model: Model, side: Side) -> str | None:
    """Return the name of the prompt that a model has for queries or passages; None: the usual one."""
    how = model.sentences
    if how is None or how.kind == "dense":
        known = {} if how is None else how.prompts
        return next((name for name in PROMPTS[side] if name in known), None)
    return how.side("query" if side == "query" else "document")


def token_counts(model: Model, texts: Sequence[str]) -> list[int]:
    """Return how many tokens each passage has for an embedder, its prompt and special tokens included."""
    return [len(ids) for ids in rows_of(model, texts, prompt_of(model, "passage"), cut=False)]


def most_tokens(model: Model) -> int:
    """Return how many tokens of a passage an embedder reads."""
    return room_of(model, prompt_of(model, "passage"))


def embedded(model: Model, texts: Sequence[str], side: Side) -> Any:
    """Return the vectors of texts, so that dot products tell how alike a query and a passage are.

    A model with prompts for queries and passages gets them. The vectors have length one [N, D], or are a list
    of sparse ones, or of matrices [T, D] with a row for each token.
    """
    vectors, how = model.embed(list(texts), prompt=prompt_of(model, side)), model.sentences
    if how is not None and how.splade is not None:
        return [how.splade.compared(vector) for vector in vectors]
    if how is not None and how.late is not None:
        shares = how.late.mean and side == "query"
        return [vector.numpy() / np.float32(len(vector) if shares else 1) for vector in vectors]
    numbers = vectors.numpy()
    unit: Vectors = numbers / np.maximum(np.linalg.norm(numbers, axis=1, keepdims=True), 1e-12)
    return unit


# Stores -----------------------------------------------------------------------------------------------------


class Store(Protocol):
    """The vectors of all passages of an index, which come part by part."""

    def add(self, arrays: Arrays) -> Arrays:
        """Take the arrays of the next part, and return those that are still needed of it."""

    def nearest(self, queries: Any, k: int) -> list[Ranking]:
        """Return the k passages nearest to each query, which `embedded` gave."""


class DenseStore:
    """One vector for each passage: [N, D]."""

    def __init__(self, count: int, width: int) -> None:
        self.vectors: Vectors = np.empty((count, width), np.float32)
        self.filled = 0

    @staticmethod
    def arrays(vectors: Vectors) -> Arrays:
        """Return what is stored of a part."""
        return {"vectors": vectors}

    def add(self, arrays: Arrays) -> Arrays:
        """See `Store`."""
        start, self.filled = self.filled, self.filled + len(arrays["vectors"])
        mine = self.vectors[start : self.filled]
        mine[:] = arrays["vectors"]
        return {"vectors": mine}

    def nearest(self, queries: Vectors, k: int) -> list[Ranking]:
        """See `Store`."""
        return nearest_rows(queries, self.vectors, k)


class SparseStore:
    """The weights of each token of the vocabulary, by passage."""

    NAMES = tuple(f"weights.{name}" for name in Postings._fields)

    def __init__(self) -> None:
        self.parts: list[Postings] = []
        self.joined: Postings | None = None

    @classmethod
    def arrays(cls, vectors: Sequence[SparseVector]) -> Arrays:
        """Return what is stored of a part: postings, whose words are tokens and whose counts are weights."""
        lengths = np.array([len(vector.ids) for vector in vectors], np.int32)
        tokens = np.concatenate([vector.ids.numpy() for vector in vectors]).astype(np.uint32)
        weights = np.concatenate([vector.weights.numpy() for vector in vectors])
        rows = np.repeat(np.arange(len(vectors), dtype=np.int32), lengths)
        order = np.argsort(tokens, kind="stable")
        return dict(zip(cls.NAMES, (tokens[order], rows[order], weights[order], lengths)))

    def add(self, arrays: Arrays) -> Arrays:
        """See `Store`."""
        self.parts.append(Postings(*(arrays[name] for name in self.NAMES)))
        return {}

    def nearest(self, queries: Sequence[SparseVector], k: int) -> list[Ranking]:
        """See `Store`. Passages that share no token with a query are left out."""
        if self.joined is None:
            self.joined, self.parts = join(self.parts), []
        return [
            best(dot_products(self.joined, query.ids.tolist(), query.weights.tolist()), k, TINY)
            for query in queries
        ]


class TokenStore:
    """A vector for each token of each passage: [M, D], in float16."""

    def __init__(self, count: int, width: int) -> None:
        self.vectors: NDArray[np.float16] = np.empty((count, width), np.float16)
        self.ends: NDArray[np.int64] = np.zeros(1, np.int64)  # N + 1: 0, then where each passage ends

    @staticmethod
    def arrays(vectors: Sequence[Vectors]) -> Arrays:
        """Return what is stored of a part."""
        ends = np.cumsum([len(vector) for vector in vectors])
        return {"vectors": np.concatenate(vectors).astype(np.float16), "token_ends": ends}

    def add(self, arrays: Arrays) -> Arrays:
        """See `Store`."""
        ends = self.ends[-1] + arrays["token_ends"]
        self.vectors[self.ends[-1] : ends[-1]] = arrays["vectors"]
        self.ends = np.concatenate([self.ends, ends])
        return {}

    def nearest(self, queries: Sequence[Vectors], k: int) -> list[Ranking]:
        """See `Store`: by MaxSim, in float32. A passage without tokens scores 0."""
        rankings = list[Ranking]()
        for start in range(0, len(queries), QUERIES):
            rankings += [best(scores, k) for scores in self._scores(queries[start : start + QUERIES])]
        return rankings

    def _scores(self, queries: Sequence[Vectors]) -> Vectors:
        """Return the score of each passage for each query."""
        tokens = torch.from_numpy(np.concatenate(queries))  # tokens of all queries, D
        firsts = np.cumsum([0, *map(len, queries[:-1])])
        scores = np.zeros((len(queries), len(self.ends) - 1), np.float32)
        for first, last in self._blocks(SCORES // len(tokens)):
            begin, ends = self.ends[first], self.ends[first : last + 1]
            filled = np.flatnonzero(np.diff(ends))
            if len(filled):
                dots = torch.from_numpy(self.vectors[begin : ends[-1]]).float() @ tokens.T
                maxima = np.maximum.reduceat(dots.numpy(), (ends - begin)[filled], axis=0)
                scores[:, first + filled] = np.add.reduceat(maxima, firsts, axis=1).T
        return scores

    def _blocks(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield first passages and ends of blocks that have so many tokens at most, or one passage."""
        first = 0
        while first < len(self.ends) - 1:
            last = int(np.searchsorted(self.ends, self.ends[first] + tokens, "right")) - 1
            yield first, (last := max(first + 1, last))
            first = last


def arrays_of(vectors: Any, kind: Kind) -> Arrays:
    """Return what is stored of a part."""
    if kind == "sparse":
        return SparseStore.arrays(vectors)
    return TokenStore.arrays(vectors) if kind == "tokens" else DenseStore.arrays(vectors)


# Which embedder made an index -------------------------------------------------------------------------------


def probes_of(vectors: Any) -> list[Any]:
    """Return vectors as JSON has them."""
    return [
        {"indices": vector.ids.tolist(), "values": vector.weights.tolist()}
        if isinstance(vector, SparseVector)
        else vector.tolist()
        for vector in vectors
    ]


def spelled_out(probe: Any, width: int) -> Vectors:
    """Return all numbers of a vector, or of those of tokens, as JSON has them; `width`: of a sparse one."""
    if not isinstance(probe, dict):
        return np.array(probe, np.float32)
    dense = np.zeros(max([width, *(index + 1 for index in probe["indices"])]), np.float32)
    dense[probe["indices"]] = probe["values"]
    return dense


def alike(stored: Sequence[Any], vectors: Any, tolerance: float) -> bool:
    """Return True if vectors are those that are stored as JSON, but for what machines differ by."""
    own = probes_of(vectors)
    width = vectors[0].width if isinstance(vectors[0], SparseVector) else 0
    pairs = [(spelled_out(vector, width), spelled_out(other, width)) for vector, other in zip(stored, own)]
    return len(stored) == len(own) and all(
        vector.shape == other.shape and float(np.abs(vector - other).max(initial=0)) <= tolerance
        for vector, other in pairs
    )
