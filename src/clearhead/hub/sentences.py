"""Sentence embeddings as sentence-transformers has them: poolings, layers on the pooled vector, their files.

Shapes: B batch, T length, D model, W width of a vector.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as nnf
from safetensors.torch import save_file
from torch import Tensor, nn

from clearhead.errors import InputError
from clearhead.hub.files import WEIGHTS, read_json, read_json_if_any, reading, refuse, write_json
from clearhead.hub.weights import open_weights

NAME = "sentence_embedding"  # of what the modules after a pooling read and write

# Poolings ---------------------------------------------------------------------------------------------------


def _first(hidden: Tensor, counted: Tensor) -> Tensor:
    return _picked(hidden, counted.int().argmax(1))


def _last(hidden: Tensor, counted: Tensor) -> Tensor:
    place = counted.shape[1] - 1 - counted.flip(1).int().argmax(1)
    return _picked(hidden * counted[:, :, None], place)


def _largest(hidden: Tensor, counted: Tensor) -> Tensor:
    return hidden.masked_fill(~counted[:, :, None], -torch.inf).amax(1)


def _mean(hidden: Tensor, counted: Tensor) -> Tensor:
    return _weighed(hidden, counted.to(hidden.dtype))


def _root_mean(hidden: Tensor, counted: Tensor) -> Tensor:
    count = counted.sum(1, keepdim=True).to(hidden.dtype)
    return _mean(hidden, counted) * count.sqrt()


def _later_more(hidden: Tensor, counted: Tensor) -> Tensor:
    places = torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype)
    return _weighed(hidden, counted * places)


def _weighed(hidden: Tensor, weights: Tensor) -> Tensor:
    return (hidden * weights[:, :, None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1e-9)


def _picked(hidden: Tensor, places: Tensor) -> Tensor:
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), places]


# Our name -> theirs in new files, theirs in old ones, the formula. Old files join several in this order.
POOLINGS: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Tensor]]] = {
    "cls": ("cls", "cls_token", _first),
    "max": ("max", "max_tokens", _largest),
    "mean": ("mean", "mean_tokens", _mean),
    "mean_sqrt_len": ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens", _root_mean),
    "weightedmean": ("weightedmean", "weightedmean_tokens", _later_more),
    "last": ("lasttoken", "lasttoken", _last),
}


def pooled(hidden: Tensor, counted: Tensor, pooling: str) -> Tensor:
    """Pool the `counted` [B, T] of states [B, T, D], padded on the right, by each name of `pooling`: [B, W].

    Names are joined by "+", as "mean+max", and so are the vectors.
    """
    return torch.cat([POOLINGS[name][2](hidden, counted) for name in pooling.split("+")], dim=-1)


# Layers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class VectorLayer:
    """A module on the pooled vector; `stated` is its config.json."""

    stated: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    kind: ClassVar[str] = ""
    tensors: ClassVar[tuple[str, ...]] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Map [B, W] -> [B, W']."""
        return x

    def width(self, before: int) -> int:
        """Return the width of what comes out, where `before` goes in."""
        return before

    def write(self, folder: Path) -> None:
        """Write the module as sentence-transformers does."""
        folder.mkdir()
        write_json(folder / "config.json", dict(self.stated))
        if self.weights:
            save_file({name: value.contiguous() for name, value in self.weights.items()}, folder / WEIGHTS)

    def _of(self, name: str, x: Tensor) -> Tensor | None:
        found = self.weights.get(name)
        return None if found is None else found.to(x)


class DroppedVector(VectorLayer):
    """Dropout, which does nothing but in training."""

    kind = "Dropout"


class UnitVector(VectorLayer):
    """Scale a vector to length one."""

    kind = "Normalize"

    def __call__(self, x: Tensor) -> Tensor:
        """Map [B, W] -> [B, W]."""
        return nnf.normalize(x, dim=-1)


