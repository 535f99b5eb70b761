"""OPT, GPT-Neo, GPT-J, GPT-BigCode and BLOOM: decoders after GPT-2, each with something of its own."""

import math

from clearhead.core.config import ModelConfig
from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, LABELS, ConfigPart, Json, cases, field, fixed
from clearhead.hub.files import refuse
from clearhead.hub.gpt import GPT2, GPT2_SCALES
from clearhead.hub.llama import BLOCK, QKV, TOKENS, classes, heads
from clearhead.hub.rules import HEAD_GROUPS, SAME, Rule, joined, same

LAYER = "transformer.h.{i}"
PRE: Json = {"family": "decoder", "norm": "layernorm", "norm_position": "pre"}
TIED = field("tie_word_embeddings", "tie_embeddings", True)
MASKS = ("*.attn.bias", "*.attn.masked_bias", "*.attention.bias", "*.attention.masked_bias")

# OPT: GPT-2's layers with ReLU, and a position table that starts at its third row.

OPT_LAYER, LM = "model.decoder.layers.{i}", "OPTForCausalLM"


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


BEFORE, WITHOUT = "do_layer_norm_before", "_remove_final_layer_norm"

OPT = Architecture(
    model_type="opt",
    classes=classes("OPT", token=False),
    prefix="model.",
    config=(
        fixed({**PRE, "positions": "learned", "position_offset": 2}),
        cases(
            {BEFORE: True, WITHOUT: False},
            ({BEFORE: True, WITHOUT: False}, {"norm_position": "pre", "final_norm": True}),
            ({BEFORE: True, WITHOUT: True}, {"norm_position": "pre", "final_norm": False}),
            ({BEFORE: False}, {"norm_position": "post", "final_norm": False}),
        ),
        fixed(only={"layer_norm_elementwise_affine": True}),
        ConfigPart(_read_table, lambda config: {"word_embed_proj_dim": config.d_embedding}),
        field("vocab_size", "vocab_size", 50272),
        field("hidden_size", "d_model", 768),
        field("num_hidden_layers", "n_layers", 12),
        field("num_attention_heads", "n_heads", 12),
        field("ffn_dim", "d_ff", 3072),
        field("max_position_embeddings", "max_positions", 2048),
        field("activation_function", "activation", "relu", ACTIVATIONS),
        *(
            field("enable_bias", ours, True)
            for ours in ("qkv_bias", "attention_out_bias", "feedforward_bias")
        ),
        field("dropout", "dropout", 0.1),
        field("attention_dropout", "attention_dropout", 0.0),
        field("init_std", "init_std", 0.02),
        TIED,
        LABELS,
    ),
    rules=(
        Rule("model.decoder.embed_tokens.weight", TOKENS),
        Rule("model.decoder.embed_positions.weight", ("decoder.positions.table.weight",)),
        *same(
            {
                **{
                    f"{OPT_LAYER}.self_attn.{x}_proj": f"{BLOCK}.attention.{x}"
                    for x in ("q", "k", "v", "out")
                },
                f"{OPT_LAYER}.fc1": f"{BLOCK}.feedforward.up",
                f"{OPT_LAYER}.fc2": f"{BLOCK}.feedforward.down",
                "model.decoder.final_layer_norm": "decoder.norm",
                "model.decoder.project_in": "decoder.embedding.front.project",
                "model.decoder.project_out": "head.transform",
            }
        ),
        *(
            rule
            for place, norm in (("pre", "before"), ("post", "after"))
            for rule in same(
                {
                    f"{OPT_LAYER}.self_attn_layer_norm": f"{BLOCK}.attention_residual.{norm}",
                    f"{OPT_LAYER}.final_layer_norm": f"{BLOCK}.feedforward_residual.{norm}",
                },
                when={"norm_position": place},
            )
        ),
    ),
    heads=heads(),
)

# GPT-Neo: scores that nothing divides, and a window in every other layer.


