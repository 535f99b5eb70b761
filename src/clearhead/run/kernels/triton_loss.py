"""Cross-entropy over a large vocabulary, in Triton. Imported only where Triton is.

The scores are the largest tensor of training, and moving them takes the time. They are read once for the
loss, and read and written once for the gradient, which takes their place. Nothing of their size is kept in
float32.

Shapes: N positions, V vocabulary.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

LANE = 8  # neighbouring scores that a thread holds: 16 bytes, as bfloat16
MOST = 4096  # scores of a row that are held at once


@triton.jit
def _loss_kernel(
    scores,
    targets,
    losses,
    norms,
    V,
    stride,
    smoothing,
    SMOOTH: tl.constexpr,
    LANES: tl.constexpr,
    LANE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    span = tl.arange(0, LANES)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    top = tl.full([LANES], -1e30, tl.float32)  # each lane goes its own way until the end
    total = tl.zeros([LANES], tl.float32)
    plain = tl.zeros([LANES], tl.float32)
    for start in range(0, V, LANES * LANE):
        at = start + span
        x = tl.load(scores + at, mask=at < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
        if SMOOTH:
            plain += tl.sum(tl.where(at < V, x, 0.0), 1)
        top = higher
    highest = tl.max(top)
    norm = highest + tl.log(tl.sum(total * tl.exp(top - highest)))
    target = tl.load(targets + row)
    chosen = tl.load(scores + tl.maximum(target, 0)).to(tl.float32)
    wanted = (1 - smoothing) * chosen + smoothing / V * tl.sum(plain)
    tl.store(norms + row, norm)
    tl.store(losses + row, tl.where(target < 0, 0.0, norm - wanted))


@triton.jit
def _gradient_kernel(
    scores, targets, norms, upstream, V, stride, smoothing, LANES: tl.constexpr, LANE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    span = tl.arange(0, LANES)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    target, norm = tl.load(targets + row), tl.load(norms + row)
    factor = tl.where(target < 0, 0.0, tl.load(upstream))
    for start in range(0, V, LANES * LANE):
        at = start + span
        x = tl.load(scores + at, mask=at < V, other=0.0).to(tl.float32)
        slope = tl.exp(x - norm) - smoothing / V - tl.where(at == target, 1 - smoothing, 0.0)
        tl.store(scores + at, (slope * factor).to(scores.dtype.element_ty), mask=at < V)


class CrossEntropy(torch.autograd.Function):
    """The cross-entropy of scores [N, V], of 32 bits or fewer, with targets [N], summed in float32 -> [].

    A target below 0 is none: its row adds nothing, and has no gradient.
    The gradient is written over the scores: nobody may need them later, and there is one backward pass.
    """

    @staticmethod
    def forward(ctx, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """See the class."""
        N, V = scores.shape
        losses, norms = torch.empty(2, N, dtype=torch.float32, device=scores.device)
        if N:
            _loss_kernel[(N,)](
                scores, targets, losses, norms, V, scores.stride(0), smoothing, smoothing > 0, **_tile(V)
            )
        ctx.save_for_backward(scores, targets, norms)
        ctx.smoothing, ctx.spent = smoothing, False
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the scores, in their type and their place."""
        if ctx.spent:
            raise RuntimeError("the scores are spent: this loss has one backward pass")
        ctx.spent = True
        scores, targets, norms = ctx.saved_tensors
        N, V = scores.shape
        if N:
            _gradient_kernel[(N,)](
                scores, targets, norms, upstream, V, scores.stride(0), ctx.smoothing, **_tile(V)
            )
        return scores.detach(), None, None


def _tile(V: int) -> dict[str, int]:
    size = min(MOST, max(32 * LANE, triton.next_power_of_2(V)))
    return {"LANES": size // LANE, "LANE": LANE, "num_warps": max(1, size // 256)}
