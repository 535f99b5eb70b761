"""Load a server: open streams, overload, health during a long prompt, a client that goes away.

    python benchmarks/serve_load.py [streams overload health] [--streams 1000] [--seconds 20] [--save]

Each part starts `clearhead serve` in a process of its own, with one thread, on a small model with random
weights, and asks it over HTTP from this process. `overload`: as many requests arrive in a second as the
server takes when all its rows are busy, and then ten times as many; latencies are those of accepted requests.
These are seconds of the wall: `load of the machine` says how many processes wanted its processors meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import clearhead as ch
from common import save
from serve_mixes import bytes_tokenizer

ROUNDS = 5  # of usual load and overload, in turn
TOKENS = 80  # of each open stream
LONGEST = 900.0  # seconds after which a request counts as hung


def started(folder: Path, *options: str, port: int = 0) -> tuple[subprocess.Popen[str], int]:
    """Start a server; return its process and its port."""
    command = [sys.executable, "-m", "clearhead", "serve", str(folder), "--port", str(port), "--drain", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
    for line in process.stderr:
        if found := re.search(r"http://127.0.0.1:(\d+)/", line):
            return process, int(found[1])
    raise RuntimeError(f"the server did not start: exit code {process.wait()}")


@contextlib.contextmanager
def server(folder: Path, *options: str) -> Iterator[int]:
    """Serve a model; give the port."""
    process, port = started(folder, *options)
    try:
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=60)


class Answer:
    """What one request got: status, headers and body, with the seconds at which its parts came."""

    def __init__(self) -> None:
        self.start, self.status, self.head, self.parts = time.monotonic(), 0, "", []

    @property
    def seconds(self) -> float:
        """From the request to the end of the answer."""
        return self.parts[-1][0] - self.start

    @property
    def first(self) -> float:
        """From the request to the first byte of the body."""
        return self.parts[0][0] - self.start

    @property
    def text(self) -> str:
        raw = b"".join(part for _, part in self.parts)
        if "transfer-encoding: chunked" not in self.head.lower():
            return raw.decode()
        chunks, at = [], 0
        while at < len(raw):
            line, _, _ = raw[at:].partition(b"\r\n")
            start, size = at + len(line) + 2, int(line, 16)
            chunks.append(raw[start : start + size])
            at = start + size + 2
        return b"".join(chunks).decode()


async def ask(port: int, path: str, body: dict | None = None, opened: asyncio.Event | None = None) -> Answer:
    """Send a request and read its answer to the end; `opened` is set when the body begins."""
    answer = Answer()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    try:
        writer.write(head.encode() + raw)
        answer.head = (await reader.readuntil(b"\r\n\r\n")).decode()
        answer.status = int(answer.head.split()[1])
        answer.parts.append((time.monotonic(), b""))
        while part := await reader.read(1 << 16):
            answer.parts.append((time.monotonic(), part))
            if opened is not None:
                opened.set()
    finally:
        writer.close()
    return answer


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the largest of seconds, in milliseconds."""
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    found = {"p50": statistics.median(ordered), "p99": p99, "most": ordered[-1]}
    return {name: round(1000 * value, 1) for name, value in found.items()}


async def hold(port: int, count: int) -> dict[str, object]:
    """Open so many streams; none ends before all have begun."""
    body = {"max_tokens": TOKENS, "temperature": 0, "stream": True, "min_tokens": TOKENS}
    begun = [asyncio.Event() for _ in range(count)]
    tasks = []
    for number, event in enumerate(begun):
        tasks.append(
            asyncio.create_task(ask(port, "/v1/completions", {**body, "prompt": f"{number}"}, event))
        )
        await asyncio.sleep(0.002)
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), LONGEST)
    still = sum(not task.done() for task in tasks)
    health = [(await ask(port, "/health")).seconds for _ in range(20)]
    answers = await asyncio.wait_for(asyncio.gather(*tasks), LONGEST)
    assert all(one.status == 200 and "data: [DONE]" in one.text for one in answers)
    return {
        "open at once": still,
        "ended whole": len(answers),
        "new tokens per second": round(
            TOKENS * count / max(one.parts[-1][0] - answers[0].start for one in answers)
        ),
        "ms to the first byte": spread([one.first for one in answers]),
        "ms of health meanwhile": spread(health),
    }


async def arrive(port: int, rate: float, seconds: float) -> list[Answer | BaseException]:
    """Send requests at a steady rate, whatever comes back."""
    body = {"prompt": "Once upon a time", "max_tokens": 24, "min_tokens": 24, "temperature": 0}
    tasks, start = [], time.monotonic()
    for number in range(max(1, int(rate * seconds))):
        await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
        tasks.append(asyncio.create_task(asyncio.wait_for(ask(port, "/v1/completions", body), LONGEST)))
    return await asyncio.gather(*tasks, return_exceptions=True)


