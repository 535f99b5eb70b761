"""Fields: how `config.json` and `ModelConfig` become each other, as reversible data.

Each part reads some keys of theirs into some fields of ours and writes them back. An architecture is a list of parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from clearhead.config import ModelConfig, RopeScaling
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
    names: Mapping[str, Any] | None = None  # their word -> our word; the first of several is written

    def read(self, theirs: Json) -> Json:
        """One field; their null counts as absent where there is a default."""
        value = theirs.get(self.theirs)
        if value is None:
            if isinstance(self.default, _Required):
                raise CheckpointError(f'config.json lacks "{self.theirs}", which says {self.ours}: it is not a complete checkpoint')
            value = self.default
        if self.names is not None and value is not None:
            if value not in self.names:
                raise CheckpointError(f'config.json has {self.theirs} "{value}": supported are {", ".join(map(str, self.names))}')
            value = self.names[value]
        return {self.ours: value}

    def write(self, config: ModelConfig) -> Json:
        """One key."""
        value = getattr(config, self.ours)
        if self.names is not None:
            value = next((theirs for theirs, ours in self.names.items() if ours == value), None)
        return {self.theirs: value}


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
class Says:
    """Keys that must have this value, or be absent: their other values are other computations, which we do not have."""

    values: Json
    write_them: bool = False

    def read(self, theirs: Json) -> Json:
        """Nothing, or an error."""
        for key, value in self.values.items():
            if key in theirs and theirs[key] != value:
                raise CheckpointError(f"config.json has {key} {theirs[key]!r}: only {value!r} is supported for this architecture")
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

    def read(self, theirs: Json) -> Json:
        """Their number, raised."""
        value = Field(self.theirs, self.ours, self.default).read(theirs)[self.ours]
        return {self.ours: float(value) ** self.power}

    def write(self, config: ModelConfig) -> Json:
        """Our number, lowered, and whole where it nearly is."""
        value = getattr(config, self.ours) ** (1 / self.power)
        return {self.theirs: round(value) if abs(value - round(value)) < 1e-6 * abs(value) else value}


@dataclass(frozen=True)
class Scaled:
    """A switch of theirs that multiplies by a power of d_model when on: our number is that, or 1."""

    theirs: str
    ours: str
    power: float
    default: bool
    width: str = "hidden_size"

    def read(self, theirs: Json) -> Json:
        """1, or the power."""
        on = theirs.get(self.theirs, self.default)
        return {self.ours: float(theirs[self.width]) ** self.power if on else 1.0}

    def write(self, config: ModelConfig) -> Json:
        """On or off."""
        return {self.theirs: getattr(config, self.ours) != 1.0}


SCALING_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
}
KEYS_BY_KIND = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}


@dataclass(frozen=True)
class Rope:
    """Rotary base, partial rotation and scaling, in the old keys (rope_theta, rope_scaling) or the new (rope_parameters)."""

    base: float = 10_000.0
    fraction: float = 1.0
    theta_keys: tuple[str, ...] = ("rope_theta", "rotary_emb_base")
    fraction_keys: tuple[str, ...] = ("partial_rotary_factor", "rotary_pct")

    def read(self, theirs: Json) -> Json:
        """Base, fraction, scaling."""
        stated = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
        return {
            "rope_base": float(_first(stated, theirs, self.theta_keys, self.base)),
            "rope_fraction": float(_first(stated, theirs, self.fraction_keys, self.fraction)),
            "rope_scaling": read_scaling(stated, theirs),
        }

    def write(self, config: ModelConfig) -> Json:
        """Both spellings: old readers know the one, new ones the other."""
        parameters = write_scaling(config, config.rope_base, config.rope_scaling)
        if config.rope_fraction != 1 or self.fraction != 1:
            parameters["partial_rotary_factor"] = config.rope_fraction
        return {"rope_theta": config.rope_base, "rope_parameters": parameters}


def read_scaling(stated: Json, theirs: Json) -> RopeScaling | None:
    """The scaling a config states, None for plain rotary positions."""
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind == "su":
        kind = "longrope"
    if kind in ("default", None):
        return None
    if kind not in KEYS_BY_KIND:
        raise CheckpointError(f'config.json has rope_type "{kind}": supported are default, {", ".join(KEYS_BY_KIND)}')
    values: Json = {"kind": kind}
    for key in KEYS_BY_KIND[kind]:
        if stated.get(key) is not None:
            value = stated[key]
            values[SCALING_KEYS[key]] = tuple(map(float, value)) if isinstance(value, list) else value
    trained = theirs.get("original_max_position_embeddings")
    if kind in ("longrope", "yarn", "llama3") and trained is not None:
        values["original_positions"] = trained
    return RopeScaling(**values)


def write_scaling(config: ModelConfig, base: float, scaling: RopeScaling | None) -> Json:
    """One entry of rope_parameters."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base}
    values: Json = {"rope_type": scaling.kind, "rope_theta": base}
    for key in KEYS_BY_KIND[scaling.kind]:
        value = getattr(scaling, SCALING_KEYS[key])
        if key == "original_max_position_embeddings" and value is None:
            value = config.max_positions
        if value is not None:
            values[key] = list(value) if isinstance(value, tuple) else value
    return values


def _first(stated: Json, theirs: Json, keys: tuple[str, ...], default: float) -> Any:
    for place in (stated, theirs):
        for key in keys:
            if place.get(key) is not None:
                return place[key]
    return default


@dataclass(frozen=True)
class Windows:
    """Sliding windows: one width, and which layers have it (by `layer_types`, by a pattern, all or none)."""

    pattern: int | None = None  # without layer_types: every pattern-th layer is full; None: all layers have the window
    default: int | None = None
    switch: str | None = None  # a key that must be true for there to be any window
    full_below: str | None = None  # a key with the number of first layers that are full

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
            windows = [width if layer >= theirs.get(self.full_below, 0) else None for layer in range(layers)]
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
        written: Json = {"sliding_window": next(iter(widths), None)}
        if self.pattern is not None or self.switch is not None:
            written["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
        if self.switch is not None:
            written[self.switch] = bool(widths)
        return written


@dataclass(frozen=True)
class Labels:
    """The number of classes, as id2label or num_labels; written with names, so that other tools show them."""

    default: int = 2
    values: Json = field(default_factory=dict)

    def read(self, theirs: Json) -> Json:
        """Nothing by itself: heads that need it ask `count`."""
        return {}

    def write(self, config: ModelConfig) -> Json:
        """Names LABEL_0, LABEL_1, ... unless the model brought its own."""
        if not config.n_classes:
            return {}
        names = {str(index): f"LABEL_{index}" for index in range(config.n_classes)}
        return {"id2label": names, "label2id": {name: int(index) for index, name in names.items()}}


def count_labels(theirs: Json) -> int:
    """How many classes config.json states."""
    if theirs.get("id2label"):
        return len(theirs["id2label"])
    return int(theirs.get("num_labels", 2))
