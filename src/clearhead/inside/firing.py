"""The neurons that matter to an answer: what each adds to a logit, through its feed-forward alone.

    found = firing(m, "The cat sat on the", count=5)
    found.neurons[0].name, found.neurons[0].value       # "2.117", in logits

A feed-forward writes its neurons' activations times their output vectors, and a bias. The logit is linear in
that, with every norm held at its actual size (see `direct`), so each neuron adds one number; with the bias
they are the feed-forward's own term of `contributions`. What fires a neuron elsewhere, and what it promotes,
is in `memories`.

Shapes: R rows that the head reads, F neurons of a feed-forward, D model.
"""

from dataclasses import dataclass

from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.core.taps import tap_names
from clearhead.errors import refuse
from clearhead.inside import inputs, results
from clearhead.inside.direct import AskedLogit, parts_of
from clearhead.inside.frozen import exact
from clearhead.run.quant.layers import weight_of


@dataclass(frozen=True)
class FiringNeuron(results.Result):
    """One neuron: its activation where it is read, and what it adds to the logit."""

    name: str  # as in `memories`: "2.117"
    activation: float
    value: float


@dataclass(frozen=True)
class Firing(results.Result):
    """The neurons that add most to a logit, or take most from it."""

    column: int
    choice: str
    neurons: tuple[FiringNeuron, ...]  # largest first, of either sign
    sums: dict[str, float]  # by feed-forward, "feedforward 2": all of its neurons together, without its bias


def firing(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    token: str | int | None = None,
    position: int = -1,
    target: inputs.Target = None,
    against: str | int | None = None,
    pair: str | None = None,
    count: int = 10,
) -> Firing:
    """Return the neurons that matter most to one logit; the arguments are `contributions`'."""
    model = inputs.as_model(m).model
    taps = [
        f"blocks.{layer}.feedforward.post"
        for layer in range(model.main.spec.n_layers)
        if f"blocks.{layer}.feedforward.post" in tap_names(model)
    ]
    refuse(not taps, "this model has no plain feed-forward whose neurons could be looked at")
    asked = AskedLogit.of(m, given, token, position, target, against, pair, *taps)
    parts, read = parts_of(asked)
    blocks = model.main.layers()
    values: dict[int, Tensor] = {}
    posts: dict[int, Tensor] = {}
    for part in parts:
        (term, *_) = part.terms
        tap = f"blocks.{term.layer}.feedforward.post"
        if term.kind == "feedforward" and term.layer is not None and tap in taps:
            posts[term.layer] = exact(asked.seen[tap][0][read.rows])  # R F
            # As float64 it would be a long copy.
            down = wide(weight_of(blocks[term.layer], "feedforward.down").detach())  # D F
            values[term.layer] = (posts[term.layer] * exact(part.slope.to(down) @ down)).sum(0)
    best = sorted(
        (
            (layer, int(unit), float(table[unit]))
            for layer, table in values.items()
            for unit in table.abs().topk(min(count, len(table))).indices
        ),
        key=lambda one: -abs(one[2]),
    )[:count]
    return Firing(
        asked.column,
        asked.name,
        tuple(
            FiringNeuron(f"{layer}.{unit}", float(posts[layer][-1, unit]), value)
            for layer, unit, value in best
        ),
        {f"feedforward {layer}": float(table.sum()) for layer, table in values.items()},
    )
