"""Latent attention in float64, for one row: its projections, and the keys that an indexer chooses.

Shapes, all of one row: T tokens, D model, H heads, E width of a head, V of its values.
"""

import torch
from torch import Tensor

from clearhead.inside.checks.reference_inputs import ReferenceInputs, ReferenceRow
from clearhead.variants.kinds import Latent


def _down(inputs: ReferenceInputs, name: str, part: str, x: Tensor) -> Tensor:
    low = inputs.linear(f"{name}.{part}_down", x)
    return (
        low
        / ((low**2).mean(1, keepdim=True) + 1e-6) ** 0.5
        * inputs.weight(f"{name}.{part}_down_norm.weight")
    )


def latent_projections(
    inputs: ReferenceInputs, name: str, row: ReferenceRow, kind: Latent, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of all heads, made of latents of a row [T, D]: [T, H·E], [T, H·V]."""
    latent, shared = _down(inputs, name, "kv", x), inputs.linear(f"{name}.k_shared", x)
    own, keys = inputs.linear(f"{name}.k", latent), []
    width = row.plan.d_head - shared.shape[1]
    for start in range(0, own.shape[1], width):
        keys += [own[:, start : start + width], shared]
    q = inputs.linear(f"{name}.q", _down(inputs, name, "q", x) if kind.query_rank else x)
    return q, torch.cat(keys, 1), inputs.linear(f"{name}.v", latent)


def indexed(
    inputs: ReferenceInputs, name: str, row: ReferenceRow, kind: Latent, x: Tensor, seen: Tensor
) -> Tensor:
    """Return which keys each query of a row sees, [T, T], of those that it may see."""
    width, R = kind.index_width, row.plan.d_rotary
    k = inputs.linear(f"{name}.index_k", x)
    k = k - k.mean(1, keepdim=True)
    k = k / ((k**2).mean(1, keepdim=True) + 1e-6) ** 0.5 * inputs.weight(f"{name}.index_norm.weight")
    k = k + inputs.weight(f"{name}.index_norm.bias")
    k = torch.cat([inputs.rotated(k[:, :R], row, None, "half"), k[:, R:]], 1)
    all_q = inputs.linear(f"{name}.index_q", _down(inputs, name, "q", x))
    weights, scores = inputs.linear(f"{name}.index_weights", x), torch.zeros(len(x), len(x)).double()
    for head in range(kind.index_heads):
        q = all_q[:, head * width : head * width + width]
        q = torch.cat([inputs.rotated(q[:, :R], row, None, "half"), q[:, R:]], 1)
        scores += weights[:, head : head + 1] * (q @ k.T).clamp(min=0)
    chosen = torch.zeros_like(seen)
    for query, allowed in enumerate(seen):
        keys = [key for key in range(len(allowed)) if allowed[key]]
        best = sorted(keys, key=lambda key: -float(scores[query, key]))[: kind.top]
        chosen[query, best] = True
    return chosen
