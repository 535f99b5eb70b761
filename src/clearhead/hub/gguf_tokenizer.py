"""The tokenizer within a GGUF file, both ways: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama").

A file names how text is split before BPE (`tokenizer.ggml.pre`); the expressions are those of the models that
brought the names. What is written is read back and held against the tokenizer itself on a few texts.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from clearhead.errors import CheckpointError, refusing
from clearhead.hub.files import refuse
from clearhead.hub.gguf_file import GgufHeader
from clearhead.hub.pieces import PieceModel, assembled, llama
from clearhead.hub.vocabularies import QWEN2_SPLIT, completed

FIELD = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
# How text is split: the expressions in turn; None stands for GPT-2's own, "digits" for one digit each.
SPLITS: dict[str, tuple[str | None, ...]] = {
    "gpt-2": (None,),
    "smollm": ("digits", None),
    "llama-bpe": (LLAMA3_SPLIT,),
    "qwen2": (QWEN2_SPLIT,),
    "falcon": (PUNCTUATION, None, "[0-9][0-9][0-9]"),
    "default": (PUNCTUATION.replace("`", ""), None, r"\p{N}+", "[0-9][0-9][0-9]"),
}
ALIKE = {
    **dict.fromkeys(("phi-2", "mpt", "olmo", "jais", "gpt3-finnish", "roberta-bpe"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), "llama-bpe"),
    **dict.fromkeys(("stablelm2", "megrez"), "qwen2"),
}
WHOLE_WORDS = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
)  # a word that is a token is not merged from parts
PROBES = (
    "Hello world",
    " two  spaces,\ttabs\n\nand   lines \n",
    "It's 1234567 and 3.5, isn't it? WE'LL see 007",
    "naïve café 中文字 日本語 привет 😀🎉",
    "x = y+1; // <tag> [a](b) #$%&_-^|~`",
)


def gguf_settings(header: GgufHeader) -> dict[str, Any]:
    """Return what tokenizer_config.json would say: special tokens, what stands around a text, templates."""
    fields, tokens = header.fields, header.fields.get(f"{FIELD}tokens")
    settings: dict[str, Any] = {}
    for role, name in ROLES.items():
        number = fields.get(f"{FIELD}{name}_token_id")
        if type(number) is int and isinstance(tokens, list):
            refuse(
                not 0 <= number < len(tokens),
                f"{header.path} has {FIELD}{name}_token_id {number}: there are {len(tokens)} tokens",
            )
            settings[f"{role}_token"] = tokens[number]
    usual = fields.get(f"{FIELD}model") == "llama" or fields.get(f"{FIELD}pre") in WHOLE_WORDS
    settings["add_bos_token"] = bool(fields.get(f"{FIELD}add_bos_token", usual))
    settings["add_eos_token"] = bool(fields.get(f"{FIELD}add_eos_token", False))
    named = {
        key.removeprefix("tokenizer.chat_template.") if "template." in key else "default": value
        for key, value in fields.items()
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
    }
    if named:
        settings["chat_template"] = named["default"] if {*named} == {"default"} else named
    length = fields.get(f"{header.architecture}.context_length")
    return settings | ({"model_max_length": length} if type(length) is int else {})


def gguf_tokenizer(header: GgufHeader) -> Tokenizer | None:
    """Return the tokenizer of a file; None where it has none."""
    fields, wrong = header.fields, f"{header.path} holds no tokenizer that can be built"
    kind = fields.get(f"{FIELD}model", "no_vocab")
    if kind in ("no_vocab", "none"):
        return None
    refuse(
        kind not in ("gpt2", "llama"),
        f'{header.path} has {FIELD}model "{kind}": supported are gpt2 and llama; '
        "name a tokenizer that lies elsewhere (tokenizer)",
    )
    tokens: Any = fields.get(f"{FIELD}tokens")
    kinds = fields.get(f"{FIELD}token_type") or [NORMAL] * len(tokens or ())
    if not _texts(tokens) or len(set(tokens)) != len(tokens) or len(kinds) != len(tokens):
        raise CheckpointError(f"{wrong}: {FIELD}tokens must be texts that differ, each with its type")
    with refusing(wrong, CheckpointError):
        made = _byte_level(header, tokens, kinds) if kind == "gpt2" else _pieces(header, tokens, kinds)
        for special in (False, True):
            wanted = CONTROL if special else USER_DEFINED
            listed = [text for text, one in zip(tokens, kinds) if one == wanted]
            made.add_tokens([AddedToken(text, normalized=False, special=special) for text in listed])
        return completed(header.path, made, "", gguf_settings(header))


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _byte_level(header: GgufHeader, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    merges, pre = header.fields.get(f"{FIELD}merges"), header.fields.get(f"{FIELD}pre", "default")
    if merges is None and all(len(text) == 1 for text, kind in zip(tokens, kinds) if kind == NORMAL):
        merges = []  # of single bytes alone; an empty list is left out of a file
    refuse(not _texts(merges), f"{header.path} has no {FIELD}merges of texts")
    split = ALIKE.get(pre, pre)
    refuse(
        split not in SPLITS,
        f'{header.path} has {FIELD}pre "{pre}": supported are {", ".join(sorted({*SPLITS, *ALIKE}))}; '
        "name a tokenizer that lies elsewhere (tokenizer)",
    )
    pairs: Any = [tuple(re.split(r"(?<=.) ", one, maxsplit=1)) for one in merges or ()]
    units = BPE({text: number for number, text in enumerate(tokens)}, pairs, ignore_merges=pre in WHOLE_WORDS)
    return assembled(
        units,
        normalizers.NFC() if pre == "qwen2" else None,
        pre_tokenizers.Sequence([*map(_split, SPLITS[split]), *_bytes(SPLITS[split])]),
        decoders.ByteLevel(),
    )


def _split(how: str | None) -> Any:
    if how is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if how == "digits":
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(how), behavior="isolated")


def _bytes(ways: Sequence[str | None]) -> list[Any]:
    """Return what turns text into bytes, where GPT-2's expression has not done so."""
    return [] if None in ways else [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _pieces(header: GgufHeader, tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores = header.fields.get(f"{FIELD}scores")
    refuse(
        not isinstance(scores, list) or len(scores) != len(tokens),
        f"{header.path} must have {FIELD}scores, one for each token",
    )
    numbers, ids = list(scores or ()), {text: number for number, text in enumerate(tokens)}
    order = sorted(
        (number for number, kind in enumerate(kinds) if kind in (NORMAL, USER_DEFINED)),
        key=lambda number: -numbers[number],
    )
    halves = ((tokens[one][:cut], tokens[one][cut:]) for one in order for cut in range(1, len(tokens[one])))
    prefix = bool(header.fields.get(f"{FIELD}add_space_prefix", True))
    model = PieceModel(
        list(zip(tokens, numbers, kinds)),
        unigram=False,
        byte_fallback=True,
        dummy_prefix=prefix,
        ids=ids,
        merges=[(first, second) for first, second in halves if first in ids and second in ids],
    )
    return llama(model, {})


# Writing ----------------------------------------------------------------------------------------------------


def tokenizer_fields(
    tokenizer: Tokenizer, special: Mapping[str, int], settings: Mapping[str, Any], size: int
) -> dict[str, Any]:
    """Return the fields of a tokenizer for a table of `size` tokens."""
    model = json.loads(tokenizer.to_str())["model"]
    fallback = bool(model.get("byte_fallback"))
    refuse(
        model["type"] != "BPE" or tokenizer.get_vocab_size() > size,
        f"GGUF has no place for this tokenizer, of kind {model['type']}: supported is BPE, of bytes or with "
        "bytes for unknown characters",
    )
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    names = {number: text for text, number in vocabulary.items()}
    merges = [tuple(one.split(" ") if isinstance(one, str) else one) for one in model["merges"]]
    tokens = [names.get(number, f"[PAD{number}]") for number in range(size)]
    fields: dict[str, Any] = {
        f"{FIELD}tokens": tokens,
        f"{FIELD}token_type": [_kind(number, names, added, special, fallback) for number in range(size)],
        **{f"{FIELD}{ROLES[role]}_token_id": number for role, number in special.items() if role in ROLES},
        **_around(tokenizer, special),
        **_templates(settings),
    }
    if fallback:
        ranks = {first + second: -float(rank) for rank, (first, second) in reversed([*enumerate(merges)])}
        found = tokenizer.encode("a", add_special_tokens=False).tokens
        fields |= {
            f"{FIELD}model": "llama",
            f"{FIELD}scores": [ranks.get(text, -float(len(merges))) for text in tokens],
            f"{FIELD}add_space_prefix": bool(found) and found[0].startswith("\u2581"),
        }
        ways: list[dict[str, Any]] = [{}]
    else:
        fields |= {f"{FIELD}model": "gpt2", f"{FIELD}merges": [" ".join(pair) for pair in merges]}
        ways = [{f"{FIELD}pre": name} for name in (*SPLITS, "dbrx")]
    for way in ways:
        if _agrees(tokenizer, fields | way):
            return fields | way
    raise CheckpointError(
        "GGUF has no name for how this tokenizer splits text, and llama.cpp would split it otherwise: "
        "a model trained with tokens.kind=byte or tokens.kind=bpe can be converted"
    )


def _kind(
    number: int, names: Mapping[int, str], added: Mapping[int, Any], special: Mapping[str, int], pieces: bool
) -> int:
    if number not in names:
        return UNUSED
    if pieces and special.get("unk") == number:
        return UNKNOWN
    if number in added:
        return CONTROL if added[number].special else USER_DEFINED
    return BYTE if pieces and re.fullmatch(r"<0x[0-9A-F]{2}>", names[number]) else NORMAL


def _around(tokenizer: Tokenizer, special: Mapping[str, int]) -> dict[str, bool]:
    """Return whether a text begins with the first token and ends with the last."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=more).ids for more in (False, True))
    begins, ends = (
        bool(
            role in special
            and whole[place : place + 1 or None] == [special[role]]
            and len(whole) > len(plain)
        )
        for role, place in (("bos", 0), ("eos", -1))
    )
    return {f"{FIELD}add_bos_token": begins, f"{FIELD}add_eos_token": ends}


def _templates(settings: Mapping[str, Any]) -> dict[str, str]:
    stated = settings.get("chat_template") or {}
    if isinstance(stated, list):
        stated = {str(one.get("name")): one.get("template") for one in stated if isinstance(one, dict)}
    named = stated if isinstance(stated, dict) else {"default": stated}
    return {
        "tokenizer.chat_template" + ("" if name == "default" else f".{name}"): text
        for name, text in named.items()
        if isinstance(text, str)
    }


def _agrees(tokenizer: Tokenizer, fields: dict[str, Any]) -> bool:
    """Return whether the tokenizer that is read from these fields gives the same ids for some texts."""
    back = gguf_tokenizer(GgufHeader(Path("written.gguf"), {"general.architecture": "", **fields}, {}, 0))
    return back is not None and all(back.encode(text).ids == tokenizer.encode(text).ids for text in PROBES)
