"""A sentence embedder trained on STS Benchmark and on SciFact's training queries, before and after.

    python benchmarks/embed.py --data ../shared/data --weights minilm/ --device cuda --out embed.json

`--data` holds `sts_benchmark` and `scifact`, `--weights` a sentence encoder such as all-MiniLM-L6-v2. STS:
the Spearman correlation on the test part, the best checkpoint by the dev part. SciFact: nDCG@10 and MRR@10 of
the test queries over all 5,183 abstracts; a tenth of the training queries chooses the checkpoint. `--peer`
trains on the same rows with sentence-transformers' own trainer and losses, where it is installed. `--tiny` is
for a CPU.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

import clearhead as ch
from clearhead.learn.evaluation.metrics import METRICS
from clearhead.learn.training.events import read_log

TINY = ("train.epochs=", "train.steps=2", "data.max_length=64", "train.samples=0")


def sts(folder: Path, part: str) -> list[dict[str, object]]:
    path = folder / f"sts-{part}.csv"
    with gzip.open(f"{path}.gz", "rt") if part == "train" else path.open() as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return [{"sentence1": row[5], "sentence2": row[6], "score": float(row[4])} for row in rows]


def scifact(folder: Path):
    with gzip.open(folder / "corpus.jsonl.gz", "rt") as file:
        corpus = {row["_id"]: f"{row['title']} {row['text']}".strip() for row in map(json.loads, file)}
    with (folder / "queries.jsonl").open() as file:
        queries = {row["_id"]: row["text"] for row in map(json.loads, file)}
    wanted: dict[str, dict[str, dict[str, float]]] = {}
    for part in ("train", "test"):
        wanted[part] = defaultdict(dict)
        with (folder / f"qrels_{part}.tsv").open() as file:
            for row in csv.DictReader(file, delimiter="\t"):
                if float(row["score"]) > 0:
                    wanted[part][row["query-id"]][row["corpus-id"]] = float(row["score"])
    return corpus, queries, wanted


def spearman(vectors, rows) -> float:
    """Of cosines with scores; `vectors` is a function from texts to [N, D]."""
    one, other = (
        torch.nn.functional.normalize(torch.as_tensor(vectors([row[side] for row in rows])), dim=-1)
        for side in ("sentence1", "sentence2")
    )
    cosines = (one * other).sum(-1, keepdim=True).tolist()
    return METRICS["spearman"](cosines, [[row["score"]] for row in rows])


def retrieval(vectors, corpus, queries, wanted) -> dict[str, float]:
    names, asked = list(corpus), list(wanted)
    texts = torch.nn.functional.normalize(torch.as_tensor(vectors(list(corpus.values()))), dim=-1)
    found = torch.nn.functional.normalize(torch.as_tensor(vectors([queries[one] for one in asked])), dim=-1)
    best = (found @ texts.T).topk(min(10, len(names))).indices.tolist()
    ranked = [[names[place] for place in row] for row in best]
    return {name: METRICS[name](ranked, [wanted[one] for one in asked]) for name in ("ndcg", "mrr")}


def peer(weights: str, rows, loss: str, device: str, epochs: float, batch: int, seed: int, rate: float):
    """Train with sentence-transformers; return a function from texts to vectors, or None without it."""
    try:
        from datasets import Dataset
        from sentence_transformers import (
            SentenceTransformer,
            SentenceTransformerTrainer,
            SentenceTransformerTrainingArguments,
            losses,
        )
    except ImportError:
        return None
    model = SentenceTransformer(weights, device=device)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=tempfile.mkdtemp(), num_train_epochs=epochs, per_device_train_batch_size=batch, seed=seed,
        learning_rate=rate, warmup_ratio=0.05, report_to=[], save_strategy="no", bf16=device == "cuda",
        batch_sampler="no_duplicates",
    )  # fmt: skip
    SentenceTransformerTrainer(
        model, arguments, train_dataset=Dataset.from_list(rows), loss=getattr(losses, loss)(model, scale=20.0)
    ).train()
    return lambda texts: model.encode(texts, batch_size=64, show_progress_bar=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--peer-alone", action="store_true", help="ours was trained before")
    parser.add_argument("--only", choices=("sts", "scifact"), default=None)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    parts = {part: sts(given.data / "sts_benchmark", part) for part in ("train", "dev", "test")}
    corpus, queries, wanted = scifact(given.data / "scifact")
    pairs = [
        {"anchor": queries[query], "positive": corpus[document]}
        for query, found in wanted["train"].items()
        for document in found
    ]
    if given.tiny:
        parts = {part: rows[:24] for part, rows in parts.items()}
        few = list(wanted["test"])[:5]
        wanted["test"] = {query: wanted["test"][query] for query in few}
        corpus = {name: corpus[name] for found in wanted["test"].values() for name in found}
        pairs = pairs[:24]
    base, results = ch.load(given.weights, dtype="float32", device=given.device), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for task, rows, more, loss in (
            ("sts", parts["train"], ["train.metric=spearman"], "CoSENTLoss"),
            ("scifact", pairs, ["train.metric=ndcg"], "MultipleNegativesRankingLoss"),
        ):
            if given.only not in (None, task):
                continue
            write(folder / f"{task}.jsonl", rows)
            batch = 8 if given.tiny else 64
            settings = [
                f"model.base={given.weights}", f"train.device={given.device}", f"train.seed={given.seed}",
                f"train.epochs={given.epochs}", f"train.lr={given.lr}", f"data.batch_size={batch}", *more,
                *(TINY if given.tiny else ()),
            ]  # fmt: skip
            if task == "sts":
                write(folder / "dev.jsonl", parts["dev"])
                settings.append(f"data.validation={folder / 'dev.jsonl'}")
            trained = None
            if not given.peer_alone:
                place = folder / task
                ch.train(f"{place}.jsonl", recipe="embed", out=place, settings=settings, on_event=print)
                trained = ch.load(place, device=given.device)
            measure = (
                (lambda vectors: {"spearman": spearman(vectors, parts["test"])})
                if task == "sts"
                else (lambda vectors: retrieval(vectors, corpus, queries, wanted["test"]))
            )
            other = None
            if given.peer or given.peer_alone:
                other = peer(
                    given.weights, rows, loss, given.device, 1 if given.tiny else given.epochs, batch,
                    given.seed, given.lr,
                )  # fmt: skip
            results[task] = {
                "rows": len(rows), "before": measure(base.embed), "after": trained and measure(trained.embed),
                "sentence_transformers": other and measure(lambda texts, m=other: np.asarray(m(texts))),
                "curve": trained and read_log(folder / task),
            }  # fmt: skip
            print(task, {key: value for key, value in results[task].items() if key != "curve"}, flush=True)
    given.out.write_text(json.dumps({"seed": given.seed, "results": results}, indent=2) + "\n")


def write(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
