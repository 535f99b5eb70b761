"""Llama and its relatives: pre-norm decoders with rotary positions, each Llama's tables with what differs.

Llama 1 to 3, Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi, OLMo 2 and 3, StableLM, Granite, SmolLM 3, Cohere,
StarCoder2, Nemotron and GLM, and LLaDA, which fills in masks. Those with experts are in `mixtures`.

q_proj and k_proj load unpermuted: both sides rotate halves of a head. GGUF permutes them
(hub/gguf_architectures.py).
"""

from typing import Any

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import (
    ACTIVATIONS,
    LABELS,
    WHOLE_HEADS,
    ConfigPart,
    Json,
    count_layers,
    field,
    fixed,
    keys,
    power,
    rope_skips,
    scaled,
    sliding_windows,
)
from clearhead.hub.files import refuse_key
from clearhead.hub.rope import rope, two_ropes
from clearhead.hub.rules import Rule, joined, same, stack_rules

BLOCK, LAYER = "decoder.blocks.{i}", "model.layers.{i}"  # ours, theirs
QKV = [f"{BLOCK}.attention.{x}" for x in "qkv"]
INV_FREQ = "*.rotary_emb.inv_freq"


def classes(name: str, lm: str = "", sequence: bool = True, token: bool = True) -> dict[str, Json]:
    """Return the classes that a decoder of this kind has: some lack those for whole texts or for tokens."""
    classifier = {"head": "classifier", "head_bias": False, "pooling": "last"}
    tagger = {"head": "tagger", "head_bias": True}
    return {
        lm or f"{name}ForCausalLM": {"head": "lm"},
        **({f"{name}ForSequenceClassification": classifier} if sequence else {}),
        **({f"{name}ForTokenClassification": tagger} if token else {}),
        f"{name}Model": {"head": "none"},
    }


def heads(tagger: str = "classifier", lm: tuple[str, ...] = ("lm_head",)) -> dict[str, tuple[Rule, ...]]:
    """Return the rules of each head, by the names of its output layer; the classifier's is always "score"."""
    names = {"lm": lm, "classifier": ("score",), "tagger": (tagger,)}
    return {head: same(dict.fromkeys(theirs, "head.out")) for head, theirs in names.items()}


def sizes(
    norm: str = "layernorm", names: dict[str, str] | None = None, **defaults: Any
) -> tuple[ConfigPart, ...]:
    """Return what every rotary pre-norm decoder states; `defaults` are for absent keys, else Llama's."""
    usual: dict[str, Any] = {
        **{"vocab_size": 32000, "d_model": 4096, "n_layers": 32, "n_heads": 32, "max_positions": 2048},
        **{"attention_dropout": 0.0, "init_std": 0.02, "tie_embeddings": False},
    }
    return (
        fixed({"family": "decoder", "positions": "rope", "norm": norm, "norm_position": "pre"}),
        *keys(names, **{**usual, **defaults}),
        LABELS,
    )


def shape(activation: str | None = "silu", **defaults: Any) -> tuple[ConfigPart, ...]:
    """Return what a decoder of Llama's kind states: RMSNorm, gated feed-forward, no biases.

    Where `activation` is None, another part states it.
    """
    usual: Json = {"d_ff": 11008, "n_kv_heads": None, "d_head": None, "norm_eps": 1e-6}
    usual |= {} if activation is None else {"activation": activation}
    return (
        *sizes("rmsnorm", {"norm_eps": "rms_norm_eps"}, **{**usual, **defaults}),
        fixed({"gated": True, "bias": False}),
    )


ATTENTION_BIAS = (
    field("attention_bias", "qkv_bias", False),
    field("attention_bias", "attention_out_bias", False),
)
FEEDFORWARD_BIAS = field("mlp_bias", "feedforward_bias", False)
QK_NORMS = "self_attn.{q,k}_norm"
POST = "post_{attention,feedforward}_layernorm"


def llama_rules(**modules: str) -> tuple[Rule, ...]:
    """Return the rules of Llama's tensors; `modules` are those that differ (see `stack_rules`)."""
    usual = {
        **{"tokens": "model.embed_tokens", "norm": "model.norm", "qkvo": "self_attn.{q,k,v,o}_proj"},
        **{"gated": "mlp.{gate,up,down}_proj", "pre_norms": "{input,post_attention}_layernorm"},
    }
    return stack_rules("decoder", LAYER, **{**usual, **modules})


