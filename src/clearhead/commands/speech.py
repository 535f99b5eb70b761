"""The command that turns speech into text: transcribe."""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from clearhead.commands.common import (
    Device,
    Dtype,
    Folder,
    Tokenizer,
    check_apart,
    load_model,
    option,
    print_notes,
    writing,
)
from clearhead.commands.texts import Input, results
from clearhead.errors import ClearheadError, refuse

if TYPE_CHECKING:
    from clearhead.tasks.results import Transcription


def transcribe(
    folder: Folder,
    files: Annotated[Positional[tuple[Path, ...]], option("sound: WAV, FLAC, OGG, MP3", metavar="FILE")],
    language: Annotated[
        str | None, option("what is spoken, such as de or german; default: what the model hears")
    ] = None,
    task: Annotated[
        Literal["transcribe", "translate"], option("write down what is said, or its English translation")
    ] = "transcribe",
    timestamps: Annotated[bool, option("segments, each with the time when it begins and ends")] = False,
    max_new_tokens: Annotated[
        int | None, option("tokens of a window at most; default: what the model has room for")
    ] = None,
    temperature: Annotated[
        tuple[float, ...],
        option("how freely tokens are drawn, 0: the best each time; several are tried in order", metavar="T"),
    ] = (0.0,),
    compression_ratio_threshold: Annotated[
        float | None, option("a window that repeats itself more is read again; default of several T: 1.35")
    ] = None,
    logprob_threshold: Annotated[
        float | None, option("one whose tokens are less probable, too; default of several T: -1")
    ] = None,
    no_speech_threshold: Annotated[
        float | None, option("above it, such an improbable window is silence; default of several T: 0.6")
    ] = None,
    seed: Annotated[int, option("for tokens that are drawn")] = 0,
    output: Annotated[Path | None, option("write there, whole or not at all, in place of stdout")] = None,
    json: Annotated[bool, option("a JSON object for each file, on one line")] = False,
    batch_size: Annotated[int, option("windows of 30 seconds at a time")] = 8,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Write down what is said in sound files; long ones are read by windows.

    For example:
      clearhead transcribe whisper/ talk.wav
      clearhead transcribe whisper/ talk.flac --timestamps
      clearhead transcribe whisper/ rede.wav --language german --task translate
      clearhead transcribe whisper/ talk.wav --temperature 0 0.2 0.4 0.6 0.8 1
      clearhead transcribe whisper/ clips/*.wav --json --output clips.jsonl
    """
    refuse(not files, "no sound was given: name one file or several after the directory")
    refuse(max_new_tokens is not None and max_new_tokens < 1, f"max-new-tokens {max_new_tokens} is below 1")
    single = len(files) == 1
    refuse(single and not files[0].is_file(), f"{files[0]} is no file: give a sound file")
    check_apart(output, files)
    model = load_model(folder, tokenizer, device, dtype)
    asked: dict[str, Any] = {
        **{"language": language, "task": task, "timestamps": timestamps},
        **{"max_new_tokens": max_new_tokens, "batch_size": batch_size},
        **{"temperature": temperature, "seed": seed},
        "compression_ratio_threshold": compression_ratio_threshold,
        "logprob_threshold": logprob_threshold,
        "no_speech_threshold": no_speech_threshold,
    }
    model.transcribe([], **asked)  # a mistake in the options is said once, before any sound is read
    failed: list[ClearheadError] = []
    with writing(output) as write:
        inputs = (Input({"file": str(file)}) for file in files)
        for item, made in results(
            inputs, lambda batch: model.transcribe([one["file"] for one in batch], **asked), batch_size
        ):
            name = item.fields["file"]
            if isinstance(made, ClearheadError):
                if single:
                    raise made
                failed.append(made)
                write(jsonlib.dumps({"file": name, "error": str(made)}) if json else f"error: {made}")
            elif json:
                write(jsonlib.dumps({"file": name, **body(made)}, ensure_ascii=False))
            else:
                write("\n".join(f"{'' if single else f'{name}: '}{line}" for line in lines(made, timestamps)))
    if failed:
        print_notes([f"clearhead: {len(failed)} of {len(files)} files failed, the first: {failed[0]}"])
        sys.exit(1)


def body(made: Transcription) -> dict[str, Any]:
    """Return a transcript as JSON values."""
    segments = [{"start": one.start, "end": one.end, "text": one.text} for one in made.segments]
    said = {"text": made.text, "language": made.language, "seconds": made.seconds, "segments": segments}
    return {**said, "windows": [asdict(one) for one in made.windows]} if made.windows else said


def lines(made: Transcription, timestamps: bool) -> list[str]:
    """Return a transcript as text: one line, or one with its times for each segment."""
    if not timestamps:
        return [made.text]
    return [f"[{_clock(one.start)} --> {_clock(one.end)}] {one.text}" for one in made.segments]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{f'{hours:02}:' if hours else ''}{minutes:02}:{rest // 1000:02}.{rest % 1000:03}"
