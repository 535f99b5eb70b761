"""Time the whole training loop of a small GPT on a CPU: data, optimizer, schedule, clipping and log.

Three jobs take turns, step by step, so that noise falls on all alike: `ch.train` on a text file, with its
log; a plain loop around transformers' GPT-2, as people write it without the `Trainer`; and the bare step of
clearhead's model on one unchanging batch.

python benchmarks/train_loop.py [--steps 24] [--save]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import clearhead as ch
from clearhead.learn.training.machine import narrow
from clearhead.run.kernels.training import join_projections, suit_narrow
from common import report, save

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 6, 6, 384, 256, 8
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

    sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, 100, steps)
    losses: list[float] = []

    def step() -> None:
        begin = torch.randint(len(text) - LENGTH - 1, (BATCH,))
        ids = torch.stack([text[i : i + LENGTH] for i in begin])
        targets = torch.stack([text[i + 1 : i + 1 + LENGTH] for i in begin])
        logits = model(ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
        d_model=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_positions=LENGTH,
        activation="gelu_tanh",
    )
    ids, targets = torch.randint(len(letters), (2, BATCH, LENGTH))
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
            f"data.batch_size={BATCH}",
            f"train.steps={options.steps + WARM}",
            "train.log_every=1",
        ]
        ch.train(file, recipe="char-gpt", out=Path(folder) / "run", settings=settings, on_event=on_event)
    seconds = {name: statistics.median(taken[WARM:]) for name, taken in times.items()}
    title = f"CPU training loop, GPT {LAYERS} x {WIDTH}, T {LENGTH}, B {BATCH}"
    result = report(title, seconds, BATCH * LENGTH)
    overhead = seconds["clearhead"] / seconds["bare step"] - 1
    print(f"  the loop takes {overhead:+.1%} of the bare step")
    if options.save:
        save("cpu_train_loop", [{**result, "overhead_over_bare_step": round(overhead, 4)}])


if __name__ == "__main__":
    main()
