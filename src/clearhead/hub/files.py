"""Files: safetensors read strictly and mapped into memory, shards and their index, and writes that are whole or not at all.

Nothing here runs code from a file. Every mistake in a file is one line that names the file and what is wrong with it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from clearhead.errors import CheckpointError

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
MAX_HEADER = 100_000_000  # the format's own limit
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ALL_WEIGHTS = (WEIGHTS, INDEX, "model-*-of-*.safetensors", PICKLED, PICKLED_INDEX, "pytorch_model-*-of-*.bin")


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: shape and dtype known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]  # the file's own bytes, mapped: writing to them changes no file
    release: Callable[[], None] = lambda: (
        None
    )  # give back the memory that reading took, once what was read is copied


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number too long, too deep
        raise CheckpointError(f"{path} is not readable JSON: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def open_weights(folder: Path) -> dict[str, Entry]:
    """Every tensor of a model directory, by name: safetensors, sharded or not; else a pickle read without running code."""
    if (folder / WEIGHTS).exists():
        return open_safetensors(_inside(folder, WEIGHTS))
    if (folder / INDEX).exists():
        return _open_shards(folder, INDEX, open_safetensors)
    if (folder / PICKLED).exists():
        return open_pickle(_inside(folder, PICKLED))
    if (folder / PICKLED_INDEX).exists():
        return _open_shards(folder, PICKLED_INDEX, open_pickle)
    raise CheckpointError(
        f"{folder} holds no weights: looked for {WEIGHTS}, {INDEX}, {PICKLED}, {PICKLED_INDEX}"
    )


def _inside(folder: Path, name: str) -> Path:
    """`folder / name`, provided it stays in the folder, through symbolic links too.

    A hub cache keeps each file as a link from `snapshots/X/` into `blobs/`, both under one model's folder: such links
    are followed.
    """
    if not isinstance(name, str) or os.path.isabs(name) or ".." in Path(name).parts:
        raise CheckpointError(
            f"{folder / INDEX} names {name!r}: shards must lie in the model's own directory"
        )
    path = folder / name
    real, root = path.resolve(), folder.resolve()
    cache = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if not real.is_relative_to(root) and not (cache is not None and real.is_relative_to(cache)):
        raise CheckpointError(f"{path} is a link out of the model's directory: copy the file itself into it")
    return path


def _open_shards(folder: Path, index: str, opener: Callable[[Path], dict[str, Entry]]) -> dict[str, Entry]:
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{folder / index} has no weight_map of tensor names to files")
    shards: dict[str, dict[str, Entry]] = {}
    for name in sorted(set(weight_map.values())):
        path = _inside(folder, name)
        if not path.exists():
            raise CheckpointError(
                f"{folder / index} names the shard {name}, which is missing: fetch it again"
            )
        shards[name] = opener(path)
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise CheckpointError(
                f"{folder / index} says {tensor} is in {name}, and it is not: the download may be incomplete"
            )
    return {tensor: shards[name][tensor] for tensor, name in weight_map.items()}


def open_safetensors(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file. The header is checked whole before any tensor is looked at."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{path} is no whole safetensors file: its header claims {length:,} bytes and the file has {size:,}"
                )
            header = json.loads(file.read(length).decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is no safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is no safetensors file: its header is not a table of tensors")
    header.pop("__metadata__", None)
    body = 8 + length
    spans = [(name, *_span(path, name, entry, size - body)) for name, entry in header.items()]
    end = 0
    for name, _, _, start, stop in sorted(spans, key=lambda span: (span[3], span[4])):
        if start != end:
            what = (
                "overlaps the tensor before it"
                if start < end
                else f"leaves {start - end} bytes before it unused"
            )
            raise CheckpointError(f"{path}: tensor {name} {what}; the file is damaged")
        end = stop
    if end != size - body:
        raise CheckpointError(
            f"{path} has {size - body - end} bytes after its last tensor; the file is damaged"
        )
    mapped = _map(path) if end else None

    def entry(dtype: torch.dtype, shape: tuple[int, ...], start: int, stop: int) -> Entry:
        def read() -> Tensor:
            if start == stop or mapped is None:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=body + start).view(
                shape
            )

        def release() -> None:
            if start < stop and mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
                page = (body + start) // mmap.PAGESIZE * mmap.PAGESIZE
                mapped.madvise(mmap.MADV_DONTNEED, page, body + stop - page)

        return Entry(shape, dtype, read, release)

    return {name: entry(dtype, shape, start, stop) for name, dtype, shape, start, stop in spans}


def _span(path: Path, name: str, entry: Any, room: int) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    try:
        kind, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(
            f"{path}: the header's entry for {name} lacks dtype, shape or data_offsets"
        ) from None
    if not isinstance(kind, str) or kind not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name} has dtype {kind!r}; known are {', '.join(DTYPES)}")
    whole = isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in [*shape, start, stop])
    if not whole:
        raise CheckpointError(
            f"{path}: tensor {name} has shape {shape!r} and offsets {start!r}, {stop!r}: they must be whole numbers"
        )
    if not start <= stop <= room:
        raise CheckpointError(
            f"{path}: tensor {name} lies at bytes {start} to {stop} of {room}: the file is cut short or damaged"
        )
    if stop - start != math.prod(shape) * DTYPES[kind].itemsize:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {shape} and dtype {kind} does not fill bytes {start} to {stop}"
        )
    return DTYPES[kind], tuple(shape), start, stop


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def open_pickle(path: Path) -> dict[str, Entry]:
    """The tensors of a PyTorch file, read with `weights_only=True`: a pickle that would run code is refused."""
    try:
        mapped = zipfile.is_zipfile(path)  # files from before PyTorch 1.6 are not, and are read whole
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path} is refused: it is damaged, or a pickle that holds more than tensors ({first[:160]})"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a table of tensors")
    tensors = {
        name: value for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)
    }

    def entry(tensor: Tensor) -> Entry:
        return Entry(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    return {name: entry(tensor) for name, tensor in tensors.items()}


# Writing --------------------------------------------------------------------------------------------------------------


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill. When the block ends well its files take their place in `target`; otherwise nothing is left of it.

    Other files of `target` stay, save for weights: one directory holds one model.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file: name a directory to write to")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"cannot write beside {target}: {error.strerror}") from None
    try:
        yield work
        new = sorted(path.relative_to(work) for path in work.rglob("*") if path.is_file())
        for name in new:
            (work / name).chmod(0o644)
            _sync(work / name)
        if not target.exists():
            work.chmod(0o755)
            os.replace(work, target)
        else:
            _replace_all(work, target, new)
        _sync(target)
        _sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _replace_all(work: Path, target: Path, new: list[Path]) -> None:
    """Move files into place, config.json last; if one cannot be moved, put back the old ones."""
    stale = [path.relative_to(target) for pattern in ALL_WEIGHTS for path in target.glob(pattern)]
    old = work / ".old"
    done: list[Path] = []
    try:
        for name in sorted(new, key=lambda name: name.name == "config.json") + [
            name for name in stale if name not in new
        ]:
            done.append(name)
            if (target / name).exists():
                _keep(target / name, old / name)
            (target / name).parent.mkdir(exist_ok=True)
            if name in new:
                os.replace(work / name, target / name)
            else:
                (target / name).unlink()
    except OSError:
        for name in done:
            if (old / name).exists():
                os.replace(old / name, target / name)
            elif name in new and not (work / name).exists():
                (target / name).unlink(missing_ok=True)
        raise


def _keep(path: Path, copy: Path) -> None:
    """A second name for a file, or a copy where the file system has no such names: so there is no moment without it."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, copy, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, copy, follow_symlinks=False)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """A JSON object, readable by people."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_text(path: Path, text: str) -> None:
    """A file that is there whole or, if it cannot be written, as it was."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        _sync(new)
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from None


def write_weights(
    folder: Path, sizes: dict[str, int], make: Callable[[str], Tensor], shard_size: int
) -> None:
    """Safetensors files of at most `shard_size` bytes each: `sizes` in bytes by name, `make` gives a tensor when its turn comes."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    names = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    for file, tensors in zip(names, shards):
        save_file(
            {name: make(name).contiguous() for name in tensors}, folder / file, metadata={"format": "pt"}
        )
    if len(shards) > 1:
        weight_map = {name: file for file, tensors in zip(names, shards) for name in tensors}
        write_json(
            folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        )
