"""Positions: how a model knows where a token stands.

A scheme adds a vector to each embedding (`embed`), rotates queries and keys (`rotary`), adds a bias to
attention scores (`bias`), or gives embeddings of relative distances, which attention dots with queries and
keys, as in DeBERTa (`relative`). All take positions as values, so padding, packing and caches need no special
care. Nothing here is a buffer: tables are computed in float64 and cast at the end, so that `.bfloat16()` and
autocast leave angles exact.

To add a scheme: subclass `PositionScheme`, register it in `POSITIONS`, and add its name to `PositionName`
(core/config/fields.py).

Shapes: B batch, T query length, S key length, D model, H heads, E head width, R rotated columns of a head.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import RopeScaling, StackSpec
from clearhead.core.config.registry import Registry
from clearhead.core.dtypes import precise, wide
from clearhead.core.taps import SILENT, Tap


class Rotary(NamedTuple):
    """Cosines and sines of one forward pass, each [B|1, 1, T, R]."""

    cos: Tensor
    sin: Tensor


class Relative(NamedTuple):
    """Embeddings of relative distances [R, D], and the row of each pair of tokens [B|1, T, S]."""

    vectors: Tensor
    which: Tensor


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

    def relative(self, queries: Tensor, keys: Tensor, tap: Tap = SILENT) -> Relative | None:
        """Return embeddings of relative distances for attention: positions [B|1, T] and [B|1, S]."""
        return None


class LearnedPositions(PositionScheme):
    """One learned vector per position."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__(spec)
        self.table = nn.Embedding(spec.max_positions + spec.position_offset, spec.d_summed)

    def embed(self, positions: Tensor, dtype: torch.dtype, tap: Tap = SILENT) -> Tensor:
        """Look up rows of the table, past its offset."""
        return tap.step("table", self.table(positions + self.spec.position_offset))


