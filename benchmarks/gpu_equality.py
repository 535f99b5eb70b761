"""Equality on a GPU: the core, finite gradients, sparse attention."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
from benchmarks.common import case_parser, device_name, save
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead as ch
from clearhead.core import attention, masks
from clearhead.core.attention import KERNELS
from clearhead.core.config.kinds import Kind
from clearhead.inside.checks import check
from clearhead.variants import block_attention
from clearhead.variants.block_attention import BlockPlan
from clearhead.variants.blocks import plan_blocks
from clearhead.variants.checks import read_kind
from clearhead.variants.presets import preset

# gpu_core -------------------------------------------------------------------------------------------------


rows: list[dict[str, object]] = []


def note(name: str, value: float, allowed: float) -> None:
    passed = value <= allowed
    rows.append({"check": name, "value": value, "allowed": allowed, "passed": passed})
    print(f"{'ok  ' if passed else 'FAIL'} {name:<74} {value:.2e} (allowed {allowed:.0e})", flush=True)


def device_equals_cpu() -> None:
    """Compare logits on the GPU with the CPU's: every family and position scheme, float32 without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    worst = {}
    families, schemes = (
        ("decoder", "encoder", "encoder-decoder"),
        ("learned", "sinusoidal", "rope", "alibi", "relative", "none"),
    )
    for family, positions, kv, window in itertools.product(families, schemes, (4, 1), (None, 5)):
        torch.manual_seed(0)
        config = ch.ModelConfig(
            family=family,
            vocab_size=50,
            d_model=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=kv,
            positions=positions,
            window=window,
            max_positions=64,
        )
        model = ch.Transformer(config).eval()
        ids, mask = torch.randint(50, (3, 20)), torch.ones(3, 20, dtype=torch.bool)
        mask[1, :7], mask[2, 12:] = False, False
        more = {"source": torch.randint(50, (3, 11))} if family == "encoder-decoder" else {}
        with torch.no_grad():
            here = model(ids, mask, **more).logits
            model.cuda()
            there = model(ids.cuda(), mask.cuda(), **{k: v.cuda() for k, v in more.items()}).logits.cpu()
        worst[family] = max(worst.get(family, 0.0), float((here - there)[mask].abs().max()))
    for family, gap in worst.items():
        note(f"device = CPU, {family}, all positions, windows, kv heads, padding", gap, 1e-5)


