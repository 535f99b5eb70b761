"""Commands over texts: read from an argument, a file or stdin, run a model batch by batch, write in order.

A bad line ends the work: the results before it are written, and the error names it.
"""

from __future__ import annotations

import gzip
import json as jsonlib
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

import clearhead as ch
from clearhead.commands.common import Dtype, load_model, option, progress, show_result
from clearhead.commands.output import check_apart, writing
from clearhead.errors import ClearheadError, InputError, refuse

Text = Annotated[
    Positional[str | None], option("the text; - or nothing: stdin, one text per line", metavar="TEXT")
]

NO_TEXT = "no text was given: write it after the directory, name a --file, or pipe in one text per line"


@dataclass(frozen=True)
class Input:
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
    device: Annotated[str, option("cpu, cuda, cuda:1, mps; auto: the best there is")] = "cpu"
    dtype: Dtype = None

    def load(self, folder: Path) -> ch.Model:
        """Return the model of a directory, as these options ask for it."""
        return load_model(folder, self.tokenizer, self.device, self.dtype)

    def run(
        self,
        given: dict[str, str | None],
        work: Callable[[list[Input]], list[Any]],
        body: Callable[[Input, Any], dict[str, Any]],
        line: Callable[[Input, Any], str],
        show: Callable[[Any], Any] | None = None,
        more: dict[str, str | None] | None = None,
    ) -> None:
        """Run a command over its inputs.

        Args:
            given: the arguments by field; the first is None or "-" where texts come from a file or stdin.
            work: computes the results of a batch of inputs.
            body: makes an input and its result a JSON object.
            line: makes an input and its result a line of text.
            show: makes the result of a single argument something that rich prints; None: its line.
            more: arguments that may be missing; those of a file's inputs come from JSON lines.
        """
        first = next(iter(given.values()))
        single = first is not None and first != "-"
        refuse(self.batch_size < 1, f"batch-size {self.batch_size} must be 1 or more")
        refuse(single and self.file is not None, "a text and --file were both given: choose one")
        check_apart(self.output, [self.file] if self.file is not None else [])
        fields = FieldNames(tuple(given), tuple(more or {}))
        argument = {**given, **(more or {})} if single else None
        with writing(self.output) as write, self._inputs(argument, fields) as inputs:
            for item, result in results(inputs, work, self.batch_size):
                if self.json:
                    write(jsonlib.dumps(body(item, result), indent=2 if single else None, ensure_ascii=False))
                elif single and show is not None and self.output is None:
                    show_result({}, False, [show(result)])
                else:
                    write(line(item, result))

    @contextmanager
    def _inputs(
        self, argument: dict[str, str | None] | None, fields: FieldNames
    ) -> Iterator[Iterator[Input]]:
        """Give the inputs: those of the command's arguments, or of a file, or of stdin."""
        if argument is not None:
            yield iter([Input(fields.check(argument))])
        elif self.file is not None:
            with _file_lines(self.file) as lines:
                yield _parse(lines, str(self.file), fields, ".jsonl" in self.file.suffixes)
        else:
            refuse(sys.stdin.isatty(), NO_TEXT)
            yield _parse(getattr(sys.stdin, "buffer", sys.stdin), "stdin", fields, jsonl=False)


Options = Annotated[TextOptions, arg(name="")]  # its flags without a prefix


@dataclass(frozen=True)
class FieldNames:
    """The names of the fields of an input."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def check(self, values: dict[str, Any]) -> dict[str, str]:
        """Return the fields among some values. Those that are needed must be there, and all must be texts."""
        found = {
            name: values[name] for name in (*self.needed, *self.optional) if values.get(name) is not None
        }
        names = ", ".join(f'"{name}"' for name in self.needed)
        for name in self.needed:
            refuse(name not in found, f"there is no {name}: an input needs {names}")
        for name, value in found.items():
            refuse(not isinstance(value, str), f"{name} is {value!r:.40}: it must be text")
            refuse(not value, f"the {name} is empty: give some text")
        return found


def results(
    inputs: Iterator[Input], work: Callable[[list[Input]], list[Any]], batch_size: int
) -> Iterator[tuple[Input, Any]]:
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


def _parse(lines: Any, name: str, fields: FieldNames, jsonl: bool) -> Iterator[Input]:
    """Give the inputs of a stream of lines: JSON objects, or texts with tabs between several fields."""
    number = 0
    try:
        for number, raw in enumerate(lines, 1):
            place = f"{name} line {number}"
            try:
                text = (raw.decode("utf-8") if isinstance(raw, bytes) else raw).rstrip("\r\n")
                values = _from_json(text) if jsonl else _from_tabs(text, fields.needed)
                yield Input(fields.check(values), place)
            except UnicodeDecodeError as error:
                raise InputError(f"{place}: byte {error.start + 1} is not UTF-8: convert the file") from None
            except InputError as error:
                raise _placed(error, place) from None
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{name} cannot be read after line {number}: {str(error).splitlines()[0]}") from None


def _from_tabs(text: str, names: Sequence[str]) -> dict[str, Any]:
    parts = text.split("\t") if len(names) > 1 else [text]
    wanted = f"{len(names)} ({', '.join(names)}), with a tab between them"
    refuse(len(parts) != len(names), f"it has {len(parts)} fields and needs {wanted}")
    return dict(zip(names, parts))


def _from_json(text: str) -> dict[str, Any]:
    try:
        value = jsonlib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON: {str(error).splitlines()[0]}") from None
    kind = type(value).__name__
    refuse(not isinstance(value, dict), f"it is {kind}, and a JSON object is needed")
    return dict(value)


@contextmanager
def _file_lines(path: Path) -> Iterator[Iterator[bytes]]:
    """Give the lines of a file, which may be compressed by gzip. A bar shows how far it is read."""
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
