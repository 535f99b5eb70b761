"""The application of the page: its files, its headers, and the routes of `inside`.

It answers to its own names only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from clearhead.errors import ClearheadError
from clearhead.explorer.pages import page_files
from clearhead.explorer.routes import in_words, inside_routes
from clearhead.explorer.session import Session

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def make_app(session: Session, host: str = "127.0.0.1") -> FastAPI:
    """The page and its routes for one session, answering to the names of `host` only."""
    app = FastAPI(title="clearhead explorer", docs_url=None, redoc_url=None, openapi_url=None)
    allowed = None if _is_everywhere(host) else {*LOOPBACK, host.lower()}

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if allowed is not None and _name(request.headers.get("host", "")) not in allowed:
            return _with_headers(
                JSONResponse({"error": "this page answers to its own address only"}, status_code=403)
            )
        return _with_headers(await answer(request))

    @app.exception_handler(ClearheadError)
    @app.exception_handler(KeyError)
    @app.exception_handler(Exception)  # this one is called outside of the guard
    async def wrong(request: Request, error: Exception) -> Response:
        return _with_headers(in_words(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse(
            {"error": f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}"}, status_code=400
        )

    @app.get("/")
    def index() -> Response:
        return _file("index.html")

    @app.get("/{name}")
    def static(name: str) -> Response:
        return _file(name)

    app.include_router(inside_routes(session))
    return app


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _with_headers(response: Response) -> Response:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _file(name: str) -> Response:
    """A file of the page, found in a fixed table: a name that is not in it is not looked for."""
    found = page_files().get(name)
    if found is None:
        return JSONResponse({"error": "there is no such file"}, status_code=404)
    return Response(found[0], media_type=f"{found[1]}; charset=utf-8")


def _name(host: str) -> str:
    """A Host header without its port."""
    return (
        host.rsplit("]", 1)[0].lstrip("[").lower() if host.startswith("[") else host.partition(":")[0].lower()
    )


def _is_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
