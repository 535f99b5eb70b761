"""Transcriptions and translations over HTTP, by the `openai` client: as `transcribe` gives them."""

from __future__ import annotations

import asyncio
import io
import json
import math
import socket
import threading
import time
import zlib

import numpy as np
import pytest

import clearhead as ch
from clearhead.errors import BusyError
from clearhead.learn.tasks.results import segments_as
from clearhead.run.serve import audio, server
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.later import later
from tests.serve.served import serving
from tests.whisper import sounds, whisper_folder

openai = later("openai", reason="needs the openai client: pip install 'clearhead[dev]'")
soundfile = pytest.importorskip("soundfile")
FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # what temperature 0 means in OpenAI's API


@pytest.fixture(scope="module")
def hearing(tmp_path_factory) -> ch.Model:
    return ch.load(whisper_folder(tmp_path_factory.mktemp("whisper") / "model", alert=True))


@pytest.fixture(scope="module")
def address(hearing, writer) -> str:
    with serving({"whisper": ServeEngine(hearing), "writer": ServeEngine(writer)}, keys=["k"]) as at:
        yield at


@pytest.fixture
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0)


def file_of(clip: np.ndarray, kind: str = "FLAC", rate: int = 16_000) -> tuple[str, bytes]:
    raw = io.BytesIO()
    soundfile.write(raw, clip, rate, format=kind)
    return f"clip.{kind.lower()}", raw.getvalue()


def heard(clip: np.ndarray, kind: str = "FLAC") -> np.ndarray:
    """A sound as it comes out of its file again."""
    return soundfile.read(io.BytesIO(file_of(clip, kind)[1]), dtype="float32")[0]


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
def test_a_text_is_that_of_transcribe(client, hearing, kind):
    clip = sounds()[2]
    want = hearing.transcribe(heard(clip, kind), language="de", temperature=FALLBACK)
    given = {"model": "whisper", "file": file_of(clip, kind), "language": "german"}
    made = client.audio.transcriptions.create(**given)
    assert (made.text, made.usage.seconds, made.usage.type) == (want.text, want.seconds, "duration")
    assert client.audio.transcriptions.create(**given, response_format="text") == f"{want.text}\n"
    warm = client.audio.transcriptions.create(**given, temperature=0.5, prompt="Names: x")
    options = {"language": "de", "temperature": 0.5, "prompt": "Names: x"}
    assert warm.text == hearing.transcribe(heard(clip, kind), **options).text
    assert warm.text != want.text


@pytest.mark.parametrize("format", ["srt", "vtt"])
def test_subtitles_are_those_of_the_command(client, hearing, format):
    clip = sounds()[2]
    want = hearing.transcribe(heard(clip), temperature=FALLBACK, timestamps=True)
    assert len(want.segments) > 1
    made = client.audio.transcriptions.create(model="whisper", file=file_of(clip), response_format=format)
    assert made == segments_as(want.segments, format) + "\n"


def test_verbose_json_has_segments_and_words(client, hearing):
    clip = sounds()[2]
    want = hearing.transcribe(heard(clip), temperature=FALLBACK, timestamps=True, words=True)
    given = {"model": "whisper", "file": file_of(clip), "response_format": "verbose_json"}
    made = client.audio.transcriptions.create(**given, timestamp_granularities=["word", "segment"])
    assert (made.text, made.duration, made.usage.seconds) == (want.text, want.seconds, want.seconds)
    assert made.language == {"en": "english", "de": "german"}[want.language]
    assert [(one.word, one.start, one.end) for one in made.words] == [
        (word.text, word.start, word.end) for word in want.words
    ]
    tokens = [token for part in made.segments for token in part.tokens]
    assert tokens == [token for part in want.segments for token in part.ids]
    texts = dict.fromkeys(range(len(want.windows)), "")
    for part, segment in zip(made.segments, want.segments, strict=True):
        window = want.windows[segment.window]
        assert (part.start, part.end, part.text.strip()) == (segment.start, segment.end, segment.text)
        assert (part.temperature, part.avg_logprob) == (window.temperature, window.logprob)
        assert part.seek == round(window.start * 100) and 0 < part.no_speech_prob < 1
        texts[segment.window] += part.text
    assert [part.id for part in made.segments] == list(range(len(made.segments))) and len(made.segments) > 3
    for part, segment in zip(made.segments, want.segments):  # of the text of its window, as OpenAI's program
        raw = texts[segment.window].strip().encode()
        assert part.compression_ratio == len(raw) / len(zlib.compress(raw))
    for asked, has in ((None, (True, False)), (["word"], (False, True)), (["segment"], (True, False))):
        more = {} if asked is None else {"timestamp_granularities": asked}
        told = client.audio.transcriptions.create(**given, **more)
        assert (told.segments is not None, told.words is not None) == has
        for part, again in zip(told.segments or (), made.segments):  # silence is measured in another pass
            assert part.no_speech_prob == pytest.approx(again.no_speech_prob, abs=1e-6)