class SinusoidalPositions(PositionScheme):
    """Sines and cosines of geometrically growing wavelength, at any position."""

    def embed(self, positions: Tensor, dtype: torch.dtype, tap: Tap = SILENT) -> Tensor:
        """Map [B|1, T] -> [B|1, T, D]."""
        spec, width, shifted = self.spec, self.spec.d_summed, positions + self.spec.position_offset
        layout = (spec.sinusoid_layout, spec.sinusoid_ends)
        if spec.input == "patches":
            # Half of the columns tell the row of a patch, half its column; the class token gets zeros.
            columns = spec.image_size[1] // spec.patch_size
            patch = (shifted - int(spec.class_token)).clamp(min=0)
            halves = (patch // columns, width // 2), (patch % columns, width - width // 2)
            waves = torch.cat([sinusoid(where, half, *layout) for where, half in halves], dim=-1)
            waves = waves * (shifted >= spec.class_token)[..., None].to(waves.device)
        else:
            waves = sinusoid(shifted, width, *layout)
        return tap.step("waves", waves.to(positions.device, dtype))


def sinusoid(positions: Tensor, width: int, layout: str = "interleaved", ends: bool = False) -> Tensor:
    """Compute sin(p / 10000^(2i/width)) and its cosine: positions [...] -> [..., width] in float64.

    `interleaved` is the paper's order, sin on even and cos on odd columns. `half` puts all sines first. With
    `ends` the slowest frequency is exactly 1/10,000, as in some translation models, and an odd last column is
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

    def __init__(self, spec: StackSpec) -> None:
        super().__init__(spec)
        if spec.rope_scaling is not None:
            SCALINGS[spec.rope_scaling.kind]  # imported now, since passes may be compiled

    def rotary(self, positions: Tensor, window: int | None, tap: Tap = SILENT) -> Rotary:
        """Compute angles in float64, cosines and sines in float32; layers with a window may have a base."""
        spec, where, device = self.spec, precise(positions), positions.device
        base, scaling, name = spec.rope_base, spec.rope_scaling, "rotary"
        if window is not None and spec.rope_local_base is not None:
            base, scaling, name = spec.rope_local_base, None, "rotary.local"
        frequencies, factor = rope_frequencies(spec.d_rotary, base, scaling, spec.max_positions, where)
        angles = self.angles(where, frequencies)  # B 1 T R/2
        half = spec.rope_layout == "half"
        angles = torch.cat([angles, angles], dim=-1) if half else angles.repeat_interleave(2, dim=-1)
        waves = angles.cos() * factor, angles.sin() * factor
        rotary = Rotary(*(wave.float().to(device) for wave in waves))
        if tap.traced:
            tap.step(name, torch.stack(rotary))
        return rotary

    def angles(self, where: Tensor, frequencies: Tensor) -> Tensor:
        """Map positions [B|1, T] to angles [B|1, 1, T, R/2]."""
        return where[:, None, :, None] * frequencies


def rotate(x: Tensor, rotary: Rotary, layout: str) -> Tensor:
    """Rotate the first R columns of each head: [B, H, T, E] -> [B, H, T, E]."""
    width = rotary.cos.shape[-1]
    rotated, kept = wide(x[..., :width]), x[..., width:]
    if layout == "half":
        a, b = rotated.chunk(2, dim=-1)
        quarter = torch.cat([-b, a], dim=-1)  # each pair rotated by a quarter circle
    else:
        quarter = torch.stack([-rotated[..., 1::2], rotated[..., ::2]], dim=-1).flatten(-2)
    rotated = (rotated * rotary.cos + quarter * rotary.sin).to(x.dtype)
    return rotated if not kept.shape[-1] else torch.cat([rotated, kept], dim=-1)


def rope_frequencies(
    width: int, base: float, scaling: RopeScaling | None, max_positions: int, positions: Tensor
) -> tuple[Tensor, float]:
    """Return radians per position of each pair, [R/2] in float64, and a factor for cosines and sines."""
    pair = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    plain = base**-pair
    if scaling is None:
        return plain, 1.0
    return SCALINGS[scaling.kind](plain, base, scaling, max_positions, positions)


class AlibiPositions(PositionScheme):
    """ALiBi: scores fall linearly with distance, at a slope of its own for each head."""

    def bias(self, queries: Tensor, keys: Tensor, dtype: torch.dtype, tap: Tap = SILENT) -> Tensor:
        """Map [B|1, T], [B|1, S] -> [B|1, H, T, S]."""
        distance = (queries[:, :, None] - keys[:, None, :]).abs()  # B T S
        wide_enough = torch.promote_types(dtype, torch.float32)
        slopes = alibi_slopes(self.spec.n_heads, distance.device).to(wide_enough)
        return tap.step("bias", (-slopes[:, None, None] * distance[:, None]).to(dtype))


def alibi_slopes(n_heads: int, device: torch.device | None = None) -> Tensor:
    """Return 2^(-8/n), 2^(-16/n), ... for the power of two n <= H, then every other slope of 2n: [H]."""
    power = 2 ** int(math.log2(n_heads))
    count = torch.arange(1, 2 * n_heads + 1, dtype=torch.float64, device=device)
    others = count[: 2 * (n_heads - power) : 2]
    return torch.exp2(torch.cat([-8 / power * count[:power], -4 / power * others]))


VARIANTS = "clearhead.variants.positions"
# How angles are stretched beyond the trained length: frequencies and a factor, as `rope_frequencies` returns.
SCALINGS: Registry[Callable[..., tuple[Tensor, float]]] = Registry(
    {kind: f"{VARIANTS}:{kind}_scaling" for kind in ("linear", "dynamic", "llama3", "yarn", "longrope")}
)
POSITIONS: Registry[type[PositionScheme]] = Registry(
    {
        **{"none": PositionScheme, "axes": f"{VARIANTS}:AxesPositions"},  # of `rope_sections`
        "learned": LearnedPositions,
        "sinusoidal": SinusoidalPositions,
        "rope": RopePositions,
        "alibi": AlibiPositions,
        "relative": f"{VARIANTS}:RelativePositions",
        "learned+relative": f"{VARIANTS}:LearnedRelativePositions",
        "disentangled": f"{VARIANTS}:DisentangledPositions",
    }
)
