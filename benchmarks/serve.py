"""Serving: mixed requests, throughput, and load over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks.common import alternate, case_parser, device_name, report, save
from tests.serve import mixes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import clearhead as ch
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits

# serve_mixes ----------------------------------------------------------------------------------------------


RESULT = pathlib.Path(__file__).parent / "results" / "serve_mixes.json"


def bytes_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet))
    return tokenizer


def run_serve_mixes() -> None:
    """Serve random mixes of requests, and compare each with the same request alone.

        python benchmarks/run.py serve_mixes [LAST] [FIRST]

    Families, lengths, seeds, every option of a request, cancellations, shared beginnings, pools so small
    that requests are preempted; in turn plain, with draft tokens of the text itself, of a draft model, with
    keys in 8 bits (in float64, where no last bit decides over a code) and with adapters that come and go; and
    of `generate`, an engine, a file and a beam of one, which must give one answer.
    Ends with an error at the first request that differs, or at a block that is not given back. With FIRST,
    the recorded run is continued.
    """
    last, first = ([*map(int, sys.argv[1:])] + [2000, 0][len(sys.argv) - 1 :])[:2]
    tokenizer, start = bytes_tokenizer(), time.process_time()
    recorded, *others = json.loads(RESULT.read_text())["results"]
    figures = Counter(recorded["figures"] if first else {})
    before = figures.pop("seconds", 0)
    served = {shape: mixes.model(shape, tokenizer) for shape in mixes.SHAPES}
    ways = mixes.ways(served)
    for number in range(first, last):
        shape, way = list(ways)[number % len(ways)]
        engine = ways[shape, way](number)
        figures["mixes"] += 1
        figures[way] += 1
        figures["requests"] += sum(engine.stats.ended.values())
        figures["cancelled"] += engine.stats.ended["cancelled"]
        figures["preempted"] += engine.stats.preempted
        figures["new tokens"] += engine.stats.new_tokens
        figures["draft tokens"] += engine.stats.drafted
        figures["tokens found in the pool"] += engine.stats.prefix_found
        if number % 50 == 49 or number == last - 1:
            seconds = before + round(time.process_time() - start)
            body = {"figures": {**figures, "seconds": seconds}, "different": 0, "models": list(served)}
            save("serve_mixes", [{"device": device_name(), **body}, *others])
            print(dict(figures), flush=True)


# serve ----------------------------------------------------------------------------------------------------


QWEN3 = {
    "vocab_size": 151_936, "d_model": 1024, "n_layers": 28, "n_heads": 16, "n_kv_heads": 8, "d_head": 128,
    "d_ff": 3072, "max_positions": 4096, "positions": "rope", "rope_base": 1e6, "norm": "rmsnorm",
    "gated": True, "activation": "silu", "bias": False, "qk_norm": "head", "tie_embeddings": True,
}  # fmt: skip


def write(engine: ServeEngine, prompts: list[list[int]], new: int, **options: object) -> list:
    asked = {"max_new_tokens": new, "stop_tokens": [], **options}
    seqs = [engine.submit(prompt, asked) for prompt in prompts]
    while engine.busy:
        engine.step()
    assert all(seq.error is None for seq in seqs)
    return seqs


def on_cpu(given: argparse.Namespace) -> list[dict[str, object]]:
    torch.set_num_threads(1)
    m = ch.Model(ch.Transformer(ch.preset("gpt2").replace(n_layers=given.layers)).eval())
    draw = torch.Generator().manual_seed(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return torch.randint(50_000, (count, length), generator=draw).tolist()

    room = {"cache_tokens": 16_384, "waiting": 10_000}
    engines = {
        "clearhead": ServeEngine(m, Limits(**room)),
        "exact rows": ServeEngine(m, Limits(**room, exact=True)),
        "no step in C": ServeEngine(m, Limits(**room, rows=False)),
    }
    results = []
    for streams in (given.streams, 1):
        ways = {
            name: lambda one=one, n=streams: write(one, prompts(n, 16), given.new) and None
            for name, one in engines.items()
        }
        ways["offline"] = lambda n=streams: m.generate(prompts(n, 16), given.new) and None
        seconds = alternate(ways, given.rounds, clock=time.process_time)
        title = f"CPU serving, GPT-2 shape of {given.layers} layers float32, {streams} streams, 16 in"
        results.append(report(f"{title}, {given.new} out", seconds, streams * given.new))
    shared, usual = prompts(1, 576)[0], engines["clearhead"]
    write(usual, [shared + prompts(1, 64)[0]], 1)
    seconds = alternate(
        {
            "clearhead": lambda: write(usual, [shared + prompts(1, 64)[0]], 1) and None,
            "no shared prefix": lambda: write(usual, prompts(1, 640), 1) and None,
        },
        given.rounds,
        clock=time.process_time,
    )
    results.append(report("time to the first of 1 token after 640, 90 % of them shared", seconds, 1))
    return results


def drafts(given: argparse.Namespace) -> list[dict[str, object]]:
    torch.set_num_threads(1)
    m = ch.Model(ch.Transformer(ch.preset("gpt2").replace(n_layers=given.layers)).eval())
    prompts = [prompt * 4 for prompt in torch.randint(50_000, (8, 8)).tolist()]
    engines = {"clearhead": ServeEngine(m), "no drafts": ServeEngine(m, Limits(lookup=0))}
    results = []
    for streams, temperature in ((1, 0.0), (1, 1.0), (4, 0.0)):
        ways = {
            name: lambda one=one, n=streams, t=temperature: (
                write(one, prompts[:n], given.new, temperature=t) and None
            )
            for name, one in engines.items()
        }
        before = vars(engines["clearhead"].stats).copy()
        seconds = alternate(ways, given.rounds, clock=time.process_time)
        after = vars(engines["clearhead"].stats)
        title = f"drafts, GPT-2 shape of {given.layers} layers float32, {streams} streams, {given.new} out"
        results.append(report(f"{title}, temperature {temperature:g}", seconds, streams * given.new))
        results[-1] |= {name: after[name] - before[name] for name in ("drafted", "accepted")}
    return results


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile, in milliseconds."""
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return {"p50": round(1000 * statistics.median(ordered), 2), "p99": round(1000 * p99, 2)}


