"""Architectures in GGUF: the names of their fields and tensors beside those of Hugging Face and ours.

A table goes both ways. What a file does not state, llama.cpp knows by the name of the architecture: so do we.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.hub.fields import Json
from clearhead.hub.llama import BLOCK, QKV, TOKENS
from clearhead.hub.rules import EXPERTS, SAME, Operation, Rule, Shape, Tensors, joined, same


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
    """Put the two numbers of each rotated pair side by side, or, `apart`, half a head apart."""
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

THEIRS = "blk.{i}"


def of_block(pairs: Mapping[str, str], operation: Operation = SAME) -> tuple[Rule, ...]:
    """Return rules for modules of a block, {theirs: ours}."""
    return same({f"{THEIRS}.{theirs}": f"{BLOCK}.{ours}" for theirs, ours in pairs.items()}, operation)


EMBEDDING = Rule("token_embd.weight", TOKENS)
EDGES = (EMBEDDING, *same({"output_norm": "decoder.norm"}))
NORM_PAIRS = {"attn_norm": "attention_residual.before", "ffn_norm": "feedforward_residual.before"}
AFTER_PAIRS = {
    "post_attention_norm": "attention_residual.inside",
    "post_ffw_norm": "feedforward_residual.inside",
}
QK_PAIRS = {f"attn_{x}_norm": f"attention.{x}_norm" for x in "qk"}
PROJECTIONS = of_block({f"attn_{x}": f"attention.{x}" for x in "qkv"})
JOINED = joined(f"{THEIRS}.attn_qkv", QKV)
OUT = of_block({"attn_output": "attention.out"})
FEEDFORWARD = of_block({f"ffn_{x}": f"feedforward.{x}" for x in ("gate", "up", "down")})
PAIRED = tuple(
    Rule(f"{THEIRS}.attn_{x}.{kind}", (f"{BLOCK}.attention.{x}.{kind}",), operation)
    for x, operation in (("q", PAIRED_QUERIES), ("k", PAIRED_KEYS), ("v", SAME))
    for kind in ("weight", "bias")
)
EXPERT = f"{BLOCK}.feedforward.experts.{{J}}"
MIXTURE = (
    Rule(f"{THEIRS}.ffn_gate_inp.weight", (f"{BLOCK}.feedforward.router.weight",)),
    *(
        Rule(f"{THEIRS}.ffn_{x}_exps.weight", (f"{EXPERT}.{x}.weight",), EXPERTS)
        for x in ("gate", "up", "down")
    ),
)
NORMS = of_block(NORM_PAIRS)
LLAMA_RULES = (*EDGES, *NORMS, *PAIRED, *OUT, *FEEDFORWARD)
PLAIN_RULES = (*EDGES, *NORMS, *PROJECTIONS, *OUT, *FEEDFORWARD)
GEMMA_NORMS = (EMBEDDING, *same({"output_norm": "decoder.norm"}, WITH_ONE), *of_block(NORM_PAIRS, WITH_ONE))
GEMMA_RULES = (*GEMMA_NORMS, *PROJECTIONS, *OUT, *FEEDFORWARD)
SANDWICH_RULES = (*GEMMA_RULES, *of_block(AFTER_PAIRS, WITH_ONE))

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
TANH = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}

LLAMA = Dialect("llama", WIDE, LLAMA_RULES, told={**BIASES, "mlp_bias": "blk.0.ffn_up.bias"})
MIXTRAL = Dialect(
    "mixtral",
    {**WIDE, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    (*EDGES, *NORMS, *PAIRED, *OUT, *MIXTURE),
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
    (
        *(*EDGES, *NORMS, *JOINED, *OUT, *FEEDFORWARD),
        Rule("position_embd.weight", ("decoder.positions.table.weight",)),
    ),
    tied=True,
)
GEMMA3 = Dialect(
    "gemma3_text",
    {**WIDE, **WINDOW, "final_logit_softcapping": "final_logit_softcapping"},
    (*SANDWICH_RULES, *of_block(QK_PAIRS, WITH_ONE)),
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
        *(*EDGES, *JOINED, *OUT, *FEEDFORWARD),
        *(
            Rule(
                f"{THEIRS}.{theirs}.{kind}",
                (f"{BLOCK}.{ours}.before.{kind}",),
                when={"parallel_norms": norms},
            )
            for theirs, ours, norms in (
                ("attn_norm", "attention_residual", 1),
                ("attn_norm_2", "attention_residual", 2),
                ("attn_norm", "feedforward_residual", 2),
            )
            for kind in ("weight", "bias")
        ),
    ),
    {"parallel_attn": True, "alibi": False},
    tied=True,
)
DIALECTS: dict[str, tuple[Dialect, ...]] = {
    "llama": (LLAMA, MIXTRAL),
    "qwen2": (Dialect("qwen2", WIDE, PLAIN_RULES),),
    "qwen3": (Dialect("qwen3", WIDE, (*PLAIN_RULES, *of_block(QK_PAIRS)), told=BIASES),),
    "gpt2": (GPT2,),
    "gemma": (Dialect("gemma", WIDE, GEMMA_RULES, TANH, BIASES, tied=True),),
    "gemma2": (Dialect("gemma2", {**WIDE, **WINDOW, **CAPS}, SANDWICH_RULES, TANH, BIASES, tied=True),),
    "gemma3": (GEMMA3,),
    "gptneox": (
        Dialect(
            "gpt_neox",
            {
                **{**SIZES, **LAYER_EPS, "rope.freq_base": "rotary_emb_base"},
                "use_parallel_residual": "use_parallel_residual",
            },
            (*EDGES, *NORMS, *JOINED, *OUT, *FEEDFORWARD),
            told={"attention_bias": "blk.0.attn_qkv.bias"},
            fraction="rotary_pct",
        ),
    ),
    "falcon": (FALCON,),
    "phi2": (
        Dialect(
            "phi",
            {**SHARED, **LAYER_EPS},
            (*EDGES, *NORMS, *PROJECTIONS, *JOINED, *OUT, *FEEDFORWARD),
            fraction="partial_rotary_factor",
        ),
    ),
    "phi3": (
        Dialect(
            "phi3",
            {**RMS, **WINDOW},
            (
                *(*EDGES, *NORMS, *JOINED, *PROJECTIONS, *OUT, *of_block({"ffn_down": "feedforward.down"})),
                *joined(f"{THEIRS}.ffn_up", [f"{BLOCK}.feedforward.gate", f"{BLOCK}.feedforward.up"]),
            ),
            fraction="partial_rotary_factor",
        ),
    ),
    "olmo2": (
        Dialect(
            "olmo2",
            RMS,
            (*EDGES, *of_block({**AFTER_PAIRS, **QK_PAIRS}), *PROJECTIONS, *OUT, *FEEDFORWARD),
            told=BIASES,
        ),
    ),
    "stablelm": (
        Dialect(
            "stablelm",
            {**SHARED, **LAYER_EPS, "use_parallel_residual": "use_parallel_residual"},
            PLAIN_RULES,
            told={"use_qkv_bias": "blk.0.attn_q.bias"},
            fraction="partial_rotary_factor",
        ),
    ),
    "granite": (
        Dialect(
            "granite",
            {
                **WIDE,
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "attention.scale": "attention_multiplier",
                "logit_scale": "logits_scaling",
            },
            LLAMA_RULES,
            told={**BIASES, "mlp_bias": "blk.0.ffn_up.bias"},
        ),
    ),
    "smollm3": (Dialect("smollm3", WIDE, LLAMA_RULES, told={**BIASES, "mlp_bias": "blk.0.ffn_up.bias"}),),
}
