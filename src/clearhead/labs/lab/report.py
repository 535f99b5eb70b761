"""What an experiment leaves behind: a report, pictures, and the numbers as JSON."""

import json
import math
import platform
from pathlib import Path

import torch

from clearhead.app import plot as canvas
from clearhead.errors import InputError, refuse, refusing
from clearhead.hub.files import write_text
from clearhead.labs.lab.experiment import Conditions, Experiment, Findings, Picture

SIGNS = {"supported": "Supported", "not supported": "Not supported", "undecided": "Undecided"}


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
        found = json.loads(path.read_text(encoding="utf-8"))
        trials, setting = found["trials"], Conditions(**found["setting"])
        facts = {fact: found[fact] for fact in ("command", "device", "torch")}
        arms, of = list(trials), found["experiment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read as results of an experiment: {error}") from None
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
        lines += [f"- **{SIGNS[judged.verdict]}:** {judged.claim.text} {judged.sentence()[:1].upper()}"
                  f"{judged.sentence()[1:]}."]  # fmt: skip
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
    if picture.made is not None:
        return picture.made(findings)
    arms = list(findings.trials)
    figure, axes = canvas.single(7, 4.2, picture.title, picture.x_name, picture.y_name, grid="both")
    if picture.figure:
        values = [findings.summary(arm, picture.figure) for arm in arms]
        wide = [(high - low) / 2 if math.isfinite(high) else 0.0 for _, low, high in values]
        means = [mean if math.isfinite(mean) else 0.0 for mean, _, _ in values]  # no bar where one diverged
        axes.bar(arms, means, yerr=wide, color=canvas.BLUE, capsize=4)
        axes.tick_params(axis="x", rotation=20 if len(arms) > 3 else 0)
        return figure
    for arm in arms:
        curves = [dict(map(tuple, trial[picture.curve])) for trial in findings.trials[arm]]
        places = [x for x in curves[0] if all(x in curve for curve in curves)]
        means = [sum(curve[x] for curve in curves) / len(curves) for x in places]
        line = axes.plot(places, means, label=arm)[0]
        if len(curves) > 1:
            lows, highs = ([edge(curve[x] for curve in curves) for x in places] for edge in (min, max))
            axes.fill_between(places, lows, highs, color=line.get_color(), alpha=0.2)
    if picture.logarithmic:
        axes.set_yscale("log")
    axes.legend(fontsize=8)
    return figure
