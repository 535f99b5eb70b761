"""Positions by distance: a learned bias for each bucket of distances, alone or beside a table of positions.

Shapes: B batch, T query length, S key length, D model, H heads.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from clearhead.core.config import StackSpec
from clearhead.core.positions import POSITIONS, LearnedPositions, PositionScheme
from clearhead.core.steps import INDEX, Pass, Step
from clearhead.core.taps import SILENT, Tap


class RelativePositions(PositionScheme):
    """A learned bias per head and bucket of distance; one table serves every layer of the stack."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__(spec)
        self.table = nn.Embedding(spec.relative_buckets, spec.n_heads)

    def bias(self, queries: Tensor, keys: Tensor, dtype: torch.dtype, tap: Tap = SILENT) -> Tensor:
        """Map [B|1, T], [B|1, S] -> [B|1, H, T, S]."""
        spec, distance = self.spec, keys[:, None, :] - queries[:, :, None]  # B T S
        buckets = relative_bucket(
            distance, not spec.causal, spec.relative_buckets, spec.relative_max_distance
        )
        return tap.step("bias", self.table(buckets).permute(0, 3, 1, 2).to(dtype))  # B H T S

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, tokens: int) -> Iterator[Step]:
        """Yield the table, which keeps the bucket of each pair of tokens, once for each window."""
        kept = tokens**2 * INDEX * len(spec.whole_kinds)
        yield Step(f"{name}.table", "positions", spec.relative_buckets * spec.n_heads, kept=kept)


def relative_bucket(distance: Tensor, both_sides: bool, n_buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each signed distance, key minus query: exact when near, logarithmic when far."""
    bucket = torch.zeros_like(distance)
    if both_sides:
        n_buckets //= 2
        bucket, distance = (distance > 0) * n_buckets, distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = n_buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (n_buckets - exact)).long()
    return bucket + torch.where(distance < exact, distance, far.clamp(max=n_buckets - 1))


class LearnedRelativePositions(RelativePositions):
    """A learned vector for each position, and a learned bias for each bucket of distances."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__(spec)
        self.places = LearnedPositions(spec)

    def embed(self, positions: Tensor, dtype: torch.dtype, tap: Tap = SILENT) -> Tensor:
        """Look up rows of the table, past its offset."""
        return self.places.embed(positions, dtype, tap.part("places"))

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, tokens: int) -> Iterator[Step]:
        """Yield both tables."""
        yield from LearnedPositions.steps(spec, run, f"{name}.places", tokens)
        yield from RelativePositions.steps(spec, run, name, tokens)


RELATIVE: dict[str, type[PositionScheme]] = {
    **POSITIONS,
    "relative": RelativePositions,
    "learned+relative": LearnedRelativePositions,
}
