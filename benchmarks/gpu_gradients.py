"""Look for gradients of attention that are not finite on a GPU: by kernel, mask, length and size of scores.

    python benchmarks/gpu_gradients.py [--train TRAIN.en TRAIN.de] [--seconds 60] [--save]

All scores of a query are shifted together, which changes no output. With --train the recipe
original-transformer runs in bfloat16, as it is and with cuDNN's kernel let in; steps that are not finite are
skipped and counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead as ch
from clearhead.core import attention
from common import save

LENGTHS = (8, 40, 64, 72, 128, 192, 320)
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def masks(length: int) -> dict[str, tuple[Tensor | None, bool]]:
    """By name, a mask and whether the pass is causal."""
    padding = torch.ones(2, 1, length, length, dtype=torch.bool, device="cuda")
    padding[1, :, :, length // 2 :] = False
    causal = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    return {"none": (None, False), "causal": (None, True), "padding": (padding, False),
            "causal and padding": (causal & padding, False)}  # fmt: skip


def finite(call: Any, length: int, width: int, shift: float) -> bool:
    """Return whether output and gradients are finite where all scores are near `shift`."""
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, 4, length, width, device="cuda").bfloat16() * s for s in (0.1, 0.1, 1.0))
    q[..., 0], k[..., 0] = 1.0, shift * width**0.5
    given = [x.requires_grad_() for x in (q, k, v)]
    out = call(*given)
    out.backward(torch.ones_like(out))
    return all(bool(x.isfinite().all()) for x in (out, *(x.grad for x in given)))


def forced(backend: SDPBackend, mask: Tensor | None, causal: bool, *qkv: Tensor) -> Tensor:
    """Attend with one kernel of PyTorch."""
    with sdpa_kernel(backend):
        return nnf.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=causal)


def ours(mask: Tensor | None, causal: bool, *qkv: Tensor) -> Tensor:
    """Attend as every model of clearhead does."""
    return attention.fused(*qkv, mask, causal=causal)


def table() -> dict[str, list[str]]:
    """Of each way to attend, the cases that are not finite."""
    bad: dict[str, list[str]] = {name: [] for name in (*KERNELS, "clearhead")}
    for width in (32, 64, 128):
        for shift in (-120.0, 0.0, 120.0):
            for length in LENGTHS:
                for kind, (mask, causal) in masks(length).items():
                    ways = {name: partial(forced, kernel, mask, causal) for name, kernel in KERNELS.items()}
                    for name, call in {**ways, "clearhead": partial(ours, mask, causal)}.items():
                        try:
                            sound = finite(call, length, width, shift)
                        except RuntimeError:
                            continue  # this kernel does not take such a mask
                        if not sound:
                            bad[name].append(f"{length} keys, width {width}, {kind}, scores {shift:+.0f}")
    return bad


def train(files: list[str], seconds: float, cudnn: bool) -> dict[str, int]:
    """Train for some seconds; return the steps, and those that were skipped."""
    sound = attention.sound
    if cudnn:
        attention.sound = nullcontext
    end = time.monotonic() + seconds
    settings = {"tokens.vocab_size": 5000, "train.steps": 16000, "train.precision": "bfloat16",
                "train.validate_every": 4000}  # fmt: skip
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = ch.train(
                files, recipe="original-transformer", out=Path(folder) / "run", settings=settings,
                stop=lambda: time.monotonic() > end,
            )  # fmt: skip
    finally:
        attention.sound = sound
    return {"steps": done.step, "skipped": done.skipped}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", nargs=2)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found["not finite"] = table()
    for name, cases in found["not finite"].items():
        print(f"{name:10} {len(cases):3} not finite", *cases[:3], sep="; ")
    for cudnn in (False, True) if options.train else ():
        name = "training, cuDNN let in" if cudnn else "training"
        found[name] = train(options.train, options.seconds, cudnn)
        print(name, found[name])
    if options.save:
        save("h200_gradients", [found])


if __name__ == "__main__":
    main()
