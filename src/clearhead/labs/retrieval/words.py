"""BM25: passages ranked by the words they share with a query.

A posting is a word, as 64 bits of its hash, a passage that has it, and how often. Postings are sorted by
word, so that those of one word are one slice. N passages, P postings.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WORD = re.compile(r"[^\W_]+")
K1, B = 0.9, 0.4  # how soon repetition stops to count, and how much length does


class Postings(NamedTuple):
    """The words of some passages."""

    words: NDArray[np.uint64]  # P, sorted
    rows: NDArray[np.int32]  # P, numbers of passages
    counts: NDArray[np.int32]  # P
    lengths: NDArray[np.int32]  # N, words of each passage

    def of(self, word: int) -> slice:
        """Return where the postings of a word are."""
        value = np.uint64(word)
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
