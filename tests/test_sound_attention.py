"""Which kernel of attention may be chosen where a gradient is asked for: cuDNN's only where it is sound."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as nnf

from clearhead.core import attention

PLAIN = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()


class OnGpu(torch.Tensor):
    """A tensor on a CPU that says it is on a GPU."""

    is_cuda = True


def asked(gradient: bool, kv_heads: int = 4, length: int = 8) -> list[torch.Tensor]:
    shapes = ((2, 4, length, 16), (2, kv_heads, 8, 16), (2, kv_heads, 8, 16))
    return [torch.randn(shape).as_subclass(OnGpu).requires_grad_(gradient) for shape in shapes]


@pytest.fixture
def chosen(monkeypatch) -> list[bool]:
    """Whether cuDNN's kernel might be taken, for each call of PyTorch's attention."""
    found, right = [], nnf.scaled_dot_product_attention

    def watched(*given, **named):
        found.append(torch.backends.cuda.cudnn_sdp_enabled())
        return right(*given, **named)

    monkeypatch.setattr(attention.nnf, "scaled_dot_product_attention", watched)
    return found


@pytest.mark.parametrize(
    ("how", "length", "sound"),
    [
        ({"causal": True}, 8, True),
        ({"mask": PLAIN}, 8, False),
        ({}, 8, False),
        ({"bias": torch.zeros(1, 4, 8, 8), "causal": True}, 8, False),
        ({"mask": PLAIN[:, :, -1:]}, 1, False),
    ],
    ids=["causal", "masked", "all seen", "biased", "one query"],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_gradient_is_taken_by_cudnn_only_without_a_mask(chosen, how, length, sound, kv_heads):
    assert torch.backends.cuda.cudnn_sdp_enabled()
    for gradient in (True, False):
        q, k, v = asked(gradient, kv_heads, length)
        out = attention.fused(q, k, v, **how)
        wanted = attention.eager(*(x.as_subclass(torch.Tensor) for x in (q, k, v)), **how)
        torch.testing.assert_close(out.as_subclass(torch.Tensor), wanted, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        attention.fused(*asked(True, kv_heads, length), **how)
    assert chosen == [sound, True, True]  # to read and write text, any kernel will do
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_choice_of_the_caller_is_kept():
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with attention.sound():
            pass
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_a_compiler_takes_it_whole():
    def product(q: torch.Tensor) -> torch.Tensor:
        with attention.sound():
            return nnf.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 8, 4)
    made = torch.compile(product, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(made, nnf.scaled_dot_product_attention(q, q, q))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN's attention is of GPUs")
@pytest.mark.parametrize("length", [1, 8, 64, 72, 128, 192, 320])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_on_a_gpu_gradients_of_very_low_scores_are_those_of_the_formula(length, width):
    """All scores of a row near -120, where exp of the sum overflows unless it is taken with care."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, width, device="cuda").bfloat16() for _ in range(3))
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(width)
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]
    found = []
    for attending, dtype in ((attention.fused, torch.bfloat16), (attention.eager, torch.float64)):
        given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        attending(*given, mask).sum().backward()
        found.append([x.grad.double() for x in given])
    for ours, theirs in zip(*found, strict=True):
        assert ours.isfinite().all()
        assert (ours - theirs).abs().max() <= 0.05 * theirs.abs().max() + 0.05