@pytest.mark.filterwarnings("ignore:deprecated")
def test_translations(client, hearing):
    clip = sounds()[2]
    want = hearing.transcribe(heard(clip), task="translate", temperature=FALLBACK)
    assert want.text != hearing.transcribe(heard(clip), temperature=FALLBACK).text
    given = {"model": "whisper", "file": file_of(clip)}
    assert client.audio.translations.create(**given).text == want.text
    verbose = client.audio.translations.create(**given, response_format="verbose_json")
    assert (verbose.language, verbose.duration) == ("english", 3.37) and verbose.segments


def test_a_stream_tells_each_window_as_it_is_read(client, hearing):
    clip = sounds()[2]
    want = hearing.transcribe(heard(clip), temperature=FALLBACK).text
    events = list(client.audio.transcriptions.create(model="whisper", file=file_of(clip), stream=True))
    assert [event.type for event in events[-2:]] == ["transcript.text.delta", "transcript.text.done"]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == want


def test_temperature_0_falls_back_and_any_other_does_not(client, hearing, monkeypatch):
    monkeypatch.setitem(hearing.generation, "logprob_threshold", -1.0)
    clip = sounds()[1]
    want = hearing.transcribe(heard(clip), temperature=FALLBACK, timestamps=True)
    assert {window.temperature for window in want.windows} == {1.0}
    ask = {"model": "whisper", "file": file_of(clip), "response_format": "verbose_json"}
    for more, temperature in (({}, 1.0), ({"temperature": 0}, 1.0), ({"temperature": 0.3}, 0.3)):
        made = client.audio.transcriptions.create(**ask, **more)
        assert {part.temperature for part in made.segments} == {temperature}
        assert temperature < 1 or made.text == want.text


# Fields, and what is refused --------------------------------------------------------------------------------

# A value of each field of the client that asks for something, and is refused by name.
REFUSED = {
    "chunking_strategy": {"type": "server_vad"},
    "include": ["logprobs"],
    "keywords": ["a"],
    "known_speaker_names": ["a"],
    "known_speaker_references": ["data:audio/wav;base64,AA=="],
    "languages": ["en", "de"],
}
NOTHING = {  # and one that asks for nothing
    "chunking_strategy": "auto",
    "include": [],
    "keywords": [],
    "known_speaker_names": [],
    "known_speaker_references": [],
    "languages": [],
    "language": "",
    "prompt": "",
    "stream": False,
    "temperature": 0,
    "timestamp_granularities": [],
    "response_format": "json",
}


