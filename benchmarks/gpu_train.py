"""Training on a GPU: bfloat16 and float8, versus a minimal GPT and transformers."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import date
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from benchmarks.common import MinimalGPT, case_command, case_parser
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import clearhead as ch
from clearhead.learn.batches.batch import Batch, Batches
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.losses import batch_loss
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.tasks.table import TASKS
from clearhead.learn.training.events import Event, Stepped, read_log
from clearhead.learn.training.loop import TrainingRun, learn
from clearhead.learn.training.machine import choose_precision, quick_attention, suit_float8
from clearhead.learn.training.optim import make_optimizer
from clearhead.run.kernels.float8 import FLOAT8
from clearhead.run.kernels.training import join_projections, suit_compiled

# gpu_train ------------------------------------------------------------------------------------------------


LAYERS, HEADS, WIDTH, LENGTH, BATCH, VOCAB = 12, 12, 768, 1024, 32, 50304
WARM, STEPS = 20, 60
Context = Callable[[], AbstractContextManager[object]]
CONFIG = ch.preset("gpt2").replace(
    vocab_size=VOCAB, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0
)
PLAIN = CONFIG.replace(bias=False)
# By job: the config, and rows of a batch.
SHAPES = {
    "loop-plain": (PLAIN, BATCH),
    "loop-350m": (PLAIN.replace(n_layers=24, n_heads=16, d_model=1024, d_ff=4096), 32),
    "loop-1.3b": (PLAIN.replace(n_layers=24, n_heads=16, d_model=2048, d_ff=8192), 16),
}
GPU_TRAIN_FLOAT8 = "-float8"
USUAL = ("loop", "step", "transformers", "minimal", "loop-plain", "minimal-plain")


class Drawn(Batches):
    """Tokens drawn anew for each batch, on the CPU."""

    per_epoch = 10**6

    def __init__(self, rows: int = BATCH) -> None:
        self.rows = rows

    def at(self, index: int) -> Batch:
        """See `Batches.at`."""
        rows = torch.randint(VOCAB, (self.rows, LENGTH + 1), generator=torch.Generator().manual_seed(index))
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def timed_step(
    model: nn.Module, loss_of: Callable[[Batch], Tensor], attention: Context = nullcontext
) -> float:
    """Seconds of a step on one batch: forward, backward, clip, AdamW; nothing is read back between steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    batch = Drawn().at(0).to("cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16), attention():
            loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    gate()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / STEPS


def bare() -> float:
    """The model as the loop has it."""
    model = ch.Transformer(CONFIG).cuda().train()
    join_projections(model)
    suit_compiled(model)
    model.compile()

    def loss_of(batch: Batch) -> Tensor:
        loss, count = batch_loss(model, batch)
        return loss / count

    return timed_step(model, loss_of, quick_attention(TASKS["lm"], DataPlan(), torch.device("cuda")))


def whole(model: nn.Module, logits_of: Callable[[Tensor], Tensor]) -> float:
    """A peer, its loss within what is compiled."""
    model.cuda().train()
    loss_of = torch.compile(
        lambda ids, targets: F.cross_entropy(logits_of(ids).flatten(0, 1), targets.flatten())
    )
    return timed_step(model, lambda batch: loss_of(batch.ids, batch.targets))


def transformers() -> float:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    )
    return whole(model, lambda ids: model(ids).logits)


def minimal(bias: bool = True) -> float:
    model = MinimalGPT(LAYERS, HEADS, WIDTH, LENGTH, VOCAB, bias)
    return whole(model, model)


def gate() -> None:
    """Say that all is compiled and warm, and wait for a line that says go."""
    print("ready", flush=True)
    sys.stdin.readline()


class Enough(Exception):
    """All steps are timed."""