def llama_like(
    model_type: str,
    named: str | dict[str, Json],
    *config: ConfigPart,
    rules: tuple[Rule, ...] | None = None,
    **more: Any,
) -> Architecture:
    """Return an architecture with Llama's tensors; `named` is how its classes begin, or the classes."""
    return Architecture(
        model_type,
        classes(named) if isinstance(named, str) else named,
        config,
        llama_rules() if rules is None else rules,
        heads(tagger="score"),
        prefix="model.",
        ignored=(INV_FREQ,),
        **more,
    )


LLAMA = llama_like(
    "llama", "Llama", *shape(), rope(), *ATTENTION_BIAS, FEEDFORWARD_BIAS, fixed(only={"pretraining_tp": 1})
)

# Mistral: a window in every layer.

MISTRAL = llama_like(
    "mistral",
    "Mistral",
    *shape(d_ff=14336, n_kv_heads=8, max_positions=131072),
    rope(),
    sliding_windows(default=4096),
)

# Qwen 2 and 2.5: biases on queries, keys and values, and a window in later layers. Qwen 3: a norm on them
# instead.

QWEN_WINDOWS = sliding_windows(
    default=4096, switch="use_sliding_window", full_below="max_window_layers", below=28
)
QWEN_SIZES: Json = {"vocab_size": 151936, "max_positions": 32768}

QWEN2 = llama_like(
    "qwen2", "Qwen2", *shape(d_ff=22016, **QWEN_SIZES), fixed({"qkv_bias": True}), rope(), QWEN_WINDOWS
)

QWEN3 = llama_like(
    "qwen3",
    "Qwen3",
    *shape(d_ff=22016, d_head=128, **QWEN_SIZES),
    *ATTENTION_BIAS,
    fixed({"qk_norm": "head"}),
    rope(),
    QWEN_WINDOWS,
    rules=llama_rules(qk_norms=QK_NORMS),
)

# Gemma 1, 2 and 3 (text): scaled embeddings, and norm weights that are stored less one. Gemma 2 adds norms
# after each part, soft-caps and a window in every other layer. Gemma 3 has a norm on queries and keys in
# place of the soft-caps; five of six of its layers have a window, and rotate by a base of their own.

TANH = {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS}
GEMMA_SIZES: Json = {"activation": None, "tie_embeddings": True, "vocab_size": 256000, "max_positions": 8192}
EVERY_GEMMA: tuple[ConfigPart, ...] = (
    fixed({"norm_unit_offset": True}),
    scaled(None, "embedding_scale", 0.5),
    *ATTENTION_BIAS,
    fixed(only={"use_bidirectional_attention": False}),
)
LATER_GEMMA: tuple[ConfigPart, ...] = (
    *shape(d_ff=9216, n_kv_heads=4, d_head=256, d_model=2304, n_layers=26, n_heads=8, **GEMMA_SIZES),
    *EVERY_GEMMA,
    fixed({"norm_position": "sandwich"}),
    field("hidden_activation", "activation", "gelu_pytorch_tanh", TANH),
    power("query_pre_attn_scalar", "attention_scale", -0.5, 256, whole=True),
)
SANDWICH = {"pre_norms": "{input,pre_feedforward}_layernorm", "output_norms": POST}

GEMMA = llama_like(
    "gemma",
    "Gemma",
    *shape(d_ff=24576, n_kv_heads=16, d_head=256, d_model=3072, n_layers=28, n_heads=16, **GEMMA_SIZES),
    *EVERY_GEMMA,
    # Its first files said gelu and meant the tanh formula.
    field("hidden_act", "activation", "gelu_pytorch_tanh", {**TANH, "gelu": "gelu_tanh"}),
    rope(),
)

GEMMA2 = llama_like(
    "gemma2",
    "Gemma2",
    *LATER_GEMMA,
    rope(),
    sliding_windows(pattern=2, default=4096),
    field("attn_logit_softcapping", "attention_softcap", 50.0, null=True),
    field("final_logit_softcapping", "logit_softcap", 30.0, null=True),
    rules=llama_rules(**SANDWICH),
)

