"""Weights on disk, read and written: safetensors, read or mapped; pickles that hold only tensors; shards.

Nothing here runs code from a file. Every mistake in a file is one line that names the file and what is wrong
with it. Several processes may write together: each has its own files, and helps with the others' tensors.
"""

import itertools
import json
import math
import mmap
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from clearhead.errors import CheckpointError, first_line
from clearhead.hub.files import (
    INDEX,
    PICKLED,
    PICKLED_INDEX,
    WEIGHTS,
    index_of,
    read_json,
    reading,
    refuse,
    write_json,
)
from clearhead.run.kernels.transpose import copied

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Shape = tuple[int, ...]
MAX_HEADER = 100_000_000  # bytes: the format's own limit
ALIGNED = 64  # bytes: matmuls of one row may add up in another order where a weight begins elsewhere
SMALL = 1 << 20  # bytes of a tensor that costs nothing to copy
CAN_MAP = os.name == "posix"  # Windows lets nobody replace a file that is mapped


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: shape and dtype are known without reading it."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]  # where mapped, the file's own pages: writing to them changes no file
    release: Callable[[], None] = lambda: None  # gives pages back, once a copy was made


def equal(a: Entry, b: Entry) -> bool:
    """Return whether two tensors of a file are the same, in shape and every number."""
    return a is b or (a.shape == b.shape and torch.equal(a.read(), b.read()))


