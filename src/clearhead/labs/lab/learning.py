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
from clearhead.core.transformer import Transformer
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
    letters: str

    def windows(self, generator: torch.Generator, batch: int, length: int, held_out: bool = False) -> Tensor:
        """Draw rows of `length` + 1 characters at random: [B, T + 1]."""
        source = self.held_out if held_out else self.train
        starts = torch.randint(len(source) - length - 1, (batch, 1), generator=generator)
        return source[starts + torch.arange(length + 1)]


@functools.cache
def prose(name: str = "stdlib-docs", characters: int = CHARACTERS) -> str:
    """Return the beginning of an embedded text, lower-cased."""
    documents: Any = CORPORA[name].load()
    return "\n".join("".join(pieces) for pieces in documents())[:characters].lower()


@functools.cache
def text(name: str = "stdlib-docs", characters: int = CHARACTERS) -> Text:
    """Return an embedded text as ids; characters that are rare in it are one character."""
    whole = prose(name, characters)
    common = (letter for letter, count in Counter(whole).items() if count >= len(whole) / 20_000)
    letters = "\0" + "".join(sorted(common))
    numbers = {letter: number for number, letter in enumerate(letters)}
    ids = torch.tensor([numbers.get(letter, 0) for letter in whole])
    cut = len(ids) * 9 // 10
    return Text(ids[:cut], ids[cut:], letters)


def language_model(**changes: Any) -> ModelConfig:
    """Return the config of a small model of characters; `changes` are fields of it."""
    usual: dict[str, Any] = {
        "vocab_size": len(text().letters),
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_positions": 64,
        "positions": "rope",
    }
    return ModelConfig(**usual | changes)


def next_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next character: rows [B, T + 1] -> []."""
    rows = rows.to(device_of(model))
    logits = logits_of(model, rows[:, :-1])
    return nnf.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's weights."""
    return next(model.parameters()).device


def logits_of(model: nn.Module, ids: Tensor, **more: Any) -> Tensor:
    """Return the logits of a Transformer, or of any other module that returns them."""
    found = model(ids, **more)
    return found if isinstance(found, Tensor) else found.required_logits


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


def train(
    model: nn.Module, draw: Draw, loss_of: Loss, plan: Training, setting: Conditions, every: int = 10
) -> Iterator[tuple[int, float, float]]:
    """Train a model; yield (step, loss, norm of the gradient) at every `every`-th step and at the last.

    The rate rises over the warm-up and falls as a cosine. A loss that is not finite ends it.
    """
    model.to(setting.device).train()
    steps, examples = setting.steps(plan.steps), torch.Generator().manual_seed(setting.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=plan.weight_decay, fused=True
    )
    warmup = min(plan.warmup, steps // 2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / max(warmup, 1), 0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )
    for step in range(1, steps + 1):
        loss = loss_of(model, draw(examples))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), plan.clip or math.inf)
        if not bool(torch.isfinite(norm)):
            yield step, math.inf, math.inf
            return
        optimizer.step()
        schedule.step()
        if step % every == 0 or step == steps:
            yield step, float(loss.detach()), float(norm)
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
    found = [
        float(next_loss(model, source.windows(examples, plan.batch, plan.length, held_out=True)))
        for _ in range(batches)
    ]
    return sum(found) / len(found)


def train_model(config: ModelConfig, plan: Training, setting: Conditions) -> tuple[Transformer, Numbers]:
    """Train a model of characters; return it with its loss on unseen text, its curve and its size."""
    model = Transformer(config)
    return model, train_on_text(model, plan, setting)


def train_on_text(model: nn.Module, plan: Training, setting: Conditions) -> Numbers:
    """Train any model of characters on the embedded text."""
    corpus = text()
    draw = functools.partial(corpus.windows, batch=plan.batch, length=plan.length)
    steps = list(train(model, draw, next_loss, plan, setting))
    broken = not math.isfinite(steps[-1][1])
    return {
        "loss": math.log(len(corpus.letters)) if broken else held_out_loss(model, plan),
        "diverged": float(broken),
        "curve": [[step, loss] for step, loss, _ in steps if math.isfinite(loss)],
        "norms": [[step, norm] for step, _, norm in steps if math.isfinite(norm)],
        "parameters": sum(one.numel() for one in model.parameters()),
    }
