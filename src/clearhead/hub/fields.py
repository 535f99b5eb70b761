"""Fields: how `config.json` and `ModelConfig` become each other, as reversible data.

Each part reads some keys of theirs into some fields of ours and writes them back. An architecture is a list of parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clearhead.config import ModelConfig
from clearhead.errors import CheckpointError
from clearhead.hub.files import require

Json = dict[str, Any]
REQUIRED = object()

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


class ConfigPart:
    """One piece of a config, both ways; by itself it says nothing in either direction."""

    def read(self, theirs: Json) -> Json:
        """Return fields of ours, from config.json."""
        return {}

    def write(self, config: ModelConfig) -> Json:
        """Return keys of theirs, from our config."""
        return {}


@dataclass(frozen=True)
class Field(ConfigPart):
    """Their key and our field hold one value, perhaps under another name; `default` is theirs when the key is absent."""

    theirs: str
    ours: str
    default: Any = REQUIRED
    names: Mapping[Any, Any] | None = None  # their word -> our word; the first of several is written
    least: int | None = None  # the smallest number this architecture can have
    null: bool = False  # is their null a value of its own, and not the same as an absent key?
    otherwise: str | None = None  # the key that holds the value where theirs is absent

    def read(self, theirs: Json) -> Json:
        """Return one field; their null counts as absent where there is a default, unless `null` says otherwise."""
        value = theirs.get(self.theirs)
        if value is None and self.otherwise is not None:
            value = theirs.get(self.otherwise)
        if value is None and not (self.null and self.theirs in theirs):
            value = self.default
        missing = (
            f'config.json lacks "{self.theirs}", which says {self.ours}: it is not a complete checkpoint'
        )
        require(value is not REQUIRED, missing)
        if self.names is not None and value is not None:
            supported = ", ".join(map(str, self.names))
            require(
                value in self.names, f'config.json has {self.theirs} "{value}": supported are {supported}'
            )
            value = self.names[value]
        return {self.ours: self._checked(value)}

    def write(self, config: ModelConfig) -> Json:
        """Return one key."""
        value = getattr(config, self.ours)
        if self.names is not None:
            value = next((theirs for theirs, ours in self.names.items() if ours == value), None)
        return {self.theirs: self._checked(value)}

    def _checked(self, value: Any) -> Any:
        refusal = f"config.json has {self.theirs} {value}: this architecture needs {self.least} at least"
        require(self.least is None or value >= self.least, refusal)
        return value


@dataclass(frozen=True)
class Fixed(ConfigPart):
    """What never varies in this architecture."""

    ours: Json = field(default_factory=dict)  # fields that config.json does not mention
    written: Json = field(
        default_factory=dict
    )  # keys that we write for other readers, whose defaults do not fit
    only: Json = field(
        default_factory=dict
    )  # keys that must be this, null or absent: we compute nothing else

    def read(self, theirs: Json) -> Json:
        """Return the fields, after a look at the keys that allow one value only."""
        for key, value in self.only.items():
            require(
                theirs.get(key) in (None, value),
                f"config.json has {key} {theirs.get(key)!r}: only {value!r} is supported for this architecture",
            )
        return dict(self.ours)

    def write(self, config: ModelConfig) -> Json:
        """Return the keys for other readers."""
        return dict(self.written)


@dataclass(frozen=True)
class Power(ConfigPart):
    """Our field is their number to a power: query_pre_attn_scalar 256 is attention_scale 256^-1/2."""

    theirs: str
    ours: str
    power: float
    default: Any = REQUIRED
    whole: bool = False  # can their number be a whole one only?

    def read(self, theirs: Json) -> Json:
        """Return their number to the power."""
        value = Field(self.theirs, self.ours, self.default).read(theirs)[self.ours]
        return {self.ours: float(value) ** self.power}

    def write(self, config: ModelConfig) -> Json:
        """Return the root of our number, rounded where it is nearly whole."""
        value = getattr(config, self.ours) ** (1 / self.power)
        nearly_whole = abs(value - round(value)) < 1e-6 * abs(value)
        return {self.theirs: round(value) if self.whole or nearly_whole else value}


@dataclass(frozen=True)
class Scaled(ConfigPart):
    """A switch of theirs that multiplies by a power of d_model when on: our number is that power, or 1."""

    theirs: str | None  # None: there is no switch, and it is always on
    ours: str
    power: float
    default: bool = True
    width: str = "hidden_size"
    otherwise: str | None = None  # the switch that decides where theirs is absent

    def read(self, theirs: Json) -> Json:
        """Return the power of d_model, or 1."""
        default = self.default if self.otherwise is None else theirs.get(self.otherwise, self.default)
        on = self.theirs is None or theirs.get(self.theirs, default)
        return {self.ours: float(theirs[self.width]) ** self.power if on else 1.0}

    def write(self, config: ModelConfig) -> Json:
        """Return the switch, on or off."""
        return {} if self.theirs is None else {self.theirs: getattr(config, self.ours) != 1.0}


@dataclass(frozen=True)
class Cases(ConfigPart):
    """A few of their keys together decide a few of our fields: rows of (theirs, ours). The first that fits counts, either way."""

    defaults: Json  # the value of each key of theirs when it is absent or null
    rows: tuple[tuple[Json, Json], ...]  # None in ours: the config derives the value, and any value fits

    def read(self, theirs: Json) -> Json:
        """Return the fields of the first row that agrees with their keys."""
        stated = {
            key: default if theirs.get(key) is None else theirs[key] for key, default in self.defaults.items()
        }
        for row, ours in self.rows:
            if all(stated[key] == value for key, value in row.items()):
                return dict(ours)
        listed = ", ".join(f"{key} {value!r}" for key, value in stated.items())
        raise CheckpointError(f"config.json has {listed}: not supported together")

    def write(self, config: ModelConfig) -> Json:
        """Return the keys of the first row that agrees with our fields; none where no row does."""
        for row, ours in self.rows:
            if all(value in (None, getattr(config, name)) for name, value in ours.items()):
                return dict(row)
        return {}


@dataclass(frozen=True)
class Depths(ConfigPart):
    """Layers of an encoder and a decoder, equally many unless their second key says otherwise; or of an encoder alone."""

    encoder: str
    decoder: str
    alone: str = "EncoderModel"  # how the names of classes end that have no decoder

    def read(self, theirs: Json) -> Json:
        """Return one depth, or two."""
        if (theirs.get("architectures") or [""])[0].endswith(self.alone):
            return Field(self.encoder, "n_layers").read(theirs)
        decoder = Field(self.decoder, "n_layers", otherwise=self.encoder)
        return Field(self.encoder, "n_encoder_layers").read(theirs) | decoder.read(theirs)

    def write(self, config: ModelConfig) -> Json:
        """Return one key, and that there is no decoder; or both keys."""
        if config.family == "encoder":
            return {self.encoder: config.n_layers, "is_encoder_decoder": False}
        return {self.encoder: config.n_encoder_layers, self.decoder: config.n_layers}


@dataclass(frozen=True)
class SlidingWindows(ConfigPart):
    """Sliding windows: one width, and the layers that have it (by `layer_types`, by a pattern, all or none)."""

    pattern: int | None = None  # without layer_types, every pattern-th layer is full; None: no layer is
    default: int | None = None
    switch: str | None = None  # a key that must be true for there to be any window
    full_below: str | None = None  # a key with the number of first layers that are full
    below: int = 0  # and that number where the key is absent

    def read(self, theirs: Json) -> Json:
        """Return one width for all layers, a tuple with one per layer, or None."""
        width = theirs.get("sliding_window", self.default)
        layers = theirs["num_hidden_layers"]
        if not width or (self.switch is not None and not theirs.get(self.switch, False)):
            return {"window": None}
        if theirs.get("layer_types") is not None:
            sliding = [kind == "sliding_attention" for kind in theirs["layer_types"]]
        elif self.full_below is not None:
            sliding = [layer >= theirs.get(self.full_below, self.below) for layer in range(layers)]
        elif self.pattern is not None:
            every = theirs.get("sliding_window_pattern", self.pattern)
            sliding = [(layer + 1) % every != 0 for layer in range(layers)]
        else:
            sliding = [True] * layers
        if all(sliding) or not any(sliding):
            return {"window": width if any(sliding) else None}
        return {"window": tuple(width if slides else None for slides in sliding)}

    def write(self, config: ModelConfig) -> Json:
        """Return the width and the kind of each layer."""
        assert config.decoder is not None
        windows = config.decoder.windows
        sliding = [layer for layer, window in enumerate(windows) if window is not None]
        without = None if self.pattern is None else self.default
        written: Json = {"sliding_window": windows[sliding[0]] if sliding else without}
        if self.pattern is not None or self.switch is not None:
            written["layer_types"] = [
                "full_attention" if window is None else "sliding_attention" for window in windows
            ]
        if self.switch is not None:
            written[self.switch] = bool(sliding)
        if self.full_below is not None:
            written[self.full_below] = sliding[0] if sliding else len(windows)
        return written


@dataclass(frozen=True)
class LabelNames(ConfigPart):
    """The number of classes; written with names, so that other tools show them. Heads that need it read `count_labels`."""

    def write(self, config: ModelConfig) -> Json:
        """Return the names LABEL_0, LABEL_1, ..., which a model's own names replace."""
        if not config.n_classes:
            return {}
        names = {str(index): f"LABEL_{index}" for index in range(config.n_classes)}
        return {"id2label": names, "label2id": {name: int(index) for index, name in names.items()}}


def count_labels(theirs: Json) -> int:
    """Return how many classes config.json states; where old files keep two placeholder names, num_labels decides."""
    names, stated = theirs.get("id2label"), theirs.get("num_labels")
    placeholders = names is not None and all(name == f"LABEL_{index}" for index, name in names.items())
    if names and not (placeholders and isinstance(stated, int)):
        return len(names)
    return 2 if stated is None else int(stated)
