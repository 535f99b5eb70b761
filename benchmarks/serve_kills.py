"""Kill a batch and a server under load, start them again, and look for what is lost.

    python benchmarks/serve_kills.py [--kills 20] [--servers 5] [--clients 8] [--save]

`batch`: each of the kills comes at a random moment or within the write of a line (`tests/serve/kills.py`).
`server`: clients ask without pause, half of them for streams, while SIGKILL ends the server and another one
takes its port. What a client gets is a whole answer, equal to `m.generate` alone, or an error that it can try
again: no connection, one that breaks off, or a stream without its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import signal
import sys
import tempfile
import time
from collections import Counter

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from tests.serve import kills, mixes

import clearhead as ch
from common import save
from serve_load import ask, small, started
from serve_mixes import bytes_tokenizer

BROKEN = (ConnectionError, asyncio.IncompleteReadError, OSError)


async def one(port: int, number: int, m: ch.Model, seen: Counter[str]) -> None:
    """Ask until there is a whole answer, and compare it with the same request alone."""
    body = {"prompt": f"Request {number}", "max_tokens": 40, "temperature": 0, "stream": number % 2 == 1}
    wanted = m.generate(body["prompt"], 40, num_beams=1).text
    while True:
        try:
            answer = await asyncio.wait_for(ask(port, "/v1/completions", body), 120)
        except TimeoutError:
            seen["hung"] += 1
            return
        except BROKEN as error:
            seen[f"try again: {type(error).__name__}"] += 1
        else:
            text = _text(answer.text, body["stream"])
            if answer.status == 200 and text is not None:
                seen["answers"] += 1
                seen["different"] += text != wanted
                return
            seen[f"try again: {'cut short' if answer.status == 200 else answer.status}"] += 1
        await asyncio.sleep(0.2)


def _text(raw: str, stream: bool) -> str | None:
    """Return the text of an answer; None where it is not whole."""
    if not stream:
        try:
            return json.loads(raw)["choices"][0]["text"]
        except ValueError:
            return None
    events = [line[6:].strip() for line in raw.split("\n") if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return None
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


async def serve_killed(folder: pathlib.Path, times: int, clients: int) -> dict[str, object]:
    """Kill the server so often under load; return what clients saw."""
    m, seen, ended = ch.load(folder), Counter(), False
    process, port = started(folder)

    async def client(number: int) -> None:
        turn = 0
        while not ended:
            await one(port, 1000 * turn + number, m, seen)
            turn += 1

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    downs = []
    for turn in range(times):
        before = seen["answers"]
        while seen["answers"] < before + clients:  # it works again
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.1 * (turn % 5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        down = time.monotonic()
        process, _ = await asyncio.to_thread(started, folder, port=port)
        downs.append(round(time.monotonic() - down, 1))
    ended = True
    await asyncio.gather(*tasks)
    process.terminate()
    process.communicate()
    return {"kills": times, "seconds down": downs, **dict(seen), "hung": seen["hung"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("kills", 20), ("servers", 5), ("clients", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work)
        m = mixes.model("rope-gqa", bytes_tokenizer())
        results.append({"title": "batch", **kills.killed(m, folder, given.kills, 0)})
        print(results[-1], flush=True)
        tiny = small(folder, "tiny", d_model=64, n_layers=2, n_heads=2, max_positions=512)
        found = asyncio.run(serve_killed(tiny, given.servers, given.clients))
        results.append({"title": "server under load", **found})
        print(results[-1], flush=True)
    if given.save:
        save("serve_kills", results)


if __name__ == "__main__":
    main()
