"""Tokenizers from a vocabulary alone: `vocab.txt`; `vocab.json` and `merges.txt`; a SentencePiece `.model`.

What surrounds the vocabulary (normalisation, special tokens, the template of a text) is known by the name of
the tokenizer's class.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece

from clearhead.hub.files import read_json, read_json_if_any, refuse
from clearhead.hub.pieces import FAMILIES, assembled, from_pieces, from_pieces_and_vocabulary

PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model")
ROLES = ("pad", "bos", "eos", "unk", "cls", "sep", "mask")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
Settings = dict[str, Any]

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
    **{"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>"},
    **{"unk": "<unk>", "pad": "<pad>", "mask": "<mask>"},
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

# The special tokens around one text $A and around a pair $A, $B; a number after a colon is the type id.
TEMPLATES = {
    "Bert": ("cls $A sep", "cls $A sep $B:1 sep:1"),
    "Albert": ("cls $A sep", "cls $A sep $B:1 sep:1"),
    "XLMRoberta": ("bos $A eos", "bos $A eos eos $B eos"),
    "T5": ("$A eos", "$A eos $B eos"),
    "Marian": ("$A eos", "$A $B eos"),
}
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def from_folder(folder: Path, settings: Settings) -> Tokenizer | None:
    """Build the tokenizer of a directory from its vocabulary; None without one, or for an unknown class."""
    kind = class_of(folder, settings)
    pieces = next((folder / name for name in PIECES if (folder / name).exists()), None)
    if (folder / "vocab.txt").exists():
        return _completed(folder, _wordpiece(folder / "vocab.txt", settings), "Bert", settings)
    if (folder / "source.spm").exists() and (folder / "vocab.json").exists():
        return _completed(folder, _marian(folder, settings), "Marian", settings)
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        kind = kind or "GPT2"
        return _completed(folder, _byte_level(folder, kind, settings), kind, settings)
    if pieces is not None and kind in FAMILIES:
        return _completed(folder, from_pieces(pieces, kind, settings), kind, settings)
    return None


def from_piece_file(path: Path, folder: Path, settings: Settings) -> tuple[Tokenizer, Settings]:
    """Return the tokenizer of a SentencePiece or llama2.c file for the model in `folder`, and settings."""
    kind = class_of(folder, settings)
    if path.suffix == ".bin":
        kind = "Llama"
        settings = {
            **{f"{role}_token": text for role, text in USUAL[kind].items()},
            **{"add_bos_token": True, **settings},
        }
    tokenizer = from_pieces(path, kind if kind in FAMILIES else "", settings)
    return _completed(folder, tokenizer, kind, settings), settings


def class_of(folder: Path, settings: Settings) -> str:
    """Return the tokenizer's class: "Bert", "Roberta", "T5", ...; empty where no file names it."""
    named = settings.get("tokenizer_class")
    kind = named.removesuffix("Fast").removesuffix("Tokenizer") if isinstance(named, str) else ""
    if kind in NO_CLASS:
        model_type = read_json_if_any(folder / "config.json").get("model_type")
        kind = CLASSES.get(model_type, "") if isinstance(model_type, str) else ""
    return LIKE.get(kind, kind)


def special_tokens(settings: Mapping[str, Any], kind: str = "") -> dict[str, str]:
    """Return special tokens by role, as text: what the files name, else what the class usually has."""
    named = {role: token_text(settings.get(f"{role}_token")) for role in ROLES}
    return USUAL.get(kind, {}) | {role: text for role, text in named.items() if text}


def token_text(token: Any) -> str | None:
    """Return a token that a file states as text or as an object; None for anything else."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def extra_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Return the special tokens that have no role."""
    listed = settings.get("additional_special_tokens") or settings.get("extra_special_tokens")
    texts = map(token_text, listed if isinstance(listed, list) else [])
    return [text for text in texts if text is not None]


# Vocabularies -----------------------------------------------------------------------------------------------


def _wordpiece(path: Path, settings: Settings) -> Tokenizer:
    return assembled(
        WordPiece(WordPiece.read_file(str(path)), unk_token=special_tokens(settings, "Bert")["unk"]),
        normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
            strip_accents=settings.get("strip_accents"),
            lowercase=settings.get("do_lower_case", True),
        ),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(prefix="##"),
    )


