"""Bytes, traffic and time of a training step on one mesh of devices.

Memory is that of the device that needs the most, at the moment that needs the most: when the loss has its
logits, or when the last block computes its gradients.
Time is compute (matmuls, attention, the bytes that other operations move) and what communication
adds: bytes over the link, less what is hidden behind compute, and the bubble of the pipeline.
The shares of `Device` are calibrated: `benchmarks/run.py planner` compares what they predict with runs.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from clearhead.errors import InputError, nearest, refuse
from clearhead.learn.parallel import HELD
from clearhead.learn.parallel.adapters import Adapters, adapted
from clearhead.learn.parallel.division import (
    Amounts,
    Checkpointing,
    MeshSizes,
    PipelineStage,
    Work,
    costs_of,
    stages_of,
)
from clearhead.variants.costs import LEARNING

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)"


@dataclass(frozen=True)
class Device:
    """A kind of accelerator: what its maker states, and the shares of it that training reaches."""

    name: str
    peak: float  # FLOP/s in half precision, without sparsity
    memory: float  # bytes
    bandwidth: float  # bytes per second between memory and processor
    inside: float = 32e9  # bytes per second to the other devices of the node, one way
    node: int = 8  # devices of a node
    peak_float8: float = 0.0  # FLOP/s in float8; 0: it has none
    matmul_share: float = 0.5  # share of the peak that matmuls reach
    float8: float = 0.5  # share of the float8 peak that they reach
    attention: float = 0.25  # share of the peak that fused attention reaches, of what it computes
    measured: bool = False  # the shares come from a run on this device


# By a part of the name that PyTorch gives a device: the first that fits counts.
DEVICES = {
    device.name: device
    for device in (
        Device("b200", 2250e12, 180e9, 8.0e12, 900e9, peak_float8=4500e12),
        Device("h200", 989e12, 141e9, 4.8e12, 450e9, 8, 1979e12, 0.55, 0.5, 0.3, measured=True),
        Device("h100 pcie", 756e12, 80e9, 2.0e12, 64e9, peak_float8=1513e12),
        Device("h100", 989e12, 80e9, 3.35e12, 450e9, 8, 1979e12, 0.49, 0.44, 0.19, measured=True),
        Device("mi300x", 1307e12, 192e9, 5.3e12, 448e9, peak_float8=2614e12),
        Device("a100", 312e12, 80e9, 2.0e12, 300e9, matmul_share=0.6, attention=0.55, measured=True),
        Device("l40s", 362e12, 48e9, 0.864e12, peak_float8=733e12),
        Device("l4", 121e12, 24e9, 0.3e12, peak_float8=242e12),
        Device("a10", 125e12, 24e9, 0.6e12),
        Device("v100", 125e12, 32e9, 0.9e12, 150e9),
        Device("t4", 65e12, 16e9, 0.32e12, 16e9),
        Device("rtx 4090", 165e12, 24e9, 1.008e12, peak_float8=330e12),
        Device("rtx 3090", 71e12, 24e9, 0.936e12),
    )
}


@dataclass(frozen=True)
class Cluster:
    """So many devices, in nodes, with a link inside each node and one between nodes."""

    device: Device
    devices: int
    memory: float  # bytes that a device may use
    link: float  # bytes per second of one device to other nodes, one way

    def rate(self, size: int, stride: int) -> float:
        """Return bytes per second and device among `size` ranks that lie `stride` apart.

        Within a node it is the inner link. Beyond, ranks that share a node also share their links to others.
        They are never faster than the inner link.
        """
        node, inside = self.device.node, self.device.inside
        if size * stride <= node or self.devices <= node:
            return inside
        return min(inside, self.link * max(1, node // stride))


def device_named(name: str) -> Device:
    """Return a device by its name: "h100", "H100", "NVIDIA H100 80GB HBM3"."""
    device = find_device(name)
    if device is None:
        raise InputError(
            f'no device is called "{name}"{nearest(name.lower(), DEVICES)}: '
            f"choose from {', '.join(DEVICES)}, or give the peak, in FLOP/s"
        )
    return device


def find_device(name: str) -> Device | None:
    """Return the first device whose name is part of this one."""
    words = re.sub(r"[\s_-]+", " ", name.lower())
    matches = (
        device for part, device in DEVICES.items() if re.search(rf"(?<![a-z0-9]){part}(?![0-9])", words)
    )
    return next(matches, None)


def read_cluster(
    devices: int,
    memory: float | str | None = None,
    link: float | str | None = None,
    peak: float | str = "h100",
    node: int | str | None = None,
) -> Cluster:
    """Describe the devices from what a user says of them; see `planner.plan` for the arguments."""
    refuse(devices < 1, f"devices {devices} must be 1 or more")
    number = isinstance(peak, float | int) or re.match(NUMBER, peak.strip())
    device = Device("device", read_flops(peak), 80e9, 2e12) if number else device_named(str(peak))
    if node is not None:
        size, _, inside = str(node).partition(",")
        refuse(
            not size.strip().isdecimal() or int(size) < 1,
            f'node "{node}" is not understood: write devices of a node and the link inside, such as 8,450GB',
        )
        device = replace(device, node=int(size), inside=read_link(inside) if inside else device.inside)
    room = device.memory if memory is None else read_bytes(memory, "memory")
    return Cluster(device, devices, room, read_link("400Gb" if link is None else link))


def read_bytes(text: float | str, name: str = "size") -> int:
    """Return the number of bytes in a text such as 500MB."""
    match = re.fullmatch(rf"{NUMBER}\s*({'|'.join(UNITS)})", str(text).strip(), re.IGNORECASE)
    size = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    refuse(size < 1, f'{name} "{text}" is not understood: write a number and a unit, such as 500MB or 5GB')
    return size


def read_link(text: float | str) -> float:
    """Return bytes per second in a text: 400Gb, 400Gb/s and 400Gbps are bits, 50GB and 50GB/s are bytes."""
    pattern = rf"{NUMBER}\s*([kKMGT]?)(b|bit|bps|b/s|bit/s|B|B/s)"
    match = re.fullmatch(pattern, str(text).strip())
    rate = float(text) if isinstance(text, float | int) else 0.0
    if match:
        rate = float(match[1]) * SCALES[match[2].upper()] / (1 if match[3].startswith("B") else 8)
    refuse(
        rate <= 0,
        f'link "{text}" is not understood: write bits per second, such as 400Gb, or bytes, such as 50GB',
    )
    return rate


def read_flops(text: float | str) -> float:
    """Return FLOP/s in a text such as 989T, 312TFLOPS or 9.89e14."""
    match = re.fullmatch(
        rf"{NUMBER}\s*([KMGTP]?)(?:FLOPS?(?:/S)?)?", str(text).strip().upper().replace("E", "e")
    )
    rate = float(match[1]) * SCALES[match[2]] if match else 0.0
    refuse(
        rate < 1e9, f'peak "{text}" is not understood: write FLOP/s, such as 989T, or the name of a device'
    )
    return rate


# The estimate ---------------------------------------------------------------------------------------------

WEIGHT, GRADIENT = 4, 4  # bytes of each, as `train` keeps them; the optimizer has the rest of `LEARNING`
SPLIT_LOGIT = 20  # bytes of a logit at its peak where `tensor` divides the vocabulary, in half precision:
# itself, in float32, its log-probability, its exponential, and the gradient twice
BUCKET = 50e6  # bytes of gradients on their way, where they are averaged and not sharded

# Calibrated; see benchmarks/run.py planner.
FORWARD = 0.22  # share of attention's time that is its forward pass
CAST = 3  # bytes that float8 moves for each value that a matmul reads or writes
MOVED = 3.0  # times that each kept byte moves between memory and processor, forward and backward
RING = 0.9  # speed of attention in the chunks of a ring
LINK = 0.85  # share of a link that collectives reach
HIDDEN = 0.75  # share of sharding's and averaging's traffic that hides behind compute, if there is enough
LATENCY = 15e-6  # seconds of a collective, however small
UPDATE = 28  # bytes that an update moves for each weight: value, gradient and moments


class Summed:
    """Figures by kind, all of one unit."""

    @property
    def total(self) -> float:
        """The sum over the kinds."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class MeshMemory(Summed):
    """Bytes of one device, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float  # gathered and cast weights, gradients on their way, what collectives write to


@dataclass(frozen=True)
class MeshTime(Summed):
    """Seconds of a step, by what they are spent on."""

    compute: float
    bubble: float  # waiting for other stages of the pipeline
    tensor: float  # communication that compute does not hide, by axis
    context: float
    expert: float
    pipeline: float
    sharding: float  # of weights and gradients: `shard` and `data`
    update: float


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
    if work.adapters is not None:
        memory = _adapted_memory(stages[0], work, work.adapters, micro_rows)
    else:
        memory = max(
            (_memory(stage, work, mesh, batches, rank) for rank, stage in enumerate(stages)),
            key=lambda stage_memory: stage_memory.total,
        )
    slowest = max(stages, key=lambda stage: _compute(stage, work, cluster, mesh)[0])
    traffic = _traffic(slowest, stages, work, mesh, batches)
    time = _time(slowest, work, cluster, mesh, batches, traffic)
    counted = costs_of(work.config, work.length, micro_rows, work.dtype, work.autocast(mesh), work.mtp)
    flops = counted.flops.training_per_token * work.tokens * work.passes
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


def _adapted_memory(stage: PipelineStage, work: Work, adapters: Adapters, rows: int) -> MeshMemory:
    """Return the bytes of one device that trains low-rank updates alone, at its peak."""
    rows *= work.passes
    figures = adapted(work.config, work.length, rows, work.dtype, adapters, work.mtp)
    layers = work.config.n_layers
    kept: float = figures.kept
    if work.checkpointing == "full":  # the input of each block, and one block computed again
        kept = figures.kept / layers + layers * rows * work.tokens / work.rows * work.config.d_model * 4
    return MeshMemory(
        weights=figures.weights,
        gradients=figures.trained * GRADIENT,
        optimizer=figures.trained * (LEARNING[work.optimizer] - WEIGHT - GRADIENT),
        activations=kept + stage.logits * (work.logit_bytes or work.size),
        buffers=figures.widest,
    )


def _compute(stage: PipelineStage, work: Work, cluster: Cluster, mesh: MeshSizes) -> tuple[float, float]:
    """Return the seconds of a micro-batch on one device, and those of attention among them."""
    device, total, full = cluster.device, stage.total, work.checkpointing == "full"
    rate = device.peak * device.matmul_share
    fast = rate
    if work.precision == "float32":
        rate = fast = rate / 2  # matmuls in TF32
    elif work.precision == "float8":
        fast = device.peak_float8 * device.float8
    again = {"none": 0.0, "selective": total.selective_again, "full": total.full_again}[work.checkpointing]
    attention = total.attention * (1 + FORWARD * full) / (device.peak * device.attention)
    attention /= RING if mesh.context > 1 else 1
    moved = MOVED * (total.kept * (1 + full / 3) + (work.logit_bytes or work.size) * stage.all_logits)
    if work.precision == "float8":
        moved += CAST * total.cast
    seconds = (total.matmuls + again) / fast + total.head / rate + moved / device.bandwidth
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
    heaviest = max(stage.total.whole for stage in stages)
    gathers = 1 if mesh.pipeline > 1 else 2 * batches
    scatters = 1 if mesh.pipeline > 1 else batches
    largest = max(stage.total.stored for stage in stages)
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
