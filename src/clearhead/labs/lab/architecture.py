"""Experiments on the model: norms, scores, residuals; size, depth, heads, tying, smoothing, experts."""

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
from clearhead.labs.lab.experiment import LOSS, LOSS_CURVE, Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import (
    USUAL,
    Training,
    logits_of,
    next_loss,
    small_model,
    train_on_text,
    unseen_rows,
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
    config = small_model(norm_position=place, n_layers=depth, d_model=48, max_positions=SHORT.length)
    return train_on_text(Transformer(config), replace(SHORT, warmup=warmup), setting)


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
    claims={
        "A deep stack with post-norm does not train without warm-up as pre-norm does.": Claim(
            "loss", f"pre-norm, {DEEP} layers, no warm-up", f"post-norm, {DEEP} layers, no warm-up", 0.1
        ),
        "Warm-up helps a deep post-norm stack.": Claim(
            "loss", f"post-norm, {DEEP} layers, warm-up", f"post-norm, {DEEP} layers, no warm-up", 0.02
        ),
        "Depth is what hurts: with 2 layers post-norm trains without warm-up.": Claim(
            "loss", "post-norm, 2 layers, no warm-up", f"post-norm, {DEEP} layers, no warm-up", 0.1
        ),
    },
    figures={**LOSS, "diverged": "1: the loss was not finite"},
    pictures=(LOSS_CURVE,),
    seconds=25,
    setup={"model": "width 48, 4 heads", **vars(SHORT)},
)

# The scale of the scores ------------------------------------------------------------------------------------


def run_scale(scale: float | None, setting: Conditions) -> Numbers:
    """Train one wide head whose scores are divided by the root of its width, or not."""
    config = small_model(
        n_heads=1, d_model=128, attention_scale=scale, init="xavier", max_positions=SHORT.length
    )
    rows = unseen_rows(8, SHORT.length, setting.device)
    model = Transformer(config).to(setting.device)
    before = sharpness(model, rows)
    numbers = train_on_text(model, SHORT, setting)
    after = sharpness(model, rows)
    return {**numbers, "sharpness": before["sharpness"], "sharpness at the end": after["sharpness"],
            "gradient": before["gradient"]}  # fmt: skip


def sharpness(model: Transformer, rows: Tensor) -> dict[str, float]:
    """Return the largest weight of a query, mean, and the norm of the gradient of queries and keys."""
    with ch.record(model, "*.pattern") as seen:
        loss = next_loss(model, rows)
        loss.backward()  # type: ignore[no-untyped-call]
    largest = [pattern[..., SHORT.length // 2 :, :].amax(-1).mean() for pattern in seen.values()]
    weights = [weight for name, weight in model.named_parameters() if name.endswith(("q.weight", "k.weight"))]
    squares = [weight.grad.square().sum() for weight in weights if weight.grad is not None]
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
    claims={
        "Without the scale the softmax is saturated from the start.": Claim(
            "sharpness", "divided", "not divided", 0.1
        ),
        "Without the scale the model learns worse.": Claim("loss", "divided", "not divided", 0.0),
    },
    figures={
        **LOSS,
        "sharpness": "largest weight of a query before training, mean; 1: one key has it all",
        "sharpness at the end": "the same after training",
        "gradient": "norm of the gradient of queries and keys before training",
    },
    pictures=(
        LOSS_CURVE,
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
    model = stripped(Transformer(small_model(n_layers=8, d_model=48, max_positions=SHORT.length)), *arm)
    model.to(setting.device)
    rows = unseen_rows(8, SHORT.length, setting.device)
    next_loss(model, rows).backward()  # type: ignore[no-untyped-call]
    slopes = [[number, _norm(block)] for number, block in enumerate(model.main.blocks)]
    model.zero_grad(set_to_none=True)
    numbers = train_on_text(model, SHORT, setting)
    first, last = slopes[0][1], slopes[-1][1]
    return {
        **numbers,
        "gradient": math.log10(max(first, 1e-30) / max(last, 1e-30)),
        "gradients": slopes,
        "surface": surface(model, rows, setting.seed),
    }


def _norm(part: nn.Module) -> float:
    gradients = [weight.grad for weight in part.parameters() if weight.grad is not None]
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))


@torch.no_grad()
def surface(model: nn.Module, rows: Tensor, seed: int) -> list[list[float]]:
    """Return the loss along a line through the weights; each matrix moves by a share of its own size."""
    generator = torch.Generator().manual_seed(seed)
    weights = [weight.detach().clone() for weight in model.parameters()]
    ways = [torch.randn(weight.shape, generator=generator).to(weight.device) for weight in weights]
    ways = [way * weight.norm() / way.norm().clamp(min=1e-12) for way, weight in zip(ways, weights)]
    points: list[list[float]] = []
    for share in (-0.6, -0.4, -0.2, -0.1, 0.0, 0.1, 0.2, 0.4, 0.6):
        for moved, weight, way in zip(model.parameters(), weights, ways):
            moved.copy_(weight + share * way)
        loss = float(next_loss(model, rows))
        points.append([share, loss if math.isfinite(loss) else 1e9])
    for moved, weight in zip(model.parameters(), weights):
        moved.copy_(weight)
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
    claims={
        "A deep stack without residuals does not learn.": Claim(
            "loss", "residuals and norms", "no residuals", 0.3
        ),
        "Norms help a stack that has residuals.": Claim("loss", "residuals and norms", "no norms", 0.0),
    },
    figures={
        **LOSS,
        "gradient": "decimal logarithm of the first gradient over the last by layer, before training",
    },
    pictures=(
        LOSS_CURVE,
        Picture("gradients", "Gradient at first", "layer", "norm", curve="gradients", logarithmic=True),
        Picture("surface", "Loss around the weights", "along a line", "nats a character", curve="surface"),
    ),
    seconds=25,
    setup={"model": "8 layers of width 48, 4 heads", **vars(SHORT)},
)  # fmt: skip


