"""What a cache costs: decode steps by length of context, and what a latent cache loses on a book."""

from __future__ import annotations

import argparse
import gzip
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import KeptParts, processor_name

import clearhead as ch
from clearhead.core.cache import Cache

KINDS = {
    "full": {"attention": "full"},
    "grouped": {"attention": "full", "n_kv_heads": 1},
    "latent": {"attention": "latent(16)", "rope_fraction": 0.5},
    "gated-delta": {"attention": "gated-delta"},
    "mamba2": {"attention": "mamba2(2, d_state=16)"},
    "conv": {"attention": "conv(3)"},
}
SHAPE: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "n_heads": 2, "n_layers": 1, "positions": "rope"}
CHUNK, STEPS = 2048, 24
SLOPE_FROM = 16_384  # below, a step's fixed cost hides what the context adds


def run_decode_slopes() -> None:
    """Time and memory of a decode step by the length of its context, to 65,536 tokens.

        python benchmarks/run.py decode_slopes [--longest 65536] [--save]

    One layer of 2 heads of 16, one row, one thread: the context is read in chunks, and at each length the
    median of 24 decode steps is taken, in time of the processor. Bytes of the cache are those of
    `ch.cost`. Slopes are of the logarithms from 16,384 tokens on: 1 grows with the context, 0 does not.
    """
    parser = argparse.ArgumentParser(
        description=run_decode_slopes.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--longest", type=int, default=65_536)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep = KeptParts(options.save)
    lengths = [n for n in (1024, 16_384, 32_768, 65_536) if n <= options.longest]
    for name, kind in KINDS.items():
        config = ch.ModelConfig(**SHAPE, **kind, max_positions=options.longest + STEPS)
        torch.manual_seed(0)
        points = decoded(ch.Transformer(config).eval(), lengths)
        keep("decode_slopes_cpu", {
            "title": name, "device": processor_name(), "attention": kind["attention"], "points": points,
            "slope_of_time": slope(points, "milliseconds"), "slope_of_bytes": slope(points, "cache_bytes"),
        })  # fmt: skip


@torch.inference_mode()
def decoded(model: ch.Transformer, lengths: list[int]) -> list[dict[str, float]]:
    """Milliseconds of a decode step, and bytes of the cache, after so many tokens."""
    cache, points, read = Cache(), [], 0
    ids = torch.randint(64, (1, lengths[-1]))
    for length in lengths:
        while read < length:
            stop = min(read + CHUNK, length)
            model(ids[:, read:stop], cache=cache, logits="none")
            read = stop
        seconds = []
        for step in range(STEPS):
            start = time.thread_time()  # others on the machine do not count
            model(ids[:, step : step + 1], cache=cache, logits="last")
            seconds.append(time.thread_time() - start)
        read += STEPS
        held = ch.cost(model.config, read).memory.kv_cache
        points.append({"tokens": length, "milliseconds": round(1000 * statistics.median(seconds), 4),
                       "cache_bytes": held})  # fmt: skip
    return points


def slope(points: list[dict[str, float]], name: str) -> float:
    """The slope of log quantity against log length, between the first and last of the long contexts."""
    long = [point for point in points if point["tokens"] >= SLOPE_FROM] or points
    first, last = long[0], long[-1]
    return round(math.log(last[name] / first[name]) / math.log(last["tokens"] / first["tokens"]), 3)


# Quality at equal bytes -------------------------------------------------------------------------------------

BOOK = Path("../shared/data/book/war_and_peace.txt.gz")
CACHES: dict[str, dict[str, Any]] = {
    "grouped, 1 of 4 heads": {"n_kv_heads": 1, "rope_fraction": 0.5},
    "latent(24)": {"attention": "latent(24)", "rope_fraction": 0.5},
    "every head": {"rope_fraction": 0.5},
}


def run_latent_book() -> None:
    """Bits a character of a book with a latent cache, and with grouped queries of the same bytes.

        python benchmarks/run.py latent_book [--steps 1000] [--seeds 3] [--save]

    Models of 2 layers of width 64 and 4 heads learn the characters of nine tenths of War and Peace; bits are
    of 20,000 characters of the rest, with a 95 % interval over windows. A token takes 32 numbers a layer:
    those of one head for keys and values, or a latent of 24 and the 8 columns that rotate.
    """
    parser = argparse.ArgumentParser(
        description=run_latent_book.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    whole = gzip.decompress(BOOK.read_bytes()).decode()
    cut, keep = len(whole) * 9 // 10, KeptParts(options.save)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.txt").write_text(whole[cut - 1_000_000 : cut], encoding="utf-8")
        (folder / "test.txt").write_text(whole[cut : cut + 20_000], encoding="utf-8")
        for seed in range(options.seeds):
            for kind, changes in CACHES.items():
                settings = {
                    **{f"model.{key}": value for key, value in changes.items()},
                    "model.base": "llama-1b-like",
                    "model.d_model": 64, "model.d_ff": 176, "model.n_layers": 2, "model.n_heads": 4,
                    "model.max_positions": 128, "model.tie_embeddings": True, "train.steps": options.steps,
                    "train.validate_every": options.steps, "train.samples": 0, "train.seed": seed,
                    "train.device": "cpu", "train.threads": 1,
                }  # fmt: skip
                if "n_kv_heads" not in changes:
                    settings["model.n_kv_heads"] = 4
                out = folder / "model"
                ch.train(
                    folder / "train.txt", recipe="char-gpt-cpu", out=out, settings=settings, overwrite=True
                )
                m = ch.load(out)
                result, cost = ch.evaluate(m, folder / "test.txt"), ch.cost(m.config, 128)
                part = {
                    "title": f"{kind}, seed {seed}", "device": processor_name(),
                    "training_steps": options.steps, "parameters": cost.parameters.total,
                    "cache_bytes_a_token": cost.memory.kv_cache // 128,
                    "bits_a_character": round(result.metrics["loss"] / math.log(2), 4),
                    "interval": [round(end / math.log(2), 4) for end in result.intervals["loss"]],
                }  # fmt: skip
                keep("latent_book_cpu", part)
