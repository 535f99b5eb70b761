"""BigBird: BERT's tables with attention by blocks, and heads of its own.

In evaluation, transformers draws block 0 as every random block, so its keys stand in the softmax of a query
1 + num_random_blocks times. Rows of up to 5 + 2 · num_random_blocks blocks are read in full.
"""

from clearhead.core.config import ModelConfig
from clearhead.core.config.kinds import Full, read_kind
from clearhead.hub.architecture import Architecture
from clearhead.hub.bert import MASKED, SHAPE, TAGGER, classes, embedding, layers
from clearhead.hub.fields import ACTIVATIONS, ConfigPart, Json, field, scaled
from clearhead.hub.files import refuse
from clearhead.hub.rules import same
from clearhead.variants.kinds import Blocks

BLOCK_SIZE, RANDOM = 64, 3  # where config.json does not say
TYPES = ("block_sparse", "original_full")


def _read_attention(theirs: Json) -> Json:
    stated = theirs.get("attention_type", TYPES[0])
    refuse(stated not in TYPES, f"config.json has attention_type {stated!r}: choose from {', '.join(TYPES)}")
    size, random = theirs.get("block_size", BLOCK_SIZE), theirs.get("num_random_blocks", RANDOM)
    for key, value, least in (("block_size", size, 1), ("num_random_blocks", random, 0)):
        wrong = type(value) is not int or value < least
        refuse(wrong, f"config.json has {key} {value!r}: it must be a whole number, {least} or more")
    whole = stated == "original_full"
    return {"attention": "full" if whole else str(block_sparse(size, random))}


def block_sparse(size: int, random: int) -> Blocks:
    """Return the kind of attention of a layer with blocks of this size and so many random ones."""
    return Blocks(size, first=1, last=1, counted="blocks", repeat=random, full=(5 + 2 * random) * size)


def _write_attention(config: ModelConfig) -> Json:
    kind = read_kind(config.attention if isinstance(config.attention, str) else config.attention[0])
    if isinstance(kind, Blocks):
        return {"attention_type": TYPES[0], "block_size": kind.size, "num_random_blocks": kind.repeat}
    refuse(not isinstance(kind, Full), f'attention "{kind}" is none that this architecture has')
    return {"attention_type": TYPES[1]}


ACTIVATION = field("hidden_act", "activation", "gelu_new", ACTIVATIONS)
BIG_BIRD = Architecture(
    model_type="big_bird",
    classes=classes(
        "BigBird",
        ForMaskedLM={"head": "mlm", "head_transform": True, "head_bias": True, "pooler": "none"},
        ForPreTraining={"head": "mlm", "head_transform": True, "head_bias": True, "pooler": "none"},
        ForSequenceClassification={"head": "classifier", "pooling": "cls", "head_bias": True},
        ForTokenClassification={"head": "tagger", "head_bias": True, "pooler": "none"},
        ForQuestionAnswering={"head": "span", "head_layer": True, "head_bias": True, "pooler": "none"},
    ),
    prefix="bert.",
    config=(
        *SHAPE,
        field("vocab_size", "vocab_size", 50358),
        field("max_position_embeddings", "max_positions", 4096),
        ACTIVATION,
        # The head for classes has the activation of the layers between its two matrices.
        ConfigPart(lambda theirs: {"pooler": ACTIVATION.read(theirs)["activation"]}, lambda config: {}),
        field("use_bias", "qkv_bias", True),
        scaled("rescale_embeddings", "embedding_scale", 0.5, default=False),
        ConfigPart(_read_attention, _write_attention),
    ),
    rules=embedding("bert") + layers("bert"),
    heads={
        "mlm": MASKED,
        "classifier": same({"classifier.dense": "head.pooler", "classifier.out_proj": "head.out"}),
        "tagger": TAGGER,
        "span": same(
            {
                "qa_classifier.intermediate.dense": "head.up",
                "qa_classifier.output.dense": "head.down",
                "qa_classifier.output.LayerNorm": "head.norm",
                "qa_classifier.qa_outputs": "head.out",
            }
        ),
        "embedding": same({"bert.pooler": "head.pooler"}),
    },
    ignored=("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"),
    carried=("bert.pooler.*", "cls.seq_relationship.*"),
    named=True,
)
