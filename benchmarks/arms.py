"""Arms: settings of one recipe, chosen on validation data by several seeds, many runs side by side."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from benchmarks.common import case_parser, device_name

import clearhead as ch
from clearhead.learn.training.fit import gated_width, modern

ROOT = Path(__file__).parent
SEEDS = (0, 1, 2)
GATED = {
    "model.positions": "rope",
    "model.norm": "rmsnorm",
    "model.activation": "silu",
    "model.gated": "true",
}


@dataclass(frozen=True)
class Contest:
    """A recipe, its data, and the settings that are compared; the first arm is the recipe itself."""

    recipe: str  # "": what the data decides
    train: tuple[str, ...]
    arms: Mapping[str, Mapping[str, str]]
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    figure: str = "loss"  # of validation, by which an arm is chosen; of all but the loss, more is better
    go_on: int = 1  # arms besides the recipe that are trained with every seed
    seeds: tuple[int, ...] = SEEDS
    generation: Mapping[str, object] = field(default_factory=dict)


SHORT = {"train.steps": "2000", "train.validate_every": "200", "train.floor": "0.02"}
ROTARY = {"model.positions": "rope", "model.dropout": "0.3", "train.lr": "1.5e-3", **SHORT}
CHANGES: Mapping[str, Mapping[str, str]] = {
    "dropout 0.3": {},
    "QK-norm, weight decay 0.3": {
        "model.qk_norm": "head",
        "train.lr": "2e-3",
        "train.weight_decay": "0.3",
        "train.steps": "1800",
    },
    "dropout 0.35": {"model.dropout": "0.35"},
    "shorter": {"train.steps": "1600", "model.dropout": "0.27"},
    "QK-norm": {"model.qk_norm": "head", "train.lr": "2e-3"},
    "value residual": {"model.value_residual": "true"},
    "mirrored skips": {"model.mirror_skips": "true"},
    "gated": {"model.activation": "silu", "model.gated": "true", "model.d_ff": "1024"},
    "zero-initialised outputs": {"model.zero_init": "true"},
    "weight decay 0.3": {"train.weight_decay": "0.3"},
    "averaged": {"train.ema": "0.995", "train.floor": "0.1"},
    "NorMuon": {
        "model.dropout": "0.4",
        "train.optimizer": "normuon",
        "train.muon_coefficients": "polar-express",
        "train.steps": "1200",
        "train.validate_every": "100",
    },
}


def decoder(width: int, layers: int, steps: int, dropout: float, rate: float) -> dict[str, str]:
    """Return settings of the decoder for much text at another size, on rows of 256 tokens."""
    size = {"model.d_model": width, "model.n_layers": layers, "model.n_heads": width // 64}
    size |= {"model.d_ff": gated_width(width), "model.dropout": dropout, "train.lr": rate}
    length = {"train.steps": steps, "train.validate_every": steps // 10, "data.batch_size": 64}
    settings = {**modern(True, frozenset()), **size, **length}
    return {name: str(value).lower() for name, value in settings.items()}


CONTESTS = {
    "books": Contest(  # what clearhead train does with 13 MB of text on a GPU
        "",
        ("books.txt.gz",),
        {
            "default": {},
            "384 wide, 1,000 steps": decoder(384, 6, 1000, 0.1, 1e-3),
            "512 wide, 1,500 steps": decoder(512, 8, 1500, 0.1, 1e-3),
            "512 wide, dropout 0.2": decoder(512, 8, 1500, 0.2, 1e-3),
        },
        go_on=0,
    ),
    "books, 3 MB": Contest(
        "",
        ("books-3MB.txt",),
        {
            "default": {},
            "256 wide": decoder(256, 4, 600, 0.2, 1e-3),
            "384 wide": decoder(384, 6, 600, 0.3, 1e-3),
        },
        go_on=0,
    ),
    "a play, 1 MB": Contest(
        "",
        ("tinyshakespeare/input.txt",),
        {
            "default": {},
            "256 wide": decoder(256, 4, 300, 0.3, 1e-3),
            "384 wide": decoder(384, 6, 300, 0.4, 1e-3),
        },
        go_on=0,
    ),
    "char-gpt": Contest(
        "char-gpt",
        ("tinyshakespeare/input.txt",),
        {
            "recipe": {},
            **{f"rotary, {name}": {**ROTARY, **change} for name, change in CHANGES.items()},
        },
        go_on=2,
    ),
    "g2p": Contest(
        "g2p",
        ("cmudict/cmudict-0.7b.train-dev-20-21",),
        {
            "gated, rotary, R-Drop": {
                **GATED,
                "model.d_ff": "688",
                "train.r_drop": "3.0",
                "train.validate_every": "4500",
            }
        },
        ("cmudict/cmudict-0.7b.train-dev-1-21",),
        ("cmudict/cmudict-0.7b.test",),
        figure="exact",
        generation={"num_beams": 4, "max_new_tokens": 40},
    ),
    "sst2": Contest(
        "mlm-then-classify",
        ("sst2/glue_train.tsv.gz",),
        {
            "recipe": {},
            "R-Drop": {"train.r_drop": "1.0"},
            "hidden words": {"data.token_dropout": "0.15"},
            "R-Drop, hidden words": {"train.r_drop": "1.0", "data.token_dropout": "0.15"},
        },
        test=("sst2/glue_dev.tsv",),
        figure="accuracy",
        seeds=(0, 1, 2, 3),
    ),
    "multi30k": Contest(
        "translate",
        ("multi30k/train.en.gz", "multi30k/train.de.gz"),
        {"translate": {}, "BPE dropout": {"data.bpe_dropout": "0.1"}},
        ("multi30k/val.en.gz", "multi30k/val.de.gz"),
        ("multi30k/test_2016_flickr.en.gz", "multi30k/test_2016_flickr.de.gz"),
        figure="bleu",
        generation={"num_beams": 5, "max_new_tokens": 80},
    ),
}
TINY = {
    **{"train.steps": "4", "train.validate_every": "2", "train.save_every": "2", "model.n_layers": "1"},
    **{"model.d_model": "32", "model.n_heads": "2", "model.d_ff": "64", "data.max_examples": "300"},
    **{"train.device": "cpu", "train.warmup": "1"},
}


@dataclass
class Race:
    """The runs of all contests, and what is known of them."""

    options: argparse.Namespace
    end: float  # of the clock; what still runs then is killed
    environment: dict[str, str]
    runs: list[dict[str, object]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def path(self, name: str) -> str:
        """Return the path of a data file."""
        return str((Path(self.options.data) / name).absolute())

    def train(self, name: str, arm: str, seed: int, alone: bool = False) -> dict[str, object]:
        """Train one arm with one seed in a process of its own."""
        contest, tag = CONTESTS[name], f"{name}-{arm}-{seed}{'-alone' if alone else ''}"
        folder = self.options.runs / tag.replace(" ", "_").replace(",", "")
        settings = {"train.samples": "0", **contest.arms[arm], "train.seed": str(seed)}
        if self.options.tiny:
            settings |= TINY
            settings |= {"train.pretrain": "4"} if contest.recipe == "mlm-then-classify" else {}
        if contest.validation:
            settings["data.validation"] = json.dumps([self.path(file) for file in contest.validation])
        command = [sys.executable, "-m", "clearhead", "train", *map(self.path, contest.train)]
        command += ["--recipe", contest.recipe] if contest.recipe else []
        command += ["--out", str(folder), "--overwrite"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        found: dict[str, object] = {"contest": name, "arm": arm, "seed": seed, "alone": alone}
        start = time.perf_counter()
        with open(f"{folder}.log", "w") as log:
            try:
                subprocess.run(
                    command,
                    check=True,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**(os.environ if alone else self.environment), "OMP_NUM_THREADS": "1"},
                    timeout=max(1.0, self.end - time.monotonic()) if not alone else 120,
                )
            except (subprocess.SubprocessError, OSError) as error:
                last = Path(f"{folder}.log").read_text(errors="replace").splitlines()[-3:]
                found["failed"] = f"{type(error).__name__}: {' | '.join(last)[-400:]}"
        log_file = folder / "log.jsonl"
        lines = [json.loads(line) for line in log_file.read_text().splitlines()] if log_file.exists() else []
        validated = [line for line in lines if line["event"] == "validated"]
        found["wall_seconds"] = round(time.perf_counter() - start, 1)
        found["training_seconds"] = round(lines[-1].get("seconds", 0.0), 1) if lines else 0.0
        found["curve"] = [
            [line["step"], *(line["metrics"].get(key) for key in dict.fromkeys(("loss", contest.figure)))]
            for line in validated
        ]
        if "failed" not in found:
            found |= {"folder": str(folder), "metrics": lines[-1]["metrics"]}
            if contest.figure == "bleu":
                judged = self.judge(name, folder, contest.validation)
                found["validation"] = judged
                found["figure"] = judged["metrics"]["bleu"]  # type: ignore[index]
            else:
                found["figure"] = lines[-1]["metrics"][contest.figure]
        self.keep(found)
        return found

    def judge(self, name: str, folder: Path, files: tuple[str, ...]) -> dict[str, object]:
        """Judge a trained model on files; one at a time, in this process."""
        device = "cpu" if self.options.tiny or not torch.cuda.is_available() else "cuda"
        plan = ch.read_recipe(folder / "train.toml").data
        with self.lock:
            judged = ch.evaluate(
                ch.load(folder, device=device),
                [self.path(file) for file in files],
                plan,
                **CONTESTS[name].generation,  # type: ignore[arg-type]
            )
        found = asdict(judged)
        return {key: found[key] for key in ("examples", "metrics", "intervals", "signatures")}

    def keep(self, found: dict[str, object] | None = None) -> None:
        """Print a run, and write down all that is known."""
        if found is not None:
            self.runs.append(found)
            shown = found.get("failed") or found.get("figure")
            print(f"{found['contest']}, {found['arm']}, seed {found['seed']}: {shown}", end=" ")
            print(f"({found['wall_seconds']} s, training {found['training_seconds']} s)", flush=True)
        body = {
            "command": "python benchmarks/run.py arms " + " ".join(sys.argv[1:]),
            "device": "CPU, a trial" if self.options.tiny else device_name(),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "shared_by_mps": self.environment is not os.environ,
            "arms": {name: CONTESTS[name].arms for name in self.options.contests},
            "runs": self.runs,
        }
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "arms.json").write_text(json.dumps(body, indent=1, default=str) + "\n")

    def ranked(self, name: str, seeds: int = 1) -> list[str]:
        """Return the arms that have so many seeds, the best by the mean first."""
        contest = CONTESTS[name]
        figures: dict[str, list[float]] = {}
        for run in self.runs:
            if run["contest"] == name and "figure" in run and not run["alone"]:
                figures.setdefault(str(run["arm"]), []).append(float(run["figure"]))  # type: ignore[arg-type]
        sign = 1 if contest.figure == "loss" else -1
        enough = [arm for arm, values in figures.items() if len(values) >= seeds]
        return sorted(enough, key=lambda arm: sign * statistics.mean(figures[arm]))

    def next_stage(self, name: str) -> list[tuple[str, str, int]]:
        """Return the runs of further seeds: of the best arms, then of the recipe."""
        best = [arm for arm in self.ranked(name) if arm != "recipe"][: CONTESTS[name].go_on]
        others = ["recipe"] if "recipe" in CONTESTS[name].arms else []
        return [(name, arm, seed) for arm in [*best, *others] for seed in CONTESTS[name].seeds[1:]]

    def run(self) -> None:
        """Train all: first every arm with one seed, of each contest; then the best ones with the others."""
        names = list(self.options.contests)
        for spec in self.options.alone:
            arm, _, seed = spec.rpartition(":")
            self.train(names[0], arm, int(seed), alone=True)
        if self.options.alone:
            return
        alone = {
            name for name in names if len(CONTESTS[name].arms) == 1
        }  # nothing to choose: all seeds at once
        waiting = [
            (name, arm, seed)
            for name in names
            for arm in CONTESTS[name].arms
            for seed in CONTESTS[name].seeds[: None if name in alone else 1]
        ]
        left = {name: len(CONTESTS[name].arms) for name in names}
        active: dict[Future[dict[str, object]], str] = {}
        with ThreadPoolExecutor(self.options.side_by_side) as pool:
            while waiting or active:
                while waiting and len(active) < self.options.side_by_side and time.monotonic() < self.end:
                    job = waiting.pop(0)
                    active[pool.submit(self.train, *job)] = job[0]
                if not active:
                    break
                for done in wait(active, return_when=FIRST_COMPLETED).done:
                    name = active.pop(done)
                    done.result()
                    left[name] -= 1
                    if left[name] == 0 and name not in alone:
                        waiting = self.next_stage(name) + waiting
        for name in names:
            self.finish(name)

    def finish(self, name: str) -> None:
        """Read the test part once, with the arm chosen on validation data; time it alone."""
        whole = self.ranked(name, len(CONTESTS[name].seeds))
        chosen = next((arm for arm in whole if arm != "recipe"), None)
        if chosen is None:
            print(f"{name}: no arm has every seed")
            return
        print(f"{name}: chosen {chosen}; all: {whole}", flush=True)
        for run in self.runs:
            if run["contest"] == name and run["arm"] == chosen and "folder" in run and CONTESTS[name].test:
                run["test"] = self.judge(name, Path(str(run["folder"])), CONTESTS[name].test)
                print(f"{name}, {chosen}, seed {run['seed']}, test: {run['test']}", flush=True)
                self.keep()
        if name == "char-gpt":
            self.train(name, chosen, CONTESTS[name].seeds[0], alone=True)


def shared_gpu(folder: Path) -> Mapping[str, str]:
    """Start NVIDIA's service that lets processes share a GPU at once; return the environment of its clients.

    Where it is missing or a client fails, processes take turns.
    """
    own = {
        **os.environ,
        "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/mps",
        "CUDA_MPS_LOG_DIRECTORY": f"{folder}/mps",
    }
    Path(f"{folder}/mps").mkdir(parents=True, exist_ok=True)
    probe = "import torch; x = torch.ones(64, 64, device='cuda'); assert float((x @ x).sum()) == 64**3"
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=own, check=True, timeout=20)
        subprocess.run([sys.executable, "-c", probe], env=own, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"processes take turns on the GPU: {error}", flush=True)
        stop_sharing(own)
        return os.environ
    return own


def stop_sharing(environment: Mapping[str, str]) -> None:
    """End that service."""
    try:
        subprocess.run(
            ["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"the service did not end: {error}", flush=True)


def main() -> None:
    """Compare arms of recipes on validation data, several seeds, and read the test part once for the best.

        PYTHONPATH=src python benchmarks/run.py arms char-gpt g2p --data ../shared/data --out DIR

    Every arm is trained with one seed; the best go on with two more, as does the recipe. What has not
    finished after --seconds is killed and reported as failed. The record is DIR/arms.json.
    """
    parser = case_parser(main, saves=False)
    parser.add_argument("contests", nargs="*", default=list(CONTESTS), help=f"of {', '.join(CONTESTS)}")
    parser.add_argument("--data", default=str(ROOT.parent.parent / "shared" / "data"))
    parser.add_argument("--out", type=Path, default=Path("runs/arms"))
    parser.add_argument("--runs", type=Path, default=Path("/tmp/arms"))
    parser.add_argument("--side-by-side", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--alone", nargs="*", default=[], metavar="ARM:SEED", help="one after the other")
    parser.add_argument("--tiny", action="store_true", help="a trial on a CPU")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    sharing = not (options.tiny or options.alone) and torch.cuda.is_available()
    environment = shared_gpu(options.runs) if sharing else os.environ
    if sharing and environment is os.environ:
        options.side_by_side = min(options.side_by_side, 4)
    try:
        Race(options, end, environment).run()  # type: ignore[arg-type]
    finally:
        if environment is not os.environ:
            stop_sharing(environment)


if __name__ == "__main__":
    main()
