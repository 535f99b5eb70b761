"""A model with all that belongs to it: tokenizer, special tokens, labels, generation defaults.

`Bundle` is what tasks read and what is saved. `clearhead.run.api.Model` is a bundle with the tasks as its
methods. An `Engine` is what its generation keeps from call to call: the inference model, captured steps, the
last prompt's cache. Prompts are prefilled by the model as it is, whatever their length. Their keys then move
into buffers of one size, and from there on a captured step takes every row one token further.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from types import NoneType
from typing import Any, Self

import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor, nn

from clearhead.core.attention import Attention
from clearhead.core.cache import Cache
from clearhead.core.config import ModelConfig
from clearhead.core.taps import SILENT, tap_for
from clearhead.core.transformer import Transformer
from clearhead.errors import InputError, refuse
from clearhead.hub import checkpoint, files, quantized
from clearhead.hub.architecture import SECTION
from clearhead.hub.checkpoint import default_names
from clearhead.hub.gguf import SUFFIX
from clearhead.hub.gguf_writing import write_gguf
from clearhead.hub.peft import Adapters
from clearhead.hub.preprocessor import PREPROCESSOR, PROCESSOR
from clearhead.hub.quantized import code_tensors, outgoing_codes
from clearhead.hub.sentences import Sentences, write_sentences
from clearhead.hub.tokenizer import check_infilling, encode, framed, save_tokenizer, stop_ids, truncation_side
from clearhead.hub.tokens.text import clean, decoded
from clearhead.hub.towers import JoinedImages, JoinedTowers
from clearhead.hub.weights import Outgoing, write_tensors
from clearhead.learn.batches.ragged import padded, real_tokens
from clearhead.learn.parallel.shards import is_split
from clearhead.run.generate import sequence
from clearhead.run.generate.decode import steps_back
from clearhead.run.generate.grammar import Grammars
from clearhead.run.generate.own_rules import own_options
from clearhead.run.generate.stream import agreed
from clearhead.run.kernels.library import library
from clearhead.run.kernels.lora import merged
from clearhead.run.kernels.parts import JoinedLinear, PackedLinear, fingerprint, same
from clearhead.run.kernels.prepare import prepared
from clearhead.run.kernels.steps import Steps
from clearhead.run.quant.layers import few_bits, quantized_parts
from clearhead.variants.contexts import unwrapped
from clearhead.variants.kinds import denoises


class Prefix:
    """The cache of a single row, and the tokens it has read; the next prompt begins where it differs."""

    def __init__(self, model: Transformer, weights: Sequence[Tensor] = ()) -> None:
        self.model, self.weights = model, weights  # `weights`: their fingerprints
        self.cache = Cache()
        self.tokens: list[int] = []

    def begin(self, prompt: Sequence[int], room: int) -> Cache:
        """Return a cache with what `prompt`, all but its last token, shares with the tokens read before.

        Tokens are compared by their keys, in which images are digests.
        """
        # Where angles go by the length of a call, what was read with fewer tokens was turned otherwise.
        shared = 0 if self.model.config.rotates_by_length else agreed(self.tokens, prompt[:-1])
        if shared < self.cache.length and not steps_back(self.model):
            shared = 0  # a state does not step back
        self.cache.crop(shared)
        self.cache.reserve = room
        return self.cache

    def end(self, row: sequence.Sequence) -> None:
        """Remember what the cache holds now."""
        self.tokens = row.keys[: self.cache.length]


class Engine:
    """The inference model and what belongs to it, made when needed and kept up to date."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.made_of: object = None  # the parts, parameters and options that the copy was made from
        self.copy: Transformer | None = None
        self.kept: list[JoinedLinear | PackedLinear] = []  # the parts of the copy that keep weights
        self.steps: Steps | None = None  # of the copy, compiled
        self.prefix: Prefix | None = None  # what the last request with `reuse` has read
        self.grammars: Grammars | None = None  # of the tokenizer that was used last

    def runner(self) -> Transformer:
        """Return the inference model; the model itself where it is split, hooked, tapped or has a kernel."""
        parts = list(self.model.modules())
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        hooked |= any("forward" in vars(part) for part in parts)
        chosen = any(isinstance(part, Attention) and part.kernel != "fused" for part in parts)
        if hooked or chosen or is_split(self.model) or tap_for(self.model) is not SILENT:
            return self.model
        made_of = [_described(part) for part in parts]
        if self.copy is None or self.made_of != made_of:
            self.copy = prepared(self.model)  # may lay out weights anew
            self.made_of = [_described(part) for part in parts]
            keeping = (JoinedLinear, PackedLinear)
            self.kept = [part for part in self.copy.modules() if isinstance(part, keeping)]
        else:
            for kept in self.kept:
                kept.refresh()
        return self.copy

    def reader(self) -> Transformer:
        """Return what runs whole texts: on a CPU the inference model, where its matmuls are compiled.

        Not with quantized weights: there the inference model rounds its inputs too.
        """
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        exact = on_cpu and library() is not None and not quantized_parts(self.model)
        return self.runner() if exact else self.model

    def steps_for(self, runner: Transformer, compiled: bool | None) -> Steps | None:
        """Return the compiled steps of the inference model, where they are asked for or may pay."""
        on_gpu = next(runner.parameters()).is_cuda
        if runner is self.model or not (on_gpu if compiled is None else compiled):
            return None
        if self.steps is None or self.steps.model is not runner:
            self.steps = Steps(runner)
        return self.steps

    def grammars_of(self, tokenizer: Tokenizer) -> Grammars:
        """Return the grammars of a tokenizer, whose tokens are spelled out once."""
        if self.grammars is None or self.grammars.tokenizer is not tokenizer:
            self.grammars = Grammars(tokenizer, self.model.config.vocab_size)
        return self.grammars

    def take_prefix(self, runner: Transformer) -> Prefix:
        """Take what the last request has read, if the model is still the same; no other call has it then."""
        prefix, self.prefix = self.prefix, None
        weights = [fingerprint(weight) for weight in self.model.parameters()]
        if prefix is not None and prefix.model is runner is not self.model and same(prefix.weights, weights):
            return prefix
        return Prefix(runner, weights)


