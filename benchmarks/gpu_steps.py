"""Decoding on a GPU by default, its steps alone, matmuls, and embeddings."""

from __future__ import annotations

import argparse
import functools
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
from benchmarks.common import case_command, case_parser, device_name, save
from benchmarks.gpu_decode import HALF, SHAPES, seconds_of, time_of

import clearhead as ch
from clearhead.run.generate.decode import prefill_fixed
from clearhead.run.generate.sequence import Prompts
from clearhead.run.kernels import triton_codes, triton_rows, triton_step
from clearhead.run.kernels.fixed_cache import MatmulConfig
from clearhead.run.kernels.kernels import MOST_BYTES, MOST_ROWS
from clearhead.run.kernels.prepare import prepared
from clearhead.run.kernels.steps import CompiledStep, slots_bucket
from clearhead.run.kernels.triton_rows import Cut
from clearhead.run.kernels.triton_step import Tile
from clearhead.run.quant.apply import quantize_model
from clearhead.run.quant.grid import Codes

# gpu_default ----------------------------------------------------------------------------------------------


SHAPE = ch.ModelConfig(
    family="decoder", vocab_size=151_936, d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8, d_head=128,
    d_ff=3072, gated=True, activation="silu", norm="rmsnorm", positions="rope", bias=False, qk_norm="head",
    tie_embeddings=True, max_positions=4096, rope_base=1e6,
)  # fmt: skip
LLAMA = ch.ModelConfig(
    family="decoder", vocab_size=32_000, d_model=2048, n_layers=22, n_heads=32, n_kv_heads=4, d_ff=5632,
    gated=True, activation="silu", norm="rmsnorm", positions="rope", bias=False, tie_embeddings=False,
    max_positions=2048,
)  # fmt: skip
# By name: the config, and the lengths of prompts.
GPU_DEFAULT_SHAPES = {"qwen3-0.6b": (SHAPE, (100, 1024)), "llama-1.1b": (LLAMA, (128, 128))}


def prompts(rows: int, seed: int, shape: str = "qwen3-0.6b") -> list[list[int]]:
    """Draw rows of tokens."""
    draw, (config, lengths) = random.Random(seed), GPU_DEFAULT_SHAPES[shape]
    return [[draw.randrange(config.vocab_size) for _ in range(draw.randint(*lengths))] for _ in range(rows)]


def run_gpu_default() -> None:
    """What `generate` gives on a GPU without any flag: prompts of unequal length, from the first call on.

        python benchmarks/run.py gpu_default [--shape qwen3-0.6b] [--rows 64] [--new 512] [--compiled]
            [--quantize int4] [--save]

    A decoder of Qwen3-0.6B's shape with random weights in bfloat16, and prompts of 100 to 1,024 tokens; or
    one of the shape of a Llama with 1.1 billion parameters, and prompts of 128; its weights in few bits
    where asked, rounded to the nearest. Each variant is timed in a first call and in a second one with
    other prompts: as it comes, step by step (`compile=False`), and with `--compiled` with `compile=True`
    too, which takes a minute at first. Seconds include reading the prompts.
    """
    parser = case_parser(run_gpu_default)
    parser.add_argument("--shape", choices=GPU_DEFAULT_SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[64])
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    given = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = ch.Transformer(GPU_DEFAULT_SHAPES[given.shape][0]).bfloat16().eval()
    if given.quantize:
        bits = {"int8": 8, "int4": 4}[given.quantize]
        model = quantize_model(model, ch.QuantPlan(bits, method="rtn")).model
    found = []
    for rows in given.rows:
        kept = {}
        for name, choice in {"default": None, "step by step": False, "compiled": True}.items():
            if name == "compiled" and not given.compiled:
                continue
            m = ch.Model(model)
            took = []
            for seed in (1, 2):
                asked = prompts(rows, seed, given.shape)
                torch.cuda.synchronize()
                start = time.perf_counter()
                answers = m.generate(asked, given.new, compile=choice)
                torch.cuda.synchronize()
                took.append(time.perf_counter() - start)
            kept[name] = [answer.ids for answer in answers]
            agree = sum(a == b for a, b in zip(kept[name], kept["default"])) / rows
            row = {
                "shape": given.shape,
                "rows": rows,
                "way": name,
                "weights": given.quantize or "bfloat16",
                "first_call_s": round(took[0], 2),
                "second_call_s": round(took[1], 2),
                "tokens_per_s_first": round(rows * given.new / took[0]),
                "tokens_per_s": round(rows * given.new / took[1]),
                "ms_a_step_with_prompts": round(1000 * took[1] / given.new, 2),
                "rows_equal_to_default": round(agree, 3),
                "device": device_name(),
                "torch": torch.__version__,
            }
            found.append(row)
            print(row, flush=True)
            del m
            torch.cuda.empty_cache()
    if given.save:
        save("_".join(filter(None, ("gpu_default", given.shape, given.quantize))), found)


