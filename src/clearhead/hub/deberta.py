"""DeBERTa v2 and v3: BERT whose scores also tell how far away a key stands (disentangled attention)."""

from clearhead.core.config import ModelConfig
from clearhead.hub.architecture import Architecture
from clearhead.hub.bert import BLOCK, KIND, MASKED, SHAPE, SPAN, TAGGER, TYPES, classes
from clearhead.hub.fields import ACTIVATIONS, ConfigPart, Json, field, fixed
from clearhead.hub.files import refuse
from clearhead.hub.rules import Rule, same

LAYER = "deberta.encoder.layer.{i}"
TERMS = {"both": ["p2c", "c2p"], "c2p": ["c2p"], "p2c": ["p2c"]}
# What each key must say, what it says where it is absent, and what is missing for anything else.
NEEDED = (
    ("relative_attention", True, False, "positions without disentangled attention"),
    ("position_biased_input", False, True, "a table of positions beside disentangled attention"),
    ("share_att_key", True, False, "projections of positions apart from those of tokens"),
)
CONVOLUTION = "a convolution beside the first layer"


def _read_distances(theirs: Json) -> Json:
    for key, needed, usual, missing in NEEDED:
        stated = theirs.get(key, usual)
        refuse(stated != needed, f"config.json has {key} {stated!r}: {missing} is not supported")
    kernel = theirs.get("conv_kernel_size", 0)
    refuse(kernel > 0, f"config.json has conv_kernel_size {kernel}: {CONVOLUTION} is not supported")
    stated = theirs.get("pos_att_type") or []
    listed = [x.strip() for x in stated.lower().split("|")] if isinstance(stated, str) else stated
    terms = next((ours for ours, named in TERMS.items() if {*named} == {*listed}), None)
    refuse(terms is None, f"config.json has pos_att_type {stated!r}: it must be p2c, c2p or both")
    buckets, furthest = theirs.get("position_buckets", -1), theirs.get("max_relative_positions", -1)
    furthest = furthest if furthest >= 1 else theirs.get("max_position_embeddings", 512)
    refuse(
        buckets == furthest,
        f"config.json has position_buckets {buckets}, as many as max_relative_positions: leave one out",
    )
    width, heads = theirs.get("hidden_size", 1536), theirs.get("num_attention_heads", 24)
    d_head = theirs.get("attention_head_size") or width // heads
    refuse(
        d_head * heads != width,
        f"config.json has attention_head_size {d_head}: only hidden_size / num_attention_heads is supported",
    )
    return {
        "relative_buckets": 2 * (buckets if buckets > 0 else furthest),
        "relative_max_distance": furthest,
        "relative_terms": terms,
        "attention_scale": (d_head * (1 + len(TERMS[terms or "both"]))) ** -0.5,
    }


def _write_distances(config: ModelConfig) -> Json:
    span, furthest = config.relative_buckets // 2, config.relative_max_distance
    return {
        **{key: needed for key, needed, _, _ in NEEDED},
        "pos_att_type": TERMS[config.relative_terms],
        "position_buckets": -1 if span == furthest else span,
        "max_relative_positions": furthest,
    }


POOLER = field("pooler_hidden_act", "pooler", "gelu", {**ACTIVATIONS, "tanh": "tanh"})
POOLED = "DebertaV2ForSequenceClassification"

DEBERTA = Architecture(
    model_type="deberta-v2",
    classes=classes(
        "DebertaV2",
        ForSequenceClassification={"head": "classifier", "pooling": "cls", "head_bias": True},
        Model={"head": "none"},
    ),
    prefix="deberta.",
    config=(
        *(part for part in SHAPE if part is not TYPES),
        fixed({**KIND, "positions": "disentangled"}, only={"legacy": True, "embedding_size": None}),
        field("vocab_size", "vocab_size", 128100),
        field("hidden_size", "d_model", 1536),
        field("num_hidden_layers", "n_layers", 24),
        field("num_attention_heads", "n_heads", 24),
        field("intermediate_size", "d_ff", 6144),
        field("max_position_embeddings", "max_positions", 512),
        field("type_vocab_size", "n_types", 0),
        field("layer_norm_eps", "norm_eps", 1e-7),
        field("norm_rel_ebd", "relative_norm", "none", {"none": False, "layer_norm": True}),
        ConfigPart(_read_distances, _write_distances),
        ConfigPart(
            lambda theirs: POOLER.read(theirs) if theirs.get("architectures") == [POOLED] else {},
            lambda config: POOLER.write(config) if config.head == "classifier" else {},
        ),
    ),
    rules=(
        Rule("deberta.embeddings.word_embeddings.weight", ("encoder.embedding.front.tokens.weight",)),
        Rule("deberta.embeddings.token_type_embeddings.weight", ("encoder.embedding.types.weight",)),
        Rule("deberta.encoder.rel_embeddings.weight", ("encoder.positions.table.weight",)),
        *same(
            {
                "deberta.embeddings.LayerNorm": "encoder.embedding.norm",
                "deberta.encoder.LayerNorm": "encoder.positions.norm",
                **{
                    f"{LAYER}.attention.self.{x}_proj": f"{BLOCK}.attention.{x[0]}"
                    for x in ("query", "key", "value")
                },
                f"{LAYER}.attention.output.dense": f"{BLOCK}.attention.out",
                f"{LAYER}.attention.output.LayerNorm": f"{BLOCK}.attention_residual.after",
                f"{LAYER}.intermediate.dense": f"{BLOCK}.feedforward.up",
                f"{LAYER}.output.dense": f"{BLOCK}.feedforward.down",
                f"{LAYER}.output.LayerNorm": f"{BLOCK}.feedforward_residual.after",
            }
        ),
    ),
    heads={
        "mlm": MASKED,
        "classifier": same({"pooler.dense": "head.pooler"}) + TAGGER,
        "tagger": TAGGER,
        "span": SPAN,
    },
    ignored=("deberta.embeddings.position_ids", "deberta.embeddings.position_embeddings.weight"),
    carried=("lm_predictions.*", "mask_predictions.*", "cls.predictions.*"),
)
