"""Architectures in GGUF: fields and tensors of a file as a config.json and rules, both ways.

From the config.json on, a GGUF file is a checkpoint like any other: what its architecture of Hugging Face
honours or refuses is honoured or refused here. What a file does not state, llama.cpp knows by the name of the
architecture: so do we.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig, RopeScaling
from clearhead.core.positions import rope_frequencies
from clearhead.errors import CheckpointError
from clearhead.hub.architecture import WITHOUT_EFFECT, Architecture, changed_fields
from clearhead.hub.fields import Json
from clearhead.hub.files import refuse
from clearhead.hub.gguf import GgufHeader, open_gguf
from clearhead.hub.llama import BLOCK, QKV
from clearhead.hub.registry import ARCHITECTURES
from clearhead.hub.rules import EXPERTS, SAME, Operation, Rule, Shape, Tensors, joined, same, stack_rules


@dataclass(frozen=True)
class Dialect:
    """An architecture of GGUF: which of Hugging Face's it holds, its keys, and its tensors."""

    model_type: str
    keys: Mapping[str, str]  # of the file, after the architecture's name: of config.json
    rules: tuple[Rule, ...]
    stated: Json = field(default_factory=dict)  # what config.json says, and the file does not
    told: Mapping[str, str] = field(default_factory=dict)  # keys of config.json: a tensor that tells
    fraction: str = ""  # the key of the part of each head that rotates
    tied: bool = False  # an output that is the token table again is that table


# Operations -------------------------------------------------------------------------------------------------


def _turned(x: Tensor, heads: int, apart: bool) -> Tensor:
    """Permute rotated pairs to the interleaved layout, or, with `apart`, to the half layout."""
    pairs = x.reshape(heads, *((-1, 2) if apart else (2, -1)), *x.shape[1:])
    return pairs.transpose(1, 2).reshape(x.shape)


def _paired(keys: bool) -> Operation:
    def heads(config: ModelConfig) -> int:
        return (config.n_kv_heads if keys else None) or config.n_heads

    def load(theirs: Tensors, shapes: list[Shape], config: ModelConfig) -> Tensors:
        return [_turned(x, heads(config), apart=True) for x in theirs]

    def save(ours: Tensors, config: ModelConfig) -> Tensors:
        return [_turned(x, heads(config), apart=False) for x in ours]

    return Operation(load, save)


# The two numbers of a rotated pair lie side by side.
PAIRED_QUERIES, PAIRED_KEYS = _paired(keys=False), _paired(keys=True)
# A norm's weight is stored whole, ours less one.
WITH_ONE = Operation(
    lambda theirs, shapes, config: [x - 1 for x in theirs], lambda ours, config: [x + 1 for x in ours]
)

# Tensors ----------------------------------------------------------------------------------------------------

LAYER = "blk.{i}"
NORMS = {"norm": "output_norm", "pre_norms": "{attn,ffn}_norm"}
QK_NORMS, OUTPUT_NORMS = {"qk_norms": "attn_{q,k}_norm"}, {"output_norms": "post_{attention,ffw}_norm"}


def gguf_rules(**modules: str) -> tuple[Rule, ...]:
    """Return the rules of a file's tensors; `modules` are those that differ (see `stack_rules`)."""
    usual = {
        **{"tokens": "token_embd", "qkv": "attn_{q,k,v}", "out": "attn_output"},
        "gated": "ffn_{gate,up,down}",
    }
    return stack_rules("decoder", LAYER, **{**usual, **NORMS, **modules})


PLAIN_RULES = gguf_rules()
UNSPLIT = joined(f"{LAYER}.attn_qkv", QKV)
JOINED_RULES = (*gguf_rules(qkv=""), *UNSPLIT)
PAIRED = tuple(
    Rule(f"{LAYER}.attn_{x}.{kind}", (f"{BLOCK}.attention.{x}.{kind}",), operation)
    for x, operation in (("q", PAIRED_QUERIES), ("k", PAIRED_KEYS), ("v", SAME))
    for kind in ("weight", "bias")
)
LLAMA_RULES = (*gguf_rules(qkv=""), *PAIRED)
MIXTURE = (
    Rule(f"{LAYER}.ffn_gate_inp.weight", (f"{BLOCK}.feedforward.router.weight",)),
    *(
        Rule(f"{LAYER}.ffn_{x}_exps.weight", (f"{BLOCK}.feedforward.experts.{{J}}.{x}.weight",), EXPERTS)
        for x in ("gate", "up", "down")
    ),
)
GEMMA_RULES = (*gguf_rules(norm="", pre_norms=""), *stack_rules("decoder", LAYER, WITH_ONE, **NORMS))
SANDWICH_RULES = (*GEMMA_RULES, *stack_rules("decoder", LAYER, WITH_ONE, **OUTPUT_NORMS))