@pytest.mark.filterwarnings("ignore:deprecated")
def test_every_field_of_the_client_is_honoured_or_refused_by_name(client):
    from openai.types.audio import transcription_create_params as transcriptions
    from openai.types.audio import translation_create_params as translations

    known = {*transcriptions.TranscriptionCreateParamsBase.__annotations__, "stream"}
    assert known == {"file", "model", *NOTHING}
    assert known >= {*translations.TranslationCreateParams.__annotations__}
    file = file_of(sounds()[0])
    bare = client.audio.transcriptions.create(model="whisper", file=file).text
    assert client.audio.transcriptions.create(model="whisper", file=file, **NOTHING).text == bare
    for name, value in REFUSED.items():
        with pytest.raises(openai.BadRequestError, match=name):
            client.audio.transcriptions.create(model="whisper", file=file, **{name: value})
    for body in ({"seed": 1}, {"timestamp_granularities[]": "word"}, {"stream": "true"}):
        with pytest.raises(openai.BadRequestError, match=f'"{next(iter(body)).removesuffix("[]")}" is not'):
            client.audio.translations.create(model="whisper", file=file, extra_body=body)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "other"}, 'model "other".* is not here'),
        ({"model": "writer"}, "transcribe needs an encoder-decoder of frames, such as Whisper"),
        ({"file": b""}, "the sound is empty"),
        ({"file": b"no sound at all " * 9}, "cannot be read as sound: Format not recognised"),
        ({"file": file_of(np.zeros(0, np.float32), "WAV")}, "holds no sound: it has 0 samples"),
        ({"file": ("x.wav", file_of(sounds()[0], "WAV")[1][:-100])}, "is cut short"),
        ({"language": "germn"}, r'language "germn" is not known \(did you mean "german"\?\)'),
        ({"prompt": "<|en|>"}, "prompt has .*, which is a special token"),
        ({"temperature": 1.5}, "temperature: Input should be less than or equal to 1"),
        ({"temperature": "warm"}, "temperature: Input should be a valid number"),
        ({"response_format": "diarized_json"}, "response_format: Input should be 'json'"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities with response_format json"),
        ({"response_format": "srt", "stream": True}, "stream with response_format srt"),
        ({"extra_body": {"language": ["de", "en"]}}, "language was given 2 times"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_said_in_one_line(client, given, said):
    asked = {"model": "whisper", "file": file_of(sounds()[0])} | given
    with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=said) as error:
        client.audio.transcriptions.create(**asked)
    assert "\n" not in error.value.body["message"]


def test_only_speech_is_asked_of_a_model_of_speech(client):
    for route, body in (
        ("/completions", {"prompt": "x"}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/embeddings", {"input": "x"}),
    ):
        with pytest.raises(openai.BadRequestError):
            client.post(route, body={"model": "whisper", **body}, cast_to=object)
    with pytest.raises(openai.BadRequestError, match="reads sound, and no text: it is for transcribe"):
        client.completions.create(model="whisper", prompt="x")


def posted(address: str, body: bytes, kind: str = "multipart/form-data; boundary=b", **headers: str) -> tuple:
    """Return status and error of a raw request."""
    import http.client

    line = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    line.request("POST", "/v1/audio/transcriptions", body, {"Content-Type": kind, **headers})
    answer = line.getresponse()
    told = json.loads(answer.read())
    return answer.status, told.get("error", {}).get("message", "")


KEY = {"Authorization": "Bearer k"}


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("application/json", b'{"file": "x"}', 'of type "application/json": send a form with a file'),
        ("multipart/form-data", b"x", "no form: Missing boundary"),
        ("multipart/form-data; boundary=b", b"x" * 99, "no form"),
        ("multipart/form-data; boundary=b", b"--b--\r\n", "file: the form has none"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n',
            "file: the form has none: send the sound as a file",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n' * 99 + b"--b--\r\n",
            "Too many fields",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="model"; filename="x"\r\n\r\nx\r\n--b--\r\n',
            "model: Input should be a valid string",
        ),
    ],
)
def test_a_body_that_is_no_form(address, kind, body, said):
    status, message = posted(address, body, kind, **KEY)
    assert (status, said in message) == (400, True), message


