"""Requests that read, such as embeddings and classes: a line of their own, beside the texts being written."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from clearhead.bundle import Bundle

TOGETHER = 64  # requests that share a call at most


class Reading:
    """A request that reads: a function of all inputs that wait for it, and of these its own."""

    def __init__(
        self, inputs: Sequence[Any], run: Callable[[list[Any]], Sequence[Any]], kind: object
    ) -> None:
        self.inputs, self.run, self.kind = list(inputs), run, kind
        self.found: Sequence[Any] | None = None
        self.error: Exception | None = None
        self.done = threading.Event()
        self.cancelled = False
        self.told: Callable[[], None] | None = None

    def wait(self, timeout: float | None = None) -> Sequence[Any]:
        """Wait for the results, one for each input; raise what went wrong."""
        if not self.done.wait(timeout):
            raise TimeoutError("the request has not ended yet")
        if self.error is not None:
            raise self.error
        assert self.found is not None
        return self.found

    def end(self, found: Sequence[Any] | None, error: Exception | None = None) -> None:
        """Tell of the results."""
        self.found, self.error = found, error
        self.done.set()
        if self.told is not None:
            self.told()


class ReadingLine:
    """The requests that wait; those that ask for the same share a call."""

    def __init__(self) -> None:
        self.waiting: deque[Reading] = deque()

    def step(self) -> None:
        """Run the first request that reads, and others that ask for the same."""
        together: list[Reading] = []
        while self.waiting and len(together) < TOGETHER:
            if together and self.waiting[0].kind != together[0].kind:
                break
            reading = self.waiting.popleft()
            if not reading.cancelled:
                together.append(reading)
        if not together:
            return
        inputs = [one for reading in together for one in reading.inputs]
        try:
            found = together[0].run(inputs)
        except Exception as error:
            if len(together) == 1:
                together[0].end(None, error)
            else:  # one of them is at fault: each by itself
                for reading in together:
                    self._alone(reading)
            return
        at = 0
        for reading in together:
            reading.end(found[at : at + len(reading.inputs)])
            at += len(reading.inputs)

    def _alone(self, reading: Reading) -> None:
        try:
            reading.end(reading.run(reading.inputs))
        except Exception as error:
            reading.end(None, error)


def with_model(m: Bundle, model: Any) -> Bundle:
    """Return the same bundle with another model in it."""
    new = object.__new__(type(m))
    new.__dict__.update(m.__getstate__() | {"model": model})
    return new
