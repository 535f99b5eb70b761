"""GPT-2 and what came after it: GPT-NeoX with Pythia, Falcon, GPT-BigCode, OPT, GPT-Neo, GPT-J and BLOOM."""

import math
from typing import Any

from clearhead.core.config import ModelConfig
from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import LABELS, WHOLE_HEADS, ConfigPart, Json, cases, field, fixed, keys
from clearhead.hub.files import refuse, refuse_key
from clearhead.hub.llama import INV_FREQ, QKV, classes, heads, sizes
from clearhead.hub.rope import rope
from clearhead.hub.rules import HEAD_GROUPS, JOINED_TRANSPOSED, SAME, TRANSPOSED, joined, same, stack_rules

LAYER = "transformer.h.{i}"
PRE: Json = {"family": "decoder", "norm": "layernorm", "norm_position": "pre"}
BIASES = ("qkv_bias", "attention_out_bias", "feedforward_bias")
MASKS = ("*.attn.bias", "*.attn.masked_bias", "*.attention.bias", "*.attention.masked_bias")
TWO_NORMS = "{input,post_attention}_layernorm"


def gpt_like(
    model_type: str,
    named: str | dict[str, Json],
    *config: ConfigPart,
    lm: tuple[str, ...] = ("lm_head",),
    **more: Any,
) -> Architecture:
    """Return an architecture; `named` is how its classes begin, or the classes."""
    known = classes(named) if isinstance(named, str) else named
    return Architecture(model_type, known, config, heads=heads(lm=lm), **{"prefix": "transformer.", **more})


# GPT-2: a pre-norm decoder with learned positions. Its linear weights are stored [in, out].

