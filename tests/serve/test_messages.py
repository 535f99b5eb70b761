"""`/v1/messages`: what it takes, the chat that it comes to, and what the `anthropic` client makes of it."""

from __future__ import annotations

import asyncio
import json
import typing
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import BaseModel, ValidationError

from clearhead.errors import InputError, RequestError
from clearhead.hub.tokens.chat import ChatTemplate
from clearhead.run.serve import messages
from clearhead.run.serve.answers import template_options
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.messages import Answer, CountBody, MessagesBody
from tests.later import later
from tests.serve.scripted import ScriptedChoices, check_fields, fields_of, read_events, without_ids
from tests.serve.served import serving

anthropic = later("anthropic", reason="needs the client: pip install 'clearhead[dev]'")
TYPES = "anthropic.types"
PLAIN = ChatTemplate(
    "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ tools }}"
)
THINKS = ChatTemplate(PLAIN.source + "{{ m.reasoning_content }}{{ enable_thinking }}")
LEVELS = ChatTemplate(PLAIN.source + "{{ reasoning_effort }}")
ASKED = {"role": "user", "content": "Hi"}
LEAST = {"messages": [ASKED], "max_tokens": 9}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "of a city", "input_schema": WEATHER}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}
TEXT = {"type": "text", "text": "a"}


# What it takes ----------------------------------------------------------------------------------------------


def test_every_field_of_a_request_works_or_asks_for_nothing_or_is_refused_by_name():
    base = {"messages", "model", "output_config", "system", "thinking", "tool_choice", "tools"}
    own = {"max_tokens", "stop_sequences", "stream"}
    fields = fields_of(f"{TYPES}.message_create_params.MessageCreateParamsBase")
    fields |= fields_of(f"{TYPES}.message_create_params.MessageCreateParamsStreaming")
    check_fields(MessagesBody, LEAST, fields, base | own)
    fields |= fields_of(f"{TYPES}.beta.message_create_params.MessageCreateParamsBase") - {"betas"}  # a header
    check_fields(MessagesBody, LEAST, fields, base | own | {"thread"})  # which is refused in words of its own
    fields = fields_of(f"{TYPES}.message_count_tokens_params.MessageCountTokensParams")
    check_fields(CountBody, {"messages": [ASKED]}, fields, base)
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 4}  # earlier clients have them
    assert MessagesBody.model_validate(LEAST | sampling).top_k == 4


WITHIN = [
    ("tool_param.ToolParam", "ClientTool", TOOL),
    ("tool_choice_auto_param.ToolChoiceAutoParam", "ToolChoice", {"type": "auto"}),
    ("tool_choice_any_param.ToolChoiceAnyParam", "ToolChoice", {"type": "any"}),
    ("tool_choice_tool_param.ToolChoiceToolParam", "ToolChoice", {"type": "tool", "name": "weather"}),
    ("tool_choice_none_param.ToolChoiceNoneParam", "ToolChoice", {"type": "none"}),
    ("thinking_config_enabled_param.ThinkingConfigEnabledParam", "Thinking", {"type": "enabled"}),
    ("thinking_config_adaptive_param.ThinkingConfigAdaptiveParam", "Thinking", {"type": "adaptive"}),
    ("thinking_config_disabled_param.ThinkingConfigDisabledParam", "Thinking", {"type": "disabled"}),
    ("output_config_param.OutputConfigParam", "OutputConfig", {}),
    ("json_output_format_param.JSONOutputFormatParam", "OutputFormat", {"type": "json_schema", "schema": {}}),
    ("text_block_param.TextBlockParam", "TextBlock", TEXT),
    ("thinking_block_param.ThinkingBlockParam", "ThinkingBlock", THOUGHT),
    ("tool_use_block_param.ToolUseBlockParam", "ToolUseBlock", USE),
    ("tool_result_block_param.ToolResultBlockParam", "ToolResultBlock", RESULT),
    ("text_block.TextBlock", "TextBlock", TEXT),  # and those of an answer, as they are sent back
    ("thinking_block.ThinkingBlock", "ThinkingBlock", THOUGHT),
    ("tool_use_block.ToolUseBlock", "ToolUseBlock", USE),
]


