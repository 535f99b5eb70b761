"""Transcripts of real clips beside transformers' on the same weights, and the word error rate of both.

python benchmarks/speech.py MODEL_DIR SPEECH_DIR [--seconds 240] [--save]

MODEL_DIR is a Whisper in Hugging Face's layout. SPEECH_DIR holds sound files, transcripts.tsv (file, text)
and a folder fsdd/ of spoken digits. Each clip but the digits is also read with timestamps. What is done is
kept in the folder that --work names, so that a run which ends after --seconds goes on where it was; 0
adds up what is there. Words are compared after transformers' own normaliser of English.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from clearhead.learn.data.sounds import read_sound
from clearhead.run.api import load
from common import save

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
def main() -> None:
    """Transcribe with both, compare, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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


if __name__ == "__main__":
    main()
