"""Learning-rate schedules: pure functions from a step to a rate."""

import math

from clearhead.recipe import TrainPlan

ORIGINAL_WARMUP = 4000


def original_schedule(step: int, d_model: int, warmup: int = ORIGINAL_WARMUP) -> float:
    """Return the original Transformer's rate: linear up to step `warmup`, then falling as 1/sqrt(step).

    d_model^-0.5 · min(step^-0.5, step · warmup^-1.5); the first step is 1, and step 0 has rate 0.
    """
    if step <= 0:
        return 0.0
    return float(d_model**-0.5 * min(step**-0.5, step * max(warmup, 1) ** -1.5))


def warmup_steps(plan: TrainPlan, steps: int) -> int:
    """Return the number of warm-up steps."""
    if plan.warmup is not None:
        return plan.warmup
    return ORIGINAL_WARMUP if plan.schedule == "original" else steps // 20


def rate(plan: TrainPlan, step: int, steps: int, d_model: int) -> float:
    """Return the learning rate of `step` (the first is 1) in a run of `steps`.

    The rate rises linearly to `plan.lr` during the warm-up. Then it stays there (constant), falls to the
    share `plan.floor` at the last step (cosine, linear), or stays and falls linearly at the end (wsd).
    `original` has its own peak and no floor.
    """
    warmup = warmup_steps(plan, steps)
    if plan.schedule == "original":
        return plan.lr * original_schedule(step, d_model, warmup)
    if step < warmup:
        return plan.lr * max(step, 0) / warmup
    begin = max(warmup, steps - round(plan.decay * steps)) if plan.schedule == "wsd" else warmup
    progress = min(max(step - begin, 0) / max(steps - begin, 1), 1.0)  # 0: the fall begins; 1: the last step
    heights = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "constant": 1.0}
    height = heights.get(plan.schedule, 1 - progress)
    return plan.lr * (plan.floor + (1 - plan.floor) * height)
