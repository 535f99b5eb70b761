"""Steering: add the difference of two texts to the stream of a third, at one layer.

    vector = steering_vector(m, "I love this", "I hate this", layer=2)
    with steering(m, vector, layer=2, strength=4):
        m.generate("The film was", 20)

Shapes: B batch, T tokens, D model.
"""

from contextlib import AbstractContextManager

from torch import Tensor

from clearhead.core.taps import edit
from clearhead.errors import refuse
from clearhead.inside import inputs, names
from clearhead.run.api import Model


def steering_vector(m: inputs.AnyModel, toward: inputs.Given, away: inputs.Given, layer: int) -> Tensor:
    """Return the stream after a layer at the last token of one text, less that of another: [D]."""
    tap = _after(inputs.as_model(m), layer)
    last = [inputs.prepare(m, text).record(tap, logits="none")[1][tap][0, -1] for text in (toward, away)]
    return last[0] - last[1]


def steering(
    m: inputs.AnyModel, vector: Tensor, layer: int, strength: float = 1.0
) -> AbstractContextManager[None]:
    """Add `strength` times a vector [D] to the stream after a layer, at every token, in a `with` block."""
    m = inputs.as_model(m)
    return edit(m.model, {_after(m, layer): lambda x: x + strength * vector.to(x)})


def _after(m: Model, layer: int) -> str:
    """Return the name of the stream after a layer of the stack that feeds the head."""
    taps = names.states(m.model.main.spec)[1:]
    refuse(not 0 <= layer < len(taps), f"there is no layer {layer}: layers are 0 to {len(taps) - 1}")
    return taps[layer]
