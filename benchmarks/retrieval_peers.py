"""Compare retrieval with sentence-transformers and FAISS: the same embedder and documents, taking turns.

    python benchmarks/run.py retrieval_peers DATA --model DIR [--collections ...] [--device cuda] [--out FILE]

DATA is as for retrieval.py, which builds the indexes; --work DIR keeps them. --sample N lets the peer embed N
documents only, evenly spread, and gives FAISS our vectors for the others: how far the vectors of the sample
lie apart is in the record. --documents N takes N documents of each collection, evenly spread, of which
quality would say nothing, and --queries N the first N queries. --timed N documents are embedded in each
round. Ratios are ours over theirs, so that below 1 ours takes less: of the wall's seconds, and of this
process's, the best of all rounds of each.
"search" is `Index.rank` of all queries beside the flat index of FAISS, "search_one" what it does with one
vector: both return numbers and scores; "search_and_read" reads the passages too. sentence-transformers and
faiss-cpu are in no extra. Without FAISS, one product of matrices stands for its flat index. Without --model
random vectors of words stand for the embedder's, and search alone is compared. --out writes the record,
--save writes it under results/.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common import device_name, processor_name, save
from benchmarks.retrieval import Clock, WordVectors, cranfield, judge, quality, scifact
from sentence_transformers import SentenceTransformer

import clearhead as ch
from clearhead.labs.retrieval.index import Index, build_index
from clearhead.labs.retrieval.ranking import nearest_rows
from clearhead.labs.retrieval.stores import embedded

try:
    import faiss
except ImportError:
    faiss = None


class Product:
    """What FAISS's flat index computes, by one product of matrices."""

    def __init__(self, width: int) -> None:
        """Begin with no vector."""
        self.vectors = np.zeros((0, width), dtype=np.float32)

    def add(self, vectors: Any) -> None:
        """Add vectors [N, D]."""
        self.vectors = np.concatenate([self.vectors, vectors])

    def search(self, asked: Any, count: int) -> tuple[Any, Any]:
        """Return the scores and numbers of the nearest vectors [Q, count]."""
        scores = asked @ self.vectors.T
        order = np.argsort(-scores, axis=1)[:, :count]
        return np.take_along_axis(scores, order, 1), order


FLAT = Product if faiss is None else faiss.IndexFlatIP


class Known:
    """Our embedder, which remembers texts: what is left to time is the search."""

    def __init__(self, model: ch.Model) -> None:
        """Begin with nothing."""
        self.model, self.sentences, self.folder = model, model.sentences, model.folder
        self.vectors: dict[str, torch.Tensor] = {}

    def embed(self, texts: list[str], prompt: str | None = None) -> torch.Tensor:
        """Return vectors [N, D]."""
        if new := [text for text in texts if text not in self.vectors]:
            self.vectors |= zip(new, self.model.embed(new, prompt=prompt))
        return torch.stack([self.vectors[text] for text in texts])


