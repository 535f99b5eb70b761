"""Chat templates: messages to the text of a prompt, by the model's own template in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
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
    special = {f"{role}_token": m.text_tokenizer.id_to_token(token) for role, token in m.special.items()}
    given: dict[str, Any] = {
        **special,
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
        "tools": None,
        "documents": None,
        **more,
    }
    try:
        text = _environment().from_string(template_of(m)).render(**given)
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise InputError(f"the chat template refuses these messages: {first_line(error)}") from None
    ids = list(m.text_tokenizer.encode(text, add_special_tokens=False).ids)
    refuse(not ids, "the chat template writes nothing for these messages")
    return ids


def _environment() -> ImmutableSandboxedEnvironment:
    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, **named: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **named})

    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = raise_exception
    found.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return found
