"""The command `lab`: experiments that train, measure, draw and conclude."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from clearhead.app.commands.common import Json, option, print_notes, show_result
from clearhead.app.report import table
from clearhead.errors import MissingExtraError, nearest, refuse
from clearhead.labs.lab import EXPERIMENTS


def lab(
    name: Annotated[
        Positional[str | None], option("an experiment, or all; none: list them", metavar="NAME")
    ] = None,
    seeds: Annotated[int, option("run every arm with so many seeds; 3 or more decide a claim")] = 3,
    effort: Annotated[float, option("a factor on the steps of training")] = 1.0,
    full: Annotated[bool, option("ten times the steps, on a GPU where there is one")] = False,
    workers: Annotated[int, option("trials that run at once, each in a process with one thread")] = 1,
    budget: Annotated[float, option("minutes it may take; one that takes longer is not begun")] = 30.0,
    out: Annotated[
        Path | None,
        option("the folder to write; of all: one in it for each; default: lab/NAME", metavar="DIR"),
    ] = None,
    redraw: Annotated[bool, option("train nothing: write report and pictures from results.json")] = False,
    json: Json = False,
) -> None:
    """Run an experiment: every arm with every seed, a report with pictures, and a verdict on each claim.

    A stopped experiment goes on where it was when the command is given again.

    For example:
      clearhead lab
      clearhead lab residuals
      clearhead lab lstm --seeds 5 --out my-lab/
      clearhead lab all --workers 8 --budget 60
    """
    if name is None:
        rows = [[key, one.summary] for key, one in EXPERIMENTS.items()]
        show_result(dict(rows), json, [table("", ("experiment", "what it asks"), rows)])
        return
    refuse(
        name != "all" and name not in EXPERIMENTS,
        f'no experiment is called "{name}"{nearest(name, EXPERIMENTS)}: clearhead lab lists them',
    )
    refuse(effort <= 0 or budget <= 0, f"--effort {effort} and --budget {budget} must be above 0")
    refuse(seeds < 1 or workers < 1, f"--seeds {seeds} and --workers {workers} must be 1 or more")
    import torch

    from clearhead.labs.lab import report
    from clearhead.labs.lab.experiment import Conditions, conduct, find, pace, run_trials

    base = out or Path("lab") / ("" if name == "all" else name)
    folders = {one: base / one for one in EXPERIMENTS} if name == "all" else {name: base}
    if redraw:
        drawn = {one: str(report.redraw(one, find(one), folder)) for one, folder in folders.items()}
        show_result(drawn, json, [table("", ("experiment", "written"), [*drawn.items()])])
        return
    device = "cuda" if full and torch.cuda.is_available() else "cpu"
    setting = Conditions(device=device, effort=effort * (10 if full else 1))
    minutes = sum(find(one).minutes(seeds, setting) for one in folders) * pace(device) / workers
    refuse(
        minutes > budget,
        f"{name} would take about {minutes:.0f} minutes here, and --budget is {budget:g}: "
        f"give it more, or choose fewer --seeds, a smaller --effort or more --workers",
    )
    print_notes([*(find(one).question for one in folders), f"About {max(minutes, 0.1):.1f} minutes."])

    def tell(line: str) -> None:
        print_notes([line])

    if workers > 1:
        run_trials(folders, seeds, setting, workers, tell)
    options = f"--seeds {seeds}" + f" --effort {effort:g}" * (effort != 1) + " --full" * full
    bodies, rows = [], []
    for one, folder in folders.items():
        experiment = find(one)
        findings = conduct(one, experiment, folder, seeds, setting, *[tell] * (workers == 1))
        try:
            written = report.write(findings, folder, f"clearhead lab {one} {options}")
        except MissingExtraError as error:
            written = folder / "report.md"
            print_notes(
                [f"without pictures, since {error}; then clearhead lab {one} --redraw --out {folder}"]
            )
        rows += [[one, judged.verdict, judged.claim.text, judged.sentence()] for judged in findings.judged]
        bodies.append({**findings.to_dict(), "report": str(written)})
    body = {"experiments": bodies} if name == "all" else bodies[0]
    head = ("experiment", "verdict", "claim", "numbers")
    show_result(body, json, [table("", head, rows, f"written: {base}")])
