"""Bytes, traffic and time of a step on one mesh.

Memory is that of the device that needs the most, at the moment that needs the most: when the loss has its
logits, or when the last block computes its gradients.
Time is compute (matrix products, attention, the bytes that other operations move) and what communication
adds: bytes over the link, less what is hidden behind compute, and the bubble of the pipeline.
"""

from dataclasses import dataclass
from typing import Any

from clearhead.learn.parallel.division import MeshSizes
from clearhead.learn.parallel.hardware import Cluster
from clearhead.learn.parallel.plan import HELD
from clearhead.learn.parallel.stages import Amounts, Checkpointing, PipelineStage, Work, costs_of, stages_of
from clearhead.variants.costs import LEARNING

WEIGHT, GRADIENT = 4, 4  # bytes of each, as `train` keeps them; the optimizer has the rest of `LEARNING`
SPLIT_LOGIT = 20  # bytes of a logit at its peak where `tensor` divides the vocabulary, in half precision:
# itself, in float32, its log-probability, its exponential, and the gradient twice
BUCKET = 50e6  # bytes of gradients on their way, where they are averaged and not sharded

# Calibrated; see benchmarks/planner.py.
FORWARD = 0.22  # share of attention's time that is its forward pass
CAST = 3  # bytes that float8 moves for each value that a product reads or writes
MOVED = 3.0  # times that each kept byte moves between memory and processor, forward and backward
RING = 0.9  # speed of attention in the pieces of a ring
LINK = 0.85  # share of a link that collectives reach
HIDDEN = 0.75  # share of sharding's and averaging's traffic that hides behind compute, if there is enough
LATENCY = 15e-6  # seconds of a collective, however small
UPDATE = 28  # bytes that an update moves for each weight: value, gradient and moments


