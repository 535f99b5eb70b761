"""Commands over texts: read from an argument, a file or stdin, run a model batch by batch, write in order.

A bad line ends the work: the results before it are written, and the error names it.
"""

from __future__ import annotations

import gzip
import json as jsonlib
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from tyro.conf import Positional, arg

import clearhead as ch
from clearhead.commands.common import (
    Device,
    Dtype,
    check_apart,
    load_model,
    option,
    progress,
    show_result,
    writing,
)
from clearhead.errors import ClearheadError, InputError, refuse

Text = Annotated[
    Positional[str | None], option("the text; - or nothing: stdin, one text per line", metavar="TEXT")
]
NO_TEXT = "no text was given: write it after the directory, name a --file, or pipe in one text per line"
Made = TypeVar("Made")


class Input(NamedTuple):
    """One input of a command: its texts by field, and its place for error messages."""

    fields: dict[str, str]
    place: str = ""  # "FILE line 3"; empty for an argument


@dataclass(frozen=True)
class TextOptions:
    """Options of every command that runs a model over texts."""

    file: Annotated[
        Path | None, option("read one text per line; .jsonl: one JSON object per line; .gz as well")
    ] = None
    output: Annotated[Path | None, option("write there, whole, in place of stdout")] = None
    json: Annotated[bool, option("one JSON object; for a file or stdin, one per line")] = False
    batch_size: Annotated[int, option("texts at a time")] = 16
    tokenizer: Annotated[
        Path | None, option("a directory, tokenizer.json, SentencePiece .model or llama2.c .bin")
    ] = None
    device: Device = "cpu"
    dtype: Dtype = None

    def load(self, folder: Path) -> ch.Model:
        """Return the model of a directory, as these options ask for it."""
        return load_model(folder, tokenizer=self.tokenizer, device=self.device, dtype=self.dtype)

    def run(
        self,
        given: Mapping[str, str | None],
        compute: Callable[[list[dict[str, str]]], Iterable[Made]],
        body: Callable[[dict[str, str], Made], dict[str, Any]],
        line: Callable[[dict[str, str], Made], str],
        show: Callable[[Made], Any] | None = None,
        optional: Mapping[str, str | None] | None = None,
    ) -> None:
        """Run a command over its inputs.

        Args:
            given: the arguments by field; the first is None or "-" where texts come from a file or stdin.
            compute: gives the result of each input of a batch, from its fields.
            body: makes the fields of an input and its result a JSON object.
            line: makes them a line of text.
            show: makes the result of a single argument something that rich prints; None: its line.
            optional: arguments that may be missing; those of a file's inputs come from JSON lines.
        """
        single = next(iter(given.values())) not in (None, "-")
        refuse(self.batch_size < 1, f"batch-size {self.batch_size} must be 1 or more")
        refuse(single and self.file is not None, "a text and --file were both given: choose one")
        check_apart(self.output, [self.file] if self.file is not None else [])
        values = {**given, **(optional or {})}
        with writing(self.output) as write, closing(self._inputs(values, tuple(given), single)) as inputs:
            for (fields, _), made in results(
                inputs, lambda batch: compute([item.fields for item in batch]), self.batch_size
            ):
                if self.json:
                    indent = 2 if single else None
                    write(jsonlib.dumps(body(fields, made), indent=indent, ensure_ascii=False))
                elif single and show is not None and self.output is None:
                    show_result({}, False, [show(made)])
                else:
                    write(line(fields, made))

    def _inputs(
        self, values: Mapping[str, str | None], needed: tuple[str, ...], single: bool
    ) -> Generator[Input]:
        """Give the arguments in `values` as an input, or the inputs of a file or stdin with such fields.

        A line is a JSON object, or the fields that are needed with tabs between them.
        """
        if single:
            yield Input(_checked(values, values, needed))
            return
        name, number = str(self.file or "stdin"), 0
        jsonl = self.file is not None and ".jsonl" in self.file.suffixes
        try:
            with _lines(self.file) as lines:
                for number, raw in enumerate(lines, 1):
                    place = f"{name} line {number}"
                    try:
                        text = (raw.decode("utf-8") if isinstance(raw, bytes) else raw).rstrip("\r\n")
                        found = _from_json(text) if jsonl else _from_tabs(text, needed)
                        yield Input(_checked(found, values, needed), place)
                    except UnicodeDecodeError as error:
                        raise InputError(
                            f"{place}: byte {error.start + 1} is not UTF-8: convert the file"
                        ) from None
                    except InputError as error:
                        raise _placed(error, place) from None
        except (EOFError, OSError, zlib.error) as error:
            raise InputError(
                f"{name} cannot be read after line {number}: {str(error).splitlines()[0]}"
            ) from None


