"""Images over HTTP: answers are those of `chat`, and an image is read in its own request alone."""

from __future__ import annotations

import base64
import io
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

import clearhead as ch
from clearhead.learn.tasks import images
from clearhead.learn.tasks.generation import chat_ids
from clearhead.run.serve.app import make_server
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.llava import PICTURED, TOKEN, directory, image, sized_directory, tiled_directory


@pytest.fixture(scope="module")
def m(tmp_path_factory: pytest.TempPathFactory) -> ch.Model:
    return ch.load(directory(tmp_path_factory.mktemp("llava")))


@pytest.fixture(scope="module")
def client(m: ch.Model):
    app = make_server({"m": ServeEngine(m, Limits(block=8, chunk=8))}, keys=["a", "b"])
    headers = {"Authorization": "Bearer a"}
    with TestClient(app, base_url="http://127.0.0.1", headers=headers) as found:
        yield found


def uri(picture: np.ndarray[Any, Any]) -> str:
    raw = io.BytesIO()
    Image.fromarray(picture).save(raw, "PNG")
    return f"data:image/png;base64,{base64.b64encode(raw.getvalue()).decode()}"


def talk(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def pictured(picture: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    return talk({"type": "image_url", "image_url": {"url": uri(picture), "detail": "auto"}})


def asked(client: TestClient, messages: Any, key: str = "a", **more: Any) -> Any:
    body = {"messages": messages, "max_tokens": 9, "temperature": 0, **more}
    return client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def test_answers_are_those_of_chat_and_prefixes_are_by_pixels(client: TestClient, m: ch.Model) -> None:
    pictures = [image(seed) for seed in (1, 2)]
    want = [m.chat(talk({"type": "image", "image": picture}), 9) for picture in pictures]
    assert want[0].text != want[1].text
    # The same image again is found in the pool, with its tokens; not another image of equal ids, nor the same
    # image by another key.
    for number, key, cached in ((0, "a", False), (1, "a", False), (0, "a", True), (0, "b", False)):
        reply = asked(client, pictured(pictures[number]), key).json()
        assert reply["choices"][0]["message"]["content"] == want[number].text
        found = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found >= 16 if cached else found < 8, (number, key, found)


def test_several_at_once_and_in_a_stream(
    client: TestClient, m: ch.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = [image(3), image(4)]
    parts = [{"type": "image_url", "image_url": {"url": uri(picture)}} for picture in pictures]
    want = m.chat(talk(*({"type": "image", "image": picture} for picture in pictures)), 9).text
    calls = []
    encode = m.image_encoder.forward  # type: ignore[union-attr]
    monkeypatch.setattr(m.image_encoder, "forward", lambda pixels: calls.append(pixels) or encode(pixels))
    reply = asked(client, talk(*parts), n=2).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == [want, want]
    assert len(calls) == 1  # of both choices
    body = {"messages": talk(*parts), "max_tokens": 9, "temperature": 0, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as lines:
        events = [json.loads(line[6:]) for line in lines.iter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == want


def test_an_image_in_tiles_is_answered_as_in_a_chat(tmp_path: pathlib.Path) -> None:
    m, picture = ch.load(tiled_directory(tmp_path)), image(7)
    parts = talk({"type": "image", "image": picture})
    want, ids = m.chat(parts, 9), chat_ids(m, parts, {})
    assert ids.count(TOKEN) == 4 * (6 + 1)  # of two rows of three tiles, and the whole image
    app = make_server({"m": ServeEngine(m, Limits(block=8, chunk=8))}, keys=["a"])
    with TestClient(app, base_url="http://127.0.0.1") as client:
        reply = asked(client, pictured(picture)).json()
    assert reply["choices"][0]["message"]["content"] == want.text
    assert reply["usage"]["prompt_tokens"] == len(ids)


def test_images_of_any_size_keep_their_positions(tmp_path: pathlib.Path) -> None:
    """In chunks, next to texts and each other, with draft tokens, and found in the pool: as alone."""
    m, text = ch.load(sized_directory(tmp_path)), f"USER: {PICTURED}What? {PICTURED}And? ASSISTANT:"
    prompts: list[Any] = [
        ch.ImagePrompt(text, [image(1), image(2, 40, 9)]),
        "ab ab ab ab ab ab",
        ch.ImagePrompt(text, [image(1), image(3, 9, 50)]),
    ]
    want = [m.generate(each, 16, logprobs=True) for each in prompts]
    assert want[0].logprobs != pytest.approx(want[2].logprobs, abs=1e-3)
    for limits in (Limits(block=8, chunk=8), Limits(block=8, chunk=8, lookup=4)):
        engine = ServeEngine(m, limits)
        for _ in range(2):
            served = [engine.submit(each, {"max_new_tokens": 16, "logprobs": True}) for each in prompts]
            while engine.busy:
                engine.step()
            for given, alone in zip(served, want):
                reply = given.wait(0)
                assert reply.ids == alone.ids and reply.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    app = make_server({"m": ServeEngine(m, Limits(block=8, chunk=8))}, keys=["a"])
    with TestClient(app, base_url="http://127.0.0.1") as client:
        reply = asked(client, pictured(image(7))).json()
    parts = talk({"type": "image", "image": image(7)})
    assert reply["choices"][0]["message"]["content"] == m.chat(parts, 9).text
    assert reply["usage"]["prompt_tokens"] == len(chat_ids(m, parts, {}))


def test_a_chunk_of_one_image_token_is_read_as_one(m: ch.Model) -> None:
    prompt = ch.ImagePrompt([5, TOKEN], [image(6)])  # 17 tokens: the last chunk is the end of an image
    engine = ServeEngine(m, Limits(block=8, chunk=8))
    served = [engine.submit(each, {"max_new_tokens": 8}) for each in (prompt, [5, 6, 7], prompt)]
    while engine.busy:
        engine.step()
    want = m.generate([prompt, [5, 6, 7], prompt], 8)
    assert [seq.wait(0).ids for seq in served] == [one.ids for one in want]


def test_ids_alone_never_lead_to_an_image(client: TestClient, m: ch.Model) -> None:
    """Another's image has just been read, and is in the pool: its ids, given without it, are refused."""
    held = pictured(image(5))
    assert asked(client, held).status_code == 200
    ids = client.post("/tokenize", json={"prompt": "USER: <image>\nWhat is this? ASSISTANT:"}).json()[
        "tokens"
    ]
    whole = [one for given in ids for one in ([given] * 16 if given == TOKEN else [given])]
    assert whole.count(TOKEN) == 16
    for prompt in (whole, ids, [TOKEN], "USER: <image>\nWhat is this? ASSISTANT:"):
        reply = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
        assert reply.status_code == 400 and "image token" in reply.json()["error"]["message"]
    for token in (-1, len(whole) * -1, m.config.vocab_size, m.config.vocab_size + 1, 2**31 - 1):
        reply = client.post("/v1/completions", json={"prompt": [5, token], "max_tokens": 2})
        assert reply.status_code == 400
    stuffed = [{"role": "user", "content": "<image>\nWhat is this?"}]
    for messages in (stuffed, [*held, *stuffed]):  # typed, with no image of its own
        reply = asked(client, messages)
        assert reply.status_code == 400 and "image token" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image", "image": "/etc/passwd"}, "send image_url"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "not fetched"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "not fetched"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "not fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "no base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}, "no base64"),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            "cannot be read as an image",
        ),
        ({"type": "image_url", "image_url": {"url": uri(image(1)), "detail": "high"}}, "detail"),
        ({"type": "image_url", "image_url": {"url": uri(image(1)), "size": 2}}, "size"),
        ({"type": "image_url", "image_url": [1]}, "url"),
        ({"type": "image_url"}, "without its image_url"),
        ({"type": "image"}, "send image_url"),
    ],
)
def test_other_images_are_refused(client: TestClient, part: dict[str, Any], words: str) -> None:
    reply = asked(client, talk(part))
    assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text


def test_images_of_one_request_are_bounded_together(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image more is refused before it is decoded."""
    monkeypatch.setattr(images, "MOST_PIXELS", 20 * 31 + 1)
    part = {"type": "image_url", "image_url": {"url": uri(image(1))}}
    assert asked(client, talk(part)).status_code == 200
    reply = asked(client, talk(part, part))
    assert reply.status_code == 400 and "at most 1 are read" in reply.json()["error"]["message"]


def test_too_many_images_and_looks_inside_are_refused(client: TestClient) -> None:
    part = {"type": "image_url", "image_url": {"url": uri(image(1))}}
    reply = asked(client, talk(*[part] * 20))
    assert reply.status_code == 400 and "maximum context length" in reply.json()["error"]["message"]
    reply = asked(client, talk(part), inside=["lens"])
    assert reply.status_code == 400 and "this request has images" in reply.json()["error"]["message"]
