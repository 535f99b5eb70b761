"""Tokenizers that come with a checkpoint, whatever their files; special tokens by role; text to ids.

The class that `tokenizer_config.json` names decides what surrounds the vocabulary: see `vocabularies`.
"""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from tokenizers import Encoding, Tokenizer

from clearhead.errors import CheckpointError, refuse, refusing
from clearhead.hub.files import read_json_if_any, reading, write_json
from clearhead.hub.gguf import gguf_settings, gguf_tokenizer, is_gguf, read_header
from clearhead.hub.sentencepiece import token_text
from clearhead.hub.tokens.text import clean
from clearhead.hub.vocabularies import ROLES, extra_tokens, from_folder, from_json, from_piece_file

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
PROBE = "A text, 1 \u4e2d \U000e0001"  # words, digits, and what hardly any vocabulary has
Side = Literal["left", "right"]  # of a text
TOGETHER = 64  # texts that are encoded at once
TEMPLATES = "additional_chat_templates"  # a folder, for templates of other names
KEPT = (
    *("model_max_length", "padding_side", "truncation_side"),
    *("clean_up_tokenization_spaces", "model_input_names", "split_special_tokens"),
)
# A class that transformers needs by name, because it knows what times are; any other is spelled out in full.
SPEECH = "WhisperTokenizer"


def read_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and the files next to it that override it: special tokens, chat templates.

    special_tokens_map.json counts only where tokenizer_config.json has no `added_tokens_decoder`.
    """
    if is_gguf(folder):
        return gguf_settings(read_header(folder))
    settings = read_json_if_any(folder / SETTINGS)
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")  # its newer name
    if "added_tokens_decoder" not in settings:
        settings |= read_json_if_any(folder / "special_tokens_map.json")
    templates = _chat_templates(folder)
    if templates:
        settings["chat_template"] = templates["default"] if {*templates} == {"default"} else templates
    return settings


def _chat_templates(folder: Path) -> dict[str, str]:
    """Read chat_template.jinja, and those of further names."""
    paths = {path.stem: path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if (folder / TEMPLATE).exists():
        paths = {"default": folder / TEMPLATE, **paths}
    templates = {}
    for name, path in paths.items():
        with reading(path, "is not UTF-8 text"):
            templates[name] = path.read_text(encoding="utf-8")
    older = read_json_if_any(folder / "chat_template.json").get("chat_template")  # of processors
    return templates or ({"default": older} if isinstance(older, str) else {})


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a model directory or GGUF file; None where it has none that we can build.

    It neither pads nor truncates by itself: `encode` here does.
    """
    if is_gguf(folder):
        tokenizer = gguf_tokenizer(read_header(folder))
        return tokenizer if tokenizer is None else _tried(tokenizer)
    if (folder / TOKENIZER).exists():
        return _from_json(folder / TOKENIZER)
    with refusing(f"{folder}: its vocabulary makes no tokenizer", CheckpointError):
        tokenizer = from_folder(folder, read_settings(folder))
        return tokenizer if tokenizer is None else _tried(tokenizer)


