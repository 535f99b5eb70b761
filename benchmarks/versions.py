"""Two versions of clearhead side by side: is the one in this checkout as fast as the one in another?

    git worktree add ../before COMMIT
    python benchmarks/run.py versions ../before [--rounds 9] [--device cuda] [--save]

Each version runs in a process of its own; they take turns round by round, so that noise falls on both alike.
Only names that are public in both are used: decoding through `generate`, training through `ch.train`, serving
through `clearhead serve`. Of serving, the seconds are the server's processor seconds, and `p99` is the 99th
percentile of the milliseconds between the events of eight streams.
"""

from __future__ import annotations

import argparse
import atexit
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import case_command

HERE = Path(__file__).resolve().parents[1]
# By device: the jobs, with the rows of a batch.
JOBS = {
    "cpu": {"decode, batch 1": 1, "decode, batch 8": 8, "train": 8, "serve": 8, "serve, a small model": 8},
    "cuda": {"decode, batch 1": 1, "decode, batch 32": 32, "train": 32},
}
GPT = {"vocab_size": 50257, "d_model": 768, "n_layers": 12, "n_heads": 12, "activation": "gelu_tanh"}
LLAMA = {
    **{"vocab_size": 32000, "d_model": 2048, "n_layers": 22, "n_heads": 32, "n_kv_heads": 4, "d_ff": 5632},
    **{"positions": "rope", "norm": "rmsnorm", "activation": "silu", "gated": True, "bias": False},
    **{"tie_embeddings": False, "max_positions": 2048},
}


def decode_job(batch: int, device: str, tokens: int) -> Callable[[], float]:
    """Time decoding: on a CPU the 124M GPT-2 shape, on a GPU a 1.1B Llama shape in bfloat16, compiled."""
    import torch

    import clearhead as ch

    torch.manual_seed(0)
    gpu = device == "cuda"
    config = ch.ModelConfig(**(LLAMA if gpu else GPT))
    whole = getattr(ch, "Model", None) or ch.Loaded
    with torch.device(device):
        model = ch.Transformer(config)
    m = whole(model.bfloat16() if gpu else model)
    prompts = torch.randint(config.vocab_size, (batch, 128 if gpu else 16)).tolist()

    def run() -> float:
        start = time.perf_counter()
        m.generate(prompts, 256 if gpu else tokens, compile=True if gpu else None)
        return time.perf_counter() - start

    return run


def train_job(batch: int, device: str) -> Callable[[], float]:
    """Time a step of `ch.train` on characters: 10.7M parameters on a CPU, the 124M shape on a GPU."""
    import torch

    import clearhead as ch

    gpu = device == "cuda"
    folder = Path(tempfile.mkdtemp())
    text = folder / "text.txt"
    text.write_text(Path(torch.__file__).parent.joinpath("functional.py").read_text() * (20 if gpu else 1))
    width, depth = (768, 12) if gpu else (384, 6)
    sizes = {"d_model": width, "n_layers": depth, "n_heads": depth}
    model = {**sizes, "max_positions": 1024 if gpu else 256, "dropout": 0.0}
    warm, steps = (20, 60) if gpu else (2, 8)
    settings = [f"model.{name}={value}" for name, value in model.items()]
    settings += [
        "tokens.kind=char",
        f"data.batch_size={batch}",
        f"train.steps={steps}",
        f"train.device={device}",
    ]
    settings += [
        f"train.log_every={10 if gpu else 1}",
        "train.validate_every=1000",
        "train.save_every=1000",
        f"train.compile={str(gpu).lower()}",
    ]
    count = 0

    def run() -> float:
        nonlocal count
        count += 1
        times: dict[int, float] = {}  # by step; on a GPU not every step is reported

        def on_event(event: Any) -> None:
            if type(event).__name__ == "Stepped":
                times[event.step] = time.perf_counter()

        ch.train(str(text), out=str(folder / str(count)), settings=settings, on_event=on_event)
        first, last = min(step for step in times if step >= warm), max(times)
        return (times[last] - times[first]) / (last - first)

    return run


