"""Kinds of attention, plainly: which key a query sees, and the formulas that have no scores.

Shapes, all of one row: T query tokens, S key tokens, D model, E head width, H heads, V value width.
"""

import functools
import math

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.config.kinds import Full, Kind, Windowed
from clearhead.inside.checks.plain_inputs import PlainInputs, PlainRow
from clearhead.variants.kinds import Blocks, Dilated, GatedDeltaKind, GlobalKind, LinearKind, Strided
from clearhead.variants.linear import orthogonal_features

MASK = 0x7FFFFFFF


def sees(kind: Kind, q: int, k: int, length: int, causal: bool) -> bool:
    """Return True if a query at position q chooses the key at position k, in a row of `length` tokens."""
    distance, first = abs(q - k), getattr(kind, "sinks", 0)
    match kind:
        case Full():
            found = True
        case Windowed() | GlobalKind():
            found = distance < kind.size
        case Dilated():
            found = distance in range(0, kind.size * kind.step, kind.step)
        case Strided():
            found = distance < kind.step or distance % kind.step == 0
        case Blocks():
            mine, its = q // kind.size, k // kind.size
            blocks = mine + 1 if causal else math.ceil(length / kind.size)
            drawn = [_drawn(kind.seed, mine, number) % max(blocks, 1) for number in range(kind.random)]
            near = abs(mine - its) <= kind.window // 2 or its in drawn
            everywhere = _globals(kind, length)
            found = near or length <= kind.full or q in everywhere or k in everywhere
        case _:
            raise TypeError(f"{kind} does not choose among keys")
    return found or k < first


@functools.cache
def _globals(kind: Blocks, length: int) -> frozenset[int]:
    """Return the positions of the tokens that see all and are seen by all."""
    size = kind.size if kind.counted == "blocks" else 1
    groups = [range(at, at + size) for at in range(0, length, size)]
    ends = groups[: kind.first] + groups[max(len(groups) - kind.last, 0) :]
    return frozenset(place for group in ends for place in group)


def times(kind: Blocks, q: int, k: int, length: int) -> int:
    """Return how often the key at position k stands in the softmax of the query at position q."""
    if length <= kind.full or q in _globals(kind, length):
        return 1
    first = kind.first * (kind.size if kind.counted == "blocks" else 1)
    return 1 + kind.repeat if k < first else 1


def global_tokens_of(kind: GlobalKind, row: PlainRow) -> list[bool]:
    """Return which tokens of a row see all and are seen by all."""
    real = [t for t, is_real in enumerate(row.real) if is_real]
    if row.marked is not None:
        chosen = [t for t in real if row.marked[t]]
    elif kind.tokens == "first":
        chosen = [t for t in real if row.positions[t] == 0]
    elif kind.tokens == "question":
        ends = [t for t in real if row.x[t] == kind.separator]
        chosen = [t for t in real if ends and t < ends[0]]
    else:
        chosen = []
    return [t in chosen for t in range(len(row.real))]


def _drawn(seed: int, block: int, number: int) -> int:
    """Mix three numbers into one below 2^31."""
    x = (block * 0x9E3779B1 + number * 0x85EBCA77 + seed * 0xC2B2AE3D + 1) & MASK
    x = ((x ^ x >> 15) * 0x2C1B3C6D) & MASK
    x = ((x ^ x >> 12) * 0x297A2D39) & MASK
    return (x ^ x >> 15) & MASK


def features(kind: LinearKind, x: Tensor, scale: float, count: int) -> Tensor:
    """Return the features of queries or keys: [T, E] -> [T, F]."""
    if kind.features == "elu":
        return torch.where(x > 0, x + 1, x.exp())
    if kind.features == "relu":
        return torch.where(x > 0, x, 0.0) + 0.001
    rows = orthogonal_features(count, x.shape[1], kind.seed).double()
    x = x * math.sqrt(scale)
    return (x @ rows.T - (x**2).sum(1, keepdim=True) / 2).exp() / math.sqrt(count)


