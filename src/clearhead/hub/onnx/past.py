"""The cache of a graph: keys and values of earlier tokens come in as tensors and go out as tensors.

Shapes: B batch, K key/value heads, P earlier tokens, T new tokens, E head width.
"""

import torch
from torch import Tensor

from clearhead.core.cache import Cache, LayerKeys
from clearhead.core.config.kinds import Kind
from clearhead.core.masks import Tokens, join


class PastKeys(LayerKeys):
    """Keys of one layer, to which new ones are appended without writing into them."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return earlier and new keys and values: [B, K, P + T, E] each."""
        before_k, before_v = self.read()
        self.k, self.v = torch.cat([before_k, k], dim=2), torch.cat([before_v, v], dim=2)
        return self.k, self.v


class PastCache(Cache):
    """The cache of one call of a graph."""

    def __init__(self, past: list[tuple[Tensor, Tensor]], real: Tensor) -> None:
        """Begin with the keys and values of each layer; `real` [B, P] is False for padding."""
        super().__init__()
        self.length = real.shape[1]
        self._past = _tokens(real)
        # The count of earlier tokens is their largest: an empty slot before them counts where there are none.
        self.tokens = _tokens(torch.cat([real.new_zeros(real.shape[0], 1), real], dim=1))
        self.layers = {number: PastKeys(k, v) for number, (k, v) in enumerate(past)}

    def layer(self, index: int, kind: Kind) -> LayerKeys:
        """Return the self-attention keys of one layer."""
        return self.layers[index]

    def begin(self, tokens: Tokens) -> None:
        """Prepare for new tokens, before the first layer."""
        self._visible = join(self._past, tokens)

    def advance(self) -> None:
        """Leave all as it is: this cache lasts one call."""


def _tokens(real: Tensor) -> Tokens:
    order = (real.cumsum(1) - 1).clamp(min=0)
    return Tokens(order, order, real, None, plain=False)
