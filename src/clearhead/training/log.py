"""The logs of a run: log.jsonl, loss.png, and TensorBoard where it is asked for."""

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.errors import CheckpointError, MissingExtraError
from clearhead.training.events import Event, Finished, OnEvent, Stepped, Validated

LOG, CURVE = "log.jsonl", "loss.png"
CURVES: tuple[tuple[str, str, dict[str, Any]], ...] = (  # kind of event, label, style
    ("stepped", "training batch", {"color": "0.7", "linewidth": 1}),
    ("validated", "validation", {"color": "C0"}),
)


@contextmanager
def open_log(folder: Path, step: int, tensorboard: bool = False) -> Iterator[OnEvent]:
    """Yield a function that writes events; lines after `step`, where a run is resumed, are removed first."""
    path = folder / LOG
    kept = [line for line in read_log(folder) if line["step"] <= step and line["event"] != "finished"]
    with _reporting(path):
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        file = path.open("a", encoding="utf-8")
    board = _tensorboard(folder) if tensorboard else None

    def write(event: Event) -> None:
        """Write steps, validations and the end; other events are not logged."""
        if not isinstance(event, Stepped | Validated | Finished):
            return
        line = {"event": type(event).__name__.lower(), **dataclasses.asdict(event)}
        with _reporting(path):
            file.write(json.dumps(_finite(line), default=str) + "\n")
            file.flush()
        if isinstance(event, Stepped):
            values = {"rate": event.rate, "norm": event.norm, "train": event.loss}
        else:
            values = event.metrics
            draw(folder)
        if board is not None:
            for name, value in values.items():
                board.add_scalar(name, value, event.step)

    with file, closing(board) if board is not None else nullcontext():
        yield write


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Report a failed write in one line."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from None


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of log.jsonl; a last line that was cut short is left out."""
    path = folder / LOG
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def draw(folder: Path) -> None:
    """Draw loss.png from log.jsonl; without matplotlib, do nothing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    log = read_log(folder)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for kind, label, style in CURVES:
        lines = [line for line in log if line["event"] == kind]
        losses = [line["loss"] if kind == "stepped" else line["metrics"]["loss"] for line in lines]
        # Null, for a loss that was not finite, is a gap in the curve.
        values = np.array(losses, dtype=np.float64)
        axes.plot([line["step"] for line in lines], values, label=label, **style)
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
