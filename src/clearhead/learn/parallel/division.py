"""How a mesh divides a model, stated once, as data, and what one device then does in a step.

A mesh has the axes of `plan.AXES`. Two of them divide by the steps of `ch.cost`: `tensor` as `TENSOR` says of
each step, and `expert` the weights of experts. `pipeline` divides the layers, `context` the tokens of a row;
those of `plan.ROWS` divide the rows of a batch. What is left of a weight is divided by dimension 0 among the
ranks of `plan.HELD`, as `fully_shard` does. `split` splits the layers of a model as `TENSOR` says.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from clearhead.core.config import ModelConfig
from clearhead.core.config.kinds import Full, Windowed
from clearhead.errors import nearest, refuse
from clearhead.learn.parallel import AXES, HELD, ROWS, ParallelPlan
from clearhead.learn.parallel.adapters import Adapters
from clearhead.variants.costs import DTYPES, Cost, chunk_rows, cost
from clearhead.variants.steps import Step

Split = Literal["columns", "rows", "vocabulary", "heads", "sequence", "whole"]
# The last name of a step, or its last two where they differ: its weights, and what it keeps for the backward
# pass. "whole": every rank of the axis has all of it. The inputs of a matmul by columns are gathered first.
TENSOR: dict[str, tuple[Split, Split]] = {
    "front.tokens": ("vocabulary", "whole"),
    "q": ("columns", "heads"),
    "k": ("columns", "heads"),
    "v": ("columns", "heads"),
    "beta": ("columns", "heads"),
    "decay": ("columns", "heads"),
    "q_norm": ("whole", "heads"),
    "k_norm": ("whole", "heads"),
    "scores": ("whole", "heads"),
    "z": ("whole", "heads"),
    "sink": ("columns", "heads"),
    "out": ("rows", "heads"),
    "gate": ("columns", "columns"),
    "up": ("columns", "columns"),
    "down": ("rows", "columns"),
    "feedforward.dropout": ("whole", "columns"),
    "attention_residual.dropout": ("whole", "sequence"),
    "cross_residual.dropout": ("whole", "sequence"),
    "feedforward_residual.dropout": ("whole", "sequence"),
    "before": ("whole", "sequence"),
    "inside": ("whole", "sequence"),
    "after": ("whole", "sequence"),
    "norm": ("whole", "sequence"),
    "router": ("whole", "sequence"),
    "sorted": ("whole", "sequence"),
    "encoder.hidden": ("whole", "sequence"),
    "head.out": ("vocabulary", "whole"),
}
# Matmuls whose result stays with selective checkpointing; attention's answer stays too.
SELECTIVE = ("q", "v", "up", "down", "z")
SELECTIVE_GATED = ("q", "v", "gate", "down", "z")


class MeshSizes(NamedTuple):
    """The size of each axis of a mesh."""

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self)

    @property
    def sharing(self) -> int:
        """Number of ranks that share the weights that are not experts'."""
        return math.prod(getattr(self, axis) for axis in HELD)

    @property
    def rows(self) -> int:
        """Number of parts that the rows of a batch are divided into."""
        return math.prod(getattr(self, axis) for axis in ROWS)

    def stride(self, axis: str) -> int:
        """Return how many devices apart the neighbours on an axis are."""
        return math.prod(getattr(self, inner) for inner in AXES[AXES.index(axis) + 1 :])

    def __str__(self) -> str:
        """Return the axes that divide something: "shard 8, tensor 2"."""
        sizes = [f"{name} {size}" for name, size in self._asdict().items() if size > 1]
        return ", ".join(sizes) or "one device"


