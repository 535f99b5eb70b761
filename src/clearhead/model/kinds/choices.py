"""Which keys a kind of attention chooses for a query, as a predicate on positions.

Shapes: B batch (1 where all rows are alike), T query length, S key length.
"""

from torch import Tensor

from clearhead.config.kinds import Blocks, Dilated, GlobalKind, Kind, Strided, Windowed


def chosen(kind: Kind, queries: Tensor, keys: Tensor, totals: Tensor | None, causal: bool) -> Tensor:
    """Return which keys a kind chooses, by positions [B|1, T] and [B|1, S]: [B|1, T, S].

    `totals` [B|1, T] are the tokens of each query's document, where the kind asks for them.
    """
    q, k = queries[:, :, None], keys[:, None, :]
    distance = (q - k).abs()
    match kind:
        case Windowed(size, sinks) | GlobalKind(size, sinks=sinks):
            found = distance < size
        case Dilated(size, step, sinks):
            found = (distance < size * step) & (distance % step == 0)
        case Strided(step, sinks):
            found = (distance < step) | (distance % step == 0)
        case Blocks(size, window, first, last, sinks=sinks):
            q_block, k_block = q // size, k // size
            found = (q_block - k_block).abs() <= window // 2
            for target in random_blocks(kind, queries, totals, causal):
                found = found | (k_block == target[:, :, None])
            found = found | (q < first) | (k < first)
            if totals is not None:
                end = totals[:, :, None] - last
                found = found | (q >= end) | (k >= end)
        case _:
            raise TypeError(f"{kind} does not choose among keys")
    return found | (k < sinks) if sinks else found


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
