"""What lies beside the weights in a directory: tokenizer, generation defaults, labels, images' settings."""

from pathlib import Path
from typing import Any

from clearhead.hub import checkpoint, files, preprocessor, sentences
from clearhead.hub.registry import tower_path
from clearhead.hub.tokenizer import load_tokenizer, open_tokenizer, read_settings, special_ids

GENERATION = "generation_config.json"


def read_beside(
    path: Path, description: checkpoint.Description, tokenizer: str | Path | None
) -> dict[str, Any]:
    """Return the fields of a `Bundle` that are read from files beside the weights, by name.

    `tokenizer` names one that lies elsewhere. Of a tower, the files are those of both.
    """
    part = tower_path(path)
    folder = path if part is None else part[0]
    generation = files.read_json_if_any(folder / GENERATION)
    empty = (folder / GENERATION).exists() and not generation
    files.refuse(empty, f"{folder / GENERATION} is empty: remove it, and config.json counts")
    if tokenizer is None:
        found, settings = load_tokenizer(folder), read_settings(folder)
    else:
        found, settings = open_tokenizer(Path(tokenizer), folder)
    return {
        "tokenizer": found,
        "generation": generation,
        "special": special_ids(found, settings, generation, description.theirs),
        "settings": settings,
        "labels": checkpoint.class_labels(description),
        "sentences": sentences.read_sentences(folder, description.config.d_model),
        "images": preprocessor.read_preprocessor(folder),
    }
