"""Importance of heads and feed-forwards by gradient: how much the loss would change if each were turned down a little.

Each head's `z` is multiplied by a mask that is one, so nothing changes, and the gradient with respect to that mask is
taken (Michel et al., 2019). One backward pass gives all heads at once, where ablating each takes a pass for each.

    importance(m, "test.txt").heads.values                # layer x head

The mask has one entry for each row of a batch, so that rows whose gradients have opposite signs do not cancel:

    importance = (sum over rows of |d loss of the row / d mask|) / number of targets

Shapes: B rows, T length, H heads, E head width, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.bundle import Model
from clearhead.inside.names import Head, attentions
from clearhead.inside.parts.ablate import HeadMap, OnProgress, find_blocks, opened
from clearhead.inside.parts.examples import Data
from clearhead.model.taps import edit
from clearhead.model.transformer import Transformer, evaluating
from clearhead.tasks.table import TASKS
from clearhead.training.losses import batch_loss


@dataclass(frozen=True)
class Importance:
    """How much the loss depends on each head and each feed-forward."""

    heads: HeadMap
    feedforwards: Mapping[str, float]  # by layer: "0", "1", ..., "encoder.0", ...

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"heads": self.heads.to_dict(), "feedforwards": dict(self.feedforwards)}


def importance(
    m: Model | Transformer,
    data: Data,
    normalise: bool = False,
    on_progress: OnProgress = lambda stage, done, total: None,
    **options: Any,
) -> Importance:
    """|d loss / d mask| of every head and feed-forward, averaged over the rows of some data.

    Args:
        m: what `load` gave; or a bare model, with `Examples`.
        data: what `examples_from` takes, and `options` as there.
        normalise: divide the heads of each attention by their L2 norm, so that layers can be compared.
        on_progress: told how many batches are done.
    """
    model, examples = opened(m, data, options)
    device = next(model.parameters()).device
    sums: dict[str, Tensor] = {}
    for done, batch in enumerate(examples.batches, start=1):
        with torch.enable_grad(), evaluating(model), _masked(model) as masks:
            loss, _ = batch_loss(model, batch.to(device), objective=TASKS[examples.task].objective)
            found = torch.autograd.grad(loss, list(masks.values()))
        for name, gradient in zip(masks, found):
            total = gradient.double().abs().sum(0).flatten().cpu()  # H, or 1 of a feed-forward
            sums[name] = sums.get(name, torch.zeros_like(total)) + total
        on_progress("gradients", done, len(examples.batches))
    means = {name: (total / examples.targets).numpy() for name, total in sums.items()}
    numbers: dict[Head, float] = {}
    for kind, layer, count in attentions(model.config):
        row = means[f"{Head(kind, layer, 0).part}.z"]
        length = float(np.linalg.norm(row)) if normalise else 1.0
        numbers |= {
            Head(kind, layer, number): float(row[number]) / (length or 1.0) for number in range(count)
        }
    quantity = "|d loss / d mask|" + (", each layer of length 1" if normalise else "")
    inner = {
        name.removesuffix(".feedforward.out").replace("blocks.", ""): float(row[0])
        for name, row in means.items()
        if "feed" in name
    }
    return Importance(HeadMap.of(model.config, quantity, numbers), inner)


@contextmanager
def _masked(model: Transformer) -> Iterator[dict[str, Tensor]]:
    """Ones on every head's z [B, H, 1, 1] and every feed-forward's answer [B, 1, 1], made when a forward pass comes by."""
    masks: dict[str, Tensor] = {}
    config = model.config
    plans = [plan for plan in (config.encoder, config.decoder) if plan is not None]
    layers = [f"{plan.prefix}{layer}" for plan in plans for layer in range(plan.n_layers)]
    names = [f"{Head(kind, layer, 0).part}.z" for kind, layer, _ in attentions(config)]
    names += [f"{block}.feedforward.out" for block in find_blocks(config, layers)]

    def multiplied(x: Tensor, name: str) -> Tensor:
        shape = x.shape[:2] if name.endswith(".z") else x.shape[:1]
        masks[name] = torch.ones((*shape, 1, 1), dtype=x.dtype, device=x.device, requires_grad=True)
        return x * masks[name]

    changes: dict[str, Callable[[Tensor], Tensor]] = {name: partial(multiplied, name=name) for name in names}
    with edit(model, changes):
        yield masks
