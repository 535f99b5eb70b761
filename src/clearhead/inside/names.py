"""Names of heads, layers and states, as people type them: "3.2" is layer 3, head 2; "encoder.0.5",
"cross.1.2".

A kind of attention is `self`, in the stack that feeds the head, `encoder`, in the stack before it, or
`cross`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from clearhead.config import ModelConfig, StackPlan
from clearhead.errors import InputError, nearest

PARTS = {"self": ("", "attention"), "encoder": ("encoder.", "attention"), "cross": ("", "cross")}
_NAME = re.compile(r"(?:(self|encoder|cross)\.)?(\d+)\.(\d+)")


@dataclass(frozen=True, order=True)
class HeadName:
    """One attention head. `number` counts the heads that the layer has now; after pruning they are fewer."""

    kind: str
    layer: int
    number: int

    @property
    def part(self) -> str:
        """The attention it belongs to, as activations are named: "blocks.3.attention"."""
        return AttentionName(self.kind, self.layer).part

    def __str__(self) -> str:
        return f"{AttentionName(self.kind, self.layer)}.{self.number}"


class AttentionName(NamedTuple):
    """One attention of a model: its kind, its layer and how many heads it has."""

    kind: str
    layer: int
    n_heads: int = 0

    @property
    def part(self) -> str:
        """As activations are named: "blocks.3.attention", "encoder.blocks.0.attention", "blocks.1.cross"."""
        prefix, module = PARTS[self.kind]
        return f"{prefix}blocks.{self.layer}.{module}"

    @property
    def heads(self) -> list[HeadName]:
        """Its heads."""
        return [HeadName(self.kind, self.layer, number) for number in range(self.n_heads)]

    def __str__(self) -> str:
        return str(self.layer) if self.kind == "self" else f"{self.kind}.{self.layer}"


def attentions(config: ModelConfig, kind: str | None = None) -> list[AttentionName]:
    """Return every attention of a model, or those of one kind, in the order of the forward pass."""
    found = []
    for plan in stack_plans(config):
        own = "encoder" if plan.prefix else "self"
        for layer in range(plan.n_layers):
            for name in (own, "cross") if plan.cross else (own,):
                part = AttentionName(name, layer).part
                found.append(AttentionName(name, layer, len(config.kept_heads(part, plan.n_heads))))
    return [one for one in found if kind in (None, one.kind)]


def all_heads(config: ModelConfig, kind: str | None = None) -> list[HeadName]:
    """Return every head of a model, or those of one kind of attention."""
    return [head for one in attentions(config, kind) for head in one.heads]


def find_heads(config: ModelConfig, names: Iterable[str]) -> list[HeadName]:
    """Return heads by their names; an error lists some that exist."""
    known = {str(head): head for head in all_heads(config)}
    found = []
    for name in names:
        matched = _NAME.fullmatch(name.strip())
        head = str(HeadName(matched[1] or "self", int(matched[2]), int(matched[3]))) if matched else ""
        if head not in known:
            some = ", ".join(list(known)[:3])
            raise InputError(
                f'there is no head "{name}"{nearest(name, known)}: '
                f"heads are called layer.head, such as {some}"
            )
        found.append(known[head])
    return found


# Stacks and layers ------------------------------------------------------------------------------------------


def stack_plans(config: ModelConfig) -> Iterator[StackPlan]:
    """Yield the stacks of a model in the order of the forward pass."""
    yield from (plan for plan in (config.encoder, config.decoder) if plan is not None)


def plan_of(config: ModelConfig, kind: str) -> StackPlan:
    """Return the stack that attentions of a kind belong to: the first for "encoder", else the last."""
    plans = list(stack_plans(config))
    return plans[0] if kind == "encoder" else plans[-1]


def layer_names(config: ModelConfig) -> dict[str, str]:
    """Return every layer by name, as activations are named: "3" is "blocks.3"."""
    return {
        f"{plan.prefix}{layer}": f"{plan.prefix}blocks.{layer}"
        for plan in stack_plans(config)
        for layer in range(plan.n_layers)
    }


def states(plan: StackPlan) -> list[str]:
    """Return the names of the residual stream of a stack by depth: at the embedding and after each block."""
    return [
        f"{plan.prefix}embedding",
        *(f"{plan.prefix}blocks.{layer}.resid_post" for layer in range(plan.n_layers)),
    ]
