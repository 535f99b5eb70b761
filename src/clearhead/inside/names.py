"""Names of heads and layers, as people type them: "3.2" is layer 3, head 2; "encoder.0.5", "cross.1.2"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from clearhead.config import ModelConfig
from clearhead.errors import InputError, nearest

KINDS = {"self": ("", "attention"), "encoder": ("encoder.", "attention"), "cross": ("", "cross")}
_NAME = re.compile(r"(?:(self|encoder|cross)\.)?(\d+)\.(\d+)")


@dataclass(frozen=True, order=True)
class Head:
    """One attention head. `number` counts the heads that the layer has now; after pruning they are fewer."""

    kind: str  # self: of the stack that feeds the head; encoder: of the stack before it; cross
    layer: int
    number: int

    @property
    def part(self) -> str:
        """The attention it belongs to, as activations are named: "blocks.3.attention", "encoder.blocks.0.attention"."""
        prefix, module = KINDS[self.kind]
        return f"{prefix}blocks.{self.layer}.{module}"

    def __str__(self) -> str:
        return (
            f"{self.layer}.{self.number}"
            if self.kind == "self"
            else f"{self.kind}.{self.layer}.{self.number}"
        )


def attentions(config: ModelConfig) -> list[tuple[str, int, int]]:
    """Every attention of a model in the order of the forward pass: its kind, its layer, how many heads it has."""
    found = []
    encoder, decoder = config.encoder, config.decoder
    main = decoder or encoder
    for plan in (encoder, decoder):
        if plan is None:
            continue
        for layer in range(plan.n_layers):
            kinds = ["self" if plan is main else "encoder"] + ["cross"] * plan.cross
            for kind in kinds:
                name = Head(kind, layer, 0).part
                found.append((kind, layer, len(plan.heads_of(name))))
    return found


def all_heads(config: ModelConfig) -> list[Head]:
    """Every head of a model."""
    return [Head(kind, layer, number) for kind, layer, count in attentions(config) for number in range(count)]


def find_heads(config: ModelConfig, names: Iterable[str]) -> list[Head]:
    """Heads by their names; an error says which there are."""
    known = {str(head): head for head in all_heads(config)}
    found = []
    for name in names:
        matched = _NAME.fullmatch(name.strip())
        head = Head(matched[1] or "self", int(matched[2]), int(matched[3])) if matched else None
        if head is None or str(head) not in known:
            some = ", ".join(list(known)[:3])
            raise InputError(
                f'there is no head "{name}"{nearest(name, known)}: heads are called layer.head, such as {some}'
            )
        found.append(head)
    return found
