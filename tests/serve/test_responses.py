"""`/v1/responses`: what it takes, the chat that it comes to, and what the `openai` client makes of it."""

from __future__ import annotations

import asyncio
import json
import typing

import pytest
from pydantic import BaseModel, ValidationError

from clearhead.errors import InputError, RequestError
from clearhead.hub.tokens.chat import ChatTemplate
from clearhead.run.serve import responses, responses_body
from clearhead.run.serve.answers import template_options
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.protocol import ChatBody
from clearhead.run.serve.responses import Answer, Kept, Memory
from clearhead.run.serve.responses_body import InputBody, ResponsesBody
from tests.later import later
from tests.serve.scripted import ScriptedChoices, check_fields, fields_of, read_events, without_ids
from tests.serve.served import serving

openai = later("openai", reason="needs the openai client: pip install 'clearhead[dev]'")
TYPES = "openai.types.responses"
PLAIN = ChatTemplate(
    "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ tools }}"
)
THINKS = ChatTemplate(PLAIN.source + "{{ m.reasoning_content }}{{ enable_thinking }}")
LEVELS = ChatTemplate(PLAIN.source + "{{ reasoning_effort }}")
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": WEATHER,
    "strict": True,
}


CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}
THOUGHT |= {"content": [{"type": "reasoning_text", "text": "hm"}]}
NAMED = {"type": "function", "name": "time"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}


# What it takes ----------------------------------------------------------------------------------------------


def test_every_field_of_a_request_works_or_asks_for_nothing_or_is_refused_by_name():
    base = {
        "input",
        "instructions",
        "model",
        "parallel_tool_calls",
        "previous_response_id",
        "reasoning",
        "text",
    }
    base |= {"tool_choice", "tools", "truncation"}
    own = {
        "include",
        "max_output_tokens",
        "metadata",
        "prompt_cache_options",
        "store",
        "stream",
        "stream_options",
    }
    own |= {"temperature", "top_logprobs", "top_p"}
    fields = fields_of(f"{TYPES}.response_create_params.ResponseCreateParamsBase")
    fields |= fields_of(f"{TYPES}.response_create_params.ResponseCreateParamsStreaming")
    check_fields(ResponsesBody, {"input": "x"}, fields, base | own)
    check_fields(
        InputBody, {"input": "x"}, fields_of(f"{TYPES}.input_token_count_params.InputTokenCountParams"), base
    )


ASKED, SAID = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
SCHEMA = "response_format_text_json_schema_config_param.ResponseFormatTextJSONSchemaConfigParam"
WITHIN = [
    ("function_tool_param.FunctionToolParam", "FunctionTool", TOOL),
    ("response_function_tool_call_param.ResponseFunctionToolCallParam", "CallItem", CALL),
    ("response_input_item_param.FunctionCallOutput", "ResultItem", RESULT),
    ("response_reasoning_item_param.ResponseReasoningItemParam", "ReasoningItem", THOUGHT),
    ("response_output_message_param.ResponseOutputMessageParam", "MessageItem", SAID),
    ("easy_input_message_param.EasyInputMessageParam", "MessageItem", ASKED),
    ("response_input_item_param.Message", "MessageItem", ASKED),
    ("response_output_text_param.ResponseOutputTextParam", "TextPart", {"type": "output_text", "text": "x"}),
    ("response_input_text_param.ResponseInputTextParam", "TextPart", {"type": "input_text", "text": "x"}),
    ("response_text_config_param.ResponseTextConfigParam", "TextConfig", {}),
    (SCHEMA, "TextFormat", {"type": "json_schema", "schema": {}}),
    ("response_create_params.PromptCacheOptions", "CacheOptions", {}),
    ("response_create_params.StreamOptions", "EventOptions", {}),
    ("tool_choice_allowed_param.ToolChoiceAllowedParam", "AllowedTools", ALLOWED),
    ("tool_choice_function_param.ToolChoiceFunctionParam", "FunctionChoice", NAMED),
]


@pytest.mark.parametrize(("name", "model", "least"), WITHIN, ids=[f"{one[1]} {one[0]}" for one in WITHIN])
def test_every_field_within_a_request(name, model, least):
    fields = fields_of(f"{TYPES}.{name}")
    check_fields(
        getattr(responses_body, model),
        least,
        fields,
        fields - {"comparison_response_id"},
    )


