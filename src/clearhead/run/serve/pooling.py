"""What an engine does besides decoding: embeddings, classes and the like, and the activations of a sequence.

Pooling requests wait in a queue of their own. What a request may see of its own sequence is what `record` and
`lens` give: the whole of it, prompt and answer, is computed once more by the model itself, alone and between
two steps, when it has ended. So nobody else's logits change, and prefixes found in the pool are seen too.

Shapes: T tokens of the text, S tokens of a source.
"""

import base64
import functools
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import BusyError, InputError, refuse
from clearhead.inside.inputs import Prepared, prepare
from clearhead.inside.lens import Lens, lens
from clearhead.inside.results import on_cpu, plain
from clearhead.run.api import Model
from clearhead.run.bundle import Bundle
from clearhead.variants.contexts import matching

TOGETHER = 64  # inputs of a call at most: sequences that decode wait for it, and memory grows with it
CHARACTERS = 1 << 13  # of a call on a CPU, but for one input that is longer


class PoolingRequest:
    """A request that reads: a function of inputs, which may be shared with other requests, and its own."""

    def __init__(
        self, inputs: Sequence[Any], run: Callable[[list[Any]], Sequence[Any]], kind: object
    ) -> None:
        self.inputs, self.run, self.kind = list(inputs), run, kind
        self.found: list[Any] = []
        self.error: Exception | None = None
        self.done = threading.Event()
        self.cancelled = False

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


class PoolingQueue:
    """The requests that wait; those that ask for the same share a call, and a long one takes several."""

    def __init__(self, characters: int) -> None:
        self.waiting: deque[PoolingRequest] = deque()
        self.characters = characters
        self.reads = self.closed = False  # in a call; for good

    def __bool__(self) -> bool:
        return self.reads or bool(self.waiting)

    def step(self) -> None:
        """Run the next inputs of the first request, and of others that ask for the same.

        A request that is not done by that goes to the end of the line.
        """
        together: list[tuple[PoolingRequest, list[Any]]] = []
        room, characters = TOGETHER, self.characters
        self.reads = bool(self.waiting)
        while self.waiting and room > 0 and characters > 0:
            if together and self.waiting[0].kind != together[0][0].kind:
                break
            reading = self.waiting.popleft()
            if reading.cancelled:
                continue
            inputs = []
            for row in itertools.islice(reading.inputs, len(reading.found), len(reading.found) + room):
                if characters <= 0:
                    break
                inputs.append(row)
                characters -= _length(row)
            together.append((reading, inputs))
            room -= len(inputs)
        if together:
            self._guarded(together)
            self.waiting += [reading for reading, _ in together if not reading.done.is_set()]
        if self.closed:
            self.close()
        self.reads = False

    def close(self) -> None:
        """End the requests that wait, and what is in a call after it."""
        self.closed = True
        for reading in list(self.waiting):
            reading.cancelled = True
            reading.end(BusyError("the server has ended: try another one"))

    def _guarded(self, together: Sequence[tuple[PoolingRequest, list[Any]]]) -> None:
        try:
            self._run(together)
        except Exception as error:
            if len(together) == 1:
                together[0][0].end(error)
            else:  # one of them is at fault: each by itself
                for request in together:
                    self._guarded([request])

    @staticmethod
    def _run(together: Sequence[tuple[PoolingRequest, list[Any]]]) -> None:
        results = together[0][0].run([row for _, inputs in together for row in inputs])
        at = 0
        for reading, inputs in together:
            reading.keep(results[at : at + len(inputs)])
            at += len(inputs)


def _length(one: Any) -> int:
    """Return the characters of an input: a text, a pair of texts, or anything else, which counts nothing."""
    if isinstance(one, str) or (isinstance(one, list) and one and isinstance(one[0], int)):
        return len(one)
    return sum(map(len, one)) if isinstance(one, list | tuple) else 0


def with_model(m: Bundle, model: Any) -> Bundle:
    """Return the same bundle with another model in it."""
    new = object.__new__(type(m))
    new.__dict__.update(m.__getstate__() | {"model": model})
    return new


LENS = "lens"
MOST_NAMES = 32  # of one request
MOST_TOKENS = 4096  # of the text and its source together
MOST_VALUES = 1 << 20  # numbers of one answer
TRIED = (3, 5)  # lengths from which sizes are told


class InsideView:
    """What may be seen of one model."""

    def __init__(self, m: Model) -> None:
        self.m = m

    def check(self, names: Sequence[str], length: int, sources: int) -> None:
        """Refuse names that are unknown, and more numbers than an answer may have."""
        refuse(len(names) > MOST_NAMES, f"inside has {len(names)} names: at most {MOST_NAMES} are taken")
        count, wider = 0, {TRIED[0]: length, TRIED[0] + 1: sources}
        for name in names:
            if name == LENS:
                count += (self.m.config.main.n_layers + 1) * length * len(Lens.__dataclass_fields__)
                continue
            for tap in _named(self.m, name):
                first, *_, second = self._shapes.get(tap, [(), ()])
                count += math.prod(a if a == b else wider.get(a, length) for a, b in zip(first, second))
        refuse(
            length + sources > MOST_TOKENS or count > MOST_VALUES,
            f"inside would give {count:,} numbers of {length + sources} tokens, and at most {MOST_VALUES:,} "
            f"of {MOST_TOKENS} are given: name fewer activations, or shorten the text",
        )

    @functools.cached_property
    def _shapes(self) -> dict[str, list[tuple[int, ...]]]:
        """The shapes of every activation at two lengths of the text; those of a source are one longer."""
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for length in TRIED:
            source = [0] * (length + 1) if self.m.config.family == "encoder-decoder" else None
            for name, value in self._prepared([0] * length, source).record("*")[1].items():
                shapes.setdefault(name, []).append(tuple(value.shape[1:]))
        return shapes

    def _prepared(self, ids: list[int], source: list[int] | None) -> Prepared:
        return prepare(self.m, ids) if source is None else prepare(self.m, source, ids)

    @torch.inference_mode()
    def look(self, names: Sequence[str], ids: list[int], source: Tensor | None) -> dict[str, Any]:
        """Return what was asked for by name, ready for JSON; `source` [1, S]."""
        given = None if source is None else source[0].tolist()
        patterns, values = [name for name in names if name != LENS], {}
        if patterns:
            seen = self._prepared(ids, given).record(*patterns)[1]
            values = {name: packed(value[0]) for name, value in seen.items()}
        if LENS in names:
            read = lens(self.m, ids) if given is None else lens(self.m, given, ids)
            values[LENS] = packed(vars(read))
        return values


def _named(m: Model, pattern: str) -> list[str]:
    try:
        return matching(m.config, pattern)
    except InputError as error:
        raise InputError(f"inside: {error}") from None


def packed(value: Any) -> Any:
    """Return a value as JSON has it; tensors become their shape and their numbers in base64."""
    if isinstance(value, Mapping):
        return {name: packed(item) for name, item in value.items()}
    if not isinstance(value, Tensor):
        return plain(value)
    numbers = on_cpu(value) if value.is_floating_point() else value.cpu()
    raw = numbers.contiguous().numpy()
    return {
        "shape": list(raw.shape),
        "dtype": str(raw.dtype),
        "base64": base64.b64encode(raw.tobytes()).decode(),
    }
