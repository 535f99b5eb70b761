"""Kill `clearhead batch` many times, start it again each time, and look for every row once.

    python -m tests.serve.kills [--kills 20] [--seed 0]

A kill comes at a random moment, or within the write of a line, half of which is then in the file.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from clearhead.run.serve import batch
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.serve import mixes
from tests.training.test_run import child


def write_rows(given: Path, count: int) -> dict[str, dict]:
    """Write a file of requests; return their bodies by name."""
    bodies = {
        f"row-{number}": dict(prompt=f"{number} U+2028:\u2028 and", max_tokens=4, temperature=0, echo=True)
        for number in range(count)
    }
    lines = [{"custom_id": name, "url": batch.URLS[0], "body": body} for name, body in bodies.items()]
    given.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), "utf-8")
    return bodies


def run(m, given: Path, out: Path, torn_after: int | None) -> None:
    """Answer what has no answer yet; die in the middle of a line after so many."""
    left = torn_after

    def dumps(line: dict, **named) -> str:
        nonlocal left
        text = json.dumps(line, **named)
        if "response" not in line:  # no line of the file, but what a fingerprint is made of
            return text
        left = None if left is None else left - 1
        if left is not None and left < 0:
            with out.open("a") as file:
                file.write(text[: len(text) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return text

    batch.json = type("Torn", (), {"dumps": staticmethod(dumps), "loads": staticmethod(json.loads)})
    for _ in batch.run_batch(ServeEngine(m, Limits(block=8, running=4)), "m", given, out):
        pass


def killed(m, folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill a batch so often, let it end, and compare each answer with the request alone."""
    draw, given, out = random.Random(seed), folder / "in.jsonl", folder / "out.jsonl"
    rows = write_rows(given, 4 * kills)
    seen, torn = [], 0
    for _ in range(kills):
        after = draw.randrange(3) if draw.random() < 0.5 else None
        number = child(functools.partial(run, m, given, out, after))
        if after is None:
            size = out.stat().st_size if out.exists() else 0
            until = time.monotonic() + 60
            while (out.stat().st_size if out.exists() else 0) <= size and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(draw.random() * 0.02)
            os.kill(number, signal.SIGKILL)
        status = os.waitpid(number, 0)[1]
        assert os.WTERMSIG(status) == signal.SIGKILL, "it ended before it was killed"
        torn += not out.read_bytes().endswith(b"\n")
        seen.append(out.read_bytes().count(b"\n"))
    assert seen == sorted(seen)
    for _ in batch.run_batch(ServeEngine(m, Limits(block=8)), "m", given, out):
        pass
    lines = [json.loads(line) for line in out.read_text("utf-8").split("\n")[:-1]]
    names = [line["custom_id"] for line in lines]
    assert sorted(names) == sorted(rows), "a row is lost or repeated"
    for line in lines:
        body = rows[line["custom_id"]]
        alone = body["prompt"] + m.generate(body["prompt"], body["max_tokens"], num_beams=1).text
        assert line["response"]["body"]["choices"][0]["text"] == alone
    return {"kills": kills, "half lines": torn, "rows": len(lines), "lost": 0, "repeated": 0}


def main() -> None:
    from benchmarks.serve import bytes_tokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        m = mixes.model("rope-gqa", bytes_tokenizer())
        print(killed(m, Path(folder), asked.kills, asked.seed))


if __name__ == "__main__":
    main()
