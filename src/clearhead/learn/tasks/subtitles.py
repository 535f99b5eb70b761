"""A transcript as lines, subtitles or JSON values. This file needs no PyTorch."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from clearhead.learn.tasks.results import Segment, Transcription

SUFFIXES = ("txt", "srt", "vtt")  # formats of OpenAI's program, one file for each sound


def as_format(segments: Sequence[Segment], format: str) -> str:
    """Return segments as OpenAI's program writes a file of this format, but for its last end of line."""
    if format == "txt":
        return "\n".join(segment.text.strip() for segment in segments)
    mark, hours = (",", True) if format == "srt" else (".", False)
    parts = ["WEBVTT\n"] if format == "vtt" else []
    for number, segment in enumerate(segments, start=1):
        times = f"{clock(segment.start, mark, hours)} --> {clock(segment.end, mark, hours)}"
        text = segment.text.strip().replace("-->", "->")  # which would be read as times
        parts.append("\n".join([*([str(number)] if format == "srt" else []), times, f"{text}\n"]))
    return "\n".join(parts)


def lines(transcript: Transcription, timestamps: bool, words: bool = False) -> list[str]:
    """Return a transcript as text: one line, or one with its times for each segment, or for each word."""
    if not (timestamps or words):
        return [transcript.text] if transcript.text else []
    parts = transcript.words if words else transcript.segments
    return [f"[{clock(part.start)} --> {clock(part.end)}] {part.text}" for part in parts]


def body(transcript: Transcription, words: bool = False) -> dict[str, Any]:
    """Return a transcript as JSON values."""
    values = {name: getattr(transcript, name) for name in ("text", "language", "seconds")}
    values["segments"] = [timed(segment) for segment in transcript.segments]
    if words:
        values["words"] = [timed(word) for word in transcript.words]
    windows = [asdict(window) for window in transcript.windows]
    return values | ({"windows": windows} if windows else {})


def timed(part: Any) -> dict[str, Any]:
    """Return a segment or a word as JSON values."""
    return {"start": part.start, "end": part.end, "text": part.text}


def clock(seconds: float, mark: str = ".", always_hours: bool = False) -> str:
    """Return a time as subtitles write it."""
    minutes, rest = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    shown = f"{hours:02}:" if hours or always_hours else ""
    return f"{shown}{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
