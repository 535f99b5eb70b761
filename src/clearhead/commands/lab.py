"""The command `lab`: experiments that train, measure, draw and conclude."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from clearhead.commands.common import Json, option, print_notes, show_result
from clearhead.errors import nearest, refuse
from clearhead.lab.table import EXPERIMENTS
from clearhead.report import table


def lab(
    name: Annotated[Positional[str | None], option("an experiment; none: list them", metavar="NAME")] = None,
    seeds: Annotated[int, option("run every arm with so many seeds; 3 or more decide a claim")] = 3,
    effort: Annotated[float, option("a factor on the steps of training")] = 1.0,
    full: Annotated[bool, option("ten times the steps, on a GPU where there is one")] = False,
    budget: Annotated[float, option("minutes it may take; one that takes longer is not begun")] = 30.0,
    out: Annotated[Path | None, option("the folder to write; default: lab/NAME", metavar="DIR")] = None,
    json: Json = False,
) -> None:
    """Run an experiment: every arm with every seed, a report with pictures, and a verdict on each claim.

    A stopped experiment goes on where it was when the command is given again.

    For example:
      clearhead lab
      clearhead lab residuals
      clearhead lab lstm --seeds 5 --out my-lab/
    """
    if name is None:
        rows = [[key, one.summary] for key, one in EXPERIMENTS.items()]
        show_result(dict(rows), json, [table("", ("experiment", "what it asks"), rows)])
        return
    refuse(
        name not in EXPERIMENTS,
        f'no experiment is called "{name}"{nearest(name, EXPERIMENTS)}: clearhead lab lists them',
    )
    refuse(effort <= 0 or budget <= 0, f"--effort {effort} and --budget {budget} must be above 0")
    from clearhead.lab import report
    from clearhead.lab.experiment import Setting, conduct
    from clearhead.lab.pace import pace
    from clearhead.lab.run import find

    experiment = find(name)
    setting = Setting(device="cpu", effort=effort * (10 if full else 1))
    if full:
        import torch

        setting = Setting(device="cuda" if torch.cuda.is_available() else "cpu", effort=setting.effort)
    minutes = experiment.minutes(seeds, setting, pace(setting.device))
    refuse(
        minutes > budget,
        f"{name} would take about {minutes:.0f} minutes here, and --budget is {budget:g}: "
        f"give it more, or choose fewer --seeds or a smaller --effort",
    )
    folder = out or Path("lab") / name
    print_notes([f"{experiment.question} About {max(minutes, 0.1):.1f} minutes."])
    findings = conduct(name, experiment, folder, seeds, setting, lambda line: print_notes([line]))
    said = f"clearhead lab {name} --seeds {seeds}" + (f" --effort {effort:g}" if effort != 1 else "")
    written = report.write(findings, folder, said + (" --full" if full else ""))
    rows = [[judged.verdict, judged.claim.text, judged.sentence()] for judged in findings.judged]
    body = {**findings.to_dict(), "report": str(written)}
    show_result(
        body, json, [table(experiment.title, ("verdict", "claim", "numbers"), rows, f"written: {written}")]
    )
