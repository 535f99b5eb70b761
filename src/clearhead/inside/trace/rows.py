"""A trace as a tree: stacks, blocks, sublayers, steps. A group has the sums of its steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clearhead.errors import InputError, refuse
from clearhead.inside.trace.steps import TraceStep


class Sums:
    """The figures of several steps, added up."""

    steps: tuple[TraceStep, ...]

    @property
    def parameters(self) -> int:
        """Parameters of all its steps."""
        return sum(step.parameters for step in self.steps)

    @property
    def flops(self) -> int:
        """FLOPs of all its steps."""
        return sum(step.flops for step in self.steps)

    @property
    def bytes(self) -> int:
        """Bytes of the results of all its steps."""
        return sum(step.bytes for step in self.steps)

    @property
    def seconds(self) -> float:
        """Seconds of all its steps."""
        return sum(step.seconds for step in self.steps)

    def figures(self) -> dict[str, Any]:
        """Return all figures by name."""
        return {name: getattr(self, name) for name in ("parameters", "flops", "bytes", "seconds")}


@dataclass(frozen=True)
class TraceRow(Sums):
    """One line of the tree: a step or a group of steps."""

    name: str
    title: str
    level: int  # 1 stack, 2 block, 3 sublayer, 4 step; a step outside of blocks has a lower level
    steps: tuple[TraceStep, ...] = field(repr=False)

    @property
    def step(self) -> TraceStep | None:
        """The step itself; None for a group."""
        first = self.steps[0]
        return first if (self.name, self.level) == (first.name, first.level) else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with the names of the first and the last step."""
        own = {"name": self.name, "title": self.title, "level": self.level}
        ends = {"first": self.steps[0].name, "last": self.steps[-1].name}
        return {**own, **self.figures(), **ends, "steps": len(self.steps)}


def rows_of(steps: Sequence[TraceStep], depth: int, layer: int | None) -> tuple[TraceRow, ...]:
    """Return every group and step down to `depth`, in order, and all steps of block `layer`."""
    refuse(
        not 1 <= depth <= 4, f"depth {depth} is not known: 1 shows stacks, 2 blocks, 3 sublayers, 4 all steps"
    )
    layers = sorted({number for step in steps if (number := _layer(step)) is not None})
    if layer is not None and layer not in layers:
        raise InputError(f"there is no layer {layer}: layers are {layers[0]} to {layers[-1]}")
    rows: list[TraceRow] = []
    open_groups: tuple[str, ...] = ()
    for number, step in enumerate(steps):
        limit = 4 if layer is not None and _layer(step) == layer else depth
        for level in range(1, len(step.path) + 1):
            group = step.path[:level]
            if open_groups[:level] != group and level <= limit:
                rows.append(TraceRow(group[-1], _title(group[-1]), level, _run(steps[number:], group)))
        open_groups = step.path
        if step.level <= limit:
            rows.append(TraceRow(step.name, step.title, step.level, (step,)))
    return tuple(rows)


def _run(steps: Sequence[TraceStep], group: tuple[str, ...]) -> tuple[TraceStep, ...]:
    """Return the steps of a group."""
    return tuple(step for step in steps if step.path[: len(group)] == group)


def _layer(step: TraceStep) -> int | None:
    """Return the number of the block of a step; None outside of blocks."""
    parts = step.path[1].split(".") if len(step.path) > 1 else []
    return int(parts[-1]) if len(parts) > 1 and parts[-2] == "blocks" else None


def _title(group: str) -> str:
    parts = group.split(".")
    return f"block {parts[-1]}" if parts[-1].isdigit() else parts[-1]
