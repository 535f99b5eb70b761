"""Importance of heads and feed-forwards: how much the loss changes as each is turned down a little.

Each head's `z` is multiplied by a mask that is one, so nothing changes, and the gradient with respect to that
mask is taken (Michel et al., 2019). One backward pass gives all heads at once, where ablating each takes a
pass for each.

    importance(m, "test.txt").heads.values                # layer x head

The mask has one entry for each row of a batch, so that rows whose gradients have opposite signs do not
cancel:

    importance = (sum over rows of |d loss of the row / d mask|) / number of targets

Shapes: B rows, T length, H heads, E head width, D model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.inside.inputs import AnyModel, device_of
from clearhead.inside.names import AttentionHead, attentions, layer_names
from clearhead.inside.parts.ablate import HeadTable, OnProgress, opened
from clearhead.inside.parts.examples import Data
from clearhead.inside.results import Result
from clearhead.losses import batch_loss
from clearhead.model.taps import edit
from clearhead.model.transformer import Transformer, evaluating
from clearhead.tasks.table import TASKS


@dataclass(frozen=True)
class Importance(Result):
    """How much the loss depends on each head and each feed-forward."""

    heads: HeadTable
    feedforwards: Mapping[str, float]  # by layer: "0", "1", ..., "encoder.0", ...


def importance(
    m: AnyModel,
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
    sums: dict[str, Tensor] = {}
    for done, batch in enumerate(examples.batches, start=1):
        with torch.enable_grad(), evaluating(model), _masked(model) as masks:
            loss, _ = batch_loss(model, batch.to(device_of(model)), objective=TASKS[examples.task].objective)
            gradients = torch.autograd.grad(loss, list(masks.values()))
        for name, gradient in zip(masks, gradients):
            total = gradient.double().abs().sum(0).flatten().cpu()  # H, or 1 of a feed-forward
            sums[name] = sums.get(name, torch.zeros_like(total)) + total
        on_progress("gradients", done, len(examples.batches))
    means = {name: (total / examples.targets).numpy() for name, total in sums.items()}
    numbers: dict[AttentionHead, float] = {}
    for one in attentions(model.config):
        row = means[f"{one.part}.z"]
        length = (float(np.linalg.norm(row)) or 1.0) if normalise else 1.0
        numbers |= {head: float(value) / length for head, value in zip(one.heads, row)}
    inner = {
        name: float(means[f"{block}.feedforward.out"][0]) for name, block in layer_names(model.config).items()
    }
    quantity = "|d loss / d mask|" + (", each layer of length 1" if normalise else "")
    return Importance(HeadTable.of(model.config, quantity, numbers), inner)


@contextmanager
def _masked(model: Transformer) -> Iterator[dict[str, Tensor]]:
    """Multiply every head's z by ones [B, H, 1, 1] and every feed-forward's output by ones [B, 1, 1]."""
    masks: dict[str, Tensor] = {}
    names = [f"{one.part}.z" for one in attentions(model.config)]
    names += [f"{block}.feedforward.out" for block in layer_names(model.config).values()]

    def multiplied(x: Tensor, name: str) -> Tensor:
        shape = x.shape[:2] if name.endswith(".z") else x.shape[:1]
        masks[name] = torch.ones((*shape, 1, 1), dtype=x.dtype, device=x.device, requires_grad=True)
        return x * masks[name]

    changes: dict[str, Callable[[Tensor], Tensor]] = {name: partial(multiplied, name=name) for name in names}
    with edit(model, changes):
        yield masks
