"""Tokenizers that come with a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from clearhead.errors import CheckpointError


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model directory, or None where it has none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} is no tokenizer: {error}") from None
