"""Commands that train a model and measure it: train, eval."""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

import clearhead as ch
from clearhead.app.commands.common import (
    DATA,
    Beams,
    Device,
    Dtype,
    Folder,
    Json,
    LengthPenalty,
    Settings,
    check_apart,
    check_inputs,
    load_model,
    option,
    print_notes,
    progress,
    show_result,
    writing,
)
from clearhead.app.report import confusion_tables, size, table
from clearhead.errors import refuse
from clearhead.learn.parallel import first_here, started
from clearhead.learn.recipe import recipe_names
from clearhead.learn.training import events

ECHO = 3  # seconds within which a second Ctrl-C is the first one, passed on
EVERY = 10  # seconds between the lines of a run without a terminal
NEWLINE = "\n"
DISK = ("bytes on disk, at most", "bytes free there")  # of a rehearsal, shown at its end
SHOWN = ("task", "examples", "targets", "metrics", "intervals", "signatures")


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
    dry_run: Annotated[bool, option("show every decision and the sizes; train and write nothing")] = False,
    show: Annotated[bool, option("print the keys of the recipe, with their values and meanings")] = False,
    json: Json = False,
) -> None:
    """Train a model from your own files, whose format is guessed. Without DATA, list the corpora and recipes.

    For example:
      clearhead train my.txt
      clearhead train stdlib-docs --out my-model
      clearhead train a.tsv --set data.columns='{text = "review", label = "stars"}'
      clearhead train train.en train.de --recipe original-transformer
      clearhead train my.txt --dry-run
      clearhead train --recipe char-gpt --show
      clearhead train --resume runs/my
      clearhead train --resume runs/my --set train.steps=4000
    """
    if show:
        refuse(data or resume is not None, "--show prints a recipe, not a run: leave data and --resume out")
        shown = ch.read_recipe(recipe, set)
        show_result(dataclasses.asdict(shown), json, [shown.to_toml()])
        return
    if not data and resume is None and not ch.read_recipe(recipe, set).data.paths:
        refuse(
            recipe is not None or set or out is not None,
            "name the data to train on: files, folders or a corpus; clearhead train alone lists them",
        )
        _list(json)
        return
    watcher = Watcher()
    if dry_run:
        refuse(resume is not None, "--dry-run is for a new run: leave --resume out")
        from clearhead.learn.training.rehearsal import rehearse

        found = rehearse(data, recipe=recipe, out=out, settings=set, on_event=watcher)
        sizes = [
            f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}"
            for name, value in found.sizes.items()
            if name not in DISK
        ]
        needed, free = (found.sizes[name] for name in DISK)
        parameters, steps = (f"{found.sizes[name]:,}" for name in ("parameters", "steps"))
        ends = [
            f"folder: {found.folder}",
            f"disk: {size(needed)} at most, and {size(free)} are free",
            f"ready: {steps} steps of {found.sizes['task']} with {parameters} parameters on "
            f"{found.sizes['device']}; nothing was trained or written",
        ]
        if needed > free:
            print_notes([f"{found.folder} needs {size(needed)}, and {size(free)} are free there"])
        show_result(found.to_dict(), json, [found.recipe.to_toml(), *sizes, *ends])
        return
    with _stopping() as signals:
        try:
            done = ch.train(
                [Path(name) for name in data],
                recipe=recipe,
                out=out,
                settings=set,
                resume=resume,
                overwrite=overwrite,
                on_event=watcher,
                stop=lambda: bool(signals),
            )
        finally:
            watcher.live.stop()
    stopped = 128 + (signals or [signal.SIGTERM])[0] if done.reason == "stopped" else 0
    if not first_here():
        sys.exit(stopped)
    folder = quote(str(done.folder))
    if done.reason == "stopped":
        resuming = f"go on with: clearhead train --resume {folder}"
        print_notes([f"stopped at step {done.step}, saved; {resuming}"])
        sys.exit(stopped)
    body = {"folder": str(done.folder), "step": done.step, "reason": done.reason, "metrics": done.metrics}
    body |= {"skipped": done.skipped}
    if done.skipped:
        many = f"{done.skipped:,} of {done.step:,} steps were skipped"
        print_notes([f"{many}: their loss or gradient was not finite; log.jsonl has them"])
    best = f"best at step {done.metrics['step']}: {_figures(done.metrics)}" if done.metrics else ""
    tries = [f"try   clearhead {done.command}", f"      clearhead check {folder}"]
    show_result(body, json, [best, f"saved {folder}", *tries])


