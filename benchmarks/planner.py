"""Training on many devices: what the planner predicts, and what a mesh costs."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.common import ask_worker, case_command, case_parser, save

import clearhead as ch
from clearhead.learn.parallel.division import Checkpointing, MeshSizes, Work, read_mesh
from clearhead.learn.parallel.estimate import DEVICES, Cluster, Device, MeshCost, estimate

GIB = 2**30
PAGE = Path(__file__).parents[1] / "docs" / "parallel.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
SOURCES = {
    "titan 2024": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "titan H200": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
    "llama3-8b_h200_202506_trainy-whitefiber.md",
    "titan A100": "https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md",
    "titan 405B": "https://github.com/pytorch/torchtitan/commits/main/docs/performance.md",
    "titan 2025": "https://github.com/pytorch/torchtitan/blob/2887250bbd9103d0bc997ea2efb3a525b5e5dbc0/benchmarks/"
    "asyncTP_llama3_h100_2025-06_torchtitan.md",
    "picotron": "https://github.com/huggingface/picotron#readme",
    "here": "../benchmarks/results/h200_train.json",
}

LLAMA = ch.preset("llama-3-8b").replace(max_positions=2**18)
LLAMA_2 = LLAMA.replace(vocab_size=32_000, max_positions=4096)
GPT = ch.preset("gpt2").replace(vocab_size=50_304, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
MODELS = {
    "Llama 3 8B": LLAMA,
    "Llama 3 70B": ch.preset("llama-3-70b"),
    "Llama 3 405B": LLAMA.replace(d_model=16_384, n_layers=126, n_heads=128, d_ff=53_248),
    "Llama 2 7B": LLAMA_2.replace(n_kv_heads=32, d_ff=11_008),
    "Llama 2 13B": LLAMA_2.replace(d_model=5120, n_layers=40, n_heads=40, n_kv_heads=40, d_ff=13_824),
    "Llama 2 70B": ch.preset("llama-3-70b").replace(vocab_size=32_000, max_positions=4096),
    "SmolLM 1.7B": LLAMA.replace(
        vocab_size=49_152,
        d_model=2048,
        n_layers=24,
        n_heads=32,
        n_kv_heads=32,
        d_ff=8192,
        tie_embeddings=True,
    ),
    "GPT-2 124M": GPT,
    "GPT-2 124M, no biases": GPT.replace(bias=False),
}
# torchtitan's H100s have 96 GB of HBM2e at 2.4 TB/s, and run at 500 W.
GRAND_TETON = dataclasses.replace(DEVICES["h100"], memory=96e9, bandwidth=2.4e12)
MACHINES = {
    "H100": GRAND_TETON,
    "H100 SXM": DEVICES["h100"],
    "H200": DEVICES["h200"],
    "A100": DEVICES["a100"],
}


@dataclass(frozen=True)
class Run:
    """One published run."""

    source: str
    model: str
    machine: str
    length: int
    rows: int  # of the whole batch
    mesh: str
    micro: int  # rows of a micro-batch
    rate: float  # tokens per second and device; below 1: MFU
    memory: float | None = None  # peak, GiB
    precision: str = "bfloat16"
    checkpointing: Checkpointing = "full"
    logit_bytes: float = 14
    interleave: int = 1
    note: str = ""

    def predict(self, device: Device | None = None) -> MeshCost:
        """Return what the planner says of this run."""
        mesh, device = read_mesh(self.mesh) if self.mesh else MeshSizes(), device or MACHINES[self.machine]
        work = Work(
            MODELS[self.model],
            self.length,
            self.rows,
            self.precision,
            self.checkpointing,
            loss_chunk=0,
            logit_bytes=self.logit_bytes,
            interleave=self.interleave,
        )
        return estimate(work, Cluster(device, mesh.devices, device.memory, 50e9), mesh, self.micro)


def _runs() -> list[Run]:
    eight, large, huge = "Llama 3 8B", "Llama 3 70B", "Llama 3 405B"
    selective: Checkpointing = "selective"
    none: Checkpointing = "none"
    wide = "shard=32,tensor=8"
    deep = "shard=8,tensor=8,pipeline=8"
    old, new, a100 = "titan 2024", "titan H200", "titan A100"
    made = [
        Run(old, eight, "H100", 8192, 16, "shard=8", 2, 6667, 77.0, checkpointing=selective),
        Run(old, eight, "H100", 8192, 16, "shard=8", 2, 8532, 76.8, "float8", selective),
        Run(old, eight, "H100", 8192, 256, "shard=128", 2, 6514, 62.0, checkpointing=selective),
        Run(old, eight, "H100", 8192, 256, "shard=128", 2, 8380, 61.8, "float8", selective),
        Run(old, eight, "H100", 32768, 8, "shard=8", 1, 3890, 83.9, "float8"),
        Run(old, eight, "H100", 65536, 4, "shard=4,context=2", 1, 2540, 84.2, "float8"),
        Run(old, eight, "H100", 131072, 2, "shard=2,context=4", 1, 1071, 84.0, "float8"),
        Run(old, eight, "H100", 262144, 1, "context=8", 1, 548, 84.5, "float8"),
        Run(old, large, "H100", 8192, 512, wide, 16, 829, 71.9, "float8", logit_bytes=20),
        Run(old, large, "H100", 8192, 512, wide, 16, 876, 67.6, "float8", logit_bytes=20, note="async TP"),
        Run(old, huge, "H100", 8192, 256, deep, 4, 100, 82.5, "float8", logit_bytes=20, note="1F1B"),
        Run(old, huge, "H100", 8192, 256, deep, 4, 128, 72.7, "float8", "full", 20, 2, "interleaved"),
    ]
    for context, rate, memory in ((1, 76, 75.3), (2, 47, 75.9), (4, 31, 77.1), (8, 16, 84.9)):
        mesh = f"shard={8 // context},tensor=8,pipeline=8,context={context}"
        rows, length = 64 // context, 32768 * context
        made.append(Run(old, huge, "H100", length, rows, mesh, 1, rate, memory, "float8", logit_bytes=20))
    flat = "shard=16,tensor=8"
    return [
        *made,
        Run("titan 405B", huge, "H100", 8192, 32, flat, 2, 109, logit_bytes=20),
        Run("titan 405B", huge, "H100", 8192, 32, flat, 2, 177, None, "float8", logit_bytes=20),
        Run("titan 2025", large, "H100", 8192, 512, wide, 16, 597.3, logit_bytes=20),
        Run("titan 2025", large, "H100", 8192, 512, wide, 16, 809.8, None, "float8", logit_bytes=20),
        Run(
            "titan 2025",
            eight,
            "H100",
            8192,
            96,
            "shard=8,tensor=8",
            12,
            4378,
            None,
            "bfloat16",
            selective,
            20,
        ),
        Run(
            "titan 2025", eight, "H100", 8192, 96, "shard=8,tensor=8", 12, 5078, None, "float8", selective, 20
        ),
        Run(a100, eight, "A100", 8192, 64, "shard=64", 1, 2973, checkpointing=selective),
        Run(a100, large, "A100", 8192, 64, "shard=64", 1, 331),
        Run(a100, "Llama 2 13B", "A100", 4096, 128, "shard=64", 2, 2162, checkpointing=none),
        Run(a100, "Llama 2 13B", "A100", 4096, 128, "shard=64", 2, 1904, checkpointing=selective),
        Run(a100, "Llama 2 70B", "A100", 4096, 64, "shard=64", 1, 355, checkpointing=selective),
        Run(a100, "Llama 2 70B", "A100", 4096, 128, "shard=64", 2, 353),
        Run(new, eight, "H200", 8192, 64, "shard=32", 2, 10938, 47.96, "float8", selective, 6),
        Run(new, eight, "H200", 8192, 128, "shard=64", 2, 10753, 46.97, "float8", selective, 6),
        Run("here", "GPT-2 124M, no biases", "H200", 1024, 32, "", 32, 529093, 15.19, "bfloat16", none, 0),
        Run("here", "GPT-2 124M", "H200", 1024, 32, "", 32, 509350, 15.19, "bfloat16", none, 0),
        Run(
            *("picotron", "Llama 2 7B", "H100 SXM", 1024, 2048, "data=16,tensor=2,pipeline=2", 4, 0.38),
            checkpointing=none,
            note="mesh assumed",
        ),
        Run(
            *("picotron", "SmolLM 1.7B", "H100 SXM", 1024, 1024, "data=8", 4, 0.50),
            checkpointing=none,
            note="mesh assumed",
        ),
    ]


RUNS = _runs()


def line(run: Run) -> dict[str, object]:
    """Return one line of the table: what was published and what is predicted."""
    found = run.predict()
    rate = found.mfu if run.rate < 1 else found.tokens_per_second
    memory = found.memory.total / GIB
    return {
        "source": run.source,
        "run": ", ".join(
            filter(
                None,
                (
                    f"{run.model} on {found.mesh.devices} {run.machine.split()[0]}",
                    str(found.mesh) if run.mesh else "",
                    f"{run.length:,} tokens",
                    {"float8": "float8"}.get(run.precision, ""),
                    f"{run.checkpointing} checkpointing" if run.checkpointing != "none" else "",
                    run.note,
                ),
            )
        ),
        "measured_rate": run.rate,
        "predicted_rate": rate,
        "rate_error": rate / run.rate - 1,
        "measured_memory": run.memory,
        "predicted_memory": memory,
        "memory_error": None if run.memory is None else memory / run.memory - 1,
    }


def table(lines: list[dict[str, object]]) -> str:
    """Return the lines as a table in Markdown."""
    rows = ["| run | tokens/s, or MFU | predicted | | GiB | predicted | |", "| --- " + "| ---: " * 6 + "|"]

    def number(value: object) -> str:
        if value is None:
            return ""
        amount = float(str(value))
        return f"{amount:.0%}" if amount < 1 else f"{amount:,.0f}"

    for one in lines:
        memory = one["measured_memory"]
        cells = [f"[{one['source']}]({SOURCES[str(one['source'])]}): {one['run']}"]
        cells += [number(one["measured_rate"]), number(one["predicted_rate"]), f"{one['rate_error']:+.0%}"]
        cells += [
            "" if memory is None else f"{memory:.1f}",
            f"{one['predicted_memory']:.1f}",
            "" if memory is None else f"{one['memory_error']:+.1%}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def fit(machine: str) -> None:
    """Print the shares of a device's peak that predict its runs best."""
    runs = [run for run in RUNS if run.machine == machine]
    device = MACHINES[machine]
    float8 = (
        (0.44, 0.48, 0.5, 0.52, 0.56) if any(run.precision == "float8" for run in runs) else (device.float8,)
    )
    tries = []
    for products, eight, attention in itertools.product(
        (0.46, 0.49, 0.52, 0.55, 0.58, 0.61), float8, (0.16, 0.185, 0.21, 0.25, 0.3, 0.45, 0.55)
    ):
        tried = dataclasses.replace(device, matmul_share=products, float8=eight, attention=attention)
        errors = [math.log(run.predict(tried).tokens_per_second / run.rate) for run in runs]
        tries.append((sum(error**2 for error in errors), products, eight, attention))
    print(machine, *sorted(tries)[:3], sep="\n  ")


