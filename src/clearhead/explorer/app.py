"""The application of the page: its files, its headers and the routes under /inside/."""

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
    """Return the page and its routes for one session, answering to the names of `host` only."""
    app = FastAPI(title="clearhead explorer", docs_url=None, redoc_url=None, openapi_url=None)
    allowed = None if _is_everywhere(host) else {*LOOPBACK, host.lower()}

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if allowed is not None and _name(request.headers.get("host", "")) not in allowed:
            refusal = {"error": "this page answers to its own address only"}
            return _with_headers(JSONResponse(refusal, status_code=403))
        return _with_headers(await answer(request))

    @app.exception_handler(ClearheadError)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(KeyError)
    @app.exception_handler(Exception)  # this one is called outside of the guard
    async def wrong(request: Request, error: Exception) -> Response:
        return _with_headers(in_words(error))

    @app.get("/")
    @app.get("/{name}")
    def static(name: str = "index.html") -> Response:
        found = page_files().get(name)  # a name that is not in this fixed table is not looked for
        if found is None:
            return JSONResponse({"error": "there is no such file"}, status_code=404)
        return Response(found[0], media_type=f"{found[1]}; charset=utf-8")

    app.include_router(inside_routes(session))
    return app


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _with_headers(response: Response) -> Response:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _name(host: str) -> str:
    """Return a Host header without its port."""
    return (
        host.rsplit("]", 1)[0].lstrip("[").lower() if host.startswith("[") else host.partition(":")[0].lower()
    )


def _is_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
