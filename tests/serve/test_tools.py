"""Tool calls: the formats of published templates, arguments that always parse, and clients that use them."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import clearhead as ch
from clearhead.errors import InputError
from clearhead.hub.tokens.answers import AnswerParser, ReadAnswer
from clearhead.hub.tokens.chat import KNOWN, ChatTemplate
from clearhead.hub.tokens.tools import Tool, ToolFormat, call_function, tools_of
from clearhead.run.serve.app import make_server
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests import harness
from tests.later import later
from tests.serve.served import serving
from tests.tokens.toys import TEMPLATES

openai = later("openai", reason="needs the openai client: pip install 'clearhead[dev]'")
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|channel|>", "<|message|>", "<|start|>"),
    *("<|end|>", "<|call|>", "<|return|>", "<|constrain|>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    "<｜end▁of▁sentence｜>",
]
ASKED = [{"role": "user", "content": "Which weather?"}]
CITY = {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 0, "maximum": 99}}
WEATHER = Tool("weather", "The weather", {"type": "object", "properties": CITY, "required": ["city"]})
CLOCK = Tool("clock", "The time", {"type": "object", "properties": {"zone": {"enum": ["CET", "UTC"]}}})
TOOLS = [WEATHER.entry, CLOCK.entry]
# Template, and what it writes of two calls, f({"a": 1}) and g({}).
WRITTEN = {
    "qwen25": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "llama31": '{"name": "f", "parameters": {"a": 1}}',
    "mistral_tools": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
    "deepseek_tools": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n'
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "chatml": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "harmony_tools": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
}
CALLS = [("f", '{"a": 1}'), ("g", "{}")]


def random_model() -> ch.Model:
    """A random decoder that reads bytes, with the special tokens of every format."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    m = harness.build(vocab_size=300, positions="rope", max_positions=4096)
    return ch.Model(m, tokenizer, special={"bos": 256, "eos": 257})


@pytest.fixture(scope="module")
def model() -> ch.Model:
    return random_model()


def with_template(model: ch.Model, name: str) -> ch.Model:
    """The model, with a template by name."""
    model.settings = {**NAMES, "chat_template": TEMPLATES.get(name) or KNOWN[name]}
    return model


def read(form: ToolFormat, texts: Sequence[str], calls: bool = True, **more: Any) -> ReadAnswer:
    """What a parser makes of a text that comes in pieces."""
    parser = AnswerParser(form, calls, **more)
    parts = [part for text in texts for part in parser.push(text)]
    return ReadAnswer.of([*parts, *parser.finish()], str)


# Formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_calls_are_read_back_however_the_text_comes(name, seed):
    """The text before calls, the reasoning and each call are the same for every way to cut the text."""
    form, draw = ChatTemplate(TEMPLATES[name], NAMES).tool_format, random.Random(seed)
    before = "" if name in ("llama31", "harmony_tools") else draw.choice(["", "Let me <look> [T] {:\n\n"])
    text = before + WRITTEN[name]
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randint(0, 12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    found = read(form, pieces, special=SPECIAL)
    wanted = CALLS if form.several else CALLS[:1]
    assert [(call.name, call.arguments) for call in found.calls] == wanted
    assert found.content == before.rstrip()
    assert found.reasoning == ("hm" if form.harmony else "")


@pytest.mark.parametrize("name", [*TEMPLATES, *KNOWN])
def test_what_a_template_writes_of_calls_is_read_as_these(name):
    """A call in a message, as the template writes it, is the call that is read from that text."""
    template = ChatTemplate(TEMPLATES.get(name) or KNOWN[name], NAMES)
    calls = [
        {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "}"]}'}}
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    if name == "plain_json":  # it writes messages as JSON, which is no text to read
        return
    if name in ("hermes_tools", "harmony"):  # it writes the names of calls alone; it takes no tools
        with pytest.raises(InputError, match=r"read back|takes no tools"):
            _ = template.tool_format
        return
    form = template.tool_format
    prompt = template.render(ASKED, True, tools=TOOLS)
    whole = template.render([*ASKED, answer], False, tools=TOOLS)
    start = whole.rindex("weather?") if not whole.startswith(prompt) else len(prompt)
    (call,) = read(form, [whole[start:]], special=SPECIAL).calls
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": [1, "}"]}), name


