"""Examples as ids on disk: encoded once, mapped into memory from then on.

A cache is a folder of flat arrays and a `meta.json` that names them with their sizes and checksums. It is filled under
another name and takes its own when it is whole; one that does not agree with its `meta.json` is made anew.
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
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from clearhead.batches import encoding
from clearhead.batches.rows import Frame
from clearhead.data.examples import Corpus, Images, Shape
from clearhead.data.plan import Task
from clearhead.errors import InputError

VERSION = 2  # of what is written: raise it when the encoding changes, and old caches are made anew
META = "meta.json"
SHAPES: dict[Task, Shape] = {
    "lm": "text",
    "mlm": "text",
    "denoise": "text",
    "seq2seq": "pairs",
    "classify": "labels",
    "tag": "tags",
    "answer": "questions",
    "image": "images",
}
BARE = Frame((), (), ())
NOTED = 0.001  # the share of unknown tokens from which on it is said
SEPARATORS: dict[Task, str] = {
    "lm": "eos",
    "mlm": "sep",
    "denoise": "eos",
}  # roles of the token between documents


@dataclass(frozen=True, eq=False)
class Encoded:
    """The examples of one side as arrays. Rows of unequal length `x` are flat, with `x_offsets` [N + 1]."""

    task: Task
    arrays: Mapping[str, NDArray[Any]]
    vocab_size: int = 0
    specials: tuple[int, ...] = ()  # ids that no text is made of
    sentinels: tuple[int, ...] = ()  # denoise
    frame: Frame = BARE  # around one text
    pair_frame: Frame = BARE  # around two
    n_unknown: int = 0  # tokens that stand for text the tokenizer has no token for
    said: tuple[str, ...] = ()  # what the user should know, a short sentence each

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[name]

    @property
    def n_tokens(self) -> int:
        """Tokens of all examples, special ones left out; 0 for images."""
        return sum(
            len(self.arrays[name.removesuffix("_offsets")])
            for name in self.arrays
            if name.endswith("_offsets")
        )


def encode_corpus(
    corpus: Corpus,
    side: Literal["train", "validation"],
    task: Task,
    tokenizer: Tokenizer | None,
    labels: Sequence[str],
    folder: str | Path,
    *,
    special: Mapping[str, int],
) -> Encoded:
    """The examples of one side as ids: from the cache in `folder`, which is filled first where it has none of them.

    Lengths are as they come: cutting to what a model takes is the batches' work, so a cache serves models of any length.

    Args:
        corpus: the raw examples.
        side: which of its two sides.
        task: what the examples are for.
        tokenizer: text to ids; truncation and padding set in it are not applied. None for images.
        labels: names of classes or tags, in the order of their numbers.
        folder: where the cache is, or is to be.
        special: ids of special tokens by role; text needs the one that parts documents.
    """
    if corpus.shape != SHAPES[task]:
        raise InputError(
            f"the task {task} learns from {SHAPES[task]}, and the data are {corpus.shape}: choose another data.task, or other data"
        )
    if isinstance(corpus.train, Images):
        return _images(corpus, side)
    if tokenizer is None:
        raise InputError(f"the task {task} needs a tokenizer")
    separator = special.get(SEPARATORS[task]) if task in SEPARATORS else None
    described = tokenizer.to_str()
    parts = [
        VERSION,
        corpus.fingerprint,
        hashlib.sha256(described.encode()).hexdigest(),
        task,
        side,
        list(labels),
        separator,
    ]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    place = Path(folder) / f"{task}-{side}-{key[:16]}"
    found = _open(place, key)
    if found is None:
        with _new_folder(place) as work:
            _encode(corpus, side, task, Tokenizer.from_str(described), labels, separator, _Files(work), key)
        found = _open(place, key)
    if found is None:
        raise InputError(
            f"the encoded data in {place} cannot be read back: check the disk, or set data.cache to another folder"
        )
    return found


def _encode(
    corpus: Corpus,
    side: str,
    task: Task,
    tokenizer: Tokenizer,
    labels: Sequence[str],
    separator: int | None,
    files: _Files,
    key: str,
) -> None:
    """Write the arrays of one side, and at last the table of them."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    rows: Any = getattr(corpus, side)
    columns: Iterator[encoding.Columns]
    if corpus.shape == "text":
        columns = encoding.encode_text(rows, tokenizer, separator)
    elif task == "seq2seq":
        columns = encoding.encode_pairs(rows, tokenizer)
    elif task == "classify":
        columns = encoding.encode_labelled(rows, tokenizer, labels)
    elif task == "tag":
        columns = encoding.encode_tagged(rows, tokenizer, labels)
    else:
        columns = encoding.encode_questions(rows, tokenizer)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    unk = encoding.unknown_id(tokenizer)
    lost = tokens = unknown = 0
    for group in columns:
        lost += int(np.sum(group.pop("lost", 0)))
        for ids, _ in (column for column in group.values() if isinstance(column, tuple)):
            tokens += len(ids)
            unknown += (
                int(np.sum(ids == unk)) if unk != separator else 0
            )  # one token for both: only bytes, which spell all
        files.append(group, np.uint16 if vocab_size < 2**16 else np.uint32)
    said = [f"{lost:,} words have no token and so no tag"] if lost else []
    if unknown > NOTED * tokens:
        said.append(
            f"{unknown / tokens:.1%} of the tokens are unknown to the tokenizer, and all of them look alike to the model"
        )
    sentinels: list[int] = []
    while (
        task == "denoise" and (sentinel := tokenizer.token_to_id(f"<extra_id_{len(sentinels)}>")) is not None
    ):
        sentinels.append(sentinel)
    facts = {
        "task": task,
        "vocab_size": vocab_size,
        "specials": sorted(
            number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
        ),
        "sentinels": sentinels,
        "frame": encoding.frame_of(tokenizer, pair=False),
        "pair_frame": encoding.frame_of(tokenizer, pair=True),
        "n_unknown": unknown,
        "said": said,
    }
    files.close({"key": key, "facts": facts})


