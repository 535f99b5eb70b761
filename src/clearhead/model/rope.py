"""Rotary positions: queries and keys are rotated, so that their product depends on their distance.

Angles are computed in float64 and their cosines cast at the end, so that `.bfloat16()` and autocast leave
them exact.

Shapes: B batch, T query length, H heads, E head width, R rotated columns of a head.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.config import RopeScaling, StackSpec
from clearhead.model.dtypes import precise, wide


class Rotary(NamedTuple):
    """Cosines and sines of one forward pass, each [B|1, 1, T, R]."""

    cos: Tensor
    sin: Tensor


def rotary_of(spec: StackSpec, positions: Tensor, local: bool) -> Rotary:
    """Return cosines and sines in float32 at positions [B|1, T]; `local` layers have a base of their own."""
    base = spec.rope_local_base if local and spec.rope_local_base is not None else spec.rope_base
    where, device = precise(positions), positions.device
    scaling = None if local else spec.rope_scaling
    frequencies, factor = rope_frequencies(spec.d_rotary, base, scaling, spec.max_positions, where)
    angles = where[:, None, :, None] * frequencies  # B 1 T R/2
    if spec.rope_layout == "half":
        angles = torch.cat([angles, angles], dim=-1)  # B 1 T R
    else:
        angles = angles.repeat_interleave(2, dim=-1)
    return Rotary((angles.cos() * factor).float().to(device), (angles.sin() * factor).float().to(device))


def rotate(x: Tensor, rotary: Rotary, layout: str) -> Tensor:
    """Rotate the first R columns of each head: [B, H, T, E] -> [B, H, T, E]."""
    width = rotary.cos.shape[-1]
    turned, kept = wide(x[..., :width]), x[..., width:]
    if layout == "half":
        a, b = turned.chunk(2, dim=-1)
        quarter = torch.cat([-b, a], dim=-1)  # each pair rotated by a quarter circle
    else:
        quarter = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
    turned = (turned * rotary.cos + quarter * rotary.sin).to(x.dtype)
    return turned if not kept.shape[-1] else torch.cat([turned, kept], dim=-1)


def rope_order(width: int, layout: str) -> Tensor:
    """Return, for each column of `layout`, its number in the other layout: a permutation of `width`.

    `weight[rope_order(E, "half")]` turns the rows of an interleaved query or key projection into half-split
    ones, exactly; `weight[rope_order(E, "interleaved")]` turns them back.
    """
    half_split = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    return half_split if layout == "half" else half_split.argsort()


def rope_frequencies(
    width: int, base: float, scaling: RopeScaling | None, max_positions: int, positions: Tensor
) -> tuple[Tensor, float]:
    """Return radians per position of each pair, [R/2] in float64, and a factor for cosines and sines."""
    pair = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    plain = base**-pair
    if scaling is None:
        return plain, 1.0
    trained = scaling.original_positions or max_positions
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "dynamic":  # the base grows with the length, once it passes the trained length
        length = (positions.max() + 1).clamp(min=trained)
        growth = scaling.factor * length / trained - (scaling.factor - 1)
        return (base * growth.double() ** (width / (width - 2))) ** -pair, 1.0
    if scaling.kind == "llama3":  # long waves are interpolated, short ones kept, those between blended
        turns = trained * plain / (2 * math.pi)  # over the trained length
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * plain + (1 - keep) * plain / scaling.factor, 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, width, base, scaling, trained), _yarn_factor(scaling)
    # longrope: each pair has a divisor within the trained length, and one beyond it.
    stretch = scaling.factor if scaling.factor != 1 else max_positions / trained
    usual = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(trained))
    short = torch.tensor(scaling.short_factor, dtype=torch.float64, device=positions.device)
    long = torch.tensor(scaling.long_factor, dtype=torch.float64, device=positions.device)
    return plain / torch.where(positions.max() + 1 > trained, long, short), scaling.attention_factor or usual


def _yarn(plain: Tensor, width: int, base: float, scaling: RopeScaling, trained: int) -> Tensor:
    """Keep pairs that turn often, interpolate pairs that turn rarely, with a linear ramp between."""

    def pair_with(turns: float) -> float:
        """Return the index of the pair that makes this many turns over the trained length."""
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    steps = torch.arange(width // 2, dtype=torch.float64, device=plain.device)
    interpolate = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / scaling.factor * interpolate + plain * (1 - interpolate)


def _yarn_factor(scaling: RopeScaling) -> float:
    """Return the factor on cosines and sines."""

    def growth(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return growth(scaling.mscale) / growth(scaling.mscale_all_dim)
    return growth(1.0)
