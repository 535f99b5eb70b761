"""Decode steps that run at one call of the host: captured as CUDA graphs, or compiled.

A CUDA graph holds the kernels of a function, and replays them with one launch. A step is made for a size of
batch and cache; sizes are a few that double, so that prompts of all lengths share a handful of steps.

Shapes: B rows, V vocabulary.
"""

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.errors import first_line
from clearhead.run.kernels.fixed_cache import FixedCache
from clearhead.run.kernels.kernels import choose

SMALLEST_SLOTS = 512  # slots of the smallest cache; larger ones double
CAPTURED_SHARE = 0.25  # of a GPU's memory, for the keys of captured CUDA graphs that no call uses
# Matmuls with one row become fused reductions, which read weights faster than the library's matmul.
COMPILER_OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True, "triton.cudagraphs": False}


@contextmanager
def never_waiting() -> Iterator[None]:
    """Raise if the host synchronizes with the GPU: a capture that fails leaves the generator unusable."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class GraphRecorder:
    """Captures graphs that share one memory pool, so only one may run at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, launch: Callable[[], object]) -> Callable[[], object]:
        """Capture the kernels that `launch` launches, without running them; return the replay function.

        Run `launch` `aside` once before: what it allocates at first use must exist.
        """
        graph = torch.cuda.CUDAGraph()
        with self.aside():
            # Other threads, such as one that writes a checkpoint, go on as they like.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph.replay

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work on a side stream, and forbid synchronization with the device."""
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with never_waiting(), torch.cuda.stream(self.side):
            yield
        current.wait_stream(self.side)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Run a function once, then record the kernels that it launches as a graph of its own."""
    recorder = GraphRecorder()
    with recorder.aside():
        run()
    torch.cuda.synchronize()
    gc.collect()  # memory that is freed while a graph is recorded would end the recording
    torch.cuda.empty_cache()  # a graph takes memory of its own, and none that is cached for others
    return recorder.record(run)


# Steps of generation --------------------------------------------------------------------------------------


def rows_bucket(rows: int) -> int:
    """Round up to 1, 2, 4, 8, or a multiple of 8."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else 8 * math.ceil(rows / 8)


def slots_bucket(slots: int, smallest: int = SMALLEST_SLOTS) -> int:
    """Double the smallest size until it is enough."""
    return max(smallest, 1 << (slots - 1).bit_length())


class CompiledStep:
    """One more token for each of `rows` rows, with room for `slots` tokens each.

    With `backend` None the step is not compiled, but captured as it is; this takes a GPU.
    """

    def __init__(
        self, model: Transformer, rows: int, slots: int, source: int = 0, backend: str | None = "inductor"
    ) -> None:
        weight = next(model.parameters())
        device, self.model = weight.device, model
        self.cache = FixedCache(model.config, rows, slots, weight.dtype, device, source)
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)  # what goes in next
        # By slot: the most probable token after it.
        self.made = torch.zeros(rows, slots, dtype=torch.long, device=device)
        self.logits = torch.zeros(rows, model.config.vocab_size, dtype=weight.dtype, device=device)
        self._forward()  # parts of the model make now what they make at first use, before the compiler
        run: Callable[[], object] = self._forward
        if backend is not None:
            options = COMPILER_OPTIONS if backend == "inductor" and device.type == "cuda" else None
            # The compiler keeps what it made by code object, a few for each: a step has one of its own.
            step = FunctionType(CompiledStep._forward.__code__.replace(), globals())
            run = torch.compile(
                MethodType(step, self), fullgraph=True, dynamic=False, backend=backend, options=options
            )
            run()
        self.replay = run if backend is None else self._or_uncompiled(run)
        if device.type == "cuda":
            self.replay = captured(run)

    def _forward(self) -> None:
        logits = self.model(self.ids, cache=self.cache, logits="last").logits[:, -1]
        choose(logits, self.cache.index, self.made, self.ids, self.logits)

    def _or_uncompiled(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return `run` with a way out, for a setting of the process that changes and will not compile."""
        compiler = torch._dynamo.exc

        def attempt() -> None:
            try:
                run()
            except (compiler.TorchDynamoException, compiler.FailOnRecompileLimitHit) as error:
                warn_uncompiled(first_line(error))  # it failed before anything ran
                self.replay = self._forward
                self.replay()

        return attempt

    def __call__(self, chosen: Tensor, rows: Tensor) -> Tensor:
        """Run one more token of some rows, by their numbers [B]: chosen [B] -> logits [B, V]."""
        self.ids[rows, 0] = chosen
        self.run(1)
        return self.logits[rows]

    def run(self, count: int) -> Tensor:
        """Run `count` times, each time on the most probable token; return those tokens [B, count]."""
        start = self.cache.length
        for _ in range(count):
            self.replay()
        # A step that runs uncompiled, because someone watches, counts by itself.
        self.cache.length = start + count
        return self.made[:, start : start + count]


