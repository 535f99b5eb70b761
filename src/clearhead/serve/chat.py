"""Chat templates: messages to the text of a prompt, by the model's own template in a sandbox."""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clearhead.bundle import Bundle
from clearhead.errors import InputError, first_line, refuse

FILE = "chat_template.jinja"


def template_of(m: Bundle) -> str:
    """Return the model's chat template."""
    path = None if m.folder is None else m.folder / FILE
    found = (
        path.read_text("utf-8") if path is not None and path.is_file() else m.settings.get("chat_template")
    )
    if isinstance(found, list):
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    if not isinstance(found, str):
        raise InputError(
            f"this model has no chat template ({FILE}, or chat_template in tokenizer_config.json): "
            "use /v1/completions"
        )
    return found


def chat_ids(m: Bundle, messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins."""
    template = template_of(m)
    special = {f"{role}_token": m.text_tokenizer.id_to_token(token) for role, token in m.special.items()}
    given: dict[str, Any] = {
        **special,
        "messages": [_plain(number, message, template) for number, message in enumerate(messages)],
        "add_generation_prompt": True,
        "tools": None,
        "documents": None,
    }
    for name in more:
        refuse(
            name in ("messages", *special) or not _reads(template, name),
            f'chat_template_kwargs has "{name}", which the chat template does not take: leave it out',
        )
    try:
        text = _environment().from_string(template).render(**given | dict(more))
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise InputError(f"the chat template refuses these messages: {first_line(error)}") from None
    ids = list(m.text_tokenizer.encode(text, add_special_tokens=False).ids)
    refuse(not ids, "the chat template writes nothing for these messages")
    return ids


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _plain(number: int, message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Return a message whose content is one text; refuse what the template would pass over."""
    place, content = f"messages.{number}", message.get("content")
    unread = [
        name
        for name, value in message.items()
        if name not in ("role", "content") and value is not None and not _reads(template, name)
    ]
    refuse(unread, f'"{place}.{"".join(unread[:1])}" is not read by the chat template: leave it out')
    refuse(not isinstance(message.get("role"), str), f"{place}.role must be a text, such as user")
    for part in content if isinstance(content, list) else ():
        refuse(
            not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str),
            f"{place}.content has a part that is no text: this server reads text alone",
        )
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    refuse(
        not isinstance(content, str) and not message.get("tool_calls"),
        f"{place}.content must be a text, or a list of parts of type text",
    )
    return {**message, "content": content}


class WrittenBlocks(Extension):
    """Blocks that mark what the model has written, for training; here they are read as they stand."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, WrittenBlocks]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, **named: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **named})

    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = raise_exception
    found.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return found
