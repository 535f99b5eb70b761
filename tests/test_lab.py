"""Experiments: what is known beyond doubt comes out, and verdicts follow the numbers."""

from __future__ import annotations

import json
import math
import sys
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch

from clearhead.core.config import ModelConfig
from clearhead.errors import ClearheadError
from clearhead.labs.lab import EXPERIMENTS, attention, ladder
from clearhead.labs.lab.experiment import (
    Claim,
    Conditions,
    Experiment,
    Picture,
    conduct,
    find,
    interval,
    redraw_report,
    run_trials,
    write_report,
)
from clearhead.learn.recipe import read_recipe

pytestmark = pytest.mark.ledger("N1", "N10", "N2", "N3", "N4", "N5", "N6", "N7", "N8", "N9")
# What is beyond doubt shows with a small share of the steps: which arm has less, which has more, by how much.
DIRECTIONS = [
    ("positions", "none", "learned", "order", 0.08, 0.3),
    ("families", "decoder", "encoder", "continue", 0.03, 0.2),
    ("scale", "divided", "not divided", "sharpness", 0.01, 0.3),
    ("residuals", "residuals and norms", "no residuals", "loss", 0.05, 0.1),
    ("budget", "width 16", "width 128", "loss", 0.02, 0.1),
    ("heads", "least important first", "most important first", "half", 0.15, 0.02),
    ("kinds", "window of 16", "full", "reach", 0.01, 60),
    ("induction", "1 layer", "2 layers", "accuracy", 0.3, 0.2),
    ("tokenizers", "bytes", "BPE, 2,048 tokens", "bits a token", 0.01, 1.0),
    ("tying", "tied", "untied", "parameters", 0.01, 100),
    ("smoothing", "0.1", "none", "overconfidence", 0.2, 0.0),
    ("experts", "balance loss 0.01", "no balance loss", "busiest", 0.04, 0.1),
    ("distillation", "taught, begun from the teacher", "alone", "loss", 0.01, 0.02),
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "less", "more", "figure", "effort", "by"), DIRECTIONS, ids=[one[0] for one in DIRECTIONS]
)
@pytest.mark.slow
def test_what_is_beyond_doubt_comes_out(name, less, more, figure, effort, by):
    experiment, found = find(name), {}
    for arm in (less, more):
        torch.manual_seed(0)
        found[arm] = experiment.run(experiment.arms[arm], Conditions(effort=effort))
        check(experiment, found[arm])
    assert found[more][figure] - found[less][figure] > by


def check(experiment: Experiment, numbers) -> None:
    """A trial has every figure and curve, and claims speak of arms and figures that there are."""
    if experiment.relate is not None:
        numbers = experiment.relate({arm: [numbers] for arm in experiment.arms})[next(iter(experiment.arms))][
            0
        ]
    assert all(math.isfinite(numbers[figure]) for figure in experiment.figures)
    assert all(numbers[picture.curve or picture.figure] is not None for picture in experiment.pictures)
    for claim in experiment.claims.values():
        assert claim.figure in experiment.figures
        assert {claim.less, claim.more} <= experiment.arms.keys()


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in {one[0] for one in DIRECTIONS}])
@pytest.mark.slow
def test_every_experiment_measures_its_figures(name, monkeypatch):
    monkeypatch.setattr(attention, "RATES", (1e-2,))
    experiment = find(name)
    check(experiment, experiment.run(list(experiment.arms.values())[-1], Conditions(effort=0.01)))


def test_each_model_gets_the_best_of_the_rates_that_do_not_diverge(monkeypatch):
    ends = {0.1: (0.5, 1.0), 0.03: (0.9, 0.0), 0.01: (0.7, 0.0), 0.003: (0.8, 0.0)}  # loss, diverged
    monkeypatch.setattr(attention, "RATES", tuple(ends))

    def train(kind, plan, setting):
        loss, diverged = ends[plan.lr]
        return {"curve": [[1, 9.0], *([step, loss] for step in range(2, 6))], "diverged": diverged}

    found = attention.at_best_rate(train, "LSTM", attention.TEXT_PLAN, Conditions())
    assert found["rate"] == 0.01
    assert dict(map(tuple, found["rates"])) == pytest.approx(
        {math.log10(rate): loss for rate, (loss, diverged) in ends.items() if not diverged}
    )


