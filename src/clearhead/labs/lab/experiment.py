"""An experiment: arms that differ in one thing, seeds, what is measured, and claims that the numbers decide.

`conduct` runs every arm with every seed and judges the claims by a stated test. Each trial is kept in a file
of its own, so that a stopped experiment goes on where it was. `run_trials` runs trials in several
processes, each with one thread. `write_report` writes the report, its pictures, and the numbers as JSON.
"""

import importlib
import json
import math
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from clearhead.app import plot as canvas
from clearhead.app.plot import Figure
from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.errors import InputError, nearest, refuse, refusing
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


def write_report(findings: Findings, folder: Path, command: str) -> Path:
    """Write results.json, then the report with its pictures; return the report."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"command": command, "device": device_name(findings.setting.device), "torch": torch.__version__}
    return _leave(findings, facts, report_text(findings, facts), folder)


def redraw_report(name: str, experiment: Experiment, folder: Path) -> Path:
    """Judge the trials of results.json, which any machine may have measured; write report and pictures."""
    path = folder / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        trials, setting = results["trials"], Conditions(**results["setting"])
        facts = {fact: results[fact] for fact in ("command", "device", "torch")}
        arms, of = list(trials), results["experiment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read as results of an experiment: {error}") from None
    if of == name and set(arms) < set(experiment.arms):
        experiment = experiment.only(arms)
    refuse(
        of != name or arms != list(experiment.arms),
        f"{path} is of {of} with the arms {', '.join(arms)}, not of {name} with "
        f"{', '.join(experiment.arms)}: run it again",
    )
    seeds = {len(trials[arm]) for arm in arms}
    refuse(len(seeds) > 1 or 0 in seeds, f"{path} has not the same seeds of every arm: run it again")
    with refusing(f"{path} lacks what a trial measures: run it again"):
        findings = Findings.of(name, experiment, trials, setting)
        written = report_text(findings, facts)
    return _leave(findings, facts, written, folder)


def _leave(findings: Findings, facts: dict[str, str], written: str, folder: Path) -> Path:
    """Write the numbers with their verdicts, the report, then its pictures; return the report."""
    write_text(folder / "results.json", json.dumps({**facts, **findings.to_dict()}) + "\n")
    path = folder / "report.md"
    write_text(path, written)
    for picture in findings.experiment.pictures:
        canvas.save(draw(findings, picture), folder / f"{picture.name}.png")
    return path


def device_name(device: str) -> str:
    """Return the name of a GPU, or of the processor."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()})"


def report_text(findings: Findings, facts: dict[str, str]) -> str:
    """Return the report in Markdown."""
    experiment, seeds = findings.experiment, len(next(iter(findings.trials.values())))
    lines = [f"# {experiment.title}", "", experiment.question, "", "## What was found", ""]
    for judged in findings.judged:
        why = judged.claim.explain(judged)
        lines += [f"- **{judged.verdict.capitalize()}:** {judged.text} {why[:1].upper()}{why[1:]}."]
    lines += ["", "## Numbers", ""]
    names = list(experiment.figures)
    lines += ["| | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    for arm in experiment.arms:
        cells = [_cell(*findings.summary(arm, name)) for name in names]
        lines += [f"| {arm} | " + " | ".join(cells) + " |"]
    lines += ["", f"Mean of {seeds} {'seed' if seeds == 1 else 'seeds'}"
              + (", ± half of the interval of 95 % (Student's t)." if seeds > 1 else ".")]  # fmt: skip
    lines += [f"`{name}`: {what}." for name, what in experiment.figures.items()]
    for picture in experiment.pictures:
        lines += ["", f"![{picture.title}]({picture.name}.png)"]
    setup = ", ".join(f"{name} {value}" for name, value in experiment.setup_in(findings.setting).items())
    lines += ["", "## How", ""]
    lines += [
        f"`{facts['command']}`, {facts['device']}, PyTorch {facts['torch']}, "
        f"{findings.seconds:.0f} s for all trials together."
    ]
    lines += [f"{setup}." if setup else ""]
    lines += [
        "A claim is an order of two arms by one figure. It is supported where the interval of 95 % of the "
        "difference, seed by seed, lies above what is claimed; not supported where it lies below; else "
        "undecided, as with fewer than three seeds."
    ]
    return "\n".join(lines).rstrip() + "\n"


def _cell(mean: float, low: float, high: float) -> str:
    return f"{mean:.4g}" if not math.isfinite(high) else f"{mean:.4g} ± {(high - low) / 2:.2g}"


def draw(findings: Findings, picture: Picture) -> canvas.Figure:
    """Draw the curves of all arms, mean over the seeds with their range, or a bar for each arm."""
    if picture.drawn_by is not None:
        return picture.drawn_by(findings)
    arms = list(findings.trials)
    if picture.figure:
        values = [findings.summary(arm, picture.figure) for arm in arms]
        wide = [(high - low) / 2 if math.isfinite(high) else 0.0 for _, low, high in values]
        means = [mean if math.isfinite(mean) else 0.0 for mean, _, _ in values]  # no bar where one diverged
        figure, axes = canvas.single(7, 0.36 * len(arms) + 1.4, picture.title, picture.y_name, grid="x")
        canvas.bars(axes, means, arms, size=9)
        axes.errorbar(means, range(len(arms)), xerr=wide, fmt="none", ecolor="black", capsize=4)
        return figure
    figure, axes = canvas.single(7, 4.8, picture.title, picture.x_name, picture.y_name, grid="both")
    for arm in arms:
        curves = [dict(map(tuple, trial[picture.curve])) for trial in findings.trials[arm]]
        steps = [x for x in curves[0] if all(x in curve for curve in curves)]
        if picture.logarithmic:  # such a scale has no place for 0
            steps = [x for x in steps if all(curve[x] > 0 for curve in curves)]
        means = [sum(curve[x] for curve in curves) / len(curves) for x in steps]
        line = axes.plot(steps, means, label=arm)[0]
        if len(curves) > 1:
            lows, highs = ([edge(curve[x] for curve in curves) for x in steps] for edge in (min, max))
            axes.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.2)
    if picture.logarithmic:
        axes.set_yscale("log")
    canvas.legend(axes, 8)
    return figure
