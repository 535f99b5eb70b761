"""Sentence embeddings: how a directory of sentence-transformers says that states become one vector."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.errors import InputError
from clearhead.hub.files import read_json, read_json_if_any, reading, refuse, write_json
from clearhead.hub.sentence_layers import (
    LAYERS,
    NAME,
    POOLINGS,
    UnitVector,
    VectorLayer,
    pooled,
    read_layer,
)

MODULES, POOLING, READING = "modules.json", "1_Pooling", "sentence_bert_config.json"
# The names that the file of what is read has had, in the order in which the library looks for them.
READERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
PROMPTS = "config_sentence_transformers.json"
KIND = "SentenceTransformer"  # the class of which config_sentence_transformers.json is
TYPE, MODE = "sentence_transformers.models.", "pooling_mode"  # how their names begin
SUPPORTED = ("Transformer", "Pooling", *LAYERS)  # modules
ONLY: dict[str, Any] = {  # of sentence_bert_config.json: any other value changes what comes out
    **{"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"},
    **{key: {} for key in ("model_args", "tokenizer_args", "config_args", "processing_kwargs")},
    **{key: {} for key in ("model_kwargs", "processor_kwargs", "config_kwargs")},
    **{"query_length": None, "document_length": None, "query_expansion": None},
}


@dataclass(frozen=True)
class Sentences:
    """How token states become a sentence's vector."""

    pooling: str = (
        "mean"  # "cls", "mean", "max", "mean_sqrt_len", "weightedmean", "last"; several: "mean+max"
    )
    normalise: bool = False  # scale to length one, at the end
    max_length: int | None = None  # tokens; None: as many as the model takes
    lowercase: bool = False  # before the tokenizer reads a text
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: what is put before a text
    prompt: str | None = None  # the name of the one that is put before every text
    pools_prompt: bool = True  # the prompt's tokens count as the text's own
    layers: tuple[VectorLayer, ...] = ()  # on the pooled vector, before it is scaled
    truncate_dim: int | None = None  # so many numbers of each vector are kept, once it is scaled

    def before(self, prompt: str | None = None) -> str:
        """Return what is put before every text: the prompt of this name, or the usual one."""
        name = self.prompt if prompt is None else prompt
        if name is not None and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InputError(f"prompt {name!r} is not one of this model's: it has {known}")
        return "" if name is None else self.prompts[name]

    def read(self, text: str) -> str:
        """Return what the tokenizer gets of a text with its prompt."""
        return text.lower() if self.lowercase else text

    def vectors(self, hidden: Tensor, counted: Tensor) -> Tensor:
        """Make one vector of the `counted` [B, T] of states [B, T, D]: [B, W]."""
        x = pooled(hidden.float(), counted, self.pooling)
        for layer in (*self.layers, *([UnitVector({}, {})] if self.normalise else [])):
            x = layer(x)
        return x[:, : self.truncate_dim]

    def width(self, d_model: int) -> int:
        """Return the width of a vector of states of this width."""
        width = d_model * len(self.pooling.split("+"))
        for layer in self.layers:
            width = layer.width(width)
        return width if self.truncate_dim is None else min(width, self.truncate_dim)