@pytest.mark.parametrize(("name", "model", "least"), WITHIN, ids=[f"{one[1]} {one[0]}" for one in WITHIN])
def test_every_field_within_a_request(name, model, least):
    fields = fields_of(f"{TYPES}.{name}")
    check_fields(getattr(messages, model), least, fields, fields)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            ("messages", "image"),
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, ("messages", "document")),
        ({"messages": [{"role": "tool", "content": "x"}]}, ("messages", "role", "tool")),
        (
            {"messages": [ASKED, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
            ("redacted",),
        ),
        ({"messages": [{"role": "user", "content": [USE]}]}, ("tool_use",)),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, ("tools", "bash_20250124", "input_schema")),
        ({"tools": [TOOL | {"input_examples": [{"city": "Oslo"}]}]}, ("tools", "input_examples")),
        ({"thinking": {"type": "between_tools"}}, ("thinking", "type")),
        ({"stop": ["x"]}, ("stop",)),
        ({"max_tokens": None}, ("max_tokens",)),
        ({"mcp_servers": [{"type": "url"}]}, ("mcp_servers",)),
        ({"speed": "fast"}, ("speed",)),
    ],
)
def test_what_is_not_served_is_named(given, named):
    with pytest.raises(ValidationError) as refused:
        MessagesBody.model_validate(LEAST | given)
    assert all(name in str(refused.value) for name in named)


# The chat ---------------------------------------------------------------------------------------------------


def chat_of(template: ChatTemplate = PLAIN, **given) -> dict:
    """The chat that a request comes to, without what is not stated."""
    chat = MessagesBody.model_validate(LEAST | given).chat(template)
    return chat.model_dump(exclude_none=True, by_alias=True)


