"""A trace as a tree: the pass, its stacks, their blocks, their sublayers, their steps. Groups have the sums of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clearhead.errors import InputError
from clearhead.inside.trace.steps import TraceStep


class Sums:
    """Figures of several steps together."""

    steps: tuple[TraceStep, ...]

    @property
    def parameters(self) -> int:
        """Of all its steps."""
        return sum(step.parameters for step in self.steps)

    @property
    def flops(self) -> int:
        """Of all its steps."""
        return sum(step.flops for step in self.steps)

    @property
    def bytes(self) -> int:
        """Of the results of all its steps."""
        return sum(step.bytes for step in self.steps)

    @property
    def seconds(self) -> float:
        """Of all its steps."""
        return sum(step.seconds for step in self.steps)

    def figures(self) -> dict[str, Any]:
        """All of them, by name."""
        return {name: getattr(self, name) for name in ("parameters", "flops", "bytes", "seconds")}


@dataclass(frozen=True)
class TraceRow(Sums):
    """One line of the tree: a step, or a group of them."""

    name: str
    title: str
    level: int  # 1 stack, 2 block, 3 sublayer, 4 step; parts without blocks or sublayers have their steps higher up
    steps: tuple[TraceStep, ...] = field(repr=False)

    @property
    def step(self) -> TraceStep | None:
        """The step itself; None for a group."""
        return (
            self.steps[0] if self.name == self.steps[0].name and self.level == self.steps[0].level else None
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; its steps by the first and the last name."""
        ends = {"first": self.steps[0].name, "last": self.steps[-1].name}
        return {
            "name": self.name,
            "title": self.title,
            "level": self.level,
            **self.figures(),
            **ends,
            "steps": len(self.steps),
        }


def rows_of(steps: Sequence[TraceStep], depth: int, layer: int | None) -> tuple[TraceRow, ...]:
    """Every group and step down to `depth`, in order; the blocks of number `layer` down to their last step."""
    if not 1 <= depth <= 4:
        raise InputError(f"depth {depth} is not known: 1 shows stacks, 2 blocks, 3 sublayers, 4 all steps")
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
    """The steps of a group; they stand together."""
    return tuple(step for step in steps if step.path[: len(group)] == group)


def _layer(step: TraceStep) -> int | None:
    """The number of the block a step belongs to; None for what stands outside of blocks."""
    parts = step.path[1].split(".") if len(step.path) > 1 else []
    return int(parts[-1]) if len(parts) > 1 and parts[-2] == "blocks" else None


def _title(group: str) -> str:
    parts = group.split(".")
    return f"block {parts[-1]}" if parts[-1].isdigit() else parts[-1]