def ratios(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Return our best over theirs, and our best seconds; who begins changes from round to round."""
    best: dict[str, float] = {}
    for turn in range(rounds):
        for name, job in [("ours", ours), ("theirs", theirs)][:: 1 if turn % 2 else -1]:
            clock = Clock()
            job()
            for kind, seconds in clock.read("wall", digits=6).items():
                best[name + kind] = min(best.get(name + kind, seconds), seconds)
    return {
        "wall": round(best["ourswall"] / best["theirswall"], 4),
        "cpu": round(best["ourswall_cpu"] / best["theirswall_cpu"], 4),
        "ours_cpu_seconds": best["ourswall_cpu"],
    }


def fewer(path: Path, count: int, work: Path) -> Path:
    """Return a file of so many of the documents, evenly spread."""
    raw = path.read_bytes()
    lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines()
    made = work / f"{path.name.split('.')[0]}-{count}.jsonl"
    made.write_bytes(b"\n".join(lines[n] for n in np.linspace(0, len(lines) - 1, count).astype(int)))
    return made


def compare(
    name: str, index: Index, peer: SentenceTransformer, queries: dict[str, str], judged: Any, given: Any
) -> dict[str, object]:
    """Return quality and time of the peer and of ours on one collection."""
    passages = [part.passage(n, file) for file, part in index.parts for n in range(len(part.ends))]
    vectors = index.vectors
    chosen = np.unique(np.linspace(0, len(passages) - 1, given.sample or len(passages)).astype(int))
    texts, asked = [passages[n].text for n in chosen], list(queries.values())

    def encode(some: list[str]) -> Any:
        return peer.encode(some, batch_size=32, normalize_embeddings=True, show_progress_bar=False)

    print(f"{name}: the peer embeds {len(texts)} of {len(passages)} documents", flush=True)
    theirs = encode(texts)
    apart = float(np.abs(theirs - vectors[chosen]).max())
    mixed = vectors.copy()
    mixed[chosen] = theirs
    flat = FLAT(mixed.shape[1])
    flat.add(mixed)

    def their_search() -> Any:
        return flat.search(encode(asked), 100)[1]

    found = their_search()
    ranked = {query: [passages[n].name for n in row] for query, row in zip(queries, found)}
    ours = index.search_all(asked, 100, "meaning")
    same = [len({hit.passage.name for hit in hits[:10]} & set(ranked[query][:10])) for query, hits in
            zip(queries, ours)]  # fmt: skip
    timed = texts[: given.timed]
    known = Index(index.folder, Known(index.model))  # type: ignore[arg-type]
    known.search_all(asked, 100, "meaning")
    vectors_asked = encode(asked)

    def our_index() -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "timed.jsonl"
            file.write_text("\n".join(json.dumps({"text": text}) for text in timed))
            build_index(Path(folder) / "index", index.model, [file])

    def their_index() -> None:
        made = FLAT(mixed.shape[1])
        made.add(encode(timed))

    def their_answer() -> list[Any]:
        return [[passages[n] for n in row] for row in flat.search(vectors_asked, 100)[1]]

    jobs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "embed": (lambda: embedded(index.model, timed, "passage"), lambda: encode(timed)),
        "index": (our_index, their_index),
        "query_and_search": (lambda: index.rank(asked, 100, "meaning"), their_search),
        "search": (lambda: known.rank(asked, 100, "meaning"), lambda: flat.search(vectors_asked, 100)),
        "search_one": (
            lambda: nearest_rows(vectors_asked[:1], index.vectors, 10),
            lambda: flat.search(vectors_asked[:1], 10),
        ),
        "query_and_search_one": (
            lambda: index.rank(asked[:1], 10, "meaning"),
            lambda: flat.search(encode(asked[:1]), 10),
        ),
        "search_and_read": (lambda: known.search_all(asked, 100, "meaning"), their_answer),
    }
    row: dict[str, object] = {
        "collection": name,
        "by": f"sentence-transformers + {'a product' if faiss is None else 'FAISS'}",
        **({} if given.documents else quality(ranked, judged)),
        "same_of_10": round(sum(same) / len(same) / 10, 4),
        "documents": len(passages),
        "embedded_by_peer": len(texts),
        "vectors_apart": apart,
        "timed_documents": len(timed),
    }
    print(row, flush=True)
    for job, (mine, other) in jobs.items():
        row[job] = ratios(mine, other, given.rounds)
        print(f"{name} {job}: ours over theirs {row[job]}", flush=True)
    return row


def compare_search(name: str, index: Index, asked: list[str], rounds: int) -> dict[str, object]:
    """Return the times of searching alone, on vectors that cost nothing."""
    vectors, known = index.vectors, Known(index.model)
    flat = FLAT(vectors.shape[1])
    flat.add(vectors)
    ours = Index(index.folder, known)  # type: ignore[arg-type]
    found = ours.rank(asked, 100, "meaning")
    queries = embedded(known, asked, "query")  # type: ignore[arg-type]
    theirs = flat.search(queries, 100)[1]
    same = [len({*list(one)[:10]} & {*row[:10].tolist()}) for one, row in zip(found, theirs)]
    row: dict[str, object] = {"collection": name, "by": "random vectors of words", "documents": len(vectors)}
    row |= {"queries": len(asked), "same_of_10": round(sum(same) / len(same) / 10, 4)}
    row["search"] = ratios(
        lambda: ours.rank(asked, 100, "meaning"), lambda: flat.search(queries, 100), rounds
    )
    row["search_one"] = ratios(
        lambda: nearest_rows(queries[:1], vectors, 10), lambda: flat.search(queries[:1], 10), 20 * rounds
    )
    print(row, flush=True)
    return row


def told(stage: str, done: int, total: int) -> None:
    """Print how far an index is."""
    print(f"{stage}: {done} of {total} passages", flush=True)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--collections", nargs="+", default=["scifact", "cranfield"])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--documents", type=int)
    parser.add_argument("--queries", type=int)
    parser.add_argument("--timed", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    if faiss is not None:
        faiss.omp_set_num_threads(torch.get_num_threads())
    model: Any = WordVectors()
    if given.model:
        model = ch.load(given.model, dtype="float32", device=given.device)
        peer = SentenceTransformer(str(given.model), device=given.device).float()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = given.work or Path(folder)
        for name in given.collections:
            read = {"scifact": scifact, "cranfield": cranfield}[name]
            path, queries, judged = read(given.data / name, work)
            queries = dict(list(queries.items())[: given.queries])
            if given.documents:
                path = fewer(path, given.documents, work)
            index = build_index(work / f"{name}.index", model, [path], on_passages=told)
            if not given.model:
                rows.append(compare_search(name, index, list(queries.values()), given.rounds))
                continue
            if not given.documents:
                rows += judge(name, index, queries, judged, ["words", "meaning", "both"])
            rows.append(compare(name, index, peer, queries, judged, given))
    on_gpu = given.device != "cpu"
    facts = {"device": device_name() if on_gpu else processor_name(), "torch": torch.__version__}
    facts["embedder"] = f"{given.model.parent.name}/{given.model.name}" if given.model else "none"
    name = "retrieval_peers_gpu" if on_gpu else "retrieval_peers" if given.model else "retrieval_search"
    results = [{**facts, "rows": rows}]
    if given.save:
        save(name, results)
    if given.out:
        save(name, results, given.out)