def run_planner() -> None:
    """Hold what `clearhead plan` predicts against published and measured training runs.

    PYTHONPATH=src python benchmarks/run.py planner [--save] [--fit]

    Each row is a run that its authors published: the model, the devices, the mesh, the batch, and what they
    read off, tokens per second and device or MFU, and peak memory. `--save` writes
    benchmarks/results/planner.json and the table of docs/parallel.md. `--fit` searches the shares of each
    device's peak again.

    The loss of torchtitan at the end of 2024 holds logits in half precision and three times in float32, 14
    bytes each, and 20 where tensor parallelism divides them; its versions of 2025 compile the loss, 6 bytes.
    """
    parser = case_parser(run_planner)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    if options.fit:
        for machine in ("H100", "H200", "A100"):
            fit(machine)
    lines = [line(run) for run in RUNS]
    print(table(lines))
    if options.save:
        save("planner", lines)
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + BEGIN + table(lines) + END + rest.split(END)[1])


# gpu_parallel -----------------------------------------------------------------------------------------------


WARM, STEPS, EVERY = 20, 60, 10
LIMIT = 1024**3  # bytes that the GPU may use for the large model


def train(settings: list[str], report: Any, text: int = 20) -> None:
    """Train on characters, and give every event to `report`."""
    import torch

    import clearhead as ch

    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "text.txt"
        path.write_text(Path(torch.__file__).parent.joinpath("functional.py").read_text() * text)
        common = ["tokens.kind=char", "train.device=cuda", "train.samples=0", "model.dropout=0.0"]
        common += ["train.validate_every=1000", "train.save_every=1000"]
        ch.train(path, out=Path(work) / "run", settings=[*common, *settings], on_event=report)


