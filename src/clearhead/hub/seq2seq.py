"""Encoder-decoders: T5, mT5; BART, mBART, M2M-100 with NLLB and Marian, all of one code; Whisper."""

from clearhead.core.config import ModelConfig
from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import (
    ACTIVATIONS,
    ConfigPart,
    Json,
    cases,
    field,
    fixed,
    keys,
    positions_after_padding,
    scaled,
)
from clearhead.hub.files import refuse_key
from clearhead.hub.rules import Rule, reshaped, same, stack_rules

SOURCE, TARGET = (f"{stack}.embedding.front.tokens.weight" for stack in ("encoder", "decoder"))


def tables(prefix: str) -> tuple[Rule, ...]:
    """Return the rules of token tables: one has the name "shared", two have the stacks' own names."""
    return (
        Rule(f"{prefix}shared.weight", (SOURCE,), when={"share_embeddings": True}),
        Rule(f"{prefix}encoder.embed_tokens.weight", (SOURCE,)),
        Rule(f"{prefix}decoder.embed_tokens.weight", (TARGET,)),
        Rule(f"{prefix}shared.weight", (SOURCE,), copy=True),  # every file must have it, read or not
    )


def tied(prefix: str) -> tuple[str, ...]:
    """Return the names of token tables that are one unless the file has others."""
    names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
    return (*(f"{prefix}{name}.weight" for name in names), "lm_head.weight")


# T5, T5 v1.1 and mT5: relative positions, one table per stack, and attention scores without a scale.


def read_depths(theirs: Json) -> Json:
    """Return the layers of encoder and decoder, equally many by default; or of an encoder alone."""
    if (theirs.get("architectures") or [""])[0].endswith("EncoderModel"):
        return field("num_layers", "n_layers").read(theirs)
    decoder = field("num_decoder_layers", "n_layers", otherwise="num_layers")
    return field("num_layers", "n_encoder_layers").read(theirs) | decoder.read(theirs)


def write_depths(config: ModelConfig) -> Json:
    """Return both keys; or one, and that there is no decoder."""
    if config.family == "encoder":
        return {"num_layers": config.n_layers, "is_encoder_decoder": False}
    return {"num_layers": config.n_encoder_layers, "num_decoder_layers": config.n_layers}


T5_KEYS = {
    **{"relative_buckets": "relative_attention_num_buckets", "max_positions": "n_positions"},
    **{"relative_max_distance": "relative_attention_max_distance", "norm_eps": "layer_norm_epsilon"},
    **{"dropout": "dropout_rate", "feedforward_dropout": "dropout_rate"},
}
T5_SHAPE: tuple[ConfigPart, ...] = (
    fixed({"positions": "relative", "attention_scale": 1.0, "norm": "rmsnorm", "norm_position": "pre"}),
    fixed({"bias": False}, written={"decoder_start_token_id": 0}),
    *(field(name, name) for name in ("vocab_size", "d_model", "d_ff")),
    field("d_kv", "d_head"),
    field("num_heads", "n_heads"),
    ConfigPart(read_depths, write_depths),
    *keys(T5_KEYS, relative_buckets=32, relative_max_distance=128, max_positions=512, norm_eps=1e-6),
    *keys(T5_KEYS, dropout=0.1, feedforward_dropout=0.1, tie_embeddings=True),
)


