"""The page at /: who waits, who runs, the blocks and the speed; a finished request opens in the explorer.

The page asks for `/page/state` once a second. Each model has an explorer of its own under `/explore/N/`,
which reads what was asked and answered by the model itself, in a thread of its own.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, FastAPI, HTTPException
from fastapi.responses import RedirectResponse, Response

from clearhead.app.explorer.app import HEADERS, Json, make_app
from clearhead.app.explorer.record import page_files
from clearhead.app.explorer.session import Opened, Session
from clearhead.run.serve.engine import KEPT, ServeEngine
from clearhead.run.serve.jobs import Job

LONGEST_LIST = 64  # requests that are listed, of those that have not ended


def add_page(app: FastAPI, engines: Mapping[str, ServeEngine], host: str) -> None:
    """Add the page and the explorers to a server."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    @router.get("/page/{name}")
    def static(name: str = "index.html") -> Response:
        if name == "state":
            return Json({model: _state(engine) for model, engine in engines.items()}, headers=HEADERS)
        found = page_files("clearhead.run.serve").get(name) or page_files().get(name)
        if found is None:
            raise HTTPException(404, "there is no such file")
        return Response(found[0], media_type=f"{found[1]}; charset=utf-8", headers=HEADERS)

    @router.get("/open/{place}/{number}")
    def opened(place: int, number: int) -> Response:
        kept = list(engines.values())[place].finished if 0 <= place < len(engines) else ()
        job = next((one for one in list(kept) if one.number == number), None)
        if job is None:
            raise HTTPException(404, f"request {number} is forgotten: the latest {KEPT} are kept")
        if job.asked.adapter:
            raise HTTPException(404, f"the explorer reads the model without adapter {job.asked.adapter}")
        return RedirectResponse(f"/explore/{place}/#{_read(job)}", 303, headers=HEADERS)

    app.include_router(router)
    for place, (name, engine) in enumerate(engines.items()):
        opened_model = Opened(name, partial(getattr, engine, "m"))
        opened_model.open()
        opened_model.roles = {}  # they take long: `clearhead explore` finds them
        app.mount(f"/explore/{place}", make_app(Session([opened_model]), host))


def _read(job: Job) -> str:
    """Return what the explorer is to read, as its address says it."""
    if job.prompts.source is None:
        return urlencode({"ids": " ".join(map(str, job.tokens))})
    found = job.result
    text = "" if found is None else found.text or ""
    return urlencode({"ids": " ".join(map(str, job.prompts.source[0].tolist())), "written": text})


def _state(engine: ServeEngine) -> dict[str, Any]:
    """Return what the page shows of one engine; texts are not in it."""
    figures, pool = engine.figures, engine.pool
    blocks = [] if pool is None else list(pool.blocks.items())
    return {
        "running": [_about(job) for job in list(engine.running)[:LONGEST_LIST]],
        "waiting": [_about(job) for job in list(engine.waiting)[:LONGEST_LIST]],
        "finished": [_about(job) for job in reversed(engine.finished)],
        "counts": {
            "running": len(engine.running),
            "waiting": len(engine.waiting) + len(engine.readings.waiting),
            "most_running": engine.limits.running,
            "most_waiting": engine.limits.waiting,
        },
        "blocks": [
            {
                "name": "sources"
                if group is None
                else f"window of {group[0]}"
                if group[0]
                else "whole texts",
                "used": one.used,
                "kept": len(one.idle),
                "free": len(one.free),
                "tokens": engine.limits.block,
            }
            for group, one in blocks
        ],
        "totals": {
            "new_tokens": figures.new_tokens,
            "prompt_tokens": figures.prompt_tokens,
            "prefix_asked": figures.prefix_asked,
            "prefix_found": figures.prefix_found,
            "preempted": figures.preempted,
            "steps": figures.steps,
        },
        "well": engine.well,
        "closed": engine.closed,
    }


def _about(job: Job) -> dict[str, Any]:
    times = job.times
    first = None if times.first is None else times.first - times.asked
    return {
        "number": job.number,
        "read": job.read,
        "prompt": job.prompt_tokens,
        "cached": job.cached,
        "written": len(job.row.ids),
        "most": job.most,
        "reason": job.row.stop_reason if job.done else None,
        "first": first,
        "seconds": None if times.ended is None else times.ended - times.asked,
    }
