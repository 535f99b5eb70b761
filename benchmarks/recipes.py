"""Recipes: what each comes to, and small models on a GPU."""

from __future__ import annotations

import cProfile
import dataclasses
import gzip
import json
import platform
import pstats
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import torch
from benchmarks.common import case_parser

import clearhead as ch
from clearhead.learn.training import prepare as preparation
from clearhead.learn.training.captured import capture_steps
from clearhead.learn.training.events import Event, Note, Stepped
from clearhead.learn.training.loop import PlainStep, TrainingRun, learn
from clearhead.learn.training.optim import make_optimizer
from clearhead.learn.training.run import planned
from clearhead.learn.training.state import State

# recipes --------------------------------------------------------------------------------------------------


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


def run_recipes() -> None:
    """Train each recipe on real data, judge it on the test part, and record score, command, seed, device,
    time.

        python benchmarks/run.py recipes char-gpt multi30k --data ../shared/data --out /tmp/runs
        python benchmarks/run.py recipes --list

    Several run side by side with --side-by-side N. Checkpoints are chosen on validation data alone, the
    test part is read once at the end. BLEU is computed where sacrebleu (and, for tokenised BLEU,
    sacremoses) is installed; the outputs are kept in any case.
    """
    parser = case_parser(run_recipes, saves=False)
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


# gpu_small ------------------------------------------------------------------------------------------------


COMPARED = 50  # steps whose losses are compared
FIRST = {"multi30k": 250, "char-gpt": 50}  # the step from which on time counts: every size has come by then
TIMED = {"plain": 60, "padded": 1, "recorded": 400, "compiled": 200, "compiled and recorded": 200}
WAYS = {"multi30k": ["plain", "padded", "recorded"], "char-gpt": [way for way in TIMED if way != "padded"]}


class Enough(Exception):
    """All steps are timed."""


@dataclass
class Watch:
    """What is seen of a run until its last step."""

    last: int
    losses: list[float] = field(default_factory=list)
    times: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.line)
        if isinstance(event, Stepped):
            self.losses.append(event.loss)
            self.times[event.step] = time.perf_counter()
            if event.step >= self.last:
                raise Enough


def opened(name: str, data: str, folder: str) -> TrainingRun:
    """The run of a recipe, ready for its first step."""
    job, places = JOBS[name], {"data": str(Path(data).absolute())}
    settings: dict[str, object] = {"train.compile": False}
    if job.validation:
        settings["data.validation"] = [there(path, places) for path in job.validation]
    paths = [there(path, places) for path in job.train]
    recipe, _, _ = planned(paths, job.recipe, folder, settings)
    return preparation.prepare(recipe, preparation.Job(Path(folder)))


def timed(run: TrainingRun, weights: dict[str, torch.Tensor], name: str, way: str, profile: bool) -> dict:
    """Train from the same weights in one way: seconds of a step, of what comes before, and first losses."""
    run.model.load_state_dict(weights)
    first = COMPARED if way in ("plain", "padded") else FIRST[name]
    last = first + TIMED[way]
    plan = replace(run.plan, validate_every=10**9, save_every=10**9, log_every=1)
    plain = {"fit": lambda batch: batch, "stepping": PlainStep, "compiled": None}
    run = replace(
        run,
        plan=plan,
        state=State(),
        optimizer=make_optimizer(run.model, plan, run.precision.device),
        **plain,
    )
    watch, start = Watch(last), time.perf_counter()
    if "compiled" in way:
        preparation._compile(run, preparation.Job(run.folder, watch))
    if "recorded" in way or way == "padded":
        capture_steps(run)
    if way == "padded":
        run.stepping = PlainStep
    profiler = cProfile.Profile()
    with suppress(Enough):
        (profiler.runcall if profile else lambda call, *given: call(*given))(learn, run, watch, lambda: False)
    torch.cuda.synchronize()
    if profile:
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(18)
    per_step = (watch.times[last] - watch.times[first]) / TIMED[way]
    return {
        "ms_per_step": round(per_step * 1e3, 2),
        "steps_per_second": round(1 / per_step, 1),
        "seconds_before": round(watch.times[first] - start - first * per_step, 1),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "notes": watch.notes,
        "losses": watch.losses[:COMPARED],
    }


def run_gpu_small() -> None:
    """Time the steps of small models on a GPU: one by one, recorded as CUDA graphs, compiled.

        PYTHONPATH=src python benchmarks/run.py gpu_small [JOB ...] [--data ../shared/data] [--out FILE.json]

    The jobs are those of benchmarks/run.py recipes, with their data: `multi30k` (3.1M parameters, batches
    of many lengths) and `char-gpt` (10.8M, batches of one shape). Each way trains from the same weights by
    the loop that `clearhead train` runs. The first steps of each way are compared: they have the same
    batches and, because dropout follows from the number of the step, the same dropout. Where batches are
    padded to the sizes that are recorded, dropout draws other numbers: there a recorded step is compared to
    one that is only padded.
    """
    parser = case_parser(run_gpu_small, saves=False)
    parser.add_argument("jobs", nargs="*", default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--data", default=str(Path(__file__).parents[2] / "shared" / "data"))
    parser.add_argument("--ways", nargs="*", default=list(TIMED), choices=list(TIMED))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", action="store_true", help="of the host, for recorded steps")
    options = parser.parse_args()
    rows: dict[str, dict] = {}
    for name in options.jobs:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            run = opened(name, options.data, folder)
            print(f"{name}: made ready in {time.perf_counter() - start:.1f} s", flush=True)
            weights = {key: one.clone() for key, one in run.model.state_dict().items()}
            found: dict[str, dict] = {}
            compared: list[float] = []
            for way in (way for way in WAYS[name] if way in options.ways):
                torch.cuda.reset_peak_memory_stats()
                try:
                    found[way] = timed(run, weights, name, way, options.profile and way == "recorded")
                except Exception as error:
                    print(f"{name}, {way}: failed: {error!r}", flush=True)
                    continue
                losses = found[way].pop("losses")
                compared = losses if way == "padded" else compared or losses
                found[way]["largest_difference"] = max(abs(a - b) for a, b in zip(compared, losses))
                print(f"{name}, {way}:", json.dumps(found[way]), flush=True)
                print("   ", [round(loss, 4) for loss in losses[:: COMPARED // 5]], flush=True)
            rows[name] = found
    if options.out:
        body = {
            "command": f"python benchmarks/run.py gpu_small {' '.join(options.jobs)} --data DATA",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "rows": rows,
        }
        options.out.write_text(json.dumps(body, indent=2) + "\n")
