"""Check the core on a GPU: device = CPU, masked rows, bad ids before any kernel, compiled = not, taps' cost.

PYTHONPATH=src python benchmarks/gpu_core.py [OUT.json]
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from datetime import date

import torch

import clearhead as ch
from clearhead.core.attention import KERNELS
from clearhead.inside.checks import check
from clearhead.variants.presets import preset

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


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__)
    for part in (device_equals_cpu, masked_rows, bad_ids, suites, compiled, taps_cost):
        part()
    failed = [row for row in rows if not row["passed"]]
    if len(sys.argv) > 1:
        body = {
            "command": "PYTHONPATH=src python benchmarks/gpu_core.py",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "rows": rows,
        }
        with open(sys.argv[1], "w") as file:
            json.dump(body, file, indent=2)
    print(f"{len(rows) - len(failed)} passed, {len(failed)} failed")
    sys.exit(bool(failed))
