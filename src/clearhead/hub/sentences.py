"""Embeddings as sentence-transformers has them: poolings, layers on vectors, their files; SPLADE and ColBERT.

Shapes: B batch, T length, D model, W width of a vector.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as nnf
from safetensors.torch import save_file
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.errors import CheckpointError, InputError
from clearhead.hub.files import WEIGHTS, read_json, read_json_if_any, reading, refuse, refuse_key, write_json
from clearhead.hub.retrievers import (
    LateInteraction,
    Role,
    Splade,
    native_mask,
    native_model,
    native_reads,
    pylate_model,
    read_native,
    read_pylate,
    read_splade,
    read_stanford,
    splade_model,
    splade_pooling,
)
from clearhead.hub.weights import open_weights

NAME = "sentence_embedding"  # of what the modules after a pooling read and write
TOKENS = "token_embeddings"  # of what they do where each token has a vector

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
# Modules on a vector, with the names of their tensors. Dropout does nothing but in training.
LAYERS = {
    "Dense": ("linear.weight", "linear.bias", "residual.weight"),
    "LayerNorm": ("norm.weight", "norm.bias"),
    "Dropout": (),
    "Normalize": (),
}


@dataclass(frozen=True, eq=False)
class VectorLayer:
    """A module on the pooled vector, or on that of each token: its kind, its config.json and its weights."""

    kind: str  # one of LAYERS
    stated: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., W] -> [..., W']."""
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
            shapes != wanted, f"a module {self.kind} has tensors {shapes} where what it reads needs {wanted}"
        )
        return after

    def write(self, folder: Path) -> None:
        """Write the module as sentence-transformers does."""
        folder.mkdir()
        write_json(folder / "config.json", dict(self.stated))
        if self.weights:
            save_file({name: value.contiguous() for name, value in self.weights.items()}, folder / WEIGHTS)


def read_layer(kind: str, folder: Path, name: str = NAME) -> VectorLayer:
    """Read a module of this kind from its folder, which reads and writes what goes by a name."""
    stated = read_json_if_any(folder / "config.json")
    for key in ("module_input_name", "module_output_name"):
        value = stated.get(key)
        refuse_key(value not in (None, name), key, value, f"only {name} is supported", folder)
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
METADATA = "artifact.metadata"  # of a ColBERT of Stanford
STANFORD, LINEAR = "HF_ColBERT", "linear.weight"  # its class in config.json, and the tensor of its layer
TYPE, MODE = "sentence_transformers.models.", "pooling_mode"  # how their names begin
SPARSE, PYLATE = "sentence_transformers.sparse_encoder.models.", "pylate.models."
MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
Kind = Literal["dense", "sparse", "tokens"]
SUPPORTED: dict[Kind, tuple[str, ...]] = {  # modules
    "dense": ("Transformer", "Pooling", *LAYERS),
    "sparse": ("Transformer", "MLMTransformer", "SpladePooling"),
    "tokens": ("Transformer", "MultiVectorMask", *LAYERS),
}
KINDS: dict[Any, Kind] = {  # of vectors, by the class that config_sentence_transformers.json names
    "SentenceTransformer": "dense",
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "tokens",
    "ColBERT": "tokens",
}
TASKS: dict[Kind, str] = {"sparse": "fill-mask"}  # of other kinds: feature-extraction
ONLY: dict[str, Any] = {  # of sentence_bert_config.json: any other value changes what comes out
    "module_output_name": "token_embeddings",
    **{key: {} for key in ("model_args", "tokenizer_args", "config_args", "processing_kwargs")},
    **{key: {} for key in ("model_kwargs", "processor_kwargs", "config_kwargs")},
}
ROLES = ("query_length", "document_length", "query_expansion")  # keys of it, for a vector of each token


