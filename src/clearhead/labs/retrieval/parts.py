"""Parts of an index: blocks of passages with their vectors and words, read from files that are checked.

N passages, D width of a vector.
"""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

from clearhead.errors import CheckpointError, refuse, refusing
from clearhead.labs.retrieval.passages import IndexedPassage
from clearhead.labs.retrieval.words import Postings

PARTS = "parts"  # their folder
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class IndexPart:
    """A block of passages, read from its file."""

    vectors: Vectors  # N D, of length one
    postings: Postings
    rows: bytes  # a JSON object a line: text, line, name
    ends: NDArray[np.int64]  # N, where each ends

    def passage(self, number: int, file: str) -> IndexedPassage:
        """Return one passage."""
        start = int(self.ends[number - 1]) if number else 0
        return IndexedPassage(file=file, **json.loads(self.rows[start : int(self.ends[number])]))


def read_entry(folder: Path, entry: dict[str, Any]) -> bytes:
    """Return the bytes of a file that the manifest names, as they were written."""
    path = folder / PARTS / entry["name"]
    with refusing(f"{path} cannot be read: make the index again", CheckpointError):
        raw: bytes = path.read_bytes()
    refuse(
        zlib.crc32(raw) != entry["checksum"],
        f"{path} has changed since it was written: remove it and make the index again",
        CheckpointError,
    )
    return raw


def read_part(folder: Path, entry: dict[str, Any]) -> IndexPart:
    """Return a part that the manifest names."""
    arrays = load(read_entry(folder, entry))
    postings = Postings(*(arrays[f"postings.{key}"] for key in Postings._fields))
    return IndexPart(arrays["vectors"], postings, arrays["rows"].tobytes(), arrays["ends"])
