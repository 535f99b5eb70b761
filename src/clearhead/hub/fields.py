"""Fields: how `config.json` and `ModelConfig` become each other, as reversible data.

A part is two functions: one reads some keys of theirs into some fields of ours, the other writes them back.
An architecture is a list of parts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.core.config import MOST_LAYERS, ModelConfig
from clearhead.errors import CheckpointError
from clearhead.hub.files import refuse, refuse_key

Json = dict[str, Any]
REQUIRED = object()
ONLY = "only {} is supported for this architecture"
WHOLE = "only hidden_size / num_attention_heads is supported"

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class ConfigPart:
    """One entry of a config, both ways."""

    read: Callable[[Json], Json]  # config.json -> fields of ours
    write: Callable[[ModelConfig], Json]  # our config -> keys of theirs


def field(
    theirs: str,
    ours: str,
    default: Any = REQUIRED,
    names: Mapping[Any, Any] | None = None,
    least: int | None = None,
    null: bool = False,
    otherwise: str | None = None,
) -> ConfigPart:
    """Return the part for a key of theirs that holds the value of a field of ours.

    Args:
        theirs: their key.
        ours: our field.
        default: the value when the key is absent; without one, the key is required.
        names: their word -> our word; the first of several is written.
        least: the smallest number that this architecture can have.
        null: their null is a value of its own, and not the same as an absent key.
        otherwise: the key that holds the value where theirs is absent.
    """

    def checked(value: Any) -> Any:
        few = least is not None and value is not None and value < least
        refuse_key(few, theirs, value, f"this architecture needs {least} at least")
        return value

    def read(config_json: Json) -> Json:
        value = config_json.get(theirs)
        if value is None and otherwise is not None:
            value = config_json.get(otherwise)
        if value is None and not (null and theirs in config_json):
            value = default
        refuse(
            value is REQUIRED,
            f'config.json lacks "{theirs}", which says {ours}: it is not a complete checkpoint',
        )
        if names is not None and value is not None:
            refuse_key(value not in names, theirs, value, f"supported are {', '.join(map(str, names))}")
            value = names[value]
        return {ours: checked(value)}

    def write(config: ModelConfig) -> Json:
        value = getattr(config, ours)
        if names is not None:
            value = next((word for word, name in names.items() if name == value), None)
        return {theirs: checked(value)}

    return ConfigPart(read, write)


# The usual key of config.json for fields of ours; any other has our own name, or one that a table states.
KEYS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_head": "head_dim",
    "d_ff": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout",
    "feedforward_dropout": "activation_dropout",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
    "n_experts": "num_local_experts",
    "n_active_experts": "num_experts_per_tok",
}


def keys(names: Mapping[str, str] | None = None, /, **defaults: Any) -> tuple[ConfigPart, ...]:
    """Return the parts for fields of ours with their values where config.json lacks the key.

    `names` has the keys that are not those of `KEYS`.
    """
    known = {**KEYS, **(names or {})}
    return tuple(
        field(known.get(ours, ours), ours, default, ACTIVATIONS if ours == "activation" else None)
        for ours, default in defaults.items()
    )


def fixed(
    ours: Mapping[str, Any] | None = None,
    written: Mapping[str, Any] | None = None,
    only: Mapping[str, Any] | None = None,
) -> ConfigPart:
    """Return the part for what never varies in this architecture.

    Args:
        ours: fields that config.json does not mention.
        written: keys that we write for other readers, because their defaults do not fit every model.
        only: keys that must have this value, or be null or absent: we compute nothing else.
    """

    def read(config_json: Json) -> Json:
        for key, value in (only or {}).items():
            stated = config_json.get(key)
            refuse_key(stated not in (None, value), key, stated, ONLY.format(repr(value)))
        return dict(ours or {})

    return ConfigPart(read, lambda config: dict(written or {}))


def of_class(name: str, part: ConfigPart) -> ConfigPart:
    """Return the part for what one class alone reads, from a key that another part writes."""
    return ConfigPart(
        lambda config_json: part.read(config_json) if config_json.get("architectures") == [name] else {},
        lambda config: {},
    )


def power(
    theirs: str, ours: str, exponent: float, default: Any = REQUIRED, whole: bool = False
) -> ConfigPart:
    """Return the part for a field that is their number to a power.

    For example, query_pre_attn_scalar 256 is attention_scale 256^-1/2. With `whole`, their number must be a
    whole one; otherwise it is written as one where it nearly is.
    """
    stated = field(theirs, ours, default)

    def write(config: ModelConfig) -> Json:
        value = getattr(config, ours) ** (1 / exponent)
        nearly_whole = abs(value - round(value)) < 1e-6 * abs(value)
        return {theirs: round(value) if whole or nearly_whole else value}

    return ConfigPart(lambda config_json: {ours: float(stated.read(config_json)[ours]) ** exponent}, write)


def scaled(
    theirs: str | None,
    ours: str,
    exponent: float,
    default: bool = True,
    width: str = "hidden_size",
    otherwise: str | None = None,
) -> ConfigPart:
    """Return the part for a switch of theirs: on, our number is a power of d_model; off, it is 1.

    Without `theirs` there is no switch, and it is always on; `otherwise` is the switch that decides where
    theirs is absent.
    """

    def read(config_json: Json) -> Json:
        usual = default if otherwise is None else config_json.get(otherwise, default)
        on = theirs is None or config_json.get(theirs, usual)
        return {ours: float(config_json[width]) ** exponent if on else 1.0}

    return ConfigPart(read, lambda config: {} if theirs is None else {theirs: getattr(config, ours) != 1.0})


def cases(defaults: Json, *rows: tuple[Json, Json]) -> ConfigPart:
    """Return the part for keys of theirs that together decide fields of ours: rows of (theirs, ours).

    The first row that fits counts, either way. `defaults` are the values of keys that are absent or null. A
    field that is None in a row is derived by the config: any value of it fits.
    """

    def read(config_json: Json) -> Json:
        stated = {
            **defaults,
            **{key: config_json[key] for key in defaults if config_json.get(key) is not None},
        }
        matching = next((ours for theirs, ours in rows if theirs.items() <= stated.items()), None)
        listed = ", ".join(f"{key} {value!r}" for key, value in stated.items())
        refuse(matching is None, f"config.json has {listed}: not supported together")
        return dict(matching or {})

    def write(config: ModelConfig) -> Json:
        fitting = (
            theirs
            for theirs, ours in rows
            if all(value in (None, getattr(config, name)) for name, value in ours.items())
        )
        return dict(next(fitting, {}))

    return ConfigPart(read, write)


def _read_whole_heads(config_json: Json) -> Json:
    stated, heads = config_json.get("head_dim"), config_json.get("num_attention_heads")
    other = stated and heads and stated != config_json["hidden_size"] // heads
    refuse_key(other, "head_dim", stated, WHOLE)
    return {}


# For architectures that have no key for the width of a head, of which transformers heeds one in parts.
WHOLE_HEADS = ConfigPart(_read_whole_heads, lambda config: {})


def positions_after_padding(rows: int, padding: int, counted: bool = True, stated: bool = True) -> ConfigPart:
    """Return the part for a position table that starts at padding id + 1; the rows before are never used.

    Args:
        rows: max_position_embeddings, where config.json does not say.
        padding: pad_token_id, where config.json does not say.
        counted: whether max_position_embeddings counts the unused rows.
        stated: whether pad_token_id decides; else the padding is always `padding`.
    """

    def read(config_json: Json) -> Json:
        named, size = config_json.get("pad_token_id"), config_json.get("max_position_embeddings", rows)
        offset = (padding if named is None or not stated else named) + 1
        return {"position_offset": offset, "max_positions": size - offset if counted else size}

    def write(config: ModelConfig) -> Json:
        offset = config.position_offset
        refuse(offset < 1, "position_offset is 0: this architecture skips a row of its table at least")
        size = config.max_positions + offset if counted else config.max_positions
        return {"pad_token_id": offset - 1, "max_position_embeddings": size}

    return ConfigPart(read, write)


def patches(image: int, patch: int, class_token: bool = True, cut: bool = False) -> ConfigPart:
    """Return the part for images cut into patches: each, and a class token, has a row of the table.

    With `cut`, pixels beyond the last whole patch are not read.
    """

    def read(config_json: Json) -> Json:
        height, width = _pair(config_json.get("image_size", image))
        side, other = _pair(config_json.get("patch_size", patch))
        square = side == other >= 1
        refuse_key(not square, "patch_size", config_json.get("patch_size"), "only squares are supported")
        whole = (height - height % side, width - width % side)
        return {
            "image_size": whole if cut else (height, width),
            "patch_size": side,
            "class_token": class_token,
            "max_positions": (height // side) * (width // side) + class_token,
        }

    def write(config: ModelConfig) -> Json:
        assert config.image_size is not None
        height, width = config.image_size
        return {"image_size": height if height == width else [height, width], "patch_size": config.patch_size}

    return ConfigPart(read, write)


def _pair(size: Any) -> tuple[int, int]:
    match size:
        case int():
            return size, size
        case [int() as height, int() as width]:
            return height, width
    raise CheckpointError(f"config.json has a size {size!r}: it must be one whole number, or two")


def _write_labels(config: ModelConfig) -> Json:
    if not config.n_classes:
        return {}
    names = {str(index): f"LABEL_{index}" for index in range(config.n_classes)}
    return {"id2label": names, "label2id": {name: int(index) for index, name in names.items()}}


# Names of classes for other tools, until a model brings its own; `count_labels` reads them.
LABELS = ConfigPart(lambda config_json: {}, _write_labels)


def count_labels(config_json: Json) -> int:
    """Return how many classes config.json states; with placeholder names, num_labels decides."""
    names, stated = config_json.get("id2label"), config_json.get("num_labels")
    placeholders = names is not None and all(name == f"LABEL_{index}" for index, name in names.items())
    if names and not (placeholders and isinstance(stated, int)):
        return len(names)
    return 2 if stated is None else int(stated)


# Fields that differ from layer to layer ---------------------------------------------------------------------

SLIDING, FULL = "sliding_attention", "full_attention"  # words of `layer_types`


def count_layers(config_json: Json) -> int:
    """Return the number of layers that config.json states."""
    layers = int(config_json["num_hidden_layers"])
    refuse_key(layers > MOST_LAYERS, "num_hidden_layers", layers, f"{MOST_LAYERS:,} is the most")
    return layers


def checked_layer_types(types: Iterable[str], known: tuple[str, ...] = (SLIDING, FULL)) -> None:
    """Refuse `layer_types` that are not among the known."""
    unknown = sorted({*types} - {*known})
    refuse_key(unknown, "layer_types", unknown[:1], f"only {' and '.join(known)} are supported")


def _layer_types(windows: Iterable[int | None]) -> list[str]:
    return [FULL if window is None else SLIDING for window in windows]


def rope_skips(key: str, interval_key: str, interval: int) -> ConfigPart:
    """Return the part for layers that do not rotate: a list with 0 for each of them, or every n-th layer."""

    def read(theirs: Json) -> Json:
        every, layers = theirs.get(interval_key) or interval, count_layers(theirs)
        rotates = theirs.get(key) or [(layer + 1) % every for layer in range(layers)]
        return {"rope_skips": tuple(layer for layer, yes in enumerate(rotates[:layers]) if not yes)}

    def write(config: ModelConfig) -> Json:
        return {key: [int(layer not in config.rope_skips) for layer in range(config.n_layers)]}

    return ConfigPart(read, write)


def sliding_windows(
    pattern: int | None = None,
    default: int | None = None,
    switch: str | None = None,
    full_below: str | None = None,
    below: int = 0,
    pattern_key: str | None = None,
    skips: ConfigPart | None = None,
) -> ConfigPart:
    """Return the part for sliding windows: one width, and the layers that have it.

    Args:
        pattern: where config.json has no `layer_types`, every pattern-th layer is full; None: no layer is.
        default: the width where config.json does not state it.
        switch: a key that must be true for there to be any window.
        full_below: a key with the number of first layers that are full.
        below: that number where the key is absent.
        pattern_key: a key with the pattern.
        skips: the part with the layers that do not rotate: those have the window. With it, `layer_types`
            need no switch.
    """
    varies = pattern is not None or switch is not None  # else `layer_types` has nothing to say

    def slides_by_default(config_json: Json, layer: int) -> bool:
        if skips is not None:
            return layer in skips.read(config_json)["rope_skips"]
        if full_below is not None:
            return bool(layer >= config_json.get(full_below, below))
        every = config_json.get(pattern_key, pattern) if pattern_key is not None else pattern
        return every is None or (layer + 1) % every != 0

    def read(config_json: Json) -> Json:
        width, kinds = config_json.get("sliding_window", default), config_json.get("layer_types")
        if switch is not None and (skips is None or kinds is None) and not config_json.get(switch, False):
            width = None
        refuse_key(width is not None and width < 1, "sliding_window", width, "it must be 1 at least, or null")
        checked_layer_types(kinds or ())
        if kinds is not None:
            slides = [kind == SLIDING for kind in kinds]
            other = not all(slides) and not varies if width is not None else any(slides)
            refuse_key(other, "sliding_window", width, "layer_types say otherwise: leave one of them out")
        else:
            slides = [
                width is not None and slides_by_default(config_json, layer)
                for layer in range(count_layers(config_json))
            ]
        if all(slides) or not any(slides):
            return {"window": width if any(slides) else None}
        return {"window": tuple(width if yes else None for yes in slides)}

    def write(config: ModelConfig) -> Json:
        assert config.decoder is not None
        windows = config.decoder.windows
        sliding = [layer for layer, window in enumerate(windows) if window is not None]
        without = None if pattern is None else default
        written: Json = {"sliding_window": windows[sliding[0]] if sliding else without}
        if varies:
            written["layer_types"] = _layer_types(windows)
        if switch is not None:
            written[switch] = bool(sliding)
        if full_below is not None:
            written[full_below] = sliding[0] if sliding else len(windows)
        return written

    return ConfigPart(read, write)


def _read_near_and_far(config_json: Json) -> Json:
    half = config_json.get("sliding_window")  # counts before local_attention
    half = config_json.get("local_attention", 128) // 2 if half is None else half
    refuse(half < 1, f"config.json has a window of {half} to each side: it must be 1 at least")
    often = config_json.get("global_attn_every_n_layers", 3)
    kinds = config_json.get("layer_types") or [
        SLIDING if layer % often else FULL for layer in range(count_layers(config_json))
    ]
    checked_layer_types(kinds)
    windows = tuple(half + 1 if kind == SLIDING else None for kind in kinds)
    return {"window": windows if any(windows) else None}


def _write_near_and_far(config: ModelConfig) -> Json:
    windows = config.main.windows
    sizes = [window for window in windows if window is not None]
    both = 2 * (sizes[0] - 1) if sizes else 128
    return {"local_attention": both, "layer_types": _layer_types(windows)}


# For an encoder whose layers see all, or half of `local_attention` to each side.
NEAR_AND_FAR = ConfigPart(_read_near_and_far, _write_near_and_far)
