"""Sweeps: a recipe trained many times on the same data, with settings drawn from ranges; the best run stays.

Each trial is a training run in a folder of its own. Trial 0 is the recipe as it is, which the others are
compared with. Successive halving stops all trials after a ninth of their steps, resumes the best third, and
stops that after a third of its steps. A resumed run has the bits of one that was never stopped, so every
trial that reaches its end is the run that `clearhead train` makes with the same settings.
"""

import itertools
import json
import math
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, get_args
from zlib import crc32

import numpy as np

from clearhead.app import plot
from clearhead.errors import ClearheadError, InputError, MissingExtraError, refuse
from clearhead.hub.files import write_text
from clearhead.learn.data.files import RECIPE
from clearhead.learn.parallel.world import ALONE
from clearhead.learn.recipe import Recipe, Settings, read_recipe
from clearhead.learn.tasks.table import open_examples
from clearhead.learn.training.events import LOG, Event, Started, read_log
from clearhead.learn.training.folder import resumable
from clearhead.learn.training.prepare import Job
from clearhead.learn.training.run import planned, train, with_rows
from clearhead.run.bundle import best_device

Method = Literal["halving", "random", "grid"]
Vary = Mapping[str, Any]  # by key: choices as a list, or text as `clearhead sweep --try KEY=TEXT` has it
RECORD, PICTURE, BEST, TRIALS = "sweep.json", "sweep.png", "best", "trials"
FACTOR = 3  # successive halving goes on with the best third
LEVELS = 2  # how often it halves, at most
WIDE = 10  # a range whose ends differ by this factor is drawn from on a logarithmic scale
FRESH = 100  # draws for one new trial, before choices are taken to be used up
WORKERS = 16  # trials at once on a CPU, at most


# What is varied ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, both included."""

    low: float
    high: float
    whole: bool

    @property
    def logarithmic(self) -> bool:
        """True where factors matter rather than differences."""
        return self.low > 0 and self.high >= WIDE * self.low

    def draw(self, random: np.random.Generator) -> float:
        """Return a number, uniform on the scale of the range."""
        if self.whole and not self.logarithmic:
            return int(random.integers(int(self.low), int(self.high) + 1))
        low, high = (math.log(self.low), math.log(self.high)) if self.logarithmic else (self.low, self.high)
        value = float(random.uniform(low, high))
        value = float(f"{math.exp(value) if self.logarithmic else value:.3g}")
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else value

    def __str__(self) -> str:
        ends = f"{self.low:g} to {self.high:g}"
        return f"{ends}, logarithmic" if self.logarithmic else ends


@dataclass(frozen=True)
class Choices:
    """A few values."""

    values: tuple[Any, ...]

    def draw(self, random: np.random.Generator) -> Any:
        """Return one of the values."""
        return self.values[int(random.integers(len(self.values)))]

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))


def read_vary(vary: Vary | Sequence[str]) -> dict[str, Range | Choices]:
    """Return what is varied: "train.lr=1e-4..1e-2" is a range, "model.n_layers=2,4" are choices."""
    if not isinstance(vary, Mapping):
        for text in vary:
            refuse(
                "=" not in text,
                f'"{text}" is not understood: write KEY=LOW..HIGH or KEY=VALUE,VALUE, '
                "such as train.lr=1e-4..1e-2",
            )
        vary = dict(text.split("=", 1) for text in vary)
    refuse(not vary, "nothing is varied: name a key and its values, such as train.lr=1e-4..1e-2")
    return {key.strip(): _read_values(key, tried) for key, tried in vary.items()}


def _read_values(key: str, tried: Any) -> Range | Choices:
    if isinstance(tried, Range | Choices):
        return tried
    if not isinstance(tried, str):
        choices = tuple(tried) if isinstance(tried, Sequence) else (tried,)
        refuse(not choices, f"{key} has no values to try")
        return Choices(choices)
    ends = tried.split("..")
    if len(ends) == 2:
        try:
            low, high = map(float, ends)
        except ValueError:
            raise InputError(f"{key}={tried} is no range: write numbers, as in 1e-4..1e-2") from None
        refuse(not low < high, f"{key}={tried} is no range: the first number must be below the second")
        return Range(low, high, all(end.strip().lstrip("-").isdigit() for end in ends))
    try:
        return Choices(tuple(tomllib.loads(f"values = [{tried}]")["values"]))
    except tomllib.TOMLDecodeError:
        return Choices(tuple(value.strip() for value in tried.split(",")))


