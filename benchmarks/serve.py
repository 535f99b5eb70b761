"""Serve: streams through the engine against our own offline batch, what exact rows cost, a shared prefix.

    python benchmarks/serve.py [--layers 12] [--streams 8] [--new 32] [--rounds 3] [--save]
    python benchmarks/serve.py --drafts [--layers 12] [--new 32] [--rounds 3] [--save]
    python benchmarks/serve.py --device cuda [--requests 256] [--new 512] [--peer [--peer-new 128]]
        [--save]

On the CPU: GPT-2's shape with random weights, float32, processor seconds of one thread. `clearhead` writes
all streams together, `exact rows` gives each row the same bits whatever else is in the step, `no step in C`
takes every token through the ragged row, `offline` is `m.generate` with a list of the same prompts. The
shared prefix is 90 % of a prompt of 640 tokens.

With `--drafts`: what lookups in the texts themselves give. Greedy texts of random weights go in circles, the
more so after a prompt that repeats itself: the most that drafts can give. Drawn at temperature 1, nothing
comes twice.

On a GPU: the shape of Qwen3 0.6B in bfloat16, requests of 100 to 1,024 tokens in that come all at once, and
at several rates. `--peer` adds transformers' `generate_batch` on the same shape and prompts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

import clearhead as ch
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from common import alternate, device_name, report, save

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("layers", 12), ("streams", 8), ("rounds", 3), ("requests", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--new", type=int, help="default: 32, on a GPU 512")
    parser.add_argument("--rates", type=float, nargs="*", default=[8.0, 16.0], help="requests per second")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--peer-new", type=int, help="tokens that the peer writes; default: as many as ours")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    given.new = given.new or (512 if given.device == "cuda" else 32)
    torch.manual_seed(0)
    name, run = ("gpu_serve", on_gpu) if given.device == "cuda" else ("cpu_serve", on_cpu)
    name, run = ("serve_guesses", drafts) if given.drafts else (name, run)
    results = run(given)
    if given.save:
        save(name, results)


if __name__ == "__main__":
    main()
