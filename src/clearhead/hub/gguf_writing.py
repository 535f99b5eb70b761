"""Writing a GGUF file: fields, then each tensor in its type, through the gguf package's writer."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.errors import CheckpointError, first_line
from clearhead.hub.checkpoint import Description
from clearhead.hub.export import outgoing
from clearhead.hub.files import refuse
from clearhead.hub.gguf_config import (
    FACTORS,
    check_written,
    dialect_for,
    layout,
    llama3_factors,
    written_fields,
)
from clearhead.hub.gguf_file import GgufHeader, StoredTensor, gguf_package
from clearhead.hub.gguf_tokenizer import tokenizer_fields
from clearhead.hub.weights import cast
from clearhead.hub.writing import Outgoing
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
    extra = _factors(config)
    fields = written_fields(config, name, dialect)
    fields |= (
        {"tokenizer.ggml.model": "no_vocab"}
        if tokenizer is None
        else tokenizer_fields(tokenizer, special or {}, settings or {}, config.vocab_size)
    )
    types = {each: _type(each, one.shape, kind) for each, one in tensors.items()} | dict.fromkeys(
        extra, "F32"
    )
    shapes = {each: one.shape for each, one in tensors.items()} | {FACTORS: (len(extra.get(FACTORS, ())),)}
    header = {each: StoredTensor(types[each], shapes[each], 0, 0) for each in types}
    _check(path, {"general.architecture": name, **fields}, header, config, extra)
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(new, name, fields, TYPES[kind], types, tensors, extra, dict(model.named_parameters()))
        os.replace(new, path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or first_line(error)}") from None
    finally:
        with suppress(OSError):
            new.unlink()


def _check(
    path: Path,
    fields: dict[str, Any],
    header: dict[str, StoredTensor],
    config: ModelConfig,
    extra: Mapping[str, Tensor],
) -> None:
    """Refuse what would be read as another model."""
    plain = {each: one for each, one in header.items() if each != FACTORS}
    scaling = config.rope_scaling
    if FACTORS in extra and scaling is not None:  # they say no more than these
        same = (scaling.low_frequency_factor, scaling.high_frequency_factor) == (1.0, 4.0)
        trained = scaling.original_positions in (8192, config.max_positions, None)
        refuse(not (same and trained), f"GGUF's {fields['general.architecture']} cannot express {scaling}")
        config = config.replace(rope_scaling=None)
    check_written(GgufHeader(path, fields, plain, 0), config)


def _factors(config: ModelConfig) -> dict[str, Tensor]:
    """Return the divisors of frequencies, for a model that scales them as Llama 3 does."""
    scaling = config.rope_scaling
    if config.positions != "rope" or scaling is None or scaling.kind != "llama3":
        return {}
    trained = scaling.original_positions or config.max_positions
    whole = replace(scaling, original_positions=trained)
    return {FACTORS: llama3_factors(whole, config.rope_base, config.d_head or 0).float()}


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
    extra: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
) -> None:
    """Write the header, then one tensor at a time."""
    package = gguf_package()
    writer = package.GGUFWriter(path, name)
    try:
        writer.add_file_type(file_type)
        writer.add_quantization_version(package.GGML_QUANT_VERSION)
        for key, value in fields.items():
            _add(writer, key, value)
        everything = {**tensors, **{key: Outgoing(tuple(x.shape), x.dtype, ()) for key, x in extra.items()}}
        for key, one in everything.items():
            kind = package.GGMLQuantizationType[types[key]]
            block, size = package.GGML_QUANT_SIZES[kind]
            count = math.prod(one.shape) // block * size
            writer.add_tensor_info(key, one.shape, np.dtype("float32"), count, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key, one in everything.items():
            given = [parameters[source].detach().cpu() for source in one.sources]
            made = extra[key] if key in extra else one.make(given).float()
            made = cast(made, torch.float16, key).float() if types[key] == "F16" else made
            kind = package.GGMLQuantizationType[types[key]]
            writer.write_tensor_data(package.quants.quantize(made.contiguous().numpy(), kind))
    finally:
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a field in the kind of its value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
