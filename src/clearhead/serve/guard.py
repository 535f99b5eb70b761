"""What every request passes first: the server's own names, keys, and limits on the body."""

import asyncio
import base64
import contextlib
import hmac
from collections.abc import Collection

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clearhead.errors import InputError
from clearhead.explorer.app import allowed_names, host_name
from clearhead.serve.answers import error_body

LARGEST_BODY = 8_000_000  # bytes
BODY_SECONDS = 30.0  # for a body to arrive
OPEN = ("/health", "/ready")  # routes without a key


class Guard:
    """The layer in front of the routes. It leaves the connection to them, so that they see it close."""

    def __init__(self, app: ASGIApp, host: str, keys: Collection[str]) -> None:
        self.app, self.allowed, self.keys = app, allowed_names(host), keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope["path"], Headers(scope=scope))
        body: list[Message] = []
        if refusal is None:
            try:
                body.append(await asyncio.wait_for(_whole(receive), BODY_SECONDS))
            except TimeoutError:
                refusal = 408, f"the body took more than {BODY_SECONDS:.0f} seconds"
            except InputError as error:
                refusal = 413, str(error)
        if refusal is not None:
            asks = {"WWW-Authenticate": "Basic"} if refusal[0] == 401 and scope["path"] == "/" else None
            await JSONResponse(error_body(InputError(refusal[1])), refusal[0], asks)(scope, receive, send)
            return

        async def again() -> Message:
            return body.pop() if body else await receive()

        await self.app(scope, again, send)

    def _refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        names = [host_name(headers.get("host", ""))]
        if "origin" in headers:
            names.append(host_name(headers["origin"].partition("://")[2]))
        if self.allowed is not None and not self.allowed.issuperset(names):
            return 403, "this server answers to its own address only: start it with another --host"
        if self.keys and path not in OPEN and not _has_key(headers, self.keys):
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


def _has_key(headers: Headers, keys: Collection[str]) -> bool:
    scheme, _, text = headers.get("authorization", "").partition(" ")
    given = text.encode("utf-8", "replace")
    if scheme == "Basic":  # what a browser sends, after asking for a name and a password: the key
        with contextlib.suppress(ValueError):
            given = base64.b64decode(given).partition(b":")[2]
    # Every key is compared, so that the time tells nothing.
    return sum(hmac.compare_digest(given, key.encode()) for key in keys) > 0