def seconds_of_a_step(compiled: bool) -> float:
    """Return the seconds of a step of the 124M shape, after its warm-up."""
    times: dict[int, float] = {}

    def report(event: Any) -> None:
        if type(event).__name__ == "Stepped":
            times[event.step] = time.perf_counter()

    sizes = {"d_model": 768, "n_layers": 12, "n_heads": 12, "max_positions": 1024}
    settings = [f"model.{name}={value}" for name, value in sizes.items()]
    settings += [
        "data.batch_size=32",
        f"train.steps={STEPS}",
        f"train.log_every={EVERY}",
        f"train.compile={str(compiled).lower()}",
    ]
    train(settings, report)
    return (times[STEPS] - times[WARM]) / (STEPS - WARM)


def split_always() -> None:
    """Give one process a mesh too."""
    from clearhead.learn.parallel.world import World

    always = functools.partialmethod(World.arranged, always=True)
    World.arranged = always  # type: ignore[assignment,method-assign]


def worker(mesh: bool, compiled: bool) -> None:
    """Time a step for each line that comes in."""
    if mesh:
        split_always()
    for _ in sys.stdin:
        print(f"seconds {seconds_of_a_step(compiled)}", flush=True)


def wrapped(rounds: int) -> list[dict[str, object]]:
    """Compare plain and split steps, in turn."""
    results: list[dict[str, object]] = []
    for compiled in (False, True):
        workers = {
            name: subprocess.Popen(
                case_command("gpu_parallel", "--worker", name, *(["--compiled"] if compiled else [])),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in ("plain", "mesh")
        }
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(rounds):
            for name, process in workers.items():
                seconds[name].append(ask_worker(process)[0])
        for process in workers.values():
            process.communicate()
        middle = {name: statistics.median(found) for name, found in seconds.items()}
        ratio = middle["plain"] / middle["mesh"]
        print(
            f"compiled {compiled}: plain {middle['plain']:.4f} s, mesh {middle['mesh']:.4f} s, {ratio:.3f} x",
            flush=True,
        )
        results.append(
            {"job": "wrapped", "compiled": compiled, "seconds": seconds, "mesh_over_plain": round(ratio, 4)}
        )
    return results


def large(offload: bool) -> dict[str, object]:
    """Train the large model, or say why not."""
    import torch

    import clearhead as ch

    torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.get_device_properties(0).total_memory)
    sizes = {"d_model": 768, "n_layers": 18, "n_heads": 12, "max_positions": 512}
    settings = [f"model.{name}={value}" for name, value in sizes.items()]
    settings += ["data.batch_size=2", "train.steps=6", "train.log_every=1", "train.compile=false"]
    if offload:
        settings += ["train.offload=true", "train.checkpointing=true"]
    found: dict[str, Any] = {"job": "large", "offload": offload, "limit": LIMIT, "losses": []}

    def report(event: Any) -> None:
        if type(event).__name__ == "Started":
            found["parameters"] = event.parameters
        if type(event).__name__ == "Stepped":
            found["losses"].append(event.loss)
            found["peak"] = event.memory
            found["tokens_per_second"] = event.tokens_per_second

    try:
        train(settings, report, text=1)
    except (ch.ClearheadError, torch.OutOfMemoryError) as error:
        found["error"] = f"{type(error).__name__}: {error}"[:300]
    return found


