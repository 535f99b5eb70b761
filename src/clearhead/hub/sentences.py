"""Sentence embeddings as sentence-transformers has them: poolings, layers on the pooled vector, their files.

Shapes: B batch, T length, D model, W width of a vector.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
from safetensors.torch import save_file
from torch import Tensor, nn

from clearhead.errors import InputError
from clearhead.hub.files import WEIGHTS, read_json, read_json_if_any, reading, refuse, refuse_key, write_json
from clearhead.hub.weights import open_weights

NAME = "sentence_embedding"  # of what the modules after a pooling read and write

# Poolings ---------------------------------------------------------------------------------------------------


def _weighted_mean(hidden: Tensor, weights: Tensor) -> Tensor:
    return (hidden * weights[:, :, None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1e-9)


def _mean(hidden: Tensor, counted: Tensor) -> Tensor:
    return _weighted_mean(hidden, counted.to(hidden.dtype))


def _at(hidden: Tensor, positions: Tensor) -> Tensor:
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), positions]


def _last(hidden: Tensor, counted: Tensor) -> Tensor:
    return _at(hidden * counted[:, :, None], counted.shape[1] - 1 - counted.flip(1).int().argmax(1))


def _later_more(hidden: Tensor, counted: Tensor) -> Tensor:
    numbers = torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype)
    return _weighted_mean(hidden, counted * numbers)


# Our name -> theirs in new files, theirs in old ones, the formula. Old files join several in this order.
POOLINGS: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Tensor]]] = {
    "cls": ("cls", "cls_token", lambda hidden, counted: _at(hidden, counted.int().argmax(1))),
    "max": (
        "max",
        "max_tokens",
        lambda hidden, counted: hidden.masked_fill(~counted[:, :, None], -torch.inf).amax(1),
    ),
    "mean": ("mean", "mean_tokens", _mean),
    "mean_sqrt_len": (
        "mean_sqrt_len_tokens",
        "mean_sqrt_len_tokens",
        lambda hidden, counted: _mean(hidden, counted) * counted.sum(1, keepdim=True).to(hidden.dtype).sqrt(),
    ),
    "weightedmean": ("weightedmean", "weightedmean_tokens", _later_more),
    "last": ("lasttoken", "lasttoken", _last),
}


def pooled(hidden: Tensor, counted: Tensor, pooling: str) -> Tensor:
    """Pool the `counted` [B, T] of states [B, T, D], padded on the right, by each name of `pooling`: [B, W].

    Names are joined by "+", as "mean+max", and so are the vectors.
    """
    return torch.cat([POOLINGS[name][2](hidden, counted) for name in pooling.split("+")], dim=-1)


# Layers -----------------------------------------------------------------------------------------------------


# Classes of torch.nn that need no arguments; the usual one comes first.
ACTIVATIONS = (
    *("Tanh", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU", "SELU", "CELU", "ReLU6"),
    *("Mish", "Softplus", "Softsign", "Tanhshrink", "Hardswish", "Hardsigmoid", "Hardtanh", "LogSigmoid"),
)
DENSE_KEYS = (
    *("in_features", "out_features", "bias", "activation_function"),
    *("module_input_name", "module_output_name", "use_residual"),
)
# Modules on the pooled vector, with the names of their tensors. Dropout does nothing but in training.
LAYERS = {
    "Dense": ("linear.weight", "linear.bias", "residual.weight"),
    "LayerNorm": ("norm.weight", "norm.bias"),
    "Dropout": (),
    "Normalize": (),
}


@dataclass(frozen=True, eq=False)
class VectorLayer:
    """A module on the pooled vector: its kind, its config.json and its weights."""

    kind: str  # one of LAYERS
    stated: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [B, W] -> [B, W']."""
        weights = {name: weight.to(x) for name, weight in self.weights.items()}
        match self.kind:
            case "Normalize":
                return nnf.normalize(x, dim=-1)
            case "LayerNorm":
                return nnf.layer_norm(x, x.shape[-1:], weights["norm.weight"], weights["norm.bias"])
            case "Dense":
                y: Tensor = nnf.linear(x, weights["linear.weight"], weights.get("linear.bias"))
                y = _activation(self.stated)(y)
                if not self.stated.get("use_residual"):
                    return y
                wide = weights.get("residual.weight")
                return y + (x if wide is None else nnf.linear(x, wide))
        return x

    def width(self, before: int) -> int:
        """Return the width of what comes out, where `before` goes in; refuse weights of other shapes."""
        after, wanted = before, dict[str, tuple[int, ...]]()
        if self.kind == "LayerNorm":
            wanted = dict.fromkeys(LAYERS["LayerNorm"], (before,))
        if self.kind == "Dense":
            after = int(self.stated["out_features"])
            wanted["linear.weight"] = (after, before)
            if self.stated.get("bias", True):
                wanted["linear.bias"] = (after,)
            if self.stated.get("use_residual") and after != before:
                wanted["residual.weight"] = (after, before)
        shapes = {name: tuple(value.shape) for name, value in self.weights.items()}
        refuse(
            shapes != wanted,
            f"a module {self.kind} has tensors {shapes} where the pooled vector needs {wanted}",
        )
        return after

    def write(self, folder: Path) -> None:
        """Write the module as sentence-transformers does."""
        folder.mkdir()
        write_json(folder / "config.json", dict(self.stated))
        if self.weights:
            save_file({name: value.contiguous() for name, value in self.weights.items()}, folder / WEIGHTS)


