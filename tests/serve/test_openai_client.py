"""The `openai` client, as it is installed from the package index."""

from __future__ import annotations

import asyncio
import typing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.nn.functional as nnf
from pydantic import BaseModel

from clearhead.run.serve.engine import ServeEngine
from tests.later import later
from tests.serve.served import serving

openai = later("openai", reason="needs the openai client: pip install 'clearhead[dev]'")
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def served(writer, reader):
    engines = {"writer": ServeEngine(writer), "reader": ServeEngine(reader)}
    with serving(engines, keys=["k"]) as address:
        yield address, writer, reader


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served[0]}/v1", api_key="k", max_retries=0)


def wanted(writer) -> str:
    return writer.generate(writer.tokenizer.encode("<user>Hi\n<a>").ids, 12, num_beams=1).text


def test_chat_whole_streamed_and_with_the_helper(client, served):
    given = {"model": "writer", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    text = wanted(served[1])
    whole = client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == text
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    with client.chat.completions.stream(**given, stop=text[-1:]) as stream:
        final = stream.get_final_completion()  # which refuses a text that was cut at its length
    assert final.choices[0].message.content == text[: text.index(text[-1])]
    assert final.choices[0].finish_reason == "stop"


def test_completions_models_and_embeddings(client, served):
    made = client.completions.create(model="writer", prompt="Hello", max_tokens=5, temperature=0, logprobs=1)
    assert made.choices[0].text == served[1].generate("Hello", 5, num_beams=1).text
    assert [one.id for one in client.models.list()] == ["writer", "reader"]
    found = client.embeddings.create(model="reader", input=["a", "b c"])  # asks for base64
    want = nnf.normalize(served[2].embed(["a", "b c"])).tolist()
    pairs = [(a, b) for row, mine in zip(found.data, want) for a, b in zip(row.embedding, mine, strict=True)]
    assert max(abs(a - b) for a, b in pairs) < 1e-5


def test_the_asynchronous_client(served):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served[0]}/v1", api_key="k", max_retries=0) as client:
            given = {"model": "writer", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
            made = await asyncio.gather(*(client.chat.completions.create(**given) for _ in range(4)))
            stream = await client.chat.completions.create(**given, stream=True)
            chunks = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return [*(one.choices[0].message.content for one in made), "".join(chunks)]

    with ThreadPoolExecutor(1) as apart:  # this thread may have a loop of its own, of an earlier test
        assert apart.submit(asyncio.run, ask()).result() == [wanted(served[1])] * 5


class Light(BaseModel):
    colour: typing.Literal["red", "green"]
    bright: bool


def test_structured_outputs_by_parse_and_in_a_stream(client):
    given = {"model": "writer", "messages": MESSAGES, "max_tokens": 60, "response_format": Light, "seed": 1}
    made = client.chat.completions.parse(**given)
    assert isinstance(made.choices[0].message.parsed, Light)
    assert made.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**given) as stream:
        chunks = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == made.choices[0].message.parsed
    assert chunks == made.choices[0].message.content
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**given | {"max_tokens": 5})


def test_fields_of_the_client_and_of_vllm(client, served):
    """Biases, several choices in a stream, the best of several, lists of stops; others by `extra_body`."""
    _, writer, reader = served
    given = {"model": "writer", "prompt": "Hello", "max_tokens": 12, "temperature": 1.0, "seed": 4}
    alone = {"temperature": 1.0, "num_beams": 1}
    (token,) = writer.tokenizer.encode("Q").ids
    made = client.completions.create(**given | {"logit_bias": {str(token): 100}})
    assert made.choices[0].text == "Q" * 12
    for options, wanted in (
        ({"stop": "9"}, {"stop": "9"}),
        ({"stop": ["9", "r"]}, {"stop": ["9", "r"]}),
        ({"extra_body": {"min_p": 0.3, "top_k": -1}}, {"min_p": 0.3}),
        ({"extra_body": {"top_k": 3}}, {"top_k": 3}),
    ):
        made = client.completions.create(**given, **options)
        assert made.choices[0].text == writer.generate("Hello", 12, seed=4, **alone, **wanted).text
    texts = [writer.generate("Hello", 12, seed=4 + n, **alone).text for n in range(3)]
    streamed = dict.fromkeys(range(3), "")
    for chunk in client.completions.create(**given, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert [*streamed.values()] == texts
    chat = {"model": "writer", "messages": MESSAGES, "max_tokens": 6, "seed": 4}
    said = [choice.message.content for choice in client.chat.completions.create(**chat, n=2).choices]
    streamed = dict.fromkeys(range(2), "")
    for chunk in client.chat.completions.create(**chat, n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [*streamed.values()] == said
    best = client.completions.create(**given, best_of=3, n=1)
    assert best.choices[0].text in texts and best.usage.completion_tokens == 36
    ids = [reader.tokenizer.encode(text).ids for text in ("a", "b c")]
    found = client.embeddings.create(model="reader", input=ids, dimensions=4)
    want = nnf.normalize(reader.embed(["a", "b c"])[:, :4])
    assert (want - want.new_tensor([one.embedding for one in found.data])).abs().max() < 1e-6


def test_an_answer_is_taken_back_as_a_message(client):
    first = client.chat.completions.create(model="writer", messages=MESSAGES, max_tokens=4)
    more = [
        *MESSAGES,
        first.choices[0].message,
        {"role": "user", "content": [{"type": "text", "text": "On"}]},
    ]
    assert client.chat.completions.create(model="writer", messages=more, max_tokens=2).usage.total_tokens > 20


def test_errors_are_errors(client, served):
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.chat.completions.create(model="writer", messages=MESSAGES, logit_bias={"1": 200})
    with pytest.raises(openai.NotFoundError, match="writer"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served[0]}/v1", api_key="no", max_retries=0).models.list()
