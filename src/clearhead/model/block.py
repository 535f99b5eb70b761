"""The block: attention, perhaps cross-attention, feed-forward, each added to the residual stream.

Where the norm stands is the whole difference between the residual layouts:

    pre         x + f(norm(x))                      steady gradients; needs a norm after the last block
    post        norm(x + f(x))                      the original
    sandwich    x + norm'(f(norm(x)))
    output      x + norm'(f(x))
    parallel    x + attention(norm(x)) + feedforward(norm(x))

Shapes: B batch, T query length, S key length, D model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.config import ModelConfig, StackPlan
from clearhead.model.attention import Attention
from clearhead.model.cache import CrossKeys, LayerKeys
from clearhead.model.experts import Experts
from clearhead.model.feedforward import FeedForward
from clearhead.model.masks import View
from clearhead.model.norms import make_norm
from clearhead.model.taps import SILENT, Tap


class Residual(nn.Module):
    """How one sublayer joins the residual stream: its norms, its dropout, its chance of being skipped."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        place = config.norm_position
        self.before = make_norm(config) if place in ("pre", "sandwich") else None
        self.inside = make_norm(config) if place in ("sandwich", "output") else None
        self.after = make_norm(config) if place == "post" else None
        self.scale, self.dropout, self.skip = config.residual_scale, config.dropout, config.layer_drop

    def read(self, x: Tensor) -> Tensor:
        """What the sublayer gets to see: [B, T, D] -> [B, T, D]."""
        return self.before(x) if self.before is not None else x

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """The stream `x` with the sublayer's answer `y` added: [B, T, D] twice -> [B, T, D]."""
        if self.inside is not None:
            y = self.inside(y)
        if self.scale != 1:
            y = y * self.scale
        if self.training:
            y = self._drop(y)
        x = x + y
        return self.after(x) if self.after is not None else x

    def _drop(self, y: Tensor) -> Tensor:
        y = nnf.dropout(y, self.dropout)
        if not self.skip:
            return y
        kept = torch.rand(y.shape[0], 1, 1, device=y.device) >= self.skip
        return y * kept / (1 - self.skip)


class Block(nn.Module):
    """One layer. An encoder's and a decoder's differ by what the view lets them see, and by having cross-attention."""

    def __init__(self, config: ModelConfig, plan: StackPlan, name: str) -> None:
        super().__init__()
        self.attention = Attention(config, plan, f"{name}.attention")
        self.attention_residual = Residual(config)
        self.cross = Attention(config, plan, f"{name}.cross") if plan.cross else None
        self.cross_residual = Residual(config) if plan.cross else None
        self.feedforward = Experts(config, plan.d_ff) if config.n_experts else FeedForward(config, plan.d_ff)
        self.parallel, one_norm = config.parallel, config.parallel and config.parallel_norms == 1
        self.feedforward_residual = Residual(config)
        if one_norm:
            self.feedforward_residual.before = None

    def forward(
        self,
        x: Tensor,
        view: View,
        memory: Tensor | None = None,
        cross_view: View | None = None,
        keys: LayerKeys | None = None,
        cross_keys: CrossKeys | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]; `memory` [B, S, D] is what cross-attention reads, unless `cross_keys` hold it already."""
        x = tap("resid_pre", x)
        if self.parallel:
            return tap("resid_post", self._both(x, view, keys, tap))
        residual = self.attention_residual
        x = residual.add(x, self.attention(residual.read(x), view, None, keys, tap.inside("attention")))
        if self.cross is not None and self.cross_residual is not None and cross_view is not None:
            residual = self.cross_residual
            x = residual.add(
                x, self.cross(residual.read(x), cross_view, memory, cross_keys, tap.inside("cross"))
            )
        x = tap("resid_mid", x)
        residual = self.feedforward_residual
        x = residual.add(x, self.feedforward(residual.read(x), tap.inside("feedforward")))
        return tap("resid_post", x)

    def _both(self, x: Tensor, view: View, keys: LayerKeys | None, tap: Tap) -> Tensor:
        """Attention and feed-forward side by side, reading one norm's output or one each."""
        read = self.attention_residual.read(x)
        attended = self.attention(read, view, None, keys, tap.inside("attention"))
        shared = self.feedforward_residual.before is None
        expanded = self.feedforward(
            read if shared else self.feedforward_residual.read(x), tap.inside("feedforward")
        )
        return self.feedforward_residual.add(self.attention_residual.add(x, attended), expanded)
