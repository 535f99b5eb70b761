"""The command that turns speech into text: transcribe."""

from __future__ import annotations

import json as jsonlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from clearhead.app.commands.common import Folder, check_apart, load_model, print_notes, writing
from clearhead.app.commands.texts import Input, results
from clearhead.errors import ClearheadError, InputError, refuse
from clearhead.learn.tasks.results import (
    TRANSCRIPT_SUFFIXES,
    segments_as,
    transcript_lines,
    transcript_values,
)


def transcribe(
    folder: Folder,
    files: tuple[Path, ...],
    *,
    language: str | None = None,
    task: Literal["transcribe", "translate"] = "transcribe",
    timestamps: bool = False,
    words: bool = False,
    prompt: str | None = None,
    format: Literal["txt", "srt", "vtt", "json"] | None = None,
    max_new_tokens: int | None = None,
    temperature: tuple[float, ...] = (0.0,),
    compression_ratio_threshold: float | None = None,
    logprob_threshold: float | None = None,
    no_speech_threshold: float | None = None,
    seed: int = 0,
    output: Path | None = None,
    json: bool = False,
    batch_size: int = 8,
    tokenizer: Path | None = None,
    device: str = "auto",
    dtype: str | None = None,
) -> None:
    """Write down what is said in sound files; long ones are read by windows.

    Args:
        files (FILE): sound: WAV, FLAC, OGG, MP3
        language: what is spoken, such as de or german; default: what the model hears
        task: write down what is said, or its English translation
        timestamps: segments, each with the time when it begins and ends
        words: words, each with the time when it begins and ends; in --json next to the segments
        prompt: text before the transcript: names, spelling and style that the model takes up
        format: segments as OpenAI's program writes them: lines or subtitles; json: --json with times
        max_new_tokens: tokens of a window at most; default: what the model has room for
        temperature (T): how freely tokens are drawn, 0: the best each time; several are tried in order
        compression_ratio_threshold: with several T, one that repeats itself more is read again (default:
            1.35)
        logprob_threshold: a window whose tokens are less probable is read again, too (default: -1)
        no_speech_threshold: such an improbable window is skipped where silence is likelier (default: 0.6)
        seed: for tokens that are drawn
        output: write there, whole or not at all; of several files in txt, srt or vtt: a directory
        json: a JSON object for each file, on one line
        batch_size: windows of 30 seconds at a time

    For example:
      clearhead transcribe whisper/ talk.wav
      clearhead transcribe whisper/ talk.flac --timestamps
      clearhead transcribe whisper/ talk.flac --words
      clearhead transcribe whisper/ talk.wav --format srt --output talk.srt
      clearhead transcribe whisper/ rede.wav --language german --task translate
      clearhead transcribe whisper/ talk.wav --temperature 0 0.2 0.4 0.6 0.8 1
      clearhead transcribe whisper/ clips/*.wav --json --output clips.jsonl
    """
    refuse(not files, "no sound was given: name one file or several after the directory")
    refuse(max_new_tokens is not None and max_new_tokens < 1, f"max-new-tokens {max_new_tokens} is below 1")
    refuse(json and format is not None, f"--json and --format {format} were both given: leave one out")
    single, whole = len(files) == 1, format if format in TRANSCRIPT_SUFFIXES else None
    refuse(words and whole, f"--words and --format {format} were both given: words go with json, or alone")
    refuse(single and not files[0].is_file(), f"{files[0]} is no file: give a sound file")
    check_apart(output, files)
    targets = {} if whole is None else _targets(files, whole, output)
    model = load_model(folder, tokenizer, device, dtype)
    options: dict[str, Any] = {
        **{"language": language, "task": task, "timestamps": timestamps or format is not None},
        **{"words": words, "prompt": prompt},
        **{"max_new_tokens": max_new_tokens, "batch_size": batch_size},
        **{"temperature": temperature, "seed": seed},
        "compression_ratio_threshold": compression_ratio_threshold,
        "logprob_threshold": logprob_threshold,
        "no_speech_threshold": no_speech_threshold,
    }
    model.transcribe([], **options)  # a mistake in the options is reported once, before any sound is read
    if targets and not single:
        try:
            next(iter(targets.values())).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--output {output} cannot be made: {error.strerror}") from None
    failed = 0
    with writing(None if targets else output) as write:
        inputs = (Input({"file": str(file)}) for file in files)
        for item, transcript in results(
            inputs,
            lambda batch: model.transcribe([fields["file"] for fields in batch], **options),
            batch_size,
        ):
            name = item.fields["file"]
            if isinstance(transcript, ClearheadError):
                if single:
                    raise transcript
                failed += 1
                # Never where transcripts go; a JSON line is a record.
                print_notes([f"clearhead: {transcript}"])
                if json or format == "json":
                    write(jsonlib.dumps({"file": name, "error": str(transcript)}))
            elif json or format == "json":
                values = {"file": name, **transcript_values(transcript, words)}
                write(jsonlib.dumps(values, ensure_ascii=False))
            elif whole is not None:
                with writing(targets.get(Path(name))) as write_whole:
                    if text := segments_as(transcript.segments, whole):
                        write_whole(text)
            else:
                shown = (
                    f"{'' if single else f'{name}: '}{line}"
                    for line in transcript_lines(transcript, timestamps, words)
                )
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
