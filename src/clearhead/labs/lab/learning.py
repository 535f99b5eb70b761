"""What the trials of an experiment share: a text, tasks drawn at random, and one short training loop.

Shapes: B batch, T length.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.inside.inputs import device_of
from clearhead.labs.lab.experiment import Conditions, Numbers
from clearhead.learn.data.corpora import CORPORA

CHARACTERS = 1_000_000  # of an embedded text that a trial learns from
Draw = Callable[[torch.Generator], Any]  # a batch
Loss = Callable[[nn.Module, Any], Tensor]  # [] of a batch


@dataclass(frozen=True)
class Text:
    """A text as ids of characters, the last tenth held out."""

    train: Tensor
    held_out: Tensor
    vocab_size: int

    def windows(self, generator: torch.Generator, batch: int, length: int, held_out: bool = False) -> Tensor:
        """Draw rows of `length` + 1 characters at random: [B, T + 1]."""
        source = self.held_out if held_out else self.train
        starts = torch.randint(len(source) - length - 1, (batch, 1), generator=generator)
        return source[starts + torch.arange(length + 1)]


@functools.cache
def prose(name: str = "stdlib-docs", characters: int = CHARACTERS) -> str:
    """Return the beginning of an embedded text, lower-cased."""
    documents: Any = CORPORA[name].load()
    return "\n".join("".join(parts) for parts in documents())[:characters].lower()


@functools.cache
def text(name: str = "stdlib-docs", characters: int = CHARACTERS) -> Text:
    """Return an embedded text as ids; characters that are rare in it are one character."""
    whole = prose(name, characters)
    common = (letter for letter, count in Counter(whole).items() if count >= len(whole) / 20_000)
    letters = "\0" + "".join(sorted(common))
    numbers = {letter: number for number, letter in enumerate(letters)}
    ids = torch.tensor([numbers.get(letter, 0) for letter in whole])
    cut = len(ids) * 9 // 10
    return Text(ids[:cut], ids[cut:], len(letters))


def small_model(**changes: Any) -> ModelConfig:
    """Return the config of a small model, of characters with a causal mask where `changes` say no other."""
    usual = {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_positions": 64, "positions": "rope"}
    size = {} if "vocab_size" in changes else {"vocab_size": text().vocab_size}
    return ModelConfig(**{**usual, **size, **changes})


def next_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next character: rows [B, T + 1] -> []."""
    return nnf.cross_entropy(logits_of(model, rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def moved(batch: Any, device: str | torch.device) -> Any:
    """Return a batch, a tensor or several, on a device."""
    return batch.to(device) if isinstance(batch, Tensor) else tuple(x.to(device) for x in batch)


def unseen_rows(batch: int, length: int, device: str) -> Tensor:
    """Draw rows of text that no trial learns from: [B, T + 1]."""
    return text().windows(torch.Generator().manual_seed(1), batch, length, held_out=True).to(device)


def logits_of(model: nn.Module, ids: Tensor, **more: Any) -> Tensor:
    """Return the logits of a Transformer, or of any other module that returns them."""
    output = model(ids, **more)
    return output if isinstance(output, Tensor) else output.required_logits


@dataclass(frozen=True)
class Training:
    """The settings of a short training run."""

    steps: int = 300
    batch: int = 16
    length: int = 64
    lr: float = 3e-3
    warmup: int = 20
    clip: float | None = 1.0
    weight_decay: float = 0.01


USUAL = Training()


def descend(
    model: nn.Module,
    loss_at: Callable[[int], Tensor],
    steps: int,
    lr: float,
    warmup: int,
    clip: float | None = 1.0,
    weight_decay: float = 0.01,
    beta2: float = 0.98,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Train by AdamW on `loss_at` of each step, counted from 1; yield (step, loss, gradient norm) after it.

    The learning rate rises over the warm-up and falls as a cosine to a tenth. A gradient that is not finite
    is not applied, and is the last.
    """
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / max(warmup, 1), 0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )
    for step in range(1, steps + 1):
        loss = loss_at(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        finite = bool(torch.isfinite(norm))
        if finite:
            optimizer.step()
            schedule.step()
        yield step, loss.detach(), norm
        if not finite:
            return


def train(
    model: nn.Module, draw: Draw, loss_of: Loss, plan: Training, setting: Conditions, every: int = 10
) -> Iterator[tuple[int, float, float]]:
    """Train a model on batches that are drawn; yield (step, loss, gradient norm) of some steps and the last.

    A loss that is not finite ends it.
    """
    model.to(setting.device)
    steps, examples = setting.steps(plan.steps), torch.Generator().manual_seed(setting.seed)

    def loss_at(step: int) -> Tensor:
        return loss_of(model, moved(draw(examples), setting.device))

    warmup = min(plan.warmup, steps // 2)
    for step, loss, norm in descend(model, loss_at, steps, plan.lr, warmup, plan.clip, plan.weight_decay):
        if not bool(torch.isfinite(norm)):
            yield step, math.inf, math.inf
            return
        if step % every == 0 or step == steps:
            yield step, float(loss), float(norm)
    model.eval()


def loss_curve(
    model: nn.Module, draw: Draw, loss_of: Loss, plan: Training, setting: Conditions
) -> list[list[float]]:
    """Train a model; return [step, loss] of every tenth step and the last."""
    return [[step, loss] for step, loss, _ in train(model, draw, loss_of, plan, setting)]


@torch.no_grad()
def held_out_loss(model: nn.Module, plan: Training, batches: int = 8, corpus: Text | None = None) -> float:
    """Return the mean loss of a model on text that it has not seen, in nats; None: the embedded one."""
    model.eval()
    examples, source = torch.Generator().manual_seed(1), corpus or text()
    windows = (source.windows(examples, plan.batch, plan.length, held_out=True) for _ in range(batches))
    return sum(float(next_loss(model, rows.to(device_of(model)))) for rows in windows) / batches


def train_on_text(
    model: nn.Module,
    plan: Training,
    setting: Conditions,
    loss_of: Loss = next_loss,
    corpus: Text | None = None,
) -> Numbers:
    """Train a model of characters; return its loss on unseen text, its curve and its size.

    `corpus` is the text; None: the embedded one.
    """
    corpus = corpus or text()
    draw = functools.partial(corpus.windows, batch=plan.batch, length=plan.length)
    steps = list(train(model, draw, loss_of, plan, setting))
    diverged = not math.isfinite(steps[-1][1])
    return {
        "loss": math.log(corpus.vocab_size) if diverged else held_out_loss(model, plan, corpus=corpus),
        "diverged": float(diverged),
        "curve": [[step, loss] for step, loss, _ in steps if math.isfinite(loss)],
        "norms": [[step, norm] for step, _, norm in steps if math.isfinite(norm)],
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