GPT2_KEYS = {
    **{"max_positions": "n_positions", "d_model": "n_embd", "n_layers": "n_layer", "n_heads": "n_head"},
    **{"d_ff": "n_inner", "activation": "activation_function", "norm_eps": "layer_norm_epsilon"},
    **{"dropout": "resid_pdrop", "attention_dropout": "attn_pdrop", "embedding_dropout": "embd_pdrop"},
}
GPT2_ALIASES = {
    **{"hidden_size": "n_embd", "max_position_embeddings": "n_positions"},
    **{"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
}
GPT2_SCALES = fixed(
    only={
        **{"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True},
        "add_cross_attention": False,
    }
)

GPT2 = gpt_like(
    "gpt2",
    classes("GPT2", "GPT2LMHeadModel"),
    fixed({**PRE, "positions": "learned"}),
    GPT2_SCALES,
    *keys(GPT2_KEYS, vocab_size=50257, max_positions=1024, d_model=768, n_layers=12, n_heads=12, d_ff=None),
    *keys(GPT2_KEYS, activation="gelu_new", norm_eps=1e-5, init_std=0.02, tie_embeddings=True),
    *keys(GPT2_KEYS, dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1),
    LABELS,
    rules=(
        *stack_rules("decoder", LAYER, tokens="transformer.wte", positions="transformer.wpe"),
        *joined(f"{LAYER}.attn.c_attn", QKV, JOINED_TRANSPOSED),
        *stack_rules("decoder", LAYER, TRANSPOSED, out="attn.c_proj", mlp="mlp.c_{fc,proj}"),
        *stack_rules("decoder", LAYER, pre_norms="ln_{1,2}", norm="transformer.ln_f"),
    ),
    ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    aliases=GPT2_ALIASES,
)

# GPT-NeoX and Pythia: attention and feed-forward side by side, rotary positions in part of each head.

NEOX_LAYER, SIDE_BY_SIDE = "gpt_neox.layers.{i}", "use_parallel_residual"

GPT_NEOX = gpt_like(
    "gpt_neox",
    "GPTNeoX",
    *sizes(vocab_size=50432, d_model=6144, n_layers=44, n_heads=64, d_ff=24576, norm_eps=1e-5),
    WHOLE_HEADS,
    *keys(activation="gelu", dropout=0.0),
    field("attention_bias", "qkv_bias", True),
    field("attention_bias", "attention_out_bias", True),
    rope(fraction=0.25, theta_key="rotary_emb_base", fraction_key="rotary_pct"),
    cases(
        {SIDE_BY_SIDE: True},
        ({SIDE_BY_SIDE: True}, {"parallel": True, "parallel_norms": 2}),
        ({SIDE_BY_SIDE: False}, {"parallel": False}),
    ),
    prefix="gpt_neox.",
    rules=(
        *joined(f"{NEOX_LAYER}.attention.query_key_value", QKV, HEAD_GROUPS),
        *stack_rules(
            "decoder",
            NEOX_LAYER,
            **{"tokens": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "pre_norms": TWO_NORMS},
            **{"out": "attention.dense", "mlp": "mlp.dense_{h_to_4h,4h_to_h}"},
        ),
    ),
    lm=("embed_out", "lm_head"),
    ignored=("*.attention.bias", "*.attention.masked_bias", INV_FREQ),
)

# Falcon: attention and feed-forward side by side, few key/value heads, stored with their queries.

NEW, MULTI_QUERY, PARALLEL = "new_decoder_architecture", "multi_query", "parallel_attn"
NORMS = "num_ln_in_parallel_attn"
ONE_NORM = {"parallel": True, "parallel_norms": 1}
JOINED_HEADS = joined(f"{LAYER}.self_attention.query_key_value", QKV, HEAD_GROUPS)
EDGES = {"tokens": "transformer.word_embeddings", "norm": "transformer.ln_f"}
DENSE = {"out": "self_attention.dense", "mlp": "mlp.dense_{h_to_4h,4h_to_h}"}

FALCON = gpt_like(
    "falcon",
    "Falcon",
    fixed({"bias": False, "norm_bias": True}),
    fixed(only={"alibi": False}),
    *sizes(vocab_size=65024, d_model=4544, n_heads=71, tie_embeddings=True, dropout=0.0),
    *keys({"d_ff": "ffn_hidden_size", "activation": "activation"}, d_ff=None, activation="gelu"),
    *keys({"norm_eps": "layer_norm_epsilon", "n_kv_heads": "num_kv_heads"}, norm_eps=1e-5, n_kv_heads=None),
    *(field("bias", ours, False) for ours in BIASES),
    rope(),
    cases(
        {NEW: False, MULTI_QUERY: True, PARALLEL: True, NORMS: 2},
        ({NEW: False, MULTI_QUERY: True, PARALLEL: True}, {"n_kv_heads": 1, **ONE_NORM}),
        ({NEW: False, MULTI_QUERY: True, PARALLEL: False}, {"n_kv_heads": 1, "parallel": False}),
        ({NEW: True, PARALLEL: True, NORMS: 2}, {"parallel": True, "parallel_norms": 2}),
        ({NEW: True, PARALLEL: True, NORMS: 1}, ONE_NORM),
        ({NEW: False, MULTI_QUERY: False, PARALLEL: True}, {"n_kv_heads": None, **ONE_NORM}),
        ({NEW: False, MULTI_QUERY: False, PARALLEL: False}, {"n_kv_heads": None, "parallel": False}),
    ),
    rules=(
        *JOINED_HEADS,
        *stack_rules("decoder", LAYER, **EDGES, **DENSE),
        *stack_rules("decoder", LAYER, SAME, {"parallel_norms": 1}, pre_norms=TWO_NORMS),
        *stack_rules("decoder", LAYER, SAME, {"parallel_norms": 2}, pre_norms="ln_{attn,mlp}"),
    ),
    ignored=(INV_FREQ,),
    aliases={"n_embed": "hidden_size"},
)

# GPT-BigCode (StarCoder): GPT-2 with one key/value head, and linear weights stored [out, in].

BIGCODE = gpt_like(
    "gpt_bigcode",
    "GPTBigCode",
    *(part for part in GPT2.config if part is not GPT2_SCALES),
    fixed(only={"scale_attn_weights": True, "add_cross_attention": False}),
    *keys(GPT2_KEYS, activation="gelu_pytorch_tanh"),
    cases(
        {MULTI_QUERY: True},
        ({MULTI_QUERY: True}, {"n_kv_heads": 1}),
        ({MULTI_QUERY: False}, {"n_kv_heads": None}),
    ),
    rules=(
        *(rule for rule in GPT2.rules if rule.operation is SAME and "c_" not in rule.theirs),
        *joined(f"{LAYER}.attn.c_attn", QKV, HEAD_GROUPS),
        *stack_rules("decoder", LAYER, out="attn.c_proj", mlp="mlp.c_{fc,proj}"),
    ),
    ignored=MASKS,
    aliases=GPT2_ALIASES,
)

# OPT: GPT-2's layers with ReLU, and a position table that starts at its third row.

OPT_LAYER, LM = "model.decoder.layers.{i}", "OPTForCausalLM"
OPT_NORMS = "{self_attn,final}_layer_norm"
OPT_KEYS = {
    **{"d_ff": "ffn_dim", "activation": "activation_function", "dropout": "dropout", "init_std": "init_std"}
}
BEFORE, WITHOUT = "do_layer_norm_before", "_remove_final_layer_norm"


def _read_table(theirs: Json) -> Json:
    width, narrow = theirs.get("hidden_size", 768), theirs.get("word_embed_proj_dim")
    if narrow in (None, width):
        return {}
    named = (theirs.get("architectures") or [LM])[0]
    refuse(
        named != LM,
        f"config.json has word_embed_proj_dim {narrow} for hidden_size {width}, and names the class {named}, "
        f"whose states are narrowed: supported is {LM}",
    )
    return {"d_embedding": narrow, "project_tokens": True, "pooler_bias": False}


OPT = gpt_like(
    "opt",
    classes("OPT", token=False),
    fixed({**PRE, "positions": "learned", "position_offset": 2}),
    cases(
        {BEFORE: True, WITHOUT: False},
        ({BEFORE: True, WITHOUT: False}, {"norm_position": "pre", "final_norm": True}),
        ({BEFORE: True, WITHOUT: True}, {"norm_position": "pre", "final_norm": False}),
        ({BEFORE: False}, {"norm_position": "post", "final_norm": False}),
    ),
    fixed(only={"layer_norm_elementwise_affine": True}),
    ConfigPart(_read_table, lambda config: {"word_embed_proj_dim": config.d_embedding}),
    *keys(OPT_KEYS, vocab_size=50272, d_model=768, n_layers=12, n_heads=12, d_ff=3072, max_positions=2048),
    *keys(OPT_KEYS, activation="relu", dropout=0.1, attention_dropout=0.0, init_std=0.02),
    *(field("enable_bias", ours, True) for ours in BIASES),
    *keys(tie_embeddings=True),
    LABELS,
    prefix="model.",
    rules=(
        *stack_rules(
            "decoder",
            OPT_LAYER,
            **{"tokens": "model.decoder.embed_tokens", "positions": "model.decoder.embed_positions"},
            **{"norm": "model.decoder.final_layer_norm", "mlp": "fc{1,2}"},
            qkvo="self_attn.{q,k,v,out}_proj",
        ),
        *same(
            {
                "model.decoder.project_in": "decoder.embedding.front.project",
                "model.decoder.project_out": "head.transform",
            }
        ),
        *stack_rules("decoder", OPT_LAYER, SAME, {"norm_position": "pre"}, pre_norms=OPT_NORMS),
        *stack_rules("decoder", OPT_LAYER, SAME, {"norm_position": "post"}, post_norms=OPT_NORMS),
    ),
)

# GPT-Neo: scores that nothing divides, and a window in every other layer.


def _read_kinds(theirs: Json) -> Json:
    types = theirs.get("attention_types") or [[["global", "local"], 12]]
    expanded = [kind for listed, times in types for _ in range(times) for kind in listed]
    kinds = theirs.get("attention_layers") or expanded  # transformers, too, reads the list where there is one
    unknown = sorted({*kinds} - {"global", "local"})
    refuse(unknown, f"config.json has attention of kind {unknown[:1]}: only global and local are supported")
    width = theirs.get("window_size", 256)
    refuse_key(width < 1, "window_size", width, "it must be 1 at least")
    windows = tuple(width if kind == "local" else None for kind in kinds)
    return {"window": windows if any(windows) else None}


def _write_kinds(config: ModelConfig) -> Json:
    windows = config.main.windows
    widths = [window for window in windows if window is not None]
    kinds = ["global" if window is None else "local" for window in windows]
    return {"attention_types": [[kinds, 1]], "attention_layers": kinds, "window_size": (widths or [256])[0]}


NEO_KEYS = {
    **{"n_layers": "num_layers", "n_heads": "num_heads", "activation": "activation_function"},
    **{"norm_eps": "layer_norm_epsilon", "dropout": "resid_dropout", "embedding_dropout": "embed_dropout"},
}

GPT_NEO = gpt_like(
    "gpt_neo",
    "GPTNeo",
    fixed({**PRE, "positions": "learned", "attention_scale": 1.0, "qkv_bias": False}),
    ConfigPart(_read_kinds, _write_kinds),
    *keys(NEO_KEYS, vocab_size=50257, d_model=2048, n_layers=24, n_heads=16, d_ff=None, max_positions=2048),
    *keys(NEO_KEYS, activation="gelu_new", norm_eps=1e-5, init_std=0.02, tie_embeddings=True),
    *keys(NEO_KEYS, dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0),
    LABELS,
    rules=stack_rules(
        "decoder",
        LAYER,
        **{"tokens": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f"},
        **{"qkvo": "attn.attention.{q,k,v,out}_proj", "pre_norms": "ln_{1,2}", "mlp": "mlp.c_{fc,proj}"},
    ),
    ignored=MASKS,
    aliases={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
)

# GPT-J: attention and feed-forward side by side, after one norm; neighbours rotate together.


def _read_rotation(theirs: Json) -> Json:
    width = theirs.get("n_embd", 4096) // theirs.get("n_head", 16)
    rotated = theirs.get("rotary_dim", 64)
    rotated = width if rotated is None else rotated
    fraction = rotated / width
    return {"rope_fraction": fraction if int(width * fraction) == rotated else math.nextafter(fraction, 1)}


GPT_J = gpt_like(
    "gptj",
    {**classes("GPTJ", token=False), "GPTJForCausalLM": {"head": "lm", "head_bias": True}},
    fixed({**PRE, "positions": "rope", "rope_layout": "interleaved", "rope_base": 10_000.0}),
    fixed({"parallel": True, "parallel_norms": 1, "qkv_bias": False, "attention_out_bias": False}),
    ConfigPart(_read_rotation, lambda config: {"rotary_dim": config.main.d_rotary}),
    *keys(GPT2_KEYS, vocab_size=50400, max_positions=2048, d_model=4096, n_layers=28, n_heads=16),
    *keys(GPT2_KEYS, d_ff=None, activation="gelu_new", norm_eps=1e-5, init_std=0.02, tie_embeddings=False),
    *keys(GPT2_KEYS, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0),
    LABELS,
    rules=stack_rules(
        "decoder",
        LAYER,
        **{"tokens": "transformer.wte", "norm": "transformer.ln_f", "pre_norm": "ln_1"},
        **{"qkvo": "attn.{q,k,v,out}_proj", "mlp": "mlp.fc_{in,out}"},
    ),
    ignored=MASKS,
    aliases=GPT2_ALIASES,
)

# BLOOM: ALiBi, and a norm after the embedding; queries, keys and values are stored head by head.

BLOOM_KEYS = {
    **{"n_layers": "n_layer", "n_heads": "n_head", "max_positions": "seq_length"},
    **{"norm_eps": "layer_norm_epsilon"},
}

BLOOM = gpt_like(
    "bloom",
    "Bloom",
    fixed({**PRE, "positions": "alibi", "embedding_norm": True, "activation": "gelu_tanh"}),
    fixed(only={"apply_residual_connection_post_layernorm": False}),
    *keys(BLOOM_KEYS, vocab_size=250880, d_model=64, n_layers=2, n_heads=8, max_positions=2048),
    *keys(BLOOM_KEYS, norm_eps=1e-5, dropout=0.0, attention_dropout=0.0, init_std=0.02, tie_embeddings=True),
    LABELS,
    rules=(
        *JOINED_HEADS,
        *stack_rules("decoder", LAYER, **EDGES, **DENSE, pre_norms=TWO_NORMS),
        *stack_rules(embedding_norm="transformer.word_embeddings_layernorm"),
    ),
    aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
)
