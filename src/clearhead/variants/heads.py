"""Heads other than a language model's: an embedding of the whole input, classes of it, classes of each token.

Shapes: B batch, T length, D model, F feed-forward, C classes.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import feedforward, heads, norms
from clearhead.core.config import HeadSpec
from clearhead.core.heads import Head
from clearhead.core.taps import SILENT, Tap
from clearhead.variants.steps import ACTIVATION_COPIES, Pass, Step, linear_step, norm_step


class PooledHead(Head):
    """The base of heads that may have a dense layer, an activation and a norm before what they say."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec)
        D, dense, normed = spec.d_model, spec.pooler != "none", spec.pooler_norm
        self.pooler = nn.Linear(D, D, bias=spec.pooler_bias) if dense else None
        self.bend = feedforward.ACTIVATIONS.get(spec.pooler, torch.tanh)
        self.pooler_norm = norms.make_norm(spec.norm, D) if normed else None

    def bent(self, x: Tensor, tap: Tap) -> Tensor:
        """Map [..., D] -> [..., D], unchanged where there is no such layer."""
        if self.pooler is None:
            return x
        x = tap.step("bent", self.bend(tap.step("pooler", self.pooler(x))))
        return x if self.pooler_norm is None else tap.step("pooler_norm", self.pooler_norm(x))

    @staticmethod
    def bent_steps(spec: HeadSpec, run: Pass, rows: int, kept: int) -> Iterator[Step]:
        """Yield that layer on `rows` vectors, of which `kept` bytes are held."""
        if spec.pooler != "none":
            yield linear_step(
                "head.pooler", "head", rows, spec.d_model, spec.d_model, spec.pooler_bias, kept=kept
            )
        if spec.pooler_norm:
            yield norm_step("head.pooler_norm", spec.norm, run, rows, spec.d_model)


class EmbeddingHead(PooledHead):
    """One vector for the whole input: pooled, perhaps with a dense layer, perhaps scaled to length one."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec)
        self.pooling, self.dropout, self.normalise = spec.pooling, spec.dropout, spec.normalise

    def forward(self, hidden: Tensor, real: Tensor | None, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, D]."""
        pooled = self.pool(hidden, real, tap)
        return tap.step("normalised", nnf.normalize(pooled, dim=-1)) if self.normalise else pooled

    def pool(self, hidden: Tensor, real: Tensor | None, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, D]."""
        pooled = self.bent(tap.step("pooled", heads.pool(hidden, real, self.pooling)), tap)
        return nnf.dropout(pooled, self.dropout, self.training)

    @staticmethod
    def steps(spec: HeadSpec, run: Pass, tokens: int) -> Iterator[Step]:
        """Yield the pooler and, for a classifier, the output layer."""
        B, D = run.batch, spec.d_model
        copied = spec.pooling == "mean" or (spec.dropout and spec.pooler == "none")
        read = (B if copied else B * tokens) * D * run.size  # the state of one token is a view: all are kept
        yield from PooledHead.bent_steps(spec, run, B, read)
        if spec.pooler != "none":
            read = B * D * run.size
        if spec.head == "classifier":
            yield linear_step("head.out", "head", B, D, spec.n_classes, spec.bias, kept=read)


class ClassifierHead(EmbeddingHead):
    """A score for each class of the whole input."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec)
        self.out = nn.Linear(spec.d_model, spec.n_classes, bias=spec.bias)

    def forward(self, hidden: Tensor, real: Tensor | None, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, C]."""
        return tap.step("out", self.out(self.pool(hidden, real, tap)))


class TokenHead(PooledHead):
    """A score for each class of every token; for spans, the two classes are "begins here" and "ends here"."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec)
        self.dropout, D, layer = spec.dropout, spec.d_model, spec.head_layer
        self.activation = feedforward.ACTIVATIONS[spec.activation]
        self.up = nn.Linear(D, spec.d_ff) if layer else None
        self.down = nn.Linear(spec.d_ff, D) if layer else None
        self.norm = norms.make_norm(spec.norm, D) if layer else None
        self.out = nn.Linear(D, spec.n_classes, bias=spec.bias)

    def forward(self, hidden: Tensor, real: Tensor | None, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, T, C]."""
        bent = self.bent(hidden, tap)
        x = nnf.dropout(bent, self.dropout, self.training)
        if self.up is not None and self.down is not None and self.norm is not None:
            wide = tap.step("activated", self.activation(tap.step("up", self.up(x))))  # B T F
            x = tap.step("norm", self.norm(tap.step("added", bent + tap.step("down", self.down(wide)))))
        return tap.step("out", self.out(x))

    @staticmethod
    def steps(spec: HeadSpec, run: Pass, tokens: int) -> Iterator[Step]:
        """Yield the layer before the output layer, and that."""
        rows, D, F = run.batch * tokens, spec.d_model, spec.d_ff
        each = run.size + (1 if spec.dropout else 0)
        yield from PooledHead.bent_steps(spec, run, rows, 2 * rows * D * run.size)
        if spec.head_layer:
            copies = 1 + ACTIVATION_COPIES.get(spec.activation, 1)
            yield linear_step("head.up", "head", rows, D, F, True, kept=rows * D * each)
            yield linear_step("head.down", "head", rows, F, D, True, kept=rows * F * copies * run.size)
            yield norm_step("head.norm", spec.norm, run, rows, D)
            each = run.size
        yield linear_step("head.out", "head", rows, D, spec.n_classes, spec.bias, kept=rows * D * each)
