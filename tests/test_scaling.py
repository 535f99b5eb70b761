"""Scaling laws: the fit is the least robust cost, laws come back from their points, budgets go furthest."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.labs.lab.scaling import (
    CHINCHILLA,
    DELTA,
    Law,
    Point,
    Rung,
    fit,
    fit_sizes,
    predict,
    train_rung,
)

TRUE = Law(1.2, 8.0, 40.0, 0.3, 0.33)
POINTS = [
    Point(size, tokens, TRUE.loss(size, tokens))
    for size in (5e4, 1e5, 2e5, 4e5, 1e6)
    for tokens in (1.8e6, 3.7e6, 7.4e6, 14.8e6)
]


def noisy(outlier: float) -> list[Point]:
    random = np.random.default_rng(0)
    made = [Point(p.weights, p.tokens, p.loss * (1 + 0.003 * random.standard_normal())) for p in POINTS]
    return [*made[:3], Point(made[3].weights, made[3].tokens, made[3].loss * outlier), *made[4:]]


@pytest.mark.ledger("I2")
def test_a_law_comes_back_from_its_points():
    found = fit(POINTS)
    assert found.loss(4e6, 14.8e6) == pytest.approx(TRUE.loss(4e6, 14.8e6), rel=1e-5)
    assert (found.alpha, found.beta, found.floor) == pytest.approx((0.3, 0.33, 1.2), rel=2e-3)


@pytest.mark.ledger("I2")
def test_the_fit_is_the_least_robust_cost():
    """Scipy, from many starts, finds no lower one."""
    optimize = pytest.importorskip("scipy.optimize")
    points = noisy(1.3)
    columns = np.array([[p.weights, p.tokens, p.loss] for p in points]).T

    def errors(x):
        terms = np.exp(x[1] - x[3] * np.log(columns[0])) + np.exp(x[2] - x[4] * np.log(columns[1]))
        return (x[0] + terms) / columns[2] - 1

    bounds = ([0, -20, -20, 0.02, 0.02], [5, 30, 30, 1.5, 1.5])
    tried = [
        optimize.least_squares(errors, [1, 13 * a, 15 * b, a, b], bounds=bounds, loss="huber", f_scale=DELTA)
        for a in (0.2, 0.5)
        for b in (0.2, 0.5)
    ]
    ours = fit(points)
    found = np.abs([ours.loss(p.weights, p.tokens) / p.loss - 1 for p in points])
    cost = np.where(found < DELTA, found**2 / 2, DELTA * (found - DELTA / 2)).sum()
    assert cost <= min(one.cost for one in tried) * (1 + 1e-4)


def test_one_amount_of_text_predicts_sizes_whatever_text_does():
    """Short runs whose losses are of another form bend the law of both, and leave that of sizes alone."""
    bent = [
        replace(p, loss=p.loss * (1 + 1e11 / p.tokens / p.weights)) if p.tokens < 1.4e7 else p for p in POINTS
    ]
    wanted, found = TRUE.loss(4e6, 14.8e6), predict(bent, 4e6, 14.8e6)
    assert found.loss == pytest.approx(wanted, rel=1e-5)
    assert abs(found.law.loss(4e6, 14.8e6) / wanted - 1) > 0.01
    assert found.by_size is not None and found.by_size.alpha == pytest.approx(0.3, rel=2e-3)
    with pytest.raises(ClearheadError, match="three sizes or more"):
        fit_sizes(POINTS)


def test_an_outlier_hardly_moves_the_prediction():
    wanted = TRUE.loss(4e6, 12e6)
    found = predict(noisy(1.3), 4e6, 12e6, times=10)
    assert found.loss == pytest.approx(wanted, rel=0.02)
    assert found.low <= found.loss <= found.high


@pytest.mark.parametrize("law", [TRUE, CHINCHILLA])
def test_no_other_size_does_better_with_a_budget(law):
    best = law.best(1e18)
    assert 6 * best.weights * best.tokens == pytest.approx(1e18)
    for factor in (0.5, 0.97, 1.03, 2):
        assert law.loss(best.weights * factor, best.tokens / factor) > best.loss


@pytest.mark.parametrize(
    ("points", "line"),
    [(POINTS[:4], "a law has five numbers"), ([*POINTS, Point(1e5, 1e6, 0.0)], "is not of numbers above 0")],
)
def test_points_that_make_no_law_are_refused(points, line):
    with pytest.raises(ClearheadError, match=line):
        fit(points)


def test_a_rung_reads_each_token_once_and_learns():
    rung = Rung(1, 16, 3_000, rows=4, length=16, rate=0.2)
    text = torch.arange(4_000).remainder(7).to(torch.uint8)
    found = train_rung(rung, text, text[:400], 8, 0, "cpu")
    model = rung.config(8)
    assert found.tokens == 3_000 // 64 * 64 and found.loss < 0.5 < np.log(7)
    assert found.weights == rung.weights(8) == 12 * 16**2 - 3 * 16 * (128 / 3 - model.d_ff) + 48
    with pytest.raises(ClearheadError, match="each is read once"):
        train_rung(Rung(1, 16, 9_000, rows=4, length=16), text, text, 8, 0, "cpu")


def test_the_command_spends_a_budget(clearhead, tmp_path):
    body = clearhead("plan", "--budget 5.76e23 --json").json
    assert body["weights"] == pytest.approx(CHINCHILLA.best(5.76e23).weights)
    law = tmp_path / "results.json"
    law.write_text(json.dumps({"law": vars(TRUE)}))
    assert "tokens" in clearhead("plan", f"--budget 1e15 --law {law}").out
    for wrong, line in (
        (["--budget", "-1"], "must be a number above 0"),
        (["--budget", "1e9", "--law", str(tmp_path / "no.json")], "does not exist"),
        (["--law", str(law)], "--budget"),
        ([], "needs a CONFIG and --devices, or a --budget"),
    ):
        clearhead.refuses(line, "plan", *wrong)