def _byte_level(folder: Path, kind: str, settings: Settings) -> Tokenizer:
    vocabulary, merges = BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    units = BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    prefix = bool(settings.get("add_prefix_space", False))
    if kind != "Qwen2":
        return assembled(units, None, pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel())
    words = [
        pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
    ]
    return assembled(units, normalizers.NFC(), pre_tokenizers.Sequence(words), decoders.ByteLevel())


def _marian(folder: Path, settings: Settings) -> Tokenizer:
    vocabulary = read_json(folder / "vocab.json")
    unknown = special_tokens(settings, "Marian")["unk"]
    tokenizer = from_pieces_and_vocabulary(folder / "source.spm", vocabulary, unknown)
    tokenizer.add_special_tokens(
        [token for token in vocabulary if token.startswith(">>") and token.endswith("<<")]
    )
    return tokenizer


# Special tokens ---------------------------------------------------------------------------------------------


def _completed(folder: Path, tokenizer: Tokenizer, kind: str, settings: Settings) -> Tokenizer:
    """Add the tokens that files name beside the vocabulary, and put special tokens around each text."""
    special = special_tokens(settings, kind)
    _add_named(folder, tokenizer, settings, special)
    ids = {role: tokenizer.token_to_id(text) for role, text in special.items()}
    if kind == "Roberta":
        _frame_roberta(tokenizer, settings, special, ids)
    else:
        _frame(tokenizer, kind, settings, special, ids)
    return tokenizer


def _add_named(folder: Path, tokenizer: Tokenizer, settings: Settings, special: dict[str, str]) -> None:
    """Add tokens that are never split; those that the vocabulary lacks come after it."""
    numbered = settings.get("added_tokens_decoder") or {}
    for number in sorted(numbered, key=int):
        flags = {name: bool(value) for name, value in numbered[number].items() if name in FLAGS}
        tokenizer.add_tokens([AddedToken(numbered[number]["content"], **flags)])
    added = read_json_if_any(folder / "added_tokens.json")
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in sorted(added, key=added.__getitem__)]
    )
    stated = {*tokenizer.get_vocab(), *special_tokens(settings).values()}
    wanted = [*(text for text in special.values() if text in stated), *extra_tokens(settings)]
    done = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in dict.fromkeys(wanted) if text not in done]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _frame_roberta(
    tokenizer: Tokenizer, settings: Settings, special: dict[str, str], ids: dict[str, Any]
) -> None:
    sep, cls = ((special[role], ids[role]) for role in ("sep", "cls"))
    refuse(
        sep[1] is None or cls[1] is None,
        f"the vocabulary lacks {cls[0]} or {sep[0]}, which stand around each text",
    )
    prefix, trim = bool(settings.get("add_prefix_space", False)), bool(settings.get("trim_offsets", True))
    tokenizer.post_processor = processors.RobertaProcessing(sep, cls, trim, prefix)


def _frame(
    tokenizer: Tokenizer,
    kind: str,
    settings: Settings,
    special: dict[str, str],
    ids: dict[str, Any],
) -> None:
    """Put the special tokens of a template around each text, if the vocabulary has them all."""
    begin = "bos " if settings.get("add_bos_token", False) else ""
    end = " eos" if settings.get("add_eos_token", False) else ""
    single = f"{begin}$A{end}"
    second = " ".join(f"{part}:1" for part in f"{begin}$B{end}".split())
    templates = TEMPLATES.get(kind, (single, f"{single} {second}"))
    parts = [[part.partition(":") for part in template.split()] for template in templates]
    names = {name for template in parts for name, _, _ in template} - {"$A", "$B"}
    if not names or any(ids.get(name) is None for name in names):
        return
    one, pair = ([f"{special.get(name, name)}:{type_id or 0}" for name, _, type_id in each] for each in parts)
    used = [(special[name], ids[name]) for name in sorted(names)]
    tokenizer.post_processor = processors.TemplateProcessing(single=one, pair=pair, special_tokens=used)
