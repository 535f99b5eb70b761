"""Which keys a kind of attention chooses for a query, as a predicate on positions.

Shapes: B batch (1 where all rows are alike), T query length, S key length.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.core.config.kinds import Blocks, Dilated, GlobalKind, Kind, Strided, Windowed

Choice = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def predicate(kind: Kind, causal: bool) -> Choice:
    """Return the rule by which a kind chooses keys: (query's position, key's position, totals) -> bool.

    It takes tensors of any shapes that broadcast, so that masks over pairs, over gathered blocks and inside a
    compiled kernel are one rule. `totals` are the tokens of a query's document, where the kind asks for them.
    """
    match kind:
        case Windowed(size, sinks) | GlobalKind(size, sinks=sinks):

            def found(q: Tensor, k: Tensor, totals: Tensor | None) -> Tensor:
                return (q - k).abs() < size

        case Dilated(size, step, sinks):

            def found(q: Tensor, k: Tensor, totals: Tensor | None) -> Tensor:
                distance = (q - k).abs()
                return (distance < size * step) & (distance % step == 0)

        case Strided(step, sinks):

            def found(q: Tensor, k: Tensor, totals: Tensor | None) -> Tensor:
                distance = (q - k).abs()
                return (distance < step) | (distance % step == 0)

        case Blocks(size, window, sinks=sinks):

            def found(q: Tensor, k: Tensor, totals: Tensor | None) -> Tensor:
                k_block = k // size
                near = (q // size - k_block).abs() <= window // 2
                for target in random_blocks(kind, q, totals, causal):
                    near = near | (k_block == target)
                start, end = between_ends(kind, totals)
                near = near | (q < start) | (k < start)
                if totals is not None and end is not None:
                    near = near | (q >= end) | (k >= end) | (totals <= kind.full)
                return near

        case _:
            raise TypeError(f"{kind} does not choose among keys")
    return (lambda q, k, totals: found(q, k, totals) | (k < sinks)) if sinks else found


def between_ends(kind: Blocks, totals: Tensor | None) -> tuple[int, Tensor | None]:
    """Return where global tokens end and where they begin again, [B|1, T], which follows from `totals`."""
    if kind.counted == "tokens":
        return kind.first, None if totals is None else totals - kind.last
    last_block = None if totals is None else (totals + kind.size - 1) // kind.size - kind.last
    return kind.first * kind.size, None if last_block is None else last_block * kind.size


def log_counts(
    kind: Kind, queries: Tensor, keys: Tensor, totals: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Return the logarithm of how often each key stands in the softmax: [B|1, 1, T, S]; None: always once.

    It is a bias on the scores. Shapes: queries and totals [B|1, T], keys [B|1, S].
    """
    if not isinstance(kind, Blocks) or not kind.repeat:
        return None
    start, end = between_ends(kind, totals)
    between = queries >= start
    if totals is not None and end is not None:
        between = between & (queries < end) & (totals > kind.full)
    counted = (between[:, :, None] & (keys < start)[:, None])[:, None]
    return torch.where(counted, math.log1p(kind.repeat), 0.0).to(dtype)


def global_tokens(
    kind: GlobalKind, ids: Tensor, positions: Tensor, real: Tensor, given: Tensor | None
) -> Tensor | None:
    """Return which real tokens see all and are seen by all: those `given`, else as the kind says: [B|1, T].

    None: no token. Shapes: ids, positions, real and given are [B|1, T].
    """
    if given is not None:
        return given & real
    match kind.tokens:
        case "first":
            return (positions == 0) & real
        case "question":
            separators = ((ids == kind.separator) & real).cumsum(1)
            return (separators == 0) & (separators[:, -1:] > 0) & real
        case _:
            return None


def random_blocks(kind: Blocks, queries: Tensor, totals: Tensor | None, causal: bool) -> list[Tensor]:
    """Draw a block of keys for each query, `random` times, by seed and the query's own block: each [B|1, T].

    A decoder's query draws among the blocks up to its own, so that it needs no later token to know them.
    """
    block, drawn = queries // kind.size, []
    if causal or totals is None:
        among = block + 1
    else:
        among = (totals + kind.size - 1) // kind.size
    for number in range(kind.random):
        mixed = (block * 0x9E3779B1 + number * 0x85EBCA77 + kind.seed * 0xC2B2AE3D + 1) & 0x7FFFFFFF
        for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & 0x7FFFFFFF
        drawn.append(mixed % among.clamp(min=1))
    return drawn
