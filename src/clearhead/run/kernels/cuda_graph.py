"""CUDA graphs: capture the kernels of a function once, then replay them with one launch."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


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
