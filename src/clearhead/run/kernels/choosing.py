"""The most probable token of each row, on the device.

Shapes: B rows, S slots, V vocabulary.
"""

import torch
from torch import Tensor

from clearhead.run.kernels.forms import NOTHING
from clearhead.run.kernels.kernels import available


def choose(logits: Tensor, index: Tensor, made: Tensor, ids: Tensor, kept: Tensor) -> None:
    """Keep the most probable token of each row: logits [B, V] -> `made` [B, S] at `index` [1], `ids` [B, 1].

    `made` has -1 where a logit is not a number. The logits are kept too, in `kept` [B, V].
    """
    if not torch.compiler.is_compiling() and available(logits):
        from clearhead.run.kernels import triton_marks

        return triton_marks.choose(logits, index, made, ids, kept)
    chosen = logits.argmax(-1, keepdim=True)
    best = logits.gather(1, chosen)  # not a number where any logit is not
    kept.copy_(logits)
    made.index_copy_(1, index, torch.where(best.isnan(), NOTHING, chosen))
    ids.copy_(chosen)