PLAIN = (int, float, str, NoneType)


def _described(part: nn.Module) -> list[object]:
    """Return what of a part its copy has by value, and what it shares by identity."""
    owned = [tensor for tensor in (*part._parameters.values(), *part._buffers.values()) if tensor is not None]
    tensors = [(id(tensor), tensor.data_ptr(), tensor.dtype, tensor.device) for tensor in owned]
    options = [
        value if isinstance(value, PLAIN) else _by_value(value)
        for name, value in vars(part).items()
        if name[0] != "_" and name != "training"
    ]
    return [part, type(part), tensors, options]


def _by_value(value: object) -> object:
    """Return a container spelled out, since it can be changed in place, and the identity of all else."""
    return repr(value) if isinstance(value, tuple | list | dict | set) else id(value)


SHARD_SIZE = 5_000_000_000
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


def best_device(name: str | torch.device = "auto") -> torch.device:
    """Return the device called `name`; "auto": a GPU if there is one, else Apple's, else the CPU."""
    present = {
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
        "cpu": 1,
    }
    if name == "auto":
        return torch.device(next(kind for kind, count in present.items() if count))
    here = ", ".join(kind for kind, count in present.items() if count)
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise InputError(f'device "{name}" is not known: choose auto or one of {here}') from None
    refuse(
        (device.index or 0) >= present.get(device.type, 0),
        f'device "{name}" is not on this machine: choose auto or one of {here}',
    )
    return device


