"""Train each recipe on real data, judge it on the test part, and record score, command, seed, device, time.

    python benchmarks/recipes.py char-gpt multi30k --data ../shared/data --out /tmp/runs
    python benchmarks/recipes.py --list

Several run side by side with --side-by-side N. Checkpoints are chosen on validation data alone, the test part
is read once at the end. BLEU is computed where sacrebleu (and, for tokenised BLEU, sacremoses) is installed;
the outputs are kept in any case.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

import clearhead as ch

ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """Name a recipe and its data set.

    `{data}`, `{minilm}`, `{fashion}` and `{runs}` stand for folders; runs and made files lie in the last.
    """

    recipe: str
    train: tuple[str, ...]
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    generation: dict[str, object] = field(default_factory=dict)
    # Files to make beforehand: each is another file, repeated so many times.
    made: dict[str, tuple[str, int]] = field(default_factory=dict)


JOBS = {
    "char-gpt": Job("char-gpt", ("{data}/tinyshakespeare/input.txt",)),
    "char-gpt-cpu": Job("char-gpt-cpu", ("{data}/tinyshakespeare/input.txt",)),
    "multi30k": Job(
        "original-transformer",
        ("{data}/multi30k/train.en.gz", "{data}/multi30k/train.de.gz"),
        ("{data}/multi30k/val.en.gz", "{data}/multi30k/val.de.gz"),
        ("{data}/multi30k/test_2016_flickr.en.gz", "{data}/multi30k/test_2016_flickr.de.gz"),
        generation={"num_beams": 5, "max_new_tokens": 80},
    ),
    "g2p": Job(
        "g2p",
        ("{data}/cmudict/cmudict-0.7b.train-dev-20-21",),
        ("{data}/cmudict/cmudict-0.7b.train-dev-1-21",),
        ("{data}/cmudict/cmudict-0.7b.test",),
        generation={"num_beams": 4, "max_new_tokens": 40},
    ),
    "scan": Job(
        "seq2seq-dates",
        ("{data}/scan/tasks_train_simple.txt.gz",),
        (),
        ("{data}/scan/tasks_test_simple.txt.gz",),
        (
            "data.format=lines",
            "data.pattern=IN: (?P<source>.*) OUT: (?P<target>.*)",
            "data.validation_share=0.05",
            "tokens.kind=word",
            "model.d_model=128",
            "model.d_ff=512",
            "model.dropout=0.1",
            "model.max_positions=64",
            "train.steps=8000",
            "train.lr=1e-3",
            "train.validate_every=1000",
        ),
        generation={"max_new_tokens": 60},
    ),
    "sst2": Job(
        "mlm-then-classify",
        ("{data}/sst2/glue_train.tsv.gz",),
        (),
        ("{data}/sst2/glue_dev.tsv",),
        ("data.validation_share=0.05",),
    ),
    "sst2-minilm": Job(
        "classify",
        # Phrases, and the sentences they are from.
        ("{data}/sst2/glue_train.tsv.gz", "{runs}/sst2_sentences.tsv"),
        ("{data}/sst2/test.tsv",),
        ("{data}/sst2/glue_dev.tsv",),
        (
            "model.base={minilm}",
            "model.pooling=mean",  # as this model was trained
            "train.layer_decay=0.85",
            "train.label_smoothing=0.1",
            "train.ema=0.998",
        ),
        made={"sst2_sentences.tsv": ("{data}/sst2/train.tsv", 2)},
    ),
    "wnut17": Job(
        "tagger",
        ("{data}/wnut17/wnut17train.conll",),
        ("{data}/wnut17/emerging.dev.conll",),
        ("{data}/wnut17/emerging.test.annotated",),
        ("model.base={minilm}", "train.epochs=20", "train.lr=1e-4"),
    ),
    "fashion-mnist": Job(
        "vit",
        ("{fashion}/train-images-idx3-ubyte.gz", "{fashion}/train-labels-idx1-ubyte.gz"),
        (),
        ("{fashion}/t10k-images-idx3-ubyte.gz", "{fashion}/t10k-labels-idx1-ubyte.gz"),
        ("data.validation_share=0.05",),
    ),
    "digits": Job(
        "vit",
        ("digits",),
        (),
        (),
        (
            "data.augment=shift",
            "data.batch_size=64",
            "model.patch_size=2",
            "model.d_model=64",
            "model.n_layers=4",
            "model.n_heads=4",
            "model.dropout=0.0",
            "train.epochs=60",
            "train.lr=2e-3",
            "train.ema=0.99",
            "train.warmup=100",
        ),
    ),
}


def there(text: str, places: dict[str, str]) -> str:
    """A path or setting with the folders that its names in braces stand for."""
    for key, value in places.items():
        text = text.replace("{" + key + "}", value)
    return text


def train(name: str, job: Job, places: dict[str, str], out: Path, seed: int) -> dict[str, object]:
    """Train in a process of its own."""
    folder = out / name
    places = {**places, "runs": str(out)}
    for made, (path, times) in job.made.items():
        text = Path(there(path, places)).read_text(encoding="utf-8").rstrip("\n") + "\n"
        (out / made).write_text(text * times, encoding="utf-8")
    settings = [*job.settings, f"train.seed={seed}"]
    if job.validation:
        settings.append(f"data.validation={json.dumps([there(path, places) for path in job.validation])}")
    command = [
        sys.executable,
        "-m",
        "clearhead",
        "train",
        *(there(path, places) for path in job.train),
        "--recipe",
        job.recipe,
        "--out",
        str(folder),
        "--overwrite",
    ]
    for setting in settings:
        command += ["--set", there(setting, places)]
    start = time.perf_counter()
    with (out / f"{name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    seconds = time.perf_counter() - start
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = ch.load(folder, device=device)
    spoken = " ".join(
        f"'{part}'" if " " in part or "(" in part else part for part in ["clearhead", *command[3:]]
    )
    for key, value in places.items():
        spoken = spoken.replace(value, key)
    result: dict[str, object] = {
        "command": spoken,
        "seed": seed,
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)",
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "seconds": round(seconds, 1),
        "training_seconds": round(lines[-1]["seconds"], 1),
        "validation": lines[-1]["metrics"],
        "curve": [[line["step"], line["metrics"]["loss"]] for line in lines if line["event"] == "validated"],
    }
    return result


def judge(name: str, job: Job, places: dict[str, str], out: Path) -> dict[str, object]:
    """The figures of a trained job on its test part."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = [there(path, places) for path in job.test]
    judged = ch.evaluate(
        ch.load(out / name, device=device),
        files,
        ch.read_recipe(out / name / "train.toml").data,
        **job.generation,
    )
    found = {name: value for name, value in dataclasses.asdict(judged).items() if name != "outputs"}
    if judged.outputs:
        (out / f"{name}.outputs.txt").write_text("\n".join(judged.outputs) + "\n", encoding="utf-8")
        if name == "multi30k":
            found |= tokenised(judged.outputs, files[1])
    return found


