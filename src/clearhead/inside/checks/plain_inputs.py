"""The beginning of `plainly`: weights in float64, linear layers, norms, activations and embeddings.

Shapes, all of one row: T tokens, D model, C channels.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.config import ModelConfig, StackSpec
from clearhead.inside.checks.plain_positions import sinusoids

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


@dataclass(frozen=True)
class PlainTokens:
    """The tokens of one row: which are real, where each stands, how many real ones stand before it."""

    real: list[bool]
    positions: list[int]
    order: list[int]
    longest: int  # of all rows: the highest position, and one


class PlainInputs:
    """A config and its weights, and the beginning of the forward pass."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], loudness: float = 1.0) -> None:
        self.config, self.weights, self.loudness = config, weights, loudness

    def weight(self, name: str) -> Tensor:
        """Return one tensor in float64, on the CPU."""
        return self.weights[name].detach().cpu().double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Return W x + b, where there is a b: [T, in] -> [T, out]."""
        y = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Normalise over the last axis."""
        config, gain = self.config, self.weight(f"{name}.weight")
        if config.norm_unit_offset:
            gain = 1 + gain
        if config.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        y = x / ((x**2).mean(-1, keepdim=True) + config.norm_eps) ** 0.5 * gain
        return y + self.weight(f"{name}.bias") if config.norm_bias else y

    def tokens(
        self, plan: StackSpec, x: Tensor, mask: Tensor | None, positions: Tensor | None, longest: int
    ) -> PlainTokens:
        """Return the tokens that one row of input becomes."""
        config, T = self.config, x.shape[0]
        if plan.input == "patches":
            T = config.n_patches + config.class_token
        elif plan.input == "frames":
            T, mask = math.ceil(T / config.conv_stride), None if mask is None else mask[:: config.conv_stride]
        real = [True] * T if mask is None else [bool(value) for value in mask]
        order = [max(sum(real[: t + 1]) - 1, 0) for t in range(T)]
        return PlainTokens(real, positions.tolist() if positions is not None else order, order, longest or T)

    def table(self, stack: str) -> str:
        """Return the name of a stack's token table: where the stacks share one, it is the encoder's."""
        config = self.config
        both = config.encoder is not None and config.decoder is not None and config.encoder.input == "tokens"
        return f"{'encoder' if both and config.share_embeddings else stack}.embedding.front.tokens.weight"

    def embed(
        self,
        stack: str,
        plan: StackSpec,
        x: Tensor,
        tokens: PlainTokens,
        mask: Tensor | None,
        types: Tensor | None,
    ) -> Tensor:
        """Add the embeddings of each token, its segment and its position: [T, D]."""
        config, front = self.config, f"{stack}.embedding.front"
        if plan.input == "tokens":
            table = self.weights[self.table(stack)].detach()
            e = table[x.to(table.device)].cpu().double() * config.embedding_scale
            if config.n_types:
                e = (
                    e
                    + self.weight(f"{stack}.embedding.types.weight")[
                        torch.zeros_like(x) if types is None else types
                    ]
                )
        elif plan.input == "patches":
            e = self.linear(f"{front}.project", self.patches(x.double()))
            if config.class_token:
                e = torch.cat([self.weight(f"{front}.class_token")[None], e])
        elif plan.input == "vectors":
            e = self.linear(f"{front}.project", x.double())
        else:
            silence = (
                torch.ones(x.shape[0], 1, dtype=torch.float64) if mask is None else mask[:, None].double()
            )
            e = ACTIVATIONS["gelu"](self.convolve(f"{front}.first", x.double() * silence, 1))
            e = ACTIVATIONS["gelu"](self.convolve(f"{front}.second", e * silence, config.conv_stride))
        if config.positions == "learned":
            e = (
                e
                + self.weight(f"{stack}.positions.table.weight")[
                    [p + config.position_offset for p in tokens.positions]
                ]
            )
        elif config.positions == "sinusoidal":
            e = e + sinusoids(tokens.positions, plan.d_embedding, config, plan.input == "patches")
        if config.embedding_norm:
            e = self.norm(f"{stack}.embedding.norm", e)
        if config.embedding_projection and plan.input == "tokens":
            e = self.linear(f"{stack}.embedding.project", e)
        return e * self.loudness

    def patches(self, pixels: Tensor) -> Tensor:
        """Cut an image [C, height, width] into squares, row by row, each flattened: [patches, C·patch²]."""
        size, (_, height, width) = self.config.patch_size, pixels.shape
        corners = [(y, x) for y in range(0, height, size) for x in range(0, width, size)]
        return torch.stack([pixels[:, y : y + size, x : x + size].flatten() for y, x in corners])

    def convolve(self, name: str, x: Tensor, stride: int) -> Tensor:
        """Convolve over time, with zeros before and after: [time, in] -> [time / stride, out]."""
        kernel, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")  # out in width
        reach = kernel.shape[2] // 2
        padded = torch.cat([x.new_zeros(reach, x.shape[1]), x, x.new_zeros(reach, x.shape[1])])
        starts = range(0, x.shape[0], stride)
        return torch.stack(
            [
                torch.einsum("oik,ki->o", kernel, padded[start : start + kernel.shape[2]]) + bias
                for start in starts
            ]
        )
