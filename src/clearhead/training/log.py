"""What a run leaves behind for later reading: log.jsonl, loss.png, and TensorBoard where asked."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from clearhead.errors import CheckpointError, MissingExtraError
from clearhead.training.events import Event, Finished, Stepped, Validated

LOG, CURVE = "log.jsonl", "loss.png"


class Log:
    """Writes events as they come; a resumed run goes on where its checkpoint stands."""

    def __init__(self, folder: Path, step: int, tensorboard: bool = False) -> None:
        self.folder, self.path = folder, folder / LOG
        kept = [line for line in read_log(folder) if line["step"] <= step and line["event"] != "finished"]
        try:
            self.path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            self.file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from None
        self.board = _tensorboard(folder) if tensorboard else None

    def write(self, event: Event) -> None:
        """Steps, validations and the end are kept."""
        if not isinstance(event, Stepped | Validated | Finished):
            return
        line = {"event": type(event).__name__.lower(), **dataclasses.asdict(event)}
        try:
            self.file.write(json.dumps(_finite(line), default=str) + "\n")
            self.file.flush()
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from None
        if isinstance(event, Validated | Finished):
            draw(self.folder)
        if self.board is not None:
            values = (
                event.metrics
                if not isinstance(event, Stepped)
                else {"rate": event.rate, "norm": event.norm, "train": event.loss}
            )
            for name, value in values.items():
                self.board.add_scalar(name, value, event.step)

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def _finite(value: Any) -> Any:
    """JSON has no number that is not finite: null stands for it."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of log.jsonl; a last line that was cut short is left out."""
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
    """loss.png from log.jsonl; without matplotlib there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    log = read_log(folder)
    steps = [line for line in log if line["event"] == "stepped"]
    judged = [line for line in log if line["event"] == "validated"]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [line["step"] for line in steps],
        [_drawn(line["loss"]) for line in steps],
        color="0.7",
        linewidth=1,
        label="training batch",
    )
    axes.plot(
        [line["step"] for line in judged],
        [_drawn(line["metrics"]["loss"]) for line in judged],
        color="C0",
        label="validation",
    )
    axes.set(xlabel="step", ylabel="loss per target")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    try:
        figure.savefig(folder / CURVE, dpi=120)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / CURVE}: {error.strerror}") from None


def _drawn(value: float | None) -> float:
    """A gap in the curve where a number was not finite."""
    return math.nan if value is None else value


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtraError(
            "train.tensorboard needs TensorBoard: pip install tensorboard, or leave it out"
        ) from None
    return SummaryWriter(str(folder / "tensorboard"))
