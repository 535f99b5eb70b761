"""MPNet: RoBERTa's encoder without segments, and one table of relative biases for all layers."""

from clearhead.hub.architecture import Architecture
from clearhead.hub.bert import BLOCK, GELU_HEAD, SHAPE, SPAN, TAGGER, TYPES, classes, masked_head
from clearhead.hub.fields import field, fixed, positions_after_padding
from clearhead.hub.rules import Rule, same

LAYER = "mpnet.encoder.layer.{i}"
POOL = same({"mpnet.pooler.dense": "head.pooler"})

MPNET = Architecture(
    model_type="mpnet",
    classes=classes("MPNet", ForMaskedLM=GELU_HEAD),
    prefix="mpnet.",
    config=(
        *(part for part in SHAPE if part is not TYPES),
        # Its code has these buckets, whatever config.json says.
        fixed({"positions": "learned+relative", "relative_buckets": 32, "relative_max_distance": 128}),
        fixed(only={"relative_attention_num_buckets": 32}),
        field("vocab_size", "vocab_size", 30527),
        positions_after_padding(rows=512, padding=1, stated=False),
    ),
    rules=(
        Rule("mpnet.embeddings.word_embeddings.weight", ("encoder.embedding.front.tokens.weight",)),
        Rule("mpnet.embeddings.position_embeddings.weight", ("encoder.positions.places.table.weight",)),
        Rule("mpnet.encoder.relative_attention_bias.weight", ("encoder.positions.table.weight",)),
        *same(
            {
                "mpnet.embeddings.LayerNorm": "encoder.embedding.norm",
                **{
                    f"{LAYER}.attention.attn.{x}": f"{BLOCK}.attention.{y}"
                    for x, y in zip("qkvo", ("q", "k", "v", "out"))
                },
                f"{LAYER}.attention.LayerNorm": f"{BLOCK}.attention_residual.after",
                f"{LAYER}.intermediate.dense": f"{BLOCK}.feedforward.up",
                f"{LAYER}.output.dense": f"{BLOCK}.feedforward.down",
                f"{LAYER}.output.LayerNorm": f"{BLOCK}.feedforward_residual.after",
            }
        ),
    ),
    heads={
        "mlm": masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head"),
        "classifier": same({"classifier.dense": "head.pooler", "classifier.out_proj": "head.out"}),
        "tagger": TAGGER,
        "span": SPAN,
        "embedding": POOL,
    },
    ignored=("mpnet.embeddings.position_ids",),
    carried=("mpnet.pooler.*",),
)
