"""The front end answers at once whatever the server does, and leaves all else to it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn

from clearhead.app.commands.models import bind
from clearhead.run.serve.app import make_server
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.server import Connection, FrontedServer
from tests.serve import mixes

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "send_fds"), reason="connections cannot be handed over here"
)
ASK = b'{"prompt": "Hi", "max_tokens": 3, "temperature": 0}'


@contextmanager
def fronted(tokenizer, keys=()):
    """A server behind its front end, of an engine that takes no steps by itself."""
    engine = ServeEngine(mixes.model("learned", tokenizer), Limits(running=1, waiting=1))
    engine.start = lambda: None
    app = make_server({"m": engine}, drain=0.0, keys=keys)
    config = uvicorn.Config(app, log_level="error", lifespan="on", http=Connection)
    server = FrontedServer(config, "127.0.0.1", bind("127.0.0.1", 0), [engine], keys)
    server.port, server.engine = server.listening.getsockname()[1], engine
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started or server.front_end is None:
        time.sleep(0.01)
    yield server
    server.should_exit = True
    thread.join(30)
    assert server.front_end.returncode is not None
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), 5).close()


@pytest.fixture
def server(byte_tokenizer):
    with fronted(byte_tokenizer) as server:
        yield server


def told(
    port: int, line: str, body: bytes = b"", host: str = "127.0.0.1", chunks: int = 1, more: str = ""
) -> bytes:
    """Send a request, in one chunk or several, and return all that comes back."""
    head = f"{line} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n{more}"
    raw = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", port), 20) as one:
        for number in range(chunks):
            one.sendall(raw[number * len(raw) // chunks : (number + 1) * len(raw) // chunks])
            time.sleep(0.05 if chunks > 1 else 0)
        found = b""
        while part := one.recv(1 << 16):
            found += part
        return found


def test_health_and_refusals_do_not_wait_for_the_server(server):
    """The server's loop is asleep, and its one row and its one place are taken."""
    assert told(server.port, "GET /health").startswith(b"HTTP/1.1 200 ")
    seqs = [server.engine.submit([20, 21], {"max_new_tokens": 2}) for _ in range(2)]
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
    assert all(seq.wait(0) for seq in seqs)
    assert told(server.port, "GET /health").startswith(b"HTTP/1.1 200 ")
    server.engine.moved, server.engine.waiting = -1e9, [seqs[0]]
    server.engine.heartbeat()
    assert told(server.port, "GET /health").startswith(b"HTTP/1.1 503 ")
    server.engine.waiting = type(server.engine.finished)()


@pytest.mark.parametrize("chunks", [1, 3])
def test_all_else_comes_to_the_server_as_it_was_sent(server, chunks):
    stepped = threading.Thread(target=lambda: [time.sleep(0.01) or server.engine.step() for _ in range(200)])
    stepped.start()
    answer = told(server.port, "POST /v1/completions", ASK, chunks=chunks)
    stepped.join(60)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"completion_tokens":3' in answer
    for line, host in (("GET /health", "evil.example"), ("POST /v1/completions", "evil.example")):
        assert told(server.port, line, ASK, host).startswith(b"HTTP/1.1 403 ")
    assert told(server.port, "GET /nothing", chunks=chunks).startswith(b"HTTP/1.1 404 ")


def test_without_its_front_end_the_server_listens_itself(server):
    os.kill(server.front_end.pid, signal.SIGKILL)
    server.front_end.wait()
    for _ in range(100):
        if server.servers:
            break
        time.sleep(0.05)
    assert told(server.port, "GET /health").startswith(b"HTTP/1.1 200 ")


@contextmanager
def stepping(engine: ServeEngine):
    """Take the engine's steps in a thread."""
    ended = threading.Event()
    stepped = threading.Thread(target=lambda: [engine.step() for _ in iter(lambda: ended.wait(0.005), True)])
    stepped.start()
    yield
    ended.set()
    stepped.join()


def flood(port: int, raw: bytes, count: int = 40) -> list[socket.socket]:
    """Send the same bytes over so many connections, and leave them open."""
    made = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(count)]
    for one in made:
        one.sendall(raw)
    return made


def head_of(body: bytes, *more: str, length: int | None = None) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, f"Content-Length: {length or len(body)}", "", ""]).encode() + body


KEY = "Authorization: Bearer right"
WRONG = {
    "no key": head_of(ASK),
    "wrong key": head_of(ASK, "Authorization: Bearer wrong"),
    "wrong scheme": head_of(ASK, "Authorization: Foo right"),
    "two keys": head_of(ASK, KEY, "Authorization: Bearer wrong"),
    "no key, half a body": head_of(ASK[:5], length=50),
    "half a body": head_of(ASK[:5], KEY, length=50),
    "half a long body": head_of(ASK[:5], KEY, length=1_000_000),
    "no body": head_of(b"", KEY, length=50),
    "half a head": head_of(ASK, KEY).partition(b"Content-Length")[0],
    "no JSON": head_of(b"x" * 20, KEY),
    "no model of this name": head_of(ASK[:-1] + b', "model": "other"}', KEY),
    "no such field": head_of(ASK[:-1] + b', "other": 1}', KEY),
    "too long": head_of(b'{"prompt": "%s"}' % (b"x" * 1000), KEY),
}


def test_only_work_that_can_be_done_takes_room_from_others(byte_tokenizer):
    """40 of each at once, where 2 requests may be on their way; then one that is right is served."""
    with fronted(byte_tokenizer, ["right"]) as server:
        for name, raw in WRONG.items():
            opened = flood(server.port, raw)
            # The front end is patient with half a request; what it counts, it would count for two seconds.
            time.sleep(0.3 if "half" in name or name == "no body" else 0.05)
            with stepping(server.engine):
                found = told(server.port, "POST /v1/completions", ASK, more=f"{KEY}\r\n")
            for one in opened:
                one.close()
            assert found.startswith(b"HTTP/1.1 200 "), (name, found)
        # While there is no room, a wrong key is told that it is wrong, and a right one to come again.
        seqs = [server.engine.submit([20, 21], {"max_new_tokens": 2}) for _ in range(2)]
        assert told(server.port, "POST /v1/completions", ASK).startswith(b"HTTP/1.1 401 ")
        refused = told(server.port, "POST /v1/completions", ASK, more=f"{KEY}\r\n")
        assert refused.startswith(b"HTTP/1.1 429 ")
        while server.engine.busy:
            server.engine.step()
        assert all(seq.done for seq in seqs)


def test_work_on_its_way_counts(byte_tokenizer):
    """The server's loop is asleep: of a burst as many are handed over as there is room for."""
    with fronted(byte_tokenizer, ["right"]) as server:
        awake = threading.Event()
        server.loop.call_soon_threadsafe(awake.wait, 20)
        opened = flood(server.port, head_of(ASK, KEY), 10)
        time.sleep(0.3)
        refused = 0
        for one in opened:
            one.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                refused += one.recv(100).startswith(b"HTTP/1.1 429 ")
        awake.set()
        assert refused == 8
        time.sleep(0.2)
        for one in opened:
            one.close()
        while server.engine.busy:
            server.engine.step()
