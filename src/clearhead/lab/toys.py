"""Toy tasks that a Transformer learns from scratch in seconds: copy, reverse, sort, add and majority.

They prove that learning works end to end: a model that is wrong anywhere does not reach 99 % on inputs it never saw.
Inputs are split by a checksum, so that no held-out input is ever trained on.

Shapes: B batch, S source length, T target length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.config import Family, ModelConfig
from clearhead.errors import ConfigError, nearest
from clearhead.generate.decode import greedy
from clearhead.model.transformer import Output, Transformer

N_SYMBOLS = 10
BEGIN, END, PLUS = N_SYMBOLS, N_SYMBOLS + 1, N_SYMBOLS + 2
VOCABULARY = [*map(str, range(N_SYMBOLS)), "<", ">", "+"]


@dataclass(frozen=True)
class Task:
    """`draw` makes a batch: sources [B, S] and what should come out, [B, T] (or [B] for one label)."""

    name: str
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    lengths: str  # in words, for people
    labels: int = 0  # 0: sequence to sequence


def _digits(n: int, generator: torch.Generator, low: int, high: int, symbols: int = N_SYMBOLS) -> Tensor:
    length = int(torch.randint(low, high + 1, (), generator=generator))
    return torch.randint(symbols, (n, length), generator=generator)


def _copy(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    source = _digits(n, generator, 3, 6)
    return source, source


def _reverse(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    source = _digits(n, generator, 3, 6)
    return source, source.flip(1)


def _sort(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    source = _digits(n, generator, 3, 6)
    return source, source.sort(1).values


def _add(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two numbers of two digits, least digit first, so that a carry travels the way the answer is written."""
    a, b = torch.randint(100, (2, n), generator=generator)
    spread = torch.tensor([1, 10, 100])
    plus = torch.full((n, 1), PLUS)
    written = [number[:, None] // spread % 10 for number in (a, b, a + b)]
    return torch.cat([written[0][:, :2], plus, written[1][:, :2]], dim=1), written[2]


def _majority(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    half = int(torch.randint(5, 10, (), generator=generator))
    source = torch.randint(2, (n, 2 * half + 1), generator=generator)
    return source, (source.sum(1) > half).long()


TASKS = {
    task.name: task
    for task in (
        Task("copy", _copy, "3 to 6 digits"),
        Task("reverse", _reverse, "3 to 6 digits"),
        Task("sort", _sort, "3 to 6 digits"),
        Task("add", _add, "two numbers below 100"),
        Task("majority", _majority, "11 to 19 bits", labels=2),
    )
}


def task_named(name: str) -> Task:
    """The task of this name."""
    if name not in TASKS:
        raise ConfigError(
            f'no toy task is called "{name}"{nearest(name, TASKS)}: choose from {", ".join(TASKS)}'
        )
    return TASKS[name]


def draw(task: Task, n: int, generator: torch.Generator, held_out: bool) -> tuple[Tensor, Tensor]:
    """Up to `n` examples from one side of the split; a tenth of all inputs is held out, by checksum."""
    source, target = task.draw(n * 12 if held_out else n + n // 4, generator)
    powers = torch.tensor([pow(31, place, 1_000_003) for place in range(source.shape[1])])
    chosen = ((source + 1) * powers).sum(1) % 1_000_003 % 10 == 0
    keep = chosen if held_out else ~chosen
    return source[keep][:n], target[keep][:n]


def toy_config(task: Task, family: Family) -> ModelConfig:
    """A model large enough for the task and no larger."""
    if (family == "encoder") != bool(task.labels):
        fitting = "encoder" if task.labels else "decoder or encoder-decoder"
        raise ConfigError(f"the toy task {task.name} is for family {fitting}, not {family}")
    return ModelConfig(
        family=family,
        vocab_size=len(VOCABULARY),
        d_model=64,
        n_layers=2,
        n_heads=4,
        max_positions=32,
        d_ff=128,
        activation="relu",
        init="xavier",
        n_classes=task.labels,
        pooling="mean" if task.labels else None,
    )


def loss_of(model: Transformer, task: Task, source: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of the answer, given the question."""
    if task.labels:
        return nnf.cross_entropy(model(source).logits, target)
    fed, wanted = frame(target)
    if model.encoder is not None:
        logits = model(fed, source=source).logits
    else:
        logits = model(torch.cat([source, fed], dim=1)).logits[:, source.shape[1] :]
    return nnf.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def frame(target: Tensor) -> tuple[Tensor, Tensor]:
    """What the decoder is fed, `<` and the target, and what it should say, the target and `>`: [B, T + 1] twice."""
    edge = torch.full((target.shape[0], 1), BEGIN)
    return torch.cat([edge, target], dim=1), torch.cat([target, torch.full_like(edge, END)], dim=1)


def answer(model: Transformer, task: Task, source: Tensor, length: int) -> Tensor:
    """What the model says: labels [B], or ids [B, length] with `>` at the end."""
    if task.labels:
        with torch.inference_mode():
            out: Output = model(source)
            return out.required_logits.argmax(-1)
    begin = torch.full((source.shape[0], 1), BEGIN)
    if model.encoder is not None:
        return greedy(model, begin, length, source=source)
    return greedy(model, torch.cat([source, begin], dim=1), length)


def accuracy(
    model: Transformer, task: Task, generator: torch.Generator, batches: int = 8, n: int = 64
) -> float:
    """Share of held-out inputs answered exactly."""
    model.eval()
    right, total = 0, 0
    for _ in range(batches):
        source, target = draw(task, n, generator, held_out=True)
        wanted = target if task.labels else frame(target)[1]
        said = answer(model, task, source, wanted.shape[-1])
        hits = (said == wanted) if task.labels else (said == wanted).all(1)
        right, total = right + int(hits.sum()), total + len(hits)
    return right / max(total, 1)


@dataclass(frozen=True)
class Progress:
    """Where training stands: handed to `on_step` at each evaluation."""

    step: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Learned:
    """A trained toy model and how it got there."""

    task: Task
    model: Transformer
    history: tuple[Progress, ...]

    @property
    def accuracy(self) -> float:
        """Exact match on held-out inputs at the end."""
        return self.history[-1].accuracy


def learn(
    name: str,
    family: Family,
    steps: int = 3000,
    batch: int = 64,
    seed: int = 0,
    every: int = 100,
    enough: float = 0.998,
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> Learned:
    """Train from scratch until `enough` of the held-out inputs come out exactly, or `steps` are done."""
    task = task_named(name)
    torch.manual_seed(seed)
    model = Transformer(toy_config(task, family))
    examples, trial = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    history: list[Progress] = []
    for step in range(1, steps + 1):
        model.train()
        loss = loss_of(model, task, *draw(task, batch, examples, held_out=False))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % every == 0 or step == steps:
            history.append(Progress(step, float(loss.detach()), accuracy(model, task, trial)))
            on_step(history[-1])
            if history[-1].accuracy >= enough:
                break
    model.eval()
    return Learned(task, model, tuple(history))
