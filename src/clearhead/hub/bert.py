"""BERT and the encoders after it.

RoBERTa (with XLM-RoBERTa and CamemBERT), DistilBERT, ALBERT, BigBird, MPNet, ELECTRA, ModernBERT, DeBERTa v2
and v3, and Longformer.
"""

import dataclasses

from clearhead.core.config import ModelConfig
from clearhead.core.config.kinds import Full
from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import (
    ACTIVATIONS,
    LABELS,
    NEAR_AND_FAR,
    ONLY,
    WHOLE,
    ConfigPart,
    Json,
    count_layers,
    field,
    fixed,
    keys,
    of_class,
    positions_after_padding,
    scaled,
)
from clearhead.hub.files import refuse, refuse_key
from clearhead.hub.llama import ATTENTION_BIAS, FEEDFORWARD_BIAS
from clearhead.hub.rope import two_ropes
from clearhead.hub.rules import Rule, joined, renamed, same, stack_rules
from clearhead.variants.checks import read_kind
from clearhead.variants.kinds import Blocks, GlobalKind, GlobalTokens

BLOCK = "encoder.blocks.{i}"
TABLE = "encoder.positions.table.weight"


def classes(name: str, pooler: str = "tanh", **changes: Json) -> dict[str, Json]:
    """Return the classes that an encoder of this kind has; `changes` replace some, by how their names end."""
    pooled = {"pooling": "cls", "pooler": pooler}
    heads: dict[str, Json] = {
        "ForMaskedLM": {"head": "mlm", "head_transform": True, "head_bias": True},
        "ForSequenceClassification": {"head": "classifier", **pooled, "head_bias": True},
        "ForTokenClassification": {"head": "tagger", "head_bias": True},
        "ForQuestionAnswering": {"head": "span", "head_bias": True},
        "Model": {"head": "embedding", **pooled},
    }
    return {name + ending: head for ending, head in (heads | changes).items()}


