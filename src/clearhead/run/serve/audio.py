"""Speech over HTTP: transcriptions and translations, with the routes of OpenAI's API.

A form brings a file. It is parsed and decoded in a thread, a few at a time, and then waits in the engine's
queue of pooling requests, which reads one window of it and goes on with the next request. A window is read
alone, so that an answer has the same numbers whoever else asks.
"""

import asyncio
import io
import json
import threading
import weakref
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from clearhead.errors import BusyError, ClearheadError, InputError, MissingExtraError, RequestError, refuse
from clearhead.hub.openai_whisper import LANGUAGES
from clearhead.learn.data.sounds import read_sound
from clearhead.learn.tasks.results import Transcription, segments_as
from clearhead.learn.tasks.speech import Hearing, SpeechRequest, Task, Transcriber
from clearhead.run.generate.stream import PARTIAL
from clearhead.run.serve.answers import LOOK
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.pooling import PoolingRequest
from clearhead.run.serve.protocol import Body, Text, error_body
from clearhead.run.serve.server import UPLOADS

MOST_SECONDS = 3600  # of a sound; a small file may hold hours of silence
MOST_SAMPLES = MOST_SECONDS * 48_000
MOST_HELD = 8 * MOST_SECONDS  # of all sounds that are being read; an hour of frames takes 115 to 184 MB
OPENING = 1  # sounds that are decoded at the same time: an hour takes 2 GB for a moment
MOST_FIELDS, PART = 64, 1 << 16  # of a form; bytes of it that are parsed at a time
# With temperature 0, as OpenAI's API has it, a window that repeats itself or is improbable is drawn warmer.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
TIMED = ("srt", "vtt", "verbose_json")  # formats with times
# Fields of OpenAI's clients that are not served, with the values that ask for nothing: these are taken.
NO_OPS: dict[str, tuple[str, ...]] = {
    "chunking_strategy": ("auto",),  # the boundaries are the server's to choose: windows
    "include": (),
    "keywords": (),
    "known_speaker_names": (),
    "known_speaker_references": (),
    "languages": (),
    "stream": ("false",),
    "timestamp_granularities": ("segment",),
}


class AudioBody(Body):
    """`/v1/audio/translations`: the fields of the form besides the file; their values come as texts."""

    model_config = ConfigDict(strict=False)
    no_ops: ClassVar = NO_OPS

    language: Annotated[str, Field(max_length=100)] | None = None  # what is spoken; None: what is heard
    prompt: Text | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0

    def speech_request(self, task: Task, words: bool = False) -> SpeechRequest:
        """Return how the sound is to be written down."""
        return SpeechRequest(
            language=self.language,
            task=task,
            timestamps=self.response_format in TIMED,
            words=words,
            prompt=self.prompt,
            temperature=self.temperature or TEMPERATURES,
            measured=self.response_format == "verbose_json",
        )

    @property
    def parts(self) -> tuple[str, ...]:
        """What is told of a transcript besides its text."""
        return ("segment",)


class TranscriptionBody(AudioBody):
    """`/v1/audio/transcriptions`."""

    stream: bool = False
    timestamp_granularities: tuple[Literal["word", "segment"], ...] = ()

    def speech_request(self, task: Task, words: bool = False) -> SpeechRequest:
        """Return how the sound is to be written down; refuse what does not go together."""
        format = self.response_format
        refuse(
            self.timestamp_granularities and format != "verbose_json",
            f"timestamp_granularities with response_format {format}: they belong to verbose_json",
        )
        refuse(self.stream and format in TIMED, f"stream with response_format {format}: choose json or text")
        return super().speech_request(task, words or "word" in self.timestamp_granularities)

    @property
    def parts(self) -> tuple[str, ...]:
        """What is told of a transcript besides its text."""
        return self.timestamp_granularities or ("segment",)


# The form ---------------------------------------------------------------------------------------------------


async def form_of(request: Request) -> FormData:
    """Return the fields and the file of a request, parsed in a thread; the file lies on disk."""
    kind = request.headers.get("content-type", "")
    refuse(
        kind.partition(";")[0].strip().lower() != "multipart/form-data",
        f'body: of type "{kind:.100}": send a form with a file, as Content-Type: multipart/form-data',
    )
    raw = await request.body()
    try:
        return await run_in_threadpool(_parsed, request.headers, raw)
    except MultiPartException as error:
        raise InputError(f"body: no form: {error.message}") from None


