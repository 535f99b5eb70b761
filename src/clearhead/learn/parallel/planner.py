"""Will it fit, and how fast: every sensible mesh for a model on some devices, the fastest first."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from clearhead.core.config import ModelConfig
from clearhead.errors import ConfigError, InputError, nearest, refuse
from clearhead.learn.parallel import AXES, ParallelPlan
from clearhead.learn.parallel.adapters import Adapters
from clearhead.learn.parallel.division import Checkpointing, MeshSizes, Work, check_axis, read_mesh, refusal
from clearhead.learn.parallel.estimate import Cluster, MeshCost, estimate, read_cluster
from clearhead.run.quant.apply import NAMES
from clearhead.variants.costs import DTYPES, LEARNING, cost
from clearhead.variants.presets import preset

PRECISIONS = (*(name for name in DTYPES if name != "float64"), "float8")
SHORTEST = 1024  # tokens of a row that a rank of `context` has, at least, in a sensible mesh
MOST = 64  # micro-batches of a sensible mesh without a pipeline
FILLED = 0.9  # of a device's memory, at most: its allocator and libraries take the rest
DOUBLINGS = 8  # of the devices that are tried where none of the meshes fits


@dataclass(frozen=True)
class MeshReport:
    """The meshes for a model on some devices."""

    config: ModelConfig
    cluster: Cluster
    work: Work
    parameters: int
    meshes: tuple[MeshCost, ...]  # the fastest of each combination of axes, the fastest first
    fitting: int  # sensible meshes that fit
    tried: int  # sensible meshes
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> MeshCost:
        """The fastest mesh that fits."""
        return self.meshes[0]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        work, cluster = self.work, self.cluster
        return {
            "parameters": self.parameters,
            "devices": cluster.devices,
            "device": dataclasses.asdict(cluster.device),
            "memory": cluster.memory,
            "link": cluster.link,
            "length": work.length,
            "rows": work.rows,
            "tokens": work.tokens,
            "precision": work.precision,
            "checkpointing": work.checkpointing,
            "optimizer": work.optimizer,
            "tried": self.tried,
            "fitting": self.fitting,
            "meshes": [mesh.to_dict() for mesh in self.meshes],
            "notes": list(self.notes),
        }


def plan(
    config: ModelConfig | str,
    devices: int,
    memory: float | str | None = None,
    link: float | str | None = None,
    *,
    length: int | None = None,
    batch: int | None = None,
    precision: str = "bfloat16",
    checkpointing: Checkpointing = "none",
    optimizer: str = "adamw",
    peak: float | str = "h100",
    node: int | str | None = None,
    mesh: MeshSizes | str | None = None,
    axes: Sequence[str] = AXES,
    top: int = 5,
    lora: int = 0,
    lora_targets: Sequence[str] = ("q", "v"),
    quantize: Literal["int8", "int4"] | None = None,
    passes: int = 1,
    mtp: bool = False,
) -> MeshReport:
    """Return the fastest mesh of each combination of axes, with bytes, traffic and time of a training step.

    Args:
        config: a config, or the name of a preset.
        devices: how many there are.
        memory: bytes of each, or text such as "80GB"; None: what the device has.
        link: bytes per second of each device to other nodes, or text: "400Gb" (bits), "50GB" (bytes).
        length: tokens of a row; None: as many as the model has positions for.
        batch: tokens of a step on all devices; None: a row for each device.
        precision: float32, bfloat16, float16 or float8, of matmuls.
        checkpointing: none, selective (matmuls are computed again) or full (whole blocks are).
        optimizer: a name of `costs.LEARNING`.
        peak: the name of a device, such as "h100" or "a100", or its half-precision FLOP/s.
        node: devices of a node, or text with the link inside it too, such as "8,450GB"; None: the device's.
        mesh: explain this mesh alone, as `MeshSizes` or text such as "shard=8,tensor=2".
        axes: those that a mesh may have.
        top: meshes to return, at most.
        lora: rank of low-rank updates, trained on one device in place of the weights; 0: none.
        lora_targets: the last names of the layers that have them, or "all-linear".
        quantize: what the frozen weights under them are kept in: int8 or int4.
        passes: forward passes of a batch, all kept for one backward pass: 2 with train.r_drop.
        mtp: MTP layers are trained too (train.mtp_weight).
    """
    config = preset(config) if isinstance(config, str) else config
    machine = read_cluster(devices, memory, link, peak, node)
    for name, value, known in (
        ("precision", precision, PRECISIONS),
        ("checkpointing", checkpointing, get_args(Checkpointing)),
        ("optimizer", optimizer, tuple(LEARNING)),
    ):
        refuse(
            value not in known,
            f'{name} "{value}" is not known{nearest(value, known)}: choose from {", ".join(known)}',
            ConfigError,
        )
    counted = cost(config, length)
    tokens = config.main.n_tokens(counted.length)
    rows, rest = divmod(devices * tokens if batch is None else batch, tokens)
    refuse(
        rows < 1 or rest,
        f"batch {batch} is no multiple of the {tokens} tokens of a row: use {max(1, rows) * tokens}, "
        "or another length",
    )
    refuse(quantize is not None and not lora, f"quantize {quantize} is for weights under lora: give its rank")
    formats = " or ".join(NAMES)
    refuse(quantize not in (None, *NAMES), f'quantize "{quantize}" is not known: choose {formats}')
    refuse(lora and devices > 1, f"lora {lora} is planned on one device, and there are {devices}: choose 1")
    adapters = Adapters(lora, tuple(lora_targets), quantize) if lora else None
    work = Work(config, counted.length, rows, precision, checkpointing, optimizer).as_trained
    refuse(passes < 1, f"passes {passes} must be 1 or more")
    refuse(mtp and not config.n_mtp_layers, "mtp is for a model with MTP layers: leave it out")
    work = dataclasses.replace(work, adapters=adapters, passes=passes, mtp=mtp)
    refuse(top < 1, f"top {top} must be 1 or more")
    refuse(
        precision == "float8" and not machine.device.peak_float8,
        f"{machine.device.name} has no matmuls in float8: use bfloat16",
    )
    for axis in axes:
        check_axis(axis)
    sizes = read_mesh(mesh) if isinstance(mesh, str) else mesh
    options = (
        [_explained(work, machine, sizes)]
        if sizes
        else [_fastest(work, machine, shape) for shape in _shapes(work, machine, axes)]
    )
    fitting = [option for option in options if option.fits]
    if not sizes and not fitting:
        raise InputError(_no_fit(work, machine, options, axes))
    ranked = sorted(fitting or options, key=lambda option: (option.time.total, option.memory.total))
    different: dict[tuple[bool, ...], MeshCost] = {}
    for option in ranked:
        different.setdefault(tuple(size > 1 for size in option.mesh), option)
    best = tuple(different.values())[:top]
    notes = tuple(_notes(work, machine, ranked[0]))
    return MeshReport(
        config, machine, work, counted.parameters.total, best, len(fitting), len(options), notes
    )


def fits(work: Work, plan: ParallelPlan, memory: float) -> bool:
    """Return True if a step of `train` fits devices of so many bytes; `work.rows` are rounded up."""
    mesh = MeshSizes(**{axis: getattr(plan, axis) for axis in AXES})
    micro = math.ceil(work.rows / mesh.rows)
    devices = read_cluster(mesh.devices, int(FILLED * memory))
    return estimate(dataclasses.replace(work.as_trained, rows=micro * mesh.rows), devices, mesh, micro).fits


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _shapes(work: Work, cluster: Cluster, axes: Sequence[str]) -> Iterator[MeshSizes]:
    """Yield every mesh of the devices that divides the model, its rows and the batch, and is sensible."""
    layers, experts = sum(stack.n_layers for stack in work.config.stacks), work.config.n_experts
    choices = {
        "tensor": [n for n in _divisors(cluster.devices) if n <= cluster.device.node],
        "pipeline": [n for n in _divisors(cluster.devices) if n <= layers],
        "context": [n for n in _divisors(cluster.devices) if n == 1 or work.length // n >= SHORTEST],
        "expert": [n for n in _divisors(cluster.devices) if n == 1 or (experts and n <= experts)],
    }
    for chosen in itertools.product(*choices.values()):
        left, rest = divmod(cluster.devices, math.prod(chosen))
        if rest:
            continue
        for shard in _divisors(left):
            mesh = MeshSizes(data=left // shard, shard=shard, **dict(zip(choices, chosen)))
            allowed = all(size == 1 or axis in axes for axis, size in mesh._asdict().items())
            if allowed and work.rows % mesh.rows == 0 and refusal(work.config, mesh, work.length) is None:
                yield mesh


def _fastest(work: Work, cluster: Cluster, mesh: MeshSizes) -> MeshCost:
    """Return the cost of a mesh with the fastest micro-batches that fit; else with the smallest."""
    rows = work.rows // mesh.rows
    sizes = [n for n in _divisors(rows) if rows // n <= MOST or n == 1]
    best = estimate(work, cluster, mesh, sizes[0])
    for size in sizes[1:] if best.fits else ():
        tried = estimate(work, cluster, mesh, size)
        if not tried.fits:  # nor will a larger one
            break
        best = min(best, tried, key=lambda option: option.time.total)
    return best


def _explained(work: Work, cluster: Cluster, mesh: MeshSizes) -> MeshCost:
    """Return the cost of the mesh that a user names, or refuse it."""
    refuse(
        mesh.devices != cluster.devices,
        f"mesh {mesh} has {mesh.devices} devices, and there are {cluster.devices}: "
        "the product of its sizes must be the number of devices",
    )
    wrong = refusal(work.config, mesh, work.length)
    refuse(wrong, f"mesh {mesh}: {wrong}", ConfigError)
    per_row = work.tokens // work.rows
    refuse(
        work.rows % mesh.rows,
        f"mesh {mesh} divides the batch into {mesh.rows} parts, and it has {work.rows} rows: "
        f"use a batch of {math.ceil(work.rows / mesh.rows) * mesh.rows * per_row} tokens",
    )
    return _fastest(work, cluster, mesh)


def _no_fit(work: Work, cluster: Cluster, options: list[MeshCost], axes: Sequence[str]) -> str:
    """Say that nothing fits, what comes closest, and what would fit."""
    if not options:
        return (
            f"no mesh of {cluster.devices} devices divides {work.rows} rows: use a batch of "
            f"{cluster.devices * (work.tokens // work.rows)} tokens, or another number of devices"
        )
    closest = min(options, key=lambda mesh: mesh.memory.total)
    kinds = sorted(vars(closest.memory).items(), key=lambda kind: -kind[1])[:2]
    largest = " and ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in kinds)
    return (
        f"no mesh of {cluster.devices} device{'s' * (cluster.devices > 1)} fits "
        f"{cluster.memory / 1e9:,.1f} GB: the closest, {closest.mesh}, "
        f"takes {closest.memory.total / 1e9:,.1f} GB, of which {largest}; "
        f"{_way_out(work, cluster, axes)}"
    )


def _way_out(work: Work, cluster: Cluster, axes: Sequence[str]) -> str:
    """Return the first changes that make a mesh fit: more checkpointing, more devices, or both."""
    if work.adapters is not None:
        return "choose shorter rows, checkpointing full, or quantize int4"
    states = cost(work.config, work.length).parameters.total * LEARNING[work.optimizer]
    modes: tuple[Checkpointing, ...] = (work.checkpointing, "full")  # `train` has no selective one

    def fits(devices: int, mode: Checkpointing) -> bool:
        machine = dataclasses.replace(cluster, devices=devices)
        tried = dataclasses.replace(work, rows=max(work.rows, devices), checkpointing=mode)
        return any(estimate(tried, machine, mesh, 1).fits for mesh in _shapes(tried, machine, axes))

    for devices in (cluster.devices * 2**doubling for doubling in range(DOUBLINGS + 1)):
        if states <= devices * cluster.memory and fits(devices, "full"):
            mode = next(mode for mode in modes if fits(devices, mode))
            changes = [f"{devices} devices"] * (devices > cluster.devices)
            changes += [f"checkpointing {mode}"] * (mode != work.checkpointing)
            return f"it fits with {' and '.join(changes)}"
    return "choose a smaller model or shorter rows"


def _notes(work: Work, cluster: Cluster, best: MeshCost) -> Iterator[str]:
    """Yield what a reader of the figures should know."""
    if not best.fits:
        needed, there = best.memory.total / 1e9, cluster.memory / 1e9
        yield f"it does not fit: this mesh takes {needed:,.1f} GB, and a device has {there:,.1f} GB"
    if not cluster.device.measured:
        yield f"no run on {cluster.device.name} was measured: times assume the usual shares of its peak"
    if work.adapters is not None:
        yield "times are those of training every weight: low-rank updates take less"
    if work.precision == "float8" and cluster.devices > 1:
        yield "`clearhead train` has float8 on one device only: with several its matmuls are in bfloat16"
    if work.checkpointing == "selective":
        yield "`clearhead train` has no selective checkpointing: train.checkpointing is what is full here"
