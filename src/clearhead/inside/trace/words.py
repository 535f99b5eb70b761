"""What each step of a trace is called, its shape in letters, its formula, and why it is there.

The parts of the model explain their own steps, beside their code. Here are those before the first part and after the
last, and the place where all of them are looked up.
"""

from __future__ import annotations

import re

from clearhead.model.attend import ATTEND_WORDS
from clearhead.model.attention import ATTENTION_WORDS, CROSS_WORDS
from clearhead.model.block import RESIDUAL_WORDS
from clearhead.model.experts import EXPERT_WORDS
from clearhead.model.feedforward import FEEDFORWARD_WORDS
from clearhead.model.fronts import EMBEDDING_WORDS
from clearhead.model.heads import HEAD_WORDS
from clearhead.model.positions import POSITION_WORDS
from clearhead.model.stack import STACK_WORDS
from clearhead.model.steps import Words

LEGEND = {
    "B": "batch, here one row",
    "T": "tokens that ask: the length of this stack's input",
    "S": "tokens that are asked: T in self-attention, the source's length in cross-attention",
    "D": "width of the model",
    "W": "width of the token table, where it is not D",
    "H": "heads",
    "K": "key/value heads",
    "E": "width of a head",
    "Ev": "width of a value head, where it is not E",
    "R": "columns of a head that are rotated",
    "F": "width of the feed-forward",
    "X": "experts",
    "A": "experts that each token visits",
    "V": "vocabulary",
    "C": "classes",
    "N": "patches of the image",
    "I": "width of one input vector",
    "Tin": "frames before the stride",
    "top": "candidates shown",
    "channels": "of the image",
    "height": "of the image, in pixels",
    "width": "of the image, in pixels",
    "patch": "side of a patch, in pixels",
}

INPUT_WORDS = {
    "tokenize": Words(
        *("tokenize", "T 2", "text → tokens"),
        "A model reads pieces from a fixed vocabulary; here are the characters behind each piece.",
    ),
    "ids": Words(
        *("ids", "B T", "token → its number"),
        "Each piece has a number, which says where its vector stands in the table.",
    ),
    "pixels": Words(
        *("pixels", "B channels height width", "image → numbers"),
        "The image at the size, and on the scale, that the model was trained on.",
    ),
    "vectors": Words("vectors", "B {Tin} I", "as given", "The input is a row of vectors already."),
}
ANSWER_WORDS = {
    "probabilities": Words("probabilities", "{answers}", "{probability}", "Scores become probabilities."),
    "candidates": Words("top candidates", "{candidates}", "the best {top}", "What the model finds most likely."),
}
PARTS = {
    "": INPUT_WORDS | STACK_WORDS,
    "embedding.": EMBEDDING_WORDS,
    "positions.": POSITION_WORDS,
    "attention.": ATTENTION_WORDS | ATTEND_WORDS,
    "cross.": ATTENTION_WORDS | ATTEND_WORDS | CROSS_WORDS,
    "residual.": RESIDUAL_WORDS,
    "feedforward.": EXPERT_WORDS | FEEDFORWARD_WORDS,
    "head.": HEAD_WORDS | ANSWER_WORDS,
}
WORDS = {part + name: words for part, entries in PARTS.items() for name, words in entries.items()}

_PLACE = re.compile(r"^(?:encoder\.)?(?:blocks\.\d+\.)?")
_SUBLAYER = re.compile(r"^(?:attention|cross|feedforward)_residual\.")


def kind_of(name: str) -> str:
    """The key in WORDS of a step's name: "encoder.blocks.3.attention_residual.add" is "residual.add"."""
    key = _SUBLAYER.sub("residual.", _PLACE.sub("", name)).replace("feedforward.experts.", "feedforward.")
    return "mask" if key.startswith("mask.") else key
