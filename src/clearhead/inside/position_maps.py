"""How a model tells positions apart, as a table: a row per position or per head; how alike two positions are.

    position_map(m, 64)                                  # vectors, angles or biases
    position_similarity(m, 64)                           # [T, T]

Shapes: T positions, D width of the vectors, R rotated columns of a head, H heads.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.errors import InputError
from clearhead.inside.inputs import AnyModel, as_model, device_of, patch_names
from clearhead.inside.results import Floats, Result, on_cpu
from clearhead.model.stack import Stack

Which = Literal["main", "encoder"]
LENGTH = 64  # positions, where nobody says how many


@dataclass(frozen=True, eq=False)
class PositionMap(Result):
    """A table of numbers with names for both sides."""

    scheme: str  # learned, sinusoidal, rope, alibi, relative
    values: Floats  # [rows, columns]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_name: str
    column_name: str
    measure: str  # what the numbers are


def position_map(m: AnyModel, length: int | None = None, stack: Which = "main") -> PositionMap:
    """Return what tells positions apart.

    Learned and sinusoidal positions are vectors [T, D]. Rotary ones are the cosines, then the sines, of each
    pair's angle [T, R]. Biases are what is added to the scores by distance [H, distances].

    Args:
        m: what `load` gave, or a bare model.
        length: positions; None: as many as the model takes, 64 at most, or all patches of an image.
        stack: of a model with an encoder and a decoder, which.
    """
    part, where, names = _positions(m, length, stack)
    vectors, angles = part.positions.embed(where, torch.float32), _angles(part, where)
    column_name, measure, row_name = "dimension", "value", "position"
    if vectors is not None:
        values = vectors[0]
        columns = tuple(map(str, range(values.shape[-1])))
    elif angles is not None:
        values = torch.cat(angles, -1)
        pairs = range(angles[0].shape[-1])
        columns = (*(f"cos {pair}" for pair in pairs), *(f"sin {pair}" for pair in pairs))
        column_name, measure = "pair", "cosine or sine of the angle"
    else:
        bias = _bias(part, where)
        last = where.shape[1] - 1
        values = torch.cat([bias[:, -1], bias[:, 0, 1:]], -1)  # H distances: -last to last
        if part.spec.causal:
            values = values[:, : last + 1]
        columns = tuple(str(place - last) for place in range(values.shape[1]))
        names = tuple(map(str, range(len(values))))
        row_name, column_name, measure = "head", "key's position - query's", "added to the score"
    return PositionMap(_scheme(part), on_cpu(values).numpy(), names, columns, row_name, column_name, measure)


def position_similarity(m: AnyModel, length: int | None = None, stack: Which = "main") -> PositionMap:
    """Return how alike two positions are, [T, T].

    Of vectors it is their cosine; of rotary positions the mean over the pairs of the cosine of the angle
    between them; of biases, which know no vectors, the mean over the heads of what is added to the score.
    """
    part, where, names = _positions(m, length, stack)
    vectors, angles = part.positions.embed(where, torch.float32), _angles(part, where)
    if vectors is not None:
        unit = nnf.normalize(vectors[0].detach().double().cpu(), dim=-1)
        values, measure = unit @ unit.T, "cosine"
    elif angles is not None:
        cos, sin = (angle.double() for angle in angles)
        values = (cos @ cos.T + sin @ sin.T) / cos.shape[-1]
        values, measure = values / values[0, 0], "mean cosine of the angle between"
    else:
        values, measure = _bias(part, where).mean(0), "mean added to the score"
    numbers = on_cpu(values).numpy()
    return PositionMap(_scheme(part), numbers, names, names, "position", "position", measure)


def _positions(m: AnyModel, length: int | None, stack: Which) -> tuple[Stack, Tensor, tuple[str, ...]]:
    """Return a stack that has positions, their numbers [1, T] and their names."""
    model = as_model(m).model
    config, part = model.config, model.main
    if stack == "encoder":
        if model.encoder is None:
            raise InputError("stack encoder was asked for, and this model has none: leave it out")
        part = model.encoder
    if config.positions == "none":
        raise InputError("this model has no positions (positions none): there is nothing to draw")
    image = part.spec.input == "patches"
    most = config.n_patches + config.class_token if image else config.max_positions
    if length is None:
        length = most if image else min(most, LENGTH)
    table = image or config.positions == "learned"
    if length < 2 or (table and length > most):
        allowed = f"lie between 2 and {most}" if table else "be 2 or more"
        raise InputError(f"length {length} must {allowed}")
    names = patch_names(config)[:length] if image else tuple(map(str, range(length)))
    return part, torch.arange(length, device=device_of(model))[None], names


def _angles(part: Stack, where: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return cosine and sine of each pair's angle in the first layer that rotates: [T, R/2] twice."""
    first = next((layer for layer in range(part.spec.n_layers) if layer not in part.spec.rope_skips), 0)
    rotary = part.positions.rotary(where, part.spec.windows[first])
    if rotary is None:
        return None
    cos, sin = rotary.cos[0, 0].cpu(), rotary.sin[0, 0].cpu()  # T R
    half = cos.shape[-1] // 2
    own = slice(half) if part.positions.spec.rope_layout == "half" else slice(None, None, 2)
    return cos[:, own], sin[:, own]


def _bias(part: Stack, where: Tensor) -> Tensor:
    """Return what is added to the scores: [H, T, T]."""
    bias = part.positions.bias(where, where, torch.float32)
    assert bias is not None
    return bias[0].detach().cpu()


def _scheme(part: Stack) -> str:
    return part.positions.spec.positions
