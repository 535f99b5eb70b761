"""Tokenizers that come with a checkpoint, whatever their files; special tokens by role; text to ids.

`tokenizer.json` is taken as it stands. Older directories hold a vocabulary alone (`vocab.txt`; `vocab.json` and
`merges.txt`; a SentencePiece `.model`), and what surrounds it is known by the name of the tokenizer's class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece

from clearhead.errors import CheckpointError, InputError
from clearhead.hub.files import read_json, write_json
from clearhead.hub.pieces import FAMILIES, from_pieces, from_pieces_and_vocabulary

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model")
ROLES = ("pad", "bos", "eos", "unk", "cls", "sep", "mask")
KEPT = (
    "model_max_length",
    "padding_side",
    "truncation_side",
    "chat_template",
    "clean_up_tokenization_spaces",
    "model_input_names",
)

# The class that a model's tokenizer has when tokenizer_config.json does not name it.
CLASSES = {
    **dict.fromkeys(("roberta", "bart", "longformer"), "Roberta"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2"),
    **dict.fromkeys(("t5", "mt5"), "T5"),
    **dict.fromkeys(("llama", "mistral", "mixtral"), "Llama"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "Gemma"),
    "xlm-roberta": "XLMRoberta",
    "albert": "Albert",
    "marian": "Marian",
}
LIKE = {"Bart": "Roberta", "Longformer": "Roberta", "LED": "Roberta"}
NO_CLASS = ("", "PreTrained", "Tokenizers", "PreTrainedTokenizerFast", "TokenizersBackend")

# The special tokens that a class has without any file naming them.
BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
FAIRSEQ = {
    "bos": "<s>",
    "eos": "</s>",
    "sep": "</s>",
    "cls": "<s>",
    "unk": "<unk>",
    "pad": "<pad>",
    "mask": "<mask>",
}
USUAL: dict[str, dict[str, str]] = {
    "Roberta": FAIRSEQ,
    "XLMRoberta": FAIRSEQ,
    "GPT2": dict.fromkeys(("unk", "bos", "eos"), "<|endoftext|>"),
    "Qwen2": dict.fromkeys(("unk", "eos", "pad"), "<|endoftext|>"),
    "T5": {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
    "Marian": {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
    "Llama": {"unk": "<unk>", "bos": "<s>", "eos": "</s>"},
    "Gemma": {"unk": "<unk>", "bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "mask": "<mask>"},
    "Albert": {**BERT, "unk": "<unk>", "pad": "<pad>", "bos": "[CLS]", "eos": "[SEP]"},
    "Bert": BERT,
}
QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the special tokens of special_tokens_map.json that it does not name itself."""
    found = [
        read_json(folder / name) for name in ("special_tokens_map.json", SETTINGS) if (folder / name).exists()
    ]
    settings: dict[str, Any] = {}
    for part in found:
        settings.update({key: value for key, value in part.items() if value is not None})
    return settings


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model directory, or None where it has none (or one of a class that its files alone do not explain).

    It neither pads nor cuts by itself: `encode` here does.
    """
    if (folder / TOKENIZER).exists():
        return _from_json(folder / TOKENIZER)
    settings = read_settings(folder)
    kind = _class_of(folder, settings)
    try:
        return _build(folder, kind, settings)
    except CheckpointError:
        raise
    except Exception as error:  # what the tokenizers library says about a vocabulary it cannot use
        raise CheckpointError(
            f"{folder}: its vocabulary makes no tokenizer: {(str(error).splitlines() or [''])[0][:200]}"
        ) from None


def open_tokenizer(path: Path, folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer for the model in `folder` that lies elsewhere, and its settings.

    `path` is a directory, a tokenizer.json, a SentencePiece `.model` or llama2.c's tokenizer `.bin`.
    """
    if path.is_dir():
        tokenizer = load_tokenizer(path)
        if tokenizer is None:
            raise CheckpointError(
                f"{path} holds no tokenizer: name a directory with tokenizer.json or a vocabulary, or one file"
            )
        return tokenizer, read_settings(path)
    if path.suffix == ".json":
        return _from_json(path), read_settings(path.parent)
    if path.suffix not in (".model", ".spm", ".bin"):
        raise CheckpointError(
            f"{path} is no tokenizer: give a directory, tokenizer.json, a SentencePiece .model or a llama2.c .bin"
        )
    settings = read_settings(folder)
    kind = "Llama" if path.suffix == ".bin" else _class_of(folder, settings)
    if path.suffix == ".bin":
        settings = {
            **{f"{role}_token": text for role, text in USUAL[kind].items()},
            "add_bos_token": True,
            **settings,
        }
    special = special_tokens(settings, kind)
    tokenizer = from_pieces(path, kind if kind in FAMILIES else "", settings)
    _add_named(folder, tokenizer, settings, special)
    _frame(tokenizer, kind, settings, special)
    return tokenizer, settings


