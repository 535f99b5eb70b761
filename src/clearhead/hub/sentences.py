"""Sentence embeddings as sentence-transformers stores them: how a directory says that states become one vector."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.errors import CheckpointError
from clearhead.hub.files import read_json, write_json

MODULES, POOLING, LENGTH = "modules.json", "1_Pooling", "sentence_bert_config.json"
TYPE = "sentence_transformers.models."
MODES = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "lasttoken": "last",
}  # their name after pooling_mode_ -> ours


@dataclass(frozen=True)
class Sentences:
    """How token states become a sentence's vector."""

    pooling: str = "mean"  # "cls", "mean" or "last"
    normalise: bool = False  # scale to length one
    max_length: int | None = None  # tokens; None: as many as the model takes


def read_sentences(folder: Path) -> Sentences | None:
    """What modules.json and the folders it names say; None for a directory without them."""
    path = folder / MODULES
    if not path.exists():
        return None
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        kinds = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in modules}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a list of modules: {error}") from None
    strange = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if strange:
        raise CheckpointError(
            f"{path} names a module {strange[0]}: supported are Transformer, Pooling, Normalize"
        )
    lengths = read_json(folder / LENGTH) if (folder / LENGTH).exists() else {}
    most = lengths.get("max_seq_length")
    stated = read_json(folder / POOLING / "config.json") if "Pooling" in kinds else {}
    return Sentences(
        _mode(stated, path), "Normalize" in kinds, most if type(most) is int and most > 0 else None
    )


def _mode(stated: dict[str, Any], path: Path) -> str:
    on = [
        key.removeprefix("pooling_mode_")
        for key, value in stated.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    if len(on) > 1 or (on and on[0] not in MODES):
        raise CheckpointError(
            f"{path.parent / POOLING} pools by {', '.join(on)}: supported is one of {', '.join(MODES)}"
        )
    return MODES[on[0]] if on else "mean"


def write_sentences(folder: Path, sentences: Sentences, d_model: int) -> None:
    """The files that `read_sentences` and sentence-transformers read."""
    names = [("", "Transformer"), (POOLING, "Pooling")] + (
        [("2_Normalize", "Normalize")] if sentences.normalise else []
    )
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": TYPE + kind} for i, (path, kind) in enumerate(names)
    ]
    (folder / MODULES).write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")
    (folder / POOLING).mkdir()
    modes = {f"pooling_mode_{theirs}": ours == sentences.pooling for theirs, ours in MODES.items()}
    write_json(folder / POOLING / "config.json", {"word_embedding_dimension": d_model, **modes})
    if sentences.max_length is not None:
        write_json(folder / LENGTH, {"max_seq_length": sentences.max_length, "do_lower_case": False})
