"""Train one tiny recipe many times beside busy processes: one precision, and one set of bits?

python benchmarks/same_bits.py [--runs 20] [--busy 2] [--set KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

TINY = ("model.d_model=64", "model.n_layers=2", "model.n_heads=2", "model.max_positions=32")
STEPS = ("data.batch_size=8", "train.steps=10", "train.samples=0", "train.device=cpu")
TEXT = "the quick brown fox jumps over the lazy dog while it sings of the sea\n" * 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--busy", type=int, default=2, help="processes that compute beside the runs")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder) / "text.txt"
            text.write_text(TEXT)
            for number in range(options.runs):
                out = Path(folder) / f"run-{number}"
                settings = [f"--set={one}" for one in (*TINY, *STEPS, *options.set)]
                command = [
                    sys.executable,
                    "-m",
                    "clearhead",
                    "train",
                    str(text),
                    "--out",
                    str(out),
                    *settings,
                ]
                subprocess.run(command, check=True, capture_output=True)
                recipe = (out / "train.toml").read_text()
                precision = next(line for line in recipe.splitlines() if line.startswith("precision"))
                bits = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()[:16]
                found[precision.split("#")[0].strip(), bits] += 1
    finally:
        for one in busy:
            one.kill()
    for (precision, bits), count in found.items():
        print(
            f"{count} of {options.runs} runs beside {options.busy} busy processes: {precision}, bits {bits}"
        )


if __name__ == "__main__":
    main()
