"""The events of a training run, as data, and their log: log.jsonl, loss.png, TensorBoard if it is asked for.

The caller of `train` decides which events to show. `warnings_of` warns early, by the log alone.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from clearhead.errors import CheckpointError, MissingExtraError
from clearhead.hub.files import write_text

LOG, CURVE = "log.jsonl", "loss.png"
DRAWN_EVERY = 10  # seconds at least between two drawings of the curve, but for the one at the end
CURVES: tuple[tuple[str, str, dict[str, Any]], ...] = (  # kind of event, label, style
    ("stepped", "training batch", {"color": "0.7", "linewidth": 1}),
    ("validated", "validation", {"color": "C0"}),
)
FEW = 20  # validations up to which each has a dot in the curve
Reason: TypeAlias = Literal["done", "patience", "stopped"]  # why a run ended


@dataclass(frozen=True)
class Note:
    """A guess, a choice or a fallback, in a sentence."""

    line: str


@dataclass(frozen=True)
class Started:
    """The run is ready for its first step."""

    folder: Path
    task: str
    parameters: int
    trainable: int
    steps: int
    step: int  # taken before, where the run is resumed
    device: str


@dataclass(frozen=True)
class Stepped:
    """Steps were taken: figures of the last one, and the speed since the last report."""

    step: int
    steps: int
    loss: float
    rate: float
    norm: float  # of the gradient, before clipping
    tokens_per_second: float
    seconds: float  # since the first step
    left: float  # seconds to the end, by the speed so far
    memory: int  # the most bytes used so far: on the device, or resident
    mfu: float | None = None  # share of the device's peak, where that is known
    figures: dict[str, float] = field(default_factory=dict)  # of the task, such as the reward of its samples


@dataclass(frozen=True)
class Skipped:
    """A step was not taken: its loss or its gradient was not finite. The weights are those before it."""

    step: int
    loss: float
    norm: float  # of the gradient
    skipped: int  # steps of the run so far, this one included


@dataclass(frozen=True)
class Validated:
    """The model was validated on the whole validation set."""

    step: int
    metrics: dict[str, float]
    best: bool
    samples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written."""

    step: int
    folder: Path


@dataclass(frozen=True)
class Finished:
    """The run ended, or was asked to stop."""

    folder: Path
    step: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    reason: Reason = "done"
    skipped: int = 0  # steps that were not taken, because loss or gradient was not finite


Said = Note  # the name of `Note` until version 0.1; it stays for one release
Event: TypeAlias = Note | Started | Stepped | Skipped | Validated | Saved | Finished
OnEvent = Callable[[Event], None]


# The log ---------------------------------------------------------------------------------------------------


