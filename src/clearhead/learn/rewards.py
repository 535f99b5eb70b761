"""Rewards: how good an answer is, as a number. Ready ones by name, and functions of the user's own files.

A reward is a function of the answer's text and of the row that holds its prompt. A file is run because the
user names it: nothing else decides that.
"""

import importlib.util
import inspect
import json
import math
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clearhead.errors import InputError, first_line, refuse, refuse_unknown

Row = Mapping[str, Any]
Reward = Callable[[str, Row], float]
SECONDS, BYTES = 5, 512 << 20  # of the tests of one answer
FENCED = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


def rewards_named(names: Sequence[str]) -> dict[str, Reward]:
    """Return the rewards of a recipe by name; a file gives its functions, or the one after a colon."""
    refuse(not names, f"grpo.reward is empty: name a FILE.py, or some of {', '.join(READY)}")
    rewards: dict[str, Reward] = {}
    for name in names:
        kind, equals, value = name.partition("=")
        if kind.partition(":")[0].endswith(".py"):
            rewards |= _of_file(*name.partition(":")[::2])
            continue
        refuse_unknown("the reward", kind, READY)
        rewards[kind] = READY[kind](value if equals else None)
    return rewards


def reward(name: str, function: Reward, answer: str, row: Row) -> float:
    """Return the reward of an answer; raise where its function fails or returns no number."""
    try:
        value = float(function(answer, row))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"the reward {name} failed on the answer {answer!r:.80}: {first_line(error)}"
        ) from None
    refuse(
        not math.isfinite(value),
        f"the reward {name} of the answer {answer!r:.80} is {value}: return a number",
    )
    return value


def _of_file(path: str, wanted: str) -> dict[str, Reward]:
    """Run a file and return its functions, or the one that is wanted."""
    refuse(not Path(path).is_file(), f"grpo.reward {path} is no file")
    spec = importlib.util.spec_from_file_location(f"rewards_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"grpo.reward {path} cannot be run: {type(error).__name__}: {error}") from None
    own = inspect.getmembers(
        module, lambda value: inspect.isfunction(value) and value.__module__ == spec.name
    )
    functions = {name: function for name, function in own if not name.startswith("_")}
    refuse(not functions, f"grpo.reward {path} has no function: write one such as def reward(answer, row)")
    if not wanted:
        return functions
    refuse_unknown(f"the function of {path}", wanted, functions)
    return {wanted: functions[wanted]}


# Ready ones -------------------------------------------------------------------------------------------------


def _column(row: Row, name: str, reward: str) -> Any:
    refuse(
        row.get(name) is None,
        f"the reward {reward} reads the column `{name}`, and a row has {', '.join(row)}",
    )
    return row[name]


def exact(value: str | None) -> Reward:
    """1 where the answer is that of the column `answer`, but for space around it; else 0."""
    refuse(value is not None, "the reward exact takes no value: the right answer is in the column `answer`")
    return lambda answer, row: answer.strip() == str(_column(row, "answer", "exact")).strip()


def regex(value: str | None) -> Reward:
    """1 where the whole answer matches the expression, or that of the column `regex`; else 0."""

    def matches(answer: str, row: Row) -> bool:
        pattern = _column(row, "regex", "regex") if value is None else value
        return re.fullmatch(pattern, answer.strip(), re.DOTALL) is not None

    return matches


def length(value: str | None) -> Reward:
    """Minus the share of letters beyond `value`, -1 at most: 0 for short answers."""
    refuse(
        value is None or not value.isdecimal() or not int(value),
        "the reward length needs letters: length=200",
    )
    most = int(str(value))
    return lambda answer, row: -min(max(len(answer) - most, 0) / most, 1.0)


def json_schema(value: str | None) -> Reward:
    """1 where the answer is JSON of the schema in a file, or in the column `schema`; else 0."""
    refuse(value is not None and not Path(value).is_file(), f"the reward json_schema has no file {value}")
    schema = None if value is None else json.loads(Path(value).read_text(encoding="utf-8"))

    def fits(answer: str, row: Row) -> bool:
        wanted = _column(row, "schema", "json_schema") if schema is None else schema
        wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError):
            return False
        return is_valid(value, wanted)

    return fits


