"""A model split over processes serves what the whole model serves; a process that fails ends the others."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import clearhead as ch
from clearhead.app import cli
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.parallel import forking
from tests.serve import mixes, split
from tests.serve.served import serving
from tests.serve.test_http import call

pytestmark = pytest.mark.ledger("U5")
SIZES = {"d_model": 24, "n_heads": 12, "d_ff": 24}
# Three key heads are no even shares for two or four processes; a single one is in all of them.
MODELS: dict[str, dict[str, Any]] = {
    "capped": {"n_kv_heads": 3},
    "windows": {"n_kv_heads": 1},
    "states": {},
    "experts": {},
    "translator": {"n_kv_heads": 3},
}
RUNS = {
    2: [("capped", 53), ("windows", 34), ("states", 1), ("experts", 3), ("translator", 1)],
    4: [("capped", 4), ("translator", 1)],
}


@pytest.mark.slow
@pytest.mark.parametrize("processes", RUNS)
def test_a_mix_of_requests_equals_each_alone(processes: int, tmp_path: Path, byte_tokenizer) -> None:
    """Greedy and sampled, with prefixes, chunks, draft tokens, preemption and cancelled requests."""
    runs = RUNS[processes]
    for name, _ in runs:
        mixes.model(name, byte_tokenizer, **SIZES, **MODELS[name]).save(tmp_path / name)
    path = tmp_path / "found.json"
    forking.perform(processes, tmp_path / "log", split.serve_mixes, tmp_path, runs, path)
    done = [sum(figures) for figures in zip(*json.loads(path.read_text()))]
    assert processes == 4 or all(done), f"preempted, cached, accepted, cancelled: {done}"


@contextmanager
def launched(folder: Path, *more: str) -> Iterator[tuple[str, list[Any]]]:
    """Serve a model in two processes; give the address and the processes."""
    log = folder.parent / "log"
    command = ["serve", str(folder), "--port", "0", "--device", "cpu", *more]
    processes = forking.start(2, log, cli.main, command)
    try:
        until = time.monotonic() + 60
        while "(Ctrl-C ends it)" not in (said := log.with_suffix(".errors").read_text()):
            assert all(process.is_alive() for process in processes) and time.monotonic() < until, said
            time.sleep(0.05)
        yield said.partition("/v1 ")[0].rpartition(" ")[2], processes
    finally:
        for process in processes:
            process.kill()


def ended(processes: list[Any]) -> list[int]:
    """Wait for processes to end by themselves; return their exit codes."""
    for process in processes:
        process.join(20)
    return [process.exitcode for process in processes]


TEXT = "to be or not to be or"


@contextmanager
def streaming(address: str) -> Iterator[Any]:
    """Give a long answer whose first event has come."""
    body = {"prompt": TEXT, "max_tokens": 100, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as stream:
        stream.readline()
        yield stream


MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [TEXT, "a"], "max_tokens": 20, "temperature": 0, "logprobs": 2}),
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 9, "temperature": 0.9, "n": 2, "seed": 3}),
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": "7", "temperature": 0, "max_tokens": 9, "regex": "[ab]{3}c"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "stream": True}),
    ("/v1/embeddings", {"model": "reader", "input": [TEXT, "x"]}),
    ("/v1/classify", {"model": "judge", "input": [TEXT, "x"]}),
    ("/v1/rerank", {"model": "judge", "query": "x", "documents": [TEXT, "y"]}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 1, "inside": ["lens"]}),  # refused
]


EACH = ("id", "created", "prompt_tokens_details")  # who came first has nothing cached


def plain(answer: Any) -> Any:
    """Return an answer without what differs each time, its numbers as `approx` compares them."""
    if isinstance(answer, str) and "data: " in answer:
        events = [line[6:] for line in answer.split("\n\n") if line.startswith("data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    if isinstance(answer, dict):
        return {name: plain(value) for name, value in answer.items() if name not in EACH}
    return [plain(value) for value in answer] if isinstance(answer, list) else answer


def flat(answer: Any) -> Iterator[Any]:
    """Yield names and values of an answer in order, nested ones too."""
    if isinstance(answer, dict | list | tuple):
        for name, value in answer.items() if isinstance(answer, dict) else enumerate(answer):
            yield name
            yield from flat(value)
    else:
        yield answer


def test_the_command_answers_as_one_process_and_drains(tmp_path: Path, writer, reader, judge) -> None:
    models = {"writer": writer, "reader": reader, "judge": judge}
    for name, m in models.items():
        m.save(tmp_path / name)

    def answers(address: str) -> list[Any]:
        with ThreadPoolExecutor() as pool:  # models have a thread each, and share the other process
            found = pool.map(lambda request: call(address, *request)[::2], REQUESTS)
            return [(status, plain(answer)) for status, answer in found]

    limits = Limits(block=8)
    with serving({name: ServeEngine(m, limits) for name, m in models.items()}) as address:
        wanted = answers(address)
    others = [f"--model={name}={tmp_path / name}" for name in ("reader", "judge")]
    with launched(tmp_path / "writer", *others) as (address, processes):
        *same, (status, refused) = answers(address)
        for request, found, expected in zip(REQUESTS, same, wanted):
            assert list(flat(found)) == pytest.approx(list(flat(expected)), abs=1e-5), request
        assert status == 400 and "inside is not possible with a model that is split" in str(refused)
        with streaming(address) as stream:
            for process in processes:  # as `torchrun` passes it on
                os.kill(process.pid, signal.SIGTERM)
            assert stream.read().endswith(b"[DONE]\n\n")
        assert ended(processes) == [0, 0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_the_others(victim: int, tmp_path: Path, writer) -> None:
    """While a request runs, which gets an error; one line says why, and nothing hangs."""
    writer.save(tmp_path / "writer")
    with launched(tmp_path / "writer") as (address, processes):
        with streaming(address) as stream:
            os.kill(processes[victim].pid, signal.SIGKILL)
            if victim:
                assert b'"type": "server_error"' in stream.read()
        assert ended(processes)[1 - victim] == 2
    if victim:  # the other one asks the first process whether to speak, unless `torchrun` answers
        said = forking.printed(tmp_path / "log")[1].splitlines()[1:]
        assert len(said) == 1
        assert said[0].startswith("clearhead: process 0 of 2 finds that another one has ended or does not")


def test_what_cannot_be_split_is_refused_by_name(tmp_path: Path, byte_tokenizer) -> None:
    mixes.model("learned", byte_tokenizer, d_model=24, n_heads=3).save(tmp_path / "odd")
    m = ch.load(tmp_path / "odd")
    lines = []
    for number, more in enumerate(((), ("--exact", "--adapter", f"a={tmp_path / 'odd'}"))):
        command = ["serve", str(tmp_path / "odd"), "--device", "cpu", *more]
        assert ended(forking.start(2, tmp_path / f"log{number}", cli.main, command)) == [2, 2]
        lines.append(forking.printed(tmp_path / f"log{number}")[1].splitlines()[0])
    whole = "run the whole model in one process, without torchrun"
    assert "does not divide the 3 heads of decoder.blocks.0.attention" in lines[0] and whole in lines[0]
    assert lines[1].startswith("clearhead: --adapter, --exact: not possible with a model that is split over")
    assert m.config.n_heads == 3
