"""Writing a GGUF file: fields, then each tensor in its type, through the gguf package's writer."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from clearhead.core.config import ModelConfig, RopeScaling
from clearhead.core.transformer import Transformer
from clearhead.errors import CheckpointError
from clearhead.hub.checkpoint import Description, outgoing
from clearhead.hub.files import refuse, whole_file
from clearhead.hub.gguf import (
    BYTE,
    CONTROL,
    FIELD,
    NORMAL,
    PROBES,
    ROLES,
    SPLITS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GgufHeader,
    StoredTensor,
    gguf_package,
    gguf_tokenizer,
)
from clearhead.hub.gguf_architectures import (
    FACTORS,
    check_written,
    dialect_for,
    layout,
    llama3_factors,
    written_fields,
)
from clearhead.hub.tokenizer import templates_of
from clearhead.hub.weights import Outgoing, cast
from clearhead.run.quant.apply import refuse_quantized

TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "Q4_0": 2}  # with the number of general.file_type
TABLES = ("token_embd.weight", "output.weight", "position_embd.weight")
WHOLE = ("position_embd.weight", ".ffn_gate_inp.weight")  # read in float32 by llama.cpp
BLOCK = 32  # weights of a quantized block


def write_gguf(
    path: Path,
    model: Transformer,
    described: Description,
    kind: str,
    tokenizer: Tokenizer | None = None,
    special: Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a model as one file: whole, or not at all.

    `kind` is the type of the matrices, one of `TYPES`. Norms and biases are F32 in any case, and with Q4_0
    the token table and the output layer are Q8_0.
    """
    refuse_quantized(model, "written as GGUF")
    refuse(kind not in TYPES, f"GGUF type {kind!r} cannot be written: choose from {', '.join(TYPES)}")
    config = model.config
    name, dialect = dialect_for(config, described.kind)
    stored = Description(described.theirs, config, described.kind, stored=layout(dialect))
    tensors = outgoing(model, stored)
    fields = written_fields(config, name, dialect)
    fields |= (
        {"tokenizer.ggml.model": "no_vocab"}
        if tokenizer is None
        else tokenizer_fields(tokenizer, special or {}, settings or {}, config.vocab_size)
    )
    types = {key: _type(key, tensor.shape, kind) for key, tensor in tensors.items()}
    header = {key: StoredTensor(types[key], tensor.shape, 0, 0) for key, tensor in tensors.items()}
    scaling = config.rope_scaling
    if config.positions == "rope" and scaling is not None and scaling.kind == "llama3":
        trained = scaling.original_positions or config.max_positions
        factors = _factors(replace(scaling, original_positions=trained), config, name)
        types[FACTORS] = "F32"
        tensors[FACTORS] = Outgoing(tuple(factors.shape), factors.dtype, (), lambda sources: factors)
        config = config.replace(rope_scaling=None)
    check_written(GgufHeader(path, {"general.architecture": name, **fields}, header, 0), config)
    with whole_file(path) as new:
        _write(new, name, fields, TYPES[kind], types, tensors, dict(model.named_parameters()))


def _factors(scaling: RopeScaling, config: ModelConfig, name: str) -> Tensor:
    """Return the divisors of frequencies, all that a file has of Llama 3's scaling; refuse any other."""
    same = (scaling.low_frequency_factor, scaling.high_frequency_factor) == (1.0, 4.0)
    trained = scaling.original_positions in (8192, config.max_positions)
    refuse(not (same and trained), f"GGUF's {name} cannot express {config.rope_scaling}")
    return llama3_factors(scaling, config.rope_base, config.d_head or 0).float()