# Trials -----------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """A run with its own settings, as far as it has come."""

    number: int
    settings: dict[str, Any]
    step: int = 0
    steps: int = 0  # of the whole run; 0: not begun
    metrics: dict[str, float] = field(default_factory=dict)  # of its best validation
    reached: float = 0.0  # the share of its steps after which it was compared with others last
    seconds: float = 0.0
    error: str = ""  # why it could not be trained

    def words(self) -> str:
        """Return its settings in one line."""
        return "  ".join(f"{key}={value}" for key, value in self.settings.items()) or "the recipe as it is"


@dataclass(frozen=True)
class Sweep:
    """The trials of a sweep, by number, and which of them is best."""

    folder: Path
    metric: str
    vary: Mapping[str, Range | Choices]
    trials: Sequence[Trial]

    @property
    def ranked(self) -> list[Trial]:
        """Those that were measured: first those that got furthest, of these the best first."""
        measured = [trial for trial in self.trials if math.isfinite(value_of(trial, self.metric))]
        sign = 1 if self.metric == "loss" else -1
        return sorted(measured, key=lambda trial: (-trial.reached, sign * value_of(trial, self.metric)))

    @property
    def best(self) -> Trial:
        """The best trial of those that got furthest."""
        return self.ranked[0]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            "folder": str(self.folder),
            "metric": self.metric,
            "vary": {key: str(tried) for key, tried in self.vary.items()},
            "best": self.best.number,
            "trials": [asdict(trial) for trial in self.trials],
        }


def value_of(trial: Trial, metric: str) -> float:
    """Return what a trial reached by the metric; NaN where it was not measured."""
    value = trial.metrics.get(metric)
    return math.nan if value is None or trial.error else value


