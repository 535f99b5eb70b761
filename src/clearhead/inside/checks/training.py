"""Rows of the equality suite about training: parts of a batch add up, and a resumed run equals a whole one.

Shapes: B rows, T tokens.
"""

import copy
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.inside.checks.rows import Comparison, Inputs, gap
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.losses import batch_loss
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.training import optim
from clearhead.learn.training.state import (
    State,
    load_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
    snapshot,
)
from clearhead.run.api import Model, load

PARTS = (slice(0, 1), slice(1, 2), slice(2, 4))  # of a batch of four rows
STEPS, STOP = 3, 2  # of the run that is stopped


def training_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows for a model that has a loss and reads tokens or images."""
    learns = inputs.model.config.head not in ("embedding", "none")
    reads = inputs.kind in ("tokens", "patches") and inputs.source_kind in ("", "tokens")
    row = partial(inputs.compare, copies=True, fits=learns and reads)
    return [
        row(
            "accumulated = whole",
            "gradients of a batch with those of its parts, unequally long, added up",
            _accumulated,
        ),
        row(
            "resumed = uninterrupted",
            f"weights after {STEPS} steps with those of a run stopped after {STOP} and resumed: bit for bit",
            _resumed,
            tolerance=0.0,
        ),
    ]


def _accumulated(inputs: Inputs) -> float:
    model, batch = copy.deepcopy(inputs.model).requires_grad_(True), some_batch(inputs.model, 0)
    with torch.enable_grad():
        loss, count = batch_loss(model, batch, chunk=0)
        parts = [batch_loss(model, part_of(batch, rows), chunk=2)[0] for rows in PARTS]
        whole, summed = (
            torch.autograd.grad(total / count, tuple(model.parameters()), allow_unused=True)
            for total in (loss, torch.stack(parts).sum())
        )
    largest = max(float(gradient.abs().max()) for gradient in whole if gradient is not None) or 1.0
    return max(
        gap(b / largest, a / largest) for a, b in zip(whole, summed) if a is not None and b is not None
    )


def some_batch(model: Transformer, seed: int) -> Batch:
    """Return four rows of unequal lengths, and targets that fit the head."""
    inputs, config = Inputs(model, rows=4, seed=seed), model.config
    rows, length, generator = 4, inputs.length, torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator).to(inputs.device)

    if inputs.kind == "patches":
        each = () if config.head == "classifier" else (config.main.n_tokens(length),)
        return Batch(inputs.main, draw(config.n_classes, rows, *each))
    lengths = torch.tensor([length, length - 5, length - 1, length // 2], device=inputs.device).clamp(min=1)
    mask = torch.arange(length, device=inputs.device) < lengths[:, None]
    if config.head == "classifier":
        targets = draw(config.n_classes, rows)
    elif config.head == "span":
        targets = torch.stack([torch.zeros_like(lengths), lengths - 1], dim=1)
    else:
        kinds = config.vocab_size if config.head in ("lm", "mlm") else config.n_classes
        targets = draw(kinds, rows, length).masked_fill(~mask, IGNORE)
    given = {name: x for name, x in inputs.given.items() if name != "global_mask"}  # a batch has none
    return Batch(targets=targets, mask=mask, **given)


def part_of(batch: Batch, rows: slice) -> Batch:
    """Return some rows of a batch, truncated to the longest of them."""
    part = batch.rows(rows)
    if part.mask is None:
        return part
    padded, length = part.mask.shape, int(part.mask.sum(1).max())
    by_token = {"ids": part.ids, "mask": part.mask, "types": part.types, "targets": part.targets}
    cut = {name: x[:, :length] for name, x in by_token.items() if x is not None and x.shape[:2] == padded}
    return replace(part, **cut)


def _resumed(inputs: Inputs) -> float:
    plan = TrainPlan(steps=STEPS, warmup=1, lr=1e-3)
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(), torch.enable_grad():
        whole = copy.deepcopy(inputs.model).to("cpu").float().requires_grad_(True)
        optimizer = optim.make_optimizer(whole, plan, torch.device("cpu"))
        _steps(whole, optimizer, plan, 0, STOP)
        moments = optimizer_tensors(optimizer, whole)
        at = save_checkpoint(Path(folder), snapshot(Model(whole), whole, whole, moments, State(step=STOP)))
        _steps(whole, optimizer, plan, STOP, STEPS)
        del optimizer
        resumed = load(at, dtype=torch.float32).model
        tensors, state = load_checkpoint(at)
        optimizer = optim.make_optimizer(resumed, plan, torch.device("cpu"))
        restore_optimizer(optimizer, resumed, tensors)
        _steps(resumed, optimizer, plan, state.step, STEPS)
        theirs = dict(whole.named_parameters())
        return max(gap(weight, theirs[name]) for name, weight in resumed.named_parameters())


def _steps(model: Transformer, optimizer: Any, plan: TrainPlan, done: int, until: int) -> None:
    """Take steps; the batch, dropout and rate of each follow from its number, as in `training.loop`."""
    for step in range(done + 1, until + 1):
        torch.manual_seed(step)
        model.train()
        optim.set_rate(optimizer, optim.rate(plan, step, STEPS, model.config.d_model))
        loss, count = batch_loss(model, some_batch(model, step))
        (loss / count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
