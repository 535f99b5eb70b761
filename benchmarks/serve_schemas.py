"""Hold texts to generated JSON schemas, and validate every one: valid, or cut off at its length.

    pip install hypothesis-jsonschema 'hypothesis<6.130'
    python benchmarks/run.py serve_schemas [COUNT]

Schemas are drawn by hypothesis-jsonschema from a schema of schemas. A model of random weights, which would
write anything, writes 200 tokens at temperature 1. A schema that llguidance cannot follow is refused by name,
which is counted, and another is drawn in its place.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
import warnings
from collections import Counter

import jsonschema
from benchmarks.serve import bytes_tokenizer
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis_jsonschema import from_schema
from tests.serve import mixes

from clearhead.errors import InputError
from clearhead.run.generate.grammar import check_constraint
from clearhead.run.serve.answers import choices_of
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.protocol import CompletionBody

RESULT = pathlib.Path(__file__).parent / "results" / "serve_schemas.json"
SMALL = {"type": "integer", "minimum": 0, "maximum": 6}
NUMBER = {"type": "integer", "minimum": -1000, "maximum": 1000}
TEXT = {"type": "string", "maxLength": 8, "pattern": '^[a-zA-Z0-9 _"\\\\\\u00e9-]*$'}
SCALAR = {"anyOf": [TEXT, NUMBER, {"type": "boolean"}, {"type": "null"}, {"type": "number"}]}


def table(kind: str, **keywords: object) -> dict:
    """Return the schema of schemas of one type."""
    named = {"type": {"const": kind}, **keywords}
    return {"type": "object", "properties": named, "required": ["type"], "additionalProperties": False}


def schemas(depth: int) -> dict:
    """Return the schema of schemas so many levels deep."""
    patterns = {"enum": ["^[a-z]+$", "^\\d{2,4}$", "(foo|bar)", "^[^x]*$", "^(a|b)*c$", "[A-Z]{2}-\\d"]}
    formats = {"enum": ["date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri"]}
    kinds = [
        table("string", minLength=SMALL, maxLength={"type": "integer", "minimum": 6, "maximum": 30}),
        table("string", pattern=patterns),
        table("string", format=formats),
        table("integer", minimum=NUMBER, exclusiveMaximum={**NUMBER, "minimum": 1001, "maximum": 10**9}),
        table("integer", multipleOf={"enum": [2, 3, 7, 10, 25]}),
        table("number", minimum=NUMBER),
        table("boolean"),
        table("null"),
        {
            "type": "object",
            "properties": {"enum": {"type": "array", "items": SCALAR, "minItems": 1, "maxItems": 5}},
            "required": ["enum"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"const": SCALAR},
            "required": ["const"],
            "additionalProperties": False,
        },
    ]
    if depth:
        below = schemas(depth - 1)
        named = {"type": "object", "additionalProperties": below, "propertyNames": TEXT, "maxProperties": 5}
        several = {"type": "array", "items": below, "minItems": 1, "maxItems": 3}
        names = {"type": "array", "items": TEXT, "maxItems": 3, "uniqueItems": True}
        more = {"anyOf": [{"type": "boolean"}, below]}
        kinds += [
            table("object", properties=named, required=names, additionalProperties=more),
            table("object", properties=named, additionalProperties={"const": False}),
            table("array", items=below, minItems=SMALL, maxItems={"type": "integer", "minimum": 6}),
            table("array", prefixItems=several, items={"const": False}),
            {
                "type": "object",
                "properties": {"anyOf": several},
                "required": ["anyOf"],
                "additionalProperties": False,
            },
        ]
    return {"anyOf": kinds}


def drawn(count: int) -> list[dict]:
    """Draw so many schemas, the same ones each time."""
    found: dict[str, dict] = {}
    for depth, most in ((0, count // 2), (1, count), (2, count // 4)):

        @seed(depth)
        @settings(
            max_examples=most,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(from_schema(schemas(depth)))
        def keep(schema: dict) -> None:
            jsonschema.Draft202012Validator.check_schema(schema)
            found.setdefault(json.dumps(schema), schema)

        keep()
    return list(found.values())


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    warnings.simplefilter("ignore")
    m = mixes.model("rope-gqa", bytes_tokenizer(), max_positions=512)
    engine, figures, refused = ServeEngine(m, Limits(waiting=10_000)), Counter(), Counter()
    every = drawn(count)
    every = every[:: max(1, len(every) // count)] + every[1 :: max(1, len(every) // count)]
    asked = []
    for schema in every:
        if len(asked) == count:
            break
        try:
            check_constraint(("json_schema", json.dumps(schema)))
        except InputError as error:
            refused[re.sub(r"^.*JSON schema: |[\d\"'].*$", "", str(error))] += 1
            continue
        stated = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"prompt": "x", "max_tokens": 200, "seed": len(asked), "response_format": stated}
        asked.append((schema, choices_of(engine, "m", CompletionBody.model_validate(body))))
        asked[-1][1].submit()
    while engine.busy:
        engine.step()
    for schema, served in asked:
        (choice,) = served.answer()["choices"]
        text, reason = choice["text"], choice["finish_reason"]
        figures[reason] += 1
        assert not re.search(r"\s{20}", text), f"{schema}: white space again and again: {text!r}"
        if reason == "stop":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
            figures["valid"] += 1
            assert not re.search(r"[:,{\[]\s", re.sub(r'"(\\.|[^"\\])*"', '""', text)), text
    body = {"schemas": len(asked), **figures, "refused by name": dict(refused), "invalid": 0}
    RESULT.write_text(json.dumps(body, indent=1) + "\n")
    print(body)
