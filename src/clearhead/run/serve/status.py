"""What the server shows of itself: `/metrics` for Prometheus, under vLLM's names, and the page at /.

The page has who waits, who runs, the blocks and the speed, and asks for `/page/state` once a second. A
finished request opens in the explorer: each model has one of its own under `/explore/N/`, which reads what
was asked and answered by the model itself, in a thread of its own.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, FastAPI, HTTPException
from fastapi.responses import RedirectResponse, Response

from clearhead.app.explorer.app import HEADERS, Json, make_app
from clearhead.app.explorer.record import page_files
from clearhead.app.explorer.session import Opened, Session
from clearhead.run.serve.engine import KEPT, ServeEngine
from clearhead.run.serve.processes import WHOLE
from clearhead.run.serve.sequence import ServedSequence

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)  # seconds
OURS = ("engine_steps_total",)  # without a name there
TIMES = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
)


class Metrics:
    """Times of requests that have ended, as histograms."""

    def __init__(self) -> None:
        self.counts = {name: [0] * (len(BUCKETS) + 1) for name in TIMES}
        self.sums = dict.fromkeys(TIMES, 0.0)
        self._lock = threading.Lock()

    def keep(self, seq: ServedSequence) -> None:
        """Count a request that has ended."""
        times = seq.times
        if times.ended is None or times.begun is None:
            return
        with self._lock:
            self._count("e2e_request_latency_seconds", times.ended - times.arrived)
            self._count("request_queue_time_seconds", times.begun - times.arrived)
            if times.first is not None and times.last is not None:
                self._count("time_to_first_token_seconds", times.first - times.arrived)
                self._count("request_prefill_time_seconds", times.first - times.begun)
                self._count("request_decode_time_seconds", times.last - times.first)
            for gap in times.gaps:
                self._count("inter_token_latency_seconds", gap)

    def _count(self, name: str, seconds: float) -> None:
        place = next((n for n, most in enumerate(BUCKETS) if seconds <= most), len(BUCKETS))
        self.counts[name][place] += 1
        self.sums[name] += seconds

    def text(self, engines: Mapping[str, ServeEngine]) -> str:
        """Return the page."""
        return "\n".join([*_of_engines(engines), *self._histograms(), ""])

    def _histograms(self) -> Iterator[str]:
        with self._lock:
            for name in TIMES:
                yield f"# TYPE vllm:{name} histogram"
                total = 0
                for most, count in zip((*BUCKETS, "+Inf"), self.counts[name]):
                    total += count
                    yield f'vllm:{name}_bucket{{le="{most}"}} {total}'
                yield f"vllm:{name}_count {total}"
                yield f"vllm:{name}_sum {self.sums[name]}"


def _of_engines(engines: Mapping[str, ServeEngine]) -> Iterator[str]:
    figures: dict[tuple[str, str], Callable[[ServeEngine], float]] = {
        ("engine_steps_total", "counter"): lambda e: e.stats.steps,
        ("num_requests_running", "gauge"): lambda e: len(e.running),
        ("num_requests_waiting", "gauge"): lambda e: len(e.waiting) + len(e.pooling.waiting),
        ("kv_cache_usage_perc", "gauge"): lambda e: 0.0 if e.pool is None else e.pool.usage,
        ("prefix_cache_queries_total", "counter"): lambda e: e.stats.prefix_asked,
        ("prefix_cache_hits_total", "counter"): lambda e: e.stats.prefix_found,
        ("prompt_tokens_total", "counter"): lambda e: e.stats.prompt_tokens,
        ("generation_tokens_total", "counter"): lambda e: e.stats.new_tokens,
        ("num_preemptions_total", "counter"): lambda e: e.stats.preempted,
        ("spec_decode_num_draft_tokens_total", "counter"): lambda e: e.stats.drafted,
        ("spec_decode_num_accepted_tokens_total", "counter"): lambda e: e.stats.accepted,
    }
    for (name, kind), value in figures.items():
        full = f"{'clearhead' if name in OURS else 'vllm'}:{name}"
        yield f"# TYPE {full} {kind}"
        for model, engine in engines.items():
            yield f'{full}{{model_name="{_quoted(model)}"}} {value(engine)}'
    yield "# TYPE vllm:request_success_total counter"
    for model, engine in engines.items():
        for reason, count in list(engine.stats.ended.items()):
            labels = f'model_name="{_quoted(model)}",finished_reason="{reason}"'
            yield f"vllm:request_success_total{{{labels}}} {count}"


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


LONGEST_LIST = 64  # requests that are listed, of those that have not ended


def add_page(app: FastAPI, engines: Mapping[str, ServeEngine], host: str) -> None:
    """Add the page and the explorers to a server."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    @router.get("/page/{name}")
    def static(name: str = "index.html") -> Response:
        if name == "state":
            return Json({model: _state(engine) for model, engine in engines.items()}, headers=HEADERS)
        file = page_files("clearhead.run.serve").get(name) or page_files().get(name)
        if file is None:
            raise HTTPException(404, "there is no such file")
        return Response(file[0], media_type=f"{file[1]}; charset=utf-8", headers=HEADERS)

    @router.get("/open/{place}/{number}")
    def opened(place: int, number: int) -> Response:
        kept = list(engines.values())[place].finished if 0 <= place < len(engines) else ()
        seq = next((ended for ended in list(kept) if ended.number == number), None)
        if seq is None:
            raise HTTPException(404, f"request {number} is forgotten: the latest {KEPT} are kept")
        if list(engines.values())[place].split:
            raise HTTPException(404, f"the explorer is not possible with {WHOLE}")
        if seq.pictured:
            raise HTTPException(404, "the explorer reads text alone, and this request had images")
        if seq.serving.adapter:
            raise HTTPException(404, f"the explorer reads the model without adapter {seq.serving.adapter}")
        return RedirectResponse(f"/explore/{place}/#{_read(seq)}", 303, headers=HEADERS)

    app.include_router(router)
    for place, (name, engine) in enumerate(engines.items()):
        if engine.split:  # no thread but the engine's may call it
            continue
        opened_model = Opened(name, partial(getattr, engine, "m"))
        opened_model.open()
        opened_model.roles = {}  # they take long: `clearhead explore` finds them
        app.mount(f"/explore/{place}", make_app(Session([opened_model]), host))


