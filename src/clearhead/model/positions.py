"""Positions: how a model knows where a token stands.

A scheme does one of three things: add a vector to each embedding (`embed`), rotate queries and keys
(`rotary`), or add a bias to attention scores (`bias`). All three take positions as values, so padding,
packing and caches need no special care. Nothing here is a buffer: tables are computed in float64 and cast at
the end, so that `.bfloat16()` and autocast leave angles exact.

Shapes: B batch, T query length, S key length, D model, H heads.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.config import StackSpec
from clearhead.model.dtypes import precise
from clearhead.model.rope import Rotary, rotary_of
from clearhead.model.steps import INDEX, Pass, Step
from clearhead.model.taps import SILENT, Tap


class PositionScheme(nn.Module):
    """The base of every scheme, and the scheme without positions."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.spec = spec

    def embed(self, positions: Tensor, dtype: torch.dtype, tap: Tap = SILENT) -> Tensor | None:
        """Return vectors to add to the embeddings: positions [B|1, T] -> [B|1, T, D]."""
        return None

    def rotary(self, positions: Tensor, window: int | None, tap: Tap = SILENT) -> Rotary | None:
        """Return cosines and sines for layers of this window: positions [B|1, T] -> [B|1, 1, T, R] twice."""
        return None

    def bias(self, queries: Tensor, keys: Tensor, dtype: torch.dtype, tap: Tap = SILENT) -> Tensor | None:
        """Return a bias to add to the scores: positions [B|1, T] and [B|1, S] -> [B|1, H, T, S]."""
        return None

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, tokens: int) -> Iterator[Step]:
        """Yield the steps of the scheme on rows of `tokens`."""
        yield from ()


class LearnedPositions(PositionScheme):
    """One learned vector per position."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__(spec)
        self.table = nn.Embedding(spec.max_positions + spec.position_offset, spec.d_embedding)

    def embed(self, positions: Tensor, dtype: torch.dtype, tap: Tap = SILENT) -> Tensor:
        """Look up rows of the table, past its offset."""
        return tap.step("table", self.table(positions + self.spec.position_offset))

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, tokens: int) -> Iterator[Step]:
        """Yield the table."""
        rows = spec.max_positions + spec.position_offset
        yield Step(f"{name}.table", "positions", rows * spec.d_embedding, kept=tokens * INDEX)


class SinusoidalPositions(PositionScheme):
    """Sines and cosines of geometrically growing wavelength, at any position."""

    def embed(self, positions: Tensor, dtype: torch.dtype, tap: Tap = SILENT) -> Tensor:
        """Map [B|1, T] -> [B|1, T, D]."""
        spec, places = self.spec, positions + self.spec.position_offset
        if spec.input == "patches":
            waves = self._of_patches(places)
        else:
            waves = sinusoid(places, spec.d_embedding, spec.sinusoid_layout, spec.sinusoid_ends)
        return tap.step("waves", waves.to(positions.device, dtype))

    def _of_patches(self, positions: Tensor) -> Tensor:
        """Use half of the columns for the row of a patch, half for its column; the class token gets zeros."""
        spec, width = self.spec, self.spec.d_embedding
        columns = spec.image_size[1] // spec.patch_size
        patch = (positions - int(spec.class_token)).clamp(min=0)
        row = sinusoid(patch // columns, width // 2, spec.sinusoid_layout, spec.sinusoid_ends)
        column = sinusoid(patch % columns, width - width // 2, spec.sinusoid_layout, spec.sinusoid_ends)
        return torch.cat([row, column], dim=-1) * (positions >= spec.class_token)[..., None].to(row.device)


def sinusoid(positions: Tensor, width: int, layout: str = "interleaved", ends: bool = False) -> Tensor:
    """Compute sin(p / 10000^(2i/width)) and its cosine: positions [...] -> [..., width] in float64.

    `interleaved` is the paper's order, sin on even and cos on odd columns. `half` puts all sines first. With
    `ends` the slowest wave is exactly 10,000 long, as in some translation models, and an odd last column is
    zero.
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

    def rotary(self, positions: Tensor, window: int | None, tap: Tap = SILENT) -> Rotary:
        """Compute angles in float64, and cosines and sines in float32."""
        local = window is not None and self.spec.rope_local_base is not None
        turns = rotary_of(self.spec, positions, local)
        if tap.traced:
            tap.step("rotary.local" if local else "rotary", torch.stack(turns))
        return turns

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, tokens: int) -> Iterator[Step]:
        """Yield cosines and sines, once for each window."""
        kept = 2 * tokens * spec.d_rotary * 4 * len(set(spec.windows))
        yield Step(f"{name}.rotary", "positions", kept=kept)


