"""The kernel of the loss, where it can run: on a GPU, or with TRITON_INTERPRET=1 and Triton installed."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as nnf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
pytestmark = pytest.mark.skipif(not RUNS, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab_size", [300, 4096, 9001])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)]
)
def test_loss_and_gradient_equal_those_in_float64(dtype, tolerance, vocab_size, smoothing):
    from clearhead.run.kernels.triton_loss import CrossEntropy

    torch.manual_seed(0)
    scores = (3 * torch.randn(7, vocab_size, device=DEVICE)).to(dtype).requires_grad_()
    targets = torch.randint(vocab_size, (7,), device=DEVICE)
    exact = scores.detach().double().requires_grad_()
    loss = CrossEntropy.apply(1 * scores, targets, smoothing)  # which it may write over
    wanted = nnf.cross_entropy(exact, targets, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    (loss / 3).backward(retain_graph=True)
    (wanted / 3).backward()
    # They differ by the rounding of the type.
    assert (scores.grad - exact.grad).abs().max() <= tolerance * exact.grad.abs().max()
    with pytest.raises(RuntimeError, match="spent"):
        torch.autograd.grad(loss, scores)
