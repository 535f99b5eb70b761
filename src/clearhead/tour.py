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

SOURCE = torch.tensor([[3, 1, 4, 1, 5, 9]])


def tour(seed: int = 0) -> None:
    """Learn to reverse digits, see how, read a cost table, run the checks."""
    console = Console()
    console.rule("1. A Transformer learns to reverse digits")
    console.print("Encoder and decoder, two layers each, 64 wide, from random weights; scored on inputs it never saw.\n")
    learned = _learn(console, seed)
    _show_attention(console, learned)
    console.rule("3. What a model takes, before it is built")
    console.print(cost_table(cost("gpt2"), "gpt2"))
    console.rule("4. The equality checks, on the model just trained")
    rows = check(learned.model)
    console.print(check_table(rows))
    failed = sum(not row.passed for row in rows)
    console.print(f"{len(rows) - failed} of {len(rows)} equal.\n")
    console.rule("Next")
    console.print("clearhead generate DIR 'Once upon'   any language model with a tokenizer")
    console.print("clearhead cost llama-3-8b --length 8192 --dtype bfloat16")
    console.print("clearhead check DIR --reference      against transformers")
    console.print("clearhead convert IN OUT             read and write Hugging Face checkpoints")


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
    said = answer(learned.model, learned.task, SOURCE, SOURCE.shape[1] + 1)
    console.print(f"\n  {_text(SOURCE)}  becomes  {_text(said)}\n")
    return learned


def _show_attention(console: Console, learned: Learned) -> None:
    console.rule("2. How it does it: where the decoder looks in the source")
    fed = torch.cat([torch.tensor([[BEGIN]]), SOURCE.flip(1)[:, :-1]], dim=1)  # what it has read when it writes each digit
    with torch.no_grad(), record(learned.model, "blocks.*.cross.pattern") as seen:
        learned.model(fed, source=SOURCE)
    heads = [(name, head, pattern[0, head]) for name, pattern in seen.items() for head in range(pattern.shape[1])]
    name, head, pattern = max(heads, key=lambda entry: _on_target(entry[2]))
    share, chance = _on_target(pattern), 1 / SOURCE.shape[1]
    console.print(f"{name}, head {head}. A row for each token just read, a column for each of the source; darker is more.\n")
    console.print(attention_map(pattern, [VOCABULARY[i] for i in fed[0]], [VOCABULARY[i] for i in SOURCE[0]]), highlight=False)
    console.print(
        f"\n{share:.0%} of its attention lies on the digit to be written next, last one first; by chance it would be {chance:.0%}.\n"
    )


def _on_target(pattern: torch.Tensor) -> float:
    """How much of a pattern [T, S] lies on the diagonal that runs backwards."""
    return float(pattern.flip(1).diagonal().mean())


def _text(ids: torch.Tensor) -> str:
    return "".join(VOCABULARY[i] for i in ids[0] if i != END)