@dataclass(frozen=True)
class Sentences:
    """How token states become a sentence's vector; with `splade` a sparse one, with `late` one per token."""

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
    splade: Splade | None = None  # in place of a pooling
    late: LateInteraction | None = None  # in place of a pooling; the layers are on each token's vector

    @property
    def kind(self) -> Kind:
        """What a text becomes: one vector, a sparse one, or one for each token."""
        return "sparse" if self.splade is not None else "tokens" if self.late is not None else "dense"

    def role(self, prompt: str | None = None) -> Role:
        """Return whether texts with the prompt of this name are queries."""
        return "query" if (prompt or self.prompt) == "query" else "document"

    @property
    def known(self) -> Mapping[str, str]:
        """All prompts by name; where each token has a vector, queries and documents are told apart."""
        return self.prompts if self.late is None else {"query": "", "document": "", **self.prompts}

    def side(self, role: Role) -> str | None:
        """Return the name of the prompt for queries or documents; None: the usual one."""
        names = ("query",) if role == "query" else ("document", "passage", "corpus")
        return next((name for name in names if name in self.known), None)

    def before(self, prompt: str | None = None) -> str:
        """Return what is put before every text: the prompt of this name, or the usual one."""
        name = self.prompt if prompt is None else prompt
        if name is None and self.late is not None:
            name = "document"
        if name is not None and name not in self.known:
            known = ", ".join(self.known) or "none"
            raise InputError(f"prompt {name!r} is not one of this model's: it has {known}")
        return "" if name is None else self.known[name]

    def read(self, text: str) -> str:
        """Return what the tokenizer gets of a text with its prompt."""
        return text.lower() if self.lowercase else text

    def vectors(self, hidden: Tensor, counted: Tensor) -> Tensor:
        """Make one vector of the `counted` [B, T] of states [B, T, D]: [B, W]."""
        return self.finished(pooled(hidden.float(), counted, self.pooling))

    def finished(self, x: Tensor) -> Tensor:
        """Map what is pooled, or the states of tokens, through the layers: [N, W] -> [N, W']."""
        for layer in (*self.layers, *([VectorLayer("Normalize")] if self.normalise else [])):
            x = layer(x)
        return x[:, : self.truncate_dim]

    def width(self, d_model: int) -> int:
        """Return the width of a vector of states of this width."""
        width = d_model * len(self.pooling.split("+"))
        for layer in self.layers:
            width = layer.width(width)
        return width if self.truncate_dim is None else min(width, self.truncate_dim)


def read_sentences(folder: Path, config: ModelConfig) -> Sentences | None:
    """Read modules.json and the folders it names, of a model; None for a directory without.

    A ColBERT of Stanford has no such file: its config.json names its class.
    """
    path = folder / MODULES
    if not path.exists():
        theirs = read_json_if_any(folder / "config.json")
        return _stanford(folder, config) if is_stanford(theirs) else None
    with reading(path, "is not a list of modules"):
        modules = json.loads(path.read_text(encoding="utf-8"))
        types = [str(module["type"]) for module in modules]
        within = [Path(str(module.get("path") or "")) for module in modules]
    named = read_json_if_any(folder / PROMPTS)
    stated = named.get("model_type", "SentenceTransformer")
    known = f"supported are {', '.join(KINDS)}"
    refuse_key(stated not in KINDS, "model_type", stated, known, folder / PROMPTS)
    pylate = stated == "ColBERT" or any(name.startswith("pylate.") for name in types)
    kind: Kind = "tokens" if pylate else KINDS[stated]
    parts = [(name.rpartition(".")[2], folder / place) for name, place in zip(types, within)]
    for (name, _), place in zip(parts, within):
        supported = ", ".join(SUPPORTED[kind])
        refuse(name not in SUPPORTED[kind], f"{path} names a module {name}: supported are {supported}")
        outside = place.is_absolute() or ".." in place.parts
        refuse(outside, f"{path} names a module outside of the directory: {place}")
    reads = next(
        filter(None, (read_json_if_any(folder / f"sentence_{name}_config.json") for name in READERS)), {}
    )
    _check_reads(reads, kind, parts[0][0] if parts else "", folder)
    how = _common(reads, named, folder)
    if kind == "sparse":
        how = _sparse(how, parts, named, config, path)
    elif kind == "tokens":
        how = _of_tokens(how, parts, reads, named, pylate, path)
    else:
        how = _dense(how, parts, path)
    how.width(config.d_model)  # refuses layers that do not fit
    return how


Parts = list[tuple[str, Path]]  # modules: what each is, and its folder