async def overload(port: int, seconds: float, running: int) -> dict[str, object]:
    """Ask as fast as the server can answer, and then ten times as fast, by turns."""

    async def closed() -> int:
        count, until = 0, time.monotonic() + seconds / 2
        body = {"prompt": "Once upon a time", "max_tokens": 24, "min_tokens": 24, "temperature": 0}
        while time.monotonic() < until:
            count += (await ask(port, "/v1/completions", body)).status == 200
        return count

    await asyncio.gather(*(closed() for _ in range(running)))
    rate = sum(await asyncio.gather(*(closed() for _ in range(running)))) / (seconds / 2)
    found: dict[int, list[Answer]] = {1: [], 10: []}
    hung = 0
    for _ in range(ROUNDS):
        for times, kept in found.items():
            got = await arrive(port, 0.9 * rate if times == 1 else times * rate, seconds / ROUNDS)
            hung += sum(isinstance(one, BaseException) for one in got)
            kept += [one for one in got if isinstance(one, Answer)]
    made = {times: [one.seconds for one in kept if one.status == 200] for times, kept in found.items()}
    refused = [one for one in found[10] if one.status == 429]
    assert all("retry-after: 1" in one.head.lower() for one in refused)
    one, ten = spread(made[1]), spread(made[10])
    return {
        "requests per second that it takes": round(rate, 1),
        "statuses at 1 x": dict(Counter(answer.status for answer in found[1])),
        "statuses at 10 x": dict(Counter(answer.status for answer in found[10])),
        "ms of accepted at 1 x": one,
        "ms of accepted at 10 x": ten,
        "p99 at 10 x over 1 x": round(ten["p99"] / one["p99"], 2),
        "ms of refusals": spread([one.seconds for one in refused]),
        "hung or broken": hung,
    }


async def health(port: int, length: int) -> dict[str, object]:
    """Ask for health all the while a long prompt is read."""
    body = {"prompt": [7] * length, "max_tokens": 1, "temperature": 0}
    task = asyncio.create_task(ask(port, "/v1/completions", body))
    seconds = []
    while not task.done():
        answer = await ask(port, "/health")
        assert answer.status == 200
        seconds.append(answer.seconds)
        await asyncio.sleep(0.01)
    assert task.result().status == 200
    return {
        "seconds of the prompt": round(task.result().seconds, 1),
        "asked": len(seconds),
        "ms": spread(seconds),
    }


async def leave(port: int, times: int) -> dict[str, object]:
    """Go away in the middle of a stream; count the steps until the blocks are free, by the metrics."""

    async def figure(name: str) -> float:
        text = (await ask(port, "/metrics")).text
        return float(re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)[1])

    steps = []
    for _ in range(times):
        begun = asyncio.Event()
        body = {
            "prompt": "x" * 1000,
            "max_tokens": 3000,
            "min_tokens": 3000,
            "temperature": 0,
            "stream": True,
        }
        task = asyncio.create_task(ask(port, "/v1/completions", body, begun))
        await begun.wait()
        assert await figure("vllm:kv_cache_usage_perc") > 0
        before = await figure("clearhead:engine_steps_total")
        task.cancel()
        while await figure("vllm:kv_cache_usage_perc") > 0:
            await asyncio.sleep(0)
        steps.append(int(await figure("clearhead:engine_steps_total") - before))
    return {"steps from going away to free blocks": steps}


def small(folder: Path, name: str, **sizes: int) -> Path:
    """Write a model with random weights that reads bytes."""
    config = ch.ModelConfig(
        vocab_size=256, positions="rope", norm="rmsnorm", gated=True, activation="silu", bias=False, **sizes
    )
    ch.Model(ch.Transformer(config), bytes_tokenizer()).save(folder / name)
    return folder / name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["streams", "overload", "health"])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    results: list[dict[str, object]] = []

    def keep(title: str, found: dict[str, object]) -> None:
        results.append({"title": title, **found, "load of the machine": round(os.getloadavg()[0], 1)})
        print(json.dumps(results[-1], indent=1), flush=True)
        if given.save:
            save("serve_load", results)

    with tempfile.TemporaryDirectory() as work:
        tiny = small(Path(work), "tiny", d_model=32, n_layers=1, n_heads=2, max_positions=512)
        wide = small(Path(work), "wide", d_model=256, n_layers=4, n_heads=4, max_positions=16_384)
        many = str(given.streams)
        if "streams" in given.parts:
            options = ("--max-running", many, "--max-waiting", many, "--step-tokens", "2048")
            with server(tiny, *options) as port:
                keep(f"{many} open streams", asyncio.run(hold(port, given.streams)))
        if "overload" in given.parts:
            with server(wide, "--max-running", "8") as port:
                keep("overload, 8 rows, 1 may wait", asyncio.run(overload(port, given.seconds, 8)))
        if "health" in given.parts:
            with server(wide) as port:
                keep("health during a prompt of 8192 tokens", asyncio.run(health(port, 8192)))
                keep("a client that goes away", asyncio.run(leave(port, 10)))


if __name__ == "__main__":
    main()
