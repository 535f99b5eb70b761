"""Fields: how `config.json` and `ModelConfig` become each other, as reversible data.

A part is two functions: one reads some keys of theirs into some fields of ours, the other writes them back.
An architecture is a list of parts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.core.config import ModelConfig
from clearhead.errors import CheckpointError
from clearhead.hub.files import refuse

Json = dict[str, Any]
REQUIRED = object()

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
    """One piece of a config, both ways."""

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
        refuse(
            least is not None and value < least,
            f"config.json has {theirs} {value}: this architecture needs {least} at least",
        )
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
            refuse(
                value not in names,
                f'config.json has {theirs} "{value}": supported are {", ".join(map(str, names))}',
            )
            value = names[value]
        return {ours: checked(value)}

    def write(config: ModelConfig) -> Json:
        value = getattr(config, ours)
        if names is not None:
            value = next((word for word, name in names.items() if name == value), None)
        return {theirs: checked(value)}

    return ConfigPart(read, write)


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
            refuse(
                stated not in (None, value),
                f"config.json has {key} {stated!r}: only {value!r} is supported for this architecture",
            )
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
        found = next((ours for theirs, ours in rows if theirs.items() <= stated.items()), None)
        listed = ", ".join(f"{key} {value!r}" for key, value in stated.items())
        refuse(found is None, f"config.json has {listed}: not supported together")
        return dict(found or {})

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
    refuse(
        stated and heads and stated != config_json["hidden_size"] // heads,
        f"config.json has head_dim {stated}: only hidden_size / num_attention_heads is supported",
    )
    return {}


# For architectures that have no key for the width of a head, of which transformers heeds one in places.
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
        refuse(
            not side == other >= 1,
            f"config.json has patch_size {config_json.get('patch_size')!r}: only squares are supported",
        )
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
    """Return how many classes config.json states; beside placeholder names, num_labels decides."""
    names, stated = config_json.get("id2label"), config_json.get("num_labels")
    placeholders = names is not None and all(name == f"LABEL_{index}" for index, name in names.items())
    if names and not (placeholders and isinstance(stated, int)):
        return len(names)
    return 2 if stated is None else int(stated)
