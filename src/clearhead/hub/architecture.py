"""An architecture: which classes its checkpoints have, how its config and its tensors become ours, and back."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.config import ModelConfig
from clearhead.errors import CheckpointError, ConfigError
from clearhead.hub.fields import Json, Part, count_labels
from clearhead.hub.rules import Rule

# Fields that change how a model is made or trained, and nothing of what it computes.
WITHOUT_EFFECT = ("init", "init_std", "dropout", "attention_dropout", "embedding_dropout", "feedforward_dropout", "layer_drop")


@dataclass(frozen=True)
class Architecture:
    """Data alone. `classes` maps each class name to what its head is in our fields; the first is the default."""

    model_type: str
    classes: Mapping[str, Json]
    config: tuple[Part, ...]
    rules: tuple[Rule, ...]
    prefix: str = ""  # of the base model's tensors within a model with a head
    ignored: tuple[str, ...] = ()  # tensors some files hold though nothing of them is learned

    def read(self, theirs: Json) -> ModelConfig:
        """Our config from a config.json."""
        values: dict[str, Any] = {}
        for part in self.config:
            values.update(part.read(theirs))
        values.update(self.classes[self.class_of(theirs)])
        if values.get("head") in ("classifier", "tagger"):
            values["n_classes"] = count_labels(theirs)
        try:
            return ModelConfig(**values)
        except ConfigError as error:
            raise CheckpointError(f"config.json describes a model that cannot be built: {error}") from None

    def class_of(self, theirs: Json) -> str:
        """The class the checkpoint was saved from."""
        named = theirs.get("architectures") or [next(iter(self.classes))]
        if named[0] not in self.classes:
            raise CheckpointError(f'config.json names the class "{named[0]}": supported for {self.model_type} are {", ".join(self.classes)}')
        return str(named[0])

    def write(self, config: ModelConfig) -> Json | None:
        """A config.json for our config, exact or not; None where no class has such a head."""
        name = next((name for name, head in self.classes.items() if all(getattr(config, k) == v for k, v in head.items())), None)
        if name is None:
            return None
        theirs: Json = {"architectures": [name], "model_type": self.model_type}
        for part in self.config:
            theirs.update(part.write(config))
        return theirs

    def differences(self, config: ModelConfig) -> list[str] | None:
        """The fields this architecture cannot express, as "name value" pairs; empty: it is exact; None: it has no such head."""
        try:
            theirs = self.write(config)
            if theirs is None:
                return None
            back = self.read(theirs)
        except (CheckpointError, ConfigError, AssertionError, KeyError, TypeError, ValueError):
            return None
        names = [entry.name for entry in dataclasses.fields(ModelConfig) if entry.name not in WITHOUT_EFFECT]
        return [f"{name} {getattr(config, name)!r}" for name in names if not _alike(getattr(config, name), getattr(back, name))]

    def is_ignored(self, name: str) -> bool:
        """May a file hold this tensor though the model has no use for it?"""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.ignored)


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-12 * max(abs(a), abs(b))
    return bool(a == b)
