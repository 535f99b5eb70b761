"""Rules: how the tensors of a checkpoint and the parameters of a model become each other, as reversible data.

A rule names tensors on both sides, `{i}` standing for a layer, `{j}` for an expert and `{J}` for all experts in turn, and
an operation that goes both ways. Several rules may lead to one parameter, where weights are tied or names have changed:
the first is written, any is read.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead.config import ModelConfig

Shape = tuple[int, ...]


class Operation(Protocol):
    """A reversible change of layout between the tensors of a file (`theirs`) and ours."""

    copies: bool  # does `load` make new tensors, or hand the file's own through?

    def load(self, theirs: list[Tensor], shapes: list[Shape], config: ModelConfig) -> list[Tensor]:
        """Their tensors as ours, which have these shapes."""

    def save(self, ours: list[Tensor], config: ModelConfig) -> list[Tensor]:
        """Our tensors as theirs."""


@dataclass(frozen=True)
class Same:
    """Nothing but the name differs."""

    copies = False

    def load(self, theirs: list[Tensor], shapes: list[Shape], config: ModelConfig) -> list[Tensor]:
        """Handed through."""
        return theirs

    def save(self, ours: list[Tensor], config: ModelConfig) -> list[Tensor]:
        """Handed through."""
        return ours


@dataclass(frozen=True)
class Transpose:
    """Their matrix is [in, out], ours [out, in]."""

    copies = True

    def load(self, theirs: list[Tensor], shapes: list[Shape], config: ModelConfig) -> list[Tensor]:
        """Turned."""
        return [x.t().contiguous() for x in theirs]

    def save(self, ours: list[Tensor], config: ModelConfig) -> list[Tensor]:
        """Turned back."""
        return [x.t().contiguous() for x in ours]


@dataclass(frozen=True)
class Split:
    """Their one tensor is several of ours laid end to end along the outputs; `transposed` where it is [in, out]."""

    transposed: bool = False
    copies = True

    def load(self, theirs: list[Tensor], shapes: list[Shape], config: ModelConfig) -> list[Tensor]:
        """Cut apart."""
        whole = theirs[0].t() if self.transposed and theirs[0].ndim == 2 else theirs[0]
        whole = (
            whole.contiguous() if self.transposed else whole.clone()
        )  # copied once: the parts are rows of it
        return list(torch.split(whole, [shape[0] for shape in shapes]))

    def save(self, ours: list[Tensor], config: ModelConfig) -> list[Tensor]:
        """Joined."""
        whole = torch.cat(ours)
        return [whole.t().contiguous() if self.transposed and whole.ndim == 2 else whole]


@dataclass(frozen=True)
class SplitHeads:
    """Their one tensor holds, for each key/value head in turn, its queries, its key and its value."""

    copies = True

    def load(self, theirs: list[Tensor], shapes: list[Shape], config: ModelConfig) -> list[Tensor]:
        """Cut apart head by head."""
        assert config.n_kv_heads and config.d_head
        rest = theirs[0].shape[1:]
        heads = theirs[0].reshape(config.n_kv_heads, -1, config.d_head, *rest)
        parts = torch.split(heads, [heads.shape[1] - 2, 1, 1], dim=1)
        return [part.reshape(-1, *rest).contiguous() for part in parts]

    def save(self, ours: list[Tensor], config: ModelConfig) -> list[Tensor]:
        """Joined head by head."""
        assert config.n_kv_heads and config.d_head
        rest = ours[0].shape[1:]
        heads = [x.reshape(config.n_kv_heads, -1, config.d_head, *rest) for x in ours]
        return [torch.cat(heads, dim=1).reshape(-1, *rest).contiguous()]


@dataclass(frozen=True)
class SplitExperts:
    """Their one tensor [expert, out, in] holds matrices of every expert, those of one expert end to end along the outputs."""

    copies = True

    def load(self, theirs: list[Tensor], shapes: list[Shape], config: ModelConfig) -> list[Tensor]:
        """Cut apart."""
        return [
            part.contiguous() for part in torch.split(theirs[0].flatten(0, 1), [shape[0] for shape in shapes])
        ]

    def save(self, ours: list[Tensor], config: ModelConfig) -> list[Tensor]:
        """Joined."""
        return [torch.cat(ours).reshape(config.n_experts, -1, ours[0].shape[1])]


@dataclass(frozen=True)
class Reshape:
    """The same numbers in another shape; `theirs` gives that shape."""

    theirs: Callable[[ModelConfig], Shape]
    copies = False

    def load(self, theirs: list[Tensor], shapes: list[Shape], config: ModelConfig) -> list[Tensor]:
        """In our shape."""
        return [x.reshape(shape) for x, shape in zip(theirs, shapes)]

    def save(self, ours: list[Tensor], config: ModelConfig) -> list[Tensor]:
        """In their shape."""
        return [x.reshape(self.theirs(config)) for x in ours]


@dataclass(frozen=True)
class Rule:
    """Their tensor names, our parameter names, and the operation between them."""

    theirs: str
    ours: tuple[str, ...]
    operation: Operation = Same()
    copy: bool = False  # written even where an earlier rule has written its parameter
    when: Mapping[str, Any] = field(default_factory=dict)  # fields our config must have for the rule to count

    def counts(self, config: ModelConfig) -> bool:
        """Does the rule speak of models with this config?"""
        return all(getattr(config, name) == value for name, value in self.when.items())


def same(pairs: dict[str, str], bias: bool = True, when: Mapping[str, Any] | None = None) -> tuple[Rule, ...]:
    """Rules for whole modules: {"their.module": "our.module"} gives a rule for the weight and one for the bias."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(
        Rule(f"{theirs}.{kind}", (f"{ours}.{kind}",), when=when or {})
        for theirs, ours in pairs.items()
        for kind in kinds
    )