def _read(seq: ServedSequence) -> str:
    """Return what the explorer is to read, as its address says it."""
    if seq.prompts.source is None:
        return urlencode({"ids": " ".join(map(str, seq.tokens))})
    result = seq.result
    text = "" if result is None else result.text or ""
    return urlencode({"ids": " ".join(map(str, seq.prompts.source[0].tolist())), "written": text})


def _state(engine: ServeEngine) -> dict[str, Any]:
    """Return what the page shows of one engine; texts are not in it."""
    figures, pool = engine.stats, engine.pool
    blocks = [] if pool is None else list(pool.blocks.items())
    return {
        "running": [_about(seq) for seq in list(engine.running)[:LONGEST_LIST]],
        "waiting": [_about(seq) for seq in list(engine.waiting)[:LONGEST_LIST]],
        "finished": [_about(seq) for seq in reversed(engine.finished)],
        "counts": {
            "running": len(engine.running),
            "waiting": len(engine.waiting) + len(engine.pooling.waiting),
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
                "used": pool.used,
                "kept": len(pool.idle),
                "free": len(pool.free),
                "tokens": engine.limits.block,
            }
            for group, pool in blocks
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


def _about(seq: ServedSequence) -> dict[str, Any]:
    times = seq.times
    first = None if times.first is None else times.first - times.arrived
    return {
        "number": seq.number,
        "read": seq.read,
        "prompt": seq.prompt_tokens,
        "cached": seq.cached,
        "written": len(seq.ids),
        "most": seq.most,
        "reason": seq.stop_reason if seq.done else None,
        "first": first,
        "seconds": None if times.ended is None else times.ended - times.arrived,
    }
