"""An index of passages on disk: built, brought up to date, and searched by meaning, by words, or by both.

A folder holds `index.json` and parts of up to `BLOCK` passages, each one file that is named by what it holds.
Parts are written whole, `index.json` last, and parts that it no longer names are removed after that. So a
process may be killed at any moment: the index is the old one or the new one, and the parts that were ready
are not embedded again. One process at a time writes to the folder: it holds a lock, which ends with it.

N passages, D width of a vector, Q queries.
"""

import bisect
import hashlib
import json
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from clearhead.errors import CheckpointError, InputError, refuse, refuse_unknown, refusing
from clearhead.hub.files import locked_folder, read_json, write_bytes, write_text
from clearhead.hub.sentences import Kind
from clearhead.labs.retrieval.passages import (
    WORDS,
    Hit,
    IndexedFile,
    IndexedPassage,
    find_files,
    read_passages,
)
from clearhead.labs.retrieval.stores import (
    TINY,
    Arrays,
    DenseStore,
    Postings,
    SparseStore,
    Store,
    TokenStore,
    Vectors,
    alike,
    arrays_of,
    best,
    bm25,
    embedded,
    fuse,
    hnsw_library,
    join,
    kind_of,
    make_hnsw,
    most_tokens,
    post,
    probes_of,
    read_hnsw,
    search_hnsw,
    spelled_out,
    token_counts,
)
from clearhead.run.api import Model
from clearhead.run.api import load as load_model

MANIFEST, VERSION = "index.json", 1
BLOCK = 1024  # passages of a part
PROBES = ("A quiet town by the river.", "Do 17 proteins fold within 3.5 seconds?")
AGREE = 1e-3  # between vectors of length one that the same embedder made on different machines
DEPTH = 100  # of fusing two rankings: passages of each
By = Literal["meaning", "words", "both"]
Nearest = Literal["exact", "hnsw"]
OnPassages = Callable[[str, int, int], None]
PARTS = "parts"  # their folder


@dataclass(frozen=True)
class IndexPart:
    """A block of passages, read from its file."""

    arrays: Arrays  # of vectors, as a store has them
    postings: Postings
    rows: bytes  # a JSON object a line: text, line, name
    ends: NDArray[np.int64]  # N, where each ends

    @property
    def vectors(self) -> Vectors:
        """The vectors of the passages [N, D], of length one, where each has one."""
        return self.arrays["vectors"]

    def passage(self, number: int, file: str) -> IndexedPassage:
        """Return one passage."""
        start = int(self.ends[number - 1]) if number else 0
        return IndexedPassage(file=file, **json.loads(self.rows[start : int(self.ends[number])]))


def read_entry(folder: Path, entry: dict[str, Any]) -> bytes:
    """Return the bytes of a file that the manifest names, as they were written."""
    path = folder / PARTS / entry["name"]
    with refusing(f"{path} cannot be read: make the index again", CheckpointError):
        raw: bytes = path.read_bytes()
    refuse(
        zlib.crc32(raw) != entry["checksum"],
        f"{path} has changed since it was written: remove it and make the index again",
        CheckpointError,
    )
    return raw


def read_part(folder: Path, entry: dict[str, Any]) -> IndexPart:
    """Return a part that the manifest names."""
    arrays = load(read_entry(folder, entry))
    postings = Postings(*(arrays.pop(f"postings.{key}") for key in Postings._fields))
    rows, ends = arrays.pop("rows").tobytes(), arrays.pop("ends")
    return IndexPart(arrays, postings, rows, ends)