def read_layer(kind: str, folder: Path) -> VectorLayer:
    """Read a module of this kind from its folder."""
    stated = read_json_if_any(folder / "config.json")
    for key in ("module_input_name", "module_output_name"):
        value = stated.get(key)
        refuse_key(value not in (None, NAME), key, value, f"only {NAME} is supported", folder)
    if kind == "Dense":
        stated = read_json(folder / "config.json")
        unknown = sorted({*stated} - {*DENSE_KEYS})
        refuse(unknown, f"{folder} has {', '.join(unknown)}: known of a Dense are {', '.join(DENSE_KEYS)}")
        with reading(folder, "is no Dense with in_features and out_features"):
            _activation(stated)
            int(stated["out_features"])
    if not LAYERS[kind]:
        return VectorLayer(kind, stated)
    weights = {
        name: entry.read().to(torch.float32, copy=True) for name, entry in open_weights(folder).items()
    }
    unknown = sorted({*weights} - {*LAYERS[kind]})
    refuse(unknown, f"{folder} has the tensor {unknown[:1]}: known here are {', '.join(LAYERS[kind])}")
    return VectorLayer(kind, stated, weights)


def _activation(stated: Mapping[str, Any]) -> nn.Module:
    """Return the activation that a Dense names by its class."""
    path = str(stated.get("activation_function", f"torch.nn.{ACTIVATIONS[0]}"))
    name = path.rpartition(".")[2]
    refuse(
        not path.startswith("torch.nn.") or name not in ACTIVATIONS,
        f"a Dense has activation_function {path}: supported are torch.nn's {', '.join(ACTIVATIONS)}",
    )
    activation: nn.Module = getattr(nn, name)()
    return activation


# Directories ------------------------------------------------------------------------------------------------


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
        for layer in (*self.layers, *([VectorLayer("Normalize")] if self.normalise else [])):
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
    folders = [folder / place for place in within]
    for kind, place in zip(kinds, within):
        refuse(kind not in SUPPORTED, f"{path} names a module {kind}: supported are {', '.join(SUPPORTED)}")
        outside = place.is_absolute() or ".." in place.parts
        refuse(outside, f"{path} names a module outside of the directory: {place}")
    order = [kind for kind in kinds if kind in ("Transformer", "Pooling")]
    refuse(
        kinds[: len(order)] != order or order not in (["Transformer"], ["Transformer", "Pooling"]),
        f"{path} lists {', '.join(kinds)}: supported is a Transformer, a Pooling, then others",
    )
    stated = read_json(folders[1] / "config.json") if "Pooling" in kinds else {}
    layers = [read_layer(kind, place) for kind, place in zip(kinds, folders) if kind in LAYERS]
    unit = bool(layers) and layers[-1].kind == "Normalize"
    reads = next(
        filter(None, (read_json_if_any(folder / f"sentence_{name}_config.json") for name in READERS)), {}
    )
    named = read_json_if_any(folder / PROMPTS)
    unread = [name for name, usual in ONLY.items() if reads.get(name) not in (None, usual)]
    refuse(unread, f"{folder / READING} has {', '.join(unread)}, which are not supported: remove them")
    prompts, default = named.get("prompts") or {}, named.get("default_prompt_name")
    kind = named.get("model_type", KIND)
    refuse_key(kind != KIND, "model_type", kind, f"only {KIND} is supported", folder / PROMPTS)
    kept, most = named.get("truncate_dim"), reads.get("max_seq_length")
    for key, value, file in (("truncate_dim", kept, PROMPTS), ("max_seq_length", most, READING)):
        wrong = value is not None and (type(value) is not int or value < 1)
        refuse_key(wrong, key, value, "it must be a whole number of 1 at least, or null", folder / file)
    texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    refuse(
        not texts or (default is not None and default not in prompts),
        f"{folder / PROMPTS} must have prompts of text, and among them default_prompt_name {default!r}",
    )
    sentences = Sentences(
        _read_pooling(stated, folders[1] if "Pooling" in kinds else folder),
        normalise=unit,
        max_length=most,
        lowercase=bool(reads.get("do_lower_case", False)),
        prompts=prompts,
        prompt=default,
        pools_prompt=bool(stated.get("include_prompt", True)),
        layers=tuple(layers[:-1] if unit else layers),
        truncate_dim=kept,
    )
    sentences.width(d_model)  # refuses layers that do not fit
    return sentences


def _read_pooling(stated: Mapping[str, Any], place: Path) -> str:
    """Return the poolings that a config.json of a Pooling names, new or old."""
    modes = stated.get(MODE)
    if modes is None:
        ours = {f"{MODE}_{old}": name for name, (_, old, _) in POOLINGS.items()}
        on = [key for key in stated if key.startswith(f"{MODE}_") and stated[key] is True]
        names = [name for key, name in ours.items() if key in on] or ["mean"]
        unknown = [key for key in on if key not in ours]
    else:
        listed = [modes] if isinstance(modes, str) else list(modes)
        ours = {new: name for name, (new, _, _) in POOLINGS.items()}
        names, unknown = [ours.get(str(mode), "") for mode in listed], [x for x in listed if x not in ours]
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
    unit = [VectorLayer("Normalize", {"module_input_name": NAME, "module_output_name": NAME})]
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
