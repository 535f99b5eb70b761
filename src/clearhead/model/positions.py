"""Positions: how a model knows where a token stands.

A scheme may do three things, and does one: add a vector to each embedding (`embed`), turn queries and keys
(`rotary`), or add a bias to attention scores (`bias`). All three take positions as values, so padding, packing and
caches need no special care. Nothing here is a buffer: tables are computed in float64 and cast at the end, so that
`.bfloat16()` and autocast leave angles exact.

Shapes: B batch, T query length, S key length, D model, H heads, E head width, R rotated columns of a head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.config import ModelConfig, RopeScaling, StackPlan, rotated_width
from clearhead.model.dtypes import precise, wide


class Rotary(NamedTuple):
    """Cosines and sines of one forward pass, each [B|1, 1, T, R]."""

    cos: Tensor
    sin: Tensor


class PositionScheme(nn.Module):
    """No positions at all, and the shape of every other scheme."""

    def __init__(self, config: ModelConfig, plan: StackPlan) -> None:
        super().__init__()
        self.config, self.plan = config, plan

    def embed(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What to add to the embeddings: positions [B|1, T] -> [B|1, T, D]."""
        return None

    def rotary(self, positions: Tensor, window: int | None) -> Rotary | None:
        """How to turn queries and keys in a layer with this window: positions [B|1, T] -> [B|1, 1, T, R] twice."""
        return None

    def bias(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What to add to the scores: positions [B|1, T] and [B|1, S] -> [B|1, H, T, S]."""
        return None


class LearnedPositions(PositionScheme):
    """One learned vector per position."""

    def __init__(self, config: ModelConfig, plan: StackPlan) -> None:
        super().__init__(config, plan)
        self.table = nn.Embedding(config.max_positions + config.position_offset, plan.d_embedding)

    def embed(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the table, past its offset."""
        return self.table(positions + self.config.position_offset)  # type: ignore[no-any-return]


class SinusoidalPositions(PositionScheme):
    """Waves of geometrically growing length, at any position. Images get half the columns for the row, half for the column."""

    def embed(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """[B|1, T] -> [B|1, T, D]."""
        config, width = self.config, self.plan.d_embedding
        positions = positions + config.position_offset
        if self.plan.input != "patches":
            return sinusoid(positions, width, config.sinusoid_layout, config.sinusoid_ends).to(
                positions.device, dtype
            )
        assert config.image_size is not None
        columns = config.image_size[1] // config.patch_size
        patch = (positions - int(config.class_token)).clamp(min=0)
        row = sinusoid(patch // columns, width // 2, config.sinusoid_layout, config.sinusoid_ends)
        column = sinusoid(patch % columns, width - width // 2, config.sinusoid_layout, config.sinusoid_ends)
        is_patch = (positions >= config.class_token)[..., None]  # the class token stands nowhere
        return torch.cat([row, column], dim=-1).to(positions.device, dtype) * is_patch


def sinusoid(positions: Tensor, width: int, layout: str = "interleaved", ends: bool = False) -> Tensor:
    """sin(p / 10000^(2i/width)) and its cosine: positions [...] -> [..., width] in float64.

    `interleaved` is the paper's order (sin on even, cos on odd columns); `half` puts all sines first. With `ends` the
    slowest wave is exactly 10,000 long, as in some translation models; there, an odd last column is zero.
    """
    pairs = width // 2 if ends else (width + 1) // 2
    positions = precise(positions)
    steps = torch.arange(pairs, dtype=torch.float64, device=positions.device)
    exponent = steps / max(pairs - 1, 1) if ends else steps * 2 / width
    angles = positions[..., None] * torch.pow(10_000.0, -exponent)
    if layout == "half":
        waves = torch.cat([angles.sin(), angles.cos()[..., : width // 2]], dim=-1)
    else:
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width]
    return nnf.pad(waves, (0, width - waves.shape[-1]))


class RopePositions(PositionScheme):
    """Rotary positions: the angle between a query and a key depends on their distance alone."""

    def rotary(self, positions: Tensor, window: int | None) -> Rotary:
        """Angles in float64, cosines and sines in float32."""
        config = self.config
        local = window is not None and config.rope_local_base is not None
        base = config.rope_local_base if local and config.rope_local_base else config.rope_base
        width, where, device = (
            rotated_width(self.plan.d_head, config.rope_fraction),
            precise(positions),
            positions.device,
        )
        frequencies, factor = rope_frequencies(
            width, base, None if local else config.rope_scaling, config.max_positions, where
        )
        angles = where[:, None, :, None] * frequencies  # B 1 T R/2
        if config.rope_layout == "half":
            angles = torch.cat([angles, angles], dim=-1)  # B 1 T R
        else:
            angles = angles.repeat_interleave(2, dim=-1)
        return Rotary((angles.cos() * factor).float().to(device), (angles.sin() * factor).float().to(device))


def rotate(x: Tensor, rotary: Rotary, layout: str) -> Tensor:
    """Turn the first R columns of each head: [B, H, T, E] -> [B, H, T, E]."""
    width = rotary.cos.shape[-1]
    turned, kept = wide(x[..., :width]), x[..., width:]
    if layout == "half":
        a, b = turned.chunk(2, dim=-1)
        quarter = torch.cat([-b, a], dim=-1)  # each pair turned by a quarter circle
    else:
        quarter = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
    turned = (turned * rotary.cos + quarter * rotary.sin).to(x.dtype)
    return turned if not kept.shape[-1] else torch.cat([turned, kept], dim=-1)


def rope_order(width: int, layout: str) -> Tensor:
    """Which column of a head in the other layout stands in each column of `layout`: a permutation of `width`.

    `weight[rope_order(E, "half")]` turns the rows of an interleaved query or key projection into half-split ones,
    exactly; `weight[rope_order(E, "interleaved")]` turns them back.
    """
    half_split = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    return half_split if layout == "half" else half_split.argsort()


def rope_frequencies(
    width: int, base: float, scaling: RopeScaling | None, max_positions: int, positions: Tensor
) -> tuple[Tensor, float]:
    """Radians per position for each pair, [R/2] in float64, and the factor on cosines and sines."""
    pair = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    plain = base**-pair
    if scaling is None:
        return plain, 1.0
    trained = scaling.original_positions or max_positions
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if (
        scaling.kind == "dynamic"
    ):  # the base grows with the length at hand, once that passes the trained length
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
    stretch = (
        scaling.factor if scaling.factor != 1 else max_positions / trained
    )  # longrope: one divisor per pair, by length
    factor = scaling.attention_factor or (
        1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(trained))
    )
    short = torch.tensor(scaling.short_factor, dtype=torch.float64, device=positions.device)
    long = torch.tensor(scaling.long_factor, dtype=torch.float64, device=positions.device)
    return plain / torch.where(positions.max() + 1 > trained, long, short), factor


def _yarn(plain: Tensor, width: int, base: float, scaling: RopeScaling, trained: int) -> Tensor:
    """Pairs that turn often are kept, pairs that turn rarely interpolated, with a linear ramp between."""

    def pair_with(
        turns: float,
    ) -> float:  # index of the pair that makes this many turns over the trained length
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    steps = torch.arange(width // 2, dtype=torch.float64, device=plain.device)
    interpolate = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / scaling.factor * interpolate + plain * (1 - interpolate)


def _yarn_factor(scaling: RopeScaling) -> float:
    def growth(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return growth(scaling.mscale) / growth(scaling.mscale_all_dim)
    return growth(1.0)


class AlibiPositions(PositionScheme):
    """Scores fall linearly with distance, at a slope of its own for each head."""

    def bias(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """[B|1, T], [B|1, S] -> [B|1, H, T, S]."""
        distance = (queries[:, :, None] - keys[:, None, :]).abs()  # B T S
        slopes = alibi_slopes(self.plan.n_heads).to(queries.device, torch.promote_types(dtype, torch.float32))
        return (-slopes[:, None, None] * distance[:, None]).to(dtype)


def alibi_slopes(n_heads: int) -> Tensor:
    """Slopes 2^(-8/n), 2^(-16/n), ... for n the power of two below, then every other slope of twice that n: [H] in float64."""
    power = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (n_heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float64)


class RelativePositions(PositionScheme):
    """A learned bias per head and bucket of distance; one table serves every layer of the stack."""

    def __init__(self, config: ModelConfig, plan: StackPlan) -> None:
        super().__init__(config, plan)
        self.table = nn.Embedding(config.relative_buckets, plan.n_heads)

    def bias(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """[B|1, T], [B|1, S] -> [B|1, H, T, S]."""
        distance = keys[:, None, :] - queries[:, :, None]  # B T S
        buckets = relative_bucket(
            distance, not self.plan.causal, self.config.relative_buckets, self.config.relative_max_distance
        )
        return self.table(buckets).permute(0, 3, 1, 2).to(dtype)  # type: ignore[no-any-return]  # B H T S


def relative_bucket(distance: Tensor, both_sides: bool, n_buckets: int, max_distance: int) -> Tensor:
    """Bucket of each signed distance (key minus query): near ones exactly, far ones on a logarithmic scale."""
    bucket = torch.zeros_like(distance)
    if both_sides:
        n_buckets //= 2
        bucket = bucket + (distance > 0) * n_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = n_buckets // 2
    far = (
        torch.log(distance.clamp(min=1).float() / exact)
        / math.log(max_distance / exact)
        * (n_buckets - exact)
    )
    return bucket + torch.where(distance < exact, distance, (exact + far.long()).clamp(max=n_buckets - 1))


POSITIONS: dict[str, type[PositionScheme]] = {
    "none": PositionScheme,
    "learned": LearnedPositions,
    "sinusoidal": SinusoidalPositions,
    "rope": RopePositions,
    "alibi": AlibiPositions,
    "relative": RelativePositions,
}
