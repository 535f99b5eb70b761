"""What `/metrics` shows, in the text format of Prometheus, under vLLM's names so that its boards work."""

import threading
from collections.abc import Callable, Iterator, Mapping

from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.jobs import Job

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

    def keep(self, job: Job) -> None:
        """Count a request that has ended."""
        times = job.times
        if times.ended is None or times.begun is None:
            return
        with self._lock:
            self._count("e2e_request_latency_seconds", times.ended - times.asked)
            self._count("request_queue_time_seconds", times.begun - times.asked)
            if times.first is not None and times.last is not None:
                self._count("time_to_first_token_seconds", times.first - times.asked)
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
        ("engine_steps_total", "counter"): lambda e: e.figures.steps,
        ("num_requests_running", "gauge"): lambda e: len(e.running),
        ("num_requests_waiting", "gauge"): lambda e: len(e.waiting) + len(e.readings.waiting),
        ("kv_cache_usage_perc", "gauge"): lambda e: 0.0 if e.pool is None else e.pool.usage,
        ("prefix_cache_queries_total", "counter"): lambda e: e.figures.prefix_asked,
        ("prefix_cache_hits_total", "counter"): lambda e: e.figures.prefix_found,
        ("prompt_tokens_total", "counter"): lambda e: e.figures.prompt_tokens,
        ("generation_tokens_total", "counter"): lambda e: e.figures.new_tokens,
        ("num_preemptions_total", "counter"): lambda e: e.figures.preempted,
        ("spec_decode_num_draft_tokens_total", "counter"): lambda e: e.figures.guessed,
        ("spec_decode_num_accepted_tokens_total", "counter"): lambda e: e.figures.guessed_right,
    }
    for (name, kind), value in figures.items():
        full = f"{'clearhead' if name in OURS else 'vllm'}:{name}"
        yield f"# TYPE {full} {kind}"
        for model, engine in engines.items():
            yield f'{full}{{model_name="{_quoted(model)}"}} {value(engine)}'
    yield "# TYPE vllm:request_success_total counter"
    for model, engine in engines.items():
        for reason, count in list(engine.figures.ended.items()):
            labels = f'model_name="{_quoted(model)}",finished_reason="{reason}"'
            yield f"vllm:request_success_total{{{labels}}} {count}"


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
