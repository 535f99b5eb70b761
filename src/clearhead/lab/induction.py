"""When induction appears: a head that finds what followed the last time."""

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

import clearhead as ch
from clearhead.config import ModelConfig
from clearhead.lab.experiment import Claim, Experiment, Numbers, Picture, Setting
from clearhead.lab.learning import Schooling, logits_of, school
from clearhead.model.transformer import Transformer

SYMBOLS, LENGTH = 12, 24
PERIODS = 4, 8  # a row repeats after so many symbols, at least and at most: no fixed distance gives it away
PLAN = Schooling(steps=600, batch=32, length=LENGTH, lr=1e-2, warmup=10)


def run(depth: int, setting: Setting) -> Numbers:
    """Train on random rows that repeat; follow the strongest induction head and the loss."""
    model = Transformer(
        ModelConfig(vocab_size=SYMBOLS, d_model=32, n_layers=depth, n_heads=2, positions="learned",
                    max_positions=LENGTH, init="xavier")
    )  # fmt: skip
    losses, scores = [], []
    for step, loss, _ in school(model, draw, repeat_loss, PLAN, setting, every=25):
        losses.append([step, loss])
        scores.append([step, induction(model)])
        model.train()
    model.eval()
    rows, period = (one.to(setting.device) for one in draw(torch.Generator().manual_seed(1), 128))
    with torch.no_grad():
        guessed = logits_of(model, rows)[:, :-1].argmax(-1)
    return {
        "accuracy": float((guessed == rows[:, 1:])[repeated(period)].float().mean()),
        "induction": scores[-1][1],
        "appears": next((step for step, score in scores if score > 0.5), setting.steps(PLAN.steps)),
        "curve": losses,
        "scores": scores,
    }


def draw(generator: torch.Generator, batch: int = PLAN.batch) -> tuple[Tensor, Tensor]:
    """Draw rows [B, T] that repeat their first symbols, all different, and the period of each row [B]."""
    low, high = PERIODS
    period = torch.randint(low, high + 1, (batch,), generator=generator)
    first = torch.rand(batch, SYMBOLS, generator=generator).argsort(1)
    return first.gather(1, torch.arange(LENGTH).expand(batch, -1) % period[:, None]), period


def repeated(period: Tensor) -> Tensor:
    """Return the places whose symbol was seen before, so that the next one is known: [B, T - 1]."""
    return torch.arange(LENGTH - 1, device=period.device) >= period[:, None]


def repeat_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of the symbols that the first period gives away."""
    rows, period = (one.to(next(model.parameters()).device) for one in batch)
    known = repeated(period)
    return nnf.cross_entropy(logits_of(model, rows)[:, :-1][known], rows[:, 1:][known])


@torch.no_grad()
def induction(model: Transformer) -> float:
    """Return the mean weight that the strongest head gives to the symbols after earlier occurrences."""
    rows, period = draw(torch.Generator().manual_seed(2), 32)
    before = nnf.pad(rows[:, :-1], (1, 0), value=-1)  # the symbol before each key
    after = (rows[:, :, None] == before[:, None, :]).tril() & nnf.pad(repeated(period), (0, 1))[:, :, None]
    with ch.record(model.eval(), "*.pattern") as seen:
        model(rows.to(next(model.parameters()).device))
    shares = [(pattern.cpu() * after[:, None]).sum((0, 2, 3)) for pattern in seen.values()]  # H
    return float(torch.stack(shares).max() / after.any(-1).sum())


EXPERIMENT = Experiment(
    title="When induction appears",
    question="Does a model need two layers to copy what followed the last time, and when does it learn to?",
    arms={"1 layer": 1, "2 layers": 2, "3 layers": 3},
    run=run,
    claims=(
        Claim("Induction needs two layers.", "accuracy", "1 layer", "2 layers", 0.3),
        Claim(
            "A head that attends to what followed the last time is there.",
            "induction",
            "1 layer",
            "2 layers",
            0.2,
        ),
    ),
    figures={
        "accuracy": "share of the repeated symbols that are named",
        "induction": "weight of the strongest head on what followed the symbol before",
        "appears": "step at which that weight passes one half",
    },
    pictures=(
        Picture("scores", "The strongest induction head", "step", "weight", curve="scores"),
        Picture("loss", "Loss of the repeated symbols", "step", "nats a symbol", curve="curve"),
    ),
    seconds=40,
    setup={"model": "width 32, 2 heads, learned positions", **vars(PLAN)},
)
