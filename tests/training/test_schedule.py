"""Learning-rate schedules against their closed forms and against transformers'."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_wsd_schedule

from clearhead.learn.recipe import TrainPlan
from clearhead.learn.training.optim import lr_at, original_schedule, warmup_steps

STEPS, WARMUP, LR = 200, 17, 3e-4


def rates(schedule: str, steps: int = STEPS, **changes) -> list[float]:
    """The rate of every step, 0 to `steps`."""
    plan = TrainPlan(**{"schedule": schedule, "lr": LR, "warmup": WARMUP, "floor": 0.0, **changes})
    return [lr_at(plan, step, steps, 64) for step in range(steps + 1)]


def theirs(make, **arguments) -> list[float]:
    """The rates of a transformers schedule, from before the first step on."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule, seen = make(optimizer, num_training_steps=STEPS, num_warmup_steps=WARMUP, **arguments), []
    for _ in range(STEPS + 1):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.ledger("H2")
@pytest.mark.parametrize(
    ("schedule", "reference"),
    [
        ("cosine", lambda: theirs(get_cosine_schedule_with_warmup)),
        ("linear", lambda: theirs(get_linear_schedule_with_warmup)),
        ("wsd", lambda: theirs(get_wsd_schedule, num_decay_steps=STEPS // 5, decay_type="linear")),
    ],
)
def test_transformers_gives_the_same_rates(schedule, reference):
    assert rates(schedule) == pytest.approx(reference(), abs=1e-15)


@pytest.mark.ledger("H2")
def test_original_is_the_papers_formula():
    plan = TrainPlan(schedule="original", lr=2.0, warmup=50)
    for step in (1, 49, 50, 51, 5000):
        assert lr_at(plan, step, 100, 512) == pytest.approx(
            2.0 * 512**-0.5 * min(step**-0.5, step * 50**-1.5), rel=1e-12
        )
    every = [lr_at(plan, step, 100, 512) for step in range(1, 400)]
    assert every.index(max(every)) + 1 == 50
    assert original_schedule(4000, 512) == pytest.approx((512 * 4000) ** -0.5)
    # The warm-up of "original" is 4,000 steps.
    assert lr_at(TrainPlan(schedule="original", lr=1.0), 4000, 100, 512) == original_schedule(4000, 512)
    assert math.isfinite(lr_at(TrainPlan(schedule="original", warmup=0), 1, 100, 512))


@pytest.mark.ledger("H2")
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_peak_floor_and_no_jumps(schedule):
    seen = rates(schedule, floor=0.1)
    assert seen[0] == 0 and seen[1] == pytest.approx(LR / WARMUP)  # the first step moves
    assert seen[WARMUP] == pytest.approx(LR) == pytest.approx(max(seen))
    assert seen[-1] == pytest.approx(LR if schedule == "constant" else 0.1 * LR)
    steepest = LR / min(WARMUP, STEPS // 5)
    assert max(abs(b - a) for a, b in itertools.pairwise(seen)) <= steepest * 1.0001
    plan = TrainPlan(schedule=schedule, lr=LR, warmup=WARMUP, floor=0.1)
    assert lr_at(plan, STEPS + 50, STEPS, 64) == pytest.approx(seen[-1])  # past the end, it stays


def test_wsd_is_stable_until_its_decay():
    seen = rates("wsd", decay=0.25, floor=0.2)
    assert set(seen[WARMUP:151]) == {LR}
    assert seen[175] == pytest.approx(LR * 0.6)


def test_warmup_by_default_is_a_twentieth():
    assert warmup_steps(TrainPlan(), 1000) == 50
    assert lr_at(TrainPlan(lr=LR), 50, 1000, 64) == LR
    # A run of 10 steps has no warm-up.
    assert lr_at(TrainPlan(lr=LR), 1, 10, 64) == pytest.approx(
        LR * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 10)))
    )
    # The warm-up may be longer than the run.
    assert [lr_at(TrainPlan(warmup=100, lr=1.0), step, 10, 64) for step in (1, 10)] == [0.01, 0.1]