def run_gpu_parallel() -> None:
    """What a mesh costs where it has one process, and how large a model may be that trains on one GPU.

        PYTHONPATH=src python benchmarks/run.py gpu_parallel [wrapped] [large] [--rounds 3] [--out FILE.json]

    wrapped: `ch.train` of the 124M shape on characters, plain and split over a mesh of one process (FSDP2),
    which
        take turns, each in a process of its own; compiled (the model, and each of its blocks) and not.
    large: a model whose weights, gradients and moments are twice what the GPU may use: plain, and with
        `train.checkpointing` and `train.offload`.
    """
    parser = case_parser(run_gpu_parallel, saves=False)
    parser.add_argument("jobs", nargs="*", default=["wrapped", "large"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker in ("plain", "mesh"):
        return worker(options.worker == "mesh", options.compiled)
    if options.worker:
        print(json.dumps(large(options.worker == "offload")))
        return
    results: list[dict[str, object]] = []
    if "large" in options.jobs:
        for kind in ("whole", "offload"):
            command = case_command("gpu_parallel", "--worker", kind)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(results[-1], flush=True)
    if "wrapped" in options.jobs:
        results += wrapped(options.rounds)
    import torch

    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today())}
    if options.out:
        options.out.write_text(
            json.dumps(
                {"command": "python benchmarks/run.py gpu_parallel", **facts, "results": results}, indent=2
            )
        )
