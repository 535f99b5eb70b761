"""Sentence embeddings: how a directory of sentence-transformers says that states become one vector."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clearhead.errors import InputError
from clearhead.hub.files import read_json, read_json_if_any, reading, refuse, write_json

MODULES, POOLING, READING = "modules.json", "1_Pooling", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
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
    lowercase: bool = False  # before the tokenizer reads a text
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: what is put before a text
    prompt: str | None = None  # the name of the one that is put before every text
    pools_prompt: bool = True  # the prompt's tokens count as the text's own

    def read(self, text: str, prompt: str | None = None) -> str:
        """Return what the tokenizer gets of a text, after the prompt of this name."""
        name = self.prompt if prompt is None else prompt
        if name is not None and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InputError(f"prompt {name!r} is not one of this model's: it has {known}")
        before = "" if name is None else self.prompts[name]
        refuse(
            before and not self.pools_prompt,
            f"prompt {name!r} is to be left out of the pooling (include_prompt), which is not supported",
        )
        whole = (before + text).strip()
        return whole.lower() if self.lowercase else whole


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
    place = next((module.get("path") for module, kind in zip(modules, kinds) if kind == "Pooling"), None)
    stated = read_json(folder / str(place) / "config.json") if place else {}
    on = [key.removeprefix(MODE) for key in stated if key.startswith(MODE) and stated[key] is True]
    refuse(
        len(on) > 1 or not set(on) <= set(MODES),
        f"{folder / str(place)} pools by {', '.join(on)}: supported is one of {', '.join(MODES)}",
    )
    reads = read_json_if_any(next(iter(sorted(folder.glob("sentence_*_config.json"))), folder / READING))
    named = read_json_if_any(folder / PROMPTS)
    unread = [name for name in ("model_args", "tokenizer_args", "config_args") if reads.get(name)]
    refuse(unread, f"{folder / READING} has {', '.join(unread)}, which are not supported: remove them")
    prompts, default = named.get("prompts") or {}, named.get("default_prompt_name")
    most = reads.get("max_seq_length")
    texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    refuse(
        not texts or (default is not None and default not in prompts),
        f"{folder / PROMPTS} must have prompts of text, and among them default_prompt_name {default!r}",
    )
    return Sentences(
        MODES[on[0]] if on else "mean",
        normalise="Normalize" in kinds,
        max_length=most if type(most) is int and most > 0 else None,
        lowercase=bool(reads.get("do_lower_case", False)),
        prompts=prompts,
        prompt=default,
        pools_prompt=bool(stated.get("include_prompt", True)),
    )


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
    pooled = {"word_embedding_dimension": d_model, **modes, "include_prompt": sentences.pools_prompt}
    write_json(folder / POOLING / "config.json", pooled)
    reads = {"max_seq_length": sentences.max_length, "do_lower_case": sentences.lowercase}
    write_json(folder / READING, reads)
    if sentences.prompts:
        named = {"prompts": dict(sentences.prompts), "default_prompt_name": sentences.prompt}
        write_json(folder / PROMPTS, named)