def read_sentences(folder: Path, d_model: int) -> Sentences | None:
    """Read modules.json and the folders it names, for states of this width; None for a directory without."""
    path = folder / MODULES
    if not path.exists():
        return None
    with reading(path, "is not a list of modules"):
        modules = json.loads(path.read_text(encoding="utf-8"))
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        within = [Path(str(module.get("path") or "")) for module in modules]
    places = [folder / place for place in within]
    for kind, place in zip(kinds, within):
        refuse(kind not in SUPPORTED, f"{path} names a module {kind}: supported are {', '.join(SUPPORTED)}")
        outside = place.is_absolute() or ".." in place.parts
        refuse(outside, f"{path} names a module outside of the directory: {place}")
    order = [kind for kind in kinds if kind in ("Transformer", "Pooling")]
    refuse(
        kinds[: len(order)] != order or order not in (["Transformer"], ["Transformer", "Pooling"]),
        f"{path} lists {', '.join(kinds)}: supported is a Transformer, a Pooling, then others",
    )
    stated = read_json(places[1] / "config.json") if "Pooling" in kinds else {}
    layers = [read_layer(kind, place) for kind, place in zip(kinds, places) if kind in LAYERS]
    unit = bool(layers) and isinstance(layers[-1], UnitVector)
    reads = next(
        filter(None, (read_json_if_any(folder / f"sentence_{name}_config.json") for name in READERS)), {}
    )
    named = read_json_if_any(folder / PROMPTS)
    unread = [name for name, usual in ONLY.items() if reads.get(name) not in (None, usual)]
    refuse(unread, f"{folder / READING} has {', '.join(unread)}, which are not supported: remove them")
    prompts, default = named.get("prompts") or {}, named.get("default_prompt_name")
    kept = named.get("truncate_dim")
    refuse(
        kept is not None and (type(kept) is not int or kept < 1),
        f"{folder / PROMPTS} has truncate_dim {kept!r}: it must be a whole number of 1 at least, or null",
    )
    kind = named.get("model_type", KIND)
    refuse(kind != KIND, f"{folder / PROMPTS} has model_type {kind!r}: only {KIND} is supported")
    most = reads.get("max_seq_length")
    refuse(
        most is not None and (type(most) is not int or most < 1),
        f"{folder / READING} has max_seq_length {most!r}: it must be a whole number of 1 at least, or null",
    )
    texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    refuse(
        not texts or (default is not None and default not in prompts),
        f"{folder / PROMPTS} must have prompts of text, and among them default_prompt_name {default!r}",
    )
    found = Sentences(
        _read_pooling(stated, places[1] if "Pooling" in kinds else folder),
        normalise=unit,
        max_length=most,
        lowercase=bool(reads.get("do_lower_case", False)),
        prompts=prompts,
        prompt=default,
        pools_prompt=bool(stated.get("include_prompt", True)),
        layers=tuple(layers[:-1] if unit else layers),
        truncate_dim=kept,
    )
    found.width(d_model)  # refuses layers that do not fit
    return found


def _read_pooling(stated: Mapping[str, Any], place: Path) -> str:
    """Return the poolings that a config.json of a Pooling names, new or old."""
    given = stated.get(MODE)
    if given is None:
        ours = {f"{MODE}_{old}": name for name, (_, old, _) in POOLINGS.items()}
        on = [key for key in stated if key.startswith(f"{MODE}_") and stated[key] is True]
        names = [name for key, name in ours.items() if key in on] or ["mean"]
        unknown = [key for key in on if key not in ours]
    else:
        listed = [given] if isinstance(given, str) else list(given)
        ours = {new: name for name, (new, _, _) in POOLINGS.items()}
        names, unknown = [ours.get(str(one), "") for one in listed], [x for x in listed if x not in ours]
    refuse(
        unknown or not names,
        f"{place} pools by {', '.join(map(str, unknown))}: supported are {', '.join(ours)}",
    )
    return "+".join(names)


def _write_pooling(sentences: Sentences, d_model: int) -> dict[str, Any]:
    """Return a Pooling's config.json: as every release reads it, unless the order of several needs a list."""
    names, tail = sentences.pooling.split("+"), {"include_prompt": sentences.pools_prompt}
    if names != [name for name in POOLINGS if name in names]:
        return {"embedding_dimension": d_model, MODE: [POOLINGS[name][0] for name in names], **tail}
    modes = {f"{MODE}_{old}": name in names for name, (_, old, _) in POOLINGS.items()}
    return {"word_embedding_dimension": d_model, **modes, **tail}


def write_sentences(folder: Path, sentences: Sentences, d_model: int) -> None:
    """Write the files that `read_sentences` and sentence-transformers read."""
    unit = [UnitVector({"module_input_name": NAME, "module_output_name": NAME}, {})]
    layers = [*sentences.layers, *(unit if sentences.normalise else [])]
    after = [(f"{number}_{layer.kind}", layer.kind) for number, layer in enumerate(layers, start=2)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": TYPE + kind}
        for i, (path, kind) in enumerate([("", "Transformer"), (POOLING, "Pooling"), *after])
    ]
    write_json(folder / MODULES, modules)
    (folder / POOLING).mkdir()
    write_json(folder / POOLING / "config.json", _write_pooling(sentences, d_model))
    for (path, _), layer in zip(after, layers):
        layer.write(folder / path)
    reads = {"max_seq_length": sentences.max_length, "do_lower_case": sentences.lowercase}
    write_json(folder / READING, reads)
    named: dict[str, Any] = {}
    if sentences.prompts:
        named = {"prompts": dict(sentences.prompts), "default_prompt_name": sentences.prompt}
    if sentences.truncate_dim is not None:
        named["truncate_dim"] = sentences.truncate_dim
    if named:
        write_json(folder / PROMPTS, named)
