"""Encode examples as ids, many texts at a time; keep them on disk, memory-mapped from then on.

A task's `encode` yields `Columns`: arrays to be concatenated. A pair of arrays stands for rows of unequal
length: their ids, flat, and the length of each row.

A cache is a folder of flat arrays and a `meta.json` that lists them with their sizes and checksums. It is
written under a temporary name and renamed when complete. A cache that disagrees with its `meta.json` is
written again.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, count, takewhile
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from clearhead.errors import InputError, nearest, refuse
from clearhead.hub.tokens.chat import ChatTemplate
from clearhead.hub.tokens.text import Merges
from clearhead.learn.batches.ragged import BARE, Frame, Ints, Stretches
from clearhead.learn.data.examples import Example
from clearhead.learn.data.plan import DataPlan

Column = NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]
Columns = dict[str, Column]
Item = TypeVar("Item")
BUFFER = 2**18  # characters encoded at a time
EXAMPLES = 1024  # encoded at a time
META = "meta.json"
NOTED = 0.001  # the share of unknown tokens above which a note says so


@dataclass
class BpeDropout:
    """Cuts the texts of an epoch into tokens anew, each by random numbers of its own.

    They follow from the seed, the epoch and the number of the text, so that each process draws the same.
    """

    merges: Merges
    share: float  # of the merges, that are skipped
    seed: int
    epoch: int
    texts: int = 0  # that have been cut

    def __call__(self, encoding: Encoding) -> list[int]:
        """Return the tokens of the next text."""
        random = Random(f"{self.seed} {self.epoch} {self.texts}")
        self.texts += 1
        return self.merges.redrawn(encoding.ids, encoding.word_ids, self.share, random)


class Encoder(NamedTuple):
    """What turns text and labels into numbers."""

    tokenizer: Tokenizer
    numbers: Mapping[str, int]  # of each label
    separator: int | None  # the token between documents
    template: ChatTemplate | None = None  # of conversations
    dropout: BpeDropout | None = None  # None: texts have the tokens that the tokenizer gives them

    def ids(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        if self.dropout is not None:
            return list(map(self.dropout, self.tokenizer.encode_batch(list(texts), add_special_tokens=False)))
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def number(self, name: str, what: str) -> int:
        """Return the number of a label."""
        if name not in self.numbers:
            known = ", ".join(list(self.numbers)[:10]) + (", ..." if len(self.numbers) > 10 else "")
            raise InputError(
                f'the {what} "{name}" is not among those of the training data '
                f"({known}){nearest(name, self.numbers)}"
            )
        return self.numbers[name]

    def frame(self, pair: bool) -> Frame:
        """Return the special tokens that the tokenizer's template puts around one text, or around two."""
        tokenizer = self.tokenizer
        candidates = ("a", "e", "0", ".", *tokenizer.get_vocab())
        text = next(
            (word for word in candidates if tokenizer.encode(word, add_special_tokens=False).ids), None
        )
        refuse(
            text is None,
            "the tokenizer turns every text into nothing: train another, or name one with tokens.model",
        )
        encoding = tokenizer.encode(text, text) if pair else tokenizer.encode(text)
        between: list[list[int]] = [[]]  # positions of the special tokens before, between and after the texts
        text_types, previous = [], None
        for position, (number, kind) in enumerate(zip(encoding.sequence_ids, encoding.type_ids)):
            if number is None:
                between[-1].append(position)
            elif number != previous:
                between.append([])
                text_types.append(kind)
                previous = number
        special, types = (
            [[values[position] for position in some] for some in between]
            for values in (encoding.ids, encoding.type_ids)
        )
        return Frame(special, types, text_types)

    def unknown(self) -> int | None:
        """Return the id of text that the tokenizer has no token for; None where it has no such id."""
        model = json.loads(self.tokenizer.to_str())["model"]
        unigram = model["type"] == "Unigram"
        return model["unk_id"] if unigram else self.tokenizer.token_to_id(model.get("unk_token") or "")


