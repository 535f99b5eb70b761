"""Time the products of a decode step on a GPU, by how they are cut up: bfloat16, int8 and int4, 1 to 64 rows.

    PYTHONPATH=src python benchmarks/gpu_products.py [--rows 1 8 32] [--bits 16 8 4] [--save]

The layers are those of a Llama with 1.1 billion parameters, with norm, gate and residual in the same kernel.
Each is timed in a graph of calls whose weights together do not fit into the GPU's cache. Beside it stands the
library's product alone, in bfloat16. Kernels are compiled first, by several processes.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as nnf

from clearhead.run.kernels import triton_codes, triton_rows, triton_step
from clearhead.run.kernels.kernels import MOST_BYTES, MOST_ROWS
from clearhead.run.kernels.triton_rows import Cut
from clearhead.run.kernels.triton_step import Tile
from clearhead.run.quant.grid import Codes
from common import device_name, save
from gpu_kernels import HALF, SHAPES, time_of

PROCESSES = 12  # that compile
GROUP = 32


def cuts(rows: int, bits: int, n: int) -> Iterator[Tile | Cut]:
    """Yield how a product of `n` rows of a weight may be cut up."""
    if rows <= MOST_ROWS and bits == 16:
        ways = ((2, 2048, 4), (4, 2048, 8), (8, 2048, 8), (4, 2048, 4, 6), (2, 2048, 8, 3))
        yield from (Tile(*one) for one in ways)
    elif rows <= MOST_BYTES and bits < 16:
        ways = ((8, 64, 4), (16, 64, 8), (8, 32, 2), (8, 256, 8), (4, 128, 4))
        yield from (Tile(*one) for one in ways)
    else:
        for splits in (1, 2, 3, 4, 6, 8):
            yield Cut(64, splits)


def weight_of(n: int, d: int, bits: int) -> Any:
    """Draw a weight; of few bits, one whose codes and scales are drawn."""
    if bits == 16:
        return torch.randn(n, d, **HALF) / d**0.5
    words = torch.randint(-(2**31), 2**31 - 1, (n, d * bits // 32), dtype=torch.int32, device="cuda")
    return Codes(bits, d, words, torch.rand(n, d // GROUP, **HALF) / d**0.5, None)


def calls(
    name: str, rows: int, bits: int, count: int | None = None
) -> dict[object, list[Callable[[], object]]]:
    """Return for each cut the calls to time."""
    n, d = SHAPES[name]
    count = count or max(8, 400_000_000 * 8 // (n * d * bits))
    weights = [weight_of(n, d, bits) for _ in range(count)]
    x, gate = torch.randn(rows, 1, d, **HALF), "silu" if name == "both" else None
    scale = torch.ones(d, **HALF) if name in ("qkv", "both", "head") else None
    add = torch.randn(rows, 1, n, **HALF) if name in ("out", "down") else None
    made: dict[object, list[Callable[[], object]]] = {}
    for cut in cuts(rows, bits, n // (2 if gate else 1)):
        one = triton_step.linear if bits == 16 else triton_codes.linear
        way = triton_rows.linear if isinstance(cut, Cut) else one
        made[cut] = [functools.partial(way, x, w, None, scale, 1e-5, False, gate, add, cut) for w in weights]
        if isinstance(cut, Cut) and bits == 16:  # the norm comes before it
            made[cut] = [functools.partial(triton_rows.wide, x, w, None, gate, add, cut) for w in weights]
    if bits == 16:
        made["library"] = [functools.partial(nnf.linear, x, w) for w in weights]
    return made


def jobs(given: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Return all (layer, rows, bits)."""
    return [(name, rows, bits) for rows in given.rows for bits in given.bits for name in SHAPES]


@torch.inference_mode()
def main() -> None:
    """Compile, time, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--compile", type=int, help="compile this share of the kernels only")
    given = parser.parse_args()
    if given.compile is not None:
        every = [call for job in jobs(given) for call in calls(*job, count=1).values()]
        for (call,) in every[given.compile :: PROCESSES]:
            try:
                call()
            except Exception as error:
                print("compile:", type(error).__name__, str(error)[:80], flush=True)
        return
    shares = [subprocess.Popen([sys.executable, *sys.argv, "--compile", str(i)]) for i in range(PROCESSES)]
    for share in shares:
        share.wait()
    found = []
    for name, rows, bits in jobs(given):
        n, d = SHAPES[name]
        size = n * d * bits / 8 + (n * d // GROUP * 2 if bits < 16 else 0)
        took: dict[object, float] = {}
        for cut, made in calls(name, rows, bits).items():
            try:
                took[cut] = time_of(made)
            except Exception as error:
                print(name, cut, type(error).__name__, str(error)[:80], flush=True)
        library = took.pop("library", None)
        best = sorted(took.items(), key=lambda item: item[1]) or [("library", library or 0.0)]
        shown = "  ".join(f"{cut} {time:.1f}" for cut, time in best[:3])
        beside = f" | library {library:.1f}" if library else ""
        print(f"{name} {rows} int{bits} {size / best[0][1] * 1e-3:,.0f} GB/s | {shown}{beside}", flush=True)
        row = {"layer": name, "rows": rows, "bits": bits, "library_us": library, "device": device_name()}
        found.append({**row, "us": [[str(cut), time] for cut, time in best]})
    if given.save:
        save("gpu_products", found)


if __name__ == "__main__":
    main()
