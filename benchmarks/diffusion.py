"""Diffusion and autoregressive language models of one text: bits a byte, samples, speed by denoising steps.

Four models of one shape (LLaDA's, which is Llama's) learn the characters of a text for the same number of
steps: autoregressive, block diffusion with blocks of 8 and of 1, masked diffusion. Bits are of held-out text:
exact for the first and for blocks of 1, upper bounds for the others. Samples are judged by the autoregressive
model: bits a character of what was generated, and the share of its words that the text has.

python benchmarks/run.py diffusion [FILE] [--steps N] [--save]
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import KeptParts

import clearhead as ch

TEXT = Path("../shared/data/tinyshakespeare/input.txt")
SHAPE = {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "d_ff": 176, "max_positions": 64}
MODELS: dict[str, dict[str, Any]] = {
    "autoregressive": {"data.task": "lm", "model.base": "llama-1b-like"},
    "blocks of 8": {"model.attention": "block-causal(8)"},
    "masked": {},
    "blocks of 1": {"model.attention": "block-causal(1)"},
}
STEPS: dict[str, tuple[int | None, ...]] = {
    "autoregressive": (None,),
    "blocks of 1": (None,),
    "blocks of 8": (1, 2, 4, 8),
    "masked": (4, 14, 56),
}
PROMPT, NEW, ROWS = "ROMEO:\n", 56, 8


def trained(name: str, text: Path, steps: int, folder: Path) -> tuple[ch.Model, float]:
    """Train one of the models; return it with the seconds it took."""
    settings = {f"model.{key}": value for key, value in SHAPE.items()} | MODELS[name]
    settings |= {"train.steps": steps, "train.validate_every": steps, "train.warmup": steps // 20}
    start = time.perf_counter()
    ch.train(text, recipe="diffusion-gpt", out=folder, settings={**settings, "model.tie_embeddings": True})
    return ch.load(folder), time.perf_counter() - start


def sampled(m: ch.Model, judge: ch.Model, words: set[str], steps: int | None) -> dict[str, object]:
    """Generate some texts; return how long one takes, and how the judge finds them."""
    options: dict[str, Any] = {"temperature": 1.0} | ({} if steps is None else {"denoising_steps": steps})
    m.generate(PROMPT, NEW, seed=ROWS, **options)
    texts, seconds, runs = [], [], []
    for seed in range(ROWS):
        start = time.perf_counter()
        generation: Any = m.generate(PROMPT, NEW, seed=seed, **options)
        seconds.append(time.perf_counter() - start)
        texts.append(generation.text)
        runs.append(generation.steps)
    total = [judge.score(PROMPT + text).total - judge.score(PROMPT).total for text in texts]
    found = [word in words for text in texts for word in re.findall(r"\b\w+\b", text)[:-1]]
    return {
        "denoising_steps": steps,
        "runs_of_the_model": statistics.mean(runs),
        "characters_per_second": round(NEW / statistics.median(seconds), 1),
        "bits_under_the_autoregressive_model": round(-sum(total) / math.log(2) / sum(map(len, texts)), 3),
        "words_of_the_text": round(sum(found) / max(1, len(found)), 3),
        "sample": texts[0],
    }


def run_diffusion() -> None:
    """Train the four models, judge them on held-out text, and sample by several numbers of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=TEXT)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    whole = given.file.read_text(encoding="utf-8")
    cut, words = len(whole) * 9 // 10, set(re.findall(r"\b\w+\b", whole))
    keep, judge = KeptParts(given.save), None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.txt").write_text(whole[:cut], encoding="utf-8")
        (folder / "test.txt").write_text(whole[cut : cut + 20_000], encoding="utf-8")
        for model in MODELS:
            m, seconds = trained(model, folder / "train.txt", given.steps, folder / model)
            judge = judge or m
            result = ch.evaluate(m, folder / "test.txt")
            bits, interval = result.metrics["bits_per_byte"], result.intervals["bits_per_byte"]
            part: dict[str, object] = {
                "title": model,
                "training_steps": given.steps,
                "parameters": ch.cost(m.config).parameters.total,
                "training_seconds": round(seconds, 1),
                "bits_per_byte": round(bits, 4),
                "interval": [round(end, 4) for end in interval],
                "bound": any("upper bounds" in note for note in result.notes),
                "samples": [sampled(m, judge, words, steps) for steps in STEPS[model]],
            }
            keep("cpu_diffusion", part)


if __name__ == "__main__":
    run_diffusion()
