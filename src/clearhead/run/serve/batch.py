"""A file of requests through the engine: one line in, one line out, resumed where it was interrupted.

A line is OpenAI's (`custom_id`, `method`, `url`, `body`) or the body of a completion or chat itself. An
answer is written as soon as it is there, under its `custom_id`, or `line-N` where there is none, with a
fingerprint of its request and of the model. What is in the file of answers already is not computed again;
half a line, the trace of a kill, is. A file with anything else in it is refused, and not a byte of it
changes. Over several machines, rows are a data set of Ray, with an engine in each of its actors; this process
writes the answers as they come, so that a run that was interrupted is resumed just as well.
"""

import fcntl
import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from clearhead.errors import ClearheadError, InputError, MissingExtraError, refuse
from clearhead.run.api import load
from clearhead.run.serve.answers import Choices, choices_of
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.protocol import ChatBody, CompletionBody, error_body

URLS = ("/v1/completions", "/v1/chat/completions")
START = b'{"id": "batch-'  # of every line that is written here
HEAD = re.compile(
    rb'\{"id": "batch-(?P<name>([^"\\]|\\.)*)", "custom_id": "(?P=name)", "request_sha256": "[0-9a-f]{64}"'
)
KEYS = {"id", "custom_id", "request_sha256", "response", "error"}
NO_ANSWER = "{} is no answer of this command, or one of an earlier version: name another file"
# The files of a model directory that decide its answers.
WEIGHTS = ("config.json", "generation_config.json", "tokenizer*.json", "*.safetensors", "*.bin")
CHUNKS, CHUNK = 64, 4096  # of each of them that are read, and bytes
SHOWN = 5  # names in a message


def run_batch(engine: ServeEngine, name: str, given: Path, out: Path, model: str = "") -> Iterator[str]:
    """Answer each line of a file that has no answer yet; yield the name of each as it is written.

    `model`: what tells this model from others, such as `model_fingerprint` gives.
    """
    yield from write_answers(given, out, model, lambda rows: answers_to(engine, name, rows, model))


def write_answers(
    given: Path, out: Path, model: str, answers: Callable[[dict[str, Any]], Iterable[tuple[str, str]]]
) -> Iterator[str]:
    """Write what `answers` gives for the rows that have no answer yet: names, and lines of JSON."""
    check_files(given, out)
    rows = dict(read_rows(given))
    # A lone surrogate of a name cannot be UTF-8; written with a backslash, it is what JSON says.
    with out.open("a", encoding="utf-8", errors="backslashreplace") as file:
        _lock(file, out)
        left = unanswered(rows, out, model)
        for row, line in answers(left):
            file.write(line + "\n")
            file.flush()
            yield row


def check_files(given: Path, out: Path) -> None:
    """Refuse a file of requests without one; a file of answers that can be none, or that is the requests'."""
    with given.open(encoding="utf-8-sig", errors="replace") as lines:
        refuse(not any(map(str.strip, lines)), f"{given} has no request: write one JSON object on each line")
    refuse(not out.parent.is_dir(), f"{out.parent} is not a directory: {out} cannot be written")
    refuse(out.exists() and not out.is_file(), f"{out} is not a file: name one that answers can be added to")
    refuse(
        out.exists() and out.samefile(given),
        f"{out} is the file of requests: name another file for the answers",
    )