def load(engine: ServeEngine, prompts: list[list[int]], new: int, rate: float) -> dict[str, object]:
    """Let requests arrive at a rate, and report speed, time to the first token and between tokens."""
    seqs, start, left = [], time.monotonic(), list(prompts)
    while left or engine.busy:
        while left and time.monotonic() - start >= len(seqs) / rate:
            seqs.append(engine.submit(left.pop(0), {"max_new_tokens": new, "stop_tokens": []}))
        if engine.busy:
            engine.step()
    took = time.monotonic() - start
    return {
        "requests per second that came": rate if rate < 1e6 else "all at once",
        "tokens per second": round(len(seqs) * new / took, 1),
        "ms to the first token": spread([seq.times.first - seq.times.arrived for seq in seqs]),
        "ms between tokens": spread([gap for seq in seqs for gap in seq.times.gaps]),
    }


def on_gpu(given: argparse.Namespace) -> list[dict[str, object]]:
    with torch.device("cuda"):
        model = ch.Transformer(ch.ModelConfig(family="decoder", **QWEN3)).to(torch.bfloat16).eval()
    draw = random.Random(0)
    lengths = [draw.randint(100, 1024) for _ in range(given.requests)]
    prompts = [[draw.randrange(1000, 150_000) for _ in range(length)] for length in lengths]
    limits = Limits(tokens=8192, running=given.requests, waiting=10_000, cache_tokens=given.requests * 1600)
    engine, results = ServeEngine(ch.Model(model), limits), []
    assert engine.model_runner.decode_runner is not None, "the recorded steps do not suit this model"
    start = time.monotonic()
    write(engine, prompts, 32)  # steps of all sizes are recorded
    for rows in (1, 2, 4, 8, 16, 32, 64, 128):
        write(engine, prompts[:rows], 32)
    print(f"steps of all sizes recorded in {time.monotonic() - start:.1f} s", flush=True)
    title = (
        f"GPU serving, Qwen3 0.6B shape bfloat16, {given.requests} requests of 100-1024 in, {given.new} out"
    )
    for rate in (1e9, *given.rates):
        # Prompts that were read before are in the pool: these are others.
        new = [[draw.randrange(1000, 150_000) for _ in range(length)] for length in lengths]
        found = {"title": title, "device": device_name(), "torch": torch.__version__}
        results.append({**found, **load(engine, new, given.new, rate)})
        print(results[-1], flush=True)
    if given.peer:
        few = given.peer_new or given.new
        results[0][f"transformers generate_batch, {few} out, tokens per second"] = peer(prompts, few)
        print(results[0], flush=True)
    return results