def flat(rows: Sequence[Sequence[int]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return rows end to end, and the length of each."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum())), lengths


def groups(rows: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield rows by the buffer: up to `EXAMPLES` of them, or `BUFFER` characters."""
    group, total = list[Item](), 0
    for row in rows:
        group.append(row)
        total += size(row)
        if len(group) == EXAMPLES or total >= BUFFER:
            yield group
            group, total = [], 0
    if group:
        yield group


def characters(row: Example) -> int:
    """Return the number of characters of an example."""
    return sum(map(len, row.texts()))


@dataclass(frozen=True, eq=False)
class Encoded:
    """The examples of one side as arrays. Rows `x` of unequal length are flat, with `x_offsets` [N + 1]."""

    task: str
    arrays: Mapping[str, NDArray[Any]]
    vocab_size: int = 0
    specials: tuple[int, ...] = ()  # ids of special tokens
    sentinels: tuple[int, ...] = ()  # ids of the tokens that stand for a span taken out
    frame: Frame = BARE  # around one text
    pair_frame: Frame = BARE  # around two
    n_unknown: int = 0  # tokens that stand for text the tokenizer has no token for
    notes: tuple[str, ...] = ()  # what the user should know, one sentence each

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[name]

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens of all examples, without special tokens; 0 for images."""
        ragged = [name.removesuffix("_offsets") for name in self.arrays if name.endswith("_offsets")]
        return sum(len(self.arrays[name]) for name in ragged)

    def stretches(self, name: str) -> Stretches:
        """Return the rows of a ragged column."""
        offsets = np.asarray(self[f"{name}_offsets"])
        return Stretches(self[name], offsets[:-1], np.diff(offsets))


def redrawn(encoded: Encoded, columns: Iterable[Columns]) -> Encoded:
    """Return the same examples with other tokens, in memory: `columns` has all of them."""
    groups = list(columns)
    arrays = dict[str, NDArray[Any]]()
    for name, column in groups[0].items():
        parts = [group[name] for group in groups]
        if isinstance(column, tuple):
            values, lengths = (np.concatenate(side) for side in zip(*parts))
            arrays |= {name: values, f"{name}_offsets": np.append(0, np.cumsum(lengths))}
        elif name in encoded.arrays:
            arrays[name] = np.concatenate(cast(list[NDArray[Any]], parts))
    return replace(encoded, arrays=arrays)


@dataclass(frozen=True, eq=False)
class Setting:
    """What batches are made from."""

    encoded: Encoded  # the examples of one side
    plan: DataPlan
    special: Mapping[str, int]  # ids of special tokens by role: pad, bos, eos, cls, sep, mask
    length: int  # the most tokens of a row
    seed: int  # of the order of examples and of everything drawn at random
    training: bool  # True: shuffled in each epoch; False: in one order, every example exactly once
    cut_left: bool = False  # whether a text that is too long loses its beginning (`truncation_side: left`)

    @property
    def pad(self) -> int:
        """Return the id of padding."""
        return self.special.get("pad", 0)

    @property
    def side(self) -> str:
        """Return the name of the side, for messages."""
        return "training" if self.training else "validation"

    def need(self, role: str, what: str | None = None) -> int:
        """Return the id of a special token that the task, or `what`, cannot do without."""
        refuse(
            role not in self.special,
            f"{what or self.encoded.task} needs a {role} token, and the tokenizer has "
            f"{', '.join(self.special) or 'none at all'}: train one for this task, or choose another task",
        )
        return self.special[role]

    def room(self, frame: Frame, what: str) -> int:
        """Return how many tokens of a row the frame leaves to the text."""
        refuse(
            self.length <= frame.size,
            f"rows of {self.length} tokens have no room for {what} next to {frame.size} special tokens: "
            "raise data.max_length",
        )
        return self.length - frame.size

    def cut(self, rows: Stretches, longest: Ints | int) -> Stretches:
        """Cut texts to `longest` tokens, at the side where the tokenizer cuts."""
        return rows.cut(longest, self.cut_left)

    def rows(self, tokens: int) -> int:
        """Return how many rows of so many tokens a batch holds."""
        by_tokens = self.plan.batch_tokens
        return self.plan.batch_size if by_tokens is None else max(1, by_tokens // tokens)


# On disk ---------------------------------------------------------------------------------------------------


def open_or_encode(
    folder: Path, key: str, task: str, encoder: Encoder, columns: Iterator[Columns], sentinels: bool = False
) -> Encoded:
    """Return the examples that a cache holds; where it is missing, write what `columns` yields first."""
    encoded = _open(folder, key)
    if encoded is None:
        with _new_folder(folder) as work:
            _write_cache(_Files(work), key, task, encoder, columns, sentinels)
        encoded = _open(folder, key)
    if encoded is None:
        raise InputError(
            f"the encoded data in {folder} cannot be read back: "
            "check the disk, or set data.cache to another folder"
        )
    return encoded


def _write_cache(
    files: _Files, key: str, task: str, encoder: Encoder, columns: Iterator[Columns], sentinels: bool
) -> None:
    """Write the arrays of one side, then the table of them."""
    tokenizer, unk = encoder.tokenizer, encoder.unknown()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    lost = tokens = unknown = 0
    for group in columns:
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
    added = tokenizer.get_added_tokens_decoder().items()
    facts = {
        "task": task,
        "vocab_size": vocab_size,
        "specials": sorted(number for number, token in added if token.special),
        "sentinels": list(takewhile(lambda token: token is not None, named)) if sentinels else [],
        "frame": encoder.frame(pair=False),
        "pair_frame": encoder.frame(pair=True),
        "n_unknown": unknown,
        "notes": notes,
    }
    files.close({"key": key, "facts": facts})


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
