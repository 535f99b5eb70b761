"""Learning works end to end: toy tasks, from random weights to inputs never seen.

Every task and every family once; `CLEARHEAD_TOYS=all` learns every task with every family it is for.
"""

import os

import pytest
import torch

from clearhead.labs.lab.toys import TASKS, accuracy, draw, learn

LEARNERS = [
    ("majority", "encoder"),
    ("reverse", "decoder"),
    ("add", "decoder"),
    ("copy", "encoder-decoder"),
    ("sort", "encoder-decoder"),
]
STEPS = {("sort", "encoder-decoder"): 400}  # 600 for all others
if os.environ.get("CLEARHEAD_TOYS") == "all":
    LEARNERS += [
        (task, family)
        for family in ("decoder", "encoder-decoder")
        for task in ("copy", "reverse", "sort", "add")
        if (task, family) not in LEARNERS
    ]


@pytest.mark.ledger("E1", "E2", "E3")
@pytest.mark.parametrize(("name", "family"), LEARNERS, ids=["-".join(pair) for pair in LEARNERS])
@pytest.mark.slow
def test_toy_task_is_learned(name, family):
    learned = learn(name, family, steps=STEPS.get((name, family), 600), every=50)
    exact = accuracy(learned.model, learned.task, torch.Generator().manual_seed(99), batches=16)
    assert exact >= 0.99, f"{exact:.2%} exact after {learned.history[-1].step} steps"


def test_every_task_and_family_is_learned():
    assert {task for task, _ in LEARNERS} == set(TASKS)
    assert {family for _, family in LEARNERS} == {"encoder", "decoder", "encoder-decoder"}


@pytest.mark.parametrize("name", TASKS)
def test_no_held_out_input_is_trained_on(name):
    seen = {side: set() for side in (True, False)}
    for held_out, rows in seen.items():
        generator = torch.Generator().manual_seed(7)
        for _ in range(50):
            rows.update(map(tuple, draw(TASKS[name], 64, generator, held_out)[0].tolist()))
    assert seen[True]
    assert not seen[True] & seen[False]
