"""A model with all that belongs to it: tokenizer, labels, generation defaults. What `load` gives and `save` writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from clearhead.config import ModelConfig
from clearhead.errors import CheckpointError, MissingExtraError
from clearhead.hub.checkpoint import Description, describe, exported_config, load_model, save_model
from clearhead.hub.files import read_json, whole_folder, write_json
from clearhead.hub.tokenizer import load_tokenizer
from clearhead.model.transformer import Transformer

SHARD_SIZE = 5_000_000_000


@dataclass
class Loaded:
    """A model ready to use."""

    model: Transformer
    tokenizer: Tokenizer | None = None
    generation: dict[str, Any] = field(default_factory=dict)  # defaults: special token ids, sampling
    description: Description | None = None  # the config.json it came with
    folder: Path | None = None

    @property
    def config(self) -> ModelConfig:
        """What the model is."""
        return self.model.config

    def save(self, folder: str | Path, dtype: torch.dtype | None = None, shard_size: int = SHARD_SIZE) -> None:
        """Write a Hugging Face directory: whole, or not at all. Other files of an existing directory stay."""
        target = Path(folder)
        architecture, theirs = exported_config(self.config, self.description)
        with whole_folder(target) as work:
            save_model(work, self.model, architecture, theirs, shard_size, dtype)
            if self.tokenizer is not None:
                self.tokenizer.save(str(work / "tokenizer.json"))
            if self.generation:
                write_json(work / "generation_config.json", self.generation)


def load(folder: str | Path, dtype: torch.dtype | None = None, device: str = "cpu", allow_download: bool = False) -> Loaded:
    """Open a model directory, clearhead's or Hugging Face's; no network unless `allow_download`."""
    path = Path(folder)
    if not path.is_dir():
        if not allow_download:
            raise CheckpointError(f"{folder} is not a directory: name a model directory, or pass allow_download=True to fetch that name")
        path = _download(str(folder))
    description = describe(path)
    model = load_model(path, description, dtype)
    defaults = path / "generation_config.json"
    generation = read_json(defaults) if defaults.exists() else {}
    return Loaded(model.to(device), load_tokenizer(path), generation, description, path)


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError("downloading needs huggingface_hub: pip install 'clearhead[hub]'") from None
    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise CheckpointError(f"{name} could not be downloaded: {str(error).splitlines()[0]}") from None