GEMMA3 = llama_like(
    "gemma3_text",
    classes("Gemma3Text", "Gemma3ForCausalLM", token=False),
    *LATER_GEMMA,
    *keys(vocab_size=262208, max_positions=131072),
    fixed({"qk_norm": "head"}),
    two_ropes(base=1_000_000.0, local=10_000.0),
    sliding_windows(pattern=6, default=4096, pattern_key="sliding_window_pattern"),
    fixed(only={"attn_logit_softcapping": None}),  # transformers reads it, and does not use it
    field("final_logit_softcapping", "logit_softcap", None),
    rules=llama_rules(**SANDWICH, qk_norms=QK_NORMS),
)

# Phi 1 to 2: attention and feed-forward side by side after one norm, with biases. Phi-3 and 4: fused weights.

PHI_DROPOUTS = keys(
    {"dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop"}, dropout=0.0, embedding_dropout=0.0
)
JOINED_GATE = joined(f"{LAYER}.mlp.gate_up_proj", [f"{BLOCK}.feedforward.gate", f"{BLOCK}.feedforward.up"])

PHI = llama_like(
    "phi",
    {**classes("Phi"), "PhiForCausalLM": {"head": "lm", "head_bias": True}},
    fixed({"parallel": True}),
    *sizes(vocab_size=51200, d_model=2048, n_layers=24),
    *keys(d_ff=8192, n_kv_heads=None, d_head=None, activation="gelu_new", norm_eps=1e-5),
    *PHI_DROPOUTS,
    field("qk_layernorm", "qk_norm", False, {False: "none", True: "head"}),
    rope(fraction=0.5),
    rules=llama_rules(
        **{"norm": "model.final_layernorm", "qkvo": "self_attn.{q_proj,k_proj,v_proj,dense}"},
        **{"qk_norms": "self_attn.{q,k}_layernorm", "gated": "", "mlp": "mlp.fc{1,2}"},
        **{"pre_norms": "", "pre_norm": "input_layernorm"},
    ),
)

PHI3 = llama_like(
    "phi3",
    "Phi3",
    *shape(d_ff=8192, norm_eps=1e-5, vocab_size=32064, d_model=3072, max_positions=4096),
    *PHI_DROPOUTS,
    rope(fraction=1.0, kinds=("longrope",), trained=4096),
    sliding_windows(),
    # By default these are rows of the released models' token table.
    fixed(written={"pad_token_id": None, "eos_token_id": None}),
    rules=(
        *llama_rules(qkvo="", out="self_attn.o_proj", gated="", down="mlp.down_proj"),
        *joined(f"{LAYER}.self_attn.qkv_proj", QKV),
        *JOINED_GATE,
    ),
)

# OLMo 2: norms after each part instead of before, and norms over queries and keys. OLMo 3: the same with a
# window in three of four layers, where nothing scales the rotation.

EVERY_OLMO = (
    *shape(norm_eps=1e-5, vocab_size=50304),
    *ATTENTION_BIAS,
    fixed({"norm_position": "output", "qk_norm": "full"}),
)
OLMO_RULES = llama_rules(pre_norms="", output_norms=POST, qk_norms=QK_NORMS)

OLMO2 = llama_like("olmo2", classes("Olmo2", token=False), *EVERY_OLMO, rope(), rules=OLMO_RULES)

# StableLM: LayerNorm, and rotary positions in part of each head.

STABLELM = llama_like(
    "stablelm",
    "StableLm",
    fixed({"gated": True, "bias": False, "norm_bias": True}),
    *sizes(vocab_size=50304, d_model=2560, max_positions=4096, d_ff=6912, n_kv_heads=32, norm_eps=1e-5),
    WHOLE_HEADS,
    *keys(activation="silu", dropout=0.0),
    field("use_qkv_bias", "qkv_bias", False),
    field("use_parallel_residual", "parallel", False),
    fixed(only={"qk_layernorm": False}),  # with it, each head has norm weights of its own
    rope(fraction=0.25),
)

# Granite: factors on the embeddings, the scores, the residual branches and the logits.

