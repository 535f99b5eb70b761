"""Clients that others wrote, against a server: litellm and lm_eval.

pip install --no-deps --target build/clients -r requirements-clients.txt
PYTHONPATH=build/clients:src python -m pytest tests/serve/test_clients.py
"""

from __future__ import annotations

import json

import pytest
import torch.nn.functional as nnf

from clearhead.run.serve.engine import ServeEngine
from tests.serve.served import serving

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def served(writer, talker, reader):
    models = {"writer": writer, "talker": talker, "reader": reader}
    with serving({name: ServeEngine(m) for name, m in models.items()}, keys=["k"]) as address:
        yield address


@pytest.fixture(scope="module", autouse=True)
def _offline():
    """Neither asks for anything beyond this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OPENAI_API_KEY", "k")
        yield


# litellm ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def litellm(_offline):
    found = pytest.importorskip("litellm", reason="litellm is not installed: requirements-clients.txt")
    found.suppress_debug_info, found.telemetry = True, False
    return found


@pytest.fixture
def given(served):
    return {"api_base": f"{served}/v1", "api_key": "k", "num_retries": 0, "max_retries": 0}


def test_litellm_chats_completes_and_embeds(litellm, given, writer, reader):
    asked = {**given, "temperature": 0, "max_tokens": 12}
    text = writer.generate(writer.tokenizer.encode("<user>Hi\n<a>").ids, 12, num_beams=1).text
    whole = litellm.completion("openai/writer", MESSAGES, logprobs=True, top_logprobs=2, **asked)
    assert whole.choices[0].message.content == text
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    chunks = [*litellm.completion("openai/writer", MESSAGES, stream=True, n=2, **asked)]
    for number in range(2):
        own = (chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == number)
        assert "".join(choice.delta.content or "" for choice in own) == text
    made = litellm.text_completion("Hello", "text-completion-openai/writer", best_of=2, **asked)
    assert made.choices[0].text == writer.generate("Hello", 12, num_beams=1).text
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    (token,) = writer.tokenizer.encode("Q").ids
    held = litellm.completion(
        "openai/writer", MESSAGES, response_format=form, **asked | {"max_tokens": 60, "temperature": 1.0}
    )
    assert json.loads(held.choices[0].message.content) in ({"a": True}, {"a": False})
    biased = litellm.completion("openai/writer", MESSAGES, logit_bias={str(token): 100}, **asked)
    assert biased.choices[0].message.content == "Q" * 12
    found = litellm.embedding("openai/reader", ["a", "b c"], **given)
    want = nnf.normalize(reader.embed(["a", "b c"]))
    assert (want - want.new_tensor([one["embedding"] for one in found.data])).abs().max() < 1e-5


def test_litellm_calls_tools_in_both_apis(litellm, given, served):
    """By OpenAI's API, whole and streamed, and by Anthropic's: arguments of the schema."""
    parameters = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tools = [{"type": "function", "function": {"name": "lamp", "parameters": parameters}}]
    asked = {"tools": tools, "tool_choice": "required", "temperature": 1.0, "max_tokens": 100}
    asked |= {"parallel_tool_calls": False, "messages": MESSAGES}
    whole = litellm.completion("openai/talker", **given, **asked)
    chunks = [*litellm.completion("openai/talker", **given, **asked, stream=True)]
    theirs = {**given, "api_base": served}
    messages = litellm.completion("anthropic/talker", **theirs, **asked)
    for answer in (whole, litellm.stream_chunk_builder(chunks), messages):
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "lamp" and type(json.loads(call.function.arguments)["on"]) is bool
        assert answer.choices[0].finish_reason == "tool_calls"


def test_litellm_raises_classes_of_its_own(litellm, given, writer):
    chat = {"model": "openai/writer", "messages": MESSAGES, **given}
    with pytest.raises(litellm.ContextWindowExceededError, match="128 tokens"):
        litellm.completion(**chat, max_tokens=500)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**chat | {"messages": [{"role": "user", "content": "x" * 500}]})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.text_completion("x" * 500, "text-completion-openai/writer", **given)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.embedding("openai/reader", ["x" * 500], **given)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**chat | {"api_key": "other"})
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        litellm.completion(**chat | {"model": "openai/nobody"})
    with pytest.raises(litellm.BadRequestError, match="logit_bias") as error:
        litellm.completion(**chat, logit_bias={"5": 1000})
    assert type(error.value) is litellm.BadRequestError
    full = ServeEngine(writer)
    full.closed = True  # as at the end of a server: it takes no more
    with serving({"writer": full}) as address, pytest.raises(litellm.RateLimitError):
        litellm.completion(**chat | {"api_base": f"{address}/v1"})


# lm_eval ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm_eval(_offline):
    parts = ("models", "api.registry", "api.instance")  # the first tells the second what there is
    reason = "lm_eval is not installed: requirements-clients.txt"
    _, registry, instance = (pytest.importorskip(f"lm_eval.{part}", reason=reason) for part in parts)
    return registry.get_model, instance.Instance


PAIRS = [("Once upon", " a time"), ("a", "b"), ("To be or not", " to be, that is"), ("x" * 60, "yz")]


@pytest.mark.parametrize("options", ["", ",batch_size=3", ",num_concurrent=2"])
def test_lm_eval_reads_the_scores_of_the_library(lm_eval, served, writer, tmp_path, options):
    get_model, instance = lm_eval
    writer.save(tmp_path)
    asked = f"base_url={served}/v1/completions,model=writer,tokenizer={tmp_path},max_length=128,"
    model = get_model("local-completions").create_from_arg_string(
        f"{asked}tokenizer_backend=huggingface{options}"
    )
    rows = [instance("loglikelihood", {}, pair, n) for n, pair in enumerate(PAIRS)]
    for (context, text), (value, greedy) in zip(PAIRS, model.loglikelihood(rows), strict=True):
        score = writer.score(context + text)
        assert value == pytest.approx(sum(score.logprobs[len(context) :]), abs=1e-4)
        written = writer.generate(context, len(text), num_beams=1)
        assert greedy == (written.text == text)
    found = model.loglikelihood_rolling([instance("loglikelihood_rolling", {}, ("to be or not",), 0)])
    whole = writer.score([model.prefix_token_id, *writer.prompt_ids("to be or not")])
    assert found == pytest.approx([sum(whole.logprobs[1:])], abs=1e-4)


def test_lm_eval_has_a_chat_answered(lm_eval, served, writer):
    get_model, instance = lm_eval
    model = get_model("local-chat-completions").create_from_arg_string(
        f"base_url={served}/v1/chat/completions,model=writer"
    )
    history = model.apply_chat_template(MESSAGES)
    text = writer.generate(writer.tokenizer.encode("<user>Hi\n<a>").ids, 12, num_beams=1).text
    for stops in ([], [text[5]]):
        asked = {"until": stops, "max_gen_toks": 12, "do_sample": False}
        (found,) = model.generate_until([instance("generate_until", {}, (history, asked), 0)])
        assert found == (text if not stops else text[: text.index(stops[0])])
