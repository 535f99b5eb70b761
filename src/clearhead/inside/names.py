"""Names of heads, layers and states, as people type them: "3.2" is layer 3, head 2; "encoder.0.5",
"cross.1.2".

A kind of attention is `self`, in the stack that feeds the head, `encoder`, in the stack before it, or
`cross`.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from clearhead.core.config import ModelConfig, StackSpec
from clearhead.core.config.kinds import FULL, Kind
from clearhead.errors import InputError, nearest, refuse, refuse_unknown

PARTS = {"self": "blocks.{}.attention", "encoder": "encoder.blocks.{}.attention", "cross": "blocks.{}.cross"}
NO_HEADS = "this model has no heads by themselves: its layers share a convolution and a gate"
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


Heads = Iterable[AttentionHead | str] | AttentionHead | str
Layers = Iterable[int | str] | int | str  # 3 or "3" of the stack that feeds the head, else "encoder.3"


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


def kinds_of(config: ModelConfig) -> dict[AttentionName, Kind]:
    """Return what each attention of a model computes, in the order of the forward pass.

    Those of recurrent layers have no heads by themselves: they share a convolution and a gate. Those of
    hybrid layers have patterns, and what else these layers add is of no head.
    """
    kinds_by_name = {}
    for spec in config.stacks:
        for layer, own in enumerate(spec.kinds):
            kinds = (("encoder" if spec.prefix else "self", own), ("cross", FULL))
            for name, kind in kinds[: 1 + spec.cross]:
                heads = spec.heads_of(AttentionName(name, layer).part)
                shown = kind.has_heads or kind.patterned
                kinds_by_name[AttentionName(name, layer, len(heads) if shown else 0)] = kind
    return kinds_by_name


def attentions(config: ModelConfig, kind: str | None = None) -> list[AttentionName]:
    """Return every attention whose heads are heads by themselves, or those of one kind, in order."""
    alone = [name for name, own in kinds_of(config).items() if own.has_heads]
    return [name for name in alone if kind in (None, name.kind)]


def patterned(
    config: ModelConfig,
    kind: str | None = None,
    required: bool = True,
    among: Collection[AttentionName] | None = None,
) -> list[AttentionName]:
    """Return every attention with a pattern, shares of tokens for each query; `required`: refuse none."""
    those = [
        name
        for name, own in kinds_of(config).items()
        if own.patterned and kind in (None, name.kind) and (among is None or name in among)
    ]
    refuse(
        required and not those, f"there is no attention pattern to look at; {''.join(unpatterned(config))}"
    )
    return those


def unpatterned(config: ModelConfig) -> list[str]:
    """Return a line on the layers without an attention pattern, and one on those that it shows in part."""
    groups: dict[str, list[str]] = {}
    for attention, kind in kinds_of(config).items():
        groups.setdefault("" if kind.patterned else str(kind), []).append(str(attention))
    those = ", ".join(groups.pop("", ["none"]))
    without = ", ".join(f"{', '.join(layers)} ({kind})" for kind, layers in groups.items())
    lines = [f"layers without an attention pattern: {without}; layers with one: {those}"] if groups else []
    if hybrid := partly_patterned(config):
        lines.append(
            "layers whose pattern shows their heads, and not the state-space mixer next to them: "
            + ", ".join(hybrid)
        )
    return lines


def partly_patterned(config: ModelConfig) -> list[str]:
    """Return the layers that add more than their heads: attention next to a state-space mixer."""
    return [str(name) for name, kind in kinds_of(config).items() if kind.patterned and not kind.has_heads]


def all_heads(config: ModelConfig, kind: str | None = None) -> list[AttentionHead]:
    """Return every head of a model, or those of one kind of attention; refuse a model without any."""
    heads = heads_in(attentions(config, kind))
    refuse(not heads, NO_HEADS)
    return heads


def heads_in(some: Iterable[AttentionName]) -> list[AttentionHead]:
    """Return the heads of some attentions."""
    return [head for attention in some for head in attention.heads]


def find_heads(config: ModelConfig, names: Iterable[str]) -> list[AttentionHead]:
    """Return heads by their names; an error lists some that exist."""
    wanted, heads = list(names), list[AttentionHead]()
    known = {str(head): head for head in heads_in(kinds_of(config))} if wanted else {}
    refuse(bool(wanted) and not known, NO_HEADS)
    for name in wanted:
        matched = _NAME.fullmatch(name.strip())
        head = str(AttentionHead(matched[1] or "self", int(matched[2]), int(matched[3]))) if matched else ""
        if head not in known:
            raise InputError(
                f'there is no head "{name}"{nearest(name, known)}: '
                f"heads are called layer.head, such as {', '.join(list(known)[:3])}"
            )
        heads.append(known[head])
    return heads


def as_heads(config: ModelConfig, heads: Heads) -> list[AttentionHead]:
    """Return heads to change, given as such or by name; each once, in the order of their names."""
    wanted = [heads] if isinstance(heads, AttentionHead | str) else heads
    found = sorted(set(find_heads(config, map(str, wanted))))
    beside = next((head for head in found if str(head).rpartition(".")[0] in partly_patterned(config)), None)
    refuse(
        beside is not None,
        f"head {beside} has a state-space mixer next to it, and is not changed by itself: choose its layer",
    )
    return found


# Parts ------------------------------------------------------------------------------------------------------


def part_of(model: Any, tap: str) -> Any:
    """Return the module of an activation: "encoder.blocks.3.attention.out" is of that attention."""
    own = tap.removeprefix("encoder.")
    stack = model.encoder if own != tap and model.encoder is not None else model.main
    _, layer, part, *_ = own.split(".")
    return getattr(stack.layers()[int(layer)], part)


def refuse_foreign(model: nn.Module) -> None:
    """Refuse a model with a part whose formula is not known here: a class of others, a hook, a new forward.

    A graph and a circuit go through a model part by part, and would leave out, silently, what these do.
    """
    known = (nn.Linear, nn.Embedding, nn.Conv1d, nn.ModuleList, nn.Dropout)
    for name, part in model.named_modules():
        if ".parametrizations" in name:
            continue  # a weight in other numbers is a weight
        own = type(part)
        ours = own.__module__.startswith("clearhead.") and "parallel" not in own.__module__
        at = f"part {name or 'model'} ({own.__module__}.{own.__name__})"
        refuse(
            not (ours or own in known or is_parametrized(part)),
            f"{at} is not one of clearhead's, and what it computes cannot be taken apart: put ours back",
        )
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        foreign = any(not getattr(hook, "__module__", "").startswith("clearhead.") for hook in hooks)
        refuse(
            foreign or "forward" in vars(part),
            f"{at} has a hook or a forward of its own, which would be left out: remove it, or use ch.edit",
        )


def refuse_shortcuts(config: ModelConfig) -> None:
    """Refuse a model whose layers read earlier ones: what takes it apart goes along one stream."""
    refuse(
        config.main.carries or config.main.recalls,
        "layers of this model read more of earlier ones than one stream (input_skips, mirror_skips, "
        "value_residual, value_embeddings), or its tokens the one before (smear_gate, bigrams), which is not "
        "taken apart: ask about a model without them",
    )


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


def find_blocks(config: ModelConfig, layers: Layers) -> list[str]:
    """Return layers as activations are named, each once: 3 is "blocks.3", "encoder.0" "encoder.blocks.0"."""
    known = layer_names(config)
    names = [str(layer).strip() for layer in ([layers] if isinstance(layers, int | str) else layers)]
    for name in names:
        refuse_unknown("layer", name, known)
    return list(dict.fromkeys(known[name] for name in names))


def states(spec: StackSpec) -> list[str]:
    """Return the names of the residual stream of a stack by depth: at the embedding and after each block."""
    return [
        f"{spec.prefix}embedding",
        *(f"{spec.prefix}blocks.{layer}.resid_post" for layer in range(spec.n_layers)),
    ]