def read_mesh(text: str) -> MeshSizes:
    """Return the mesh in a text such as "shard=8,tensor=2"."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (text.strip() for text in part.partition("="))
        refuse(
            not equals or not size.isdecimal() or int(size) < 1,
            f'mesh "{text}" is not understood: write axes and sizes, such as shard=8,tensor=2',
        )
        check_axis(axis)
        sizes[axis] = int(size)
    return MeshSizes(**sizes)


def check_axis(axis: str) -> None:
    """Refuse an axis that no mesh has."""
    refuse(
        axis not in MeshSizes._fields,
        f'a mesh has no axis "{axis}"{nearest(axis, MeshSizes._fields)}: '
        f"choose from {', '.join(MeshSizes._fields)}",
    )


def refusal(config: ModelConfig, mesh: MeshSizes, length: int) -> str | None:
    """Return why a mesh cannot divide a model on rows of `length`, in one line, or None."""
    for stack in config.stacks:
        heads = {stack.n_heads, *(len(stack.heads_of(pruned)) for pruned in stack.pruned_heads)}
        for name, size in [*(("heads", count) for count in sorted(heads)), ("d_ff", stack.d_ff)]:
            if size % mesh.tensor:
                return f"tensor {mesh.tensor} does not divide {name} {size}: {_choices(size)}"
        kinds = [kind for kind in stack.kinds if not (kind.masked and kind.shares)]
        if mesh.tensor > 1 and kinds:
            return (
                f"tensor {mesh.tensor} is estimated for softmax attention over keys of each head, "
                f"and a layer is {kinds[0]}: use 1"
            )
        kinds = [kind for kind in stack.kinds if not isinstance(kind, Full | Windowed)]
        if mesh.context > 1 and kinds:
            return (
                f"context {mesh.context} divides full and window layers, and the model has {kinds[0]}: use 1"
            )
    if line := whole_refusal(config, mesh):
        return line
    layers = sum(stack.n_layers for stack in config.stacks)
    if mesh.pipeline > layers:
        return f"pipeline {mesh.pipeline} is more than the {layers} layers: choose {layers} or less"
    if mesh.context > 1 and (length % (2 * mesh.context) or config.main.input == "patches"):
        return f"context {mesh.context} must cut rows of {length} into {2 * mesh.context} equal chunks: use 1"
    experts = config.n_experts or 1
    if experts % mesh.expert:
        return f"expert {mesh.expert} does not divide n_experts {experts}: {_choices(experts)}"
    return None


def whole_refusal(config: ModelConfig, mesh: MeshSizes | ParallelPlan) -> str | None:
    """Return which layers of a model a mesh cannot divide, in one line, or None: MTP layers and shortcuts."""
    divided = max(mesh.tensor, mesh.pipeline, mesh.context, mesh.expert) > 1
    if config.n_mtp_layers and divided:
        return f"n_mtp_layers {config.n_mtp_layers}: {mesh} does not divide MTP layers: use data or shard"
    names = ("smear_gate", "bigrams", "input_skips", "mirror_skips", "value_residual", "value_embeddings")
    name = next((name for name in names if getattr(config, name)), None)
    if name is not None and (divided or (mesh.shard or 1) > 1):
        return f"{name}: {mesh} divides neither the embedding nor the layers of it: use data"
    return None


def _choices(size: int) -> str:
    return f"choose from {', '.join(str(n) for n in range(1, min(size, 128) + 1) if size % n == 0)}"


def tensor_split(step: Step) -> tuple[Split, Split]:
    """Return how the weights of a step and what it keeps are divided by `tensor`."""
    names = step.name.split(".")
    return TENSOR.get(".".join(names[-2:])) or TENSOR.get(names[-1]) or ("whole", "whole")


def is_expert(step: Step) -> bool:
    """Return True if the weights of a step are those of experts."""
    return ".experts." in step.name


def parts_of(step: Step, tensor: int, config: ModelConfig) -> int:
    """Return among how many ranks of `tensor` the heads or columns of a step are divided.

    Key and value heads fewer than the ranks are copied, so that every rank has one.
    """
    if tensor > 1 and step.name.rsplit(".", 1)[-1] in ("k", "v", "k_norm"):
        stack = next(s for s in config.stacks if step.name.startswith(f"{s.prefix}blocks."))
        return math.gcd(tensor, stack.kv_heads_of(step.name.rsplit(".", 1)[0]))
    return tensor


def weights_of(step: Step, mesh: MeshSizes, config: ModelConfig) -> tuple[int, int]:
    """Count the weights of a step that one rank computes with, and those that it stores.

    The first rank stores the most: rows of dimension 0 are divided and rounded up.
    """
    if not step.parameters:
        return 0, 0
    rows = _first_dimension(step, config)
    (split, _), tensor, sharing = tensor_split(step), parts_of(step, mesh.tensor, config), mesh.sharing
    width, inputs = step.parameters // rows, step.weights // rows  # what is left of the width is a bias
    if is_expert(step):
        width, inputs, sharing = width // mesh.expert, inputs // mesh.expert, sharing // mesh.expert
    if split in ("columns", "vocabulary"):
        rows = math.ceil(rows / tensor)
    elif split == "rows":
        width += math.ceil(inputs / tensor) - inputs
    return rows * width, math.ceil(rows / sharing) * width


def _first_dimension(step: Step, config: ModelConfig) -> int:
    """Return the size of dimension 0 of a step's weights."""
    name, spec = step.name.rsplit(".", 1)[-1], config.main
    if step.n and step.weights:
        return step.n
    if name in ("tokens", "types"):
        return step.parameters // (spec.d_embedding if name == "tokens" else spec.d_summed)
    if name == "table" and step.parameters % spec.d_model == 0:
        return step.parameters // spec.d_model
    return step.parameters // (1 + spec.norm.bias) if step.part == "norms" else step.parameters


# What one device does -------------------------------------------------------------------------------------

