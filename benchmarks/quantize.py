"""Quantized weights: perplexity and speed, matmuls, GGUF, and threads of a decode step."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import case_parser, save
from torch import Tensor, nn

import clearhead as ch
from clearhead.inside.quantize import (
    TextFigures,
    log_probabilities,
    text_figures,
    text_sums,
    weight_bytes,
)
from clearhead.run.kernels import library
from clearhead.run.kernels.native import Pointers
from clearhead.run.quant.apply import QuantPlan, linear_names, moments, quantize_model
from clearhead.run.quant.grid import Grid, nearest_codes
from clearhead.run.quant.layers import QuantizedLinear, quantized_parts
from clearhead.run.quant.methods import CALIBRATED

# quantize -------------------------------------------------------------------------------------------------


LENGTH = 512
BATCH = 4
MEMORY = 4e9  # bytes of log-probabilities to keep
VARIANTS = {
    "int8 rtn": QuantPlan(8, method="rtn"),
    "int8 hqq": QuantPlan(8, method="hqq"),
    "int4 rtn": QuantPlan(4, method="rtn"),
    "int4 rtn, symmetric": QuantPlan(4, symmetric=True, method="rtn"),
    "int4 hqq": QuantPlan(4, method="hqq"),
    "int4 hqq, symmetric": QuantPlan(4, symmetric=True, method="hqq"),
    "int4 imatrix": QuantPlan(4),
    "int4 awq": QuantPlan(4, method="awq"),
    "int4 gptq": QuantPlan(4, method="gptq"),
    "int4 gptq, symmetric": QuantPlan(4, symmetric=True, method="gptq"),
}
RESULT = Path(__file__).parent / "results" / "quantize.json"


@torch.no_grad()
def reorder(model: ch.Transformer, seed: int = 0) -> None:
    """Put channels in another order, in all layers alike: no weight changes, nor what the model computes."""
    generator = torch.Generator().manual_seed(seed)

    def order(size: int) -> Tensor:
        return torch.randperm(size, generator=generator).to(next(model.parameters()).device)

    def put(rows: Tensor | None, columns: Tensor | None, *weights: Tensor) -> None:
        for weight in weights:
            moved = weight if rows is None else weight[rows]
            weight.copy_(moved if columns is None else moved[:, columns])

    stream = order(model.config.d_model)  # the residual stream, which most layers read or write
    tables = [model.main.embedding.front.tokens.weight, model.head.out.weight]
    put(None, stream, *(tables[:1] if tables[0] is tables[1] else tables))
    put(stream, None, model.main.norm.weight)
    for block in model.main.blocks:
        attention, feedforward = block.attention, block.feedforward
        reading = attention.q, attention.k, attention.v, feedforward.gate, feedforward.up
        put(None, stream, *(layer.weight for layer in reading))
        put(stream, None, attention.out.weight, feedforward.down.weight)
        put(stream, None, block.attention_residual.before.weight, block.feedforward_residual.before.weight)
        inner = order(feedforward.up.out_features)
        put(inner, None, feedforward.gate.weight, feedforward.up.weight)
        put(None, inner, feedforward.down.weight)
        width = attention.d_value  # values keep to their head, and several query heads read one
        values = torch.stack([order(width) + width * head for head in range(attention.n_kv_heads)])
        put(values.flatten(), None, attention.v.weight)
        shared = attention.n_heads // attention.n_kv_heads
        starts = width * torch.arange(attention.n_heads, device=values.device)[:, None]
        put(None, ((values % width).repeat_interleave(shared, 0) + starts).flatten(), attention.out.weight)


@torch.no_grad()
def share_on_grid(model: ch.Transformer) -> float:
    """Return the share of groups of 32 weights of the blocks that have at most 16 different numbers."""
    found, count = 0, 0
    for name in linear_names(model):
        weight = model.get_submodule(name).weight
        if "blocks" in name and weight.shape[1] % 32 == 0:
            groups = weight.reshape(-1, 32).sort(-1).values
            steps = groups.diff(dim=-1) > 1e-6 * groups.abs().amax(-1, keepdim=True)
            found, count = found + int((steps.sum(-1) < 16).sum()), count + len(groups)
    return found / count


def widened(model: ch.Transformer) -> ch.Transformer:
    """Put the numbers that codes stand for in their place, once: the same arithmetic, in less time."""
    for name, part in quantized_parts(model).items():
        wide: nn.Module
        if isinstance(part, QuantizedLinear):
            with torch.device("meta"):
                wide = nn.Linear(part.in_features, part.out_features, bias=part.bias is not None)
            wide.bias = part.bias
        else:
            with torch.device("meta"):
                wide = nn.Embedding(part.out_features, part.in_features)
        wide.weight = nn.Parameter(part.weight, requires_grad=False)
        model.set_submodule(name, wide)
    return model


def rows(m: ch.Model, path: Path, tokens: int, device: torch.device) -> list[Tensor]:
    """Return the first tokens of a file, 0: all, in batches of rows [B, 512]."""
    text = path.read_text(encoding="utf-8")
    text, most = (text[: 8 * tokens], tokens) if tokens else (text, None)
    ids = m.text_tokenizer.encode(text, add_special_tokens=False).ids[:most]
    count = len(ids) // LENGTH
    return list(torch.tensor(ids[: count * LENGTH], device=device).view(count, LENGTH).split(BATCH))


class Reference:
    """What the model in float32 says of the test rows: kept where memory allows, else computed again."""

    def __init__(self, model: ch.Transformer, test: list[Tensor]) -> None:
        self.model, self.test = model, test
        self.kept: list[Tensor] | None = None
        if 4 * model.config.vocab_size * sum(one.numel() for one in test) <= MEMORY:
            with torch.no_grad():
                self.kept = [log_probabilities(model, ids) for ids in test]

    @torch.no_grad()
    def measured(self, model: ch.Transformer) -> TextFigures:
        """Return the figures of a model beside this one; logits of a batch are held at a time."""
        sums = torch.zeros(4, dtype=torch.float64)
        for number, ids in enumerate(self.test):
            log = log_probabilities(self.model, ids) if self.kept is None else self.kept[number]
            sums += text_sums(log, log if model is self.model else log_probabilities(model, ids), ids)
        return text_figures(sums)


def keep(title: str, name: str, line: dict[str, object]) -> None:
    """Add one variant to what earlier runs saved."""
    before = json.loads(RESULT.read_text())["results"] if RESULT.exists() else []
    earlier = next((one for one in before if one["title"] == title), {"title": title, "rows": {}})
    earlier["rows"][name] = line
    save("quantize", [*(one for one in before if one["title"] != title), earlier])


def run_quantize() -> None:
    """Measure what rounding the weights of SmolLM2-135M-Instruct costs on WikiText-2: perplexity and KL.

        python benchmarks/run.py quantize MODEL --data WIKITEXT2 [--tokens 4096] [--device cuda] [--save]

    MODEL is a directory in Hugging Face's layout or the GGUF file itself. The weights that can be had here
    come from a file that is rounded to 4 bits in groups of 32 already (Q4_1), so rounding them to the same
    grid costs next to nothing. They are moved off that grid first, unless `--as-stored`, without changing
    what the model computes, nor any weight: channels of the residual stream, of values and of feed-forwards
    are put in another order, in all layers alike. A new group then has weights of many old ones, each with
    its own scale, and is as wide as groups are. The first lines say that this is so: the share of groups of
    32 weights that have at most 16 different numbers, and perplexity, before and after. Calibration is on
    valid.txt and figures are on test.txt, rows of 512, all of them with `--tokens 0`.

    Each variant is printed, and with `--save` kept, as soon as it is measured.
    """
    parser = case_parser(run_quantize)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--tokens", type=int, default=4096, help="of test.txt; 0: all")
    parser.add_argument("--calibration", type=int, default=8192, help="tokens of valid.txt; 0: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--as-stored", action="store_true", help="keep the weights on the grid of their file")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    m = ch.load(options.folder, "float32", options.device)
    device = next(m.model.parameters()).device
    test = rows(m, options.data / "test.txt", options.tokens, device)
    valid = rows(m, options.data / "valid.txt", options.calibration, device)
    stored = Reference(m.model, test).measured(m.model)
    print(
        f"as stored: perplexity {stored.perplexity:.3f}, on a grid {share_on_grid(m.model):.1%}", flush=True
    )
    if not options.as_stored:
        reorder(m.model)
    title = "weights as stored (Q4_1)" if options.as_stored else "channels in another order"
    count, seen_tokens = sum(map(len, test)), sum(one.numel() for one in valid)
    title += f", {count} rows of {LENGTH} tokens, calibrated on {seen_tokens:,}, on {device.type}"
    reference = Reference(m.model, test)
    float32, size = reference.measured(m.model), weight_bytes(m.model)
    grid = share_on_grid(m.model)
    print(f"{title}\nfloat32: perplexity {float32.perplexity:.3f}, on a grid {grid:.1%}", flush=True)
    if options.save:
        keep(title, "float32", {**float32.to_dict(), "bytes": size, "change": 0.0})
    needed = any(VARIANTS[name].method in CALIBRATED for name in options.variants)
    seen = moments(m.model, valid, linear_names(m.model)) if needed else None
    for name in options.variants:
        start = time.perf_counter()
        given = seen if VARIANTS[name].method in CALIBRATED else None
        model = quantize_model(m.model, VARIANTS[name], seen=given).model
        size = weight_bytes(model)
        found = reference.measured(widened(model))
        change = found.perplexity / float32.perplexity - 1
        print(f"{name}: {found.perplexity:.3f} ({change:+.2%}), KL {found.divergence:.4f}, "
              f"{size / 1e6:.0f} MB, {time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
        if options.save:
            keep(title, name, {**found.to_dict(), "bytes": size, "change": round(change, 5)})


# products -------------------------------------------------------------------------------------------------


GRIDS = {"int8": Grid(8, 32), "int4": Grid(4, 32), "int4 with offsets": Grid(4, 32, symmetric=False)}


def run_products() -> None:
    """Time matmuls with weights of 32, 8 and 4 bits on one thread, by each way `step.c` can be compiled.

    Those of float32 also by PyTorch, which takes more threads unless the environment says one.

        OPENBLAS_NUM_THREADS=1 python benchmarks/run.py products [--rows 1 4 16] [--size 49152 576]
        [--rounds 7]

    Processor time, the ways in turn, the quickest round: other work on the machine only ever adds.
    """
    parser = case_parser(run_products, saves=False)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--size", type=int, nargs=2, default=[49152, 576])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    compiler = shutil.which("cc")
    assert compiler and library.library() is not None
    ways = {
        name or "this processor's": library.opened(compiler, *library.allowed(name))
        for name in ("", *library.limits())
    }
    layer = torch.nn.Linear(options.size[1], options.size[0], bias=False)
    layers = {"float32": layer}
    for name, grid in GRIDS.items():
        layers[name] = QuantizedLinear(nearest_codes(grid, layer.weight.detach()), None, None)
    for rows in options.rows:
        x, out = torch.randn(rows, options.size[1]), torch.empty(rows, options.size[0])
        for kind, one in layers.items():
            pointers = Pointers()
            fields = pointers.linear(one)
            places = (ctypes.addressof(fields), x.data_ptr(), out.data_ptr())
            jobs: dict[str, Callable[[], object]] = {
                name: partial(way.clearhead_linear, *places, rows, 1, 0) for name, way in ways.items()
            }
            if one is layer:
                jobs["PyTorch's"] = partial(torch.mm, x, layer.weight.detach().T, out=out)
            best = dict.fromkeys(jobs, float("inf"))
            for _ in range(options.rounds):
                for name, job in jobs.items():
                    start = time.thread_time()
                    job()
                    best[name] = min(best[name], time.thread_time() - start)
            rates = ", ".join(
                f"{name} {rows * layer.weight.numel() / took / 1e9:.1f}" for name, took in best.items()
            )
            print(f"{rows} rows, {kind}: {rates} billion products a second", flush=True)


# gguf_llama -----------------------------------------------------------------------------------------------


PROMPTS = (
    *("Once upon a time", "The capital of France is", "def add(a, b):", "1, 2, 3, 4,", "Dear Sir or Madam,"),
    *("Water boils at", "The three primary colours are", "Q: What is 12 + 30?\nA:", "It's a café in Paris"),
    *("To be, or not to be", "In 1969, humans first", "<html>\n<body>", "The mitochondria is the"),
    *("She opened the door and", "Рим — это", "日本の首都は", "import numpy as np\n", "E = mc^2 means"),
    *("My favourite recipe:\n\n1.", "The quick brown fox"),
)


def llama_server(path: Path, length: int = 256) -> Any:
    """Return llama.cpp's server over a file, in one thread, with keys and values in float32."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path, given.n_ctx, given.n_parallel, given.warmup = str(path), length, 1, False
    given.cache_type_k = given.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
    given.n_gpu_layers, given.verbosity = 0, 0
    return xllamacpp.Server(given)


