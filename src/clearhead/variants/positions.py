"""Positions by distance: a learned bias for each bucket of distances, or disentangled attention (DeBERTa).

Scalings of rotary positions: each maps `plain`, the radians of each pair without scaling, to those with it;
`most` is the model's number of positions, `where` are the positions of a pass.

In disentangled attention what a token says and how far away it stands meet in the scores. Each distance, up
to its sign and in buckets, has a vector. A layer projects these vectors as it projects the tokens. The score
of a query i and a key j at distance d is then

    (q_i · k_j  +  q_i · k(d)  +  q(d) · k_j) · scale        content, "c2p", "p2c"

On several axes (mrope) a token of an image has a position in time, height and width; text has one on all. A
call gives them as `axes`, and caches keep them with the tokens. So what is read after them counts on by
itself, in generation, beams, drafts and batches. Where no token has axes, angles are those of plain RoPE.

Shapes: B batch, T query length, S key length, D model, H heads, K key/value heads, E head width, R distances,
A axes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import masks, norms
from clearhead.core.attention import Attention, of_heads
from clearhead.core.cache import LayerKV
from clearhead.core.config import RopeScaling, StackSpec
from clearhead.core.config.fields import Fields
from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.masks import TokenInfo, next_order
from clearhead.core.positions import (
    LearnedPositions,
    PositionScheme,
    Relative,
    RopePositions,
    rope_frequencies,
)
from clearhead.core.taps import SILENT, Tap
from clearhead.variants.steps import INDEX, Pass, Step, attention_steps, learned_position_steps, norm_step


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
        self.places = LearnedPositions(spec)  # a name in checkpoints

    def embed(self, positions: Tensor, dtype: torch.dtype, tap: Tap = SILENT) -> Tensor:
        """Look up rows of the table, past its offset."""
        return self.places.embed(positions, dtype, tap.part("places"))

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, tokens: int) -> Iterator[Step]:
        """Yield both tables."""
        yield from learned_position_steps(spec, run, f"{name}.places", tokens)
        yield from RelativePositions.steps(spec, run, name, tokens)


def relative_mistakes(config: Fields, stacks: Sequence[StackSpec]) -> Iterator[str]:
    """Yield what is wrong with the buckets of relative positions."""
    buckets, most = config.relative_buckets, 2 * config.relative_max_distance - 1
    if not 4 <= buckets <= most:
        yield f"relative_buckets {buckets} must lie between 4 and {most}, or relative_max_distance rise"


class DisentangledPositions(PositionScheme):
    """A learned vector for each bucket of distances, for every layer to project."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__(spec)
        self.table = nn.Embedding(spec.relative_buckets, spec.d_model)
        self.norm = norms.make_norm(spec.norm, spec.d_model) if spec.relative_norm else None

    def relative(self, queries: Tensor, keys: Tensor, tap: Tap = SILENT) -> Relative:
        """Return the vectors [R, D] and which one each pair has: [B|1, T], [B|1, S] -> [B|1, T, S]."""
        spec, vectors = self.spec, self.table.weight
        if self.norm is not None:
            vectors = tap.step("norm", self.norm(vectors))
        vectors = nnf.dropout(vectors, spec.dropout, self.training)
        distance = queries[:, :, None] - keys[:, None, :]
        which = signed_bucket(distance, spec.relative_buckets // 2, spec.relative_max_distance)
        return Relative(vectors, tap.step("which", which))

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, tokens: int) -> Iterator[Step]:
        """Yield the table, its norm, and the bucket of each pair of tokens."""
        R, D = spec.relative_buckets, spec.d_model
        yield Step(f"{name}.table", "positions", R * D)
        if spec.relative_norm:
            yield norm_step(f"{name}.norm", spec.norm, run, R, D)
        yield Step(f"{name}.which", "positions", kept=tokens**2 * INDEX * len(spec.whole_kinds))


def signed_bucket(distance: Tensor, span: int, furthest: int) -> Tensor:
    """Return the index into the 2 `span` embeddings for each distance, query minus key.

    Within half the span every distance has its own; beyond, buckets grow logarithmically up to `furthest`.
    Where `furthest` is the span itself, every distance within it has its own.
    """
    if furthest != span:
        half = span // 2
        away = torch.where(distance.abs() < half, half - 1, distance.abs()).float()
        grown = torch.log(away / half) / math.log((furthest - 1) / half) * (half - 1)
        distance = torch.where(away <= half, distance, (grown.ceil() + half).long() * distance.sign())
    return (distance + span).clamp(0, 2 * span - 1)


