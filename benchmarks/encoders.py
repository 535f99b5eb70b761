"""Models of speech and with sparse attention, versus transformers."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.common import alternate, report, save
from torch import Tensor, nn
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

import clearhead as ch
from clearhead.learn.data.sounds import read_sound
from clearhead.run.api import load

# speech ---------------------------------------------------------------------------------------------------


DIGITS = "zero one two three four five six seven eight nine".split()  # noqa: SIM905
RATE = 16_000


def errors(wanted: list[str], said: list[str]) -> int:
    """Words to change, add or leave out so that what was said becomes what was wanted."""
    row = list(range(len(said) + 1))
    for number, word in enumerate(wanted, 1):
        before, row = row, [number]
        for place, other in enumerate(said, 1):
            row.append(min(before[place] + 1, row[-1] + 1, before[place - 1] + (word != other)))
    return row[-1]


def clips(folder: Path) -> dict[str, tuple[Path, str]]:
    """Each clip by name: its file and its text."""
    lines = (folder / "transcripts.tsv").read_text(encoding="utf-8").splitlines()[1:]
    found = {name: (folder / name, text) for name, text in (line.split("\t") for line in lines)}
    digits = sorted((folder / "fsdd").glob("*.wav"))
    return found | {f"fsdd/{path.name}": (path, DIGITS[int(path.name[0])]) for path in digits}


def rate(rows: list[dict[str, Any]], key: str, normal: EnglishTextNormalizer) -> float:
    """Wrong words of all rows, as a share of the words that were said."""
    pairs = [(normal(row["wanted"]).split(), normal(row[key]).split()) for row in rows]
    return sum(errors(*pair) for pair in pairs) / sum(len(wanted) for wanted, _ in pairs)


@torch.no_grad()
def run_speech() -> None:
    """Transcripts of real clips beside transformers' on the same weights, and the word error rate of both.

    python benchmarks/run.py speech MODEL_DIR SPEECH_DIR [--seconds 240] [--save]

    MODEL_DIR is a Whisper in Hugging Face's layout. SPEECH_DIR holds sound files, transcripts.tsv (file,
    text) and a folder fsdd/ of spoken digits. Each clip but the digits is also read with timestamps. What
    is done is kept in the folder that --work names, so that a run which ends after --seconds goes on where
    it was; 0 adds up what is there. Words are compared after transformers' own normaliser of English.
    """
    parser = argparse.ArgumentParser(
        description=run_speech.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("speech", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "speech")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    options.work.mkdir(exist_ok=True)
    kept = options.work / "clips.json"
    done: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    wanted, end = clips(options.speech), time.monotonic() + options.seconds
    if options.seconds:
        ours = load(options.folder, dtype="float32")
        theirs = transformers.WhisperForConditionalGeneration.from_pretrained(
            options.folder, dtype=torch.float32
        ).eval()
        processor = transformers.WhisperProcessor.from_pretrained(options.folder)
    for name, (path, text) in wanted.items():
        if name in done or time.monotonic() > end:
            continue
        samples = read_sound(path, RATE)
        frames = processor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        row: dict[str, Any] = {"wanted": text}
        for times in (False,) if "/" in name else (False, True):
            made = ours.transcribe(path, timestamps=times)
            told = theirs.generate(frames, return_timestamps=times, return_segments=True)["segments"][0]
            ids = [token for part in told for token in part["tokens"].tolist()]
            kind = "timed" if times else "plain"
            row[f"{kind}_tokens_equal"] = made.ids == ids
            row[kind] = made.text
            row[f"{kind}_theirs"] = processor.decode(ids, skip_special_tokens=True).strip()
        done[name] = row
        kept.write_text(json.dumps(done))
        print(name, row, flush=True)
    normal = EnglishTextNormalizer({})
    figures: dict[str, dict[str, object]] = {}
    for part, kinds in (("speech", ("plain", "timed")), ("digits", ("plain",))):
        rows = [row for name, row in done.items() if ("/" in name) == (part == "digits")]
        for kind in kinds if rows else ():
            equal = [row[kind] == row[f"{kind}_theirs"] and row[f"{kind}_tokens_equal"] for row in rows]
            figures[f"{part}, {kind}"] = {
                "clips": len(rows),
                "equal": sum(equal),
                "word_error_rate": round(rate(rows, kind, normal), 4),
                "word_error_rate_of_transformers": round(rate(rows, f"{kind}_theirs", normal), 4),
            }
            print(f"{part}, {kind}: {figures[f'{part}, {kind}']}")
    if options.save:
        spoken = [{"clip": name, **done[name]} for name in wanted if name in done]
        save("speech", [{"transformers": transformers.__version__, **figures, "transcripts": spoken}])


# sparse_encoders ------------------------------------------------------------------------------------------


LINEAR = "linear layers alone"
# Their config, their model, and the options of the base size.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bigbird": ("BigBirdConfig", "BigBirdModel", {"block_size": 64, "num_random_blocks": 3}),
    "longformer": (
        "LongformerConfig",
        "LongformerModel",
        {"vocab_size": 50265, "type_vocab_size": 1, "attention_window": 512, "max_position_embeddings": 4098},
    ),
}


def linear_layers(layers: int, length: int) -> Callable[[], None]:
    """A job of the products of the base size alone: four of attention and two of the feed-forward a layer."""
    states = torch.randn(length, 768), torch.randn(length, 3072)
    square, up, down = nn.Linear(768, 768), nn.Linear(768, 3072), nn.Linear(3072, 768)

    def job() -> None:
        for _ in range(layers):
            for _ in range(4):
                square(states[0])
            up(states[0])
            down(states[1])

    return job


@torch.inference_mode()
def compare(
    name: str, length: int, layers: int, rounds: int, warm: int, first_global: bool
) -> dict[str, object]:
    """Time both models on the same ids."""
    config_name, model_name, options = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**options, num_hidden_layers=layers)
    theirs = getattr(transformers, model_name)(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = ch.load(folder).model
    ids = torch.randint(100, theirs.config.vocab_size, (1, length))
    answers: dict[str, Tensor] = {}
    marked = torch.zeros_like(ids, dtype=torch.bool)
    marked[:, 0] = first_global
    to_ours = {"global_mask": marked} if name == "longformer" else {}
    to_theirs = {"global_attention_mask": marked.long()} if first_global else {}

    def run_ours() -> None:
        answers["clearhead"] = ours(ids, logits="none", **to_ours).hidden

    def run_theirs() -> None:
        answers["transformers"] = theirs(ids, attention_mask=torch.ones_like(ids), **to_theirs)[0]

    jobs = {"clearhead": run_ours, "transformers": run_theirs, LINEAR: linear_layers(layers, length)}
    seconds = alternate(jobs, rounds, warm, clock=time.process_time)
    gap = float((answers["clearhead"] - answers["transformers"]).abs().max())
    which = ", the first token global" if first_global else ""
    row = report(f"{name}, {layers} layers, {length} tokens{which}", seconds, length)
    shares = {one: round(seconds[LINEAR] / seconds[one], 3) for one in ("clearhead", "transformers")}
    beyond = {share: seconds[share] - seconds[LINEAR] for share in shares}
    figures = {
        "transformers": transformers.__version__,
        "processor_seconds": {one: round(took, 2) for one, took in seconds.items()},
        "share_of_linear_layers": shares,
        "at_most": round(seconds["transformers"] / seconds[LINEAR], 2),
        "beyond_linear_layers": round(beyond["transformers"] / beyond["clearhead"], 2),
        "largest_difference": gap,
    }
    print("  " + ", ".join(f"{one} {value}" for one, value in figures.items()), flush=True)
    return {**row, **figures}


def run_sparse_encoders() -> None:
    """Encoders with sparse attention, at their base size: a forward pass versus transformers' own class.

    python benchmarks/run.py sparse_encoders longformer [--lengths 4096] [--layers 12] [--rounds 2] [--save]

    Random weights, saved by transformers and read here; one row without padding, float32, both as they are
    loaded. Longformer has a window of 512 and stands twice, without global tokens and with the first one
    global; `bigbird` has blocks of 64. The two models take turns. Times are processor time, all threads
    together, so that other work on the machine falls out. Beside them stands the time of the linear layers
    alone, which both leave to the same library: no attention, however quick, could be faster than that, so
    `at_most` is the most by which anything that computes them in float32 could be quicker than
    transformers. The largest difference of a last state is given too.
    """
    parser = argparse.ArgumentParser(
        description=run_sparse_encoders.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--layers", type=int, default=12, help="of the base size; all are alike")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", type=int, default=1, help="rounds before those that count")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = [
        compare(options.name, length, options.layers, options.rounds, options.warm, first_global)
        for length in options.lengths
        for first_global in ((False, True) if options.name == "longformer" else (False,))
    ]
    if options.save:
        save(f"sparse_{options.name}", rows)