def _from_json(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} is no tokenizer: {str(error).splitlines()[0][:200]}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _class_of(folder: Path, settings: Mapping[str, Any]) -> str:
    """The tokenizer's class: "Bert", "Roberta", "T5", ...; empty where nothing says it."""
    named = settings.get("tokenizer_class")
    kind = named.removesuffix("Fast").removesuffix("Tokenizer") if isinstance(named, str) else ""
    if kind in NO_CLASS:
        path = folder / "config.json"
        model_type = read_json(path).get("model_type") if path.exists() else None
        kind = CLASSES.get(model_type, "") if isinstance(model_type, str) else ""
    return LIKE.get(kind, kind)


def _build(folder: Path, kind: str, settings: dict[str, Any]) -> Tokenizer | None:
    """From a vocabulary alone."""
    pieces = next((folder / name for name in PIECES if (folder / name).exists()), None)
    if (folder / "vocab.txt").exists():
        kind = "Bert"
        special = special_tokens(settings, kind)
        tokenizer = _wordpiece(folder / "vocab.txt", settings, special)
    elif (folder / "source.spm").exists() and (folder / "vocab.json").exists():
        kind = "Marian"
        special = special_tokens(settings, kind)
        vocabulary = read_json(folder / "vocab.json")
        tokenizer = from_pieces_and_vocabulary(folder / "source.spm", vocabulary, special["unk"])
        tokenizer.add_special_tokens(
            [token for token in vocabulary if token.startswith(">>") and token.endswith("<<")]
        )
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        kind = kind or "GPT2"
        special = special_tokens(settings, kind)
        tokenizer = _byte_level(folder, kind, settings)
    elif pieces is not None and kind in FAMILIES:
        special = special_tokens(settings, kind)
        tokenizer = from_pieces(pieces, kind, settings)
    else:
        return None
    _add_named(folder, tokenizer, settings, special)
    _frame(tokenizer, kind, settings, special)
    return tokenizer


def special_tokens(settings: Mapping[str, Any], kind: str = "") -> dict[str, str]:
    """Special tokens by role, as text: what the files name, else what the class usually has."""
    named = {role: _text(settings.get(f"{role}_token")) for role in ROLES}
    return {**USUAL.get(kind, {}), **{role: text for role, text in named.items() if text}}