def llama_greedy(server: Any, prompt: str | list[int], tokens: int) -> tuple[list[int], list[float]]:
    """Return llama.cpp's greedy tokens after a prompt, and log-probabilities of those that end a character.

    Its server leaves the others out of what it says of log-probabilities, and of its text.
    """
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "top_k": 1, "logprobs": 1}
    whole = {"return_tokens": True, "verbose": True}
    made = server.handle_completions(asked | whole | {"cache_prompt": False, "repeat_penalty": 1.0})
    found = (made["choices"][0]["logprobs"] or {}).get("content") or []
    return made["__verbose"]["tokens"], [one["logprob"] for one in found]


def run_gguf_llama() -> None:
    """Greedy tokens of one GGUF file here and in llama.cpp (the xllamacpp wheel), both ways.

        python -m benchmarks.gguf_llama SmolLM2-135M-Instruct.Q4_1.gguf --tokens 24

    The file is opened here and written again in F32, which llama.cpp opens: the same numbers in float. Both
    continue the same texts, each by its own tokenizer, and the tokens are compared.
    """
    parser = case_parser(run_gguf_llama, saves=False)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args()
    m = ch.load(given.file)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "ours.gguf"
        m.save(written, "float32")
        server = llama_server(written)
        equal, first, size = 0, [], 0
        for prompt in PROMPTS:
            theirs, _ = llama_greedy(server, prompt, given.tokens)
            ours = m.generate(prompt, given.tokens).ids[: len(theirs)]
            size += len(theirs)
            equal += ours == theirs
            if ours != theirs:
                first.append({"prompt": prompt, "ours": ours, "theirs": theirs})
    print(json.dumps({"prompts": len(PROMPTS), "equal": equal, "tokens": size, "differing": first}))