EVERY_GRANITE = (
    *shape(),
    rope(),
    *ATTENTION_BIAS,
    field("embedding_multiplier", "embedding_scale", 1.0),
    field("residual_multiplier", "residual_scale", 1.0),
    field("attention_multiplier", "attention_scale", 1.0),
    power("logits_scaling", "logit_scale", -1, 1.0),
)

GRANITE = llama_like(
    "granite", classes("Granite", sequence=False, token=False), *EVERY_GRANITE, FEEDFORWARD_BIAS
)

# SmolLM 3: layers, every fourth, that do not rotate.

SMOLLM3_SKIPS = rope_skips("no_rope_layers", "no_rope_layer_interval", 4)

SMOLLM3 = llama_like(
    "smollm3",
    "SmolLM3",
    *shape(vocab_size=128256, d_model=2048, n_layers=36, n_heads=16, n_kv_heads=4),
    *keys(max_positions=32768, tie_embeddings=True),
    rope(base=2_000_000.0),
    SMOLLM3_SKIPS,
    *ATTENTION_BIAS,
    FEEDFORWARD_BIAS,
    sliding_windows(switch="use_sliding_window", skips=SMOLLM3_SKIPS),
    # By default these are rows of the released models' token table.
    fixed(written={"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}),
)

# Cohere (Command R): LayerNorm without bias, attention and feed-forward side by side, neighbours rotate
# together, scaled logits. Cohere 2: layers with a window rotate, the others do not.

EVERY_COHERE = (
    *sizes(vocab_size=256000, d_model=8192, n_layers=40, n_heads=64, max_positions=8192, tie_embeddings=True),
    *keys(d_ff=22528, n_kv_heads=None, norm_eps=1e-5, logit_scale=0.0625, activation="silu"),
    WHOLE_HEADS,
    fixed({"gated": True, "bias": False, "parallel": True, "rope_layout": "interleaved"}),
    fixed(written={"pad_token_id": None}),  # by default a row of the released models' token table
    *ATTENTION_BIAS,
)
COHERE_WINDOWS = sliding_windows(pattern=4, default=4096, pattern_key="sliding_window_pattern")


def _read_cohere_layers(theirs: Json) -> Json:
    window = COHERE_WINDOWS.read(theirs)["window"]
    each = window if isinstance(window, tuple) else (window,) * count_layers(theirs)
    return {"window": window, "rope_skips": tuple(n for n, width in enumerate(each) if width is None)}


COHERE = llama_like(
    "cohere",
    classes("Cohere", sequence=False, token=False),
    *EVERY_COHERE,
    rope(base=500_000.0),
    fixed(only={"use_qk_norm": False}),  # with it, each head has norm weights of its own
)

COHERE2 = llama_like(
    "cohere2",
    classes("Cohere2", sequence=False, token=False),
    *EVERY_COHERE,
    rope(),
    ConfigPart(_read_cohere_layers, COHERE_WINDOWS.write),
)

# StarCoder2: LayerNorm, biases, a feed-forward without a gate.

STARCODER2 = llama_like(
    "starcoder2",
    "Starcoder2",
    *sizes(vocab_size=49152, d_model=3072, n_layers=30, n_heads=24, n_kv_heads=2, d_head=None, d_ff=12288),
    *keys(max_positions=4096, init_std=0.018042, tie_embeddings=True, embedding_dropout=0.0),
    *keys({"norm_eps": "norm_epsilon", "dropout": "residual_dropout"}, norm_eps=1e-5, dropout=0.0),
    fixed({"norm_bias": True}),
    field("hidden_act", "activation", "gelu_pytorch_tanh", TANH),
    *(field("use_bias", ours, True) for ours in ("qkv_bias", "attention_out_bias", "feedforward_bias")),
    rope(),
    sliding_windows(),
    rules=llama_rules(gated="", mlp="mlp.c_{fc,proj}"),
)

# Nemotron: LayerNorm whose weights are stored less one, squared ReLU without a gate, half of a head rotates.

NEMOTRON = llama_like(
    "nemotron",
    "Nemotron",
    *sizes(vocab_size=256000, d_model=6144, n_heads=48, max_positions=4096, init_std=0.0134, d_ff=24576),
    *keys({"norm_eps": "norm_eps"}, n_kv_heads=None, d_head=None, activation="relu2", norm_eps=1e-5),
    fixed({"bias": False, "norm_bias": True, "norm_unit_offset": True}),
    *ATTENTION_BIAS,
    FEEDFORWARD_BIAS,
    rope(fraction=0.5),
)

# GLM: half of each head rotates, neighbours together, and gate and up are one tensor. GLM-4 (0414): norms
# after each part too.

EVERY_GLM = (
    *shape(d_ff=13696, n_kv_heads=2, d_head=128, norm_eps=1.5625e-07, vocab_size=151552, n_layers=40),
    *keys(max_positions=131072),
    fixed({"rope_layout": "interleaved"}, written={"pad_token_id": None}),
    field("attention_bias", "qkv_bias", True),
    rope(fraction=0.5),
)
GLM_RULES = (*llama_rules(gated="", down="mlp.down_proj"), *JOINED_GATE)

GLM = llama_like("glm", "Glm", *EVERY_GLM, rules=GLM_RULES)

GLM4 = llama_like(
    "glm4",
    "Glm4",
    *EVERY_GLM,
    fixed({"norm_position": "sandwich"}),
    rules=(*GLM_RULES, *stack_rules("decoder", LAYER, output_norms="post_{self_attn,mlp}_layernorm")),
)

OLMO3 = llama_like(
    "olmo3",
    classes("Olmo3", token=False),
    *EVERY_OLMO,
    fixed(written={"pad_token_id": None}),
    two_ropes(base=500_000.0, local=500_000.0, local_key=None),
    sliding_windows(pattern=4, default=4096),
    rules=OLMO_RULES,
)

# LLaDA: a masked diffusion language model of Llama's shape, whose tokens all see each other. Its tensors have
# the names of the first OLMo. Logits at a mask are of the token there: nothing is shifted.

LLADA_KEYS = {
    **{name: name for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "init_std")},
    **{"d_ff": "mlp_hidden_size", "activation": "activation_type", "norm_eps": "rms_norm_eps"},
    **{
        "max_positions": "max_sequence_length",
        "tie_embeddings": "weight_tying",
        "dropout": "residual_dropout",
    },
}
LLADA_STATED: Json = {
    **{
        "block_type": "llama",
        "block_group_size": 1,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
    },
    **{"rope": True, "alibi": False, "include_bias": False, "attention_layer_norm": False},
    **{"input_emb_norm": False, "scale_logits": False},
}


def _llada_tables(theirs: Json) -> Json:
    rows, words = theirs.get("embedding_size"), theirs.get("vocab_size", 50257)
    refuse_key(rows not in (None, words), "embedding_size", rows, f"it must be vocab_size, {words}")
    ratio = theirs.get("mlp_hidden_size") or theirs.get("mlp_ratio", 4) * theirs.get("d_model", 768)
    return {"vocab_size": words, "d_ff": ratio}


LLADA = Architecture(
    "llada",
    {"LLaDAModelLM": {"head": "lm"}},
    (
        fixed({"family": "encoder", "positions": "rope", "norm": "rmsnorm", "norm_position": "pre"}),
        fixed({"gated": True, "bias": False}, written=LLADA_STATED, only=LLADA_STATED),
        *keys(LLADA_KEYS, d_model=768, n_layers=12, n_heads=12, n_kv_heads=None, d_ff=None),
        *keys(LLADA_KEYS, max_positions=1024, activation="silu", norm_eps=1e-5),
        *keys(LLADA_KEYS, tie_embeddings=True, init_std=0.02),
        *keys(LLADA_KEYS, dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1),
        ConfigPart(
            _llada_tables, lambda config: dict.fromkeys(("vocab_size", "embedding_size"), config.vocab_size)
        ),
        field("include_qkv_bias", "qkv_bias", False),
        field("rope_theta", "rope_base", 10_000.0),
    ),
    stack_rules(
        "encoder",
        "model.transformer.blocks.{i}",
        **{"tokens": "model.transformer.wte", "norm": "model.transformer.ln_f"},
        **{"qkvo": "{q_proj,k_proj,v_proj,attn_out}", "gated": "{ff_proj,up_proj,ff_out}"},
        pre_norms="{attn,ff}_norm",
    ),
    heads(lm=("model.transformer.ff_out",)),
)