def peer(prompts: list[list[int]], new: int) -> float:
    """Return the speed of transformers' own continuous batches, with paged SDPA."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        attn_implementation="paged|sdpa",
    )  # fmt: skip
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    asked = GenerationConfig(max_new_tokens=new, eos_token_id=-1, pad_token_id=0, do_sample=False)
    start = time.monotonic()
    model.generate_batch(inputs=prompts, generation_config=asked)
    return round(len(prompts) * new / (time.monotonic() - start), 1)


def run_serve() -> None:
    """Serve: streams through the engine against our own offline batch, what exact rows cost, a shared prefix.

        python benchmarks/run.py serve [--layers 12] [--streams 8] [--new 32] [--rounds 3] [--save]
        python benchmarks/run.py serve --drafts [--layers 12] [--new 32] [--rounds 3] [--save]
        python benchmarks/run.py serve --device cuda [--requests 256] [--new 512] [--peer [--peer-new 128]]
            [--save]

    On the CPU: GPT-2's shape with random weights, float32, processor seconds of one thread. `clearhead`
    writes all streams together, `exact rows` gives each row the same bits whatever else is in the step, `no
    step in C` takes every token through the ragged row, `offline` is `m.generate` with a list of the same
    prompts. The shared prefix is 90 % of a prompt of 640 tokens.

    With `--drafts`: what lookups in the texts themselves give. Greedy texts of random weights go in
    circles, the more so after a prompt that repeats itself: the most that drafts can give. Drawn at
    temperature 1, nothing comes twice.

    On a GPU: the shape of Qwen3 0.6B in bfloat16, requests of 100 to 1,024 tokens in that come all at once,
    and at several rates. `--peer` adds transformers' `generate_batch` on the same shape and prompts.
    """
    parser = case_parser(run_serve)
    for name, value in (("layers", 12), ("streams", 8), ("rounds", 3), ("requests", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--new", type=int, help="default: 32, on a GPU 512")
    parser.add_argument("--rates", type=float, nargs="*", default=[8.0, 16.0], help="requests per second")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--peer-new", type=int, help="tokens that the peer writes; default: as many as ours")
    parser.add_argument("--drafts", action="store_true")
    given = parser.parse_args()
    given.new = given.new or (512 if given.device == "cuda" else 32)
    torch.manual_seed(0)
    name, run = ("gpu_serve", on_gpu) if given.device == "cuda" else ("cpu_serve", on_cpu)
    name, run = ("serve_guesses", drafts) if given.drafts else (name, run)
    results = run(given)
    if given.save:
        save(name, results)


# serve_load -----------------------------------------------------------------------------------------------


ROUNDS = 5  # of usual load and overload, in turn
TOKENS = 80  # of each open stream
LONGEST = 900.0  # seconds after which a request counts as hung


def started(folder: Path, *options: str, port: int = 0) -> tuple[subprocess.Popen[str], int]:
    """Start a server; return its process and its port."""
    command = [sys.executable, "-m", "clearhead", "serve", str(folder), "--port", str(port), "--drain", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
    for line in process.stderr:
        if found := re.search(r"http://127.0.0.1:(\d+)/", line):
            return process, int(found[1])
    raise RuntimeError(f"the server did not start: exit code {process.wait()}")


@contextlib.contextmanager
def server(folder: Path, *options: str) -> Iterator[int]:
    """Serve a model; give the port."""
    process, port = started(folder, *options)
    try:
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=60)


class Answer:
    """What one request got: status, headers and body, with the seconds at which its parts came."""

    def __init__(self) -> None:
        self.start, self.status, self.head, self.parts = time.monotonic(), 0, "", []

    @property
    def seconds(self) -> float:
        """From the request to the end of the answer."""
        return self.parts[-1][0] - self.start

    @property
    def first(self) -> float:
        """From the request to the first byte of the body."""
        return self.parts[0][0] - self.start

    @property
    def text(self) -> str:
        raw = b"".join(part for _, part in self.parts)
        if "transfer-encoding: chunked" not in self.head.lower():
            return raw.decode()
        chunks, at = [], 0
        while at < len(raw):
            line, _, _ = raw[at:].partition(b"\r\n")
            start, size = at + len(line) + 2, int(line, 16)
            chunks.append(raw[start : start + size])
            at = start + size + 2
        return b"".join(chunks).decode()


async def ask(port: int, path: str, body: dict | None = None, opened: asyncio.Event | None = None) -> Answer:
    """Send a request and read its answer to the end; `opened` is set when the body begins."""
    answer = Answer()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    try:
        writer.write(head.encode() + raw)
        answer.head = (await reader.readuntil(b"\r\n\r\n")).decode()
        answer.status = int(answer.head.split()[1])
        answer.parts.append((time.monotonic(), b""))
        while part := await reader.read(1 << 16):
            answer.parts.append((time.monotonic(), part))
            if opened is not None:
                opened.set()
    finally:
        writer.close()
    return answer


def serve_load_spread(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the largest of seconds, in milliseconds."""
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    found = {"p50": statistics.median(ordered), "p99": p99, "most": ordered[-1]}
    return {name: round(1000 * value, 1) for name, value in found.items()}


