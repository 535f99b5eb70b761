"""What a batch hides from the model: masked tokens, and spans taken out.

Shapes: B rows, T tokens of a row.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.learn.batches.batch import IGNORE
from clearhead.learn.batches.rows import Ints

MASKED, REPLACED = 0.8, 0.1  # of the chosen tokens; the others stay as they are


def mask_tokens(
    ids: Ints,
    hideable: NDArray[np.bool_],
    share: float,
    mask_id: int,
    ordinary: Ints,
    random: np.random.Generator,
) -> tuple[Ints, Ints]:
    """Mask a share of the tokens that may be masked -> what the model reads, and its targets, both [B, T].

    Each `hideable` token [B, T] is chosen with probability `share`, and one in a row where chance chose none.
    Of the chosen, 80 % become the mask, 10 % a token drawn from `ordinary`, 10 % stay: any token may be a
    wrong one.
    """
    draw = np.where(hideable, random.random(ids.shape), np.inf)
    chosen = draw < share
    chosen[np.arange(len(ids)), draw.argmin(1)] |= np.isfinite(draw.min(1))
    targets = np.where(chosen, ids, IGNORE)
    fate = random.random(ids.shape)
    seen = np.where(chosen & (fate < MASKED), mask_id, ids)
    replaced = chosen & (fate >= MASKED) & (fate < MASKED + REPLACED)
    seen[replaced] = ordinary[random.integers(len(ordinary), size=int(replaced.sum()))]
    return seen, targets


def noise_sizes(length: int, share: float, span_length: float, sentinels: int) -> tuple[int, int]:
    """Return how many of `length` tokens are taken out, and in how many spans."""
    noise = min(max(1, round(length * share)), max(1, length - 1))
    return noise, min(max(1, round(noise / span_length)), noise, length - noise + 1, sentinels)


def corrupt_spans(rows: Ints, noise: int, sentinels: Ints, random: np.random.Generator) -> tuple[Ints, Ints]:
    """Take spans out of rows [B, T] -> the source, and the target.

    In the source a sentinel replaces each span; in the target each sentinel is followed by its span. `noise`
    tokens of each row are taken out, in as many spans as there are `sentinels`, so all rows keep one length.
    Between two spans at least one token stays. Lengths and places of the spans are uniform over all ways to
    choose them.
    """
    (n, length), spans = rows.shape, len(sentinels)
    cut = _parts(n, noise, spans, random)  # B spans
    kept = _parts(n, length - noise + 2, spans + 1, random)  # B spans+1
    kept[:, [0, -1]] -= 1  # the ends may be empty
    lengths = np.empty((n, 2 * spans + 1), dtype=np.int64)
    lengths[:, 0::2], lengths[:, 1::2] = kept, cut
    numbers = np.tile(np.arange(2 * spans + 1), n)
    stretch = np.repeat(numbers, lengths.reshape(-1)).reshape(n, length)  # odd: taken out
    hidden = stretch % 2 == 1
    first = hidden.copy()
    first[:, 1:] &= stretch[:, 1:] != stretch[:, :-1]
    sentinel = sentinels[np.minimum(stretch // 2, spans - 1)]
    source = np.where(first, sentinel, rows)[~hidden | first].reshape(n, -1)
    target = np.stack([sentinel, rows], -1)[np.stack([first, hidden], -1)].reshape(n, -1)
    return source, target


def _parts(n: int, total: int, parts: int, random: np.random.Generator) -> Ints:
    """Draw `n` ways to write `total` as a sum of `parts` numbers of 1 or more, uniformly: [n, parts]."""
    places: NDArray[Any] = np.argsort(random.random((n, total - 1)), axis=1)[:, : parts - 1] + 1
    return np.diff(np.sort(places, axis=1), axis=1, prepend=0, append=total)