def loop(
    config: ch.ModelConfig = CONFIG, batch: int = BATCH, precision: Literal["auto", "float8"] = "auto"
) -> float:
    """Time the loop that `clearhead train` runs, between two reports; validation and checkpoints come later.

    The device is a step ahead of the reports. So the first of the two is not the one at which the others are
    waited for.
    """
    device = torch.device("cuda")
    plan = TrainPlan(steps=10**6, lr=1e-4, metric="loss", precision=precision)
    chosen = choose_precision(plan, device)
    model = ch.Transformer(config).to(device)
    times: dict[int, float] = {}
    first = WARM + plan.log_every

    def on_event(event: Event) -> None:
        if isinstance(event, Stepped):
            if event.step == WARM:
                gate()
            times[event.step] = time.perf_counter()
            if event.step >= first + STEPS:
                raise Enough

    with tempfile.TemporaryDirectory() as folder:
        optimizer = make_optimizer(model, plan, device)
        join_projections(model)
        if chosen.float8:
            suit_float8(model, split=False)
        suit_compiled(model)
        model.compile()
        run = TrainingRun(
            folder=Path(folder),
            task=TASKS["lm"],
            plan=plan,
            steps=plan.steps,
            metric="loss",
            loaded=ch.Model(model),
            train=Drawn(batch),
            validation=Drawn(batch),
            optimizer=optimizer,
            precision=chosen,
            attention=quick_attention(TASKS["lm"], DataPlan(), device),
            flops_per_token=ch.cost(config, length=LENGTH).flops.training_per_token,
        )
        with suppress(Enough):
            learn(run, on_event, lambda: False)
    return (times[first + STEPS] - times[first]) / STEPS


def loss_kernel() -> dict[str, float]:
    """How far the kernel of the loss, and the gradient it gives, lie from float64: relative to the whole."""
    from clearhead.run.kernels.triton_loss import CrossEntropy

    found = {}
    for dtype, vocab, smoothing in itertools.product(
        (torch.float32, torch.bfloat16), (VOCAB, 50257), (0.0, 0.1)
    ):
        scores = (3 * torch.randn(64, vocab, device="cuda")).to(dtype).requires_grad_()
        targets = torch.randint(vocab, (64,), device="cuda")
        exact = scores.detach().double().requires_grad_()
        wanted = F.cross_entropy(exact, targets, reduction="sum", label_smoothing=smoothing)
        loss = CrossEntropy.apply(scores, targets, smoothing)
        (expected,), (gradient,) = (
            torch.autograd.grad(wanted / 3, exact),
            torch.autograd.grad(loss / 3, scores),
        )
        name = f"{dtype}, vocabulary {vocab}, smoothing {smoothing}"
        found[f"loss, {name}"] = abs(loss.item() / wanted.item() - 1)
        found[f"gradient, {name}"] = ((gradient - expected).norm() / expected.norm()).item()
    return found


JOBS: dict[str, Callable[[], float]] = {
    "loop": loop,
    "step": bare,
    "transformers": transformers,
    "minimal": minimal,
    "minimal-plain": functools.partial(minimal, bias=False),
    **{name: functools.partial(loop, *shape) for name, shape in SHAPES.items()},
    **{name + GPU_TRAIN_FLOAT8: functools.partial(loop, *shape, "float8") for name, shape in SHAPES.items()},
}


def alone(name: str) -> None:
    """One job, in this process: its figures as the last line."""
    torch.manual_seed(0)
    seconds = JOBS[name]()
    usual = PLAIN if name.endswith("plain") else CONFIG
    config, batch = SHAPES.get(name.removesuffix(GPU_TRAIN_FLOAT8), (usual, BATCH))
    weights = ch.cost(config).parameters.total - LENGTH * config.d_model
    rate = batch * LENGTH / seconds
    flops = 6 * weights + 12 * config.n_layers * config.d_model * LENGTH  # of a token
    peak = choose_precision(TrainPlan(), torch.device("cuda")).peak
    found = {
        "tokens_per_second": round(rate),
        "ms_per_step": round(seconds * 1e3, 2),
        "mfu": round(rate * flops / peak, 4) if peak else None,
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }
    print(json.dumps(found))