def model_fingerprint(folder: Path, *options: object) -> str:
    """Return what tells a model from others, and from itself after more training; a sample of it is read."""
    files = [folder] if folder.is_file() else sorted({path for kind in WEIGHTS for path in folder.glob(kind)})
    total = hashlib.sha256(repr(options).encode())
    for path in files:
        size = path.stat().st_size
        total.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(CHUNK, size // CHUNKS)):
                file.seek(start)
                total.update(file.read(CHUNK))
    return total.hexdigest()


def fingerprint(model: str, line: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a request, whatever its name and the order of its fields, and of the model."""
    request = {name: value for name, value in line.items() if name != "custom_id"}
    return hashlib.sha256(json.dumps([model, request], sort_keys=True).encode()).hexdigest()


def answers_to(
    engine: ServeEngine, name: str, rows: Mapping[str, Any], model: str = ""
) -> Iterator[tuple[str, str]]:
    """Answer rows as they end: yield the name and the line of each. No row ends those after it."""

    def written(row: str, status: int, body: dict[str, Any]) -> tuple[str, str]:
        answer = {"status_code": status, "body": body}
        line = {"id": f"batch-{row}", "custom_id": row, "request_sha256": fingerprint(model, rows[row])}
        return row, json.dumps({**line, "response": answer, "error": None}, ensure_ascii=False)

    waiting, flying = deque(rows.items()), dict[str, Choices]()
    while waiting or flying:
        if waiting and len(flying) < engine.limits.running:
            row, line = waiting.popleft()
            try:
                flying[row] = _submitted(engine, name, line)
            except (ClearheadError, ValidationError) as error:
                yield written(row, 400, error_body(InputError(str(error).replace("\n", " "))))
            except Exception as error:
                yield written(row, 500, error_body(error))
            continue
        engine.step()
        for row in [row for row, choices in flying.items() if all(seq.done for seq in choices.seqs)]:
            try:
                yield written(row, 200, flying.pop(row).answer())
            except Exception as error:
                yield written(row, 500, error_body(error))


def _lock(file: TextIO, out: Path) -> None:
    """Hold a file as long as it is open; the lock ends with the process, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another batch is writing to {out}: wait for it, or name another file") from None
    except OSError:  # some network file systems have no locks
        return


def _submitted(engine: ServeEngine, name: str, line: Any) -> Choices:
    body = line.get("body", {key: value for key, value in line.items() if key != "custom_id"})
    refuse(not isinstance(body, dict), f"body is {json.dumps(body)[:60]}: give an object")
    url = line.get("url", URLS["messages" in body])
    refuse(url not in URLS, f'url "{url}" is not one that a batch takes: choose {" or ".join(URLS)}')
    refuse(body.get("stream"), "stream in a batch: leave it out")
    model = body.get("model")
    refuse(
        model not in (None, name),
        f'model "{model}" is not the model of this batch, "{name}": leave it out, or run another batch',
    )
    kind = ChatBody if url == URLS[1] else CompletionBody
    choices = choices_of(engine, name, kind.model_validate(body))
    choices.submit()
    return choices


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the object of each line; two lines with one name are refused."""
    names: set[str] = set()
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}: convert it") from None
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        line = _object(text)
        if line is None:
            raise InputError(f"{path}:{number} is not a JSON object")
        named = line.get("custom_id", f"line-{number}")
        refuse(
            isinstance(named, bool) or not isinstance(named, str | int),
            f"{path}:{number} has the custom_id {json.dumps(named)[:60]}: give a text, or leave it out",
        )
        row = str(named)
        refuse(row in names, f'{path}:{number} has the custom_id "{row}" of an earlier line: give it another')
        names.add(row)
        yield row, line


def unanswered(rows: Mapping[str, Any], out: Path, model: str) -> dict[str, Any]:
    """Return the rows that a file of answers lacks; end its last line if that is half of one, or whole.

    Nothing is changed before every line has proven to be ours. An answer to another request under the name of
    a row is refused, not replaced: it may have taken hours, and a wrong file is the likelier slip.
    """
    raw = out.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    lines, rest = whole.split(b"\n")[:-1], raw[len(whole) :]
    half = bool(rest) and _object(rest) is None
    if rest and not half:
        lines.append(rest)  # all but its end of line was written
    answers = dict(_answer(line, f"{out}:{number}") for number, line in enumerate(lines, start=1))
    begun = HEAD.match(rest) or (lines and (rest.startswith(START) or START.startswith(rest)))
    refuse(half and not begun, NO_ANSWER.format(f"{out}:{len(lines) + 1}"))
    others = [
        name for name, found in answers.items() if name in rows and found != fingerprint(model, rows[name])
    ]
    refuse(
        others,
        f"{out} answers other requests, or another model's, under {len(others)} of the names in this file "
        f"({', '.join(others[:SHOWN])}{', ...' if len(others) > SHOWN else ''}): name another file for the "
        "answers, or delete those lines to have them answered anew",
    )
    if half:
        with out.open("r+b") as file:
            file.truncate(len(whole))
    elif rest:
        with out.open("ab") as file:
            file.write(b"\n")
    return {name: line for name, line in rows.items() if name not in answers}


def _answer(text: bytes, place: str) -> tuple[str, str]:
    """Return the name and the fingerprint of one line of answers; refuse what was not written here."""
    line = _object(text) or {}
    ours = line.keys() == KEYS and line["id"] == f"batch-{line['custom_id']}"
    refuse(not ours, NO_ANSWER.format(place))
    return str(line["custom_id"]), str(line["request_sha256"])


def _object(text: str | bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


ROWS = 64  # of a shard


class RayAnswers:
    """An engine that answers shards of rows."""

    def __init__(self, folder: str, limits: Limits, options: Mapping[str, Any], model: str) -> None:
        self.name, self.model = Path(folder).name, model
        self.engine = ServeEngine(load(folder, **options), limits)

    def __call__(self, shard: dict[str, Any]) -> dict[str, list[str]]:
        """Answer rows, given by name and JSON; return names and lines of answers."""
        rows = {str(name): json.loads(str(row)) for name, row in zip(shard["name"], shard["row"])}
        answers = list(answers_to(self.engine, self.name, rows, self.model))
        return {"name": [name for name, _ in answers], "line": [line for _, line in answers]}


def run_on_ray(
    folder: Path,
    limits: Limits,
    options: Mapping[str, Any],
    given: Path,
    out: Path,
    workers: int,
    model: str = "",
) -> Iterator[str]:
    """Answer each line of a file that has no answer yet, by so many actors; yield names as they are written.

    Every machine of the cluster must have the model under the same path.
    """
    try:
        import ray.data
    except ImportError:
        raise MissingExtraError("batch --ray needs Ray Data: pip install 'clearhead[ray]'") from None

    def answers(rows: dict[str, Any]) -> Iterator[tuple[str, str]]:
        if not rows:
            return
        items = [{"name": name, "row": json.dumps(row)} for name, row in rows.items()]
        shards = ray.data.from_items(items, override_num_blocks=math.ceil(len(items) / ROWS)).map_batches(
            RayAnswers,
            fn_constructor_args=(str(folder.resolve()), limits, dict(options), model),
            batch_size=ROWS,
            concurrency=workers,
            num_gpus=1 if str(options.get("device", "cpu")).startswith("cuda") else 0,
        )
        for row in shards.iter_rows():
            yield str(row["name"]), str(row["line"])

    yield from write_answers(given, out, model, answers)
