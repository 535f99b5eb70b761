"""What float8 products would bring to training the 124M GPT-2 shape, and where the time of its step goes.

    PYTHONPATH=src python benchmarks/gpu_float8.py

Prints the step in bfloat16 and with float8 products in the blocks (forward and both gradients, scales found
anew at each product), the kernels of the step in bfloat16, and each product alone in both types. It is an
experiment: clearhead trains in bfloat16, for the reasons in docs/decisions/speed-of-training.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import clearhead as ch
from clearhead.data.plan import DataPlan
from clearhead.fast.training import join_projections
from clearhead.losses import batch_loss
from clearhead.tasks.table import TASKS
from clearhead.training.machine import quick_attention
from gpu_train import BATCH, LENGTH, PLAIN, VOCAB, WIDTH, Drawn

VALUES, SLOPES = torch.float8_e4m3fn, torch.float8_e5m2
SHOWN, PROFILED = 18, 3  # kernels, steps


def narrowed(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x in float8, scaled so that its largest value is the largest of the type, and the scale []."""
    top = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=1e-12) / top
    return (x.float() / scale).clamp(-top, top).to(dtype), scale


class Float8Product(torch.autograd.Function):
    """x [M, K] by weight [N, K] transposed, in float8: -> [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (x8, x_scale), (w8, w_scale) = narrowed(x, VALUES), narrowed(weight, VALUES)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        return torch._scaled_mm(x8, w8.t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = narrowed(upstream, SLOPES)
        # The second factor must lie column after column.
        across = w8.t().contiguous().t(), x8.t().contiguous().t()
        return (
            torch._scaled_mm(g8, across[0], g_scale, w_scale, out_dtype=torch.bfloat16),
            torch._scaled_mm(g8.t().contiguous(), across[1], g_scale, x_scale, out_dtype=torch.float32),
        )


class Float8Linear(nn.Linear):
    """A linear layer with float8 products."""

    def forward(self, x: Tensor) -> Tensor:
        y = Float8Product.apply(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def in_float8(model: nn.Module) -> None:
    """Replace the linear layers of the blocks."""
    for name, part in list(model.named_modules()):
        if type(part) is nn.Linear and ".blocks." in f".{name}":
            made = Float8Linear(part.in_features, part.out_features, part.bias is not None, device="meta")
            made.weight, made.bias = part.weight, part.bias
            model.set_submodule(name, made)


def stepper(change: Callable[[nn.Module], None]) -> Callable[[], None]:
    """Return one step of training, compiled and warm."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ch.Transformer(PLAIN).cuda().train()
    change(model)
    model.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    attention = quick_attention(TASKS["lm"], DataPlan(), torch.device("cuda"))
    batch = Drawn().at(0).to("cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16), attention():
            loss, count = batch_loss(model, batch)
        (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(10):
        step()
    return step


def milliseconds(run: Callable[[], object], count: int = 20) -> float:
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def main() -> None:
    plain = stepper(join_projections)
    print(f"bfloat16: {milliseconds(plain):.2f} ms a step", flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            plain()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    print(f"its kernels: {sum(row.self_device_time_total for row in rows) / PROFILED / 1e3:.2f} ms")
    for row in rows[:SHOWN]:
        per_step = row.self_device_time_total / PROFILED / 1e3
        print(f"{per_step:7.2f} ms {row.count // PROFILED:4d} x {row.key[:80]}", flush=True)
    print(f"float8 in the blocks: {milliseconds(stepper(in_float8)):.2f} ms a step", flush=True)
    one = torch.ones((), device="cuda")
    for inner, outer in (
        *((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH)),
        *((4 * WIDTH, WIDTH), (WIDTH, VOCAB)),
    ):
        a, b = (
            torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16) for rows in (BATCH * LENGTH, outer)
        )
        a8, b8 = a.to(VALUES), b.to(VALUES)
        wide = milliseconds(lambda a=a, b=b: a @ b.t())
        narrow = milliseconds(
            lambda a=a8, b=b8: torch._scaled_mm(
                a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )
        print(
            f"{BATCH * LENGTH} x {inner} x {outer}: bfloat16 {wide:.3f} ms, float8 {narrow:.3f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
