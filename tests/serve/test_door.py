"""The door answers at once whatever the server does, and leaves all else to it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest
import uvicorn

from clearhead.commands.models import bind
from clearhead.serve.app import make_server
from clearhead.serve.behind import ServerBehind
from clearhead.serve.engine import ServeEngine
from clearhead.serve.guard import Connection
from clearhead.serve.limits import Limits
from tests.serve import mixes

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "send_fds"), reason="connections cannot be handed over here"
)
ASK = b'{"prompt": "Hi", "max_tokens": 3, "temperature": 0}'


@pytest.fixture
def server(byte_tokenizer):
    """A server behind a door, of an engine that takes no steps by itself."""
    engine = ServeEngine(mixes.model("learned", byte_tokenizer), Limits(running=1, waiting=1))
    engine.start = lambda: None
    app = make_server({"m": engine}, drain=0.0)
    config = uvicorn.Config(app, log_level="error", lifespan="on", http=Connection)
    server = ServerBehind(config, "127.0.0.1", bind("127.0.0.1", 0), [engine])
    server.port, server.engine = server.listening.getsockname()[1], engine
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started or server.door is None:
        time.sleep(0.01)
    yield server
    server.should_exit = True
    thread.join(30)
    assert server.door.returncode is not None
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), 5).close()


def told(port: int, line: str, body: bytes = b"", host: str = "127.0.0.1", pieces: int = 1) -> bytes:
    """Send a request, in one piece or several, and return all that comes back."""
    head = f"{line} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    raw = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", port), 20) as one:
        for number in range(pieces):
            one.sendall(raw[number * len(raw) // pieces : (number + 1) * len(raw) // pieces])
            time.sleep(0.05 if pieces > 1 else 0)
        found = b""
        while part := one.recv(1 << 16):
            found += part
        return found


def test_health_and_refusals_do_not_wait_for_the_server(server):
    """The server's loop is asleep, and its one row and its one place are taken."""
    assert told(server.port, "GET /health").startswith(b"HTTP/1.1 200 ")
    jobs = [server.engine.submit([20, 21], {"max_new_tokens": 2}) for _ in range(2)]
    asleep, awake = threading.Event(), threading.Event()
    sleeper = threading.Thread(target=told, args=(server.port, "GET /sleep"))

    def sleep() -> None:
        asleep.set()
        awake.wait(20)

    server.loop.call_soon_threadsafe(sleep)
    asleep.wait(10)
    sleeper.start()  # handed over, and waits
    assert told(server.port, "GET /health").startswith(b"HTTP/1.1 200 ")
    refused = told(server.port, "POST /v1/completions", ASK + b" " * 3_000_000)
    assert refused.startswith(b"HTTP/1.1 429 ")
    assert b"Retry-After: 1" in refused
    assert b"try again later" in refused
    awake.set()
    sleeper.join(20)
    while server.engine.busy:
        server.engine.step()
    assert all(job.wait(0) for job in jobs)
    assert told(server.port, "GET /health").startswith(b"HTTP/1.1 200 ")
    server.engine.moved, server.engine.waiting = -1e9, [jobs[0]]
    server.engine.sign()
    assert told(server.port, "GET /health").startswith(b"HTTP/1.1 503 ")
    server.engine.waiting = type(server.engine.finished)()


@pytest.mark.parametrize("pieces", [1, 3])
def test_all_else_comes_to_the_server_as_it_was_sent(server, pieces):
    stepped = threading.Thread(target=lambda: [time.sleep(0.01) or server.engine.step() for _ in range(200)])
    stepped.start()
    answer = told(server.port, "POST /v1/completions", ASK, pieces=pieces)
    stepped.join(60)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"completion_tokens":3' in answer
    for line, host in (("GET /health", "evil.example"), ("POST /v1/completions", "evil.example")):
        assert told(server.port, line, ASK, host).startswith(b"HTTP/1.1 403 ")
    assert told(server.port, "GET /nothing", pieces=pieces).startswith(b"HTTP/1.1 404 ")


def test_without_its_door_the_server_listens_itself(server):
    os.kill(server.door.pid, signal.SIGKILL)
    server.door.wait()
    for _ in range(100):
        if server.servers:
            break
        time.sleep(0.05)
    assert told(server.port, "GET /health").startswith(b"HTTP/1.1 200 ")
