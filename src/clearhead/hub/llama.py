"""Llama 1, 2 and 3: a pre-norm decoder with rotary positions, RMSNorm and a gated feed-forward.

Others build on its tables.
"""

from collections.abc import Mapping

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, LABELS, ConfigPart, Json, field, fixed
from clearhead.hub.rope import rope
from clearhead.hub.rules import Rule, same

BLOCK, THEIRS = "decoder.blocks.{i}", "model.layers.{i}"
TOKENS = ("decoder.embedding.front.tokens.weight",)
QKV = [f"{BLOCK}.attention.{x}" for x in "qkv"]


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


SIZES = {  # their key: our field, and what Llama means where the key is absent
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("d_model", 4096),
    "num_hidden_layers": ("n_layers", 32),
    "num_attention_heads": ("n_heads", 32),
    "max_position_embeddings": ("max_positions", 2048),
    "attention_dropout": ("attention_dropout", 0.0),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", False),
}


def sizes(norm: str = "layernorm", **defaults: object) -> tuple[ConfigPart, ...]:
    """Return what every rotary pre-norm decoder states; `defaults` replace Llama's for absent keys."""
    return (
        fixed({"family": "decoder", "positions": "rope", "norm": norm, "norm_position": "pre"}),
        *(field(theirs, ours, defaults.get(theirs, usual)) for theirs, (ours, usual) in SIZES.items()),
        LABELS,
    )


def shape(
    d_ff: int = 11008,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
    **defaults: object,
) -> tuple[ConfigPart, ...]:
    """Return what a decoder of Llama's kind states: RMSNorm, gated feed-forward, no biases."""
    return (
        *sizes("rmsnorm", **defaults),
        fixed({"gated": True, "bias": False}),
        field("intermediate_size", "d_ff", d_ff),
        field("num_key_value_heads", "n_kv_heads", kv_heads),
        field("head_dim", "d_head", head_dim),
        field("rms_norm_eps", "norm_eps", eps),
    )


ACTIVATION = field("hidden_act", "activation", "silu", ACTIVATIONS)
ATTENTION_BIAS = (
    field("attention_bias", "qkv_bias", False),
    field("attention_bias", "attention_out_bias", False),
)
FEEDFORWARD_BIAS = field("mlp_bias", "feedforward_bias", False)
ATTENTION = same(
    {f"{THEIRS}.self_attn.{x}_proj": f"{BLOCK}.attention.{y}" for x, y in zip("qkvo", ("q", "k", "v", "out"))}
)
QK_NORMS = same({f"{THEIRS}.self_attn.{x}_norm": f"{BLOCK}.attention.{x}_norm" for x in "qk"})
FEEDFORWARD = same({f"{THEIRS}.mlp.{x}_proj": f"{BLOCK}.feedforward.{x}" for x in ("gate", "up", "down")})
EMBEDDING = Rule("model.embed_tokens.weight", TOKENS)
EDGES = (EMBEDDING, *same({"model.norm": "decoder.norm"}))
NORMS = same(
    {
        f"{THEIRS}.input_layernorm": f"{BLOCK}.attention_residual.before",
        f"{THEIRS}.post_attention_layernorm": f"{BLOCK}.feedforward_residual.before",
    }
)
RULES = (*EDGES, *NORMS, *ATTENTION, *FEEDFORWARD)
INV_FREQ = "*.rotary_emb.inv_freq"


def llama_like(
    model_type: str,
    named: str | dict[str, Json],
    *config: ConfigPart,
    rules: tuple[Rule, ...] = RULES,
    aliases: Mapping[str, str] | None = None,
) -> Architecture:
    """Return an architecture with Llama's tensors; `named` is how its classes begin, or the classes."""
    known = classes(named) if isinstance(named, str) else named
    return Architecture(
        model_type,
        known,
        config,
        rules,
        heads(tagger="score"),
        prefix="model.",
        ignored=(INV_FREQ,),
        aliases=aliases or {},
    )


LLAMA = llama_like(
    "llama",
    "Llama",
    *shape(),
    ACTIVATION,
    rope(),
    *ATTENTION_BIAS,
    FEEDFORWARD_BIAS,
    fixed(only={"pretraining_tp": 1}),
)
