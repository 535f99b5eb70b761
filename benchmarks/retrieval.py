"""Measure retrieval: nDCG@10 and recall@100 on judged collections; time and memory of many passages.

    python benchmarks/retrieval.py --data DATA [--model DIR] [--device cuda] [--save]
    python benchmarks/retrieval.py --many 100000 --text FILE... [--model DIR] [--device cuda] [--save]

DATA has the folders scifact (BEIR's form) and cranfield (cran.all.1400.gz, cran.qry, cranqrel). Without
--model the embedder is a small encoder of random weights: words alone are judged, and times are of its size.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import resource
import tempfile
import time
from pathlib import Path

import torch

import clearhead as ch
from clearhead.retrieval.index import Index, build_index
from clearhead.tokens.training import READER, byte_tokenizer
from common import device_name, processor_name, save

Judged = dict[str, set[str]]  # of each query: the documents that fit


def small_encoder(folder: Path) -> ch.Model:
    """Return an encoder of random weights: two layers of width 64 over bytes."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(READER)
    config = ch.ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        family="encoder",
        d_model=64,
        n_layers=2,
        n_heads=4,
        max_positions=64,
    )
    made = ch.Model(ch.Transformer(config), tokenizer)
    made.save(folder)
    return ch.load(folder)


def scifact(data: Path, work: Path) -> tuple[Path, dict[str, str], Judged]:
    """Return the file of documents, the test queries, and what fits each."""
    rows = [line.split("\t") for line in (data / "qrels_test.tsv").read_text().splitlines()[1:]]
    judged: Judged = {}
    for query, document, score in rows:
        if int(score) > 0:
            judged.setdefault(query, set()).add(document)
    texts = [json.loads(line) for line in (data / "queries.jsonl").read_text().splitlines()]
    return (
        data / "corpus.jsonl.gz",
        {one["_id"]: one["text"] for one in texts if one["_id"] in judged},
        judged,
    )


def cranfield(data: Path, work: Path) -> tuple[Path, dict[str, str], Judged]:
    """Write the documents as JSON lines; number the queries by their order; codes 1 to 4 fit."""

    def entries(text: str) -> list[dict[str, str]]:
        return [
            {
                name: " ".join(body.split())
                for name, body in re.findall(r"^\.([TW])\n(.*?)(?=^\.[A-Z]|\Z)", one, re.M | re.S)
            }
            for one in re.split(r"^\.I +\d+ *\n", text, flags=re.M)[1:]
        ]

    documents = entries(gzip.decompress((data / "cran.all.1400.gz").read_bytes()).decode("ascii"))
    path = work / "cranfield.jsonl"
    lines = [
        json.dumps({"_id": str(n), "title": one.get("T", ""), "text": one.get("W", "")})
        for n, one in enumerate(documents, start=1)
    ]
    path.write_text("\n".join(lines))
    queries = {str(n): one["W"] for n, one in enumerate(entries((data / "cran.qry").read_text()), start=1)}
    judged: Judged = {}
    for line in (data / "cranqrel").read_text().splitlines():
        query, document, code = line.split()[:3]
        if int(code) > 0:
            judged.setdefault(query, set()).add(document)
    return path, {name: text for name, text in queries.items() if name in judged}, judged


def ndcg(ranked: list[str], fitting: set[str], k: int = 10) -> float:
    """Return the normalised discounted cumulative gain of the first k, relevant or not."""
    gains = sum(1 / math.log2(rank + 1) for rank, name in enumerate(ranked[:k], start=1) if name in fitting)
    return gains / sum(1 / math.log2(rank + 1) for rank in range(1, min(k, len(fitting)) + 1))


def judge(
    name: str, index: Index, queries: dict[str, str], judged: Judged, ways: list[str]
) -> list[dict[str, object]]:
    """Search every query in every way."""
    rows: list[dict[str, object]] = []
    for by in ways:
        start = time.perf_counter()
        found = index.search_all(list(queries.values()), 100, by)  # type: ignore[arg-type]
        took = time.perf_counter() - start
        ranked = {query: [hit.passage.name for hit in hits] for query, hits in zip(queries, found)}
        gains = [ndcg(ranked[query], judged[query]) for query in queries]
        recalls = [len(judged[query] & set(ranked[query])) / len(judged[query]) for query in queries]
        row = {
            "collection": name,
            "by": by,
            "ndcg_10": round(sum(gains) / len(gains), 4),
            "recall_100": round(sum(recalls) / len(recalls), 4),
            "ms_per_query": round(1000 * took / len(queries), 2),
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def many(count: int, texts: list[Path], model: ch.Model, work: Path) -> list[dict[str, object]]:
    """Index many passages of plain text, bring the index up to date, and search it."""
    words = " ".join(
        (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        for path in texts
    ).split()
    size = len(words) // count
    lines = (json.dumps({"text": " ".join(words[n * size : (n + 1) * size])}) for n in range(count))
    (work / "many.jsonl").write_text("\n".join(lines))
    start = time.perf_counter()
    index = build_index(work / "many.index", model, [work / "many.jsonl"])
    built = time.perf_counter() - start
    start = time.perf_counter()
    build_index(work / "many.index", model)
    again = time.perf_counter() - start
    start = time.perf_counter()
    index = Index(work / "many.index", model)
    index.search("the whale")
    opened = time.perf_counter() - start
    queries = [" ".join(words[n * 997 : n * 997 + 8]) for n in range(50)]
    row: dict[str, object] = {
        "passages": len(index),
        "words_each": size,
        "index_seconds": round(built, 1),
        "again_seconds": round(again, 1),
        "open_seconds": round(opened, 2),
        "disk_mb": round(
            sum(path.stat().st_size for path in (work / "many.index").rglob("*") if path.is_file()) / 1e6
        ),
        "width": model.config.d_model,
    }
    for by in ("meaning", "words", "both"):
        start = time.perf_counter()
        for query in queries:
            index.search(query, 10, by)  # type: ignore[arg-type]
        row[f"{by}_ms"] = round(1000 * (time.perf_counter() - start) / len(queries), 1)
    row["peak_memory_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(row, flush=True)
    return [row]


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--many", type=int)
    parser.add_argument("--text", type=Path, nargs="+")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = ch.load(given.model, device=given.device) if given.model else small_encoder(work / "encoder")
        ways = ["words", "meaning", "both"] if given.model else ["words"]
        for name, read in {"scifact": scifact, "cranfield": cranfield}.items() if given.data else ():
            path, queries, judged = read(given.data / name, work)
            start = time.perf_counter()
            index = build_index(work / f"{name}.index", model, [path])
            print(f"{name}: {len(index):,} passages in {time.perf_counter() - start:.1f} s", flush=True)
            rows += judge(name, index, queries, judged, ways)
        if given.many:
            rows += many(given.many, given.text, model, work)
    if given.save:
        facts = {
            "device": processor_name() if given.device == "cpu" else device_name(),
            "torch": torch.__version__,
        }
        embedder = given.model.name if given.model else "random encoder, 2 x 64"
        name = "retrieval_many" if given.many and not given.data else "retrieval"
        save(
            name if given.device == "cpu" else f"{name}_gpu", [{**facts, "embedder": embedder, "rows": rows}]
        )


if __name__ == "__main__":
    main()
