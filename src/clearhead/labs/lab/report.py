"""What an experiment writes: a report, pictures, and the numbers as JSON."""

import json
import math
import platform
from pathlib import Path

import torch

from clearhead.app import plot as canvas
from clearhead.errors import InputError, refuse, refusing
from clearhead.hub.files import write_text
from clearhead.labs.lab.experiment import Conditions, Experiment, Findings, Picture


def write(findings: Findings, folder: Path, command: str) -> Path:
    """Write results.json, then the report with its pictures; return the report."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "command": command,
        "device": device_name(findings.setting.device),
        "torch": torch.__version__,
    }
    return _leave(findings, facts, text(findings, facts), folder)


def redraw(name: str, experiment: Experiment, folder: Path) -> Path:
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
        written = text(findings, facts)
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


def text(findings: Findings, facts: dict[str, str]) -> str:
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
