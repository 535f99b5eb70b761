"""The story of the page versus exhaustive ablation: is the named part the one with the largest effect?

Each prompt is explained from candidates, as the page does, and again with every head and feed-forward off.
The probabilities with and without what the sentence names are computed once more by a whole forward pass with
the part's activation set to zero, which shares nothing with the batched passes of `explain`.

Real models: those of requirements-weights.txt that choose among tokens or classes, stories260K, and
SmolLM2-135M-Instruct where `--smollm2` names its file. Trained: three short runs of our own recipes.

Also: frames of Play on a decoder, an encoder-decoder and a ViT (see `explorer`); the size of the saved page
of stories260K with its examples; and, with `--smollm2`, what a reader waits for at 98 tokens, from the click
on a view until it is there and nothing is computed for it (Turn off: the first parts; all of them).

python benchmarks/run.py story [--smollm2 FILE.gguf] [--parts stories,play,file,views] [--only NAME] [--save]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import RESULTS, KeptParts, processor_name
from benchmarks.explorer import ASKED, OPENED, chromium, play_frames, play_models, serving, until

import clearhead as ch
from clearhead.app.explorer.findings import findings, inputs_for
from clearhead.app.explorer.record import record, single_file
from clearhead.app.explorer.session import Opened, first_given
from clearhead.inside.inputs import choices_of, prepare
from clearhead.inside.story import PartEffect, explain

WEIGHTS = Path("../shared/weights/stories260K")
TRAINED = {
    "seq2seq-dates": {"train.steps": 300},
    "char-gpt-cpu": {"train.steps": 150},
    "g2p": {"train.steps": 150},
}
STORIES = (
    'Once upon a time, there was a cat named Tom. Tom liked to run. "Hello,',
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day,",
    "Lily and Ben went to the park. Lily saw a big, red ball. Ben",
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


def models(smollm2: Path | None, only: str) -> Iterator[tuple[str, Any, list[Any]]]:
    """Each model with its name and its prompts; `only` those whose name it is a part of."""
    if smollm2 is not None and only in "SmolLM2-135M-Instruct":
        yield "SmolLM2-135M-Instruct", ch.load(smollm2), list(PROMPTS)
    if only in "stories260K":
        yield "stories260K", ch.load(WEIGHTS / "hf", tokenizer=WEIGHTS / "tok512.bin"), list(STORIES)
    folder = packaged("rxnfp")
    if folder is not None and only in "rxnfp, masked, classifier":
        forms = folder / "models" / "transformers"
        yield "rxnfp, masked", ch.load(forms / "bert_pretrained"), list(REACTIONS)
        texts = [text.replace("[MASK]", "O") for text in REACTIONS]
        yield "rxnfp, classifier", ch.load(forms / "bert_ft_10k_25s"), texts
    for recipe, settings in TRAINED.items():
        if only not in recipe:
            continue
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


# What a reader waits for at 98 tokens: the view, and what is in it when it is there.
WAITED = {"lens": "td[data-value]", "flow": "[data-group]", "attention": "canvas.heat", "head": "table"}
WAITED |= {"next": "#next-table td", "cost": "#cost-flops", "graph": "[data-edge]"}
LONG_TEXT = (
    "My name is Tom Miller and I live in a small town by the sea. Every morning I walk down to the harbour, "
    "where the boats come in with fish, and I talk to the men who have been out all night. They know me "
    "well, and they say that the weather will turn before the week is over. In the afternoon I write letters "
    "to my sister, who moved to the city a long time ago and misses the sound of the waves. When people ask "
    "her who her brother is, she says that his name is Tom"
)
TOKENS = 98
STILL = "() => clearhead.source.waited.size === 0 && document.querySelector('#story')"
SWITCHED = """async () => {
  const start = performance.now(), taken = {};
  clearhead.open("ablate");
  const parts = () => document.querySelector("#ablate td [style*='background-color: rgb']");
  const busy = () => document.querySelector("#ablate .job:not([hidden])");
  do await new Promise(requestAnimationFrame); while (!parts() && performance.now() - start < 300000);
  taken.first = performance.now() - start;
  do await new Promise(requestAnimationFrame); while (busy() && performance.now() - start < 300000);
  taken.all = performance.now() - start;
  return taken;
}"""


def waited(m: Any) -> dict[str, float]:
    """Milliseconds from a click until each view is there, after the story is told."""
    ids = list(prepare(m, LONG_TEXT).tokens.ids)[-TOKENS:]
    assert len(ids) == TOKENS
    shown = Opened("SmolLM2", lambda: m, {"ids": ids})
    shown.roles, shown.findings = {}, []
    with chromium() as browser, serving(shown) as (_, url):
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        start = time.perf_counter()
        page.goto(url)
        until(page, "() => Boolean(document.querySelector('.path-picture'))", 300)
        found = {"path, first": 1000 * (time.perf_counter() - start)}
        until(page, STILL, 300)
        found["the sentence"] = 1000 * (time.perf_counter() - start)
        found |= {name: page.evaluate(OPENED, [name, ready]) for name, ready in WAITED.items()}
        page.evaluate("() => clearhead.open('path')")
        chip = "#input-tokens [data-token='80']"
        found["another token, path"] = page.evaluate(ASKED, [chip, "#path-sum"])
        taken = page.evaluate(SWITCHED)
        found |= {"turn off, first parts": taken["first"], "turn off, all parts": taken["all"]}
        page.close()
    return {f"{name}_ms": round(value, 1) for name, value in found.items()}


def main() -> None:
    """Explain every prompt of every model, twice, and save what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--parts", default="stories,play,file,views")
    parser.add_argument("--only", default="")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    keep, parts = KeptParts(options.save), options.parts.split(",")
    device = f"{processor_name()}; others use the machine too, load {os.getloadavg()[0]:.1f}"
    if "file" in parts:
        m = ch.load(WEIGHTS / "hf", tokenizer=WEIGHTS / "tok512.bin")
        given, pair = first_given(m, None)
        size = len(single_file(record(m, "stories260K", given, None, pair, examples=findings(m))).encode())
        keep(
            "story",
            {"title": "the saved page of stories260K", "megabytes": round(size / 1e6, 2)},
            device=device,
        )
    if "play" in parts:
        with chromium() as browser:
            about = {"browser": f"Chromium {browser.version}, headless, software rendering", "device": device}
            for m, started, title in play_models():
                keep("story", play_frames(browser, m, started, title), **about)
    if "views" in parts and options.smollm2 is not None:
        title = f"views of SmolLM2-135M-Instruct, {TOKENS} tokens"
        keep("story", {"title": title, **waited(ch.load(options.smollm2))}, device=device)
    if "stories" in parts:
        stories(keep, options, device)


