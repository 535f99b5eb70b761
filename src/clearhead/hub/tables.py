"""Tables of positions whose size config.json does not state and only implies: parts of a config, as in `fields`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clearhead.config import ModelConfig
from clearhead.errors import CheckpointError
from clearhead.hub.fields import Json


@dataclass(frozen=True)
class PositionsAfterPadding:
    """A table of positions whose first rows, up to that of the padding id, are no position: the first token's is the next."""

    rows: int  # where config.json does not say
    padding: int
    skipped: bool = True  # does max_position_embeddings count the rows that are skipped?

    def read(self, theirs: Json) -> Json:
        """The rows to skip, and how many are left."""
        padding = theirs.get("pad_token_id")
        offset = (self.padding if padding is None else padding) + 1
        return {
            "position_offset": offset,
            "max_positions": theirs.get("max_position_embeddings", self.rows) - offset * self.skipped,
        }

    def write(self, config: ModelConfig) -> Json:
        """All rows, and the padding id that the skipped ones imply."""
        offset = config.position_offset
        if offset < 1:
            raise CheckpointError("position_offset is 0: this architecture skips a row of its table at least")
        return {
            "pad_token_id": offset - 1,
            "max_position_embeddings": config.max_positions + offset * self.skipped,
        }


@dataclass(frozen=True)
class Patches:
    """Images cut into squares, a class token before them, a row of the position table for each: all from two sizes."""

    image: int
    patch: int

    def read(self, theirs: Json) -> Json:
        """Sizes, and the rows of the table they imply; one number stands for a square."""
        height, width = _pair(theirs.get("image_size", self.image))
        patch, other = _pair(theirs.get("patch_size", self.patch))
        if patch != other or patch < 1:
            raise CheckpointError(
                f"config.json has patch_size {theirs['patch_size']!r}: only squares are supported"
            )
        rows = (height // patch) * (width // patch) + 1
        return {
            "image_size": (height, width),
            "patch_size": patch,
            "class_token": True,
            "max_positions": rows,
        }

    def write(self, config: ModelConfig) -> Json:
        """One number for a square image, two for another."""
        assert config.image_size is not None
        height, width = config.image_size
        return {"image_size": height if height == width else [height, width], "patch_size": config.patch_size}


def _pair(size: Any) -> tuple[int, int]:
    values = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list | tuple) else ()
    if len(values) != 2 or not all(isinstance(value, int) for value in values):
        raise CheckpointError(f"config.json has a size {size!r}: it must be one whole number, or two")
    return values[0], values[1]
