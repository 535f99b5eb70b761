"""Measure answers to SQuAD's questions with and without the passages that an index finds.

    python benchmarks/retrieval_answers.py SQUAD.json.gz --model DIR [--embedder DIR] [--passages 1]
        [--device cuda] [--out FILE] [--save]

The index holds every paragraph of the file. Questions are drawn from all of them, in the order of a seed.
Each is answered three times by the same chat model: from the question alone, after the nearest passages, and
after the paragraph that it was written for. Without --embedder passages are found by words alone (BM25).
--cpu-seconds ends the run after the question at which so much processor time is spent. Intervals of 95 % are
by the normal distribution. --out writes the record, --save writes it under results/.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import clearhead as ch
from clearhead.labs.retrieval.index import build_index
from clearhead.labs.retrieval.passages import before_prompt
from clearhead.labs.retrieval.ranking import WORD
from clearhead.learn.evaluation.metrics import answer_match
from clearhead.learn.tasks.chat import chat_ids
from common import device_name, processor_name, save
from retrieval import WordVectors

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


def main() -> None:
    """Ask, count and print after each question."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("squad", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--embedder", type=Path)
    parser.add_argument("--passages", type=int, default=1)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--cpu-seconds", type=float, default=float("inf"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    articles = json.loads(gzip.decompress(given.squad.read_bytes()))["data"]
    paragraphs = [one for article in articles for one in article["paragraphs"]]
    questions = [(number, row) for number, one in enumerate(paragraphs) for row in one["qas"]]
    random.Random(0).shuffle(questions)
    model, begun = ch.load(given.model, device=given.device), time.process_time()
    scores: dict[str, list[tuple[float, ...]]] = {
        way: [] for way in ("question alone", "with passages", "with its paragraph")
    }
    found = asked_so_far = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "paragraphs.jsonl"
        file.write_text("\n".join(json.dumps({"text": one["context"]}) for one in paragraphs))
        embedder: Any = ch.load(given.embedder, device=given.device) if given.embedder else WordVectors(8)
        index = build_index(Path(folder) / "index", embedder, [file])
        whole = {hit.passage.line: hit for hit in index.search("the", len(paragraphs), "meaning")}
        for number, row in questions[: given.questions]:
            hits = index.search(row["question"], given.passages, "both" if given.embedder else "words")
            references = [one["text"] for one in row["answers"]]
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


if __name__ == "__main__":
    main()
