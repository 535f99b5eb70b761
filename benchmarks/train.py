"""Training: the step and the whole loop on a CPU, equal bits, and the lab's ladder on a CPU and a GPU."""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.common import (
    RESULTS,
    MinimalGPT,
    alternate,
    by_processor,
    case_parser,
    device_name,
    processor_name,
    report,
    save,
)
from torch import nn

import clearhead as ch
from clearhead.labs.lab.experiment import interval
from clearhead.labs.lab.ladder import ARMS, BASELINE, EVERYTHING, SIZES, Watch, shares_of, sized
from clearhead.learn.training.machine import narrow
from clearhead.run.kernels.training import join_projections, suit_narrow

# train_step -----------------------------------------------------------------------------------------------


LAYERS, HEADS, WIDTH, LENGTH, BATCH, VOCAB = 6, 6, 384, 256, 8, 65


def run_train_step() -> None:
    """Time one CPU training step of a small GPT: clearhead, transformers' GPT-2 and a minimal GPT, in turn.

    python benchmarks/run.py train_step [--rounds 12] [--save]
    """
    parser = case_parser(run_train_step)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.manual_seed(0)
    ids, targets = torch.randint(VOCAB, (2, BATCH, LENGTH))

    config = ch.ModelConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_positions=LENGTH,
        activation="gelu_tanh",
    )
    ours, minimal = ch.Transformer(config), MinimalGPT(LAYERS, HEADS, WIDTH, LENGTH, VOCAB)
    models: dict[str, tuple[nn.Module, object]] = {
        "clearhead": (ours, lambda: ours(ids).logits),
        "minimal GPT": (minimal, lambda: minimal(ids)),
    }
    try:
        from transformers import GPT2Config, GPT2LMHeadModel

        peer = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_positions=LENGTH,
                n_embd=WIDTH,
                n_layer=LAYERS,
                n_head=HEADS,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
            )
        )
        models["transformers GPT-2"] = (peer, lambda: peer(ids, use_cache=False).logits)
    except ImportError:
        print("transformers is not installed: its row is left out")

    def step(model: nn.Module, forward: object) -> object:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def once() -> None:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(forward().flatten(0, 1), targets.flatten()).backward()
            optimizer.step()

        return once

    jobs = {name: step(*pair) for name, pair in models.items()}
    result = report(
        f"CPU training step, GPT {LAYERS} x {WIDTH}, T {LENGTH}, B {BATCH}",
        alternate(jobs, options.rounds),
        BATCH * LENGTH,
    )
    if options.save:
        save(by_processor("cpu_train_step"), [result])


# train_loop -----------------------------------------------------------------------------------------------


LOOP_LAYERS, LOOP_HEADS, LOOP_WIDTH, LOOP_LENGTH, LOOP_BATCH = 6, 6, 384, 256, 8
WARM = 4