def run_gpu_train() -> None:
    """Time training on a GPU: the 124M GPT-2 shape, bfloat16, 32 rows of 1,024 tokens, compiled.

    AdamW is fused, and gradients are clipped.

    PYTHONPATH=src python benchmarks/run.py gpu_train [JOB ...] [--out FILE.json]

    The jobs, each in a process of its own; they are compiled side by side and timed one after another:
        loop          clearhead's training loop itself, `train.loop.learn`: data from the CPU, schedule, log,
                      the check that all is finite
        step          the bare step of clearhead's model on one unchanging batch
        transformers  the bare step of transformers' GPT-2, compiled as a whole with its loss
        minimal       the bare step of the least code that is a GPT, compiled as a whole with its loss
        loop-plain, minimal-plain    the same two without biases, as nanoGPT trains this shape by default
        loop-350m, loop-1.3b         the loop with larger shapes, if named: without biases, 32 and 16 rows
        loop-plain-float8, loop-350m-float8, loop-1.3b-float8    with train.precision=float8, if named

    MFU is nanoGPT's: 6 operations for each weight but those of positions, and 12 x layers x width x length
    for attention, which counts the masked half as if it were computed; over the peak of the device, in half
    precision and without sparsity, also where products are in float8.
    """
    parser = case_parser(run_gpu_train, saves=False)
    parser.add_argument("jobs", nargs="*", default=USUAL, help=f"of {', '.join(JOBS)}")
    parser.add_argument("--alone", action="store_true", help="one job in this process")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.alone:
        return alone(options.jobs[0])
    distances = loss_kernel()
    print("loss kernel to float64:", json.dumps(distances), flush=True)
    command = case_command("gpu_train", "--alone")
    jobs = {
        name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in options.jobs
    }
    ready = {name: job for name, job in jobs.items() if "ready\n" in iter(job.stdout.readline, "")}
    rows: dict[str, dict[str, float]] = {}
    for name, job in ready.items():
        said, _ = job.communicate("go\n")
        if job.returncode:
            continue
        rows[name] = json.loads(said.splitlines()[-1])
        print(f"{name:<18}", json.dumps(rows[name]), flush=True)
        if options.out:
            body = {
                "command": f"PYTHONPATH=src python benchmarks/run.py gpu_train {' '.join(options.jobs)}",
                "title": (
                    f"GPT-2 shape, {LAYERS} x {WIDTH}, vocabulary {VOCAB}, B {BATCH} x T {LENGTH}, "
                    "bfloat16 autocast, compiled; larger shapes and float8 where named"
                ),
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "date": date.today().isoformat(),
                "rows": rows,
                "loss_kernel_to_float64": distances,
            }
            options.out.write_text(json.dumps(body, indent=2) + "\n")
    if len(rows) < len(jobs):
        sys.exit(f"failed: {', '.join(jobs.keys() - rows)}")


# gpu_float8 -----------------------------------------------------------------------------------------------


# Rows and both widths: of the blocks of the 124M and the 1.3B shape, and of the 124M shape's head.
PRODUCTS = (
    *((32768, 768, 2304), (32768, 768, 768), (32768, 768, 3072), (32768, 3072, 768), (32768, 768, 50304)),
    *((16384, 2048, 6144), (16384, 2048, 2048), (16384, 2048, 8192), (16384, 8192, 2048)),
)
SHOWN, PROFILED = 30, 3  # kernels, steps
PRECISIONS = ("bfloat16", "float8")
LEARNED = (
    *("data.task=lm", "data.batch_size=16", "tokens.kind=char", "model.base=gpt2", "model.dropout=0.0"),
    *("model.embedding_dropout=0.0", "model.attention_dropout=0.0", "model.max_positions=1024"),
    *("train.compile=true", "train.lr=6e-4", "train.warmup=100", "train.betas=[0.9, 0.95]"),
)