def masked_rows() -> None:
    """A query that may attend to nothing: zeros and finite gradients, on both kernels and in two dtypes."""
    for kernel, dtype, biased in itertools.product(KERNELS, (torch.float32, torch.bfloat16), (False, True)):
        q, k, v = (
            torch.randn(2, 4, 33, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
        )
        mask = torch.rand(2, 1, 33, 33, device="cuda") > 0.5
        mask[:, :, 3] = False
        bias = torch.randn(1, 4, 33, 33, device="cuda", dtype=dtype) if biased else None
        out = KERNELS[kernel](q, k, v, mask, bias)
        out.float().square().sum().backward()
        finite = all(bool(x.grad.isfinite().all()) for x in (q, k, v)) and bool(out.isfinite().all())
        gap = float(out[:, :, 3].detach().abs().max()) if finite else float("inf")
        note(f"masked row is zero, gradients finite, {kernel}, {dtype}, bias {biased}", gap, 0.0)


def bad_ids() -> None:
    """An id outside the table is one clear line, and the GPU lives on."""
    model = ch.Transformer(preset("micro-decoder")).cuda()
    try:
        model(torch.tensor([[1, 10_000]], device="cuda"))
        caught = 1.0
    except ch.InputError as error:
        print("     ", error)
        caught = 0.0
    dead = float(torch.ones(4, device="cuda").sum().item() != 4)
    note("id outside the vocabulary is refused before any kernel, context alive", caught + dead, 0.0)


def suites() -> None:
    for name in ("micro-decoder", "micro-encoder", "micro-encoder-decoder", "micro-vit"):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            results = check(ch.Transformer(preset(name)).to("cuda", dtype))
            note(
                f"equality suite, {name}, {dtype}: rows that fail of {len(results)}",
                float(sum(not row.passed for row in results)),
                0.0,
            )


def compiled() -> None:
    torch.manual_seed(0)
    config = preset("micro-decoder").replace(
        positions="rope", norm="rmsnorm", gated=True, activation="silu", bias=False
    )
    model = ch.Transformer(config).cuda().eval()
    ids = torch.randint(config.vocab_size, (2, 24), device="cuda")
    fast = torch.compile(model)
    with torch.no_grad():
        note("compiled = not, float32", float((fast(ids).logits - model(ids).logits).abs().max()), 1e-5)


def taps_cost() -> None:
    """Time of a forward as it is, against one whose taps are cut out."""
    from clearhead.core import taps

    model = (
        ch.Transformer(preset("gpt2").replace(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0))
        .cuda()
        .bfloat16()
        .eval()
    )
    ids = torch.randint(50257, (8, 1024), device="cuda")

    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            model(ids, logits="none")
        torch.cuda.synchronize()
        return time.perf_counter() - start

    [once() for _ in range(5)]
    forward = statistics.median(once() for _ in range(20))
    start = time.perf_counter()
    x = torch.zeros(1)
    for _ in range(100_000):
        taps.SILENT("pattern", x)
    per_call = (time.perf_counter() - start) / 100_000
    share = per_call * len(ch.tap_names(model.config)) / forward
    note("share of a GPT-2 forward (8 x 1024) spent in silent taps", share, 0.01)


def run_gpu_core() -> None:
    """Check the core on a GPU: device = CPU, masked rows, bad ids before any kernel, compiled, taps' cost.

    PYTHONPATH=src python benchmarks/run.py gpu_core [OUT.json]
    """
    print(torch.cuda.get_device_name(), torch.__version__)
    for part in (device_equals_cpu, masked_rows, bad_ids, suites, compiled, taps_cost):
        part()
    failed = [row for row in rows if not row["passed"]]
    if len(sys.argv) > 1:
        body = {
            "command": "PYTHONPATH=src python benchmarks/run.py gpu_core",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "rows": rows,
        }
        with open(sys.argv[1], "w") as file:
            json.dump(body, file, indent=2)
    print(f"{len(rows) - len(failed)} passed, {len(failed)} failed")
    sys.exit(bool(failed))


# gpu_gradients --------------------------------------------------------------------------------------------


LENGTHS = (8, 40, 64, 72, 128, 192, 320)
GPU_GRADIENTS_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def gpu_gradients_masks(length: int) -> dict[str, tuple[Tensor | None, bool]]:
    """By name, a mask and whether the pass is causal."""
    padding = torch.ones(2, 1, length, length, dtype=torch.bool, device="cuda")
    padding[1, :, :, length // 2 :] = False
    causal = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    return {"none": (None, False), "causal": (None, True), "padding": (padding, False),
            "causal and padding": (causal & padding, False)}  # fmt: skip


def finite(call: Any, length: int, width: int, shift: float) -> bool:
    """Return whether output and gradients are finite where all scores are near `shift`."""
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, 4, length, width, device="cuda").bfloat16() * s for s in (0.1, 0.1, 1.0))
    q[..., 0], k[..., 0] = 1.0, shift * width**0.5
    given = [x.requires_grad_() for x in (q, k, v)]
    out = call(*given)
    out.backward(torch.ones_like(out))
    return all(bool(x.isfinite().all()) for x in (out, *(x.grad for x in given)))


def forced(backend: SDPBackend, mask: Tensor | None, causal: bool, *qkv: Tensor) -> Tensor:
    """Attend with one kernel of PyTorch."""
    with sdpa_kernel(backend):
        return nnf.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=causal)


def ours(mask: Tensor | None, causal: bool, *qkv: Tensor) -> Tensor:
    """Attend as every model of clearhead does."""
    return attention.fused(*qkv, mask, causal=causal)


