"""Tools in a conversation: a model learns calls from a row of data, and `clearhead chat` runs them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import clearhead as ch
from clearhead.errors import InputError
from clearhead.hub.tokens.tools import call_function, functions_of, tools_of

SHOP = '''
from pathlib import Path
from neighbour import STOCK

def stock(item: str) -> int:
    """Count."""
    with Path(__file__).with_name("ran").open("a") as file:
        file.write(item + "\\n")
    return STOCK[item]
'''
QUESTION, ANSWER = "Any lamps?", "Yes, 12."
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "tool_calls": [{"function": {"name": "stock", "arguments": {"item": "lamp"}}}]},
    {"role": "tool", "content": "12"},
    {"role": "assistant", "content": ANSWER},
]
SETTINGS = {
    "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 2, "model.max_positions": 640,
    "tokens.kind": "byte", "tokens.template": "chatml", "data.batch_size": 1, "data.max_length": 640,
    "train.steps": 130, "train.lr": 8e-3, "train.samples": 1, "train.threads": 1, "train.device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A file of tools, and a model that has learned one conversation with them by heart."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(SHOP)
    (folder / "neighbour.py").write_text('STOCK = {"lamp": 12}\n')
    tools = [tool.entry for tool in tools_of([*functions_of(folder / "shop.py", "--tools").values()])]
    for name in ("talk", "held"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"messages": TALK, "tools": tools}) + "\n")
    settings = {**SETTINGS, "data.validation": str(folder / "held.jsonl")}
    ch.train(folder / "talk.jsonl", out=folder / "model", settings=settings)
    return folder


@pytest.fixture
def chat(folder, clearhead, monkeypatch):
    """Say something to the model with its tools; return what was printed, and the items asked for."""

    def say(text: str, *more: str):
        (folder / "ran").unlink(missing_ok=True)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text + "\n"))
        done = clearhead("chat", str(folder / "model"), "--tools", str(folder / "shop.py"), *more)
        ran = folder / "ran"
        return done, ran.read_text().split() if ran.exists() else []

    return say


def test_a_learned_call_is_run_and_answered(folder, chat):
    """The call, the function's own result and the answer; the saved conversation is the row it came from."""
    saved = folder / "saved.jsonl"
    done, ran = chat(f"{QUESTION}\n/save {saved}", "--yes")
    assert (done.code, done.out, ran) == (0, f"{ANSWER}\n", ["lamp"])
    assert 'call: stock({"item": "lamp"})' in done.err and "result: 12" in done.err
    row, wanted = json.loads(saved.read_text()), json.loads((folder / "talk.jsonl").read_text())
    assert row["tools"] == wanted["tools"]
    assert [message["role"] for message in row["messages"]] == [message["role"] for message in TALK]


def test_no_call_runs_without_consent(chat):
    done, ran = chat(QUESTION)
    assert (done.code, ran) == (0, [])
    assert "not run: --yes" in done.err


def test_a_cut_call_is_not_run(chat):
    done, ran = chat(QUESTION, "--yes", "--max-new-tokens", "50")
    assert (done.code, ran) == (2, [])
    assert "cut off after 50 tokens: raise --max-new-tokens" in done.err


def fails(x: int) -> int:
    """Raise an error."""
    raise KeyError("no such x")


def ends(x: int) -> int:
    """End the process."""
    sys.exit(x)


async def later(x: int) -> int:
    """Return a number later."""
    return x + 1


@pytest.mark.parametrize(
    ("function", "arguments", "wanted"),
    [
        (fails, '{"x": 1}', "error: KeyError: 'no such x'"),
        (fails, '{"x": "a"}', "error: x: Input should be a valid integer"),
        (fails, "{}", "error: x: Missing required argument"),
        (ends, '{"x": 3}', "error: SystemExit: 3"),
        (later, '{"x": 3}', "4"),
    ],
)
def test_the_model_is_told_how_a_call_went(function, arguments, wanted):
    assert call_function(function, arguments).startswith(wanted)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("def f(x: int) -> int\n", "SyntaxError"),
        ("import sys\nsys.exit(3)\n", "SystemExit"),
        ("x = 1\n", "no function"),
        ("def f(x): ...\n", "x of the tool f needs"),
        ("def f(x: int, /): ...\n", "x of the tool f needs"),
        ("class A: ...\ndef f(x: A): ...\n", "A"),
    ],
)
def test_a_wrong_file_of_tools_is_refused(text, named, tmp_path):
    (tmp_path / "tools.py").write_text(text)
    with pytest.raises(InputError, match=named):
        functions_of(tmp_path / "tools.py", "--tools")
