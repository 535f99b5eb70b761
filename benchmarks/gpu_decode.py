"""Decoding on a GPU: kernels and variants of the compiled step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
from benchmarks.common import case_command, case_parser
from torch import Tensor

import clearhead as ch
from clearhead.core.attention import KERNELS, Attention
from clearhead.run.generate.decode import decode, prefill, prefill_fixed
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Ends, Prompts
from clearhead.run.kernels import kernels as kernels_module
from clearhead.run.kernels import prepare
from clearhead.run.kernels.fixed_cache import HeadConfig, MatmulConfig
from clearhead.run.kernels.kernels import step_attend, step_linear
from clearhead.run.kernels.steps import COMPILER_OPTIONS, CompiledStep, Steps

# gpu_kernels ----------------------------------------------------------------------------------------------
# Check the kernels of a decode step on a GPU against their formulas, and time each by how work is cut up.
#
# PYTHONPATH=src python benchmarks/run.py gpu_decode kernel-equality tiles


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
            form = MatmulConfig(bias, scale, 1e-5, False, gate, added)
            wide = form._replace(bias=_double(bias), scale=_double(scale), add=_double(added))
            exact = step_linear(_double(x), _double(weight), wide)
            worst = max(
                worst,
                float((step_linear(x, weight, form) - exact).abs().max()),
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


# gpu_decode -----------------------------------------------------------------------------------------------


PROMPT, NEW = 128, 256
DEFAULT = {"triton.cudagraphs": False}
DESCENT = {**DEFAULT, "coordinate_descent_tuning": True}
AUTOTUNE = {**DESCENT, "max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
# By name: which parts have kernels of ours, who compiles the rest, what it is told, and how attention is
# computed otherwise.
VARIANTS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "default": ("some", "inductor", DESCENT, "fused"),  # what `generate` does
    "attention": ("attention", "inductor", DESCENT, "fused"),
    "descent": ("none", "inductor", DESCENT, "fused"),
    # Nothing is compiled but our kernels, and the step is recorded as a graph.
    "kernels-recorded": ("some", "eager", {}, "fused"),
    "recorded": ("none", "eager", {}, "fused"),
    "attention-autotune": ("attention", "inductor", AUTOTUNE, "fused"),
    "prototype": ("none", "inductor", DEFAULT, "fused"),
    "formula": ("none", "inductor", DESCENT, "formula"),  # attention as sums of products
    "plain": ("none", "", {}, "fused"),  # neither compiled nor recorded
}
BIG = ch.ModelConfig(
    family="decoder",
    vocab_size=32000,
    d_model=2048,
    n_layers=22,
    n_heads=32,
    n_kv_heads=4,
    d_ff=5632,
    positions="rope",
    norm="rmsnorm",
    gated=True,
    activation="silu",
    bias=False,
    max_positions=2048,
    tie_embeddings=False,
)
SMALL = BIG.replace(vocab_size=1000, d_model=256, n_layers=3, n_heads=8, n_kv_heads=2, d_ff=704)


def built(config: ch.ModelConfig, dtype: torch.dtype = torch.bfloat16) -> ch.Transformer:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return ch.Transformer(config).to(dtype).eval()


def prompts_of(config: ch.ModelConfig, rows: int, length: int = PROMPT) -> list[list[int]]:
    generator = torch.Generator().manual_seed(rows * 10_000 + length)
    return torch.randint(config.vocab_size, (rows, length), generator=generator).tolist()


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: object = None,
    scale: float | None = None,
    **more: object,
) -> Tensor:
    """Attention of one query per head as sums of products, for the compiler to fuse."""
    if q.shape[2] > 1 or mask is None:
        return KERNELS["fused"](q, k, v, mask, scale=scale, causal=bool(more["causal"]))
    B, H, _, E = q.shape
    K, S = k.shape[1:3]
    # [B, K, G, S].
    scores = (q.view(B, K, H // K, 1, E).float() * k[:, :, None].float()).sum(-1) * (
        E**-0.5 if scale is None else scale
    )
    pattern = scores.masked_fill(~mask.view(-1, 1, 1, S), float("-inf")).softmax(-1)
    return (pattern[..., None] * v[:, :, None].float()).sum(3).to(q.dtype).view(B, H, 1, -1)


def variant(name: str) -> tuple[Callable[[ch.Transformer], ch.Transformer], str]:
    """How a model is made ready for a variant, and the compiler's name."""
    kernels, backend, options, attention = VARIANTS[name]
    COMPILER_OPTIONS.clear()
    COMPILER_OPTIONS.update(options)
    kernels_module.MOST_ROWS = 0 if kernels == "attention" else kernels_module.MOST_ROWS
    KERNELS["formula"] = formula

    def ready(model: ch.Transformer) -> ch.Transformer:
        fast = prepare.prepared(model, kernels=kernels != "none")
        for part in fast.modules():
            if isinstance(part, Attention):
                part.kernel = attention
        return fast

    return ready, backend


