"""`clearhead demo`: a tour of two minutes in the terminal, from data to a model and a look inside it."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from clearhead.app.report import attention_map, check_table, cost_table
from clearhead.inside.checks import check
from clearhead.learn.training.events import Event, Stepped, Validated
from clearhead.learn.training.run import train
from clearhead.run.api import Model
from clearhead.variants.contexts import record
from clearhead.variants.costs import cost

PROSE = {"data.batch_size": 16, "data.max_examples": 200, "train.lr": 3e-3}
DATES = {"data.max_examples": 4000, "generate.max_new_tokens": 12}
PROMPT, DATE = "Return the ", "the 3rd of May 2011"
NEXT = """\
clearhead generate {writer} 'Return the ' --temperature 0.7 --stream
clearhead translate {reader} '24 December 1999'
clearhead explore {reader} --text '3 May 2011' --export page.html    see it think
clearhead trace {reader} '3 May 2011' --depth 3    the forward pass, step by step
clearhead train my.txt                     your own text, pairs, labels, tags or images
clearhead tokens 'any text'                the stages of tokenization
clearhead check DIR --reference            against transformers"""


def tour(seed: int = 0, steps: int = 400, folder: Path | None = None) -> None:
    """Train on prose and on dates, show an attention map and a cost table, and run the equality checks.

    Args:
        seed: of both models.
        steps: of the first model; the second takes half as many again.
        folder: where the models are written; None: a temporary folder.
    """
    console = Console(highlight=False)
    place = folder or Path(tempfile.mkdtemp(prefix="clearhead-demo-"))
    console.rule("1. A small GPT learns the prose of Python's own documentation")
    writer = _train(console, "stdlib-docs", "char-gpt-cpu", place / "writer", PROSE, steps, seed)
    sample = writer.generate(PROMPT, 50, temperature=0.6, seed=seed)
    console.print(f"\n[bold]{PROMPT}[/bold]", Text(sample.text or ""), sep="")
    console.rule("2. An encoder-decoder learns to read dates")
    reader = _train(console, "dates", "seq2seq-dates", place / "reader", DATES, steps * 3 // 2, seed)
    answer = reader.generate(DATE, 12)
    console.print(f"\n{DATE}  becomes  {answer.text}\n")
    console.rule("3. Where it looks while it writes")
    _show_attention(console, reader, DATE, answer.ids)
    console.rule("4. What a model takes, before it is built")
    console.print(cost_table(cost("gpt2"), "gpt2"))
    console.rule("5. The equality checks, on the model just trained")
    rows = check(reader)
    console.print(check_table(rows))
    console.print(f"{sum(row.passed for row in rows)} of {len(rows)} equal.\n")
    console.rule("Next")
    console.print(NEXT.format(writer=place / "writer", reader=place / "reader"), soft_wrap=True)


def _train(
    console: Console, data: str, recipe: str, out: Path, settings: Mapping[str, Any], steps: int, seed: int
) -> Model:
    """Train with one live line or, without a terminal, with a line at each validation."""
    start = time.perf_counter()
    length = {"train.steps": steps, "train.validate_every": max(1, steps // 2), "train.seed": seed}
    live = Live(Text("reading"), console=console, refresh_per_second=8, transient=True)

    def show(event: Event) -> None:
        took = f"{time.perf_counter() - start:4.0f} s"
        if isinstance(event, Stepped):
            bar = "█" * round(30 * event.step / event.steps)
            figures = f"loss {event.loss:.3f}  {event.tokens_per_second:>6,.0f} tok/s"
            live.update(Text(f"step {event.step:>4}/{event.steps}  {figures}  {bar:<30} {took}"))
        if isinstance(event, Validated):
            figures = "  ".join(f"{name} {value:.3f}" for name, value in event.metrics.items())
            console.print(f"step {event.step:>4}  validation  {figures}  {took}")
            for sample in event.samples[:1]:
                console.print(Text("    " + sample.replace("\n", "⏎")[: console.width - 6]))

    settings = {**settings, **length}
    with live:
        return train(data, recipe=recipe, out=out, settings=settings, on_event=show, overwrite=True).model


def _show_attention(console: Console, reader: Model, source: str, answer: list[int]) -> None:
    """Show the sharpest cross-attention head as a picture of characters."""
    assert reader.tokenizer is not None
    read = reader.encode([source])[0]
    inputs = [reader.special["decoder_start"], *answer[:-1]]
    with torch.no_grad(), record(reader.model, "blocks.*.cross.pattern") as seen:
        reader.model(torch.tensor([inputs]), source=torch.tensor([read]))
    heads = [
        (name, head, pattern[0, head]) for name, pattern in seen.items() for head in range(pattern.shape[1])
    ]
    name, head, pattern = max(heads, key=lambda entry: float(entry[2].amax(-1).mean()))
    written, letters = (
        [reader.tokenizer.id_to_token(token) or "" for token in ids] for ids in (answer, read)
    )
    console.print(
        f"{name}, head {head}. A row for each character written, a column for each character read; "
        "darker is more.\n",
        attention_map(pattern, written, [letter if len(letter) == 1 else "." for letter in letters]),
        f"\nOn average {float(pattern.amax(-1).mean()):.0%} of a row lies on one character of {len(read)}.\n",
        sep="\n",
    )
