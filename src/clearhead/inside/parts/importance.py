"""Importance of heads and feed-forwards: how much the loss depends on each.

    importance(m, "test.txt").heads.values                # layer x head, all by one backward pass
    ablate_each(m, "test.txt").values                     # the same by a pass without each head

By gradient (Michel et al., 2019), each head's `z` is multiplied by a mask that is one, so nothing changes,
and the gradient with respect to that mask is taken. The mask has one entry for each row of a batch, so that
rows whose gradients have opposite signs do not cancel:

    importance = (sum over rows of |d loss of the row / d mask|) / number of targets

Shapes: B rows, T length, H heads, E head width, D model, L attentions of a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.taps import edit
from clearhead.core.transformer import evaluating
from clearhead.inside import inputs, results
from clearhead.inside.names import AttentionHead, all_heads, attentions, layer_names
from clearhead.inside.parts.ablate import (
    How,
    Means,
    OnProgress,
    ablating,
    mean_activations,
    means_for,
    opened,
)
from clearhead.inside.parts.examples import Data, judge
from clearhead.learn.tasks.table import TASKS


@dataclass(frozen=True)
class HeadTable(results.Result):
    """One number for each head: a row for each attention in the order of the forward pass."""

    quantity: str  # what the numbers are
    rows: tuple[str, ...]  # "0", "1", ..., "encoder.0", ..., "cross.0", ...
    values: results.Array  # L, most heads; NaN where an attention has fewer heads

    @classmethod
    def of(cls, config: ModelConfig, quantity: str, numbers: Mapping[AttentionHead, float]) -> Self:
        """Return the table of one number for each head."""
        rows = [[numbers[head] for head in one.heads] for one in attentions(config)]
        return cls(quantity, tuple(map(str, attentions(config))), results.filled(rows))

    def numbers(self, config: ModelConfig) -> dict[AttentionHead, float]:
        """Return one number for each head of the model that the table is of."""
        return {
            head: float(value)
            for one, row in zip(attentions(config), self.values)
            for head, value in zip(one.heads, row)
        }


@dataclass(frozen=True)
class Importance(results.Result):
    """How much the loss depends on each head and each feed-forward."""

    heads: HeadTable
    feedforwards: Mapping[str, float]  # by layer: "0", "1", ..., "encoder.0", ...


def importance(
    m: inputs.AnyModel,
    data: Data,
    normalise: bool = False,
    on_progress: OnProgress = lambda stage, done, total: None,
    **options: Any,
) -> Importance:
    """Return |d loss / d mask| of every head and feed-forward, averaged over the rows of some data.

    Args:
        m: what `load` gave; or a bare model, with `Examples`.
        data: what `examples_from` takes, and `options` as there.
        normalise: divide the heads of each attention by their L2 norm, so that layers can be compared.
        on_progress: told how many batches are done.
    """
    model, examples = opened(m, data, options)
    all_heads(model.config)  # refuses a model without any
    masks, sums = dict[str, Tensor](), dict[str, Tensor]()

    def masked(x: Tensor, name: str) -> Tensor:
        # A head's z by ones B H 1 1, a feed-forward's output by ones B 1 1.
        shape = x.shape[:2] if name.endswith(".z") else x.shape[:1]
        masks[name] = torch.ones((*shape, 1, 1), dtype=x.dtype, device=x.device, requires_grad=True)
        return x * masks[name]

    changes = {
        name: partial(masked, name=name)
        for name in (
            *(f"{one.part}.z" for one in attentions(model.config)),
            *(f"{block}.feedforward.out" for block in layer_names(model.config).values()),
        )
    }
    for done, batch in enumerate(examples.batches, start=1):
        with torch.enable_grad(), evaluating(model), edit(model, changes):
            loss, _ = TASKS[examples.task].batch_loss(model, batch.to(inputs.device_of(model)))
            gradients = torch.autograd.grad(loss, list(masks.values()))
        for name, gradient in zip(masks, gradients):
            # H, or 1 of a feed-forward.
            sums[name] = sums.get(name, 0) + gradient.double().abs().sum(0).flatten().cpu()
        on_progress("gradients", done, len(examples.batches))
    means = {name: (total / examples.targets).numpy() for name, total in sums.items()}
    numbers: dict[AttentionHead, float] = {}
    for one in attentions(model.config):
        row = means[f"{one.part}.z"]
        row = row / (np.linalg.norm(row) or 1.0) if normalise else row
        numbers |= dict(zip(one.heads, row.tolist()))
    inner = {
        name: float(means[f"{block}.feedforward.out"][0]) for name, block in layer_names(model.config).items()
    }
    quantity = "|d loss / d mask|, each layer of length 1" if normalise else "|d loss / d mask|"
    return Importance(HeadTable.of(model.config, quantity, numbers), inner)


def ablate_each(
    m: inputs.AnyModel,
    data: Data,
    how: How = "zero",
    means: Means | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
    **options: Any,
) -> HeadTable:
    """Measure by how much the loss rises without each head alone: one pass over the data for each head."""
    model, examples = opened(m, data, options)
    means = means_for(how, means, lambda: mean_activations(model, examples))
    whole, heads = judge(model, examples).loss, all_heads(model.config)
    increase: dict[AttentionHead, float] = {}
    for done, head in enumerate(heads, start=1):
        with ablating(model, [head], means=means):
            increase[head] = judge(model, examples).loss - whole
        on_progress("heads", done, len(heads))
    return HeadTable.of(model.config, "loss increase", increase)
