"""The door: a small process in front of the server, which answers at once however busy that is.

It listens, looks at the first bytes of each connection, and answers two kinds of requests by itself: /health,
and work that there is no room for. Every other connection is handed to the server as it came, unread. What it
must know of the engines stands in memory that both processes see. The server's own threads share one lock of
the interpreter with the engines, and a thread that holds it may be off the processor; this process has no
such thread.

    python door.py LISTENING CONTROL STATE NAMES

The first three are file descriptors. NAMES are the names that the server answers to, as JSON; null: any. This
file needs nothing but the standard library, and ends when the server does.
"""

import contextlib
import json
import math
import mmap
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Collection

# Of an engine: when it counts as ill, by `time.monotonic()`; how many requests there is room for; how many it
# has let in or refused so far.
ENGINE = struct.Struct("ddd")
HEAD = 8192  # bytes of a request that are looked at
PATIENCE = 0.25  # seconds for the first bytes; a connection that says nothing is the server's
FAREWELL = 1.0  # seconds in which a client that was refused may still send
DECIDED = (
    2.0  # seconds after which a request that was handed over counts as decided, whatever the engine says
)
MOST = 512  # connections that are looked at, or taken leave of, at the same time
WORK = (b"POST /v1/completions ", b"POST /v1/chat/completions ", b"POST /v1/embeddings ")
BUSY = b'{"error":{"message":"the server is full: try again later","type":"invalid_request_error",'
BUSY += b'"param":null,"code":null}}'
ILL = b'{"error":{"message":"work waits and nothing moves","type":"invalid_request_error",'
ILL += b'"param":null,"code":null}}'


def answer(status: bytes, body: bytes, more: bytes = b"") -> bytes:
    """Return an answer after which the connection is closed."""
    head = b"HTTP/1.1 %b\r\nContent-Length: %d\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head % (status, len(body)) + more + b"\r\n" + body


def host_of(head: bytes) -> str | None:
    """Return the one name in the Host header; None where there is none, or a page of another server asks."""
    lines = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    found = [value.strip() for name, _, value in lines if name.lower() == b"host"]
    if len(found) != 1 or any(name.lower() == b"origin" for name, _, _ in lines):
        return None
    host = found[0].decode("latin-1").lower()
    return host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]


class Door:
    """The connections of which the first bytes are awaited, and those that are taken leave of."""

    def __init__(
        self,
        listening: socket.socket,
        control: socket.socket,
        state: mmap.mmap,
        names: Collection[str] | None,
    ) -> None:
        self.listening, self.control, self.state, self.names = listening, control, state, names
        self.selector = selectors.DefaultSelector()
        self.new: dict[socket.socket, float] = {}  # until when
        self.leaving: dict[socket.socket, float] = {}
        self.handed: deque[socket.socket] = deque()  # to be given to the server
        self.asked: deque[float] = deque()  # when work was handed over that no engine has decided on yet
        self.decided = 0.0
        for one in (listening, control):
            one.setblocking(False)
            self.selector.register(one, selectors.EVENT_READ)

    def run(self) -> None:
        """Answer and hand over, until the server ends."""
        while True:
            ready = self.selector.select(0.05 if self.new or self.leaving else None)
            for key, events in ready:
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is self.control:
                    if events & selectors.EVENT_READ and not self.control.recv(1):
                        return
                elif one is self.listening:
                    self.accept()
                elif one in self.new:
                    self.look(one)
                elif one in self.leaving:
                    self.drain(one)
            self.give()
            now = time.monotonic()
            for one in [one for one, until in self.new.items() if until < now]:
                self.hand_over(one)
            for one in [one for one, until in self.leaving.items() if until < now]:
                self.forget(self.leaving, one)
                one.close()

    def accept(self) -> None:
        """Take the connections that have come."""
        for _ in range(64):
            try:
                one, _ = self.listening.accept()
            except OSError:  # none left, or one that is gone already
                return
            one.setblocking(False)
            self.new[one] = time.monotonic() + PATIENCE
            self.selector.register(one, selectors.EVENT_READ)
            self.look(one)
            if len(self.new) > MOST:
                self.hand_over(next(iter(self.new)))

    def look(self, one: socket.socket) -> None:
        """Answer a request that needs no engine or finds no room; leave all else to the server."""
        try:
            seen = one.recv(HEAD, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            seen = b""
        head, whole, _ = seen.partition(b"\r\n\r\n")
        known = bool(whole) and (self.names is None or host_of(head) in self.names)
        ill, room = self.engines()
        if known and head.startswith(b"GET /health "):
            status = b"503 Service Unavailable" if ill else b"200 OK"
            self.leave(one, answer(status, ILL if ill else b""))
        elif known and head.startswith(WORK) and room <= 0 and len(self.leaving) < MOST:
            self.leave(one, answer(b"429 Too Many Requests", BUSY, b"Retry-After: 1\r\n"))
        else:
            if head.startswith(WORK):
                self.asked.append(time.monotonic())
            self.hand_over(one)

    def engines(self) -> tuple[bool, float]:
        """Return whether an engine is ill, and the room for requests beyond those on the way."""
        found, now = list(ENGINE.iter_unpack(self.state[:])), time.monotonic()
        decided = sum(count for _, _, count in found)
        for _ in range(min(len(self.asked), int(decided - self.decided))):
            self.asked.popleft()
        while self.asked and self.asked[0] < now - DECIDED:
            self.asked.popleft()
        self.decided = decided
        return min(until for until, _, _ in found) < now, sum(room for _, room, _ in found) - len(self.asked)

    def leave(self, one: socket.socket, line: bytes) -> None:
        """Answer; what the client may still send is read and dropped, since it would lose the answer else."""
        self.forget(self.new, one, closes=False)
        self.leaving[one] = time.monotonic() + FAREWELL
        try:
            one.send(line)  # a few hundred bytes, into an empty buffer
            one.shutdown(socket.SHUT_WR)
        except OSError:
            self.leaving[one] = -math.inf
        self.drain(one)

    def drain(self, one: socket.socket) -> None:
        """Drop what a client sends after its answer; close when it has read that."""
        try:
            while one.recv(1 << 16):
                pass
        except BlockingIOError:
            return
        except OSError:
            pass
        self.forget(self.leaving, one)
        one.close()

    def hand_over(self, one: socket.socket) -> None:
        """Give a connection to the server."""
        self.forget(self.new, one)
        self.handed.append(one)
        self.give()

    def give(self) -> None:
        """Send what is handed over; where the server has taken too little so far, later."""
        try:
            while self.handed:
                socket.send_fds(self.control, [b"1"], [self.handed[0].fileno()])
                self.handed.popleft().close()
        except BlockingIOError:
            pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.handed else 0)
        self.selector.modify(self.control, wanted)

    def forget(self, where: dict[socket.socket, float], one: socket.socket, closes: bool = True) -> None:
        """Watch a connection no longer; `closes` False: it goes on in another list."""
        del where[one]
        if closes:
            self.selector.unregister(one)


def main(listening: str, control: str, state: str, names: str) -> None:
    """Keep the door of the server that has started this process."""
    door, server = (socket.socket(fileno=int(number)) for number in (listening, control))
    memory = mmap.mmap(int(state), 0, access=mmap.ACCESS_READ)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        Door(door, server, memory, json.loads(names)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
