"""Fields of rotary positions: base, partial rotation and scaling, in the many spellings config.json has for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clearhead.config import ModelConfig, RopeScaling
from clearhead.errors import CheckpointError
from clearhead.hub.fields import Json

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
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    ),
}


@dataclass(frozen=True)
class Rope:
    """Rotary base, partial rotation and scaling, in the old keys (rope_theta, rope_scaling) or the new (rope_parameters)."""

    base: float = 10_000.0
    fraction: float | None = (
        None  # of each head, where the key is absent; None: there is no such key, and all of it turns
    )
    theta_keys: tuple[str, ...] = ("rope_theta", "rotary_emb_base")
    fraction_keys: tuple[str, ...] = ("partial_rotary_factor", "rotary_pct")

    def read(self, theirs: Json) -> Json:
        """Base, fraction, scaling."""
        stated = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
        return {
            "rope_base": float(_first(stated, theirs, self.theta_keys, self.base)),
            "rope_fraction": self._read_fraction(stated, theirs),
            "rope_scaling": read_scaling(stated, theirs),
        }

    def _read_fraction(self, stated: Json, theirs: Json) -> float:
        fraction = float(
            _first(stated, theirs, self.fraction_keys, 1.0 if self.fraction is None else self.fraction)
        )
        if self.fraction is None and fraction != 1:
            raise CheckpointError(
                f"config.json has {self.fraction_keys[0]} {fraction}: this architecture rotates whole heads"
            )
        return fraction

    def write(self, config: ModelConfig) -> Json:
        """Both spellings: old readers know the one, new ones the other."""
        parameters = write_scaling(config, config.rope_base, config.rope_scaling)
        written = {self.theta_keys[0]: config.rope_base, "rope_parameters": parameters}
        if self.fraction is not None:
            written[self.fraction_keys[0]] = parameters["partial_rotary_factor"] = config.rope_fraction
        if config.rope_scaling is not None:
            written["rope_scaling"] = parameters
        return written


@dataclass(frozen=True)
class TwoRopes:
    """Layers with a window rotate by a base of their own, without scaling; old keys, or rope_parameters by kind of layer."""

    base: float
    local: float

    def read(self, theirs: Json) -> Json:
        """Base, base of the layers with a window (None: all layers are alike), scaling."""
        stated = theirs.get("rope_parameters") or {}
        full = stated.get("full_attention") or theirs.get("rope_scaling") or {}
        near = stated.get("sliding_attention") or {}
        base = float(_first(full, theirs, ("rope_theta",), self.base))
        local = float(
            _first(near, {"rope_theta": theirs.get("rope_local_base_freq")}, ("rope_theta",), self.local)
        )
        scaling, near_scaling = read_scaling(full, theirs), read_scaling(near, theirs)
        if (base, scaling) == (local, near_scaling):
            return {"rope_base": base, "rope_local_base": None, "rope_scaling": scaling}
        if near_scaling is not None:
            raise CheckpointError(
                "config.json scales the rotation of layers with a window: supported there is rope_type default"
            )
        return {"rope_base": base, "rope_local_base": local, "rope_scaling": scaling}

    def write(self, config: ModelConfig) -> Json:
        """Both spellings, as far as the old one goes."""
        full = write_scaling(config, config.rope_base, config.rope_scaling)
        near = (
            dict(full)
            if config.rope_local_base is None
            else write_scaling(config, config.rope_local_base, None)
        )
        return {
            "rope_theta": config.rope_base,
            "rope_local_base_freq": near["rope_theta"],
            "rope_parameters": {"full_attention": full, "sliding_attention": near},
        }


def read_scaling(stated: Json, theirs: Json) -> RopeScaling | None:
    """The scaling a config states, None for plain rotary positions."""
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind == "su":
        kind = "longrope"
    if kind in ("default", None):
        return None
    if kind not in KEYS_BY_KIND:
        raise CheckpointError(
            f'config.json has rope_type "{kind}": supported are default, {", ".join(KEYS_BY_KIND)}'
        )
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
        if value is not None and not (key == "factor" and scaling.kind == "longrope" and value == 1):
            values[key] = list(value) if isinstance(value, tuple) else value
    return values


def _first(stated: Json, theirs: Json, keys: tuple[str, ...], default: float) -> Any:
    for place in (stated, theirs):
        for key in keys:
            if place.get(key) is not None:
                return place[key]
    return default


@dataclass(frozen=True)
class Skips:
    """Layers that rotate nothing: a list with 0 for each of them and 1 for the others, or every so many layers one."""

    key: str
    interval_key: str
    interval: int

    def read(self, theirs: Json) -> Json:
        """Their numbers, from 0."""
        every = theirs.get(self.interval_key) or self.interval
        rotates = theirs.get(self.key) or [
            (layer + 1) % every for layer in range(theirs["num_hidden_layers"])
        ]
        return {
            "rope_skips": tuple(
                layer for layer, yes in enumerate(rotates[: theirs["num_hidden_layers"]]) if not yes
            )
        }

    def write(self, config: ModelConfig) -> Json:
        """The list."""
        return {self.key: [int(layer not in config.rope_skips) for layer in range(config.n_layers)]}
