"""Gathered blocks beside `flex_attention` on a GPU: the same mask, forward and backward, equality and time.

    python benchmarks/flex.py [--lengths 4096 16384 65536] [--limit 90] [--out PATH] [--device cuda]

8 heads of 64, one row, bfloat16, for each kind: the plan of each attends, from queries, keys and
values to their gradients. Differences are those of answers and gradients from gathered blocks in float32,
divided by the largest of these, beside what gathered blocks in bfloat16 differ by themselves. Milliseconds
are medians of several rounds, the two in turn; the plan of a pass, which all layers share, is timed apart. A
padded row of the shortest length is compared too, since its padding sees nothing. Compiling is counted by
itself: with lengths left open it should happen once for each kind. `--limit` seconds stop the series before
the next case. `--device cpu` compares forward passes alone, in float32 and uncompiled.

`attending(model, "flex")` chooses it in a model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.core import masks
from clearhead.core.config.kinds import Kind, read_kind
from clearhead.variants import block_attention
from clearhead.variants.block_attention import BlockPlan
from clearhead.variants.blocks import plan_blocks
from common import device_name

KINDS = ("window(256)", "blocks(64, 3, 64, 0, 3)", "dilated(64, 4)")
HEADS, WIDTH = 8, 64


def tokens_of(kind: Kind, length: int, device: str, padded: bool) -> masks.Tokens:
    """The tokens of a row; `padded`: its first quarter is padding."""
    mask = torch.arange(length, device=device)[None] >= length // 4 if padded else None
    tokens = masks.tokens_from(1, length, torch.device(device), mask)
    return kind.describe(tokens, True, tokens.order, None)


def plan_of(kind: Kind, tokens: masks.Tokens, flexible: bool) -> BlockPlan | None:
    return plan_blocks(tokens, tokens, kind, True, lambda queries, keys: None, flexible)


def run(inputs: list[Tensor], plan: BlockPlan, weights: Tensor, backward: bool) -> list[Tensor]:
    """The answer, and the gradients of q, k and v."""
    z = plan.attend(*inputs)
    return [z, *(torch.autograd.grad(z, inputs, weights) if backward else ())]


def distance(found: list[Tensor], exact: list[Tensor], rows: Tensor) -> float:
    """The largest difference of real rows, as a share of the largest value; nan where anything is nan."""
    shares = [
        (one[:, :, rows].float() - other[:, :, rows]).abs().max() / other[:, :, rows].abs().max()
        for one, other in zip(found, exact)
    ]
    whole = all(bool(one.isfinite().all()) for one in found)  # padding too: its gradients reach weights
    return float(torch.stack(shares).max()) if whole else float("nan")


def milliseconds(jobs: dict[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    """Median milliseconds of each job, in turn."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def compare(text: str, length: int, device: str, padded: bool) -> dict[str, Any]:
    """Compare both ways on one row."""
    kind, backward = read_kind(text), device == "cuda"
    row: dict[str, Any] = {"kind": text, "length": length, "padded": padded}
    tokens = tokens_of(kind, length, device, padded)
    plans = {"gathered": plan_of(kind, tokens, False), "flex": plan_of(kind, tokens, True)}
    missing = [name for name, plan in plans.items() if plan is None]
    if missing:
        return {**row, "note": f"a dense mask is as good for {' and '.join(missing)}"}
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, HEADS, length, WIDTH)
    exact = [torch.randn(shape, generator=generator, device=device).requires_grad_(backward) for _ in "qkv"]
    weights = torch.randn(shape, generator=generator, device=device)
    rows = tokens.real_mask()[0]
    weights[:, :, ~rows] = 0.0  # no loss is taken of padding
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    half, slope = [x.detach().to(dtype).requires_grad_(backward) for x in exact], weights.to(dtype)
    rounded = [x.detach().float().requires_grad_(backward) for x in half]
    wanted = run(rounded, plans["gathered"], slope.float(), backward)
    found: dict[str, list[Tensor]] = {}
    for name, plan in plans.items():
        start = time.perf_counter()
        found[name] = run(half, plan, slope, backward)
        if device == "cuda":
            torch.cuda.synchronize()
        row[f"first_seconds_{name}"] = round(time.perf_counter() - start, 2)  # with compiling
    row["difference"] = {name: distance(one, wanted, rows) for name, one in found.items()}
    del found, wanted
    peak = {}
    for name, plan in plans.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            run(half, plan, slope, backward)
            peak[name] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    rounds = 5 if device == "cuda" else 1
    # Forward passes keep what a backward pass needs, so that no second kernel is compiled for them.
    timed = {name: lambda plan=plan: run(half, plan, slope, False) for name, plan in plans.items()}
    row |= {"peak_mib": peak, "ms_forward": milliseconds(timed, device, rounds)}
    if backward:
        both = {name: lambda plan=plan: run(half, plan, slope, True) for name, plan in plans.items()}
        row["ms_both"] = milliseconds(both, device, rounds)
    planning = {
        name: lambda flexible=flexible: plan_of(kind, tokens, flexible)
        for name, flexible in (("gathered", False), ("flex", True))
    }
    row["ms_plan"] = milliseconds(planning, device, rounds)
    return row


