"""Layers of few bits for the kernels of a GPU: the same numbers, laid out anew beside the model's own.

Shapes: N width out, D width in.
"""

import torch
from torch import Tensor, nn

from clearhead.run.kernels.codes import Codes, laid
from clearhead.run.kernels.kernels import available, step_linear
from clearhead.run.kernels.parts import Direct
from clearhead.run.quant.layers import QuantizedLinear, QuantizedTable


def can_join(*layers: nn.Module | None) -> bool:
    """Return True if these layers can be one: of one grid, and with inputs as they come."""
    few = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    alike = len({layer.grid for layer in few}) == 1 and not any(layer.smooth is not None for layer in few)
    return len(few) == len(layers) and alike


class FewBitsLinear(Direct):
    """A linear layer of few bits; of several, their outputs are concatenated.

    Up to `kernels.MOST_FEW` rows, codes become numbers in registers. For more, such as a prompt's, the weight
    is made first, and the library's product is used.
    """

    def __init__(self, *layers: QuantizedLinear) -> None:
        super().__init__()
        first, biased = layers[0], any(layer.bias is not None for layer in layers)
        self.codes = laid([layer.made for layer in layers])
        self.smooth = first.smooth
        self.bias = torch.cat([_bias_of(layer) for layer in layers]) if biased else None
        self.in_features, self.out_features = first.in_features, len(self.codes.words)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        return step_linear(x if self.smooth is None else (x * self.smooth).to(x.dtype), self.codes, self.bias)


def _bias_of(layer: QuantizedLinear) -> Tensor:
    if layer.bias is not None:
        return layer.bias.detach()
    return torch.zeros(layer.out_features, dtype=layer.place.dtype, device=layer.place.device)


def few_rows(weight: Codes, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return some rows of a weight of few bits: ids [n] -> [n, D]."""
    if torch.compiler.is_compiling() or not (weight.words.is_cuda or available(weight.scales)):
        offsets = None if weight.offsets is None else weight.offsets[ids]
        chosen = Codes(weight.bits, weight.columns, weight.words[ids], weight.scales[ids], offsets)
        return chosen.weight(dtype)
    from clearhead.run.kernels import triton_codes

    return triton_codes.spread(weight, dtype, ids)


class FewBitsTable(Direct):
    """A token table of few bits."""

    def __init__(self, table: QuantizedTable) -> None:
        super().__init__()
        self.codes, self.smooth, self.dtype = laid([table.made]), table.smooth, table.place.dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., D]."""
        rows = few_rows(self.codes, ids.flatten(), self.dtype)
        rows = rows if self.smooth is None else (rows * self.smooth).to(self.dtype)
        return rows.view(*ids.shape, self.codes.columns)
