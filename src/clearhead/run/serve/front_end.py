"""The front end: a small process before the server, which answers at once however busy that is.

It listens, looks at the first bytes of each connection, and answers two kinds of requests by itself: /health,
and work that there is no room for. Every other connection is handed to the server as it came, unread. Only a
request with a valid key whose body is all here counts as work on its way: nobody else can fill the server.
What it must know of the engines stands in memory that both processes see. The server's own threads share one
lock of the interpreter with the engines, and a thread that holds it may be off the processor; this process
has no such thread.

    python front_end.py LISTENING CONTROL STATE < SETTINGS

The three are file descriptors. SETTINGS are JSON, and not arguments, which others on this machine can list:
`names`, those that the server answers to, or null for any; `keys`, the SHA-256 of each API key. This file
needs nothing but the standard library, and ends when the server does.
"""

import base64
import contextlib
import hashlib
import hmac
import json
import math
import mmap
import selectors
import socket
import struct
import sys
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence

# Of an engine: when it counts as ill, by `time.monotonic()`; how many requests there is room for; how many it
# has let in or refused so far.
ENGINE = struct.Struct("ddd")
SEEN = 32_768  # bytes of a request that are looked at; the server counts larger ones itself
PATIENCE = 0.25  # seconds for a request to be all here; what is slower is the server's, and does not count
DRAIN_SECONDS = 1.0  # seconds in which a client that was refused may still send
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


def key_digest(key: bytes) -> bytes:
    """Return what is kept of an API key: enough to recognise it."""
    return hashlib.sha256(key).digest()


def digest_given(authorization: str, digests: Collection[bytes]) -> bytes | None:
    """Return the digest of the key in an Authorization header; None where it is not one of `digests`."""
    scheme, _, text = authorization.partition(" ")
    key = text.strip(" ").encode("utf-8", "replace")
    if scheme.lower() == "basic":  # what a browser sends, after asking for a name and a password: the key
        try:
            key = base64.b64decode(key, validate=True).partition(b":")[2]
        except ValueError:
            return None
    elif scheme.lower() != "bearer":
        return None
    # Every digest is compared, so that the time tells nothing.
    found = [one for one in digests if hmac.compare_digest(key_digest(key), one)]
    return found[0] if found else None


def headers_of(head: bytes) -> dict[str, list[str]]:
    """Return the values of each header of a request, by its name in small letters."""
    found = defaultdict(list)
    for line in head.decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        found[name.lower()].append(value.strip())
    return found


def host_of(headers: Mapping[str, Sequence[str]]) -> str | None:
    """Return the one name in the Host header; None where there is none, or a page of another server asks."""
    found = headers.get("host", ())
    if len(found) != 1 or "origin" in headers:
        return None
    host = found[0].lower()
    return host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]


def body_length(headers: Mapping[str, Sequence[str]]) -> int | None:
    """Return how long a body is; None where that is not said, or the client waits before it sends it."""
    lengths = headers.get("content-length", ())
    if len(lengths) != 1 or "transfer-encoding" in headers or "expect" in headers:
        return None
    return int(lengths[0]) if lengths[0].isascii() and lengths[0].isdecimal() else None


class FrontEnd:
    """The connections of which the first bytes are awaited, and those that are taken leave of."""

    def __init__(
        self,
        listening: socket.socket,
        control: socket.socket,
        state: mmap.mmap,
        names: Collection[str] | None,
        keys: Collection[bytes],
    ) -> None:
        self.listening, self.control, self.state = listening, control, state
        self.names, self.keys = names, keys
        self.selector = selectors.DefaultSelector()
        self.new: dict[socket.socket, float] = {}  # until when
        self.leaving: dict[socket.socket, float] = {}
        self.handed: deque[socket.socket] = deque()  # to be given to the server
        self.pending: deque[float] = deque()  # when work was handed over that no engine has decided on yet
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
            seen = one.recv(SEEN, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            seen = b""
        head, whole, _ = seen.partition(b"\r\n\r\n")
        headers = headers_of(head) if whole else {}
        known = bool(whole) and (self.names is None or host_of(headers) in self.names)
        ill, room = self.engines()
        if known and head.startswith(b"GET /health "):
            status = b"503 Service Unavailable" if ill else b"200 OK"
            self.leave(one, answer(status, ILL if ill else b""))
            return
        if not known or not head.startswith(WORK) or not self.has_key(headers):
            self.hand_over(one)
            return
        if room <= 0 and len(self.leaving) < MOST:
            self.leave(one, answer(b"429 Too Many Requests", BUSY, b"Retry-After: 1\r\n"))
            return
        length = body_length(headers)
        size = None if length is None else len(head) + len(whole) + length
        if size is not None and len(seen) < size <= SEEN:
            # Look again when that much is here: what is peeked at would else be ready to read at once.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            return
        if size is not None and size <= SEEN:
            self.pending.append(time.monotonic())
        self.hand_over(one)

    def has_key(self, headers: Mapping[str, Sequence[str]]) -> bool:
        """Return whether a request may do work: it has one key, and a valid one, where keys are asked for."""
        given = headers.get("authorization", ())
        return not self.keys or (len(given) == 1 and digest_given(given[0], self.keys) is not None)

    def engines(self) -> tuple[bool, float]:
        """Return whether an engine is ill, and the room for requests beyond those on the way."""
        found, now = list(ENGINE.iter_unpack(self.state[:])), time.monotonic()
        decided = sum(count for _, _, count in found)
        for _ in range(min(len(self.pending), int(decided - self.decided))):
            self.pending.popleft()
        while self.pending and self.pending[0] < now - DECIDED:
            self.pending.popleft()
        self.decided = decided
        return min(until for until, _, _ in found) < now, sum(room for _, room, _ in found) - len(
            self.pending
        )

    def leave(self, one: socket.socket, line: bytes) -> None:
        """Answer; what the client may still send is read and dropped, since it would lose the answer else."""
        self.forget(self.new, one, closes=False)
        self.leaving[one] = time.monotonic() + DRAIN_SECONDS
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
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if closes:
            self.selector.unregister(one)


def main(listening: str, control: str, state: str) -> None:
    """Run the front end of the server that has started this process."""
    listener, server = (socket.socket(fileno=int(number)) for number in (listening, control))
    memory = mmap.mmap(int(state), 0, access=mmap.ACCESS_READ)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        settings = json.load(sys.stdin)
        keys = [bytes.fromhex(key) for key in settings["keys"]]
        FrontEnd(listener, server, memory, settings["names"], keys).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
