"""Learning-rate schedules: pure functions from a step to a rate."""

from __future__ import annotations


def original_schedule(step: int, d_model: int, warmup: int = 4000) -> float:
    """The original Transformer's rate: linear up to step `warmup`, then falling as 1/sqrt(step).

    d_model^-0.5 · min(step^-0.5, step · warmup^-1.5); the first step is 1, and step 0 has rate 0.
    """
    if step <= 0:
        return 0.0
    return float(d_model**-0.5 * min(step**-0.5, step * warmup**-1.5))
