"""The command `train`: a run, watched."""

from __future__ import annotations

import json as json_
import signal
import sys
import time
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from clearhead.commands.common import Json
from clearhead.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.training.events import Event


def train(
    data: Annotated[
        Positional[tuple[str, ...]], arg(metavar="DATA", help="files, folders, globs, or an embedded corpus")
    ] = (),
    recipe: Annotated[str | None, arg(help="a recipe's name or .toml file; default: by the data")] = None,
    out: Annotated[Path | None, arg(help="folder to write; default: runs/ and the name of the data")] = None,
    set: Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(
            metavar="KEY=VALUE",
            help="change the recipe, such as train.steps=2000; each run's train.toml explains the keys",
        ),
    ] = (),
    resume: Annotated[Path | None, arg(metavar="DIR", help="go on with the run in this folder")] = None,
    overwrite: Annotated[bool, arg(help="remove an earlier run in the output folder")] = False,
    json: Json = False,
) -> None:
    """Train a model from your own files; what they are is guessed, and said. Without DATA: lists what comes along.

    For example:
      clearhead train my.txt
      clearhead train stdlib-docs --out my-model
      clearhead train reviews.tsv --set data.columns='{text = "review", label = "stars"}'
      clearhead train train.en train.de --recipe original-transformer --set train.steps=5000
      clearhead train --resume runs/my
    """
    from clearhead.training.recipe import read_recipe
    from clearhead.training.run import train as run

    if not data and resume is None and not read_recipe(recipe, set).data.paths:
        if recipe is not None or set or out is not None:
            raise InputError(
                "name the data to train on: files, folders or a corpus; clearhead train alone lists what comes along"
            )
        _list(json)
        return
    watcher = Watcher()
    with Stopper() as stopper:
        try:
            done = run(
                data,
                recipe=recipe,
                out=out,
                settings=set,
                resume=resume,
                overwrite=overwrite,
                on_event=watcher,
                stop=lambda: stopper.asked,
            )
        finally:
            watcher.close()
    if done.reason == "stopped":
        print(
            f"stopped at step {done.step}, saved; go on with: clearhead train --resume {quote(str(done.folder))}",
            file=sys.stderr,
        )
        sys.exit(130 if stopper.signal == signal.SIGINT else 143)
    body = {"folder": str(done.folder), "step": done.step, "reason": done.reason, "metrics": done.metrics}
    if json:
        print(json_.dumps(body, indent=2))
    else:
        print(summary(body, done.model))


def summary(body: dict[str, Any], loaded: Any) -> str:
    """The last words of a run: what came out and what to try."""
    head, family, folder = loaded.config.head, loaded.config.family, quote(body["folder"])
    figures = "  ".join(f"{name} {value:.4f}" for name, value in body["metrics"].items() if name != "step")
    writes = (
        f"translate {folder} TEXT"
        if family == "encoder-decoder"
        else f"generate {folder} TEXT --temperature 0.8"
    )
    use = {
        "lm": f"clearhead {writes}",
        "mlm": f"clearhead fill {folder} TEXT",
        "classifier": f"clearhead classify {folder} {'TEXT' if loaded.tokenizer is not None else 'IMAGE'}",
        "tagger": f"clearhead tag {folder} TEXT",
        "span": f"clearhead answer {folder} QUESTION CONTEXT",
    }[head]
    best = f"best at step {body['metrics']['step']}: {figures}" if body["metrics"] else ""
    return f"{best}\nsaved {folder}\ntry   {use}\n      clearhead check {folder}"


def _list(json: bool) -> None:
    """The corpora and recipes that come along."""
    from clearhead.data.corpora import CORPORA
    from clearhead.training.recipe import recipe_names

    corpora = {name: corpus.sentence for name, corpus in CORPORA.items()}
    recipes = recipe_names()
    if json:
        print(json_.dumps({"corpora": corpora, "recipes": recipes}, indent=2))
        return
    print("clearhead train FILE ...     trains on your files; or on one of these:")
    for name, sentence in corpora.items():
        print(f"  {name:<22} {sentence}")
    print("\n--recipe NAME                how; without it, by what the data are:")
    for name, sentence in recipes.items():
        print(f"  {name:<22} {sentence}")


class Stopper:
    """Turns the first Ctrl-C or SIGTERM into a request to save and stop; the second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.asked, self.signal = False, signal.SIGINT
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stopper:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked, self.signal = True, signal.Signals(number)
        print(
            "\nstopping after this step and saving; Ctrl-C again stops at once", file=sys.stderr, flush=True
        )

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Watcher:
    """Shows a run on stderr: a live line in a terminal, else a plain line now and then."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console: Console = Console(stderr=True, highlight=False)
        self.live: Any = None
        self.last = 0.0
        self.validated = ""

    def __call__(self, event: Event) -> None:
        """Show one event."""
        from clearhead.training import events

        match event:
            case events.Note(line):
                self.say(line)
            case events.Started():
                also = "" if event.trainable == event.parameters else f", {event.trainable:,} of them trained"
                self.say(
                    f"{event.task}: {event.parameters:,} parameters{also}, {event.steps:,} steps on {event.device} -> {event.folder}"
                )
            case events.Stepped():
                self.step(event)
            case events.Validated():
                self.validated = "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
                self.say(
                    f"step {event.step:,}  validation  {self.validated}{'  (best so far)' if event.best else ''}"
                )
                for sample in event.samples:
                    self.say(f"    {shortened(sample)}")
            case events.Saved() | events.Finished():
                pass

    def step(self, event: Any) -> None:
        """The figures of a step; without a terminal, every ten seconds."""
        words = [
            f"step {event.step:,}/{event.steps:,}",
            f"loss {event.loss:.4f}",
            f"rate {event.rate:.2e}",
            f"norm {event.norm:.2f}",
            f"{event.tokens_per_second:,.0f} tok/s",
            *([f"MFU {event.mfu:.1%}"] if event.mfu is not None else []),
            f"{event.memory / 2**30:.1f} GiB",
            f"{_clock(event.left)} left",
        ]
        line = "  ".join(words)
        if self.console.is_terminal:
            self.show(line, event.step / event.steps)
        elif time.monotonic() - self.last > 10 or event.step in (1, event.steps):
            self.last = time.monotonic()
            self.say(line)

    def show(self, line: str, share: float) -> None:
        """The live panel."""
        from rich.live import Live
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        grid = Table.grid(expand=True)
        grid.add_row(line)
        grid.add_row(ProgressBar(total=1.0, completed=share))
        if self.validated:
            grid.add_row(f"validation  {self.validated}")
        if self.live is None:
            self.live = Live(console=self.console, refresh_per_second=8, transient=True)
            self.live.start()
        self.live.update(Panel(grid, title="training", border_style="dim"))

    def say(self, line: str) -> None:
        """A line that stays."""
        from rich.text import Text

        self.console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.live is not None:
            self.live.stop()
            self.live = None


def shortened(text: str, width: int = 160) -> str:
    """One line of a sample, line breaks visible."""
    line = text.replace("\n", "⏎")
    return line if len(line) <= width else line[: width - 1] + "…"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
