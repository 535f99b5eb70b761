"""Chat with a model: its template, the ids of a conversation, and the answer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clearhead.errors import InputError, nearest, refuse
from clearhead.hub.files import reading
from clearhead.hub.sentencepiece import token_text
from clearhead.hub.tokenizer import TEMPLATE, templates_of
from clearhead.hub.tokens.chat import ASSISTANT, KNOWN, ChatTemplate, Message
from clearhead.hub.tokens.text import clean
from clearhead.hub.tokens.training import SpecialTokens
from clearhead.hub.vocabularies import ROLES
from clearhead.learn.tasks.generation import NO_HOOKS, Hooks, generate
from clearhead.learn.tasks.results import Generation
from clearhead.run.bundle import Bundle
from clearhead.run.generate.request import ANSWER_TOKENS

PLAIN = "plain"  # the template of a model that has none
# To see how a turn ends; no template writes these words itself.
PROBE = ({"role": "user", "content": "xyzzy"}, {"role": ASSISTANT, "content": "plugh"})


def chat_template(m: Bundle) -> ChatTemplate:
    """Return the model's chat template: that of the tokenizer's settings, or of the file beside them."""
    found = templates_of(m.settings)
    if "default" not in found:
        raise InputError(
            f"this model has no chat template ({TEMPLATE}, or chat_template in tokenizer_config.json): "
            "give it plain text, as generate and /v1/completions do, or train it on conversations"
        )
    return ChatTemplate(found["default"], named_tokens(m), found.get("tool_use"))


def named_tokens(m: Bundle) -> dict[str, str]:
    """Return special tokens as templates name them: those of the tokenizer's settings, else by their ids."""
    stated = {f"{role}_token": token_text(m.settings.get(f"{role}_token")) for role in ROLES}
    known = {name: text for name, text in stated.items() if text is not None}
    by_id = {f"{role}_token": m.text_tokenizer.id_to_token(token) for role, token in m.special.items()}
    return known or {name: text for name, text in by_id.items() if text is not None}


def named_template(name: str) -> str:
    """Return a template by its name, or that of a file."""
    path = Path(name)
    refuse(
        name not in KNOWN and not path.is_file(),
        f'tokens.template "{name}" is no file and no known template{nearest(name, KNOWN)}: '
        f"known are {', '.join(KNOWN)}",
    )
    if name in KNOWN:
        return KNOWN[name]
    with reading(path, "is not UTF-8 text"):
        return path.read_text(encoding="utf-8")


def template_for(name: str | None, specials: SpecialTokens) -> ChatTemplate:
    """Return the template of a new model, with the special tokens that its tokenizer will have."""
    tokens = {f"{role}_token": token for role, token in specials.tokens.items()}
    return ChatTemplate(named_template(name or PLAIN), tokens)


def set_template(m: Bundle, name: str | None) -> str:
    """Give a model the template of this name or file, or keep its own, or take the plain one; return a note.

    The token that ends a turn then ends what the model generates too, here and in transformers.
    """
    own = "default" in templates_of(m.settings)
    if name is not None or not own:
        m.settings["chat_template"] = named_template(name or PLAIN)
    end = turn_end(m)
    if end is not None and end not in m.stops:
        m.generation["eos_token_id"] = [*m.stops, end]
    token = "nothing" if end is None else m.text_tokenizer.id_to_token(end)
    which = "the model's own" if own and name is None else name or PLAIN
    return f"chat template: {which}, which ends an answer with {token}"


def chat_ids(m: Bundle, messages: Sequence[Message], more: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins.

    The template writes every special token, so the tokenizer adds none.
    """
    text = clean(chat_template(m).render(messages, **more))
    ids = list(m.text_tokenizer.encode(text, add_special_tokens=False).ids)
    refuse(not ids, "the chat template writes nothing for these messages")
    return ids


def turn_end(m: Bundle) -> int | None:
    """Return the special token that follows an answer in the model's template; None where none does."""
    ((text, spans),) = chat_template(m).learned(PROBE)
    said = text[spans[-1].first :] if spans else ""
    tokens = m.text_tokenizer.encode(said.partition("plugh")[2], add_special_tokens=False).ids
    added = m.text_tokenizer.get_added_tokens_decoder()
    return next((token for token in tokens if token in added and added[token].special), None)


def turn_of(
    m: Bundle, messages: Sequence[Message], more: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    """Return the ids of a conversation, and the options of `generate` with which its answer ends as a turn.

    A template that refuses to be probed for the end of a turn leaves it to the model's own tokens.
    """
    ids = chat_ids(m, messages, more)
    try:
        end = turn_end(m)
    except InputError:
        end = None
    if end is None or end in m.stops:
        return ids, dict(options)
    return ids, {**options, "stop_tokens": (*(options.get("stop_tokens") or ()), end)}


def chat(
    m: Bundle, messages: Sequence[Message], options: Mapping[str, Any], hooks: Hooks = NO_HOOKS
) -> Generation:
    """Answer a conversation: what is generated after its template, up to the end of the turn.

    `options` are fields of a request, and `template`: a mapping of what the template takes besides, such as
    tools.
    """
    plain = {name: value for name, value in options.items() if name != "template"}
    ids, given = turn_of(m, messages, options.get("template") or {}, plain)
    if "max_new_tokens" not in given:
        room = ANSWER_TOKENS if "overflow" in given else m.max_length - len(ids)
        given["max_new_tokens"] = max(1, min(ANSWER_TOKENS, room))
    return generate(m, [ids], given, hooks)[0][0]
