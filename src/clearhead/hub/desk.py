"""Where weights are read to, so that no memory is taken twice."""

import dataclasses
import math

import torch
from torch import Tensor

from clearhead.hub.rules import SAME, Rule
from clearhead.hub.weights import Entry, allocated


class Desk:
    """Memory that one tensor after the other is read into: fresh memory takes as long as reading."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def placed(self, rule: Rule, entry: Entry, own: Tensor) -> Entry:
        """Return an entry that reads into `own`, its parameter, where nothing is done to it, or else here."""
        if entry.fill is None:
            return entry
        as_it_is = rule.operation is SAME and (entry.shape, entry.dtype) == (tuple(own.shape), own.dtype)

        def read() -> Tensor:
            to = own if as_it_is else self._room(entry)
            assert entry.fill is not None
            entry.fill(to)
            return to

        return dataclasses.replace(entry, read=read)

    def _room(self, entry: Entry) -> Tensor:
        size = math.prod(entry.shape) * entry.dtype.itemsize
        if len(self._bytes) < size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # before more is taken
            self._bytes = allocated({"": (size,)}, {"": torch.uint8})[""]
        return self._bytes[:size].view(entry.dtype).view(entry.shape)