def _check_reads(reads: Mapping[str, Any], kind: Kind, first: str, folder: Path) -> None:
    """Refuse what sentence_bert_config.json says and is not supported; `first` is the first module."""
    task = "fill-mask" if first == "MLMTransformer" else "feature-extraction"
    only = ONLY | {"transformer_task": TASKS.get(kind, "feature-extraction")}
    only |= {} if kind == "tokens" else dict.fromkeys(ROLES)
    stated = {"transformer_task": task, **reads}
    unread = [name for name, usual in only.items() if stated.get(name) not in (None, usual)]
    refuse(unread, f"{folder / READING} has {', '.join(unread)}, which are not supported: remove them")


def _common(reads: Mapping[str, Any], named: Mapping[str, Any], folder: Path) -> Sentences:
    """Return what the files say of every kind of vectors: lengths, prompts, letters."""
    prompts, default = named.get("prompts") or {}, named.get("default_prompt_name")
    kept, most = named.get("truncate_dim"), reads.get("max_seq_length")
    for key, value, file in (("truncate_dim", kept, PROMPTS), ("max_seq_length", most, READING)):
        wrong = value is not None and (type(value) is not int or value < 1)
        refuse_key(wrong, key, value, "it must be a whole number of 1 at least, or null", folder / file)
    texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    refuse(
        not texts or (default is not None and default not in prompts),
        f"{folder / PROMPTS} must have prompts of text, and among them default_prompt_name {default!r}",
    )
    return Sentences(
        max_length=most,
        lowercase=bool(reads.get("do_lower_case", False)),
        prompts=prompts,
        prompt=default,
        truncate_dim=kept,
    )


def _dense(how: Sentences, parts: Parts, path: Path) -> Sentences:
    """Add a pooling, and the layers after it."""
    kinds = [kind for kind, _ in parts]
    order = [kind for kind in kinds if kind in ("Transformer", "Pooling")]
    refuse(
        kinds[: len(order)] != order or order not in (["Transformer"], ["Transformer", "Pooling"]),
        f"{path} lists {', '.join(kinds)}: supported is a Transformer, a Pooling, then others",
    )
    stated = read_json(parts[1][1] / "config.json") if "Pooling" in kinds else {}
    return _with_layers(
        replace(
            how,
            pooling=_read_pooling(stated, parts[1][1] if "Pooling" in kinds else path.parent),
            pools_prompt=bool(stated.get("include_prompt", True)),
        ),
        [read_layer(kind, place) for kind, place in parts if kind in LAYERS],
    )


def _with_layers(how: Sentences, layers: list[VectorLayer]) -> Sentences:
    unit = bool(layers) and layers[-1].kind == "Normalize"
    return replace(how, normalise=unit, layers=tuple(layers[:-1] if unit else layers))


def _sparse(
    how: Sentences, parts: Parts, named: Mapping[str, Any], config: ModelConfig, path: Path
) -> Sentences:
    """Add a SpladePooling."""
    kinds = [kind for kind, _ in parts]
    refuse(
        len(kinds) != 2 or not kinds[0].endswith("Transformer") or kinds[1] != "SpladePooling",
        f"{path} lists {', '.join(kinds)}: supported is a Transformer, then a SpladePooling",
    )
    refuse(
        config.head != "mlm",
        f"{path} has a SpladePooling, which needs a masked language model, and config.json names one with "
        f"head {config.head}: name the class that ends in ForMaskedLM",
    )
    place = parts[1][1]
    return replace(how, splade=read_splade(read_json_if_any(place / "config.json"), named, place))


def _of_tokens(
    how: Sentences, parts: Parts, reads: Mapping[str, Any], named: Mapping[str, Any], pylate: bool, path: Path
) -> Sentences:
    """Add late interaction, and the layers on each token."""
    kinds = [kind for kind, _ in parts]
    refuse(
        kinds.count("Transformer") != 1 or kinds[0] != "Transformer",
        f"{path} lists {', '.join(kinds)}: supported is one Transformer, then others",
    )
    own = dict(how.prompts)
    if pylate:
        layers = [_of_pylate(kind, place) for kind, place in parts if kind in LAYERS]
        late = read_pylate(named, path.with_name(PROMPTS))
        for role, marker in late.markers.items():  # with which its text may begin too
            own |= {role: own[role].removeprefix(marker)} if role in own else {}
        if not layers or layers[-1].kind != "Normalize":
            layers.append(VectorLayer("Normalize"))
    else:
        layers = [read_layer(kind, place, TOKENS) for kind, place in parts if kind in LAYERS]
        masks = [
            read_json_if_any(place / "config.json") for kind, place in parts if kind == "MultiVectorMask"
        ]
        late = read_native(reads, masks[0] if masks else None, named, path.parent)
    return _with_layers(replace(how, prompts=own, late=late), layers)


