"""Open thousands of connections that say nothing, and see what others notice.

python benchmarks/serve_idle.py [COUNT]
"""

from __future__ import annotations

import json
import pathlib
import resource
import socket
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from benchmarks.serve_mixes import bytes_tokenizer
from tests.serve import mixes
from tests.serve.served import serving
from tests.serve.test_http import call

from clearhead.run.serve import server
from clearhead.run.serve.engine import ServeEngine

RESULT = pathlib.Path(__file__).parent / "results" / "serve_idle.json"
KEPT = 1000  # connections that the server keeps in this run


def health(address: str) -> dict[str, float]:
    """Return how long the health route takes, in milliseconds."""
    took = []
    for _ in range(50):
        start = time.perf_counter()
        assert call(address, "/health")[0] == 200
        took.append(1000 * (time.perf_counter() - start))
    return {"median ms": round(statistics.median(took), 2), "largest ms": round(max(took), 2)}


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main(count: int) -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, 4 * count), files))
    server.Connection.most = KEPT
    with serving({"m": ServeEngine(mixes.model("learned", bytes_tokenizer()))}) as address:
        host, port = address.removeprefix("http://").split(":")
        body = {"connections": count, "kept at most": KEPT, "before": health(address), "MiB before": memory()}
        idle = [socket.create_connection((host, int(port)), 60) for _ in range(count)]
        body["while they are open"] = health(address)
        closed = 0
        for one in idle:
            one.setblocking(False)
            try:
                closed += one.recv(1) == b""
            except ConnectionResetError:
                closed += 1
            except BlockingIOError:
                pass
        body |= {"closed by the server": closed, "MiB after": memory()}
        asked = {"prompt": "x", "max_tokens": 5, "temperature": 0}
        assert call(address, "/v1/completions", asked)[0] == 200
        for one in idle:
            one.close()
    assert count - closed <= KEPT
    RESULT.write_text(json.dumps(body, indent=1) + "\n")
    print(body)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3000)
