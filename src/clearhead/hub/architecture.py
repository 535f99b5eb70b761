"""An architecture: which classes its checkpoints have, how its config and its tensors become ours, and back."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from clearhead.config import MOST_LAYERS, MOST_WIDE, ModelConfig
from clearhead.errors import CheckpointError, ConfigError
from clearhead.hub.fields import Json, Part, count_labels
from clearhead.hub.rules import Rule

# Fields that change how a model is made or trained, and nothing of what it computes; `bias` speaks through those it sets.
WITHOUT_EFFECT = (
    *("init", "init_std", "bias"),
    *("dropout", "attention_dropout", "embedding_dropout", "feedforward_dropout", "layer_drop"),
)

# transformers builds a base model without its pooler when told so in code, and its config.json does not tell: ours does.
POOLER_KEY = "has_pooler"
WITHOUT_POOLER: Json = {"head": "none", "pooler": "none"}

# Of every other number MOST_WIDE is the most.
MOST = {
    "n_layers": MOST_LAYERS,
    "n_encoder_layers": MOST_LAYERS,
    "vocab_size": 2**31,
    "source_vocab_size": 2**31,
    "max_positions": 2**31,
}


@dataclass(frozen=True)
class Architecture:
    """Data alone. `classes` maps each class name to what its head is in our fields; the first is the default."""

    model_type: str
    classes: Mapping[str, Json]
    config: tuple[Part, ...]
    rules: tuple[Rule, ...]
    heads: Mapping[str, tuple[Rule, ...]] = field(
        default_factory=dict
    )  # by our name of the head: rules for it alone
    prefix: str = ""  # of the base model's tensors within a model with a head
    ignored: tuple[str, ...] = ()  # tensors some files hold though nothing of them is learned
    open: tuple[str, ...] = ()  # fields that the tensors of a file decide, and config.json does not state
    carried: tuple[
        str, ...
    ] = ()  # tensors of heads that files hold besides their class's own: kept, and written back

    def read(self, theirs: Json) -> ModelConfig:
        """Our config from a config.json."""
        try:
            values = self._values(theirs)
            check_sizes(values)
            return ModelConfig(**values)
        except CheckpointError:
            raise
        except ConfigError as error:
            raise CheckpointError(f"config.json describes a model that cannot be built: {error}") from None
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            line = str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"config.json has a value of the wrong kind: {line or type(error).__name__}"
            ) from None

    def _values(self, theirs: Json) -> Json:
        values: Json = {}
        for part in self.config:
            values.update(part.read(theirs))
        values.update(self.classes[self.class_of(theirs)])
        if values.get("head") == "embedding" and theirs.get(POOLER_KEY) is False:
            values.update(WITHOUT_POOLER)
        if values.get("head") in ("classifier", "tagger"):
            values["n_classes"] = count_labels(theirs)
        return values

    def class_of(self, theirs: Json) -> str:
        """The class the checkpoint was saved from."""
        named = theirs.get("architectures") or [next(iter(self.classes))]
        if named[0] not in self.classes:
            raise CheckpointError(
                f'config.json names the class "{named[0]}": supported for {self.model_type} are {", ".join(self.classes)}'
            )
        return str(named[0])

    def write(self, config: ModelConfig) -> Json | None:
        """A config.json for our config, exact or not; None where no class has such a head."""
        named = next(
            (
                named
                for named, head in self._choices()
                if all(getattr(config, k) == v for k, v in head.items())
            ),
            None,
        )
        if named is None:
            return None
        theirs: Json = {**named, "model_type": self.model_type}
        for part in self.config:
            theirs.update(part.write(config))
        return theirs

    def _choices(self) -> Iterator[tuple[Json, Json]]:
        """For each head there is: how config.json names it, and what it is in our fields."""
        for name, head in self.classes.items():
            yield {"architectures": [name]}, head
            if head.get("head") == "embedding":
                yield {"architectures": [name], POOLER_KEY: False}, {**head, **WITHOUT_POOLER}

    def differences(self, config: ModelConfig) -> list[str] | None:
        """The fields this architecture cannot express, as "name value" pairs; empty: it is exact; None: it has no such head."""
        try:
            theirs = self.write(config)
            if theirs is None:
                return None
            back = self.read(theirs)
        except (CheckpointError, ConfigError, AssertionError, KeyError, TypeError, ValueError):
            return None
        names = [
            entry.name
            for entry in dataclasses.fields(ModelConfig)
            if entry.name not in (*WITHOUT_EFFECT, *self.open)
        ]
        return [
            f"{name} {getattr(config, name)!r}"
            for name in names
            if not _alike(getattr(config, name), getattr(back, name))
        ]

    def names_all(self, names: Iterable[str]) -> bool:
        """Could each of these tensors be one of this architecture's, with the base model's prefix or without?"""
        rules = [*self.rules, *(rule for head in self.heads.values() for rule in head)]
        pattern = re.compile("|".join(re.sub(r"\\{\w\\}", r"\\d+", re.escape(rule.theirs)) for rule in rules))
        bare = bool(self.prefix) and not any(name.startswith(self.prefix) for name in names)
        full = [self.prefix + name if bare else name for name in names]
        return all(pattern.fullmatch(name) or self.is_ignored(name) or self.is_carried(name) for name in full)

    def is_ignored(self, name: str) -> bool:
        """May a file hold this tensor though the model has no use for it?"""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.ignored)

    def is_carried(self, name: str) -> bool:
        """Is this tensor part of a head that the checkpoint's class has not?"""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.carried)


def check_sizes(values: Json) -> None:
    """Refuse numbers no model has, before anything is made that long."""
    for name, value in values.items():
        most = MOST.get(name, MOST_WIDE)
        if isinstance(value, int) and abs(value) > most:
            raise CheckpointError(f"config.json makes {name} {str(value)[:24]}: {most:,} is the most")


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-12 * max(abs(a), abs(b))
    return bool(a == b)
