"""The beginning of the float64 reference: weights, linear layers, norms, embeddings, positions, latents.

Shapes, all of one row: T tokens, D model, C channels, H heads, E head width, V width of a value, R rotated
columns of a head.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from clearhead.core.config import TABLES, ModelConfig, RopeScaling, StackSpec
from clearhead.variants.kinds import Latent

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
}


@dataclass(frozen=True)
class ReferenceRow:
    """One row of input of one stack, and its tokens."""

    stack: str  # encoder or decoder, as its weights are named
    plan: StackSpec
    x: Tensor  # ids [T], pixels [C, height, width], vectors or frames [time, width]
    types: Tensor  # [T]
    heard: Tensor  # [time] 1 for each frame that is no padding
    real: list[bool]  # which tokens are no padding
    positions: list[int]
    order: list[int]  # how many real tokens stand before each
    marked: list[bool] | None  # which tokens the call makes global
    lengths: list[int]  # of the longest row, as far as it was known when each token was read
    axes: list[list[int]] | None = None  # the position of each token on each axis, where the call has them
    carried: dict[str, Tensor] = field(default_factory=dict)  # what layers have read, and the first values

    def part(self, chosen: list[int]) -> "ReferenceRow":
        """Return the row of some of its tokens, each where it was."""
        real, positions = [self.real[t] for t in chosen], [self.positions[t] for t in chosen]
        order, lengths = [self.order[t] for t in chosen], [self.lengths[t] for t in chosen]
        axes = None if self.axes is None else [self.axes[t] for t in chosen]
        return replace(self, real=real, positions=positions, order=order, lengths=lengths, axes=axes)

    @cached_property
    def length(self) -> int:
        """One more than the position of its last real token."""
        return max((place + 1 for place, real in zip(self.positions, self.real) if real), default=0)

    @cached_property
    def distances(self) -> tuple[Tensor, Tensor]:
        """The distances between its tokens, each once [N], and which of them each pair has [T, T]."""
        distances, where = torch.unique(pairs(self.positions, self.positions), return_inverse=True)
        return distances, where


def pairs(queries: list[int], keys: list[int]) -> Tensor:
    """Return the number of each key minus that of each query: [T, S]."""
    return torch.tensor(keys)[None, :] - torch.tensor(queries)[:, None]


class ReferenceInputs:
    """A config and its weights, and the beginning of the forward pass."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], loudness: float = 1.0, learns: bool = False
    ) -> None:
        self.config, self.weights, self.loudness, self.learns = config, weights, loudness, learns

    def weight(self, name: str) -> Tensor:
        """Return one tensor in float64, on the CPU."""
        return self.weights[name].detach().cpu().double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Return W x + b, where there is a b: [T, in] -> [T, out]."""
        y = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Normalise over the last axis."""
        config = self.config
        gain = self.weight(f"{name}.weight") + (1.0 if config.norm_unit_offset else 0.0)
        if config.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        y = x / ((x**2).mean(-1, keepdim=True) + config.norm_eps) ** 0.5 * gain
        return y + self.weight(f"{name}.bias") if config.norm_bias else y

    def row(
        self,
        number: int,
        plan: StackSpec,
        x: Tensor,
        mask: Tensor | None,
        positions: Tensor | None = None,
        types: Tensor | None = None,
        lengths: Tensor | None = None,
        global_mask: Tensor | None = None,
        axes: Tensor | None = None,
    ) -> ReferenceRow:
        """Return one row of a batch; `lengths` [T] is how long it was as each of its tokens was read."""
        config, B = self.config, x.shape[0]
        time = config.n_patches + config.class_token if plan.input == "patches" else x.shape[1]
        heard = torch.ones(B, time) if mask is None else mask.cpu().expand(B, -1).double()
        tokens = heard[:, :: config.conv_stride] if plan.input == "frames" else heard
        real = tokens[number].bool().tolist()
        order = [max(sum(real[: t + 1]) - 1, 0) for t in range(len(real))]
        own, longest = order, int(tokens.sum(1).max())
        if positions is not None:
            own, longest = positions.expand(B, -1)[number].tolist(), int(positions.max()) + 1
        return ReferenceRow(
            stack="decoder" if plan.causal else "encoder",
            plan=plan,
            x=x[number].cpu(),
            types=torch.zeros(time, dtype=torch.long) if types is None else types[number].cpu(),
            heard=heard[number],
            real=real,
            positions=own,
            order=order,
            marked=None if global_mask is None else global_mask[number].tolist(),
            lengths=[longest] * len(own) if lengths is None else lengths.tolist(),
            axes=None if axes is None else axes.expand(B, -1, -1)[number].tolist(),
        )

    def shortcuts(self, name: str, layer: int, x: Tensor, row: ReferenceRow) -> Tensor:
        """Return what a layer reads: the stream, and what earlier layers have read: [T, D] -> [T, D]."""
        layers, row.carried[f"read {layer}"] = row.plan.n_layers, x
        if self.config.mirror_skips and layer >= math.ceil(layers / 2):
            x = x + self.weight(f"{name}.mirror") * row.carried[f"read {layers - layer}"]
        if self.config.input_skips and layer > 0:
            own, first = self.weight(f"{name}.input")
            x = own * x + first * row.carried["read 0"]
        return x

    def values(self, name: str, layer: int, v: Tensor, row: ReferenceRow) -> Tensor:
        """Return the values of a layer: its own, those of the first layer, those of a table: [T, K·V]."""
        first = row.carried.setdefault("values", v)
        if self.config.value_residual and layer > 0:
            own, share = self.weight(f"{name}.values")
            v = own * v + share * first
        if layer in self.config.value_embeddings:
            v = v + self.weight(f"{name}.table.weight")[row.x]
        return v

    def table(self, stack: str) -> str:
        """Return the name of a stack's token table: where the stacks share one, it is the encoder's."""
        both = [spec.input for spec in self.config.stacks] == ["tokens", "tokens"]
        return (
            f"{'encoder' if both and self.config.share_embeddings else stack}.embedding.front.tokens.weight"
        )

    def embed(self, row: ReferenceRow) -> Tensor:
        """Add the embeddings of each token, its segment and its position: [T, D]."""
        config, plan, stack, x = self.config, row.plan, row.stack, row.x
        front = f"{stack}.embedding.front"
        if plan.input == "tokens":
            table = self.weights[self.table(stack)].detach()
            e = table[x.to(table.device)].cpu().double() * config.embedding_scale
            if config.project_tokens:
                e = e @ self.weight(self.table(stack).replace("tokens", "project")).T
            if config.n_types:
                e = e + self.weight(f"{stack}.embedding.types.weight")[row.types]
        elif plan.input == "frames":
            heard = row.heard[:, None]
            e = ACTIVATIONS["gelu"](self.convolve(f"{front}.first", x.double() * heard, 1))
            e = ACTIVATIONS["gelu"](self.convolve(f"{front}.second", e * heard, config.conv_stride))
        else:
            vectors = self.patches(x) if plan.input == "patches" else x
            e = self.linear(f"{front}.project", vectors.double())
            if config.class_token:
                e = torch.cat([self.weight(f"{front}.class_token")[None], e])
        positions = [position + config.position_offset for position in row.positions]
        if config.positions in TABLES:
            own = "" if config.positions == "learned" else ".places"
            e = e + self.weight(f"{stack}.positions{own}.table.weight")[positions]
        elif config.positions == "sinusoidal":
            e = e + torch.tensor([_sinusoid(position, plan) for position in positions], dtype=torch.float64)
        if config.embedding_norm:
            e = self.norm(f"{stack}.embedding.norm", e)
        if plan.embedding_projection:
            e = self.linear(f"{stack}.embedding.project", e)
        return self.with_previous(f"{stack}.previous", e, row) * self.loudness

    def with_previous(self, name: str, e: Tensor, row: ReferenceRow) -> Tensor:
        """Add to the embedding of each real token what the one before it says: [T, D] -> [T, D]."""
        config, mixed, last = self.config, e.clone(), None
        for t in (t for t, real in enumerate(row.real) if real):
            if config.smear_gate and last is not None:
                gate = self.linear(f"{name}.gate", e[t, None, : config.smear_gate])[0]
                mixed[t] += self.weight(f"{name}.share") * e[last] / (1 + (-gate).exp())
            if config.bigrams:
                pair = (0 if last is None else int(row.x[last]) + 1) * 1_000_003 + int(row.x[t])
                mixed[t] += self.weight(f"{name}.table.weight")[pair % config.bigrams]
            last = t
        return mixed

    def patches(self, pixels: Tensor) -> Tensor:
        """Cut an image [C, height, width] into squares, row by row, each flattened: [patches, C·patch²]."""
        size, (_, height, width) = self.config.patch_size, pixels.shape
        corners = [(y, x) for y in range(0, height, size) for x in range(0, width, size)]
        return torch.stack([pixels[:, y : y + size, x : x + size].flatten() for y, x in corners])

    def convolve(self, name: str, x: Tensor, stride: int) -> Tensor:
        """Convolve over time, with zeros before and after: [time, in] -> [time / stride, out]."""
        kernel, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")  # out in width
        width = kernel.shape[2]
        padded = torch.nn.functional.pad(x, (0, 0, width // 2, width // 2))
        return torch.einsum("oik,tik->to", kernel, padded.unfold(0, width, stride)) + bias

    def places(self, row: ReferenceRow, t: int) -> Iterator[int]:
        """Yield the position by which each pair of columns of one token rotates."""
        if row.axes is None:
            return itertools.repeat(row.positions[t])
        pairs = zip(row.axes[t], self.config.rope_sections)
        return itertools.chain.from_iterable(itertools.repeat(place, count) for place, count in pairs)

    def rotated(self, x: Tensor, row: ReferenceRow, window: int | None, layout: str | None = None) -> Tensor:
        """Rotate one head's queries or keys [T, E] by pairs, by an angle that grows with the position."""
        R, half = (
            int(row.plan.d_head * self.config.rope_fraction),
            (layout or self.config.rope_layout) == "half",
        )
        widths = [2 * pairs for pairs in self.config.rope_sections] if self.config.rope_axial else [R]
        speeds = {
            length: (
                [speed for width in widths for speed in _speeds(width, length, self.config, window)[0]],
                _speeds(R, length, self.config, window)[1],
            )
            for length in set(row.lengths)
        }
        first = torch.arange(R // 2) if half else torch.arange(0, R, 2)
        second = first + (R // 2 if half else 1)
        angles = torch.tensor(
            [
                [place * speed for place, speed in zip(self.places(row, t), speeds[length][0])]
                for t, length in enumerate(row.lengths)
            ],
            dtype=torch.float64,
        )
        factor = torch.tensor([[speeds[length][1]] for length in row.lengths], dtype=torch.float64)  # T 1
        cos, sin = angles.cos() * factor, angles.sin() * factor  # T R/2
        rotated = x.clone()
        rotated[:, first] = x[:, first] * cos - x[:, second] * sin
        rotated[:, second] = x[:, first] * sin + x[:, second] * cos
        return rotated


# Positions, one number at a time ----------------------------------------------------------------------------


def _sinusoid(place: int, plan: StackSpec) -> list[float]:
    """Return the sinusoid of a position; a patch has its row in the first half, its column in the second."""
    width = plan.d_summed
    if plan.input != "patches":
        return _wave(place, width, plan)
    if place < plan.class_token:
        return [0.0] * width
    row, column = divmod(place - plan.class_token, plan.image_size[1] // plan.patch_size)
    return _wave(row, width // 2, plan) + _wave(column, width - width // 2, plan)


def _wave(position: int, width: int, plan: StackSpec) -> list[float]:
    """Return `width` sines and cosines of one number."""
    pairs = width // 2 if plan.sinusoid_ends else math.ceil(width / 2)
    last = max(pairs - 1, 1) if plan.sinusoid_ends else width / 2
    angles = [position / 10_000 ** (pair / last) for pair in range(pairs)]
    sines, cosines = [math.sin(angle) for angle in angles], [math.cos(angle) for angle in angles]
    if plan.sinusoid_layout == "half":
        values = sines + cosines[: width // 2]
    else:
        values = [value for both in zip(sines, cosines) for value in both][:width]
    return values + [0.0] * (width - len(values))


def _speeds(R: int, longest: int, config: ModelConfig, window: int | None) -> tuple[list[float], float]:
    """Return the radians per position of each pair, and a factor on cosine and sine.

    `longest` is the length of the longest row at hand: two kinds of scaling go by it.
    """
    base, scaling = config.rope_base, config.rope_scaling
    if window is not None and config.rope_local_base is not None:
        base, scaling = config.rope_local_base, None
    plain = [base ** (-2 * pair / R) for pair in range(R // 2)]
    if scaling is None:
        return plain, 1.0
    trained, factor = scaling.original_positions or config.max_positions, scaling.factor
    match scaling.kind:
        case "linear":
            return [speed / factor for speed in plain], 1.0
        case "dynamic":
            # As if the base were multiplied by stretch ** (R / (R - 2)).
            stretch = factor * max(longest, trained) / trained - (factor - 1)
            return [speed / stretch ** (2 * pair / (R - 2)) for pair, speed in enumerate(plain)], 1.0
        case "llama3":
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            kept = [(trained * speed / (2 * math.pi) - low) / (high - low) for speed in plain]
            return _mixed(plain, kept, factor), 1.0
        case "yarn":
            speeds = _mixed(plain, _yarn(R, base, trained, scaling), factor)
            return speeds, scaling.attention_factor or _yarn_factor(scaling)
    divisors = scaling.long_factor if longest > trained else scaling.short_factor
    assert divisors is not None
    growth = factor if factor != 1 else config.max_positions / trained
    usual = math.sqrt(1 + math.log(growth) / math.log(trained)) if growth > 1 else 1.0
    return [speed / divisor for speed, divisor in zip(plain, divisors)], scaling.attention_factor or usual


def _mixed(plain: list[float], kept: list[float], factor: float) -> list[float]:
    """Mix speeds with the same divided by the factor; 1 and more is kept as it is, 0 and less is divided."""
    shares = [min(max(share, 0.0), 1.0) for share in kept]
    return [share * speed + (1 - share) * speed / factor for speed, share in zip(plain, shares)]


def _yarn(R: int, base: float, trained: int, scaling: RopeScaling) -> list[float]:
    """Keep pairs that rotate over beta_fast times in the trained length; slow those below beta_slow."""
    first, last = (
        R * math.log(trained / (2 * math.pi * rotations)) / (2 * math.log(base))
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    return [1 - (pair - first) / (last - first if first != last else 0.001) for pair in range(R // 2)]


def _yarn_factor(scaling: RopeScaling) -> float:
    grown = max(math.log(scaling.factor), 0.0) / 10
    if scaling.mscale and scaling.mscale_all_dim:
        return (1 + scaling.mscale * grown) / (1 + scaling.mscale_all_dim * grown)
    return 1 + grown


def slope(head: int, n_heads: int) -> float:
    """Return ALiBi's slope: 2^(-8/n), 2^(-16/n), ...

    for a power of two n; the heads above it take every other one of 2n.
    """
    n = 1 << (n_heads.bit_length() - 1)
    return math.pow(2, -8 * (head + 1) / n) if head < n else math.pow(2, -4 * (2 * (head - n) + 1) / n)


def bucket(distance: int, both_sides: bool, config: ModelConfig) -> int:
    """Return the row of the relative table for a key this far right of its query (negative: left)."""
    count = config.relative_buckets // (2 if both_sides else 1)
    first = count if both_sides and distance > 0 else 0
    away = abs(distance) if both_sides else max(-distance, 0)
    exact = count // 2
    if away < exact:
        return first + away
    steps = math.log(away / exact) / math.log(config.relative_max_distance / exact) * (count - exact)
    return first + min(exact + int(steps), count - 1)


MASK = 0x7FFFFFFF


def drawn_by(seed: int, block: int, number: int) -> int:
    """Mix three numbers into one below 2^31."""
    x = (block * 0x9E3779B1 + number * 0x85EBCA77 + seed * 0xC2B2AE3D + 1) & MASK
    x = ((x ^ x >> 15) * 0x2C1B3C6D) & MASK
    x = ((x ^ x >> 12) * 0x297A2D39) & MASK
    return (x ^ x >> 15) & MASK


# Latent attention -------------------------------------------------------------------------------------------


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