def test_the_parts_of_reasoning_are_known():
    fields = fields_of("openai.types.shared_params.reasoning.Reasoning")
    check_fields(responses_body.Reasoning, {}, fields, fields)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"input": [{"type": "web_search_call", "id": "a"}]}, ("input", "web_search_call")),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, ("input", "input_image")),
        ({"input": [{"role": "tool", "content": "x"}]}, ("input", "role")),
        ({"input": [THOUGHT | {"encrypted_content": "x"}]}, ("encrypted_content",)),
        ({"tools": [{"type": "web_search"}]}, ("tools", "type", "function")),
        ({"tools": [TOOL | {"defer_loading": True}]}, ("tools", "defer_loading")),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, ("tool_choice", "mcp")),
        ({"text": {"verbosity": "low"}}, ("text", "verbosity")),
        ({"reasoning": {"summary": "detailed"}}, ("reasoning", "summary")),
        ({"stream_options": {"include_obfuscation": True}}, ("include_obfuscation",)),
        ({"prompt_cache_options": {"prewarm": True}}, ("prewarm",)),
        ({"include": ["all"]}, ("include",)),
        ({"metadata": {"a": "b" * 513}}, ("metadata",)),
        ({"max_tokens": 5}, ("max_tokens",)),
        ({"n": 2}, ("n",)),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(given, named):
    with pytest.raises(ValidationError) as refused:
        ResponsesBody.model_validate({"input": "x", **given})
    assert all(name in str(refused.value) for name in named)


# The chat ---------------------------------------------------------------------------------------------------


def chat_of(template: ChatTemplate = PLAIN, **given) -> dict:
    """The chat that a request comes to, without what is not stated."""
    body = ResponsesBody.model_validate({"input": "x", **given})
    return body.chat(responses_body.plain_items(body.input), template).model_dump(
        exclude_none=True, by_alias=True
    )


def test_items_become_messages():
    said = {"type": "message", "role": "assistant", "id": "m", "status": "completed"}
    said |= {"content": [{"type": "output_text", "text": "I look.", "annotations": []}]}
    two = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [{"role": "user", "content": "Hi"}, THOUGHT, said, CALL, RESULT, {"role": "user", "content": two}]
    asked, answered = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I look."}
    tool = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain"}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    called = answered | {"tool_calls": [CALLED]}
    assert chat_of(input=items)["messages"] == [asked, called, tool, parts]
    with_thought = called | {"reasoning_content": "hm"}
    assert chat_of(THINKS, input=items, instructions="Be brief")["messages"] == [
        {"role": "system", "content": "Be brief"}, asked, with_thought, tool, parts,
    ]  # fmt: skip
    only = [{"role": "user", "content": "Hi"}, CALL, CALL | {"call_id": "c2"}]
    assert chat_of(input=only)["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [CALLED, CALLED | {"id": "c2"}]}
    ] or chat_of(input=only)["messages"][1]["tool_calls"] == [CALLED, CALLED | {"id": "c2"}]
    twice = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat_of(input=[{"role": "user", "content": "x"}, *twice])["messages"][1:] == twice
    with pytest.raises(InputError, match='"c1" and no such call'):
        chat_of(input=[{"role": "user", "content": "x"}, RESULT])
    with pytest.raises(InputError, match="input is empty"):
        chat_of(input=[])


