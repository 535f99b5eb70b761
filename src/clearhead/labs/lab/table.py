"""The list of experiments. A line names where one is, as "module:name", and what it asks."""

from typing import NamedTuple


class Listed(NamedTuple):
    """Where an experiment is, and what it asks in a few words."""

    target: str
    summary: str


EXPERIMENTS = {
    "positions": Listed(
        "positions:EXPERIMENT", "what each scheme of positions knows, within and beyond its length"
    ),
    "families": Listed("tasks:FAMILIES", "encoder, decoder and both, on the tasks of each other"),
    "norms": Listed("layers:NORMS", "pre- and post-norm, with and without warm-up, by depth"),
    "scale": Listed("layers:SCALE", "scores with and without the root of the head's width"),
    "residuals": Listed("layers:RESIDUALS", "residuals and norms switched off"),
    "shapes": Listed("shapes:SHAPES", "width, depth and heads at equal size"),
    "budget": Listed("shapes:BUDGET", "small and large models for the same FLOPs"),
    "heads": Listed("removal:EXPERIMENT", "heads removed, by their importance and at random"),
    "pooling": Listed("tasks:POOLING", "a class token against the mean"),
    "kinds": Listed("lengths:EXPERIMENT", "kinds of attention against length: time, reach and loss"),
    "lstm": Listed("recurrent:EXPERIMENT", "a Transformer and an LSTM of equal size"),
    "induction": Listed("induction:EXPERIMENT", "when a head learns to copy what followed the last time"),
    "tokenizers": Listed("vocabularies:EXPERIMENT", "bytes, BPE and Unigram on one text"),
    "tying": Listed("shapes:TYING", "one table for reading and writing"),
    "smoothing": Listed("shapes:SMOOTHING", "what label smoothing does to confidence"),
    "experts": Listed("shapes:EXPERTS", "whether experts share the work by themselves"),
    "scaling": Listed("climbing:EXPERIMENT", "a ladder of small models that foretells a larger one"),
    "distillation": Listed("distilling:EXPERIMENT", "a small model that learns from a larger one"),
}