KIND: Json = {
    **{"family": "encoder", "positions": "learned", "embedding_norm": True, "norm": "layernorm"},
    **{"norm_position": "post", "bias": True, "init": "bert"},
}
BERT_KEYS = {"dropout": "hidden_dropout_prob", "attention_dropout": "attention_probs_dropout_prob"}
TYPES = field("type_vocab_size", "n_types", 2, least=1)
WITHOUT_TYPES: tuple[ConfigPart, ...] = (
    fixed(KIND),
    fixed(only={"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}),
    *keys(vocab_size=30522, d_model=768, n_layers=12, n_heads=12, d_ff=3072, activation="gelu"),
    *keys(BERT_KEYS, norm_eps=1e-12, dropout=0.1, attention_dropout=0.1, init_std=0.02, tie_embeddings=True),
    LABELS,
)
SHAPE = (*WITHOUT_TYPES, TYPES)


def tables(name: str) -> dict[str, str]:
    """Return their modules of the embedding."""
    names = {"tokens": "word", "positions": "position", "types": "token_type"}
    parts = {part: f"{name}.embeddings.{theirs}_embeddings" for part, theirs in names.items()}
    return {**parts, "embedding_norm": f"{name}.embeddings.LayerNorm"}


QKV = "attention.self.{query,key,value}"
LAYER = {"mlp": "{intermediate,output}.dense", "post_norms": "{attention.output,output}.LayerNorm"}


def body(name: str, **modules: str) -> tuple[Rule, ...]:
    """Return the rules of BERT's tensors but for the head; `modules` differ (see `stack_rules`)."""
    usual = {**tables(name), "qkv": QKV, "out": "attention.output.dense", **LAYER}
    return stack_rules("encoder", f"{name}.encoder.layer.{{i}}", **{**usual, **modules})


def masked_head(transform: str, norm: str, out: str) -> tuple[Rule, ...]:
    """Return the rules of the head that predicts masked tokens.

    Its bias is stored twice; the output layer's own is used.
    """
    pairs = {transform: "head.transform", norm: "head.norm", f"{out}.decoder": "head.out"}
    return (*same(pairs), Rule(f"{out}.bias", ("head.out.bias",), copy=True))


TAGGER, SPAN = same({"classifier": "head.out"}), same({"qa_outputs": "head.out"})
MASKED = masked_head(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"
)
CLASSIFIER = same({"classifier.{dense,out_proj}": "head.{pooler,out}"})  # RoBERTa's and those after it


def heads(masked: tuple[Rule, ...], pooler: str) -> dict[str, tuple[Rule, ...]]:
    """Return the rules of every head, given those for masked tokens and the name of the pooler."""
    pool = same({pooler: "head.pooler"})
    return {"mlm": masked, "classifier": pool + TAGGER, "tagger": TAGGER, "span": SPAN, "embedding": pool}


def older(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules, and again with the names that norms had in the first checkpoints."""
    return (
        *rules,
        *renamed(rules, "LayerNorm.gamma", "LayerNorm.weight"),
        *renamed(rules, "LayerNorm.beta", "LayerNorm.bias"),
    )


BERT = Architecture(
    model_type="bert",
    classes=classes("Bert"),
    prefix="bert.",
    config=(*SHAPE, *keys(max_positions=512)),
    rules=older(body("bert")),
    heads=heads(older(MASKED), "bert.pooler.dense"),
    ignored=("bert.embeddings.position_ids",),
    carried=("bert.pooler.*", "cls.seq_relationship.*"),
)

# RoBERTa: positions that start at padding id + 1, and heads of its own.

# This head has GELU, whatever activation the layers have.
GELU_HEAD: Json = {"head": "mlm", "head_transform": True, "head_bias": True, "head_activation": "gelu"}


AFTER_PADDING = positions_after_padding(rows=512, padding=1)


def roberta_like(
    model_type: str,
    name: str,
    prefix: str = "roberta",
    *config: ConfigPart,
    also: tuple[Rule, ...] = (),
    named: bool = True,
    **modules: str,
) -> Architecture:
    """Return an architecture with RoBERTa's config and tensors; its classes begin with `name`.

    `also` are further rules, and `modules` those of `body` that differ.
    """
    masked = masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head")
    return Architecture(
        model_type=model_type,
        classes=classes(name, ForMaskedLM=GELU_HEAD),
        prefix=f"{prefix}.",
        config=config or (*SHAPE, AFTER_PADDING),
        rules=(*body(prefix, **modules), *also),
        heads={**heads(masked, f"{prefix}.pooler.dense"), "classifier": CLASSIFIER},
        ignored=(f"{prefix}.embeddings.position_ids",),
        carried=(f"{prefix}.pooler.*",),
        named=named,
    )


ROBERTA = roberta_like("roberta", "Roberta", named=False)

# DistilBERT: no segments and no pooler, under names of its own.

DISTIL_KEYS = {
    **{"d_model": "dim", "n_layers": "n_layers", "n_heads": "n_heads", "d_ff": "hidden_dim"},
    **{"activation": "activation", "dropout": "dropout"},
}

DISTILBERT = Architecture(
    model_type="distilbert",
    classes=classes("DistilBert", pooler="relu", Model={"head": "none"}),
    prefix="distilbert.",
    config=(
        # sinusoidal_pos_embds says how the position table was initialised; it is stored like any other.
        fixed({**KIND, "norm_eps": 1e-12}),
        *keys(
            DISTIL_KEYS, vocab_size=30522, max_positions=512, d_model=768, n_layers=6, n_heads=12, d_ff=3072
        ),
        *keys(DISTIL_KEYS, activation="gelu", dropout=0.1, attention_dropout=0.1),
        *keys(init_std=0.02, tie_embeddings=True),
        LABELS,
    ),
    rules=stack_rules(
        "encoder",
        "distilbert.transformer.layer.{i}",
        **{**tables("distilbert"), "types": ""},
        **{"qkvo": "attention.{q,k,v,out}_lin", "mlp": "ffn.lin{1,2}"},
        post_norms="{sa,output}_layer_norm",
    ),
    heads={
        "mlm": same({"vocab_{transform,layer_norm,projector}": "head.{transform,norm,out}"}),
        "classifier": same({"pre_classifier": "head.pooler", "classifier": "head.out"}),
        "tagger": TAGGER,
        "span": SPAN,
    },
    ignored=("distilbert.embeddings.position_ids",),
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
)

# ALBERT: a narrow token table, projected up, and layers that share their weights in groups.

ALBERT = Architecture(
    model_type="albert",
    classes=classes("Albert"),
    prefix="albert.",
    config=(
        *SHAPE,
        fixed({"embedding_projection": True}),
        fixed(only={"inner_group_num": 1}),
        *keys(
            vocab_size=30000, d_model=4096, n_heads=64, d_ff=16384, activation="gelu_new", max_positions=512
        ),
        *keys(BERT_KEYS, dropout=0.0, attention_dropout=0.0),
        field("embedding_size", "d_embedding", 128),
        field("num_hidden_groups", "layer_groups", 1),
    ),
    rules=stack_rules(
        "encoder",
        "albert.encoder.albert_layer_groups.{i}.albert_layers.0",
        **{**tables("albert"), "projection": "albert.encoder.embedding_hidden_mapping_in"},
        **{"qkvo": "attention.{query,key,value,dense}", "mlp": "{ffn,ffn_output}"},
        post_norms="{attention.LayerNorm,full_layer_layer_norm}",
    ),
    heads=heads(masked_head("predictions.dense", "predictions.LayerNorm", "predictions"), "albert.pooler"),
    ignored=("albert.embeddings.position_ids",),
    carried=("albert.pooler.*", "sop_classifier.*"),
)

# BigBird: BERT's tables with attention by blocks, and heads of its own. In evaluation, transformers draws
# block 0 as every random block, so its keys stand in the softmax of a query 1 + num_random_blocks times. Rows
# of up to 5 + 2 · num_random_blocks blocks are read in full.

BLOCK_SIZE, RANDOM = 64, 3  # where config.json does not say
ATTENTION_TYPES = ("block_sparse", "original_full")


def _read_blocks(theirs: Json) -> Json:
    stated = theirs.get("attention_type", ATTENTION_TYPES[0])
    allowed = f"choose from {', '.join(ATTENTION_TYPES)}"
    refuse_key(stated not in ATTENTION_TYPES, "attention_type", stated, allowed)
    size, random = theirs.get("block_size", BLOCK_SIZE), theirs.get("num_random_blocks", RANDOM)
    for key, value, least in (("block_size", size, 1), ("num_random_blocks", random, 0)):
        wrong = type(value) is not int or value < least
        refuse_key(wrong, key, value, f"it must be a whole number, {least} or more")
    whole = stated == "original_full"
    return {"attention": "full" if whole else str(block_sparse(size, random))}


def block_sparse(size: int, random: int) -> Blocks:
    """Return the kind of attention of a layer with blocks of this size and so many random ones."""
    return Blocks(size, first=1, last=1, counted="blocks", repeat=random, full=(5 + 2 * random) * size)


def _write_blocks(config: ModelConfig) -> Json:
    kind = read_kind(config.attention if isinstance(config.attention, str) else config.attention[0])
    if isinstance(kind, Blocks):
        blocks = {"block_size": kind.size, "num_random_blocks": kind.repeat}
        return {"attention_type": ATTENTION_TYPES[0], **blocks}
    refuse(not isinstance(kind, Full), f'attention "{kind}" is none that this architecture has')
    return {"attention_type": ATTENTION_TYPES[1]}


UNPOOLED_MASKED: Json = {"head": "mlm", "head_transform": True, "head_bias": True, "pooler": "none"}

BIG_BIRD = Architecture(
    model_type="big_bird",
    classes=classes(
        "BigBird",
        ForMaskedLM=UNPOOLED_MASKED,
        ForPreTraining=UNPOOLED_MASKED,
        ForSequenceClassification={"head": "classifier", "pooling": "cls", "head_bias": True},
        ForTokenClassification={"head": "tagger", "head_bias": True, "pooler": "none"},
        ForQuestionAnswering={"head": "span", "head_layer": True, "head_bias": True, "pooler": "none"},
    ),
    prefix="bert.",
    config=(
        *SHAPE,
        *keys(vocab_size=50358, max_positions=4096, activation="gelu_new"),
        # The head for classes has the activation of the layers between its two matrices.
        ConfigPart(field("hidden_act", "pooler", "gelu_new", ACTIVATIONS).read, lambda config: {}),
        field("use_bias", "qkv_bias", True),
        scaled("rescale_embeddings", "embedding_scale", 0.5, default=False),
        ConfigPart(_read_blocks, _write_blocks),
    ),
    rules=body("bert"),
    heads={
        "mlm": MASKED,
        "classifier": CLASSIFIER,
        "tagger": TAGGER,
        "span": same(
            {
                "qa_classifier.{intermediate,output}.dense": "head.{up,down}",
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

XLM_ROBERTA = roberta_like("xlm-roberta", "XLMRoberta")
CAMEMBERT = roberta_like("camembert", "Camembert")

# MPNet: RoBERTa's encoder without segments, and one table of relative biases for all layers.

MPNET = roberta_like(
    "mpnet",
    "MPNet",
    "mpnet",
    *WITHOUT_TYPES,
    # Its code has these buckets, whatever config.json says.
    fixed({"positions": "learned+relative", "relative_buckets": 32, "relative_max_distance": 128}),
    fixed(only={"relative_attention_num_buckets": 32}),
    *keys(vocab_size=30527),
    positions_after_padding(rows=512, padding=1, stated=False),
    also=(
        Rule("mpnet.embeddings.position_embeddings.weight", ("encoder.positions.places.table.weight",)),
        Rule("mpnet.encoder.relative_attention_bias.weight", (TABLE,)),
    ),
    named=False,
    types="",
    positions="",
    qkv="attention.attn.{q,k,v}",
    out="attention.attn.o",
    post_norms="{attention,output}.LayerNorm",
)
# ELECTRA: BERT with a table that may be narrow, as the generator or as the discriminator of its training.

DISCRIMINATES = tuple(
    dataclasses.replace(rule, needs="head.pooler.weight")
    for rule in same({"discriminator_predictions.{dense,dense_prediction}": "head.{pooler,out}"})
)

ELECTRA = Architecture(
    model_type="electra",
    classes=classes(
        "Electra",
        pooler="gelu",
        ForMaskedLM=GELU_HEAD,
        ForTokenClassification={"head": "tagger", "head_bias": True, "pooler": "none"},
        Model={"head": "none"},
        # It says of each token if it was replaced: one number, through a layer with the activation of all.
        ForPreTraining={"head": "tagger", "head_bias": True, "n_classes": 1},
    ),
    prefix="electra.",
    config=(
        *SHAPE,
        field("embedding_size", "d_embedding", 128),
        *keys(d_model=256, n_heads=4, d_ff=1024, max_positions=512),
        of_class("ElectraForPreTraining", field("hidden_act", "pooler", "gelu", ACTIVATIONS)),
    ),
    rules=body("electra", projection="electra.embeddings_project"),
    heads={
        "mlm": same(
            {
                "generator_predictions.{dense,LayerNorm}": "head.{transform,norm}",
                "generator_lm_head": "head.out",
            }
        ),
        "classifier": CLASSIFIER,
        "tagger": DISCRIMINATES + TAGGER,
        "span": SPAN,
    },
    ignored=("electra.embeddings.position_ids",),
    carried=("discriminator_predictions.*", "generator_predictions.*", "generator_lm_head.*"),
)

# ModernBERT: a pre-norm encoder with rotary positions, gated feed-forwards and windows in most layers.

MODERN_LAYER = "model.layers.{i}"
POOLER = field("classifier_activation", "pooler", "gelu", ACTIVATIONS)
TRANSFORM = field("classifier_activation", "head_activation", "gelu", ACTIVATIONS)
# The layer before the output is the transform of masked tokens, and the pooler of every other head.
HEAD_ACTIVATION = ConfigPart(
    lambda config_json: POOLER.read(config_json) | TRANSFORM.read(config_json),
    lambda config: (POOLER if config.pooler_norm else TRANSFORM).write(config),
)
POOLED: Json = {"head_bias": True, "pooler_norm": True}
UNPOOLED: Json = {"pooler": "none", "pooler_norm": False}
DENSE = same({"head.{dense,norm}": "head.{pooler,pooler_norm}", "classifier": "head.out"})
MODERN_KEYS = {
    "activation": "hidden_activation",
    "norm_eps": "norm_eps",
    "feedforward_dropout": "mlp_dropout",
}

MODERNBERT = Architecture(
    model_type="modernbert",
    classes={
        "ModernBertForMaskedLM": {"head": "mlm", "head_transform": True, **UNPOOLED},
        "ModernBertForSequenceClassification": {"head": "classifier", **POOLED},
        "ModernBertForTokenClassification": {"head": "tagger", **POOLED},
        "ModernBertForQuestionAnswering": {"head": "span", **POOLED},
        "ModernBertModel": {"head": "none", **UNPOOLED},
    },
    prefix="model.",
    config=(
        fixed({"family": "encoder", "positions": "rope", "norm": "layernorm", "norm_position": "pre"}),
        fixed({"embedding_norm": True, "first_norm": False, "gated": True, "bias": False, "init": "bert"}),
        fixed(written={"pad_token_id": None}, only={"sparse_prediction": False}),
        *keys(vocab_size=50368, d_model=768, n_layers=22, n_heads=12, d_ff=1152, max_positions=8192),
        *keys(MODERN_KEYS, activation="gelu", norm_eps=1e-5, norm_bias=False),
        *ATTENTION_BIAS,
        FEEDFORWARD_BIAS,
        NEAR_AND_FAR,
        two_ropes(160_000.0, 10_000.0, "global_rope_theta", "local_rope_theta", scales_both=True),
        *keys(
            MODERN_KEYS, embedding_dropout=0.0, attention_dropout=0.0, feedforward_dropout=0.0, init_std=0.02
        ),
        *keys(tie_embeddings=True),
        field("decoder_bias", "head_bias", True),
        field("classifier_bias", "pooler_bias", False),
        field("classifier_pooling", "pooling", "cls", {"cls": "cls", "mean": "mean"}),
        HEAD_ACTIVATION,
        LABELS,
    ),
    rules=(
        *joined(f"{MODERN_LAYER}.attn.Wqkv", [f"{BLOCK}.attention.{x}" for x in "qkv"]),
        *joined(f"{MODERN_LAYER}.mlp.Wi", [f"{BLOCK}.feedforward.{x}" for x in ("gate", "up")]),
        *stack_rules(
            "encoder",
            MODERN_LAYER,
            **{"tokens": "model.embeddings.tok_embeddings", "embedding_norm": "model.embeddings.norm"},
            **{"out": "attn.Wo", "down": "mlp.Wo", "pre_norms": "{attn,mlp}_norm"},
            norm="model.final_norm",
        ),
    ),
    heads={
        "mlm": same({"head.{dense,norm}": "head.{transform,norm}", "decoder": "head.out"}),
        **dict.fromkeys(("classifier", "tagger", "span"), DENSE),
    },
    carried=("head.*", "decoder.*"),
)

# DeBERTa v2 and v3: BERT whose scores also tell how far away a key stands (disentangled attention).

TERMS = {"both": ["p2c", "c2p"], "c2p": ["c2p"], "p2c": ["p2c"]}
# What each key must say, what it says where it is absent, and what is missing for anything else.
NEEDED = (
    ("relative_attention", True, False, "positions without disentangled attention"),
    ("position_biased_input", False, True, "a table of positions next to disentangled attention"),
    ("share_att_key", True, False, "projections of positions apart from those of tokens"),
)
CONVOLUTION = "a convolution next to the first layer"


def _read_distances(theirs: Json) -> Json:
    for key, needed, usual, missing in NEEDED:
        stated = theirs.get(key, usual)
        refuse_key(stated != needed, key, stated, f"{missing} is not supported")
    kernel = theirs.get("conv_kernel_size", 0)
    refuse_key(kernel > 0, "conv_kernel_size", kernel, f"{CONVOLUTION} is not supported")
    stated = theirs.get("pos_att_type") or []
    listed = [x.strip() for x in stated.lower().split("|")] if isinstance(stated, str) else stated
    terms = next((ours for ours, named in TERMS.items() if {*named} == {*listed}), None)
    refuse_key(terms is None, "pos_att_type", stated, "it must be p2c, c2p or both")
    buckets, furthest = theirs.get("position_buckets", -1), theirs.get("max_relative_positions", -1)
    furthest = furthest if furthest >= 1 else theirs.get("max_position_embeddings", 512)
    alike = "it equals max_relative_positions: leave one out"
    refuse_key(buckets == furthest, "position_buckets", buckets, alike)
    width, heads = theirs.get("hidden_size", 1536), theirs.get("num_attention_heads", 24)
    d_head = theirs.get("attention_head_size") or width // heads
    refuse_key(d_head * heads != width, "attention_head_size", d_head, WHOLE)
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


DEBERTA_POOLER = field("pooler_hidden_act", "pooler", "gelu", {**ACTIVATIONS, "tanh": "tanh"})

DEBERTA = Architecture(
    model_type="deberta-v2",
    classes=classes(
        "DebertaV2",
        ForSequenceClassification={"head": "classifier", "pooling": "cls", "head_bias": True},
        Model={"head": "none"},
    ),
    prefix="deberta.",
    config=(
        *WITHOUT_TYPES,
        fixed({**KIND, "positions": "disentangled"}, only={"legacy": True, "embedding_size": None}),
        *keys(vocab_size=128100, d_model=1536, n_layers=24, n_heads=24, d_ff=6144, max_positions=512),
        *keys({"n_types": "type_vocab_size"}, n_types=0, norm_eps=1e-7),
        field("norm_rel_ebd", "relative_norm", "none", {"none": False, "layer_norm": True}),
        ConfigPart(_read_distances, _write_distances),
        ConfigPart(
            of_class("DebertaV2ForSequenceClassification", DEBERTA_POOLER).read,
            lambda config: DEBERTA_POOLER.write(config) if config.head == "classifier" else {},
        ),
    ),
    rules=(
        *body("deberta", positions="", qkv="attention.self.{query,key,value}_proj"),
        Rule("deberta.encoder.rel_embeddings.weight", (TABLE,)),
        *same({"deberta.encoder.LayerNorm": "encoder.positions.norm"}),
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

# Longformer: RoBERTa with a window in each layer, and global tokens with projections of their own.

WINDOW, SEPARATOR = 512, 2  # where config.json does not say
# Which tokens are global where a call names none; in other classes, none.
GLOBAL: dict[str, GlobalTokens] = {
    "LongformerForSequenceClassification": "first",
    "LongformerForQuestionAnswering": "question",
}


def _read_global(theirs: Json) -> Json:
    count, stated = count_layers(theirs), theirs.get("attention_window", WINDOW)
    windows = stated if isinstance(stated, list) else [stated] * count
    odd = any(type(width) is not int or width < 2 or width % 2 for width in windows)
    allowed = f"give an even number, 2 at least, or one for each of the {count} layers"
    refuse_key(odd or len(windows) != count, "attention_window", stated, allowed)
    dilation = theirs.get("attention_dilation")
    steps = dilation if isinstance(dilation, list) else [dilation or 1]
    refuse_key(any(step != 1 for step in steps), "attention_dilation", dilation, ONLY.format(1))
    named = (theirs.get("architectures") or [""])[0]
    tokens, separator = GLOBAL.get(named, "given"), theirs.get("sep_token_id")
    separating = {"separator": SEPARATOR if separator is None else separator} if tokens == "question" else {}
    kinds = tuple(str(GlobalKind(width // 2 + 1, tokens, **separating)) for width in windows)
    return {"attention": kinds[0] if len(set(kinds)) == 1 else kinds}


def _write_global(config: ModelConfig) -> Json:
    kinds = [kind for kind in config.main.kinds if isinstance(kind, GlobalKind)]
    refuse(len(kinds) < config.n_layers, "this architecture has global tokens in every layer")
    windows = [2 * (kind.size - 1) for kind in kinds]
    separators = [kind.separator for kind in kinds if kind.tokens == "question"]
    return {
        "attention_window": windows[0] if len(set(windows)) == 1 else windows,
        **({"sep_token_id": separators[0]} if separators else {}),
    }


LONGFORMER = roberta_like(
    "longformer",
    "Longformer",
    "longformer",
    *(*SHAPE, AFTER_PADDING),
    fixed(only={"autoregressive": False}),
    ConfigPart(_read_global, _write_global),
    also=same({f"longformer.encoder.layer.{{i}}.{QKV}_global": f"{BLOCK}.attention.{{q,k,v}}_global"}),
    named=False,
)
