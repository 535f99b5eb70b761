"""Sentence embeddings: how a directory of sentence-transformers says that states become one vector."""

import json
from dataclasses import dataclass
from pathlib import Path

from clearhead.hub.files import read_json, read_json_if_any, reading, refuse, write_json

MODULES, POOLING, LENGTH = "modules.json", "1_Pooling", "sentence_bert_config.json"
TYPE, MODE = "sentence_transformers.models.", "pooling_mode_"  # how their names begin
SUPPORTED = ("Transformer", "Pooling", "Normalize")  # modules
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
        refuse(kind not in SUPPORTED, f"{path} names a module {kind}: supported are {', '.join(SUPPORTED)}")
    stated = read_json(folder / POOLING / "config.json") if "Pooling" in kinds else {}
    on = [key.removeprefix(MODE) for key in stated if key.startswith(MODE) and stated[key] is True]
    refuse(
        len(on) > 1 or not set(on) <= set(MODES),
        f"{folder / POOLING} pools by {', '.join(on)}: supported is one of {', '.join(MODES)}",
    )
    most = read_json_if_any(folder / LENGTH).get("max_seq_length")
    length = most if type(most) is int and most > 0 else None
    return Sentences(MODES[on[0]] if on else "mean", "Normalize" in kinds, length)


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
    modes = {MODE + theirs: ours == sentences.pooling for theirs, ours in MODES.items()}
    write_json(folder / POOLING / "config.json", {"word_embedding_dimension": d_model, **modes})
    if sentences.max_length is not None:
        write_json(folder / LENGTH, {"max_seq_length": sentences.max_length, "do_lower_case": False})
