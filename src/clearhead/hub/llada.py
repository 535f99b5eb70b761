"""LLaDA: a masked diffusion language model of Llama's shape, whose tokens all see each other.

Its tensors have the names of the first OLMo. Logits at a mask are of the token there: nothing is shifted.
"""

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ConfigPart, Json, field, fixed, keys
from clearhead.hub.files import refuse_key
from clearhead.hub.llama import heads
from clearhead.hub.rules import stack_rules

KEYS = {
    **{name: name for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "init_std")},
    **{"d_ff": "mlp_hidden_size", "activation": "activation_type", "norm_eps": "rms_norm_eps"},
    **{
        "max_positions": "max_sequence_length",
        "tie_embeddings": "weight_tying",
        "dropout": "residual_dropout",
    },
}
STATED: Json = {
    **{
        "block_type": "llama",
        "block_group_size": 1,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
    },
    **{"rope": True, "alibi": False, "include_bias": False, "attention_layer_norm": False},
    **{"input_emb_norm": False, "scale_logits": False},
}


def _read_tables(theirs: Json) -> Json:
    rows, words = theirs.get("embedding_size"), theirs.get("vocab_size", 50257)
    refuse_key(rows not in (None, words), "embedding_size", rows, f"it must be vocab_size, {words}")
    ratio = theirs.get("mlp_hidden_size") or theirs.get("mlp_ratio", 4) * theirs.get("d_model", 768)
    return {"vocab_size": words, "d_ff": ratio}


LLADA = Architecture(
    "llada",
    {"LLaDAModelLM": {"head": "lm"}},
    (
        fixed({"family": "encoder", "positions": "rope", "norm": "rmsnorm", "norm_position": "pre"}),
        fixed({"gated": True, "bias": False}, written=STATED, only=STATED),
        *keys(KEYS, d_model=768, n_layers=12, n_heads=12, n_kv_heads=None, d_ff=None, max_positions=1024),
        *keys(KEYS, activation="silu", norm_eps=1e-5, tie_embeddings=True, init_std=0.02),
        *keys(KEYS, dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1),
        ConfigPart(
            _read_tables, lambda config: dict.fromkeys(("vocab_size", "embedding_size"), config.vocab_size)
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
