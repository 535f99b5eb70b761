"""Examples as ids on disk: encoded once, memory-mapped from then on.

A cache is a folder of flat arrays and a `meta.json` that lists them with their sizes and checksums. It is
written under a temporary name and renamed when complete. A cache that disagrees with its `meta.json` is
written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from clearhead.errors import InputError, refuse
from clearhead.hub.tokens.chat import ChatTemplate
from clearhead.learn.batches.batching import Batching, Encoded
from clearhead.learn.batches.encoding import Columns, Encoder
from clearhead.learn.batches.rows import Frame
from clearhead.learn.data.examples import Corpus, Images

VERSION = 2  # of what is written: raise it when the encoding changes, and old caches are written again
META = "meta.json"
NOTED = 0.001  # the share of unknown tokens above which a note says so


def encode_corpus(
    corpus: Corpus,
    side: Literal["train", "validation"],
    batching: Batching,
    tokenizer: Tokenizer | None,
    labels: Sequence[str],
    folder: str | Path,
    *,
    special: Mapping[str, int],
    template: ChatTemplate | None = None,
) -> Encoded:
    """Return the examples of one side as ids, from the cache in `folder`, which is written first where it is
    missing.

    Rows keep their full length: batches cut them to what a model takes, so a cache serves models of any
    length.

    Args:
        corpus: the examples.
        side: which of its two sides.
        batching: how the task encodes its examples.
        tokenizer: its truncation and padding are not applied. None for images.
        labels: names of classes or tags, in the order of their numbers.
        folder: where the cache is, or is to be.
        special: ids of special tokens by role; text needs the one between documents.
        template: the chat template, for tasks that learn from conversations.
    """
    task, shape = batching.task, batching.shape.name
    refuse(
        corpus.shape != shape,
        f"the task {task} learns from {shape}, and the data are {corpus.shape}: "
        "choose another data.task, or other data",
    )
    if isinstance(corpus.train, Images):
        return _images(task, corpus.train, cast(Images, getattr(corpus, side)))
    if tokenizer is None:
        raise InputError(f"the task {task} needs a tokenizer")
    separator = special.get(batching.separator) if batching.separator else None
    described = tokenizer.to_str()
    hashed = hashlib.sha256(described.encode()).hexdigest()
    parts = [VERSION, corpus.fingerprint, hashed, task, side, list(labels), separator]
    parts += [] if template is None else [template.source, dict(template.tokens), template.tool_source]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    place = Path(folder) / f"{task}-{side}-{key[:16]}"
    found = _open(place, key)
    if found is None:
        encoder = Encoder(Tokenizer.from_str(described), dict(zip(labels, count())), separator, template)
        with _new_folder(place) as work:
            _encode(getattr(corpus, side), batching, encoder, _Files(work), key)
        found = _open(place, key)
    if found is None:
        raise InputError(
            f"the encoded data in {place} cannot be read back: "
            "check the disk, or set data.cache to another folder"
        )
    return found


def _encode(rows: Any, batching: Batching, encoder: Encoder, files: _Files, key: str) -> None:
    """Write the arrays of one side, then the table of them."""
    tokenizer, unk = encoder.tokenizer, encoder.unknown()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    lost = tokens = unknown = 0
    assert batching.encode is not None
    for group in batching.encode(rows, encoder):
        lost += int(np.sum(group.pop("lost", 0)))
        for ids, _ in (column for column in group.values() if isinstance(column, tuple)):
            tokens += len(ids)
            # Where one token is both, the tokenizer spells bytes, and nothing is unknown.
            unknown += int(np.sum(ids == unk)) if unk != encoder.separator else 0
        files.append(group, np.uint16 if vocab_size < 2**16 else np.uint32)
    notes = [f"{lost:,} words have no token and so no tag"] if lost else []
    if unknown > NOTED * tokens:
        notes.append(
            f"{unknown / tokens:.1%} of the tokens are unknown to the tokenizer, "
            "and all of them look alike to the model"
        )
    named = (tokenizer.token_to_id(f"<extra_id_{number}>") for number in count())
    sentinels = takewhile(lambda token: token is not None, named) if batching.sentinels else ()
    added = tokenizer.get_added_tokens_decoder().items()
    facts = {
        "task": batching.task,
        "vocab_size": vocab_size,
        "specials": sorted(number for number, token in added if token.special),
        "sentinels": list(sentinels),
        "frame": encoder.frame(pair=False),
        "pair_frame": encoder.frame(pair=True),
        "n_unknown": unknown,
        "notes": notes,
    }
    files.close({"key": key, "facts": facts})


def _images(task: str, train: Images, images: Images) -> Encoded:
    """Return pictures as they are, with mean and deviation of each channel of the training side."""
    levels, channels = np.arange(256) / 255, np.moveaxis(np.asarray(train.pixels), -1, 0)  # C N H W
    counts = np.stack([np.bincount(channel.reshape(-1), minlength=256) for channel in channels])
    weights = counts / np.maximum(1, counts.sum(1, keepdims=True))  # C 256
    mean = weights @ levels
    deviation = np.sqrt(weights @ levels**2 - mean**2)
    std = np.where(deviation > 1e-6, deviation, 1.0)  # a channel of one colour is only shifted
    scale = {"mean": mean.astype(np.float32), "std": std.astype(np.float32)}
    return Encoded(task, {"pixels": np.asarray(images.pixels), "labels": images.labels, **scale})


# On disk ---------------------------------------------------------------------------------------------------


@dataclass
class _Files:
    """Arrays that grow at their end, each in a file of its own."""

    folder: Path
    # Of each file: dtype, shape, bytes, checksum.
    table: dict[str, dict[str, Any]] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)  # the last offset of each ragged column

    def append(self, columns: Columns, ids: type[np.unsignedinteger[Any]]) -> None:
        """Append each column to its file; the ids of ragged columns are written as `ids`."""
        for name, column in columns.items():
            if not isinstance(column, tuple):
                self._write(name, column)
                continue
            values, lengths = column
            total = self.totals.get(name, 0)
            offsets = total + np.cumsum(np.append(0, lengths), dtype=np.int64)
            self._write(name, values.astype(ids))
            self._write(f"{name}_offsets", offsets[1 if name in self.totals else 0 :])
            self.totals[name] = int(offsets[-1])

    def _write(self, name: str, array: NDArray[Any]) -> None:
        fresh = {"dtype": array.dtype.str, "shape": list(array.shape[1:]), "bytes": 0, "checksum": 0}
        entry = self.table.setdefault(name, fresh)
        data = np.ascontiguousarray(array).tobytes()
        with _writing(self.folder.parent), (self.folder / name).open("ab") as file:
            file.write(data)
        entry["bytes"] += len(data)
        entry["checksum"] = zlib.crc32(data, entry["checksum"])

    def close(self, meta: Mapping[str, Any]) -> None:
        with _writing(self.folder.parent):
            (self.folder / META).write_text(json.dumps({**meta, "arrays": self.table}))


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn the error of a folder that cannot be written into one clear line."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write encoded data to {folder}: {error.strerror or error}; "
            "make room there, or set data.cache to another folder"
        ) from None


@contextmanager
def _new_folder(place: Path) -> Iterator[Path]:
    """Make a folder that takes its place when the block ends without an error, and is removed otherwise."""
    with _writing(place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        yield work
        with _writing(place.parent):
            if place.exists():  # damaged
                shutil.rmtree(place)
            os.replace(work, place)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _open(place: Path, key: str) -> Encoded | None:
    """Return what a cache holds; None where it is missing or not complete."""
    try:
        meta = json.loads((place / META).read_text())
        facts = meta["facts"]
        facts |= {name: Frame(*facts[name]) for name in ("frame", "pair_frame")}
        facts |= {name: tuple(facts[name]) for name in ("specials", "sentinels", "notes")}
        arrays = {name: _map(place / name, entry) for name, entry in meta["arrays"].items()}
        return Encoded(arrays=arrays, **facts) if meta["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _map(path: Path, entry: Mapping[str, Any]) -> NDArray[Any]:
    """Map an array of a cache into memory; raise where its size or content is not what the table says."""
    size, checksum = path.stat().st_size, 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
    if (size, checksum) != (entry["bytes"], entry["checksum"]):
        raise ValueError(f"{path} has changed since it was written")
    dtype = entry["dtype"]
    flat = np.asarray(np.memmap(path, dtype=dtype, mode="r")) if size else np.empty(0, dtype)
    return flat.reshape(-1, *entry["shape"])
