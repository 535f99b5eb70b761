"""Defaults: what the shortest command makes of ten files, next to a simple model on the same rows."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import RESULTS, case_command, case_parser, processor_name

import clearhead as ch
from clearhead.learn.training.events import Event, Note, Started, Validated

ROOT = Path(__file__).parent
RECORD = RESULTS / "defaults_cpu.json"
SETTINGS = {"flats-1500": ("data.task=regress",)}  # what a command needs to be told
Arms = dict[str, dict[str, Any]]
# Of each task the figure that is compared, and whether more of it is better
FIGURES = {
    "lm": ("loss", False),
    "classify": ("accuracy", True),
    "regress": ("spearman", True),
    "tag": ("accuracy", True),
    "seq2seq": ("exact", True),
}


@dataclass(frozen=True)
class Sample:
    """A file to train on and one to judge by, which share no row."""

    train: Path
    test: Path
    settings: tuple[str, ...] = ()  # what the command needs to be told, such as the task


def opened(path: Path) -> str:
    """Return the text of a file, gzipped or not."""
    with (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".gz"
        else path.open(encoding="utf-8") as file
    ):
        return file.read()


def written(folder: Path, name: str, ending: str, parts: Iterable[str], *settings: str) -> Sample:
    """Write the two parts of a sample."""
    paths = places(folder, name, ending)
    for path, text in zip(paths, parts, strict=True):
        path.write_text(text, encoding="utf-8")
    return Sample(paths[0], paths[1], settings)


def places(folder: Path, name: str, ending: str) -> list[Path]:
    """Return where the two parts of a sample lie."""
    return [folder / f"{name}{'-test' * number}.{ending}" for number in range(2)]


def text(folder: Path, name: str, whole: str, size: int) -> Sample:
    """Take the first `size` characters to train on, and the next to judge by."""
    return written(
        folder, name, "txt", (whole[:size], whole[size : size + min(max(size // 2, 2000), 100_000)])
    )


def rows(folder: Path, name: str, lines: list[str], count: int, header: str, *settings: str) -> Sample:
    """Take `count` rows to train on, and at most 2,000 others to judge by."""
    random.Random(0).shuffle(lines)
    parts = (lines[:count], lines[count : count + 2000])
    return written(folder, name, "tsv", ("\n".join([header, *part]) + "\n" for part in parts), *settings)


def flats(count: int) -> list[str]:
    """Return made rows of a text and a number: a price that depends on products of what is written."""
    draw, found = random.Random(1), []
    for _ in range(count):
        rooms, area, floor = draw.randint(1, 6), draw.randint(20, 160), draw.randint(0, 9)
        place = draw.choice(["centre", "suburb", "village"])
        factor = {"centre": 3.0, "suburb": 2.0, "village": 1.2}[place]
        price = factor * area * (1 + 0.05 * rooms) + (10 if floor > 3 else 0) + draw.gauss(0, 10)
        found.append(f"{rooms} rooms, {area} m2, floor {floor}, {place}\t{price:.1f}")
    return found


def tagged(path: Path) -> list[str]:
    """Return sentences as lines of word and part of speech."""
    sentences = []
    for block in opened(path).split("\n\n"):
        cells = [line.split("\t") for line in block.splitlines() if line[:1].isdigit()]
        words = [f"{cell[1]}\t{cell[3]}" for cell in cells if cell[0].isdigit()]
        sentences += ["\n".join(words)] if words else []
    return sentences


def tags(folder: Path, name: str, path: Path, count: int) -> Sample:
    """Take `count` sentences to train on, and 500 others to judge by."""
    found = tagged(path)
    parts = (found[:count], found[count : count + 500])
    return written(folder, name, "conll", ("\n\n".join(part) + "\n" for part in parts))


def labelled(path: Path) -> list[str]:
    """Return the rows of a table of text and class, without its header."""
    return [line for line in opened(path).splitlines() if line.count("\t") == 1 and line[-1] in "01"]


def commands(path: Path) -> list[str]:
    """Return SCAN's pairs as rows."""
    return [line.removeprefix("IN: ").replace(" OUT: ", "\t") for line in opened(path).splitlines()]


def python_sources() -> str:
    """Return some of Python's own modules, one after the other."""
    library = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "textwrap", "shutil", "tarfile", "zipfile", "inspect", "pathlib", "typing")
    return "\n".join(path.read_text() for name in names if (path := library / f"{name}.py").exists())


