"""What one device does in a step on a mesh: the figures of `ch.cost`, divided as `division` says."""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from clearhead.core.config import ModelConfig
from clearhead.core.steps import Step
from clearhead.learn.parallel.division import (
    SELECTIVE,
    SELECTIVE_GATED,
    MeshSizes,
    is_expert,
    parts_of,
    tensor_split,
    weights_of,
)
from clearhead.variants.costs import DTYPES, Cost, chunk_rows, cost

Checkpointing = Literal["none", "selective", "full"]
NONE = (0.0, 0.0)  # logits of a stage without the head
BLOCK = re.compile(r"(?:encoder\.)?blocks\.(\d+)\.")


@dataclass(frozen=True)
class Work:
    """What is trained in one step, and how."""

    config: ModelConfig
    length: int
    rows: int  # of the whole batch
    precision: str = "bfloat16"  # of products: float32, bfloat16, float16, float8
    checkpointing: Checkpointing = "none"
    optimizer: str = "adamw"
    loss_chunk: int | None = None  # positions scored at a time; 0: all; None: as `train` chooses
    logit_bytes: float = 0.0  # bytes of a logit at its peak; 0: as `train` has it, compiled
    sequence: bool = True  # `tensor` divides the tokens between products, and the logits
    cast: bool = True  # sharded weights are cast before they are gathered, and the residual stream is narrow
    interleave: int = 1  # pieces of the model that each rank of `pipeline` has

    @property
    def dtype(self) -> str:
        """The dtype of activations: products in float8 read and write bfloat16."""
        return "bfloat16" if self.precision == "float8" else self.precision

    @property
    def size(self) -> int:
        """Bytes of one value of it."""
        return DTYPES[self.dtype]

    @property
    def gathered(self) -> int:
        """Bytes of a weight that is gathered."""
        return self.size if self.cast else 4

    @property
    def as_trained(self) -> Self:
        """The same as `train` does it: the residual stream is whole, and weights are gathered in float32."""
        return dataclasses.replace(self, sequence=False, cast=False)

    def autocast(self, mesh: MeshSizes) -> bool:
        """Return True if weights are float32 until a product takes them, and the residual stream is too."""
        return mesh.sharing == 1 or not self.cast

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch, of the stack that feeds the head."""
        return self.rows * self.config.main.n_tokens(self.length)


@dataclass(frozen=True)
class Amounts:
    """The figures of some steps on one device, for one micro-batch; they can be added."""

    whole: int = 0  # weights that it computes with
    stored: int = 0  # weights that it stores, as the others of its group store the rest
    kept: float = 0.0  # bytes for the backward pass, without checkpointing
    selective: float = 0.0  # the same with selective checkpointing
    full: float = 0.0  # the same with full checkpointing: the input of a block
    copies: float = 0.0  # bytes of weights cast by autocast
    products: float = 0.0  # FLOPs of linear layers, forward and backward
    selective_again: float = 0.0  # those of the forward pass that selective checkpointing computes again
    full_again: float = 0.0  # the same with full checkpointing: all but the last product, which nobody reads
    cast: float = 0.0  # values that products read and write, forward and backward
    attention: float = 0.0  # FLOPs of attention that are computed: half of the square where it is causal
    head: float = 0.0  # FLOPs of the head, forward and backward
    stream: float = 0.0  # bytes of the residual stream [tokens, D]
    joints: int = 0  # sublayers: `tensor` gathers the stream before each and scatters it behind
    keys: float = 0.0  # bytes of keys and values that `context` passes on
    routed: float = 0.0  # bytes of tokens that `expert` sends to experts and back

    def __add__(self, other: "Amounts") -> "Amounts":
        return Amounts(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def times(self, count: int) -> "Amounts":
        """Return the figures of so many equal blocks."""
        return Amounts(*(value * count for value in vars(self).values()))


@dataclass(frozen=True)
class PipelineStage:
    """One rank of `pipeline`: its layers, and what is before and behind them."""

    blocks: tuple[tuple[Amounts, int], ...]  # of each kind, and how many there are
    ends: Amounts  # embeddings, the last norm, the head
    logits: float  # values of logits at a time; 0 where the stage has no head
    all_logits: float  # of a micro-batch

    @functools.cached_property
    def total(self) -> Amounts:
        """The sum over all of it."""
        return sum((block.times(count) for block, count in self.blocks), self.ends)

    @property
    def count(self) -> int:
        """The number of blocks."""
        return sum(count for _, count in self.blocks)

    @property
    def largest(self) -> Amounts:
        """The figures of the block with the most weights."""
        return max((block for block, _ in self.blocks), key=lambda block: (block.whole, block.kept))


@functools.lru_cache(maxsize=64)
def costs_of(config: ModelConfig, length: int, rows: int, dtype: str, autocast: bool) -> Cost:
    """Return `ch.cost`, kept: many meshes ask for the same."""
    return cost(config, length, rows, dtype, autocast=autocast)


@functools.lru_cache(maxsize=64)
def _groups(
    config: ModelConfig, length: int, rows: int, dtype: str, autocast: bool
) -> tuple[list[Step], list[list[Step]], list[int]]:
    """Return the steps outside the blocks, those of each kind of block, and the kind of each block."""
    ends: list[Step] = []
    blocks: dict[str, list[Step]] = {}
    for step in costs_of(config, length, rows, dtype, autocast).steps:
        found = BLOCK.match(step.name)
        (blocks.setdefault(found[0], []) if found else ends).append(step)
    kinds: dict[tuple[object, ...], int] = {}
    of_block: list[int] = []
    different: list[list[Step]] = []
    for name, inner in blocks.items():
        own = ((step.name.removeprefix(name), step.parameters, step.kept, step.forward) for step in inner)
        key = (name.startswith("encoder"), *own)
        if key not in kinds:
            kinds[key] = len(different)
            different.append(inner)
        of_block.append(kinds[key])
    return ends, different, of_block


def stages_of(work: Work, mesh: MeshSizes, rows: int, memory: float) -> list[PipelineStage]:
    """Divide a model among the ranks of `pipeline`, for micro-batches of `rows`."""
    ends, different, of_block = _groups(work.config, work.length, rows, work.dtype, work.autocast(mesh))
    kinds = [_figures(inner, work, mesh, rows, block=True) for inner in different]
    made, count = [], len(of_block)
    for rank in range(mesh.pipeline):
        start, stop = (math.ceil(count * n / mesh.pipeline) for n in (rank, rank + 1))
        last, first = rank == mesh.pipeline - 1, rank == 0
        mine = [step for step in ends if (last if _behind(step) else first)]
        if last and not first:  # a tied table is there twice: the first stage has it too
            mine = [_untied(step) for step in mine]
        logits = next((_logits(step, work, mesh, memory) for step in mine if step.name == "head.out"), NONE)
        inner = tuple((kinds[kind], n) for kind, n in Counter(of_block[start:stop]).items())
        made.append(PipelineStage(inner, _figures(mine, work, mesh, rows, block=False), *logits))
    return made


def _behind(step: Step) -> bool:
    return step.part == "head" or step.name == "norm"


def _untied(step: Step) -> Step:
    return dataclasses.replace(step, parameters=step.parameters or step.weights)


def _logits(out: Step, work: Work, mesh: MeshSizes, memory: float) -> tuple[float, float]:
    """Return how many logits one device has at a time, and of a whole micro-batch."""
    positions = every = out.m / mesh.context
    if work.config.readout.head in ("lm", "mlm") and work.loss_chunk != 0:
        positions = min(positions, work.loss_chunk or chunk_rows(out.n, memory))
    width = math.ceil(out.n / (mesh.tensor if work.sequence else 1))
    return positions * width, every * width


def _figures(steps: Sequence[Step], work: Work, mesh: MeshSizes, rows: int, block: bool) -> Amounts:
    """Add up the steps of one block, or of what lies outside the blocks."""
    config, size, context = work.config, work.size, mesh.context
    spec = config.stacks[0] if steps and steps[0].name.startswith("encoder.") else config.main
    tokens = spec.n_tokens(work.length)
    names = SELECTIVE_GATED if spec.gated else SELECTIVE
    stream = rows * tokens * spec.d_model / context  # values of the residual stream
    totals: dict[str, float] = dict.fromkeys((f.name for f in dataclasses.fields(Amounts)), 0)
    for step in steps:
        last = step.name.rsplit(".", 1)[-1]
        split, kept = tensor_split(step)
        parts = parts_of(step, mesh.tensor, config)
        divided = context * (parts if kept != "whole" and (work.sequence or kept != "sequence") else 1)
        whole, stored = weights_of(step, mesh, config)
        totals["whole"] += whole
        totals["stored"] += stored
        totals["kept"] += step.kept / divided
        if work.autocast(mesh) and size < 4 and step.gradients > 1:
            totals["copies"] += step.weights * size / (parts if split != "whole" else 1)
        if block and last in names:
            totals["selective"] += step.m * step.n * step.count * size / (context * parts)
        if step.weights:
            work_done = step.forward / (context * (parts if split != "whole" else 1))
            totals["head" if step.name == "head.out" else "products"] += work_done * (1 + step.gradients)
            totals["selective_again"] += work_done if block and last not in names else 0
            totals["full_again"] += work_done if block and last != "down" else 0
            totals["cast"] += 3 * step.m * (step.k + step.n) / (context * parts) if block else 0
        elif step.forward:
            met = step.n if last == "scores" else step.k
            half = 0.5 if spec.causal and met == tokens and step.part == "attention" else 1.0
            totals["attention"] += half * step.forward * (1 + step.gradients) / (context * parts)
        totals["joints"] += block and last in ("out", "down") and ".shared." not in step.name
        if block and last in ("k", "v"):
            totals["keys"] += step.m * step.n * size / (context * parts)
        if is_expert(step) and last == "down":
            totals["routed"] += 2 * step.m * step.n * size / context
    if block:
        totals["stream"] = stream * size
        wide = 4 if work.autocast(mesh) else size
        totals["full"] = stream * wide / (mesh.tensor if work.sequence else 1)
        totals["selective"] += totals["full"]
    else:
        totals["selective"] = totals["full"] = totals["kept"]
    return Amounts(**totals)  # type: ignore[arg-type]
