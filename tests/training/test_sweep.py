"""Sweeps: settings are drawn as stated, halving stops and resumes runs exactly, a stopped sweep goes on."""

import json
import math
from multiprocessing import get_context

import pytest

import clearhead as ch
from clearhead.labs import sweep
from clearhead.labs.sweep import Choices, Range, drawn, read_vary
from clearhead.run.api import Model

SETTINGS = {
    "data.max_length": 16, "data.batch_size": 4, "tokens.kind": "char", "model.d_model": 16,
    "model.n_layers": 1, "model.n_heads": 2, "train.steps": 9, "train.validate_every": 1,
    "train.device": "cpu", "train.samples": 0, "train.log_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("sweep") / "text.txt"
    path.write_text("".join(f"{number} and {number + 1} make {2 * number + 1}.\n" for number in range(200)))
    return path


def test_ranges_and_choices_are_read_and_drawn_from():
    vary = read_vary(
        ["train.lr=1e-4..1e-2", "model.n_layers=2..5", "train.schedule=cosine,wsd", "x=[1,2],[3]"]
    )
    assert vary["train.lr"] == Range(1e-4, 1e-2, whole=False) and vary["train.lr"].logarithmic
    assert vary["model.n_layers"] == Range(2, 5, whole=True) and not vary["model.n_layers"].logarithmic
    assert vary["train.schedule"] == Choices(("cosine", "wsd")) and vary["x"] == Choices(([1, 2], [3]))
    del vary["x"]
    trials = list(drawn(vary, "random", 200, seed=1))
    assert trials[0] == {} and len(trials) == 200
    assert trials[:20] == list(drawn(vary, "random", 20, seed=1))  # more trials begin as fewer do
    assert {trial["model.n_layers"] for trial in trials[1:]} == {2, 3, 4, 5}
    rates = [trial["train.lr"] for trial in trials[1:]]
    assert min(rates) >= 1e-4 and max(rates) <= 1e-2
    below = sum(rate < 1e-3 for rate in rates) / len(rates)  # half of a logarithmic range
    assert abs(below - 0.5) < 4 * math.sqrt(0.25 / len(rates))
    few = {"a": Choices((1, 2)), "b": Choices((3, 4))}
    assert [*drawn(few, "grid", 99, seed=0)][1:] == [{"a": a, "b": b} for a in (1, 2) for b in (3, 4)]
    assert len([*drawn(few, "random", 99, seed=0)]) == 5  # the recipe, and all that can be drawn


@pytest.mark.slow
def test_a_halved_sweep_keeps_the_run_that_train_makes(text, tmp_path, monkeypatch):
    """Trials are stopped, resumed and killed on the way; the best is bit for bit a run of `ch.train`."""
    started = []  # spawned processes would import PyTorch anew, which takes longer than their trials
    monkeypatch.setattr(sweep, "get_context", lambda how: started.append(how) or get_context("fork"))
    folder, vary = tmp_path / "sweep", {"train.lr": [1e-3, 3e-3, 1e-2, 3e-2], "model.n_heads": [2, 3]}
    lines = list[str]()

    class Killed(Exception):
        pass

    def kill(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            raise Killed

    settings = dict(recipe="char-gpt-cpu", settings=SETTINGS, out=folder, trials=9, workers=2)
    with pytest.raises(Killed):
        ch.sweep([text], vary, **settings, tell=kill)
    done = ch.sweep([text], vary, **settings, tell=lines.append)
    assert len({line.split("  ")[0] for line in lines}) == 9
    failed = [trial for trial in done.trials if trial.error]
    assert failed and all("n_heads 3" in trial.error for trial in failed)  # 16 is not divisible by 3
    full = [trial for trial in done.trials if trial.reached == 1]
    assert done.trials[0] in full and 2 <= len(full) < 5 and all(trial.step == 9 for trial in full)
    assert done.best.metrics["loss"] == min(trial.metrics["loss"] for trial in full)
    alone = ch.train([text], recipe="char-gpt-cpu", out=tmp_path / "alone",
                     settings={**SETTINGS, "train.threads": 1, **done.best.settings})  # fmt: skip
    assert alone.metrics["loss"] == done.best.metrics["loss"]
    kept: Model = ch.load(folder / "best")
    for name, weight in alone.model.model.state_dict().items():
        assert weight.equal(kept.model.state_dict()[name]), name
    with_weights = [path.parent.name for path in folder.glob("trials/*/model.safetensors")]
    assert with_weights == [f"{done.best.number:03}"]
    assert (folder / "sweep.png").stat().st_size > 1000
    assert json.loads((folder / "sweep.json").read_text())["trials"][0]["settings"] == {}
    again = ch.sweep([text], vary, **settings)  # nothing is left to do
    assert again.to_dict() == done.to_dict()
    with pytest.raises(ch.InputError, match="holds a sweep with another vary"):
        ch.sweep([text], {"train.lr": [1e-3]}, **settings)
    assert {*started} == {"spawn"}  # threads of PyTorch do not outlive a fork


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({}, "nothing is varied"),
        (["train.lr"], "KEY=LOW..HIGH or KEY=VALUE,VALUE"),
        (["train.lr=1e-2..1e-4"], "first number must be below the second"),
        (["train.lr=a..b"], "is no range"),
        (["train.rate=1,2"], 'unknown .*"rate"'),
        (["train.steps=0,-1"], "steps 0 must be 1 or more|steps -1"),
        ({"train.lr": []}, "no values"),
    ],
)
def test_what_cannot_be_swept_is_refused(text, tmp_path, vary, message):
    with pytest.raises((ch.InputError, ch.ConfigError), match=message):
        ch.sweep([text], vary, recipe="char-gpt-cpu", settings=SETTINGS, out=tmp_path / "sweep", trials=3)
    assert not (tmp_path / "sweep").exists()
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ch.InputError, match=r"^\S+empty.txt is empty"):
        ch.sweep(tmp_path / "empty.txt", {"train.lr": "1e-4..1e-2"}, out=tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()
    with pytest.raises(ch.InputError, match="a grid needs values, not ranges"):
        ch.sweep([text], ["train.lr=1e-4..1e-3"], out=tmp_path / "sweep", method="grid")