def _images(corpus: Corpus, side: str) -> Encoded:
    """Pictures stay as they are; with them go mean and deviation of each channel, those of the training side, on a scale of 0 to 1."""
    train, images = cast(Images, corpus.train), cast(Images, getattr(corpus, side))
    levels = np.arange(256) / 255
    counts = np.stack(
        [
            np.bincount(train.pixels[..., channel].reshape(-1), minlength=256)
            for channel in range(train.pixels.shape[-1])
        ]
    )
    weights = counts / np.maximum(1, counts.sum(1, keepdims=True))  # C 256
    mean = weights @ levels
    deviation = np.sqrt(weights @ levels**2 - mean**2)
    std = np.where(deviation > 1e-6, deviation, 1.0)  # a channel of one colour is only moved
    arrays = {
        "pixels": images.pixels,
        "labels": images.labels,
        "mean": mean.astype(np.float32),
        "std": std.astype(np.float32),
    }
    return Encoded("image", arrays)


# On disk ----------------------------------------------------------------------------------------------------------------


@dataclass
class _Files:
    """Arrays that grow at their end, each in a file of its own."""

    folder: Path
    table: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # of each file: dtype, shape of an entry, bytes, checksum
    totals: dict[str, int] = field(default_factory=dict)  # the last offset of each ragged column

    def append(self, columns: encoding.Columns, ids: type[np.unsignedinteger[Any]]) -> None:
        """Put each column behind what is there; the ids of ragged columns are written as `ids`."""
        for name, column in columns.items():
            if isinstance(column, tuple):
                values, lengths = column
                self._write(name, values.astype(ids))
                if name not in self.totals:
                    self._write(f"{name}_offsets", np.zeros(1, dtype=np.int64))
                offsets = self.totals.get(name, 0) + np.cumsum(lengths, dtype=np.int64)
                self._write(f"{name}_offsets", offsets)
                self.totals[name] = int(offsets[-1]) if len(offsets) else self.totals.get(name, 0)
            else:
                self._write(name, column)

    def _write(self, name: str, array: NDArray[Any]) -> None:
        entry = self.table.setdefault(
            name, {"dtype": array.dtype.str, "shape": list(array.shape[1:]), "bytes": 0, "checksum": 0}
        )
        data = np.ascontiguousarray(array).tobytes()
        with _saying(self.folder.parent), (self.folder / name).open("ab") as file:
            file.write(data)
        entry["bytes"] += len(data)
        entry["checksum"] = zlib.crc32(data, entry["checksum"])

    def close(self, meta: Mapping[str, Any]) -> None:
        """Write the table."""
        with _saying(self.folder.parent):
            (self.folder / META).write_text(json.dumps({**meta, "arrays": self.table}))


@contextmanager
def _saying(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(
            f"cannot write encoded data to {folder}: {why}; make room there, or set data.cache to another folder"
        ) from None


@contextmanager
def _new_folder(place: Path) -> Iterator[Path]:
    """A folder to fill, which takes its place when the block ends well; otherwise nothing is left of it."""
    with _saying(place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        yield work
        with _saying(place.parent):
            if place.exists():  # damaged
                shutil.rmtree(place)
            os.replace(work, place)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _open(place: Path, key: str) -> Encoded | None:
    """What a cache holds; None where there is none, or one that is not whole."""
    try:
        meta = json.loads((place / META).read_text())
        if meta["key"] != key:
            return None
        facts = meta["facts"]
        arrays = {name: _map(place / name, entry) for name, entry in meta["arrays"].items()}
        frame, pair_frame = (Frame(*map(tuple, facts[name])) for name in ("frame", "pair_frame"))
        specials, sentinels, said = (tuple(facts[name]) for name in ("specials", "sentinels", "said"))
        return Encoded(
            facts["task"],
            arrays,
            facts["vocab_size"],
            specials,
            sentinels,
            frame,
            pair_frame,
            facts["n_unknown"],
            said,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _map(path: Path, entry: Mapping[str, Any]) -> NDArray[Any]:
    """An array of a cache, mapped; an error where size or content are not what the table says."""
    size, shape = path.stat().st_size, (-1, *entry["shape"])
    if size != entry["bytes"]:
        raise ValueError(f"{path} has {size} bytes of {entry['bytes']}")
    if not size:
        return np.empty((0, *entry["shape"]), dtype=entry["dtype"])
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
    if checksum != entry["checksum"]:
        raise ValueError(f"{path} has changed since it was written")
    return np.asarray(np.memmap(path, dtype=entry["dtype"], mode="r")).reshape(shape)
