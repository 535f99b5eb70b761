"""What each kind of attention costs: time and memory of a training step of one layer against its length.

    python benchmarks/kinds.py [--longest 65536] [--device cuda] [--save]

One layer of 8 heads of 64, one row: forward and backward. Beside it, what `ch.cost` computes. The slope is
that of log time against log length over the lengths from `SLOPE_FROM` on; the crossing is the shortest length
at which a kind is quicker than full attention. Full attention stops where a step takes `PATIENCE` seconds.
`--save` also draws docs/images/kinds_DEVICE.png: lines are measured, dots are the FLOPs of `ch.cost`, scaled
to the first point of the line from `SLOPE_FROM` on.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import clearhead as ch
from common import device_name, processor_name, save

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
SLOPE_FROM = {"cpu": 4096, "cuda": 32768}  # shorter rows do not keep the device busy
PATIENCE = 60.0
IMAGES = Path(__file__).parents[1] / "docs" / "images"


def measure(kind: str, length: int, device: str) -> dict[str, float]:
    """Seconds of the quicker of two steps, peak bytes (a GPU's own count), FLOPs and bytes by `ch.cost`."""
    family = "encoder" if kind.startswith("low-rank") else "decoder"
    config = ch.ModelConfig(
        family=family, vocab_size=256, d_model=512, n_layers=1, n_heads=8, positions="rope",
        max_positions=length, attention=kind, head="none",
    )  # fmt: skip
    torch.manual_seed(0)
    model = ch.Transformer(config).to(device)
    ids = torch.randint(256, (1, length), device=device)
    seconds = []
    for _ in range(2):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        model(ids).hidden.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if seconds[-1] > PATIENCE:
            break
    priced = ch.cost(config, length)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {
        "seconds": min(seconds),
        "peak_bytes": peak,
        "flops": priced.flops.forward.total + priced.flops.backward.total,
        "activation_bytes": priced.memory.activations.total,
    }


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--longest", type=int, default=65536)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    lengths = [length for length in (1024 << power for power in range(9)) if length <= options.longest]
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in options.kinds}
    for length in lengths:
        for name in options.kinds:
            before = found[name].get(length // 2)
            if before is not None and before["seconds"] > PATIENCE / 4:
                continue
            found[name][length] = measure(KINDS[name], length, options.device)
            print(f"{name:<18}{length:>8}  {found[name][length]['seconds']:9.3f} s", flush=True)
    rows, begin = [], SLOPE_FROM[options.device]
    for name, points in found.items():
        full = found.get("full", {})
        quicker = [n for n in points if n in full and points[n]["seconds"] < full[n]["seconds"]]
        row = {
            "kind": KINDS[name],
            "slope_of_time": slope(points, "seconds", begin),
            "slope_of_flops": slope(points, "flops", begin),
            "slope_of_activations": slope(points, "activation_bytes", begin),
            "quicker_than_full_from": min(quicker, default=None),
            "points": points,
        }
        rows.append(row)
        print(f"{name:<18} time {row['slope_of_time']}  FLOPs {row['slope_of_flops']}  "
              f"from {row['quicker_than_full_from']}")  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak of the process {peak / 2**30:.1f} GiB; median of the slopes of time "
          f"{statistics.median(row['slope_of_time'] or 0 for row in rows):.2f}")  # fmt: skip
    if options.save:
        name = device_name() if options.device == "cuda" else processor_name()
        save(f"kinds_{options.device}", [{"device": name, "peak_bytes": peak, "rows": rows}])
        draw(rows, name, begin)


if __name__ == "__main__":
    main()
