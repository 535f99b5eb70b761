"""ModernBERT: a pre-norm encoder with rotary positions, gated feed-forwards and windows in most layers."""

from clearhead.hub.architecture import Architecture
from clearhead.hub.bert import BLOCK
from clearhead.hub.fields import ACTIVATIONS, LABELS, ConfigPart, Json, field, fixed
from clearhead.hub.layers import near_and_far
from clearhead.hub.llama import ATTENTION_BIAS, FEEDFORWARD_BIAS
from clearhead.hub.rope import two_ropes
from clearhead.hub.rules import JOINED, Rule, joined, same

LAYER = "model.layers.{i}"
BENDS = field("classifier_activation", "pooler", "gelu", ACTIVATIONS)
BENDS_TRANSFORM = field("classifier_activation", "head_activation", "gelu", ACTIVATIONS)
# The layer before the output is the transform of masked tokens, and the pooler of every other head.
HEAD_ACTIVATION = ConfigPart(
    lambda config_json: BENDS.read(config_json) | BENDS_TRANSFORM.read(config_json),
    lambda config: (BENDS if config.pooler_norm else BENDS_TRANSFORM).write(config),
)
BENT: Json = {"head_bias": True, "pooler_norm": True}
PLAIN: Json = {"pooler": "none", "pooler_norm": False}
DENSE = same({"head.dense": "head.pooler", "head.norm": "head.pooler_norm", "classifier": "head.out"})

MODERNBERT = Architecture(
    model_type="modernbert",
    classes={
        "ModernBertForMaskedLM": {"head": "mlm", "head_transform": True, **PLAIN},
        "ModernBertForSequenceClassification": {"head": "classifier", **BENT},
        "ModernBertForTokenClassification": {"head": "tagger", **BENT},
        "ModernBertForQuestionAnswering": {"head": "span", **BENT},
        "ModernBertModel": {"head": "none", **PLAIN},
    },
    prefix="model.",
    config=(
        fixed({"family": "encoder", "positions": "rope", "norm": "layernorm", "norm_position": "pre"}),
        fixed({"embedding_norm": True, "first_norm": False, "gated": True, "bias": False, "init": "bert"}),
        fixed(written={"pad_token_id": None}, only={"sparse_prediction": False}),
        field("vocab_size", "vocab_size", 50368),
        field("hidden_size", "d_model", 768),
        field("num_hidden_layers", "n_layers", 22),
        field("num_attention_heads", "n_heads", 12),
        field("intermediate_size", "d_ff", 1152),
        field("hidden_activation", "activation", "gelu", ACTIVATIONS),
        field("max_position_embeddings", "max_positions", 8192),
        field("norm_eps", "norm_eps", 1e-5),
        field("norm_bias", "norm_bias", False),
        *ATTENTION_BIAS,
        FEEDFORWARD_BIAS,
        near_and_far(width=128, every=3),
        two_ropes(160_000.0, 10_000.0, "global_rope_theta", "local_rope_theta", scales_both=True),
        field("embedding_dropout", "embedding_dropout", 0.0),
        field("attention_dropout", "attention_dropout", 0.0),
        field("mlp_dropout", "feedforward_dropout", 0.0),
        field("initializer_range", "init_std", 0.02),
        field("tie_word_embeddings", "tie_embeddings", True),
        field("decoder_bias", "head_bias", True),
        field("classifier_bias", "pooler_bias", False),
        field("classifier_pooling", "pooling", "cls", {"cls": "cls", "mean": "mean"}),
        HEAD_ACTIVATION,
        LABELS,
    ),
    rules=(
        Rule("model.embeddings.tok_embeddings.weight", ("encoder.embedding.front.tokens.weight",)),
        *joined(f"{LAYER}.attn.Wqkv", [f"{BLOCK}.attention.{x}" for x in "qkv"], JOINED),
        *joined(f"{LAYER}.mlp.Wi", [f"{BLOCK}.feedforward.{x}" for x in ("gate", "up")], JOINED),
        *same(
            {
                "model.embeddings.norm": "encoder.embedding.norm",
                f"{LAYER}.attn_norm": f"{BLOCK}.attention_residual.before",
                f"{LAYER}.attn.Wo": f"{BLOCK}.attention.out",
                f"{LAYER}.mlp_norm": f"{BLOCK}.feedforward_residual.before",
                f"{LAYER}.mlp.Wo": f"{BLOCK}.feedforward.down",
                "model.final_norm": "encoder.norm",
            }
        ),
    ),
    heads={
        "mlm": same({"head.dense": "head.transform", "head.norm": "head.norm", "decoder": "head.out"}),
        "classifier": DENSE,
        "tagger": DENSE,
        "span": DENSE,
    },
    carried=("head.*", "decoder.*"),
)