Options = Annotated[TextOptions, arg(name="")]  # its flags without a prefix


def results(
    inputs: Iterator[Input], work: Callable[[list[Input]], Iterable[Made]], batch_size: int
) -> Iterator[tuple[Input, Made]]:
    """Give each input with its result, in order; a bad input is an error, after the results before it."""
    wrong: list[ClearheadError] = []
    good = _until_wrong(inputs, wrong)
    while batch := list(islice(good, batch_size)):
        try:
            yield from zip(batch, work(batch))
        except ClearheadError:  # of one of them: find it, and lose none before it
            for item in batch:
                try:
                    (result,) = work([item])
                except ClearheadError as error:
                    raise _placed(error, item.place) from None
                yield item, result
    if wrong:
        raise wrong[0]


def _until_wrong(inputs: Iterator[Input], wrong: list[ClearheadError]) -> Iterator[Input]:
    """Give the inputs up to one that cannot be read, and keep the error for when their results are out."""
    try:
        yield from inputs
    except ClearheadError as error:
        wrong.append(error)


def _placed(error: ClearheadError, place: str) -> ClearheadError:
    return type(error)(f"{place}: {error}") if place else error


def _checked(values: Mapping[str, Any], names: Iterable[str], needed: Iterable[str]) -> dict[str, str]:
    """Return the named fields among some values: all texts, and those that are needed there."""
    found = {name: values[name] for name in names if values.get(name) is not None}
    all_needed = ", ".join(f'"{name}"' for name in needed)
    for name in needed:
        refuse(name not in found, f"there is no {name}: an input needs {all_needed}")
    for name, value in found.items():
        refuse(not isinstance(value, str), f"{name} is {value!r:.40}: it must be text")
        refuse(not value, f"the {name} is empty: give some text")
    return found


def _from_tabs(text: str, names: tuple[str, ...]) -> dict[str, Any]:
    parts = text.split("\t") if len(names) > 1 else [text]
    wanted = f"{len(names)} ({', '.join(names)}), with a tab between them"
    refuse(len(parts) != len(names), f"it has {len(parts)} fields and needs {wanted}")
    return dict(zip(names, parts))


def _from_json(text: str) -> dict[str, Any]:
    try:
        value = jsonlib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON: {str(error).splitlines()[0]}") from None
    refuse(not isinstance(value, dict), f"it is {type(value).__name__}, and a JSON object is needed")
    return dict(value)


@contextmanager
def _lines(path: Path | None) -> Iterator[Iterable[bytes | str]]:
    """Give the lines of stdin or of a file, compressed or not; a bar shows how far a file is read."""
    if path is None:
        refuse(sys.stdin.isatty(), NO_TEXT)
        yield getattr(sys.stdin, "buffer", sys.stdin)
        return
    try:
        raw = path.open("rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    size = path.stat().st_size
    plain = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
    with raw, plain, progress() as on_progress:

        def lines() -> Iterator[bytes]:
            for line in plain:
                on_progress(path.name, raw.tell(), size)
                yield line

        yield lines()