def milliseconds(run: Callable[[], object], count: int = 30) -> float:
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def products() -> None:
    """Time each product of a forward pass in bfloat16, and in float8 with a scale for each row."""
    for rows, inner, outer in PRODUCTS:
        a, b = (torch.randn(size, inner, device="cuda", dtype=torch.bfloat16) for size in (rows, outer))
        a8, b8 = a.to(FLOAT8), b.to(FLOAT8)
        by_row, by_column = torch.rand(rows, 1, device="cuda"), torch.rand(1, outer, device="cuda")
        wide = milliseconds(lambda a=a, b=b: a @ b.t())
        narrow = milliseconds(
            lambda a=a8, b=b8, scales=(by_row, by_column): torch._scaled_mm(
                a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )
        print(f"{rows} x {inner} x {outer}: bfloat16 {wide:.3f} ms, float8 {narrow:.3f} ms", flush=True)


def kernels(shape: str, precision: str) -> None:
    """Print the kernels of a step that take longest."""
    config, rows = SHAPES[shape]
    torch.manual_seed(0)
    model = ch.Transformer(config).cuda().train()
    join_projections(model)
    if precision == "float8":
        suit_float8(model, split=False)
    suit_compiled(model)
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    attention = quick_attention(TASKS["lm"], DataPlan(), torch.device("cuda"))
    batch = Drawn(rows).at(0).to("cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16), attention():
            loss, count = batch_loss(model, batch)
        (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    print(f"{shape}, {precision}: {milliseconds(step, 20):.2f} ms a step", flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    found = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    print(f"its kernels: {sum(row.self_device_time_total for row in found) / PROFILED / 1e3:.2f} ms")
    for row in found[:SHOWN]:
        per_step = row.self_device_time_total / PROFILED / 1e3
        print(f"{per_step:7.2f} ms {row.count // PROFILED:4d} x {row.key[:100]}", flush=True)


def curves(train: Path, valid: Path, steps: int, seeds: int, out: Path | None) -> None:
    """Train with each seed in both precisions, and compare the losses on the text for validation."""
    with tempfile.TemporaryDirectory() as base:
        runs = {}
        for precision in PRECISIONS:
            for seed in range(seeds):
                settings = (
                    *LEARNED,
                    *(f"data.validation=['{valid}']", f"train.precision={precision}", f"train.seed={seed}"),
                    *(f"train.steps={steps}", f"train.validate_every={steps // 8}"),
                )
                command = [sys.executable, "-m", "clearhead", "train", str(train), "--out"]
                command += [f"{base}/{precision}-{seed}"]
                command += [part for setting in settings for part in ("--set", setting)]
                runs[precision, seed] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        rows: dict[str, dict[str, object]] = {precision: {} for precision in PRECISIONS}
        ends: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
        for (precision, seed), run in runs.items():
            assert run.wait() == 0, f"{precision}, seed {seed} failed"
            events = [event for event in read_log(Path(base) / f"{precision}-{seed}") if "metrics" in event]
            curve = {event["step"]: round(event["metrics"]["loss"], 4) for event in events}
            rows[precision][f"seed {seed}"] = curve
            ends[precision].append(curve[steps])
            print(f"{precision}, seed {seed}:", json.dumps(curve), flush=True)
    for precision, losses in ends.items():
        spread = statistics.stdev(losses) if seeds > 1 else 0.0
        print(f"{precision}: {statistics.mean(losses):.4f} after {steps} steps, seeds apart by {spread:.4f}")
    if out:
        body = {
            "command": f"python benchmarks/run.py gpu_float8 curves TRAIN VALID --steps {steps}",
            "title": "validation loss of the 124M GPT-2 shape on characters of books, 16 x 1,024 a step",
            **{"device": torch.cuda.get_device_name(), "torch": torch.__version__},
            **{"date": date.today().isoformat(), "rows": rows},
        }
        out.write_text(json.dumps(body, indent=2) + "\n")


def run_gpu_float8() -> None:
    """Training in float8 versus bfloat16 on a GPU: matmuls alone, the kernels of a step, what is learned.

        PYTHONPATH=src python benchmarks/run.py gpu_float8 products
        PYTHONPATH=src python benchmarks/run.py gpu_float8 kernels [--shape loop-1.3b] [--precision float8]
        PYTHONPATH=src python benchmarks/run.py gpu_float8 curves TRAIN.txt VALID.txt [--out FILE.json]

    How fast whole steps are, `gpu_train.py` measures. The curves are those of `clearhead train` on
    characters, with the 124M GPT-2 shape, rows of 1,024 and each seed in both precisions; all runs share
    the device at once.
    """
    parser = case_parser(run_gpu_float8, saves=False)
    parser.add_argument("part", choices=("products", "kernels", "curves"))
    parser.add_argument("texts", nargs="*", type=Path, help="curves: to train on, and for validation")
    parser.add_argument("--shape", choices=[*SHAPES], default="loop-plain")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.part == "products":
        products()
    elif given.part == "kernels":
        kernels(given.shape, given.precision)
    else:
        curves(*given.texts, given.steps, given.seeds, given.out)