def transposed(pairs: dict[str, str]) -> tuple[Rule, ...]:
    """As `same`, for modules whose weight is stored [in, out]."""
    weights = tuple(
        Rule(f"{theirs}.weight", (f"{ours}.weight",), Transpose()) for theirs, ours in pairs.items()
    )
    return weights + tuple(Rule(f"{theirs}.bias", (f"{ours}.bias",)) for theirs, ours in pairs.items())


def split(theirs: str, ours: Sequence[str], operation: Operation) -> tuple[Rule, ...]:
    """Rules for one of their modules that is several of ours: weight and bias."""
    return tuple(
        Rule(f"{theirs}.{kind}", tuple(f"{name}.{kind}" for name in ours), operation)
        for kind in ("weight", "bias")
    )


def renamed(rules: Iterable[Rule], old: str, new: str) -> tuple[Rule, ...]:
    """The rules whose tensors once had `old` in their name where it now is `new`, for those older names."""
    return tuple(
        dataclasses.replace(rule, theirs=rule.theirs.replace(new, old))
        for rule in rules
        if new in rule.theirs
    )


@dataclass(frozen=True)
class Match:
    """A rule with its layer and expert filled in."""

    theirs: str
    ours: tuple[str, ...]
    operation: Operation
    copy: bool = False


def matches(rules: Iterable[Rule], names: Iterable[str]) -> Iterator[Match]:
    """Every way in which a rule leads to one of our parameter names, in the order of the rules."""
    known = list(names)
    present = set(known)
    for rule in rules:
        pattern = _pattern(rule.ours[0].replace("{J}", "0"))
        for name in known:
            found = pattern.fullmatch(name)
            if found is None:
                continue
            ours = _ours(rule, found.groupdict(), present)
            if all(other in present for other in ours):
                yield Match(_fill(rule.theirs, found.groupdict()), ours, rule.operation, rule.copy)


def _ours(rule: Rule, values: dict[str, str], present: set[str]) -> tuple[str, ...]:
    """Our names with the layer and the expert filled in: expert after expert, where the rule speaks of all of them."""
    if "{J}" not in rule.ours[0]:
        return tuple(_fill(template, values) for template in rule.ours)
    experts = (
        tuple(_fill(template, {**values, "J": str(number)}) for template in rule.ours)
        for number in itertools.count()
    )
    return tuple(
        name for names in itertools.takewhile(lambda names: names[0] in present, experts) for name in names
    )


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d+)", re.escape(template)))


def _fill(template: str, values: dict[str, str]) -> str:
    return re.sub(r"\{(\w)\}", lambda found: values[found.group(1)], template)
