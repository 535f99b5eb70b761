"""One head at one token, in five stops: q·k, scale, mask and position, softmax, the mix of values.

The numbers are those of the recorded pass: its queries and keys, its masked scores, its pattern and values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.app.explorer.pack import short
from clearhead.core.taps import Recording, tap_names
from clearhead.errors import refuse
from clearhead.inside.inputs import Prepared, find_column
from clearhead.inside.names import AttentionHead, find_heads, kinds_of
from clearhead.inside.trace_words import filled_words

HIDDEN = -1e30  # scores below this are masked
MIX = "Each value counts as much as its share; what is shown is the length of what each token gives."


def head_stops(prepared: Prepared, heads: Sequence[str], reader: int) -> list[dict[str, Any]]:
    """Return what each head computes for one reader, [S] numbers at each stop; masked scores are null."""
    config = prepared.m.config
    found, known = find_heads(config, heads), tap_names(config)
    seen_kinds = {one.part for one, kind in kinds_of(config).items() if kind.patterned}
    for head in found:
        refuse(head.part not in seen_kinds, f"head {head} has no attention pattern to look into")
    taps = {f"{head.part}.{tap}" for head in found for tap in ("q", "k", "v", "scores", "pattern")}
    _, seen = prepared.record(*sorted(taps & set(known)), logits="none")
    return [_stops_of(prepared, seen, head, reader) for head in found]


def _stops_of(prepared: Prepared, seen: Recording, head: AttentionHead, reader: int) -> dict[str, Any]:
    """Return one head's stops from what the pass has recorded."""
    model = prepared.model
    stack = model.encoder if head.kind == "encoder" else model.main
    assert stack is not None
    block = list(stack.layers())[head.layer]
    attention: Any = block.cross if head.kind == "cross" else block.attention
    rows = prepared.tokens_of("encoder." if head.kind == "encoder" else "").labels
    columns = prepared.tokens_of("" if head.kind == "self" else "encoder.").labels
    place = find_column(reader, rows)

    def of_group(tap: str, heads: int) -> Tensor:
        """Return the keys or values that the head reads, [S, E]: those of its group."""
        x = seen[f"{head.part}.{tap}"][0].float()
        return x[len(x) * head.number // heads]

    shares = seen[f"{head.part}.pattern"][0].float()
    numbers: dict[str, tuple[str, Tensor]] = {}  # by stop: the step it is of, [S] numbers
    if f"{head.part}.scores" in seen:
        masked = seen[f"{head.part}.scores"][0, head.number, place].float()
        query = seen[f"{head.part}.q"][0, head.number, place].float()
        product = of_group("k", len(shares)) @ query
        scaled, cap = product * attention.scale, attention.softcap
        numbers["q·k"] = "scores", product
        numbers["scale"] = (
            ("scaled", scaled) if cap is None else ("softcapped", cap * torch.tanh(scaled / cap))
        )
        numbers["mask"] = "masked", masked
    numbers["softmax"] = "pattern", shares[head.number, place]
    stops = []
    for stop, (step, values) in numbers.items():
        words = filled_words(model.config, f"{head.part}.{step}", values)
        shown = [None if value <= HIDDEN else short(value) for value in values.tolist()]
        stops.append({"stop": stop, "formula": words.formula, "why": words.why, "values": shown})
    mix = shares[head.number, place] * of_group("v", len(shares)).norm(dim=-1)
    stops.append(
        {"stop": "mix", "formula": "share × |v|", "why": MIX, "values": [short(x) for x in mix.tolist()]}
    )
    return {
        "head": str(head),
        "reader": place,
        "label": rows[place],
        "columns": list(columns),
        "stops": stops,
    }
