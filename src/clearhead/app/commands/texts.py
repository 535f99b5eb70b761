"""Commands over texts: read from an argument, a file or stdin, run a model batch by batch, write in order.

A bad input does not end the work: its result says what is wrong with it, and the exit code at the end is 1.
"""

from __future__ import annotations

import gzip
import io
import json as jsonlib
import math
import os
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar

from tyro.conf import Positional, arg

import clearhead as ch
from clearhead.app.commands.common import (
    Device,
    Dtype,
    check_apart,
    load_model,
    option,
    print_notes,
    progress,
    show_result,
    token_ids,
    writing,
)
from clearhead.errors import ClearheadError, InputError, refuse
from clearhead.learn.parallel import started

Text = Annotated[
    Positional[str | None], option("the text; - or nothing: stdin, one text per line", metavar="TEXT")
]
NO_TEXT = "no text was given: write it after the directory, name a --file, or pipe in one text per line"
Result = TypeVar("Result")


class Input(NamedTuple):
    """One input of a command."""

    fields: dict[str, Any]  # its texts, or lists of token ids, by name
    unused: Mapping[str, Any] = MappingProxyType({})  # the other fields of its JSON object
    place: str = ""  # for messages, "FILE line 3"; empty for an argument
    error: ClearheadError | None = None  # why it cannot be read


@dataclass(frozen=True)
class TextOptions:
    """Options of every command that runs a model over texts."""

    file: Annotated[
        Path | None,
        option("read one text per line; .jsonl: one JSON object per line; .gz as well", aliases=("--data",)),
    ] = None
    output: Annotated[Path | None, option("write there, whole or not at all, in place of stdout")] = None
    json: Annotated[
        bool, option("a JSON object for each result, on one line; unused fields of JSON lines stay")
    ] = False
    batch_size: Annotated[int | None, option("texts at a time; default: 16, embed: as the device likes")] = (
        None
    )
    tokenizer: Annotated[
        Path | None, option("a directory, tokenizer.json, SentencePiece .model or llama2.c .bin")
    ] = None
    device: Device = "auto"
    dtype: Dtype = None

    def load(self, folder: Path, parallel: Mapping[str, int] | None = None) -> ch.Model:
        """Return the model of a directory, as these options ask for it; `parallel` as in `ch.load`."""
        return load_model(folder, self.tokenizer, self.device, self.dtype, parallel=parallel)

    @property
    def rows(self) -> int:
        """Texts at a time."""
        return self.batch_size or 16

    def run(
        self,
        given: Mapping[str, str | None],
        compute: Callable[[list[dict[str, Any]]], Iterable[Result]],
        body: Callable[[dict[str, Any], Result], dict[str, Any]],
        line: Callable[[dict[str, Any], Result], str],
        show: Callable[[Result], Any] | None = None,
        optional: Mapping[str, str | None] | None = None,
        ids: bool | None = None,
        array: bool = False,
        of_file: int | None = None,
    ) -> None:
        """Run a command over its inputs.

        Args:
            given: the arguments by field; the first is None or "-" where texts come from a file or stdin.
            compute: gives the result of each input of a batch, from its fields; of an empty batch, it refuses
                a model or an option that fits no input.
            body: makes the fields of an input and its result a JSON object.
            line: makes them a line of text.
            show: makes the result of a single argument something that rich prints; None: its line.
            optional: arguments that may be missing; those of a file's inputs come from JSON lines.
            ids: read the texts as token ids; None: the command takes no ids.
            array: the results are vectors, which --output FILE.npy holds as a matrix.
            of_file: how many inputs of a file `compute` is given at a time; None: `rows`.
        """
        single = next(iter(given.values())) not in (None, "-")
        few = self.batch_size is not None and self.batch_size < 1
        refuse(few, f"batch-size {self.batch_size} must be 1 or more")
        refuse(single and self.file is not None, "a text and --file were both given: choose one")
        check_apart(self.output, [self.file] if self.file is not None else [])
        matrix = self.output is not None and self.output.suffix == ".npy"
        refuse(
            matrix and (self.json or not array),
            f"--output {self.output}: a .npy file holds vectors, of embed without --json: rename it",
        )
        if not single:
            list(compute([]))
        values, written, failed = {**given, **(optional or {})}, 0, list[ClearheadError]()
        vectors: list[Any] = []  # for a matrix; None where an input failed
        with (
            writing(self.output, "wb" if matrix else "w") as write,
            closing(self._inputs(values, tuple(given), ids, single)) as inputs,
        ):
            for item, result in results(inputs, compute, (self.file and of_file) or self.rows):
                if isinstance(result, ClearheadError):
                    if single:
                        raise result
                    failed.append(result)
                    row, text, vector = {**item.fields, "error": str(result)}, f"error: {result}", None
                elif single and show is not None and not self.json and self.output is None:
                    show_result({}, False, [show(result)])
                    continue
                else:
                    written += 1
                    row, text, vector = body(item.fields, result), line(item.fields, result), result
                if matrix:
                    vectors.append(vector)
                elif self.json:  # unused fields of the input stay, as given_NAME where the result has NAME
                    unused = {f"given_{n}" if n in row else n: value for n, value in item.unused.items()}
                    write(jsonlib.dumps({**unused, **row}, ensure_ascii=False))
                else:
                    write(text)
            if matrix:
                write(_npy(vectors))
        if failed:
            count = f"{len(failed)} of {written + len(failed)} inputs failed"
            print_notes([f"clearhead: {count}, the first: {failed[0]}"])
            sys.exit(1)

    def _inputs(
        self, values: Mapping[str, str | None], needed: tuple[str, ...], ids: bool | None, single: bool
    ) -> Generator[Input]:
        """Give the arguments in `values` as an input, or the inputs of a file or stdin with such fields.

        A line is a JSON object, or the fields that are needed with tabs between them.
        """
        if single:
            yield Input(_checked(values, values, needed, ids))
            return
        name, number = str(self.file or "stdin"), 0
        jsonl = self.file is not None and ".jsonl" in self.file.suffixes
        try:
            with _lines(self.file) as lines:
                for number, raw in enumerate(lines, 1):
                    place, values_read = f"{name} line {number}", dict[str, Any]()
                    refuse(
                        number == 1 and isinstance(raw, bytes) and b"\0" in raw,
                        f"{name} is a binary file: give texts, one per line",
                    )
                    try:
                        text = (raw.decode("utf-8") if isinstance(raw, bytes) else raw).rstrip("\r\n")
                        refuse(not text, "the line is blank: give some text")
                        values_read = _from_json(text) if jsonl else _from_tabs(text, needed)
                        fields = _checked(values_read, values, needed, ids)
                    except UnicodeDecodeError as error:
                        wrong = f"byte {error.start + 1} is not UTF-8: convert the file"
                        yield Input({}, place=place, error=InputError(f"{place}: {wrong}"))
                    except InputError as error:
                        yield Input({}, values_read, place, _placed(error, place))
                    else:
                        unused = {name: value for name, value in values_read.items() if name not in fields}
                        yield Input(fields, unused, place)
            refuse(self.file is not None and not number, f"{name} is empty: there is no text in it")
        except (EOFError, OSError, zlib.error) as error:
            raise InputError(
                f"{name} cannot be read after line {number}: {str(error).splitlines()[0]}"
            ) from None


