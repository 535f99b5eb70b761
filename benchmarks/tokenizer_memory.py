"""Peak memory and time of training a tokenizer on a large generated text, each kind in a process of its own.

    python benchmarks/tokenizer_memory.py [--megabytes 1000] [--kinds bpe wordpiece unigram word char]
        [--shape zipf] [--save]

The text is words of a fixed seed on one single line: `zipf` draws from two million of them, each as often as
its rank says, as in written language; `distinct` hardly repeats a word, which is the worst case for trainers
that keep each one. Memory is the peak of the whole process, imports included; the text lies in a file and is
read in pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from common import save

LETTERS = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
N_WORDS = 2_000_000
BLOCK = 200_000  # words written at once
MEASURE = """
import json, resource, sys, time
from pathlib import Path
from clearhead.hub.tokens import TokensPlan
from clearhead.hub.tokens.training import TextFiles
from clearhead.hub.tokens.training import GENERATOR, train_tokenizer
kind, path = sys.argv[1], Path(sys.argv[2])
def peak():
    try:  # the kernel's own figure; ru_maxrss also counts what the parent process had
        lines = open("/proc/self/status")
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before, start = peak(), time.perf_counter()
made = train_tokenizer(TextFiles((path,)), TokensPlan(kind=kind), GENERATOR, path.stat().st_size)
seconds = time.perf_counter() - start
found = {"seconds": seconds, "before": before, "peak": peak(), "vocab_size": made.get_vocab_size()}
print(json.dumps(found))
"""


def words(generator: np.random.Generator, count: int) -> list[str]:
    """Random words of 2 to 12 letters, short ones more often."""
    lengths = np.minimum(2 + generator.poisson(4.5, count), 12)
    letters = "".join(generator.choice(LETTERS, int(lengths.sum())))
    ends = lengths.cumsum().tolist()
    return [letters[end - length : end] for end, length in zip(ends, lengths.tolist())]


def write(path: Path, size: int, shape: str) -> None:
    """A text of `size` bytes."""
    generator = np.random.default_rng(0)
    known = np.array(words(generator, N_WORDS), dtype=object)
    with path.open("w", encoding="ascii") as file:
        while file.tell() < size:
            if shape == "zipf":
                # Draw rank r as often as 1/r.
                drawn = known[np.exp(generator.random(BLOCK) * np.log(N_WORDS)).astype(int)]
            else:
                drawn = np.array(words(generator, BLOCK), dtype=object)
            file.write(" ".join(drawn) + " ")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", default=["bpe", "wordpiece", "unigram", "word", "char"])
    parser.add_argument("--shape", choices=("zipf", "distinct"), default="zipf")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    device = f"CPU {platform.machine()}, {os.cpu_count()} cores"
    title = f"train a tokenizer on {options.megabytes} MB of text, {options.shape}"
    print(f"\n{title}  [{device}]")
    rows = {}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "text.txt"
        write(path, options.megabytes * 1_000_000, options.shape)
        for kind in options.kinds:
            run = subprocess.run(
                [sys.executable, "-c", MEASURE, kind, str(path)], check=True, capture_output=True, text=True
            )
            seen = json.loads(run.stdout.splitlines()[-1])
            row = {"peak_mb": round(seen["peak"] / 1e6), "before_mb": round(seen["before"] / 1e6)}
            rows[kind] = row | {"seconds": round(seen["seconds"], 1), "vocab_size": seen["vocab_size"]}
            print(
                f"  {kind:<10} peak {row['peak_mb']:>5} MB   {seen['seconds']:>7.1f} s   "
                f"{seen['vocab_size']:>6} tokens",
                flush=True,
            )
    if options.save:
        save(f"tokenizer_memory_{options.shape}", [{"title": title, "device": device, "rows": rows}])


if __name__ == "__main__":
    main()
