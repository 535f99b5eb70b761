"""Serving a model that is split over the processes of `torchrun`: the first one decides, all of them compute.

The first process has HTTP, the scheduler and the samplers. Before it calls a model, or a model's head, it
broadcasts what it calls it with. The others wait for that and make the same call of their own share of the
heads. A paged cache is sent as chunks and block tables: each process has a pool of its own, with the keys of
its heads in blocks of the same numbers. So what depends on time, such as which requests share a step, is
decided once, and logits reach the first process alone.

Messages are pickled: the processes of one launch trust each other.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from clearhead.core.attention import Attention
from clearhead.core.transformer import Output, Transformer
from clearhead.errors import ClearheadError, first_line, refuse
from clearhead.learn.parallel.world import LOST, World
from clearhead.run.kernels.parts import like
from clearhead.run.serve.kv_cache import Chunk, Group, PagedCache, Pool, States, Table
from clearhead.run.serve.model_runner import ModelRunner, Unpadded, attention_kernels

PATIENCE = timedelta(seconds=30)  # for another process, within a call
IDLE = timedelta(days=365)  # for the next call
WHOLE = "a model that is split over processes: leave it out, or start the server without torchrun"
END = None  # the message after which the others leave


class Step(NamedTuple):
    """A paged cache, as it is sent."""

    chunks: list[tuple[int, int, int, int]]  # number of the sequence, start, stop, place in the row
    tables: dict[int, dict[Group, list[int | None]]]  # the blocks of each sequence
    sources: list[int]
    stateful: set[int]  # sequences whose states go on, in this step or later


class Placed:
    """A sequence of the first process, as the others know it."""

    def __init__(self, pool: Pool, blocks: Mapping[Group, list[int | None]], states: States) -> None:
        self.tables, self.states = {group: Table(pool, group) for group in blocks}, states
        for group, ids in blocks.items():
            self.tables[group].ids = ids


class SplitModel:
    """What a process has of one model: some of the heads, their keys in a pool, and their states."""

    def __init__(self, runner: Transformer, pool: Pool | None) -> None:
        self.runner, self.pool = runner, pool
        self.device = next(runner.parameters()).device
        self.seqs: dict[int, Any] = {}  # in the first process: the sequences that may have states
        self.states: dict[int, States] = {}  # in the others

    def run(self, name: str, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the model or, by name, its head."""
        call = self.runner.head if name == "head" else self.runner
        with attention_kernels(self.device):
            return call(*inputs, **named)

    def packed(self, value: Any) -> Any:
        """Return an argument of a call as it is sent."""
        if isinstance(value, Tensor):
            return value.detach().cpu().clone()  # a view would be sent with all that it is a view of
        if not isinstance(value, PagedCache):
            return value
        now = {chunk.seq.number: chunk.seq for chunk in value.chunks}
        stateful = {number for number, seq in self.seqs.items() if seq.states}
        self.seqs = {number: self.seqs[number] for number in stateful} | now
        chunks = [(chunk.seq.number, chunk.start, chunk.stop, chunk.span.start) for chunk in value.chunks]
        tables = {
            number: {group: table.ids for group, table in seq.tables.items()} for number, seq in now.items()
        }
        return Step(chunks, tables, list(value.sources), stateful)

    def unpacked(self, value: Any) -> Any:
        """Return an argument of a call as it is taken."""
        if isinstance(value, Tensor):
            return value.to(self.device)
        if not isinstance(value, Step):
            return value
        assert self.pool is not None
        numbers = value.stateful | value.tables.keys()
        self.states = {n: self.states[n] if n in value.stateful else {} for n in numbers}
        seqs = {n: Placed(self.pool, blocks, self.states[n]) for n, blocks in value.tables.items()}
        chunks = []
        for number, start, stop, place in value.chunks:
            chunks.append(Chunk(seqs[number], start, stop))
            chunks[-1].placed(place)
        return PagedCache(self.pool, chunks, value.sources)


class LedModel(Unpadded):
    """The model of the first process, whose calls all processes make."""

    lead: Callable[..., Output]

    def forward(self, *inputs: Any, **named: Any) -> Output:
        """Run as `Transformer.forward`, in all processes."""
        cache = named.get("cache")
        refuse(
            cache is not None and not isinstance(cache, PagedCache),
            f"generation outside of the engine's steps is not possible with {WHOLE}",
        )
        return self.lead("model", *inputs, **named)


