"""Retrieval: quality and time of an index, and answers with passages."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import re
import resource
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import case_parser, device_name, processor_name, save

import clearhead as ch
from clearhead.hub.files import read_json
from clearhead.labs.retrieval.index import MANIFEST, PARTS, Index, build_index
from clearhead.labs.retrieval.passages import before_prompt
from clearhead.labs.retrieval.stores import WORD, words_of
from clearhead.learn.evaluation.metrics import answer_match
from clearhead.learn.tasks.generation import chat_ids

# retrieval ------------------------------------------------------------------------------------------------


Judged = dict[str, set[str]]  # of each query: the documents that fit


class WordVectors:
    """Stands for an embedder that costs nothing: a text is the sum of random vectors of its words."""

    sentences, folder = None, None

    def __init__(self, width: int = 384) -> None:
        """Draw 65,536 vectors."""
        self.table = torch.randn(2**16, width, generator=torch.Generator().manual_seed(0))

    def embed(self, texts: list[str], prompt: str | None = None) -> torch.Tensor:
        """Return vectors [N, D]."""
        rows = [torch.tensor([word % 2**16 for word in words_of(text)], dtype=torch.long) for text in texts]
        return torch.stack([self.table[row].sum(0) for row in rows])


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
        {text["_id"]: text["text"] for text in texts if text["_id"] in judged},
        judged,
    )


def cranfield(data: Path, work: Path) -> tuple[Path, dict[str, str], Judged]:
    """Write the documents as JSON lines; number the queries by their order; codes 1 to 4 fit."""

    def entries(text: str) -> list[dict[str, str]]:
        return [
            {
                name: " ".join(body.split())
                for name, body in re.findall(r"^\.([TW])\n(.*?)(?=^\.[A-Z]|\Z)", part, re.M | re.S)
            }
            for part in re.split(r"^\.I +\d+ *\n", text, flags=re.M)[1:]
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


def quality(ranked: dict[str, list[str]], judged: Judged) -> dict[str, float]:
    """Return nDCG@10, recall@10 and recall@100 of the rankings of some queries."""
    figures = {"ndcg_10": [ndcg(names, judged[query]) for query, names in ranked.items()]}
    for k in (10, 100):
        figures[f"recall_{k}"] = [
            len(judged[query] & set(names[:k])) / len(judged[query]) for query, names in ranked.items()
        ]
    return {name: round(sum(values) / len(values), 4) for name, values in figures.items()}


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
        row = {
            "collection": name,
            "by": by,
            **quality(ranked, judged),
            "ms_per_query": round(1000 * took / len(queries), 2),
        }
        print(row, flush=True)
        rows.append(row)
    return rows


class Clock:
    """Seconds since it was made: of the wall, and of this process."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self, name: str, of: int = 1, digits: int = 1) -> dict[str, float]:
        """Return both, for one of so many things."""
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        return {name: round(wall / of, digits), f"{name}_cpu": round(cpu / of, digits)}


def many(count: int, texts: list[Path], model: Any, work: Path) -> list[dict[str, object]]:
    """Index many passages of plain text, bring the index up to date, and search it, by a graph as well."""
    words = " ".join(
        (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        for path in texts
    ).split()
    size = len(words) // count
    lines = (json.dumps({"text": " ".join(words[n * size : (n + 1) * size])}) for n in range(count))
    (work / "many.jsonl").write_text("\n".join(lines))
    folder, clock = work / "many.index", Clock()
    build_index(folder, model, [work / "many.jsonl"])
    row: dict[str, object] = {"passages": count, "words_each": size, **clock.read("index_seconds")}
    clock = Clock()
    build_index(folder, model)
    row |= clock.read("again_seconds")
    clock = Clock()
    index = Index(folder, model)
    index.search("the whale")
    row |= clock.read("open_seconds", digits=2)
    row |= {"disk_mb": megabytes(folder), "width": index.parts[0][1].vectors.shape[1]}
    queries = [" ".join(words[n * 997 : n * 997 + 8]) for n in range(50)]
    for by in ("meaning", "words", "both"):
        clock = Clock()
        for query in queries:
            index.search(query, 10, by)  # type: ignore[arg-type]
        row |= clock.read(f"{by}_seconds", len(queries), 4)
    row["peak_memory_mb"] = peak_memory()
    print(row, flush=True)
    clock = Clock()
    graph = build_index(folder, model, nearest="hnsw")
    row |= clock.read("hnsw_index_seconds")
    graph.search("the whale")
    clock = Clock()
    found = [graph.search(query, 10, "meaning") for query in queries]
    row |= clock.read("hnsw_meaning_seconds", len(queries), 4)
    exact = [{hit.passage for hit in index.search(query, 10, "meaning")} for query in queries]
    shared = [len({hit.passage for hit in hits} & wanted) / 10 for hits, wanted in zip(found, exact)]
    row |= {"hnsw_recall_10": round(sum(shared) / len(shared), 4), "hnsw_disk_mb": megabytes(folder)}
    row["hnsw_peak_memory_mb"] = peak_memory()
    print(row, flush=True)
    return [row]


def megabytes(folder: Path) -> int:
    """Return what a folder takes on disk."""
    return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6)


