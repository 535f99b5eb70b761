"""Speech to text: what is said in a sound, window by window, with times and in a language.

A window is as long as the encoder has positions, mostly 30 seconds. A longer sound is read by windows that
begin where the last segment of the one before ended, so its transcript has times whether they are asked for
or not. A window of several sounds is read together; each comes out as it would alone.

Temperature fallback: a window whose transcript repeats itself or is improbable is drawn again, warmer. A
transcript is taken when it passes both thresholds, and in any case at the last temperature. A window that is
improbable and in which the model hears no speech is skipped, at one temperature too. The measures and the
decisions are those of transformers' long-form generation; to skip a window, OpenAI's program measures and
decides the same.

Shapes: B windows read together, N samples, T frames of a window, M mel bands, V vocabulary.
"""

import io
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.core.transformer import Transformer
from clearhead.errors import InputError, nearest, refuse
from clearhead.hub.openai_whisper import CODES, LANGUAGES
from clearhead.hub.preprocessor import Spectrogram, spectrogram_of
from clearhead.hub.tokens.text import decoded
from clearhead.learn.data.sounds import Samples, read_sound, resampled
from clearhead.learn.tasks.reading import fitting
from clearhead.learn.tasks.results import Segment, Transcription, WindowReading
from clearhead.run.bundle import Bundle
from clearhead.run.generate import sequence
from clearhead.run.generate.decode import decode
from clearhead.run.generate.request import REMOVED, Request, make_request, with_own
from clearhead.run.generate.sequence import Ends, Prompts, Rule
from clearhead.run.generate.steps import Steps
from clearhead.variants.contexts import evaluating

USUAL = {"compression_ratio_threshold": 1.35, "logprob_threshold": -1.0, "no_speech_threshold": 0.6}


@dataclass(frozen=True)
class Fallback:
    """The temperatures to try in order, and what makes the next one be tried."""

    temperatures: tuple[float, ...] = (0.0,)
    compression_ratio_threshold: float = math.inf
    logprob_threshold: float = -math.inf
    no_speech_threshold: float = math.inf

    @property
    def judges(self) -> bool:
        """Whether any transcript can fail."""
        return self.compression_ratio_threshold < math.inf or self.logprob_threshold > -math.inf


def make_fallback(
    temperature: float | Sequence[float], thresholds: Mapping[str, float | None], stated: Mapping[str, Any]
) -> Fallback:
    """Return the temperatures to try in order, and the thresholds by name.

    A threshold that is None is what generation_config.json (`stated`) says, else the usual one.
    """
    single = isinstance(temperature, int | float)
    temperatures = (temperature,) if isinstance(temperature, int | float) else tuple(temperature)
    refuse(not temperatures, "temperature names none: give one number, or several to try in order")
    for number in temperatures:
        refuse(
            isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf,
            f"temperature {number!r} must be a number, 0 (the best token each time) or more",
        )
    named = {name: stated.get(name) if thresholds.get(name) is None else thresholds[name] for name in USUAL}
    for name, value in named.items():
        refuse(
            value is not None and (not isinstance(value, int | float) or math.isnan(value)),
            f"{name} {value!r} must be a number; {getattr(Fallback, name)} switches it off",
        )
    used = {name: USUAL[name] if value is None else float(value) for name, value in named.items()}
    fallback = Fallback(tuple(map(float, temperatures)), **used)
    refuse(
        not single and len(temperatures) > 1 and not fallback.judges,
        f"{len(temperatures)} temperatures with no threshold: the second would never be tried, so leave the "
        "others out, or give compression_ratio_threshold or logprob_threshold",
    )
    return fallback


