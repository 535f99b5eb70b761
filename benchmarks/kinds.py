"""Kinds of attention: time and memory by length, versus fla-core, and what their caches cost."""

from __future__ import annotations

import gzip
import json
import math
import statistics
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from benchmarks.common import KeptParts, alternate, case_parser, device_name, processor_name, save
from torch import Tensor

import clearhead as ch
from clearhead.core.cache import Cache
from clearhead.inside.long_text import peak_bytes
from clearhead.variants.gated_delta import gated_delta
from clearhead.variants.linear import FEATURES, attend_linear

# kinds ----------------------------------------------------------------------------------------------------


KINDS = {
    "full": "full",
    "window": "window(256)",
    "window, 4 sinks": "window(256, sinks=4)",
    "dilated": "dilated(64, 4)",
    "blocks": "blocks(64, 3, 64, 0, 3)",
    "linear, elu": "linear(elu)",
    "linear, favor": "linear(favor, 128)",
    "low-rank": "low-rank(128)",
    "gated-delta": "gated-delta",
}
SLOPE_FROM = {"cpu": 16384, "cuda": 32768}  # shorter rows fit a cache, or do not keep the device busy
PATIENCE = 60.0
AFTER = "\n## "  # what ends a section
RESULTS = Path(__file__).parent / "results"
IMAGES = RESULTS.parents[1] / "docs" / "images"


def measure(kind: str, length: int, device: str) -> dict[str, float]:
    """Seconds of the quickest of three steps, their peak bytes, FLOPs and bytes by `ch.cost`."""
    family = "encoder" if kind.startswith("low-rank") else "decoder"
    config = ch.ModelConfig(
        family=family, vocab_size=256, d_model=512, n_layers=1, n_heads=8, positions="rope",
        max_positions=length, attention=kind, head="none",
    )  # fmt: skip
    torch.manual_seed(0)
    model = ch.Transformer(config).to(device)
    ids = torch.randint(256, (1, length), device=device)

    def step() -> None:
        model(ids).hidden.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    start = time.perf_counter()
    peak, seconds = peak_bytes(model, step), [time.perf_counter() - start]
    for _ in range(2):
        if seconds[-1] > PATIENCE:
            break
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    priced = ch.cost(config, length)
    print(f"{kind:<24}{length:>8}  {min(seconds):9.3f} s  {peak / 2**30:7.2f} GiB", flush=True)
    return {
        "seconds": min(seconds),
        "peak_bytes": peak,
        "flops": priced.flops.forward.total + priced.flops.backward.total,
        "activation_bytes": priced.memory.activations.total,
    }