class NormedVector(VectorLayer):
    """Layer norm of a vector."""

    kind, tensors = "LayerNorm", ("norm.weight", "norm.bias")

    def __call__(self, x: Tensor) -> Tensor:
        """Map [B, W] -> [B, W]."""
        return nnf.layer_norm(x, x.shape[-1:], self._of("norm.weight", x), self._of("norm.bias", x))

    def width(self, before: int) -> int:
        """Return the width, which the weights must have."""
        _check_shapes(self, {"norm.weight": (before,), "norm.bias": (before,)})
        return before


# Classes of torch.nn that need no arguments; the usual one comes first.
BENDS = (
    *("Tanh", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU", "SELU", "CELU", "ReLU6"),
    *("Mish", "Softplus", "Softsign", "Tanhshrink", "Hardswish", "Hardsigmoid", "Hardtanh", "LogSigmoid"),
)
DENSE_KEYS = (
    *("in_features", "out_features", "bias", "activation_function"),
    *("module_input_name", "module_output_name", "use_residual"),
)


class DenseVector(VectorLayer):
    """A linear layer and an activation, perhaps added to what went in."""

    kind, tensors = "Dense", ("linear.weight", "linear.bias", "residual.weight")

    def __call__(self, x: Tensor) -> Tensor:
        """Map [B, W] -> [B, W']."""
        weight = self.weights["linear.weight"].to(x)
        made: Tensor = _bend(self.stated)(nnf.linear(x, weight, self._of("linear.bias", x)))
        if not self.stated.get("use_residual"):
            return made
        wide = self._of("residual.weight", x)
        return made + (x if wide is None else nnf.linear(x, wide))

    def width(self, before: int) -> int:
        """Return out_features, which the weights must have."""
        after = int(self.stated["out_features"])
        wanted: dict[str, tuple[int, ...]] = {"linear.weight": (after, before)}
        if self.stated.get("bias", True):
            wanted["linear.bias"] = (after,)
        if self.stated.get("use_residual") and after != before:
            wanted["residual.weight"] = (after, before)
        _check_shapes(self, wanted)
        return after


LAYERS: dict[str, type[VectorLayer]] = {
    layer.kind: layer for layer in (DenseVector, NormedVector, DroppedVector, UnitVector)
}


def read_layer(kind: str, folder: Path) -> VectorLayer:
    """Read a module of this kind from its folder."""
    cls = LAYERS[kind]
    stated = read_json_if_any(folder / "config.json")
    for key in ("module_input_name", "module_output_name"):
        refuse(
            stated.get(key) not in (None, NAME),
            f"{folder} has {key} {stated.get(key)!r}: only {NAME} is supported",
        )
    if cls is DenseVector:
        stated = read_json(folder / "config.json")
        unknown = sorted({*stated} - {*DENSE_KEYS})
        refuse(unknown, f"{folder} has {', '.join(unknown)}: known of a Dense are {', '.join(DENSE_KEYS)}")
        with reading(folder, "is no Dense with in_features and out_features"):
            _bend(stated)
            int(stated["out_features"])
    return cls(stated, _read_weights(folder, cls.tensors) if cls.tensors else {})


def _bend(stated: Mapping[str, Any]) -> nn.Module:
    """Return the activation that a Dense names by its class."""
    path = str(stated.get("activation_function", f"torch.nn.{BENDS[0]}"))
    name = path.rpartition(".")[2]
    refuse(
        not path.startswith("torch.nn.") or name not in BENDS,
        f"a Dense has activation_function {path}: supported are torch.nn's {', '.join(BENDS)}",
    )
    made: nn.Module = getattr(nn, name)()
    return made


def _read_weights(folder: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    found = {name: entry.read().to(torch.float32, copy=True) for name, entry in open_weights(folder).items()}
    unknown = sorted({*found} - {*names})
    refuse(unknown, f"{folder} has the tensor {unknown[:1]}: known here are {', '.join(names)}")
    return found


def _check_shapes(layer: VectorLayer, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a layer whose tensors are not those of these names and shapes."""
    found = {name: tuple(value.shape) for name, value in layer.weights.items()}
    refuse(
        found != dict(wanted),
        f"a module {layer.kind} has tensors {found} where the pooled vector needs {dict(wanted)}",
    )


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
