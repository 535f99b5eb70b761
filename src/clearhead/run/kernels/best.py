"""The best tokens of rows of logits, with their log-probabilities, through `best.h`.

Shapes: R rows, V vocabulary, C candidates.
"""

import ctypes

import torch
from torch import Tensor

from clearhead.run.kernels.library import BEST, library


def best_tokens(logits: Tensor, kept: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Return the `count` best of `kept` [R, V], best first: log-probabilities and ids [R, C] each.

    `kept`: the logits [R, V], some of them removed. Where less than `count` are left, others follow with
    -inf. None where that is not compiled, or not for these tensors.
    """
    suits = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in (logits, kept))
    found = library() if suits else None
    if found is None:
        return None
    logits, kept = logits.contiguous(), kept.contiguous()
    rows, width = logits.shape
    values, ids = logits.new_empty(rows, count), torch.empty(rows, count, dtype=torch.long)
    sizes, places = (rows, width, count), (values.data_ptr(), ids.data_ptr())
    asked = BEST(logits.data_ptr(), kept.data_ptr(), *sizes, *places)
    found.clearhead_best(ctypes.addressof(asked), torch.get_num_threads())
    return values, ids