def table() -> dict[str, list[str]]:
    """Of each way to attend, the cases that are not finite."""
    bad: dict[str, list[str]] = {name: [] for name in (*GPU_GRADIENTS_KERNELS, "clearhead")}
    for width in (32, 64, 128):
        for shift in (-120.0, 0.0, 120.0):
            for length in LENGTHS:
                for kind, (mask, causal) in gpu_gradients_masks(length).items():
                    ways = {
                        name: partial(forced, kernel, mask, causal)
                        for name, kernel in GPU_GRADIENTS_KERNELS.items()
                    }
                    for name, call in {**ways, "clearhead": partial(ours, mask, causal)}.items():
                        try:
                            sound = finite(call, length, width, shift)
                        except RuntimeError:
                            continue  # this kernel does not take such a mask
                        if not sound:
                            bad[name].append(f"{length} keys, width {width}, {kind}, scores {shift:+.0f}")
    return bad


def train(files: list[str], seconds: float, cudnn: bool) -> dict[str, int]:
    """Train for some seconds; return the steps, and those that were skipped."""
    sound = attention.sound
    if cudnn:
        attention.sound = nullcontext
    end = time.monotonic() + seconds
    settings = {"tokens.vocab_size": 5000, "train.steps": 16000, "train.precision": "bfloat16",
                "train.validate_every": 4000}  # fmt: skip
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = ch.train(
                files, recipe="original-transformer", out=Path(folder) / "run", settings=settings,
                stop=lambda: time.monotonic() > end,
            )  # fmt: skip
    finally:
        attention.sound = sound
    return {"steps": done.step, "skipped": done.skipped}


def run_gpu_gradients() -> None:
    """Look for gradients of attention that are not finite on a GPU: by kernel, mask, length and size of
    scores.

        python benchmarks/run.py gpu_gradients [--train TRAIN.en TRAIN.de] [--seconds 60] [--save]

    All scores of a query are shifted together, which changes no output. With --train the recipe
    original-transformer runs in bfloat16, as it is and with cuDNN's kernel let in; steps that are not
    finite are skipped and counted.
    """
    parser = case_parser(run_gpu_gradients)
    parser.add_argument("--train", nargs=2)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found["not finite"] = table()
    for name, cases in found["not finite"].items():
        print(f"{name:10} {len(cases):3} not finite", *cases[:3], sep="; ")
    for cudnn in (False, True) if options.train else ():
        name = "training, cuDNN let in" if cudnn else "training"
        found[name] = train(options.train, options.seconds, cudnn)
        print(name, found[name])
    if options.save:
        save("h200_gradients", [found])


# flex -----------------------------------------------------------------------------------------------------


KINDS = ("window(256)", "blocks(64, 3, 64, 0, 3)", "dilated(64, 4)")
HEADS, WIDTH = 8, 64


def tokens_of(kind: Kind, length: int, device: str, padded: bool) -> masks.TokenInfo:
    """The tokens of a row; `padded`: its first quarter is padding."""
    mask = torch.arange(length, device=device)[None] >= length // 4 if padded else None
    tokens = masks.tokens_from(1, length, torch.device(device), mask)
    return kind.describe(tokens, True, tokens.order, None)


def plan_of(kind: Kind, tokens: masks.TokenInfo, flexible: bool) -> BlockPlan | None:
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


def run_flex() -> None:
    """Gathered blocks versus `flex_attention` on a GPU: the same mask, forward and backward, equality and
    time.

        python benchmarks/run.py flex [--lengths 4096 16384 65536] [--limit 90] [--out PATH] [--device cuda]

    8 heads of 64, one row, bfloat16, for each kind: `attend_blocks` with the plan of each, from queries,
    keys and values to their gradients. Differences are those of answers and gradients from gathered blocks
    in float32, divided by the largest of these, beside what gathered blocks in bfloat16 differ by
    themselves. Milliseconds are medians of several rounds, the two in turn; the plan of a pass, which all
    layers share, is timed apart. A padded row of the shortest length is compared too, since its padding
    sees nothing. Compiling is counted by itself: with lengths left open it should happen once for each
    kind. `--limit` seconds stop the series before the next case. `--device cpu` compares forward passes
    alone, in float32 and uncompiled.

    `attending(model, "flex")` chooses it in a model.
    """
    parser = case_parser(run_flex, saves=False)
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