class AlibiPositions(PositionScheme):
    """ALiBi: scores fall linearly with distance, at a slope of its own for each head."""

    def bias(self, queries: Tensor, keys: Tensor, dtype: torch.dtype, tap: Tap = SILENT) -> Tensor:
        """Map [B|1, T], [B|1, S] -> [B|1, H, T, S]."""
        distance = (queries[:, :, None] - keys[:, None, :]).abs()  # B T S
        slopes = alibi_slopes(self.spec.n_heads).to(queries.device, torch.promote_types(dtype, torch.float32))
        return tap.step("bias", (-slopes[:, None, None] * distance[:, None]).to(dtype))

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, tokens: int) -> Iterator[Step]:
        """Yield the bias of all layers; under a causal mask, each layer keeps a masked copy instead."""
        if not spec.causal:
            whole = any(window is None or window >= tokens for window in spec.windows)
            kept = spec.n_heads * tokens**2 * run.size if whole else 0
            yield Step(f"{name}.bias", "positions", kept=kept)


def alibi_slopes(n_heads: int) -> Tensor:
    """Return 2^(-8/n), 2^(-16/n), ... for the power of two n <= H, then every other slope of 2n: [H]."""
    power = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (n_heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float64)


class RelativePositions(PositionScheme):
    """A learned bias per head and bucket of distance; one table serves every layer of the stack."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__(spec)
        self.table = nn.Embedding(spec.relative_buckets, spec.n_heads)

    def bias(self, queries: Tensor, keys: Tensor, dtype: torch.dtype, tap: Tap = SILENT) -> Tensor:
        """Map [B|1, T], [B|1, S] -> [B|1, H, T, S]."""
        spec, distance = self.spec, keys[:, None, :] - queries[:, :, None]  # B T S
        n_buckets, furthest = spec.relative_buckets, spec.relative_max_distance
        buckets = relative_bucket(distance, not spec.causal, n_buckets, furthest)
        return tap.step("bias", self.table(buckets).permute(0, 3, 1, 2).to(dtype))  # B H T S

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, tokens: int) -> Iterator[Step]:
        """Yield the table, which keeps the bucket of each pair of tokens, once for each window."""
        kept = tokens**2 * INDEX * len(set(spec.windows))
        yield Step(f"{name}.table", "positions", spec.relative_buckets * spec.n_heads, kept=kept)


def relative_bucket(distance: Tensor, both_sides: bool, n_buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each signed distance, key minus query: exact when near, logarithmic when far."""
    bucket = torch.zeros_like(distance)
    if both_sides:
        n_buckets //= 2
        bucket = bucket + (distance > 0) * n_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = n_buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = ratio * (n_buckets - exact)
    return bucket + torch.where(distance < exact, distance, (exact + far.long()).clamp(max=n_buckets - 1))


POSITIONS: dict[str, type[PositionScheme]] = {
    "none": PositionScheme,
    "learned": LearnedPositions,
    "sinusoidal": SinusoidalPositions,
    "rope": RopePositions,
    "alibi": AlibiPositions,
    "relative": RelativePositions,
}