# gpu_steps ------------------------------------------------------------------------------------------------


PROMPT, STEPS, ROUNDS = 128, 255, 5
BITS = {"int8": 8, "int4": 4}


def bandwidth() -> float:
    """Return bytes a second that a sum over 2 GB reads."""
    large = torch.ones(1 << 30, dtype=torch.bfloat16, device="cuda")
    large.sum()
    return large.nbytes / min(seconds_of(large.sum) for _ in range(ROUNDS))


def bytes_of(weights: str) -> float:
    """Return the size of all weights that a step reads; of few bits, with scales and offsets."""
    table = LLAMA.vocab_size * LLAMA.d_model  # of which a step reads one row; the head is as large
    layers = ch.cost(LLAMA).parameters.total - 2 * table
    if weights not in BITS:
        return 2 * (layers + table)
    plan = ch.QuantPlan(BITS[weights])
    layer, head = (plan.grid_of(bits).bits_per_weight for bits in (plan.bits, 8))
    return (layers * layer + table * head) / 8


@torch.inference_mode()
def step_seconds(model: ch.Transformer, rows: int) -> float:
    """Return the seconds of one step for so many rows."""
    step = CompiledStep(model, rows, slots_bucket(PROMPT + STEPS + 1), backend=None)
    took = []
    for _ in range(ROUNDS):
        given = Prompts(prompts(rows, rows, "llama-1.1b"))
        step.ids[:rows, 0] = prefill_fixed(model, given, step.cache).argmax(-1)
        took.append(seconds_of(lambda: step.run(STEPS)))
    return min(took) / STEPS


def run_gpu_steps() -> None:
    """Time the recorded steps of a decoder on a GPU alone, without the prompts: what bounds `generate` there.

        PYTHONPATH=src python benchmarks/run.py gpu_steps [--rows 1 2 32] [--few-rows 1]
            [--weights bfloat16 int8 int4] [--save]

    A Llama shape with 1.1 billion parameters, random weights, prompts of 128 tokens, 255 steps. Beside
    tokens a second stands the share of the step that reading all weights once would take, at the rate of a
    large sum.
    """
    parser = case_parser(run_gpu_steps)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 32])
    parser.add_argument("--few-rows", type=int, nargs="+", default=[1], help="the same, of few bits")
    parser.add_argument("--weights", nargs="+", default=["bfloat16", *BITS], choices=["bfloat16", *BITS])
    given = parser.parse_args()
    rate, found = bandwidth(), []
    print(f"a sum reads {rate / 1e12:.2f} TB/s", flush=True)
    for weights in given.weights:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = ch.Transformer(LLAMA).bfloat16().eval()
        if weights in BITS:
            model = quantize_model(model, ch.QuantPlan(BITS[weights], method="rtn")).model
        fast = prepared(model)
        for rows in given.few_rows if weights in BITS else given.rows:
            seconds = step_seconds(fast, rows)
            row = {
                "weights": weights,
                "rows": rows,
                "ms_a_step": round(seconds * 1e3, 4),
                "tokens_per_s": round(rows / seconds),
                "share_of_reading": round(bytes_of(weights) / rate / seconds, 3),
                "sum_tb_per_s": round(rate / 1e12, 2),
                "device": device_name(),
                "torch": torch.__version__,
            }
            found.append(row)
            print(row, flush=True)
        del model, fast
        torch.cuda.empty_cache()
    if given.save:
        save("gpu_steps", found)


