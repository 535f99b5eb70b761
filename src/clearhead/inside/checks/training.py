"""Rows of the equality suite about training: parts of a batch add up, and a run that was stopped goes on as if it had not been.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.api import Model, load
from clearhead.batches.batch import IGNORE, Batch
from clearhead.inside.checks.inputs import Inputs
from clearhead.inside.checks.row import Row, gap
from clearhead.model.transformer import Transformer
from clearhead.training.losses import batch_loss
from clearhead.training.optim import make_optimizer, set_rate
from clearhead.training.plan import TrainPlan
from clearhead.training.schedule import rate
from clearhead.training.state import (
    State,
    load_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)

PARTS = (slice(0, 1), slice(1, 2), slice(2, 4))  # of a batch of four rows
STEPS, STOP = 3, 2  # of the run that is stopped


def training_rows(inputs: Inputs, tolerance: float) -> Iterator[Row]:
    """Rows for a model that has a loss and reads tokens or images."""
    head = inputs.model.config.head
    if (
        head in ("embedding", "none")
        or inputs.kind not in ("tokens", "patches")
        or inputs.source_kind not in ("", "tokens")
    ):
        return
    what = "gradients of a batch with those of its parts, unequally long, added up"
    yield Row("accumulated = whole", what, partial(_accumulated, inputs.model), tolerance, copies=True)
    what = f"weights after {STEPS} steps with those of a run that was stopped after {STOP}, saved and resumed; on the CPU, bit for bit"
    yield Row("resumed = uninterrupted", what, partial(_resumed, inputs.model), 0.0, copies=True)


def _accumulated(model: Transformer) -> float:
    batch = some_batch(model, 0)
    with _learning(model) as trained, torch.enable_grad():
        loss, count = batch_loss(model, batch, chunk=0)
        whole = torch.autograd.grad(loss / count, trained, allow_unused=True)
        parts = [batch_loss(model, part_of(batch, rows), chunk=2)[0] for rows in PARTS]
        summed = torch.autograd.grad(torch.stack(parts).sum() / count, trained, allow_unused=True)
    largest = max(float(gradient.abs().max()) for gradient in whole if gradient is not None)
    return max(
        gap(b / largest, a / largest) for a, b in zip(whole, summed) if a is not None and b is not None
    )


@contextmanager
def _learning(model: Transformer) -> Iterator[list[Tensor]]:
    """Let every weight have a gradient, for a while; no weight is changed."""
    weights = list(model.parameters())
    before = [weight.requires_grad for weight in weights]
    try:
        yield [weight.requires_grad_() for weight in weights]
    finally:
        for weight, kept in zip(weights, before):
            weight.requires_grad_(kept)


def some_batch(model: Transformer, seed: int) -> Batch:
    """Four rows of unequal lengths, and targets that fit the head."""
    inputs, config = Inputs(model, rows=4, seed=seed), model.config
    generator = torch.Generator().manual_seed(seed)
    rows, length = 4, inputs.length

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator).to(inputs.device)

    if inputs.kind == "patches":
        return Batch(inputs.main, draw(config.n_classes, rows))
    lengths = torch.tensor(
        [length, max(length - 5, 1), max(length - 1, 1), max(length // 2, 1)], device=inputs.device
    )
    mask = torch.arange(length, device=inputs.device) < lengths[:, None]
    if config.head == "classifier":
        targets = draw(config.n_classes, rows)
    elif config.head == "span":
        targets = torch.stack([torch.zeros_like(lengths), lengths - 1], dim=1)
    else:
        targets = draw(
            config.vocab_size if config.head in ("lm", "mlm") else config.n_classes, rows, length
        ).masked_fill(~mask, IGNORE)
    return Batch(inputs.main, targets, mask, inputs.source, types=inputs.types)


def part_of(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch, cut to the longest of them."""
    length = batch.ids.shape[1] if batch.mask is None else int(batch.mask[rows].sum(1).max())

    def cut(x: Tensor | None) -> Tensor | None:
        return (
            None
            if x is None
            else x[rows]
            if batch.mask is None or x.shape[:2] != batch.mask.shape
            else x[rows, :length]
        )

    ids, targets = cut(batch.ids), cut(batch.targets)
    assert ids is not None and targets is not None
    source = None if batch.source is None else batch.source[rows]
    return Batch(ids, targets, cut(batch.mask), source, types=cut(batch.types))


def _resumed(model: Transformer) -> float:
    plan = TrainPlan(steps=STEPS, warmup=1, lr=1e-3)
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(), torch.enable_grad():
        whole = copy.deepcopy(model).to("cpu").float().requires_grad_(True)
        optimizer = make_optimizer(whole, plan, torch.device("cpu"))
        for step in range(1, STOP + 1):
            _step(whole, optimizer, plan, step)
        at = save_checkpoint(
            Path(folder), Model(whole), optimizer_tensors(optimizer, whole), State(step=STOP)
        )
        for step in range(STOP + 1, STEPS + 1):
            _step(whole, optimizer, plan, step)
        del optimizer
        resumed = load(at, dtype=torch.float32).model
        tensors, state = load_checkpoint(at)
        optimizer = make_optimizer(resumed, plan, torch.device("cpu"))
        restore_optimizer(optimizer, resumed, tensors)
        for step in range(state.step + 1, STEPS + 1):
            _step(resumed, optimizer, plan, step)
        theirs = dict(whole.named_parameters())
        return max(gap(weight, theirs[name]) for name, weight in resumed.named_parameters())


def _step(model: Transformer, optimizer: Any, plan: TrainPlan, step: int) -> None:
    """One step; its batch, its dropout and its rate follow from its number, as in `train.loop`."""
    torch.manual_seed(step)
    model.train()
    set_rate(optimizer, rate(plan, step, STEPS, model.config.d_model))
    loss, count = batch_loss(model, some_batch(model, step))
    (loss / count).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