def test_blocks_become_messages():
    called = {
        "id": "t1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    answer = {"role": "assistant", "content": [THOUGHT, TEXT, USE]}
    result = {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "rain"}
    given = [
        ASKED,
        answer,
        {"role": "user", "content": [RESULT, TEXT | {"cache_control": {"type": "ephemeral"}}]},
    ]
    said = {"role": "assistant", "content": "a", "tool_calls": [called]}
    after = [result, {"role": "user", "content": "a"}]
    assert chat_of(messages=given)["messages"] == [ASKED, said, *after]
    system = [TEXT, {"type": "text", "text": "b"}]
    messages = chat_of(THINKS, messages=given, system=system)["messages"]
    first = {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert messages == [first, ASKED, said | {"reasoning_content": "hm"}, *after]
    only = chat_of(
        messages=[ASKED, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
    )
    assert only["messages"][1:] == [{"role": "assistant", "content": None, "tool_calls": [called]}, result]
    assert chat_of(system="Be brief")["messages"][0] == {"role": "system", "content": "Be brief"}
    later = [ASKED, {"role": "system", "content": [TEXT]}]
    assert chat_of(messages=later)["messages"] == [ASKED, {"role": "system", "content": "a"}]


@pytest.mark.parametrize(
    ("result", "content"),
    [
        (RESULT | {"is_error": True}, "Error: rain"),
        (RESULT | {"is_error": True, "content": "error 5"}, "error 5"),
        (RESULT | {"content": [TEXT]}, "a"),
        ({"type": "tool_result", "tool_use_id": "t1"}, ""),
    ],
)
def test_results_of_tools(result, content):
    messages = [ASKED, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    assert chat_of(messages=messages)["messages"][-1]["content"] == content


def test_what_cannot_be_answered_is_refused():
    with pytest.raises(InputError, match='"t1" and no such tool_use'):
        chat_of(messages=[{"role": "user", "content": [RESULT]}])
    with pytest.raises(InputError, match="the last of messages is the assistant's"):
        chat_of(messages=[ASKED, {"role": "assistant", "content": "a"}])
    with pytest.raises(RequestError, match="thread: conversations are not kept") as refused:
        chat_of(thread={"type": "create"})
    assert refused.value.code == "thread_unsupported_request"
    for choice in ({"type": "tool"}, {"type": "auto", "name": "weather"}):
        with pytest.raises(InputError, match=r"tool_choice\.name"):
            chat_of(tools=[TOOL], tool_choice=choice)


def test_tools_formats_and_options_are_those_of_a_chat():
    tools = [
        {
            "type": "function",
            "function": {"name": "weather", "description": "of a city", "parameters": WEATHER},
        }
    ]
    assert chat_of(tools=[TOOL])["tools"] == tools
    for given, wanted in (
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ):
        chat = chat_of(tools=[TOOL], tool_choice=given | {"disable_parallel_tool_use": True})
        assert (chat["tool_choice"], chat["parallel_tool_calls"]) == (wanted, False)
    format = chat_of(output_config={"format": {"type": "json_schema", "schema": WEATHER}})["response_format"]
    assert format == {"type": "json_schema", "json_schema": {"name": "answer", "schema": WEATHER}}
    assert chat_of(temperature=0.5, top_k=3)["top_k"] == 3


def test_thinking_is_said_as_the_template_takes_it():
    def options(template, **given):
        return template_options(template, MessagesBody.model_validate(LEAST | given).chat(template))

    enabled, disabled = {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}
    assert options(THINKS, thinking=enabled) == {"enable_thinking": True}
    assert options(THINKS, thinking=disabled) == {"enable_thinking": False}
    assert options(PLAIN, thinking=disabled) == options(PLAIN, thinking={"type": "adaptive"}) == {}
    assert options(LEVELS, output_config={"effort": "low"}) == {"reasoning_effort": "low"}
    assert options(PLAIN, output_config={"effort": "high"}) == {}
    with pytest.raises(InputError, match="thinking: this model does not think"):
        options(PLAIN, thinking=enabled)
    with pytest.raises(InputError, match="effort"):
        options(PLAIN, output_config={"effort": "low"})


# The answer -------------------------------------------------------------------------------------------------


def answer_of(reason: str = "tool_calls", given=None, **script) -> Answer:
    return Answer(
        MessagesBody.model_validate(LEAST | (given or {})), ScriptedChoices(reason=reason, **script)
    )


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_a_stream_tells_the_answer_that_is_given_whole(display):
    from anthropic.lib.streaming._messages import accumulate_event
    from anthropic.types import Message

    given = {"thinking": {"type": "adaptive", "display": display}}
    whole = asyncio.run(answer_of(given=given).whole(None))
    Message.model_validate(whole)  # strictly: the client itself takes anything
    events = read_events(answer_of(given=given).stream())
    message, buffers = None, {}
    for event in events:  # the client's own reading of the events
        if event["type"] != "ping":
            message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    found = message.to_dict()
    for block in found["content"]:
        block.pop("parsed_output", None)
    assert without_ids(found) == without_ids(whole)
    kinds = ["thinking", "text", "tool_use", "tool_use", "text"]
    assert [block["type"] for block in whole["content"]] == kinds
    assert whole["content"][0]["thinking"] == ("" if display == "omitted" else "It is about weather.")
    assert [block.get("input") for block in whole["content"]] == [None, None, {"city": "Oslo"}, {}, None]
    assert whole["stop_reason"] == "tool_use"
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert whole["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 4},
    }


@pytest.mark.parametrize(
    ("reason", "stopped_by", "most", "wanted"),
    [
        ("stop", None, 9, ("end_turn", None)),
        ("stop", "END", 9, ("stop_sequence", "END")),
        ("stop", "<|turn|>", 9, ("end_turn", None)),  # of the model's own settings
        ("length", None, 9, ("max_tokens", None)),
        ("length", None, 90, ("model_context_window_exceeded", None)),
    ],
)
def test_why_an_answer_has_ended(reason, stopped_by, most, wanted):
    given = {"stop_sequences": ["END"], "max_tokens": most}
    whole = asyncio.run(answer_of(reason, given, stopped_by=stopped_by).whole(None))
    assert (whole["stop_reason"], whole["stop_sequence"]) == wanted


def test_arguments_that_were_cut_are_none():
    from clearhead.hub.tokens.answers import Part

    cut = [Part("call", "weather", 0), Part("arguments", '{"city": "Os', 0)]
    assert asyncio.run(answer_of("length", parts=cut).whole(None))["content"][0]["input"] == {}


def test_a_failure_in_a_stream_is_an_event():
    answer = answer_of(error=InputError("the engine has ended"))
    last = read_events(answer.stream())[-1]
    assert last == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "the engine has ended"},
    }
    assert answer.choices.cancelled


# The client -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(talker):
    with serving({"talker": ServeEngine(talker, Limits(block=8))}, keys=["k"]) as at:
        yield at


@pytest.fixture
def client(address):
    return anthropic.Anthropic(base_url=address, api_key="k", max_retries=0)


SAMPLING = {"extra_body": {"temperature": 0}}
GIVEN = {"model": "talker", "max_tokens": 12, **SAMPLING}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
LOOK_UP = TOOL | {"input_schema": CITY}


def call(address: str, path: str, body: dict | None = None, **headers: str) -> tuple[int, dict]:
    """Ask as a client of any kind does."""
    raw = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}{path}", raw, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_message_is_the_answer_of_a_chat(client, address):
    messages = [{"role": "system", "content": "Be brief"}, ASKED]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    chat = call(address, "/v1/chat/completions", body, Authorization="Bearer k")[1]
    text = chat["choices"][0]["message"]["content"]
    made = client.messages.create(messages=[ASKED], system="Be brief", **GIVEN)
    assert [block.text for block in made.content] == [text]
    assert (made.stop_reason, made.usage.output_tokens) == ("max_tokens", 12)
    read = made.usage.input_tokens + made.usage.cache_read_input_tokens
    assert read == chat["usage"]["prompt_tokens"]
    system = [{"type": "text", "text": "Be brief"}]
    counted = client.messages.count_tokens(model="talker", messages=[ASKED], system=system)
    assert counted.input_tokens == read
    with client.messages.stream(
        messages=[ASKED], system="Be brief", **GIVEN, stop_sequences=[text[-1]]
    ) as stream:
        heard = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert heard == final.content[0].text == text[: text.index(text[-1])]
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", text[-1])
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == read


def test_the_asynchronous_client(address):
    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=address, api_key="k", max_retries=0) as client:
            made = await client.messages.create(messages=[ASKED], **GIVEN)
            async with client.messages.stream(messages=[ASKED], **GIVEN) as stream:
                return [made.content[0].text, await stream.get_final_text()]

    with ThreadPoolExecutor(1) as apart:  # this thread may have a loop of its own, of an earlier test
        first, second = apart.submit(asyncio.run, ask()).result()
    assert first == second


