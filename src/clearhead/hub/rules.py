"""Rules: how the tensors of a checkpoint and the parameters of a model become each other, as reversible data.

A rule names tensors on both sides and an operation that goes both ways. In the names `{i}` stands for a
layer, `{j}` for an expert and `{J}` for every expert in turn. Several rules may lead to one parameter, where
weights are tied or names have changed: the first is written, any is read.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig

Shape = tuple[int, ...]
Tensors = list[Tensor]

# Operations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """A reversible change of layout between the tensors of a file (theirs) and parameters (ours)."""

    load: Callable[[Tensors, list[Shape], ModelConfig], Tensors]  # theirs, the shapes of ours -> ours
    save: Callable[[Tensors, ModelConfig], Tensors]  # ours -> theirs
    copies: bool = True  # does `load` make new tensors, or return the file's own?


def _split(whole: Tensor, shapes: list[Shape]) -> Tensors:
    return list(torch.split(whole, [shape[0] for shape in shapes]))


def _split_columns(tensor: Tensor, shapes: list[Shape]) -> Tensors:
    """Split [in, out] along the outputs into transposed matrices, each of which lies in one block."""
    return [part.contiguous().t() for part in torch.split(tensor, [shape[0] for shape in shapes], -1)]


def _transposed(tensors: Tensors) -> Tensors:
    return [x.t().contiguous() for x in tensors]


def _load_interleaved(theirs: Tensors, shapes: list[Shape], config: ModelConfig) -> Tensors:
    X, whole = config.n_experts, theirs[0]
    parts = whole.reshape(X, *whole.shape[1:-1], -1, len(shapes) // X)  # expert in out part
    return [x.contiguous() for x in _reversed(parts).flatten(0, 1)]


def _save_interleaved(ours: Tensors, config: ModelConfig) -> Tensors:
    parts = torch.stack(ours).reshape(config.n_experts, -1, *ours[0].shape)  # expert part out in
    return [_reversed(parts).flatten(-2)]


def _reversed(x: Tensor) -> Tensor:
    """Reverse the order of all axes but the first."""
    return x.permute(0, *range(x.ndim - 1, 0, -1))


# Only the name differs.
SAME = Operation(lambda theirs, shapes, config: theirs, lambda ours, config: ours, copies=False)
# Their matrix is [in, out], ours is [out, in]: a view of it.
TRANSPOSED = Operation(
    lambda theirs, shapes, config: [x.t() for x in theirs],
    lambda ours, config: _transposed(ours),
    copies=False,
)
# Their one tensor is several of ours, end to end along the outputs.
JOINED = Operation(
    lambda theirs, shapes, config: _split(theirs[0], shapes),
    lambda ours, config: [torch.cat(ours)],
    copies=False,
)
# The same, stored [in, out].
JOINED_TRANSPOSED = Operation(
    lambda theirs, shapes, config: _split_columns(theirs[0], shapes),
    lambda ours, config: _transposed([torch.cat(ours)]),
)
# Their one tensor [expert, out, in] holds matrices of every expert, those of one expert end to end.
EXPERTS = Operation(
    lambda theirs, shapes, config: [x.contiguous() for x in _split(theirs[0].flatten(0, 1), shapes)],
    lambda ours, config: [torch.cat(ours).reshape(config.n_experts, -1, ours[0].shape[1])],
)
# Their one tensor [expert, in, out] (of biases [expert, out]) holds every expert, and of several matrices of
# an expert the outputs in turn: gate, up, gate, up, ...
INTERLEAVED_EXPERTS = Operation(_load_interleaved, _save_interleaved)


def grouped(count: Callable[[ModelConfig], int]) -> Operation:
    """Return the operation for one tensor of theirs that holds, group by group, a share of each of ours."""

    def load(theirs: Tensors, shapes: list[Shape], config: ModelConfig) -> Tensors:
        groups = theirs[0].reshape(count(config), -1, *theirs[0].shape[1:])
        parts = torch.split(groups, [shape[0] // groups.shape[0] for shape in shapes], dim=1)
        return [part.flatten(0, 1).contiguous() for part in parts]

    def save(ours: Tensors, config: ModelConfig) -> Tensors:
        groups = [x.reshape(count(config), -1, *x.shape[1:]) for x in ours]
        return [torch.cat(groups, dim=1).flatten(0, 1)]

    return Operation(load, save)


# Their one tensor holds the queries, the key and the value of each key/value head in turn.
HEAD_GROUPS = grouped(lambda config: config.n_kv_heads or config.n_heads)


def reshaped(shape: Callable[[ModelConfig], Shape]) -> Operation:
    """Return the operation between our shape and theirs, which `shape` computes from the config."""
    return Operation(
        lambda theirs, shapes, config: [x.reshape(ours) for x, ours in zip(theirs, shapes)],
        lambda ours, config: [x.reshape(shape(config)) for x in ours],
        copies=False,
    )


# Rules ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Their tensor name, our parameter names, and the operation between them."""

    theirs: str
    ours: tuple[str, ...]
    operation: Operation = SAME
    copy: bool = False  # written even where an earlier rule has written its parameter
    when: Mapping[str, Any] = field(default_factory=dict)  # values of config fields that it needs
    needs: str = ""  # a parameter that its layer must have

    def applies(self, config: ModelConfig) -> bool:
        """Return whether the rule holds for models with this config."""
        return all(getattr(config, name) == value for name, value in self.when.items())


