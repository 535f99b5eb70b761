"""Requests that read, such as embeddings and classes: a line of their own, beside the texts being written."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from clearhead.errors import BusyError
from clearhead.run.bundle import Bundle

TOGETHER = 64  # inputs of a call at most: texts that are written wait for it, and memory grows with it
CHARACTERS = 1 << 13  # of a call on a CPU, but for one input that is longer


class Reading:
    """A request that reads: a function of inputs, which may be shared with other requests, and its own."""

    def __init__(
        self, inputs: Sequence[Any], run: Callable[[list[Any]], Sequence[Any]], kind: object
    ) -> None:
        self.inputs, self.run, self.kind = list(inputs), run, kind
        self.found: list[Any] = []
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
        return self.found

    def keep(self, found: Sequence[Any]) -> None:
        """Take the results of the next inputs; tell of it when they are all there."""
        self.found += found
        if len(self.found) == len(self.inputs) and not self.done.is_set():
            self.end()

    def end(self, error: Exception | None = None) -> None:
        """Tell that there are results, or an error."""
        self.error = error
        self.done.set()
        if self.told is not None:
            self.told()


class ReadingLine:
    """The requests that wait; those that ask for the same share a call, and a long one takes several."""

    def __init__(self, characters: int) -> None:
        self.waiting: deque[Reading] = deque()
        self.characters = characters
        self.reads = False  # in a call

    def __bool__(self) -> bool:
        return self.reads or bool(self.waiting)

    def step(self) -> None:
        """Run the next inputs of the first request, and of others that ask for the same.

        A request that is not done by that goes to the end of the line.
        """
        together: list[tuple[Reading, list[Any]]] = []
        room, characters = TOGETHER, self.characters
        self.reads = bool(self.waiting)
        while self.waiting and room > 0 and characters > 0:
            if together and self.waiting[0].kind != together[0][0].kind:
                break
            reading = self.waiting.popleft()
            if reading.cancelled:
                continue
            inputs = []
            for one in itertools.islice(reading.inputs, len(reading.found), len(reading.found) + room):
                if characters <= 0:
                    break
                inputs.append(one)
                characters -= len(one) if isinstance(one, str) else sum(map(len, one))
            together.append((reading, inputs))
            room -= len(inputs)
        if together:
            self._guarded(together)
            self.waiting += [reading for reading, _ in together if not reading.done.is_set()]
        self.reads = False

    def close(self) -> None:
        """End the requests that wait."""
        for reading in list(self.waiting):
            reading.cancelled = True
            reading.end(BusyError("the server has ended: try another one"))

    def _guarded(self, together: Sequence[tuple[Reading, list[Any]]]) -> None:
        try:
            self._run(together)
        except Exception as error:
            if len(together) == 1:
                together[0][0].end(error)
            else:  # one of them is at fault: each by itself
                for one in together:
                    self._guarded([one])

    @staticmethod
    def _run(together: Sequence[tuple[Reading, list[Any]]]) -> None:
        found = together[0][0].run([one for _, inputs in together for one in inputs])
        at = 0
        for reading, inputs in together:
            reading.keep(found[at : at + len(inputs)])
            at += len(inputs)


def with_model(m: Bundle, model: Any) -> Bundle:
    """Return the same bundle with another model in it."""
    new = object.__new__(type(m))
    new.__dict__.update(m.__getstate__() | {"model": model})
    return new
