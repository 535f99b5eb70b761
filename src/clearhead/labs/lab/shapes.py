"""Choices of a language model at equal cost: width, depth and heads; tying, smoothing, experts."""

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

import clearhead as ch
from clearhead.core.transformer import Transformer
from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import (
    Schooling,
    held_out_loss,
    language_model,
    logits_of,
    next_loss,
    read,
    school,
    text,
)
from clearhead.learn.losses import balance_loss
from clearhead.variants.costs import cost

PLAN = Schooling(steps=300, batch=16, length=64)
LOSS = {"loss": "nats a character on unseen text"}
CURVE = Picture("loss", "Loss while training", "step", "nats a character", curve="curve")


def run_shape(fields: dict[str, Any], setting: Conditions) -> Numbers:
    """Train a model with these fields."""
    config = language_model(**fields)
    found = read(config, PLAN, setting)[1]
    return {**found, "flops": cost(config, PLAN.length).flops.training_per_token}


# 12 L D^2 weights in the blocks: 1 x 128, 2 x 90, 4 x 64, 8 x 45, rounded to whole heads.
SHAPES = Experiment(
    title="Width, depth and heads at equal size",
    question="Of models of the same number of weights, which shape learns best?",
    arms={
        "1 layer of 128": {"n_layers": 1, "d_model": 128, "n_heads": 8},
        "2 layers of 88": {"n_layers": 2, "d_model": 88, "n_heads": 4},
        "4 layers of 64": {"n_layers": 4, "d_model": 64, "n_heads": 4},
        "8 layers of 44": {"n_layers": 8, "d_model": 44, "n_heads": 2},
        "4 layers, 1 head": {"n_layers": 4, "d_model": 64, "n_heads": 1},
        "4 layers, 16 heads": {"n_layers": 4, "d_model": 64, "n_heads": 16},
    },
    run=run_shape,
    claims=(
        Claim(
            "Some depth pays: four layers beat one of the same size.",
            "loss",
            "4 layers of 64",
            "1 layer of 128",
        ),
        Claim("Several heads beat one.", "loss", "4 layers of 64", "4 layers, 1 head"),
        Claim("Heads can be too narrow.", "loss", "4 layers of 64", "4 layers, 16 heads"),
    ),
    figures={**LOSS, "parameters": "weights", "flops": "floating-point operations a token, in training"},
    pictures=(CURVE, Picture("final", "Loss by shape", "", "nats a character", figure="loss")),
    seconds=30,
    setup=vars(PLAN),
)

TYING = Experiment(
    title="One table for reading and writing",
    question="What does tying the output layer to the token table cost, and what does it save?",
    arms={"tied": {"tie_embeddings": True}, "untied": {"tie_embeddings": False}},
    run=run_shape,
    claims=(Claim("Tying saves weights.", "parameters", "tied", "untied", 1.0),
            Claim("Tying learns no worse.", "loss", "tied", "untied", -0.02)),
    figures={**LOSS, "parameters": "weights"},
    pictures=(CURVE,),
    seconds=20,
    setup=vars(PLAN),
)  # fmt: skip

# Sizes at equal FLOPs -------------------------------------------------------------------------------------


def run_budget(width: int, setting: Conditions) -> Numbers:
    """Train a model of a width for as many steps as the FLOPs of the usual width and steps allow."""
    work = [cost(language_model(d_model=one), PLAN.length).flops.training_per_token for one in (64, width)]
    plan = replace(PLAN, steps=round(PLAN.steps * work[0] / work[1]))
    found = read(language_model(d_model=width), plan, setting)[1]
    return {**found, "steps": setting.steps(plan.steps)}


BUDGET = Experiment(
    title="Sizes at equal FLOPs",
    question="For the same work of training: a small model with many steps, or a large one with few?",
    arms={f"width {width}": width for width in (16, 32, 64, 128)},
    run=run_budget,
    claims=(
        Claim("A model can be too large for its budget.", "loss", "width 32", "width 128"),
        Claim("A model can be too small for its budget.", "loss", "width 32", "width 16"),
    ),
    figures={**LOSS, "parameters": "weights", "steps": "steps that the same FLOPs allow"},
    pictures=(CURVE, Picture("final", "Loss by width", "", "nats a character", figure="loss")),
    seconds=20,
    setup=vars(PLAN),
)