def made(data: Path, folder: Path) -> dict[str, Callable[[], Sample]]:
    """Return the makers of the files by name."""
    book = data / "book" / "war_and_peace.txt.gz"
    train = data / "ud_english_ewt" / "en_ewt-ud-train.conllu.gz"
    reviews = data / "sst2" / "train.tsv"
    return {
        "text-1kB": lambda: text(folder, "text-1kB", opened(book)[10_000:], 1_000),
        "text-20kB": lambda: text(
            folder, "text-20kB", opened(data / "tinystories_sample" / "tinystories.txt"), 20_000
        ),
        "code-200kB": lambda: text(folder, "code-200kB", python_sources(), 200_000),
        "books-3MB": lambda: text(
            folder, "books-3MB", opened(data / "lm_text" / "train.txt.gz")[1_000_000:], 3_000_000
        ),
        "reviews-100": lambda: rows(folder, "reviews-100", labelled(reviews), 100, "text\tlabel"),
        "reviews-2000": lambda: rows(folder, "reviews-2000", labelled(reviews), 2000, "text\tlabel"),
        "phrases-20000": lambda: rows(
            folder, "phrases-20000", labelled(data / "sst2" / "glue_train.tsv.gz"), 20_000, "text\tlabel"
        ),
        "flats-1500": lambda: rows(
            folder, "flats-1500", flats(2500), 1500, "text\tlabel", *SETTINGS["flats-1500"]
        ),
        "tags-800": lambda: tags(folder, "tags-800", train, 800),
        "pairs-3000": lambda: rows(
            folder,
            "pairs-3000",
            commands(data / "scan" / "tasks_train_simple.txt.gz"),
            3000,
            "source\ttarget",
        ),
    }


def development(data: Path, folder: Path) -> None:
    """Write files to choose settings by: no row that they are judged by is in a test part of the ten."""

    def table(name: str, known: list[str], asked: list[str]) -> None:
        parts = ("\n".join(["text\tlabel", *part]) + "\n" for part in (known, asked))
        written(folder, name, "tsv", parts)

    reviews = labelled(data / "sst2" / "train.tsv")
    random.Random(0).shuffle(reviews)  # as `rows` does, whose files take the first 4,000
    table("dev-reviews-2000", reviews[:2000], reviews[4000:])
    for draw in range(4):
        table(f"dev-reviews-100-{draw}", reviews[100 * draw : 100 * (draw + 1)], reviews[4000:6000])
    phrases = labelled(data / "sst2" / "glue_train.tsv.gz")
    random.Random(0).shuffle(phrases)
    table("dev-phrases-20000", phrases[:20_000], phrases[22_000:26_000])
    sentences = tagged(data / "ud_english_ewt" / "en_ewt-ud-train.conllu.gz")
    blocks = (sentences[:800], sentences[1300:2300])
    written(folder, "dev-tags-800", "conll", ("\n\n".join(part) + "\n" for part in blocks))
    book = opened(data / "book" / "war_and_peace.txt.gz")[10_000:]
    for start in range(3):
        part = book[100_000 * start :]
        written(folder, f"dev-text-1kB-{start}", "txt", (part[:1000], part[5000:15_000]))
    stories = opened(data / "tinystories_sample" / "tinystories.txt")
    written(folder, "dev-text-20kB", "txt", (stories[:20_000], stories[40_000:80_000]))


