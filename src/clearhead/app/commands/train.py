"""Commands that train a model and measure it: train, sweep, eval, align."""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Any, Literal

import clearhead as ch
from clearhead.app.commands.common import check_apart, check_inputs, print_notes, writing
from clearhead.app.report import confusion_tables, size, table
from clearhead.app.views import ModelArgument, OnProgress, Repeated, View, drawing
from clearhead.app.watch import PORT, address
from clearhead.app.watch import watch as serve_page
from clearhead.errors import refuse
from clearhead.learn.parallel import first_here, started
from clearhead.learn.recipe import recipe_names
from clearhead.learn.training import events
from clearhead.learn.training.events import LOG, warnings_of

FIGURES = ("reward", "logprob_difference")  # of a task, shown at a step
ECHO = 3  # seconds within which a second Ctrl-C is the first one, passed on
EVERY = 10  # seconds between the lines of a run without a terminal
NEWLINE = "\n"
DISK = ("bytes on disk, at most", "bytes free there")  # of a rehearsal, shown at its end
TOWERS = ("clip", "siglip")
SHOWN = ("task", "examples", "targets", "metrics", "intervals", "signatures")


def train(
    data: tuple[str, ...] = (),
    *,
    recipe: str | None = None,
    out: Path | None = None,
    set: Repeated = (),
    resume: Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    show: bool = False,
    watch: bool = False,
) -> View | None:
    """Train a model from your own files, whose format is detected. Without DATA, list corpora and recipes.

    Args:
        data (DATA): files, folders, globs, or an embedded corpus
        recipe: a recipe's name or .toml file; default: by the data
        out: folder to write; default: runs/ and the name of the data
        set (KEY=VALUE): change the recipe, such as train.steps=2000; each run's train.toml explains the keys
        resume (DIR): go on with the run in this folder
        overwrite: remove an earlier run in the output folder
        dry_run: show every decision and the sizes; train and write nothing
        show: print the keys of the recipe, with their values and meanings
        watch: show losses, samples and warnings on a page in the browser while the model trains

    For example:
      clearhead train my.txt
      clearhead train my.txt --watch
      clearhead train stdlib-docs --out my-model
      clearhead train a.tsv --set data.columns='{text = "review", label = "stars"}'
      clearhead train train.en train.de --recipe translate
      clearhead train my.txt --dry-run
      clearhead train --recipe char-gpt --show
      clearhead train --resume runs/my
      clearhead train --resume runs/my --set train.steps=4000
    """
    if show:
        refuse(data or resume is not None, "--show prints a recipe, not a run: leave data and --resume out")
        shown = ch.read_recipe(recipe, set)
        return View(dataclasses.asdict(shown), [shown.to_toml()])
    if not data and resume is None and not ch.read_recipe(recipe, set).data.paths:
        refuse(
            recipe is not None or set or out is not None,
            "name the data to train on: files, folders or a corpus; clearhead train alone lists them",
        )
        return _lists()
    watcher = Watcher(watch)
    if dry_run:
        refuse(resume is not None, "--dry-run is for a new run: leave --resume out")
        from clearhead.learn.training.run import rehearse

        rehearsal = rehearse(data, recipe=recipe, out=out, settings=set, on_event=watcher)
        sizes = [
            f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}"
            for name, value in rehearsal.sizes.items()
            if name not in DISK
        ]
        needed, free = (rehearsal.sizes[name] for name in DISK)
        parameters, steps = (f"{rehearsal.sizes[name]:,}" for name in ("parameters", "steps"))
        ends = [
            f"folder: {rehearsal.folder}",
            f"disk: {size(needed)} at most, and {size(free)} are free",
            f"ready: {steps} steps of {rehearsal.sizes['task']} with {parameters} parameters on "
            f"{rehearsal.sizes['device']}; nothing was trained or written",
        ]
        if needed > free:
            print_notes([f"{rehearsal.folder} needs {size(needed)}, and {size(free)} are free there"])
        return View(rehearsal, [rehearsal.recipe.to_toml(), *sizes, *ends])
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
    return View(body, [best, f"saved {folder}", *tries])


def _figures(metrics: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "step")


