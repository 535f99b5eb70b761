"""What the commands share: common options, loading a model, progress, and showing a result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

import clearhead as ch
from clearhead.errors import refuse


def option(help: str, **more: Any) -> Any:
    """Describe an option or argument. The help shows its default, unless that is None, False or empty."""
    return arg(help=help, help_behavior_hint=_show_default, **more)


def _show_default(default: str) -> str:
    return "" if default in ("None", "False", "") else f"(default: {default})"


Json = Annotated[bool, option("print one JSON object instead of a table")]
Folder = Annotated[
    Positional[Path], option("a model directory, clearhead's or Hugging Face's", metavar="DIR")
]
Given = Annotated[Positional[str], option("the text; for a model of images, an image file", metavar="TEXT")]
Target = Annotated[
    str | None,
    option("what the decoder of an encoder-decoder has written; default: what it writes by itself"),
]
Pair = Annotated[str | None, option("the second text of a pair, for an encoder")]
Tokenizer = Annotated[Path | None, option("a tokenizer that lies elsewhere: a directory or file")]
Device = Annotated[str, option("cpu, cuda, cuda:1, mps; auto: the best there is")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, option("dtype of the weights; default: as they are")
]
Plot = Annotated[Path | None, option("draw a picture: FILE.png, .svg or .pdf", metavar="FILE")]
DATA = "files, folders, globs, or an embedded corpus"
Settings = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(metavar="KEY=VALUE", help="how to read the data, such as data.header=true"),
]


def check_inputs(folder: Path, *texts: str, plot: Path | None = None) -> None:
    """Refuse a missing model, an empty text or an unknown format of picture, before importing torch."""
    fetch = f"one from the Hub is fetched by `hf download {folder} --local-dir DIR`"
    refuse(not folder.is_dir(), f"{folder} is not a directory: name a model directory; {fetch}")
    refuse("" in texts, "the text is empty: give some text, or the name of an image file")
    if plot is not None:
        from clearhead.plot.canvas import FORMATS

        formats = f"its name must end in a format: use {', '.join(FORMATS)}"
        refuse(plot.suffix.lower() not in FORMATS, f"--plot {plot} cannot be written: {formats}")


def load_model(
    folder: Path, tokenizer: Path | None = None, device: str = "cpu", dtype: str | None = None
) -> ch.Model:
    """Return the model of a directory, on a device and in a dtype."""
    check_inputs(folder)
    import torch

    from clearhead.training.machine import best_device

    wanted = getattr(torch, dtype) if dtype is not None else None
    return ch.load(folder, wanted, str(best_device(device)), tokenizer=tokenizer)


def save_plot(plot: Path | None, draw: Callable[[], Any]) -> dict[str, str]:
    """Draw and save a picture, where one is asked for. Return its name for the JSON output."""
    if plot is None:
        return {}
    from clearhead.plot.canvas import save

    print_notes([f"saved {save(draw(), plot)}"])
    return {"plot": str(plot)}


def print_notes(notes: Iterable[str]) -> None:
    """Print lines that are not part of the result, to stderr."""
    for line in notes:
        print(line, file=sys.stderr)


def show_result(body: dict[str, Any], as_json: bool, parts: Iterable[Any], width: int = 0) -> None:
    """Print one JSON object, or else the parts: lines of text, tables, whatever rich prints.

    Args:
        body: the JSON object.
        as_json: print that.
        parts: what is printed otherwise; a generator is not run for JSON.
        width: columns to use, even where the terminal has fewer.
    """
    if as_json:
        print(json.dumps(body, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, width)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Give a function (stage, done, total) that shows a bar for each stage, where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    console = Console(stderr=True)
    with Progress(console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        bars: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = bar.add_task(stage, total=total)
            bar.update(bars[stage], completed=done)

        yield show
