"""Words of the steps of attention with a formula of its own: linear, low-rank and the gated delta rule."""

from clearhead.inside.trace.words import Words

KIND_WORDS = {
    "linear.pattern": Words(
        *("shares", "B H T S", "φ(q) · φ(k) / their sum"),
        "How much each token takes from each other one. The layer itself adds up values without them.",
    ),
    "linear.z": Words(
        *("mix values", "B H T {Ev}", "φ(q) · Σ φ(k) [v, 1]ᵀ, divided by its last column"),
        "Keys and values are added up once, whatever the length, and every query reads the sum.",
    ),
    "low-rank.k_mix": Words(
        "mix keys", "{shape}", "Mᵀ · k", "A few mixtures stand for all keys, by weights for each position."
    ),
    "low-rank.v_mix": Words(
        "mix values", "{shape}", "Mᵀ · v", "The same mixtures of values, with weights of their own."
    ),
    "low-rank.scores": Words("scores", "{shape}", "q · kᵀ", "How well each query fits each mixture."),
    "low-rank.scaled": Words(
        *("scale", "{shape}", "scores · {scale}"),
        "Long vectors make large products; the scale keeps softmax from choosing one mixture alone.",
    ),
    "low-rank.masked": Words("mask", "{shape}", "{hidden}", "Every mixture may be seen: nothing is hidden."),
    "low-rank.pattern": Words(
        *("softmax", "{shape}", "softmax(scores)"),
        "Scores become shares: how much each token takes from each mixture, one in all.",
    ),
    "gated-delta.q": Words("query", "{shape}", "x · Wq", "What each token looks for in the memory."),
    "gated-delta.k": Words("key", "{shape}", "x · Wk", "Under what each token writes into the memory."),
    "gated-delta.v": Words("value", "{shape}", "x · Wv", "What each token writes there."),
    "gated-delta.conv": Words(
        *("short convolution", "{shape}", "silu(Σ weight · the latest q, k, v)"),
        "Each token takes in the few before it, channel by channel.",
    ),
    "gated-delta.beta": Words(
        *("strength", "{shape}", "sigmoid(x · Wb)"),
        "How much of what the memory holds under a key gives way to the new value.",
    ),
    "gated-delta.decay": Words(
        *("decay", "{shape}", "−rate · softplus(x · Wd + b)"),
        "How fast the memory fades from one token to the next, as a logarithm.",
    ),
    "gated-delta.z": Words(
        "read the memory", "{shape}", "Sᵀ · q / √E", "What the memory holds under each query."
    ),
    "gated-delta.gate": Words("gate", "{shape}", "x · Wg", "Which parts of the answer will be let through."),
    "gated-delta.concat": Words(
        *("gate the answer", "{shape}", "rmsnorm(z) · silu(gate)"),
        "The heads' answers at one scale, as far as the gate lets them through, side by side.",
    ),
    "gated-delta.out": Words(
        *("output", "B T D", "x · Wo"),
        "Mixes what the heads found, and brings it to the width of the stream.",
    ),
}
