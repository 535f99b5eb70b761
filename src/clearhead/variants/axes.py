"""Positions on several axes (mrope): time, height and width of a token of an image; of text, one on all.

A call gives them as `axes`, and caches keep them with the tokens. So what is read after them counts on by
itself, in generation, beams, drafts and batches. Where no token has axes, angles are those of plain RoPE.

Shapes: B batch, T length, A axes, R rotated columns of a head.
"""

import torch
from torch import Tensor

from clearhead.core.masks import TokenInfo, next_order
from clearhead.core.positions import RopePositions, rope_frequencies


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