def peak_memory() -> int:
    """Return the most memory that this process has had, in MB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def kills(count: int, work: Path) -> list[dict[str, object]]:
    """Kill a process that brings an index up to date, at random moments; look at what it leaves.

    Every round changes all files, so that every part and the graph are written again.
    """
    draw, model, folder = random.Random(0), WordVectors(64), work / "killed.index"
    build_index.__globals__["BLOCK"] = 64  # many parts, so many moments

    def write(edition: str) -> None:
        for number in range(20):
            rows = [{"text": f"{edition} {number} {row} river bridge"} for row in range(500)]
            (work / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def build() -> None:
        build_index(folder, model, [work / f"{number}.jsonl" for number in range(20)], nearest="hnsw")

    def begin() -> int:
        """Return the id of a process that builds."""
        if not (child := os.fork()):
            build()
            os._exit(0)
        return child

    def unnamed() -> int:
        """Return how many parts were written that the index does not name yet."""
        named = {
            part["name"] for source in read_json(folder / MANIFEST)["sources"] for part in source["parts"]
        }
        return len({path.name for path in (folder / PARTS).glob("[!.]*.safetensors")} - named)

    write("edition0")
    build()
    write("edition0 whole")
    clock = Clock()
    assert os.waitpid(begin(), 0)[1] == 0  # a child by itself comes to its end
    whole, before, tally, left = clock.read("wall")["wall"], "edition0", {"old": 0, "new": 0}, []
    for number in range(1, count + 1):
        edition = f"edition{number}"
        write(edition)
        child = begin()
        time.sleep(draw.uniform(0, 1.2 * whole))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left.append(unnamed())
        index = Index(folder, model, stale=True)
        hits = [hit for by in ("words", "meaning") for hit in index.search(f"{before} {edition}", 50, by)]
        editions = {hit.passage.text.split()[0] for hit in hits}
        assert len(index) == 10_000 and len(editions) == 1 and editions <= {before, edition}, editions
        tally["new" if editions == {edition} else "old"] += 1
        build()  # goes on from there
        assert {hit.passage.text.split()[0] for hit in Index(folder, model).search(edition, 9)} == {edition}
        before = edition
    row = {"kills": count, "seconds_of_a_build": whole, "index_left": tally, "parts": 20 * 8}
    row |= {"parts_written_when_killed": sorted(left)}
    print(row, flush=True)
    return [row]


def run_retrieval() -> None:
    """Measure retrieval: nDCG@10 and recall on judged collections; time and memory of many passages; kills.

        python benchmarks/run.py retrieval --data DATA [--model DIR] [--device cuda] [--save]
        python benchmarks/run.py retrieval --many 100000 --text FILE... [--model DIR] [--device cuda] [--save]
        python benchmarks/run.py retrieval --kills 20 [--save]

    DATA has the folders scifact (BEIR's form) and cranfield (cran.all.1400.gz, cran.qry, cranqrel). Without
    --model the vector of a text is the sum of random vectors of its words: words alone are judged, and
    times are those of the index by itself, without an embedder's. --work DIR keeps the indexes: a run that
    is broken off goes on from there.
    """
    parser = case_parser(run_retrieval)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--many", type=int)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--text", type=Path, nargs="+")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = given.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        model: Any = ch.load(given.model, device=given.device) if given.model else WordVectors()
        ways = ["words", "meaning", "both"] if given.model else ["words"]
        for name, read in {"scifact": scifact, "cranfield": cranfield}.items() if given.data else ():
            path, queries, judged = read(given.data / name, work)
            start = time.perf_counter()
            index = build_index(work / f"{name}.index", model, [path])
            print(f"{name}: {len(index):,} passages in {time.perf_counter() - start:.1f} s", flush=True)
            rows += judge(name, index, queries, judged, ways)
        if given.many:
            rows += many(given.many, given.text, model, work)
        if given.kills:
            rows += kills(given.kills, work)
    if given.save:
        facts = {
            "device": processor_name() if given.device == "cpu" else device_name(),
            "torch": torch.__version__,
        }
        embedder = given.model.name if given.model else "sums of random vectors of words"
        name = "retrieval" if given.data else "retrieval_many" if given.many else "retrieval_kills"
        save(
            name if given.device == "cpu" else f"{name}_gpu", [{**facts, "embedder": embedder, "rows": rows}]
        )


# retrieval_answers ----------------------------------------------------------------------------------------


NEW = 24  # tokens of an answer


def asked(model: ch.Model, question: str, passages: list[Any]) -> str:
    """Return the first line of the answer of a model that was trained for conversations."""

    def ids(text: str) -> list[int]:
        return chat_ids(model, [{"role": "user", "content": text}], {})

    prompt = f"Question: {question}\nAnswer with a few words only."
    whole = before_prompt(prompt, passages, lambda text: len(ids(text)), model.max_length - NEW)[0]
    return (model.generate(ids(whole), NEW).text or "").strip().split("\n")[0]


def contains(text: str, references: list[str]) -> bool:
    """Return True if one of the references stands in a text, letters and digits compared."""
    plain = [f" {' '.join(WORD.findall(one.lower()))} " for one in (text, *references)]
    return any(one.strip() and one in plain[0] for one in plain[1:])


def mean(values: tuple[float, ...]) -> list[float]:
    """Return the mean, and half of its interval of 95 %."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return [round(statistics.fmean(values), 4), round(1.96 * spread / len(values) ** 0.5, 4)]


def run_retrieval_answers() -> None:
    """Measure answers to SQuAD's questions with and without the passages that an index finds.

        python benchmarks/run.py retrieval_answers SQUAD.json.gz --model DIR [--embedder DIR] [--passages 1]
            [--device cuda] [--out FILE] [--save]

    The index holds every paragraph of the file. Questions are drawn from all of them, in the order of a
    seed. Each is answered three times by the same chat model: from the question alone, after the nearest
    passages, and after the paragraph that it was written for. Without --embedder passages are found by
    words alone (BM25). --cpu-seconds ends the run after the question at which so much processor time is
    spent. Intervals of 95 % are by the normal distribution. --out writes the record, --save writes it under
    results/.
    """
    parser = case_parser(run_retrieval_answers)
    parser.add_argument("squad", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--embedder", type=Path)
    parser.add_argument("--passages", type=int, default=1)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--cpu-seconds", type=float, default=float("inf"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    articles = json.loads(gzip.decompress(given.squad.read_bytes()))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    questions = [(number, row) for number, one in enumerate(paragraphs) for row in one["qas"]]
    random.Random(0).shuffle(questions)
    model, begun = ch.load(given.model, device=given.device), time.process_time()
    scores: dict[str, list[tuple[float, ...]]] = {
        way: [] for way in ("question alone", "with passages", "with its paragraph")
    }
    found = asked_so_far = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "paragraphs.jsonl"
        file.write_text("\n".join(json.dumps({"text": paragraph["context"]}) for paragraph in paragraphs))
        embedder: Any = ch.load(given.embedder, device=given.device) if given.embedder else WordVectors(8)
        index = build_index(Path(folder) / "index", embedder, [file])
        whole = {hit.passage.line: hit for hit in index.search("the", len(paragraphs), "meaning")}
        for number, row in questions[: given.questions]:
            hits = index.search(row["question"], given.passages, "both" if given.embedder else "words")
            references = [answer["text"] for answer in row["answers"]]
            found += number + 1 in {hit.passage.line for hit in hits}
            asked_so_far += 1
            for way, passages in zip(scores, ([], hits, [whole[number + 1]])):
                text = asked(model, row["question"], passages)
                right, f1, _ = answer_match(text, references)
                scores[way].append((right, f1, float(contains(text, references))))
                print(f"{asked_so_far} {way}: {text!r:.60} {references[0]!r:.40} f1 {f1:.2f}", flush=True)
            if time.process_time() - begun > given.cpu_seconds:
                break
    rows = {
        way: {name: mean(values) for name, values in zip(("exact", "f1", "contains"), zip(*each))}
        for way, each in scores.items()
    }
    facts = {
        **{"device": device_name() if given.device != "cpu" else processor_name()},
        **{"torch": torch.__version__, "model": given.model.name},
        **{"embedder": given.embedder.name if given.embedder else "none: by words"},
        **{"passages": given.passages, "questions": asked_so_far, "paragraphs": len(paragraphs)},
        "paragraph_found": round(found / asked_so_far, 4),
        "cpu_seconds": round(time.process_time() - begun),
    }
    print(facts, rows, flush=True)
    if given.save:
        save("retrieval_answers", [{**facts, "rows": rows}])
    if given.out:
        save("retrieval_answers", [{**facts, "rows": rows}], given.out)
