"""Checkpoints written behind training: tensors are copied first, then written while training goes on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clearhead.errors import CheckpointError, ClearheadError, first_line
from clearhead.learn.training.events import OnEvent, Saved


class Saver:
    """One write at a time, in a thread of its own."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.event: Saved | None = None  # of what is written
        self.error: ClearheadError | None = None

    def begin(self, event: Saved, write: Callable[[], object]) -> None:
        """Start to write a checkpoint; the one before must have been waited for."""

        def run() -> None:
            try:
                write()
            except ClearheadError as error:
                self.error = error
            except Exception as error:
                self.error = CheckpointError(f"step {event.step} was not saved: {first_line(error)}")

        self.event, self.thread = event, threading.Thread(target=run, name="saving", daemon=True)
        self.thread.start()

    @property
    def failed(self) -> bool:
        """True where the last write has failed; `finish` raises why."""
        return self.error is not None

    def finish(self, on_event: OnEvent = lambda event: None, wait: bool = False) -> None:
        """Tell of a checkpoint that is written; `wait` until it is, and raise what its write failed with."""
        if self.thread is None or (self.thread.is_alive() and not wait) or (self.failed and not wait):
            return
        self.thread.join()
        self.thread = None
        if self.error is not None:
            raise self.error
        assert self.event is not None
        on_event(self.event)

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Let a write come to its end where a block ends in an error."""
        try:
            yield
        except BaseException:
            if self.thread is not None:
                self.thread.join()
            raise