# Label smoothing ------------------------------------------------------------------------------------------


def run_smoothing(share: float, setting: Conditions) -> Numbers:
    """Train with a share of each target spread over all characters; measure loss and calibration."""
    model, corpus = Transformer(language_model()), text()

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        rows = rows.to(next(model.parameters()).device)
        logits = logits_of(model, rows[:, :-1]).flatten(0, 1)
        return nnf.cross_entropy(logits, rows[:, 1:].flatten(), label_smoothing=share)

    draw = functools.partial(corpus.windows, batch=PLAN.batch, length=PLAN.length)
    steps = list(school(model, draw, loss_of, PLAN, setting))
    rows = corpus.windows(torch.Generator().manual_seed(1), 64, PLAN.length, held_out=True).to(setting.device)
    with torch.no_grad():
        best = logits_of(model.eval(), rows[:, :-1]).softmax(-1).max(-1)
    sure, right = best.values.mean(), (best.indices == rows[:, 1:]).float().mean()
    return {
        "loss": held_out_loss(model, PLAN),
        "accuracy": float(right),
        "overconfidence": float(sure - right),
        "curve": [[step, loss] for step, loss, _ in steps],
    }


SMOOTHING = Experiment(
    title="Label smoothing",
    question="What does label smoothing do to loss, accuracy and confidence?",
    arms={"none": 0.0, "0.1": 0.1},
    run=run_smoothing,
    claims=(
        Claim("Smoothing raises the loss of the true next character.", "loss", "none", "0.1", 0.0),
        Claim("Smoothing lowers confidence.", "overconfidence", "0.1", "none", 0.0),
    ),
    figures={
        **LOSS,
        "accuracy": "share of characters named",
        "overconfidence": "mean probability of the likeliest character minus how often it is right",
    },
    pictures=(Picture("confidence", "Confidence above accuracy", "", "share", figure="overconfidence"),),
    seconds=20,
    setup=vars(PLAN),
)

# Mixtures of experts ----------------------------------------------------------------------------------------


def run_experts(weight: float, setting: Conditions) -> Numbers:
    """Train a mixture with a loss that spreads tokens evenly over the experts, of a weight."""
    model, corpus = Transformer(language_model(n_experts=8, n_active_experts=1, d_ff=64)), text()

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        return next_loss(model, rows) + weight * balance_loss(model)

    draw = functools.partial(corpus.windows, batch=PLAN.batch, length=PLAN.length)
    steps = list(school(model, draw, loss_of, PLAN, setting))
    rows = corpus.windows(torch.Generator().manual_seed(1), 32, PLAN.length, held_out=True)
    with torch.no_grad(), ch.record(model.eval(), "*.router") as seen:
        next_loss(model, rows)
    busiest = [
        float(torch.bincount(logits.argmax(-1).flatten(), minlength=8).max() / logits[..., 0].numel())
        for logits in seen.values()
    ]
    return {
        "loss": held_out_loss(model, PLAN),
        "busiest": sum(busiest) / len(busiest),
        "curve": [[step, loss] for step, loss, _ in steps],
    }


EXPERTS = Experiment(
    title="Balance of experts",
    question="Do experts share the work by themselves?",
    arms={"no balance loss": 0.0, "balance loss 0.01": 0.01},
    run=run_experts,
    claims=(
        Claim("Without a loss for it, one expert gets more than its share.", "busiest", "balance loss 0.01",
              "no balance loss", 0.0),
    ),
    figures={**LOSS, "busiest": "share of the tokens that the busiest of 8 experts gets, mean over layers"},
    pictures=(Picture("busiest", "The busiest of 8 experts", "", "share of the tokens", figure="busiest"),),
    seconds=30,
    setup={"experts": 8, "active": 1, **vars(PLAN)},
)  # fmt: skip