def bare(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    """One batch again and again: forward, loss, backward, clip, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def peer(text: torch.Tensor, vocab: int, steps: int) -> Callable[[], None]:
    """Run a plain loop around transformers: random windows, schedule, clipping, the loss at every step."""
    from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

    sizes = {
        "n_positions": LOOP_LENGTH,
        "n_embd": LOOP_WIDTH,
        "n_layer": LOOP_LAYERS,
        "n_head": LOOP_HEADS,
    }
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, 100, steps)
    losses: list[float] = []

    def step() -> None:
        begin = torch.randint(len(text) - LOOP_LENGTH - 1, (LOOP_BATCH,))
        ids = torch.stack([text[i : i + LOOP_LENGTH] for i in begin])
        targets = torch.stack([text[i + 1 : i + 1 + LOOP_LENGTH] for i in begin])
        logits = model(ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())

    return step


def run_train_loop() -> None:
    """Time the whole training loop of a small GPT on a CPU: data, optimizer, schedule, clipping and log.

    Three jobs take turns, step by step, so that noise falls on all alike: `ch.train` on a text file, with
    its log; a plain loop around transformers' GPT-2, as people write it without the `Trainer`; and the bare
    step of clearhead's model on one unchanging batch.

    python benchmarks/run.py train_loop [--steps 24] [--save]
    """
    parser = case_parser(run_train_loop)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    torch.manual_seed(0)
    whole = "".join(
        Path(torch.__file__).parent.joinpath(name).read_text() for name in ("functional.py", "_tensor.py")
    )
    letters = sorted(set(whole))
    text = torch.tensor([letters.index(letter) for letter in whole])
    config = ch.ModelConfig(
        vocab_size=len(letters),
        d_model=LOOP_WIDTH,
        n_layers=LOOP_LAYERS,
        n_heads=LOOP_HEADS,
        max_positions=LOOP_LENGTH,
        activation="gelu_tanh",
    )
    ids, targets = torch.randint(len(letters), (2, LOOP_BATCH, LOOP_LENGTH))
    model = ch.Transformer(config)
    join_projections(model)  # as the loop does
    if narrow(torch.device("cpu")):
        suit_narrow(model)
    others = {
        "bare step": bare(model, ids, targets),
        "transformers, own loop": peer(text, len(letters), options.steps),
    }
    times: dict[str, list[float]] = {"clearhead": [], **{name: [] for name in others}}
    left = time.perf_counter()

    def on_event(event: object) -> None:
        nonlocal left
        now = time.perf_counter()
        if type(event).__name__ == "Stepped":
            times["clearhead"].append(now - left)
            for name, step in others.items():
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)
        left = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.txt"
        file.write_text(whole)
        settings = [
            "model.dropout=0.0",
            f"data.batch_size={LOOP_BATCH}",
            f"train.steps={options.steps + WARM}",
            "train.log_every=1",
        ]
        ch.train(file, recipe="char-gpt", out=Path(folder) / "run", settings=settings, on_event=on_event)
    seconds = {name: statistics.median(taken[WARM:]) for name, taken in times.items()}
    title = f"CPU training loop, GPT {LOOP_LAYERS} x {LOOP_WIDTH}, T {LOOP_LENGTH}, B {LOOP_BATCH}"
    result = report(title, seconds, LOOP_BATCH * LOOP_LENGTH)
    overhead = seconds["clearhead"] / seconds["bare step"] - 1
    print(f"  the loop takes {overhead:+.1%} of the bare step")
    if options.save:
        save("cpu_train_loop", [{**result, "overhead_over_bare_step": round(overhead, 4)}])


# ladder ---------------------------------------------------------------------------------------------------


def run_ladder() -> None:
    """Record the lab's ladder: shares of tokens and time to equal loss, from the trials of its folder.

    clearhead lab ladder --data TEXT --out DIR, then python benchmarks/run.py ladder DIR [--save]
    """
    parser = case_parser(run_ladder)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    found = json.loads((options.folder / "results.json").read_text())
    names = [f"{size} {what}" for size in SIZES for what in ("tokens", "time", "loss")]
    rows = {}
    for arm, trials in found["trials"].items():
        rows[arm] = {}
        for name in names:
            values = [trial[name] for trial in trials]
            low, high = interval(values)
            rows[arm][name] = {
                "mean": round(statistics.fmean(values), 4),
                "low": round(low, 4),
                "high": round(high, 4),
                "seeds": [round(value, 4) for value in values],
            }
        print(f"{arm:<32}", *(f"{name} {rows[arm][name]['mean']:.3f}" for name in names))
    made = {"title": "the ladder", "device": processor_name(), "torch": found["torch"]}
    made |= {key: found[key] for key in ("command", "setup", "arms", "seconds")}
    if options.save:
        save("ladder_cpu", [{**made, "sizes": SIZES, "rows": rows}])


# same_bits ------------------------------------------------------------------------------------------------


TINY = ("model.d_model=64", "model.n_layers=2", "model.n_heads=2", "model.max_positions=32")
STEPS = ("data.batch_size=8", "train.steps=10", "train.samples=0", "train.device=cpu")
TEXT = "the quick brown fox jumps over the lazy dog while it sings of the sea\n" * 100


def run_same_bits() -> None:
    """Train one tiny recipe many times next to busy processes: one precision, and one set of bits?

    python benchmarks/run.py same_bits [--runs 20] [--busy 2] [--set KEY=VALUE ...]
    """
    parser = case_parser(run_same_bits, saves=False)
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


# gpu_ladder -------------------------------------------------------------------------------------------------


TEXTS, UNSEEN = ("books.txt.gz", "wiki.txt.gz"), ("unseen-books.txt.gz", "unseen-wiki.txt.gz")
CHECKS, ROW, ROWS = 12, 256, 64  # validations; tokens of a row; rows of a batch
GPU_SIZES: dict[str, dict[str, Any]] = {
    "12M": {"model.d_model": 384, "model.n_layers": 6, "model.n_heads": 6, "train.lr": 1e-3},
    "45M": {"model.d_model": 640, "model.n_layers": 8, "model.n_heads": 10, "train.lr": 8e-4},
    "92M": {"model.d_model": 768, "model.n_layers": 12, "model.n_heads": 12, "train.lr": 6e-4},
}
TWO = ("12M", "45M")
SEEDS = (0, 1, 2)
DOUBLE = "baseline, twice the rate"  # so that no arm wins by a better rate alone
SHARED: dict[str, Any] = {
    **{"data.task": "lm", "data.batch_size": ROWS, "tokens.kind": "bpe", "tokens.vocab_size": 8192},
    **{"model.base": "gpt2", "model.max_positions": ROW, "model.dropout": 0.0, "train.warmup": 50},
    **{"train.betas": (0.9, 0.95), "train.samples": 0, "train.compile": False, "train.floor": 0.02},
}
TINY_LADDER: dict[str, Any] = {
    **{"model.d_model": 24, "model.n_heads": 4, "model.max_positions": 32, "data.batch_size": 4},
    **{"tokens.vocab_size": 400, "train.warmup": 2, "train.device": "cpu", "train.precision": "float32"},
}
Job = tuple[str, str, int]  # size, arm, seed


def settings_of(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a run is told."""
    size, arm, seed = job
    own: dict[str, Any] = {**SHARED, **GPU_SIZES[size]}
    own |= {"train.lr": 2 * own["train.lr"]} if arm == DOUBLE else ARMS[arm]
    own = sized(own)
    if "train.window_schedule" in own:  # the lab's rows are of 64 tokens
        own["train.window_schedule"] = (ROW // 4, ROW // 2)
    every = max(1, options.steps // CHECKS)
    own |= {"train.steps": options.steps, "train.validate_every": every, "train.log_every": every}
    own |= {"train.save_every": options.steps, "train.seed": max(seed, 0), "train.device": options.device}
    own |= {"data.validation": tuple(str(options.data / name) for name in UNSEEN)}
    if options.tiny:
        own |= TINY_LADDER
        own |= {"model.n_layers": 2} | ({"train.window_schedule": (8, 16)} if "windows" in arm else {})
    tokens = options.data / "tokens"  # of a tokenizer that was trained before, where there is one
    if tokens.exists():
        own |= {"tokens.model": str(tokens)}
        own = {name: value for name, value in own.items() if name not in ("tokens.kind", "tokens.vocab_size")}
    own |= {"data.cache": str(options.runs / "cache")}
    return own


def run(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Train one arm; write each validation down as it comes."""
    from clearhead.learn.training.events import Validated
    from clearhead.learn.training.run import train

    torch.set_num_threads(2)
    size, arm, seed = job
    name, start = f"{size} {arm} {seed}", time.perf_counter()
    watch = Watch(options.device)

    def listen(event: object) -> None:
        watch(event)  # type: ignore[arg-type]
        if isinstance(event, Validated):
            with open(options.out / "points.jsonl", "a") as lines:
                lines.write(
                    json.dumps({"size": size, "arm": arm, "seed": seed, "point": watch.points[-1]}) + "\n"
                )

    found: dict[str, Any] = {"size": size, "arm": arm, "seed": seed}
    try:
        own = settings_of(job, options)
        texts = [str(options.data / text) for text in TEXTS]
        with tempfile.TemporaryDirectory(dir=options.runs) as folder:
            done = train(texts, out=f"{folder}/run", settings=own, on_event=listen)
        grown = own.get("train.accumulate_schedule", (1,))
        per_step, steps = own["data.batch_size"] * own["model.max_positions"], options.steps
        counts = [grown[min(step * len(grown) // steps, len(grown) - 1)] * per_step for step in range(steps)]
        found |= {
            f"{size} loss": watch.points[-1][2],
            f"{size} over tokens": [[sum(counts[: int(step)]), loss] for step, _, loss in watch.points],
            f"{size} over time": [[seconds, loss] for _, seconds, loss in watch.points],
            "parameters": sum(weight.numel() for weight in done.model.model.parameters()),
        }
        told = f"loss {watch.points[-1][2]:.4f}, training {watch.seconds:.1f} s"
    except Exception as error:
        traceback.print_exc()
        found["failed"] = told = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    found["wall_seconds"] = round(time.perf_counter() - start, 1)
    print(f"{name}: {told}, in all {found['wall_seconds']} s", flush=True)
    return found


def tables(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return of each size and arm the loss and the shares of the baseline's tokens and time at equal loss."""
    whole = {(each["size"], each["arm"], each["seed"]): each for each in runs if "failed" not in each}
    rows: dict[str, Any] = {}
    for size, arm in dict.fromkeys(key[:2] for key in whole):
        seeds = [seed for seed in SEEDS if {(size, arm, seed), (size, BASELINE, seed)} <= whole.keys()]
        figures: dict[str, list[float]] = {"loss": [], "tokens": [], "time": []}
        for seed in seeds:
            mine, plain = whole[size, arm, seed], whole[size, BASELINE, seed]
            figures["loss"].append(mine[f"{size} loss"])
            for name, share in shares_of(mine, plain, [size]):
                figures[name.rpartition(" ")[2]].append(share)
        row = rows.setdefault(size, {}).setdefault(arm, {})
        for name, values in figures.items():
            row[name] = {"seeds": [round(value, 4) for value in values]}
            if values:
                row[name]["mean"] = round(statistics.fmean(values), 4)
            if len(values) > 1:
                row[name]["low"], row[name]["high"] = (round(end, 4) for end in interval(values))
    return rows


def keep(runs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Write down all that is known."""
    body = {
        "title": "the ladder on a GPU",
        "device": "CPU, a trial" if options.tiny else device_name(),
        "torch": torch.__version__,
        "side_by_side": options.side_by_side,
        "steps": options.steps,
        "tokens_of_a_step": ROWS * ROW,
        "shared": SHARED,
        "sizes": GPU_SIZES,
        "arms": {arm: ARMS[arm] for arm in ARMS},
        "rows": tables(runs),
        "runs": runs,
    }
    partial = options.out / "ladder.json.part"
    partial.write_text(json.dumps(body, indent=1, default=str) + "\n")
    partial.rename(options.out / "ladder.json")
    return body


def jobs(runs: list[dict[str, Any]], chosen: Sequence[str]) -> Iterator[Job | None]:
    """Yield the runs in their order; None: wait for one that is under way.

    `chosen`: these arms alone, with every seed.
    """
    if chosen:
        yield from ((size, arm, seed) for seed in SEEDS for size in TWO for arm in chosen)
        return
    arms = [BASELINE, EVERYTHING, *(arm for arm in ARMS if arm not in (BASELINE, EVERYTHING)), DOUBLE]
    first = [(size, arm, 0) for size in TWO for arm in arms]
    yield from first
    yield from ((size, arm, seed) for seed in SEEDS[1:] for size in TWO for arm in (BASELINE, EVERYTHING))
    while len([each for each in runs if each["seed"] == 0]) < len(first):
        yield None
    rows = tables(runs)

    def share(arm: str) -> float:
        return sum(rows.get(size, {}).get(arm, {}).get("tokens", {}).get("mean", 9.0) for size in TWO)

    leading = sorted((arm for arm in arms if arm not in (BASELINE, EVERYTHING)), key=share)[:2]
    yield from ((size, arm, seed) for size in TWO for arm in leading for seed in SEEDS[1:])
    yield from (("92M", arm, 0) for arm in (BASELINE, EVERYTHING))


def draw_ladder() -> None:
    """Draw the record: loss over tokens of the leading arms at two sizes, and what each arm needs of them."""
    from matplotlib.figure import Figure

    records = json.loads((RESULTS / "ladder_h200.json").read_text())["results"]
    shares: dict[str, dict[str, float]] = {}
    curves: dict[str, dict[str, list[list[float]]]] = {size: {} for size in TWO}
    for record in records:
        for size, rows in record["rows"].items():
            for arm, row in rows.items():
                shares.setdefault(arm, {})[size] = row["tokens"]["mean"]
        for run in record["runs"]:
            if run["seed"] == 0:
                curves[run["size"]][run["arm"]] = run[f"{run['size']} over tokens"]
        for size, cut in record.get("unfinished", {}).items():
            curves[size] = {**cut, **curves[size]}
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    *plots, bars = figure.subplots(1, 3, width_ratios=[1, 1, 1.1])
    leading = [arm for arm in (BASELINE, "rotary positions", "NorMuon with Polar Express") if arm in shares]
    for plot, size in zip(plots, TWO):
        for arm in [*leading, "Qwen3's parts and NorMuon", EVERYTHING]:
            points = curves[size].get(arm, [])
            plot.plot([x / 1e6 for x, _ in points], [y for _, y in points], label=arm)
        plot.set(
            title=f"{size} parameters",
            xlabel="million tokens",
            ylabel="nats a token, unseen text",
            ylim=(4, 6),
        )
        plot.grid(alpha=0.3)
    plots[0].legend(fontsize=8)
    arms = sorted((arm for arm in shares if arm != BASELINE), key=lambda arm: -min(shares[arm].values()))
    for size, mark in zip(TWO, "os"):
        there = [arm for arm in arms if size in shares[arm]]
        bars.plot([shares[arm][size] for arm in there], [arms.index(arm) for arm in there], mark, label=size)
    bars.axvline(1, color="gray", lw=1)
    bars.set(title="Share of the baseline's tokens", yticks=range(len(arms)), xlim=(0, 1.2))
    bars.set_yticklabels(arms, fontsize=8)
    bars.legend()
    bars.grid(alpha=0.3)
    figure.savefig(RESULTS.parents[1] / "docs" / "images" / "ladder_h200.png", dpi=100)


def run_gpu_ladder() -> None:
    """Train the arms of the lab's ladder on a GPU, several side by side, and write each run down.

        PYTHONPATH=src python benchmarks/run.py gpu_ladder --data DIR --out DIR [--seconds 490] [--save]

    DIR has the texts TEXTS and UNSEEN, and tokens/, a tokenizer. Every arm is trained at two sizes with one
    seed, then the baseline, everything and the two leading arms with two more, then a third size. What has
    not finished after --seconds is left out. The record is DIR/ladder.json; DIR/points.jsonl has each
    validation as it came.
    """
    parser = case_parser(run_gpu_ladder)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_ladder"))
    parser.add_argument("--runs", type=Path, default=Path("/tmp/ladder"))
    parser.add_argument("--side-by-side", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=490)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--arms", nargs="*", default=[], help="these alone, each with three seeds")
    parser.add_argument("--tiny", action="store_true", help="a trial on a CPU")
    parser.add_argument(
        "--redraw", action="store_true", help="draw the picture of the record, and train nothing"
    )
    options = parser.parse_args()
    if options.redraw:
        draw_ladder()
        return
    options.device = "cpu" if options.tiny else "cuda"
    for folder in (options.out, options.runs, options.runs / "cache"):
        folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    steps, options.steps = options.steps, 1
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:  # encodes the text
        pool.submit(run, ("12M", BASELINE, -1), options).result()
    options.steps = steps
    runs: list[dict[str, Any]] = []
    took: dict[str, float] = {}  # seconds of the slowest run of each size
    active: dict[Future[dict[str, Any]], Job] = {}
    todo = jobs(runs, options.arms)
    pool = ProcessPoolExecutor(options.side_by_side, context)
    body: dict[str, Any] = {}
    waiting = True
    while waiting or active:
        while waiting and len(active) < options.side_by_side:
            job = next(todo, None)
            waiting = job is not None or (bool(active) and todo.gi_frame is not None)  # type: ignore[attr-defined]
            if job is None:
                break
            if time.monotonic() + took.get(job[0], 0.0) > end:
                print(f"{job}: no time left", flush=True)
                continue
            active[pool.submit(run, job, options)] = job
        if not active:
            break
        for done in wait(active, timeout=max(0.0, end - time.monotonic()), return_when=FIRST_COMPLETED).done:
            size = active.pop(done)[0]
            runs.append(done.result())
            took[size] = max(took.get(size, 0.0), runs[-1]["wall_seconds"])
            body = keep(runs, options)
        if time.monotonic() > end:
            print(f"time is up; not finished: {sorted(active.values())}", flush=True)
            break
    for size, rows in body.get("rows", {}).items():
        for arm, row in rows.items():
            print(
                f"{size:<4} {arm:<32}", *(f"{name} {row[name].get('mean', float('nan')):.3f}" for name in row)
            )
    if options.save:
        save("ladder_h200", [body])
        draw_ladder()
    for worker in multiprocessing.active_children():  # those that are not done
        worker.kill()
