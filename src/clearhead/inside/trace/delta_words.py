"""Words of the steps of a gated delta layer, which reads and writes a memory in place of keys."""

import re
from collections.abc import Mapping

from clearhead.config import ModelConfig
from clearhead.config.kinds import GatedDeltaKind
from clearhead.inside.trace.words import Words

DELTA = {
    **{
        f"attention.{x}_projected": Words(
            f"{word}, projected", f"B T {width}", f"x · W{x}", "One linear map of each token."
        )
        for x, word, width in (("q", "query", "Kd·Ed"), ("k", "key", "Kd·Ed"), ("v", "value", "Hd·Vd"))
    },
    "attention.conv": Words(
        *("convolve", "B T Cd", "silu(conv(q, k, v))"),
        "Each token takes in the few before it.",
    ),
    "attention.q": Words("query", "B Kd T Ed", "q / |q|", "What each token looks for in the memory."),
    "attention.k": Words("key", "B Kd T Ed", "k / |k|", "The place in the memory that each token writes to."),
    "attention.v": Words("value", "B Hd T Vd", "B T Hd·Vd → B Hd T Vd", "What each token writes there."),
    "attention.beta": Words(
        "strength", "B Hd T", "sigmoid(x · Wb)", "How far each token replaces what stands at its place."
    ),
    "attention.decay": Words(
        *("decay", "B Hd T", "−rate · softplus(x · Wa + b)"),
        "How much of the memory each token forgets first, as a logarithm.",
    ),
    "attention.z": Words(
        *("recall", "B Hd T Vd", "memory · q"),
        "Each token reads the memory, after it has forgotten and written.",
    ),
    "attention.gate": Words(
        "gate", "B T Hd·Vd", "x · Wg", "How much of what was read each token will let through."
    ),
    "attention.concat": Words(
        *("norm and gate", "B T Hd·Vd", "rmsnorm(z) · silu(gate)"),
        "What the heads read is brought to one scale, gated, and laid side by side.",
    ),
    "attention.out": Words(
        *("output", "B T D", "x · Wo"), "Mixes what the heads read, and brings it to the width of the stream."
    ),
}


def own_words(config: ModelConfig, name: str) -> Mapping[str, Words]:
    """Return the words for the kind of attention that a step belongs to; none where the usual ones hold."""
    layer = re.match(r"blocks\.(\d+)\.attention\.", name)
    return DELTA if layer and isinstance(config.main.kinds[int(layer[1])], GatedDeltaKind) else {}
