"""How a model knows where a token stands, as a picture: one row per position or per head, and how alike two positions are.

    position_map(m, 64)                                  # vectors, angles or biases, as the model's scheme has them
    position_similarity(m, 64)                           # [T, T]

Shapes: T positions, D width of the vectors, R rotated columns of a head, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.bundle import Model
from clearhead.errors import InputError
from clearhead.model.stack import Stack
from clearhead.model.transformer import Transformer

Which = Literal["main", "encoder"]
Floats = NDArray[np.float32]
LENGTH = 64  # positions, where nobody says how many


@dataclass(frozen=True, eq=False)
class PositionMap:
    """A table of numbers with names for both sides."""

    scheme: str  # learned, sinusoidal, rope, alibi, relative
    values: Floats  # [rows, columns]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_name: str
    column_name: str
    measure: str  # what the numbers are

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "values": self.values.tolist()}


def position_map(m: Model | Transformer, length: int | None = None, stack: Which = "main") -> PositionMap:
    """What tells positions apart: their vectors [T, D]; with rotary positions the cosines, then the sines, of each pair's angle [T, R];
    with biases what is added to the scores by distance [H, distances].

    Args:
        m: what `load` gave, or a bare model.
        length: positions; None: as many as the model takes, 64 at most, or all patches of an image.
        stack: of a model with an encoder and a decoder, which.
    """
    part, where = _positions(m, length, stack)
    names = _names(part, where.shape[1])
    scheme = part.positions.spec.positions
    vectors = part.positions.embed(where, torch.float32)
    if vectors is not None:
        columns = _numbers(range(vectors.shape[-1]))
        return PositionMap(scheme, _array(vectors[0]), names, columns, "position", "dimension", "value")
    turns = _turns(part, where)
    if turns is not None:
        pairs = range(turns[0].shape[-1])
        columns = (*(f"cos {pair}" for pair in pairs), *(f"sin {pair}" for pair in pairs))
        return PositionMap(
            scheme,
            _array(torch.cat(turns, -1)),
            names,
            columns,
            "position",
            "pair",
            "cosine or sine of the angle",
        )
    bias = _bias(part, where)
    last = where.shape[1] - 1
    far = torch.cat(
        [bias[:, -1], bias[:, 0, 1:]], -1
    )  # H distances, from `last` before the query to `last` after it
    distances = range(-last, last + 1)
    if part.spec.causal:
        far, distances = far[:, : last + 1], range(-last, 1)
    heads = _numbers(range(far.shape[0]))
    return PositionMap(
        scheme,
        _array(far),
        heads,
        _numbers(distances),
        "head",
        "key's position - query's",
        "added to the score",
    )


def position_similarity(
    m: Model | Transformer, length: int | None = None, stack: Which = "main"
) -> PositionMap:
    """How alike two positions are, [T, T]: the cosine of their vectors; with rotary positions the mean over the pairs of the cosine
    of the angle between them; with biases, which know no vectors, the mean over the heads of what is added to the score.
    """
    part, where = _positions(m, length, stack)
    names = _names(part, where.shape[1])
    vectors, turns = part.positions.embed(where, torch.float32), _turns(part, where)
    if vectors is not None:
        unit = nnf.normalize(vectors[0].detach().double().cpu(), dim=-1)
        values, measure = unit @ unit.T, "cosine"
    elif turns is not None:
        values = (
            sum((turn.double() @ turn.double().T for turn in turns), torch.zeros(())) / turns[0].shape[-1]
        )
        values, measure = values / values[0, 0], "mean cosine of the angle between"
    else:
        values, measure = _bias(part, where).mean(0), "mean added to the score"
    return PositionMap(
        part.positions.spec.positions, _array(values), names, names, "position", "position", measure
    )


def _positions(m: Model | Transformer, length: int | None, stack: Which) -> tuple[Stack, Tensor]:
    """A stack that has positions, and their numbers [1, T]."""
    model = m.model if isinstance(m, Model) else m
    config = model.config
    if stack == "encoder" and model.encoder is None:
        raise InputError("stack encoder was asked for, and this model has none: leave it out")
    part = model.encoder if stack == "encoder" and model.encoder is not None else model.main
    if config.positions == "none":
        raise InputError("this model has no positions (positions none): there is nothing to draw")
    image = part.spec.input == "patches"
    most = config.n_patches + config.class_token if image else config.max_positions
    length = (most if image else min(most, LENGTH)) if length is None else length
    table = image or config.positions == "learned"
    if length < 2 or (table and length > most):
        raise InputError(
            f"length {length} must lie between 2 and {most}"
            if table
            else f"length {length} must be 2 or more"
        )
    return part, torch.arange(length, device=next(model.parameters()).device)[None]


def _turns(part: Stack, where: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine of each rotated pair's angle, of the first layer that rotates: [T, R/2] twice."""
    layers = [layer for layer in range(part.spec.n_layers) if layer not in part.spec.rope_skips] or [0]
    rotary = part.positions.rotary(where, part.spec.windows[layers[0]])
    if rotary is None:
        return None
    cos, sin = rotary.cos[0, 0].cpu(), rotary.sin[0, 0].cpu()  # T R
    half = cos.shape[-1] // 2
    if part.positions.spec.rope_layout == "half":
        return cos[:, :half], sin[:, :half]
    return cos[:, ::2], sin[:, ::2]


def _bias(part: Stack, where: Tensor) -> Tensor:
    """What is added to the scores: [H, T, T]."""
    bias = part.positions.bias(where, where, torch.float32)
    assert bias is not None
    return bias[0].detach().cpu()


def _names(part: Stack, length: int) -> tuple[str, ...]:
    """Positions as people call them; patches by row and column."""
    config = part.positions.spec
    if part.spec.input != "patches" or config.image_size is None:
        return _numbers(range(length))
    columns, first = config.image_size[1] // config.patch_size, int(config.class_token)
    return tuple(
        "[CLS]" if place < first else f"{(place - first) // columns},{(place - first) % columns}"
        for place in range(length)
    )


def _numbers(values: Sequence[int]) -> tuple[str, ...]:
    return tuple(map(str, values))


def _array(values: Tensor) -> Floats:
    made: Floats = values.detach().float().cpu().numpy()
    return made