def attempted(kind: str, length: int, device: str, padded: bool) -> dict[str, Any]:
    """The same; where it fails with lengths left open, once more for this length, and from then on so."""
    try:
        return {**compare(kind, length, device, padded), "dynamic": block_attention.DYNAMIC}
    except Exception as error:  # one kind that fails must not hide the others
        traceback.print_exc()
        if block_attention.DYNAMIC:
            block_attention.DYNAMIC = False
            block_attention.compiled.cache_clear()
            return attempted(kind, length, device, padded)
        said = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        return {"kind": kind, "length": length, "padded": padded, "error": said}


def shown(row: dict[str, Any]) -> str:
    """A line of the table."""
    head = f"{row['kind']:<26}{row['length']:>7}{' padded' if row['padded'] else '':<8}"
    if "difference" not in row:
        return head + str(row.get("note") or row.get("error"))
    both = row.get("ms_both", row["ms_forward"])
    return head + "".join(
        f"{value:>12}"
        for value in (
            *(f"{row['difference'][name]:.1e}" for name in ("gathered", "flex")),
            *(row["ms_forward"][name] for name in ("gathered", "flex")),
            *(both[name] for name in ("gathered", "flex")),
            *(row["ms_plan"][name] for name in ("gathered", "flex")),
            f"{both['gathered'] / both['flex']:.2f} x",
            row["first_seconds_flex"],
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which no case begins")
    parser.add_argument("--out", type=Path, help="a file for the figures, JSON")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    began, rows = time.perf_counter(), []
    names = (
        "differ: gather",
        "flex",
        "ms fwd: gather",
        "flex",
        "both: gather",
        "flex",
        "plan: gather",
        "flex",
    )
    print(f"[{device_name()}, torch {torch.__version__}]\n{'':41}" + " | ".join(names), flush=True)
    # Each kind at one length first, so that a limit leaves none out.
    cases = [(kind, length, False) for length in options.lengths for kind in options.kinds]
    cases[len(options.kinds) : len(options.kinds)] = [(options.kinds[0], options.lengths[0], True)]
    for kind, length, padded in cases:
        if time.perf_counter() - began > options.limit:
            rows.append({"kind": kind, "length": length, "padded": padded, "note": "left out: time is up"})
        else:
            rows.append(attempted(kind, length, options.device, padded))
        print(shown(rows[-1]), flush=True)
        body = {"device": device_name(), "torch": torch.__version__, "heads": HEADS, "d_head": WIDTH}
        stats = dict(torch._dynamo.utils.counters["stats"]) if "_dynamo" in dir(torch) else {}
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**body, "dynamo": stats, "rows": rows}, indent=2)
            options.out.write_text(text + "\n")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