@dataclass(frozen=True)
class MeshMemory:
    """Bytes of one device, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float  # gathered and cast weights, gradients on their way, what collectives write to

    @property
    def total(self) -> float:
        """The sum over the kinds."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class MeshTime:
    """Seconds of a step, by what they are spent on."""

    compute: float
    bubble: float  # waiting for other stages of the pipeline
    tensor: float  # communication that compute does not hide, by axis
    context: float
    expert: float
    pipeline: float
    sharding: float  # of weights and gradients: `shard` and `data`
    update: float

    @property
    def total(self) -> float:
        """The sum of all."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class MeshCost:
    """What a step takes on one mesh."""

    mesh: MeshSizes
    micro_rows: int  # rows of a micro-batch
    micro_batches: int  # of each device, one after another
    memory: MeshMemory
    traffic: dict[str, float]  # bytes that a device sends in a step, by axis
    time: MeshTime
    mfu: float  # share of the peak, by the FLOPs of `ch.cost`, with attention in full
    tokens_per_second: float  # of one device
    fits: bool
    checkpointing: Checkpointing = "none"

    @property
    def bubble(self) -> float:
        """Share of the step that a device waits for other stages."""
        return self.time.bubble / self.time.total

    @property
    def recipe(self) -> str:
        """The lines of a recipe that ask for this mesh."""
        sizes = (f"{axis} = {size}" for axis, size in self.mesh._asdict().items() if size > 1)
        again = ["", "[train]", "checkpointing = true"] if self.checkpointing == "full" else []
        return "\n".join(["[parallel]", *sizes, *again])

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "mesh": self.mesh._asdict(),
            "micro_rows": self.micro_rows,
            "micro_batches": self.micro_batches,
            "memory": {**vars(self.memory), "total": self.memory.total},
            "traffic": self.traffic,
            "time": {**vars(self.time), "total": self.time.total},
            "bubble": self.bubble,
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "fits": self.fits,
            "recipe": self.recipe,
        }


def estimate(work: Work, cluster: Cluster, mesh: MeshSizes, micro_rows: int) -> MeshCost:
    """Return memory, traffic and time of a step on one mesh, in micro-batches of `micro_rows`."""
    batches = work.rows // mesh.rows // micro_rows
    stages = stages_of(work, mesh, micro_rows, cluster.memory)
    memory = max(
        (_memory(stage, work, mesh, batches, rank) for rank, stage in enumerate(stages)),
        key=lambda found: found.total,
    )
    slowest = max(stages, key=lambda stage: _compute(stage, work, cluster, mesh)[0])
    traffic = _traffic(slowest, stages, work, mesh, batches)
    time = _time(slowest, work, cluster, mesh, batches, traffic)
    counted = costs_of(work.config, work.length, micro_rows, work.dtype, work.autocast(mesh))
    flops = counted.flops.training_per_token * work.tokens
    rate = work.tokens / mesh.devices / time.total
    mfu = flops / (time.total * mesh.devices * cluster.device.peak)
    fits = memory.total <= cluster.memory
    return MeshCost(mesh, micro_rows, batches, memory, traffic, time, mfu, rate, fits, work.checkpointing)


def _kept(figures: Amounts, work: Work) -> float:
    """Return the bytes that stay for the backward pass."""
    return {"none": figures.kept, "selective": figures.selective, "full": figures.full}[work.checkpointing]


def _memory(stage: PipelineStage, work: Work, mesh: MeshSizes, batches: int, rank: int) -> MeshMemory:
    """Return the bytes of a device of one stage, at its peak."""
    total, block, ends, size, cast = stage.total, stage.largest, stage.ends, work.size, work.gathered
    waiting: float = mesh.pipeline - rank  # micro-batches whose backward pass has not begun
    if work.interleave > 1:
        waiting += (mesh.pipeline - 1) / work.interleave
    waiting = min(batches, waiting)
    kept = waiting * _kept(total, work)
    logits = stage.logits * (work.logit_bytes or (SPLIT_LOGIT if mesh.tensor > 1 else size))
    again = block.kept - _kept(block, work) if work.checkpointing != "none" else 0.0
    moving = 2 * block.stream if mesh.tensor > 1 else 0.0
    moving += 4 * block.keys if mesh.context > 1 else 0.0
    always = total.copies
    if mesh.pipeline > 1:  # outputs of micro-batches on their way, and room to receive inputs and gradients
        always += (waiting + 2 * batches) * block.stream / mesh.tensor
    buffers = {"loss": always, "block": always + moving, "end": always}
    if mesh.sharing > 1 and mesh.pipeline > 1:  # weights stay gathered and gradients whole for the step
        held = total.whole * (cast + GRADIENT)
        buffers = {moment: held + more for moment, more in buffers.items()}
    elif mesh.sharing > 1:
        gathered = ends.whole * cast
        buffers["loss"] += gathered + block.whole * cast
        buffers["block"] += gathered + ends.whole * cast + block.whole * (2 * cast + cast + GRADIENT)
        buffers["end"] += gathered + ends.whole * (cast + GRADIENT)
    elif mesh.data > 1:
        buffers = {moment: more + BUCKET for moment, more in buffers.items()}
    activations = {"loss": kept + logits, "block": kept + again, "end": 0.0}
    peak = max(buffers, key=lambda moment: buffers[moment] + activations[moment])
    return MeshMemory(
        weights=total.stored * WEIGHT,
        gradients=total.stored * GRADIENT,
        optimizer=total.stored * (LEARNING[work.optimizer] - WEIGHT - GRADIENT),
        activations=activations[peak],
        buffers=buffers[peak],
    )


def _compute(stage: PipelineStage, work: Work, cluster: Cluster, mesh: MeshSizes) -> tuple[float, float]:
    """Return the seconds of a micro-batch on one device, and those of attention among them."""
    device, total, full = cluster.device, stage.total, work.checkpointing == "full"
    rate = device.peak * device.products
    fast = rate
    if work.precision == "float32":
        rate = fast = rate / 2  # products in TF32
    elif work.precision == "float8":
        fast = device.peak_float8 * device.float8
    again = {"none": 0.0, "selective": total.selective_again, "full": total.full_again}[work.checkpointing]
    attention = total.attention * (1 + FORWARD * full) / (device.peak * device.attention)
    attention /= RING if mesh.context > 1 else 1
    moved = MOVED * (total.kept * (1 + full / 3) + (work.logit_bytes or work.size) * stage.all_logits)
    if work.precision == "float8":
        moved += CAST * total.cast
    seconds = (total.products + again) / fast + total.head / rate + moved / device.bandwidth
    return seconds + attention, attention


def _traffic(
    stage: PipelineStage, stages: list[PipelineStage], work: Work, mesh: MeshSizes, batches: int
) -> dict[str, float]:
    """Return the bytes that one device sends in a step, by axis."""
    total, sharing = stage.total, mesh.sharing
    passes = 3 + (work.checkpointing == "full")  # forward and backward of a ring: keys and values, gradients
    twice = 2 + (work.checkpointing == "full")
    joints = 4 * total.joints + (2 * total.joints - stage.count) * (work.checkpointing == "full")
    stream = stage.largest.stream
    heaviest = max(one.total.whole for one in stages)
    gathers = 1 if mesh.pipeline > 1 else 2 * batches
    scatters = 1 if mesh.pipeline > 1 else batches
    largest = max(one.total.stored for one in stages)
    return {
        "data": 2 * (mesh.data - 1) / mesh.data * largest * GRADIENT,
        "shard": (sharing - 1) / sharing * heaviest * (gathers * work.gathered + scatters * GRADIENT),
        "tensor": (mesh.tensor - 1) / mesh.tensor * stream * joints * batches,
        "pipeline": (mesh.pipeline > 1) * 2 * work.interleave * batches * stream / mesh.tensor,
        "context": (mesh.context - 1) * total.keys * passes * batches,
        "expert": (mesh.expert - 1) / mesh.expert * total.routed * twice * batches,
    }


def _time(
    stage: PipelineStage,
    work: Work,
    cluster: Cluster,
    mesh: MeshSizes,
    batches: int,
    traffic: dict[str, float],
) -> MeshTime:
    """Return the seconds of a step."""
    micro, attention = _compute(stage, work, cluster, mesh)
    compute, attention = micro * batches, attention * batches
    calls = stage.count * batches

    def link(axis: str, size: int, collectives: float) -> float:
        rate = cluster.rate(size, mesh.stride(HELD[-1] if axis == "shard" else axis)) * LINK
        return traffic[axis] / rate + LATENCY * collectives if size > 1 else 0.0

    tensor, expert = link("tensor", mesh.tensor, 8 * calls), link("expert", mesh.expert, 4 * calls)
    ring = link("context", mesh.context, 3 * (mesh.context - 1) * calls)
    sharing = link("shard", mesh.sharing, 0) + link("data", mesh.data, 0)
    waits = (mesh.pipeline - 1) / work.interleave / batches
    return MeshTime(
        compute=compute,
        bubble=waits * (compute + tensor + expert),
        tensor=tensor,
        context=max(ring - attention, (1 - HIDDEN) * ring),
        expert=expert,
        pipeline=(1 - HIDDEN) * link("pipeline", mesh.pipeline, 2 * batches),
        sharding=max(sharing - compute, (1 - HIDDEN) * sharing),
        update=stage.total.stored * UPDATE / cluster.device.bandwidth,
    )