def _figures(metrics: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "step")


def _list(json: bool) -> None:
    """List the corpora and recipes that come with clearhead."""
    from clearhead.learn.data.corpora import CORPORA

    body = {"corpora": {name: corpus.sentence for name, corpus in CORPORA.items()}, "recipes": recipe_names()}
    corpora, recipes = (
        table("", ("", ""), listed.items(), box=None, show_header=False, padding=(0, 0, 0, 2))
        for listed in body.values()
    )
    first = "clearhead train FILE ...     trains on your files; or on one of these:"
    second = "\n--recipe NAME                how; without it, by what the data are:"
    show_result(body, json, [first, corpora, second, recipes])


@contextmanager
def _stopping() -> Iterator[list[signal.Signals]]:
    """Give a list that the first Ctrl-C or SIGTERM goes into, as a request to save and stop.

    A second Ctrl-C stops at once. `torchrun` passes on a Ctrl-C that the terminal has already sent to all.
    """
    received: list[signal.Signals] = []
    asked = 0.0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        echo, asked = started() and time.monotonic() - asked < ECHO, asked or time.monotonic()
        if received and number == signal.SIGINT and not echo:
            raise KeyboardInterrupt
        received.append(signal.Signals(number))
        if not first_here() or echo:
            return
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
        from rich import console, live

        self.console = console.Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.live = live.Live(console=self.console, refresh_per_second=8, transient=True)
        self.last = 0.0
        self.validated = ""
        self.unit = "tok"

    def __call__(self, event: events.Event) -> None:
        """Show one event."""
        match event:
            case events.Note(line):
                self.say(line)
            case events.Started():
                from clearhead.learn.tasks.table import task_named

                self.unit = "pictures" if task_named(event.task).tokens is None else "tok"
                all_trained = event.trainable == event.parameters
                also = "" if all_trained else f", {event.trainable:,} of them trained"
                size = f"{event.parameters:,} parameters{also}, {event.steps:,} steps"
                self.say(f"{event.task}: {size} on {event.device} -> {event.folder}")
            case events.Stepped():
                self.step(event)
            case events.Skipped():
                bad = "gradient" if math.isfinite(event.loss) else "loss"
                self.say(f"step {event.step:,}  skipped: the {bad} is not finite  ({event.skipped:,} so far)")
            case events.Validated():
                self.validated = _figures(event.metrics)
                best = "  (best so far)" if event.best else ""
                self.say(f"step {event.step:,}  validation  {self.validated}{best}")
                for sample in event.samples:
                    self.say(f"    {sample.replace(NEWLINE, '⏎')}")

    def step(self, event: events.Stepped) -> None:
        """Show the figures of a step; without a terminal, every ten seconds."""
        words = [
            f"step {event.step:,}/{event.steps:,}",
            f"loss {event.loss:.4f}",
            f"lr {event.rate:.2e}",
            f"grad norm {event.norm:.2f}",
            f"{event.tokens_per_second:,.0f} {self.unit}/s",
            *([f"MFU {event.mfu:.1%}"] if event.mfu is not None else []),
            f"{event.memory / 2**30:.1f} GiB",
            f"{timedelta(seconds=round(event.left))} left",
        ]
        line = "  ".join(words)
        if self.console.is_terminal:
            from rich import console, panel, progress_bar

            more = [f"validation  {self.validated}"] if self.validated else []
            bar = progress_bar.ProgressBar(total=1.0, completed=event.step / event.steps)
            self.live.start()
            shown = console.Group("  ".join(words[:4]), "  ".join(words[4:]), *more, bar)
            self.live.update(panel.Panel(shown, title="training", border_style="dim"))
        elif time.monotonic() - self.last > EVERY or event.step in (1, event.steps):
            self.last = time.monotonic()
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self.console.print(line, soft_wrap=not self.console.is_terminal)


