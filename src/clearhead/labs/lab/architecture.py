"""Experiments on the model: norms, scores, residuals; size, depth, heads, tying, smoothing, experts."""

import functools
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

import clearhead as ch
from clearhead.core.stack import Residual
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Transformer
from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import (
    USUAL,
    Training,
    device_of,
    held_out_loss,
    language_model,
    logits_of,
    loss_curve,
    next_loss,
    text,
    train_model,
    train_on_text,
)
from clearhead.learn.losses import balance_loss
from clearhead.run.kernels.parts import like
from clearhead.variants.costs import cost

DEEP = 12
SHORT = Training(steps=200, batch=16, length=48, lr=3e-3)

# Norms and warm-up ------------------------------------------------------------------------------------------


def run_norms(arm: tuple[str, int, int], setting: Conditions) -> Numbers:
    """Train a stack of a depth with its norms before or after each sublayer, and with a warm-up or none."""
    place, depth, warmup = arm
    config = language_model(norm_position=place, n_layers=depth, d_model=48, max_positions=SHORT.length)
    plan = Training(**{**vars(SHORT), "warmup": warmup})
    return train_model(config, plan, setting)[1]


_PLACES = {
    f"{place}-norm, {depth} layers, {'warm-up' if warmup else 'no warm-up'}": (place, depth, warmup)
    for depth in (2, DEEP)
    for place in ("pre", "post")
    for warmup in (0, 40)
}
NORMS = Experiment(
    title="Pre- and post-norm, with and without warm-up",
    question="Does post-norm need a warm-up, and pre-norm none?",
    arms=_PLACES,
    run=run_norms,
    claims=(
        Claim(
            "A deep stack with post-norm does not train without warm-up as pre-norm does.",
            "loss",
            f"pre-norm, {DEEP} layers, no warm-up",
            f"post-norm, {DEEP} layers, no warm-up",
            0.1,
        ),
        Claim(
            "Warm-up helps a deep post-norm stack.",
            "loss",
            f"post-norm, {DEEP} layers, warm-up",
            f"post-norm, {DEEP} layers, no warm-up",
            0.02,
        ),
        Claim(
            "Depth is what hurts: with 2 layers post-norm trains without warm-up.",
            "loss",
            "post-norm, 2 layers, no warm-up",
            f"post-norm, {DEEP} layers, no warm-up",
            0.1,
        ),
    ),
    figures={"loss": "nats a character on unseen text", "diverged": "1: the loss was not finite"},
    pictures=(Picture("loss", "Loss while training", "step", "nats a character", curve="curve"),),
    seconds=25,
    setup={"model": "width 48, 4 heads", **vars(SHORT)},
)

# The scale of the scores ------------------------------------------------------------------------------------


def run_scale(scale: float | None, setting: Conditions) -> Numbers:
    """Train one wide head whose scores are divided by the root of its width, or not."""
    config = language_model(
        n_heads=1, d_model=128, attention_scale=scale, init="xavier", max_positions=SHORT.length
    )
    rows = text().windows(torch.Generator().manual_seed(1), 8, SHORT.length, held_out=True)
    torch.manual_seed(setting.seed)
    before = sharpness(Transformer(config).to(setting.device), rows.to(setting.device))
    torch.manual_seed(setting.seed)
    model, found = train_model(config, SHORT, setting)
    after = sharpness(model, rows.to(setting.device))
    return {**found, "sharpness": before["sharpness"], "sharpness at the end": after["sharpness"],
            "gradient": before["gradient"]}  # fmt: skip


