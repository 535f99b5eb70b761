"""What holds a deep stack together: norms and warm-up, the scale of the scores, residuals."""

import math
from typing import Any

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.core.stack import Residual
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Transformer
from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import Schooling, language_model, next_loss, read, school_text, text
from clearhead.run.kernels.parts import like

DEEP = 12
SHORT = Schooling(steps=200, batch=16, length=48, lr=3e-3)

# Norms and warm-up ------------------------------------------------------------------------------------------


def run_norms(arm: tuple[str, int, int], setting: Conditions) -> Numbers:
    """Train a stack of a depth with its norms before or after each sublayer, and with a warm-up or none."""
    place, depth, warmup = arm
    config = language_model(norm_position=place, n_layers=depth, d_model=48, max_positions=SHORT.length)
    plan = Schooling(**{**vars(SHORT), "warmup": warmup})
    return read(config, plan, setting)[1]


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
    model, found = read(config, SHORT, setting)
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
    found = school_text(model, SHORT, setting)
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
