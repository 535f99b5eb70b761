"""What the commands share: common options, loading a model, progress, printing a result, writing lines."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

import clearhead as ch
from clearhead.errors import ConfigError, InputError, nearest, no_model, refuse


def option(help: str, **more: Any) -> Any:
    """Describe an option or argument. The help shows its default, unless that is None, False or empty."""
    return arg(help=help, help_behavior_hint=_show_default, **more)


def _show_default(default: str) -> str:
    return "" if default in ("None", "False", "") else f"(default: {default})"


Json = Annotated[bool, option("print one JSON object, on one line, instead of a table")]
Folder = Annotated[
    Positional[Path],
    option("a model directory, clearhead's or Hugging Face's; or a GGUF file", metavar="DIR"),
]
Given = Annotated[Positional[str], option("the text; for a model of images, an image file", metavar="TEXT")]
TokenIds = Annotated[
    bool,
    option('the text is token ids, such as "15 27 3"; JSON lines may have lists of them anyway'),
]
Target = Annotated[
    str | None,
    option("what the decoder of an encoder-decoder has written; default: what it writes by itself"),
]
Pair = Annotated[str | None, option("the second text of a pair, for an encoder")]
Tokenizer = Annotated[Path | None, option("a tokenizer that lies elsewhere: a directory or file")]
Beams = Annotated[int | None, option("search with this many beams; default: the model's own, else 4")]
LengthPenalty = Annotated[
    float | None, option("above 0 favours long texts; default: the model's own, else 1")
]
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


def token_ids(text: str) -> list[int]:
    """Return the token ids written in a text, with spaces or commas between them."""
    try:
        return list(map(int, text.replace(",", " ").split()))
    except ValueError:
        raise InputError(
            f'"{text:.40}" is not a list of token ids: with --ids, write whole numbers, such as "15 27 3"'
        ) from None


def check_inputs(folder: Path, plot: Path | None = None) -> None:
    """Refuse a missing model or an unknown format of picture, before importing torch."""
    refuse(
        not folder.is_dir() and not is_gguf_file(folder) and not may_be_tower(folder),
        no_model(folder),
    )
    check_picture(plot)


def is_gguf_file(path: Path) -> bool:
    """Return whether a path names a GGUF file, before importing torch."""
    return path.suffix == ".gguf" and path.is_file()


def may_be_tower(path: Path) -> bool:
    """Return whether a path may name one tower of two, such as clip/text, before importing torch."""
    return path.name in ("text", "image") and (path.parent / "config.json").is_file()


def check_picture(plot: Path | None) -> None:
    """Refuse an unknown format of picture."""
    if plot is not None:
        from clearhead.app.plot.canvas import FORMATS

        refuse(
            plot.suffix.lower() not in FORMATS,
            f"--plot {plot} cannot be written: its name must end in a format: use {', '.join(FORMATS)}",
        )


def read_config(name: str) -> ch.ModelConfig:
    """Return the config of a JSON file, of a model directory or its config.json, or of a preset."""
    path = Path(name)
    if path.is_file() and not is_gguf_file(path):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as a config: {error}") from None
        if path.name != "config.json" or not ('"model_type"' in text or '"clearhead"' in text):
            return ch.ModelConfig.from_json(text)
        path = path.parent
    if path.is_dir() or is_gguf_file(path) or may_be_tower(path):
        from clearhead.hub.checkpoint import describe

        return describe(path).config
    refuse(
        name not in ch.PRESETS,
        f'"{name}" is no file, directory or preset{nearest(name, ch.PRESETS)}: '
        f"presets are {', '.join(ch.PRESETS)}",
        ConfigError,
    )
    return ch.PRESETS[name]


def load_model(
    folder: Path,
    tokenizer: Path | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    plot: Path | None = None,
    parallel: Mapping[str, int] | None = None,
    quantize: str | None = None,
) -> ch.Model:
    """Return the model of a directory, on a device and in a dtype, once the inputs are checked."""
    check_inputs(folder, plot)
    return ch.load(folder, dtype, device, tokenizer=tokenizer, parallel=parallel, quantize=quantize)


def print_notes(notes: Iterable[str]) -> None:
    """Print lines that are not part of the result, to stderr."""
    for line in notes:
        print(line, file=sys.stderr)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print each warning of the library once, as one line on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", RuntimeWarning)
        warnings.showwarning = lambda message, *where: print_notes([f"warning: {message}"])
        yield


def show_result(
    body: dict[str, Any],
    as_json: bool,
    parts: Iterable[Any],
    plot: Path | None = None,
    draw: Callable[[], Any] | None = None,
    width: int = 0,
) -> None:
    """Save a picture where one is asked for, then print one JSON object, or else the parts.

    Args:
        body: the JSON object.
        as_json: print that.
        parts: what is printed otherwise, lines and tables; a generator is not run for JSON.
        plot: the file of the picture; the JSON object names it.
        draw: makes the picture.
        width: columns to use, even where the terminal has fewer.
    """
    if plot is not None and draw is not None:
        from clearhead.app.plot.canvas import save

        print_notes([f"saved {save(draw(), plot)}"])
        body = {**body, "plot": str(plot)}
    if as_json:
        print(json.dumps(body, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, width)
    for part in parts:
        pieces = [part]
        if isinstance(part, Table):  # rich would break title and caption at the width of the table
            pieces = [piece for piece in (part.title, part, part.caption) if piece is not None]
            part.title = part.caption = None
        for piece in pieces:
            console.print(piece, soft_wrap=isinstance(piece, str))


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


def check_apart(output: Path | None, inputs: Iterable[Path]) -> None:
    """Refuse an output that is one of the inputs."""
    for path in inputs:
        refuse(
            output is not None and output.exists() and path.exists() and output.samefile(path),
            f"--output {output} is the file that is read, {path}: name another",
        )


@contextmanager
def writing(path: Path | None, mode: Literal["w", "wb"] = "w") -> Iterator[Callable[[Any], None]]:
    """Give a function that writes a line, or bytes: to stdout at once, or to a file, whole or not at all.

    The file appears when all is done. A link stays, and its target is written. A pipe or a device, which no
    file can replace, gets each line at once.
    """
    if path is None:
        yield lambda text: print(text, flush=True)
        return
    whole = path.is_file() or not path.exists()
    target = Path(os.path.realpath(path)) if whole else path
    work = target.with_name(f".{target.name}.{os.getpid()}") if whole else path
    try:
        file = work.open(mode, encoding=None if mode == "wb" else "utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None

    def write(given: Any) -> None:
        file.write(given if mode == "wb" else f"{given}\n")
        if not whole:
            file.flush()

    try:
        with file:
            yield write
            if whole:
                file.flush()
                os.fsync(file.fileno())
        if whole:
            work.replace(target)
    finally:
        if whole:
            work.unlink(missing_ok=True)
