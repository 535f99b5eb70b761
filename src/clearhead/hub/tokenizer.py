"""Tokenizers that come with a checkpoint, whatever their files; special tokens by role; text to ids.

`tokenizer.json` is taken as it stands. Older directories hold a vocabulary alone: see `vocabularies`.
"""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from clearhead.errors import CheckpointError, refuse
from clearhead.hub.files import first_line, read_json_if_any, write_json
from clearhead.hub.vocabularies import ROLES, extra_tokens, from_folder, from_piece_file, token_text

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
KEPT = (
    *("model_max_length", "padding_side", "truncation_side"),
    *("chat_template", "clean_up_tokenization_spaces", "model_input_names"),
)


def read_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and from special_tokens_map.json the special tokens it does not name."""
    return {
        key: value
        for name in ("special_tokens_map.json", SETTINGS)
        for key, value in read_json_if_any(folder / name).items()
        if value is not None
    }


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a model directory; None where it has none that we can build.

    It neither pads nor truncates by itself: `encode` here does.
    """
    if (folder / TOKENIZER).exists():
        return _from_json(folder / TOKENIZER)
    try:
        return from_folder(folder, read_settings(folder))
    except CheckpointError:
        raise
    except Exception as error:  # what the tokenizers library says about a vocabulary it cannot use
        raise CheckpointError(f"{folder}: its vocabulary makes no tokenizer: {first_line(error)}") from None


def open_tokenizer(path: Path, folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return a tokenizer for the model in `folder` that lies elsewhere, and its settings.

    `path` is a directory, a tokenizer.json, a SentencePiece `.model` or llama2.c's tokenizer `.bin`.
    """
    if path.is_dir():
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
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} is no tokenizer: {first_line(error)}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
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
        found = [index for value in stated for index in _ids(value)]
        if found:
            special[role] = found[0]
    return special


def stop_ids(
    special: Mapping[str, int], generation: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return every id that ends a generated text: `eos_token_id` may be a list."""
    stated = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    return tuple(stated or _ids(special.get("eos")))


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
    try:
        tokenizer.save(str(folder / TOKENIZER))
    except Exception as error:
        raise CheckpointError(f"{folder / TOKENIZER} cannot be written: {error}") from None
    named = {role: tokenizer.id_to_token(special[role]) for role in ROLES if role in special}
    others = [text for text in extra_tokens(settings) if text not in named.values()]
    extra = [text for text in others if tokenizer.token_to_id(text) is not None]
    written = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({} if max_length is None else {"model_max_length": max_length}),
        **{key: settings[key] for key in KEPT if key in settings},
        **{f"{role}_token": text for role, text in named.items() if text is not None},
        **({"additional_special_tokens": extra} if extra else {}),
    }
    write_json(folder / SETTINGS, written)


def clean(text: str) -> str:
    """Return the text with U+FFFD for each broken surrogate, which a tokenizer could not read."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def warn_if_cut(cut: bool, max_length: int) -> None:
    """Warn that a text is cut; Python shows a warning of the same words once."""
    if cut:
        most = f"the {max_length:,} tokens that the model takes"
        warnings.warn(f"a text is longer than {most}: only its beginning is read", stacklevel=2)


def encode(tokenizer: Tokenizer, texts: Iterable[str], max_length: int | None = None) -> list[list[int]]:
    """Return the ids of each text with its special tokens, truncated to `max_length`."""
    cleaned = [clean(text) for text in texts]
    if max_length is None:
        return [encoding.ids for encoding in tokenizer.encode_batch(cleaned)]
    room = max_length - tokenizer.num_special_tokens_to_add(is_pair=False)
    refuse(room < 0, f"max_length {max_length} is below the number of special tokens: raise it")
    found = tokenizer.encode_batch(cleaned, add_special_tokens=False)
    warn_if_cut(max(map(len, found), default=0) > room, max_length)
    for encoding in found:
        encoding.truncate(room)
    return [tokenizer.post_process(encoding).ids for encoding in found]