def sharpness(model: Transformer, rows: Tensor) -> dict[str, float]:
    """Return the largest weight of a query, mean, and the norm of the gradient of queries and keys."""
    with ch.record(model, "*.pattern") as seen:
        loss = next_loss(model, rows)
        loss.backward()  # type: ignore[no-untyped-call]
    largest = [pattern[..., SHORT.length // 2 :, :].amax(-1).mean() for pattern in seen.values()]
    weights = [part for name, part in model.named_parameters() if name.endswith(("q.weight", "k.weight"))]
    squares = [one.grad.square().sum() for one in weights if one.grad is not None]
    model.zero_grad(set_to_none=True)
    return {
        "sharpness": float(torch.stack(largest).mean()),
        "gradient": math.sqrt(float(torch.stack(squares).sum())),
    }


SCALE = Experiment(
    title="Scores divided by the root of the head's width",
    question="What happens to the softmax, and to learning, without the division?",
    arms={"divided": None, "not divided": 1.0},
    run=run_scale,
    claims=(
        Claim(
            "Without the scale the softmax is saturated from the start.",
            "sharpness",
            "divided",
            "not divided",
            0.1,
        ),
        Claim("Without the scale the model learns worse.", "loss", "divided", "not divided", 0.0),
    ),
    figures={
        "loss": "nats a character on unseen text",
        "sharpness": "largest weight of a query before training, mean; 1: one key has it all",
        "sharpness at the end": "the same after training",
        "gradient": "norm of the gradient of queries and keys before training",
    },
    pictures=(
        Picture("loss", "Loss while training", "step", "nats a character", curve="curve"),
        Picture("sharpness", "Largest weight of a query, before training", "", "weight", figure="sharpness"),
    ),
    seconds=15,
    setup={"model": "2 layers, one head of width 128", **vars(SHORT)},
)

# Residuals and norms --------------------------------------------------------------------------------------


class Bare(Residual):
    """A sublayer that replaces the stream: nothing is added to it."""

    def add(self, x: Tensor, y: Tensor, tap: Tap = SILENT) -> Tensor:
        """Return the sublayer's output alone."""
        return y


def stripped(model: Transformer, residuals: bool, norms: bool) -> Transformer:
    """Take the residuals or the norms out of every block."""
    for name, part in list(model.named_modules()):
        if isinstance(part, Residual):
            part = part if residuals else like(part, Bare)
            if not norms:
                part.before = None
            model.set_submodule(name, part)
    return model


def run_residuals(arm: tuple[bool, bool], setting: Conditions) -> Numbers:
    """Train a deep stack with or without residuals and norms; measure gradients and the loss around."""
    model = stripped(Transformer(language_model(n_layers=8, d_model=48, max_positions=SHORT.length)), *arm)
    model.to(setting.device)
    rows = text().windows(torch.Generator().manual_seed(1), 8, SHORT.length, held_out=True)
    next_loss(model, rows).backward()  # type: ignore[no-untyped-call]
    slopes = [[number, _norm(block)] for number, block in enumerate(model.main.blocks)]
    model.zero_grad(set_to_none=True)
    found = train_on_text(model, SHORT, setting)
    first, last = slopes[0][1], slopes[-1][1]
    return {
        **found,
        "gradient": math.log10(max(first, 1e-30) / max(last, 1e-30)),
        "gradients": slopes,
        "surface": surface(model, rows, setting.seed),
    }


def _norm(part: nn.Module) -> float:
    squares = [float(one.grad.square().sum()) for one in part.parameters() if one.grad is not None]
    return math.sqrt(sum(squares))


@torch.no_grad()
def surface(model: nn.Module, rows: Tensor, seed: int) -> list[list[float]]:
    """Return the loss along a line through the weights; each matrix moves by a share of its own size."""
    generator = torch.Generator().manual_seed(seed)
    there = [one.detach().clone() for one in model.parameters()]
    ways = [torch.randn(one.shape, generator=generator).to(one.device) for one in there]
    ways = [way * one.norm() / way.norm().clamp(min=1e-12) for way, one in zip(ways, there)]
    points: list[list[float]] = []
    for share in (-0.6, -0.4, -0.2, -0.1, 0.0, 0.1, 0.2, 0.4, 0.6):
        for one, home, way in zip(model.parameters(), there, ways):
            one.copy_(home + share * way)
        loss = float(next_loss(model, rows))
        points.append([share, loss if math.isfinite(loss) else 1e9])
    for one, home in zip(model.parameters(), there):
        one.copy_(home)
    return points


_PARTS: dict[str, Any] = {
    "residuals and norms": (True, True),
    "no norms": (True, False),
    "no residuals": (False, True),
    "neither": (False, False),
}
RESIDUALS = Experiment(
    title="Residuals and norms, on and off",
    question="What do residual connections and norms do for a stack of 8 layers?",
    arms=_PARTS,
    run=run_residuals,
    claims=(
        Claim(
            "A deep stack without residuals does not learn.",
            "loss",
            "residuals and norms",
            "no residuals",
            0.3,
        ),
        Claim("Norms help a stack that has residuals.", "loss", "residuals and norms", "no norms", 0.0),
    ),
    figures={
        "loss": "nats a character on unseen text",
        "gradient": "decimal logarithm of the first gradient over the last by layer, before training",
    },
    pictures=(
        Picture("loss", "Loss while training", "step", "nats a character", curve="curve"),
        Picture("gradients", "Gradient at first", "layer", "norm", curve="gradients", logarithmic=True),
        Picture("surface", "Loss around the weights", "along a line", "nats a character", curve="surface"),
    ),
    seconds=25,
    setup={"model": "8 layers of width 48, 4 heads", **vars(SHORT)},
)  # fmt: skip


# Width, depth, heads and tying at equal cost --------------------------------------------------------------


LOSS = {"loss": "nats a character on unseen text"}
CURVE = Picture("loss", "Loss while training", "step", "nats a character", curve="curve")


def run_shape(fields: dict[str, Any], setting: Conditions) -> Numbers:
    """Train a model with these fields."""
    config = language_model(**fields)
    found = train_model(config, USUAL, setting)[1]
    return {**found, "flops": cost(config, USUAL.length).flops.training_per_token}


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
    setup=vars(USUAL),
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
    setup=vars(USUAL),
)  # fmt: skip

# Sizes at equal FLOPs -------------------------------------------------------------------------------------


def run_budget(width: int, setting: Conditions) -> Numbers:
    """Train a model of a width for as many steps as the FLOPs of the usual width and steps allow."""
    work = [cost(language_model(d_model=one), USUAL.length).flops.training_per_token for one in (64, width)]
    plan = replace(USUAL, steps=round(USUAL.steps * work[0] / work[1]))
    found = train_model(language_model(d_model=width), plan, setting)[1]
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
    setup=vars(USUAL),
)

