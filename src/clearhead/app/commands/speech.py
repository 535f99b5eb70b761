"""The command that turns speech into text: transcribe."""

from __future__ import annotations

import json as jsonlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from clearhead.app.commands.common import (
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
from clearhead.app.commands.texts import Input, results
from clearhead.errors import ClearheadError, InputError, refuse

if TYPE_CHECKING:
    from clearhead.learn.tasks.results import Segment, Transcription

SUFFIXES = ("txt", "srt", "vtt")  # formats of which each sound has a file


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
    format: Annotated[
        Literal["txt", "srt", "vtt", "json"] | None,
        option("segments as OpenAI's program writes them: lines or subtitles; json: --json with times"),
    ] = None,
    max_new_tokens: Annotated[
        int | None, option("tokens of a window at most; default: what the model has room for")
    ] = None,
    temperature: Annotated[
        tuple[float, ...],
        option("how freely tokens are drawn, 0: the best each time; several are tried in order", metavar="T"),
    ] = (0.0,),
    compression_ratio_threshold: Annotated[
        float | None,
        option("with several T, one that repeats itself more is read again (default: 1.35)"),
    ] = None,
    logprob_threshold: Annotated[
        float | None, option("a window whose tokens are less probable is read again, too (default: -1)")
    ] = None,
    no_speech_threshold: Annotated[
        float | None,
        option("such an improbable window is skipped where silence is likelier (default: 0.6)"),
    ] = None,
    seed: Annotated[int, option("for tokens that are drawn")] = 0,
    output: Annotated[
        Path | None,
        option("write there, whole or not at all; of several files in txt, srt or vtt: a directory"),
    ] = None,
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
      clearhead transcribe whisper/ talk.wav --format srt --output talk.srt
      clearhead transcribe whisper/ rede.wav --language german --task translate
      clearhead transcribe whisper/ talk.wav --temperature 0 0.2 0.4 0.6 0.8 1
      clearhead transcribe whisper/ clips/*.wav --json --output clips.jsonl
    """
    refuse(not files, "no sound was given: name one file or several after the directory")
    refuse(max_new_tokens is not None and max_new_tokens < 1, f"max-new-tokens {max_new_tokens} is below 1")
    refuse(json and format is not None, f"--json and --format {format} were both given: leave one out")
    single, whole = len(files) == 1, format if format in SUFFIXES else None
    refuse(single and not files[0].is_file(), f"{files[0]} is no file: give a sound file")
    check_apart(output, files)
    targets = {} if whole is None else _targets(files, whole, output)
    model = load_model(folder, tokenizer, device, dtype)
    asked: dict[str, Any] = {
        **{"language": language, "task": task, "timestamps": timestamps or format is not None},
        **{"max_new_tokens": max_new_tokens, "batch_size": batch_size},
        **{"temperature": temperature, "seed": seed},
        "compression_ratio_threshold": compression_ratio_threshold,
        "logprob_threshold": logprob_threshold,
        "no_speech_threshold": no_speech_threshold,
    }
    model.transcribe([], **asked)  # a mistake in the options is said once, before any sound is read
    if targets and not single:
        try:
            next(iter(targets.values())).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--output {output} cannot be made: {error.strerror}") from None
    failed = 0
    with writing(None if targets else output) as write:
        inputs = (Input({"file": str(file)}) for file in files)
        for item, made in results(
            inputs, lambda batch: model.transcribe([one["file"] for one in batch], **asked), batch_size
        ):
            name = item.fields["file"]
            if isinstance(made, ClearheadError):
                if single:
                    raise made
                failed += 1
                print_notes([f"clearhead: {made}"])  # never where transcripts go; a JSON line is a record
                if json or format == "json":
                    write(jsonlib.dumps({"file": name, "error": str(made)}))
            elif json or format == "json":
                write(jsonlib.dumps({"file": name, **body(made)}, ensure_ascii=False))
            elif whole is not None:
                with writing(targets.get(Path(name))) as write_whole:
                    if text := as_format(made.segments, whole):
                        write_whole(text)
            else:
                shown = (f"{'' if single else f'{name}: '}{line}" for line in lines(made, timestamps))
                for line in shown:
                    write(line)
    if failed:
        print_notes([f"clearhead: {failed} of {len(files)} files failed"])
        sys.exit(1)


def _targets(files: Sequence[Path], format: str, output: Path | None) -> dict[Path, Path]:
    """Return the file that each transcript goes to; none for one sound and stdout."""
    if len(files) == 1:
        return {} if output is None else {files[0]: output}
    refuse(
        output is None or (output.exists() and not output.is_dir()),
        f"--format {format} makes one file of each sound, and {len(files)} were given: name a directory for "
        "them with --output",
    )
    assert output is not None
    targets = {file: output / f"{file.stem}.{format}" for file in files}
    twice = [path for path, count in Counter(targets.values()).items() if count > 1]
    shared = ", ".join(map(str, twice))
    refuse(twice, f"several sounds would be written to {shared}: transcribe those by themselves")
    for target in targets.values():
        check_apart(target, files)
    return targets


def body(made: Transcription) -> dict[str, Any]:
    """Return a transcript as JSON values."""
    segments = [{"start": one.start, "end": one.end, "text": one.text} for one in made.segments]
    said = {"text": made.text, "language": made.language, "seconds": made.seconds, "segments": segments}
    return {**said, "windows": [asdict(one) for one in made.windows]} if made.windows else said


def as_format(segments: Sequence[Segment], format: str) -> str:
    """Return segments as OpenAI's program writes a file of this format, but for its last end of line."""
    if format == "txt":
        return "\n".join(one.text.strip() for one in segments)
    mark, hours = (",", True) if format == "srt" else (".", False)
    parts = ["WEBVTT\n"] if format == "vtt" else []
    for number, one in enumerate(segments, start=1):
        times = f"{_clock(one.start, mark, hours)} --> {_clock(one.end, mark, hours)}"
        text = one.text.strip().replace("-->", "->")  # which would be read as times
        parts.append("\n".join([*([str(number)] if format == "srt" else []), times, f"{text}\n"]))
    return "\n".join(parts)


def lines(made: Transcription, timestamps: bool) -> list[str]:
    """Return a transcript as text: one line, or one with its times for each segment; of silence none."""
    if not timestamps:
        return [made.text] if made.text else []
    return [f"[{_clock(one.start)} --> {_clock(one.end)}] {one.text}" for one in made.segments]


def _clock(seconds: float, mark: str = ".", always_hours: bool = False) -> str:
    minutes, rest = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    shown = f"{hours:02}:" if hours or always_hours else ""
    return f"{shown}{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
