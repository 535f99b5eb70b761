"""When induction appears: a head that finds what followed the last time."""

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

import clearhead as ch
from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import Schooling, logits_of, school

SYMBOLS, PAIRS, LENGTH = 8, 3, 16  # pairs of a row; a row is drawn from them, a pair at a time
PLAN = Schooling(steps=600, batch=64, length=LENGTH, lr=1e-2, warmup=10)


def run(depth: int, setting: Conditions) -> Numbers:
    """Train on rows of random pairs that come again; follow the strongest induction head and the loss."""
    model = Transformer(
        ModelConfig(vocab_size=SYMBOLS, d_model=32, n_layers=depth, n_heads=2, positions="rope",
                    max_positions=LENGTH, init="xavier")
    )  # fmt: skip
    losses, scores = [], []
    for step, loss, _ in school(model, draw, repeat_loss, PLAN, setting, every=25):
        losses.append([step, loss])
        scores.append([step, induction(model)])
        model.train()
    model.eval()
    rows, known = (one.to(setting.device) for one in draw(torch.Generator().manual_seed(1), 256))
    with torch.no_grad():
        guessed = logits_of(model, rows)[:, :-1].argmax(-1)
    return {
        "accuracy": float((guessed == rows[:, 1:])[known[:, :-1]].float().mean()),
        "induction": scores[-1][1],
        "appears": next((step for step, score in scores if score > 0.5), setting.steps(PLAN.steps)),
        "curve": losses,
        "scores": scores,
    }


def draw(generator: torch.Generator, batch: int = PLAN.batch) -> tuple[Tensor, Tensor]:
    """Draw rows [B, T] of pairs in any order, and where the first of a pair stands that came before [B, T].

    Which symbol follows which is new in each row, so that only the row itself tells.
    """
    mixed = torch.rand(batch, SYMBOLS, generator=generator).argsort(1)[:, : 2 * PAIRS].view(batch, PAIRS, 2)
    picks = torch.randint(PAIRS, (batch, LENGTH // 2), generator=generator)
    rows = mixed.gather(1, picks[:, :, None].expand(-1, -1, 2)).flatten(1)
    before = (picks[:, :, None] == picks[:, None, :]).tril(-1).any(-1)  # B T/2
    return rows, torch.stack([before, torch.zeros_like(before)], dim=2).flatten(1)


def repeat_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of the second symbols of pairs that came before."""
    rows, known = (one.to(next(model.parameters()).device) for one in batch)
    known = known[:, :-1]
    return nnf.cross_entropy(logits_of(model, rows)[:, :-1][known], rows[:, 1:][known])


@torch.no_grad()
def induction(model: Transformer) -> float:
    """Return the mean weight that the strongest head gives to the symbols after earlier occurrences."""
    rows, known = draw(torch.Generator().manual_seed(2), 32)
    before = nnf.pad(rows[:, :-1], (1, 0), value=-1)  # the symbol before each key
    after = (rows[:, :, None] == before[:, None, :]).tril() & known[:, :, None]
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
        "accuracy": "share of the symbols named that a pair before gives away",
        "induction": "weight of the strongest head on what followed the symbol before",
        "appears": "step at which that weight passes one half",
    },
    pictures=(
        Picture("scores", "The strongest induction head", "step", "weight", curve="scores"),
        Picture("loss", "Loss of the repeated symbols", "step", "nats a symbol", curve="curve"),
    ),
    seconds=20,
    setup={"model": "width 32, 2 heads, RoPE", **vars(PLAN)},
)
