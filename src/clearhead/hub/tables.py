"""Position tables whose size config.json implies and does not state: parts of a config, as in `fields`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clearhead.config import ModelConfig
from clearhead.errors import CheckpointError
from clearhead.hub.fields import ConfigPart, Json
from clearhead.hub.files import require


@dataclass(frozen=True)
class PositionsAfterPadding(ConfigPart):
    """A position table that starts at padding id + 1: the rows up to the padding id are never used."""

    rows: int  # max_position_embeddings where config.json does not say
    padding: int  # pad_token_id where config.json does not say
    counted: bool = True  # does max_position_embeddings count the unused rows?

    def read(self, theirs: Json) -> Json:
        """Return the number of unused rows and of the others."""
        padding = theirs.get("pad_token_id")
        offset = (self.padding if padding is None else padding) + 1
        rows = theirs.get("max_position_embeddings", self.rows)
        return {"position_offset": offset, "max_positions": rows - offset if self.counted else rows}

    def write(self, config: ModelConfig) -> Json:
        """Return the size of the table, and the padding id that the unused rows imply."""
        offset = config.position_offset
        require(offset >= 1, "position_offset is 0: this architecture skips a row of its table at least")
        rows = config.max_positions + offset if self.counted else config.max_positions
        return {"pad_token_id": offset - 1, "max_position_embeddings": rows}


@dataclass(frozen=True)
class Patches(ConfigPart):
    """Images cut into squares, with a class token before them: the position table has a row for each."""

    image: int
    patch: int

    def read(self, theirs: Json) -> Json:
        """Return both sizes, and the rows of the table they imply; one number stands for a square."""
        height, width = _pair(theirs.get("image_size", self.image))
        patch, other = _pair(theirs.get("patch_size", self.patch))
        stated = theirs.get("patch_size")
        require(patch == other >= 1, f"config.json has patch_size {stated!r}: only squares are supported")
        rows = (height // patch) * (width // patch) + 1
        return {
            "image_size": (height, width),
            "patch_size": patch,
            "class_token": True,
            "max_positions": rows,
        }

    def write(self, config: ModelConfig) -> Json:
        """Return one number for a square image, two for another."""
        assert config.image_size is not None
        height, width = config.image_size
        return {"image_size": height if height == width else [height, width], "patch_size": config.patch_size}


def _pair(size: Any) -> tuple[int, int]:
    match size:
        case int():
            return size, size
        case [int() as height, int() as width]:
            return height, width
    raise CheckpointError(f"config.json has a size {size!r}: it must be one whole number, or two")