# Keys -------------------------------------------------------------------------------------------------------

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}
SHARED = {**SIZES, "attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta"}
LAYER_EPS = {"attention.layer_norm_epsilon": "layer_norm_eps"}
HEADS = {"attention.key_length": "head_dim", "attention.value_length": "head_dim"}
WINDOW = {"attention.sliding_window": "sliding_window"}
CAPS = {f"{name}_logit_softcapping": f"{name}_logit_softcapping" for name in ("attn", "final")}
RMS = {**SHARED, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
WIDE = {**RMS, **HEADS}
BIASES = {"attention_bias": "blk.0.attn_q.bias"}
ALL_BIASES = {**BIASES, "mlp_bias": "blk.0.ffn_up.bias"}
TANH = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}

LLAMA = Dialect("llama", WIDE, LLAMA_RULES, told=ALL_BIASES)
MIXTRAL = Dialect(
    "mixtral",
    {**WIDE, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    (*gguf_rules(qkv="", gated=""), *PAIRED, *MIXTURE),
)
GPT2 = Dialect(
    "gpt2",
    {
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "block_count": "n_layer",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "vocab_size": "vocab_size",
    },
    (*JOINED_RULES, *stack_rules(positions="position_embd")),
    tied=True,
)
GEMMA3 = Dialect(
    "gemma3_text",
    {**WIDE, **WINDOW, "final_logit_softcapping": "final_logit_softcapping"},
    (*SANDWICH_RULES, *stack_rules("decoder", LAYER, WITH_ONE, **QK_NORMS)),
    TANH,
    tied=True,
)
FALCON = Dialect(
    "falcon",
    {
        **SHARED,
        "attention.head_count_kv": "num_kv_heads",
        "feed_forward_length": "ffn_hidden_size",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    (
        *(*gguf_rules(qkv="", pre_norms=""), *UNSPLIT),
        *stack_rules("decoder", LAYER, SAME, {"parallel_norms": 1}, pre_norm="attn_norm"),
        *stack_rules("decoder", LAYER, SAME, {"parallel_norms": 2}, pre_norms="{attn_norm_2,attn_norm}"),
    ),
    {"parallel_attn": True, "alibi": False},
    tied=True,
)
DIALECTS = {
    "llama": LLAMA,
    "qwen2": Dialect("qwen2", WIDE, PLAIN_RULES),
    "qwen3": Dialect("qwen3", WIDE, gguf_rules(**QK_NORMS), told=BIASES),
    "gpt2": GPT2,
    "gemma": Dialect("gemma", WIDE, GEMMA_RULES, TANH, BIASES, tied=True),
    "gemma2": Dialect("gemma2", {**WIDE, **WINDOW, **CAPS}, SANDWICH_RULES, TANH, BIASES, tied=True),
    "gemma3": GEMMA3,
    "gptneox": Dialect(
        "gpt_neox",
        {
            **{**SIZES, **LAYER_EPS, "rope.freq_base": "rotary_emb_base"},
            "use_parallel_residual": "use_parallel_residual",
        },
        JOINED_RULES,
        told={"attention_bias": "blk.0.attn_qkv.bias"},
        fraction="rotary_pct",
    ),
    "falcon": FALCON,
    "phi2": Dialect(
        "phi", {**SHARED, **LAYER_EPS}, (*PLAIN_RULES, *UNSPLIT), fraction="partial_rotary_factor"
    ),
    "phi3": Dialect(
        "phi3",
        {**RMS, **WINDOW},
        (
            *UNSPLIT,
            *gguf_rules(gated="", down="ffn_down"),
            *joined(f"{LAYER}.ffn_up", [f"{BLOCK}.feedforward.gate", f"{BLOCK}.feedforward.up"]),
        ),
        fraction="partial_rotary_factor",
    ),
    "olmo2": Dialect("olmo2", RMS, gguf_rules(pre_norms="", **OUTPUT_NORMS, **QK_NORMS), told=BIASES),
    "stablelm": Dialect(
        "stablelm",
        {**SHARED, **LAYER_EPS, "use_parallel_residual": "use_parallel_residual"},
        PLAIN_RULES,
        told={"use_qkv_bias": "blk.0.attn_q.bias"},
        fraction="partial_rotary_factor",
    ),
    "granite": Dialect(
        "granite",
        {
            **WIDE,
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
        LLAMA_RULES,
        told=ALL_BIASES,
    ),
    "smollm3": Dialect("smollm3", WIDE, LLAMA_RULES, told=ALL_BIASES),
}
WITH_EXPERTS = {"llama": MIXTRAL}  # what a name stands for where the file has experts


# Fields -----------------------------------------------------------------------------------------------------


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
    dialect = (DIALECTS | WITH_EXPERTS if stated.get("expert_count", 0) else DIALECTS)[name]
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
    theirs: Json = {}
    for key, value in stated.items():
        refuse(
            key not in known and not key.startswith(SCALING) and value not in (0, False, ""),
            f"{header.path} has {header.architecture}.{key} {str(value)[:40]}: it is not supported",
        )
        if key in dialect.keys:
            place = dialect.keys[key]
            refuse(
                theirs.get(place, value) != value,
                f"{header.path} has {header.architecture}.{key} {value}, and {theirs.get(place)} elsewhere",
            )
            refuse(
                isinstance(value, str),
                f"{header.path} has {header.architecture}.{key} {str(value)[:40]!r}: it must be a number",
            )
            theirs[place] = value
    missing = next((key for key in ("block_count", "embedding_length") if key not in stated), None)
    refuse(missing, f"{header.path} has no {header.architecture}.{missing}: it holds no whole model")
    return theirs


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
    rotation: Json = {}
    heads: Any = stated.get("attention.head_count")
    width: Any = stated.get("embedding_length")
    refuse(
        not (isinstance(heads, int) and isinstance(width, int) and heads > 0),
        f"{header.path} has {header.architecture}.attention.head_count {heads!r}: it must be a whole number",
    )
    head = stated.get("attention.key_length") or width // heads
    rotated = stated.get("rope.dimension_count", head)
    if dialect.fraction:
        rotation[dialect.fraction] = rotated / head if isinstance(rotated, int) else rotated
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
        rotation["rope_scaling"] = _llama3(header, entry.read(), theirs, head)
    elif kind == "linear" or (kind == "none" and factor != 1.0):
        rotation["rope_scaling"] = {"rope_type": "linear", "factor": float(factor)}
    elif kind == "yarn":
        rotation["rope_scaling"] = {"rope_type": "yarn", "factor": float(factor)}
        rotation["rope_scaling"] |= {} if trained is None else {TRAINED: trained}
    else:
        refuse(
            kind != "none",
            f"{header.path} has {header.architecture}.{SCALING}type {kind!r}: "
            "supported are none, linear and yarn",
        )
    if rotation.get("rope_scaling"):
        rotation["rope_scaling"]["rope_theta"] = theirs.get("rope_theta", 10_000.0)
    return rotation


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
    special: Json = {}
    for theirs, ours in roles.items():
        value = header.fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if type(value) is int:
            special[f"{ours}_token_id"] = value
    turns = [header.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    also = [value for value in turns if type(value) is int and value != special.get("eos_token_id")]
    if also and "eos_token_id" in special:
        special["eos_token_id"] = [special["eos_token_id"], *also]
    return special


# Writing ----------------------------------------------------------------------------------------------------


def dialect_for(config: ModelConfig, kind: str) -> tuple[str, Dialect]:
    """Return the name of the architecture in GGUF, and its table, for one of Hugging Face."""
    kinds = {"mistral": "llama"}
    named = (*DIALECTS.items(), *WITH_EXPERTS.items())
    dialects = {dialect.model_type: (name, dialect) for name, dialect in named}
    wanted = kinds.get(kind, kind)
    refuse(
        wanted not in dialects or config.head != "lm",
        f"GGUF has no architecture for this model, {kind} with head {config.head}: "
        f"supported are language models of {', '.join(sorted({*dialects, *kinds}))}",
    )
    return dialects[wanted]


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
    changed = changed_fields(config, back, WITHOUT_EFFECT, tolerance=1e-6)  # numbers are stored in float32
    differing = [f"{name} {getattr(config, name)!r}" for name in changed]
    refuse(
        differing,
        f"GGUF's {header.architecture} cannot express {', '.join(differing[:4])}: "
        "save the model as a directory",
    )
