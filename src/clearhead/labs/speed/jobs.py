"""What is timed (the first token of a prompt, decoding, reading inputs, a training step), and its limit.

A machine's limit is measured: bytes read and floating-point operations computed in a second. The least that a
job can take follows from what it must do: to read the weights, and while decoding the keys and values of a
row, once for each step; and to compute the FLOPs that `ch.cost` counts. Quantized weights are multiplied as
whole numbers, whose limit is not measured: there, reading alone counts.
"""

import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from clearhead.errors import refuse
from clearhead.inside.long_text import quickest
from clearhead.inside.quantize import weight_bytes
from clearhead.inside.results import Result
from clearhead.run.api import Model
from clearhead.run.kernels.library import library
from clearhead.run.kernels.native import NativeLinear
from clearhead.run.quant.layers import quantized_parts
from clearhead.variants.costs import Cost, cost

# Bytes that are read, more than any cache holds, and the width of the matrices that are multiplied. For a
# smaller model, a matrix of its size is read as often: caches hold of it what they hold of the model.
READ = {"cpu": 2**28, "cuda": 2**31}
WIDTH = {"cpu": 1536, "cuda": 8192}
REPEATS = 25  # the quickest counts: a busy machine only ever adds


@dataclass(frozen=True)
class Machine(Result):
    """A device, with what it reads and computes in a second in a model's dtype."""

    name: str
    threads: int  # of a processor; 0 on a GPU
    dtype: str
    bandwidth: float  # bytes per second, of the quickest of a few ways to read a matrix
    arithmetic: float  # operations per second, of a matmul of two large matrices

    def least(self, read: float, flops: float) -> float:
        """Return the seconds that reading so many bytes and computing so much take at least."""
        return max(read / self.bandwidth, flops / self.arithmetic)

    def best(self, other: "Machine") -> "Machine":
        """Return the better figures of two measurements: a busy machine only ever takes away."""
        bandwidth, arithmetic = max(self.bandwidth, other.bandwidth), max(self.arithmetic, other.arithmetic)
        return replace(self, bandwidth=bandwidth, arithmetic=arithmetic)