# Label smoothing ------------------------------------------------------------------------------------------


def run_smoothing(share: float, setting: Conditions) -> Numbers:
    """Train with a share of each target spread over all characters; measure loss and calibration."""
    model, corpus = Transformer(language_model()), text()

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        rows = rows.to(device_of(model))
        logits = logits_of(model, rows[:, :-1]).flatten(0, 1)
        return nnf.cross_entropy(logits, rows[:, 1:].flatten(), label_smoothing=share)

    draw = functools.partial(corpus.windows, batch=USUAL.batch, length=USUAL.length)
    curve = loss_curve(model, draw, loss_of, USUAL, setting)
    rows = corpus.windows(torch.Generator().manual_seed(1), 64, USUAL.length, held_out=True)
    rows = rows.to(setting.device)
    with torch.no_grad():
        best = logits_of(model.eval(), rows[:, :-1]).softmax(-1).max(-1)
    sure, right = best.values.mean(), (best.indices == rows[:, 1:]).float().mean()
    return {
        "loss": held_out_loss(model, USUAL),
        "accuracy": float(right),
        "overconfidence": float(sure - right),
        "curve": curve,
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
    setup=vars(USUAL),
)

# Mixtures of experts ----------------------------------------------------------------------------------------


def run_experts(weight: float, setting: Conditions) -> Numbers:
    """Train a mixture with a loss that spreads tokens evenly over the experts, of a weight."""
    model, corpus = Transformer(language_model(n_experts=8, n_active_experts=1, d_ff=64)), text()

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        return next_loss(model, rows) + weight * balance_loss(model)

    draw = functools.partial(corpus.windows, batch=USUAL.batch, length=USUAL.length)
    curve = loss_curve(model, draw, loss_of, USUAL, setting)
    rows = corpus.windows(torch.Generator().manual_seed(1), 32, USUAL.length, held_out=True)
    with torch.no_grad(), ch.record(model.eval(), "*.router") as seen:
        next_loss(model, rows)
    busiest = [
        float(torch.bincount(logits.argmax(-1).flatten(), minlength=8).max() / logits[..., 0].numel())
        for logits in seen.values()
    ]
    return {
        "loss": held_out_loss(model, USUAL),
        "busiest": sum(busiest) / len(busiest),
        "curve": curve,
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
    setup={"experts": 8, "active": 1, **vars(USUAL)},
)  # fmt: skip
