"""A file of requests through the engine: one line in, one line out, taken up again where it was broken off.

A line is OpenAI's (`custom_id`, `method`, `url`, `body`) or the body of a completion or chat itself. An
answer is written as soon as it is there, under its `custom_id`, or `line-N` where there is none. What is in
the file of answers already is not asked again; half a line, the trace of a kill, is.
"""

import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from clearhead.errors import ClearheadError, InputError, refuse
from clearhead.serve.answers import ServedTexts, completion, conversation, error_body
from clearhead.serve.engine import ServeEngine
from clearhead.serve.protocol import ChatBody, CompletionBody

URLS = ("/v1/completions", "/v1/chat/completions")


def run_batch(engine: ServeEngine, name: str, given: Path, out: Path) -> Iterator[str]:
    """Answer each line of a file that has no answer yet; yield the name of each as it is written."""
    yield from write_answers(given, out, lambda rows: answers_to(engine, name, rows))


def write_answers(
    given: Path, out: Path, answers: Callable[[dict[str, Any]], Iterable[tuple[str, str]]]
) -> Iterator[str]:
    """Write what `answers` gives for the rows that have no answer yet: names, and lines of JSON."""
    rows = dict(read_rows(given))
    with out.open("a", encoding="utf-8") as file:
        _lock(file, out)
        for done in finished(out):
            rows.pop(done, None)
        for row, line in answers(rows):
            file.write(line + "\n")
            file.flush()
            yield row


def answers_to(engine: ServeEngine, name: str, rows: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Answer rows as they end: yield the name and the line of each."""
    flying: dict[str, ServedTexts] = {}
    for row, line in _while_any(iter(rows.items()), flying):
        if row is not None:
            try:
                flying[row] = _submitted(engine, name, line)
            except (ClearheadError, ValidationError) as error:
                yield row, _line(row, 400, error_body(InputError(str(error).replace("\n", " "))))
        if row is None or len(flying) >= engine.limits.running:
            engine.step()
        for done in [row for row, one in flying.items() if all(job.done for job in one.jobs)]:
            yield done, _answered(done, flying.pop(done))


def _line(row: str, status: int, body: dict[str, Any]) -> str:
    answer = {"status_code": status, "body": body}
    line = {"id": f"batch-{row}", "custom_id": row, "response": answer, "error": None}
    return json.dumps(line, ensure_ascii=False)


def _lock(file: TextIO, out: Path) -> None:
    """Hold a file as long as it is open; the lock ends with the process, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another batch is writing to {out}: wait for it, or name another file") from None
    except OSError:  # some network file systems have no locks
        return


def _while_any(
    waiting: Iterator[tuple[str, Any]], flying: dict[str, ServedTexts]
) -> Iterator[tuple[str | None, Any]]:
    yield from waiting
    while flying:
        yield None, None


def _submitted(engine: ServeEngine, name: str, line: Any) -> ServedTexts:
    body = line.get("body", line)
    url = line.get("url", URLS["messages" in body])
    refuse(url not in URLS, f'url "{url}" is not one that a batch takes: choose {" or ".join(URLS)}')
    refuse(body.get("stream"), "stream in a batch: leave it out")
    if url == URLS[1]:
        choices = conversation(engine, name, ChatBody.model_validate(body))
    else:
        choices = completion(engine, name, CompletionBody.model_validate(body))
    choices.submit()
    return choices


def _answered(row: str, choices: ServedTexts) -> str:
    try:
        return _line(row, 200, choices.answer())
    except Exception as error:
        return _line(row, 500, error_body(error))


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the object of each line; two lines with one name are refused."""
    names: set[str] = set()
    for number, text in enumerate(path.read_text("utf-8").split("\n"), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise InputError(f"{path}:{number} is not a JSON object")
        row = str(line.get("custom_id", f"line-{number}"))
        refuse(row in names, f'{path}:{number} has the custom_id "{row}" of an earlier line: give it another')
        names.add(row)
        yield row, line


def finished(out: Path) -> Iterator[str]:
    """Yield the names that have an answer, and cut off half a line at the end."""
    if not out.exists():
        return
    raw = out.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        with out.open("r+b") as file:
            file.truncate(len(whole))
    for number, text in enumerate(whole.decode("utf-8").split("\n")[:-1], start=1):
        try:
            yield str(json.loads(text)["custom_id"])
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{out}:{number} is no answer of a batch: name another file") from None
