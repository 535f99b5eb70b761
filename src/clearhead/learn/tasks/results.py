"""What the tasks return, and a transcript as lines, subtitles or JSON values. This file needs no PyTorch."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from clearhead.hub.tokens.answers import ReadAnswer
from clearhead.hub.tokens.tools import ToolCall


@dataclass(frozen=True)
class Classification:
    """The class of one input."""

    label: str  # the best
    probability: float  # of the best; a model that regresses has its number here
    scores: dict[str, float]  # of every label, in the order of the classes


@dataclass(frozen=True)
class Word:
    """One word and its tag."""

    text: str
    label: str  # as the model has it, such as B-PER
    start: int  # characters of the text; given words count as joined by single spaces
    end: int
    score: float


@dataclass(frozen=True)
class Span:
    """Words that belong together: B-PER I-PER is one PER."""

    label: str  # the type, without a prefix
    text: str
    start: int
    end: int
    score: float  # mean over its words


@dataclass(frozen=True)
class Tags:
    """What a tagger says of one text."""

    words: list[Word]
    spans: list[Span]


@dataclass(frozen=True)
class Ranked:
    """A text and how well it answers a query."""

    index: int  # its place among the texts that were given
    text: str
    score: float  # a cross-encoder's probability, or of vectors: cosine, dot product or MaxSim


@dataclass(frozen=True)
class Candidate:
    """A token for a mask."""

    token: str
    id: int
    probability: float
    text: str  # with the token in place of the mask


@dataclass(frozen=True)
class Answer:
    """The part of a context that answers a question."""

    text: str  # empty where the context has no answer
    start: int  # characters of the context
    end: int
    score: float  # probability that it begins there, times that it ends there


@dataclass(frozen=True)
class Generation:
    """What came of one prompt."""

    text: str | None  # None where the model has no tokenizer
    ids: list[int]  # the new tokens; a token that ends the text is not among them
    stop_reason: str  # eos, stop, length, time, cancelled
    logprobs: list[float] | None = None  # of each token, under the model's own distribution
    alternatives: list[list[tuple[int, float]]] | None = None  # of each step: tokens and log-probabilities
    score: float | None = None  # of a beam search: the sum of log-probabilities over length ** length_penalty
    steps: int | None = None  # runs of the model that tokens were chosen from; fewer than tokens if guessed
    layers: list[int] | None = None  # with early_exit: how many layers each token came from
    read: ReadAnswer | None = (
        None  # of a chat: what it says, thinks and calls; None where all of it is content
    )

    @property
    def message(self) -> dict[str, Any]:
        """The answer of a chat as its next message: content, reasoning_content and tool_calls."""
        return (self.read or ReadAnswer(self.text or "")).message

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of an answer of a chat."""
        return [] if self.read is None else self.read.calls


@dataclass(frozen=True)
class Score:
    """How probable a model finds a text."""

    ids: list[int]
    logprobs: list[float | None]  # of each token given those before it; None for one that nothing precedes

    @property
    def total(self) -> float:
        """Log-probability of all tokens that have one."""
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability per token."""
        scored = [value for value in self.logprobs if value is not None]
        return math.exp(-math.fsum(scored) / len(scored)) if scored else math.nan


@dataclass(frozen=True)
class Segment:
    """A stretch of speech."""

    start: float  # seconds from the beginning of the sound
    end: float
    text: str
    ids: list[int] = field(default_factory=list)  # its tokens, those for times among them
    window: int = 0  # the number of the window it was heard in, as they are counted in `windows`


@dataclass(frozen=True)
class SpokenWord:
    """A word of a transcript, with the punctuation at it, and when it was spoken."""

    start: float  # seconds from the beginning of the sound
    end: float
    text: str


@dataclass(frozen=True)
class WindowReading:
    """How the transcript of one window was judged, at the temperature it was taken at."""

    start: float  # seconds from the beginning of the sound
    temperature: float
    logprob: float  # mean log-probability of its tokens
    compression_ratio: float  # of its tokens' bytes; text that repeats itself has a high one
    no_speech: float | None  # probability that nothing is said; None where logprob left no doubt
    skipped: bool  # taken for silence, and left out


@dataclass(frozen=True)
class Transcription:
    """What was said in one sound."""

    text: str
    segments: list[Segment]  # one for all of it where no timestamps were asked for
    language: str | None  # its code, such as "en"; None where the model has no tokens for languages
    ids: list[int]  # the new tokens of all windows, those for times among them
    seconds: float  # how long the sound is
    windows: tuple[WindowReading, ...] = ()  # as they were judged; none where no threshold is on
    words: tuple[SpokenWord, ...] = ()  # where they were asked for


TRANSCRIPT_SUFFIXES = ("txt", "srt", "vtt")  # formats of OpenAI's program, one file for each sound


def segments_as(segments: Sequence[Segment], format: str) -> str:
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


def transcript_lines(transcript: Transcription, timestamps: bool, words: bool = False) -> list[str]:
    """Return a transcript as text: one line, or one with its times for each segment, or for each word."""
    if not (timestamps or words):
        return [transcript.text] if transcript.text else []
    parts = transcript.words if words else transcript.segments
    return [f"[{clock(part.start)} --> {clock(part.end)}] {part.text}" for part in parts]


def transcript_values(transcript: Transcription, words: bool = False) -> dict[str, Any]:
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