# Width, depth, heads and tying at equal cost --------------------------------------------------------------


def run_shape(fields: dict[str, Any], setting: Conditions) -> Numbers:
    """Train a model with these fields."""
    config = small_model(**fields)
    numbers = train_on_text(Transformer(config), USUAL, setting)
    return {**numbers, "flops": cost(config, USUAL.length).flops.training_per_token}


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
    claims={
        "Some depth pays: four layers beat one of the same size.": Claim(
            "loss", "4 layers of 64", "1 layer of 128"
        ),
        "Several heads beat one.": Claim("loss", "4 layers of 64", "4 layers, 1 head"),
        "Heads can be too narrow.": Claim("loss", "4 layers of 64", "4 layers, 16 heads"),
    },
    figures={**LOSS, "parameters": "weights", "flops": "floating-point operations a token, in training"},
    pictures=(LOSS_CURVE, Picture("final", "Loss by shape", "", "nats a character", figure="loss")),
    seconds=30,
    setup=vars(USUAL),
)

TYING = Experiment(
    title="One table for reading and writing",
    question="What does tying the output layer to the token table cost, and what does it save?",
    arms={"tied": {"tie_embeddings": True}, "untied": {"tie_embeddings": False}},
    run=run_shape,
    claims={
        "Tying saves weights.": Claim("parameters", "tied", "untied", 1.0),
        "Tying learns no worse.": Claim("loss", "tied", "untied", -0.02),
    },
    figures={**LOSS, "parameters": "weights"},
    pictures=(LOSS_CURVE,),
    seconds=20,
    setup=vars(USUAL),
)  # fmt: skip

# Sizes at equal FLOPs -------------------------------------------------------------------------------------


def run_budget(width: int, setting: Conditions) -> Numbers:
    """Train a model of a width for as many steps as the FLOPs of the usual width and steps allow."""
    work = [cost(small_model(d_model=size), USUAL.length).flops.training_per_token for size in (64, width)]
    plan = replace(USUAL, steps=round(USUAL.steps * work[0] / work[1]))
    numbers = train_on_text(Transformer(small_model(d_model=width)), plan, setting)
    return {**numbers, "steps": setting.steps(plan.steps)}


BUDGET = Experiment(
    title="Sizes at equal FLOPs",
    question="For the same work of training: a small model with many steps, or a large one with few?",
    arms={f"width {width}": width for width in (16, 32, 64, 128)},
    run=run_budget,
    claims={
        "A model can be too large for its budget.": Claim("loss", "width 32", "width 128"),
        "A model can be too small for its budget.": Claim("loss", "width 32", "width 16"),
    },
    figures={**LOSS, "parameters": "weights", "steps": "steps that the same FLOPs allow"},
    pictures=(LOSS_CURVE, Picture("final", "Loss by width", "", "nats a character", figure="loss")),
    seconds=20,
    setup=vars(USUAL),
)

# Label smoothing ------------------------------------------------------------------------------------------


def run_smoothing(share: float, setting: Conditions) -> Numbers:
    """Train with a share of each target spread over all characters; measure loss and calibration."""
    model = Transformer(small_model())

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        logits = logits_of(model, rows[:, :-1]).flatten(0, 1)
        return nnf.cross_entropy(logits, rows[:, 1:].flatten(), label_smoothing=share)

    numbers = train_on_text(model, USUAL, setting, loss_of)
    rows = unseen_rows(64, USUAL.length, setting.device)
    with torch.no_grad():
        best = logits_of(model.eval(), rows[:, :-1]).softmax(-1).max(-1)
    sure, right = best.values.mean(), (best.indices == rows[:, 1:]).float().mean()
    return {**numbers, "accuracy": float(right), "overconfidence": float(sure - right)}


SMOOTHING = Experiment(
    title="Label smoothing",
    question="What does label smoothing do to loss, accuracy and confidence?",
    arms={"none": 0.0, "0.1": 0.1},
    run=run_smoothing,
    claims={
        "Smoothing raises the loss of the true next character.": Claim("loss", "none", "0.1", 0.0),
        "Smoothing lowers confidence.": Claim("overconfidence", "0.1", "none", 0.0),
    },
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
    model = Transformer(small_model(n_experts=8, n_active_experts=1, d_ff=64))

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        return next_loss(model, rows) + weight * balance_loss(model)

    numbers = train_on_text(model, USUAL, setting, loss_of)
    rows = unseen_rows(32, USUAL.length, setting.device)
    with torch.no_grad(), ch.record(model.eval(), "*.router") as seen:
        next_loss(model, rows)
    busiest = [
        float(torch.bincount(logits.argmax(-1).flatten(), minlength=8).max() / logits[..., 0].numel())
        for logits in seen.values()
    ]
    return {**numbers, "busiest": sum(busiest) / len(busiest)}


EXPERTS = Experiment(
    title="Balance of experts",
    question="Do experts share the work by themselves?",
    arms={"no balance loss": 0.0, "balance loss 0.01": 0.01},
    run=run_experts,
    claims={
        "Without a loss for it, one expert gets more than its share.": Claim(
            "busiest", "balance loss 0.01", "no balance loss", 0.0
        ),
    },
    figures={**LOSS, "busiest": "share of the tokens that the busiest of 8 experts gets, mean over layers"},
    pictures=(Picture("busiest", "The busiest of 8 experts", "", "share of the tokens", figure="busiest"),),
    seconds=30,
    setup={"experts": 8, "active": 1, **vars(USUAL)},
)  # fmt: skip