def made(values: dict[str, list[float]]) -> Experiment:
    """An experiment that measures what it is told."""
    return Experiment(
        title="Made up",
        question="Is it?",
        arms={name: name for name in values},
        run=lambda arm, setting: {"figure": values[arm][setting.seed], "curve": [[0, 1.0], [1, 2.0]]},
        claims={"a is less than b.": Claim("figure", "a", "b", 0.5)},
        figures={"figure": "a number"},
        pictures=(
            Picture("curve", "Curve", "x", "y", curve="curve"),
            Picture("bars", "Bars", "", "y", figure="figure"),
        ),
    )


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([1.0, 1.1, 0.9], [2.0, 2.1, 2.0], "supported"),
        ([2.0, 2.1, 2.0], [1.0, 1.1, 0.9], "not supported"),
        ([1.0, 1.1, 0.9], [1.4, 1.7, 1.3], "undecided"),
        ([1.0, 1.1], [3.0, 3.1], "undecided"),
        ([1.0, 1.1, 0.9], [2.0, math.nan, 2.0], "undecided"),  # a trial diverged
        ([1.0, 1.1, 0.9], [2.0, math.inf, 2.0], "undecided"),
    ],
)
def test_a_verdict_follows_the_interval_of_the_differences(a, b, verdict, tmp_path):
    findings = conduct("made", made({"a": a, "b": b}), tmp_path, len(a))
    assert findings.judged[0].verdict == verdict
    path = write_report(findings, tmp_path, "clearhead lab made")
    assert f"**{verdict.capitalize()}:** a is less than b." in path.read_text()
    assert json.loads((tmp_path / "results.json").read_text())["verdicts"][0]["verdict"] == verdict
    assert (tmp_path / "curve.png").exists() and (tmp_path / "bars.png").exists()


def test_changed_numbers_turn_the_verdict_and_broken_ones_are_refused(tmp_path):
    experiment = made({"a": [1.0, 1.1, 0.9], "b": [2.0, 2.1, 2.0]})
    write_report(conduct("made", experiment, tmp_path, 3), tmp_path, "clearhead lab made")
    path = tmp_path / "results.json"
    found = json.loads(path.read_text())
    turned = {"a": found["trials"]["b"], "b": found["trials"]["a"]}
    path.write_text(json.dumps({**found, "trials": turned}))
    assert "**Not supported:** a is less than b." in redraw_report("made", experiment, tmp_path).read_text()
    assert json.loads(path.read_text())["verdicts"][0]["verdict"] == "not supported"
    for trials, said in (
        ({"a": turned["a"], "b": [{"seconds": 1.0}] * 3}, "lacks what a trial measures"),
        ({"a": turned["a"], "b": turned["b"][:2]}, "not the same seeds"),
        ({"a": [], "b": []}, "not the same seeds"),
    ):
        path.write_text(json.dumps({**found, "trials": trials}))
        with pytest.raises(ClearheadError, match=said):
            redraw_report("made", experiment, tmp_path)
        assert "**Not supported:**" in (tmp_path / "report.md").read_text()  # the earlier one is left


def test_an_interval_is_students():
    stats = pytest.importorskip("scipy.stats")
    values = [1.0, 2.0, 4.0, 3.5]
    wanted = stats.t.interval(0.95, 3, stats.tmean(values), stats.sem(values))
    assert interval(values) == pytest.approx(wanted, abs=1e-3)


def test_a_stopped_experiment_goes_on_where_it_was(tmp_path):
    calls = []

    def run(arm, setting):
        calls.append((arm, setting.seed))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return {"figure": 1.0}

    experiment = Experiment("t", "q", {"a": 1, "b": 2}, run, {}, {"figure": "f"})
    with pytest.raises(KeyboardInterrupt):
        conduct("t", experiment, tmp_path, 2)
    conduct("t", experiment, tmp_path, 2)
    assert calls == [(1, 0), (2, 0), (1, 1), (1, 1), (2, 1)]
    with pytest.raises(ClearheadError, match="choose another --out"):
        conduct("t", experiment, tmp_path, 2, Conditions(effort=2.0))


def test_the_command_lists_refuses_runs_and_redraws(tmp_path, clearhead, monkeypatch):
    listed = clearhead("lab").out
    assert all(name in listed for name in EXPERIMENTS)
    clearhead.refuses('did you mean "residuals"', "lab", "residual")
    clearhead.refuses("minutes here, and --budget is 0.001", "lab", "norms", "--budget 0.001")
    folder = tmp_path / "tying"
    with monkeypatch.context() as patch:  # without matplotlib the numbers are kept, and drawn later
        patch.setitem(sys.modules, "matplotlib.figure", None)
        ran = clearhead("lab", "tying", f"--effort 0.01 --seeds 1 --out {folder} --json")
    assert ran.json["verdicts"][0]["verdict"] == "undecided" and "--redraw" in ran.err
    assert (folder / "results.json").exists() and not (folder / "loss.png").exists()
    written = (folder / "report.md").read_text()
    (folder / "report.md").unlink()
    clearhead("lab", "tying", f"--redraw --out {folder}")
    assert (folder / "report.md").read_text() == written
    assert (folder / "loss.png").exists()
    clearhead.refuses("is of tying", "lab", "scale", f"--redraw --out {folder}")


