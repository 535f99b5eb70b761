"""What the commands that use a model share: texts from an argument, a file or stdin; results in the order given, batch by batch.

A bad line ends the work: what came before it is written, and the error names it.
"""

from __future__ import annotations

import gzip
import json as jsonlib
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from clearhead.errors import ClearheadError, InputError

if TYPE_CHECKING:
    from clearhead.api import Model

Text = Annotated[
    Positional[str | None], arg(metavar="TEXT", help="the text; - or nothing: stdin, one text per line")
]


@dataclass(frozen=True)
class Item:
    """One input: its fields by name, and where it stands."""

    fields: dict[str, str]
    place: str = ""  # "FILE line 3"; empty for an argument


@dataclass(frozen=True)
class Fields:
    """The names of what an input has."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def check(self, values: dict[str, Any]) -> dict[str, str]:
        """The fields among some values, provided that they are texts and none that is needed is missing."""
        for name in self.needed:
            if values.get(name) is None:
                named = ", ".join(f'"{each}"' for each in self.needed)
                raise InputError(
                    f"there is no {name}: {named} {'is' if len(self.needed) == 1 else 'are'} needed"
                )
        found = {
            name: values[name] for name in (*self.needed, *self.optional) if values.get(name) is not None
        }
        for name, value in found.items():
            if not isinstance(value, str):
                raise InputError(f"{name} is {value!r:.40}: it must be text")
            if not value:
                raise InputError(f"the {name} is empty: give some text")
        return found


@dataclass(frozen=True)
class Reading:
    """Options of every command that uses a model."""

    file: Annotated[
        Path | None, arg(help="read one text per line; .jsonl: one JSON object per line; .gz as well")
    ] = None
    output: Annotated[Path | None, arg(help="write there, whole, in place of stdout")] = None
    json: Annotated[bool, arg(help="one JSON object; for a file or stdin, one per line")] = False
    batch_size: Annotated[int, arg(help="texts at a time")] = 16
    tokenizer: Annotated[
        Path | None, arg(help="a directory, tokenizer.json, SentencePiece .model or llama2.c .bin")
    ] = None
    device: Annotated[str, arg(help="cpu, cuda, cuda:1, mps, ...")] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, arg(help="of the weights; default: as they are")
    ] = None

    def load(self, folder: Path) -> Model:
        """The model of a directory, as these options want it."""
        import torch

        from clearhead.api import load

        return load(
            folder, getattr(torch, self.dtype) if self.dtype else None, self.device, tokenizer=self.tokenizer
        )

    def run(
        self,
        given: dict[str, str | None],
        work: Callable[[list[Item]], list[Any]],
        body: Callable[[Item, Any], dict[str, Any]],
        line: Callable[[Item, Any], str],
        show: Callable[[Any], Any] | None = None,
        more: dict[str, str | None] | None = None,
    ) -> None:
        """Work through what was given.

        Args:
            given: the command's arguments by field; the first is None or "-" where texts come from a file or stdin.
            work: a batch of items to their results.
            body: an item and its result as JSON.
            line: an item and its result as a line of text.
            show: the result of a single argument as something rich prints; None: its line.
            more: arguments that may be missing; those of a file's items come from JSON lines.
        """
        if self.batch_size < 1:
            raise InputError(f"batch-size {self.batch_size} must be 1 or more")
        first = next(iter(given.values()))
        single = first is not None and first != "-"
        if single and self.file is not None:
            raise InputError("a text and --file were both given: choose one")
        check_apart(self.output, [self.file] if self.file is not None else [])
        fields = Fields(tuple(given), tuple(more or {}))
        with writing(self.output) as write, self._items({**given, **(more or {})}, fields, single) as items:
            for item, result in results(items, work, self.batch_size):
                if self.json:
                    write(jsonlib.dumps(body(item, result), indent=2 if single else None, ensure_ascii=False))
                elif single and show is not None and self.output is None:
                    from rich.console import Console

                    Console().print(show(result))
                else:
                    write(line(item, result))

    @contextmanager
    def _items(self, given: dict[str, str | None], fields: Fields, single: bool) -> Iterator[Iterator[Item]]:
        if single:
            yield iter([Item(fields.check(given))])
        elif self.file is not None:
            packed = self.file.suffix == ".gz"
            with (
                _opened(self.file) as raw,
                gzip.GzipFile(fileobj=raw) if packed else nullcontext(raw) as plain,
                _progress(raw, self.file) as seen,
            ):
                yield _lines(seen(plain), str(self.file), fields, ".jsonl" in self.file.suffixes)
        elif sys.stdin.isatty():
            raise InputError(
                "no text was given: write it after the directory, name a --file, or pipe it in, one text per line"
            )
        else:
            yield _lines(getattr(sys.stdin, "buffer", sys.stdin), "stdin", fields, jsonl=False)


def results(
    items: Iterator[Item], work: Callable[[list[Item]], list[Any]], batch_size: int
) -> Iterator[tuple[Item, Any]]:
    """Each item with its result, in order; a bad item is an error that names its place, after all before it."""
    while True:
        batch, wrong = _take(items, batch_size)
        try:
            yield from zip(batch, work(batch) if batch else [])
        except ClearheadError:  # of one of them: find it, and lose none before it
            for item in batch:
                try:
                    (result,) = work([item])
                except ClearheadError as error:
                    raise _placed(error, item.place) from None
                yield item, result
        if wrong is not None:
            raise wrong
        if len(batch) < batch_size:
            return


def _take(items: Iterator[Item], count: int) -> tuple[list[Item], ClearheadError | None]:
    """The next items, and what is wrong with the one after them."""
    batch: list[Item] = []
    try:
        while len(batch) < count:
            batch.append(next(items))
    except StopIteration:
        pass
    except ClearheadError as error:
        return batch, error
    return batch, None


def _placed(error: ClearheadError, place: str) -> ClearheadError:
    return type(error)(f"{place}: {error}") if place else error


def _lines(stream: Any, name: str, fields: Fields, jsonl: bool) -> Iterator[Item]:
    """Items of a stream of lines; several fields of a plain line stand apart by tabs."""
    number = 0
    try:
        for number, raw in enumerate(stream, 1):
            place = f"{name} line {number}"
            try:
                text = (raw.decode("utf-8") if isinstance(raw, bytes) else raw).rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise InputError(f"{place}: byte {error.start + 1} is not UTF-8: convert the file") from None
            try:
                yield Item(
                    fields.check(_from_json(text) if jsonl else _from_tabs(text, fields.needed)), place
                )
            except InputError as error:
                raise _placed(error, place) from None
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{name} cannot be read after line {number}: {str(error).splitlines()[0]}") from None


def _from_tabs(text: str, names: Sequence[str]) -> dict[str, Any]:
    parts = text.split("\t") if len(names) > 1 else [text]
    if len(parts) != len(names):
        raise InputError(
            f"it has {len(parts)} fields and needs {len(names)} ({', '.join(names)}), with a tab between them"
        )
    return dict(zip(names, parts))


def _from_json(text: str) -> dict[str, Any]:
    try:
        value = jsonlib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(value, dict):
        raise InputError(f"it is {type(value).__name__}, and a JSON object is needed")
    return value


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    with file:
        yield file


@contextmanager
def _progress(raw: IO[bytes], path: Path) -> Iterator[Callable[[Any], Any]]:
    """A bar on stderr, where that is a terminal, that moves as lines of the file are read."""
    if not sys.stderr.isatty():
        yield lambda stream: stream
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(
        console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task(path.name, total=path.stat().st_size)

        def seen(stream: Any) -> Iterator[bytes]:
            while line := stream.readline():
                bar.update(task, completed=raw.tell())
                yield line

        yield seen


def check_apart(output: Path | None, read: Iterable[Path]) -> None:
    """What is written must not be what is read."""
    for path in read:
        if output is not None and output.exists() and path.exists() and output.samefile(path):
            raise InputError(f"--output {output} is the file that is read, {path}: name another")


@contextmanager
def writing(path: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that writes a line: to stdout at once, or to a file that is there whole when all is done.

    After a mistake in the input, the file holds what came before it. A link stays one, and what it leads to is written;
    to a pipe or a device, which nothing can take the place of, lines go at once.
    """
    if path is None:
        yield lambda text: print(text, flush=True)
        return
    if path.exists() and not path.is_file():
        with _created(path, path) as file:
            yield lambda text: print(text, file=file, flush=True)
        return
    target = Path(os.path.realpath(path))
    work = target.with_name(f".{target.name}.{os.getpid()}")
    file = _created(work, path)
    try:
        with file:
            try:
                yield lambda text: print(text, file=file)
            finally:
                file.flush()
                os.fsync(file.fileno())
    except ClearheadError:
        work.replace(target)
        raise
    except BaseException:
        work.unlink(missing_ok=True)
        raise
    work.replace(target)


def _created(path: Path, asked: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{asked} cannot be written: {error.strerror}") from None
