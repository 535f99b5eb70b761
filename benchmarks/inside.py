"""Measure what looking inside costs on the CPU: recording attention, silent taps, and memory for deep models.

Recording: all patterns of a decoder of GPT-2's shape against a plain forward pass, in turn, the best of each;
the output layer, which adds to both alike, is left out. Taps: the calls of one forward pass times what a
silent call takes, against the pass. Times are CPU time of the process: a busy machine disturbs it less.
Memory: a process of its own records 48 layers over 1,024 tokens, draws all heads, and says its largest
resident size.

python benchmarks/inside.py [--tokens 512] [--rounds 5] [--threads 2] [--save]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar
from unittest import mock

import torch

import clearhead as ch
from clearhead.core.taps import SILENT, LiveTap, tap_for
from clearhead.inside.attention import attention
from clearhead.variants.presets import preset
from common import device_name, save

DEEP, LONG, LIMIT = 48, 1024, 2e9  # layers, tokens, bytes


def best(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The fewest seconds of CPU time of each job, the jobs taking turns: a busy machine only ever adds."""
    seconds = dict.fromkeys(jobs, float("inf"))
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            if turn:
                seconds[name] = min(seconds[name], time.process_time() - start)
    return seconds


class Counting(LiveTap):
    """A tap that counts its calls."""

    calls: ClassVar[Counter[str]] = Counter()

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.calls["call"] += 1
        return x

    def inside(self, name: str) -> Counting:
        self.calls["inside"] += 1
        return self

    def wants(self, *names: str) -> bool:
        self.calls["wants"] += 1
        return False


def recording(tokens: int, rounds: int) -> dict[str, object]:
    """All patterns kept and streamed, and silence, against a forward pass."""
    torch.manual_seed(0)
    model = ch.Transformer(preset("gpt2")).eval()
    ids = torch.randint(model.config.vocab_size, (1, tokens))

    def forward() -> None:
        with torch.no_grad():
            model(ids, logits="none")

    def recorded() -> None:
        with ch.record(model, "blocks.*.attention.pattern"):
            forward()

    def streamed() -> None:
        with tempfile.TemporaryDirectory() as folder:
            attention(model, ids[0].tolist(), budget=None, to=Path(folder) / "maps")

    jobs: dict[str, Callable[[], object]] = {
        "forward": forward,
        "record": recorded,
        "attention": lambda: attention(model, ids[0].tolist(), budget=None),
        "attention, to disk": streamed,
    }
    seconds = best(jobs, rounds)
    rows = {
        name: {"seconds": round(took, 4), "over_forward": round(took / seconds["forward"], 3)}
        for name, took in seconds.items()
    }
    print(f"12 layers, {tokens} tokens  [{device_name()}, torch {torch.__version__}]")
    for name, row in rows.items():
        print(f"  {name:<22}{row['seconds']:>9.3f} s{row['over_forward']:>8.2f} x a plain forward pass")
    return {
        "title": f"recording all patterns, 12 layers, {tokens} tokens",
        "rows": rows,
        **silence(model, ids, seconds["forward"]),
    }


def silence(model: ch.Transformer, ids: torch.Tensor, forward: float) -> dict[str, object]:
    """What the silent taps of one pass take, against the pass."""
    with torch.no_grad(), mock.patch("clearhead.core.transformer.tap_for", return_value=Counting(())):
        model(ids)
    calls, x = Counting.calls, torch.zeros(1)

    def taps() -> None:
        for _ in range(calls["call"]):
            SILENT("q", x)
        for _ in range(calls["inside"]):
            SILENT.part(f"blocks.{0}")
        for _ in range(calls["wants"]):
            SILENT.wants("scores", "pattern")
        tap_for(model)

    took = best({"taps": taps}, 200)["taps"]
    print(
        f"  silent taps: {sum(calls.values())} calls, {took * 1e6:.1f} µs, "
        f"{took / forward:.4%} of a forward pass"
    )
    return {"silent_tap_calls": sum(calls.values()), "silent_tap_share": round(took / forward, 8)}


def deep(to: str) -> None:
    """In a process of its own: 48 layers over 1,024 tokens, recorded and drawn."""
    from clearhead.app.plot import save as save_picture
    from clearhead.app.plot.prompts import draw_model

    config = ch.ModelConfig(vocab_size=1000, d_model=256, n_layers=DEEP, n_heads=16, max_positions=LONG)
    model = ch.Transformer(config).eval()
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        options = {"to": Path(folder) / "maps", "budget": None} if to == "disk" else {}
        maps = attention(model, torch.randint(1000, (LONG,)).tolist(), **options)
        took, recorded = time.process_time() - start, peak()
        save_picture(draw_model(maps), Path(folder) / "model.png")
        print(maps.aggregated, took, recorded, peak())


def peak() -> int:
    """Return the largest resident size so far, in bytes.

    Pages of mapped files count, although the system may take them back.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory(threads: int) -> dict[str, object]:
    """Largest resident size of `deep`."""
    found: dict[str, object] = {"title": f"{DEEP} layers, 16 heads, {LONG} tokens: largest resident size"}
    for to in ("memory", "disk"):
        command = [sys.executable, __file__, "--deep", to, "--threads", str(threads)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        size, took, recorded, drawn = int(said[0]), *map(float, said[1:])
        how = f"in {to}, {size} tokens per cell" if size > 1 else f"whole, streamed to {to}"
        print(
            f"  {DEEP} layers, {LONG} tokens {how}: {recorded / 1e9:.2f} GB, "
            f"all heads drawn {drawn / 1e9:.2f} GB, {took:.1f} s"
        )
        figures = {"recorded_gigabytes": round(recorded / 1e9, 3), "drawn_gigabytes": round(drawn / 1e9, 3)}
        found[to] = {"tokens_per_cell": size, **figures, "cpu_seconds": round(took, 2)}
        if to == "memory":
            assert drawn <= LIMIT, f"{drawn / 1e9:.2f} GB are more than {LIMIT / 1e9:.0f}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--deep", choices=("memory", "disk"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.deep:
        deep(options.deep)
        return
    machine = {"device": device_name(), "torch": torch.__version__}
    results = [
        {**recording(options.tokens, options.rounds), **machine},
        {**memory(options.threads), **machine},
    ]
    if options.save:
        save("cpu_inside", results)


if __name__ == "__main__":
    main()
