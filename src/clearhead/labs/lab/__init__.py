"""Experiments that anybody can repeat: where each one is, as "module:name", and what it asks."""

from typing import NamedTuple


class Listed(NamedTuple):
    """Where an experiment is, and what it asks in a few words."""

    target: str
    summary: str


EXPERIMENTS = {
    "positions": Listed(
        "attention:POSITIONS", "what each scheme of positions knows, within and beyond its length"
    ),
    "families": Listed("tasks:FAMILIES", "encoder, decoder and both, on the tasks of each other"),
    "norms": Listed("architecture:NORMS", "pre- and post-norm, with and without warm-up, by depth"),
    "scale": Listed("architecture:SCALE", "scores with and without the root of the head's width"),
    "residuals": Listed("architecture:RESIDUALS", "residuals and norms switched off"),
    "shapes": Listed("architecture:SHAPES", "width, depth and heads at equal size"),
    "budget": Listed("architecture:BUDGET", "small and large models for the same FLOPs"),
    "heads": Listed("attention:HEADS", "heads removed, by their importance and at random"),
    "pooling": Listed("tasks:POOLING", "a class token against the mean"),
    "kinds": Listed("attention:KINDS", "kinds of attention against length: time, reach and loss"),
    "lstm": Listed("attention:LSTM", "a Transformer and an LSTM of equal size"),
    "induction": Listed("attention:INDUCTION", "when a head learns to copy what followed the last time"),
    "tokenizers": Listed("tasks:TOKENIZERS", "bytes, BPE and Unigram on one text"),
    "tying": Listed("architecture:TYING", "one table for reading and writing"),
    "smoothing": Listed("architecture:SMOOTHING", "what label smoothing does to confidence"),
    "experts": Listed("architecture:EXPERTS", "whether experts share the work by themselves"),
    "ladder": Listed("ladder:LADDER", "known gains over a plain GPT-2: tokens and time to equal loss"),
    "scaling": Listed("scaling:SCALING", "a ladder of small models that predicts a larger one"),
    "distillation": Listed("tasks:DISTILLATION", "a small model that learns from a larger one"),
}