def float_dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype that weights may have, by its name or itself; None stays."""
    dtype = DTYPES.get(str(given).removeprefix("torch."))
    refuse(
        given is not None and dtype is None,
        f"dtype {str(given)!r} is not one that weights may have: choose from {', '.join(DTYPES)}",
    )
    return dtype


@dataclass(repr=False)
class Bundle:
    """A Transformer with its tokenizer and settings, whether it was loaded or built."""

    model: Transformer
    tokenizer: Tokenizer | None = None
    generation: dict[str, Any] = field(default_factory=dict)  # defaults: special token ids, sampling
    description: checkpoint.Description | None = None  # the config.json it came with
    folder: Path | None = None
    special: dict[str, int] = field(default_factory=dict)  # ids by role: pad, bos, eos, cls, sep, mask, ...
    settings: dict[str, Any] = field(default_factory=dict)  # the tokenizer_config.json it came with
    labels: tuple[str, ...] = ()  # names of the classes, for a head that has them
    sentences: Sentences | None = None  # how sentence-transformers makes one vector of a text
    images: dict[str, Any] = field(default_factory=dict)  # the preprocessor_config.json it came with
    towers: JoinedTowers | None = None  # texts and images in one space; `model` is then the text tower
    image_encoder: JoinedImages | None = None  # makes vectors of the images in a prompt; `model` reads them
    _engine: Engine | None = field(default=None, init=False, repr=False, compare=False)
    _adapters: Adapters | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.model = unwrapped(self.model)
        if self.towers is not None and self.towers.text is not self.model:
            self.towers = None  # a changed copy of the text tower stands alone

    def __repr__(self) -> str:
        return "\n".join([type(self).__name__, *(f"  {name}: {fact}" for name, fact in self.facts.items())])

    def _repr_html_(self) -> str:
        """Return the same as a table, for a notebook."""
        rows = (f"<tr><th>{name}</th><td>{escape(fact)}</td></tr>" for name, fact in self.facts.items())
        return f"<table>{''.join(rows)}</table>"

    @property
    def facts(self) -> dict[str, str]:
        """What to know of the model at a glance, a few words each."""
        config, weight = self.config, next(self.model.parameters())
        count = sum(parameter.numel() for parameter in self.model.parameters())
        dtype = str(weight.dtype).removeprefix("torch.")
        shared = f" ({config.n_kv_heads} for keys and values)" if config.n_kv_heads != config.n_heads else ""
        layers = " + ".join(str(stack.n_layers) for stack in config.stacks)
        head = f"{config.head}, {config.n_classes} classes" if config.n_classes else str(config.head)
        tokens = "none" if self.tokenizer is None else f"{self.tokenizer.get_vocab_size():,} tokens"
        return {
            "model": f"{config.family} of {config.input}, head {head}",
            "weights": f"{count:,} parameters, {dtype} on {weight.device}{few_bits(self.model)}",
            "size": f"{layers} layers, d_model {config.d_model}, {config.n_heads} heads{shared}",
            "reads": f"{config.max_positions:,} positions ({config.positions}); tokenizer: {tokens}",
            **({} if self.image_encoder is None else {"images": self.image_encoder.fact}),
            "folder": str(self.folder or "none: it was built here"),
        }

    def to(
        self, device: str | torch.device | torch.dtype | None = None, dtype: str | torch.dtype | None = None
    ) -> Self:
        """Move the model to a device, or cast it to a dtype, or both; as PyTorch's `to`, in place.

        Args:
            device: "cpu", "cuda", "cuda:1", "mps", or "auto" for the best there is; or a dtype.
            dtype: float32, bfloat16, float16 or float64, by name or as PyTorch's.
        """
        if isinstance(device, torch.dtype) or str(device) in DTYPES:
            refuse(dtype is not None, f"two dtypes were given, {device} and {dtype}: leave one of them out")
            device, dtype = None, str(device)
        cast = float_dtype(dtype)
        for whole in (self.towers or self.model, self.image_encoder):
            if whole is not None:
                whole.to(device=None if device is None else best_device(device), dtype=cast)
        return self

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.model.config

    @property
    def engine(self) -> Engine:
        """What generation keeps from call to call; made when first needed, and never copied or pickled."""
        if self._engine is None or self._engine.model is not self.model:
            self._engine = Engine(self.model)
        return self._engine

    @property
    def adapters(self) -> Adapters:
        """The model's adapters, by name: `m.adapters.add("polite", folder)`, `m.adapters.use("polite")`."""
        if self._adapters is None or self._adapters.model is not self.model:
            self._adapters = Adapters(self.model, self.described().architecture)
        return self._adapters

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_engine": None}

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; LABEL_0, LABEL_1, ... where they have none."""
        return self.labels or default_names(self.config.n_classes)

    @property
    def mask_id(self) -> int:
        """The id of the mask token."""
        if "mask" not in self.special:
            raise InputError(
                f"{self.folder or 'this model'} names no mask token: state mask_token_id in config.json, or "
                'set m.special["mask"]'
            )
        return self.special["mask"]

    @property
    def stops(self) -> tuple[int, ...]:
        """Every id that ends a generated text."""
        return stop_ids(self.special, self._stated)

    @property
    def own_options(self) -> dict[str, Any]:
        """The model's own rules of generation, as options of a request."""
        return own_options(self._stated, self.special, self.stops, self.config.vocab_size)

    @property
    def _stated(self) -> dict[str, Any]:
        """What the files say of generation: generation_config.json, or, without one, config.json.

        A model that was built here has no files: it ends with its tokenizer's token unless told otherwise.
        """
        if self.description is not None:
            return self.generation or self.description.theirs
        ends = {"eos_token_id": self.special["eos"]} if "eos" in self.special else {}
        return ends | self.generation

    @property
    def start_ids(self) -> list[int]:
        """The ids that the decoder of an encoder-decoder begins with; none for a model of one stack."""
        if self.config.family != "encoder-decoder":
            return []
        roles = ("decoder_start", "bos", "pad")
        stated = (self._stated.get(f"{role}_token_id") for role in roles[:2])
        known = (*stated, *(self.special.get(role) for role in roles))
        start = next((token for token in known if type(token) is int and token >= 0), 0)
        return [start, self.special["forced_bos"]] if "forced_bos" in self.special else [start]

    @property
    def max_length(self) -> int:
        """The most tokens that a text given to the model may have."""
        own = self.sentences and self.sentences.max_length  # goes before the tokenizer's, as in the library
        limits = (self.config.max_positions, own or self.settings.get("model_max_length"))
        return min(limit for limit in limits if type(limit) is int and limit > 0)

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, where text cannot do without one."""
        if self.tokenizer is None:
            raise InputError(
                f"{self.folder or 'this model'} has no tokenizer (looked for tokenizer.json, vocab.txt, "
                "vocab.json with merges.txt, a SentencePiece .model): give token ids in place of text, "
                "add tokenizer.json, or name one that lies elsewhere (tokenizer)"
            )
        return self.tokenizer

    def encode(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        """Return the token ids of each text, special tokens included, cut to `max_length`."""
        check_infilling(self.settings, texts)
        return encode(self.text_tokenizer, texts, max_length, truncation_side(self.settings))

    def framed(self, text: str, pair: str | None = None, max_length: int | None = None) -> Encoding:
        """Return the tokens of a text or a pair, special ones too, cut to `max_length` or the model's own."""
        length = self.max_length if max_length is None else max_length
        return framed(self.text_tokenizer, length, text, pair, truncation_side(self.settings))

    def decode(self, ids: Any, special: bool = False) -> Any:
        """Return the text of token ids; of rows of ids, a list of texts.

        Args:
            ids: a list, tensor or array [T], or rows of them [B, T].
            special: write special tokens too, such as padding and the end of a text.
        """
        given = ids.tolist() if hasattr(ids, "tolist") else ids
        refuse(
            not isinstance(given, list | tuple), f"{given!r:.40} was given: decode takes a list of token ids"
        )
        if given and (isinstance(given[0], list | tuple) or hasattr(given[0], "tolist")):
            return [self.decode(row, special) for row in given]
        size = self.config.vocab_size
        wrong = next((token for token in given if type(token) is not int or not 0 <= token < size), None)
        refuse(wrong is not None, f"{wrong!r} is no token id: ids go from 0 to {size - 1}")
        return decoded(self.text_tokenizer, given, special)

    def batch(self, texts: Sequence[str | Sequence[int]], left: bool = False) -> tuple[Tensor, Tensor]:
        """Return texts, or rows of ids, as ids and mask for a call of the model: two tensors [B, T].

        Rows are padded to the longest, at the right or, for a decoder that goes on from their ends, at the
        left. The mask is True for tokens and False for padding: `m.model(*m.batch(texts))`. Texts longer than
        the model takes are refused.
        """
        refuse(isinstance(texts, str) or not len(texts), "batch takes a list of texts, or rows of token ids")
        rows = [self.encode([row])[0] if isinstance(row, str) else self.prompt_ids(row) for row in texts]
        longest = max(map(len, rows))
        refuse(
            longest > self.max_length,
            f"a text has {longest} tokens and the model takes {self.max_length}: shorten it",
        )
        device = next(self.model.parameters()).device
        return padded(rows, self.special.get("pad", 0), device, left), real_tokens(rows, device, left)

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the ids of a prompt; of one that is continued, without the end that the tokenizer adds."""
        if not isinstance(prompt, str):
            given: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
            listed = isinstance(given, Sequence) and not isinstance(given, bytes | bytearray)
            # One number of a tensor or an array is a number.
            ids = [value.tolist() if hasattr(value, "tolist") else value for value in given] if listed else []
            refuse(
                not listed or not all(type(token) is int for token in ids),
                f"a prompt is {given!r:.40}: it must be text or a list of token ids, whole numbers",
            )
            size = self.config.stacks[0].vocab_size  # of the stack that reads prompts
            wrong = next((token for token in ids if not 0 <= token < size), None)
            refuse(wrong is not None, f"ids contain {wrong}: allowed are 0 to {size - 1} (vocab_size {size})")
            return ids
        check_infilling(self.settings, [prompt])
        encoding = self.text_tokenizer.encode(clean(prompt))
        ids = list(encoding.ids)
        ended = len(ids) > 1 and encoding.special_tokens_mask[-1] and ids[-1] in self.stops
        if (self.config.family == "decoder" or denoises(self.config)) and ended:
            ids = ids[:-1]
        if not ids and "bos" in self.special:
            ids = [self.special["bos"]]
        return ids

    def save(
        self, folder: str | Path, dtype: str | torch.dtype | None = None, shard_size: int = SHARD_SIZE
    ) -> None:
        """Write a Hugging Face directory: whole, or not at all. Other files of an existing directory stay.

        Adapters that are in use are merged into the weights that are written. A name that ends in .gguf is
        written as one GGUF file, whose `dtype` may also be Q8_0 or Q4_0.
        """
        refuse(
            is_split(self.model),
            f"this model is split over processes: use the directory it was loaded from, {self.folder}",
        )
        described = self.described()
        if Path(folder).suffix == SUFFIX:
            with merged(self.model):
                write_gguf(
                    Path(folder),
                    self.model,
                    described,
                    self._gguf_type(dtype),
                    self.tokenizer,
                    self.special,
                    self.settings,
                )
            return
        with merged(self.model), files.whole_folder(Path(folder)) as work:
            parameters = dict[str, Tensor]((*self.model.named_parameters(), *code_tensors(self.model)))
            theirs = described.theirs
            if self.towers is not None:
                parameters, theirs = dict(self.towers.named_parameters()), self.towers.theirs
                tensors = self.towers.outgoing(float_dtype(dtype))
            elif self.image_encoder is not None:
                parameters |= dict(self.image_encoder.named_parameters("image"))
                own = checkpoint.outgoing(self.model, described, float_dtype(dtype))
                theirs, tensors = self.image_encoder.saved(described, own, float_dtype(dtype))
            else:
                tensors = checkpoint.outgoing(self.model, described, float_dtype(dtype))
                tensors |= outgoing_codes(self.model)
            write_tensors(
                work, files.MODEL, tensors, lambda name, owner: parameters[name].detach().cpu(), shard_size
            )
            self.write_settings(work, described, tensors, theirs)

    def _gguf_type(self, dtype: str | torch.dtype | None) -> str:
        """Return the type of GGUF that is asked for, or, where none is, the one that holds the weights."""
        name = str(dtype or next(self.model.parameters()).dtype).removeprefix("torch.")
        return {"float32": "F32", "float64": "F32", "bfloat16": "F32", "float16": "F16"}.get(name, name)

    def described(self) -> checkpoint.Description:
        """Return what the model is saved as: its architecture and config.json."""
        saved = checkpoint.exported(self.config, self.description)
        if quantized_parts(self.model):  # no architecture of others has such tensors
            saved = checkpoint.Description(quantized.described(self.model, self.config), self.config, SECTION)
        theirs = dict(saved.theirs)
        if len(self.labels) == self.config.n_classes > 0:
            theirs |= {
                "id2label": {str(number): name for number, name in enumerate(self.labels)},
                "label2id": {name: number for number, name in enumerate(self.labels)},
            }
        if saved is not self.description:  # whose config.json says the special ids
            theirs |= self._named_ids(theirs)
        return replace(saved, theirs=theirs)

    def write_settings(
        self,
        folder: Path,
        described: checkpoint.Description,
        tensors: Mapping[str, Outgoing],
        theirs: Mapping[str, Any] | None = None,
    ) -> None:
        """Write all of a directory but the weights, which are written as `tensors`.

        `theirs`: its config.json, where it is not that of the model alone.
        """
        checkpoint.write_config(folder, theirs or (self.towers or described).theirs, tensors)
        if self.tokenizer is not None:
            save_tokenizer(folder, self.tokenizer, self.special, self.settings, self.config.max_positions)
        generation = self._stated if self.generation else {}
        for name, settings in (("generation_config.json", generation), (PREPROCESSOR, self.images)):
            if settings:
                files.write_json(folder / name, settings)
        if self.image_encoder is not None:
            token = self.tokenizer and self.tokenizer.id_to_token(self.image_encoder.config.token_id)
            files.write_json(folder / PROCESSOR, self.image_encoder.processor(token))
        if self.sentences is not None:
            write_sentences(folder, self.sentences, self.config.d_model)

    def _named_ids(self, theirs: dict[str, Any]) -> dict[str, int]:
        """Return special token ids by their names in config.json, all but a padding id that is there."""
        roles = ["bos", "eos", *(["pad"] if theirs.get("pad_token_id") is None else [])]
        if self.config.family == "encoder-decoder":
            roles.append("decoder_start")
        if denoises(self.config):
            roles.append("mask")
        return {f"{role}_token_id": self.special[role] for role in roles if role in self.special}
