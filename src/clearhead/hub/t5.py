"""T5, T5 v1.1 and mT5: relative positions, one table per stack, and attention scores without a scale."""

from clearhead.core.config import ModelConfig
from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, ConfigPart, Json, field, fixed, scaled
from clearhead.hub.files import refuse
from clearhead.hub.rules import Rule, same

PARTS = {"q": "q", "k": "k", "v": "v", "o": "out"}
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}


def classes(name: str) -> dict[str, Json]:
    """Return the classes that T5 and mT5 have."""
    return {
        f"{name}ForConditionalGeneration": {"family": "encoder-decoder", "head": "lm"},
        f"{name}Model": {"family": "encoder-decoder", "head": "none"},
        f"{name}EncoderModel": {"family": "encoder", "head": "none"},
    }


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


SHAPE: tuple[ConfigPart, ...] = (
    fixed(
        {
            "positions": "relative",
            "attention_scale": 1.0,
            "norm": "rmsnorm",
            "norm_position": "pre",
            "bias": False,
        }
    ),
    field("vocab_size", "vocab_size"),
    field("d_model", "d_model"),
    field("d_kv", "d_head"),
    field("d_ff", "d_ff"),
    field("num_heads", "n_heads"),
    ConfigPart(read_depths, write_depths),
    field("relative_attention_num_buckets", "relative_buckets", 32),
    field("relative_attention_max_distance", "relative_max_distance", 128),
    field("n_positions", "max_positions", 512),
    field("layer_norm_epsilon", "norm_eps", 1e-6),
    field("dropout_rate", "dropout", 0.1),
    field("dropout_rate", "feedforward_dropout", 0.1),
    field("tie_word_embeddings", "tie_embeddings", True),
    fixed(written={"decoder_start_token_id": 0}),
)


def feedforward(default: str) -> ConfigPart:
    """Return the part for the activation and its gate; `default` is feed_forward_proj where it is absent.

    Newer files state the two beside feed_forward_proj, and these decide.
    """

    def read(theirs: Json) -> Json:
        stated = theirs.get("feed_forward_proj") or default
        gate, _, word = str(stated).rpartition("-")
        refuse(
            gate not in ("", "gated"),
            f'config.json has feed_forward_proj "{stated}": it must be an activation, or gated-ACTIVATION',
        )
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


def block(stack: str, kinds: tuple[str, ...]) -> tuple[Rule, ...]:
    """Return the rules of one stack's blocks: attentions of these kinds, and a feed-forward, by number."""
    theirs, ours, last = f"{stack}.block.{{i}}.layer", f"{stack}.blocks.{{i}}", len(kinds)
    attention = {"SelfAttention": "attention", "EncDecAttention": "cross"}
    wide = f"{theirs}.{last}.DenseReluDense"
    return (
        *same(
            {
                f"{theirs}.{n}.{kind}.{x}": f"{ours}.{attention[kind]}.{y}"
                for n, kind in enumerate(kinds)
                for x, y in PARTS.items()
            }
        ),
        *same(
            {
                **{
                    f"{theirs}.{n}.layer_norm": f"{ours}.{attention[kind]}_residual.before"
                    for n, kind in enumerate(kinds)
                },
                f"{theirs}.{last}.layer_norm": f"{ours}.feedforward_residual.before",
                f"{stack}.final_layer_norm": f"{stack}.norm",
                f"{wide}.wi_0": f"{ours}.feedforward.gate",
                f"{wide}.wo": f"{ours}.feedforward.down",
            }
        ),
        Rule(f"{wide}.wi_1.weight", (f"{ours}.feedforward.up.weight",), when={"gated": True}),
        Rule(f"{wide}.wi.weight", (f"{ours}.feedforward.up.weight",), when={"gated": False}),
        Rule(
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            (f"{stack}.positions.table.weight",),
        ),
    )


SOURCE, TARGET = (f"{stack}.embedding.front.tokens.weight" for stack in ("encoder", "decoder"))
TIED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
RULES = (
    Rule("shared.weight", (SOURCE,), when={"share_embeddings": True}),
    Rule("encoder.embed_tokens.weight", (SOURCE,)),
    Rule("decoder.embed_tokens.weight", (TARGET,)),
    Rule("shared.weight", (SOURCE,), copy=True),  # every file must have it, read or not
    *block("encoder", ("SelfAttention",)),
    *block("decoder", ("SelfAttention", "EncDecAttention")),
    Rule("lm_head.weight", ("head.out.weight",)),
)
IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

T5 = Architecture(
    model_type="t5",
    classes=classes("T5"),
    config=(
        *SHAPE,
        feedforward("relu"),
        scaled(
            "scale_decoder_outputs", "logit_scale", -0.5, width="d_model", otherwise="tie_word_embeddings"
        ),
    ),
    rules=RULES,
    ignored=IGNORED,
    open=("share_embeddings",),
    tied=TIED,
    aliases=ALIASES,
)
MT5 = Architecture(
    model_type="mt5",
    classes=classes("MT5"),
    config=(*SHAPE, feedforward("gated-gelu")),
    rules=RULES,
    ignored=IGNORED,
    open=("share_embeddings",),
    tied=TIED,
    aliases=ALIASES,
)