def _read_kinds(theirs: Json) -> Json:
    types = theirs.get("attention_types") or [[["global", "local"], 12]]
    expanded = [kind for listed, times in types for _ in range(times) for kind in listed]
    kinds = theirs.get("attention_layers") or expanded  # transformers, too, reads the list where there is one
    unknown = sorted({*kinds} - {"global", "local"})
    refuse(unknown, f"config.json has attention of kind {unknown[:1]}: only global and local are supported")
    width = theirs.get("window_size", 256)
    refuse(width < 1, f"config.json has window_size {width}: it must be 1 at least")
    windows = tuple(width if kind == "local" else None for kind in kinds)
    return {"window": windows if any(windows) else None}


def _write_kinds(config: ModelConfig) -> Json:
    windows = config.main.windows
    sizes = [window for window in windows if window is not None]
    kinds = ["global" if window is None else "local" for window in windows]
    return {"attention_types": [[kinds, 1]], "attention_layers": kinds, "window_size": (sizes or [256])[0]}


NEO_ATTENTION = f"{LAYER}.attn.attention"

GPT_NEO = Architecture(
    model_type="gpt_neo",
    classes=classes("GPTNeo"),
    prefix="transformer.",
    config=(
        fixed({**PRE, "positions": "learned", "attention_scale": 1.0, "qkv_bias": False}),
        ConfigPart(_read_kinds, _write_kinds),
        field("vocab_size", "vocab_size", 50257),
        field("hidden_size", "d_model", 2048),
        field("num_layers", "n_layers", 24),
        field("num_heads", "n_heads", 16),
        field("intermediate_size", "d_ff", None),
        field("max_position_embeddings", "max_positions", 2048),
        field("activation_function", "activation", "gelu_new", ACTIVATIONS),
        field("layer_norm_epsilon", "norm_eps", 1e-5),
        field("resid_dropout", "dropout", 0.0),
        field("embed_dropout", "embedding_dropout", 0.0),
        field("attention_dropout", "attention_dropout", 0.0),
        field("initializer_range", "init_std", 0.02),
        TIED,
        LABELS,
    ),
    rules=(
        Rule("transformer.wte.weight", TOKENS),
        Rule("transformer.wpe.weight", ("decoder.positions.table.weight",)),
        *same(
            {
                **{f"{NEO_ATTENTION}.{x}_proj": f"{BLOCK}.attention.{x}" for x in ("q", "k", "v", "out")},
                f"{LAYER}.ln_1": f"{BLOCK}.attention_residual.before",
                f"{LAYER}.ln_2": f"{BLOCK}.feedforward_residual.before",
                f"{LAYER}.mlp.c_fc": f"{BLOCK}.feedforward.up",
                f"{LAYER}.mlp.c_proj": f"{BLOCK}.feedforward.down",
                "transformer.ln_f": "decoder.norm",
            }
        ),
    ),
    heads=heads(),
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


GPT_J = Architecture(
    model_type="gptj",
    classes={**classes("GPTJ", token=False), "GPTJForCausalLM": {"head": "lm", "head_bias": True}},
    prefix="transformer.",
    config=(
        fixed({**PRE, "positions": "rope", "rope_layout": "interleaved", "rope_base": 10_000.0}),
        fixed({"parallel": True, "parallel_norms": 1, "qkv_bias": False, "attention_out_bias": False}),
        ConfigPart(_read_rotation, lambda config: {"rotary_dim": config.main.d_rotary}),
        field("vocab_size", "vocab_size", 50400),
        field("n_positions", "max_positions", 2048),
        field("n_embd", "d_model", 4096),
        field("n_layer", "n_layers", 28),
        field("n_head", "n_heads", 16),
        field("n_inner", "d_ff", None),
        field("activation_function", "activation", "gelu_new", ACTIVATIONS),
        field("layer_norm_epsilon", "norm_eps", 1e-5),
        field("resid_pdrop", "dropout", 0.0),
        field("attn_pdrop", "attention_dropout", 0.0),
        field("embd_pdrop", "embedding_dropout", 0.0),
        field("initializer_range", "init_std", 0.02),
        field("tie_word_embeddings", "tie_embeddings", False),
        LABELS,
    ),
    rules=(
        Rule("transformer.wte.weight", TOKENS),
        *same(
            {
                **{f"{LAYER}.attn.{x}_proj": f"{BLOCK}.attention.{x}" for x in ("q", "k", "v", "out")},
                f"{LAYER}.ln_1": f"{BLOCK}.attention_residual.before",
                f"{LAYER}.mlp.fc_in": f"{BLOCK}.feedforward.up",
                f"{LAYER}.mlp.fc_out": f"{BLOCK}.feedforward.down",
                "transformer.ln_f": "decoder.norm",
            }
        ),
    ),
    heads=heads(),
    ignored=MASKS,
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)

# GPT-BigCode (StarCoder): GPT-2 with one key/value head, and linear weights stored [out, in].

BIGCODE = Architecture(
    model_type="gpt_bigcode",
    classes=classes("GPTBigCode"),
    prefix="transformer.",
    config=(
        *(part for part in GPT2.config if part is not GPT2_SCALES),
        fixed(only={"scale_attn_weights": True, "add_cross_attention": False}),
        field("activation_function", "activation", "gelu_pytorch_tanh", ACTIVATIONS),
        cases(
            {"multi_query": True},
            ({"multi_query": True}, {"n_kv_heads": 1}),
            ({"multi_query": False}, {"n_kv_heads": None}),
        ),
    ),
    rules=(
        *(rule for rule in GPT2.rules if rule.operation is SAME and "c_" not in rule.theirs),
        *joined(f"{LAYER}.attn.c_attn", QKV, HEAD_GROUPS),
        *same(
            {
                f"{LAYER}.attn.c_proj": f"{BLOCK}.attention.out",
                f"{LAYER}.mlp.c_fc": f"{BLOCK}.feedforward.up",
                f"{LAYER}.mlp.c_proj": f"{BLOCK}.feedforward.down",
            }
        ),
    ),
    heads=heads(),
    ignored=MASKS,
    aliases=GPT2.aliases,
)

# BLOOM: ALiBi, and a norm after the embedding; queries, keys and values are stored head by head.

BLOOM = Architecture(
    model_type="bloom",
    classes=classes("Bloom"),
    prefix="transformer.",
    config=(
        fixed({**PRE, "positions": "alibi", "embedding_norm": True, "activation": "gelu_tanh"}),
        fixed(only={"apply_residual_connection_post_layernorm": False}),
        field("vocab_size", "vocab_size", 250880),
        field("hidden_size", "d_model", 64),
        field("n_layer", "n_layers", 2),
        field("n_head", "n_heads", 8),
        field("seq_length", "max_positions", 2048),
        field("layer_norm_epsilon", "norm_eps", 1e-5),
        field("hidden_dropout", "dropout", 0.0),
        field("attention_dropout", "attention_dropout", 0.0),
        field("initializer_range", "init_std", 0.02),
        TIED,
        LABELS,
    ),
    rules=(
        Rule("transformer.word_embeddings.weight", TOKENS),
        *joined(f"{LAYER}.self_attention.query_key_value", QKV, HEAD_GROUPS),
        *same(
            {
                "transformer.word_embeddings_layernorm": "decoder.embedding.norm",
                f"{LAYER}.input_layernorm": f"{BLOCK}.attention_residual.before",
                f"{LAYER}.self_attention.dense": f"{BLOCK}.attention.out",
                f"{LAYER}.post_attention_layernorm": f"{BLOCK}.feedforward_residual.before",
                f"{LAYER}.mlp.dense_h_to_4h": f"{BLOCK}.feedforward.up",
                f"{LAYER}.mlp.dense_4h_to_h": f"{BLOCK}.feedforward.down",
                "transformer.ln_f": "decoder.norm",
            }
        ),
    ),
    heads=heads(),
    aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
)