def speed(name: str) -> Rows:
    """Measure tokens per second, seconds to make the step, and memory.

    Tokens per second are those of the steps alone, and of the whole call with the prompt read.
    """
    ready, backend = variant(name)
    model = ready(built(BIG))
    found = []
    for rows in BATCHES:
        torch._dynamo.reset()
        torch.cuda.reset_peak_memory_stats()
        measure = speed_at if backend else plain_speed_at
        figures = measure(model, prompts_of(BIG, rows), backend)
        found.append(
            {"variant": name, "batch": rows, **figures, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def plain_speed_at(model: ch.Transformer, prompts: list[list[int]], backend: str) -> dict[str, float]:
    """Neither compiled nor recorded."""
    read = Prompts(prompts)
    decode(model, Request(max_new_tokens=4), read)
    long, short = (
        seconds_of(lambda new=new: decode(model, Request(max_new_tokens=new), read)) for new in (64, 1)
    )
    took = long - short
    return {"step_tokens_per_second": len(prompts) * 63 / took}


@torch.inference_mode()
def speed_at(model: ch.Transformer, prompts: list[list[int]], backend: str) -> dict[str, float]:
    """One batch of prompts."""
    steps, rows = Steps(model, backend), len(prompts)
    begun = time.perf_counter()
    step = steps.find(rows, PROMPT + NEW, 0, True)
    torch.cuda.synchronize()
    figures = {"compile_seconds": time.perf_counter() - begun}
    assert step is not None, "not compiled: see the warning above"
    alone = []
    for _ in range(4):
        step.ids[:rows, 0] = prefill_fixed(model, Prompts(prompts), step.cache).argmax(-1)
        alone.append(seconds_of(lambda: step.run(NEW - 1)))
    request, read = Request(max_new_tokens=NEW, compile=True), Prompts(prompts)
    whole = min(seconds_of(lambda: decode(model, request, read, steps=steps)) for _ in range(4))
    figures |= {
        "step_tokens_per_second": rows * (NEW - 1) / min(alone),
        "whole_tokens_per_second": rows * NEW / whole,
    }
    figures |= {"ms_per_step": min(alone) / (NEW - 1) * 1e3, **step_error(model, step, prompts)}
    print(profile(step), flush=True)
    return figures


@torch.inference_mode()
def step_error(model: ch.Transformer, step: CompiledStep, prompts: list[list[int]]) -> dict[str, float]:
    """Measure how far the logits of one step are from the uncompiled ones, and how often the best differ.

    The distance is in standard deviations of the uncompiled logits.
    """
    rows, same = torch.arange(len(prompts), device=step.ids.device), ch.Cache()
    first = prefill_fixed(model, Prompts(prompts), step.cache).argmax(-1)
    prefill(model, prompts, same)
    ours, plain = (
        step(first, rows).float(),
        model(first[:, None], cache=same, logits="last").logits[:, -1].float(),
    )
    return {
        "logit_error": float((ours - plain).abs().max() / plain.std()),
        "same_best": float((ours.argmax(-1) == plain.argmax(-1)).float().mean()),
    }


def profile(step: CompiledStep) -> str:
    """Which kernels a step spends its time in."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    step.cache.cursor.fill_(PROMPT + NEW // 2)
    step.replay()
    step.cache.cursor.fill_(PROMPT + NEW // 2)
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        step.replay()
        torch.cuda.synchronize()
    return seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=60)


def equality() -> Rows:
    """In float32, tokens of the compiled variants against those of the model uncompiled."""
    torch.backends.cuda.matmul.allow_tf32 = False
    found = []
    model = built(SMALL, torch.float32)
    prompts = [prompt[: 20 + 17 * row] for row, prompt in enumerate(prompts_of(SMALL, 5, 100))]
    greedy = Request(max_new_tokens=100, compile=True)
    sampled = dataclasses.replace(greedy, temperature=0.8, top_p=0.9)
    ends = Ends(frozenset([7, 8]))
    for name in ("default", "descent", "kernels-recorded"):
        ready, backend = variant(name)
        torch._dynamo.reset()
        fast = ready(model)
        steps = Steps(fast, backend)
        for batch, request in itertools.product((prompts[:1], prompts), (greedy, sampled)):
            read = Prompts(batch, seeds=range(len(batch)))
            ours = decode(fast, request, read, ends, steps=steps)
            plain = decode(model, request, read, ends)
            differ = sum(a.ids != b.ids or a.stop_reason != b.stop_reason for a, b in zip(ours, plain)) + (
                steps.unfit is not None
            )
            found.append(
                noted(
                    f"rows that differ, float32, {name}, "
                    f"{len(batch)} rows, temperature {request.temperature}",
                    differ,
                    0,
                )
            )
    return found


def lengths() -> Rows:
    """How many steps are made, and how many graphs the compiler sees, over prompts of twenty lengths."""
    from torch._dynamo.utils import counters

    ready, backend = variant("default")
    model = ready(built(SMALL))
    steps = Steps(model, backend)
    counters.clear()
    sizes = [5 + 97 * i for i in range(20)]
    for size in sizes:
        request = Request(max_new_tokens=64, compile=True)
        decode(model, request, Prompts(prompts_of(SMALL, 1, size)), steps=steps)
    found = {
        "prompt_lengths": sizes,
        "steps_made": len(steps.made),
        "graphs": counters["stats"]["unique_graphs"],
    }
    print(json.dumps(found), flush=True)
    return [found]


def peer() -> Rows:
    """transformers with a static cache and its compiled step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(theirs).bfloat16().eval()
    return [peer_at(model, torch.tensor(prompts_of(BIG, rows), device="cuda")) for rows in BATCHES]


def peer_at(model: Any, ids: Tensor) -> dict[str, object]:
    """One batch of prompts."""
    options = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "cache_implementation": "static",
        "pad_token_id": 0,
    }
    run = functools.partial(model.generate, ids, attention_mask=torch.ones_like(ids), **options)
    first = seconds_of(run)
    run()
    rate = ids.shape[0] * NEW / min(seconds_of(run) for _ in range(3))
    row = {
        "variant": "transformers, static cache, compiled",
        "batch": ids.shape[0],
        "whole_tokens_per_second": rate,
        "compile_seconds": first,
    }
    print(json.dumps(row), flush=True)
    return row


PARTS = {
    "kernel-equality": kernel_equality,
    "equality": equality,
    "lengths": lengths,
    "tiles": tiles,
    "peer": peer,
}


def run_gpu_decode() -> None:
    """Time compiled decoding on a GPU: a 1.1B Llama shape in bfloat16, at batch 1 and 32.

    Prompts have 128 tokens, and 256 new ones follow.

    PYTHONPATH=src python benchmarks/run.py gpu_decode [JOB ...] [--seconds N] [--out FILE.json]

    A job is a variant of the step (see `VARIANTS`) or one of kernel-equality, equality, lengths, tiles,
    peer. Each runs in a process of its own, so that one that fails or takes too long harms no other; what
    is done when the time is up is kept.
    """
    parser = case_parser(run_gpu_decode, saves=False)
    parser.add_argument("jobs", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=540, help="time for all jobs together")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "h200_decode.json"))
    parser.add_argument("--here", metavar="FILE", help="run one job in this process and write what it found")
    given = parser.parse_args()
    known = [*PARTS, *VARIANTS]
    jobs = given.jobs or [
        "kernel-equality",
        "kernels",
        "kernels-recorded",
        "attention",
        "plain",
        "equality",
        "lengths",
        "descent",
    ]
    if unknown := [job for job in jobs if job not in known]:
        parser.error(f"{', '.join(unknown)} not known: choose from {', '.join(known)}")
    if given.here:
        job = jobs[0]
        rows = PARTS[job]() if job in PARTS else speed(job)
        Path(given.here).write_text(json.dumps(rows))
        return

    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    end = time.monotonic() + given.seconds
    body: dict[str, Any] = {
        "command": " ".join(
            ["PYTHONPATH=src python benchmarks/run.py gpu_decode", *jobs, f"--seconds {given.seconds:g}"]
        ),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "jobs": {},
    }
    for job in jobs:
        left = end - time.monotonic()
        if left < 15:
            body["jobs"][job] = "no time left"
            continue
        print(f"\n== {job}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            begun = time.monotonic()
            try:
                environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
                code = subprocess.run(
                    case_command("gpu_decode", job, "--here", str(file)), timeout=left, env=environment
                ).returncode
                body["jobs"][job] = (
                    json.loads(file.read_text()) if file.exists() else f"failed with code {code}"
                )
            except subprocess.TimeoutExpired:
                body["jobs"][job] = "took too long"
            print(f"== {job} took {time.monotonic() - begun:.0f} s", flush=True)
        Path(given.out).write_text(json.dumps(body, indent=2) + "\n")

    print(
        f"\n{'variant':<38}{'batch':>6}{'step tok/s':>12}{'whole tok/s':>12}"
        f"{'compile s':>11}{'peak GiB':>10}{'error':>9}"
    )
    for rows in body["jobs"].values():
        for row in rows if isinstance(rows, list) else ():
            if "batch" in row:
                figures = [
                    row.get(key)
                    for key in (
                        "step_tokens_per_second",
                        "whole_tokens_per_second",
                        "compile_seconds",
                        "peak_gib",
                    )
                ]
                shown = "".join(
                    f"{'-' if x is None else format(x, ',.1f'):>{w}}"
                    for x, w in zip(figures, (12, 12, 11, 10))
                )
                print(
                    f"{row['variant']:<38}{row['batch']:>6}{shown}"
                    f"{row.get('logit_error', float('nan')):>9.3f}"
                )
    unfinished = {job: rows for job, rows in body["jobs"].items() if not isinstance(rows, list)}
    failed = [
        row["check"]
        for rows in body["jobs"].values()
        if isinstance(rows, list)
        for row in rows
        if row.get("passed") is False
    ]
    print("unfinished:", unfinished or "none", " failed checks:", failed or "none")