def _text(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _wordpiece(path: Path, settings: Mapping[str, Any], special: Mapping[str, str]) -> Tokenizer:
    tokenizer = Tokenizer(WordPiece(WordPiece.read_file(str(path)), unk_token=special["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _byte_level(folder: Path, kind: str, settings: Mapping[str, Any]) -> Tokenizer:
    vocabulary, merges = BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = Tokenizer(
        BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    )
    prefix = bool(settings.get("add_prefix_space", False))
    if kind == "Qwen2":
        tokenizer.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_named(
    folder: Path, tokenizer: Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Tokens that files name beside the vocabulary: never split, and added at the end where the vocabulary lacks them."""
    numbered = settings.get("added_tokens_decoder") or {}
    for _, entry in sorted(numbered.items(), key=lambda item: int(item[0])):
        flags = {
            key: bool(entry[key])
            for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if key in entry
        }
        tokenizer.add_tokens([AddedToken(entry["content"], **flags)])
    added = read_json(folder / "added_tokens.json") if (folder / "added_tokens.json").exists() else {}
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in sorted(added, key=added.__getitem__)]
    )
    known, named = tokenizer.get_vocab(), special_tokens(settings).values()
    wanted = [*(text for text in special.values() if text in known or text in named), *_extra(settings)]
    done = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(wanted)
            if text not in done
        ]
    )


def _extra(settings: Mapping[str, Any]) -> list[str]:
    listed = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    return [
        text for token in (listed if isinstance(listed, list) else []) if (text := _text(token)) is not None
    ]


def _frame(tokenizer: Tokenizer, kind: str, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """What is put around a text: [CLS] and [SEP], <s> and </s>, or nothing."""
    ids = {role: tokenizer.token_to_id(text) for role, text in special.items()}
    if kind == "Roberta":
        cls, sep = ids["cls"], ids["sep"]
        if cls is None or sep is None:
            raise CheckpointError(
                f"the vocabulary lacks {special['cls']} or {special['sep']}, which stand around each text"
            )
        prefix, trim = bool(settings.get("add_prefix_space", False)), bool(settings.get("trim_offsets", True))
        tokenizer.post_processor = processors.RobertaProcessing(
            (special["sep"], sep), (special["cls"], cls), trim, prefix
        )
        return
    begins, ends = bool(settings.get("add_bos_token", False)), bool(settings.get("add_eos_token", False))
    single, pair = {
        "Bert": ("cls $A sep", "cls $A sep $B:1 sep:1"),
        "Albert": ("cls $A sep", "cls $A sep $B:1 sep:1"),
        "XLMRoberta": ("bos $A eos", "bos $A eos eos $B eos"),
        "T5": ("$A eos", "$A eos $B eos"),
        "Marian": ("$A eos", "$A $B eos"),
    }.get(
        kind,
        (
            _around("$A", begins, ends),
            _around("$A", begins, ends) + " " + _around("$B:1", begins, ends, ":1"),
        ),
    )
    names = {part.partition(":")[0] for part in f"{single} {pair}".split()} - {"$A", "$B"}
    if not names or any(ids.get(role) is None for role in names):
        return

    def spelled(template: str) -> list[str]:
        parts = [part.partition(":") for part in template.split()]
        return [special.get(name, name) + (f":{type_id}" if type_id else ":0") for name, _, type_id in parts]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=spelled(single),
        pair=spelled(pair),
        special_tokens=[(special[role], ids[role]) for role in sorted(names)],
    )


def _around(text: str, begins: bool, ends: bool, type_id: str = "") -> str:
    return " ".join((["bos" + type_id] if begins else []) + [text] + (["eos" + type_id] if ends else []))


def special_ids(
    tokenizer: Tokenizer | None,
    settings: Mapping[str, Any],
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, int]:
    """Ids of special tokens by role: pad, bos, eos, unk, cls, sep, mask, decoder_start, forced_bos, forced_eos.

    A token that the tokenizer's files name comes first, then an id of generation_config.json, then one of config.json.
    Where several end a text, `eos` is the first of them: `stop_ids` gives all.
    """
    special: dict[str, int] = {}
    for role in (*ROLES, "decoder_start", "forced_bos", "forced_eos"):
        ids = [_ids(place.get(f"{role}_token_id")) for place in (generation, config)]
        text = _text(settings.get(f"{role}_token"))
        known = tokenizer.token_to_id(text) if tokenizer is not None and text is not None else None
        found = [known] if known is not None else next((each for each in ids if each), [])
        if found:
            special[role] = found[0]
    if tokenizer is not None:  # roles that no file names, by the usual spelling
        marked = {
            token.content: index
            for index, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        for role in ("pad", "unk", "cls", "sep", "mask"):
            found = [marked[text] for text in (f"[{role.upper()}]", f"<{role}>") if text in marked]
            if found:
                special.setdefault(role, found[0])
    return special


def stop_ids(
    special: Mapping[str, int], generation: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[int, ...]:
    """Every id that ends a generated text: `eos_token_id` may be a list."""
    stated = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    return tuple(stated or ([special["eos"]] if "eos" in special else []))


def _ids(value: Any) -> list[int]:
    return [
        item for item in (value if isinstance(value, list) else [value]) if type(item) is int and item >= 0
    ]


def save_tokenizer(
    folder: Path,
    tokenizer: Tokenizer,
    special: Mapping[str, int],
    settings: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> None:
    """tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer opens with the same ids."""
    settings = settings or {}
    try:
        tokenizer.save(str(folder / TOKENIZER))
    except Exception as error:
        raise CheckpointError(f"{folder / TOKENIZER} cannot be written: {error}") from None
    written: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if max_length is not None:
        written["model_max_length"] = max_length
    written.update({key: settings[key] for key in KEPT if key in settings})
    named = {role: tokenizer.id_to_token(special[role]) for role in ROLES if role in special}
    written.update({f"{role}_token": text for role, text in named.items() if text is not None})
    roles = set(named.values())
    extra = [
        text for text in _extra(settings) if text not in roles and tokenizer.token_to_id(text) is not None
    ]
    if extra:
        written["additional_special_tokens"] = extra
    write_json(folder / SETTINGS, written)


def clean(text: str) -> str:
    """The text with U+FFFD for each broken surrogate, which a tokenizer would choke on."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode(tokenizer: Tokenizer, texts: Iterable[str], max_length: int | None = None) -> list[list[int]]:
    """Ids of each text with its special tokens, cut to `max_length` so that those stay. Broken surrogates become U+FFFD."""
    mended = [clean(text) for text in texts]
    if max_length is None:
        return [encoding.ids for encoding in tokenizer.encode_batch(mended)]
    room = max_length - tokenizer.num_special_tokens_to_add(is_pair=False)
    if room < 0:
        raise InputError(
            f"max_length {max_length} is below the special tokens that the tokenizer adds: raise it"
        )
    found = tokenizer.encode_batch(mended, add_special_tokens=False)
    for encoding in found:
        encoding.truncate(room)
    return [tokenizer.post_process(encoding).ids for encoding in found]
