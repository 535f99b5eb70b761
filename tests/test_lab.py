"""Experiments: what is known beyond doubt comes out, and verdicts follow the numbers."""

from __future__ import annotations

import json
import math

import pytest
import torch

from clearhead.cli import main
from clearhead.errors import ClearheadError
from clearhead.lab import report
from clearhead.lab.experiment import Claim, Experiment, Picture, Setting, conduct, interval
from clearhead.lab.run import find
from clearhead.lab.table import EXPERIMENTS

# A twentieth of the steps shows that an experiment runs; with more of them, what is beyond doubt.
DIRECTIONS = [
    ("residuals", ("residuals and norms", "no residuals"), 0.2, "loss", 0.2),
    ("scale", ("divided", "not divided"), 0.05, "sharpness", 0.3),
    ("positions", ("none", "learned"), 0.5, "order", 0.3),
    ("induction", ("1 layer", "2 layers"), 0.6, "accuracy", 0.2),
    ("tying", ("tied", "untied"), 0.05, "parameters", 100),
    ("experts", ("balance loss 0.01", "no balance loss"), 0.3, "busiest", 0.0),
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.ledger("N1", "N4", "N9")
@pytest.mark.parametrize(
    ("name", "arms", "effort", "figure", "least"), DIRECTIONS, ids=lambda value: str(value)
)
def test_what_is_beyond_doubt_comes_out(name, arms, effort, figure, least):
    experiment, found = find(name), []
    for arm in arms:
        torch.manual_seed(0)
        found.append(experiment.run(experiment.arms[arm], Setting(effort=effort))[figure])
    assert found[1] - found[0] > least


@pytest.mark.ledger("N2", "N3", "N5", "N7", "N10")
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in {one[0] for one in DIRECTIONS}])
def test_every_experiment_measures_its_figures(name):
    experiment = find(name)
    arm = list(experiment.arms.values())[-1]
    numbers = experiment.run(arm, Setting(effort=0.01))
    assert all(math.isfinite(numbers[figure]) for figure in experiment.figures)
    for picture in experiment.pictures:
        assert numbers[picture.curve or picture.figure] is not None
    for claim in experiment.claims:
        assert claim.figure in experiment.figures
        assert {claim.less, claim.more} <= experiment.arms.keys()


def made(values: dict[str, list[float]]) -> Experiment:
    """An experiment that measures what it is told."""
    return Experiment(
        title="Made up",
        question="Is it?",
        arms={name: name for name in values},
        run=lambda arm, setting: {"figure": values[arm][setting.seed], "curve": [[0, 1.0], [1, 2.0]]},
        claims=(Claim("a is less than b.", "figure", "a", "b", 0.5),),
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
    ],
)
def test_a_verdict_follows_the_interval_of_the_differences(a, b, verdict, tmp_path):
    findings = conduct("made", made({"a": a, "b": b}), tmp_path, len(a))
    assert findings.judged[0].verdict == verdict
    path = report.write(findings, tmp_path, "clearhead lab made")
    assert f"**{verdict.capitalize()}:** a is less than b." in path.read_text()
    assert json.loads((tmp_path / "results.json").read_text())["verdicts"][0]["verdict"] == verdict
    assert (tmp_path / "curve.png").exists() and (tmp_path / "bars.png").exists()


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

    experiment = Experiment("t", "q", {"a": 1, "b": 2}, run, (), {"figure": "f"})
    with pytest.raises(KeyboardInterrupt):
        conduct("t", experiment, tmp_path, 2)
    conduct("t", experiment, tmp_path, 2)
    assert calls == [(1, 0), (2, 0), (1, 1), (1, 1), (2, 1)]
    with pytest.raises(ClearheadError, match="choose another --out"):
        conduct("t", experiment, tmp_path, 2, Setting(effort=2.0))


def test_the_command_lists_refuses_and_runs(tmp_path, capsys, monkeypatch):
    main(["lab"])
    assert all(name in capsys.readouterr().out for name in EXPERIMENTS)
    for arguments, said in (
        (["lab", "residual"], 'did you mean "residuals"'),
        (["lab", "norms", "--budget", "0.001"], "minutes here, and --budget is 0.001"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert said in capsys.readouterr().err
    main(["lab", "tying", "--effort", "0.01", "--seeds", "1", "--out", str(tmp_path / "tying"), "--json"])
    body = json.loads(capsys.readouterr().out)
    assert body["verdicts"][0]["verdict"] == "undecided"
    assert (tmp_path / "tying" / "report.md").exists()
