"""An experiment: arms that differ in one thing, seeds, what is measured, and claims that the numbers decide.

`conduct` runs every arm with every seed and judges the claims by a stated test. Each trial is kept in a file
of its own, so that a stopped experiment goes on where it was. `run_trials` runs trials in several
processes, each with one thread.
"""

import importlib
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from clearhead.app.plot import Figure
from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.errors import InputError, refuse
from clearhead.hub.files import write_text
from clearhead.labs.lab import EXPERIMENTS

Verdict = Literal["supported", "not supported", "undecided"]
Numbers = dict[str, Any]  # of a trial: figures by name, and curves as lists of [x, y]
# Student's t for an interval of 95 %, by degrees of freedom; of more than the last, the last, which is wider.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
FEWEST = 3  # seeds that decide anything


@dataclass(frozen=True)
class Conditions:
    """How a trial is run."""

    seed: int = 0
    device: str = "cpu"
    effort: float = 1.0  # a factor on the steps of training

    def steps(self, usual: int) -> int:
        """Return the number of steps to take in place of the usual ones."""
        return max(2, round(usual * self.effort))


@dataclass(frozen=True)
class Claim:
    """What the field says, as an order of two arms by one measured figure."""

    text: str
    figure: str
    less: str  # the arm that has less of it
    more: str
    by: float = 0.0  # at least

    def judge(self, trials: Mapping[str, Sequence[Numbers]]) -> "Judged":
        """Judge by the differences of the two arms, seed by seed."""
        pairs = zip(trials[self.less], trials[self.more])
        found = [float(more[self.figure]) - float(less[self.figure]) for less, more in pairs]
        low, high = interval(found)
        verdict: Verdict = "undecided"
        if len(found) >= FEWEST and low > self.by:
            verdict = "supported"
        elif len(found) >= FEWEST and high < self.by:
            verdict = "not supported"
        return Judged(self, verdict, statistics.fmean(found), low, high, len(found))

    def said(self, judged: "Judged") -> str:
        """Say the numbers that decided it."""
        numbers = f"{self.figure}: {self.more} minus {self.less} is {judged.difference:.4g}"
        if not math.isfinite(judged.difference):
            return f"{numbers}: a trial diverged, so nothing is decided"
        if judged.seeds < FEWEST:
            seeds = "seed" if judged.seeds == 1 else "seeds"
            return f"{numbers} with {judged.seeds} {seeds}: too few to decide"
        return f"{numbers} ({judged.low:.4g} to {judged.high:.4g}, 95 % by Student's t, {judged.seeds} seeds)"


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict, and the mean difference that decided it with its interval of 95 %."""

    claim: Claim
    verdict: Verdict
    difference: float
    low: float
    high: float
    seeds: int

    def sentence(self) -> str:
        """Say what was found, in one sentence."""
        return self.claim.said(self)


@dataclass(frozen=True)
class Picture:
    """A picture of the results: the curve of each arm, or one figure of each."""

    name: str
    title: str
    x_name: str
    y_name: str
    curve: str = ""  # the curve of each trial; empty: bars of `figure`
    figure: str = ""
    logarithmic: bool = False
    made: "Callable[[Findings], Figure] | None" = None  # draws it in another way


@dataclass(frozen=True)
class Experiment:
    """A question, the arms that answer it, and what is claimed."""

    title: str
    question: str
    arms: Mapping[str, Any]
    run: Callable[[Any, Conditions], Numbers]  # an arm in a setting -> what was measured
    claims: Sequence[Claim]
    figures: Mapping[str, str]  # the figures of the table, with what they are
    pictures: Sequence[Picture] = ()
    seconds: float = 30.0  # of a trial on one core
    # What all arms share, for the report; a function of the conditions where a value depends on them.
    setup: Mapping[str, Any] = field(default_factory=dict)

    def setup_in(self, setting: Conditions) -> dict[str, Any]:
        """Return what all arms share in these conditions, with the steps that are taken in them."""
        made = {name: value(setting) if callable(value) else value for name, value in self.setup.items()}
        if "steps" in made:
            made["steps"] = setting.steps(made["steps"])
            made |= {"warmup": min(made["warmup"], made["steps"] // 2)} if "warmup" in made else {}
        return made

    def minutes(self, seeds: int, setting: Conditions) -> float:
        """Return about how long it takes on one core."""
        return len(self.arms) * seeds * self.seconds * setting.effort / 60


@dataclass(frozen=True)
class Findings:
    """What an experiment found: trials by arm, in the order of their seeds, and judged claims."""

    name: str
    experiment: Experiment
    trials: Mapping[str, Sequence[Numbers]]
    judged: Sequence[Judged]
    seconds: float
    setting: Conditions

    def summary(self, arm: str, figure: str) -> tuple[float, float, float]:
        """Return the mean of a figure over the seeds, and its interval of 95 %."""
        values = [float(trial[figure]) for trial in self.trials[arm]]
        return statistics.fmean(values), *interval(values)

    @classmethod
    def of(
        cls, name: str, experiment: Experiment, trials: Mapping[str, Sequence[Numbers]], setting: Conditions
    ) -> "Findings":
        """Judge the claims by what was measured."""
        spent = sum(trial["seconds"] for arm in trials.values() for trial in arm)
        judged = [claim.judge(trials) for claim in experiment.claims]
        return cls(name, experiment, trials, judged, spent, setting)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            "experiment": self.name,
            "question": self.experiment.question,
            "setup": self.experiment.setup_in(self.setting),
            "arms": dict(self.experiment.arms),
            "setting": asdict(self.setting),
            "seconds": round(self.seconds, 1),
            "verdicts": [
                {"claim": one.claim.text, **{k: v for k, v in asdict(one).items() if k != "claim"}}
                for one in self.judged
            ],
            "trials": {arm: list(trials) for arm, trials in self.trials.items()},
        }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of 95 % of a mean, by Student's t; all numbers, of one or a diverged one."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2 or not math.isfinite(mean):
        return -math.inf, math.inf
    wide = STUDENT[min(count - 2, len(STUDENT) - 1)] * statistics.stdev(values) / math.sqrt(count)
    return mean - wide, mean + wide


def find(name: str) -> Experiment:
    """Return the experiment of a name in the list."""
    module, attribute = EXPERIMENTS[name].target.split(":")
    experiment: Experiment = getattr(importlib.import_module(f"clearhead.labs.lab.{module}"), attribute)
    return experiment


def conduct(
    name: str,
    experiment: Experiment,
    folder: Path,
    seeds: int = 3,
    setting: Conditions | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Findings:
    """Run every arm with every seed, those of earlier tries left out, and judge the claims.

    Seeds come first: a stopped experiment has all arms of the seeds it has.
    """
    setting = setting or Conditions()
    refuse(seeds < 1, f"seeds {seeds} must be 1 or more")
    trials: dict[str, list[Numbers]] = {arm: [] for arm in experiment.arms}
    total, began = seeds * len(trials), time.perf_counter()
    for number in range(total):
        seed, arm = number // len(trials), list(trials)[number % len(trials)]
        found = trial(experiment, arm, replace(setting, seed=seed), folder)
        trials[arm].append(found)
        left = (time.perf_counter() - began) / (number + 1) * (total - number - 1)
        tell(f"{number + 1} of {total}  {said(experiment, arm, found)}; about {left:.0f} s left")
    return Findings.of(name, experiment, trials, setting)


def trial(experiment: Experiment, arm: str, setting: Conditions, folder: Path) -> Numbers:
    """Run an arm with a seed, or return what an earlier try measured."""
    path = folder / "trials" / f"{_file_name(arm)}-{setting.seed}.json"
    asked = {"setting": asdict(setting), "arm": experiment.arms[arm], "setup": experiment.setup_in(setting)}
    asked = json.loads(json.dumps(asked))  # as it is read back
    found = _read(path, asked)
    if found is None:
        start = time.perf_counter()
        torch.manual_seed(setting.seed)
        found = {**experiment.run(experiment.arms[arm], setting), "seed": setting.seed}
        found["seconds"] = time.perf_counter() - start
        write_text(path, json.dumps({**asked, "numbers": found}))
    return found


def said(experiment: Experiment, arm: str, found: Numbers) -> str:
    """Say what a trial measured, in one line."""
    figures = ", ".join(f"{figure} {found[figure]:.4g}" for figure in experiment.figures)
    return f"{arm}, seed {found['seed']}: {figures}"


def _read(path: Path, asked: Mapping[str, Any]) -> Numbers | None:
    """Return what an earlier try measured; refuse one that was asked for something else."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        numbers: Numbers = found.pop("numbers")
    except (ValueError, KeyError, AttributeError):
        raise InputError(
            f"{path} is not the record of a trial: remove it, or choose another folder"
        ) from None
    differs = next((name for name in asked if found.get(name) != asked[name]), None)
    if differs:
        was, wanted = found.get(differs), asked[differs]
        raise InputError(f"{path} was run with {differs} {was}, not {wanted}: choose another --out")
    return numbers