def feedforward(default: str) -> ConfigPart:
    """Return the part for the activation and its gate; `default` is feed_forward_proj where it is absent.

    Newer files state the two next to feed_forward_proj, and these decide.
    """

    def read(theirs: Json) -> Json:
        stated = theirs.get("feed_forward_proj") or default
        gate, _, word = str(stated).rpartition("-")
        allowed = "it must be an activation, or gated-ACTIVATION"
        refuse_key(gate not in ("", "gated"), "feed_forward_proj", stated, allowed)
        # "gelu" is the tanh formula behind a gate, and the exact one without.
        usual = {"dense_act_fn": "gelu_new" if stated == "gated-gelu" else word}
        activation = field("dense_act_fn", "activation", names=ACTIVATIONS).read({**usual, **theirs})
        return {**activation, "gated": bool(theirs.get("is_gated_act", gate == "gated"))}

    def write(config: ModelConfig) -> Json:
        word = next(word for word, name in ACTIVATIONS.items() if name == config.activation)
        short = "gelu" if config.gated and word == "gelu_new" else word
        stated = {"dense_act_fn": word, "is_gated_act": config.gated}
        return {"feed_forward_proj": f"gated-{short}" if config.gated else short, **stated}

    return ConfigPart(read, write)


def t5_blocks(stack: str, **attentions: str) -> tuple[Rule, ...]:
    """Return the rules of one stack's blocks: attentions {ours: theirs}, and a feed-forward, by number."""
    theirs, ours = f"{stack}.block.{{i}}.layer", f"{stack}.blocks.{{i}}"
    norms = dict(enumerate([*attentions, "feedforward"]))
    wide = f"{theirs}.{len(attentions)}.DenseReluDense"
    return (
        *same(
            {
                f"{theirs}.{n}.{attentions[name]}.{{q,k,v,o}}": f"{ours}.{name}.{{q,k,v,out}}"
                for n, name in enumerate(attentions)
            }
        ),
        *same({f"{theirs}.{n}.layer_norm": f"{ours}.{name}_residual.before" for n, name in norms.items()}),
        *same(
            {
                f"{stack}.final_layer_norm": f"{stack}.norm",
                f"{wide}.{{wi_0,wo}}": f"{ours}.feedforward.{{gate,down}}",
            }
        ),
        Rule(f"{wide}.wi_1.weight", (f"{ours}.feedforward.up.weight",), when={"gated": True}),
        Rule(f"{wide}.wi.weight", (f"{ours}.feedforward.up.weight",), when={"gated": False}),
        Rule(
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            (f"{stack}.positions.table.weight",),
        ),
    )


def t5_like(model_type: str, name: str, *config: ConfigPart) -> Architecture:
    """Return T5 or mT5."""
    both = {"family": "encoder-decoder"}
    return Architecture(
        model_type,
        classes={
            f"{name}ForConditionalGeneration": {**both, "head": "lm"},
            f"{name}Model": {**both, "head": "none"},
            f"{name}EncoderModel": {"family": "encoder", "head": "none"},
        },
        config=(*T5_SHAPE, *config),
        rules=(
            *tables(""),
            *t5_blocks("encoder", attention="SelfAttention"),
            *t5_blocks("decoder", attention="SelfAttention", cross="EncDecAttention"),
            Rule("lm_head.weight", ("head.out.weight",)),
        ),
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        open=("share_embeddings",),
        tied=tied(""),
        aliases={
            **{"hidden_size": "d_model", "num_attention_heads": "num_heads"},
            **{"num_hidden_layers": "num_layers", "head_dim": "d_kv"},
        },
    )


LOGITS = scaled(
    "scale_decoder_outputs", "logit_scale", -0.5, width="d_model", otherwise="tie_word_embeddings"
)

T5 = t5_like("t5", "T5", feedforward("relu"), LOGITS)

# BART and mBART: learned positions, norms after (BART) or before (mBART) each part.


def classes(name: str, generator: str = "ForConditionalGeneration") -> dict[str, Json]:
    """Return the classes that each encoder-decoder of this kind has."""
    return {f"{name}{generator}": {"head": "lm"}, f"{name}Model": {"head": "none"}}


BART_KEYS = {
    **{"d_model": "d_model", "n_layers": "decoder_layers", "n_encoder_layers": "encoder_layers"},
    **{"n_heads": "decoder_attention_heads", "n_encoder_heads": "encoder_attention_heads"},
    **{"d_ff": "decoder_ffn_dim", "d_encoder_ff": "encoder_ffn_dim"},
    **{"dropout": "dropout", "init_std": "init_std", "activation": "activation_function"},
}