def _type(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Return the type that a tensor is written in."""
    if len(shape) < 2 or kind == "F32" or name.endswith(WHOLE):
        return "F32"
    if kind == "F16" or shape[-1] % BLOCK:
        return "F16"
    return "Q8_0" if name in TABLES else kind


def _write(
    path: Path,
    name: str,
    fields: Mapping[str, Any],
    file_type: int,
    types: Mapping[str, str],
    tensors: Mapping[str, Outgoing],
    parameters: Mapping[str, Tensor],
) -> None:
    """Write the header, then one tensor at a time."""
    package = gguf_package()
    writer = package.GGUFWriter(path, name)
    try:
        writer.add_file_type(file_type)
        writer.add_quantization_version(package.GGML_QUANT_VERSION)
        adders = {
            **{bool: writer.add_bool, int: writer.add_uint32},
            **{float: writer.add_float32, str: writer.add_string},
        }
        for key, value in fields.items():
            adders.get(type(value), writer.add_array)(key, value)
        for key, tensor in tensors.items():
            kind = package.GGMLQuantizationType[types[key]]
            block, size = package.GGML_QUANT_SIZES[kind]
            count = math.prod(tensor.shape) // block * size
            writer.add_tensor_info(key, tensor.shape, np.dtype("float32"), count, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key, tensor in tensors.items():
            weight = tensor.make([parameters[source].detach().cpu() for source in tensor.sources]).float()
            weight = cast(weight, torch.float16, key).float() if types[key] == "F16" else weight
            kind = package.GGMLQuantizationType[types[key]]
            writer.write_tensor_data(package.quants.quantize(weight.contiguous().numpy(), kind))
    finally:
        writer.close()


# The tokenizer ---------------------------------------------------------------------------------------------


def tokenizer_fields(
    tokenizer: Tokenizer, special: Mapping[str, int], settings: Mapping[str, Any], size: int
) -> dict[str, Any]:
    """Return the fields of a tokenizer for a table of `size` tokens."""
    model = json.loads(tokenizer.to_str())["model"]
    fallback = bool(model.get("byte_fallback"))
    refuse(
        model["type"] != "BPE" or tokenizer.get_vocab_size() > size,
        f"GGUF has no place for this tokenizer, of kind {model['type']}: supported is BPE, of bytes or with "
        "bytes for unknown characters",
    )
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    names = {number: text for text, number in vocabulary.items()}
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    tokens = [names.get(number, f"[PAD{number}]") for number in range(size)]
    fields: dict[str, Any] = {
        f"{FIELD}tokens": tokens,
        f"{FIELD}token_type": [_kind(number, names, added, special, fallback) for number in range(size)],
        **{f"{FIELD}{ROLES[role]}_token_id": number for role, number in special.items() if role in ROLES},
        **_around(tokenizer, special),
        **{
            "tokenizer.chat_template" + ("" if name == "default" else f".{name}"): text
            for name, text in templates_of(settings).items()
        },
    }
    if fallback:
        ranks = {first + second: -float(rank) for rank, (first, second) in reversed([*enumerate(merges)])}
        first_tokens = tokenizer.encode("a", add_special_tokens=False).tokens
        fields |= {
            f"{FIELD}model": "llama",
            f"{FIELD}scores": [ranks.get(text, -float(len(merges))) for text in tokens],
            f"{FIELD}add_space_prefix": bool(first_tokens) and first_tokens[0].startswith("\u2581"),
        }
        ways: list[dict[str, Any]] = [{}]
    else:
        fields |= {f"{FIELD}model": "gpt2", f"{FIELD}merges": [" ".join(pair) for pair in merges]}
        ways = [{f"{FIELD}pre": name} for name in (*SPLITS, "dbrx")]
    for way in ways:
        if _agrees(tokenizer, fields | way):
            return fields | way
    raise CheckpointError(
        "GGUF has no name for how this tokenizer splits text, and llama.cpp would split it otherwise: "
        "a model trained with tokens.kind=byte or tokens.kind=bpe can be converted"
    )


def _kind(
    number: int, names: Mapping[int, str], added: Mapping[int, Any], special: Mapping[str, int], pieces: bool
) -> int:
    if number not in names:
        return UNUSED
    if pieces and special.get("unk") == number:
        return UNKNOWN
    if number in added:
        return CONTROL if added[number].special else USER_DEFINED
    return BYTE if pieces and re.fullmatch(r"<0x[0-9A-F]{2}>", names[number]) else NORMAL


def _around(tokenizer: Tokenizer, special: Mapping[str, int]) -> dict[str, bool]:
    """Return whether a text begins with the first token and ends with the last."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=more).ids for more in (False, True))
    begins, ends = (
        bool(
            role in special
            and whole[place : place + 1 or None] == [special[role]]
            and len(whole) > len(plain)
        )
        for role, place in (("bos", 0), ("eos", -1))
    )
    return {f"{FIELD}add_bos_token": begins, f"{FIELD}add_eos_token": ends}


def _agrees(tokenizer: Tokenizer, fields: dict[str, Any]) -> bool:
    """Return whether the tokenizer that is read from these fields gives the same ids for some texts."""
    back = gguf_tokenizer(GgufHeader(Path("written.gguf"), {"general.architecture": "", **fields}, {}, 0))
    return back is not None and all(back.encode(text).ids == tokenizer.encode(text).ids for text in PROBES)