def _parsed(headers: Headers, raw: bytes) -> FormData:
    """Parse a form; a thread takes its time for that, and the loop that all wait for does not."""
    try:
        import python_multipart  # noqa: F401
    except ImportError:
        raise MissingExtraError("a form needs python-multipart: pip install 'clearhead[serve]'") from None

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(raw), PART):
            yield raw[at : at + PART]
        yield b""

    given: Any = parts()
    return asyncio.run(MultiPartParser(headers, given, max_files=1, max_fields=MOST_FIELDS).parse())


def fields_of(form: FormData, kind: type[AudioBody]) -> dict[str, Any]:
    """Return the fields of a form but for the file; those that are empty or ask for nothing are left out."""
    fields: dict[str, Any] = {}
    for key in dict.fromkeys(form):
        name, values = key.removesuffix("[]"), [value for value in form.getlist(key) if value != ""]
        no_ops = () if name in kind.model_fields else kind.no_ops.get(name, ())
        if name == "file" or all(isinstance(value, str) and value.lower() in no_ops for value in values):
            continue
        listed = name == "timestamp_granularities"
        refuse(len(values) > 1 and not listed, f"{name} was given {len(values)} times: give it once")
        fields[name] = [*fields.get(name, ()), *values] if listed else values[0]
    return fields


def body_of(form: FormData, kind: type[AudioBody]) -> tuple[AudioBody, UploadFile]:
    """Return what a form asks for, and its file."""
    try:
        body = kind.model_validate(fields_of(form, kind))
    except ValidationError as error:
        wrong = [{**mistake, "loc": ("body", *mistake["loc"])} for mistake in error.errors()]
        raise RequestValidationError(wrong) from None
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise RequestError("file: the form has none: send the sound as a file", "missing_file", 400, "file")
    return body, file


# The work ---------------------------------------------------------------------------------------------------


class SpeechJob:
    """A sound that the engine's thread writes down, window by window."""

    def __init__(self, engine: ServeEngine, request: SpeechRequest) -> None:
        """Refuse a model that hears nothing, and options that it has not."""
        self.gone, self.engine = threading.Event(), engine  # `gone`: nobody waits for the answer any more
        self.transcriber = Transcriber(engine.m, request, self._cancelled)
        self.heard: Hearing | None = None
        self.text = ""  # so far

    def open(self, raw: io.BytesIO) -> None:
        """Decode a file."""
        rate = self.transcriber.voice.sound.sampling_rate
        self.heard = self.transcriber.hear(read_sound(raw, rate, MOST_SECONDS, MOST_SAMPLES))

    @property
    def seconds(self) -> float:
        """How long the sound is; 0 before it is decoded, and after its end."""
        return 0.0 if self.heard is None else self.heard.seconds

    def end(self, reading: PoolingRequest) -> None:
        """End the job, if it has not ended: nobody waits for it."""
        self.gone.set()
        reading.cancelled, self.heard = True, None

    def submit(self) -> PoolingRequest:
        """Queue the job; a call reads one window."""
        return self.engine.read([self], lambda m, jobs: self._next(), joined=True)

    def _next(self) -> list[Transcription]:
        """Read the next window; return the transcript when none is left."""
        heard = self.heard
        if heard is not None and heard.language is None:
            self.transcriber.tell_languages([heard])
        if heard is not None and self.transcriber.goes_on(heard):
            self.transcriber.read([heard])
        if heard is None or self.gone.is_set():
            raise ClearheadError("the client has gone")
        if self.transcriber.goes_on(heard):
            self.text = self.transcriber.text_of(heard.ids).strip()
            return []
        self.heard = None  # all of its frames
        return [self.transcriber.written(heard)]

    def _cancelled(self) -> bool:
        self.engine.beat()
        return self.gone.is_set()

    # Answers -----------------------------------------------------------------------------------------------

    def answer(self, body: AudioBody, transcript: Transcription) -> Response:
        """Return a transcript in the format that was asked for."""
        format = body.response_format
        if format in ("srt", "vtt"):
            return PlainTextResponse(segments_as(transcript.segments, format) + "\n")
        if format == "text":
            return PlainTextResponse(transcript.text + "\n")
        told: dict[str, Any] = {"text": transcript.text}
        if format == "verbose_json":
            task = self.transcriber.speech.task
            language = "en" if task == "translate" else transcript.language or "en"
            named = {"task": task, "language": LANGUAGES[language], "duration": transcript.seconds}
            told = named | told
            if "segment" in body.parts:
                told["segments"] = self._segments(transcript)
            if "word" in body.parts:
                told["words"] = [
                    {"word": word.text, "start": word.start, "end": word.end} for word in transcript.words
                ]
        return JSONResponse({**told, "usage": usage_of(transcript)})

    def _segments(self, transcript: Transcription) -> list[dict[str, Any]]:
        """Return segments with all that OpenAI's API tells of them; measures are those of their window."""
        texts = [self.transcriber.text_of(segment.ids) for segment in transcript.segments]
        whole = dict.fromkeys((segment.window for segment in transcript.segments), "")
        for segment, text in zip(transcript.segments, texts):
            whole[segment.window] += text
        seconds, found = self.transcriber.voice.sound.seconds, []
        for number, (segment, text) in enumerate(zip(transcript.segments, texts)):
            window = transcript.windows[segment.window]
            found.append(
                {
                    **{"id": number, "seek": round(window.start / seconds)},
                    **{"start": segment.start, "end": segment.end, "text": text, "tokens": segment.ids},
                    **{"temperature": window.temperature, "avg_logprob": window.logprob},
                    "compression_ratio": compression_of(whole[segment.window].strip()),
                    "no_speech_prob": window.no_speech,
                }
            )
        return found

    async def stream(self, reading: PoolingRequest) -> AsyncIterator[str]:
        """Yield what is new after each window as server-sent events, and at the end the whole text."""
        told, ended = "", False

        def event(kind: str, **fields: Any) -> str:
            return f"data: {json.dumps({'type': f'transcript.text.{kind}', **fields})}\n\n"

        try:
            while not ended:
                ended = await run_in_threadpool(reading.done.wait, LOOK)
                text = reading.wait(0)[0].text if ended else self.text.rstrip(PARTIAL)
                if len(text) > len(told) and text.startswith(told):
                    yield event("delta", delta=text[len(told) :])
                    told = text
            yield event("done", text=text)
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield f"data: {json.dumps(error_body(error))}\n\n"
        finally:
            self.end(reading)


