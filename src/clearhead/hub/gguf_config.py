"""The fields of a GGUF file as a config.json, and the other way round.

From the config.json on, a GGUF file is a checkpoint like any other: what its architecture of Hugging Face
honours or refuses is honoured or refused here.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig, RopeScaling
from clearhead.core.positions import rope_frequencies
from clearhead.errors import CheckpointError
from clearhead.hub.architecture import WITHOUT_EFFECT, Architecture
from clearhead.hub.fields import Json
from clearhead.hub.files import refuse
from clearhead.hub.gguf_file import GgufHeader, open_gguf
from clearhead.hub.gguf_tables import DIALECTS, Dialect
from clearhead.hub.registry import ARCHITECTURES
from clearhead.hub.rules import same

FACTORS = "rope_freqs.weight"
LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, whose scores have another scale
# Keys that say how a file was made, or what others say again.
NOT_READ = {"tensor_data_layout", "rope.scaling.finetuned", "rope.dimension_count_swa", "attention.causal"}
REALS = ("scale", "epsilon", "softcapping", "freq_base", "factor")  # keys of numbers that are not whole
SCALING, TRAINED = "rope.scaling.", "original_max_position_embeddings"
LLAMA3_TRAINED = 8192  # positions, low and high factor of every Llama 3.x that was released


def read_config(header: GgufHeader) -> tuple[Json, Architecture]:
    """Return the config.json that a file amounts to, and the rules by which its tensors are read."""
    name = header.architecture
    refuse(
        name not in DIALECTS,
        f'{header.path} has general.architecture "{name}": supported are {", ".join(sorted(DIALECTS))}',
    )
    parts = header.fields.get("split.count", 1)
    refuse(parts not in (0, 1), f"{header.path} is one of {parts} parts: join them, llama-gguf-split --merge")
    stated = {
        key.removeprefix(f"{name}."): _one(header, key, value)
        for key, value in header.fields.items()
        if key.startswith(f"{name}.")
    }
    choices = DIALECTS[name]
    dialect = choices[-1] if stated.get("expert_count", 0) else choices[0]
    theirs: Json = {**dialect.stated, **_stated_keys(header, dialect, stated)}
    architecture = ARCHITECTURES[dialect.model_type]
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{header.path} has no table token_embd.weight: it holds no language model")
    theirs |= {
        "model_type": dialect.model_type,
        "architectures": [next(iter(architecture.classes))],
        "vocab_size": table.shape[0],
        "tie_word_embeddings": dialect.tied or "output.weight" not in header.tensors,
        **{key: tensor in header.tensors for key, tensor in dialect.told.items()},
        **_by_name(header, name, theirs),
        **_rotation(header, dialect, stated, theirs),
        **_special(header),
    }
    return theirs, layout(dialect)


def layout(dialect: Dialect) -> Architecture:
    """Return the rules between the tensors of a file and ours."""
    return Architecture(
        f"GGUF ({dialect.model_type})",
        {},
        (),
        dialect.rules,
        heads={"lm": same({"output": "head.out"})},
        ignored=(FACTORS,),
    )


def _one(header: GgufHeader, key: str, value: Any) -> Any:
    """Return a value that is one for every layer, where it is stated for each."""
    if isinstance(value, list):
        refuse(
            len(set(map(str, value))) != 1, f"{header.path} has {key} {str(value)[:40]}: layers must be alike"
        )
        return value[0]
    return value


def _stated_keys(header: GgufHeader, dialect: Dialect, stated: Mapping[str, Any]) -> Json:
    """Return keys of config.json for those of the file; refuse by name what is not honoured."""
    known = {*dialect.keys, *NOT_READ, "rope.dimension_count", "rope.scale_linear", "expert_count"}
    found: Json = {}
    for key, value in stated.items():
        refuse(
            key not in known and not key.startswith(SCALING) and value not in (0, False, ""),
            f"{header.path} has {header.architecture}.{key} {str(value)[:40]}: it is not supported",
        )
        if key in dialect.keys:
            place = dialect.keys[key]
            refuse(
                found.get(place, value) != value,
                f"{header.path} has {header.architecture}.{key} {value}, and {found.get(place)} elsewhere",
            )
            refuse(
                isinstance(value, str),
                f"{header.path} has {header.architecture}.{key} {str(value)[:40]!r}: it must be a number",
            )
            found[place] = value
    missing = next((key for key in ("block_count", "embedding_length") if key not in stated), None)
    refuse(missing, f"{header.path} has no {header.architecture}.{missing}: it holds no whole model")
    return found


def _by_name(header: GgufHeader, name: str, theirs: Json) -> Json:
    """Return what follows from the name of an architecture and its sizes."""
    if name == "falcon":
        heads, shared = theirs.get("num_attention_heads"), theirs.get("num_kv_heads")
        second = "blk.0.attn_norm_2.weight" in header.tensors
        new = second or shared not in (1, heads)
        return {
            "new_decoder_architecture": new,
            "multi_query": shared == 1,
            **({"num_ln_in_parallel_attn": 2 if second else 1} if new else {}),
        }
    if name not in LARGEST:
        return {}
    width = theirs.get("head_dim")
    if theirs["num_hidden_layers"] == LARGEST[name]:
        width = theirs["hidden_size"] // theirs["num_attention_heads"]
    return {"query_pre_attn_scalar": width}


def _rotation(header: GgufHeader, dialect: Dialect, stated: Mapping[str, Any], theirs: Json) -> Json:
    """Return the keys of rotary positions: the part of a head that rotates, and scaling."""
    found: Json = {}
    heads: Any = stated.get("attention.head_count")
    width: Any = stated.get("embedding_length")
    refuse(
        not (isinstance(heads, int) and isinstance(width, int) and heads > 0),
        f"{header.path} has {header.architecture}.attention.head_count {heads!r}: it must be a whole number",
    )
    head = stated.get("attention.key_length") or width // heads
    rotated = stated.get("rope.dimension_count", head)
    if dialect.fraction:
        found[dialect.fraction] = rotated / head if isinstance(rotated, int) else rotated
    else:
        refuse(
            rotated != head and dialect.model_type != "gpt2",
            f"{header.path} has {header.architecture}.rope.dimension_count {rotated}: its heads are {head} "
            "wide, and rotate whole",
        )
    kind = stated.get(f"{SCALING}type", "none")
    factor = stated.get(f"{SCALING}factor", stated.get("rope.scale_linear", 1.0))
    trained = stated.get(f"{SCALING}original_context_length")
    rest = sorted(
        key
        for key in stated
        if key.startswith(SCALING)
        and key.removeprefix(SCALING) not in ("type", "factor", "original_context_length", "finetuned")
    )
    refuse(rest, f"{header.path} has {header.architecture}.{''.join(rest[:1])}: it is not supported")
    if FACTORS in header.tensors:
        entry = open_gguf(dataclasses.replace(header, tensors={FACTORS: header.tensors[FACTORS]}))[FACTORS]
        found["rope_scaling"] = _llama3(header, entry.read(), theirs, head)
    elif kind == "linear" or (kind == "none" and factor != 1.0):
        found["rope_scaling"] = {"rope_type": "linear", "factor": float(factor)}
    elif kind == "yarn":
        found["rope_scaling"] = {"rope_type": "yarn", "factor": float(factor)}
        found["rope_scaling"] |= {} if trained is None else {TRAINED: trained}
    else:
        refuse(
            kind != "none",
            f"{header.path} has {header.architecture}.{SCALING}type {kind!r}: "
            "supported are none, linear and yarn",
        )
    if found.get("rope_scaling"):
        found["rope_scaling"]["rope_theta"] = theirs.get("rope_theta", 10_000.0)
    return found


def _llama3(header: GgufHeader, factors: Tensor, theirs: Json, head: int) -> Json:
    """Return the scaling of Llama 3 whose divisors of each frequency a file holds."""
    for trained in (LLAMA3_TRAINED, theirs.get("max_position_embeddings", 0)):
        scaling = RopeScaling(kind="llama3", factor=float(factors.max()), original_positions=trained or 1)
        wanted = llama3_factors(scaling, float(theirs.get("rope_theta", 10_000.0)), head)
        if wanted.shape == factors.shape and torch.allclose(wanted, factors.double(), rtol=1e-5):
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                TRAINED: trained,
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
            }
    raise CheckpointError(
        f"{header.path}: {FACTORS} holds divisors of frequencies that are not Llama 3's: it is not supported"
    )


def llama3_factors(scaling: RopeScaling, base: float, head: int) -> Tensor:
    """Return by how much each frequency is divided, [R/2]."""
    nothing = torch.zeros(1, dtype=torch.int64)
    plain, _ = rope_frequencies(head, base, None, 1, nothing)
    scaled, _ = rope_frequencies(head, base, scaling, 1, nothing)
    return plain / scaled


def _special(header: GgufHeader) -> Json:
    """Return the ids of special tokens, as config.json names them."""
    roles = {"bos": "bos", "eos": "eos", "padding": "pad"}
    found: Json = {}
    for theirs, ours in roles.items():
        value = header.fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if type(value) is int:
            found[f"{ours}_token_id"] = value
    turns = [header.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    also = [value for value in turns if type(value) is int and value != found.get("eos_token_id")]
    if also and "eos_token_id" in found:
        found["eos_token_id"] = [found["eos_token_id"], *also]
    return found


# Writing ----------------------------------------------------------------------------------------------------


def dialect_for(config: ModelConfig, kind: str) -> tuple[str, Dialect]:
    """Return the name of the architecture in GGUF, and its table, for one of Hugging Face."""
    kinds = {"mistral": "llama"}
    found = {dialect.model_type: (name, dialect) for name, choices in DIALECTS.items() for dialect in choices}
    wanted = kinds.get(kind, kind)
    refuse(
        wanted not in found or config.head != "lm",
        f"GGUF has no architecture for this model, {kind} with head {config.head}: "
        f"supported are language models of {', '.join(sorted({*found, *kinds}))}",
    )
    return found[wanted]


def written_fields(config: ModelConfig, name: str, dialect: Dialect) -> dict[str, Any]:
    """Return the fields of a file that state a config, the tokenizer's left out."""
    theirs = ARCHITECTURES[dialect.model_type].write(config) or {}
    values = {key: theirs.get(place) for key, place in dialect.keys.items()}
    if name == "falcon":
        values["attention.head_count_kv"] = config.n_kv_heads
    if config.positions == "rope":
        values["rope.dimension_count"] = round((config.d_head or 0) * config.rope_fraction)
        scaling = config.rope_scaling
        if scaling is not None and scaling.kind in ("linear", "yarn"):
            values |= {f"{SCALING}type": scaling.kind, f"{SCALING}factor": float(scaling.factor)}
            if scaling.original_positions is not None:
                values[f"{SCALING}original_context_length"] = scaling.original_positions
    if values.get("feed_forward_length", 0) is None:
        values["feed_forward_length"] = config.d_ff
    return {
        f"{name}.{key}": float(value) if key.endswith(REALS) else value
        for key, value in values.items()
        if value is not None
    }


def check_written(header: GgufHeader, config: ModelConfig) -> None:
    """Refuse to write a file that would not be read as this config."""
    theirs, _ = read_config(header)
    back = ARCHITECTURES[theirs["model_type"]].read(theirs)
    if back.tie_embeddings and "output.weight" in header.tensors:
        back = back.replace(tie_embeddings=False)
    differing = [
        f"{one.name} {getattr(config, one.name)!r}"
        for one in dataclasses.fields(ModelConfig)
        if one.name not in WITHOUT_EFFECT and not _close(getattr(config, one.name), getattr(back, one.name))
    ]
    refuse(
        differing,
        f"GGUF's {header.architecture} cannot express {', '.join(differing[:4])}: "
        "save the model as a directory",
    )


def _close(a: Any, b: Any) -> bool:
    """Compare with the precision of float32, in which numbers are stored."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, RopeScaling) and isinstance(b, RopeScaling):
        return all(_close(x, y) for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b)))
    return bool(a == b)
