"""Check the kernels of a decode step on a GPU against their formulas, and time each by how work is cut up.

PYTHONPATH=src python benchmarks/gpu_decode.py kernel-equality tiles
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.run.kernels.fixed_cache import HeadConfig
from clearhead.run.kernels.kernels import step_attend, step_linear

Rows = list[dict[str, object]]
BATCHES = (1, 32)
SHAPES = {
    "qkv": (2560, 2048),
    "out": (2048, 2048),
    "both": (11264, 2048),
    "down": (2048, 5632),
    "head": (32000, 2048),
}
HALF = {"device": "cuda", "dtype": torch.bfloat16}


def seconds_of(job: Callable[[], object]) -> float:
    """How long a job takes on the GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    job()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def noted(check: str, value: float, allowed: float) -> dict[str, object]:
    """One check, printed."""
    row = {"check": check, "value": value, "allowed": allowed, "passed": value <= allowed}
    print(json.dumps(row), flush=True)
    return row


def kernel_equality() -> Rows:
    """The kernels against their formulas in float64."""
    torch.manual_seed(0)
    found = []
    for dtype, allowed in ((torch.float32, 2e-5), (torch.bfloat16, 6e-2)):
        made = {"device": "cuda", "dtype": dtype}
        worst = 0.0
        for norm, gate, add in ((True, "silu", False), (True, None, False), (False, None, True)):
            x, weight = torch.randn(1, 1, 704, **made), torch.randn(512, 704, **made) / 704**0.5
            bias, scale = torch.randn(512, **made), torch.rand(704, **made) if norm else None
            added = torch.randn(1, 1, 256 if gate else 512, **made) if add else None
            exact = step_linear(*map(_double, (x, weight, bias, scale)), 1e-5, False, gate, _double(added))
            worst = max(
                worst,
                float((step_linear(x, weight, bias, scale, 1e-5, False, gate, added) - exact).abs().max()),
            )
        found.append(noted(f"linear kernel = formula, {dtype}", worst, allowed))
        worst = 0.0
        shapes = ((1, 4, None), (3, 4, 20.0), (32, 4, None), (3, 32, None))
        for (rows, heads, softcap), filled in itertools.product(shapes, (0, 1, 100, 511)):
            k, v = (torch.randn(rows, heads, 512, 64, **made) for _ in range(2))
            qkv = torch.randn(rows, 1, (32 + 2 * heads) * 64, **made)
            mask = (torch.rand(rows, 512, device="cuda") > 0.3) & (torch.arange(512, device="cuda") < filled)
            mask[:, filled] = True
            angles = torch.randn(rows, 1, 1, 64, device="cuda")
            form = HeadConfig(angles.cos(), angles.sin(), "half", 32, 0.125, softcap)
            more = (torch.tensor([filled], device="cuda"), mask, form)
            exact = step_attend(qkv.double(), k.double(), v.double(), *more)
            worst = max(worst, float((step_attend(qkv, k, v, *more) - exact).abs().max()))
        found.append(noted(f"attention kernel = formula, {dtype}", worst, allowed))
    return found


def _double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


@torch.inference_mode()
def tiles() -> Rows:
    """Each kernel at the sizes of the big model; beside it PyTorch's own."""
    found = [linear_tiles(name) for name in SHAPES]
    return found + [attend_tiles(rows, slots) for rows, slots in itertools.product(BATCHES, (512, 2048))]


def linear_tiles(name: str) -> dict[str, object]:
    """One linear layer of the model, on one row."""
    from clearhead.run.kernels.triton_step import Tile, linear

    n, d = SHAPES[name]
    weights = [torch.randn(n, d, **HALF) for _ in range(max(8, 400_000_000 // (n * d * 2)))]
    x = torch.randn(1, 1, d, **HALF)
    scale = torch.ones(d, **HALF) if name in ("qkv", "both", "head") else None
    added = torch.randn(1, 1, n, **HALF) if name in ("out", "down") else None
    by_tile = {}
    for cut in itertools.product((2, 4, 8), (1024, 2048), (4, 8)):
        run = functools.partial(
            linear,
            bias=None,
            scale=scale,
            eps=1e-5,
            unit_offset=False,
            gate="silu" if name == "both" else None,
        )
        try:
            by_tile[cut] = time_of(
                [functools.partial(run, x, weight, add=added, tile=Tile(*cut)) for weight in weights]
            )
        except Exception as error:
            print(f"{name} {cut}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    reference = time_of([functools.partial(nnf.linear, x, weight) for weight in weights])
    return _row(f"{name} {n}x{d}, 1 row", n * d * 2, by_tile, reference)


def attend_tiles(rows: int, slots: int) -> dict[str, object]:
    """Attention over a cache that is half full."""
    from clearhead.run.kernels.triton_attend import Tile, attend

    caches = [[torch.randn(rows, 4, slots, 64, **HALF) for _ in range(2)] for _ in range(22)]
    qkv, q = torch.randn(rows, 1, 40 * 64, **HALF), torch.randn(rows, 4, 8, 64, **HALF)
    slot, mask = (
        torch.tensor([slots // 2], device="cuda"),
        torch.arange(slots, device="cuda")[None] <= slots // 2,
    )
    angles = torch.randn(1, 1, 1, 64, device="cuda")
    more = (slot, mask, HeadConfig(angles.cos(), angles.sin(), "half", 32, 0.125, None))
    by_tile = {}
    for cut in itertools.product((32, 64), (1, 4, 8, 16), (2, 4)):
        if cut[0] * cut[1] <= slots:
            by_tile[cut] = time_of(
                [functools.partial(attend, qkv, *cache, *more, tile=Tile(*cut)) for cache in caches]
            )
    product = functools.partial(nnf.scaled_dot_product_attention, attn_mask=mask[:, None, None])
    reference = time_of([functools.partial(product, q, *cache) for cache in caches])
    return _row(
        f"attend {slots // 2} of {slots}, {rows} rows", rows * 4 * slots // 2 * 64 * 4, by_tile, reference
    )


def time_of(calls: list[Callable[[], object]]) -> float:
    """Microseconds a call, in a graph of them all; their weights together do not fit into the GPU's cache."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return min(seconds_of(graph.replay) for _ in range(5)) / len(calls) * 1e6


def _row(
    kernel: str, size: int, by_tile: dict[tuple[int, ...], float], reference: float
) -> dict[str, object]:
    best = sorted(by_tile.items(), key=lambda item: item[1])[:5]
    shown = "  ".join(f"{cut} {took:.1f}" for cut, took in best)
    print(
        f"{kernel:<26} pytorch {reference:5.1f} us | {shown} | {size / best[0][1] * 1e-3:,.0f} GB/s",
        flush=True,
    )
    return {"kernel": kernel, "pytorch_us": reference, "best_us": [[list(cut), took] for cut, took in best]}