def test_an_answer_cut_between_two_calls_says_nothing_there():
    """What begins another call is no content, where the answer ends within it."""
    form = ChatTemplate(TEMPLATES["qwen25"], NAMES).tool_format
    first, second, _ = WRITTEN["qwen25"].split("<tool_call>")[1:] + [""]
    for size in range(len('\n<tool_call>\n{"name": "')):
        text = f"<tool_call>{first.rstrip()}" + ("\n<tool_call>" + second)[:size]
        found = read(form, [text[:30], text[30:]], special=SPECIAL)
        assert (found.content, [call.name for call in found.calls]) == ("", ["f"]), text


def test_reasoning_is_apart_from_content():
    form = ChatTemplate(TEMPLATES["qwen3"], NAMES).answer_format
    text = "<think>\na < b\n</think>\n\nYes <think>.\n"
    for size in (1, 3, len(text)):
        found = read(form, [text[n : n + size] for n in range(0, len(text), size)], calls=False)
        assert (found.reasoning, found.content) == ("a < b", "Yes <think>.\n")
    begun = read(form, ["so", " it is</th", "ink> Yes"], calls=False, thinks=True)
    assert (begun.reasoning, begun.content) == ("so it is", "Yes")
    assert read(form, [" <thin", "g"], calls=False).content == " <thing"
    assert read(form, ["<think>\nand so"], calls=False) == ReadAnswer("", "and so", [])


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_goes_back_into_its_conversation(name):
    """What was read of an answer is a message that the same template takes."""
    template = ChatTemplate(TEMPLATES[name], NAMES)
    form = template.answer_format
    thought = "" if form.thinking is None else f"{form.thinking[0]}\nhm\n{form.thinking[1]}\n\n"
    answer = read(
        form, [f"{thought}Yes." if not form.harmony else "<|channel|>final<|message|>Yes."], calls=False
    )
    assert answer.content == "Yes."
    assert "Yes." in template.render([*ASKED, answer.message, *ASKED])


# Arguments --------------------------------------------------------------------------------------------------


def schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema of what tools take."""
    kinds = ["string", "integer", "number", "boolean", "enum", "array", "object", "null", "union"]
    kind = draw.choice(kinds[: 5 if depth > 1 else None])
    if kind == "enum":
        return {"enum": draw.sample(["a", "b c", 1, True, None, 'q"uote', "ü"], 3)}
    if kind == "union":
        return {"anyOf": [schema(draw, depth + 1), {"type": "null"}]}
    if kind == "array":
        return {"type": "array", "items": schema(draw, depth + 1), "maxItems": 2}
    if kind == "object":
        names = draw.sample(string.ascii_letters, draw.randint(0, 3))
        required = [name for name in names if draw.random() < 0.5]
        fields = {name: schema(draw, depth + 1) for name in names}
        return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
    bounds = {"string": {"maxLength": 5}, "integer": {"minimum": -9, "maximum": 99}}
    return {"type": kind, **bounds.get(kind, {"minimum": 0, "maximum": 9} if kind == "number" else {})}


def random_tool(draw: random.Random) -> Tool:
    """A tool whose arguments are of a random schema."""
    fields = {f"x{n}": schema(draw) for n in range(draw.randint(0, 4))}
    names = [name for name in fields if draw.random() < 0.7]
    return Tool(
        f"tool-{draw.randint(0, 99)}", "", {"type": "object", "properties": fields, "required": names}
    )


def fits(value: Any, rules: dict[str, Any]) -> bool:
    """Whether a value is of a schema, by its own definition."""
    if "anyOf" in rules:
        return any(fits(value, one) for one in rules["anyOf"])
    if "enum" in rules:
        return any(type(value) is type(one) and value == one for one in rules["enum"])
    match rules["type"]:
        case "string":
            return isinstance(value, str) and len(value) <= rules["maxLength"]
        case "integer":
            return type(value) is int and rules["minimum"] <= value <= rules["maximum"]
        case "number":
            return type(value) in (int, float) and rules["minimum"] <= value <= rules["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return isinstance(value, list) and len(value) <= 2 and all(fits(x, rules["items"]) for x in value)
    known = rules["properties"]
    return (
        isinstance(value, dict)
        and {*rules["required"]} <= {*value} <= {*known}
        and all(fits(one, known[name]) for name, one in value.items())
    )


FORMATS = ("qwen25", "llama31", "mistral_tools", "deepseek_tools", "harmony_tools")
EACH = 16  # random tools in each format, of which the suite asks for half


def random_calls(m: ch.Model, name: str, each: int = EACH) -> Iterator[tuple[Tool, Any]]:
    """Tools of random schemas, and what a random model answers that has to call them in a format."""
    m, draw = with_template(m, name), random.Random(name)
    end = m.text_tokenizer.token_to_id("<|end|>")  # a random model thinks for long: its messages end soon
    for number in range(each):
        tool = random_tool(draw)
        options = {"temperature": 1.0, "seed": number, "max_new_tokens": 1500, "top_k": 40}
        options |= {"logit_bias": {end: 9.0}} if name == "harmony_tools" else {}
        yield tool, m.chat(ASKED, tools=[tool], tool_choice="required", parallel_tool_calls=False, **options)


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_of_random_schemas_parse_and_validate(name, model):
    """Eight tools in each format: a random model writes calls whose arguments are of their schemas."""
    for tool, answer in random_calls(model, name, EACH // 2):
        assert answer.stop_reason == "eos"
        (call,) = answer.tool_calls
        assert call.name == tool.name
        assert fits(json.loads(call.arguments), tool.schema), (call.arguments, tool.schema)


@pytest.mark.parametrize("name", ["qwen25", "llama31", "mistral_tools", "zephyr"])
def test_which_tool_is_called(name, model):
    m = with_template(model, name)
    options = {"temperature": 1.0, "max_new_tokens": 600, "tools": TOOLS}
    for seed in range(2):
        named = m.chat(ASKED, tool_choice="clock", seed=seed, **options)
        assert {call.name for call in named.tool_calls} == {"clock"}
        one = m.chat(ASKED, tool_choice="required", parallel_tool_calls=False, seed=seed, **options)
        assert len(one.tool_calls) == 1
        free = m.chat(ASKED, seed=seed, **options)
        assert free.tool_calls or free.message["content"]
    plain = m.chat(ASKED, 40)
    assert m.chat(ASKED, 40, tools=TOOLS, tool_choice="none").ids == plain.ids
    assert m.chat(ASKED, 40, tools=[]).ids == plain.ids


def test_an_answer_without_calls_is_of_its_schema(model):
    m = with_template(model, "qwen25")
    for seed in range(6):
        options = {"temperature": 1.0, "seed": seed, "json_schema": {"enum": ["yes", "no"]}}
        answer = m.chat(ASKED, 600, tools=TOOLS, **options)
        assert answer.tool_calls or json.loads(answer.message["content"]) in ("yes", "no")


City = Annotated[str, Field(max_length=6)]


def weather(
    city: City, days: Annotated[int, Field(ge=0, le=9)] = 1, unit: Literal["C", "F"] = "C"
) -> dict[str, Any]:
    """The weather of a city."""
    return {"city": city, "days": days, "unit": unit}


def test_python_functions_are_tools(model):
    (tool,) = tools_of([weather])
    assert (tool.name, tool.description) == ("weather", "The weather of a city.")
    assert tool.parameters["required"] == ["city"]
    assert tool.parameters["properties"]["unit"]["enum"] == ["C", "F"]
    assert json.loads(call_function(weather, '{"city": "Köln", "days": 2}')) == weather("Köln", 2)
    (call, *_) = (
        with_template(model, "qwen25").chat(ASKED, 900, tools=[weather], tool_choice="weather").tool_calls
    )
    assert json.loads(call_function(weather, call.arguments))["unit"] in ("C", "F")


def test_wrong_tools_are_refused_by_name():
    def untyped(city):
        """No type."""

    wrong = [
        ([{"function": {"name": "a b"}}], "a b"),
        ([{"function": {"name": "f", "parameters": {"type": "array"}}}], "type object"),
        ([{"function": {"name": "f"}, "speed": 1}], "speed"),
        ([{"type": "web_search"}], "web_search"),
        ([{"name": "f"}, {"name": "f"}], '"f"'),
        ([untyped], "city"),
        ("f", "list"),
    ]
    for tools, named in wrong:
        with pytest.raises(InputError, match=named):
            tools_of(tools)  # type: ignore[arg-type]


# Clients ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(model):
    engine = ServeEngine(with_template(model, "qwen25"), Limits(block=16))
    with serving({"m": engine}) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0)


def test_a_round_trip_with_the_openai_client(client, model):
    given = {
        "model": "m",
        "messages": ASKED,
        "tools": TOOLS,
        "max_tokens": 900,
        "temperature": 1.0,
        "seed": 5,
    }
    answer = client.chat.completions.create(**given, tool_choice="required").choices[0]
    alone = model.chat(ASKED, 900, tools=TOOLS, tool_choice="required", temperature=1.0, seed=5)
    assert answer.finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in answer.message.tool_calls] == [
        (c.name, c.arguments) for c in alone.tool_calls
    ]
    assert answer.message.content is None
    ids = [call.id for call in answer.message.tool_calls]
    assert len({*ids}) == len(ids)
    results = [{"role": "tool", "tool_call_id": token, "content": "rain"} for token in ids]
    told = [*ASKED, answer.message.model_dump(exclude_none=True), *results]
    again = client.chat.completions.create(**given | {"messages": told, "max_tokens": 8})
    assert again.usage.prompt_tokens > alone.steps
    with client.chat.completions.stream(**given, tool_choice="required") as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert [c.function.arguments for c in final.message.tool_calls] == [c.arguments for c in alone.tool_calls]
    assert any(event.type == "tool_calls.function.arguments.done" for event in events)
    assert final.finish_reason == "tool_calls"


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """A choice among some of the tools, as OpenAI's API has it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_some_of_the_tools_are_allowed(client):
    """The answer is the one to these tools alone."""
    given = {"model": "m", "messages": ASKED, "max_tokens": 300, "seed": 2, "parallel_tool_calls": False}
    some = client.chat.completions.create(**given, tools=TOOLS, tool_choice=allowed("required", "clock"))
    alone = client.chat.completions.create(**given, tools=TOOLS[1:], tool_choice="required")
    (call,), (same,) = (one.choices[0].message.tool_calls for one in (some, alone))
    assert call.function == same.function and call.function.name == "clock"


