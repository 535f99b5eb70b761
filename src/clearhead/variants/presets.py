"""Named sizes: published systems, and a few tiny models for tests. A preset is a config and nothing more.

`preset("gpt2").replace(vocab_size=8_000, n_layers=4)` is another config of the same kind.
"""

from clearhead.core.config import ModelConfig, RopeScaling
from clearhead.errors import ConfigError, nearest, refuse

# The original Transformer. Its attention has no biases, in the paper's formulas as in its first code.
_original = ModelConfig(
    family="encoder-decoder",
    vocab_size=37_000,
    d_model=512,
    n_layers=6,
    n_heads=8,
    d_ff=2048,
    positions="sinusoidal",
    max_positions=512,
    embedding_scale=512**0.5,
    share_embeddings=True,
    tie_embeddings=True,
    qkv_bias=False,
    attention_out_bias=False,
    activation="relu",
    norm_position="post",
    norm_eps=1e-6,
    dropout=0.1,
    attention_dropout=0.0,
    init="xavier",
)

# GPT-2 and GPT-3. Every other layer of GPT-3 is banded; here all are full, which changes no parameter.
_gpt2 = ModelConfig(
    family="decoder",
    vocab_size=50_257,
    d_model=768,
    n_layers=12,
    n_heads=12,
    max_positions=1024,
    activation="gelu_tanh",
    dropout=0.1,
    init="gpt2",
)

# BERT. The pooler serves the heads that pool; the masked language model has none.
_bert = ModelConfig(
    family="encoder",
    vocab_size=30_522,
    d_model=768,
    n_layers=12,
    n_heads=12,
    max_positions=512,
    embedding_norm=True,
    n_types=2,
    activation="gelu",
    norm_position="post",
    norm_eps=1e-12,
    dropout=0.1,
    head="mlm",
    pooler="tanh",
    init="bert",
)

# ModernBERT: two layers of three see a window, and rotate by a base of their own
_modern = ModelConfig(
    family="encoder",
    vocab_size=50_368,
    d_model=768,
    n_layers=22,
    n_heads=12,
    d_ff=1152,
    positions="rope",
    max_positions=8192,
    rope_base=160_000.0,
    rope_local_base=10_000.0,
    window=tuple(65 if layer % 3 else None for layer in range(22)),
    embedding_norm=True,
    first_norm=False,
    gated=True,
    bias=False,
    head="mlm",
    pooler_bias=False,
    init="bert",
)

# LLaMA
_llama = ModelConfig(
    family="decoder",
    vocab_size=32_000,
    d_model=2048,
    n_layers=22,
    n_heads=32,
    n_kv_heads=4,
    d_ff=5632,
    positions="rope",
    max_positions=2048,
    tie_embeddings=False,
    bias=False,
    activation="silu",
    gated=True,
    norm="rmsnorm",
    init="bert",
)
_llama_3 = _llama.replace(vocab_size=128_256, n_kv_heads=8, max_positions=8192, rope_base=500_000.0)

# LLaDA: a diffusion language model, whose tokens all see each other
_llada = _llama_3.replace(
    family="encoder",
    head="lm",
    vocab_size=126_464,
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    d_ff=12_288,
    max_positions=4096,
)

# gpt-oss: experts, sinks, every other layer with a window
_gpt_oss = _llama_3.replace(
    vocab_size=201_088,
    d_model=2880,
    d_head=64,
    n_heads=64,
    d_ff=2880,
    max_positions=131_072,
    rope_base=150_000.0,
    rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_positions=4096, truncate=False),
    attention=("window(128)", "full"),
    attention_sink=True,
    bias=True,
    norm_bias=False,
    head_bias=False,
    activation="quick_gelu",
    gated_clamp=7.0,
    gated_shift=1.0,
    n_layers=24,
    n_experts=32,
    n_active_experts=4,
    router_bias=True,
    router_order="topk_softmax",
)

# T5: scores unscaled, logits scaled instead
_t5_small = ModelConfig(
    family="encoder-decoder",
    vocab_size=32_128,
    d_model=512,
    n_layers=6,
    n_heads=8,
    d_ff=2048,
    positions="relative",
    max_positions=512,
    attention_scale=1.0,
    bias=False,
    activation="relu",
    norm="rmsnorm",
    norm_eps=1e-6,
    dropout=0.1,
    feedforward_dropout=0.1,
    logit_scale=512**-0.5,
)

