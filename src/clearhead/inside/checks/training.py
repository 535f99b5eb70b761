"""Rows of the equality suite about training: parts of a batch add up, and a resumed run equals a whole one.

Shapes: B rows, T tokens.
"""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.api import Model, load
from clearhead.batches.batch import IGNORE, Batch
from clearhead.inside.checks.inputs import Inputs
from clearhead.inside.checks.row import Comparison, gap
from clearhead.losses import batch_loss
from clearhead.model.transformer import Transformer
from clearhead.recipe import TrainPlan
from clearhead.training.optim import make_optimizer, rate, set_rate
from clearhead.training.state import (
    State,
    load_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)

PARTS = (slice(0, 1), slice(1, 2), slice(2, 4))  # of a batch of four rows
STEPS, STOP = 3, 2  # of the run that is stopped


def training_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows for a model that has a loss and reads tokens or images."""
    learns = inputs.model.config.head not in ("embedding", "none")
    reads = inputs.kind in ("tokens", "patches") and inputs.source_kind in ("", "tokens")
    return [
        inputs.compare(
            "accumulated = whole",
            "gradients of a batch with those of its parts, unequally long, added up",
            _accumulated,
            copies=True,
            fits=learns and reads,
        ),
        inputs.compare(
            "resumed = uninterrupted",
            f"weights after {STEPS} steps with those of a run stopped after {STOP} and resumed: bit for bit",
            _resumed,
            tolerance=0.0,
            copies=True,
            fits=learns and reads,
        ),
    ]


def _accumulated(inputs: Inputs) -> float:
    model, batch = inputs.model, some_batch(inputs.model, 0)
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
    """Give every weight a gradient while the block lasts; no weight is changed."""
    weights = list(model.parameters())
    before = [weight.requires_grad for weight in weights]
    try:
        yield [weight.requires_grad_() for weight in weights]
    finally:
        for weight, kept in zip(weights, before):
            weight.requires_grad_(kept)


def some_batch(model: Transformer, seed: int) -> Batch:
    """Return four rows of unequal lengths, and targets that fit the head."""
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
        kinds = config.vocab_size if config.head in ("lm", "mlm") else config.n_classes
        targets = draw(kinds, rows, length).masked_fill(~mask, IGNORE)
    return Batch(inputs.main, targets, mask, inputs.source, types=inputs.types)


def part_of(batch: Batch, rows: slice) -> Batch:
    """Return some rows of a batch, truncated to the longest of them."""
    if batch.mask is None:
        return Batch(batch.ids[rows], batch.targets[rows])
    length, padded = int(batch.mask[rows].sum(1).max()), batch.mask.shape
    ids, mask = batch.ids[rows, :length], batch.mask[rows, :length]
    targets = batch.targets[rows, :length] if batch.targets.shape[:2] == padded else batch.targets[rows]
    source = None if batch.source is None else batch.source[rows]
    types = None if batch.types is None else batch.types[rows, :length]
    return Batch(ids, targets, mask, source, types=types)


def _resumed(inputs: Inputs) -> float:
    plan = TrainPlan(steps=STEPS, warmup=1, lr=1e-3)
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(), torch.enable_grad():
        whole = copy.deepcopy(inputs.model).to("cpu").float().requires_grad_(True)
        optimizer = make_optimizer(whole, plan, torch.device("cpu"))
        _steps(whole, optimizer, plan, 0, STOP)
        tensors = optimizer_tensors(optimizer, whole)
        at = save_checkpoint(Path(folder), Model(whole), tensors, State(step=STOP))
        _steps(whole, optimizer, plan, STOP, STEPS)
        del optimizer
        resumed = load(at, dtype=torch.float32).model
        tensors, state = load_checkpoint(at)
        optimizer = make_optimizer(resumed, plan, torch.device("cpu"))
        restore_optimizer(optimizer, resumed, tensors)
        _steps(resumed, optimizer, plan, state.step, STEPS)
        theirs = dict(whole.named_parameters())
        return max(gap(weight, theirs[name]) for name, weight in resumed.named_parameters())


def _steps(model: Transformer, optimizer: Any, plan: TrainPlan, done: int, until: int) -> None:
    """Take steps; the batch, dropout and rate of each follow from its number, as in `training.loop`."""
    for step in range(done + 1, until + 1):
        torch.manual_seed(step)
        model.train()
        set_rate(optimizer, rate(plan, step, STEPS, model.config.d_model))
        loss, count = batch_loss(model, some_batch(model, step))
        (loss / count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