def test_what_tools_exclude_is_refused_by_name(client):
    given = {"model": "m", "messages": ASKED, "max_tokens": 9}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": "required"}, "without tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, '"f" is none'),
        (
            {"tools": TOOLS, "tool_choice": allowed("auto", "clock", "f")},
            "allows f, and tools has weather, clock",
        ),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": TOOLS, "extra_body": {"regex": "a"}}, "regex with tools"),
        ({"tools": [Tool("f", "", {"type": "object", "not": {}}).entry]}, "tool f"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ]
    for more, named in wrong:
        with pytest.raises(openai.BadRequestError, match=named):
            client.chat.completions.create(**given, **more)


def test_a_cut_call_ends_by_its_length(client):
    given = {"model": "m", "messages": ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 40}
    answer = client.chat.completions.create(**given).choices[0]
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("name", ["qwen25", "mistral_tools", "deepseek_tools", "llama31"])
def test_other_apis_call_tools_in_the_format_of_the_model(model, name):
    """A call by `/v1/responses` and `/v1/messages`, and its result: the same tokens as by the chat."""
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    theirs = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        for tool in flat
    ]
    drawn = {"model": "m", "temperature": 1.0, "seed": 5}
    with TestClient(make_server({"m": ServeEngine(with_template(model, name), Limits(block=16))})) as client:
        client.headers["Host"] = "127.0.0.1"

        def post(path: str, **body: Any) -> dict[str, Any]:
            answer = client.post(f"/v1/{path}", json=drawn | body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        one = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 900}
        message = post("chat/completions", messages=ASKED, **one)["choices"][0]["message"]
        (called,) = message["tool_calls"]
        one = {"tools": flat, "tool_choice": "required", "parallel_tool_calls": False}
        response = post("responses", input=ASKED, **one, max_output_tokens=900)
        (call,) = response["output"]
        assert (call["name"], call["arguments"]) == (
            called["function"]["name"],
            called["function"]["arguments"],
        )
        choice = {"type": "any", "disable_parallel_tool_use": True}
        answer = post("messages", messages=ASKED, tools=theirs, tool_choice=choice, max_tokens=900)
        (use,) = answer["content"]
        assert (use["name"], use["input"]) == (call["name"], json.loads(call["arguments"]))

        told = {"role": "tool", "tool_call_id": called["id"], "content": "rain"}
        chat = post("chat/completions", messages=[*ASKED, message, told], tools=TOOLS, max_tokens=8)
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        more = {"input": [result], "previous_response_id": response["id"], "tools": flat}
        usage = post("responses", **more, max_output_tokens=8)["usage"]
        assert usage["total_tokens"] == chat["usage"]["total_tokens"]
        block = {"type": "tool_result", "tool_use_id": use["id"], "content": "rain"}
        after = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [block]}]
        usage = post("messages", messages=[*ASKED, *after], tools=theirs, max_tokens=8)["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
