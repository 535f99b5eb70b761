"""The story of the page versus exhaustive ablation: is the named part the one with the largest effect?

Each prompt is explained from candidates, as the page does, and again with every head and feed-forward off.
The probabilities with and without what the sentence names are computed once more by a whole forward pass with
the part's activation set to zero, which shares nothing with the batched passes of `explain`.

Real models: those of requirements-weights.txt that choose among tokens or classes, stories260K, and
SmolLM2-135M-Instruct where `--smollm2` names its file. Trained: three short runs of our own recipes.

python benchmarks/run.py story [--smollm2 FILE.gguf] [--only NAME] [--save]
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import KeptParts, processor_name

import clearhead as ch
from clearhead.app.explorer.findings import inputs_for
from clearhead.inside.inputs import choices_of, prepare
from clearhead.inside.story import PartEffect, explain

TRAINED = {
    "seq2seq-dates": {"train.steps": 300},
    "char-gpt-cpu": {"train.steps": 150},
    "g2p": {"train.steps": 150},
}
STORIES = (
    [1, 403, 407, 261, 378],
    [1, 403, 407, 261, 378, 432, 401, 403],
    [1, 5, 9, 12, 5, 9],
)
REACTIONS = ("CC(=O)O.[MASK]>>CC(=O)OCC", "CCO.CC(=O)O>>CC(=O)[MASK]CC", "c1ccccc1Br.[MASK]>>c1ccccc1")
PROMPTS = (
    "When Mary and John went to the store, John gave a drink to",
    "The keys to the old wooden cabinet",
    "one two three four one two three",
    "Paris is the capital of France, and Rome is the capital of",
    "My name is Tom Miller. What is my name? Your name is Tom",
    "It was not good. It was not bad. It was",
)


def packaged(name: str) -> Path | None:
    """The folder of an installed package, None where there is none."""
    found = importlib.util.find_spec(name)
    return (
        Path(next(iter(found.submodule_search_locations)))
        if found and found.submodule_search_locations
        else None
    )


def models(smollm2: Path | None) -> Iterator[tuple[str, Any, list[Any]]]:
    """Each model with its name and its prompts."""
    if smollm2 is not None:
        yield "SmolLM2-135M-Instruct", ch.load(smollm2), list(PROMPTS)
    yield "stories260K", ch.load("../shared/weights/stories260K/hf"), [list(ids) for ids in STORIES]
    folder = packaged("rxnfp")
    if folder is not None:
        forms = folder / "models" / "transformers"
        yield "rxnfp, masked", ch.load(forms / "bert_pretrained"), list(REACTIONS)
        texts = [text.replace("[MASK]", "O") for text in REACTIONS]
        yield "rxnfp, classifier", ch.load(forms / "bert_ft_10k_25s"), texts
    for recipe, settings in TRAINED.items():
        with tempfile.TemporaryDirectory() as folder_of_run:
            out = Path(folder_of_run) / "run"
            try:
                ch.train(recipe=recipe, out=out, settings=settings, overwrite=True)
                m = ch.load(out)
            except ch.ClearheadError as error:
                print(f"{recipe}: {error}")
                continue
            yield (
                f"{recipe}, {settings['train.steps']} steps",
                m,
                [given for _, given, _ in inputs_for(m)][:3],
            )


def recomputed(m: Any, given: Any, column: int, choice: str, part: PartEffect) -> tuple[float, float]:
    """The probability of the choice with and without a part, each by a whole forward pass."""
    prepared = prepare(m, given)
    choices = choices_of(prepared)
    number = next(i for i in range(choices.count) if choices.name(i) == choice)
    kind, _, rest = part.name.rpartition(":")
    names = rest.split(".")
    encoder = "encoder." if names[0] == "encoder" else ""
    layer = names[-1] if kind else names[-2]
    tap = f"{encoder}blocks.{layer}." + (
        "feedforward.out" if kind else "cross.z" if names[0] == "cross" else "attention.z"
    )

    def silenced(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[(...,) if kind else (slice(None), int(names[-1]))] = 0
        return x

    found = []
    for changes in ({}, {tap: silenced}):
        with torch.no_grad(), ch.edit(m.model, changes):
            logits = m.model(**prepared.arguments).logits
        found.append(float(choices.scores(logits)[0, column].double().softmax(-1)[number]))
    return found[0], found[1]


def main() -> None:
    """Explain every prompt of every model, twice, and save what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    keep, agree, heads, count = KeptParts(options.save), 0, 0, 0
    for name, m, prompts in models(options.smollm2):
        rows = []
        for given in prompts if options.only in name else ():
            start = time.perf_counter()
            told = explain(m, given)
            took, start = time.perf_counter() - start, time.perf_counter()
            every = explain(m, given, everything=True)
            agrees = told.effects[0].name == every.effects[0].name
            same_head = (told.head and told.head.name) == (every.head and every.head.name)
            before, after = recomputed(m, given, told.column, told.choice, told.effects[0])
            rows.append(
                {
                    "prompt": given if isinstance(given, str) else " ".join(map(str, given)),
                    "sentence": told.sentence,
                    "part": told.effects[0].name,
                    "before": round(before, 6),
                    "after": round(after, 6),
                    "difference": max(abs(before - told.before), abs(after - told.effects[0].after)),
                    "largest_by_exhaustive": every.effects[0].name,
                    "head_largest_too": same_head,
                    "tried": len(told.effects),
                    "parts": told.parts,
                    "seconds": round(took, 2),
                    "exhaustive_seconds": round(time.perf_counter() - start, 2),
                }
            )
            agree, heads, count = agree + agrees, heads + same_head, count + 1
            print(f"{name}: {told.sentence} {agrees} {same_head}")
        if rows:
            keep("story", {"title": name, "rows": rows}, device=processor_name())
    share = {"prompts": count, "named_part_has_largest_effect": round(agree / max(count, 1), 3)}
    share["named_head_has_largest_effect_of_heads"] = round(heads / max(count, 1), 3)
    print(share)
    keep("story", {"title": "share", **share}, device=processor_name())