class LostError(RuntimeError):
    """A call that another process cannot take part in any more."""


def kv_heads_here(model: Transformer) -> dict[str, int]:
    """Return how many key/value heads each attention of a model has in this process, by name."""
    parts = {
        f"{model.main.spec.prefix}blocks.{layer}.{name}": getattr(block, name)
        for layer, block in enumerate(model.main.layers())
        for name in ("attention", "cross")
    }
    return {name: part.n_kv_heads for name, part in parts.items() if isinstance(part, Attention)}


class Processes:
    """The processes of a launch that serves; each builds the same engines, in the same order."""

    def __init__(self, world: World) -> None:
        self.world, self.models = world, list[SplitModel]()
        self.lost = ""  # why no call is possible any more
        self.on_lost: Callable[[], None] = lambda: None
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE if world.first else IDLE)
        self._lock = threading.Lock()  # engines have a thread each, and the others take one call at a time

    @property
    def first(self) -> bool:
        """True in the process that serves HTTP."""
        return self.world.first

    def share(self, model_runner: ModelRunner, pool: Pool | None) -> None:
        """Let the first process lead the calls of a model, and the others follow them."""
        number, model = len(self.models), SplitModel(model_runner.runner, pool)
        self.models.append(model)
        if self.first:
            lead = partial(self._lead, number)
            model_runner.runner = like(model.runner, LedModel, lead=lead)
            model_runner.head = partial(lead, "head")

    def meet(self, facts: Mapping[str, object]) -> None:
        """Wait until every process has loaded the models; refuse one with other `facts` than the first."""
        self.world.agree({"version": version("clearhead"), "torch": torch.__version__, **facts})
        for group in dist.distributed_c10d._world.pg_map:
            if group is not self._group:
                dist.distributed_c10d._set_pg_timeout(PATIENCE, group)

    def _lead(self, number: int, name: str, *inputs: Any, **named: Any) -> Any:
        """Make a call in all processes, and return what it gives here."""
        model = self.models[number]
        with self._lock:
            if self.lost:
                raise LostError(self.lost)
            try:
                sent = (
                    [model.packed(value) for value in inputs],
                    {k: model.packed(v) for k, v in named.items()},
                )
                self._tell((number, name, *sent))
                return model.run(name, inputs, named)
            except ClearheadError:  # what the arguments of a call are refused for, all processes refuse
                raise
            except Exception as error:
                self.lost = self._line(error)
                self.on_lost()
                raise LostError(self.lost) from error

    def follow(self) -> None:
        """Make the calls of the first process until it ends; it alone heeds signals."""
        _ignore_signals()
        with torch.inference_mode():
            while (call := self._hear()) is not END:
                number, name, inputs, named = call
                model = self.models[number]
                try:
                    taken = {key: model.unpacked(value) for key, value in named.items()}
                    model.run(name, tuple(map(model.unpacked, inputs)), taken)
                except ClearheadError:
                    continue
                except Exception as error:
                    raise ClearheadError(self._line(error)) from None
        with suppress(RuntimeError):  # the first one says what it waits for in vain
            dist.monitored_barrier(self._group, PATIENCE)

    @contextmanager
    def leading(self, on_lost: Callable[[], None]) -> Iterator[None]:
        """Lead the others in the block, and let them end after it; `on_lost` is to end it early.

        A signal that the server has heeded does not end this process before the others know.
        """
        self.on_lost = on_lost
        _ignore_signals()
        yield
        with self._lock:
            if not self.lost:
                try:
                    self._tell(END)
                    dist.monitored_barrier(self._group, PATIENCE)
                except RuntimeError as error:
                    self.lost = self._line(error)
        refuse(self.lost, self.lost, ClearheadError)

    def _tell(self, call: Any) -> None:
        dist.broadcast_object_list([call], group=self._group, device=torch.device("cpu"))

    def _hear(self) -> Any:
        call = [END]
        try:
            dist.broadcast_object_list(call, group=self._group, device=torch.device("cpu"))
        except RuntimeError as error:
            raise ClearheadError(self._line(error)) from None
        return call[0]

    def _line(self, error: Exception) -> str:
        """Return why the launch ends."""
        own = f"process {self.world.rank} of {self.world.size}"
        way_out = "the server ends; torchrun --max-restarts 3 would start all processes again"
        if LOST.search(str(error)):
            return f"{own} finds that another one has ended or does not answer: {way_out}"
        return f"{own} has failed ({first_line(error)}): {way_out}"


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
