"""Models that encode versus other programs: speech, sparse attention, retrieval."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks.common import alternate, case_parser, device_name, processor_name, report, save
from benchmarks.retrieval import Clock, WordVectors, cranfield, judge, quality, scifact
from torch import Tensor, nn
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

import clearhead as ch
from clearhead.labs.retrieval.index import Index, build_index
from clearhead.labs.retrieval.stores import embedded, nearest_rows
from clearhead.learn.data.sounds import read_sound
from clearhead.run.api import load

# speech ---------------------------------------------------------------------------------------------------


DIGITS = "zero one two three four five six seven eight nine".split()  # noqa: SIM905
RATE = 16_000


def errors(wanted: list[str], said: list[str]) -> int:
    """Words to change, add or leave out so that what was said becomes what was wanted."""
    row = list(range(len(said) + 1))
    for number, word in enumerate(wanted, 1):
        before, row = row, [number]
        for place, other in enumerate(said, 1):
            row.append(min(before[place] + 1, row[-1] + 1, before[place - 1] + (word != other)))
    return row[-1]


def clips(folder: Path) -> dict[str, tuple[Path, str]]:
    """Each clip by name: its file and its text."""
    lines = (folder / "transcripts.tsv").read_text(encoding="utf-8").splitlines()[1:]
    found = {name: (folder / name, text) for name, text in (line.split("\t") for line in lines)}
    digits = sorted((folder / "fsdd").glob("*.wav"))
    return found | {f"fsdd/{path.name}": (path, DIGITS[int(path.name[0])]) for path in digits}


def rate(rows: list[dict[str, Any]], key: str, normal: EnglishTextNormalizer) -> float:
    """Wrong words of all rows, as a share of the words that were said."""
    pairs = [(normal(row["wanted"]).split(), normal(row[key]).split()) for row in rows]
    return sum(errors(*pair) for pair in pairs) / sum(len(wanted) for wanted, _ in pairs)


@torch.no_grad()
def run_speech() -> None:
    """Transcripts of real clips versus transformers' on the same weights, and the word error rate of both.

    python benchmarks/run.py speech MODEL_DIR SPEECH_DIR [--seconds 240] [--save]

    MODEL_DIR is a Whisper in Hugging Face's layout. SPEECH_DIR holds sound files, transcripts.tsv (file,
    text) and a folder fsdd/ of spoken digits. Each clip but the digits is also read with timestamps. What
    is done is kept in the folder that --work names, so that a run which ends after --seconds goes on where
    it was; 0 adds up what is there. Words are compared after transformers' own normaliser of English.
    """
    parser = case_parser(run_speech)
    parser.add_argument("folder", type=Path)
    parser.add_argument("speech", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "speech")
    parser.add_argument("--seconds", type=float, default=240)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    options.work.mkdir(exist_ok=True)
    kept = options.work / "clips.json"
    done: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    wanted, end = clips(options.speech), time.monotonic() + options.seconds
    if options.seconds:
        ours = load(options.folder, dtype="float32")
        theirs = transformers.WhisperForConditionalGeneration.from_pretrained(
            options.folder, dtype=torch.float32
        ).eval()
        processor = transformers.WhisperProcessor.from_pretrained(options.folder)
    for name, (path, text) in wanted.items():
        if name in done or time.monotonic() > end:
            continue
        samples = read_sound(path, RATE)
        frames = processor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        row: dict[str, Any] = {"wanted": text}
        for times in (False,) if "/" in name else (False, True):
            made = ours.transcribe(path, timestamps=times)
            told = theirs.generate(frames, return_timestamps=times, return_segments=True)["segments"][0]
            ids = [token for part in told for token in part["tokens"].tolist()]
            kind = "timed" if times else "plain"
            row[f"{kind}_tokens_equal"] = made.ids == ids
            row[kind] = made.text
            row[f"{kind}_theirs"] = processor.decode(ids, skip_special_tokens=True).strip()
        done[name] = row
        kept.write_text(json.dumps(done))
        print(name, row, flush=True)
    normal = EnglishTextNormalizer({})
    figures: dict[str, dict[str, object]] = {}
    for part, kinds in (("speech", ("plain", "timed")), ("digits", ("plain",))):
        rows = [row for name, row in done.items() if ("/" in name) == (part == "digits")]
        for kind in kinds if rows else ():
            equal = [row[kind] == row[f"{kind}_theirs"] and row[f"{kind}_tokens_equal"] for row in rows]
            figures[f"{part}, {kind}"] = {
                "clips": len(rows),
                "equal": sum(equal),
                "word_error_rate": round(rate(rows, kind, normal), 4),
                "word_error_rate_of_transformers": round(rate(rows, f"{kind}_theirs", normal), 4),
            }
            print(f"{part}, {kind}: {figures[f'{part}, {kind}']}")
    if options.save:
        spoken = [{"clip": name, **done[name]} for name in wanted if name in done]
        save("speech", [{"transformers": transformers.__version__, **figures, "transcripts": spoken}])


# sparse_encoders ------------------------------------------------------------------------------------------


LINEAR = "linear layers alone"
# Their config, their model, and the options of the base size.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bigbird": ("BigBirdConfig", "BigBirdModel", {"block_size": 64, "num_random_blocks": 3}),
    "longformer": (
        "LongformerConfig",
        "LongformerModel",
        {"vocab_size": 50265, "type_vocab_size": 1, "attention_window": 512, "max_position_embeddings": 4098},
    ),
}


def linear_layers(layers: int, length: int) -> Callable[[], None]:
    """A job of the products of the base size alone: four of attention and two of the feed-forward a layer."""
    states = torch.randn(length, 768), torch.randn(length, 3072)
    square, up, down = nn.Linear(768, 768), nn.Linear(768, 3072), nn.Linear(3072, 768)

    def job() -> None:
        for _ in range(layers):
            for _ in range(4):
                square(states[0])
            up(states[0])
            down(states[1])

    return job


@torch.inference_mode()
def compare(
    name: str, length: int, layers: int, rounds: int, warm: int, first_global: bool
) -> dict[str, object]:
    """Time both models on the same ids."""
    config_name, model_name, options = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**options, num_hidden_layers=layers)
    theirs = getattr(transformers, model_name)(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = ch.load(folder).model
    ids = torch.randint(100, theirs.config.vocab_size, (1, length))
    answers: dict[str, Tensor] = {}
    marked = torch.zeros_like(ids, dtype=torch.bool)
    marked[:, 0] = first_global
    to_ours = {"global_mask": marked} if name == "longformer" else {}
    to_theirs = {"global_attention_mask": marked.long()} if first_global else {}

    def run_ours() -> None:
        answers["clearhead"] = ours(ids, logits="none", **to_ours).hidden

    def run_theirs() -> None:
        answers["transformers"] = theirs(ids, attention_mask=torch.ones_like(ids), **to_theirs)[0]

    jobs = {"clearhead": run_ours, "transformers": run_theirs, LINEAR: linear_layers(layers, length)}
    seconds = alternate(jobs, rounds, warm, clock=time.process_time)
    gap = float((answers["clearhead"] - answers["transformers"]).abs().max())
    which = ", the first token global" if first_global else ""
    row = report(f"{name}, {layers} layers, {length} tokens{which}", seconds, length)
    shares = {one: round(seconds[LINEAR] / seconds[one], 3) for one in ("clearhead", "transformers")}
    beyond = {share: seconds[share] - seconds[LINEAR] for share in shares}
    figures = {
        "transformers": transformers.__version__,
        "processor_seconds": {one: round(took, 2) for one, took in seconds.items()},
        "share_of_linear_layers": shares,
        "at_most": round(seconds["transformers"] / seconds[LINEAR], 2),
        "beyond_linear_layers": round(beyond["transformers"] / beyond["clearhead"], 2),
        "largest_difference": gap,
    }
    print("  " + ", ".join(f"{one} {value}" for one, value in figures.items()), flush=True)
    return {**row, **figures}


def run_sparse_encoders() -> None:
    """Encoders with sparse attention, at their base size: a forward pass versus transformers' own class.

    python benchmarks/run.py sparse_encoders longformer [--lengths 4096] [--layers 12] [--rounds 2] [--save]

    Random weights, saved by transformers and read here; one row without padding, float32, both as they are
    loaded. Longformer has a window of 512 and stands twice, without global tokens and with the first one
    global; `bigbird` has blocks of 64. The two models take turns. Times are processor time, all threads
    together, so that other work on the machine falls out. Beside them stands the time of the linear layers
    alone, which both leave to the same library: no attention, however quick, could be faster than that, so
    `at_most` is the most by which anything that computes them in float32 could be quicker than
    transformers. The largest difference of a last state is given too.
    """
    parser = case_parser(run_sparse_encoders)
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--layers", type=int, default=12, help="of the base size; all are alike")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", type=int, default=1, help="rounds before those that count")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = [
        compare(options.name, length, options.layers, options.rounds, options.warm, first_global)
        for length in options.lengths
        for first_global in ((False, True) if options.name == "longformer" else (False,))
    ]
    if options.save:
        save(f"sparse_{options.name}", rows)


# retrieval_peers --------------------------------------------------------------------------------------------


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


def compare_retrieval(
    name: str, index: Index, peer: Any, queries: dict[str, str], judged: Any, given: Any
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


def run_retrieval_peers() -> None:
    """Compare retrieval with sentence-transformers and FAISS: the same embedder and documents, taking turns.

        python benchmarks/run.py retrieval_peers DATA --model DIR [--collections ...] [--device cuda]
            [--out FILE]

    DATA is as for retrieval.py, which builds the indexes; --work DIR keeps them. --sample N lets the peer
    embed N documents only, evenly spread, and gives FAISS our vectors for the others: how far the vectors of
    the sample lie apart is in the record. --documents N takes N documents of each collection, evenly spread,
    of which quality would say nothing, and --queries N the first N queries. --timed N documents are embedded
    in each round. Ratios are ours over theirs, so that below 1 ours takes less: of the wall's seconds, and of
    this process's, the best of all rounds of each. "search" is `Index.rank` of all queries beside the flat
    index of FAISS, "search_one" what it does with one
    vector: both return numbers and scores; "search_and_read" reads the passages too. sentence-transformers
    and faiss-cpu are in no extra. Without FAISS, one product of matrices stands for its flat index. Without
    --model random vectors of words stand for the embedder's, and search alone is compared. --out writes the
    record, --save writes it under results/.
    """
    parser = case_parser(run_retrieval_peers)
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
    given = parser.parse_args()
    if faiss is not None:
        faiss.omp_set_num_threads(torch.get_num_threads())
    model: Any = WordVectors()
    if given.model:
        model = ch.load(given.model, dtype="float32", device=given.device)
        from sentence_transformers import SentenceTransformer

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
            rows.append(compare_retrieval(name, index, peer, queries, judged, given))
    on_gpu = given.device != "cpu"
    facts = {"device": device_name() if on_gpu else processor_name(), "torch": torch.__version__}
    facts["embedder"] = f"{given.model.parent.name}/{given.model.name}" if given.model else "none"
    name = "retrieval_peers_gpu" if on_gpu else "retrieval_peers" if given.model else "retrieval_search"
    results = [{**facts, "rows": rows}]
    if given.save:
        save(name, results)
    if given.out:
        save(name, results, given.out)