class DisentangledAttention(Attention):
    """Attention that also dots queries and keys with projected embeddings of relative distances (DeBERTa)."""

    def __init__(self, spec: StackSpec, name: str, kind: Kind = FULL) -> None:
        super().__init__(spec, name, kind)
        self.terms = spec.relative_terms

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: masks.View, layer_kv: LayerKV | None, tap: Tap, x: Tensor
    ) -> Tensor:
        """Attend with queries [B, H, T, E] to keys and values [B, K, S, E]; see `Attention.attend`."""
        if layer_kv is not None:
            k, v = layer_kv.update(k, v)
        assert view.relative is not None
        bias = tap.step("by_distance", self.by_distance(q, k, view.relative))
        by_call = of_heads(view.bias, list(self.heads))
        bias = bias if by_call is None else bias + by_call
        return super().attend(q, k, v, replace(view, bias=bias), None, tap, x)

    def by_distance(self, q: Tensor, k: Tensor, relative: Relative) -> Tensor:
        """Return what the distance of each pair adds to its score: [B, H, T, S]."""
        vectors, H, K = relative.vectors.to(q.dtype)[None], self.n_heads, self.n_kv_heads
        by_query = self.split("q", self.q(vectors), H, self.q_norm, SILENT)  # 1 H R E
        by_key = self.split("k", self.k(vectors), K, self.k_norm, SILENT)  # 1 K R E
        by_key, k = (x.repeat_interleave(H // K, 1) for x in (by_key, k))
        by_term: list[Tensor] = []
        which = relative.which[:, None].expand(q.shape[0], H, -1, -1)  # B H T S
        if self.terms != "p2c":
            by_term.append((q @ by_key.transpose(-2, -1)).gather(-1, which))
        if self.terms != "c2p":
            met = (k @ by_query.transpose(-2, -1)).gather(-1, which.transpose(-2, -1))  # B H S T
            by_term.append(met.transpose(-2, -1))
        return torch.stack(by_term).sum(0) * self.scale

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, T: int, kind: Kind) -> Iterator[Step]:
        """Yield the steps of an attention of T tokens, and of its relative-distance terms."""
        B, H, K, E = run.batch, len(spec.heads_of(name)), spec.kv_heads_of(name), spec.d_head
        R, D, both = spec.relative_buckets, spec.d_model, 2 if spec.relative_terms == "both" else 1
        for step in attention_steps(spec, run, name, T, T, kind, "attention"):
            if step.name == f"{name}.scores":
                for part, heads in (("q", H), ("k", K)):
                    yield Step(f"{name}.{part}_distance", "attention", m=R, n=heads * E, k=D)
                kept = B * H * T * T * (both * INDEX + run.size) + B * T * (H + K) * E * run.size
                yield Step(f"{name}.by_distance", "attention", m=T, n=R, k=E, count=both * B * H, kept=kept)
            yield step


def disentangled_mistakes(config: Fields, stacks: Sequence[StackSpec]) -> Iterator[str]:
    """Yield what is wrong with disentangled positions."""
    buckets, furthest = config.relative_buckets, config.relative_max_distance
    span = buckets // 2
    if config.family != "encoder":
        family = f"family is {config.family}: choose rope or relative"
        yield f"positions disentangled is for encoders, and {family}"
    if buckets % 2 or span < 2 or not (furthest == span or furthest > span // 2 + 1):
        yield (
            f"relative_buckets {buckets} must be even, 4 at least, and half of it be relative_max_distance "
            f"{furthest}, or a quarter of it lie below that by 2 at least"
        )


Scaled = tuple[Tensor, float]  # radians per position of each pair, [R/2] in float64; a factor for cos and sin


def linear_scaling(plain: Tensor, base: float, scaling: RopeScaling, most: int, where: Tensor) -> Scaled:
    """Interpolate: every angle is divided by the factor."""
    return plain / scaling.factor, 1.0


def dynamic_scaling(plain: Tensor, base: float, scaling: RopeScaling, most: int, where: Tensor) -> Scaled:
    """Let the base grow with the length, once it passes the trained length."""
    width, trained = 2 * len(plain), scaling.original_positions or most
    pair = torch.arange(0, width, 2, dtype=torch.float64, device=plain.device) / width
    length = (where.max() + 1).clamp(min=trained)
    growth = scaling.factor * length / trained - (scaling.factor - 1)
    return (base * growth.double() ** (width / (width - 2))) ** -pair, 1.0


def llama3_scaling(plain: Tensor, base: float, scaling: RopeScaling, most: int, where: Tensor) -> Scaled:
    """Interpolate long waves, keep short ones, blend those between."""
    rotations = (scaling.original_positions or most) * plain / (2 * math.pi)  # over the trained length
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling.factor, 1.0


def yarn_scaling(plain: Tensor, base: float, scaling: RopeScaling, most: int, where: Tensor) -> Scaled:
    """Keep pairs that rotate often, interpolate pairs that rotate rarely, with a linear ramp between."""
    width, trained = 2 * len(plain), scaling.original_positions or most

    def pair_with(rotations: float) -> float:
        """Return the index of the pair that makes this many rotations over the trained length."""
        return width * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    steps = torch.arange(width // 2, dtype=torch.float64, device=plain.device)
    interpolate = ((steps - low) / ((high - low) or 0.001)).clamp(0, 1)
    growth = math.log(max(scaling.factor, 1))
    factor = 0.1 * growth + 1
    if scaling.mscale and scaling.mscale_all_dim:
        factor = (0.1 * scaling.mscale * growth + 1) / (0.1 * scaling.mscale_all_dim * growth + 1)
    if scaling.attention_factor is not None:
        factor = scaling.attention_factor
    return plain / scaling.factor * interpolate + plain * (1 - interpolate), factor


def longrope_scaling(plain: Tensor, base: float, scaling: RopeScaling, most: int, where: Tensor) -> Scaled:
    """Divide each pair by a number of its own: one within the trained length, one beyond it."""
    trained = scaling.original_positions or most
    stretch = scaling.factor if scaling.factor != 1 else most / trained
    usual = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(trained))
    short, long = (plain.new_tensor(divisors) for divisors in (scaling.short_factor, scaling.long_factor))
    return plain / torch.where(where.max() + 1 > trained, long, short), scaling.attention_factor or usual


class AxesPositions(RopePositions):
    """Rotary positions whose pairs go by axes, in `rope_sections`."""

    def angles(self, where: Tensor, frequencies: Tensor) -> Tensor:
        """Map positions [B|1, T], or on each axis [B|1, T, A], to angles [B|1, 1, T, R/2]."""
        sections, base = self.spec.rope_sections, self.spec.rope_base
        if self.spec.rope_axial:
            each = [rope_frequencies(2 * pairs, base, None, 0, where)[0] for pairs in sections]
            frequencies = torch.cat(each)
        if where.ndim == 2:
            return super().angles(where, frequencies)
        axis_of_pair = [axis for axis, pairs in enumerate(sections) for _ in range(pairs)]
        return where[:, None, :, axis_of_pair] * frequencies


def on_axes(tokens: TokenInfo, count: int) -> Tensor:
    """Return the position of each token on each of `count` axes: [B|1, T, A]."""
    return tokens.positions[..., None].expand(-1, -1, count) if tokens.axes is None else tokens.axes


def joined(a: TokenInfo, b: TokenInfo, batch: int) -> Tensor:
    """Return the axes of the tokens of `a` followed by those of `b`: [B, T, A]."""
    count = next(tokens.axes.shape[-1] for tokens in (a, b) if tokens.axes is not None)
    return torch.cat([on_axes(tokens, count).expand(batch, -1, -1) for tokens in (a, b)], dim=1)


def continued(before: TokenInfo, order: Tensor) -> Tensor:
    """Return positions on all axes that count on from the highest one so far: [B|1, T] -> [B|1, T, A]."""
    assert before.axes is not None
    highest = torch.where(before.real_mask(), before.axes.amax(-1), -1).amax(1, keepdim=True)
    after = order - next_order(before, order.shape[0], order.device) + highest + 1
    return after[..., None].expand(-1, -1, before.axes.shape[-1])
