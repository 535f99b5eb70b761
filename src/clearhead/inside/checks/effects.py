"""Rows about what looking inside says: contributions, scores and graphs add up, and hold under interventions.

They are of the first row of the inputs; a graph is computed in float64, whatever the dtype of the model.
"""

import math

from clearhead.errors import InputError
from clearhead.inside import names
from clearhead.inside.attribution import looks
from clearhead.inside.checks.rows import Comparison, Inputs
from clearhead.inside.graph import graph
from clearhead.inside.held import refuse_bent, refuse_unscored
from clearhead.inside.inputs import KINDS, InputTokens, Prepared
from clearhead.inside.lens import contributions
from clearhead.run.api import Model

EXACT = 1e-8
SUMS = 1e-4  # of terms that one by one may be a thousand times the logit


def effects_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows; a graph takes a model that is linear once patterns, norms and gates are held."""
    config = inputs.model.config
    chooses = config.head in KINDS and inputs.kind in ("tokens", "patches") and not config.head_layer
    chooses &= inputs.source_kind in ("", "tokens") and "global_mask" not in inputs.arguments
    return [
        inputs.compare(
            "contributions = logit",
            "what all parts add to the likeliest choice, with its logit less the mean of all",
            _contributions,
            tolerance=max(SUMS, inputs.compare("", "", _contributions).tolerance),
            fits=chooses and all(weight.is_floating_point() for weight in inputs.model.parameters()),
        ),
        inputs.compare(
            "score terms = score",
            "a score as a sum over the parts that made its query and its key, with the score",
            _score,
            fits=chooses and _linear(inputs, scored=True),
        ),
        inputs.compare(
            "graph = interventions",
            "nodes and edges of an attribution graph with what changes without each, all else held",
            _graph,
            tolerance=EXACT,
            copies=True,
            fits=chooses and _linear(inputs),
        ),
    ]


def _linear(inputs: Inputs, scored: bool = False) -> bool:
    prepared = _prepared(inputs)
    try:
        refuse_bent(inputs.model)
        if scored:
            refuse_unscored(prepared)
    except InputError:
        return False
    return True


def _prepared(inputs: Inputs) -> Prepared:
    """Return the first row of the inputs."""
    first = {name: x[:1] for name, x in inputs.arguments.items()}
    count = inputs.model.main.spec.n_tokens(inputs.length)
    if inputs.kind == "patches":
        count = inputs.model.config.stacks[0].n_tokens(inputs.length)
    labels = [InputTokens(tuple(map(str, range(size)))) for size in
              (count, first["source"].shape[1] if "source" in first else 0)]  # fmt: skip
    source = first.get("source")
    return Prepared(
        Model(inputs.model), first["ids"], labels[0], source, None if source is None else labels[1],
        first.get("types"),
    )  # fmt: skip


def _contributions(inputs: Inputs) -> float:
    found = contributions(inputs.model, _prepared(inputs))
    return abs(found.total - found.logit) / max(1.0, abs(found.logit))


def _score(inputs: Inputs) -> float:
    worst = 0.0
    for attention in names.patterned(inputs.model.config):
        found = looks(inputs.model, _prepared(inputs), f"{attention}.0", 0, 0)
        total = math.fsum((found.rest, found.position, *(term.value for term in found.terms)))
        worst = max(worst, abs(total - found.score) / max(1.0, abs(found.score)))
    return worst


def _graph(inputs: Inputs) -> float:
    found = graph(inputs.model, _prepared(inputs), verify=True, nodes=24)
    assert found.difference is not None
    return found.difference
