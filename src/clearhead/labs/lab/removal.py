"""Heads removed from a trained model, in the order of their importance or in another."""

import torch

from clearhead.inside.ablation import Examples, ablating
from clearhead.inside.pruning import By, ordered, scores
from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import Schooling, held_out_loss, language_model, read, text
from clearhead.learn.batches.batch import Batch

PLAN = Schooling(steps=300, batch=16, length=64)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def run(order: str, setting: Conditions) -> Numbers:
    """Train a model of 16 heads, rank them on text that it was trained on, and switch them off one by one."""
    model = read(language_model(n_heads=8, init="xavier"), PLAN, setting)[0]
    rows = text().windows(torch.Generator().manual_seed(2), PLAN.batch, PLAN.length)
    examples = Examples("lm", (Batch(rows[:, :-1], rows[:, 1:]),))
    by: By = "random" if order == "random" else "importance"
    numbers = scores(model, examples, by, setting.seed).numbers(model.config)
    heads = [head for unit in ordered(model.config, numbers) for head in unit]
    heads = heads[::-1] if order == "most" else heads
    losses: dict[float, float] = {}
    for share in SHARES:
        with ablating(model, heads[: round(share * len(heads))]):
            losses[share] = held_out_loss(model, PLAN, batches=4)
    return {
        "whole": losses[0.0],
        "quarter": losses[0.25],
        "half": losses[0.5],
        "curve": [[share, loss] for share, loss in losses.items()],
    }


EXPERIMENT = Experiment(
    title="Heads removed",
    question="How many heads does a trained model need, and does their importance say which?",
    arms={"least important first": "least", "at random": "random", "most important first": "most"},
    run=run,
    claims=(
        Claim(
            "Half of the heads can go at less cost when the least important go first.",
            "half",
            "least important first",
            "at random",
        ),
        Claim(
            "The most important heads are missed most.",
            "half",
            "least important first",
            "most important first",
        ),
    ),
    figures={
        "whole": "nats a character on unseen text, with all heads",
        "quarter": "the same with a quarter of the heads gone",
        "half": "the same with half of them gone",
    },
    pictures=(
        Picture("removed", "Loss against heads removed", "share removed", "nats a character", curve="curve"),
    ),
    seconds=25,
    setup={"model": "2 layers of width 64, 8 heads each, begun as Xavier's", **vars(PLAN)},
)