def _lists() -> View:
    """Return the corpora and recipes that come with clearhead."""
    from clearhead.learn.data.corpora import CORPORA

    body = {"corpora": {name: corpus.sentence for name, corpus in CORPORA.items()}, "recipes": recipe_names()}
    corpora, recipes = (
        table("", ("", ""), listed.items(), box=None, show_header=False, padding=(0, 0, 0, 2))
        for listed in body.values()
    )
    first = "clearhead train FILE ...     trains on your files; or on one of these:"
    second = "\n--recipe NAME                how; without it, by what the data are:"
    return View(body, [first, corpora, second, recipes])


@contextmanager
def _stopping() -> Iterator[list[signal.Signals]]:
    """Give a list that the first Ctrl-C or SIGTERM goes into, as a request to save and stop.

    A second Ctrl-C stops at once. `torchrun` passes on a Ctrl-C that the terminal has already sent to all.
    """
    received: list[signal.Signals] = []
    requested = 0.0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        echo, requested = started() and time.monotonic() - requested < ECHO, requested or time.monotonic()
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

    def __init__(self, page: bool = False) -> None:
        from rich import console, live

        self.console = console.Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.live = live.Live(console=self.console, refresh_per_second=8, transient=True)
        self.last = 0.0
        self.validated = ""
        self.unit = "tok"
        self.page, self.folder = page, Path()
        self.warned: dict[str, int] = {}

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
                self.folder = event.folder
                if self.page:
                    self.page = False  # the second of two stages is on the page of the first
                    self.say(f"watch it on {address(serve_page(event.folder))}")
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
                for step, kind, text in warnings_of(events.read_log(self.folder)):
                    if kind not in self.warned or (kind == "spike" and step > self.warned[kind]):
                        self.warned[kind] = step
                        self.say(f"step {step:,}  warning: {text}")

    def step(self, event: events.Stepped) -> None:
        """Show the figures of a step; without a terminal, every ten seconds."""
        words = [
            f"step {event.step:,}/{event.steps:,}",
            f"loss {event.loss:.4f}",
            *(
                f"{name.replace('_', ' ')} {event.figures[name]:.3g}"
                for name in FIGURES
                if name in event.figures
            ),
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


def sweep(
    data: tuple[str, ...],
    *,
    vary: Repeated = (),
    recipe: str | None = None,
    set: Repeated = (),
    out: Path | None = None,
    trials: int = 20,
    method: Literal["halving", "random", "grid"] = "halving",
    workers: int | None = None,
    seed: int = 0,
    keep: bool = False,
    ray: bool = False,
) -> View:
    """Sweep hyperparameters: train a recipe with many settings on the same data, and keep the best run.

    A sweep that was stopped goes on when the command is given again.

    Args:
        data (DATA): files, folders, globs, or an embedded corpus
        vary (KEY=VALUES): values of a key to try, such as train.lr=1e-4..1e-2 or model.n_layers=2,4
        recipe: a recipe's name or .toml file; default: by the data
        set (KEY=VALUE): change the recipe of all trials, such as train.steps=2000
        out: folder to write; default: sweeps/ and the name of the data
        trials: how many; the first is the recipe as it is
        method: successive halving, random search, or every combination
        workers: trials at once, each in a process; default: one for each core, one on a GPU
        seed: random seed of the settings that are drawn
        keep: keep the weights of all trials
        ray: run the trials on a Ray cluster

    For example:
      clearhead sweep my.txt --vary train.lr=1e-4..1e-2 --vary model.n_layers=2,4,6
      clearhead sweep reviews.tsv --vary model.dropout=0..0.5 --trials 30
      clearhead sweep a.en a.de --vary train.label_smoothing=0,0.1 --method grid
    """
    refuse(
        not data,
        "no data is named: name files first, such as clearhead sweep my.txt --vary train.lr=1e-4..1e-2",
    )
    done = ch.sweep(
        data, vary, recipe=recipe, settings=set, out=out, trials=trials, method=method, workers=workers,
        seed=seed, keep=keep, ray=ray, tell=lambda line: print_notes([line]),
    )  # fmt: skip
    from clearhead.labs.sweep import value_of

    keys, metric = list(done.vary), done.metric
    rows = [
        [str(trial.number), *(_short(trial.settings.get(key, "recipe's")) for key in keys)]
        + [f"{trial.step:,} of {trial.steps:,}", f"{value_of(trial, metric):.4f}"]
        for trial in done.ranked
    ]
    failed = [
        f"trial {trial.number}  {trial.words()}  failed: {trial.error}"
        for trial in done.trials
        if trial.error
    ]
    best, first = done.best, value_of(done.trials[0], metric)
    than = f"; the recipe as it is: {first:.4f}" if best.number else ""
    ends = [
        f"best: {best.words()}  {metric} {value_of(best, metric):.4f}{than}",
        f"saved {done.folder / 'best'}, sweep.json and sweep.png",
    ]
    shown = table(str(done.folder), (">trial", *(f">{key}" for key in keys), ">steps", f">{metric}"), rows)
    return View(done, [shown, *failed, *ends])


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def watch_page(run: Path, *, port: int = PORT, no_open: bool = False) -> None:
    """Show a training run on a page: losses, learning rate, gradient norm, samples and warnings, live.

    Args:
        run (DIR): the folder of a run that trains now, here or in another process, or that has ended
        no_open: do not open the browser

    For example:
      clearhead watch runs/my
    """
    refuse(not (run / LOG).is_file(), f"{run} holds no run: it needs {LOG}, which clearhead train writes")
    place = address(server := serve_page(run, port))
    print_notes([f"{run}: {place}  (Ctrl-C ends)"])
    if not no_open:
        webbrowser.open(place)
    try:
        signal.pause()
    except KeyboardInterrupt:
        server.shutdown()


def evaluate(
    model: ModelArgument,
    data: tuple[str, ...],
    *,
    recipe: str | None = None,
    set: Repeated = (),
    beams: int | None = None,
    length_penalty: float | None = None,
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    output: Path | None = None,
    plot: Path | None = None,
    lowercase: bool = False,
    tokenize: str | None = None,
    no_baseline: bool = False,
    seed: int = 0,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> View:
    """Measure a model on data it has not seen: loss, perplexity, accuracy, F1, BLEU, chrF, with intervals.

    Args:
        data (DATA): files, folders, globs, or an embedded corpus
        recipe: a recipe whose [data] says how to read them; default: the one of the model's training
        batch_size: rows at a time; default: by their length
        output: write what the model said there, a line for each example
        plot (FILE): draw a classifier's confusion matrix: FILE.png, .svg or .pdf
        lowercase: give BLEU without regard to case too
        tokenize: sacreBLEU's tokenizer: 13a, intl, char, none, ...; default: 13a
        no_baseline: leave out the baseline: a linear model (for text an n-gram model) fitted on the data of
            the model's training
        seed: random seed of the intervals, and of the masks of a masked model

    For example:
      clearhead eval my-model/ test.txt
      clearhead eval my-model/ test.en test.de --beams 5 --output test.out
      clearhead eval my-model/ a.tsv --set data.columns='{text="body",label="mark"}'
      clearhead eval my-model/ reviews.tsv --plot confusion.png
      clearhead eval my-gpt/ wiki.txt --set data.max_length=256 --json
    """
    folder = model.folder
    check_inputs(folder, plot)
    refuse(
        not data, "no data is named: name files after the model, such as clearhead eval my-model/ test.txt"
    )
    refuse(
        output is not None and (output.is_dir() or not output.absolute().parent.is_dir()),
        f"{output} cannot be written: name a file in a folder that is there",
    )
    from clearhead.learn.data.corpora import CORPORA
    from clearhead.learn.data.examples import Chunk
    from clearhead.learn.data.files import expand
    from clearhead.learn.evaluation.evaluate import data_plan, task_for
    from clearhead.learn.tasks.table import task_named

    if output is not None:
        recipes = [Path(recipe)] if recipe is not None else []
        check_apart(output, [*expand(name for name in data if name not in CORPORA), *recipes])
    m = model()
    plan = data_plan(folder, data, recipe, set)
    task = task_for(m, plan.task)
    refuse(
        output is not None and task_named(task).row is Chunk,
        f"--output {output}: a model judged by {task} gives no answers to write: leave it out",
    )
    refuse(
        plot is not None and not (task_named(task).classes and task_named(task).pooled),
        f"--plot {plot} draws the confusion matrix of a classifier, and this model is judged by {task}",
    )
    search = {"num_beams": beams, "length_penalty": length_penalty, "max_new_tokens": max_new_tokens}
    done = ch.evaluate(
        m,
        data,
        plan,
        seed=seed,
        batch_size=batch_size,
        tokenize=tokenize,
        lowercase=lowercase,
        baseline=not no_baseline,
        on_progress=on_progress,
        **{name: value for name, value in search.items() if value is not None},
    )
    if output is not None:
        with writing(output) as write:
            for text in done.outputs:
                write(" ".join(text.splitlines()))
    body = {name: getattr(done, name) for name in SHOWN}
    title = f"{folder}: {done.task}, {done.examples:,} examples, {done.targets:,} targets"
    simple = done.baseline
    rows = (
        (metric, f"{value:.4f}", " to ".join(f"{end:.4f}" for end in done.intervals.get(metric, ())))
        + (() if simple is None else (f"{simple.metrics[metric]:.4f}" if metric in simple.metrics else "",))
        for metric, value in done.metrics.items()
    )
    columns = ("metric", ">value", ">95 % interval") + (() if simple is None else (">baseline",))
    fitted = "" if simple is None else f"baseline: {simple.name}, fitted on {simple.fitted_on:,} examples"
    signatures = [f"{metric}: {signature}" for metric, signature in done.signatures.items()]
    counts = done.classes
    body |= {"classes": counts.to_dict()} if counts is not None else {}
    body |= {"baseline": simple.to_dict()} if simple is not None else {}
    shown = [table(title, columns, rows), *filter(None, [fitted]), *signatures]
    parts = [*shown, *(confusion_tables(counts) if counts is not None else ())]
    title = f"{model.name}: what each class is taken for"
    return View(body, parts, drawing("models:draw_confusion", counts, title), done.notes)


def align(
    model: str,
    data: Path,
    *,
    out: Path,
    validation: Path | None = None,
    steps: int = 1000,
    batch_size: int = 64,
    lr: float = 5e-4,
    weight_decay: float = 0.1,
    seed: int = 0,
    validate_every: int = 100,
    d_model: int | None = None,
    n_layers: int | None = None,
    resume: bool = False,
    device: str = "auto",
) -> View:
    """Train two towers, so that a picture and its caption come to lie near each other.

    The loss is the model's own: CLIP's cross entropy or SigLIP's sigmoid loss.

    Args:
        model (DIR): a directory of CLIP or SigLIP; or clip, siglip: a new model
        data (DATA): rows of image and caption: TSV or CSV with a header, JSON lines
        out: the directory of the run
        validation: held-out rows; default: every tenth of DATA
        steps: batches to train on
        batch_size: pairs that are told from each other
        lr: the peak learning rate
        weight_decay: of matrices
        seed: of new weights, and of the order of pairs
        validate_every: steps; a checkpoint is written too
        d_model: new model: width of both towers; default: 128
        n_layers: new model: of the text tower, default 2; images have twice as many
        resume: go on with the run in --out, given all else as before

    For example:
      clearhead align clip captions.tsv --out run/
      clearhead align my-clip/ captions.jsonl --out run/ --lr 1e-5
      clearhead align clip captions.tsv --out run/ --resume
    """
    refuse(
        model not in TOWERS and not Path(model).is_dir(),
        f"{model} is no directory: name one of CLIP or SigLIP, or clip or siglip for a new model",
    )
    refuse(
        model not in TOWERS and (d_model is not None or n_layers is not None),
        f"--d-model and --n-layers are sizes of a new model, and {model} has its own: leave them out",
    )
    from clearhead.learn.training.events import Event, Validated
    from clearhead.learn.training.run import train as run

    changes: dict[str, Any] = {
        "data.batch_size": batch_size, "train.steps": steps, "train.lr": lr, "train.seed": seed,
        "train.weight_decay": weight_decay, "train.validate_every": validate_every,
    }  # fmt: skip
    lines: list[dict[str, float]] = []

    def told(event: Event) -> None:
        if isinstance(event, Validated):
            figures = {"step": event.step, **event.metrics}
            right = f"{figures['image_to_text']:.1%} of images find their caption"
            chance = f"chance {figures['chance']:.1%}"
            print_notes([f"step {event.step}: loss {figures['loss']:.4f}, {right} ({chance})"])
            lines.append(figures)

    if resume:
        run(resume=out, settings=changes, on_event=told)
    else:
        sizes = {"model.d_model": d_model, "model.n_layers": n_layers}
        changes |= {name: value for name, value in sizes.items() if value is not None}
        changes |= {"data.task": "align", "model.base": model, "train.device": device, "train.samples": 0}
        changes |= {} if validation is None else {"data.validation": str(validation)}
        run(str(data), out=out, settings=changes, on_event=told)
    note = f"wrote {out}: try clearhead classify {out} IMAGE --labels A B"
    return View({"validations": lines, "folder": str(out)}, [note])
