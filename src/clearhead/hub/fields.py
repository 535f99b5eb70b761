"""Fields: how `config.json` and `ModelConfig` become each other, as reversible data.

Each part reads some keys of theirs into some fields of ours and writes them back. An architecture is a list of parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from clearhead.config import ModelConfig
from clearhead.errors import CheckpointError

Json = dict[str, Any]


class Part(Protocol):
    """One piece of a config, both ways."""

    def read(self, theirs: Json) -> Json:
        """Fields of ours, from config.json."""

    def write(self, config: ModelConfig) -> Json:
        """Keys of theirs, from our config."""


class _Required:
    pass


REQUIRED = _Required()

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class Field:
    """Their key and our field hold one value, perhaps under another name; `default` is theirs when the key is absent."""

    theirs: str
    ours: str
    default: Any = REQUIRED
    names: Mapping[Any, Any] | None = None  # their word -> our word; the first of several is written
    least: int | None = None  # a smaller number is no model of theirs
    null: bool = False  # is their null a value of its own, and not the same as an absent key?
    otherwise: str | None = None  # the key that holds the value where theirs is absent

    def read(self, theirs: Json) -> Json:
        """One field; their null counts as absent where there is a default, unless `null` says otherwise."""
        value = theirs.get(self.theirs)
        if value is None and self.otherwise is not None:
            value = theirs.get(self.otherwise)
        if value is None and not (self.null and self.theirs in theirs):
            if isinstance(self.default, _Required):
                raise CheckpointError(
                    f'config.json lacks "{self.theirs}", which says {self.ours}: it is not a complete checkpoint'
                )
            value = self.default
        if self.names is not None and value is not None:
            if value not in self.names:
                raise CheckpointError(
                    f'config.json has {self.theirs} "{value}": supported are {", ".join(map(str, self.names))}'
                )
            value = self.names[value]
        return {self.ours: self._checked(value)}

    def write(self, config: ModelConfig) -> Json:
        """One key."""
        value = getattr(config, self.ours)
        if self.names is not None:
            value = next((theirs for theirs, ours in self.names.items() if ours == value), None)
        return {self.theirs: self._checked(value)}

    def _checked(self, value: Any) -> Any:
        if self.least is not None and value < self.least:
            raise CheckpointError(
                f"config.json has {self.theirs} {value}: this architecture needs {self.least} at least"
            )
        return value


@dataclass(frozen=True)
class Fixed:
    """What this architecture always is, in our words; nothing of it stands in config.json."""

    values: Json

    def read(self, theirs: Json) -> Json:
        """Always the same."""
        return dict(self.values)

    def write(self, config: ModelConfig) -> Json:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class Written:
    """Keys we write and do not read: without them, other readers would take a default that does not fit every model."""

    values: Json

    def read(self, theirs: Json) -> Json:
        """Nothing."""
        return {}

    def write(self, config: ModelConfig) -> Json:
        """Always the same."""
        return dict(self.values)


@dataclass(frozen=True)
class Says:
    """Keys that must have this value, or be null or absent: their other values are other computations, which we do not have."""

    values: Json
    write_them: bool = False

    def read(self, theirs: Json) -> Json:
        """Nothing, or an error."""
        for key, value in self.values.items():
            if theirs.get(key) not in (None, value):
                raise CheckpointError(
                    f"config.json has {key} {theirs[key]!r}: only {value!r} is supported for this architecture"
                )
        return {}

    def write(self, config: ModelConfig) -> Json:
        """The value, where it must be spelled out."""
        return dict(self.values) if self.write_them else {}


@dataclass(frozen=True)
class Power:
    """Our field is their number to a power: query_pre_attn_scalar 256 is attention_scale 256^-1/2."""

    theirs: str
    ours: str
    power: float
    default: Any = REQUIRED
    whole: bool = False  # can their number be a whole one only?

    def read(self, theirs: Json) -> Json:
        """Their number, raised."""
        value = Field(self.theirs, self.ours, self.default).read(theirs)[self.ours]
        return {self.ours: float(value) ** self.power}

    def write(self, config: ModelConfig) -> Json:
        """Our number, lowered, and whole where it nearly is."""
        value = getattr(config, self.ours) ** (1 / self.power)
        return {
            self.theirs: round(value)
            if self.whole or abs(value - round(value)) < 1e-6 * abs(value)
            else value
        }


@dataclass(frozen=True)
class Scaled:
    """A switch of theirs that multiplies by a power of d_model when on: our number is that, or 1."""

    theirs: str | None  # None: there is no switch, and it is always on
    ours: str
    power: float
    default: bool = True
    width: str = "hidden_size"
    otherwise: str | None = None  # the switch that decides where theirs is absent

    def read(self, theirs: Json) -> Json:
        """1, or the power."""
        default = theirs.get(self.otherwise, self.default) if self.otherwise is not None else self.default
        on = theirs.get(self.theirs, default) if self.theirs is not None else True
        return {self.ours: float(theirs[self.width]) ** self.power if on else 1.0}

    def write(self, config: ModelConfig) -> Json:
        """On or off."""
        return {self.theirs: getattr(config, self.ours) != 1.0} if self.theirs is not None else {}


@dataclass(frozen=True)
class Cases:
    """A few of their keys together decide a few of our fields: rows of (theirs, ours). The first that fits counts, either way."""

    defaults: Json  # what it means when a key of theirs is absent or null
    rows: tuple[
        tuple[Json, Json], ...
    ]  # a None of ours is derived by the config, and fits whatever that gave

    def read(self, theirs: Json) -> Json:
        """The fields of the row their keys agree with."""
        stated = {
            key: default if theirs.get(key) is None else theirs[key] for key, default in self.defaults.items()
        }
        for row, ours in self.rows:
            if all(stated[key] == value for key, value in row.items()):
                return dict(ours)
        raise CheckpointError(
            f"config.json has {', '.join(f'{key} {value!r}' for key, value in stated.items())}: not supported together"
        )

    def write(self, config: ModelConfig) -> Json:
        """The keys of the row our fields agree with; none, where no row says it."""
        fits = (
            row
            for row, ours in self.rows
            if all(value in (None, getattr(config, name)) for name, value in ours.items())
        )
        return dict(next(fits, {}))


@dataclass(frozen=True)
class Depths:
    """Layers of an encoder and a decoder, of equal number unless their second key says otherwise; or of an encoder alone."""

    encoder: str
    decoder: str
    alone: str = "EncoderModel"  # how the names of classes end that have no decoder

    def read(self, theirs: Json) -> Json:
        """One depth, or two."""
        alone = (theirs.get("architectures") or [""])[0].endswith(self.alone)
        first = Field(self.encoder, "n_layers" if alone else "n_encoder_layers").read(theirs)
        return (
            first
            if alone
            else {**first, **Field(self.decoder, "n_layers", otherwise=self.encoder).read(theirs)}
        )

    def write(self, config: ModelConfig) -> Json:
        """One key, and that there is no decoder; or both."""
        if config.family == "encoder":
            return {self.encoder: config.n_layers, "is_encoder_decoder": False}
        return {self.encoder: config.n_encoder_layers, self.decoder: config.n_layers}


@dataclass(frozen=True)
class Windows:
    """Sliding windows: one width, and which layers have it (by `layer_types`, by a pattern, all or none)."""

    pattern: int | None = (
        None  # without layer_types: every pattern-th layer is full; None: all layers have the window
    )
    default: int | None = None
    switch: str | None = None  # a key that must be true for there to be any window
    full_below: str | None = None  # a key with the number of first layers that are full
    below: int = 0  # and that number where the key is absent

    def read(self, theirs: Json) -> Json:
        """One width for all layers, a tuple with one per layer, or None."""
        width = theirs.get("sliding_window", self.default)
        layers = theirs["num_hidden_layers"]
        if width is None or (self.switch is not None and not theirs.get(self.switch, False)):
            return {"window": None}
        kinds = theirs.get("layer_types")
        if kinds is not None:
            windows = [width if kind == "sliding_attention" else None for kind in kinds]
        elif self.full_below is not None:
            windows = [
                width if layer >= theirs.get(self.full_below, self.below) else None for layer in range(layers)
            ]
        elif self.pattern is not None:
            every = theirs.get("sliding_window_pattern", self.pattern)
            windows = [width if (layer + 1) % every else None for layer in range(layers)]
        else:
            windows = [width] * layers
        if not any(windows):
            return {"window": None}
        return {"window": windows[0] if len(set(windows)) == 1 else tuple(windows)}

    def write(self, config: ModelConfig) -> Json:
        """The width and the kind of each layer."""
        assert config.decoder is not None
        windows = config.decoder.windows
        widths = {window for window in windows if window is not None}
        written: Json = {
            "sliding_window": next(iter(widths), self.default if self.pattern is not None else None)
        }
        if self.pattern is not None or self.switch is not None:
            written["layer_types"] = [
                "full_attention" if window is None else "sliding_attention" for window in windows
            ]
        if self.switch is not None:
            written[self.switch] = bool(widths)
        if self.full_below is not None:
            written[self.full_below] = next(
                (layer for layer, window in enumerate(windows) if window is not None), len(windows)
            )
        return written


@dataclass(frozen=True)
class Labels:
    """The number of classes, as id2label or num_labels; written with names, so that other tools show them."""

    def read(self, theirs: Json) -> Json:
        """Nothing by itself: heads that need it ask `count_labels`."""
        return {}

    def write(self, config: ModelConfig) -> Json:
        """Names LABEL_0, LABEL_1, ... unless the model brought its own."""
        if not config.n_classes:
            return {}
        names = {str(index): f"LABEL_{index}" for index in range(config.n_classes)}
        return {"id2label": names, "label2id": {name: int(index) for index, name in names.items()}}


def count_labels(theirs: Json) -> int:
    """How many classes config.json states. Old files keep two placeholder names beside another num_labels: that counts."""
    names, stated = theirs.get("id2label"), theirs.get("num_labels")
    placeholders = names is not None and all(name == f"LABEL_{index}" for index, name in names.items())
    if names and not (placeholders and isinstance(stated, int)):
        return len(names)
    return 2 if stated is None else int(stated)
