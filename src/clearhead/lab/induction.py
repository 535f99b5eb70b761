"""When induction appears: a head that finds what followed the last time."""

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

import clearhead as ch
from clearhead.config import ModelConfig
from clearhead.lab.experiment import Claim, Experiment, Numbers, Picture, Setting
from clearhead.lab.learning import Schooling, logits_of, school
from clearhead.model.transformer import Transformer

SYMBOLS, HALF = 24, 16
PLAN = Schooling(steps=900, batch=32, length=2 * HALF, lr=3e-3, warmup=50)


def run(depth: int, setting: Setting) -> Numbers:
    """Train on random rows that repeat once; follow the strongest induction head and the loss."""
    model = Transformer(
        ModelConfig(vocab_size=SYMBOLS, d_model=64, n_layers=depth, n_heads=4, positions="rope",
                    max_positions=2 * HALF)
    )  # fmt: skip
    losses, scores = [], []
    for step, loss, _ in school(model, draw, repeat_loss, PLAN, setting, every=25):
        losses.append([step, loss])
        scores.append([step, induction(model)])
        model.train()
    model.eval()
    rows = draw(torch.Generator().manual_seed(1), 128).to(setting.device)
    with torch.no_grad():
        hits = logits_of(model, rows)[:, HALF:-1].argmax(-1) == rows[:, HALF + 1 :]
    return {
        "accuracy": float(hits.float().mean()),
        "induction": scores[-1][1],
        "appears": next((step for step, score in scores if score > 0.5), PLAN.steps),
        "curve": losses,
        "scores": scores,
    }


def draw(generator: torch.Generator, batch: int = PLAN.batch) -> Tensor:
    """Draw rows of random symbols, each row twice: [B, T]."""
    half = torch.randint(SYMBOLS, (batch, HALF), generator=generator)
    return torch.cat([half, half], dim=1)


def repeat_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the loss of the second half, which the first half gives away."""
    rows = rows.to(next(model.parameters()).device)
    return nnf.cross_entropy(logits_of(model, rows)[:, HALF:-1].flatten(0, 1), rows[:, HALF + 1 :].flatten())


@torch.no_grad()
def induction(model: Transformer) -> float:
    """Return the mean weight that the strongest head gives to the token after the last occurrence."""
    rows = draw(torch.Generator().manual_seed(2), 32).to(next(model.parameters()).device)
    with ch.record(model.eval(), "*.pattern") as seen:
        model(rows)
    queries = torch.arange(HALF, 2 * HALF - 1)
    return max(
        float(pattern[:, :, queries, queries - HALF + 1].mean((0, 2)).max()) for pattern in seen.values()
    )


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
        "accuracy": "share of the symbols of the second half that are named",
        "induction": "weight of the strongest head on the token after the last occurrence",
        "appears": "step at which that weight passes one half",
    },
    pictures=(
        Picture("scores", "The strongest induction head", "step", "weight", curve="scores"),
        Picture("loss", "Loss of the repeated half", "step", "nats a symbol", curve="curve"),
    ),
    seconds=40,
    setup={"model": "width 64, 4 heads, RoPE", **vars(PLAN)},
)