def open_tokenizer(path: Path, folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return a tokenizer for the model in `folder` that lies elsewhere, and its settings.

    `path` is a directory, a tokenizer.json, a GGUF file, a SentencePiece `.model` or llama2.c's `.bin`.
    """
    if path.is_dir() or is_gguf(path):
        tokenizer = load_tokenizer(path)
        if tokenizer is None:
            raise CheckpointError(
                f"{path} holds no tokenizer: name a directory with tokenizer.json or a vocabulary, or a file"
            )
        return tokenizer, read_settings(path)
    if path.suffix == ".json":
        return _from_json(path), read_settings(path.parent)
    if path.suffix not in (".model", ".spm", ".bin"):
        raise CheckpointError(
            f"{path} is no tokenizer: give a directory, tokenizer.json, a SentencePiece .model or a .bin"
        )
    return from_piece_file(path, folder, read_settings(folder))


def _from_json(path: Path) -> Tokenizer:
    with refusing(f"{path} is no tokenizer", CheckpointError):
        stated = Tokenizer.from_file(str(path))
    left = stated.truncation is not None and stated.truncation["direction"] == "left"
    refuse(
        left and read_settings(path.parent).get("truncation_side") is None,
        f'{path} cuts texts at the left: say so, "truncation_side": "left" in {SETTINGS}',
        CheckpointError,
    )
    stated.no_padding()
    stated.no_truncation()
    with refusing(f"{path} and {SETTINGS} next to it make no tokenizer", CheckpointError):
        return _tried(from_json(path.parent, stated, read_settings(path.parent)))


def _tried(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that does not panic at the first text, as parts that do not fit together do.

    That it knows no token for a text is no fault: it may have been made for a closed vocabulary.
    """
    for text in ("", PROBE):
        with suppress(Exception):
            tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
    return tokenizer


def special_ids(
    tokenizer: Tokenizer | None,
    settings: Mapping[str, Any],
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, int]:
    """Return the ids of special tokens by role.

    Roles are pad, bos, eos, unk, cls, sep, mask, decoder_start, forced_bos and forced_eos. A token that the
    tokenizer's files name comes first, then an id of generation_config.json, then one of config.json. Where
    several end a text, `eos` is the first of them: `stop_ids` returns all.
    """
    marked: dict[str, int] = {}
    if tokenizer is not None:
        added = tokenizer.get_added_tokens_decoder().items()
        marked = {token.content: index for index, token in added if token.special}
    special: dict[str, int] = {}
    for role in (*ROLES, "decoder_start", "forced_bos", "forced_eos"):
        text = token_text(settings.get(f"{role}_token"))
        key = f"{role}_token_id"
        known = tokenizer.token_to_id(text) if tokenizer is not None and text is not None else None
        # Roles that no file names go by the usual spelling.
        usual = [f"[{role.upper()}]", f"<{role}>"] if role in ("pad", "unk", "cls", "sep", "mask") else []
        # Forced tokens are rules, and generation_config.json, where there is one, has all of them.
        older = {} if generation and role.startswith("forced") else config
        stated = (known, generation.get(key), older.get(key), *(marked.get(text) for text in usual))
        ids = [index for value in stated for index in _ids(value)]
        if ids:
            special[role] = ids[0]
    return special


def stop_ids(special: Mapping[str, int], stated: Mapping[str, Any]) -> tuple[int, ...]:
    """Return every id that ends a generated text: `eos_token_id` may be a list.

    `stated` is generation_config.json or, without one, config.json: where it names no end, texts go on up to
    their length, as in transformers. Only a model without either file ends with its tokenizer's token.
    """
    return tuple(_ids(stated.get("eos_token_id") if stated else special.get("eos")))


def _ids(value: Any) -> list[int]:
    listed = value if isinstance(value, list) else [value]
    return [item for item in listed if type(item) is int and item >= 0]


def save_tokenizer(
    folder: Path,
    tokenizer: Tokenizer,
    special: Mapping[str, int],
    settings: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> None:
    """Write tokenizer.json and tokenizer_config.json; transformers' AutoTokenizer gives the same ids."""
    settings = settings or {}
    is_speech = str(settings.get("tokenizer_class")).removesuffix("Fast") == SPEECH
    try:
        tokenizer.save(str(folder / TOKENIZER))
    except Exception as error:
        raise CheckpointError(f"{folder / TOKENIZER} cannot be written: {error}") from None
    named = {role: tokenizer.id_to_token(special[role]) for role in ROLES if role in special}
    others = [text for text in map(token_text, extra_tokens(settings)) if text not in named.values()]
    extra = [text for text in others if text is not None and tokenizer.token_to_id(text) is not None]
    written = {
        "tokenizer_class": SPEECH if is_speech else "PreTrainedTokenizerFast",
        **({} if max_length is None else {"model_max_length": max_length}),
        **{key: settings[key] for key in KEPT if settings.get(key) is not None},
        **{f"{role}_token": text for role, text in named.items() if text is not None},
        **({"additional_special_tokens": extra} if extra else {}),
    }
    write_json(folder / SETTINGS, written)
    for name, text in templates_of(settings).items():
        path = folder / (TEMPLATE if name == "default" else f"{TEMPLATES}/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def templates_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return chat templates by name, from any of the forms in which files state them."""
    stated = settings.get("chat_template") or {}
    if isinstance(stated, list):
        stated = {str(each.get("name")): each.get("template") for each in stated if isinstance(each, dict)}
    named = stated if isinstance(stated, dict) else {"default": stated}
    safe = {name: text for name, text in named.items() if re.fullmatch(r"[\w. -]+", name)}
    return {name: text for name, text in safe.items() if isinstance(text, str)}


def truncation_side(settings: Mapping[str, Any]) -> Side:
    """Return the end at which a text that is too long is cut: tokenizer_config.json's, else the right."""
    side = settings.get("truncation_side")
    refuse(
        side not in (None, "left", "right"),
        f"{SETTINGS} has truncation_side {side!r}: choose left or right",
        CheckpointError,
    )
    return "left" if side == "left" else "right"


def warn_if_cut(cut: bool, max_length: int, side: Side = "right") -> None:
    """Warn that a text is cut; Python shows a warning of the same words once."""
    if cut:
        most = f"the {max_length:,} tokens that the model takes"
        part = "beginning" if side == "right" else "end"
        warnings.warn(f"a text is longer than {most}: only its {part} is read", stacklevel=2)


def check_infilling(settings: Mapping[str, Any], texts: Iterable[str]) -> None:
    """Refuse texts with CodeLlama's fill token, which its class in transformers rewrites."""
    named = str(settings.get("tokenizer_class"))
    fill = token_text(settings.get("fill_token", "<FILL_ME>")) if named.startswith("CodeLlama") else None
    refuse(
        bool(fill) and any(str(fill) in text for text in texts),
        f"a text has {fill}, which asks for infilling: give what comes after it as suffix",
    )


def encode(
    tokenizer: Tokenizer, texts: Iterable[str], max_length: int | None = None, side: Side = "right"
) -> list[list[int]]:
    """Return the ids of each text with its special tokens, truncated at `side` to `max_length`."""
    given, encoded = list(texts), list[list[int]]()
    for at in range(0, len(given), TOGETHER):  # encodings hold much more than the ids that are kept of them
        encoded += _encode(tokenizer, given[at : at + TOGETHER], max_length, side)
    return encoded


def _encode(
    tokenizer: Tokenizer, texts: Sequence[str], max_length: int | None, side: Side
) -> list[list[int]]:
    cleaned = [clean(text) for text in texts]
    with refusing("the tokenizer cannot read a text"):
        if max_length is None:
            return [encoding.ids for encoding in tokenizer.encode_batch_fast(cleaned)]
        encodings = tokenizer.encode_batch_fast(cleaned, add_special_tokens=False)
    room = max_length - tokenizer.num_special_tokens_to_add(is_pair=False)
    refuse(room < 0, f"max_length {max_length} is below the number of special tokens: raise it")
    warn_if_cut(max(map(len, encodings), default=0) > room, max_length, side)
    for encoding in encodings:
        encoding.truncate(room, direction=side)
    return [tokenizer.post_process(encoding).ids for encoding in encodings]


# Encodings with offsets and segment types -------------------------------------------------------------------


def encoding_of(tokenizer: Tokenizer, text: str | list[str], special: bool = False) -> Encoding:
    """Encode one text, or a list of words, with its special tokens or without."""
    words = not isinstance(text, str)
    cleaned = clean(text) if isinstance(text, str) else [clean(word) for word in text]
    with refusing("the tokenizer cannot read a text"):
        return tokenizer.encode(cleaned, is_pretokenized=words, add_special_tokens=special)


def framed(
    tokenizer: Tokenizer, max_length: int, text: str, pair: str | None = None, side: Side = "right"
) -> Encoding:
    """Encode a text or a pair with its special tokens; the longer one is truncated until all fits."""
    parts = [encoding_of(tokenizer, part) for part in ((text,) if pair is None else (text, pair))]
    room = max_length - tokenizer.num_special_tokens_to_add(is_pair=pair is not None)
    warn_if_cut(sum(map(len, parts)) > max(room, 0), max_length, side)
    for part, length in zip(parts, _shares(max(room, 0), *map(len, parts))):
        part.truncate(length, direction=side)
    return tokenizer.post_process(parts[0], parts[1] if pair is not None else None)


def _shares(room: int, first: int, second: int = 0) -> tuple[int, int]:
    """Return how many tokens of each of two texts fit: of the shorter one half of the room at least."""
    shorter, longer = sorted((first, second))
    shorter = min(shorter, max(room // 2, room - longer))
    longer = min(longer, room - shorter)
    return (shorter, longer) if first <= second else (longer, shorter)


def windows(
    tokenizer: Tokenizer, max_length: int, text: str | list[str], stride: int, question: str | None = None
) -> list[tuple[int, Encoding]]:
    """Encode a text in windows that fit, each with its special tokens and the question before it.

    Return (number of the first token, encoding) for each.

    Neighbours share `stride` tokens, half a window at most.
    """
    refuse(stride < 0, f"stride {stride} is negative: it is the number of tokens that two windows share")
    first = None if question is None else encoding_of(tokenizer, question)
    taken = tokenizer.num_special_tokens_to_add(is_pair=first is not None) + len(first or [])
    room = max_length - taken
    refuse(
        room < 1,
        f"a question takes {taken} tokens, special ones too, and a window has {max_length}: shorten it",
    )
    stride = min(stride, room // 2)
    whole = encoding_of(tokenizer, text)
    whole.truncate(room, stride=stride)
    return [
        (
            number * (room - stride),
            tokenizer.post_process(piece) if first is None else tokenizer.post_process(first, piece),
        )
        for number, piece in enumerate([whole, *whole.overflowing])
    ]
