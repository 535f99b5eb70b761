"""One head at one token, in five stops: q·k, scale, mask and position, softmax, the mix of values."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from clearhead.api import Model
from clearhead.errors import refuse
from clearhead.explorer.pack import short
from clearhead.inside.choices import find_column
from clearhead.inside.names import AttentionHead, find_heads
from clearhead.inside.trace import Trace, trace

HIDDEN = -1e30  # scores below this are masked
# The last of each tuple that the model has: positions and caps change scores where they are used.
STOPS = {
    "q·k": ("scores",),
    "scale": ("scaled", "softcapped"),
    "mask": ("biased", "masked"),
    "softmax": ("pattern",),
}


def head_stops(
    m: Model, given: Any, target: Sequence[int] | None, pair: str | None, heads: Sequence[str], reader: int
) -> list[dict[str, Any]]:
    """Return what each head computes for one reader, [S] numbers at each stop, from one traced pass.

    Masked scores are null.
    """
    found = find_heads(m.config, heads)
    steps = [step for several in STOPS.values() for step in several]
    names = {f"{head.part}.{step}" for head in found for step in (*steps, "v_heads")}
    seen = trace(m, given, target, pair, keep_values=sorted(names))
    return [_stops_of(head, seen, reader) for head in found]


def _stops_of(head: AttentionHead, seen: Trace, reader: int) -> dict[str, Any]:
    """Return one head's stops from a trace that kept them."""
    kept = {step.name: step for step in seen.steps if step.value is not None}
    refuse(f"{head.part}.pattern" not in kept, f"head {head} has no attention pattern to look into")
    first, main = seen.source_tokens or seen.tokens, seen.tokens
    rows, columns = {"encoder": (first, first), "cross": (main, first)}.get(head.kind, (main, main))
    place = find_column(reader, rows)

    def row(name: str) -> Tensor:
        value = kept[name].value
        assert value is not None
        return value[0, head.number, place].float()

    stops = []
    for title, steps in STOPS.items():
        there = [kept[f"{head.part}.{step}"] for step in steps if f"{head.part}.{step}" in kept]
        if there:
            step = there[-1]
            numbers = [None if value <= HIDDEN else short(value) for value in row(step.name).tolist()]
            stops.append({"stop": title, "formula": step.formula, "why": step.why, "values": numbers})
    weights, values = (kept[f"{head.part}.{step}"].value for step in ("pattern", "v_heads"))
    assert weights is not None and values is not None
    shared = values.shape[1] * head.number // weights.shape[1]  # the key/value head of its group
    lengths = values[0, shared].float().norm(dim=-1)
    mix = [short(value) for value in (row(f"{head.part}.pattern") * lengths).tolist()]
    why = "Each value counts as much as its share; what is shown is the length of what each token gives."
    stops.append({"stop": "mix", "formula": "share × |v|", "why": why, "values": mix})
    return {
        "head": str(head),
        "reader": place,
        "label": rows[place],
        "columns": list(columns),
        "stops": stops,
    }