def same(
    pairs: Mapping[str, str], operation: Operation = SAME, when: Mapping[str, Any] | None = None
) -> tuple[Rule, ...]:
    """Return rules for whole modules, {"their.module": "our.module"}; `operation` is for the weight only.

    "{q,k}" in both names stands for each in turn: {"{q,k}_proj": "attention.{q,k}"} is two modules.
    """
    return tuple(
        Rule(
            f"{theirs}.{kind}", (f"{ours}.{kind}",), operation if kind == "weight" else SAME, when=when or {}
        )
        for pair in pairs.items()
        for theirs, ours in zip(*map(_alternatives, pair), strict=True)
        for kind in ("weight", "bias")
    )


def _alternatives(name: str) -> list[str]:
    """Return the names that "a.{b,c}" stands for: "a.b" and "a.c"; a letter alone, as {i}, stays."""
    before, *inside, after = re.split(r"\{([^{}]*,[^{}]*)\}", name) if "," in name else (name, "")
    return [before + word + after for word in (inside[0].split(",") if inside else [""])]


# Our modules by the words of `stack_rules`: tables and norms of a stack, then parts of a block.
TABLES = {"tokens": "embedding.front.tokens", "positions": "positions.table", "types": "embedding.types"}
EDGES = {"embedding_norm": "embedding.norm", "projection": "embedding.project", "norm": "norm"}
PARTS = {
    "qkvo": "attention.{q,k,v,out}",
    "qkv": "attention.{q,k,v}",
    "out": "attention.out",
    "qk_norms": "attention.{q,k}_norm",
    "mlp": "feedforward.{up,down}",
    "gated": "feedforward.{gate,up,down}",
    "down": "feedforward.down",
    "pre_norm": "attention_residual.before",
    "pre_norms": "{attention,feedforward}_residual.before",
    "output_norms": "{attention,feedforward}_residual.inside",
    "post_norms": "{attention,feedforward}_residual.after",
}


def stack_rules(
    stack: str = "decoder",
    layer: str = "",
    operation: Operation = SAME,
    when: Mapping[str, Any] | None = None,
    /,
    **modules: str,
) -> tuple[Rule, ...]:
    """Return the rules of a stack, by what their modules are: words of TABLES, EDGES and PARTS.

    Names of PARTS follow `layer`, the name of a block with {i} in it. An empty name is left out.
    """
    rules: tuple[Rule, ...] = ()
    for word, theirs in modules.items():
        if not theirs:
            continue
        if word in TABLES:
            rules += (Rule(f"{theirs}.weight", (f"{stack}.{TABLES[word]}.weight",)),)
        elif word in EDGES:
            rules += same({theirs: f"{stack}.{EDGES[word]}"}, operation, when)
        else:
            rules += same({f"{layer}.{theirs}": f"{stack}.blocks.{{i}}.{PARTS[word]}"}, operation, when)
    return rules


def joined(theirs: str, ours: Sequence[str], operation: Operation = JOINED) -> tuple[Rule, ...]:
    """Return rules for one of their modules that is several of ours: weight and bias."""
    return tuple(
        Rule(f"{theirs}.{kind}", tuple(f"{name}.{kind}" for name in ours), operation)
        for kind in ("weight", "bias")
    )


def renamed(rules: Iterable[Rule], old: str, new: str) -> tuple[Rule, ...]:
    """Return, for the rules with `new` in their tensor's name, the same rules with its `old` name."""
    return tuple(
        dataclasses.replace(rule, theirs=rule.theirs.replace(new, old))
        for rule in rules
        if new in rule.theirs
    )


NUMBER = re.compile(r"\{\w\}|\d+")  # in a name, or the letter that stands for it


def matches(rules: Iterable[Rule], names: Iterable[str]) -> Iterator[Rule]:
    """Yield each rule with its layer and expert filled in, for every parameter that it leads to, in order."""
    present = dict.fromkeys(names)
    numbers: dict[str, list[list[str]]] = {}  # of every name, by what it is without them
    for name in present:
        numbers.setdefault(NUMBER.sub("#", name), []).append(NUMBER.findall(name))
    for rule in rules:
        template = rule.ours[0].replace("{J}", "0")
        letters = NUMBER.findall(template)
        for numbers_of in numbers.get(NUMBER.sub("#", template), []):
            values = {letter: number for letter, number in zip(letters, numbers_of) if letter != number}
            if any(letter.isdigit() for letter in values):  # the rule is for another number
                continue
            ours = _our_names(rule, values, present)
            if all(name in present for name in ours) and (
                not rule.needs or _fill(rule.needs, values) in present
            ):
                yield dataclasses.replace(rule, theirs=_fill(rule.theirs, values), ours=ours)


def _our_names(rule: Rule, values: dict[str, str], present: Collection[str]) -> tuple[str, ...]:
    """Return our names with layer and expert filled in; with `{J}`, those of every expert."""
    if "{J}" not in rule.ours[0]:
        return tuple(_fill(template, values) for template in rule.ours)
    experts = (
        [_fill(template, {**values, "{J}": str(expert)}) for template in rule.ours]
        for expert in itertools.count()
    )
    return tuple(itertools.chain(*itertools.takewhile(lambda names: names[0] in present, experts)))


def _fill(template: str, values: dict[str, str]) -> str:
    for letter, number in values.items():
        template = template.replace(letter, number)
    return template