def _of_pylate(kind: str, place: Path) -> VectorLayer:
    """Read a layer of PyLate, which is on tokens whatever its config.json says."""
    stated = read_json_if_any(place / "config.json")
    layer = read_layer(kind, place, str(stated.get("module_input_name", TOKENS)))
    keys = ("module_input_name", "module_output_name")
    return replace(layer, stated={key: value for key, value in layer.stated.items() if key not in keys})


def is_stanford(theirs: Mapping[str, Any]) -> bool:
    """Return True if a config.json is that of a ColBERT of Stanford."""
    named = theirs.get("architectures")
    return isinstance(named, list) and STANFORD in named


def _stanford(folder: Path, config: ModelConfig) -> Sentences:
    """Read a ColBERT of Stanford, whose layer is a tensor of the model's file."""
    entry = open_weights(folder).get(LINEAR)
    if entry is None:
        raise CheckpointError(f"{folder} is a {STANFORD} and has no tensor {LINEAR}: fetch it again")
    weight = entry.read().to(torch.float32, copy=True)
    refuse(
        weight.ndim != 2, f"{folder}: tensor {LINEAR} has shape {tuple(weight.shape)}: it must be a matrix"
    )
    size = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False}
    dense = VectorLayer(
        "Dense", {**size, "activation_function": "torch.nn.Identity"}, {"linear.weight": weight}
    )
    late = read_stanford(read_json_if_any(folder / METADATA), folder / METADATA)
    how = Sentences(normalise=True, layers=(dense,), late=late)
    how.width(config.d_model)
    return how


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
    """Write the files that `read_sentences` and sentence-transformers read; with markers, PyLate's."""
    splade, late = sentences.splade, sentences.late
    first, name, layers = "Transformer", TOKENS if late else NAME, list(sentences.layers)
    own: list[tuple[str, str, dict[str, Any]]] = []  # modules besides layers: folder, type, config.json
    reads: dict[str, Any] = {"max_seq_length": sentences.max_length, "do_lower_case": sentences.lowercase}
    named: dict[str, Any] = {}
    if sentences.prompts:
        named = {"prompts": dict(sentences.prompts), "default_prompt_name": sentences.prompt}
    if sentences.truncate_dim is not None:
        named["truncate_dim"] = sentences.truncate_dim
    if splade is not None:
        first = SPARSE + "MLMTransformer"
        own = [("1_SpladePooling", SPARSE + "SpladePooling", splade_pooling(splade))]
        named |= splade_model(splade)
    elif late is not None and late.markers:
        named |= pylate_model(late)
    elif late is not None:
        own = [("1_MultiVectorMask", MASK, native_mask(late))]
        named |= native_model(late)
        reads |= native_reads(late)
    else:
        own = [(POOLING, TYPE + "Pooling", _write_pooling(sentences, d_model))]
    pylate = late is not None and bool(late.markers)  # scales by itself
    if sentences.normalise and not pylate:
        layers.append(VectorLayer("Normalize", {"module_input_name": name, "module_output_name": name}))
    after = [(f"{number}_{layer.kind}", layer) for number, layer in enumerate(layers, start=1 + len(own))]
    dense = PYLATE if pylate else TYPE
    listed = [
        ("", first if "." in first else TYPE + first),
        *((path, kind) for path, kind, _ in own),
        *((path, f"{dense}{layer.kind}{'.Dense' if pylate else ''}") for path, layer in after),
    ]
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(listed)
    ]
    write_json(folder / MODULES, modules)
    for path, _, config in own:
        (folder / path).mkdir()
        write_json(folder / path / "config.json", config)
    for path, layer in after:
        layer.write(folder / path)
    write_json(folder / READING, reads)
    if named:
        write_json(folder / PROMPTS, named)