def test_a_key_is_asked_for_before_a_file_is_read(address):
    """The head alone is sent, of a file that never comes."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as line:
        line.sendall(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9000000\r\n\r\n"
        )
        assert line.recv(100).startswith(b"HTTP/1.1 401")


def test_files_are_limited_in_size_and_length(address, client, monkeypatch):
    large = b"x" * (server.LARGEST_BODY + 1)  # more than any other route takes
    assert posted(address, large, **KEY)[0] == 400  # and read: it is no form
    monkeypatch.setattr(server, "MOST_LARGE", 0)
    status, message = posted(address, large, **KEY)
    assert status == 429 and "large files are arriving already" in message
    monkeypatch.setattr(server, "LARGEST_UPLOAD", 1000)
    status, message = posted(address, b"x" * 1001, **KEY)
    assert (status, message) == (413, "the body is larger than 1,000 bytes")
    monkeypatch.undo()
    ask = client.audio.transcriptions.create
    for name, value in (("MOST_SECONDS", 0.5), ("MOST_SAMPLES", 8000)):
        with monkeypatch.context() as patch:
            patch.setattr(audio, name, value)
            with pytest.raises(openai.BadRequestError, match=r"holds more than 0.00013.* hours of sound"):
                ask(model="whisper", file=file_of(sounds()[1]))
    with monkeypatch.context() as patch:
        patch.setattr(audio, "MOST_HELD", 0.5)
        with pytest.raises(openai.RateLimitError, match=r"0\.0 hours of sound are being read"):
            ask(model="whisper", file=file_of(sounds()[1]))
    assert ask(model="whisper", file=file_of(sounds()[1])).text


def test_a_full_engine_takes_no_file(hearing):
    engine = ServeEngine(hearing, Limits(waiting=1, running=1))
    with serving({"whisper": engine}) as at, engine.admit(), engine.admit():
        status, message = posted(at, b"x")
        assert status == 429 and "try again later" in message


# Windows in turn --------------------------------------------------------------------------------------------


def job_of(engine: ServeEngine, clip: np.ndarray, **asked) -> tuple[audio.SpeechJob, object]:
    job = audio.SpeechJob(engine, audio.TranscriptionBody(**asked).speech_request("transcribe"))
    job.open(io.BytesIO(file_of(clip)[1]))
    return job, job.submit()


def test_requests_take_turns_window_by_window(hearing):
    engine = ServeEngine(hearing)
    long = np.concatenate([sounds()[2]] * 2)
    first, second = job_of(engine, long, response_format="verbose_json"), job_of(engine, sounds()[0])
    embedded = engine.read(["a"], lambda m, texts: [len(text) for text in texts])
    order = []
    while engine.busy:
        engine.step()
        order += [
            n for n, one in enumerate((first[1], second[1], embedded)) if one.done.is_set() and n not in order
        ]
    assert order == [2, 1, 0] or order == [1, 2, 0]  # who asks for little does not wait for a long file
    (made,) = first[1].wait(0)
    want = hearing.transcribe(heard(long), temperature=FALLBACK, timestamps=True)
    assert made.ids == want.ids and len(made.windows) > 5
    assert [window.logprob for window in made.windows] == [window.logprob for window in want.windows]
    assert first[0].seconds == 0  # its frames are gone


def test_who_has_gone_is_not_read_on(hearing):
    engine = ServeEngine(hearing)
    job, reading = job_of(engine, np.concatenate([sounds()[2]] * 3))
    engine.step()
    job.end(reading)
    engine.step()
    assert not engine.busy and not reading.done.is_set()
    # In the middle of a window, too: it ends at the next token.
    job, reading = job_of(engine, sounds()[1])
    tokens = []
    job.transcriber.cancel = lambda: tokens.append(1) or len(tokens) > 2 or job.gone.is_set()
    job.gone.set()
    engine.step()
    assert len(tokens) < 10 and not engine.busy
    with pytest.raises(ch.ClearheadError, match="the client has gone"):
        reading.wait(0)


def test_a_client_that_leaves_frees_the_engine(hearing):
    engine = ServeEngine(hearing)
    raw = file_of(np.concatenate([sounds()[2]] * 40))[1]
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    body = head + raw + b"\r\n--b--\r\n"
    lines = [b"POST /v1/audio/transcriptions HTTP/1.1", b"Host: 127.0.0.1", b"Content-Length: %d" % len(body)]
    lines.append(b"Content-Type: multipart/form-data; boundary=b")
    with serving({"whisper": engine}) as at:
        host, port = at.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 10) as line:
            line.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            until = time.monotonic() + 20
            while not engine.busy and time.monotonic() < until:
                time.sleep(0.01)
            assert engine.busy
        until = time.monotonic() + 20
        while engine.busy and time.monotonic() < until:
            time.sleep(0.01)
        assert not engine.busy


def test_a_server_that_ends_finishes_what_it_has_begun(hearing):
    engine = ServeEngine(hearing)
    _, reading = job_of(engine, sounds()[2])
    engine.start()
    engine.close(drain=30)
    assert reading.wait(0)[0].text == hearing.transcribe(heard(sounds()[2]), temperature=FALLBACK).text
    engine = ServeEngine(hearing)
    _, reading = job_of(engine, np.concatenate([sounds()[2]] * 40))
    engine.start()
    engine.close(drain=0.1)
    with pytest.raises(BusyError, match="the server has ended"):
        reading.wait(10)


def test_a_slow_window_is_no_standstill(hearing, monkeypatch):
    """`/health` asks when something moved last; each token counts."""
    engine = ServeEngine(hearing)
    job, _ = job_of(engine, sounds()[1])
    engine.moved = -math.inf
    assert not engine.well
    job._cancelled()
    assert engine.well


def test_the_description_of_the_routes_has_the_form(address):
    import urllib.request

    request = urllib.request.Request(f"{address}/openapi.json", headers=KEY)
    with urllib.request.urlopen(request) as answer:
        paths = json.loads(answer.read())["paths"]
    for route, more in (("transcriptions", {"stream", "timestamp_granularities"}), ("translations", set())):
        content = paths[f"/v1/audio/{route}"]["post"]["requestBody"]["content"]
        fields = content["multipart/form-data"]["schema"]["properties"]
        assert {*fields} == {"file", "model", "language", "prompt", "response_format", "temperature"} | more


def test_the_asynchronous_client_asks_for_several_at_once(address, hearing):
    want = [hearing.transcribe(heard(clip), temperature=FALLBACK).text for clip in sounds()]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0) as client:
            made = (
                client.audio.transcriptions.create(model="whisper", file=file_of(clip)) for clip in sounds()
            )
            return [one.text for one in await asyncio.gather(*made)]

    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(asyncio.run(ask())))
    thread.start()
    thread.join()
    assert found == want
