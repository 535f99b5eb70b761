"""Speech to text: what is said in a sound, window by window, with times and in a language.

A window is as long as the encoder has positions, mostly 30 seconds. A longer sound is read by windows that
begin where the last segment of the one before ended, so its transcript has times whether they are asked for
or not. A window of several sounds is read together; each comes out as it would alone. How a window is read,
drawn again or skipped is in `fallback`, the rules of times in `timestamps`, when each word was spoken in
`timestamps`.

Shapes: B windows read together, N samples, T frames of a window, M mel bands, V vocabulary.
"""

import functools
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.errors import InputError, nearest, refuse
from clearhead.hub.openai_whisper import CODES, LANGUAGES
from clearhead.hub.preprocessor import Spectrogram, spectrogram_of
from clearhead.hub.tokens.text import decoded
from clearhead.learn.data.sounds import Samples, read_sound, resampled
from clearhead.learn.tasks.fallback import Fallback, WindowBatch, make_fallback, read_windows
from clearhead.learn.tasks.reading import fitting
from clearhead.learn.tasks.results import Segment, SpokenWord, Transcription, WindowReading
from clearhead.learn.tasks.timestamps import (
    Timestamps,
    alignment_heads,
    median_width,
    read_again,
    segments_of,
    split_words,
    token_positions,
)
from clearhead.run.bundle import Bundle
from clearhead.run.generate import sequence
from clearhead.run.generate.decode import decode
from clearhead.run.generate.own_rules import with_own
from clearhead.run.generate.request import Request, make_request
from clearhead.run.generate.sequence import Ends, Prompts
from clearhead.variants.contexts import evaluating

# Transcription ----------------------------------------------------------------------------------------------


Sound = str | Path | io.BytesIO | np.ndarray | Tensor  # a file, or samples [N], of several channels [N, C]
Task = Literal["transcribe", "translate"]
TASKS = ("transcribe", "translate")
NO_TIMES, BEFORE = "<|notimestamps|>", "<|startofprev|>"


class TranscribeOptions(TypedDict, total=False):
    """Keywords of `transcribe`."""

    language: str | None
    task: Task
    timestamps: bool
    words: bool
    prompt: str | None
    rate: int | None
    max_new_tokens: int | None
    batch_size: int
    temperature: float | Sequence[float]
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    seed: int


@dataclass(frozen=True, kw_only=True)
class SpeechRequest:
    """How sounds are written down; see `Model.transcribe`."""

    language: str | None = None
    task: Task = "transcribe"
    timestamps: bool = False
    words: bool = False
    prompt: str | None = None
    max_new_tokens: int | None = None
    temperature: float | Sequence[float] = 0.0
    compression_ratio_threshold: float | None = None
    logprob_threshold: float | None = None
    no_speech_threshold: float | None = None
    seed: int = 0
    measured: bool = False  # report every measure of each window, also those that decide nothing

    def fallback(self, stated: dict[str, Any]) -> Fallback:
        """Return which temperatures are tried, and when; `stated` is generation_config.json."""
        names = ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")
        return make_fallback(self.temperature, {name: getattr(self, name) for name in names}, stated)


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


@dataclass(frozen=True)
class Stretch:
    """Tokens between two times, in seconds from the beginning of the sound."""

    start: float
    end: float
    ids: list[int]
    window: int
    spoken: list[float]  # when each token was, where words are asked for


@dataclass
class Hearing:
    """One sound as it is transcribed."""

    frames: Tensor  # all of them, M bands each
    seconds: float
    sounding: int  # frames before the padding
    language: int | None = None
    times: bool = False
    at: int = 0  # the frame that the next window begins with
    count: int = 0  # windows that were read
    stretches: list[Stretch] = field(default_factory=list)
    windows: list[WindowReading] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return [token for stretch in self.stretches for token in stretch.ids]


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


