"""Fields of rotary positions: base, partial rotation and scaling, in the many spellings of config.json."""

from typing import Any

from clearhead.config import ModelConfig, RopeScaling
from clearhead.hub.fields import ConfigPart, Json
from clearhead.hub.files import refuse

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


def rope(
    base: float = 10_000.0,
    fraction: float | None = None,
    theta_keys: tuple[str, ...] = ("rope_theta", "rotary_emb_base"),
    fraction_keys: tuple[str, ...] = ("partial_rotary_factor", "rotary_pct"),
) -> ConfigPart:
    """Return the part for base, partial rotation and scaling, in old keys or new (rope_parameters).

    `fraction` is the part of each head that rotates, where the key is absent. None: whole heads rotate, and
    there is no key.
    """

    def read(theirs: Json) -> Json:
        stated = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
        part = float(_first(stated, theirs, fraction_keys, 1.0 if fraction is None else fraction))
        refuse(
            fraction is None and part != 1,
            f"config.json has {fraction_keys[0]} {part}: this architecture rotates whole heads",
        )
        return {
            "rope_base": float(_first(stated, theirs, theta_keys, base)),
            "rope_fraction": part,
            "rope_scaling": read_scaling(stated, theirs),
        }

    def write(config: ModelConfig) -> Json:
        parameters = write_scaling(config, config.rope_base, config.rope_scaling)
        # Old readers know the first key, new ones the second.
        written = {theta_keys[0]: config.rope_base, "rope_parameters": parameters}
        if fraction is not None:
            written[fraction_keys[0]] = parameters["partial_rotary_factor"] = config.rope_fraction
        if config.rope_scaling is not None:
            written["rope_scaling"] = parameters
        return written

    return ConfigPart(read, write)


def two_ropes(base: float, local: float) -> ConfigPart:
    """Return the part for layers with a window that rotate by a base of their own, without scaling."""

    def read(theirs: Json) -> Json:
        stated = theirs.get("rope_parameters") or {}
        full = stated.get("full_attention") or theirs.get("rope_scaling") or {}
        near = stated.get("sliding_attention") or {}
        old = {"rope_theta": theirs.get("rope_local_base_freq")}
        theta = float(_first(full, theirs, ("rope_theta",), base))
        near_theta = float(_first(near, old, ("rope_theta",), local))
        scaling, near_scaling = read_scaling(full, theirs), read_scaling(near, theirs)
        alike = (theta, scaling) == (near_theta, near_scaling)
        refuse(
            not alike and near_scaling is not None,
            "config.json scales the rotation of layers with a window: supported there is rope_type default",
        )
        return {
            "rope_base": theta,
            "rope_local_base": None if alike else near_theta,
            "rope_scaling": scaling,
        }

    def write(config: ModelConfig) -> Json:
        full = near = write_scaling(config, config.rope_base, config.rope_scaling)
        if config.rope_local_base is not None:
            near = write_scaling(config, config.rope_local_base, None)
        return {
            "rope_theta": config.rope_base,
            "rope_local_base_freq": near["rope_theta"],
            "rope_parameters": {"full_attention": full, "sliding_attention": dict(near)},
        }

    return ConfigPart(read, write)


def rope_skips(key: str, interval_key: str, interval: int) -> ConfigPart:
    """Return the part for layers that do not rotate: a list with 0 for each of them, or every n-th layer."""

    def read(theirs: Json) -> Json:
        every, layers = theirs.get(interval_key) or interval, theirs["num_hidden_layers"]
        rotates = theirs.get(key) or [(layer + 1) % every for layer in range(layers)]
        return {"rope_skips": tuple(layer for layer, yes in enumerate(rotates[:layers]) if not yes)}

    def write(config: ModelConfig) -> Json:
        return {key: [int(layer not in config.rope_skips) for layer in range(config.n_layers)]}

    return ConfigPart(read, write)


def read_scaling(stated: Json, theirs: Json) -> RopeScaling | None:
    """Return the scaling a config states; None for plain rotary positions."""
    named = stated.get("rope_type", stated.get("type", "default"))
    if named in ("default", None):
        return None
    kind: Any = "longrope" if named == "su" else named
    refuse(
        kind not in KEYS_BY_KIND,
        f'config.json has rope_type "{kind}": supported are {", ".join(("default", *KEYS_BY_KIND))}',
    )
    merged = stated if theirs.get(TRAINED) is None else {**stated, TRAINED: theirs[TRAINED]}
    given = {key: merged[key] for key in KEYS_BY_KIND[kind] if merged.get(key) is not None}
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
