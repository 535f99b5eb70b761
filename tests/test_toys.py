"""Learning works end to end: toy tasks, from random weights to inputs never seen.

A model with a fault does not reach 99 % on inputs it never saw. Inputs are split by a checksum, so that no
held-out input is ever trained on. Every family learns the hardest task that it is for; `CLEARHEAD_TOYS=all`
learns every task with every family it is for.

Shapes: B batch, S source length, T target length.
"""

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.labs.lab.learning import descend
from clearhead.run.generate.decode import greedy

N_SYMBOLS, EVERY, ENOUGH = 10, 100, 0.998
BEGIN, END, PLUS = N_SYMBOLS, N_SYMBOLS + 1, N_SYMBOLS + 2


class Toy(NamedTuple):
    """How sources [B, S] are drawn, and what should come out, [B, T] (or [B] for one label)."""

    source: Callable[[int, torch.Generator], Tensor]
    target: Callable[[Tensor], Tensor]
    labels: int = 0  # 0: sequence to sequence


def symbols(n: int, generator: torch.Generator, kinds: int, lengths: range) -> Tensor:
    """Rows of symbols, of one of these lengths."""
    length = lengths[int(torch.randint(len(lengths), (), generator=generator))]
    return torch.randint(kinds, (n, length), generator=generator)


def sums(n: int, generator: torch.Generator) -> Tensor:
    """Two numbers below 100 and a plus, least digit first: a carry travels as one writes."""
    a, b = torch.randint(100, (2, n), generator=generator)[..., None] // torch.tensor([1, 10]) % 10
    return torch.cat([a, torch.full((n, 1), PLUS), b], dim=1)


def added(source: Tensor) -> Tensor:
    powers = torch.tensor([1, 10, 100])
    return (source[:, :2] + source[:, 3:]) @ powers[:2, None] // powers % 10


DIGITS = partial(symbols, kinds=N_SYMBOLS, lengths=range(3, 7))
BITS = partial(symbols, kinds=2, lengths=range(11, 20, 2))
TASKS = {
    "copy": Toy(DIGITS, lambda source: source),
    "reverse": Toy(DIGITS, lambda source: source.flip(1)),
    "sort": Toy(DIGITS, lambda source: source.sort(1).values),
    "add": Toy(sums, added),
    "majority": Toy(BITS, lambda source: (2 * source.sum(1) > source.shape[1]).long(), labels=2),
}
LEARNERS = {  # steps and rows a batch that suffice for each of three seeds
    ("majority", "encoder"): (400, 32),
    ("add", "decoder"): (600, 64),
    ("sort", "encoder-decoder"): (400, 64),
}
if os.environ.get("CLEARHEAD_TOYS") == "all":
    every = itertools.product(("copy", "reverse", "sort", "add"), ("decoder", "encoder-decoder"))
    LEARNERS = dict.fromkeys(every, (600, 64)) | LEARNERS


def draw(task: Toy, n: int, generator: torch.Generator, held_out: bool) -> tuple[Tensor, Tensor]:
    """Up to `n` examples from one side of the split; a tenth of all inputs is held out, by checksum."""
    source = task.source(n * 12 if held_out else n + n // 4, generator)
    powers = torch.tensor([pow(31, position, 1_000_003) for position in range(source.shape[1])])
    chosen = ((source + 1) * powers).sum(1) % 1_000_003 % 10 == 0
    source = source[chosen == held_out][:n]
    return source, task.target(source)


def build_toy(task: Toy, family: str) -> Transformer:
    """A model just large enough for the task."""
    return Transformer(
        ModelConfig(
            family=family, vocab_size=N_SYMBOLS + 3, d_model=64, n_layers=2, n_heads=4, max_positions=32,
            d_ff=128, activation="relu", init="xavier", n_classes=task.labels,
            pooling="mean" if task.labels else None,
        )
    )  # fmt: skip


def arguments(model: Transformer, source: Tensor, written: Tensor) -> dict[str, Tensor]:
    """What a model reads: the question, then what is written; the encoder of two reads the question."""
    if model.encoder is None:
        return {"ids": torch.cat([source, written], dim=1)}
    return {"ids": written, "source": source}


def loss_of(model: Transformer, task: Toy, source: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy of the answer, given the question."""
    if task.labels:
        return nnf.cross_entropy(model(source).logits, target)
    edge = torch.full((len(target), 1), BEGIN)
    wanted = torch.cat([target, torch.full_like(edge, END)], dim=1)
    logits = model(**arguments(model, source, torch.cat([edge, target], dim=1))).logits
    return nnf.cross_entropy(logits[:, -wanted.shape[1] :].flatten(0, 1), wanted.flatten())


@torch.no_grad()
def accuracy(model: Transformer, task: Toy, generator: torch.Generator, batches: int = 8) -> float:
    """The share of held-out inputs answered exactly."""
    hits = []
    for _ in range(batches):
        source, target = draw(task, 64, generator, held_out=True)
        if task.labels:
            hits.append(model.eval()(source).logits.argmax(-1) == target)
            continue
        edge = torch.full((len(target), 1), BEGIN)
        wanted = torch.cat([target, torch.full_like(edge, END)], dim=1)
        read = arguments(model.eval(), source, edge)
        hits.append((greedy(model, read.pop("ids"), wanted.shape[1], **read) == wanted).all(1))
    return float(torch.cat(hits).float().mean())


@pytest.mark.ledger("E1", "E2", "E3")
@pytest.mark.parametrize(("name", "family"), LEARNERS, ids=["-".join(pair) for pair in LEARNERS])
@pytest.mark.slow
def test_toy_task_is_learned(name, family):
    torch.manual_seed(0)
    task, (steps, rows) = TASKS[name], LEARNERS[name, family]
    model = build_toy(task, family)
    examples, held_out = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)

    def loss_at(step: int) -> Tensor:
        return loss_of(model.train(), task, *draw(task, rows, examples, held_out=False))

    for step, _, _ in descend(model, loss_at, steps, lr=3e-3, warmup=100):
        if step % EVERY == 0 and accuracy(model, task, held_out) >= ENOUGH:
            break
    exact = accuracy(model, task, torch.Generator().manual_seed(99), batches=16)
    assert exact >= 0.99, f"{exact:.2%} exact after {step} steps"


@pytest.mark.parametrize("name", TASKS)
def test_no_held_out_input_is_trained_on(name):
    seen = {side: set() for side in (True, False)}
    for held_out, rows in seen.items():
        generator = torch.Generator().manual_seed(7)
        for _ in range(50):
            rows.update(map(tuple, draw(TASKS[name], 64, generator, held_out)[0].tolist()))
    assert seen[True]
    assert not seen[True] & seen[False]
