"""What the commands share: common options, loading a model, progress, printing a result, writing lines.

`command_of` makes a command of a row of `clearhead.app.views`.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Positional, UseAppendAction, arg

import clearhead as ch
from clearhead.app.views import COMMANDS, Command, ModelArgument
from clearhead.errors import ConfigError, InputError, nearest, no_model, refuse


def option(help: str, **more: Any) -> Any:
    """Describe an option or argument. The help shows its default, unless that is None, False or empty."""

    def show_default(default: str) -> str:
        return "" if default in ("None", "False", "") else f"(default: {default})"

    return arg(help=help, help_behavior_hint=show_default, **more)


Folder = Annotated[
    Positional[Path],
    option("a model directory, clearhead's or Hugging Face's; or a GGUF file", metavar="DIR"),
]
TokenIds = Annotated[
    bool, option('the text is token ids, such as "15 27 3"; JSON lines may have lists of them anyway')
]
Images = Annotated[
    tuple[Path, ...],
    option("images that stand where the text has the model's image token, such as <image>", metavar="FILE"),
]
Device = Annotated[
    str,
    option(
        "where the model runs; cuda:1: the second GPU; auto: the best there is", metavar="cpu|cuda|mps|auto"
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, option("dtype of the weights; default: as they are")
]

SHARED: dict[str, Any] = {  # arguments that mean the same in every command
    "target": Annotated[
        str | None,
        option("what the decoder of an encoder-decoder has written; default: what it writes by itself"),
    ],
    "pair": Annotated[str | None, option("the second text of a pair, for an encoder")],
    "beams": Annotated[int | None, option("search with this many beams; default: the model's own, else 4")],
    "length_penalty": Annotated[
        float | None, option("above 0 favours long texts; default: the model's own, else 1")
    ],
    "max_new_tokens": Annotated[
        int | None, option("where a text ends at the latest; default: the model's own")
    ],
    "examples": Annotated[int, option("most rows of the data to read; 0: all")],
    "set": Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(metavar="KEY=VALUE", help="how to read the data, such as data.header=true"),
    ],
    "seed": Annotated[int, option("random seed")],
    "plot": Annotated[Path | None, option("draw a picture: FILE.png, .svg or .pdf", metavar="FILE")],
    "tokenizer": Annotated[Path | None, option("a tokenizer that lies elsewhere: a directory or file")],
    "device": Device,
    "dtype": Dtype,
    "quantize": Annotated[
        Literal["int8", "int4"] | None,
        option("round weights first; llama.cpp then has Q8_0 or Q4_0, and other programs do not round"),
    ],
    "host": Annotated[str, option("address to listen on; others than this machine's own let others in")],
    "port": Annotated[int, option("0: any that is free")],
    "step_tokens": Annotated[
        int, option("tokens of one step at most, prefill and decode", aliases=("--max-batched-tokens",))
    ],
    "max_running": Annotated[
        int, option("sequences that decode at the same time", aliases=("--max-sequences",))
    ],
    "cache_tokens": Annotated[
        int | None, option("tokens that the KV cache holds; default: as many as 1 GiB holds")
    ],
    "overwrite": Annotated[bool, option("write into OUT although there is something already")],
    "json": Annotated[bool, option("print one JSON object, on one line, instead of a table")],
}
DEFAULTS = {"device": "auto", "json": False}


# Commands from rows -----------------------------------------------------------------------------------------

_ENTRY = re.compile(r" {4}(\w+)(?: \(([^)]*)\))?: (.*)")


def _described(function: Callable[..., Any]) -> tuple[str, dict[str, tuple[str, str]]]:
    """Return a docstring without its `Args:`, and of each argument (what is in brackets, its help)."""
    before, _, rest = (inspect.getdoc(function) or "").partition("Args:\n")
    listed, _, after = rest.partition("\n\n")
    helps: dict[str, tuple[str, str]] = {}
    for line in listed.splitlines():
        if entry := _ENTRY.fullmatch(line):
            name, helps[entry[1]] = entry[1], (entry[2] or "", entry[3])
        else:
            helps[name] = (helps[name][0], f"{helps[name][1]} {line.strip()}")
    return before + after, helps


def _argument(hint: Any, brackets: str, help: str, positional: bool, repeated: bool) -> Any:
    """Return the type of an argument for tyro; `brackets` has its metavar and aliases: "FILE --data"."""
    aliases = tuple(word for word in brackets.split() if word.startswith("--"))
    metavar = next((word for word in brackets.split() if not word.startswith("--")), None)
    markers: list[Any] = [get_args(Positional[str])[1]] if positional else []
    if repeated:
        return Annotated[hint, get_args(UseAppendAction[str])[1], arg(help=help, metavar=metavar)]
    return Annotated[hint, *markers, option(help, metavar=metavar, aliases=aliases or None)]


def command_of(name: str) -> Callable[..., None]:
    """Return a command, with the signature that tyro makes arguments of.

    An argument is described by its annotation, by the docstring, or, if it means the same everywhere, by
    `SHARED`.
    """
    row = COMMANDS[name]
    text, helps = _described(row.function)
    taken = inspect.signature(row.function).parameters
    own = {
        key: param for key, param in taken.items() if param.annotation not in ("ModelArgument", "OnProgress")
    }
    types = type("Types", (), {"__annotations__": {key: param.annotation for key, param in own.items()}})
    hints = get_type_hints(types, row.function.__globals__, include_extras=True)
    arguments: dict[str, tuple[Any, Any]] = {}
    if "ModelArgument" in [param.annotation for param in taken.values()]:
        arguments["folder"] = (Folder, inspect.Parameter.empty)
    for key, param in own.items():
        hint = str if param.annotation == "Prompt" else hints[key]
        if key in helps:
            flagged, repeated = param.kind is param.KEYWORD_ONLY, param.annotation == "Repeated"
            hint = _argument(hint, *helps[key], not flagged, repeated)
        elif get_origin(hint) is not Annotated:
            hint = SHARED[key]
        arguments[key] = (hint, param.default)
        if param.annotation == "Prompt":
            arguments |= {"ids": (TokenIds, False), "image": (Images, ())}
    if "View" in str(inspect.signature(row.function).return_annotation):
        for key in (*(["plot"] if row.plot else []), *row.loads, "json"):
            arguments.setdefault(key, (SHARED[key], DEFAULTS.get(key)))

    def command(**given: Any) -> None:
        _run(row, given)

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for key, (hint, default) in arguments.items()
        ]
    )
    command.__annotations__ = {key: hint for key, (hint, _) in arguments.items()}
    command.__doc__ = text
    return command


def _run(row: Command, given: dict[str, Any]) -> None:
    """Run a command with its arguments, print what it gives, and write its picture."""
    taken = inspect.signature(row.function).parameters
    json, plot = given.get("json", False), given.get("plot")
    if "ids" not in taken and given.pop("ids", False):
        given["text"] = token_ids(given["text"])
    if "image" not in taken and (images := given.pop("image", ())):
        from clearhead.learn.tasks.images import ImagePrompt

        given["text"] = ImagePrompt(given["text"], images)
    if "folder" in given and "folder" not in taken:
        loading = {name: given[name] for name in row.loads}
        folder = given["folder"]
        given["model"] = ModelArgument(folder, functools.partial(load_model, folder, plot=plot, **loading))
    with progress() if "on_progress" in taken else nullcontext() as given["on_progress"]:
        view = row.function(**{name: value for name, value in given.items() if name in taken})
    if view is None:
        return
    print_notes(view.notes)
    show_result(view.body, json, view.parts, plot, view.draw, view.width)
    if view.exit_code:
        sys.exit(view.exit_code)


# Inputs and outputs -----------------------------------------------------------------------------------------


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
    refuse(not folder.is_dir() and not is_gguf_file(folder) and not may_be_tower(folder), no_model(folder))
    check_picture(plot)


def is_gguf_file(path: Path) -> bool:
    """Return whether a path names a GGUF file, before importing torch."""
    return path.suffix == ".gguf" and path.is_file()


def may_be_tower(path: Path) -> bool:
    """Return whether a path may name one tower of two, such as clip/text, before importing torch."""
    return path.name in ("text", "image") and (path.parent / "config.json").is_file()


def check_output(path: Path | None) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold."""
    refuse(
        path is not None and (path.is_dir() or not path.absolute().parent.is_dir()),
        f"{path} cannot be written: it is a folder, or its folder is missing",
    )


def check_picture(plot: Path | None) -> None:
    """Refuse a picture that cannot be written, by its format or its place."""
    check_output(plot)
    if plot is not None:
        from clearhead.app.plot import FORMATS

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
            refuse(not text.strip(), f"{path} is empty: there is no config in it", ConfigError)
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


def is_own(draft: Path) -> bool:
    """Return whether --draft names the model's own MTP layers, and no folder."""
    return draft == Path("mtp") and not draft.exists()


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
    refuse(plot is not None and draw is None, "there is nothing to draw here: leave --plot out")
    if plot is not None and draw is not None:
        from clearhead.app.plot import save

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
        lines = [part]
        if isinstance(part, Table):  # rich would break title and caption at the width of the table
            lines = [line for line in (part.title, part, part.caption) if line is not None]
            part.title = part.caption = None
        for line in lines:
            console.print(line, soft_wrap=isinstance(line, str))


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

    def write(content: Any) -> None:
        file.write(content if mode == "wb" else f"{content}\n")
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