def drawn(
    vary: Mapping[str, Range | Choices], method: Method, count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the settings of each trial; the first is the recipe as it is. More trials begin as fewer do."""
    yield {}
    if method == "grid":
        listed = [tried.values for tried in vary.values() if isinstance(tried, Choices)]
        ranges = [key for key, tried in vary.items() if isinstance(tried, Range)]
        refuse(bool(ranges), f"a grid needs values, not ranges: write {', '.join(ranges)}=VALUE,VALUE")
        for values in itertools.product(*listed):
            yield dict(zip(vary, values))
        return
    seen: list[dict[str, Any]] = []
    for number in range(1, FRESH * count):
        settings = {
            key: tried.draw(np.random.default_rng([seed, number, crc32(key.encode())]))
            for key, tried in vary.items()
        }
        if settings not in seen:
            seen.append(settings)
            yield settings
        if len(seen) == count - 1:
            return


def rungs(method: Method, count: int) -> list[float]:
    """Return the shares of the steps after which trials are compared; the last is 1."""
    levels = min(LEVELS, int(math.log(max(count, 1), FACTOR))) if method == "halving" else 0
    return [FACTOR**-level for level in range(levels, -1, -1)]


# Running ----------------------------------------------------------------------------------------------------


def sweep(
    data: Any,
    vary: Vary | Sequence[str],
    *,
    recipe: str | Path | Recipe | None = None,
    settings: Settings = (),
    out: str | Path | None = None,
    trials: int = 20,
    method: Method = "halving",
    workers: int | None = None,
    seed: int = 0,
    keep: bool = False,
    ray: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Sweep:
    """Train a recipe with many settings on the same data, and keep the best run, as `clearhead sweep` does.

    A sweep that was stopped goes on when it is called again with the same arguments, and one that is asked
    for more trials keeps those it has.

    Args:
        data: what `train` takes.
        vary: the values of each key: `{"train.lr": "1e-4..1e-2", "model.n_layers": [2, 4]}`. A range of
            numbers whose ends differ tenfold is drawn from on a logarithmic scale.
        recipe: a recipe, its name, or its file; None: chosen by the data.
        settings: changes of the recipe that all trials share.
        out: the folder to write; None: `sweeps/` and the name of the data.
        trials: their number; a grid has as many as there are combinations.
        method: "halving" (successive halving), "random" (each trial is trained to its end) or "grid".
        workers: trials at once, each in a process; None: one for each core, and one on a GPU.
        seed: of the settings drawn; each run has the recipe's `train.seed`.
        keep: keep the weights of all trials, not those of the best alone.
        ray: run the trials on the Ray cluster that is connected to, or on a local one.
        tell: called with a line for each trial.
    """
    refuse(method not in get_args(Method), f'method "{method}" must be {", ".join(get_args(Method))}')
    refuse(trials < 2, f"trials {trials} must be 2 or more: the recipe as it is, and others")
    tried = read_vary(vary)
    settings = settings if isinstance(settings, Mapping) else list(settings)
    plan, name, rows = planned(data, recipe, None, settings)
    folder = (Path(out) if out is not None else Path("sweeps") / name.name).absolute()
    proposals = list(drawn(tried, method, trials, seed))
    for one_of_each in proposals[1:]:
        read_recipe(plan, one_of_each)  # refuses a key or a value that no recipe can have
    if rows is None:
        open_examples(plan.data)  # refuses files that no trial could read
    cores = os.cpu_count() or 1
    workers = (min(WORKERS, cores) if _device(plan) == "cpu" else 1) if workers is None else workers
    refuse(workers < 1, f"workers {workers} must be 1 or more")
    if plan.train.threads is None and workers > 1:
        plan = plan.replace("train", threads=max(1, cores // workers))
    facts = {
        "recipe": plan.to_toml(), "vary": {key: str(tried) for key, tried in tried.items()},
        "method": method, "seed": seed,
    }  # fmt: skip
    done = _opened(folder, facts, proposals)
    plan = with_rows(plan, rows, Job(folder, lambda event: None, ALONE))
    record = _Record(folder, facts, done, tell)
    running = [trial.number for trial in done]
    pool = _OnRay(_device(plan) == "cuda") if ray else ProcessPoolExecutor(workers, get_context("spawn"))
    with pool:
        for share in rungs(method, len(proposals)):
            jobs = [(plan, folder, done[number], share) for number in running if not done[number].error]
            submitted = [pool.submit(advance, *job) for job in jobs if job[2].reached < share]
            for finished in as_completed(submitted):
                record.add(finished.result())
            ranked = Sweep(folder, record.metric(), tried, [done[number] for number in running]).ranked
            refuse(not ranked, f"no trial could be trained: {done[0].error}")
            running = sorted({0, *(trial.number for trial in ranked[: math.ceil(len(running) / FACTOR)])})
    result = Sweep(folder, record.metric(), tried, done)
    with suppress(MissingExtraError):
        plot.save(draw_sweep(result), folder / PICTURE)
    _keep_best(result, keep)
    return result


def advance(plan: Recipe, folder: Path, trial: Trial, share: float) -> Trial:
    """Begin or resume a trial, up to a share of its steps: to the validation there."""
    place, limit, taken = folder / TRIALS / f"{trial.number:03}", math.inf, 0

    def told(event: Event) -> None:
        nonlocal limit, taken
        if isinstance(event, Started):
            every = read_recipe(place / RECIPE).train.validate_every or event.steps
            limit, taken = math.ceil(share * event.steps / every) * every, event.step
            trial.steps = event.steps

    def stop() -> bool:
        nonlocal taken
        taken += 1
        return taken >= limit and taken < trial.steps

    try:
        if resumable(place):
            run = train(resume=place, on_event=told, stop=stop)
        else:
            own = read_recipe(plan, trial.settings)
            run = train(recipe=own, out=place, overwrite=True, on_event=told, stop=stop)
    except ClearheadError as error:
        return replace(trial, error=str(error).splitlines()[0])
    metric = read_recipe(place / RECIPE).train.metric or "loss"
    measured = [line for line in read_log(place) if line["event"] == "validated"]
    values = [(line["metrics"].get(metric), line) for line in measured]
    finite = [(value, line) for value, line in values if value is not None]
    if not finite:
        return replace(trial, step=run.step, error=f"{metric} was never finite")
    best = (min if metric == "loss" else max)(finite, key=lambda pair: pair[0])[1]
    seconds = max((line["seconds"] for line in read_log(place) if "seconds" in line), default=0.0)
    metrics = {"step": best["step"], **best["metrics"]}
    return replace(trial, step=run.step, metrics=metrics, reached=share, seconds=seconds)


class _Record:
    """The file of a sweep, written anew after each trial."""

    def __init__(self, folder: Path, facts: dict[str, Any], trials: list[Trial], tell: Callable[[str], None]):
        self.folder, self.facts, self.trials, self.tell = folder, facts, trials, tell

    def metric(self) -> str:
        """Return what trials are compared by: the metric of the runs."""
        written = (self.folder / TRIALS / f"{trial.number:03}" / RECIPE for trial in self.trials)
        return next((read_recipe(path).train.metric or "loss" for path in written if path.exists()), "loss")

    def add(self, trial: Trial) -> None:
        """Write down what a trial has reached."""
        self.trials[trial.number] = trial
        write_text(self.folder / RECORD, record_text(self.facts, self.trials))
        metric = self.metric()
        reached = (
            trial.error
            or f"{metric} {value_of(trial, metric):.4f}  after {trial.step:,} of {trial.steps:,} steps"
        )
        self.tell(f"trial {trial.number}  {trial.words()}  {reached}")


def record_text(facts: Mapping[str, Any], trials: Sequence[Trial]) -> str:
    """Return the text of a sweep's file."""
    return json.dumps({**facts, "trials": [asdict(trial) for trial in trials]}, indent=1) + "\n"


def _opened(folder: Path, facts: Mapping[str, Any], proposals: Sequence[dict[str, Any]]) -> list[Trial]:
    """Return the trials with what an earlier call measured of them; refuse a folder of another sweep."""
    path, known = folder / RECORD, dict[str, Any]()
    if path.is_file():
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise InputError(f"{path} is no record of a sweep: name another folder with --out") from None
    else:
        refuse(
            folder.is_dir() and any(folder.iterdir()),
            f"{folder} is not empty and holds no sweep: name another folder with --out",
        )
    for name, value in facts.items() if known else ():
        refuse(
            known.get(name) != value,
            f"{folder} holds a sweep with another {name}: name another folder with --out",
        )
    folder.mkdir(parents=True, exist_ok=True)
    before = [Trial(**trial) for trial in known.get("trials", ())]
    trials = [Trial(number, settings) for number, settings in enumerate(proposals)]
    for trial in before[: len(trials)]:
        trials[trial.number] = trial
    return trials


def _keep_best(result: Sweep, keep: bool) -> None:
    """Point `best` to the best run, and remove the weights of the others."""
    best = Path(TRIALS) / f"{result.best.number:03}"
    link = result.folder / BEST
    link.unlink(missing_ok=True)
    link.symlink_to(best, target_is_directory=True)
    for trial in result.trials if not keep else ():
        place = result.folder / TRIALS / f"{trial.number:03}"
        for path in place.iterdir() if trial is not result.best and place.is_dir() else ():
            if path.name not in (RECIPE, LOG):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def draw_sweep(result: Sweep) -> plot.Figure:
    """Draw what each trial reached against each key; trials that were stopped early are paler."""
    keys = list(result.vary)
    figure, grid = plot.panels(
        max(4.0, 3.0 * len(keys)),
        3.6,
        f"{result.folder.name}: {len(result.trials)} trials",
        columns=len(keys),
    )
    for key, axes in zip(keys, grid[0]):
        tried, trials = result.vary[key], [trial for trial in result.ranked if key in trial.settings]
        xs = [trial.settings[key] for trial in trials]
        if isinstance(tried, Choices):
            axes.set_xticks(range(len(tried.values)), [str(value) for value in tried.values])
            axes.set_xlim(-0.5, len(tried.values) - 0.5)
            xs = [tried.values.index(value) for value in xs]
        elif tried.logarithmic:
            axes.set_xscale("log")
            axes.set_xlim(tried.low / 1.2, tried.high * 1.2)
            axes.tick_params(axis="x", which="minor", labelbottom=False)
        values = [value_of(trial, result.metric) for trial in trials]
        axes.scatter(xs, values, color="C0", alpha=[0.25 + 0.75 * trial.reached for trial in trials])
        axes.axhline(value_of(result.trials[0], result.metric), color="0.6", linestyle="--")
        if result.best.number:
            best = trials.index(result.best)
            axes.scatter(xs[best], values[best], marker="*", s=160, color="C1", zorder=3)
        plot.name(axes, "", key, result.metric if key == keys[0] else "")
    grid[0, 0].set_title("star: best; dashed: the recipe as it is", fontsize=8, loc="left")
    return figure


def _device(plan: Recipe) -> str:
    return best_device(plan.train.device).type


class _OnRay(Executor):
    """Runs each trial as a task of Ray, on a CPU or GPU of its cluster."""

    def __init__(self, gpu: bool) -> None:
        try:
            import ray
        except ImportError:
            raise MissingExtraError("Ray is not installed: pip install 'clearhead[ray]'") from None
        self.run = ray.remote(num_gpus=int(gpu))(advance)

    def submit(self, function: Any, /, *job: Any, **named: Any) -> Any:
        """Return a future of what `advance` returns."""
        return self.run.remote(*job).future()