def evaluate(
    folder: Folder,
    data: Annotated[Positional[tuple[str, ...]], option(DATA, metavar="DATA")],
    recipe: Annotated[
        str | None,
        option("a recipe whose [data] says how to read them; default: the one of the model's training"),
    ] = None,
    set: Settings = (),
    beams: Beams = None,
    length_penalty: LengthPenalty = None,
    max_new_tokens: Annotated[
        int | None, option("where a text ends at the latest; default: the model's own")
    ] = None,
    batch_size: Annotated[int | None, option("rows at a time; default: by their length")] = None,
    device: Device = "auto",
    dtype: Dtype = None,
    output: Annotated[Path | None, option("write what the model said there, a line for each example")] = None,
    plot: Annotated[
        Path | None,
        option("draw a classifier's confusion matrix: FILE.png, .svg or .pdf", metavar="FILE"),
    ] = None,
    lowercase: Annotated[bool, option("give BLEU without regard to case too")] = False,
    tokenize: Annotated[
        str | None, option("sacreBLEU's tokenizer: 13a, intl, char, none, ...; default: 13a")
    ] = None,
    seed: Annotated[int, option("random seed of the intervals, and of the masks of a masked model")] = 0,
    json: Json = False,
) -> None:
    """Measure a model on data it has not seen: loss, perplexity, accuracy, F1, BLEU, chrF, with intervals.

    For example:
      clearhead eval my-model/ test.txt
      clearhead eval my-model/ test.en test.de --beams 5 --output test.out
      clearhead eval my-model/ a.tsv --set data.columns='{text="body",label="mark"}'
      clearhead eval my-model/ reviews.tsv --plot confusion.png
      clearhead eval my-gpt/ wiki.txt --set data.max_length=256 --json
    """
    check_inputs(folder, plot)
    refuse(
        not data, "no data is named: name files after the model, such as clearhead eval my-model/ test.txt"
    )
    refuse(
        output is not None and (output.is_dir() or not output.absolute().parent.is_dir()),
        f"{output} cannot be written: name a file in a folder that is there",
    )
    from clearhead.learn.data.corpora import CORPORA
    from clearhead.learn.data.examples import TEXT
    from clearhead.learn.data.files import expand
    from clearhead.learn.evaluation.evaluate import data_plan, task_for
    from clearhead.learn.tasks.table import task_named

    if output is not None:
        recipes = [Path(recipe)] if recipe is not None else []
        check_apart(output, [*expand(name for name in data if name not in CORPORA), *recipes])
    model = load_model(folder, device=device, dtype=dtype)
    plan = data_plan(folder, data, recipe, set)
    task = task_for(model, plan.task)
    refuse(
        output is not None and task_named(task).shape is TEXT,
        f"--output {output}: a model judged by {task} gives no answers to write: leave it out",
    )
    refuse(
        plot is not None and not (task_named(task).classes and task_named(task).pooled),
        f"--plot {plot} draws the confusion matrix of a classifier, and this model is judged by {task}",
    )
    asked = {"num_beams": beams, "length_penalty": length_penalty, "max_new_tokens": max_new_tokens}
    with progress() as on_progress:
        done = ch.evaluate(
            model,
            data,
            plan,
            seed=seed,
            batch_size=batch_size,
            tokenize=tokenize,
            lowercase=lowercase,
            on_progress=on_progress,
            **{name: value for name, value in asked.items() if value is not None},
        )
    if output is not None:
        with writing(output) as write:
            for text in done.outputs:
                write(" ".join(text.splitlines()))
    print_notes(done.notes)
    body = {name: getattr(done, name) for name in SHOWN}
    title = f"{folder}: {done.task}, {done.examples:,} examples, {done.targets:,} targets"
    rows = (
        (metric, f"{value:.4f}", " to ".join(f"{end:.4f}" for end in done.intervals.get(metric, ())))
        for metric, value in done.metrics.items()
    )
    signatures = [f"{metric}: {signature}" for metric, signature in done.signatures.items()]
    counts = done.classes
    body |= {"classes": counts.to_dict()} if counts is not None else {}
    shown = [table(title, ("metric", ">value", ">95 % interval"), rows), *signatures]
    parts = [*shown, *(confusion_tables(counts) if counts is not None else ())]
    show_result(body, json, parts, plot, lambda: _draw(counts, folder))


def _draw(counts: Any, folder: Path) -> Any:
    from clearhead.app.plot.classes import draw_confusion

    return draw_confusion(counts, f"{folder.resolve().name}: what each class is taken for")
