"""The server around the routes: names, keys, limits on headers and body, and its front end.

A connection that says nothing, or says it too slowly, is closed; where connections are too many, the one
that has waited longest. Where the system allows it, a process of its own accepts them (`front_end.py`).
"""

import asyncio
import contextlib
import json
import math
import mmap
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from clearhead.app.explorer.app import allowed_names, host_name
from clearhead.errors import InputError
from clearhead.run.serve.answers import error_body
from clearhead.run.serve.engine import STALLED, ServeEngine
from clearhead.run.serve.front_end import ENGINE, WORK, digest_given, key_digest

LARGEST_BODY = 8_000_000  # bytes
BODY_SECONDS = 30.0  # for a body to arrive
DRAIN_SECONDS = 1.0  # for a client that is refused to end what it sends
HEADER_SECONDS = 10.0  # for the line and the headers of a request to arrive
MOST_CONNECTIONS = 4096
FILES_LEFT = 256  # that the process needs beside its connections
OWNER = "clearhead.owner"  # in the scope of a request: the digest of its key, or nothing
OPEN = ("/health", "/ready")  # routes without a key
ONCE = ("content-length", "host", "transfer-encoding", "authorization")  # headers that must not come twice


class Connection(H11Protocol):
    """A connection as uvicorn has it, that must ask for something soon."""

    most = MOST_CONNECTIONS
    waiting: ClassVar[dict["Connection", float]] = {}  # since when, by connection, the longest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the one that has waited longest, where connections are too many."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self.most:
            next(iter(self.waiting)).leave()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what has come; a request that is whole waits no longer."""
        if self not in self.waiting and self._idle():
            self._wait()
        super().data_received(data)
        if not self._idle():
            self.waiting.pop(self, None)

    def leave(self) -> None:
        """Close the connection, and make room at once."""
        self.waiting.pop(self, None)
        self.connections.discard(self)
        self.transport.abort()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self.waiting[self] = since = time.monotonic()
        self.loop.call_later(HEADER_SECONDS, self._late, since)

    def _late(self, since: float) -> None:
        if self.waiting.get(self) == since:
            self.leave()


def connections_allowed() -> int:
    """Return how many connections there may be; let the process open as many files as it may."""
    try:
        import resource
    except ImportError:
        return MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + FILES_LEFT
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(MOST_CONNECTIONS, soft - FILES_LEFT))


class Guard:
    """The layer in front of the routes. It leaves the connection to them, so that they see it close."""

    def __init__(self, app: ASGIApp, host: str, keys: Collection[str], settle: Callable[[], None]) -> None:
        """`settle` is called for each request for work that is refused: it is on its way no longer."""
        self.app, self.allowed, self.settle = app, allowed_names(host), settle
        self.keys = [key_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key = digest_given(headers.get("authorization", ""), self.keys)
        refusal = self._refusal(scope["path"], headers, key)
        body: list[Message] = []
        if refusal is None:
            try:
                body.append(await asyncio.wait_for(_whole(receive), BODY_SECONDS))
            except TimeoutError:
                refusal = 408, f"the body took more than {BODY_SECONDS:.0f} seconds"
            except InputError as error:
                refusal = 413, str(error)
        if refusal is not None:
            # What is still being sent is dropped: closing before would lose the answer on the way.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_dropped(receive), DRAIN_SECONDS)
            more = {"Connection": "close"}
            if refusal[0] == 401 and scope["path"] == "/":
                more["WWW-Authenticate"] = "Basic"
            answer = JSONResponse(error_body(InputError(refusal[1])), refusal[0], more)
            await answer(scope, receive, send)
            return

        async def again() -> Message:
            return body.pop() if body else await receive()

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and is_work:
                self.settle()
            await send(message)

        is_work = f"{scope['method']} {scope['path']} ".encode() in WORK
        scope[OWNER] = "" if key is None else key.hex()
        await self.app(scope, again, answered)

    def _refusal(self, path: str, headers: Headers, key: bytes | None) -> tuple[int, str] | None:
        twice = [name for name in ONCE if len(headers.getlist(name)) > 1]
        if ("content-length" in headers and "transfer-encoding" in headers) or twice:
            both = ", ".join(twice) or "content-length and transfer-encoding"
            return 400, f"the headers do not say where the request ends, or whose it is: {both}"
        names = [host_name(headers.get("host", ""))]
        if "origin" in headers:
            names.append(host_name(headers["origin"].partition("://")[2]))
        if self.allowed is not None and not self.allowed.issuperset(names):
            return 403, "this server answers to its own address only: start it with another --host"
        if self.keys and path not in OPEN and key is None:
            return 401, "this server asks for a key: send it as Authorization: Bearer KEY"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > LARGEST_BODY:
            return 413, f"the body is larger than {LARGEST_BODY:,} bytes"
        return None


async def _whole(receive: Receive) -> Message:
    """Read the body, and return it as one message."""
    raw, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return message
        raw += message.get("body", b"")
        more = message.get("more_body", False)
        if len(raw) > LARGEST_BODY:
            raise InputError(f"the body is larger than {LARGEST_BODY:,} bytes")
    return {"type": "http.request", "body": bytes(raw), "more_body": False}


async def _dropped(receive: Receive) -> None:
    """Read to the end of the body, or until the client goes."""
    message: Message = {"type": "http.request", "more_body": True}
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await receive()


FRONT_END = Path(__file__).with_name("front_end.py")


class FrontedServer(uvicorn.Server):
    """uvicorn's server, whose connections are accepted by a process of its own where the system allows it."""

    def __init__(
        self,
        config: uvicorn.Config,
        host: str,
        listening: socket.socket,
        engines: Sequence[ServeEngine],
        keys: Collection[str] = (),
    ) -> None:
        super().__init__(config)
        self.keys = keys
        self.host, self.listening, self.engines = host, listening, engines
        self.control: socket.socket | None = None
        self.front_end: subprocess.Popen[bytes] | None = None
        self.tasks: set[asyncio.Task[Any]] = set()  # the loop itself keeps none alive

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and its front end."""
        self.loop = asyncio.get_running_loop()
        self.listening.listen(self.config.backlog)
        if not hasattr(socket, "send_fds"):  # no process can take another's connections here
            await super().startup([self.listening])
            return
        await super().startup([])
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        with tempfile.TemporaryFile() as file:
            file.write(ENGINE.pack(math.inf, 0.0, 0.0) * len(self.engines))
            file.flush()
            memory = mmap.mmap(file.fileno(), 0)
            for number, engine in enumerate(self.engines):
                engine.heartbeat = Heartbeat(memory, number, engine)
            given = (self.listening.fileno(), theirs.fileno(), file.fileno())
            names = allowed_names(self.host)
            keys = [key_digest(key.encode()).hex() for key in self.keys]
            settings = {"names": None if names is None else sorted(names), "keys": keys}
            command = [sys.executable, "-I", "-S", str(FRONT_END), *map(str, given)]
            self.front_end = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=given, start_new_session=True
            )
            assert self.front_end.stdin is not None
            with self.front_end.stdin as pipe:
                pipe.write(json.dumps(settings).encode())
        theirs.close()
        self.loop.add_reader(self.control, self._take)

    def _take(self) -> None:
        """Take the connections that the front end has handed over; without one, accept them here."""
        assert self.control is not None
        try:
            while True:
                got, found, _, _ = socket.recv_fds(self.control, 1, 1)
                for number in found:
                    one = socket.socket(fileno=number)
                    self._begin(self.loop.connect_accepted_socket(self._protocol, one))
                if not got:
                    break
        except BlockingIOError:
            return
        except OSError:
            pass
        self.loop.remove_reader(self.control)
        if not self.should_exit:
            self._begin(self._listen())

    async def _listen(self) -> None:
        self.servers.append(await self.loop.create_server(self._protocol, sock=self.listening))

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: Any) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a client that is gone already

    def _protocol(self) -> Any:
        kind: Any = self.config.http_protocol_class
        return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the front end, and then end as uvicorn does."""
        if self.control is not None:
            self.loop.remove_reader(self.control)
            self.control.close()  # the front end ends with it
        await super().shutdown([self.listening])
        if self.front_end is not None:
            await asyncio.to_thread(self.front_end.wait)


class Heartbeat:
    """What the front end may know of one engine: until when it counts as well, and its room."""

    def __init__(self, memory: mmap.mmap, number: int, engine: ServeEngine) -> None:
        self.memory, self.place, self.engine = memory, number * ENGINE.size, engine
        self._lock = threading.Lock()
        self()

    def __call__(self) -> None:
        """Write it down."""
        engine = self.engine
        with self._lock:  # what is written last is what was seen last
            until = engine.moved + STALLED if engine.busy else math.inf
            ENGINE.pack_into(self.memory, self.place, until, engine.room, engine.decided)
