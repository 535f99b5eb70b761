"""The fields of each request over HTTP: which work, which change nothing, which are refused by name.

They are read off our bodies and off the types of the packages that clients are made of. A body is a row of
`BODIES`; `docs/reference/fields.md` shows its table between `<!-- table: fields NAME -->` and `<!-- end -->`.
Bodies that count tokens have none: they take a part of another one.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

SERVE, OPENAI, ANTHROPIC = "clearhead.run.serve", "openai.types", "anthropic.types"


class Api(NamedTuple):
    """A route, the class of its body here, and the class of its parameters in the client's package."""

    route: str
    ours: str
    theirs: str


BODIES = {
    "completions": Api(
        "/v1/completions",
        f"{SERVE}.protocol:CompletionBody",
        f"{OPENAI}.completion_create_params:CompletionCreateParamsStreaming",
    ),
    "chat": Api(
        "/v1/chat/completions",
        f"{SERVE}.protocol:ChatBody",
        f"{OPENAI}.chat.completion_create_params:CompletionCreateParamsStreaming",
    ),
    "embeddings": Api(
        "/v1/embeddings",
        f"{SERVE}.protocol:EmbeddingsBody",
        f"{OPENAI}.embedding_create_params:EmbeddingCreateParams",
    ),
    "responses": Api(
        "/v1/responses",
        f"{SERVE}.responses_body:ResponsesBody",
        f"{OPENAI}.responses.response_create_params:ResponseCreateParamsStreaming",
    ),
    "input_tokens": Api(
        "/v1/responses/input_tokens",
        f"{SERVE}.responses_body:InputBody",
        f"{OPENAI}.responses.input_token_count_params:InputTokenCountParams",
    ),
    "messages": Api(
        "/v1/messages",
        f"{SERVE}.messages:MessagesBody",
        f"{ANTHROPIC}.beta.message_create_params:MessageCreateParamsStreaming",
    ),
    "count_tokens": Api(
        "/v1/messages/count_tokens",
        f"{SERVE}.messages:CountBody",
        f"{ANTHROPIC}.beta.message_count_tokens_params:MessageCountTokensParams",
    ),
    "transcriptions": Api(
        "/v1/audio/transcriptions",
        f"{SERVE}.audio:TranscriptionBody",
        f"{OPENAI}.audio.transcription_create_params:TranscriptionCreateParamsStreaming",
    ),
    "translations": Api(
        "/v1/audio/translations",
        f"{SERVE}.audio:AudioBody",
        f"{OPENAI}.audio.translation_create_params:TranslationCreateParams",
    ),
}
WORKS, EXTRA, UNUSED, REFUSED = "works", "works, an extension", "no effect", "refused by name"


class ApiField(NamedTuple):
    """A field of a request, what becomes of it, and the values that are taken."""

    name: str
    status: str  # WORKS, EXTRA, UNUSED or REFUSED
    taken: str


def class_of(place: str) -> Any:
    """Return the class that "module:class" names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def client_fields(api: Api) -> list[str]:
    """Return the fields that the client sends; `betas` is a header."""
    return [name for name in class_of(api.theirs).__annotations__ if name != "betas"]


def api_fields(api: Api) -> list[ApiField]:
    """Return every field of a request: the client's, and then ours that it sends by `extra_body` alone."""
    body, theirs = class_of(api.ours), client_fields(api)
    schema = body.model_json_schema()
    parts, own = schema.get("$defs", {}), schema["properties"]
    found = []
    for name in [*theirs, *(name for name in own if name not in theirs)]:
        if name == "file":
            found.append(ApiField(name, WORKS, "file"))
        elif name in own and not own[name].get("refused"):
            status = WORKS if name in theirs else EXTRA
            found.append(ApiField(name, status, values(own[name], parts)))
        elif name in body.unused:
            found.append(ApiField(name, UNUSED, "any"))
        else:
            no_ops = () if name in own else body.no_ops[name]
            taken = ", ".join(f"`{json.dumps(value)}`" for value in (None, *no_ops))
            found.append(ApiField(name, REFUSED, f"{taken} only"))
    return found


def values(schema: dict[str, Any], parts: dict[str, Any]) -> str:
    """Return in words what a field takes, by its JSON schema."""
    if "$ref" in schema:
        return values(parts[schema["$ref"].rpartition("/")[2]], parts)
    if "anyOf" in schema or "oneOf" in schema:
        several = [one for one in schema.get("anyOf", schema.get("oneOf")) if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(values(one, parts) for one in several))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(one)}`" for one in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {values(schema.get('items', {}), parts)}"
    least, most = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    bounds = [f"above {least}" if "exclusiveMinimum" in schema else f"{least}"] if least is not None else []
    bounds += [f"{most}"] if most is not None and abs(most) < 2**31 else []
    return f"{kind}, {' to '.join(bounds)}" if len(bounds) == 2 else kind


def fields_table(name: str) -> Iterator[str]:
    """Yield the rows of the fields of one body."""
    yield "| field | status | takes |"
    yield "| --- | --- | --- |"
    for field in api_fields(BODIES[name]):
        yield f"| `{field.name}` | {field.status} | {field.taken} |"
