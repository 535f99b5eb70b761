"""Toy tasks that a Transformer learns from scratch in seconds: copy, reverse, sort, add and majority.

They prove that learning works end to end: a model with a fault does not reach 99 % on inputs it never saw.
Inputs are split by a checksum, so that no held-out input is ever trained on.

Shapes: B batch, S source length, T target length.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core.config import Family, ModelConfig
from clearhead.core.transformer import Output, Transformer
from clearhead.errors import ConfigError, nearest, refuse
from clearhead.run.generate.decode import greedy

N_SYMBOLS = 10
BEGIN, END, PLUS = N_SYMBOLS, N_SYMBOLS + 1, N_SYMBOLS + 2
VOCABULARY = [*map(str, range(N_SYMBOLS)), "<", ">", "+"]


@dataclass(frozen=True)
class Toy:
    """A toy task: how sources [B, S] are drawn, and what should come out, [B, T] (or [B] for one label)."""

    source: Callable[[int, torch.Generator], Tensor]
    target: Callable[[Tensor], Tensor]
    labels: int = 0  # 0: sequence to sequence


def _drawn(n: int, generator: torch.Generator, symbols: int, lengths: range) -> Tensor:
    """Draw rows of symbols, of one of these lengths."""
    length = lengths[int(torch.randint(len(lengths), (), generator=generator))]
    return torch.randint(symbols, (n, length), generator=generator)


def _sums(n: int, generator: torch.Generator) -> Tensor:
    """Draw two numbers below 100 and a plus, least digit first: a carry travels as one writes."""
    numbers = torch.randint(100, (2, n), generator=generator)
    a, b = numbers[..., None] // torch.tensor([1, 10]) % 10
    return torch.cat([a, torch.full((n, 1), PLUS), b], dim=1)


def _added(source: Tensor) -> Tensor:
    places = torch.tensor([1, 10, 100])
    return (source[:, :2] + source[:, 3:]) @ places[:2, None] // places % 10


_digits = partial(_drawn, symbols=N_SYMBOLS, lengths=range(3, 7))
TASKS = {
    "copy": Toy(_digits, lambda source: source),
    "reverse": Toy(_digits, lambda source: source.flip(1)),
    "sort": Toy(_digits, lambda source: source.sort(1).values),
    "add": Toy(_sums, _added),
    "majority": Toy(
        partial(_drawn, symbols=2, lengths=range(11, 20, 2)),
        lambda source: (2 * source.sum(1) > source.shape[1]).long(),
        labels=2,
    ),
}


def draw(task: Toy, n: int, generator: torch.Generator, held_out: bool) -> tuple[Tensor, Tensor]:
    """Draw up to `n` examples from one side of the split; a tenth of all inputs is held out, by checksum."""
    source = task.source(n * 12 if held_out else n + n // 4, generator)
    powers = torch.tensor([pow(31, place, 1_000_003) for place in range(source.shape[1])])
    chosen = ((source + 1) * powers).sum(1) % 1_000_003 % 10 == 0
    source = source[chosen == held_out][:n]
    return source, task.target(source)


def toy_config(name: str, family: Family) -> ModelConfig:
    """Return the config of a model just large enough for the task."""
    refuse(
        name not in TASKS,
        f'no toy task is called "{name}"{nearest(name, TASKS)}: choose from {", ".join(TASKS)}',
        ConfigError,
    )
    labels = TASKS[name].labels
    fitting = "encoder" if labels else "decoder or encoder-decoder"
    refuse(
        (family == "encoder") != bool(labels),
        f"the toy task {name} is for family {fitting}, not {family}",
        ConfigError,
    )
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
        n_classes=labels,
        pooling="mean" if labels else None,
    )


def loss_of(model: Transformer, task: Toy, source: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the answer, given the question."""
    if task.labels:
        return nnf.cross_entropy(model(source).logits, target)
    fed, wanted = frame(target)
    prompt, more = _asked(model, source, fed)
    logits = model(prompt, **more).logits[:, -fed.shape[1] :]
    return nnf.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def frame(target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decoder's input, `<` and the target, and what is wanted, the target and `>`: [B, T + 1]."""
    edge = torch.full((target.shape[0], 1), BEGIN)
    return torch.cat([edge, target], dim=1), torch.cat([target, torch.full_like(edge, END)], dim=1)


def _asked(model: Transformer, source: Tensor, fed: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the ids a model reads: the question, then `fed`; the encoder of two reads the question."""
    return (torch.cat([source, fed], dim=1), {}) if model.encoder is None else (fed, {"source": source})


def answer(model: Transformer, task: Toy, source: Tensor, length: int) -> Tensor:
    """Return the model's answer: labels [B], or ids [B, length] with `>` at the end."""
    if task.labels:
        out: Output = model(source)
        return out.required_logits.argmax(-1)
    prompt, more = _asked(model, source, torch.full((source.shape[0], 1), BEGIN))
    return greedy(model, prompt, length, **more)


@torch.no_grad()
def accuracy(
    model: Transformer, task: Toy, generator: torch.Generator, batches: int = 8, n: int = 64
) -> float:
    """Return the share of held-out inputs answered exactly."""
    model.eval()
    hits = []
    for _ in range(batches):
        source, target = draw(task, n, generator, held_out=True)
        wanted = target if task.labels else frame(target)[1]
        hits.append((answer(model, task, source, wanted.shape[-1]) == wanted).view(len(wanted), -1).all(1))
    return float(torch.cat(hits).float().mean())


@dataclass(frozen=True)
class Progress:
    """The figures of one evaluation during training."""

    step: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Learned:
    """A trained toy model and how it got there."""

    task: Toy
    model: Transformer
    history: tuple[Progress, ...]


def learn(
    name: str,
    family: Family,
    steps: int = 3000,
    batch: int = 64,
    seed: int = 0,
    every: int = 100,
    enough: float = 0.998,
) -> Learned:
    """Train from scratch until `enough` of the held-out inputs come out exactly, or `steps` are done."""
    torch.manual_seed(seed)
    model, task = Transformer(toy_config(name, family)), TASKS[name]
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
            if history[-1].accuracy >= enough:
                break
    model.eval()
    return Learned(task, model, tuple(history))