def _file_name(arm: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in arm)


# Many trials at once --------------------------------------------------------------------------------------


def run_trials(
    folders: dict[str, Path], seeds: int, setting: Conditions, workers: int, tell: Callable[[str], None]
) -> None:
    """Run every trial of experiments, by name with their folders; long ones begin first.

    Each trial is kept in its experiment's folder, from which `conduct` reads it.
    """
    jobs = [
        (name, arm, replace(setting, seed=seed), folder)
        for name, folder in sorted(folders.items(), key=lambda item: -find(item[0]).seconds)
        for seed in range(seeds)
        for arm in find(name).arms
    ]
    apart = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, apart, torch.set_num_threads, (1,)) as pool:
        running = {pool.submit(_run, *job): job for job in jobs}
        faults = []
        try:
            for number, done in enumerate(as_completed(running), start=1):
                name, arm, _, _ = running[done]
                fault = done.exception()
                if fault is not None:
                    faults.append(fault)
                line = fault or said(find(name), arm, done.result())
                tell(f"{number} of {len(jobs)}  {name}: {line}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if faults:  # after all others: what they measured is kept
        raise faults[0]


def _run(name: str, arm: str, setting: Conditions, folder: Path) -> Numbers:
    return trial(find(name), arm, setting, folder)


# How long it takes ----------------------------------------------------------------------------------------


REFERENCE = 0.020  # seconds of the step of `pace` on one core of the machine that the times were taken on


def pace(device: str) -> float:
    """Return how many times as long as on the reference machine a small step takes."""
    model = Transformer(ModelConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=4, max_positions=64)).to(
        device
    )
    ids = torch.zeros(16, 64, dtype=torch.long, device=device)
    found = []
    for _ in range(6):
        start = time.perf_counter()
        model(ids).logits.sum().backward()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found) / REFERENCE