def series(name: str, lengths: list[int], device: str) -> dict[int, dict[str, float]]:
    """What a step costs at each length, as long as it is worth waiting for."""
    points: dict[int, dict[str, float]] = {}
    for length in lengths:
        before = points.get(length // 2)
        if before is None or before["seconds"] <= PATIENCE / 4:
            points[length] = measure(KINDS[name], length, device)
    return points


def rates(device: str) -> dict[str, float]:
    """FLOPs a second of a large matmul in float32, and bytes a second of a copy, the best of some."""
    size = 8192 if device == "cuda" else 1536
    a, b = torch.randn(2, size, size, device=device)
    found = dict.fromkeys(("flops", "bytes"), 0.0)
    for _ in range(6):
        for name, job, amount in (("flops", lambda: a @ b, 2 * size**3), ("bytes", a.clone, 2 * a.nbytes)):
            start = time.perf_counter()
            for _ in range(5):
                job()
            if device == "cuda":
                torch.cuda.synchronize()
            found[name] = max(found[name], 5 * amount / (time.perf_counter() - start))
    return found


def share(point: dict[str, float], best: dict[str, float]) -> float:
    """The time of the roofline divided by that of a step."""
    bound = max(point["flops"] / best["flops"], 2 * point["activation_bytes"] / best["bytes"])
    return round(bound / point["seconds"], 3)


def section(device: str) -> str:
    """What the record of a device says, and draw its picture again."""
    record = json.loads((RESULTS / f"kinds_{device}.json").read_text())["results"][0]
    rows, best = record["rows"], record["rates"]
    longest = max(max(map(int, row["points"])) for row in rows)
    option = "--device cuda " if device == "cuda" else ""
    shorter = "do not keep it busy" if device == "cuda" else "fit its cache and take less time a token"
    lead = (
        f"One layer of 8 heads of 64, one row, forward and backward in float32, on {record['device']} "
        f"(`python benchmarks/run.py kinds {option}--longest {longest} --save`). Lines are measured, dots "
        "are the FLOPs of `ch.cost`, scaled to the line where it begins to be straight, at "
        f"{SLOPE_FROM[device]:,} tokens. The slope is the power of the length with which time grows from "
        f"there on; shorter rows {shorter}. Memory is the most that lives at once in such a step, next to "
        "the weights."
    )
    lines = [
        f"| kind | seconds at {longest:,} | GiB | slope | quicker than `full` from | share of the roofline |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        last, begin = row["points"].get(str(longest)), row["quicker_than_full_from"]
        cells = (
            f"`{row['kind']}`",
            "" if last is None else f"{last['seconds']:.2f}",
            "" if last is None else f"{last['peak_bytes'] / 2**30:.1f}",
            f"{row['slope_of_time']:.2f}",
            "" if row["kind"] == "full" else "never" if begin is None else f"{begin:,}",
            f"{100 * row['share_of_roofline']:.0f} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
    ending = (
        "The roofline is the longer of two times: the FLOPs at the rate of a large matmul in float32, "
        f"{best['flops'] / 1e12:.2g} TFLOP/s, and writing and reading once what is kept for the backward "
        f"pass, at the rate of a copy, {best['bytes'] / 1e9:,.0f} GB/s. `full` passes it, since its kernel "
        "leaves out the half of the square behind the causal mask, which `ch.cost` counts."
    )
    numbered = [
        {**row, "points": {int(length): point for length, point in row["points"].items()}} for row in rows
    ]
    draw(numbered, record["device"], SLOPE_FROM[device])
    fill = partial(textwrap.fill, width=110, break_long_words=False, break_on_hyphens=False)
    picture = (
        f"![Time of a training step of one layer against the number of tokens](images/kinds_{device}.png)"
    )
    return "\n\n".join((picture, fill(lead), "\n".join(lines), fill(ending)))


def write() -> None:
    """Write what the records say into docs/attention.md."""
    page = RESULTS.parents[1] / "docs" / "attention.md"
    before, head, rest = page.read_text().partition("## Cost of attention kinds by length\n")
    after = rest[rest.index(AFTER) :] if AFTER in rest else ""
    page.write_text(f"{before}{head}\n{section('cuda')}\n\n{section('cpu')}\n{after}")


def slope(points: dict[int, dict[str, float]], name: str, begin: int) -> float | None:
    """The slope of log quantity against log length, over the lengths that count."""
    lengths = [length for length in points if length >= begin]
    if len(lengths) < 2:
        return None
    values = [points[length][name] for length in lengths]
    return round(float(np.polyfit(np.log(lengths), np.log(values), 1)[0]), 3)


def draw(rows: list[dict[str, object]], device: str, begin: int) -> None:
    """Draw time against length, each kind with its slope, beside the FLOPs that `ch.cost` counts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(rows):
        points: dict[int, dict[str, float]] = row["points"]  # type: ignore[assignment]
        color = f"C{number}"
        axes.loglog(
            list(points),
            [point["seconds"] for point in points.values()],
            color=color,
            label=f"{row['kind']}: slope {row['slope_of_time']}",
        )
        counted = {length: point for length, point in points.items() if length >= begin}
        if counted:
            first = next(iter(counted.values()))
            scale = first["seconds"] / first["flops"]
            axes.plot(
                list(counted),
                [scale * point["flops"] for point in counted.values()],
                ".",
                color=color,
                alpha=0.6,
            )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds, forward and backward, one layer")
    axes.set_title(f"What kinds of attention cost on {device}")
    axes.legend(fontsize=8)
    figure.savefig(IMAGES / f"kinds_{'cuda' if 'NVIDIA' in device else 'cpu'}.png", dpi=110)


def run_kinds() -> None:
    """What each kind of attention costs: time and memory of a training step of one layer against its length.

        python benchmarks/run.py kinds [--longest 65536] [--device cuda] [--processes 1] [--save]
        python benchmarks/run.py kinds --write

    One layer of 8 heads of 64, one row: forward and backward. Beside it, what `ch.cost` computes. The slope
    is that of log time against log length over the lengths from `SLOPE_FROM` on; the crossing is the
    shortest length at which a kind is quicker than full attention. Full attention stops where a step takes
    `PATIENCE` seconds. `--save` also draws docs/images/kinds_DEVICE.png: lines are measured, dots are the
    FLOPs of `ch.cost`, scaled to the first point of the line from `SLOPE_FROM` on. `--write` writes what
    the records say into docs/attention.md. `--processes` measures that many kinds beside each other, where
    there are cores enough.

    The roofline of a step is the longer of two times: its FLOPs at the rate of one large product in
    float32, and writing and reading once what it keeps for the backward pass, at the rate of a copy. Both
    rates are measured.
    """
    parser = case_parser(run_kinds)
    parser.add_argument("--longest", type=int, default=65536)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="kinds measured beside each other")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--write", action="store_true", help="write the records into the docs")
    options = parser.parse_args()
    if options.write:
        return write()
    lengths = [length for length in (1024 << power for power in range(9)) if length <= options.longest]
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        jobs = {name: pool.submit(series, name, lengths, options.device) for name in options.kinds}
        found = {name: job.result() for name, job in jobs.items()}
    rows, begin, best = [], SLOPE_FROM[options.device], rates(options.device)
    for name, points in found.items():
        full = found.get("full", {})
        quicker = [n for n in points if n in full and points[n]["seconds"] < full[n]["seconds"]]
        row = {
            "kind": KINDS[name],
            "slope_of_time": slope(points, "seconds", begin),
            "slope_of_flops": slope(points, "flops", begin),
            "slope_of_activations": slope(points, "activation_bytes", begin),
            "quicker_than_full_from": min(quicker, default=None),
            "share_of_roofline": share(points[max(points)], best),
            "points": points,
        }
        rows.append(row)
        print(f"{name:<18} time {row['slope_of_time']}  FLOPs {row['slope_of_flops']}  "
              f"from {row['quicker_than_full_from']}  roofline {row['share_of_roofline']}")  # fmt: skip
    if options.save:
        name = device_name() if options.device == "cuda" else processor_name()
        save(f"kinds_{options.device}", [{"device": name, "rates": best, "rows": rows}])
        draw(rows, name, begin)


# fla_kernels ----------------------------------------------------------------------------------------------


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


def run_fla_kernels() -> None:
    """Linear attention and the gated delta rule versus the Triton kernels of flash-linear-attention.

        pip install --no-deps --target build/ref fla-core einops
        PYTHONPATH=src:build/ref python benchmarks/run.py fla_kernels [--lengths 4096 65536]
        [--kinds gated-delta]
            [--tries 4] [--out PATH]

    8 heads of 64, one row, bfloat16, forward and backward from queries, keys and values to their gradients;
    both sides take turns. Differences are those of answers and gradients from ours in float64 at the
    shortest length, divided by the largest of these. The share of the roofline is that of
    `benchmarks/run.py kinds` for the products alone, at the rate of a large product in float32, which is
    what ours are made of. Its kernels try many shapes of blocks at their first call, for minutes; `--tries`
    leaves each so many of them.
    """
    parser = case_parser(run_fla_kernels, saves=False)
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


# decode_slopes, latent_book ---------------------------------------------------------------------------------


CACHED = {
    "full": {"attention": "full"},
    "grouped": {"attention": "full", "n_kv_heads": 1},
    "latent": {"attention": "latent(16)", "rope_fraction": 0.5},
    "gated-delta": {"attention": "gated-delta"},
    "mamba2": {"attention": "mamba2(2, d_state=16)"},
    "conv": {"attention": "conv(3)"},
}
SHAPE: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "n_heads": 2, "n_layers": 1, "positions": "rope"}
READ, STEPS = 2048, 24
LONG = 16_384  # below, a step's fixed cost hides what the context adds


def run_decode_slopes() -> None:
    """Time and memory of a decode step by the length of its context, to 65,536 tokens.

        python benchmarks/run.py decode_slopes [--longest 65536] [--save]

    One layer of 2 heads of 16, one row, one thread: the context is read in chunks, and at each length the
    median of 24 decode steps is taken, in time of the processor. Bytes of the cache are those of
    `ch.cost`. Slopes are of the logarithms from 16,384 tokens on: 1 grows with the context, 0 does not.
    """
    parser = case_parser(run_decode_slopes)
    parser.add_argument("--longest", type=int, default=65_536)
    options = parser.parse_args()
    if options.longest < 2 * LONG:
        parser.error(
            f"--longest {options.longest}: a slope is of {LONG:,} tokens and more: give {2 * LONG} or more"
        )
    torch.set_num_threads(1)
    keep = KeptParts(options.save)
    lengths = [n for n in (1024, LONG, 2 * LONG, 4 * LONG) if n <= options.longest]
    for name, kind in CACHED.items():
        config = ch.ModelConfig(**SHAPE, **kind, max_positions=options.longest + STEPS)
        torch.manual_seed(0)
        points = decoded(ch.Transformer(config).eval(), lengths)
        keep("decode_slopes_cpu", {
            "title": name, "device": processor_name(), "attention": kind["attention"], "points": points,
            "slope_of_time": slope_of_long(points, "milliseconds"),
            "slope_of_bytes": slope_of_long(points, "cache_bytes"),
        })  # fmt: skip


@torch.inference_mode()
def decoded(model: ch.Transformer, lengths: list[int]) -> list[dict[str, float]]:
    """Milliseconds of a decode step, and bytes of the cache, after so many tokens."""
    cache, points, read = Cache(), [], 0
    ids = torch.randint(64, (1, lengths[-1]))
    for length in lengths:
        while read < length:
            stop = min(read + READ, length)
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


def slope_of_long(points: list[dict[str, float]], name: str) -> float:
    """The slope of log quantity against log length, between the first and last of the long contexts."""
    long = [point for point in points if point["tokens"] >= LONG]
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
    parser = case_parser(run_latent_book)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
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
