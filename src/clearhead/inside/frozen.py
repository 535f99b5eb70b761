"""Norms and heads as the linear maps they are at one state: the way back from a logit to the residual stream.

A norm divides by a size that it measures. With that size held at its actual value the norm is linear, and a
logit is a sum over everything that was added to the stream. A direction g stands for the number <g, x>;
`back` takes a direction behind a norm to the one before it, and `shift` is what the norm's own bias adds.

Shapes: R rows (tokens) that are read, T tokens, D model, V vocabulary, C classes. All in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.dtypes import precise
from clearhead.core.heads import ClassifierHead, Head, LanguageHead, PooledHead, TokenHead
from clearhead.core.norms import LayerNorm, RMSNorm
from clearhead.errors import refuse


@dataclass(frozen=True)
class FrozenNorm:
    """A norm whose size is held at its actual value; without a norm, the identity."""

    scale: Tensor | float = 1.0  # [D]
    size: Tensor | float = 1.0  # [R, 1] the standard deviation, or the root mean square, that it divides by
    bias: Tensor | float = 0.0  # [D]
    centred: bool = False  # is the mean subtracted?

    def forward(self, x: Tensor) -> Tensor:
        """Return what the norm gives: [R, D] -> [R, D]."""
        return (x - x.mean(-1, keepdim=True) if self.centred else x) / self.size * self.scale + self.bias

    def back(self, direction: Tensor) -> Tensor:
        """Return the direction before the norm from the one behind it: [R, D] -> [R, D]."""
        before = direction * self.scale / self.size
        return before - before.mean(-1, keepdim=True) if self.centred else before

    def shift(self, direction: Tensor) -> float:
        """Return what the bias adds: [R, D] -> a number."""
        return float((direction * self.bias).sum())


def freeze(norm: nn.Module | None, x: Tensor) -> FrozenNorm:
    """Return a norm as it is at its actual input [R, D]."""
    if norm is None:
        return FrozenNorm()
    assert isinstance(norm, LayerNorm | RMSNorm)
    centred = isinstance(norm, LayerNorm)
    spread = x - x.mean(-1, keepdim=True) if centred else x
    size = (spread.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    scale = exact(norm.weight) + float(norm.unit_offset)
    return FrozenNorm(scale, size, 0.0 if bias is None else exact(bias), centred)


@dataclass(frozen=True)
class LinearReadout:
    """A number that a head says, as a sum: <directions, hidden states at `rows`> + transform + bias."""

    rows: Tensor  # [R] which tokens are read
    directions: Tensor  # [R, D]
    # What a dense layer before the output adds: biases, and what its tangent leaves over.
    transform: float = 0.0
    bias: float = 0.0  # of the output layer


def read_back(head: Head, hidden: Tensor, column: int, choice: int, against: int | None) -> LinearReadout:
    """Return how a score, or the difference of two, depends on the hidden states [T, D]; before a soft cap.

    `column` and the choices are as in `choices`. An activation on the way is replaced by its tangent at the
    actual state; what that leaves over is in `transform`.
    """
    assert isinstance(head, ClassifierHead | TokenHead | LanguageHead)
    _check_straight(head)
    direction, bias = _difference(head.out, choice, against)
    if isinstance(head, ClassifierHead):
        return _from_pool(head, hidden, direction, bias)
    transform = 0.0
    if isinstance(head, TokenHead):
        direction, transform = _through_pooler(head, hidden[column], direction)
    elif isinstance(head, LanguageHead):
        direction, transform = _through_transform(head, hidden[column], direction * head.scale)
    return LinearReadout(torch.tensor([column]), direction[None], transform, bias)


def read_span(head: Head, column: int, place: int, against: int | None) -> LinearReadout:
    """Return the same for a span, where a choice is a token: its score, perhaps less another token's."""
    assert isinstance(head, TokenHead)
    _check_straight(head)
    refuse(
        head.pooler is not None,
        "a pooler bends the states of a span before they are scored: ask about a model without it",
    )
    direction, bias = _difference(head.out, column, None)
    if against is None:
        return LinearReadout(torch.tensor([place]), direction[None], bias=bias)
    return LinearReadout(torch.tensor([place, against]), torch.stack([direction, -direction]))


def _check_straight(head: Head) -> None:
    refuse(
        isinstance(head, TokenHead) and head.up is not None,
        "head_layer stands between the states and their scores, which are no sum of parts: "
        "ask about a model without it",
    )


def exact(x: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU, without gradients."""
    return precise(x.detach()).cpu()


def through_linear(layer: nn.Linear, direction: Tensor) -> tuple[Tensor, float]:
    """Return the direction before a linear layer, and what its bias adds: [..., D]."""
    return direction @ exact(layer.weight), bias_term(layer.bias, direction)


def bias_term(bias: Tensor | None, direction: Tensor) -> float:
    """Return what the bias of a linear layer adds along a direction [..., D]."""
    return 0.0 if bias is None else float((direction @ exact(bias)).sum())


def _difference(out: nn.Linear, choice: int, against: int | None) -> tuple[Tensor, float]:
    """Return one row of an output layer, perhaps less another, and the same of its bias: [D] and a number."""
    numbers = [choice] if against is None else [choice, against]
    weight = exact(out.weight[numbers])
    sign = weight.new_tensor([1.0, -1.0][: len(numbers)])
    return sign @ weight, 0.0 if out.bias is None else float(sign @ exact(out.bias[numbers]))


def _through_transform(head: LanguageHead, state: Tensor, direction: Tensor) -> tuple[Tensor, float]:
    """Return the direction before the head's dense layer, and what stays behind: hidden state [D]."""
    if head.transform is None:
        return direction, 0.0
    shift = left = 0.0
    if head.activation is not None and head.norm is not None:
        dense = _linear(head.transform, state)
        norm = freeze(head.norm, head.activation(dense))
        shift = norm.shift(direction)
        direction, left = _tangent(head.activation, dense, norm.back(direction))
    direction, bias = through_linear(head.transform, direction)
    return direction, shift + left + bias


def _from_pool(head: ClassifierHead, hidden: Tensor, direction: Tensor, bias: float) -> LinearReadout:
    """Return directions at the tokens that are pooled: hidden states [T, D]."""
    tokens = hidden.shape[0]
    rows = {"cls": [0], "last": [tokens - 1]}.get(head.pooling or "mean", list(range(tokens)))
    direction, transform = _through_pooler(head, hidden[rows].mean(0), direction)
    return LinearReadout(torch.tensor(rows), direction.expand(len(rows), -1) / len(rows), transform, bias)


def _through_pooler(head: PooledHead, state: Tensor, direction: Tensor) -> tuple[Tensor, float]:
    """Return the direction before the head's dense layer, and what stays behind: a state [D]."""
    if head.pooler is None:
        return direction, 0.0
    dense, shift = _linear(head.pooler, state), 0.0
    if head.pooler_norm is not None:
        norm = freeze(head.pooler_norm, head.bend(dense))
        shift, direction = norm.shift(direction), norm.back(direction)
    direction, left = _tangent(head.bend, dense, direction)
    direction, inner = through_linear(head.pooler, direction)
    return direction, shift + left + inner


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return nnf.linear(x, exact(layer.weight), None if layer.bias is None else exact(layer.bias))


def _tangent(bend: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> tuple[Tensor, float]:
    """Return the direction before an activation, taken as its tangent at x, and what that leaves over."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        y = bend(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
    return direction * slope, float(direction @ (y - slope * x).detach())
