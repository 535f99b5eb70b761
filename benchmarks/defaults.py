"""Defaults: what the shortest command makes of ten files, next to a simple model on the same rows."""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import RESULTS, processor_name

import clearhead as ch
from clearhead.learn.training.events import Event, Note, Started, Validated

ROOT = Path(__file__).parent
# Of each task the figure that is compared, and whether more of it is better
FIGURES = {
    "lm": ("bits_per_character", False),
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
    paths = [folder / f"{name}{'-test' * number}.{ending}" for number in range(2)]
    for path, text in zip(paths, parts, strict=True):
        path.write_text(text, encoding="utf-8")
    return Sample(paths[0], paths[1], settings)


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
            folder, "flats-1500", flats(2500), 1500, "text\tlabel", "data.task=regress"
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
        out=out / f"{name}-{arm}",
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
    judged = ch.evaluate(model, sample.test, plan.data, baseline=True)
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


def main() -> None:
    """Train on ten files by the shortest command, and compare with a simple model on rows held out.

        python benchmarks/run.py defaults [FILE ...] --data ../shared/data [--arm NAME --set KEY=VALUE ...]

    The simple model is what `clearhead eval --baseline` shows: an n-gram model for text, a linear one for
    labels, tags and numbers; pairs have none. --save adds what was measured to results/defaults_cpu.json.
    """
    parser = argparse.ArgumentParser(
        description=main.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*")
    parser.add_argument("--data", type=Path, default=ROOT.parent.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--arm", default="default", help="a name for these settings")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seconds", type=float, default=1e9, help="processor time after which to stop")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    makers = made(options.data, options.out)
    for name in options.files or makers:
        row = tried(name, makers[name](), options.arm, options.set, options.out, options.seconds)
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
        (RESULTS / "defaults_cpu.json").write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
