"""CUDA graphs: the kernels of a function recorded once, and then run again at one call of the host."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def never_waiting() -> Iterator[None]:
    """Raise where the host waits for the GPU: a recording that fails for it leaves the generator unusable."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class GraphRecorder:
    """Records graphs that share their memory: of all of them, one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, launch: Callable[[], object]) -> Callable[[], object]:
        """Return a function that runs again all kernels that `launch` launches; none runs now.

        What `launch` makes at its first use must be there: run it `aside` before.
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
        """Work on a stream of its own, never waiting for the device."""
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
