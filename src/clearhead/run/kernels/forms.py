"""What kernels are told beside their tensors, and what they tell."""

from typing import NamedTuple

from torch import Tensor

NOTHING = -1  # in place of a token: the logits are not numbers


class HeadForm(NamedTuple):
    """How heads attend: rotation, scale, soft-cap, and the norm of each head's queries and keys.

    `cos` and `sin` are [B|1, 1, 1, R], for the first R columns of a head; `layout` says how they pair.
    `q_norm` and `k_norm` [E] scale an RMS norm, where there is one.
    """

    cos: Tensor | None
    sin: Tensor | None
    layout: str
    n_heads: int
    scale: float
    softcap: float | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    unit_offset: bool = False