def held(tensor: Tensor) -> Entry:
    """Return an entry for a tensor that is in memory."""
    return Entry(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def allocated(shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return tensors of these shapes in one block of memory, which is taken as they are filled.

    PyTorch may round each tensor of its own up to huge pages, which adds a tenth and more.
    """
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    starts = dict(
        zip(sizes, itertools.accumulate((math.ceil(size / 64) * 64 for size in sizes.values()), initial=0))
    )
    total = sum(sizes.values()) + 64 * len(sizes) + 1
    try:
        memory = mmap.mmap(-1, total, access=mmap.ACCESS_COPY)
    except (OSError, OverflowError):
        raise CheckpointError(f"the model takes {total:,} bytes of memory, which are not there") from None
    return {
        name: torch.frombuffer(memory, dtype=dtypes[name], count=math.prod(shape), offset=starts[name]).view(
            shape
        )
        if sizes[name]
        else torch.empty(shape, dtype=dtypes[name])
        for name, shape in shapes.items()
    }


def open_weights(folder: Path, mapped: bool = True) -> dict[str, Entry]:
    """Return every tensor of a model directory, by name: from safetensors, or else from a pickle.

    Tensors of a `mapped` file are its pages, copied as they are written to: the file never changes by that.
    """
    for name, index, opener in ((WEIGHTS, INDEX, open_safetensors), (PICKLED, PICKLED_INDEX, open_pickle)):
        if (entries := _opened(folder, name, index, partial(opener, mapped=mapped))) is not None:
            return entries
    raise CheckpointError(
        f"{folder} holds no weights: looked for {WEIGHTS}, {INDEX}, {PICKLED}, {PICKLED_INDEX}"
    )


def open_tensors(folder: Path, stem: str) -> dict[str, Entry]:
    """Return what `write_tensors` wrote next to a model: mapped, in one file or several."""
    tensors = _opened(folder, f"{stem}.safetensors", index_of(stem), open_safetensors)
    if tensors is None:
        raise CheckpointError(f"{folder} holds no {stem}.safetensors and no {index_of(stem)}")
    return tensors


def _opened(
    folder: Path, name: str, index: str, opener: Callable[[Path], dict[str, Entry]]
) -> dict[str, Entry] | None:
    """Return the tensors of one file, or of the files that an index names; None: there is neither."""
    if (folder / name).exists():
        return opener(_inside(folder, name))
    return _open_shards(folder, index, opener) if (folder / index).exists() else None


def _inside(folder: Path, name: str) -> Path:
    """Return `folder / name`, provided that it stays in the folder, through symbolic links too.

    A hub cache keeps each file as a link from `snapshots/X/` into `blobs/`, both under one model's folder:
    such links are followed.
    """
    refuse(
        os.path.isabs(name) or ".." in Path(name).parts,
        f"{folder / INDEX} names {name!r}: shards must lie in the model's own directory",
    )
    path, root = folder / name, folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    refuse(
        not any(path.resolve().is_relative_to(place) for place in allowed),
        f"{path} is a link out of the model's directory: copy the file itself into it",
    )
    return path


def _open_shards(folder: Path, index: str, opener: Callable[[Path], dict[str, Entry]]) -> dict[str, Entry]:
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{folder / index} has no weight_map of tensor names to files")
    shards: dict[str, dict[str, Entry]] = {}
    for name in sorted(set(weight_map.values())):
        path = _inside(folder, name)
        refuse(
            not path.exists(), f"{folder / index} names the shard {name}, which is missing: fetch it again"
        )
        shards[name] = opener(path)
    for tensor, name in weight_map.items():
        refuse(
            tensor not in shards[name],
            f"{folder / index} says {tensor} is in {name}, and it is not: the download may be incomplete",
        )
    return {tensor: shards[name][tensor] for tensor, name in weight_map.items()}


# Safetensors ------------------------------------------------------------------------------------------------


def open_safetensors(path: Path, mapped: bool = True) -> dict[str, Entry]:
    """Return the tensors of one safetensors file. The whole header is checked before any tensor is read."""
    with reading(path, "is no safetensors file: its header is not JSON"):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            refuse(
                length > min(MAX_HEADER, size - 8),
                f"{path} is no whole safetensors file: "
                f"its header claims {length:,} bytes and the file has {size:,}",
            )
            header = json.loads(file.read(length).decode("utf-8"))
    refuse(
        not isinstance(header, dict), f"{path} is no safetensors file: its header is not a table of tensors"
    )
    header.pop("__metadata__", None)
    body, room = 8 + length, size - 8 - length
    spans = {name: _span(path, name, stated, room) for name, stated in header.items()}
    end = 0
    for name, (_, _, start, stop) in sorted(spans.items(), key=lambda item: item[1][2:]):
        refuse(start < end, f"{path}: tensor {name} overlaps the tensor before it; the file is damaged")
        refuse(
            start != end,
            f"{path}: tensor {name} leaves {start - end} bytes before it unused; the file is damaged",
        )
        end = stop
    refuse(end != room, f"{path} has {room - end} bytes after its last tensor; the file is damaged")
    pages = map_file(path) if mapped else None
    return {name: stored_entry(path, pages, body, *span) for name, span in spans.items()}


def _span(path: Path, name: str, stated: Any, room: int) -> tuple[torch.dtype, Shape, int, int]:
    """Return dtype, shape, first byte and end of a tensor; bytes count from the end of the header."""
    with reading(path, f"has a header whose entry for {name} lacks dtype, shape or data_offsets"):
        kind, shape, (start, stop) = stated["dtype"], stated["shape"], stated["data_offsets"]
    wrong = f"{path}: tensor {name}"
    refuse(
        not isinstance(kind, str) or kind not in DTYPES,
        f"{wrong} has dtype {kind!r}; known are {', '.join(DTYPES)}",
    )
    whole = isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in [*shape, start, stop])
    refuse(
        not whole, f"{wrong} has shape {shape!r} and offsets {start!r}, {stop!r}: they must be whole numbers"
    )
    refuse(
        not start <= stop <= room,
        f"{wrong} lies at bytes {start} to {stop} of {room}: the file is cut short or damaged",
    )
    refuse(
        stop - start != math.prod(shape) * DTYPES[kind].itemsize,
        f"{wrong} of shape {shape} and dtype {kind} does not fill bytes {start} to {stop}",
    )
    refuse(
        start == stop and math.prod(n or 1 for n in shape) >= 2**63,
        f"{wrong} has shape {shape}: no tensor has",
    )
    return DTYPES[kind], tuple(shape), start, stop


def map_file(path: Path) -> mmap.mmap | None:
    """Map a file, privately: pages are copied when written to. None where that is not possible."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if CAN_MAP else None
    except (OSError, ValueError):  # some network file systems
        return None


def stored_entry(
    path: Path, pages: mmap.mmap | None, body: int, dtype: torch.dtype, shape: Shape, start: int, stop: int
) -> Entry:
    """Return how to read a tensor of a file whose header ends at `body`: from its pages, if it is mapped."""
    first, last = body + start, body + stop
    if start == stop:
        return Entry(shape, dtype, lambda: torch.empty(shape, dtype=dtype))

    def view() -> Tensor:
        tensor = torch.frombuffer(pages, dtype=dtype, count=math.prod(shape), offset=first).view(shape)
        # Processors expect numbers in step. Large tensors of others' files stay mapped wherever they begin.
        apart = first % dtype.itemsize or (first % ALIGNED and stop - start <= SMALL)
        return tensor.clone() if apart else tensor

    def release() -> None:
        if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            page = first // mmap.PAGESIZE * mmap.PAGESIZE
            pages.madvise(mmap.MADV_DONTNEED, page, last - page)

    def copy() -> Tensor:
        tensor = allocated({"": shape}, {"": dtype})[""]  # goes back to the system at once, not to a heap
        into = tensor.view(-1).view(torch.uint8).numpy().data
        with reading(path, "cannot be read"), path.open("rb") as file:
            file.seek(first)
            refuse(
                file.readinto(into) != len(into),
                f"{path} has become shorter while it was read: load it again",
            )
        return tensor

    return Entry(shape, dtype, copy) if pages is None else Entry(shape, dtype, view, release)


# Pickles ----------------------------------------------------------------------------------------------------


def open_pickle(path: Path, mapped: bool = True) -> dict[str, Entry]:
    """Return the tensors of a PyTorch file, read with `weights_only=True`: code in a pickle is refused."""
    state = unpickled(path, mapped)
    tensors = {
        name: value for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)
    }
    for name, tensor in tensors.items():
        _check_plain(path, name, tensor)

    def drop(name: str) -> None:
        tensors.pop(name, None)

    return {
        name: Entry(
            tuple(tensor.shape), tensor.dtype, partial(tensors.__getitem__, name), partial(drop, name)
        )
        for name, tensor in tensors.items()
    }


def unpickled(path: Path, mapped: bool = False) -> dict[Any, Any]:
    """Return the table that a PyTorch file holds; no code in it is run."""
    try:  # files from before PyTorch 1.6 are read whole
        mapped = mapped and CAN_MAP and zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise CheckpointError(
            f"{path} is refused: it is damaged, or a pickle of more than tensors ({first_line(error)})"
        ) from None
    refuse(not isinstance(state, dict), f"{path} holds a {type(state).__name__}, not a table of tensors")
    return dict(state)


def _check_plain(path: Path, name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose numbers do not all lie in the file, each once: sparse, nested, quantized, ..."""
    kinds = {
        "nested": tensor.is_nested,
        str(tensor.layout).removeprefix("torch."): tensor.layout != torch.strided,
        f"of dtype {tensor.dtype}": tensor.dtype not in DTYPES.values(),
        "without data": tensor.is_meta,
    }
    if not any(kinds.values()):
        kinds["expanded"] = tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize
    for kind, is_so in kinds.items():
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
        refuse(is_so, f"{path}: tensor {name} is {kind}: save it as a dense tensor of {known}")


def finite(folder: Path, name: str, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors that a file holds under this name; refuse those with a NaN or an infinity.

    A sum over such numbers is none itself, and takes a fraction of the time that reading them took.
    """
    for tensor in tensors:
        if tensor.is_floating_point() and not math.isfinite(tensor.sum()):
            count = tensor.numel() - int(
                tensor.isfinite().sum()
            )  # none: the sum of large numbers is too large
            refuse(
                count,
                f"{folder}: tensor {name} has {count:,} numbers that are NaN or infinite: it is damaged, "
                "or training diverged; ch.load(..., check_finite=False) opens it all the same",
            )
    return tensors


def cast(tensor: Tensor, dtype: torch.dtype, name: str, into: Tensor | None = None) -> Tensor:
    """Return a tensor in another dtype, in `into` where given; refuse numbers that are too large for it."""
    new = tensor.to(dtype).contiguous() if into is None else copied(tensor, into)
    narrower = tensor.is_floating_point() and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    if narrower and new.isinf().any() and not tensor.isinf().any():
        raise CheckpointError(
            f"{name} has a number as large as {float(tensor.abs().max()):.3g}, and "
            f"{str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:.3g}: "
            "choose bfloat16 or float32"
        )
    return new


# Writing ----------------------------------------------------------------------------------------------------


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
        ends = list(itertools.accumulate((tensor.size for tensor in tensors.values()), initial=0))
        header = {"__metadata__": {"format": "pt"}} | {
            name: {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": ends[place:][:2],
            }
            for place, (name, tensor) in enumerate(tensors.items())
        }
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % ALIGNED)
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
                            writer.add(tensors[name].make([source for source in whole if source is not None]))
                        except Exception as error:
                            failure = error
    if failure is not None:
        raise failure
    if rank == 0 and len(files) > 1:
        weight_map = {name: file for file, names in files for name in names}
        total = sum(tensor.size for tensor in tensors.values())
        write_json(folder / index_of(stem), {"metadata": {"total_size": total}, "weight_map": weight_map})


def _files(
    stem: str, tensors: Mapping[str, Outgoing], shard_size: float, processes: int
) -> Sequence[tuple[str, list[str]]]:
    """Return the files to write, each with its tensors: those that keep the next aligned come first."""
    shards: list[list[str]] = [[]]
    total, begun, filled = sum(tensor.size for tensor in tensors.values()), 0, 0
    for name, tensor in tensors.items():
        share = processes > 1 and begun >= total * len(shards) / processes  # the next process's turn
        if shards[-1] and (share or filled + tensor.size > shard_size):
            shards.append([])
            filled = 0
        shards[-1].append(name)
        begun, filled = begun + tensor.size, filled + tensor.size
    count = len(shards)
    return [
        (
            f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05}-of-{count:05}.safetensors",
            sorted(names, key=lambda name: -math.gcd(tensors[name].size, ALIGNED)),
        )
        for number, names in enumerate(shards, start=1)
    ]