async def hold(port: int, count: int) -> dict[str, object]:
    """Open so many streams; none ends before all have begun."""
    body = {"max_tokens": TOKENS, "temperature": 0, "stream": True, "min_tokens": TOKENS}
    begun = [asyncio.Event() for _ in range(count)]
    tasks = []
    for number, event in enumerate(begun):
        tasks.append(
            asyncio.create_task(ask(port, "/v1/completions", {**body, "prompt": f"{number}"}, event))
        )
        await asyncio.sleep(0.002)
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), LONGEST)
    still = sum(not task.done() for task in tasks)
    health = [(await ask(port, "/health")).seconds for _ in range(20)]
    answers = await asyncio.wait_for(asyncio.gather(*tasks), LONGEST)
    assert all(one.status == 200 and "data: [DONE]" in one.text for one in answers)
    return {
        "open at once": still,
        "ended whole": len(answers),
        "new tokens per second": round(
            TOKENS * count / max(one.parts[-1][0] - answers[0].start for one in answers)
        ),
        "ms to the first byte": serve_load_spread([one.first for one in answers]),
        "ms of health meanwhile": serve_load_spread(health),
    }


async def arrive(port: int, rate: float, seconds: float) -> list[Answer | BaseException]:
    """Send requests at a steady rate, whatever comes back."""
    body = {"prompt": "Once upon a time", "max_tokens": 24, "min_tokens": 24, "temperature": 0}
    tasks, start = [], time.monotonic()
    for number in range(max(1, int(rate * seconds))):
        await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
        tasks.append(asyncio.create_task(asyncio.wait_for(ask(port, "/v1/completions", body), LONGEST)))
    return await asyncio.gather(*tasks, return_exceptions=True)


async def overload(port: int, seconds: float, running: int) -> dict[str, object]:
    """Ask as fast as the server can answer, and then ten times as fast, by turns."""

    async def closed() -> int:
        count, until = 0, time.monotonic() + seconds / 2
        body = {"prompt": "Once upon a time", "max_tokens": 24, "min_tokens": 24, "temperature": 0}
        while time.monotonic() < until:
            count += (await ask(port, "/v1/completions", body)).status == 200
        return count

    await asyncio.gather(*(closed() for _ in range(running)))
    rate = sum(await asyncio.gather(*(closed() for _ in range(running)))) / (seconds / 2)
    found: dict[int, list[Answer]] = {1: [], 10: []}
    hung = 0
    for _ in range(ROUNDS):
        for times, kept in found.items():
            got = await arrive(port, 0.9 * rate if times == 1 else times * rate, seconds / ROUNDS)
            hung += sum(isinstance(one, BaseException) for one in got)
            kept += [one for one in got if isinstance(one, Answer)]
    made = {times: [one.seconds for one in kept if one.status == 200] for times, kept in found.items()}
    refused = [one for one in found[10] if one.status == 429]
    assert all("retry-after: 1" in one.head.lower() for one in refused)
    one, ten = serve_load_spread(made[1]), serve_load_spread(made[10])
    return {
        "requests per second that it takes": round(rate, 1),
        "statuses at 1 x": dict(Counter(answer.status for answer in found[1])),
        "statuses at 10 x": dict(Counter(answer.status for answer in found[10])),
        "ms of accepted at 1 x": one,
        "ms of accepted at 10 x": ten,
        "p99 at 10 x over 1 x": round(ten["p99"] / one["p99"], 2),
        "ms of refusals": serve_load_spread([one.seconds for one in refused]),
        "hung or broken": hung,
    }