# ranks ----------------------------------------------------------------------------------------------------


RESULTS = Path(__file__).parent / "results" / "cpu_ranks.json"
SETTINGS = {
    **{"model.d_model": 128, "model.n_layers": 4, "model.n_heads": 4, "model.max_positions": 128},
    **{"data.batch_size": 16, "train.steps": 16, "train.log_every": 1, "train.samples": 0},
    **{"train.validate_every": 16, "train.precision": "float32", "train.device": "cpu", "train.seed": 0},
}


def speed(data: Path, out: Path, processes: int, mesh: str) -> float:
    """Train; return the median over the steps of tokens per second."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launch if processes > 1 else []), "-m", "clearhead", "train", str(data)]
    given = {**SETTINGS, "train.threads": 2 // processes, **({f"parallel.{mesh}": processes} if mesh else {})}
    for name, value in given.items():
        command += ["--set", f"{name}={value}"]
    threads = {"OMP_NUM_THREADS": str(2 // processes)}
    subprocess.run(
        [*command, "--out", str(out)], check=True, capture_output=True, env={**os.environ, **threads}
    )
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return statistics.median(line["tokens_per_second"] for line in lines if line["event"] == "stepped")


def summary(turns: list[dict[str, float]]) -> dict[str, object]:
    """Return the ratios of the speeds of two processes to that of one."""
    ratios = {name: sorted(turn[name] / turn["alone"] for turn in turns) for name in ("data", "shard")}
    ranges = {
        name: {"median": statistics.median(found), "least": found[0], "most": found[-1]}
        for name, found in ratios.items()
    }
    return {"date": date.today().isoformat(), "settings": SETTINGS, "efficiency": ranges, "turns": turns}


def run_ranks() -> None:
    """Two processes of one thread against one process of two threads, on a small decoder.

    The same steps on the same rows, in turns: `PYTHONPATH=src python benchmarks/run.py ranks --save`. Each
    turn gives a ratio. A busy machine slows both sides of a turn, so that the range of ratios says more
    than either speed.
    """
    parser = case_parser(run_ranks)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    turns = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        data = folder / "text.txt"
        data.write_text("the quick brown fox jumps over the lazy dog and sings of the wide blue sea\n" * 2000)
        for turn in range(given.turns):
            rates = {
                name: speed(data, folder / f"{name}{turn}", processes, mesh)
                for name, processes, mesh in (("alone", 1, ""), ("data", 2, "data"), ("shard", 2, "shard"))
            }
            turns.append(rates)
            print(json.dumps({name: round(rate) for name, rate in rates.items()}), flush=True)
            if given.save:
                RESULTS.write_text(json.dumps(summary(turns), indent=1) + "\n")
    print(json.dumps(summary(turns)["efficiency"]))
