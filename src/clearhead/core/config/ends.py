"""Checks of the two ends of a model: what is embedded, and what the head says."""

from clearhead.core.config.fields import TABLES, Fields

Rules = list[tuple[object, str]]  # a mistake that may have been made, and the line of its error


def embedding_rules(config: Fields) -> Rules:
    """Return what may be wrong with what goes in: tables, patches, vectors, frames."""
    both, kind, head = config.family == "encoder-decoder", config.input, config.head
    predicts = head in ("lm", "mlm")
    reads = kind == "tokens" or both or predicts
    shared = both and kind == "tokens" and config.share_embeddings
    return [
        (
            config.d_embedding != config.d_model and not config.embedding_projection,
            f"d_embedding {config.d_embedding} must be projected to d_model {config.d_model}: "
            "leave embedding_projection out",
        ),
        (
            config.project_tokens and config.d_embedding == config.d_model,
            f"project_tokens widens a narrower token table, and d_embedding is d_model {config.d_model}: "
            "leave project_tokens out",
        ),
        (
            kind != "tokens" and not both and predicts,
            f"head {head} predicts ids and input is {kind}: "
            "choose head classifier, tagger, embedding or none",
        ),
        (
            reads and config.vocab_size < 1,
            "vocab_size is not set: give the number of tokens of the tokenizer, 1 at least",
        ),
        (
            shared and config.source_vocab_size != config.vocab_size,
            f"share_embeddings needs one vocabulary, and source_vocab_size {config.source_vocab_size} "
            f"differs from vocab_size {config.vocab_size}: set share_embeddings false",
        ),
        *(_image(config) if kind == "patches" else ()),
        (
            kind in ("vectors", "frames") and config.d_input < 1,
            f"d_input {config.d_input} must be 1 or more",
        ),
        (
            config.conv_kernel % 2 == 0,
            f"conv_kernel {config.conv_kernel} is even, and would shift the frames: choose an odd width",
        ),
        (
            config.class_token and kind != "patches",
            f"class_token belongs to input patches, and input is {kind}: put a CLS id in the text instead",
        ),
        (
            not config.patch_bias and kind != "patches",
            f"patch_bias belongs to input patches, and input is {kind}: leave it out",
        ),
    ]


def _image(config: Fields) -> Rules:
    if config.image_size is None:
        return [(True, "input patches needs image_size, as (height, width)")]
    size, patch = config.image_size, config.patch_size
    needed = (size[0] // patch) * (size[1] // patch) + config.class_token
    table = config.positions in TABLES and config.family != "encoder-decoder"
    return [
        (
            any(side % patch for side in size) or min(size) < patch,
            f"image_size {size} is not a whole number of patches of {patch}: change one of the two",
        ),
        (
            table and config.max_positions < needed,
            f"max_positions {config.max_positions} is below the {needed} positions of one image: raise it",
        ),
    ]


def head_rules(config: Fields) -> Rules:
    """Return what may be wrong with the head."""
    layered = config.head_layer and config.head not in ("tagger", "span")
    return [
        (
            config.head in ("classifier", "tagger") and config.n_classes < 1,
            f"head {config.head} needs n_classes, 1 at least",
        ),
        (
            config.pooler_norm and config.pooler == "none",
            "pooler_norm follows a pooler, and there is none: choose pooler tanh or an activation",
        ),
        (layered, f"head_layer is for head tagger or span, and head is {config.head}: leave it out"),
        (
            config.head == "mlm" and config.family != "encoder",
            f"head mlm reads both sides of a mask and family is {config.family}: "
            "choose family encoder, or head lm",
        ),
    ]