class OnHost:
    """An asynchronous copy of a tensor to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.copy.copy_(tensor, non_blocking=True)
        self.arrived = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self.arrived is not None:
            self.arrived.record()

    def tolist(self) -> list[list[int]]:
        """Wait for the copy, and return its numbers."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return cast(list[list[int]], self.copy.tolist())


class Steps:
    """The steps of one model by size, each made when first needed and kept.

    On a GPU a step is captured as a CUDA graph, which takes a second; one that was compiled, which takes a
    minute, is quicker and is used once it is there.
    """

    def __init__(self, model: Transformer, backend: str = "inductor") -> None:
        self.model, self.backend = model, backend
        self.made: dict[tuple[int, int, int], CompiledStep] = {}
        self.captured: dict[tuple[int, int, int], CompiledStep] = {}  # the one used last comes last
        reasons = {
            "its experts are chosen on the host": model.config.n_experts > 0,
            "its layers take some tokens alone": min(model.config.main.capacities) < 1,
            "its angles depend on the longest row in the batch": model.config.rotates_by_length,
        }
        self.unfit = next(
            (reason for reason, holds in reasons.items() if holds), None
        )  # why none can be made
        self.captures = next(model.parameters()).is_cuda and self.unfit is None

    def find(self, rows: int, slots: int, source: int, compiles: bool) -> CompiledStep | None:
        """Return the step for these sizes, compiled if asked; None where none can be made."""
        size = (rows_bucket(rows), slots_bucket(slots), slots_bucket(source, 64) if source else 0)
        if size not in self.made and compiles and self.unfit is None:
            self.captured.pop(size, None)
            try:
                self.made[size] = CompiledStep(self.model, *size, backend=self.backend)
            except Exception as error:  # compilers fail in many ways, and none is a reason not to generate
                self.unfit = first_line(error)
                warn_uncompiled(self.unfit)
        return self.made.get(size) or self._capture(size)

    def _capture(self, size: tuple[int, int, int]) -> CompiledStep | None:
        """Return the captured step of this size; None where it cannot be captured, or has no room."""
        step = self.captured.pop(size, None)
        if step is None and self.captures:
            try:
                step = CompiledStep(self.model, *size, backend=None)
            except torch.OutOfMemoryError:  # a growing cache needs less
                self.captured.clear()
            except Exception:  # something that a CUDA graph cannot hold, such as a copy to the host
                self.captures = False
        if step is not None:
            self.captured[size] = step
            most = torch.cuda.get_device_properties(step.ids.device).total_memory * CAPTURED_SHARE
            while len(self.captured) > 1 and sum(step.cache.nbytes for step in self.captured.values()) > most:
                self.captured.pop(next(iter(self.captured)))
        return step


def warn_uncompiled(reason: str) -> None:
    """Warn that the step runs uncompiled."""
    warnings.warn(f"the decode step runs uncompiled: {reason}", RuntimeWarning, stacklevel=2)
