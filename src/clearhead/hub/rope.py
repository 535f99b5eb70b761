"""Fields of rotary positions: base, partial rotation and scaling, in the many spellings config.json has for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clearhead.config import ModelConfig, RopeScaling
from clearhead.hub.fields import ConfigPart, Json
from clearhead.hub.files import require

TRAINED = "original_max_position_embeddings"
SCALING_KEYS = {
    "factor": "factor",
    TRAINED: "original_positions",
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
    "llama3": ("factor", TRAINED, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", TRAINED, "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
    "longrope": ("factor", TRAINED, "attention_factor", "short_factor", "long_factor"),
}


@dataclass(frozen=True)
class Rope(ConfigPart):
    """Rotary base, partial rotation and scaling, in the old keys (rope_theta, rope_scaling) or the new (rope_parameters)."""

    base: float = 10_000.0
    fraction: float | None = (
        None  # of each head, where the key is absent; None: whole heads rotate, and there is no key
    )
    theta_keys: tuple[str, ...] = ("rope_theta", "rotary_emb_base")
    fraction_keys: tuple[str, ...] = ("partial_rotary_factor", "rotary_pct")

    def read(self, theirs: Json) -> Json:
        """Return base, fraction and scaling."""
        stated = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
        usual = 1.0 if self.fraction is None else self.fraction
        fraction = float(_first(stated, theirs, self.fraction_keys, usual))
        base = float(_first(stated, theirs, self.theta_keys, self.base))
        require(
            self.fraction is not None or fraction == 1,
            f"config.json has {self.fraction_keys[0]} {fraction}: this architecture rotates whole heads",
        )
        return {"rope_base": base, "rope_fraction": fraction, "rope_scaling": read_scaling(stated, theirs)}

    def write(self, config: ModelConfig) -> Json:
        """Return both spellings: old readers know the one, new ones the other."""
        parameters = write_scaling(config, config.rope_base, config.rope_scaling)
        written = {self.theta_keys[0]: config.rope_base, "rope_parameters": parameters}
        if self.fraction is not None:
            written[self.fraction_keys[0]] = parameters["partial_rotary_factor"] = config.rope_fraction
        if config.rope_scaling is not None:
            written["rope_scaling"] = parameters
        return written


@dataclass(frozen=True)
class TwoRopes(ConfigPart):
    """Layers with a window rotate by a base of their own, without scaling; old keys, or rope_parameters by kind of layer."""

    base: float
    local: float

    def read(self, theirs: Json) -> Json:
        """Return base, base of the layers with a window (None: all layers are alike) and scaling."""
        stated = theirs.get("rope_parameters") or {}
        full = stated.get("full_attention") or theirs.get("rope_scaling") or {}
        near = stated.get("sliding_attention") or {}
        base = float(_first(full, theirs, ("rope_theta",), self.base))
        old = {"rope_theta": theirs.get("rope_local_base_freq")}
        local = float(_first(near, old, ("rope_theta",), self.local))
        scaling, near_scaling = read_scaling(full, theirs), read_scaling(near, theirs)
        alike = (base, scaling) == (local, near_scaling)
        require(
            alike or near_scaling is None,
            "config.json scales the rotation of layers with a window: supported there is rope_type default",
        )
        return {"rope_base": base, "rope_local_base": None if alike else local, "rope_scaling": scaling}

    def write(self, config: ModelConfig) -> Json:
        """Return both spellings, as far as the old one goes."""
        full = near = write_scaling(config, config.rope_base, config.rope_scaling)
        if config.rope_local_base is not None:
            near = write_scaling(config, config.rope_local_base, None)
        return {
            "rope_theta": config.rope_base,
            "rope_local_base_freq": near["rope_theta"],
            "rope_parameters": {"full_attention": full, "sliding_attention": dict(near)},
        }


@dataclass(frozen=True)
class RopeSkips(ConfigPart):
    """Layers that do not rotate: a list with 0 for each of them and 1 for the others, or every n-th layer."""

    key: str
    interval_key: str
    interval: int

    def read(self, theirs: Json) -> Json:
        """Return the numbers of these layers, from 0."""
        every, layers = theirs.get(self.interval_key) or self.interval, theirs["num_hidden_layers"]
        rotates = theirs.get(self.key) or [(layer + 1) % every for layer in range(layers)]
        return {"rope_skips": tuple(layer for layer, yes in enumerate(rotates[:layers]) if not yes)}

    def write(self, config: ModelConfig) -> Json:
        """Return the list."""
        return {self.key: [int(layer not in config.rope_skips) for layer in range(config.n_layers)]}


def read_scaling(stated: Json, theirs: Json) -> RopeScaling | None:
    """Return the scaling a config states; None for plain rotary positions."""
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind == "su":
        kind = "longrope"
    if kind in ("default", None):
        return None
    supported = ", ".join(("default", *KEYS_BY_KIND))
    require(kind in KEYS_BY_KIND, f'config.json has rope_type "{kind}": supported are {supported}')
    keys = KEYS_BY_KIND[kind]
    given: Json = {key: stated[key] for key in keys if stated.get(key) is not None}
    if TRAINED in keys and theirs.get(TRAINED) is not None:
        given[TRAINED] = theirs[TRAINED]
    values: Json = {
        SCALING_KEYS[key]: tuple(map(float, value)) if isinstance(value, list) else value
        for key, value in given.items()
    }
    return RopeScaling(kind=kind, **values)


def write_scaling(config: ModelConfig, base: float, scaling: RopeScaling | None) -> Json:
    """Return one entry of rope_parameters."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base}
    values: Json = {"rope_type": scaling.kind, "rope_theta": base}
    for key in KEYS_BY_KIND[scaling.kind]:
        value = getattr(scaling, SCALING_KEYS[key])
        if key == TRAINED and value is None:
            value = config.max_positions
        if value is not None and not (key == "factor" and scaling.kind == "longrope" and value == 1):
            values[key] = list(value) if isinstance(value, tuple) else value
    return values


def _first(stated: Json, theirs: Json, keys: tuple[str, ...], default: float) -> Any:
    found = (place[key] for place in (stated, theirs) for key in keys if place.get(key) is not None)
    return next(found, default)
