"""Two processes of one thread against one process of two threads, on a small decoder.

The same steps on the same rows, in turns: `PYTHONPATH=src python benchmarks/ranks.py --save`. Each turn gives
a ratio. A busy machine slows both sides of a turn, so that the range of ratios says more than either speed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "cpu_ranks.json"
SETTINGS = {
    **{"model.d_model": 128, "model.n_layers": 4, "model.n_heads": 4, "model.max_positions": 128},
    **{"data.batch_size": 16, "train.steps": 16, "train.log_every": 1, "train.samples": 0},
    **{"train.validate_every": 16, "train.precision": "float32", "train.device": "cpu", "train.seed": 0},
}


def speed(data: Path, out: Path, processes: int, mesh: str) -> float:
    """Train; return the median over the steps of tokens per second."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launch if processes > 1 else []), "-m", "clearhead", "train", str(data)]
    given = {**SETTINGS, "train.threads": 2 // processes, **({f"parallel.{mesh}": processes} if mesh else {})}
    for name, value in given.items():
        command += ["--set", f"{name}={value}"]
    threads = {"OMP_NUM_THREADS": str(2 // processes)}
    subprocess.run(
        [*command, "--out", str(out)], check=True, capture_output=True, env={**os.environ, **threads}
    )
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return statistics.median(line["tokens_per_second"] for line in lines if line["event"] == "stepped")


def summary(turns: list[dict[str, float]]) -> dict[str, object]:
    """Return the ratios of the speeds of two processes to that of one."""
    ratios = {name: sorted(turn[name] / turn["alone"] for turn in turns) for name in ("data", "shard")}
    ranges = {
        name: {"median": statistics.median(found), "least": found[0], "most": found[-1]}
        for name, found in ratios.items()
    }
    return {"date": date.today().isoformat(), "settings": SETTINGS, "efficiency": ranges, "turns": turns}


def main() -> None:
    """Measure in turns and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    turns = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        data = folder / "text.txt"
        data.write_text("the quick brown fox jumps over the lazy dog and sings of the wide blue sea\n" * 2000)
        for turn in range(given.turns):
            rates = {
                name: speed(data, folder / f"{name}{turn}", processes, mesh)
                for name, processes, mesh in (("alone", 1, ""), ("data", 2, "data"), ("shard", 2, "shard"))
            }
            turns.append(rates)
            print(json.dumps({name: round(rate) for name, rate in rates.items()}), flush=True)
            if given.save:
                RESULTS.write_text(json.dumps(summary(turns), indent=1) + "\n")
    print(json.dumps(summary(turns)["efficiency"]))


if __name__ == "__main__":
    main()
