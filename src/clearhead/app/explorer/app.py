"""The application of the page: its files, its headers, and routes under /inside/ to what `views` computes.

Any server may include the routes.
"""

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response

from clearhead.app.explorer.interventions import ablated, steered
from clearhead.app.explorer.record import page_files, record_run, single_file
from clearhead.app.explorer.session import Session
from clearhead.app.explorer.views import finite
from clearhead.app.views import of_prompts, page_view
from clearhead.errors import ClearheadError, InputError, refuse
from clearhead.hub.tokens.text import labels
from clearhead.variants.costs import cost

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
ASIDE = (
    "denoising",
    "looks/",
    "trace",
    "neurons",
    "analysis/",
)  # with a pass of their own: no other view waits for them
LOOPBACK = ("localhost", "127.0.0.1", "::1")
LARGEST_BODY = 8_000_000  # bytes
MOST_LABELS = 2000
MOST_NAMES = 10_000


class Json(JSONResponse):
    """JSON of any text: half a surrogate pair, which UTF-8 has no bytes for, is written as an escape."""

    def render(self, content: Any) -> bytes:
        """Return the bytes of the answer."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


def make_app(session: Session, host: str = "127.0.0.1") -> FastAPI:
    """Return the page and its routes for one session, answering to the names of `host` only."""
    app = FastAPI(title="clearhead explorer", docs_url=None, redoc_url=None, openapi_url=None)
    allowed = allowed_names(host)

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if allowed is not None and host_name(request.headers.get("host", "")) not in allowed:
            return _with_headers(_refusal("this page answers to its own address only", 403))
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
        file = page_files().get(name)  # a name that is not in this fixed table is not looked for
        if file is None:
            return _refusal("there is no such file", 404)
        return Response(file[0], media_type=f"{file[1]}; charset=utf-8")

    app.include_router(inside_routes(session))
    return app


def allowed_names(host: str) -> set[str] | None:
    """Return the names by which a server that listens on `host` may be called; None: any."""
    address = _address(host)
    return None if address is not None and address.is_unspecified else {*LOOPBACK, host.lower()}


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _with_headers(response: Response) -> Response:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def host_name(host: str) -> str:
    """Return a Host header without its port."""
    return (
        host.rsplit("]", 1)[0].lstrip("[").lower() if host.startswith("[") else host.partition(":")[0].lower()
    )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host as an address; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


# Routes -----------------------------------------------------------------------------------------------------


async def _body(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request; refuse anything else, and more bytes than the limit."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    refuse(kind != "application/json", "a request must have the content type application/json")
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        refuse(len(raw) > LARGEST_BODY, f"the request is larger than {LARGEST_BODY:,} bytes")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise InputError("the request is not JSON") from None
    refuse(not isinstance(body, dict), "the request must be a JSON object")
    return dict(body)


Body = Annotated[dict[str, Any], Depends(_body)]


def inside_routes(session: Session) -> APIRouter:
    """Return the routes for one session."""
    router = APIRouter(prefix="/inside", default_response_class=Json)

    @router.get("/model")
    def model() -> dict[str, Any]:
        first, *others = session.models
        return {**first.view(), "other": others[0].view() if others else None}

    @router.get("/example")
    def example() -> Response:
        stored = page_files().get("example.json")
        return Response(stored[0] if stored else "null", media_type="application/json")

    @router.get("/roles")
    def roles() -> dict[str, Any]:
        roles = session.models[0].roles
        return {"ready": roles is not None, "roles": roles or {}}

    @router.get("/examples")
    def examples() -> dict[str, Any]:
        findings = session.models[0].findings
        return {"ready": findings is not None, "examples": findings or []}

    @router.get("/analyses")
    def analyses() -> dict[str, Any]:
        return {"analyses": of_prompts()}

    @router.get("/labels")
    def names(ids: str, model: int = 0) -> dict[str, Any]:
        m, numbers = session.model(model), _numbers(ids)
        last = m.config.vocab_size - 1
        refuse(
            m.tokenizer and max(numbers) > last, f"ids go from 0 to {last}, and {max(numbers)} is asked for"
        )
        return {"labels": list(labels(m.tokenizer, numbers))}

    @router.get("/cost")
    def costs(
        length: int | None = None,
        batch: int = 1,
        dtype: str = "float32",
        source_length: int | None = None,
        model: int = 0,
    ) -> Any:
        return finite(cost(session.model(model).config, length, batch, dtype, source_length).to_dict())

    @router.post("/run")
    def begin(body: Body) -> dict[str, Any]:
        return session.begin(body)

    @router.post("/tokens")
    def tokens(body: Body) -> dict[str, Any]:
        return {"tokens": session.tokens(body)}

    @router.post("/run/{name}/extend")
    def extend(name: str, body: Body) -> dict[str, Any]:
        run, token = session.run(name), _whole(body, "token")
        last = run.m.config.vocab_size - 1
        refuse(not 0 <= token <= last, f"token {token} is not in the vocabulary: ids go from 0 to {last}")
        with session.lock:
            return session.keep(run.extended(token))

    @router.post("/run/{name}/ablate")
    def ablate(name: str, body: Body) -> Any:
        run, position = session.run(name), _whole(body, "position")
        heads, layers, feedforwards = (_names(body, key) for key in ("heads", "layers", "feedforwards"))
        how = str(body.get("how", "zero"))
        second = session.run(str(body.get("second"))) if how == "second" else None
        with session.lock:
            return finite(ablated(run, heads, layers, feedforwards, how, position, second))

    @router.post("/run/{name}/steer")
    def steer(name: str, body: Body) -> Any:
        run = session.run(name)
        texts = [body.get(key) for key in ("toward", "away")]
        strength: Any = body.get("strength", 1.0)
        refuse(not all(isinstance(text, str) for text in texts), "toward and away must be texts")
        refuse(type(strength) not in (int, float), "strength must be a number")
        toward, away = map(str, texts)
        layer, position = _whole(body, "layer"), _whole(body, "position")
        with session.aside:
            return finite(steered(run, (toward, away), layer, strength, position))

    @router.get("/export")
    def export(run: str, state: str = "", second: str = "") -> HTMLResponse:
        recorded, other = session.run(run), session.run(second) if second else None
        with session.lock:
            opened = session.models[recorded.number]
            page = single_file(record_run(recorded, opened.name, state, other, opened.findings or ()))
        return HTMLResponse(
            page,
            headers={
                "Content-Disposition": 'attachment; filename="clearhead.html"',
                "Content-Security-Policy": "sandbox; default-src 'none'",
            },
        )

    @router.get("/run/{name}/job/{path:path}")
    def job(name: str, path: str, request: Request) -> Json:
        query = f"?{request.url.query}" if request.url.query else ""
        return Json(session.job(name, path + query))

    @router.get("/run/{name}/{path:path}")
    async def views(name: str, path: str, request: Request) -> Response:
        run = session.run(name)
        query = f"?{request.url.query}" if request.url.query else ""
        turn = session.aside if path.startswith(ASIDE) else session.lock
        while not turn.acquire(blocking=False):
            if await request.is_disconnected():
                return Response(status_code=499)  # nobody waits for it any more
            await asyncio.sleep(0.005)
        try:
            return await run_in_threadpool(lambda: Json(page_view(run, path + query)))
        finally:
            turn.release()

    return router


def _whole(body: dict[str, Any], name: str) -> int:
    value: Any = body.get(name)
    refuse(type(value) is not int, f"{name} must be a whole number")
    return int(value)


def _names(body: dict[str, Any], name: str) -> list[str]:
    listed = [] if body.get(name) is None else body[name]
    refuse(
        not isinstance(listed, list)
        or len(listed) > MOST_NAMES
        or not all(isinstance(part, str | int) for part in listed),
        f"{name} must be a list of names",
    )
    return [str(part) for part in listed]


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    refuse(
        len(parts) > MOST_LABELS or not all(part.strip().isdecimal() and len(part) < 12 for part in parts),
        f"ids must be at most {MOST_LABELS} whole numbers with commas between them",
    )
    return [int(part) for part in parts]


def in_words(error: Exception) -> Response:
    """Return an error as one line of JSON."""
    if isinstance(error, KeyError):
        return _refusal(str(error.args[0]), 404)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return _refusal(f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}", 400)
    if isinstance(error, ClearheadError):
        return _refusal(str(error), 400)
    return _refusal(f"something went wrong: {type(error).__name__}: {str(error)[:200]}", 500)


def _refusal(line: str, status: int) -> Response:
    return Json({"error": line}, status_code=status)
