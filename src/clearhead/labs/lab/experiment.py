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
from clearhead.errors import InputError, nearest, refuse
from clearhead.hub.files import write_text
from clearhead.inside.long_text import quickest
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
    data: str = ""  # the text of an experiment that takes one; "": an embedded one

    def steps(self, usual: int) -> int:
        """Return the number of steps to take in place of the usual ones."""
        return max(2, round(usual * self.effort))


@dataclass(frozen=True)
class Claim:
    """An order of two arms by one measured figure."""

    figure: str
    less: str  # the arm that has less of it
    more: str
    by: float = 0.0  # at least

    def differences(self, trials: Mapping[str, Sequence[Numbers]]) -> list[float]:
        """Return what decides it, a number for each seed: how much more one arm has than the other."""
        pairs = zip(trials[self.less], trials[self.more])
        return [float(more[self.figure]) - float(less[self.figure]) for less, more in pairs]

    def verdict(self, low: float, high: float) -> Verdict:
        """Return the verdict that an interval of the mean difference allows."""
        return "supported" if low > self.by else "not supported" if high < self.by else "undecided"

    def judge(self, text: str, trials: Mapping[str, Sequence[Numbers]]) -> "Judged":
        """Judge by the differences, seed by seed; a few seeds decide nothing."""
        differences = self.differences(trials)
        low, high = interval(differences)
        verdict = self.verdict(low, high) if len(differences) >= FEWEST else "undecided"
        return Judged(text, self, verdict, statistics.fmean(differences), low, high, len(differences))

    def explain(self, judged: "Judged") -> str:
        """Return the numbers that decided it, in one sentence."""
        name = f"{self.figure}: {self.more} minus {self.less} is"
        if not math.isfinite(judged.difference):
            return f"{name} {judged.difference:.4g}: a trial diverged, so nothing is decided"
        return judged.numbers(name, ".4g")


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict, and the mean difference that decided it with its interval of 95 %."""

    text: str
    claim: Claim
    verdict: Verdict
    difference: float
    low: float
    high: float
    seeds: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        facts = asdict(self)
        return {"claim": facts.pop("text"), **{name: facts[name] for name in facts if name != "claim"}}

    def numbers(self, name: str, form: str) -> str:
        """Return the mean difference with its interval, or why there is none."""
        mean, low, high = (format(value, form) for value in (self.difference, self.low, self.high))
        seeds = "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
        if self.seeds < FEWEST:
            return f"{name} {mean} with {seeds}: too few to decide"
        return f"{name} {mean} ({low} to {high}, 95 % by Student's t, {seeds})"


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
    drawn_by: "Callable[[Findings], Figure] | None" = None  # draws it in another way


# Of every experiment that trains on text.
LOSS = {"loss": "nats a character on unseen text"}
LOSS_CURVE = Picture("loss", "Loss while training", "step", "nats a character", curve="curve")


@dataclass(frozen=True)
class Experiment:
    """A question, the arms that answer it, and what is claimed."""

    title: str
    question: str
    arms: Mapping[str, Any]
    run: Callable[[Any, Conditions], Numbers]  # an arm in a setting -> what was measured
    claims: Mapping[str, Claim]  # what the field says, and the order that it means
    figures: Mapping[str, str]  # the figures of the table, with what they are
    pictures: Sequence[Picture] = ()
    seconds: float = 30.0  # of a trial on one core
    # What all arms share, for the report; a function of the conditions where a value depends on them.
    setup: Mapping[str, Any] = field(default_factory=dict)
    # Adds figures that compare an arm with another, once all have been measured.
    relate: Callable[[Mapping[str, Sequence[Numbers]]], Mapping[str, Sequence[Numbers]]] | None = None
    takes_data: bool = False  # whether it can be run on a text of one's own

    def setup_in(self, setting: Conditions) -> dict[str, Any]:
        """Return what all arms share in these conditions, with the steps that are taken in them."""
        setup = {name: value(setting) if callable(value) else value for name, value in self.setup.items()}
        if "steps" in setup:
            setup["steps"] = setting.steps(setup["steps"])
        if "warmup" in setup:
            setup["warmup"] = min(setup["warmup"], setup["steps"] // 2)
        return setup

    def only(self, arms: Sequence[str]) -> "Experiment":
        """Return the experiment with the first arm, which others are compared with, and these."""
        names = [name.strip() for name in arms]
        unknown = next((name for name in names if name not in self.arms), "")
        refuse(
            unknown,
            f'no arm is called "{unknown}"{nearest(unknown, self.arms)}: there are {", ".join(self.arms)}',
        )
        kept = {
            arm: value for number, (arm, value) in enumerate(self.arms.items()) if not number or arm in names
        }
        claims = {
            text: claim for text, claim in self.claims.items() if {claim.less, claim.more} <= kept.keys()
        }
        return replace(self, arms=kept, claims=claims)

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
        trials = trials if experiment.relate is None else experiment.relate(trials)
        judged = [claim.judge(text, trials) for text, claim in experiment.claims.items()]
        return cls(name, experiment, trials, judged, spent, setting)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            "experiment": self.name,
            "question": self.experiment.question,
            "setup": self.experiment.setup_in(self.setting),
            "arms": dict(self.experiment.arms),
            "setting": facts_of(self.setting),
            "seconds": round(self.seconds, 1),
            "verdicts": [judged.to_dict() for judged in self.judged],
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
        trials[arm].append(trial(experiment, arm, replace(setting, seed=seed), folder))
        left = (time.perf_counter() - began) / (number + 1) * (total - number - 1)
        line = summary_of(experiment, arm, trials[arm][-1])
        tell(f"{number + 1} of {total}  {line}; about {left:.0f} s left")
    return Findings.of(name, experiment, trials, setting)


def trial(experiment: Experiment, arm: str, setting: Conditions, folder: Path) -> Numbers:
    """Run an arm with a seed, or return what an earlier try measured."""
    name = "".join(letter if letter.isalnum() else "_" for letter in arm)
    path = folder / "trials" / f"{name}-{setting.seed}.json"
    facts = {"setting": facts_of(setting), "arm": experiment.arms[arm], "setup": experiment.setup_in(setting)}
    facts = json.loads(json.dumps(facts))  # as they are read back
    if path.exists():
        return _read(path, facts)
    start = time.perf_counter()
    torch.manual_seed(setting.seed)
    numbers = {**experiment.run(experiment.arms[arm], setting), "seed": setting.seed}
    numbers["seconds"] = time.perf_counter() - start
    write_text(path, json.dumps({**facts, "numbers": numbers}))
    return numbers


def facts_of(setting: Conditions) -> dict[str, Any]:
    """Return the conditions as they are recorded: a text only where one was given."""
    return {name: value for name, value in asdict(setting).items() if name != "data" or value}


def summary_of(experiment: Experiment, arm: str, numbers: Numbers) -> str:
    """Return what a trial measured, in one line."""
    measured = [figure for figure in experiment.figures if figure in numbers]  # others compare arms
    figures = ", ".join(f"{figure} {numbers[figure]:.4g}" for figure in measured)
    return f"{arm}, seed {numbers['seed']}: {figures}"


def _read(path: Path, facts: Mapping[str, Any]) -> Numbers:
    """Return what an earlier try measured; refuse one of another experiment."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        numbers: Numbers = record.pop("numbers")
    except (ValueError, KeyError, AttributeError):
        raise InputError(
            f"{path} is not the record of a trial: remove it, or choose another folder"
        ) from None
    for name, wanted in facts.items():
        was = record.get(name)
        refuse(was != wanted, f"{path} was run with {name} {was}, not {wanted}: choose another --out")
    return numbers


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
                faults += [] if fault is None else [fault]
                line = fault or summary_of(find(name), arm, done.result())
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
    config = ModelConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=4, max_positions=64)
    model, ids = Transformer(config).to(device), torch.zeros(16, 64, dtype=torch.long, device=device)
    return quickest(lambda: model(ids).logits.sum().backward(), torch.device(device), 5) / REFERENCE
