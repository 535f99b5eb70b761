"""Names of heads, layers and states, as people type them: "3.2" is layer 3, head 2; "encoder.0.5",
"cross.1.2".

A kind of attention is `self`, in the stack that feeds the head, `encoder`, in the stack before it, or
`cross`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from clearhead.config import ModelConfig, StackSpec
from clearhead.config.kinds import GatedDeltaKind
from clearhead.errors import InputError, nearest

PARTS = {"self": "blocks.{}.attention", "encoder": "encoder.blocks.{}.attention", "cross": "blocks.{}.cross"}
_NAME = re.compile(r"(?:(self|encoder|cross)\.)?(\d+)\.(\d+)")


@dataclass(frozen=True, order=True)
class AttentionHead:
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
        return PARTS[self.kind].format(self.layer)

    @property
    def heads(self) -> list[AttentionHead]:
        """Its heads."""
        return [AttentionHead(self.kind, self.layer, number) for number in range(self.n_heads)]

    def __str__(self) -> str:
        return str(self.layer) if self.kind == "self" else f"{self.kind}.{self.layer}"


def attentions(config: ModelConfig, kind: str | None = None) -> list[AttentionName]:
    """Return every attention of a model, or those of one kind, in the order of the forward pass.

    Layers of the gated delta rule are none: their heads share a convolution and a gate.
    """
    return [
        AttentionName(name, layer, len(spec.heads_of(AttentionName(name, layer).part)))
        for spec in config.stacks
        for layer in range(spec.n_layers)
        for name in ("encoder" if spec.prefix else "self", *(["cross"] if spec.cross else []))
        if kind in (None, name) and (name == "cross" or not isinstance(spec.kinds[layer], GatedDeltaKind))
    ]


def all_heads(config: ModelConfig, kind: str | None = None) -> list[AttentionHead]:
    """Return every head of a model, or those of one kind of attention."""
    return [head for one in attentions(config, kind) for head in one.heads]


def find_heads(config: ModelConfig, names: Iterable[str]) -> list[AttentionHead]:
    """Return heads by their names; an error lists some that exist."""
    known = {str(head): head for head in all_heads(config)}
    found = []
    for name in names:
        matched = _NAME.fullmatch(name.strip())
        head = str(AttentionHead(matched[1] or "self", int(matched[2]), int(matched[3]))) if matched else ""
        if head not in known:
            raise InputError(
                f'there is no head "{name}"{nearest(name, known)}: '
                f"heads are called layer.head, such as {', '.join(list(known)[:3])}"
            )
        found.append(known[head])
    return found


# Stacks and layers ------------------------------------------------------------------------------------------


def spec_of(config: ModelConfig, kind: str) -> StackSpec:
    """Return the stack that attentions of a kind belong to."""
    return config.stacks[0] if kind == "encoder" else config.main


def layer_names(config: ModelConfig) -> dict[str, str]:
    """Return every layer by name, as activations are named: "3" is "blocks.3"."""
    return {
        f"{spec.prefix}{layer}": f"{spec.prefix}blocks.{layer}"
        for spec in config.stacks
        for layer in range(spec.n_layers)
    }


def states(spec: StackSpec) -> list[str]:
    """Return the names of the residual stream of a stack by depth: at the embedding and after each block."""
    return [
        f"{spec.prefix}embedding",
        *(f"{spec.prefix}blocks.{layer}.resid_post" for layer in range(spec.n_layers)),
    ]
