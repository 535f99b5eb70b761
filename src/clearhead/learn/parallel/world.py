"""The processes of a run: which one this is, its share of each batch, and what all of them know together.

`torchrun` starts the processes and tells each its number. `ALONE` is the world of one process, where nothing
is split and nothing is sent.
"""

import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from clearhead.errors import ConfigError, TrainingError, refuse
from clearhead.learn.batches.batch import Batch
from clearhead.learn.parallel import (
    AXES,
    EXPERT_HELD,
    HELD,
    ROWS,
    TOKENS,
    ParallelPlan,
    processes_here,
    restarts,
    shards,
    started,
)

Made = TypeVar("Made")
APART = 7_368_787  # between the seeds of two shares
LOST = re.compile(r"gloo|nccl|timed? ?out|connection|peer|socket|store", re.IGNORECASE)  # others are gone
WAITED = "~"  # sorts after the number of a call
TELLING = 1.0  # seconds in which all processes that wait in vain say so
_calls = itertools.count()


@dataclass(frozen=True)
class World:
    """Processes in a mesh, and the place of this one."""

    plan: ParallelPlan = field(default_factory=ParallelPlan)
    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None  # of `AXES`; None: not arranged yet, or one process
    held: DeviceMesh | None = None  # of two axes: copies of the weights, and parts of each copy
    expert_held: DeviceMesh | None = None  # the same for weights of experts
    together: dist.ProcessGroup | None = None  # the processes that differ in their share of a batch alone
    aside: dist.ProcessGroup | None = None  # all, in main memory: for what goes on during training
    through: dist.ProcessGroup | None = None  # those in their share or their stage of the pipeline

    @property
    def first(self) -> bool:
        """True in the process that writes and reports."""
        return self.rank == 0

    @property
    def shares(self) -> int:
        """Into how many shares the tokens of a batch are split."""
        return math.prod(self.extent(axis) for axis in TOKENS)

    @property
    def share(self) -> int:
        """The number of this process's share."""
        return self._number(TOKENS)

    def _number(self, axes: Sequence[str]) -> int:
        """Return the number of this process among those along some axes."""
        number = 0
        for axis in axes:
            number = number * self.extent(axis) + self.place(axis)
        return number

    def extent(self, axis: str) -> int:
        """Return the number of processes along an axis."""
        return getattr(self.plan, axis) or 1

    def place(self, axis: str) -> int:
        """Return the number of this process along an axis."""
        inner = math.prod(self.extent(other) for other in AXES[AXES.index(axis) + 1 :])
        return self.rank // inner % self.extent(axis)

    @property
    def seed(self) -> int:
        """What to add to a seed, so that shares and stages draw apart and the parts of one layer alike."""
        return (self.share + self.shares * self.place("pipeline")) * APART

    @property
    def last(self) -> bool:
        """True in a process of the last stage, which has the head and the loss."""
        return self.place("pipeline") == self.extent("pipeline") - 1

    def arranged(
        self, plan: ParallelPlan, device: str, fits: Callable[[ParallelPlan], bool], always: bool = False
    ) -> Self:
        """Return the same processes in the mesh of a plan; see `ParallelPlan.settled`.

        One process has a mesh only if it is to have one `always`.
        """
        plan = plan.settled(self.size, fits)
        if self.size == 1 and not always:
            return replace(self, plan=plan)
        check_gpus(device, "train on the CPU with train.device=cpu")
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(_backend(), store=store, rank=0, world_size=1)
        mesh = init_device_mesh(device, tuple(getattr(plan, name) for name in AXES), mesh_dim_names=AXES)
        held = DeviceMesh._concatenate([mesh["data"], mesh[HELD]._flatten("held")])
        apart = DeviceMesh._concatenate([mesh["data"], mesh[EXPERT_HELD]._flatten("expert_held")])
        together, aside = mesh[TOKENS]._flatten("shares").get_group(), dist.new_group(backend="gloo")
        through = mesh["pipeline", *TOKENS]._flatten("stages").get_group() if plan.pipeline > 1 else together
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=plan.timeout), group)
        more = {"held": held, "expert_held": apart, "together": together, "through": through}
        return replace(self, plan=plan, mesh=mesh, aside=aside, **more)  # type: ignore[arg-type]

    def rows(self, batch: Batch, axes: Sequence[str] = ROWS) -> Batch:
        """Return this process's share of the rows; where there are too few, one row that counts nothing.

        `axes`: those along which processes have different rows.
        """
        shares, share = math.prod(self.extent(axis) for axis in axes), self._number(axes)
        if shares == 1:
            return batch
        begin, end = (len(batch) * number // shares for number in (share, share + 1))
        own = batch.rows(slice(begin, max(end, begin + 1)) if begin < len(batch) else slice(0, 1))
        own.__dict__["n_shared"] = batch.n_targets
        if begin == end:
            own.__dict__.update(n_targets=0, n_tokens=0, n_rows=0)
        return own

    def sum(self, value: Tensor, stages: bool = False) -> Tensor:
        """Return the sum of a value over the shares, or over those of all stages; it is changed in place."""
        if self.shares * (self.extent("pipeline") if stages else 1) > 1:
            with self.waiting("the sum of the loss"):
                dist.all_reduce(value, group=self.through if stages else self.together)
        return value

    def any(self, flag: bool) -> bool:
        """Return True in every process if `flag` is True in one."""
        if self.size == 1:
            return flag
        any_flag = torch.tensor(int(flag))
        with self.waiting("the end of a step"):
            dist.all_reduce(any_flag, op=dist.ReduceOp.MAX)
        return bool(any_flag)

    def clip(
        self, parameters: Sequence[nn.Parameter], most: float, counted: Sequence[nn.Parameter]
    ) -> Tensor:
        """Scale the gradients so that their norm over the whole model is `most` at most; return it [] before.

        As PyTorch does for one process. `counted`: those that no earlier stage of a pipeline holds too.
        """
        if self.mesh is None:
            return nn.utils.clip_grad_norm_(parameters, most)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        with self.waiting("the norm of the gradients"):
            known = [parameter.grad for parameter in counted if parameter.grad is not None]
            processes, experts = self.size // self.extent("pipeline"), self.extent("expert")
            norm = shards.norm_of(known, processes, experts, parameters[0].device)
        torch._foreach_mul_(
            [shards.local(gradient) for gradient in gradients], (most / (norm + 1e-6)).clamp(max=1.0)
        )
        return norm

    def complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum over the tensor axis the gradients of which each of its processes has a part."""
        if parameters and self.mesh is not None:
            group = self.mesh["tensor"].get_group()
            with self.waiting("gradients over the tensor axis"):
                for parameter in parameters:
                    if parameter.grad is not None:
                        dist.all_reduce(shards.local(parameter.grad), group=group)

    def meet(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            with self.waiting("all processes to meet"):
                dist.barrier()

    @contextmanager
    def holding(self, context: AbstractContextManager[Made], otherwise: Made) -> Iterator[Made]:
        """Enter a context in the first process, for all; the others have `otherwise`, once it is entered."""
        with context if self.first else nullcontext(otherwise) as value:
            self.meet()
            yield value

    @contextmanager
    def led(self) -> Iterator[None]:
        """Run a block in the first process, then in the others, which find what it has written."""
        if not self.first:
            self.meet()
        yield
        if self.first:
            self.meet()

    def once(self, make: Callable[[], Made]) -> Made:
        """Call `make` in the first process, and return what it made in every one."""
        value: list[Any] = [make()] if self.first else [None]
        if self.size > 1:
            with self.waiting("what the first process prepares"):
                dist.broadcast_object_list(value)
        return value[0]  # type: ignore[no-any-return]

    def gathered(self, own: Made) -> list[Made]:
        """Return what each share has, in order; of a pipeline, what its last stage has."""
        count = self.shares * self.extent("pipeline")
        if count == 1:
            return [own]
        shares: list[Any] = [None] * count
        with self.waiting("the results of a batch"):
            dist.all_gather_object(shares, own, group=self.through)
        return shares[-self.shares :]

    def everyone(self, own: Made) -> list[Made]:
        """Return what each process has, in order."""
        if self.size == 1:
            return [own]
        values: list[Any] = [None] * self.size
        with self.waiting("what each process has"):
            dist.all_gather_object(values, own)
        return values

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuse a process whose data, settings or versions are not those of the first one."""
        everyone = self.everyone(dict(facts))
        for rank, theirs in enumerate(everyone):
            for name in sorted(everyone[0].keys() | theirs.keys()):
                value, own = everyone[0].get(name), theirs.get(name)
                refuse(
                    own != value,
                    f"process {rank} has another {name} than process 0 ({own}, not {value}): "
                    "start all of them with the same files, versions and settings",
                    ConfigError,
                )

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Name the process that others wait for in vain."""
        if self.size == 1:
            yield
            return
        _store().set(f"at/{self.rank}", f"{next(_calls):012} {what}")
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, TrainingError | torch.OutOfMemoryError) or not LOST.search(str(error)):
                raise
            raise TrainingError(f"process {self.rank} waited for {what} in vain: {self._missing()}") from None

    def _missing(self) -> str:
        """Say which process is furthest behind, by what each reported last; those that wait too are not."""
        try:
            _store().set(f"at/{self.rank}", f"{WAITED} for others")
            time.sleep(TELLING)
            others = (rank for rank in range(self.size) if rank != self.rank)
            last_calls = {rank: _store().get(f"at/{rank}").decode() for rank in others}
        except RuntimeError:
            return "the process that started it is gone"
        rank = min(last_calls, key=last_calls.__getitem__)
        return f"process {rank} came no further than {last_calls[rank].partition(' ')[2]}"


ALONE = World()


@contextmanager
def joined() -> Iterator[World]:
    """Join the processes that `torchrun` has started; alone, give `ALONE`.

    Of an error that ends them all, one process speaks. A group that the caller has opened stays open.
    """
    opened = dist.is_initialized()
    if not started() or opened:
        try:
            yield join()
        finally:
            if dist.is_initialized() and not opened:
                dist.destroy_process_group()
        return
    try:
        yield join()
    except Exception:
        if not _speaks():
            raise SystemExit(2) from None
        raise
    finally:
        dist.destroy_process_group()


def join() -> World:
    """Join the processes that `torchrun` has started, if there are others, and stay with them."""
    if not started():
        return ALONE
    if not dist.is_initialized():
        number = int(os.environ.get("LOCAL_RANK", "0"))
        if number < torch.cuda.device_count():  # more processes than GPUs may still train on the CPU
            torch.cuda.set_device(number)
        store, rank, size = next(rendezvous("env://"))
        # The store may outlive a restart, and hold the addresses of processes that are gone.
        own = dist.PrefixStore(f"life {restarts()}", store)  # type: ignore[attr-defined]
        dist.init_process_group(_backend(), store=own, rank=rank, world_size=size)
    return World(rank=dist.get_rank(), size=dist.get_world_size())


def check_gpus(device: str, else_: str) -> None:
    """Refuse more processes on this machine than it has GPUs; `else_`: what to do instead."""
    here, gpus = processes_here(), torch.cuda.device_count()
    refuse(
        device == "cuda" and here > gpus,
        f"{here} processes on a machine with {gpus} GPUs: start {gpus} with --nproc-per-node {gpus}, or "
        f"{else_}",
        ConfigError,
    )


def _speaks() -> bool:
    """Return True in the first process that fails, which says why; the others end in silence."""
    own = os.environ["RANK"]
    try:
        return bool(_store().compare_set("failed", "", own).decode() == own)
    except RuntimeError:  # the store is gone, and with it the process that failed
        return False


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