@contextmanager
def together(
    options: TextOptions, text: str | None
) -> Iterator[tuple[TextOptions, Mapping[str, int] | None]]:
    """Join the processes of `torchrun`, if any: give options that write in the first alone, and how to split.

    One of them reports a mistake.
    """
    if not started():
        yield options, None
        return
    refuse(
        text in (None, "-") and options.file is None,
        "several processes cannot share stdin: write the text after the directory, or name a --file",
    )
    from clearhead.learn.parallel.world import joined

    with joined() as world, ExitStack() as silence:
        if not world.first:
            nowhere = silence.enter_context(open(os.devnull, "w"))
            silence.enter_context(redirect_stdout(nowhere))
            silence.enter_context(redirect_stderr(nowhere))
            options = replace(options, output=None)
        yield options, {"tensor": world.size}


Options = Annotated[TextOptions, arg(name="")]  # its flags without a prefix
USUAL = TextOptions()


def results(
    inputs: Iterator[Input], compute: Callable[[list[dict[str, Any]]], Iterable[Result]], batch_size: int
) -> Iterator[tuple[Input, Result | ClearheadError]]:
    """Give each input with its result, or with what is wrong with it, in order.

    Where the file itself fails, its error is raised after the results of what was read.
    """
    wrong: list[ClearheadError] = []

    def until_wrong() -> Iterator[Input]:
        try:
            yield from inputs
        except ClearheadError as error:
            wrong.append(error)

    readable = until_wrong()
    while batch := list(islice(readable, batch_size)):
        outputs = iter(_attempt([item for item in batch if item.error is None], compute))
        for item in batch:
            yield item, next(outputs) if item.error is None else item.error
    if wrong:
        raise wrong[0]


def _attempt(
    batch: list[Input], compute: Callable[[list[dict[str, Any]]], Iterable[Result]]
) -> list[Result | ClearheadError]:
    """Return the results of a batch; where it fails, try its halves, down to the inputs that are wrong."""
    try:
        return list(compute([item.fields for item in batch])) if batch else []
    except ClearheadError as error:
        if len(batch) == 1:
            return [_placed(error, batch[0].place)]
        half = len(batch) // 2
        return [*_attempt(batch[:half], compute), *_attempt(batch[half:], compute)]


def _placed(error: ClearheadError, place: str) -> ClearheadError:
    return type(error)(f"{place}: {error}") if place else error


def _checked(
    values: Mapping[str, Any], names: Iterable[str], needed: Iterable[str], ids: bool | None
) -> dict[str, Any]:
    """Return the named fields among some values: texts, or token ids; all that are needed are there."""
    fields = {name: values[name] for name in names if values.get(name) is not None}
    all_needed = ", ".join(f'"{name}"' for name in needed)
    for name in needed:
        refuse(name not in fields, f"there is no {name}: an input needs {all_needed}")
    for name, value in fields.items():
        if ids and isinstance(value, str):
            fields[name] = value = token_ids(value)
        listed = isinstance(value, list) and all(type(token) is int for token in value)
        allowed = "text" if ids is None else "text, or a list of token ids"
        refuse(
            not isinstance(value, str) and not (listed and ids is not None),
            f"{name} is {value!r:.40}: it must be {allowed}",
        )
    return fields


def _npy(rows: list[list[float] | None]) -> bytes:
    """Return vectors as the bytes of a .npy file, float32 [N, D]; an input that failed is a row of NaN."""
    import numpy as np

    width = max((len(row) for row in rows if row is not None), default=0)
    filled = [row if row is not None else [math.nan] * width for row in rows]
    file = io.BytesIO()
    np.save(file, np.array(filled, np.float32).reshape(len(rows), width))
    return file.getvalue()


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


def texts_of(file: Path) -> list[str]:
    """Return the texts of a file, or of stdin for "-"; refuse one that cannot be read."""
    inputs = list(
        TextOptions(None if str(file) == "-" else file)._inputs({"text": None}, ("text",), None, False)
    )
    for error in (item.error for item in inputs if item.error is not None):
        raise error
    refuse(not inputs, f"{file} has no line: give one text on each")
    return [item.fields["text"] for item in inputs]