def bart_shape(width: int, layers: int, heads: int, wide: int, **defaults: object) -> tuple[ConfigPart, ...]:
    """Return what encoder and decoder state, alike where config.json does not say."""
    return (
        *keys(BART_KEYS, d_model=width, n_encoder_layers=layers, n_layers=layers),
        *keys(BART_KEYS, n_encoder_heads=heads, n_heads=heads, d_encoder_ff=wide, d_ff=wide),
        *keys(BART_KEYS, feedforward_dropout=0.0, init_std=0.02, **defaults),
    )


# Where transformers does not tie the output layer, it shares nothing between encoder and decoder either.
SHARE, TIE = "share_encoder_decoder_embeddings", "tie_word_embeddings"
BOTH: Json = {"tie_embeddings": True, "share_embeddings": True}
NEITHER: Json = {"tie_embeddings": False, "share_embeddings": False}
TYING = cases({TIE: True}, ({TIE: True}, BOTH), ({TIE: False}, NEITHER))
GELU: Json = {"dropout": 0.1, "activation": "gelu", "attention_dropout": 0.0}
UNSCALED = scaled("scale_embedding", "embedding_scale", 0.5, default=False, width="d_model")
BART_LIKE: Json = {"family": "encoder-decoder", "norm": "layernorm", "head_bias": True}
OLDER_TABLE = Rule("model.shared.weight", (TARGET,))  # files with an output layer of its own, and one table


def blocks(stack: str) -> tuple[Rule, ...]:
    """Return the rules of one stack.

    A model has a norm before or after a part: the rule for the other finds nothing.
    """
    theirs, ours = f"model.{stack}.layers.{{i}}", f"{stack}.blocks.{{i}}"
    norms = f"{theirs}.{{self_attn,encoder_attn,final}}_layer_norm"
    return (
        *stack_rules(
            stack,
            theirs,
            **{"qkvo": "self_attn.{q,k,v,out}_proj", "mlp": "fc{1,2}", "norm": f"model.{stack}.layer_norm"},
            **{"embedding_norm": f"model.{stack}.layernorm_embedding"},
            positions=f"model.{stack}.embed_positions",
        ),
        *same({f"{theirs}.encoder_attn.{{q,k,v,out}}_proj": f"{ours}.cross.{{q,k,v,out}}"}),
        *same({norms: f"{ours}.{{attention,cross,feedforward}}_residual.before"}),
        *same({norms: f"{ours}.{{attention,cross,feedforward}}_residual.after"}),
    )


BODY = (
    *blocks("encoder"),
    *blocks("decoder"),
    Rule("lm_head.weight", ("head.out.weight",)),
    Rule("final_logits_bias", ("head.out.bias",), reshaped(lambda config: (1, config.vocab_size))),
)
ALIASES = {
    **{"num_attention_heads": "encoder_attention_heads", "hidden_size": "d_model"},
    "num_hidden_layers": "encoder_layers",
}
OLD = ("model.encoder.version", "model.decoder.version")


def bart(model_type: str, name: str, norm_position: str) -> Architecture:
    """Return BART or mBART, which differ in where their norms stand."""
    return Architecture(
        model_type,
        classes(name),
        config=(
            fixed({**BART_LIKE, "positions": "learned", "position_offset": 2, "embedding_norm": True}),
            fixed({"norm_position": norm_position}),
            *bart_shape(1024, 12, 16, 4096, vocab_size=50265, max_positions=1024, **GELU),
            UNSCALED,
            TYING,
        ),
        rules=(*tables("model."), OLDER_TABLE, *BODY),
        prefix="model.",
        ignored=OLD,
        open=("head_bias",),
        tied=tied("model."),
        aliases=ALIASES,
    )


BART, MBART = bart("bart", "Bart", "post"), bart("mbart", "MBart", "pre")

