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


def bm25(parts: Sequence[Postings], query: str) -> NDArray[np.float64]:
    """Return the score of every passage of all parts, in their order: [N]."""
    total = sum(len(part.lengths) for part in parts)
    mean = sum(float(part.lengths.sum()) for part in parts) / max(total, 1) or 1.0
    scores = [np.zeros(len(part.lengths)) for part in parts]
    for word, times in Counter(words_of(query)).items():
        places = [part.of(word) for part in parts]
        holders = sum(place.stop - place.start for place in places)
        weight = times * math.log(1 + (total - holders + 0.5) / (holders + 0.5))
        for part, place, score in zip(parts, places, scores):
            rows, counts = part.rows[place], part.counts[place]
            norm = K1 * (1 - B + B * part.lengths[rows] / mean)
            score[rows] += weight * counts / (counts + norm)
    return np.concatenate([*scores, np.zeros(0)])
