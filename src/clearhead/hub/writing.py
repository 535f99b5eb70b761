"""Tensors on their way to disk: safetensors files, each tensor made when its turn comes, and their index.

Several processes may write together: each has its own files, and helps with the tensors of the others.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from clearhead.hub.files import index_of, write_json
from clearhead.hub.weights import DTYPES, Shape

NAMES = {dtype: name for name, dtype in DTYPES.items()}
Fetch = Callable[[str, int], Tensor | None]  # brings a whole tensor to a process; the others get None


@dataclass(frozen=True)
class Outgoing:
    """A tensor to be written: its form, and how it is made of others."""

    shape: Shape
    dtype: torch.dtype
    sources: tuple[str, ...]
    make: Callable[[list[Tensor]], Tensor] = lambda sources: sources[0]

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """One file, to which tensors are added in the order of `tensors`."""

    def __init__(self, path: Path, tensors: Mapping[str, Outgoing]) -> None:
        ends = list(itertools.accumulate((one.size for one in tensors.values()), initial=0))
        header = {"__metadata__": {"format": "pt"}} | {
            name: {"dtype": NAMES[one.dtype], "shape": list(one.shape), "data_offsets": ends[place:][:2]}
            for place, (name, one) in enumerate(tensors.items())
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8 bytes
        self.file = path.open("wb")
        self.file.write(len(text).to_bytes(8, "little") + text)

    def add(self, tensor: Tensor) -> None:
        """Write the next tensor."""
        if tensor.numel():
            self.file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())


def write_tensors(
    folder: Path,
    stem: str,
    tensors: Mapping[str, Outgoing],
    fetch: Fetch,
    shard_size: float = math.inf,
    rank: int = 0,
    processes: int = 1,
) -> None:
    """Write tensors as `stem`.safetensors, or as several files of about `shard_size` bytes with an index.

    Each of `processes` calls it with the same tensors and its `rank`, and writes some of the files. A process
    that fails to write goes on to help the others, and raises at the end.
    """
    files = _files(stem, tensors, shard_size, processes)
    failure: Exception | None = None
    for first in range(0, len(files), processes):
        some = files[first : first + processes]
        with ExitStack() as stack:
            try:
                if rank < len(some):
                    name, names = some[rank]
                    writer = stack.enter_context(
                        SafetensorsWriter(folder / name, {each: tensors[each] for each in names})
                    )
            except OSError as error:
                failure = error
            # One tensor of each file in turn, so that all processes write at once.
            for row in itertools.zip_longest(*(names for _, names in some)):
                for owner, name in ((owner, name) for owner, name in enumerate(row) if name is not None):
                    whole = [fetch(source, owner) for source in tensors[name].sources]
                    if owner == rank and failure is None:
                        try:
                            writer.add(tensors[name].make([one for one in whole if one is not None]))
                        except Exception as error:
                            failure = error
    if failure is not None:
        raise failure
    if rank == 0 and len(files) > 1:
        weight_map = {name: file for file, names in files for name in names}
        total = sum(one.size for one in tensors.values())
        write_json(folder / index_of(stem), {"metadata": {"total_size": total}, "weight_map": weight_map})


def _files(
    stem: str, tensors: Mapping[str, Outgoing], shard_size: float, processes: int
) -> Sequence[tuple[str, list[str]]]:
    """Return the files to write, each with the names of its tensors; wide numbers first, for alignment."""
    shards: list[list[str]] = [[]]
    total, begun, filled = sum(one.size for one in tensors.values()), 0, 0
    for name, one in tensors.items():
        share = processes > 1 and begun >= total * len(shards) / processes  # the next process's turn
        if shards[-1] and (share or filled + one.size > shard_size):
            shards.append([])
            filled = 0
        shards[-1].append(name)
        begun, filled = begun + one.size, filled + one.size
    count = len(shards)
    return [
        (
            f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05}-of-{count:05}.safetensors",
            sorted(names, key=lambda name: -tensors[name].dtype.itemsize),
        )
        for number, names in enumerate(shards, start=1)
    ]
