"""Embeddings of texts of 4 to 250 words on a GPU, beside sentence-transformers on the same directory.

    PYTHONPATH=src python benchmarks/gpu_embed.py DIR [--texts 2048] [--drawn] [--save]

DIR is a sentence encoder such as all-MiniLM-L6-v2. With `--drawn` only its config and tokenizer are read and
weights are drawn, which takes as long. Both run as they come, without any option, in float32.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import clearhead as ch
from common import device_name, save

ROUNDS = 4


def seconds_of(job: Callable[[], object]) -> float:
    """Return the least seconds of a job, after one that warms up."""
    job()
    took = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        job()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return min(took)


def drawn(folder: Path, to: Path) -> Path:
    """Return a copy of a directory with weights that are drawn."""
    from transformers import AutoConfig, AutoModel

    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(to)
    return to


def main() -> None:
    """Time both, and say how far their vectors are apart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=2048)
    parser.add_argument("--drawn", action="store_true")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    draw = random.Random(0)
    words = [word for word in (given.folder / "vocab.txt").read_text().split() if word.isalpha()]
    texts = [" ".join(draw.choices(words, k=draw.randint(4, 250))) for _ in range(given.texts)]
    with tempfile.TemporaryDirectory() as room:
        folder = drawn(given.folder, Path(room) / "drawn") if given.drawn else given.folder
        ours, theirs = ch.load(folder, device="cuda"), SentenceTransformer(str(folder), device="cuda")
        apart = (torch.from_numpy(theirs.encode(texts)) - ours.embed(texts)).abs().max()
        mine, peer = seconds_of(lambda: ours.embed(texts)), seconds_of(lambda: theirs.encode(texts))
    row = {
        "texts": given.texts,
        "texts_per_s": round(given.texts / mine),
        "ratio_to_sentence_transformers": round(peer / mine, 3),
        "vectors_apart": float(apart),
        "weights": "drawn" if given.drawn else str(given.folder.name),
        "device": device_name(),
        "torch": torch.__version__,
    }
    print(row)
    if given.save:
        save("gpu_embed", row)


if __name__ == "__main__":
    main()