# gpu_products ---------------------------------------------------------------------------------------------


PROCESSES = 12  # that compile
GROUP = 32


def cuts(rows: int, bits: int, n: int) -> Iterator[Tile | Cut]:
    """Yield how a product of `n` rows of a weight may be cut up."""
    if rows <= MOST_ROWS and bits == 16:
        ways = ((2, 2048, 4), (4, 2048, 8), (8, 2048, 8), (4, 2048, 4, 6), (2, 2048, 8, 3))
        yield from (Tile(*way) for way in ways)
    elif rows <= MOST_BYTES and bits < 16:
        ways = ((8, 64, 4), (16, 64, 8), (8, 32, 2), (8, 256, 8), (4, 128, 4))
        yield from (Tile(*way) for way in ways)
    else:
        for splits in (1, 2, 3, 4, 6, 8):
            yield Cut(64, splits)


def weight_of(n: int, d: int, bits: int) -> Any:
    """Draw a weight; of few bits, one whose codes and scales are drawn."""
    if bits == 16:
        return torch.randn(n, d, **HALF) / d**0.5
    words = torch.randint(-(2**31), 2**31 - 1, (n, d * bits // 32), dtype=torch.int32, device="cuda")
    return Codes(bits, d, words, torch.rand(n, d // GROUP, **HALF) / d**0.5, None)


def calls(
    name: str, rows: int, bits: int, count: int | None = None
) -> dict[object, list[Callable[[], object]]]:
    """Return for each cut the calls to time."""
    n, d = SHAPES[name]
    count = count or max(8, 400_000_000 * 8 // (n * d * bits))
    weights = [weight_of(n, d, bits) for _ in range(count)]
    x, gate = torch.randn(rows, 1, d, **HALF), "silu" if name == "both" else None
    scale = torch.ones(d, **HALF) if name in ("qkv", "both", "head") else None
    add = torch.randn(rows, 1, n, **HALF) if name in ("out", "down") else None
    form = MatmulConfig(None, scale, 1e-5, False, gate, add)
    made: dict[object, list[Callable[[], object]]] = {}
    for cut in cuts(rows, bits, n // (2 if gate else 1)):
        one = triton_step.linear if bits == 16 else triton_codes.linear
        way = triton_rows.linear if isinstance(cut, Cut) else one
        made[cut] = [functools.partial(way, x, w, form, cut) for w in weights]
        if isinstance(cut, Cut) and bits == 16:  # the norm comes before it
            made[cut] = [functools.partial(triton_rows.wide, x, w, None, gate, add, cut) for w in weights]
    if bits == 16:
        made["library"] = [functools.partial(nnf.linear, x, w) for w in weights]
    return made


def jobs(given: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Return all (layer, rows, bits)."""
    return [(name, rows, bits) for rows in given.rows for bits in given.bits for name in SHAPES]


@torch.inference_mode()
def run_gpu_products() -> None:
    """Time the matmuls of a decode step on a GPU, by how they are cut up: bfloat16, int8 and int4, 1 to 64
    rows.

        PYTHONPATH=src python benchmarks/run.py gpu_products [--rows 1 8 32] [--bits 16 8 4] [--save]

    The layers are those of a Llama with 1.1 billion parameters, with norm, gate and residual in the same
    kernel. Each is timed in a graph of calls whose weights together do not fit into the GPU's cache. Beside
    it stands the library's product alone, in bfloat16. Kernels are compiled first, by several processes.
    """
    parser = case_parser(run_gpu_products)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4])
    parser.add_argument("--compile", type=int, help="compile this share of the kernels only")
    given = parser.parse_args()
    if given.compile is not None:
        every = [call for job in jobs(given) for call in calls(*job, count=1).values()]
        for (call,) in every[given.compile :: PROCESSES]:
            try:
                call()
            except Exception as error:
                print("compile:", type(error).__name__, str(error)[:80], flush=True)
        return
    shares = [
        subprocess.Popen(case_command("gpu_products", *sys.argv[1:], "--compile", str(i)))
        for i in range(PROCESSES)
    ]
    for share in shares:
        share.wait()
    found = []
    for name, rows, bits in jobs(given):
        n, d = SHAPES[name]
        size = n * d * bits / 8 + (n * d // GROUP * 2 if bits < 16 else 0)
        took: dict[object, float] = {}
        for cut, made in calls(name, rows, bits).items():
            try:
                took[cut] = time_of(made)
            except Exception as error:
                print(name, cut, type(error).__name__, str(error)[:80], flush=True)
        library = took.pop("library", None)
        best = sorted(took.items(), key=lambda item: item[1]) or [("library", library or 0.0)]
        shown = "  ".join(f"{cut} {time:.1f}" for cut, time in best[:3])
        beside = f" | library {library:.1f}" if library else ""
        print(f"{name} {rows} int{bits} {size / best[0][1] * 1e-3:,.0f} GB/s | {shown}{beside}", flush=True)
        row = {"layer": name, "rows": rows, "bits": bits, "library_us": library, "device": device_name()}
        found.append({**row, "us": [[str(cut), time] for cut, time in best]})
    if given.save:
        save("gpu_products", found)


# gpu_embed ------------------------------------------------------------------------------------------------


GPU_EMBED_ROUNDS = 4


def gpu_embed_seconds_of(job: Callable[[], object]) -> float:
    """Return the least seconds of a job, after one that warms up."""
    job()
    took = []
    for _ in range(GPU_EMBED_ROUNDS):
        start = time.perf_counter()
        job()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return min(took)


def drawn(folder: Path, to: Path) -> Path:
    """Return a copy of a directory with weights that are drawn."""
    from transformers import AutoConfig, AutoModel

    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(to)
    return to


def run_gpu_embed() -> None:
    """Embeddings of texts of 4 to 250 words on a GPU, next to sentence-transformers on the same directory.

        PYTHONPATH=src python benchmarks/run.py gpu_embed DIR [--texts 2048] [--drawn] [--save]

    DIR is a sentence encoder such as all-MiniLM-L6-v2. With `--drawn` only its config and tokenizer are
    read and weights are drawn, which takes as long. Both run as they come, without any option, in float32.
    """
    parser = case_parser(run_gpu_embed)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=2048)
    parser.add_argument("--drawn", action="store_true")
    given = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    draw = random.Random(0)
    words = [word for word in (given.folder / "vocab.txt").read_text().split() if word.isalpha()]
    texts = [" ".join(draw.choices(words, k=draw.randint(4, 250))) for _ in range(given.texts)]
    with tempfile.TemporaryDirectory() as room:
        folder = drawn(given.folder, Path(room) / "drawn") if given.drawn else given.folder
        ours, theirs = ch.load(folder, device="cuda"), SentenceTransformer(str(folder), device="cuda")
        apart = (torch.from_numpy(theirs.encode(texts)) - ours.embed(texts)).abs().max()
        mine, peer = (
            gpu_embed_seconds_of(lambda: ours.embed(texts)),
            gpu_embed_seconds_of(lambda: theirs.encode(texts)),
        )
    row = {
        "texts": given.texts,
        "texts_per_s": round(given.texts / mine),
        "ratio_to_sentence_transformers": round(peer / mine, 3),
        "vectors_apart": float(apart),
        "weights": "drawn" if given.drawn else str(given.folder.name),
        "device": device_name(),
        "torch": torch.__version__,
    }
    print(row)
    if given.save:
        save("gpu_embed", row)