@contextmanager
def logged(folder: Path, step: int, on_event: OnEvent, tensorboard: bool = False) -> Iterator[OnEvent]:
    """Yield a function that writes all but notes and checkpoints to the log, and calls `on_event` with all.

    Lines after `step`, where a run is resumed, are removed first.
    """
    path = folder / LOG
    kept = [line for line in read_log(folder) if line["step"] <= step and line["event"] != "finished"]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    board: Any = _tensorboard(folder) if tensorboard else None
    drawn = time.monotonic()

    def tell(event: Event) -> None:
        if isinstance(event, Stepped | Skipped | Validated | Finished):
            write(event)
        on_event(event)

    def write(event: Stepped | Skipped | Validated | Finished) -> None:
        nonlocal drawn
        text = json.dumps({"event": type(event).__name__.lower(), **asdict(event)}, default=str)
        # JSON has no numbers that are not finite: null stands for them.
        line = json.dumps(json.loads(text, parse_constant=lambda name: None))
        with _reporting(path), path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if isinstance(event, Stepped):
            values = {"rate": event.rate, "norm": event.norm, "train": event.loss} | event.figures
        elif isinstance(event, Skipped):
            values = {"skipped": event.skipped}
        else:
            values = event.metrics
            if isinstance(event, Finished) or time.monotonic() - drawn > DRAWN_EVERY:
                draw(folder)
                drawn = time.monotonic()
        for name, value in values.items() if board is not None else ():
            board.add_scalar(name, value, event.step)

    with closing(board) if board is not None else nullcontext():
        yield tell


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Report a failed write in one line."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from None


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of log.jsonl; a last line that was cut short is left out."""
    lines: list[dict[str, Any]] = []
    with suppress(FileNotFoundError, json.JSONDecodeError):
        lines.extend(map(json.loads, (folder / LOG).read_text(encoding="utf-8").splitlines()))
    return lines


def draw(folder: Path) -> None:
    """Draw loss.png from log.jsonl; without matplotlib, do nothing."""
    try:
        import numpy as np
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for kind, label, style in CURVES:
        lines = [line for line in read_log(folder) if line["event"] == kind]
        losses = [line["loss"] if kind == "stepped" else line["metrics"]["loss"] for line in lines]
        # Null, for a loss that was not finite, is a gap in the curve.
        few = "o" if kind == "validated" and len(lines) <= FEW else ""  # one alone makes no line
        steps = [line["step"] for line in lines]
        axes.plot(steps, np.array(losses, dtype=np.float64), label=label, marker=few, markersize=4, **style)
    axes.set(xlabel="step", ylabel="loss per target")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with _reporting(folder / CURVE):
        figure.savefig(folder / CURVE, dpi=120)


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtraError(
            "train.tensorboard needs TensorBoard: pip install tensorboard, or leave it out"
        ) from None
    return SummaryWriter(str(folder / "tensorboard"))


WINDOW = 20  # reports before the one that is looked at
JUMP = 0.25  # of the usual loss: a rise by more, and three times as far up as any of the window, is a spike
STEEP = 10  # times the usual gradient norm
WORSE = 0.03  # of the best validation loss
PATIENCE = 3  # validations after the best
SLOW, FALL = 0.2, 0.01  # a loss that fell by less than this share in this share of the steps


class Warned(NamedTuple):
    """A warning: the step at which it was noticed, its kind, and the sentence."""

    step: int
    kind: str
    text: str


def warnings_of(log: Sequence[Mapping[str, Any]]) -> list[Warned]:
    """Return the warnings of a log (the lines of log.jsonl, oldest first), by step."""
    stepped = [line for line in log if line["event"] == "stepped" and line["loss"] is not None]
    validated = [
        line for line in log if line["event"] == "validated" and line["metrics"].get("loss") is not None
    ]
    warned = [*_spikes(stepped), *_steep(stepped), *_stuck(stepped), *_memorised(stepped, validated)]
    skipped = [line for line in log if line["event"] == "skipped"]
    if skipped:
        many = f"{skipped[-1]['skipped']:,} steps were skipped: their loss or gradient was not finite"
        warned.append(
            Warned(skipped[-1]["step"], "skipped", f"{many}. Lower train.lr, or use train.precision=float32.")
        )
    return sorted(warned)


def _spikes(stepped: Sequence[Mapping[str, Any]]) -> Iterator[Warned]:
    """Yield where the training loss jumped; the reports until it is back count as one spike."""
    losses, high = [line["loss"] for line in stepped], False
    for at in range(WINDOW, len(losses)):
        before = losses[at - WINDOW : at]
        usual = statistics.median(before)
        jumped = losses[at] > usual + max(3 * (max(before) - usual), JUMP * abs(usual))
        if jumped and not high:
            text = f"the training loss jumped from {usual:.3g} to {losses[at]:.3g}"
            advice = "If it does not come back, lower train.lr, or raise train.warmup."
            yield Warned(stepped[at]["step"], "spike", f"{text}. {advice}")
        high = jumped or (high and losses[at] > usual + JUMP * abs(usual))


def _steep(stepped: Sequence[Mapping[str, Any]]) -> Iterator[Warned]:
    """Yield the first gradient that is much larger than those before it."""
    norms = [line.get("norm") or 0.0 for line in stepped]
    for at in range(WINDOW, len(norms)):
        usual = statistics.median(norms[at - WINDOW : at])
        if usual > 0 and norms[at] > STEEP * usual:
            text = (
                f"the gradient norm is {norms[at]:.3g}, {norms[at] / usual:.0f} times its usual {usual:.3g}"
            )
            advice = "A smaller train.clip or train.lr makes such steps harmless."
            yield Warned(stepped[at]["step"], "gradient", f"{text}. {advice}")
            return


def _stuck(stepped: Sequence[Mapping[str, Any]]) -> Iterator[Warned]:
    """Yield where the loss has not fallen since the start."""
    if len(stepped) <= WINDOW or stepped[-1]["step"] < SLOW * stepped[-1]["steps"]:
        return
    first = stepped[0]["loss"]
    late = statistics.median(line["loss"] for line in stepped[-WINDOW:])
    if late > first - FALL * abs(first):
        text = f"the training loss has not fallen since the start ({first:.3g}, now {late:.3g})"
        advice = "Try train.lr ten times lower and higher, and look at the data: clearhead train --dry-run."
        yield Warned(stepped[-1]["step"], "stuck", f"{text}. {advice}")


def _memorised(
    stepped: Sequence[Mapping[str, Any]], validated: Sequence[Mapping[str, Any]]
) -> Iterator[Warned]:
    """Yield where validation has become worse while the training loss went on falling."""
    if not validated or not stepped:
        return
    best = min(validated, key=lambda line: line["metrics"]["loss"])
    after = [line for line in validated if line["step"] > best["step"]]
    low, now = best["metrics"]["loss"], validated[-1]["metrics"]["loss"]
    near = [line["loss"] for line in stepped if line["step"] <= best["step"]][-WINDOW:]
    late = [line["loss"] for line in stepped if line["step"] > best["step"]][-WINDOW:]
    falls = bool(near and late) and statistics.median(late) < statistics.median(near)
    if len(after) >= PATIENCE and now > low + WORSE * abs(low) and falls:
        since = f"validation is worse than at step {best['step']:,} ({low:.4g}, now {now:.4g})"
        advice = "More data, more model.dropout or train.patience=3 help; the best weights are kept."
        text = f"{since} while the training loss falls: the model memorises. {advice}"
        yield Warned(validated[-1]["step"], "overfitting", text)