def tokenised(outputs: tuple[str, ...], references: str) -> dict[str, object]:
    """BLEU over Moses tokens in lower case, as the literature on Multi30k reports it."""
    try:
        import sacrebleu
        from sacremoses import MosesTokenizer
    except ImportError:
        return {}
    tokenizer = MosesTokenizer(lang="de")
    with gzip.open(references, "rt", encoding="utf-8") as file:
        wanted = [line.rstrip("\n") for line in file]
    sides = [
        [tokenizer.tokenize(text.lower(), return_str=True, escape=False) for text in texts]
        for texts in (outputs, wanted)
    ]
    metric = sacrebleu.metrics.BLEU(tokenize="none", force=True)
    return {
        "tokenised_lowercase_bleu": metric.corpus_score(sides[0], [sides[1]]).score,
        "tokenised_signature": str(metric.get_signature()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--data", default=str(ROOT.parent.parent / "shared" / "data"))
    parser.add_argument("--minilm", default="", help="a directory with all-MiniLM-L6-v2")
    parser.add_argument("--fashion", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.list:
        print("\n".join(JOBS))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    places = {
        name: str(Path(getattr(options, name)).absolute())
        for name in ("data", "minilm", "fashion")
        if getattr(options, name)
    }

    def one(name: str) -> None:
        try:
            result = train(name, JOBS[name], places, options.out, options.seed)
            if JOBS[name].test:
                result["test"] = judge(name, JOBS[name], places, options.out)
        except Exception as error:
            print(f"{name}: failed: {error!r}; see {options.out / name}.log", flush=True)
            return
        result |= {
            "side_by_side": min(options.side_by_side, len(options.jobs)),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }
        (options.results / f"recipe_{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        shown = result.get("test") or result["validation"]
        print(f"{name}: {result['seconds']} s  {json.dumps(shown)[:400]}", flush=True)

    with ThreadPoolExecutor(options.side_by_side) as pool:
        list(pool.map(one, options.jobs))


if __name__ == "__main__":
    main()