def test_structured_outputs(client):
    class Light(BaseModel):
        colour: typing.Literal["red", "green"]
        bright: bool

    made = client.messages.parse(messages=[ASKED], output_format=Light, **GIVEN | {"max_tokens": 60})
    assert isinstance(made.parsed_output, Light)


def test_tools_are_called_and_their_results_are_read(client, address):
    given = {**GIVEN, "max_tokens": 200, "tools": [LOOK_UP]}
    any_one = {"type": "any", "disable_parallel_tool_use": True}  # weights that are random call for ever
    made = client.messages.create(**given, messages=[ASKED], tool_choice=any_one)
    use = made.content[0]
    assert (use.type, use.name, made.stop_reason) == ("tool_use", "weather", "tool_use")
    assert use.input["city"] in ("Oslo", "Rome")
    named = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    with client.messages.stream(**given, messages=[ASKED], tool_choice=named) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(parts)) == final.content[0].input == use.input
    assert len(final.content) == 1

    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
    messages = [
        ASKED,
        made.to_param() if hasattr(made, "to_param") else made,
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(**GIVEN, tools=[LOOK_UP], tool_choice={"type": "none"}, messages=messages)
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": json.dumps(one.input)}}
        for one in made.content
    ]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    messages = [ASKED, called, {"role": "tool", "tool_call_id": use.id, "content": "rain"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    chat = call(address, "/v1/chat/completions", body, Authorization="Bearer k")[1]
    assert after.content[0].text == chat["choices"][0]["message"]["content"]


def test_the_tool_runner_of_the_beta_client(client):
    asked = []

    @anthropic.beta_tool
    def weather(city: typing.Literal["Oslo", "Rome"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "rain"

    choice = {"type": "any", "disable_parallel_tool_use": True}
    given = {"messages": [ASKED], "tools": [weather], "tool_choice": choice, "max_iterations": 2}
    made = list(client.beta.messages.tool_runner(**GIVEN | {"max_tokens": 200}, **given))
    assert [message.content[0].input["city"] for message in made] == asked
    assert len(asked) == 2


def test_a_full_server_says_so_as_the_client_reads_it(talker):
    engine = ServeEngine(talker, Limits(waiting=1, running=1))
    engine.start = lambda: None  # nothing moves
    with serving({"talker": engine}, drain=0) as at:
        engine.submit("x")
        engine.submit("x")
        client = anthropic.Anthropic(base_url=at, api_key="k", max_retries=0)
        with pytest.raises(anthropic.RateLimitError) as refused:
            client.messages.create(messages=[ASKED], **GIVEN)
        assert refused.value.type == "rate_limit_error"
        engine.waiting.clear()


def test_more_than_the_context_holds_ends_with_it(client, talker):
    full = [{"role": "user", "content": "x" * 1990}]
    with_bans = {"extra_body": {"temperature": 0, "min_tokens": 100}}  # it does not end by itself
    made = client.messages.create(model="talker", max_tokens=8000, messages=full, **with_bans)
    assert made.stop_reason == "model_context_window_exceeded"
    read = made.usage.input_tokens + made.usage.cache_read_input_tokens
    assert read + made.usage.output_tokens == talker.max_length
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        client.messages.create(messages=[{"role": "user", "content": "x" * 3000}], **GIVEN)


def test_errors_have_anthropic_s_form(client, address):
    for change, error, kind in (
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"tools": [{"type": "bash_20250124"}]}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
        ({"output_config": {"effort": "low"}}, anthropic.BadRequestError, "invalid_request_error"),
    ):
        with pytest.raises(error) as refused:
            client.messages.create(**{"messages": [ASKED], **GIVEN, **change})
        assert refused.value.type == kind
        assert refused.value.api_message
    stranger = anthropic.Anthropic(base_url=address, api_key="no", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        stranger.messages.create(messages=[ASKED], **GIVEN)
    assert refused.value.type == "authentication_error"
    assert call(address, "/v1/messages/batches", {}, Authorization="Bearer k")[1]["type"] == "error"


def test_keys_come_as_x_api_key_too(address):
    count = {"messages": [ASKED]}
    path = "/v1/messages/count_tokens"
    assert call(address, path, count, **{"x-api-key": "k", "anthropic-version": "2023-06-01"})[0] == 200
    assert call(address, path, count, **{"x-api-key": "k", "Authorization": "Bearer no"})[0] == 200
    for headers in ({"x-api-key": "no"}, {"x-api-key": ""}, {}):
        status, found = call(address, path, count, **headers)
        assert (status, found["error"]["type"]) == (401, "authentication_error")


def test_models_are_listed_as_the_client_reads_them(client):
    (model,) = client.models.list()
    assert (model.id, model.type, client.models.retrieve("talker").display_name) == (
        "talker",
        "model",
        "talker",
    )
