"""Sentence embeddings: how a directory of sentence-transformers says that states become one vector."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.hub.files import read_json, read_json_if_any, reading, refuse, write_json

MODULES, POOLING, LENGTH = "modules.json", "1_Pooling", "sentence_bert_config.json"
TYPE = "sentence_transformers.models."
# Their name after pooling_mode_ -> ours.
MODES = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}


@dataclass(frozen=True)
class Sentences:
    """How token states become a sentence's vector."""

    pooling: str = "mean"  # "cls", "mean" or "last"
    normalise: bool = False  # scale to length one
    max_length: int | None = None  # tokens; None: as many as the model takes


def read_sentences(folder: Path) -> Sentences | None:
    """Read modules.json and the folders it names; None for a directory without them."""
    path = folder / MODULES
    if not path.exists():
        return None
    with reading(path, "is not a list of modules"):
        modules = json.loads(path.read_text(encoding="utf-8"))
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    for kind in kinds:
        supported = ("Transformer", "Pooling", "Normalize")
        refuse(kind not in supported, f"{path} names a module {kind}: supported are {', '.join(supported)}")
    most = read_json_if_any(folder / LENGTH).get("max_seq_length")
    length = most if type(most) is int and most > 0 else None
    stated = read_json(folder / POOLING / "config.json") if "Pooling" in kinds else {}
    return Sentences(_mode(stated, path), "Normalize" in kinds, length)


def _mode(stated: dict[str, Any], path: Path) -> str:
    prefix = "pooling_mode_"
    on = [key.removeprefix(prefix) for key in stated if key.startswith(prefix) and stated[key] is True]
    refusal = f"{path.parent / POOLING} pools by {', '.join(on)}: supported is one of {', '.join(MODES)}"
    refuse(not (len(on) <= 1 and set(on) <= set(MODES)), refusal)
    return MODES[on[0]] if on else "mean"


def write_sentences(folder: Path, sentences: Sentences, d_model: int) -> None:
    """Write the files that `read_sentences` and sentence-transformers read."""
    names = [("", "Transformer"), (POOLING, "Pooling")]
    if sentences.normalise:
        names.append(("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": TYPE + kind} for i, (path, kind) in enumerate(names)
    ]
    write_json(folder / MODULES, modules)
    (folder / POOLING).mkdir()
    modes = {f"pooling_mode_{theirs}": ours == sentences.pooling for theirs, ours in MODES.items()}
    write_json(folder / POOLING / "config.json", {"word_embedding_dimension": d_model, **modes})
    if sentences.max_length is not None:
        write_json(folder / LENGTH, {"max_seq_length": sentences.max_length, "do_lower_case": False})
