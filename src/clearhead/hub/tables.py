"""Position tables whose size config.json implies and does not state: parts of a config, as in `fields`."""

from __future__ import annotations

from typing import Any

from clearhead.config import ModelConfig
from clearhead.errors import CheckpointError
from clearhead.hub.fields import ConfigPart, Json
from clearhead.hub.files import require


def positions_after_padding(rows: int, padding: int, counted: bool = True) -> ConfigPart:
    """Return the part for a position table that starts at padding id + 1; the rows before are never used.

    Args:
        rows: max_position_embeddings, where config.json does not say.
        padding: pad_token_id, where config.json does not say.
        counted: whether max_position_embeddings counts the unused rows.
    """

    def read(theirs: Json) -> Json:
        stated, size = theirs.get("pad_token_id"), theirs.get("max_position_embeddings", rows)
        offset = (padding if stated is None else stated) + 1
        return {"position_offset": offset, "max_positions": size - offset if counted else size}

    def write(config: ModelConfig) -> Json:
        offset = config.position_offset
        require(offset >= 1, "position_offset is 0: this architecture skips a row of its table at least")
        size = config.max_positions + offset if counted else config.max_positions
        return {"pad_token_id": offset - 1, "max_position_embeddings": size}

    return ConfigPart(read, write)


def patches(image: int, patch: int) -> ConfigPart:
    """Return the part for images cut into patches, with a class token: each has a row of the table."""

    def read(theirs: Json) -> Json:
        height, width = _pair(theirs.get("image_size", image))
        side, other = _pair(theirs.get("patch_size", patch))
        stated = theirs.get("patch_size")
        require(side == other >= 1, f"config.json has patch_size {stated!r}: only squares are supported")
        rows = (height // side) * (width // side) + 1
        return {"image_size": (height, width), "patch_size": side, "class_token": True, "max_positions": rows}

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
