"""Routes under /inside/: what `views` computes, over HTTP. Start-up and headers are elsewhere, so that any server may include these."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, Response

from clearhead.costs import cost
from clearhead.errors import ClearheadError, InputError
from clearhead.explorer.pack import finite
from clearhead.explorer.pages import page_files, single_file
from clearhead.explorer.record import record_run
from clearhead.explorer.session import Session
from clearhead.explorer.views import view
from clearhead.tokens.labels import labels

LARGEST_BODY = 8_000_000  # bytes
MOST_LABELS = 2000


def inside_routes(session: Session) -> APIRouter:
    """The routes for one session."""
    router = APIRouter(prefix="/inside")

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
        found = session.models[0].roles
        return {"ready": found is not None, "roles": found or {}}

    @router.get("/labels")
    def names(ids: str, model: int = 0) -> dict[str, Any]:
        wanted = _numbers(ids)
        return {"labels": list(labels(session.model(model).tokenizer, wanted))}

    @router.get("/cost")
    def costs(
        length: int | None = None,
        batch: int = 1,
        dtype: str = "float32",
        source_length: int | None = None,
        model: int = 0,
    ) -> dict[str, Any]:
        config = session.model(model).config
        made: dict[str, Any] = finite(cost(config, length, batch, dtype, source_length).to_dict())
        return made

    @router.post("/run")
    async def begin(request: Request) -> dict[str, Any]:
        asked = await _body(request)
        return await run_in_threadpool(lambda: session.begin(asked))

    @router.post("/run/{name}/extend")
    async def extend(name: str, request: Request) -> dict[str, Any]:
        asked = await _body(request)
        token = asked.get("token")
        if type(token) is not int:
            raise InputError("token must be a whole number")
        run = session.run(name)
        if not 0 <= token < run.m.config.vocab_size:
            raise InputError(
                f"token {token} is not in the vocabulary: ids go from 0 to {run.m.config.vocab_size - 1}"
            )

        def work() -> dict[str, Any]:
            with session.lock:
                return session.keep(run.extended(token), _number_of(session, run.m))

        return await run_in_threadpool(work)

    @router.post("/run/{name}/ablate")
    async def ablate(name: str, request: Request) -> dict[str, Any]:
        asked = await _body(request)
        run = session.run(name)
        heads, layers, feedforwards = (
            _texts(asked.get(key), key) for key in ("heads", "layers", "feedforwards")
        )
        position = asked.get("position")
        if type(position) is not int:
            raise InputError("position must be a whole number")

        def work() -> dict[str, Any]:
            with session.lock:
                made: dict[str, Any] = finite(
                    run.ablate(heads, layers, feedforwards, str(asked.get("how", "zero")), position)
                )
                return made

        return await run_in_threadpool(work)

    @router.get("/export")
    def export(run: str) -> HTMLResponse:
        found = session.run(run)
        number = _number_of(session, found.m)
        with session.lock:
            page = single_file(record_run(found, session.models[number].name, session.models[number].roles))
        headers = {
            "Content-Disposition": 'attachment; filename="clearhead.html"',
            "Content-Security-Policy": "sandbox; default-src 'none'",
        }
        return HTMLResponse(page, headers=headers)

    @router.get("/run/{name}/{path:path}")
    def views(name: str, path: str, request: Request) -> Any:
        run = session.run(name)
        query = f"?{request.url.query}" if request.url.query else ""
        with session.lock:
            return JSONResponse(view(run, path + query))

    return router


def _number_of(session: Session, m: object) -> int:
    return next(number for number, opened in enumerate(session.models) if opened.m is m)


async def _body(request: Request) -> dict[str, Any]:
    """A JSON object, within the limit; anything else is an error in words."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/json":
        raise InputError("a request must have the content type application/json")
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > LARGEST_BODY:
            raise InputError(f"the request is larger than {LARGEST_BODY:,} bytes")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise InputError("the request is not JSON") from None
    if not isinstance(body, dict):
        raise InputError("the request must be a JSON object")
    return body


def _texts(value: Any, name: str) -> list[str]:
    if value is None:
        return []
    if (
        not isinstance(value, list)
        or len(value) > 10_000
        or not all(isinstance(one, str | int) for one in value)
    ):
        raise InputError(f"{name} must be a list of names")
    return [str(one) for one in value]


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if len(parts) > MOST_LABELS or not all(part.strip().isdecimal() and len(part) < 12 for part in parts):
        raise InputError(f"ids must be at most {MOST_LABELS} whole numbers with commas between them")
    return [int(part) for part in parts]


def in_words(error: Exception) -> JSONResponse:
    """An error as one line of JSON."""
    if isinstance(error, KeyError):
        return JSONResponse({"error": str(error.args[0])}, status_code=404)
    if isinstance(error, ClearheadError):
        return JSONResponse({"error": str(error)}, status_code=400)
    return JSONResponse(
        {"error": f"something went wrong: {type(error).__name__}: {str(error)[:200]}"}, status_code=500
    )