def stories(keep: KeptParts, options: argparse.Namespace, device: str) -> None:
    """Explain every prompt of every model from candidates, from all parts, and once more from outside."""
    for name, m, prompts in models(options.smollm2, options.only):
        rows = []
        for given in prompts:
            start = time.perf_counter()
            told = explain(m, given)
            took, start = time.perf_counter() - start, time.perf_counter()
            every = explain(m, given, everything=True)
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
                    "named_is_largest": told.effects[0].name == every.effects[0].name,
                    "head_is_largest_too": (told.head and told.head.name) == (every.head and every.head.name),
                    "tried": len(told.effects),
                    "parts": told.parts,
                    "seconds": round(took, 2),
                    "exhaustive_seconds": round(time.perf_counter() - start, 2),
                }
            )
            print(f"{name}: {told.sentence} {rows[-1]['named_is_largest']}")
            keep("story", {"title": name, "rows": rows}, device=device)
    path = RESULTS / "story.json"
    saved = json.loads(path.read_text())["results"] if path.exists() else []
    every_row = [row for part in saved for row in part.get("rows", ())]
    count = max(len(every_row), 1)
    share = {
        "prompts": len(every_row),
        "named_part_has_largest_effect": round(sum(row["named_is_largest"] for row in every_row) / count, 3),
        "named_head_has_largest_effect_of_heads": round(
            sum(row["head_is_largest_too"] for row in every_row) / count, 3
        ),
        "largest_difference_from_outside": max((row["difference"] for row in every_row), default=0.0),
    }
    keep("story", {"title": "share, of all models that are saved", **share}, device=device)