def weighed(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Return the mean of values by the products of features, over the keys that are seen: [T, V]."""
    products = (q @ k.T) * seen
    total = products.sum(1, keepdim=True)
    return torch.where(total > 0, products @ v / total, 0.0)


def mixtures(inputs: PlainInputs, name: str, row: PlainRow, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Mix the real keys and values of a row by position: [S, E] -> [R, E] each."""
    real, places = torch.tensor(row.real)[:, None], row.positions
    by_key, by_value = (inputs.weight(f"{name}.{one}_mix")[places] * real for one in ("k", "v"))
    return by_key.T @ k, by_value.T @ v


def delta_rule(inputs: PlainInputs, name: str, row: PlainRow, kind: GatedDeltaKind, x: Tensor) -> Tensor:
    """Read a row from left to right into a memory that decays and corrects itself: [T, D] -> [T, D]."""
    K, H, E, V = kind.sizes(row.plan)
    real = [t for t, is_real in enumerate(row.real) if is_real]
    mixed = torch.cat([inputs.linear(f"{name}.{part}", x[real]) for part in "qkv"], dim=1)
    kernel, before = inputs.weight(f"{name}.conv")[:, 0], torch.zeros(kind.kernel - 1, mixed.shape[1])
    padded = torch.cat([before.double(), mixed])
    mixed = torch.stack([(padded[t : t + kind.kernel] * kernel.T).sum(0) for t in range(len(real))])
    mixed = mixed / (1 + (-mixed).exp())
    q, k, v = mixed[:, : K * E], mixed[:, K * E : 2 * K * E], mixed[:, 2 * K * E :]
    write = 1 / (1 + (-inputs.linear(f"{name}.beta", x[real])).exp())  # T H
    decay = inputs.linear(f"{name}.decay", x[real]) + inputs.weight(f"{name}.decay_bias")
    kept = (-inputs.weight(f"{name}.log_rate").exp() * decay.exp().log1p()).exp()
    gate, answers = inputs.linear(f"{name}.gate", x[real]), torch.zeros(len(x), H * V).double()
    for head in range(H):
        shared, memory = head * K // H, torch.zeros(E, V).double()
        for t, place in enumerate(real):
            one_q, one_k = (part[t, shared * E : shared * E + E] for part in (q, k))
            one_q, one_k = (each / ((each**2).sum() + 1e-6) ** 0.5 for each in (one_q, one_k))
            memory = memory * kept[t, head]
            memory = memory + write[t, head] * torch.outer(
                one_k, v[t, head * V : head * V + V] - one_k @ memory
            )
            z = one_q @ memory / E**0.5
            z = z / ((z**2).mean() + inputs.config.norm_eps) ** 0.5 * inputs.weight(f"{name}.norm.weight")
            opened = gate[t, head * V : head * V + V]
            answers[place, head * V : head * V + V] = z * opened / (1 + (-opened).exp())
    return inputs.linear(f"{name}.out", answers)


def signed_row(distance: int, config: ModelConfig) -> int:
    """Return the row of the table of disentangled positions for a query this far right of its key."""
    span, furthest = config.relative_buckets // 2, config.relative_max_distance
    half, away, sign = span // 2, abs(distance), -1 if distance < 0 else 1
    if furthest != span and away > half:
        away = half + math.ceil(math.log(away / half) / math.log((furthest - 1) / half) * (half - 1))
    return min(max(span + sign * away, 0), 2 * span - 1)


def by_distance(plain: PlainInputs, name: str, row: PlainRow, head: int, q: Tensor, k: Tensor) -> Tensor:
    """Return what one head adds to its scores where queries and keys [T, E] meet distances: [T, T]."""
    config, plan = plain.config, row.plan
    vectors = plain.weight(f"{row.stack}.positions.table.weight")
    if config.relative_norm:
        vectors = plain.norm(f"{row.stack}.positions.norm", vectors)
    shared = head // (plan.n_heads // plan.n_kv_heads)
    met = []  # the vectors as queries and as keys of this head
    for kind, number in (("q", head), ("k", shared)):
        found = plain.linear(f"{name}.{kind}", vectors)
        if config.qk_norm == "full":
            found = plain.norm(f"{name}.{kind}_norm", found)
        found = found[:, number * plan.d_head : (number + 1) * plan.d_head]
        met.append(plain.norm(f"{name}.{kind}_norm", found) if config.qk_norm == "head" else found)
    added = torch.zeros(len(q), len(k), dtype=torch.float64)
    for i, here in enumerate(row.positions):
        which = [signed_row(here - there, config) for there in row.positions]
        if config.relative_terms != "p2c":
            added[i] += met[1][which] @ q[i]
        if config.relative_terms != "c2p":
            added[i] += (met[0][which] * k).sum(-1)
    return added * plan.attention_scale
