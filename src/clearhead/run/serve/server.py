"""The server around the routes: names, keys, admission, and limits on headers and body.

A connection that says nothing, or says it too slowly, is closed; where connections are too many, the one
that has waited longest. Work that there is no room for is refused before its body is read.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import time
from collections.abc import Callable, Collection
from typing import ClassVar

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from clearhead.app.explorer.app import allowed_names, host_name
from clearhead.errors import BusyError, InputError
from clearhead.run.serve.protocol import error_body

LARGEST_BODY = 8_000_000  # bytes
LARGEST_UPLOAD = 26_500_000  # bytes of a form with a file: 25 MiB, as OpenAI takes, and what is around it
MOST_LARGE = 16  # bodies above LARGEST_BODY that are held while they arrive
BODY_SECONDS = 30.0  # for a body to arrive, and as much for each further LARGEST_BODY that its header states
DRAIN_SECONDS = 1.0  # for a client that is refused to end what it sends
HEADER_SECONDS = 10.0  # for the line and the headers of a request to arrive
MOST_CONNECTIONS = 4096
FILES_LEFT = 256  # that the process needs besides its connections
OWNER = "clearhead.owner"  # in the scope of a request: the digest of its key, or nothing
RETRY_AFTER = "1"  # seconds
UPLOADS = ("/v1/audio/transcriptions", "/v1/audio/translations")  # routes that take a file
# What an engine is needed for.
WORK = (
    *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"),
    *UPLOADS,
)
OPEN = ("/health", "/ready")  # routes without a key
# Headers that must not come twice.
ONCE = ("content-length", "host", "transfer-encoding", "authorization", "x-api-key")


class Connection(H11Protocol):
    """A connection as uvicorn has it, that must ask for something soon."""

    most = MOST_CONNECTIONS
    refusal: Callable[[bytes], bytes | None] | None = None  # `Admission.early`
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
        refused = self.refusal(data) if self.refusal is not None and self._idle() else None
        if refused is not None:
            self.transport.write(refused)
            self.transport.close()
            return
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
    equal = [digest for digest in digests if hmac.compare_digest(key_digest(key), digest)]
    return equal[0] if equal else None


class Admission:
    """Who may ask, and whether there is room for what is asked."""

    def __init__(
        self, host: str, keys: Collection[str], check_room: Callable[[], None], origins: Collection[str] = ()
    ) -> None:
        """`check_room` raises `BusyError` where no engine has room for another request.

        `origins`: other servers whose pages may ask.
        """
        self.allowed, self.check_room, self.origins = allowed_names(host), check_room, origins
        self.keys = [key_digest(key.encode()) for key in keys]

    def key_of(self, headers: Headers) -> bytes | None:
        """Return the digest of the key that a request has; None where it has none that is known.

        Anthropic's clients may send it as x-api-key.
        """
        given = [headers.get("authorization", "")]
        given += [f"Bearer {headers['x-api-key']}"] if "x-api-key" in headers else []
        digests = [digest_given(value, self.keys) for value in given]
        return next((digest for digest in digests if digest is not None), None)

    def refusal(self, path: str, headers: Headers, key: bytes | None) -> tuple[int, str] | None:
        """Return the status and the reason, where a request is refused before its body is read."""
        twice = [name for name in ONCE if len(headers.getlist(name)) > 1]
        if ("content-length" in headers and "transfer-encoding" in headers) or twice:
            both = ", ".join(twice) or "content-length and transfer-encoding"
            return 400, f"the headers do not say where the request ends, or whose it is: {both}"
        names = [host_name(headers.get("host", ""))]
        if "origin" in headers and not {headers["origin"], "*"} & {*self.origins}:
            names.append(host_name(headers["origin"].partition("://")[2]))
        if self.allowed is not None and not self.allowed.issuperset(names):
            return 403, "this server answers to its own address only: start it with another --host"
        if self.keys and path not in OPEN and key is None:
            return (
                401,
                "this server asks for a key: send it as Authorization: Bearer KEY, or as x-api-key: KEY",
            )
        length, most = headers.get("content-length", "0"), largest_body(path)
        if not length.isdecimal() or int(length) > most:
            return 413, too_large(most)
        try:
            if path in WORK:
                self.check_room()
        except BusyError as error:
            return 429, str(error)
        return None

    def early(self, data: bytes) -> bytes | None:
        """Return the answer to bytes that are one whole request for work, where there is no room; else None.

        In overload most requests end here. Parsing them as HTTP would take time from the engine.
        """
        head, _, body = data.partition(b"\r\n\r\n")
        line, *fields = head.decode("latin-1").split("\r\n")
        method, _, target = line.partition(" ")
        path = target.partition(" ")[0]
        if method != "POST" or path not in WORK:
            return None
        pairs = (field.partition(":")[::2] for field in fields)
        raw = [(name.lower().encode("latin-1"), value.strip().encode("latin-1")) for name, value in pairs]
        headers = Headers(raw=raw)
        if headers.get("content-length") != str(len(body)):
            return None
        refusal = self.refusal(path, headers, self.key_of(headers))
        if refusal is None or refusal[0] != 429:
            return None
        answer = refused(*refusal, path)
        lines = [b"HTTP/1.1 429 Too Many Requests", *(b": ".join(pair) for pair in answer.raw_headers)]
        return b"\r\n".join([*lines, b"", bytes(answer.body)])


def refused(status: int, line: str, path: str = "") -> JSONResponse:
    """Return the answer to a request that is refused; the connection is closed."""
    more = {"Connection": "close"}
    if status == 401 and path == "/":
        more["WWW-Authenticate"] = "Basic"
    if status == 429:
        more["Retry-After"] = RETRY_AFTER
    return JSONResponse(error_body(InputError(line), status, path), status, more)


def largest_body(path: str) -> int:
    """Return how many bytes the body of a request to this route may have."""
    return LARGEST_UPLOAD if path in UPLOADS else LARGEST_BODY


def too_large(most: int) -> str:
    """Return why a body is refused."""
    return f"the body is larger than {most:,} bytes"


class Guard:
    """The layer in front of the routes. It leaves the connection to them, so that they see it close."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self.app, self.admission = app, admission
        self.large = 0  # bodies above LARGEST_BODY that are arriving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key = self.admission.key_of(headers)
        refusal = self.admission.refusal(scope["path"], headers, key)
        body: list[Message] = []
        if refusal is None:
            seconds = BODY_SECONDS * max(1.0, int(headers.get("content-length", "0")) / LARGEST_BODY)
            try:
                whole = self._whole(receive, largest_body(scope["path"]))
                body.append(await asyncio.wait_for(whole, seconds))
            except TimeoutError:
                refusal = 408, f"the body took more than {seconds:.0f} seconds"
            except InputError as error:
                refusal = 413, str(error)
            except BusyError as error:
                refusal = 429, str(error)
        if refusal is not None:
            # What is still being sent is dropped: closing before would lose the answer on the way.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_dropped(receive), DRAIN_SECONDS)
            await refused(*refusal, scope["path"])(scope, receive, send)
            return

        async def again() -> Message:
            return body.pop() if body else await receive()

        scope[OWNER] = "" if key is None else key.hex()
        await self.app(scope, again, send)

    async def _whole(self, receive: Receive, most: int) -> Message:
        """Read the body, and return it as one message; only so many large ones are held at a time."""
        raw, more, large = bytearray(), True, False
        try:
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                raw += message.get("body", b"")
                more = message.get("more_body", False)
                if len(raw) > most:
                    raise InputError(too_large(most))
                if len(raw) > LARGEST_BODY and not large:
                    if self.large >= MOST_LARGE:
                        raise BusyError(f"{self.large} large files are arriving already: try again later")
                    self.large, large = self.large + 1, True
            return {"type": "http.request", "body": bytes(raw), "more_body": False}
        finally:
            self.large -= large


async def _dropped(receive: Receive) -> None:
    """Read to the end of the body, or until the client goes."""
    message: Message = {"type": "http.request", "more_body": True}
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await receive()
