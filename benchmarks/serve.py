"""Serve: streams through the engine against our own offline batch, what exact rows cost, a shared prefix.

    python benchmarks/serve.py [--layers 12] [--streams 8] [--new 32] [--rounds 3] [--save]

GPT-2's shape with random weights, float32, on the CPU: processor seconds of one thread. `served` writes all
streams together, `offline` is `m.generate` with a list of the same prompts, `served, plain rows` lets one row
take the library's usual product, whose bits differ from those of several rows. The shared prefix is 90 % of a
prompt of 640 tokens.
"""

from __future__ import annotations

import argparse
import time

import torch

import clearhead as ch
from clearhead.fast.parts import PACKED_ROWS, PackedLinear
from clearhead.serve.engine import ServeEngine
from clearhead.serve.limits import Limits
from common import alternate, report, save


def write(engine: ServeEngine, prompts: list[list[int]], new: int) -> None:
    jobs = [engine.submit(prompt, {"max_new_tokens": new}) for prompt in prompts]
    while engine.busy:
        engine.step()
    assert all(job.error is None for job in jobs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("layers", 12), ("streams", 8), ("new", 32), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    m = ch.Model(ch.Transformer(ch.preset("gpt2").replace(n_layers=given.layers)).eval())
    draw = torch.Generator().manual_seed(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return torch.randint(50_000, (count, length), generator=draw).tolist()

    exact = ServeEngine(m, Limits(cache_tokens=16_384, exact=True))
    packed = [part for part in exact.runner.modules() if isinstance(part, PackedLinear)]

    def plainly(count: int) -> None:
        usual = packed[0].packed_rows
        for part in packed:
            part.packed_rows = PACKED_ROWS
        write(exact, prompts(count, 16), given.new)
        for part in packed:
            part.packed_rows = usual

    results = []
    for streams in (given.streams, 1):
        seconds = alternate(
            {
                "clearhead": lambda n=streams: write(exact, prompts(n, 16), given.new),
                "served, plain rows": lambda n=streams: plainly(n),
                "offline": lambda n=streams: m.generate(prompts(n, 16), given.new) and None,
            },
            given.rounds,
            clock=time.process_time,
        )
        title = f"CPU serving, GPT-2 shape of {given.layers} layers float32, {streams} streams, 16 in"
        results.append(report(f"{title}, {given.new} out", seconds, streams * given.new))
    shared = prompts(1, 576)[0]
    write(exact, [shared + prompts(1, 64)[0]], 1)
    seconds = alternate(
        {
            "clearhead": lambda: write(exact, [shared + prompts(1, 64)[0]], 1),
            "no shared prefix": lambda: write(exact, prompts(1, 640), 1),
        },
        given.rounds,
        clock=time.process_time,
    )
    results.append(report("time to the first of 1 token after 640, 90 % of them shared", seconds, 1))
    if given.save:
        save("cpu_serve", results)


if __name__ == "__main__":
    main()
