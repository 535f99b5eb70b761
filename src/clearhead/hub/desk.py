"""Where weights are read to: to their parameters, with no memory taken for a second copy."""

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import compress

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.hub.rules import JOINED, JOINED_TRANSPOSED, SAME, TRANSPOSED, Rule, Shape
from clearhead.hub.weights import Entry, allocated, cast
from clearhead.run.kernels.library import compiled_before

PIECE = 1 << 22  # bytes read at a time of what is turned or converted: they stay near the processor
LINES = 64  # rows turned together: their columns fill whole lines of the cache
TURNED = (TRANSPOSED, JOINED_TRANSPOSED)

SHARES = 16  # of the tensors: passing each on its own to a thread takes as long as reading a small one

Source = tuple[Rule, Entry]


def shared(
    way: Callable[[Source], list[Tensor]], sources: list[Source], readers: int
) -> Iterator[tuple[Source, list[Tensor]]]:
    """Yield every source with what `way` makes of it, in several threads; the sources come largest first."""
    shares = [sources[first::SHARES] for first in range(min(SHARES, len(sources)))]
    with ThreadPoolExecutor(readers) as pool:
        for share, found in zip(shares, pool.map(lambda share: [way(source) for source in share], shares)):
            yield from zip(share, found)


def loaded(rule: Rule, entry: Entry, shapes: list[Shape], config: ModelConfig) -> list[Tensor]:
    """Read one tensor as our parameters; where that makes copies, give the file's pages back at once."""
    theirs = entry.read()
    if not theirs.is_floating_point():
        return [theirs]
    try:
        ours = rule.operation.load([theirs], shapes, config)
    except RuntimeError:  # it cannot be split into those shapes
        return [theirs]
    if rule.operation.copies:
        entry.release()
    return ours


class Ahead:
    """Reads the token table, often the largest tensor, in a thread of its own while the model is built."""

    def __init__(self, entries: Iterable[Entry], shape: Shape, dtype: torch.dtype | None) -> None:
        """Begin with the first entry of this shape, unless it will be converted."""
        self._tables = [
            entry
            for entry in entries
            if entry.fill is not None and entry.shape == shape and dtype in (None, entry.dtype)
        ][:1]
        pool = ThreadPoolExecutor(1)
        self._readings = [pool.submit(entry.read) for entry in self._tables]
        pool.shutdown(wait=False)  # the thread ends when it has read

    def claim(
        self, sources: list[Source], shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, Future[Tensor]]:
        """Take the table off the sources and return its parameter, if it is one parameter as it is."""
        readings, self._readings = self._readings, []  # what nobody claims is not kept
        found = [source for source in sources if any(source[1] is table for table in self._tables)]
        for rule, entry in found:
            name = rule.ours[0]
            alike = entry.dtype.is_floating_point and entry.dtype == dtypes[name]
            if rule.operation is SAME and alike and entry.shape == shapes[name] and len(found) == 1:
                sources.remove((rule, entry))
                return {name: readings[0]}
        return {}


class Desk(threading.local):
    """Reads tensors to their parameters in `room`, or to memory of the thread that reads.

    That memory is for one tensor after the other: fresh memory takes as long as reading.
    """

    def __init__(self, room: Mapping[str, Tensor]) -> None:
        self._room = room
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def divided(self, sources: list[Source]) -> tuple[list[Source], list[Source]]:
        """Return the tensors that `fill` can read, and the others."""
        if any(rule.operation in TURNED for rule, _ in sources):
            compiled_before()  # looked up once, not by every thread at the same time
        direct = [bool(self._room) and self._can_fill(*source) for source in sources]
        return list(compress(sources, direct)), [source for source, yes in zip(sources, direct) if not yes]

    def _can_fill(self, rule: Rule, entry: Entry) -> bool:
        """Return True for numbers that are only joined, turned or converted, if the shapes fit."""
        shapes = [tuple(self._room[name].shape) for name in rule.ours]
        whole = shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return (
            entry.fill is not None
            and entry.dtype.is_floating_point
            and rule.operation in (SAME, JOINED, *TURNED)
            and whole == (entry.shape[::-1] if rule.operation in TURNED else entry.shape)
            and all(shape[1:] == whole[1:] for shape in shapes)
        )

    def placed(self, entry: Entry) -> Entry:
        """Return an entry that reads the whole tensor into this memory, where it can."""
        if entry.fill is None:
            return entry

        def read() -> Tensor:
            to = self._space(entry.shape, entry.dtype)
            assert entry.fill is not None
            entry.fill(to, 0)
            return to

        return dataclasses.replace(entry, read=read)

    def fill(self, source: Source) -> list[Tensor]:
        """Read a tensor to its parameters: at once as it is, or in pieces that are turned or converted."""
        rule, entry = source
        own = [self._room[name] for name in rule.ours]
        if rule.operation in TURNED and len(entry.shape) == 2:
            self._turn(rule, entry, own)
            return own
        start = 0
        for parameter in own:
            self._copy(rule, entry, start, parameter)
            start += parameter.numel()
        return own

    def _copy(self, rule: Rule, entry: Entry, start: int, own: Tensor) -> None:
        """Fill a parameter with the numbers from `start` on."""
        assert entry.fill is not None
        if entry.dtype == own.dtype:
            return entry.fill(own, start)
        for part in torch.split(own.view(-1), PIECE // entry.dtype.itemsize):
            piece = self._space(tuple(part.shape), entry.dtype)
            entry.fill(piece, start)
            cast(piece, own.dtype, rule.theirs, into=part)
            start += len(part)

    def _turn(self, rule: Rule, entry: Entry, own: list[Tensor]) -> None:
        """Read some rows at a time of a matrix [in, out]: they are columns of its parameters [out, in]."""
        assert entry.fill is not None
        height, width = entry.shape
        together = max(1, PIECE // max(1, width * entry.dtype.itemsize) // LINES) * LINES
        for start in range(0, height, together):
            piece = self._space((min(together, height - start), width), entry.dtype)
            entry.fill(piece, start * width)
            columns = [parameter[:, start : start + together] for parameter in own]
            for part, to in zip(torch.split(piece, [len(parameter) for parameter in own], 1), columns):
                cast(part.t(), to.dtype, rule.theirs, into=to)

    def _space(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if len(self._bytes) < size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # before more is taken
            self._bytes = allocated({"": (size,)}, {"": torch.uint8})[""]
        return self._bytes[:size].view(dtype).view(shape)
