"""A request is one value: the keywords, the command's options and a JSON object make the same one."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import typing

import numpy as np
import pydantic
import pytest
import tyro
from tools.options_table import options_table

import clearhead as ch
from clearhead.app.cli import main
from clearhead.app.commands.requests import GroupedRequest
from clearhead.learn.tasks.generation import GenerateOptions, TranslateOptions
from clearhead.run.generate.request import (
    GROUPS,
    OPTIONS,
    SEQUENCES,
    Request,
    RequestOptions,
    make_request,
)
from clearhead.run.serve.protocol import CompletionBody


def test_every_front_end_makes_the_same_request():
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "stop": ["a", "b"], "max_new_tokens": 7}
    flags = ["--temperature=0.8", "--top-p=0.9", "--seed=3", "--max-new-tokens=7", "--stop", "a", "b"]
    wanted = Request(temperature=0.8, top_p=0.9, seed=3, stop=("a", "b"), max_new_tokens=7)
    assert make_request(options) == make_request(json.loads(json.dumps(options))) == wanted
    options, wanted = (
        {**options, "logit_bias": {5: -100.0, 9: 2.5}},
        dataclasses.replace(wanted, logit_bias=((5, -100.0), (9, 2.5))),
    )
    flags += ["--logit-bias", "5=-100", "9=2.5"]
    assert make_request(options) == wanted
    assert make_request(tyro.cli(GroupedRequest, args=flags).given()) == wanted
    named = json.loads(json.dumps({OPTIONS[name].http: value for name, value in options.items()}))
    body = CompletionBody.model_validate({"prompt": "x", **named})
    assert make_request(body.options() | {"seed": body.seeds(1)[0]}) == wanted
    assert GroupedRequest().given() == {}  # one set of defaults; HTTP draws, as OpenAI does
    assert CompletionBody(prompt="x").options() == {"temperature": 1.0}


def test_every_field_is_a_keyword_and_an_option(capsys):
    """What an editor completes is what a request has."""
    named = {"max_new_tokens", "num_return"}
    assert set(GenerateOptions.__annotations__) == {*OPTIONS} - named | {"on_text", "cancel", "draft"}
    assert set(TranslateOptions.__annotations__) == set(GenerateOptions.__annotations__) - {
        "num_beams",
        "length_penalty",
    }
    hints = typing.get_type_hints(Request)
    for name, hint in typing.get_type_hints(RequestOptions).items():
        if name not in SEQUENCES:
            assert hint == hints[name], name
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    help_text = capsys.readouterr().out
    for name, option in OPTIONS.items():  # the command has --logprobs COUNT
        listed = f"--{option.flag or name.replace('_', '-')} " in help_text
        assert listed == bool(option.group or name == "logprobs"), name
    places = [help_text.index(f" {group} options ") for group in GROUPS]
    assert places == sorted(places) and help_text.rindex("--temperature") > places[0]


def test_an_option_means_the_same_over_http():
    """Of each option: the type and the bounds of its declaration, and the line of help."""
    fields = CompletionBody.model_json_schema()["properties"]
    for name, option in OPTIONS.items():
        if not option.http or name == "max_new_tokens":  # of which echo takes none
            continue
        assert fields[option.http]["description"] == option.help
        if option.bounds is not None:
            wrong = option.bounds.least - 2  # top_k -1 keeps every token, as it does in vLLM
            with pytest.raises(pydantic.ValidationError, match=option.http):
                CompletionBody.model_validate({"prompt": "x", option.http: wrong})
            with pytest.raises(ch.InputError, match=f"{name} {wrong}"):
                make_request({name: wrong})


def test_the_documentation_lists_every_option():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "decoding.md").read_text()
    assert options_table() in page, "python tools/options_table.py writes the table"


def test_sequences_are_tuples():
    request = Request(stop="end", stop_tokens=[3, "x"], allowed=np.array([1, 2]), banned=range(5, 7))
    assert request.stop == ("end",) and request.stop_tokens == (3, "x")
    assert request.allowed == (1, 2) and request.banned == (5, 6)
    assert hash(request) == hash(dataclasses.replace(request))
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.seed = 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens 0 must be a whole number, 1 or more"),
        ({"max_new_tokens": 2.5}, "max_new_tokens 2.5"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": -1.0}, "temperature -1.0 is outside"),
        ({"typical_p": 0.0}, "typical_p 0.0 is outside"),
        ({"min_p": 1.5}, "min_p 1.5 is outside"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 must be above 0"),
        ({"top_k": -1}, "top_k -1"),
        ({"stop": [3]}, "stop"),
        ({"logit_bias": {5: 101}}, "logit_bias 101 of token 5 is outside"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias nan of token 5 is outside"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logit_bias": 5}, "logit_bias 5 is not allowed"),
        ({"overflow": "wrap"}, "overflow 'wrap' is not allowed"),
        ({"allowed": [1], "banned": [1]}, "no token"),
        ({"num_beams": 2, "lookup": 3}, "lookup with num_beams 2"),
        ({"num_beams": 2, "reuse": True}, "reuse with num_beams 2"),
        ({"num_beams": 2, "alternatives": 1}, "alternatives with num_beams 2"),
        ({"num_beams": 2, "min_p": 0.1}, "min_p with num_beams 2"),
        ({"temprature": 1.0}, 'did you mean "temperature"'),
    ],
)
def test_mistakes_are_one_line(options, words):
    with pytest.raises(ch.InputError, match=words) as error:
        make_request(options)
    assert "\n" not in str(error.value)


def test_hooks_are_refused_in_one_place():
    for name in ("on_text", "cancel", "draft"):
        with pytest.raises(ch.InputError, match=f"{name} with num_beams 2"):
            Request(num_beams=2).check_hooks(**{name: print})
        Request().check_hooks(**{name: print})
    with pytest.raises(ch.InputError, match="lookup with draft"):
        Request(lookup=2).check_hooks(draft=print)


def test_a_request_needs_no_torch():
    """Neither do the results. A stand-in for `clearhead` lets only these files be imported."""
    script = (
        "import sys, types, pathlib; root = types.ModuleType('clearhead'); root.__path__ = [sys.argv[1]]; "
        "sys.modules['clearhead'] = root; "
        "import clearhead.run.generate.request, clearhead.learn.tasks.results; "
        "print(any(name in sys.modules for name in ('torch', 'tokenizers', 'tyro', 'numpy')))"
    )
    arguments = [sys.executable, "-c", script, str(ch.__path__[0])]
    assert subprocess.run(arguments, capture_output=True, text=True, check=True).stdout == "False\n"