def test_tools_formats_and_options_are_those_of_a_chat():
    functions = {
        name: {"name": name, "description": "of a city", "parameters": WEATHER}
        for name in ("weather", "time")
    }
    tools = [{"type": "function", "function": one} for one in functions.values()]
    given = [TOOL, TOOL | {"name": "time"}]
    chat = chat_of(tools=given, tool_choice="required", parallel_tool_calls=False, temperature=0.5, seed=3)
    assert (chat["tools"], chat["tool_choice"], chat["parallel_tool_calls"]) == (tools, "required", False)
    assert (chat["temperature"], chat["seed"]) == (0.5, 3)
    named = NAMED
    assert chat_of(tools=given, tool_choice=named)["tool_choice"] == {
        "type": "function",
        "function": {"name": "time"},
    }
    allowed = ALLOWED
    chat = chat_of(tools=given, tool_choice=allowed)
    choice = ChatBody.model_validate(chat).choice_of_tools()
    assert ([tool.name for tool in choice.tools], choice.choice) == (["time"], "required")
    with pytest.raises(RequestError, match="allows time, and tools has weather"):
        ChatBody.model_validate(chat_of(tools=given[:1], tool_choice=allowed)).choice_of_tools()
    stated = {"type": "json_schema", "name": "place", "schema": WEATHER, "strict": True}
    format = chat_of(text={"format": stated})["response_format"]
    assert format == {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": WEATHER, "strict": True},
    }
    assert chat_of(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    with pytest.raises(InputError, match=r"text\.format\.schema"):
        chat_of(text={"format": {"type": "json_schema", "name": "x"}})


def test_effort_is_said_as_the_template_takes_it():
    def options(template, effort):
        body = ResponsesBody(input="x", reasoning={"effort": effort, "summary": "auto"})
        return template_options(template, body.chat(responses_body.plain_items("x"), template))

    assert options(LEVELS, "low") == {"reasoning_effort": "low"}
    assert options(THINKS, "low") == {"enable_thinking": True}
    assert options(THINKS, "none") == {"enable_thinking": False}
    assert options(PLAIN, None) == options(PLAIN, "none") == {}
    with pytest.raises(InputError, match="reasoning_effort"):
        options(PLAIN, "low")


# The answer -------------------------------------------------------------------------------------------------


def events_of(choices: ScriptedChoices, keep=lambda response: None, **given) -> list[dict]:
    """The events of an answer, as they are sent."""
    return read_events(Answer(ResponsesBody(input="x", **given), choices).stream(keep))


@pytest.mark.parametrize("reason", ["tool_calls", "length"])
def test_a_stream_tells_the_answer_that_is_given_whole(reason):
    from openai._models import construct_type_unchecked
    from openai.lib.streaming.responses._responses import ResponseStreamState
    from openai.types.responses import Response, ResponseStreamEvent

    answer = Answer(ResponsesBody(input="x"), ScriptedChoices(reason=reason))
    whole = asyncio.run(answer.whole(None))
    kept = []
    events = events_of(ScriptedChoices(reason=reason), kept.append)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    assert events[-1]["type"] == ("response.completed" if reason == "tool_calls" else "response.incomplete")
    assert kept == [events[-1]["response"]]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    Response.model_validate(whole)  # strictly: the client itself takes anything

    state = ResponseStreamState(input_tools=[], text_format=openai.omit)
    for one in events:  # the client's own reading of the events
        state.handle_event(construct_type_unchecked(type_=ResponseStreamEvent, value=one))
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
    snapshot = state.accumulate_event(construct_type_unchecked(type_=ResponseStreamEvent, value=events[1]))
    for item, mine in zip(snapshot.output, events[-1]["response"]["output"], strict=True):
        assert item.id == mine["id"]
        if item.type == "message":
            assert [part.text for part in item.content] == [part["text"] for part in mine["content"]]
        elif item.type == "function_call":
            assert (item.name, item.arguments, item.call_id) == (
                mine["name"],
                mine["arguments"],
                mine["call_id"],
            )
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    last = "incomplete" if reason == "length" else "completed"
    assert [one["status"] for one in done] == ["completed"] * 4 + [last]
    thought = "".join(one["delta"] for one in events if one["type"] == "response.reasoning_text.delta")
    assert thought == done[0]["content"][0]["text"] == "It is about weather."


def test_usage_and_an_empty_answer():
    whole = asyncio.run(Answer(ResponsesBody(input="x"), ScriptedChoices([], "stop")).whole(None))
    assert [item["content"][0]["text"] for item in whole["output"]] == [""]
    assert whole["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 29,
    }


def test_a_failure_in_a_stream_is_an_event_and_nothing_is_kept():
    kept, choices = [], ScriptedChoices(error=InputError("the engine has ended"))
    last = events_of(choices, kept.append)[-1]
    assert (last["type"], last["response"]["status"], kept) == ("response.failed", "failed", [])
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine has ended"}
    assert choices.cancelled


# What is kept -----------------------------------------------------------------------------------------------


def kept(id: str, size: int = 1) -> Kept:
    return Kept({"id": id, "output": [{"id": f"item of {id}", "type": "message"}]}, [], size)


def test_memory_is_bounded_and_each_key_s_own(monkeypatch):
    monkeypatch.setattr(responses, "MOST_KEPT", 3)
    monkeypatch.setattr(responses, "MOST_BYTES", 100)
    memory = Memory()
    for number in range(4):
        memory.keep("a", kept(f"r{number}"))
    memory.keep("b", kept("other"))
    for owner, id in (("a", "r0"), ("b", "r1"), ("a", "other"), ("", "r1")):
        with pytest.raises(RequestError, match=f'response "{id}" is not here') as missing:
            memory.find(owner, id)
        assert missing.value.status == 404
    memory.find("a", "r1")  # it is in use: another one goes
    memory.keep("a", kept("r4"))
    reference = {"type": "item_reference", "id": "item of r4"}
    assert memory.find("a", "r1").conversation[0]["id"] == "item of r1"
    assert memory.resolved("a", [reference]) == [{"id": "item of r4", "type": "message"}]
    with pytest.raises(RequestError):
        memory.find("a", "r2")
    with pytest.raises(RequestError, match="of no response that is kept"):
        memory.resolved("b", [reference])
    memory.keep("a", kept("large", 99))
    assert memory.find("a", "large")
    with pytest.raises(RequestError):
        memory.find("a", "r4")
    memory.keep("a", kept("too large", 101))
    assert memory.find("a", "large")
    with pytest.raises(RequestError):
        memory.find("a", "too large")
    memory.drop("b", "other")
    with pytest.raises(RequestError):
        memory.drop("b", "other")


# The client -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(talker):
    with serving({"talker": ServeEngine(talker, Limits(block=8))}, keys=["k", "other"]) as at:
        yield at


@pytest.fixture
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0)


