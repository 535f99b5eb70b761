"""What benchmarks share: rounds in turn, medians, ratios to a peer in one run, records, a minimal GPT."""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RESULTS = Path(__file__).parent / "results"


def alternate(
    jobs: dict[str, Callable[[], None]],
    rounds: int,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each job by `clock`, the jobs taking turns so that noise falls on all alike."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(warm + rounds):
        for name, job in jobs.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = clock()
            job()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= warm:
                times[name].append(clock() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def case_command(name: str, *arguments: str) -> list[str]:
    """The command that runs a case in a process of its own."""
    return [sys.executable, str(Path(__file__).with_name("run.py")), name, *arguments]


def case_parser(case: Callable[[], None], saves: bool = True) -> argparse.ArgumentParser:
    """The command line of a case, whose help is what its function says; with `saves` it has --save."""
    parser = argparse.ArgumentParser(
        description=inspect.getdoc(case), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if saves:
        parser.add_argument("--save", action="store_true", help="write the record under benchmarks/results")
    return parser


def ask_worker(process: subprocess.Popen[str]) -> list[float]:
    """Let a worker run its job once; return its seconds, and what else it measures."""
    assert process.stdin is not None and process.stdout is not None
    print("go", file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith("seconds "):
            return [float(number) for number in line.split()[1:]]
    raise SystemExit("a worker ended before it answered")


def device_name() -> str:
    """The accelerator's name, or the processor's kind and number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return processor_name()


def processor_name() -> str:
    """The processor's kind, its name where the system says it, and the number of threads."""
    kind = platform.machine()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return f"CPU {' '.join([kind, *sorted(names)])}, {torch.get_num_threads()} threads"


def by_processor(name: str) -> str:
    """The name of a result for this kind of processor: those of Arm and of x86 lie side by side."""
    return name if platform.machine() == "aarch64" else f"{name}_{platform.machine()}"


def report(title: str, seconds: dict[str, float], tokens: int, ours: str = "clearhead") -> dict[str, object]:
    """Print tokens per second of each job and the ratio of ours to it; return the same as data."""
    print(f"\n{title}  [{device_name()}, torch {torch.__version__}]")
    rows = {}
    for name, took in seconds.items():
        rate = tokens / took
        rows[name] = {"tokens_per_second": round(rate, 1), "ours_over_this": round(took / seconds[ours], 3)}
        print(f"  {name:<28}{rate:>12,.1f} tok/s   clearhead is {took / seconds[ours]:.2f} x")
    return {"title": title, "device": device_name(), "torch": torch.__version__, "rows": rows}


def running_command() -> str:
    """The command that measures, as it was typed, without the folders of this machine."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def save(name: str, results: list[dict[str, object]], path: Path | None = None) -> None:
    """Write results with the running command and the date to a file, by default under benchmarks/results/."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    body = {"command": running_command(), "date": date.today().isoformat(), "results": results}
    path.write_text(json.dumps(body, indent=2) + "\n")


class KeptParts:
    """Prints each part as soon as it is measured and, with `--save`, writes it into its file at once.

    A run that is cut off keeps what it has: other parts of the file stay as they were, each with its own
    command and date.
    """

    def __init__(self, saves: bool) -> None:
        self.saves, self.start = saves, time.perf_counter()

    def __call__(self, file: str, part: dict[str, object], **about: str) -> None:
        """Add what the parts of a file share to this one, and keep it."""
        took = round(time.perf_counter() - self.start, 1)
        when = {"command": running_command(), "measured": date.today().isoformat(), "part_took_s": took}
        made = {"device": device_name(), **part, **about, **when}
        print(json.dumps(made), flush=True)
        if self.saves:
            path = RESULTS / f"{file}.json"
            there = json.loads(path.read_text())["results"] if path.exists() else []
            save(file, [*(one for one in there if one["title"] != made["title"]), made])
        self.start = time.perf_counter()


# The least code that is a GPT, for others to be measured by: no options, nothing to look into.


class MinimalBlock(nn.Module):
    """One projection for q, k and v, the fused kernel. Streams [B, T, D] -> [B, T, D]."""

    def __init__(self, heads: int, width: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class MinimalGPT(nn.Module):
    """Ids [B, T] -> logits [B, T, V], by the table of tokens."""

    def __init__(
        self, layers: int, heads: int, width: int, length: int, vocab: int, bias: bool = True
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(MinimalBlock(heads, width, bias) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.norm(self.blocks(x)) @ self.tokens.weight.T
