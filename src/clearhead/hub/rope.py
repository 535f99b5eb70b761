"""Fields of rotary positions: base, partial rotation and scaling, in the many spellings of config.json."""

from typing import Any

from clearhead.core.config import ModelConfig, RopeScaling
from clearhead.hub.fields import ConfigPart, Json
from clearhead.hub.files import refuse, refuse_key

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
    theta_key: str = "rope_theta",
    fraction_key: str = "partial_rotary_factor",
    kinds: tuple[str, ...] = tuple(KEYS_BY_KIND),
    trained: int | None = None,
    usual: Json | None = None,
) -> ConfigPart:
    """Return the part for base, partial rotation and scaling, in old keys (rope_scaling) or new.

    Args:
        base: the base where config.json does not state it.
        fraction: the part of each head that rotates, where the key is absent. None: whole heads rotate, and
            there is no key.
        theta_key: the key of the base outside rope_parameters.
        fraction_key: the key of the fraction outside rope_parameters.
        kinds: scalings that this architecture has.
        trained: the length before scaling, where config.json does not state it; None: the context's.
        usual: the rope_parameters where config.json has none; None: no scaling.
    """

    def read(theirs: Json) -> Json:
        parameters = theirs.get("rope_parameters")
        stated = theirs.get("rope_scaling") or (usual if parameters is None else parameters) or {}
        whole = 1.0 if fraction is None else fraction
        part = stated.get("partial_rotary_factor", theirs.get(fraction_key, whole))
        part = 1.0 if part is None else float(part)
        refuse_key(
            fraction is None and part != 1, fraction_key, part, "this architecture rotates whole heads"
        )
        return {
            "rope_base": _base(stated, theirs, theta_key, base),
            "rope_fraction": part,
            "rope_scaling": read_scaling(stated, theirs, kinds, trained),
        }

    def write(config: ModelConfig) -> Json:
        parameters = write_scaling(config, config.rope_base, config.rope_scaling)
        # Old readers know the first key, new ones the second.
        written = {theta_key: config.rope_base, "rope_parameters": parameters}
        if fraction is not None:
            written[fraction_key] = parameters["partial_rotary_factor"] = config.rope_fraction
        if config.rope_scaling is not None:
            written["rope_scaling"] = parameters
            if trained is not None:
                written[TRAINED] = parameters[TRAINED]
        return written

    return ConfigPart(read, write)


def two_ropes(
    base: float,
    local: float,
    theta_key: str = "rope_theta",
    local_key: str | None = "rope_local_base_freq",
    scales_both: bool = False,
) -> ConfigPart:
    """Return the part for layers with a window that rotate by a base of their own, without scaling.

    `theta_key` and `local_key` are the keys of both bases outside rope_parameters; None: there is no such
    key. With `scales_both`, rope_scaling is for layers with a window too.
    """

    def read(theirs: Json) -> Json:
        stated = theirs.get("rope_parameters") or {"full_attention": {"rope_type": "default"}}
        full = {**(stated.get("full_attention") or {}), **(theirs.get("rope_scaling") or {})}
        near = {**(stated.get("sliding_attention") or {})}
        near |= (theirs.get("rope_scaling") or {}) if scales_both else {}
        theta = _base(full, theirs, theta_key, base)
        near_theta = _base(near, theirs, local_key, local)
        scaling, near_scaling = read_scaling(full, theirs), read_scaling(near, theirs)
        part = full.get("partial_rotary_factor", 1), near.get("partial_rotary_factor", 1)
        refuse_key(part != (1, 1), "partial_rotary_factor", part, "only 1 is supported here")
        alike = (theta, scaling) == (near_theta, near_scaling)
        refuse(
            not alike and near_scaling is not None,
            "config.json scales the rotation of layers with a window: supported there is rope_type default",
        )
        return {"rope_base": theta, "rope_local_base": None if alike else near_theta, "rope_scaling": scaling}

    def write(config: ModelConfig) -> Json:
        full = near = write_scaling(config, config.rope_base, config.rope_scaling)
        if config.rope_local_base is not None:
            near = write_scaling(config, config.rope_local_base, None)
        return {
            theta_key: config.rope_base,
            **({} if local_key is None else {local_key: near["rope_theta"]}),
            "rope_parameters": {"full_attention": full, "sliding_attention": dict(near)},
        }

    return ConfigPart(read, write)


def read_scaling(
    stated: Json, theirs: Json, kinds: tuple[str, ...] = tuple(KEYS_BY_KIND), usual: int | None = None
) -> RopeScaling | None:
    """Return the scaling a config states, of one of the `kinds`; None for plain rotary positions.

    `usual` is the trained length where config.json does not state it; None: what `stated` says.
    """
    named = stated.get("rope_type", stated.get("type", "default"))
    if named in ("default", None):
        return None
    kind: Any = "longrope" if named == "su" else named
    refuse_key(kind not in kinds, "rope_type", kind, f"supported are {', '.join(('default', *kinds))}")
    trained = theirs.get(TRAINED, usual)
    refuse_key(isinstance(trained, int) and trained < 1, TRAINED, trained, "it must be 1 at least")
    merged = stated if trained is None else {**stated, TRAINED: trained}
    factorless = kind != "longrope" and merged.get("factor") is None
    refuse(factorless, f"config.json has rope_type {kind} and no factor: state it")
    # transformers reads these so: 0 stands for the usual beta, null for false.
    merged = {key: value or None if key.startswith("beta_") else value for key, value in merged.items()}
    merged |= {"truncate": bool(merged["truncate"])} if "truncate" in merged else {}
    keys = {key: merged[key] for key in KEYS_BY_KIND[kind] if merged.get(key) is not None}
    values: Json = {
        SCALING_KEYS[key]: tuple(map(float, value)) if isinstance(value, list) else value
        for key, value in keys.items()
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


def _base(stated: Json, theirs: Json, key: str | None, default: float) -> float:
    outside = None if key is None else theirs.get(key)
    bases = (value for value in (stated.get("rope_theta"), outside) if value is not None)
    return float(next(bases, default))
