"""Words of the steps of global, linear and low-rank attention, and which words a kind of attention has."""

import re
from collections.abc import Mapping

from clearhead.core.config import ModelConfig
from clearhead.inside.trace.delta_words import DELTA
from clearhead.inside.trace.words import Words

GLOBAL = {
    "attention.q_global": Words(
        *("global query", "B T H·E", "x · Wq'{qkv_bias}"),
        "What global tokens look for: those that see all others.",
    ),
    "attention.k_global": Words(
        *("global key", "B S K·E", "x · Wk'{key_bias}"), "What each token offers to be found by global ones."
    ),
    "attention.v_global": Words(
        *("global value", "B S K·{Ev}", "x · Wv'{qkv_bias}"), "What each token hands over to global ones."
    ),
}
LINEAR = {
    "attention.pattern": Words(
        *("shares", "B H T S", "φ(q) · φ(k) / their sum"),
        "How much each token takes from each other one. The layer itself adds up values without them.",
    ),
}
LOW_RANK = {
    "attention.k_mix": Words(
        "mix keys", "{shape}", "Mᵀ · k", "A few mixtures stand for all keys, by weights for each position."
    ),
    "attention.v_mix": Words(
        "mix values", "{shape}", "Mᵀ · v", "The same mixtures of values, with weights of their own."
    ),
    "attention.scores": Words("scores", "{shape}", "q · kᵀ", "How well each query fits each mixture."),
    "attention.scaled": Words(
        *("scale", "{shape}", "scores · {scale}"),
        "Long vectors make large products; the scale keeps softmax from choosing one mixture alone.",
    ),
    "attention.masked": Words("mask", "{shape}", "{hidden}", "Every mixture may be seen: nothing is hidden."),
    "attention.pattern": Words(
        *("softmax", "{shape}", "softmax(scores)"),
        "Scores become shares: how much each token takes from each mixture, one in all.",
    ),
}
KIND_WORDS: dict[str, Mapping[str, Words]] = {
    "global": GLOBAL,
    "linear": LINEAR,
    "low-rank": LOW_RANK,
    "gated-delta": DELTA,
}


def own_words(config: ModelConfig, name: str) -> Mapping[str, Words]:
    """Return the words for the kind of attention that a step belongs to; none where the usual ones hold."""
    layer = re.match(r"(?:encoder\.)?blocks\.(\d+)\.attention\.", name)
    spec = config.stacks[0] if name.startswith("encoder.") else config.main
    return KIND_WORDS.get(spec.kinds[int(layer[1])].name, {}) if layer else {}
