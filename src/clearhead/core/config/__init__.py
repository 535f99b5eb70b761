"""`ModelConfig`: everything that decides what a Transformer is, as one frozen, serialisable dataclass.

`fields` lists what may be set, `resolve` derives the rest, and `CHECKS` refuse what does not fit. Every field
of a built config has its final value. The config remembers which were given, and `replace` derives the others
anew.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.core.config.fields import (
    BIASES,
    LEARNED_BIASES,
    MOST_LAYERS,
    MOST_WIDE,
    TABLES,
    Family,
    Fields,
    HeadSpec,
    Initialisation,
    Input,
    NormSpec,
    RopeScaling,
    StackSpec,
)
from clearhead.core.config.registry import Registry
from clearhead.core.config.resolve import derive, head_spec, stack_specs
from clearhead.errors import ConfigError, check_names, check_types, from_plain, plain, refuse

__all__ = [
    "BIASES",
    "LEARNED_BIASES",
    "MOST_LAYERS",
    "MOST_WIDE",
    "TABLES",
    "Family",
    "HeadSpec",
    "Initialisation",
    "Input",
    "ModelConfig",
    "NormSpec",
    "RopeScaling",
    "StackSpec",
]

# What is refused: wrong values of the given fields, and stacks whose fields do not go together.
CHECKS: Registry[Any] = Registry(
    {"fields": "clearhead.variants.checks:check_given", "stacks": "clearhead.variants.checks:check_specs"}
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Fields):
    """The description of a Transformer; `Fields` explains every field."""

    def __post_init__(self) -> None:
        check_types(self)
        CHECKS["fields"](self)
        free = {name: value for name, value in derive(self).items() if getattr(self, name) is None}
        for name, value in free.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_free", frozenset(free))
        CHECKS["stacks"](self, self.stacks)

    @property
    def derived(self) -> frozenset[str]:
        """Names of the fields that were not given: their values follow from the others."""
        return frozenset(vars(self)["_free"])

    @functools.cached_property
    def _specs(self) -> tuple[StackSpec | None, StackSpec | None]:
        return stack_specs(self)

    @property
    def encoder(self) -> StackSpec | None:
        """The bidirectional stack, or None."""
        return self._specs[0]

    @property
    def decoder(self) -> StackSpec | None:
        """The causal stack, or None."""
        return self._specs[1]

    @property
    def stacks(self) -> tuple[StackSpec, ...]:
        """The encoder and the decoder, those that exist, in the order of the forward pass."""
        return tuple(stack for stack in (self.encoder, self.decoder) if stack is not None)

    @property
    def main(self) -> StackSpec:
        """The stack that feeds the head."""
        return self.stacks[-1]

    @property
    def bounded(self) -> bool:
        """Whether a stack can read no position past `max_positions`."""
        return any(stack.bounded for stack in self.stacks)

    @functools.cached_property
    def readout(self) -> HeadSpec:
        """The specification of the head."""
        return head_spec(self)

    @property
    def n_patches(self) -> int:
        """Number of patches of one image, for a model that reads patches."""
        return self.stacks[0].n_patches

    def replace(self, **changes: Any) -> ModelConfig:
        """Return a copy with some fields changed; fields that were never given are derived anew."""
        check_names(ModelConfig, changes)
        return dataclasses.replace(self, **{**dict.fromkeys(self.derived), **changes})

    def to_dict(self, derived: bool = False) -> dict[str, Any]:
        """Return the given fields as JSON values; with `derived`, all fields."""
        defaults: dict[str, Any] = {
            entry.name: {} if entry.default is dataclasses.MISSING else entry.default
            for entry in dataclasses.fields(self)
        }
        stated = {name: getattr(self, name) for name in defaults if derived or name not in self.derived}
        changed = {name: plain(value) for name, value in stated.items() if value != defaults[name]}
        return {"family": self.family, **changed}

    def to_json(self) -> str:
        """Return the text that `from_json` reads back into an equal config."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Build a config from JSON values; an unknown name raises an error that suggests the nearest one."""
        return from_plain(cls, values)

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """Build a config from the text that `to_json` wrote."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"config is not JSON: {error}") from None
        refuse(
            not isinstance(values, dict),
            f"config must be a JSON object, not {type(values).__name__}",
            ConfigError,
        )
        return cls.from_dict(values)
