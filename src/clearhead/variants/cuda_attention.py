"""PyTorch's fused attention on a GPU, where its choice of cuDNN must not always be trusted.

Shapes: B batch, T query length, S key length, H heads, K key/value heads, E head width.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SOUND = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as PyTorch does: q [B,H,T,E], k [B,K,S,E], v [B,K,S,Ev]; a causal pass has no mask."""
    H, K = q.shape[1], k.shape[1]
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    doubtful = learning and not causal
    if mask is not None and K < H and (doubtful or not _may_use_cudnn()):
        k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))  # else a slow kernel takes it
    with sound() if doubtful else nullcontext():
        out = nnf.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=causal, scale=scale, enable_gqa=k.shape[1] < H
        )
    if mask is not None and mask.dtype == torch.bool:
        # For a query that may attend to nothing, one of the kernels returns a mean, not zeros.
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return out


def sound() -> AbstractContextManager[object]:
    """Return a context in which attention has gradients that can be trusted: any kernel but cuDNN's.

    Its gradient of the queries is NaN under a mask where the keys fill half of their last tile of 128, and
    all scores of a query are below about -89: the rest of the tile is scored 0, and exp(0 + 89) overflows.
    A query that sees one key comes to such scores first. (pytorch/pytorch#196678.)
    """
    return sdpa_kernel(SOUND) if torch.compiler.is_compiling() else without_cudnn()


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Do without cuDNN's attention for the length of a `with` block."""
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _may_use_cudnn() -> bool:
    """Return True if cuDNN's attention may be chosen; compiled code takes what was chosen outside of it."""
    if torch.compiler.is_compiling():
        return True
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
