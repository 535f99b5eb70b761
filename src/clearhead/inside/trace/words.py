"""What each step of a trace is called, its formula, and why it is there: one entry for each kind of step.

In formulas `x` is what the step before gave, and names in braces are filled in from the model at hand.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Words(NamedTuple):
    """How to speak of one kind of step."""

    title: str
    formula: str
    why: str


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

WORDS = {
    # Input
    "tokenize": Words(
        "tokenize",
        "text → tokens",
        "A model reads pieces from a fixed vocabulary; here are the characters behind each piece.",
    ),
    "ids": Words(
        "ids",
        "token → its number",
        "Each piece has a number, which says where its vector stands in the table.",
    ),
    "pixels": Words(
        "pixels", "image → numbers", "The image at the size, and on the scale, that the model was trained on."
    ),
    "vectors": Words("vectors", "as given", "The input is a row of vectors already."),
    # Embedding
    "embedding.front.tokens": Words(
        "embed",
        "table[ids]",
        "Each token becomes a vector, learned in training: what it means before its neighbours are known.",
    ),
    "embedding.front.scaled": Words(
        "scale",
        "x · {embedding_scale}",
        "Makes the token's vector large beside the vectors that are added to it.",
    ),
    "embedding.front.patches": Words(
        "patches", "cut, then flatten", "An image has no words, so squares of it take their place."
    ),
    "embedding.front.project": Words(
        "project", "x · W + b", "Brings each input vector to the width of the model."
    ),
    "embedding.front.class_token": Words(
        "class token",
        "[class token; x]",
        "A learned vector that stands for no patch gathers what the whole image shows.",
    ),
    "embedding.front.first": Words(
        "first convolution", "conv(x)", "Each frame takes in its neighbours in time."
    ),
    "embedding.front.first_bent": Words(
        "activate", "gelu(x)", "Without a bend, two convolutions would be one."
    ),
    "embedding.front.second": Words(
        "second convolution", "conv(x)", "Takes in neighbours again, with a stride that shortens the row."
    ),
    "embedding.front.second_bent": Words(
        "activate", "gelu(x)", "Bends the result, so that what follows is more than one linear map."
    ),
    "embedding.types": Words(
        "types", "table[types]", "A vector that says which of two texts a token belongs to."
    ),
    "embedding.typed": Words("add types", "x + types", "Each token now carries the text it belongs to."),
    "positions.table": Words(
        "positions",
        "table[0, 1, 2, …]",
        "A learned vector for each place in the row: attention itself knows no order.",
    ),
    "positions.waves": Words(
        "positions",
        "sin, cos of the place",
        "Waves of many lengths give each place a vector of its own: attention itself knows no order.",
    ),
    "embedding.placed": Words("add positions", "x + positions", "Each token now carries where it stands."),
    "embedding.norm": Words(
        "norm", "{norm}(x)", "Brings every token's vector to one scale before the first block."
    ),
    "embedding.project": Words(
        "widen", "x · W + b", "The table is narrower than the model, to save weights, and is widened here."
    ),
    # What attention may see, and how
    "positions.rotary": Words(
        "angles",
        "cos, sin of place · frequency",
        "By how much queries and keys will be turned at each place.",
    ),
    "positions.rotary.local": Words(
        "angles, local",
        "cos, sin of place · frequency",
        "The same at the base that layers with a window have.",
    ),
    "positions.bias": Words(
        "position bias", "{bias}", "What will be added to a score for the distance between two tokens."
    ),
    "mask": Words("who sees whom", "{mask}", "True where a token may look at another one."),
    # Attention
    "attention.q": Words("query", "x · Wq{qkv_bias}", "What each token looks for."),
    "attention.k": Words("key", "x · Wk{qkv_bias}", "What each token offers to be found by."),
    "attention.v": Words("value", "x · Wv{qkv_bias}", "What each token hands over when it is found."),
    "cross.q": Words("query", "x · Wq{qkv_bias}", "What each token being written looks for in the source."),
    "cross.k": Words("key", "memory · Wk{qkv_bias}", "What each token of the source offers to be found by."),
    "cross.v": Words(
        "value", "memory · Wv{qkv_bias}", "What each token of the source hands over when it is found."
    ),
    "attention.q_heads": Words(
        "split heads, q",
        "B T H·E → B H T E",
        "Each head looks for something else, with its own share of the columns.",
    ),
    "attention.k_heads": Words(
        "split heads, k",
        "B S K·E → B K S E",
        "Each head has its own keys; fewer than queries where heads share them.",
    ),
    "attention.v_heads": Words(
        "split heads, v",
        "B S K·E → B K S E",
        "Each head has its own values; fewer than queries where heads share them.",
    ),
    "attention.q_norm": Words(
        "norm q", "{norm}(q)", "Keeps scores from growing with the size of the queries."
    ),
    "attention.k_norm": Words("norm k", "{norm}(k)", "Keeps scores from growing with the size of the keys."),
    "attention.q_rotated": Words(
        "rotate q",
        "q turned by its place",
        "Turned queries and keys fit by their distance, so order enters the scores.",
    ),
    "attention.k_rotated": Words(
        "rotate k",
        "k turned by its place",
        "Turned queries and keys fit by their distance, so order enters the scores.",
    ),
    "attention.scores": Words("scores", "q · kᵀ", "How well each query fits each key."),
    "attention.scaled": Words(
        "scale",
        "scores · {scale}",
        "Long vectors make large products; the scale keeps softmax from choosing one key alone.",
    ),
    "attention.softcapped": Words(
        "soft-cap",
        "{softcap} · tanh(scores / {softcap})",
        "Bounds the scores smoothly, so that none runs away.",
    ),
    "attention.biased": Words("add bias", "scores + position bias", "Distance enters the scores."),
    "attention.masked": Words(
        "mask", "{hidden}", "What a token may not see gets the lowest score, and so no weight."
    ),
    "cross.masked": Words(
        "mask", "{hidden}", "Every token of the source may be seen: nothing is hidden here."
    ),
    "attention.pattern": Words(
        "softmax",
        "softmax(scores)",
        "Scores become shares: how much each token takes from each other one, one in all.",
    ),
    "attention.z": Words(
        "mix values", "pattern · v", "Each token takes in the values of those it looks at, by their shares."
    ),
    "attention.concat": Words(
        "concatenate", "B H T E → B T H·E", "What the heads found is laid side by side."
    ),
    "attention.out": Words(
        "output", "z · Wo{out_bias}", "Mixes what the heads found, and brings it to the width of the stream."
    ),
    # Residual stream
    "residual.before": Words(
        "norm", "{norm}(x)", "The sublayer reads the stream at one scale, whatever its size has become."
    ),
    "residual.inside": Words(
        "inner norm", "{norm}(y)", "What the sublayer says is brought to one scale before it is added."
    ),
    "residual.scaled": Words(
        "scale", "y · {residual_scale}", "How loudly a sublayer speaks beside the stream."
    ),
    "residual.add": Words(
        "residual", "x + y", "The stream goes on, and the sublayer only adds to it: so depth loses nothing."
    ),
    "residual.after": Words("post norm", "{norm}(x)", "The stream itself is brought back to one scale."),
    # Feed-forward
    "feedforward.router": Words("router", "x · Wr", "How well each expert suits each token."),
    "feedforward.chosen": Words(
        "choice of experts",
        "the best {n_active} of {n_experts}",
        "Each token visits a few experts, so that weights are many and work is little.",
    ),
    "feedforward.weights": Words(
        "weights of experts", "{router}", "How much of each chosen expert's answer a token takes."
    ),
    "feedforward.sorted": Words(
        "sort by expert",
        "rows of x, by expert",
        "Tokens of one expert are laid together, so that it works on them at once.",
    ),
    "feedforward.gate": Words(
        "gate", "x · Wg{feedforward_bias}", "Which of the wide features will be let through."
    ),
    "feedforward.up": Words(
        "expand",
        "x · Wu{feedforward_bias}",
        "Each token by itself looks for many features, in a wider space.",
    ),
    "feedforward.activated": Words(
        "activate", "{activation}(x)", "The bend: without it the two linear maps would be one."
    ),
    "feedforward.gated": Words(
        "multiply", "gate · up", "The gate lets some features through and holds others back."
    ),
    "feedforward.down": Words(
        "contract", "x · Wd{feedforward_bias}", "The features found say what to add to the stream."
    ),
    "feedforward.mixed": Words(
        "mix experts", "Σ weight · answer", "Each token adds up the answers of its experts, by their weights."
    ),
    # Head
    "norm": Words(
        "final norm", "{norm}(x)", "The last states are brought to one scale for whoever reads them."
    ),
    "head.transform": Words(
        "transform", "x · W + b", "One more layer on each state before it is compared with the tokens."
    ),
    "head.activation": Words("activate", "{head_activation}(x)", "The bend of that layer."),
    "head.norm": Words("norm", "{norm}(x)", "Brings the transformed states to one scale."),
    "head.scaled": Words("scale", "x · {logit_scale}", "Sets how sharp the choice will be."),
    "head.pooled": Words("pool", "{pooling}", "One vector must speak for the whole input."),
    "head.pooler": Words("pooler", "x · W + b", "A layer on that one vector."),
    "head.bent": Words("activate", "{pooler}(x)", "The bend of that layer."),
    "head.normalised": Words(
        "unit length", "x / |x|", "Vectors of length one are compared by their angle alone."
    ),
    "head.out": Words("logits", "x · W{head_bias}", "A score for every answer there is."),
    "head.softcapped": Words(
        "soft-cap",
        "{logit_softcap} · tanh(x / {logit_softcap})",
        "Bounds the scores smoothly, so that none runs away.",
    ),
    "head.probabilities": Words("probabilities", "{probability}", "Scores become probabilities."),
    "head.candidates": Words("top candidates", "the best {top}", "What the model finds most likely."),
}

_PLACE = re.compile(r"^(?:encoder\.)?(?:blocks\.\d+\.)?")
_SUBLAYER = re.compile(r"^(?:attention|cross|feedforward)_residual\.")


def kind_of(name: str) -> str:
    """The key in WORDS of a step's name: "encoder.blocks.3.cross.z" is "attention.z"."""
    key = _SUBLAYER.sub("residual.", _PLACE.sub("", name)).replace("feedforward.experts.", "feedforward.")
    key = re.sub(r"^mask\..*", "mask", key)
    return key if key in WORDS else key.replace("cross.", "attention.")