def prompt_ids(m: Bundle, text: str | None) -> list[int]:
    """Return the tokens of a text before a transcript, the last of it that fit; none for no text."""
    if text is None or not text.strip():
        return []
    tokenizer = m.text_tokenizer
    known = (tokenizer.token_to_id(BEFORE), m.generation.get("prev_sot_token_id"))
    start = next((token for token in known if type(token) is int), -1)
    refuse(start < 0, f"prompt with a model that has no token for it ({BEFORE}): leave it out")
    ids = list(tokenizer.encode(f" {text.strip()}", add_special_tokens=False).ids)
    added = tokenizer.get_added_tokens_decoder()
    wrong = next((added[token].content for token in ids if token in added), None)
    refuse(wrong is not None, f"prompt has {wrong}, which is a special token and no text: leave it out")
    return [start, *ids[-(m.config.max_positions // 2 - 1) :]]


class Transcriber:
    """A model, and how it is asked to write down sounds, each of them window by window."""

    def __init__(self, m: Bundle, speech: SpeechRequest, cancel: Callable[[], bool] | None = None) -> None:
        """Check what is asked; `cancel` is asked after each token, and ends a window when it is True."""
        self.m, self.speech, self.cancel, self.voice = m, speech, cancel, voice_of(m)
        self.fallback = speech.fallback(m.generation)
        task = speech.task
        refuse(task not in TASKS, f'task "{task}" is not known: choose {" or ".join(TASKS)}')
        refuse(
            task != "transcribe" and task not in self.voice.tasks,
            f'task "{task}" with a model of English alone: it writes down what it hears, so leave task out',
        )
        refuse(
            speech.timestamps and self.voice.no_times is None,
            f"this model has no tokens for times ({NO_TIMES} is not in its vocabulary): leave timestamps and "
            "--format out",
        )
        self.language = language_id(self.voice, speech.language)
        self.before = prompt_ids(m, speech.prompt)
        self.heads, self.width = (alignment_heads(m), median_width(m)) if speech.words else ([], 1)

    def hear(self, sound: Sound, rate: int | None = None) -> Hearing:
        """Return a sound as frames, of its file or of samples."""
        voice = self.voice
        samples = samples_of(sound, voice.sound.sampling_rate, rate)
        frames = voice.sound.frames(samples)
        long = len(frames) > voice.frames
        refuse(
            long and voice.no_times is None,
            f"a sound is longer than the {voice.sound.chunk_length} seconds of a window, and this model has "
            "no tokens for times: cut it into shorter ones",
        )
        sounding = min(-(-len(samples) // voice.sound.hop_length), len(frames))
        seconds = len(samples) / voice.sound.sampling_rate
        return Hearing(frames, seconds, sounding, times=self.speech.timestamps or long)

    @torch.inference_mode()
    def tell_languages(self, heard: list[Hearing]) -> None:
        """Set the language of each sound: the one that is named, or what its first window sounds like."""
        languages = [self.language] * len(heard)
        if self.language is None and self.voice.languages:
            source = self.windows(heard)
            start = torch.full((len(heard), 1), self.voice.start, device=source.device)
            with evaluating(self.m.model):
                logits = self.m.model(start, source=source).logits[:, -1]
            languages = [*language_of(logits, list(self.voice.languages.values()))]
        for sound, language in zip(heard, languages):
            sound.language = language

    def goes_on(self, heard: Hearing) -> bool:
        """Move past windows without any sound, if these are skipped; return whether one is left to be read.

        There no frame has anything within 80 dB of the loudest moment: all are the floor of the spectrogram.
        A model may still write a word, and find it probable. What is left of the padding after a sound is
        read, as transformers does.
        """
        skips = self.fallback.no_speech_threshold < math.inf
        while heard.at < len(heard.frames):
            window = heard.frames[heard.at : heard.at + self.voice.frames]
            within = heard.at * self.voice.sound.seconds < heard.seconds
            if not (skips and within) or window.min() < window.max():
                return True
            heard.at += len(window)
        return False

    @torch.inference_mode()
    def read(self, heard: list[Hearing]) -> None:
        """Transcribe the next window of each sound; either all of them have times, or none."""
        m, voice = self.m, self.voice
        with evaluating(m.model):
            runner = m.engine.runner()
            starts = [self.begin(sound) for sound in heard]
            request, ends = self.request(heard[0].times, len(starts[0]))
            prompts = Prompts(starts, self.windows(heard))
            begun = [sound.at * voice.sound.seconds for sound in heard]
            silence = None if voice.no_times is None else voice.no_times - 1
            batch = WindowBatch(
                *(m.model, runner, m.engine.steps_for(runner, None), request, ends, prompts, begun, silence),
                begin=len(self.before),
            )
            readings = read_windows(batch, self.fallback, self.speech.measured)
            for number, (sound, (row, judged)) in enumerate(zip(heard, readings)):
                spoken: list[float] = []
                unheard = None
                if row is not None and self.speech.words:
                    spoken, unheard = self._spoken(sound, batch, number, row)
                elif row is not None and self.speech.measured:
                    unheard = batch.no_speech(number)
                if judged is not None and judged.no_speech is None:
                    judged = replace(judged, no_speech=unheard)
                self._note(sound, None if row is None else row.ids, judged, spoken)

    def begin(self, heard: Hearing) -> list[int]:
        """Return what the transcript of each window of a sound begins with."""
        return [*self.before, *self.voice.begin(heard.language, self.speech.task, heard.times)]

    def written(self, heard: Hearing) -> Transcription:
        """Return what was written of a sound so far."""
        segments = [
            Segment(
                round(stretch.start, 3),
                round(stretch.end if heard.times else heard.seconds, 3),
                text,
                stretch.ids,
                stretch.window,
            )
            for stretch in heard.stretches
            if (text := self.text_of(stretch.ids).strip())
        ]
        text, language = self.text_of(heard.ids).strip(), self._code(heard)
        seconds, windows = round(heard.seconds, 3), tuple(heard.windows)
        words = tuple(self._words(heard)) if self.speech.words else ()
        return Transcription(text, segments, language, heard.ids, seconds, windows, words)

    def _code(self, heard: Hearing) -> str | None:
        codes = {token: code for code, token in self.voice.languages.items()}
        return None if heard.language is None else codes[heard.language]

    @functools.cached_property
    def _special(self) -> set[int]:
        added = self.m.text_tokenizer.get_added_tokens_decoder().items()
        return {number for number, token in added if token.special}

    def _is_text(self, token: int) -> bool:
        first = self.m.config.vocab_size if self.voice.no_times is None else self.voice.no_times
        return token < first and token not in self._special

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without times and special ones."""
        return decoded(self.m.text_tokenizer, [token for token in ids if self._is_text(token)])

    def _words(self, heard: Hearing) -> Iterator[SpokenWord]:
        """Yield the words of a sound: each begins where the token before it has ended."""
        before = 0.0
        language = "en" if self.speech.task == "translate" else self._code(heard)
        for stretch in heard.stretches:
            begins = [before, *stretch.spoken]
            kept = [number for number, token in enumerate(stretch.ids) if self._is_text(token)]
            at, before = 0, begins[-1]
            texts = [stretch.ids[number] for number in kept]
            for text, count in split_words(self.m.text_tokenizer, texts, language):
                start, end = begins[kept[at]], stretch.spoken[kept[at + count - 1]]
                at += count
                if text.strip():
                    yield SpokenWord(round(start, 3), round(end, 3), text.strip())

    def windows(self, heard: list[Hearing]) -> Tensor:
        """Return the next window of each sound; what is after its end is 0: [B, T, M]."""
        length = self.voice.frames
        parts = [sound.frames[sound.at : sound.at + length] for sound in heard]
        rows = [nnf.pad(part, (0, 0, 0, length - len(part))) for part in parts]
        return torch.stack(rows).to(next(self.m.model.parameters()))

    def request(self, times: bool, begun: int) -> tuple[Request, Ends]:
        """Return how the tokens of a window are chosen, and what ends it."""
        m, speech, voice = self.m, self.speech, self.voice
        positions = m.config.max_positions
        stated = m.generation.get("max_length")
        room = min(positions, stated + begun) - begun if type(stated) is int else positions - begun
        refuse(room < 1, f"the model has {positions} positions and a transcript begins with {begun} tokens")
        most = room if speech.max_new_tokens is None else min(room, speech.max_new_tokens)
        options: dict[str, Any] = {"max_new_tokens": most, "seed": speech.seed}
        stops = frozenset(token for token in m.stops if token < m.config.vocab_size)
        rule = None
        if times and voice.no_times is not None:
            latest = m.generation.get("max_initial_timestamp_index")
            rule = Timestamps(voice.no_times + 1, min(stops, default=voice.no_times), latest)
        request = make_request(with_own(m.own_options, options, hooked=True))
        return request, Ends(stops, cancel=self.cancel, rule=rule)

    def _spoken(
        self, heard: Hearing, batch: WindowBatch, number: int, row: sequence.Sequence
    ) -> tuple[list[float], float | None]:
        """Return when each token of a window was spoken, and how probable silence is in it.

        The last token of a window that has not ended was never read, as in the reference: it has the time of
        the one before it.
        """
        voice, begun = self.voice, batch.prompts.ids[number]
        source = batch.prompts.source
        assert source is not None
        read = row.ids if row.stop_reason == "eos" else row.ids[:-1]
        attention, logits = read_again(self.m, source[number : number + 1], [*begun, *read], self.heads)
        sounding = max(
            1, (heard.sounding - heard.at) // voice.stride
        )  # positions of the window that hold sound
        positions = token_positions(attention[:, len(begun) :, :sounding], self.width)
        positions += positions[-1:] or [0]
        times = [batch.starts[number] + place * voice.step for place in positions]
        return times[: len(row.ids)], batch.silence_in(logits[batch.begin])

    def _note(
        self, heard: Hearing, ids: list[int] | None, judged: WindowReading | None, spoken: list[float]
    ) -> None:
        """Add what was written of a window, and go on where it ended; a skipped one is passed over."""
        voice, window = self.voice, heard.count
        left = min(voice.frames, len(heard.frames) - heard.at)
        heard.count += 1
        if judged is not None:
            heard.windows.append(judged)
        if ids is None:
            heard.at += left
            return
        offset, at = heard.at * voice.sound.seconds, 0
        if voice.no_times is None or not heard.times:
            segments, steps = [(0, left // voice.stride, list(ids))], None
        else:
            segments, steps = segments_of(ids, voice.no_times + 1, left // voice.stride)
        for start, end, tokens in segments:
            begin, stop = offset + start * voice.step, offset + end * voice.step
            heard.stretches.append(Stretch(begin, stop, tokens, window, spoken[at : at + len(tokens)]))
            at += len(tokens)
        heard.at += left if steps is None else steps * voice.stride


def transcribe(
    m: Bundle, sounds: Sequence[Sound], rate: int | None = None, batch_size: int = 8, **options: Any
) -> list[Transcription]:
    """Return what is said in each sound; see `Model.transcribe`."""
    transcriber = Transcriber(m, SpeechRequest(**options))
    refuse(batch_size < 1, f"batch_size {batch_size} must be 1 or more")
    heard = [transcriber.hear(sound, rate) for sound in sounds]
    for start in range(0, len(heard), batch_size):
        transcriber.tell_languages(heard[start : start + batch_size])
    while waiting := [sound for sound in heard if transcriber.goes_on(sound)]:
        # Transcripts that begin alike are read together.
        transcriber.read([sound for sound in waiting if sound.times == waiting[0].times][:batch_size])
    return [transcriber.written(sound) for sound in heard]


def first_window(m: Bundle, sound: Sound) -> tuple[Tensor, list[int], list[int], float]:
    """Return the first window of a sound [1, T, M], what its transcript begins with, and the transcript.

    It has no times. Last comes how many seconds a position of the encoder stands for.
    """
    transcriber = Transcriber(m, SpeechRequest())
    heard = transcriber.hear(sound)
    heard.times = False
    source = transcriber.windows([heard])
    with torch.inference_mode(), evaluating(m.model):
        transcriber.tell_languages([heard])
        start = transcriber.begin(heard)
        request, ends = transcriber.request(False, len(start))
        rows = decode(m.engine.runner(), request, Prompts([start], source), ends)
    return source, start, rows[0].ids, transcriber.voice.step


def samples_of(sound: Sound, wanted: int, rate: int | None = None, most: float | None = None) -> Samples:
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


def language_of(logits: Tensor, known: Sequence[int]) -> list[int]:
    """Return the most probable of the known language tokens in each row: [B, V] -> B."""
    index = torch.tensor(list(known), device=logits.device)
    return [int(known[place]) for place in logits[:, index].argmax(-1).tolist()]
