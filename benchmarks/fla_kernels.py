"""Linear attention and the gated delta rule beside the Triton kernels of flash-linear-attention, on a GPU.

    pip install --no-deps --target build/ref fla-core einops
    PYTHONPATH=src:build/ref python benchmarks/fla_kernels.py [--lengths 4096 65536] [--kinds gated-delta]
        [--tries 4] [--out PATH]

8 heads of 64, one row, bfloat16, forward and backward from queries, keys and values to their gradients; both
sides take turns. Differences are those of answers and gradients from ours in float64 at the shortest length,
divided by the largest of these. The share of the roofline is that of `benchmarks/kinds.py` for the products
alone, at the rate of a large product in float32, which is what ours are made of. Its kernels try many shapes
of blocks at their first call, for minutes; `--tries` leaves each so many of them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.variants.gated_delta import gated_delta
from clearhead.variants.linear import FEATURES, attend_linear
from common import alternate, device_name
from kinds import rates

HEADS, WIDTH, CHUNK = 8, 64, 64
Job = Callable[..., Tensor]


def linear_here(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend_linear(FEATURES["elu"](q).values, FEATURES["elu"](k).values, v, causal=True)[0]


def linear_there(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fla.ops.linear_attn import chunk_linear_attn

    fq, fk = (FEATURES["elu"](x).values.to(x.dtype).transpose(1, 2) for x in (q, k))
    return chunk_linear_attn(fq, fk, v.transpose(1, 2), scale=1.0, normalize=True)[0].transpose(1, 2)


def delta_here(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return gated_delta(nnf.normalize(q, dim=-1), nnf.normalize(k, dim=-1), v, g, beta)[0]


def delta_there(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    given = (nnf.normalize(q, dim=-1), nnf.normalize(k, dim=-1), v, g, beta)
    return chunk_gated_delta_rule(*(x.transpose(1, 2) for x in given))[0].transpose(1, 2)


# Ours, theirs, and the products of a chunk and a head, forward, in multiples of CHUNK · WIDTH².
CASES: dict[str, tuple[Job, Job, int]] = {
    "linear(elu)": (linear_here, linear_there, 4),
    "gated-delta": (delta_here, delta_there, 8),
}


def inputs_of(name: str, length: int) -> list[Tensor]:
    """q, k, v, and for the gated delta rule the log of the decay and the strength, in float64."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, length, WIDTH, dtype=torch.float64, device="cuda")
    if name != "gated-delta":
        return [q, k, v]
    g, beta = torch.rand(2, 1, HEADS, length, dtype=torch.float64, device="cuda")
    return [q, k, v, -0.2 * g, beta]


def passed(job: Job, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The answer and the gradients of the inputs; the decay stays float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    given = [x.to(wide if place == 3 else dtype).requires_grad_() for place, x in enumerate(inputs)]
    out = job(*given)
    return [out, *torch.autograd.grad(out, given, torch.ones_like(out))]


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest difference as a share of the largest value, over answer and gradients."""
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, exact))


def compare(name: str, length: int, exact: bool, best: dict[str, float]) -> dict[str, object]:
    here, there, products = CASES[name]
    inputs, row = inputs_of(name, length), {"kind": name, "length": length}
    start = time.perf_counter()
    passed(there, inputs, torch.bfloat16)
    torch.cuda.synchronize()
    row["seconds_to_compile_fla"] = round(time.perf_counter() - start, 1)
    if exact:
        right = passed(here, inputs, torch.float64)
        row["difference"] = {
            "clearhead, float32": distance(passed(here, inputs, torch.float32), right),
            "clearhead": distance(passed(here, inputs, torch.bfloat16), right),
            "fla": distance(passed(there, inputs, torch.bfloat16), right),
        }
        del right
    jobs = {"clearhead": lambda: passed(here, inputs, torch.bfloat16)}
    jobs["fla"] = lambda: passed(there, inputs, torch.bfloat16)
    seconds = alternate(jobs, 5)
    flops = 3 * 2 * products * CHUNK * WIDTH**2 * HEADS * math.ceil(length / CHUNK)
    row["ms"] = {one: round(1e3 * took, 3) for one, took in seconds.items()}
    row["fla_is_quicker_by"] = round(seconds["clearhead"] / seconds["fla"], 2)
    row["share_of_roofline"] = {one: round(flops / best["flops"] / took, 4) for one, took in seconds.items()}
    print(json.dumps(row), flush=True)
    return row


def fewer_tries(most: int) -> None:
    """Let Triton's tuner try the first `most` shapes of a kernel; call it before those are defined."""
    import triton

    tuned = triton.autotune
    triton.autotune = lambda configs, *rest, **named: tuned(configs[:most], *rest, **named)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 65536])
    parser.add_argument("--kinds", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--tries", type=int, help="shapes of blocks that a kernel of fla tries; default: all")
    parser.add_argument("--out", type=Path, help="a file for the figures, JSON")
    options = parser.parse_args()
    if options.tries is not None:
        fewer_tries(options.tries)
    best, rows = rates("cuda"), []
    for name in options.kinds:
        for length in options.lengths:
            rows.append(compare(name, length, length == min(options.lengths), best))
            if options.out is not None:
                body = {"device": device_name(), "torch": torch.__version__, "rates": best, "rows": rows}
                options.out.write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    main()