def serve_job(streams: int, tokens: int, small: bool) -> Callable[[], tuple[float, float]]:
    """Time streams over HTTP: processor seconds of the server, and the 99th percentile between events."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    import clearhead as ch

    torch.manual_seed(0)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    shape = {**GPT, **({"d_model": 64, "n_layers": 4, "n_heads": 4} if small else {}), "vocab_size": 256}
    folder = tempfile.mkdtemp()
    ch.Model(ch.Transformer(ch.ModelConfig(**shape)), tokenizer).save(folder)
    command = [sys.executable, "-m", "clearhead", "serve", folder, "--port", "0", "--drain", "1"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    atexit.register(server.terminate)
    assert server.stderr is not None
    port = next(int(found[1]) for line in server.stderr if (found := re.search(r"127.0.0.1:(\d+)/", line)))
    body = {"max_tokens": tokens, "min_tokens": tokens, "temperature": 0.8, "stream": True}

    def busy() -> float:
        threads = Path(f"/proc/{server.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def events(seed: int) -> list[float]:
        """Return when the events of one stream came."""
        connection = http.client.HTTPConnection("127.0.0.1", port)
        given = {**body, "prompt": f"{seed} once upon a time", "seed": seed}
        connection.request("POST", "/v1/completions", json.dumps(given), {"Content-Type": "application/json"})
        return [time.perf_counter() for line in connection.getresponse() if line.startswith(b"data: {")]

    def run() -> tuple[float, float]:
        start = busy()
        with ThreadPoolExecutor(streams) as several:
            times = list(several.map(events, range(streams)))
        gaps = sorted(after - one for row in times for one, after in pairwise(row))
        return busy() - start, 1000 * gaps[round(0.99 * (len(gaps) - 1))]

    return run


def worker(job: str, device: str, tokens: int) -> None:
    """Run the job once for each line that comes in, and answer with what it measures, seconds first."""
    rows = JOBS[device][job]
    if job.startswith("serve"):
        serving = serve_job(rows, tokens, small=job != "serve")
        for _ in sys.stdin:
            print("seconds {} {}".format(*serving()), flush=True)
    else:
        run = train_job(rows, device) if job == "train" else decode_job(rows, device, tokens)
        for _ in sys.stdin:
            print(f"seconds {run()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", nargs="+")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a decoding on a CPU")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, options.device, options.tokens)
    results: list[dict[str, object]] = []
    for job in options.jobs or JOBS[options.device]:
        command = [
            *case_command("versions"),
            str(options.before),
            "--device",
            options.device,
            "--tokens",
            str(options.tokens),
            "--worker",
            job,
        ]
        workers = {
            name: subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(folder.resolve() / "src")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, folder in (("before", options.before), ("now", HERE))
        }
        times: dict[str, list[float]] = {"before": [], "now": []}
        gaps: dict[str, list[float]] = {"before": [], "now": []}
        for turn in range(options.rounds + 1):
            for name in list(workers) if turn % 2 else list(workers)[::-1]:
                seconds, *gap = ask(workers[name])
                if turn:  # the first round is for warming up
                    times[name].append(seconds)
                    gaps[name] += gap
        for process in workers.values():
            process.communicate()
        before, now = statistics.median(times["before"]), statistics.median(times["now"])
        pairs = sorted(old / new for old, new in zip(times["before"], times["now"]))
        ratio = statistics.median(pairs)
        print(f"{job:<18} before {before:.3f} s   now {now:.3f} s   now is {ratio:.3f} x as fast "
              f"({pairs[0]:.3f} to {pairs[-1]:.3f})", flush=True)  # fmt: skip
        results.append({"job": job, "seconds": times, "now_over_before": round(ratio, 4)})
        if gaps["now"]:
            of_gaps = statistics.median(old / new for old, new in zip(gaps["before"], gaps["now"]))
            print(f"{'':<18} p99 between events: now is {of_gaps:.3f} x as fast", flush=True)
            results[-1] |= {"p99_ms": gaps, "p99_now_over_before": round(of_gaps, 4)}
    if options.save:
        from benchmarks.common import device_name, save

        serving = all(str(row["job"]).startswith("serve") for row in results)
        save(
            f"versions_{'serve' if serving else options.device}", [{"device": device_name(), "jobs": results}]
        )


def ask(process: subprocess.Popen[str]) -> list[float]:
    """Let a worker run its job once; return its seconds, and what else it measures."""
    assert process.stdin is not None and process.stdout is not None
    print("go", file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith("seconds "):
            return [float(number) for number in line.split()[1:]]
    raise SystemExit("a worker ended before it answered")