def usage_of(transcript: Transcription) -> dict[str, Any]:
    """Return what is billed elsewhere: the length of the sound."""
    return {"type": "duration", "seconds": transcript.seconds}


def compression_of(text: str) -> float:
    """Return how much shorter zlib makes a text, as OpenAI's program measures it; 2.4 is suspicious there."""
    raw = text.encode("utf-8", "replace")
    return len(raw) / len(zlib.compress(raw))


# Routes -----------------------------------------------------------------------------------------------------

EngineOf = Callable[[str | None], tuple[str, ServeEngine]]  # finds a model by its name
Wait = Callable[[PoolingRequest, Request], Awaitable[Sequence[Any]]]  # as long as the client does


def add_audio(
    app: FastAPI, engine_of: EngineOf, note: Callable[[ServeEngine, Sequence[Any]], None], wait: Wait
) -> None:
    """Add the routes of speech to a server; `note` logs what is asked."""
    opening, held = asyncio.Semaphore(OPENING), weakref.WeakSet[SpeechJob]()

    async def opened(job: SpeechJob, file: UploadFile) -> PoolingRequest:
        """Decode a file and queue it."""
        async with opening:
            await run_in_threadpool(job.open, io.BytesIO(await file.read()))
        seconds = sum(other.seconds for other in held)
        if seconds + job.seconds > MOST_HELD:
            hours = f"{seconds / 3600:.1f} hours of sound"
            raise BusyError(f"{hours} are being read, and at most {MOST_HELD / 3600:g} may: try again later")
        reading = job.submit()
        held.add(job)
        return reading

    async def written(request: Request, kind: type[AudioBody], task: Task) -> Response:
        """Parse the form, decode its file, and answer when the engine has read it."""
        form = await form_of(request)
        try:
            body, file = body_of(form, kind)
            name, engine = engine_of(body.model)
            refuse(name in engine.adapters, f'"{name}" is an adapter, and speech is read by a model alone')
            with engine.admit():
                job = await run_in_threadpool(SpeechJob, engine, body.speech_request(task))
                note(engine, [body.prompt] if body.prompt else [])
                reading = await opened(job, file)
        finally:
            await form.close()
        if isinstance(body, TranscriptionBody) and body.stream:
            return StreamingResponse(job.stream(reading), media_type="text/event-stream")
        try:
            (transcript,) = await wait(reading, request)
        finally:
            job.end(reading)
        return await run_in_threadpool(job.answer, body, transcript)

    @app.post(UPLOADS[0], openapi_extra=described(TranscriptionBody))
    async def transcriptions(request: Request) -> Response:
        return await written(request, TranscriptionBody, "transcribe")

    @app.post(UPLOADS[1], openapi_extra=described(AudioBody))
    async def translations(request: Request) -> Response:
        return await written(request, AudioBody, "translate")


def described(kind: type[AudioBody]) -> dict[str, Any]:
    """Return a form as openapi.json tells of it."""
    schema = kind.model_json_schema()
    schema["properties"] = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    schema["required"] = ["file"]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