def test_each_arm_of_the_ladder_is_a_recipe_and_a_share_is_told_at_equal_loss(clearhead, tmp_path):
    for changes in ladder.ARMS.values():
        recipe = read_recipe(None, {**ladder.SHARED, **ladder.SIZES["large"], **changes})
        model = {name: value for name, value in recipe.model.items() if name != "base"}
        assert ModelConfig(vocab_size=5, **model).d_model == 96

    def trial(*losses: float, seconds: float = 1.0) -> dict:
        """Losses after 100, 200, ... tokens."""
        points = [[100.0 * number, loss] for number, loss in enumerate(losses, start=1)]
        curves = {"over tokens": points, "over time": [[x * seconds, loss] for x, loss in points]}
        return {f"{size} {name}": curve for size in ladder.SIZES for name, curve in curves.items()} | {
            f"{size} loss": losses[-1] for size in ladder.SIZES
        }

    trials = {
        ladder.BASELINE: [trial(4, 3, 2)],
        "better": [trial(3, 1, 0, seconds=2)],
        "worse": [trial(4, 4, 3)],
    }
    told = ladder.with_shares(trials)
    shares = {arm: [told[arm][0][f"small {what}"] for what in ("tokens", "time")] for arm in trials}
    assert shares == {
        ladder.BASELINE: [1, 1],
        "better": [150 / 300, 300 / 300],
        "worse": [300 / 200, 300 / 200],
    }
    clearhead.refuses('no arm is called "QKnorm" (did you mean "QK-norm"?)', "lab", "ladder", "--arms QKnorm")
    clearhead.refuses("tying has its own", "lab", "tying", f"--data {tmp_path}")
    kept = ladder.LADDER.only(["Muon"])
    assert list(kept.arms) == [ladder.BASELINE, "Muon"] and len(kept.claims) == len(ladder.SIZES)


@pytest.mark.slow
def test_trials_of_other_processes_are_those_of_this_one(tmp_path, monkeypatch):
    brief, said, started = Conditions(effort=0.005), [], []
    # A spawned process would import PyTorch anew, which takes longer than its trials.
    fork = SimpleNamespace(get_context=lambda how: started.append(how) or get_context("fork"))
    monkeypatch.setattr("clearhead.labs.lab.experiment.multiprocessing", fork)
    run_trials({"induction": tmp_path / "apart"}, 1, brief, 1, said.append)
    apart = conduct("induction", find("induction"), tmp_path / "apart", 1, brief)
    alone = conduct("induction", find("induction"), tmp_path / "alone", 1, brief)
    assert len(said) == 3 and started == ["spawn"]
    for arm, (trial,) in alone.trials.items():
        assert apart.trials[arm][0]["induction"] == pytest.approx(trial["induction"], abs=1e-5)


@pytest.mark.parametrize("name", list(EXPERIMENTS))
@pytest.mark.parametrize("effort", [0.1, 1.0, 10.0])
def test_an_experiment_records_the_steps_that_it_takes(name, effort):
    experiment, setting = find(name), Conditions(effort=effort)
    usual, found = experiment.setup_in(Conditions()), experiment.setup_in(setting)
    assert json.loads(json.dumps(found)).keys() == usual.keys()
    if "steps" in usual:
        assert found["steps"] == setting.steps(usual["steps"]) == round(usual["steps"] * effort)
    for key in ("teacher", "recall task"):
        if key in usual and "steps" in str(usual[key]):
            assert str(found[key]) != str(usual[key]) or effort == 1


def test_the_record_of_a_short_experiment_is_of_what_ran(tmp_path):
    taken = []

    def run(arm, setting):
        taken.append(setting.steps(200))
        return {"loss": 1.0}

    experiment = Experiment("t", "q", {"a": 1}, run, {}, {"loss": "loss"}, setup={"steps": 200, "warmup": 20})
    findings = conduct("t", experiment, tmp_path, seeds=1, setting=Conditions(effort=0.1))
    assert taken == [20] and findings.to_dict()["setup"] == {"steps": 20, "warmup": 10}
    stored = json.loads(next((tmp_path / "trials").iterdir()).read_text())
    assert stored["setup"] == {"steps": 20, "warmup": 10}