GIVEN = {"model": "talker", "temperature": 0, "max_output_tokens": 12}
CHAT = {"model": "talker", "temperature": 0, "max_tokens": 12}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
LOOK_UP = TOOL | {"parameters": CITY | {"additionalProperties": False}}


def test_a_response_is_the_answer_of_a_chat(client):
    asked = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(messages=asked, **CHAT)
    made = client.responses.create(input="Hi", instructions="Be brief", metadata={"a": "b"}, **GIVEN)
    assert made.output_text == chat.choices[0].message.content
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (made.usage.input_tokens, made.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert (made.instructions, made.metadata, made.temperature) == ("Be brief", {"a": "b"}, 0)
    events = list(client.responses.create(input="Hi", instructions="Be brief", stream=True, **GIVEN))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == made.output_text
    assert events[-1].type == "response.incomplete"
    stop = {"extra_body": {"stop": made.output_text[-1]}}
    with client.responses.stream(input="Hi", instructions="Be brief", **GIVEN, **stop) as stream:
        final = stream.get_final_response()  # which needs an answer that is complete
    cut = made.output_text.index(made.output_text[-1])
    assert (final.output_text, final.status) == (made.output_text[:cut], "completed")
    counted = client.responses.input_tokens.count(model="talker", input="Hi", instructions="Be brief")
    assert counted.input_tokens == made.usage.input_tokens


class Light(BaseModel):
    colour: typing.Literal["red", "green"]
    bright: bool


def test_structured_outputs_by_parse_and_in_a_stream(client):
    given = {**GIVEN, "max_output_tokens": 60, "input": "Hi", "text_format": Light}
    made = client.responses.parse(**given)
    assert isinstance(made.output_parsed, Light)
    with client.responses.stream(**given) as stream:
        assert stream.get_final_response().output_parsed == made.output_parsed


def test_tools_are_called_and_their_results_are_read(client):
    given = {**GIVEN, "max_output_tokens": 200, "tools": [LOOK_UP], "input": "Weather?"}
    given["parallel_tool_calls"] = False  # weights that are random call for ever
    made = client.responses.create(**given, tool_choice="required")
    call = made.output[0]
    assert (call.type, call.name, made.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    with client.responses.stream(**given, tool_choice={"type": "function", "name": "weather"}) as stream:
        text = "".join(one.delta for one in stream if one.type == "response.function_call_arguments.delta")
        final = stream.get_final_response()
    assert text == final.output[0].arguments == call.arguments
    assert final.output[0].parsed_arguments == json.loads(text)

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    after = {**GIVEN, "tools": [LOOK_UP], "tool_choice": "none"}
    by_id = client.responses.create(**after, input=[result], previous_response_id=made.id)
    items = [{"role": "user", "content": "Weather?"}, *made.output, result]
    in_full = client.responses.create(**after, input=items, store=False)
    function = {"name": "weather", "arguments": call.arguments}
    called = [{"id": call.call_id, "type": "function", "function": function}]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": called},
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]
    chat = client.chat.completions.create(messages=messages, **CHAT)
    assert by_id.output_text == in_full.output_text == chat.choices[0].message.content
    assert by_id.usage.input_tokens == in_full.usage.input_tokens == chat.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="no such call"):
        client.responses.create(**GIVEN, input=[result])