class Index:
    """An open index."""

    def __init__(
        self, folder: str | Path, model: Model | None = None, stale: bool = False, exact: bool = False
    ) -> None:
        """Open an index.

        Args:
            folder: that `build_index` wrote.
            model: the embedder; None: that of the directory which the index names, once it is needed.
            stale: search even where files have changed since.
            exact: compare every vector, even where the index has a graph.
        """
        self.folder = Path(folder)
        self.manifest, self.exact = _manifest(self.folder), exact
        refuse(
            not self.manifest["complete"],
            f"{folder} was not finished: give the command `clearhead index` again, it goes on from there",
        )
        old = [source["file"] for source in self.manifest["sources"] if not _source(source).is_current()]
        refuse(
            old and not stale,
            f"{', '.join(old[:3])}{' and more' if len(old) > 3 else ''} changed after {folder} was made: "
            f"bring it up to date by `clearhead index --out {folder}`, or search as it is (--stale)",
        )
        self._model = None if model is None else _fitting(model, self.manifest, self.folder)

    @cached_property
    def model(self) -> Model:
        """The embedder."""
        if self._model is not None:
            return self._model
        return _fitting(load_model(self.manifest["model"]), self.manifest, self.folder)

    def __len__(self) -> int:
        return sum(part["passages"] for source in self.manifest["sources"] for part in source["parts"])

    @property
    def parts(self) -> list[tuple[str, IndexPart]]:
        """All parts, each with the file that it is of."""
        return self._read[0]

    @property
    def kind(self) -> Kind:
        """What a passage has: one vector (dense), a sparse one (sparse), or one of each token (tokens)."""
        kind: Kind = self.manifest.get("kind", "dense")
        return kind

    @property
    def vectors(self) -> Vectors:
        """The vectors of all passages [N, D], where each has one; those of a part are a view of it."""
        store = self.store
        refuse(not isinstance(store, DenseStore), f"{self.folder} has no one vector of each passage")
        return cast(DenseStore, store).vectors

    @property
    def store(self) -> Store:
        """The vectors of all passages."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[list[tuple[str, IndexPart]], Store]:
        entries = [(source["file"], part) for source in self.manifest["sources"] for part in source["parts"]]
        store, parts = self._new_store([entry for _, entry in entries]), list[tuple[str, IndexPart]]()
        for file, entry in entries:
            part = read_part(self.folder, entry)
            with refusing(f"{self.folder / MANIFEST} does not fit its parts: make the index again"):
                parts.append((file, replace(part, arrays=store.add(part.arrays))))
        return parts, store

    def _new_store(self, entries: Sequence[dict[str, Any]]) -> Store:
        """Return a store without vectors yet."""
        if self.kind == "sparse":
            return SparseStore()
        width = spelled_out(self.manifest["probes"][0], 0).shape[-1]
        if self.kind == "tokens":
            return TokenStore(sum(entry["tokens"] for entry in entries), width)
        return DenseStore(len(self), width)

    @cached_property
    def graph(self) -> Any:
        """The graph of the vectors; None: every vector is compared."""
        entry = None if self.exact else self.manifest.get("graph")
        return None if entry is None else read_hnsw(read_entry(self.folder, entry))

    @cached_property
    def postings(self) -> Postings:
        """The words of all passages."""
        return join([part.postings for _, part in self.parts])

    def search(self, query: str, k: int = 10, by: By = "both") -> list[Hit]:
        """Return the k passages nearest to a query, best first."""
        return self.search_all([query], k, by)[0]

    def search_all(self, queries: Sequence[str], k: int = 10, by: By = "both") -> list[list[Hit]]:
        """Return the k nearest passages of each query, as `rank` finds them."""
        return [
            [Hit(self.passage(number), score) for number, score in ranked.items()]
            for ranked in self.rank(queries, k, by)
        ]

    def rank(self, queries: Sequence[str], k: int = 10, by: By = "both") -> list[dict[int, float]]:
        """Return the numbers of the k nearest passages of each query with their scores, best first.

        `by` is "meaning" (cosine of the embedder's vectors, dot product of sparse ones, MaxSim of those of
        tokens; every passage is compared, or those that a graph proposes), "words" (BM25), or "both", which
        sums the reciprocal ranks of the two. No text is read: `passage` does that.
        """
        refuse(k < 1, f"k {k} must be 1 or more")
        refuse_unknown("by", by, get_args(By))
        refuse(not all(query.strip() for query in queries), "a query is empty: write what to look for")
        if by == "meaning":
            return self._by_meaning(queries, k)
        if by == "words":
            return self._by_words(queries, k)
        deep = max(k, DEPTH)
        pairs = zip(self._by_meaning(queries, deep), self._by_words(queries, deep))
        return [dict(list(fuse(pair).items())[:k]) for pair in pairs]

    def passage(self, number: int) -> IndexedPassage:
        """Return the passage of a number, counted from 0 over all parts."""
        refuse(not 0 <= number < len(self), f"passage {number} is not one of 0 to {len(self) - 1}")
        place = bisect.bisect_right(self._starts, number) - 1
        file, part = self.parts[place]
        return part.passage(number - self._starts[place], file)

    @cached_property
    def _starts(self) -> list[int]:
        """The number of the first passage of each part, and that after the last."""
        return list(accumulate((len(part.ends) for _, part in self.parts), initial=0))

    def _by_words(self, queries: Sequence[str], k: int) -> list[dict[int, float]]:
        return [best(bm25(self.postings, query), k, TINY) for query in queries]

    def _by_meaning(self, queries: Sequence[str], k: int) -> list[dict[int, float]]:
        vectors = embedded(self.model, queries, "query")  # Q D
        if self.graph is not None:
            proposed = zip(vectors, search_hnsw(self.graph, vectors, k))
            exact = ((rows, best(self.vectors[rows] @ row, k)) for row, rows in proposed)
            return [{rows[at]: score for at, score in scores.items()} for rows, scores in exact]
        return self.store.nearest(vectors, k)


# Building ---------------------------------------------------------------------------------------------------


def build_index(
    folder: str | Path,
    model: Model | None = None,
    files: Sequence[str | Path] = (),
    words: int | None = None,
    skip: bool = False,
    nearest: Nearest | None = None,
    on_passages: OnPassages = lambda stage, done, total: None,
) -> Index:
    """Index the passages of files; blocks of passages that are in the index already are not embedded again.

    Args:
        folder: to write; an index that is there is brought up to date.
        model: the embedder; None: that of the index.
        files: files and folders of text; none: those of the index.
        words: of a passage of plain text, at most; None: as before, or 150, and no more than the embedder
            reads whole.
        skip: leave out files that cannot be read, with a warning that names each, in place of refusing them.
        nearest: "exact" compares every vector with a query, "hnsw" those that a graph proposes; None: as
            before, or exact.
        on_passages: told what is being done, and how many passages of how many are embedded.
    """
    folder = Path(folder)
    refuse(words is not None and words < 1, f"words {words} must be 1 or more")
    if nearest == "hnsw":
        hnsw_library()  # refused before anything is embedded
    with locked_folder(folder, "clearhead index", lambda line: warnings.warn(line, stacklevel=2)):
        before = _manifest(folder) if (folder / MANIFEST).exists() else {}
        refuse(
            not before and any(folder.glob("[!.]*")), f"{folder} exists and is no index: name another folder"
        )
        named_files = [str(file) for file in files] or before.get("given", [])
        refuse(
            not named_files,
            f"no files were named, and {folder} is no index yet: name files or folders of text",
        )
        if model is None:
            refuse(not before, f"{folder} is no index yet, so it needs an embedder: name a model directory")
            model = load_model(before["model"])
        if before:
            _fitting(model, before, folder)
        refuse(
            nearest == "hnsw" and kind_of(model) != "dense",
            "a graph (hnsw) is for one vector of each passage, and this embedder makes others: leave it out",
        )
        words = words or before.get("words")
        read = list(_read_all(find_files(named_files), words, skip, folder, model))
        total, done, sources = sum(len(passages) for _, passages in read), 0, []
        refuse(not total, f"there is no text in {', '.join(named_files[:3])}: name files of text")
        _tell_cut(model, [passage.text for _, passages in read for passage in passages], words)
        manifest = before or _empty(folder, model, words)
        for source, passages in read:
            parts = []
            for start in range(0, len(passages), BLOCK):
                parts.append(_part(folder, model, manifest, passages[start : start + BLOCK]))
                done += parts[-1]["passages"]
                on_passages("embedding", done, total)
            sources.append({**asdict(source), "parts": parts})
        entries = [part for source in sources for part in source["parts"]]
        wanted = nearest == "hnsw" or (nearest is None and before.get("graph"))
        graph = _graph(folder, entries) if wanted else None
        facts = {"given": named_files, "words": words, "sources": sources, "graph": graph, "complete": True}
        write_text(folder / MANIFEST, json.dumps(manifest | facts))
        named = {entry["name"] for entry in [*entries, *([graph] if graph else [])]}
        for path in (folder / PARTS).iterdir():
            if path.name not in named:
                path.unlink(missing_ok=True)
    return Index(folder, model)


def _empty(folder: Path, model: Model, words: int | None) -> dict[str, Any]:
    """Write the manifest of an index that is still to be built, which says by whom; return it."""
    probes = embedded(model, PROBES, "passage")
    stated = probes_of(probes)
    numbers = b"".join(spelled_out(probe, 0).tobytes() for probe in stated)
    facts = {
        "version": VERSION,
        "model": str(model.folder.resolve()) if model.folder is not None else "",
        "kind": kind_of(model),
        "embedder": hashlib.sha256(numbers).hexdigest()[:16],
        "probes": stated,
        "words": words,
    }
    manifest = {**facts, "given": [], "sources": [], "complete": False}
    write_text(folder / MANIFEST, json.dumps(manifest))
    return manifest


def _read_all(
    paths: Sequence[Path], words: int | None, skip: bool, folder: Path, model: Model
) -> Iterator[tuple[IndexedFile, list[IndexedPassage]]]:
    for path in paths:
        if folder.resolve() in path.resolve().parents:
            continue  # the index itself lies among its files
        try:
            file, passages = read_passages(path, words or WORDS)
            whole = words is not None or ".jsonl" in path.suffixes  # one passage by its file stays one
            yield file, passages if whole else _halved(model, passages)
        except InputError as error:
            refuse(not skip, f"{error}; leave it out, or skip what cannot be read (--skip-unreadable)")
            warnings.warn(f"left out: {error}", stacklevel=3)


def _halved(model: Model, passages: Sequence[IndexedPassage]) -> list[IndexedPassage]:
    """Return passages that the embedder reads whole: longer ones are cut in halves, as often as it takes."""
    halved, lengths = list[IndexedPassage](), token_counts(model, [passage.text for passage in passages])
    most = most_tokens(model)
    for passage, length in zip(passages, lengths):
        words = passage.text.split()
        if length <= most or len(words) == 1:
            halved.append(passage)
        else:
            middle = (len(words) + 1) // 2
            halves = (words[:middle], words[middle:])
            halved += _halved(model, [replace(passage, text=" ".join(half)) for half in halves])
    return halved


def _tell_cut(model: Model, texts: Sequence[str], words: int | None) -> None:
    """Warn of passages whose end the embedder does not read."""
    most = most_tokens(model)
    cut = sum(length > most for length in token_counts(model, texts))
    if cut:
        way_out = "leave --words out, or give fewer" if words is not None else "write shorter ones"
        warnings.warn(
            f"{cut:,} of {len(texts):,} passages have more than the {most:,} tokens that the "
            f"embedder reads, and their end is found by words alone: {way_out}",
            stacklevel=3,
        )


def _part(
    folder: Path, model: Model, manifest: dict[str, Any], passages: Sequence[IndexedPassage]
) -> dict[str, Any]:
    """Write the part of some passages, where it is not there yet; return its entry in the manifest."""
    rows = [
        json.dumps({"text": passage.text, "line": passage.line, "name": passage.name}).encode() + b"\n"
        for passage in passages
    ]
    blob, kind = b"".join(rows), kind_of(model)
    name = hashlib.sha256(manifest["embedder"].encode() + blob).hexdigest()[:24] + ".safetensors"
    path = folder / PARTS / name
    if not path.exists():
        texts = [passage.text for passage in passages]
        arrays = {
            **arrays_of(embedded(model, texts, "passage"), kind),
            **{f"postings.{key}": value for key, value in post(texts)._asdict().items()},
            "rows": np.frombuffer(blob, np.uint8),
            "ends": np.cumsum([len(row) for row in rows]),
        }
        write_bytes(path, save(arrays))
    raw = path.read_bytes()
    tokens = {"tokens": len(load(raw)["vectors"])} if kind == "tokens" else {}
    return {"name": name, "passages": len(passages), **tokens, "checksum": zlib.crc32(raw)}


def _graph(folder: Path, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write the graph of all parts, where it is not there yet; return its entry in the manifest."""
    name = hashlib.sha256("".join(entry["name"] for entry in entries).encode()).hexdigest()[:24] + ".hnsw"
    path = folder / PARTS / name
    if not path.exists():
        write_bytes(path, make_hnsw([read_part(folder, entry).vectors for entry in entries]))
    return {"name": name, "checksum": zlib.crc32(path.read_bytes())}


# Reading ----------------------------------------------------------------------------------------------------


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    refuse(not path.exists(), f"{folder} is no index: make one by `clearhead index FILES --out {folder}`")
    manifest = read_json(path)
    known = {"version", "model", "embedder", "probes", "words", "given", "sources", "complete"}
    refuse(
        manifest.get("version") != VERSION or not known <= manifest.keys(),
        f"{path} is not the manifest of an index of version {VERSION}: make the index again",
        CheckpointError,
    )
    return manifest


def _source(entry: dict[str, Any]) -> IndexedFile:
    return IndexedFile(**{name: value for name, value in entry.items() if name != "parts"})


def _fitting(model: Model, manifest: dict[str, Any], folder: Path) -> Model:
    """Return the embedder, or refuse one that gives other vectors than the index has."""
    same_kind = manifest.get("kind", "dense") == kind_of(model)
    refuse(
        not same_kind or not alike(manifest["probes"], embedded(model, PROBES, "passage"), AGREE),
        f"{model.folder} embeds otherwise than the model that made {folder}, {manifest['model']}: "
        "use that one, or make the index again in another folder",
    )
    return model