async def health(port: int, length: int) -> dict[str, object]:
    """Ask for health all the while a long prompt is read."""
    body = {"prompt": [7] * length, "max_tokens": 1, "temperature": 0}
    task = asyncio.create_task(ask(port, "/v1/completions", body))
    seconds = []
    while not task.done():
        answer = await ask(port, "/health")
        assert answer.status == 200
        seconds.append(answer.seconds)
        await asyncio.sleep(0.01)
    assert task.result().status == 200
    return {
        "seconds of the prompt": round(task.result().seconds, 1),
        "asked": len(seconds),
        "ms": serve_load_spread(seconds),
    }


async def leave(port: int, times: int) -> dict[str, object]:
    """Go away in the middle of a stream; count the steps until the blocks are free, by the metrics."""

    async def figure(name: str) -> float:
        text = (await ask(port, "/metrics")).text
        return float(re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)[1])

    steps = []
    for _ in range(times):
        begun = asyncio.Event()
        body = {
            "prompt": "x" * 1000,
            "max_tokens": 3000,
            "min_tokens": 3000,
            "temperature": 0,
            "stream": True,
        }
        task = asyncio.create_task(ask(port, "/v1/completions", body, begun))
        await begun.wait()
        assert await figure("vllm:kv_cache_usage_perc") > 0
        before = await figure("clearhead:engine_steps_total")
        task.cancel()
        while await figure("vllm:kv_cache_usage_perc") > 0:
            await asyncio.sleep(0)
        steps.append(int(await figure("clearhead:engine_steps_total") - before))
    return {"steps from going away to free blocks": steps}


def small(folder: Path, name: str, **sizes: int) -> Path:
    """Write a model with random weights that reads bytes."""
    config = ch.ModelConfig(
        vocab_size=256, positions="rope", norm="rmsnorm", gated=True, activation="silu", bias=False, **sizes
    )
    ch.Model(ch.Transformer(config), bytes_tokenizer()).save(folder / name)
    return folder / name


def run_serve_load() -> None:
    """Load a server: open streams, overload, health during a long prompt, a client that goes away.

        python benchmarks/run.py serve_load [streams overload health] [--streams 1000] [--seconds 20] [--save]

    Each part starts `clearhead serve` in a process of its own, with one thread, on a small model with
    random weights, and asks it over HTTP from this process. `overload`: as many requests arrive in a second
    as the server takes when all its rows are busy, and then ten times as many; latencies are those of
    accepted requests. These are seconds of the wall: `load of the machine` says how many processes wanted
    its processors meanwhile.
    """
    parser = case_parser(run_serve_load)
    parser.add_argument("parts", nargs="*", default=["streams", "overload", "health"])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    results: list[dict[str, object]] = []

    def keep(title: str, found: dict[str, object]) -> None:
        results.append({"title": title, **found, "load of the machine": round(os.getloadavg()[0], 1)})
        print(json.dumps(results[-1], indent=1), flush=True)
        if given.save:
            save("serve_load", results)

    with tempfile.TemporaryDirectory() as work:
        tiny = small(Path(work), "tiny", d_model=32, n_layers=1, n_heads=2, max_positions=512)
        wide = small(Path(work), "wide", d_model=256, n_layers=4, n_heads=4, max_positions=16_384)
        many = str(given.streams)
        if "streams" in given.parts:
            options = ("--max-running", many, "--max-waiting", many, "--step-tokens", "2048")
            with server(tiny, *options) as port:
                keep(f"{many} open streams", asyncio.run(hold(port, given.streams)))
        if "overload" in given.parts:
            with server(wide, "--max-running", "8") as port:
                keep("overload, 8 rows, 1 may wait", asyncio.run(overload(port, given.seconds, 8)))
        if "health" in given.parts:
            with server(wide) as port:
                keep("health during a prompt of 8192 tokens", asyncio.run(health(port, 8192)))
                keep("a client that goes away", asyncio.run(leave(port, 10)))
