"""SmolLM 3: Llama with layers, every fourth, that do not rotate."""

from clearhead.hub.fields import fixed, sliding_windows
from clearhead.hub.llama import ACTIVATION, ATTENTION_BIAS, FEEDFORWARD_BIAS, llama_like, shape
from clearhead.hub.rope import rope, rope_skips

SIZES = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}

SMOLLM3 = llama_like(
    "smollm3",
    "SmolLM3",
    *shape(kv_heads=4, **SIZES),
    ACTIVATION,
    rope(base=2_000_000.0),
    rope_skips("no_rope_layers", "no_rope_layer_interval", 4),
    *ATTENTION_BIAS,
    FEEDFORWARD_BIAS,
    sliding_windows(switch="use_sliding_window"),
    # By default these are rows of the released models' token table.
    fixed(written={"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}),
)
