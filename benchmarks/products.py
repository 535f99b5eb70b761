"""Time products with weights of 32, 8 and 4 bits on one thread, by each way that `step.c` can be compiled.

Those of float32 also by PyTorch, which takes more threads unless the environment says one.

    OPENBLAS_NUM_THREADS=1 python benchmarks/products.py [--rows 1 4 16] [--size 49152 576] [--rounds 7]

Processor time, the ways in turn, the quickest round: other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import time
from collections.abc import Callable
from functools import partial

import torch

from clearhead.run.kernels import library
from clearhead.run.kernels.native import Pointers
from clearhead.run.quant.grid import Grid, nearest_codes
from clearhead.run.quant.layers import QuantizedLinear

GRIDS = {"int8": Grid(8, 32), "int4": Grid(4, 32), "int4 with offsets": Grid(4, 32, symmetric=False)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--size", type=int, nargs=2, default=[49152, 576])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    compiler = shutil.which("cc")
    assert compiler and library.library() is not None
    ways = {
        name or "this processor's": library.opened(compiler, *library.allowed(name))
        for name in ("", *library.limits())
    }
    layer = torch.nn.Linear(options.size[1], options.size[0], bias=False)
    layers = {"float32": layer}
    for name, grid in GRIDS.items():
        layers[name] = QuantizedLinear(nearest_codes(grid, layer.weight.detach()), None, None)
    for rows in options.rows:
        x, out = torch.randn(rows, options.size[1]), torch.empty(rows, options.size[0])
        for kind, one in layers.items():
            pointers = Pointers()
            fields = pointers.linear(one)
            places = (ctypes.addressof(fields), x.data_ptr(), out.data_ptr())
            jobs: dict[str, Callable[[], object]] = {
                name: partial(way.clearhead_linear, *places, rows, 1, 0) for name, way in ways.items()
            }
            if one is layer:
                jobs["PyTorch's"] = partial(torch.mm, x, layer.weight.detach().T, out=out)
            best = dict.fromkeys(jobs, float("inf"))
            for _ in range(options.rounds):
                for name, job in jobs.items():
                    start = time.thread_time()
                    job()
                    best[name] = min(best[name], time.thread_time() - start)
            rates = ", ".join(
                f"{name} {rows * layer.weight.numel() / took / 1e9:.1f}" for name, took in best.items()
            )
            print(f"{rows} rows, {kind}: {rates} billion products a second", flush=True)


if __name__ == "__main__":
    main()