@torch.no_grad()
def measure_machine(device: torch.device, dtype: torch.dtype, weights: float = math.inf) -> Machine:
    """Time how a matrix, as large as so many bytes of weights, is read, and a matmul of two matrices.

    It is read by a matmul with a vector in PyTorch, by a sum, and on a CPU by our own matmul: libraries
    reach half of what the memory gives on some processors, and the limit is what any of them reaches.
    """
    kind = device.type if device.type in READ else "cpu"
    rows = max(1, int(min(READ[kind], weights)) // (8192 * dtype.itemsize))
    matrix = torch.ones(rows, 8192, dtype=dtype, device=device)
    vector = torch.ones(8192, dtype=dtype, device=device)
    times = max(1, READ[kind] // matrix.nbytes)

    ways: list[Callable[[], Tensor]] = [lambda: torch.mv(matrix, vector), matrix.sum]
    if device.type == "cpu" and dtype == torch.float32 and library() is not None:
        layer = nn.Linear(8192, rows, bias=False, device="meta")
        layer.weight = nn.Parameter(matrix, requires_grad=False)
        ours = NativeLinear(layer)
        ways.append(lambda: ours(vector[None]))

    def read_by(way: Callable[[], Tensor]) -> None:
        for _ in range(times):
            way()

    read = min(quickest(partial(read_by, way), device, REPEATS) for way in ways)
    left, right = torch.ones(2, WIDTH[kind], WIDTH[kind], dtype=dtype, device=device)
    multiplied = quickest(lambda: left @ right, device, REPEATS)
    on_gpu = device.type == "cuda"
    return Machine(
        torch.cuda.get_device_name(device) if on_gpu else f"CPU {platform.machine()}",
        0 if on_gpu else torch.get_num_threads(),
        str(dtype).removeprefix("torch."),
        times * matrix.nbytes / read,
        2 * WIDTH[kind] ** 3 / multiplied,
    )


# The jobs -------------------------------------------------------------------------------------------------


Kind = Literal["first", "decode", "read", "train"]
KINDS: tuple[Kind, ...] = ("first", "decode", "read", "train")
PROMPT = 16  # tokens of a prompt, or of a source, before decoding
TRAINED = (4, 128)  # rows and tokens of a training step
TEXTS_READ = (48, 4, 160)  # texts that are read, tokens of the shortest and of the longest


@dataclass(frozen=True)
class SpeedSizes:
    """How much of each job is done."""

    prompt: int = 512  # tokens before the first token
    new: int = 32  # tokens that each row of a batch writes
    batches: tuple[int, ...] = (1, 8)


@dataclass(frozen=True)
class SpeedJob:
    """One thing to time, with what it reads and computes at least."""

    name: str
    kind: Kind
    tokens: int  # written or read in one run, or pictures
    read: float  # bytes
    flops: float
    ids: Tensor  # [B, T]; pictures [B, C, H, W]
    new: int = 0
    texts: tuple[str, ...] = ()


def jobs_of(m: Model, kinds: tuple[Kind, ...], sizes: SpeedSizes) -> list[SpeedJob]:
    """Return the jobs that suit a model, of these kinds."""
    config, jobs = m.config, list[SpeedJob]()
    writes = config.head == "lm" and config.family != "encoder"
    room = config.max_positions if config.bounded else max(sizes.prompt, PROMPT) + sizes.new
    prompt, new = min(sizes.prompt, room - 1), min(sizes.new, room - PROMPT)
    refuse(
        writes and "decode" in kinds and new < 1,
        f"the model has {room} positions: decoding is timed after {PROMPT} tokens, and has no room",
    )
    if writes and "first" in kinds:
        jobs.append(_writing(m, f"first token after {prompt}", "first", 1, prompt, 1))
    if writes and "decode" in kinds:
        jobs += [
            _writing(m, f"decode {new}, batch {batch}", "decode", batch, PROMPT, new)
            for batch in sizes.batches
        ]
    if not writes and "read" in kinds and config.input != "frames":
        jobs.append(_reading(m))
    if "train" in kinds and config.input == "tokens" and not quantized_parts(m.model):
        jobs.append(_training(m))
    if quantized_parts(m.model):
        jobs = [replace(job, flops=0.0) for job in jobs]
    refuse(not jobs, f"none of {', '.join(kinds)} suits this model: a model that writes has first and decode")
    return jobs


def bytes_read(m: Model) -> float:
    """Return the bytes of weights that one pass reads; a table of tokens is read where it is the head too."""
    counted, config = cost(m.config, length=1).parameters, m.config
    whole = config.head == "lm" and config.tie_embeddings
    share = (counted.active - (0 if whole else counted.embedding)) / counted.total
    return share * weight_bytes(m.model)


def _priced(m: Model, rows: int, length: int, source: int | None = None) -> Cost:
    weight = next(m.model.parameters())
    dtype = str(weight.dtype).removeprefix("torch.")
    both = m.config.family == "encoder-decoder"
    return cost(m.config, length, rows, dtype, (source or length) if both else None)


def _drawn(m: Model, rows: int, length: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(m.config.vocab_size, (rows, length), generator=random)


def _writing(m: Model, name: str, kind: Kind, rows: int, prompt: int, new: int) -> SpeedJob:
    whole = _priced(m, rows, new if m.config.encoder is not None else prompt + new - 1, prompt)
    cached = whole.memory.kv_cache + whole.memory.cross_cache
    return SpeedJob(
        name,
        kind,
        rows * new,
        new * bytes_read(m) + (new - 1) * cached,
        _least_flops(whole, rows * new),
        _drawn(m, rows, prompt),
        new,
    )


def _least_flops(whole: Cost, scored: int) -> float:
    """Return what writing takes at least: scores of `scored` tokens alone, and none for tokens to come."""
    forward, tokens = whole.flops.forward, whole.flops.tokens
    squares = sum(
        2 * step.m * step.n * step.k * step.count
        for step in whole.steps
        if step.name.startswith("blocks.") and step.name.endswith((".attention.scores", ".attention.z"))
    )
    return forward.total - squares / 2 - forward.head * (1 - scored / tokens)


def _reading(m: Model) -> SpeedJob:
    """Texts of many lengths, or pictures."""
    config, (count, shortest, longest) = m.config, TEXTS_READ
    if config.input == "patches":
        random = torch.Generator().manual_seed(0)
        pictures = torch.rand(16, config.n_channels, *config.stacks[0].image_size, generator=random)
        figures = cost(config, batch=16)
        return SpeedJob("16 pictures", "read", 16, bytes_read(m), figures.flops.forward.total, pictures)
    refuse(m.tokenizer is None, "the model has no tokenizer: reading is timed on texts; add --tokenizer FILE")
    longest = min(longest, config.max_positions - 2) if config.bounded else longest
    ratio = (longest / shortest) ** (1 / (count - 1))
    lengths = [round(shortest * ratio**place) for place in range(count)]
    lengths = [lengths[(7 * place) % count] for place in range(count)]  # mixed, as texts come
    drawn = _drawn(m, count, longest)
    assert m.tokenizer is not None
    texts = tuple(m.tokenizer.decode(row[:n].tolist()) or "a" for row, n in zip(drawn, lengths))
    flops = sum(_priced(m, 1, n).flops.forward.total for n in lengths)
    title = f"{count} texts of {shortest} to {longest} tokens"
    return SpeedJob(title, "read", sum(lengths), bytes_read(m), flops, drawn, texts=texts)


def _training(m: Model) -> SpeedJob:
    rows, length = TRAINED
    length = min(length, m.config.max_positions) if m.config.bounded else length
    figures = _priced(m, rows, length)
    moved = 16 * figures.parameters.total  # weights, gradients and two moments, read or written
    return SpeedJob(
        f"training step, {rows} x {length}",
        "train",
        rows * length,
        moved,
        figures.flops.training,
        _drawn(m, rows, length),
    )
