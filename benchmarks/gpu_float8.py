"""Training in float8 beside bfloat16 on a GPU: products alone, the kernels of a step, and what is learned.

    PYTHONPATH=src python benchmarks/gpu_float8.py products
    PYTHONPATH=src python benchmarks/gpu_float8.py kernels [--shape loop-1.3b] [--precision float8]
    PYTHONPATH=src python benchmarks/gpu_float8.py curves TRAIN.txt VALID.txt [--out FILE.json]

How fast whole steps are, `gpu_train.py` measures. The curves are those of `clearhead train` on characters,
with the 124M GPT-2 shape, rows of 1,024 and each seed in both precisions; all runs share the device at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import clearhead as ch
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.losses import batch_loss
from clearhead.learn.tasks.table import TASKS
from clearhead.learn.training.events import read_log
from clearhead.learn.training.machine import quick_attention, suit_float8
from clearhead.run.kernels.float8 import FLOAT8
from clearhead.run.kernels.training import join_projections, suit_compiled
from gpu_train import SHAPES, Drawn

# Rows and both widths: of the blocks of the 124M and the 1.3B shape, and of the 124M shape's head.
PRODUCTS = (
    *((32768, 768, 2304), (32768, 768, 768), (32768, 768, 3072), (32768, 3072, 768), (32768, 768, 50304)),
    *((16384, 2048, 6144), (16384, 2048, 2048), (16384, 2048, 8192), (16384, 8192, 2048)),
)
SHOWN, PROFILED = 30, 3  # kernels, steps
PRECISIONS = ("bfloat16", "float8")
LEARNED = (
    *("data.task=lm", "data.batch_size=16", "tokens.kind=char", "model.base=gpt2", "model.dropout=0.0"),
    *("model.embedding_dropout=0.0", "model.attention_dropout=0.0", "model.max_positions=1024"),
    *("train.compile=true", "train.lr=6e-4", "train.warmup=100", "train.betas=[0.9, 0.95]"),
)


def milliseconds(run: Callable[[], object], count: int = 30) -> float:
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def products() -> None:
    """Time each product of a forward pass in bfloat16, and in float8 with a scale for each row."""
    for rows, inner, outer in PRODUCTS:
        a, b = (torch.randn(size, inner, device="cuda", dtype=torch.bfloat16) for size in (rows, outer))
        a8, b8 = a.to(FLOAT8), b.to(FLOAT8)
        by_row, by_column = torch.rand(rows, 1, device="cuda"), torch.rand(1, outer, device="cuda")
        wide = milliseconds(lambda a=a, b=b: a @ b.t())
        narrow = milliseconds(
            lambda a=a8, b=b8, scales=(by_row, by_column): torch._scaled_mm(
                a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )
        print(f"{rows} x {inner} x {outer}: bfloat16 {wide:.3f} ms, float8 {narrow:.3f} ms", flush=True)


def kernels(shape: str, precision: str) -> None:
    """Print the kernels of a step that take longest."""
    config, rows = SHAPES[shape]
    torch.manual_seed(0)
    model = ch.Transformer(config).cuda().train()
    join_projections(model)
    if precision == "float8":
        suit_float8(model, split=False)
    suit_compiled(model)
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    attention = quick_attention(TASKS["lm"], DataPlan(), torch.device("cuda"))
    batch = Drawn(rows).at(0).to("cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16), attention():
            loss, count = batch_loss(model, batch)
        (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    print(f"{shape}, {precision}: {milliseconds(step, 20):.2f} ms a step", flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    found = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    print(f"its kernels: {sum(row.self_device_time_total for row in found) / PROFILED / 1e3:.2f} ms")
    for row in found[:SHOWN]:
        per_step = row.self_device_time_total / PROFILED / 1e3
        print(f"{per_step:7.2f} ms {row.count // PROFILED:4d} x {row.key[:100]}", flush=True)


def curves(train: Path, valid: Path, steps: int, seeds: int, out: Path | None) -> None:
    """Train with each seed in both precisions, and compare the losses on the text for validation."""
    with tempfile.TemporaryDirectory() as base:
        runs = {}
        for precision in PRECISIONS:
            for seed in range(seeds):
                settings = (
                    *LEARNED,
                    *(f"data.validation=['{valid}']", f"train.precision={precision}", f"train.seed={seed}"),
                    *(f"train.steps={steps}", f"train.validate_every={steps // 8}"),
                )
                command = [sys.executable, "-m", "clearhead", "train", str(train), "--out"]
                command += [f"{base}/{precision}-{seed}"]
                command += [part for setting in settings for part in ("--set", setting)]
                runs[precision, seed] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        rows: dict[str, dict[str, object]] = {precision: {} for precision in PRECISIONS}
        ends: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
        for (precision, seed), run in runs.items():
            assert run.wait() == 0, f"{precision}, seed {seed} failed"
            events = [event for event in read_log(Path(base) / f"{precision}-{seed}") if "metrics" in event]
            curve = {event["step"]: round(event["metrics"]["loss"], 4) for event in events}
            rows[precision][f"seed {seed}"] = curve
            ends[precision].append(curve[steps])
            print(f"{precision}, seed {seed}:", json.dumps(curve), flush=True)
    for precision, losses in ends.items():
        spread = statistics.stdev(losses) if seeds > 1 else 0.0
        print(f"{precision}: {statistics.mean(losses):.4f} after {steps} steps, seeds apart by {spread:.4f}")
    if out:
        body = {
            "command": f"PYTHONPATH=src python benchmarks/gpu_float8.py curves TRAIN VALID --steps {steps}",
            "title": "validation loss of the 124M GPT-2 shape on characters of books, 16 x 1,024 a step",
            **{"device": torch.cuda.get_device_name(), "torch": torch.__version__},
            **{"date": date.today().isoformat(), "rows": rows},
        }
        out.write_text(json.dumps(body, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("products", "kernels", "curves"))
    parser.add_argument("texts", nargs="*", type=Path, help="curves: to train on, and for validation")
    parser.add_argument("--shape", choices=[*SHAPES], default="loop-plain")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.part == "products":
        products()
    elif given.part == "kernels":
        kernels(given.shape, given.precision)
    else:
        curves(*given.texts, given.steps, given.seeds, given.out)


if __name__ == "__main__":
    main()