def small(width: int, layers: int, dropout: float, length: int = 0) -> dict[str, Any]:
    """Return the settings of a model of this size; with a length, those of a decoder."""
    found: dict[str, Any] = {"model.d_model": width, "model.n_layers": layers, "model.n_heads": 4}
    found |= {"model.dropout": dropout, "model.init": "xavier"}
    if length:
        found |= {"model.base": "llama-1b-like", "model.n_kv_heads": 4, "model.max_positions": length}
        found |= {"model.d_ff": width * 8 // 3 // 16 * 16, "model.tie_embeddings": True}
    return found


def trained(steps: int, rate: float, batch: int, **more: Any) -> dict[str, Any]:
    """Return the settings of a training run."""
    found = {"train.steps": steps, "train.lr": rate, "data.batch_size": batch}
    found["train.validate_every"] = max(steps // 15, 5)
    return found | {key.replace("__", "."): value for key, value in more.items()}


def text_arms(sizes: list[tuple[int, int, float]], length: int, *plans: tuple[int, float, int]) -> Arms:
    """Return arms of decoders of several sizes, and the plain one (`gpt2`) at the first."""
    arms: Arms = {}
    for plan in plans:
        for width, layers, dropout in sizes:
            name = f"{layers} x {width}, dropout {dropout}, {plan[0]} steps of {plan[2]} at {plan[1]:g}"
            arms[name] = {**small(width, layers, dropout, length), **trained(*plan)}
    width, layers, dropout = sizes[0]
    usual = {**small(width, layers, dropout), "model.max_positions": length, "model.init": "gpt2"}
    return {"gpt2": {**usual, **trained(*plans[0])}, **arms}


def label_arms(steps: int, batch: int, *more: dict[str, Any]) -> Arms:
    """Return arms of encoders that take the mean of a text's vectors."""
    arms: Arms = {}
    for width, layers, dropout in ((128, 1, 0.5), (128, 2, 0.3), (64, 1, 0.3)):
        for number, extra in enumerate(({}, {"tokens.vocab_size": 8192}, {"tokens.kind": "word"}, *more)):
            name = f"{layers} x {width}, dropout {dropout}, {number}"
            arms[name] = {
                **small(width, layers, dropout),
                "model.pooling": "mean",
                **trained(steps, 2e-3 if width == 64 else 1e-3, batch),
                **extra,
            }
    return arms


AVERAGED = {"train.ema": 0.98, "train.label_smoothing": 0.1}
ARMS: dict[str, Arms] = {
    "text-1kB": text_arms(
        [(64, 1, 0.2), (32, 1, 0.2), (128, 1, 0.4), (64, 2, 0.3)], 32, (200, 3e-3, 8), (200, 1e-3, 8)
    ),
    "text-20kB": text_arms([(64, 2, 0.1), (128, 2, 0.3), (128, 4, 0.3)], 64, (600, 3e-3, 16)),
    "code-200kB": text_arms([(128, 3, 0.1), (128, 4, 0.2), (96, 3, 0.0)], 128, (800, 3e-3, 16)),
    "books-3MB": {
        **text_arms([(128, 4, 0.0)], 128, (900, 3e-3, 16)),
        "bpe": {
            **small(128, 4, 0.0, 128),
            **trained(900, 3e-3, 16),
            "tokens.kind": "bpe",
            "tokens.vocab_size": 2048,
        },
    },
    "reviews-100": label_arms(100, 16, {"tokens.vocab_size": 8192, **AVERAGED}),
    "reviews-2000": label_arms(600, 32, {"tokens.vocab_size": 8192, **AVERAGED}),
    "phrases-20000": label_arms(2000, 64, {"tokens.vocab_size": 8192, **AVERAGED}),
    "flats-1500": {
        **label_arms(800, 32),
        **{
            f"{kind}, {layers} x {width}": {
                **small(width, layers, 0.0),
                **trained(1000, 2e-3, 32),
                "tokens.kind": kind,
                "model.pooling": "mean",
            }
            for kind in ("char", "word")
            for width, layers in ((64, 2), (128, 2))
        },
    },
    "tags-800": {
        f"{layers} x {width}, dropout {dropout}, {name}": {
            **small(width, layers, dropout),
            **trained(600, rate, 32),
            **extra,
        }
        for width, layers, dropout, rate in ((128, 2, 0.3, 1e-3), (128, 1, 0.3, 2e-3), (192, 2, 0.4, 1e-3))
        for name, extra in (("", {}), ("8192", {"tokens.vocab_size": 8192}))
    },
    "pairs-3000": {
        f"{layers} x {width}, dropout {dropout}, {kind}": {
            **small(width, layers, dropout),
            **trained(1200, 2e-3, 32),
            "tokens.kind": kind,
        }
        for width, layers, dropout in ((64, 2, 0.1), (128, 2, 0.1))
        for kind in ("word", "char")
    },
}


def tried(
    name: str, sample: Sample, arm: str, settings: list[str], out: Path, seconds: float
) -> dict[str, Any]:
    """Train on a file as the shortest command would, stop after `seconds`, and judge on the other file."""
    notes: list[str] = []
    figures: dict[str, Any] = {"steps": 0, "curve": []}

    def watch(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.line)
        elif isinstance(event, Started):
            figures["parameters"] = getattr(event, "parameters", None)
        elif isinstance(event, Validated):
            figures["curve"].append([event.step, round(event.metrics["loss"], 4)])

    start, clock = time.process_time(), time.perf_counter()
    done = ch.train(
        sample.train,
        out=out / re.sub(r"[^\w.-]+", "_", f"{name}-{arm}"),
        settings=["train.samples=0", *sample.settings, *settings],
        overwrite=True,
        on_event=watch,
        stop=lambda: time.process_time() - start > seconds,
    )
    spent = time.process_time() - start
    plan = ch.read_recipe(done.folder / "train.toml")
    kept = done.folder / "best" if done.reason == "stopped" else done.folder
    model = ch.load(kept)
    task = str(plan.data.task)
    try:
        judged = ch.evaluate(model, sample.test, plan.data, baseline=True)
    except ImportError:  # no scikit-learn: see --baselines
        judged = ch.evaluate(model, sample.test, plan.data)
    figure, _ = FIGURES[task]
    simple = judged.baseline
    return {
        "file": name,
        "arm": arm,
        "settings": settings,
        "task": task,
        "figure": figure,
        "model": judged.metrics.get(figure),
        "baseline": simple and simple.metrics.get(figure),
        "metrics": judged.metrics,
        "baseline_metrics": simple and simple.metrics,
        "baseline_name": simple and simple.name,
        "steps": done.step,
        "planned_steps": plan.train.steps,
        "best_step": done.metrics.get("step"),
        "parameters": sum(parameter.numel() for parameter in model.model.parameters()),
        "processor_seconds": round(spent, 1),
        "seconds": round(time.perf_counter() - clock, 1),
        "notes": [line for line in notes if line.startswith(("tokens:", "by the data"))],
        "curve": figures["curve"],
    }


def sweep(options: argparse.Namespace) -> None:
    """Run every arm in a process of its own, several at once, until the time is over."""
    end = time.monotonic() + 60 * options.minutes
    if options.development:  # the arms that the record has of these files
        rows = json.loads(RECORD.read_text())["development"]["rows"]
        named = [(row["file"], row["arm"], row["settings"].split(" ")) for row in rows]
        jobs = [(name, arm, dict(each.split("=", 1) for each in said)) for name, arm, said in named]
    else:
        jobs = [(name, "before", {}) for name in options.files or ARMS]
        jobs += [(name, arm, arms) for name in options.files or ARMS for arm, arms in ARMS[name].items()]
    random.Random(0).shuffle(jobs)  # of every file some are done when the time is over

    def one(job: tuple[str, str, dict[str, Any]]) -> None:
        name, arm, settings = job
        left = end - time.monotonic()
        command = [*case_command("defaults", name, "--arm", arm), "--samples", str(options.samples)]
        command += ["--out", str(options.out), "--seconds", str(options.seconds)]
        for key, value in {**settings, "train.device": "cpu"}.items():
            command += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
        if left > 20:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(command, env=environment, timeout=left, check=False)

    with ThreadPoolExecutor(options.sweep) as pool:
        list(pool.map(one, jobs))


def main() -> None:
    """Train on ten files by the shortest command, and compare with a simple model on rows held out.

        python benchmarks/run.py defaults [FILE ...] --data ../shared/data [--arm NAME --set KEY=VALUE ...]

    The simple model is what `clearhead eval --baseline` shows: an n-gram model for text, a linear one for
    labels, tags and numbers; pairs have none. --save adds what was measured to results/defaults_cpu.json.
    """
    parser = case_parser(main)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--data", type=Path, default=ROOT.parent.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--arm", default="default", help="a name for these settings")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seconds", type=float, default=1e9, help="processor time after which to stop")
    parser.add_argument(
        "--samples", type=Path, default=Path("runs/defaults/files"), help="made where missing"
    )
    parser.add_argument("--sweep", type=int, default=0, help="try all arms of ARMS, so many at once")
    parser.add_argument("--minutes", type=float, default=60, help="of the sweep")
    parser.add_argument(
        "--development",
        action="store_true",
        help="make the files that settings are chosen by; with --sweep, try the arms of the record on them",
    )
    options = parser.parse_args()
    for folder in (options.out, options.samples):
        folder.mkdir(parents=True, exist_ok=True)
    makers = made(options.data, options.samples)
    if options.development:
        development(options.data, options.samples)
    if options.sweep:
        sweep(options)
    if options.sweep or options.development:
        return
    for name in options.files or makers:
        there = [places(options.samples, name, ending) for ending in ("txt", "tsv", "conll")]
        known = [Sample(*pair, SETTINGS.get(name, ())) for pair in there if pair[1].exists()]
        sample = known[0] if known else makers[name]()
        row = tried(name, sample, options.arm, options.set, options.out, options.seconds)
        print(json.dumps({key: value for key, value in row.items() if "metrics" not in key}), flush=True)
        with (options.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    if options.save:
        lines = (options.out / "rows.jsonl").read_text().splitlines()
        body = {
            "command": "python benchmarks/run.py defaults --save",
            "device": processor_name(),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "rows": [json.loads(line) for line in lines],
        }
        body |= {"development": json.loads(RECORD.read_text())["development"]}
        RECORD.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