# BART
_bart_base = ModelConfig(
    family="encoder-decoder",
    vocab_size=50_265,
    d_model=768,
    n_layers=6,
    n_heads=12,
    max_positions=1024,
    position_offset=2,
    embedding_norm=True,
    activation="gelu",
    norm_position="post",
    dropout=0.1,
    feedforward_dropout=0.1,
    init="bert",
)

# The vision Transformer, tiny size
_vit_tiny = ModelConfig(
    family="encoder",
    input="patches",
    image_size=(224, 224),
    patch_size=16,
    class_token=True,
    d_model=192,
    n_layers=12,
    n_heads=3,
    max_positions=197,
    norm_eps=1e-6,
    n_classes=1000,
    init="bert",
)

# PaLM's block at its smallest size
_palm = ModelConfig(
    family="decoder",
    vocab_size=256_000,
    d_model=4096,
    n_layers=32,
    n_heads=16,
    n_kv_heads=1,
    d_head=256,
    positions="rope",
    max_positions=2048,
    bias=False,
    activation="silu",
    gated=True,
    parallel=True,
    parallel_norms=1,
)

# nanoGPT's character model
_nano = ModelConfig(
    family="decoder",
    vocab_size=65,
    d_model=384,
    n_layers=6,
    n_heads=6,
    max_positions=256,
    bias=False,
    dropout=0.2,
)

# For tests: milliseconds on a CPU
_micro = ModelConfig(family="decoder", vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_positions=64)

PRESETS: dict[str, ModelConfig] = {
    "transformer-base": _original,
    "transformer-big": _original.replace(
        d_model=1024, n_heads=16, d_ff=4096, embedding_scale=1024**0.5, dropout=0.3
    ),
    "gpt2": _gpt2,
    "gpt2-medium": _gpt2.replace(d_model=1024, n_layers=24, n_heads=16),
    "gpt2-large": _gpt2.replace(d_model=1280, n_layers=36, n_heads=20),
    "gpt2-xl": _gpt2.replace(d_model=1600, n_layers=48, n_heads=25),
    "gpt3": _gpt2.replace(d_model=12_288, n_layers=96, n_heads=96, max_positions=2048),
    "bert-base": _bert,
    "bert-large": _bert.replace(d_model=1024, n_layers=24, n_heads=16),
    "distilbert": _bert.replace(n_layers=6, n_types=0, pooler="relu"),
    "xlm-roberta-base": _bert.replace(vocab_size=250_002, position_offset=2, n_types=1, norm_eps=1e-5),
    "mpnet-base": _bert.replace(
        vocab_size=30_527, positions="learned+relative", position_offset=2, n_types=0, norm_eps=1e-5
    ),
    "electra-base": _bert.replace(head="tagger", n_classes=1, pooler="gelu"),
    "modernbert-base": _modern,
    "deberta-v3-base": _bert.replace(
        vocab_size=128_100,
        positions="disentangled",
        relative_buckets=512,
        relative_max_distance=512,
        relative_norm=True,
        attention_scale=(3 * 64) ** -0.5,
        n_types=0,
        norm_eps=1e-7,
        pooler="none",
    ),
    "longformer-base": _bert.replace(
        vocab_size=50_265,
        max_positions=4096,
        position_offset=2,
        n_types=1,
        norm_eps=1e-5,
        pooler="none",
        attention="global(size=257, tokens=given)",
    ),
    "llama-1b-like": _llama,
    "llama-3-8b": _llama_3.replace(d_model=4096, n_layers=32, n_heads=32, d_ff=14_336),
    "llama-3-70b": _llama_3.replace(d_model=8192, n_layers=80, n_heads=64, d_ff=28_672),
    "llada-8b": _llada,
    "gpt-oss-20b": _gpt_oss,
    "gpt-oss-120b": _gpt_oss.replace(n_layers=36, n_experts=128),
    "t5-small": _t5_small,
    "bart-base": _bart_base,
    "vit-tiny": _vit_tiny,
    "palm-like": _palm,
    "nano": _nano,
    "micro-decoder": _micro,
    "micro-encoder": _micro.replace(family="encoder"),
    "micro-encoder-decoder": _micro.replace(family="encoder-decoder"),
    "micro-vit": _micro.replace(
        family="encoder",
        input="patches",
        vocab_size=0,
        image_size=(8, 8),
        patch_size=2,
        n_channels=1,
        class_token=True,
        n_classes=10,
    ),
}


def preset(name: str) -> ModelConfig:
    """The config of this name; an unknown name is an error that suggests the nearest known one."""
    refuse(
        name not in PRESETS,
        f'no preset is called "{name}"{nearest(name, PRESETS)}: choose from {", ".join(PRESETS)}',
        ConfigError,
    )
    return PRESETS[name]
