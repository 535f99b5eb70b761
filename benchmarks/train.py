"""Training on a CPU: the step, the whole loop, and equal bits."""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmarks.common import MinimalGPT, alternate, by_processor, processor_name, report, save
from torch import nn

import clearhead as ch
from clearhead.labs.lab.experiment import interval
from clearhead.labs.lab.ladder import SIZES
from clearhead.learn.training.machine import narrow
from clearhead.run.kernels.training import join_projections, suit_narrow

# train_step -----------------------------------------------------------------------------------------------


LAYERS, HEADS, WIDTH, LENGTH, BATCH, VOCAB = 6, 6, 384, 256, 8, 65


def run_train_step() -> None:
    """Time one CPU training step of a small GPT: clearhead, transformers' GPT-2 and a minimal GPT, in turn.

    python benchmarks/run.py train_step [--rounds 12] [--save]
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--save", action="store_true")
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
    parser = argparse.ArgumentParser(
        description=run_train_loop.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save", action="store_true")
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
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save", action="store_true")
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
    """Train one tiny recipe many times beside busy processes: one precision, and one set of bits?

    python benchmarks/run.py same_bits [--runs 20] [--busy 2] [--set KEY=VALUE ...]
    """
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