@dataclass
class Likelihood:
    """A rule of decoding that adds up how probable the chosen tokens were, after all rules that came before.

    Temperature comes later and does not count. A row is known by its list of new tokens, which grows.
    """

    rule: Rule | None
    sums: dict[int, float] = field(default_factory=dict)
    last: dict[int, Tensor] = field(default_factory=dict)  # log-probabilities at the row's last step: V

    def __call__(self, logits: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """Apply the rule, and note the distribution: [B, V] -> [B, V]."""
        logits = logits if self.rule is None else self.rule(logits, rows)
        for values, ids in zip(logits.float().log_softmax(-1), rows):
            if ids:
                self.sums[id(ids)] = self.sums.get(id(ids), 0.0) + float(self.last[id(ids)][ids[-1]])
            self.last[id(ids)] = values
        return logits

    def mean(self, row: sequence.Sequence, tokens: Sequence[int]) -> float:
        """Return the mean log-probability of a row's tokens, the one that ended it among them."""
        return (self.sums.get(id(row.ids), 0.0) + float(self.last[id(row.ids)][tokens[-1]])) / len(tokens)


def compression_ratio(tokens: Sequence[int], vocab_size: int) -> float:
    """Return how much shorter zlib makes the ids, as bytes: text that repeats itself shrinks most."""
    width = int(math.log2(vocab_size) / 8) + 1
    raw = b"".join(token.to_bytes(width, "little") for token in tokens)
    return len(raw) / len(zlib.compress(raw))


@dataclass(frozen=True)
class WindowBatch:
    """Windows that are read together, B of them, and how."""

    model: Transformer  # the one that says how probable silence is
    runner: Transformer  # the same, as it decodes
    steps: Steps | None
    request: Request
    ends: Ends
    prompts: Prompts  # what each transcript begins with, and the windows B T M
    starts: Sequence[float]  # seconds from the beginning of each sound
    silence: int | None  # id of the token that says that nothing is said, after the first of a prompt

    def read(
        self, numbers: Sequence[int], temperature: float, likely: Likelihood | None = None
    ) -> list[sequence.Sequence]:
        """Transcribe some of the windows, by their numbers."""
        ids, source = [self.prompts.ids[number] for number in numbers], self.prompts.source
        prompts = Prompts(ids, None if source is None else source[list(numbers)])
        request = replace(self.request, temperature=temperature)
        ends = self.ends if likely is None else replace(self.ends, rule=likely)
        return decode(self.runner, request, prompts, ends, steps=self.steps)

    def no_speech(self, number: int) -> float | None:
        """Return the probability that nothing is said in a window; None: the model has no token for it."""
        if self.silence is None or self.prompts.source is None:
            return None
        source = self.prompts.source[number : number + 1]
        first = torch.tensor([self.prompts.ids[number][:1]], device=source.device)
        logits = self.model(first, source=source).logits[0, -1]
        return float(logits.float().softmax(-1)[self.silence])


def read_windows(windows: WindowBatch, fallback: Fallback) -> list[tuple[list[int], WindowReading | None]]:
    """Return of each window its new tokens, none of a skipped one, and how they were judged, if they were."""
    left = list(range(len(windows.starts)))
    if not fallback.judges:
        return [(row.ids, None) for row in windows.read(left, fallback.temperatures[0])]
    size, end = windows.model.config.vocab_size, min(windows.ends.stop_ids, default=0)
    readings: dict[int, tuple[list[int], WindowReading]] = {}
    quiet: dict[int, float | None] = {}
    for temperature in fallback.temperatures:
        likely, again = Likelihood(windows.ends.rule), []
        for number, row in zip(left, windows.read(left, temperature, likely)):
            tokens = [*row.ids, end] if row.stop_reason == "eos" else row.ids
            ratio, logprob = compression_ratio(tokens, size), likely.mean(row, tokens)
            improbable = logprob < fallback.logprob_threshold
            if improbable and number not in quiet:
                quiet[number] = windows.no_speech(number)
            unheard = quiet.get(number)
            skipped = improbable and unheard is not None and unheard > fallback.no_speech_threshold
            if not skipped and (improbable or ratio > fallback.compression_ratio_threshold):
                again.append(number)
            judged = WindowReading(
                round(windows.starts[number], 3), temperature, logprob, ratio, unheard, skipped
            )
            readings[number] = [] if skipped else row.ids, judged
        left = again
        if not left:
            break
    return [readings[number] for number in range(len(windows.starts))]


# Transcription ----------------------------------------------------------------------------------------------


Sound = str | Path | io.BytesIO | np.ndarray | Tensor  # a file, or samples [N], of several channels [N, C]
Task = Literal["transcribe", "translate"]
TASKS = ("transcribe", "translate")
NO_TIMES = "<|notimestamps|>"


class TranscribeOptions(TypedDict, total=False):
    """Keywords of `transcribe`."""

    language: str | None
    task: Task
    timestamps: bool
    rate: int | None
    max_new_tokens: int | None
    batch_size: int
    temperature: float | Sequence[float]
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    seed: int


@dataclass(frozen=True)
class Voice:
    """The tokens by which one model is told what to write, and how its sound becomes frames."""

    start: int
    languages: dict[str, int]  # token of each language by its code; empty in a model of English alone
    tasks: dict[str, int]
    no_times: int | None  # says that no times are written; the tokens after it are times
    sound: Spectrogram
    frames: int  # T
    stride: int  # frames of one position of the encoder

    @property
    def step(self) -> float:
        """Seconds of one position of the encoder, which is what times are counted in."""
        return self.sound.seconds * self.stride

    def begin(self, language: int | None, task: str, times: bool) -> list[int]:
        """Return what every transcript of this kind begins with."""
        ids = [self.start]
        if language is not None:
            ids += [language, *([self.tasks[task]] if task in self.tasks else ())]
        return ids if times or self.no_times is None else [*ids, self.no_times]


@dataclass
class Hearing:
    """One sound as it is transcribed."""

    frames: Tensor  # all of them, M bands each
    seconds: float
    language: int | None = None
    times: bool = False
    at: int = 0  # the frame that the next window begins with
    ids: list[int] = field(default_factory=list)
    segments: list[tuple[float, float, list[int]]] = field(default_factory=list)
    windows: list[WindowReading] = field(default_factory=list)


def voice_of(m: Bundle) -> Voice:
    """Return how a model is told what to write, from generation_config.json and its tokenizer."""
    config = m.config
    refuse(
        config.family != "encoder-decoder" or config.input != "frames" or config.head != "lm",
        f"transcribe needs an encoder-decoder of frames, such as Whisper, and this is a model of family "
        f"{config.family} that reads {config.input}: {fitting(m)}",
    )
    stated, spec = m.generation, m.config.stacks[0]

    def known(names: dict[str, str], key: str) -> dict[str, int]:
        listed = stated.get(key)
        if isinstance(listed, dict):
            tokens = {name: listed.get(token, listed.get(name)) for name, token in names.items()}
        else:
            tokens = {name: m.text_tokenizer.token_to_id(token) for name, token in names.items()}
        size = m.config.vocab_size
        return {name: token for name, token in tokens.items() if type(token) is int and 0 <= token < size}

    refuse(
        bool(stated.get("condition_on_prev_tokens")),
        "generation_config.json has condition_on_prev_tokens true: here a window is read without the text "
        "of the one before, so set it to false",
    )
    english = not stated.get("is_multilingual", "lang_to_id" in stated)
    no_times = stated.get("no_timestamps_token_id", m.text_tokenizer.token_to_id(NO_TIMES))
    refuse(
        no_times is not None and not (type(no_times) is int and 0 <= no_times < m.config.vocab_size),
        f"generation_config.json has no_timestamps_token_id {no_times!r}: it must be an id of the vocabulary",
    )
    return Voice(
        start=m.start_ids[0],
        languages={} if english else known({code: f"<|{code}|>" for code in LANGUAGES}, "lang_to_id"),
        tasks={} if english else known({task: f"<|{task}|>" for task in TASKS}, "task_to_id"),
        no_times=no_times,
        sound=spectrogram_of(m.images, m.config),
        frames=spec.max_positions * spec.conv_stride,
        stride=spec.conv_stride,
    )


def language_id(voice: Voice, language: str | None) -> int | None:
    """Return the token of a language by its code, its token or its English name; None: none was named."""
    if language is None:
        return None
    name = language.lower().strip()
    code = CODES.get(name, name.removeprefix("<|").removesuffix("|>"))
    if not voice.languages:
        refuse(code != "en", f'language "{language}" with a model of English alone: leave it out')
        return None
    names = {**{LANGUAGES[code]: code for code in voice.languages}, **dict.fromkeys(voice.languages, "")}
    if code not in voice.languages:
        listed = ", ".join(f"{code} ({LANGUAGES[code]})" for code in list(voice.languages)[:6])
        raise InputError(
            f'language "{language}" is not known{nearest(name, names)}: the model has '
            f"{len(voice.languages)} languages, by code or name, such as {listed}"
        )
    return voice.languages[code]


@torch.inference_mode()
def transcribe(
    m: Bundle,
    sounds: Sequence[Sound],
    language: str | None = None,
    task: Task = "transcribe",
    timestamps: bool = False,
    rate: int | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 8,
    temperature: float | Sequence[float] = 0.0,
    compression_ratio_threshold: float | None = None,
    logprob_threshold: float | None = None,
    no_speech_threshold: float | None = None,
    seed: int = 0,
) -> list[Transcription]:
    """Return what is said in each sound; see `Model.transcribe`."""
    voice = voice_of(m)
    thresholds = {
        "compression_ratio_threshold": compression_ratio_threshold,
        "logprob_threshold": logprob_threshold,
        "no_speech_threshold": no_speech_threshold,
    }
    fallback = make_fallback(temperature, thresholds, m.generation)
    refuse(batch_size < 1, f"batch_size {batch_size} must be 1 or more")
    refuse(task not in TASKS, f'task "{task}" is not known: choose {" or ".join(TASKS)}')
    refuse(
        task != "transcribe" and task not in voice.tasks,
        f'task "{task}" with a model of English alone: it writes down what it hears, so leave task out',
    )
    refuse(
        timestamps and voice.no_times is None,
        f"this model has no tokens for times ({NO_TIMES} is not in its vocabulary): leave timestamps and "
        "--format out",
    )
    named = language_id(voice, language)
    heard = [_hear(voice, sound, rate, timestamps) for sound in sounds]
    with evaluating(m.model):
        runner = m.engine.runner()
        steps = m.engine.steps_for(runner, None)
        for start in range(0, len(heard), batch_size):
            _tell_languages(m, voice, heard[start : start + batch_size], named)
        skips = fallback.no_speech_threshold < math.inf
        while waiting := [sound for sound in heard if _seek(voice, sound, skips)]:
            # Transcripts that begin alike are read together.
            alike = [sound for sound in waiting if sound.times == waiting[0].times][:batch_size]
            starts = [voice.begin(sound.language, task, sound.times) for sound in alike]
            request, ends = _request(m, voice, alike[0].times, len(starts[0]), max_new_tokens, seed)
            prompts = Prompts(starts, _windows(m, voice, alike))
            begun = [sound.at * voice.sound.seconds for sound in alike]
            silence = None if voice.no_times is None else voice.no_times - 1
            batch = WindowBatch(m.model, runner, steps, request, ends, prompts, begun, silence)
            for sound, (ids, judged) in zip(alike, read_windows(batch, fallback)):
                _note(voice, sound, ids, judged)
    return [_written(m, voice, sound) for sound in heard]


def first_window(m: Bundle, sound: Sound) -> tuple[Tensor, list[int], list[int], float]:
    """Return the first window of a sound [1, T, M], what its transcript begins with, and the transcript.

    It has no times. Last comes how many seconds a position of the encoder stands for.
    """
    voice = voice_of(m)
    heard = _hear(voice, sound, None, timestamps=False)
    heard.times = False
    source = _windows(m, voice, [heard])
    with torch.inference_mode(), evaluating(m.model):
        _tell_languages(m, voice, [heard], None)
        start = voice.begin(heard.language, "transcribe", times=False)
        request, ends = _request(m, voice, False, len(start), None)
        rows = decode(m.engine.runner(), request, Prompts([start], source), ends)
    return source, start, rows[0].ids, voice.step


def _hear(voice: Voice, sound: Sound, rate: int | None, timestamps: bool) -> Hearing:
    """Return a sound as frames, of its file or of samples."""
    samples = samples_of(sound, voice.sound.sampling_rate, rate)
    frames = voice.sound.frames(samples)
    long = len(frames) > voice.frames
    refuse(
        long and voice.no_times is None,
        f"a sound is longer than the {voice.sound.chunk_length} seconds of a window, and this model has no "
        "tokens for times: cut it into shorter ones",
    )
    return Hearing(frames, len(samples) / voice.sound.sampling_rate, times=timestamps or long)


def samples_of(sound: Sound, wanted: int, rate: int | None = None) -> Samples:
    """Return the samples [N] of a sound at the wanted rate; `rate` is that of samples which are given."""
    if isinstance(sound, io.BytesIO):
        return read_sound(sound, wanted)
    if isinstance(sound, str | Path):
        refuse(rate is not None, f"rate {rate} is for samples, and {sound} is a file, which states its own")
        return read_sound(Path(sound), wanted)
    refuse(
        not isinstance(sound, np.ndarray | Tensor),
        f"{type(sound).__name__} was given for a sound: give a file, or an array or tensor of samples",
    )
    samples = torch.as_tensor(sound).detach().cpu()
    refuse(
        not samples.is_floating_point() or samples.ndim not in (1, 2),
        f"samples of dtype {str(samples.dtype).removeprefix('torch.')} and shape {list(samples.shape)} were "
        "given: give floating-point numbers from -1 to 1, [N] or, for several channels, [N, C]",
    )
    refuse(rate is not None and rate < 1, f"rate {rate} must be 1 or more: samples a second")
    mixed = samples.float() if samples.ndim == 1 else samples.float().mean(1)
    return resampled(np.ascontiguousarray(mixed.numpy()), wanted if rate is None else rate, wanted)


def _seek(voice: Voice, heard: Hearing, skips: bool) -> bool:
    """Move past windows without any sound, if these are skipped; return whether one is left to be read.

    There no frame has anything within 80 dB of the loudest moment: all are the floor of the spectrogram. A
    model may still write a word, and find it probable. What is left of the padding after a sound is read, as
    transformers does.
    """
    while heard.at < len(heard.frames):
        window = heard.frames[heard.at : heard.at + voice.frames]
        within = heard.at * voice.sound.seconds < heard.seconds
        if not (skips and within) or window.min() < window.max():
            return True
        heard.at += len(window)
    return False


def _windows(m: Bundle, voice: Voice, heard: list[Hearing]) -> Tensor:
    """Return the next window of each sound; what is after its end is 0: [B, T, M]."""
    parts = [sound.frames[sound.at : sound.at + voice.frames] for sound in heard]
    rows = [nnf.pad(part, (0, 0, 0, voice.frames - len(part))) for part in parts]
    return torch.stack(rows).to(next(m.model.parameters()))


def _tell_languages(m: Bundle, voice: Voice, heard: list[Hearing], named: int | None) -> None:
    """Set the language of each sound: the one that is named, or what its first window sounds like most."""
    languages = [named] * len(heard)
    if named is None and voice.languages:
        source = _windows(m, voice, heard)
        start = torch.full((len(heard), 1), voice.start, device=source.device)
        logits = m.model(start, source=source).logits[:, -1]
        languages = [*language_of(logits, list(voice.languages.values()))]
    for sound, language in zip(heard, languages):
        sound.language = language


def _request(
    m: Bundle, voice: Voice, times: bool, begun: int, max_new_tokens: int | None, seed: int = 0
) -> tuple[Request, Ends]:
    """Return how the tokens of a window are chosen, and what ends it."""
    positions = m.config.max_positions
    stated = m.generation.get("max_length")
    room = min(positions, stated + begun) - begun if type(stated) is int else positions - begun
    refuse(room < 1, f"the model has {positions} positions and a transcript begins with {begun} tokens")
    most = room if max_new_tokens is None else min(room, max_new_tokens)
    options: dict[str, Any] = {"max_new_tokens": most, "seed": seed}
    stops = frozenset(token for token in m.stops if token < m.config.vocab_size)
    rule = None
    if times and voice.no_times is not None:
        latest = m.generation.get("max_initial_timestamp_index")
        rule = Timestamps(voice.no_times + 1, min(stops, default=voice.no_times), latest)
    return make_request(with_own(m.own_options, options, hooked=True)), Ends(stops, rule=rule)


def _note(voice: Voice, heard: Hearing, ids: list[int], judged: WindowReading | None) -> None:
    """Add what was written of a window, and go on where it ended; a skipped one is passed over."""
    left = min(voice.frames, len(heard.frames) - heard.at)
    if judged is not None:
        heard.windows.append(judged)
        if judged.skipped:
            heard.at += left
            return
    offset = heard.at * voice.sound.seconds
    if voice.no_times is None or not heard.times:
        segments, steps = [(0, left // voice.stride, list(ids))], None
    else:
        segments, steps = segments_of(ids, voice.no_times + 1, left // voice.stride)
    for start, end, tokens in segments:
        heard.ids += tokens
        heard.segments.append((offset + start * voice.step, offset + end * voice.step, tokens))
    heard.at += left if steps is None else steps * voice.stride


def _written(m: Bundle, voice: Voice, heard: Hearing) -> Transcription:
    words = m.config.vocab_size if voice.no_times is None else voice.no_times

    def text(ids: list[int]) -> str:
        return decoded(m.text_tokenizer, [token for token in ids if token < words]).strip()

    parts = [
        Segment(round(start, 3), round(end if heard.times else heard.seconds, 3), spoken)
        for start, end, tokens in heard.segments
        if (spoken := text(tokens))
    ]
    codes = {token: code for code, token in voice.languages.items()}
    language = None if heard.language is None else codes[heard.language]
    seconds, windows = round(heard.seconds, 3), tuple(heard.windows)
    return Transcription(text(heard.ids), parts, language, heard.ids, seconds, windows)


@dataclass(frozen=True)
class Timestamps:
    """The rules that a transcript with times keeps to, as a function of logits.

    Tokens from `first` on are times, in order. A transcript begins with one. They come in pairs, the end of
    one segment and the beginning of the next, and never go back. Where all times together are more probable
    than any single word, a time is generated.
    """

    first: int  # id of the first time; the one before it says that no times are written
    end: int  # id of the token that ends a transcript; those before it are words
    latest: int | None = None  # how many times after the first a transcript may begin with

    def __call__(self, logits: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """Remove what must not come next, given the new tokens of each row: [B, V] -> [B, V]."""
        logits, first = wide(logits).clone(), self.first
        logits[:, first - 1] = REMOVED
        for row, written in zip(logits, rows):
            times = [token for token in written if token >= first]
            after_time = len(written) > 0 and written[-1] >= first
            closed = len(written) < 2 or written[-2] >= first  # the time before it ended a segment
            if after_time and closed:
                row[first:] = REMOVED  # words come next
            elif after_time:
                row[: self.end] = REMOVED  # a second time, or the end
            if times:
                opens = after_time and not closed  # the next segment may begin where this one ended
                row[first : times[-1] + (0 if opens else 1)] = REMOVED
            if not written:
                row[:first] = REMOVED
                if self.latest is not None:
                    row[first + self.latest + 1 :] = REMOVED
        probable = logits.log_softmax(-1)
        timed = probable[:, first:].logsumexp(-1) > probable[:, :first].amax(-1)  # B
        logits[:, :first] = logits[:, :first].masked_fill(timed[:, None], REMOVED)
        return logits


def segments_of(
    tokens: Sequence[int], first: int, window: int
) -> tuple[list[tuple[int, int, list[int]]], int | None]:
    """Cut the tokens of one window into segments; return (start, end, tokens) of each, and how far it goes.

    Times are counted in steps of the encoder, `window` of them. A window that ends with a pair of times, or
    in the middle of a segment after one, goes as far as the last pair: the rest is left for the next window.
    None: it goes to its end.
    """
    timed = [token >= first for token in tokens]
    ends = [place + 1 for place in range(len(tokens) - 1) if timed[place] and timed[place + 1]]
    alone = timed[-2:] == [False, True]  # nothing is said after the last time
    if not ends:
        times = [token for token in tokens if token >= first]
        end = times[-1] - first if times and times[-1] != first else window
        return [(0, end, list(tokens))], None
    if alone:
        ends.append(len(tokens))
    else:
        ends[-1] += 1  # the second time of the last pair shows that no segment was left open
    segments, start = [], 0
    for end in ends:
        part = list(tokens[start:end])
        last = part[-1] if end != ends[-1] or alone else part[-2]
        segments.append((part[0] - first, last - first, part))
        start = end
    return segments, None if alone else max(1, tokens[start - 2] - first)


def language_of(logits: Tensor, known: Sequence[int]) -> list[int]:
    """Return the most probable of the known language tokens in each row: [B, V] -> B."""
    index = torch.tensor(list(known), device=logits.device)
    return [int(known[place]) for place in logits[:, index].argmax(-1).tolist()]