# M2M-100 and NLLB: norms before each part, sinusoidal positions that begin after the padding id.

M2M100 = Architecture(
    model_type="m2m_100",
    classes=classes("M2M100"),
    prefix="model.",
    config=(
        fixed({**BART_LIKE, "head_bias": False, "norm_position": "pre"}),
        fixed({"positions": "sinusoidal", "sinusoid_layout": "half", "sinusoid_ends": True}),
        *bart_shape(1024, 12, 16, 4096, vocab_size=128112, **{**GELU, "activation": "relu"}),
        *keys(attention_dropout=0.1),
        positions_after_padding(rows=1024, padding=1, counted=False),
        scaled("scale_embedding", "embedding_scale", 0.5, default=True, width="d_model"),
        TYING,
    ),
    rules=(*tables("model."), OLDER_TABLE, *BODY),
    ignored=(*OLD, "*.embed_positions.weights"),
    tied=tied("model."),
    aliases=ALIASES,
)

# Marian (Opus-MT): norms after each part, sinusoidal positions, some with two vocabularies.

MARIAN = Architecture(
    model_type="marian",
    classes=classes("Marian", "MTModel"),
    prefix="model.",
    config=(
        fixed({**BART_LIKE, "positions": "sinusoidal", "sinusoid_layout": "half", "norm_position": "post"}),
        *bart_shape(1024, 12, 16, 4096, max_positions=1024, **GELU),
        field("vocab_size", "source_vocab_size", 58101),
        field("decoder_vocab_size", "vocab_size", 58101, otherwise="vocab_size"),
        UNSCALED,
        cases(
            {SHARE: True, TIE: True},
            ({SHARE: True, TIE: True}, BOTH),
            ({SHARE: False, TIE: True}, {"share_embeddings": False, "tie_embeddings": True}),
            ({SHARE: False, TIE: False}, NEITHER),
            ({SHARE: True, TIE: False}, NEITHER),  # as in TYING: what is not tied is not shared
        ),
        fixed(written={"pad_token_id": None, "decoder_start_token_id": 0}),
    ),
    rules=(*tables("model.")[:3], Rule("model.shared.weight", (SOURCE,)), OLDER_TABLE, *BODY),
    ignored=(*OLD, "*.embed_positions.weight"),
    open=("head_bias",),
    tied=tied("model."),
    aliases=ALIASES,
)

MT5 = t5_like("mt5", "MT5", feedforward("gated-gelu"))

# Whisper: an encoder of log-mel frames and a decoder of text, norms before each part, keys without bias. Both
# position tables are stored, that of the encoder too, though its waves are never trained.

WHISPER_TABLE = "model.decoder.embed_tokens.weight"

WHISPER = Architecture(
    model_type="whisper",
    classes=classes("Whisper"),
    prefix="model.",
    config=(
        fixed(
            {**BART_LIKE, "head_bias": False, "norm_position": "pre", "positions": "learned"},
            written={"pad_token_id": None, "decoder_start_token_id": 0, "begin_suppress_tokens": None},
        ),
        fixed({"input": "frames", "key_bias": False}),
        *bart_shape(384, 4, 6, 1536, vocab_size=51865, **{**GELU, "dropout": 0.0}),
        field("num_mel_bins", "d_input", 80),
        field("max_source_positions", "max_encoder_positions", 1500),
        field("max_target_positions", "max_positions", 448),
        *keys(tie_embeddings=True),
    ),
    rules=(
        *same({"model.encoder.conv{1,2}": "encoder.embedding.front.{first,second}"}),
        Rule(WHISPER_TABLE, (TARGET,)),
        *blocks("encoder"),
        *blocks("decoder"),
        Rule("proj_out.weight", ("head.out.weight",)),
    ),
    tied=(WHISPER_TABLE, "proj_out.weight"),
    aliases={"num_key_value_heads": "encoder_attention_heads", **ALIASES},
)