class Weather(BaseModel):
    city: typing.Literal["Oslo", "Rome"]


def test_arguments_are_parsed_as_the_client_s_models(client):
    tool = openai.pydantic_function_tool(Weather, name="weather")
    given = {**GIVEN, "max_output_tokens": 200, "tools": [tool], "tool_choice": "required", "input": "Hi"}
    made = client.responses.parse(**given, parallel_tool_calls=False)
    assert isinstance(made.output[0].parsed_arguments, Weather)


def test_responses_are_kept_for_their_key_alone(client, address):
    first = client.responses.create(input="One", **GIVEN)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(input="Two", previous_response_id=first.id, **GIVEN)
    items = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.content[0].text for item in items.data] == ["One", first.output_text]
    assert [item.role for item in items] == ["user", "assistant", "user"]  # on from page to page
    listed = client.responses.input_items.list(second.id)
    assert [item.id for item in listed] == [item.id for item in items][::-1]
    referred = [{"type": "item_reference", "id": item.id} for item in items]
    again = client.responses.create(input=referred, **GIVEN)
    assert again.output_text == second.output_text

    stranger = openai.OpenAI(base_url=f"{address}/v1", api_key="other", max_retries=0)
    for ask in (stranger.responses.retrieve, stranger.responses.delete, stranger.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)
    with pytest.raises(openai.NotFoundError) as refused:
        stranger.responses.create(input="Two", previous_response_id=first.id, **GIVEN)
    assert refused.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError, match="of no response"):
        stranger.responses.create(input=referred, **GIVEN)
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.responses.create(input="Three", previous_response_id=second.id, **GIVEN).status
    for stream in (False, True):
        made = client.responses.create(input="One", store=False, stream=stream, **GIVEN)
        id = list(made)[-1].response.id if stream else made.id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)


def test_truncation_drops_the_oldest_turns(client, talker):
    first, given = {"role": "developer", "content": "Be brief"}, []
    for number in range(9):
        given.append({"role": "user", "content": f"{number}" * 300})
        given.append({"role": "assistant", "content": f"{number}"})
    given.pop()

    def count(given: list, **more) -> int:
        return client.responses.input_tokens.count(model="talker", input=given, **more).input_tokens

    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input=[first, *given], **GIVEN)
    assert refused.value.code == "context_length_exceeded"
    made = client.responses.create(input=[first, *given], truncation="auto", **GIVEN)
    fitting = ([first, *given[start:]] for start in range(0, len(given), 2))
    longest = next(one for one in fitting if count(one) + 12 <= talker.max_length)
    assert 3 < len(longest) < len(given)
    want = client.responses.create(input=longest, **GIVEN)
    assert (made.output_text, made.usage.input_tokens) == (want.output_text, want.usage.input_tokens)
    assert count([first, *given], truncation="auto") <= talker.max_length * 3 // 4


def test_log_probabilities_of_the_text(client):
    asked = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
    chat = client.chat.completions.create(**asked, **CHAT)
    wanted = [(one.token, one.bytes, len(one.top_logprobs)) for one in chat.choices[0].logprobs.content]
    given = {**GIVEN, "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    made = client.responses.create(**given)
    found = made.output[0].content[0].logprobs
    assert [(one.token, one.bytes, len(one.top_logprobs)) for one in found] == wanted
    events = list(client.responses.create(**given, stream=True))
    told = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.token for one in told] == [one[0] for one in wanted]
    whole = events[-1].response.output[0].content[0].logprobs
    assert [one.token for one in whole] == [one[0] for one in wanted]
    assert max(abs(a.logprob - b.logprob) for a, b in zip(whole, found)) < 1e-4


def test_errors_are_errors(client):
    for change, error in (
        ({"model": "other"}, openai.NotFoundError),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError),
        ({"background": True}, openai.BadRequestError),
        ({"input": "x" * 5000}, openai.BadRequestError),
    ):
        with pytest.raises(error):
            client.responses.create(**{"input": "Hi", **GIVEN, **change})
    with pytest.raises(openai.BadRequestError, match="kept whole"):
        client.responses.retrieve(client.responses.create(input="Hi", **GIVEN).id, stream=True)
