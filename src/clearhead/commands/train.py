"""The command `train`: a run, watched."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

import clearhead as ch
from clearhead.commands.common import DATA, Json, option, show_result
from clearhead.errors import refuse

if TYPE_CHECKING:
    from clearhead.training.events import Event, Stepped

EVERY = 10  # seconds between the lines of a run without a terminal
LONGEST = 160  # letters of a sample


def train(
    data: Annotated[Positional[tuple[str, ...]], option(DATA, metavar="DATA")] = (),
    recipe: Annotated[str | None, option("a recipe's name or .toml file; default: by the data")] = None,
    out: Annotated[Path | None, option("folder to write; default: runs/ and the name of the data")] = None,
    set: Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(
            metavar="KEY=VALUE",
            help="change the recipe, such as train.steps=2000; each run's train.toml explains the keys",
        ),
    ] = (),
    resume: Annotated[Path | None, option("go on with the run in this folder", metavar="DIR")] = None,
    overwrite: Annotated[bool, option("remove an earlier run in the output folder")] = False,
    json: Json = False,
) -> None:
    """Train a model from your own files, whose format is guessed. Without DATA, list the corpora and recipes.

    For example:
      clearhead train my.txt
      clearhead train stdlib-docs --out my-model
      clearhead train reviews.tsv --set data.columns='{text = "review", label = "stars"}'
      clearhead train train.en train.de --recipe original-transformer --set train.steps=5000
      clearhead train --resume runs/my
    """
    if not data and resume is None and not ch.read_recipe(recipe, set).data.paths:
        refuse(
            recipe is not None or set or out is not None,
            "name the data to train on: files, folders or a corpus; clearhead train alone lists them",
        )
        _list(json)
        return
    watcher = Watcher()
    with _stopping() as signals:
        try:
            done = ch.train(
                data,
                recipe=recipe,
                out=out,
                settings=set,
                resume=resume,
                overwrite=overwrite,
                on_event=watcher,
                stop=lambda: bool(signals),
            )
        finally:
            watcher.close()
    folder = quote(str(done.folder))
    if done.reason == "stopped":
        resuming = f"go on with: clearhead train --resume {folder}"
        print(f"stopped at step {done.step}, saved; {resuming}", file=sys.stderr)
        sys.exit(128 + signals[0])
    body = {"folder": str(done.folder), "step": done.step, "reason": done.reason, "metrics": done.metrics}
    best = f"best at step {done.metrics['step']}: {_figures(done.metrics)}" if done.metrics else ""
    show_result(body, json, [best, f"saved {folder}", *_next_steps(done.model, folder)])


def _next_steps(model: ch.Model, folder: str) -> list[str]:
    """Return commands to try on a model that has just been trained."""
    from clearhead.evaluation.evaluate import task_for
    from clearhead.tasks.table import task_named

    use = task_named(task_for(model, None)).command.format(folder=folder)
    return [f"try   clearhead {use}", f"      clearhead check {folder}"]


def _figures(metrics: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "step")


def _list(json: bool) -> None:
    """List the corpora and recipes that come with clearhead."""
    from clearhead.data.corpora import CORPORA
    from clearhead.recipe import recipe_names

    corpora = {name: corpus.sentence for name, corpus in CORPORA.items()}
    recipes = recipe_names()
    corpus_lines, recipe_lines = (
        [f"  {name:<22} {sentence}" for name, sentence in listed.items()] for listed in (corpora, recipes)
    )
    lines = ["clearhead train FILE ...     trains on your files; or on one of these:", *corpus_lines]
    lines += ["\n--recipe NAME                how; without it, by what the data are:", *recipe_lines]
    show_result({"corpora": corpora, "recipes": recipes}, json, lines)


@contextmanager
def _stopping() -> Iterator[list[signal.Signals]]:
    """Give a list that the first Ctrl-C or SIGTERM goes into, as a request to save and stop.

    A second Ctrl-C stops at once.
    """
    received: list[signal.Signals] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signal.Signals(number))
        note = "\nstopping after this step and saving; Ctrl-C again stops at once"
        print(note, file=sys.stderr, flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Watcher:
    """Shows a run on stderr: a live panel in a terminal, else a line now and then."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.live = Live(console=self.console, refresh_per_second=8, transient=True)
        self.last = 0.0
        self.validated = ""

    def __call__(self, event: Event) -> None:
        """Show one event."""
        from clearhead.training import events

        match event:
            case events.Note(line):
                self.say(line)
            case events.Started():
                all_trained = event.trainable == event.parameters
                also = "" if all_trained else f", {event.trainable:,} of them trained"
                size = f"{event.parameters:,} parameters{also}, {event.steps:,} steps"
                self.say(f"{event.task}: {size} on {event.device} -> {event.folder}")
            case events.Stepped():
                self.step(event)
            case events.Validated():
                self.validated = _figures(event.metrics)
                best = "  (best so far)" if event.best else ""
                self.say(f"step {event.step:,}  validation  {self.validated}{best}")
                for sample in event.samples:
                    line = sample.replace("\n", "⏎")
                    self.say(f"    {line if len(line) <= LONGEST else line[: LONGEST - 1] + '…'}")

    def step(self, event: Stepped) -> None:
        """Show the figures of a step; without a terminal, every ten seconds."""
        words = [
            f"step {event.step:,}/{event.steps:,}",
            f"loss {event.loss:.4f}",
            f"rate {event.rate:.2e}",
            f"norm {event.norm:.2f}",
            f"{event.tokens_per_second:,.0f} tok/s",
            *([f"MFU {event.mfu:.1%}"] if event.mfu is not None else []),
            f"{event.memory / 2**30:.1f} GiB",
            f"{timedelta(seconds=round(event.left))} left",
        ]
        line = "  ".join(words)
        if self.console.is_terminal:
            self.show(line, event.step / event.steps)
        elif time.monotonic() - self.last > EVERY or event.step in (1, event.steps):
            self.last = time.monotonic()
            self.say(line)

    def show(self, line: str, share: float) -> None:
        """Update the live panel."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar

        more = [f"validation  {self.validated}"] if self.validated else []
        shown = Group(line, *more, ProgressBar(total=1.0, completed=share))
        self.live.start()
        self.live.update(Panel(shown, title="training", border_style="dim"))

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self.console.print(line, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.live.stop()
