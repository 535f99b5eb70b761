"""`clearhead demo`: a short tour in the terminal."""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from clearhead.cost import cost
from clearhead.inside.checks import check
from clearhead.lab.toys import BEGIN, END, VOCABULARY, Learned, Progress, answer, learn
from clearhead.model.taps import record
from clearhead.report import attention_map, check_table, cost_table


def tour(seed: int = 0) -> None:
    """Learn to reverse digits, see how, read a cost table, run the checks."""
    console = Console()
    console.rule("1. A Transformer learns to reverse digits")
    console.print("Encoder and decoder, two layers each, 64 wide, from random weights; scored on inputs it never saw.\n")
    learned = _learn(console, seed)
    _show_attention(console, learned, seed)
    console.rule("3. What a model takes, before it is built")
    console.print(cost_table(cost("gpt2"), "gpt2"))
    console.rule("4. The equality checks, on the model just trained")
    rows = check(learned.model)
    console.print(check_table(rows))
    failed = sum(not row.passed for row in rows)
    console.print(f"{len(rows) - failed} of {len(rows)} equal.\n")
    console.rule("Next")
    console.print("clearhead cost llama-3-8b --length 8192 --dtype bfloat16")
    console.print("clearhead check DIR --reference     a Hugging Face directory, against transformers")
    console.print("clearhead convert IN OUT            read and write Hugging Face checkpoints")


def _learn(console: Console, seed: int) -> Learned:
    start = time.perf_counter()

    def line(progress: Progress) -> Text:
        bar = "█" * round(progress.accuracy * 30)
        took = time.perf_counter() - start
        return Text(f"step {progress.step:>5}   loss {progress.loss:.3f}   exact {progress.accuracy:7.2%}  {bar:<30}  {took:4.0f} s")

    if not console.is_terminal:
        learned = learn("reverse", "encoder-decoder", seed=seed, on_step=lambda progress: console.print(line(progress)))
    else:
        with Live(Text("starting"), console=console, refresh_per_second=8) as live:
            learned = learn("reverse", "encoder-decoder", seed=seed, every=50, on_step=lambda progress: live.update(line(progress)))
    source = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    said = answer(learned.model, learned.task, source, 8)
    console.print(f"\n  {_text(source)}  becomes  {_text(said)}\n")
    return learned


def _show_attention(console: Console, learned: Learned, seed: int) -> None:
    console.rule("2. How it does it: where the decoder looks in the source")
    source = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    fed = torch.cat([torch.tensor([[BEGIN]]), source.flip(1)], dim=1)
    with torch.no_grad(), record(learned.model, "blocks.*.cross.pattern") as seen:
        learned.model(fed, source=source)
    name, head, pattern = max(
        ((name, head, pattern[0, head]) for name, pattern in seen.items() for head in range(pattern.shape[1])),
        key=lambda entry: float(entry[2].amax(-1).mean()),
    )
    console.print(f"{name}, head {head}: its sharpest. Row by row, the token just read; darker is more.\n")
    console.print(attention_map(pattern, [VOCABULARY[i] for i in fed[0]], [VOCABULARY[i] for i in source[0]]), highlight=False)
    console.print("\nThe dark diagonal runs backwards: that is reversal, learned.\n")


def _text(ids: torch.Tensor) -> str:
    return "".join(VOCABULARY[i] for i in ids[0] if i != END)