KINDS: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: (
        not isinstance(value, bool) and isinstance(value, int | float) and value % 1 == 0
    ),
    "number": lambda value: not isinstance(value, bool) and isinstance(value, int | float),
}
NOTES = ("title", "description", "default", "examples", "$schema", "$id", "$comment")
# Keywords of a schema: the kind of value each is about, and what holds for it.
KEYWORDS: dict[str, tuple[str, Callable[[Any, Any, Any], bool]]] = {
    "minimum": ("number", lambda value, bound, _: value >= bound),
    "maximum": ("number", lambda value, bound, _: value <= bound),
    "exclusiveMinimum": ("number", lambda value, bound, _: value > bound),
    "exclusiveMaximum": ("number", lambda value, bound, _: value < bound),
    "minLength": ("string", lambda value, bound, _: len(value) >= bound),
    "maxLength": ("string", lambda value, bound, _: len(value) <= bound),
    "pattern": ("string", lambda value, pattern, _: re.search(pattern, value) is not None),
    "minItems": ("array", lambda value, bound, _: len(value) >= bound),
    "maxItems": ("array", lambda value, bound, _: len(value) <= bound),
    "items": ("array", lambda value, inner, _: all(is_valid(item, inner) for item in value)),
    "required": ("object", lambda value, names, _: set(names) <= value.keys()),
    "properties": (
        "object",
        lambda value, inner, _: all(is_valid(value[name], inner[name]) for name in inner if name in value),
    ),
    "additionalProperties": (
        "object",
        lambda value, inner, schema: all(
            is_valid(value[name], inner) for name in value.keys() - schema.get("properties", {}).keys()
        ),
    ),
}


def is_valid(value: Any, schema: Any) -> bool:
    """Return whether a value fits a JSON schema; refuse a keyword that is not known."""
    if isinstance(schema, bool):
        return schema
    for keyword, wanted in schema.items():
        if keyword == "type":
            kinds = [wanted] if isinstance(wanted, str) else wanted
            fits = any(KINDS[kind](value) for kind in kinds)
        elif keyword in ("enum", "const"):
            some = wanted if keyword == "enum" else [wanted]
            fits = json.dumps(value, sort_keys=True) in [json.dumps(each, sort_keys=True) for each in some]
        elif keyword in ("anyOf", "allOf", "oneOf"):
            count = sum(is_valid(value, each) for each in wanted)
            fits = {"anyOf": count > 0, "allOf": count == len(wanted), "oneOf": count == 1}[keyword]
        elif keyword in KEYWORDS:
            kind, holds = KEYWORDS[keyword]
            fits = not KINDS[kind](value) or holds(value, wanted, schema)
        else:
            known = ("type", "enum", "const", "anyOf", "allOf", "oneOf", *KEYWORDS, *NOTES)
            refuse_unknown("the keyword of a JSON schema", keyword, known)
            continue
        if not fits:
            return False
    return True


# In a process of its own: limits first, no network where the system lets a process leave it, then the code.
SANDBOX = f"""
import ctypes, json, os, resource, sys
code, tests, done = json.load(sys.stdin)
for limit, most in ((resource.RLIMIT_CPU, {SECONDS}), (resource.RLIMIT_AS, {BYTES}),
                    (resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (most, most))
if sys.platform == "linux":
    ctypes.CDLL(None).unshare(0x50000000)  # a user and a network of its own
write, names = os.write, {{"__name__": "answer"}}
exec(compile(code, "answer", "exec"), names)
exec(compile(tests, "tests", "exec"), names)
write(1, done.encode())
"""


def unit_tests(value: str | None) -> Reward:
    """1 where the answer's code (a ```python block, else all of it) passes the column `tests`; else 0.

    It runs in a process of its own: 5 seconds, 512 MiB, an empty folder, no environment, and no network where
    the system allows to leave it. That contains mistakes, not attacks.
    """
    refuse(value is not None, "the reward unit_tests takes no value: the tests are in the column `tests`")

    def passes(answer: str, row: Row) -> bool:
        block, done = FENCED.search(answer), secrets.token_hex(16)
        sent = json.dumps([block[1] if block else answer, str(_column(row, "tests", "unit_tests")), done])
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", SANDBOX], cwd=folder, env={}, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, errors="replace",
            )  # fmt: skip
            try:
                output, _ = process.communicate(sent, timeout=2 * SECONDS)
            except subprocess.TimeoutExpired:
                return False
            finally:
                process.kill()
                process.wait()
        return process.returncode == 0 and output.endswith(done)

    return passes


READY: dict[str, Callable[[str | None], Reward]] = {
    "exact": exact,
    "regex": regex,
    "json_schema": json_schema,
    "unit_tests": unit_tests,
    "length": length,
}