Checkpointing = Literal["none", "selective", "full"]
NONE = (0.0, 0.0)  # logits of a stage without the head
BLOCK = re.compile(r"(?:encoder\.|mtp\.\d+\.)?blocks\.(\d+)\.")


@dataclass(frozen=True)
class Work:
    """What is trained in one step, and how."""

    config: ModelConfig
    length: int
    rows: int  # of the whole batch
    precision: str = "bfloat16"  # of matmuls: float32, bfloat16, float16, float8
    checkpointing: Checkpointing = "none"
    optimizer: str = "adamw"
    loss_chunk: int | None = None  # positions scored at a time; 0: all; None: as `train` chooses
    logit_bytes: float = 0.0  # bytes of a logit at its peak; 0: as `train` has it, compiled
    sequence: bool = True  # `tensor` divides the tokens between matmuls, and the logits
    cast: bool = True  # sharded weights are cast before they are gathered, and the residual stream is narrow
    interleave: int = 1  # chunks of the model that each rank of `pipeline` has
    adapters: Adapters | None = None  # low-rank updates, in one process; None: every weight is trained
    passes: int = 1  # forward passes of a batch, all kept for one backward pass
    mtp: bool = False  # whether MTP layers are trained

    @property
    def dtype(self) -> str:
        """The dtype of activations: matmuls in float8 read and write bfloat16."""
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
        """Return True if weights are float32 until a matmul takes them, and the residual stream is too."""
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
    matmuls: float = 0.0  # FLOPs of linear layers, forward and backward
    selective_again: float = 0.0  # those of the forward pass that selective checkpointing computes again
    full_again: float = 0.0  # the same with full checkpointing: all but the last matmul, which nobody reads
    cast: float = 0.0  # values that matmuls read and write, forward and backward
    attention: float = 0.0  # FLOPs of attention that are computed: half of the square where it is causal
    head: float = 0.0  # FLOPs of the head, forward and backward
    stream: float = 0.0  # bytes of the residual stream [tokens, D]
    joints: int = 0  # sublayers: `tensor` gathers the stream before each and scatters it after
    keys: float = 0.0  # bytes of keys and values that `context` passes on
    routed: float = 0.0  # bytes of tokens that `expert` sends to experts and back

    def __add__(self, other: "Amounts") -> "Amounts":
        return Amounts(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def times(self, count: int) -> "Amounts":
        """Return the figures of so many equal blocks."""
        return Amounts(*(value * count for value in vars(self).values()))


@dataclass(frozen=True)
class PipelineStage:
    """One rank of `pipeline`: its layers, and what is before and after them."""

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
def costs_of(config: ModelConfig, length: int, rows: int, dtype: str, autocast: bool, mtp: bool) -> Cost:
    """Return `ch.cost`, kept: many meshes ask for the same."""
    return cost(config, length, rows, dtype, autocast=autocast, mtp=mtp)


@functools.lru_cache(maxsize=64)
def _groups(
    config: ModelConfig, length: int, rows: int, dtype: str, autocast: bool, mtp: bool
) -> tuple[list[Step], list[list[Step]], list[int]]:
    """Return the steps outside the blocks, those of each kind of block, and the kind of each block."""
    ends: list[Step] = []
    blocks: dict[str, list[Step]] = {}
    for step in costs_of(config, length, rows, dtype, autocast, mtp).steps:
        block = BLOCK.match(step.name) if mtp or not step.name.startswith("mtp.") else None
        (blocks.setdefault(block[0], []) if block else ends).append(step)
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
    rows *= work.passes
    ends, different, of_block = _groups(
        work.config, work.length, rows, work.dtype, work.autocast(mesh), work.mtp
    )
    kinds = [_figures(inner, work, mesh, rows, block=True) for inner in different]
    stages, count = [], len(of_block)
    for rank in range(mesh.pipeline):
        start, stop = (math.ceil(count * n / mesh.pipeline) for n in (rank, rank + 1))
        last, first = rank == mesh.pipeline - 1, rank == 0
        after = (step.part == "head" or step.name == "norm" for step in ends)
        mine = [step for step, late in zip(ends, after) if (last if late else first)]
        if last and not first:  # a tied table is there twice: the first stage has it too
            mine = [dataclasses.replace(step, parameters=step.parameters or step.weights) for step in mine]
        logits = next((_logits(step, work, mesh, memory) for step in mine if step.name == "head.out"), NONE)
        inner = tuple((kinds[kind], n) for kind, n in Counter(of_block[start:stop]).items())
        stages.append(PipelineStage(inner, _figures(mine, work, mesh, rows, block=False), *logits))
    return stages


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
            totals["head" if step.name.endswith("head.out") else "matmuls"] += work_done * (
                1 + step.gradients
            )
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
