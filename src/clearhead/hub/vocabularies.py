"""Tokenizers from a vocabulary: `vocab.txt`; `vocab.json` and `merges.txt`; a SentencePiece `.model`.

What surrounds the vocabulary (normalisation, special tokens, the template of a text) is known by the name of
the tokenizer's class. A class also surrounds the vocabulary of a `tokenizer.json` in its own way, as its
settings say, whatever else that file states: so does transformers.
"""

import base64
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece

from clearhead.hub.files import read_json, read_json_if_any, refuse
from clearhead.hub.sentencepiece import (
    FAMILIES,
    UNUSED,
    PieceModel,
    from_pieces,
    from_pieces_and_vocabulary,
    sentinels,
    token_text,
)
from clearhead.hub.tokens.text import assembled

Settings = dict[str, Any]
# In the order in which special tokens without an id get one.
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token

# Classes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenizerClass:
    """What a class of tokenizers has without any file saying so.

    In a template, $A and $B are texts, and a number after a colon is the type id.
    """

    special: Mapping[str, str] = field(default_factory=dict)  # special tokens, by role
    model_types: tuple[str, ...] = ()  # models whose tokenizer has this class where no file names one
    units: str = ""  # the kind of model that it takes from a tokenizer.json; empty: the file stands as it is
    unk_id: int = 0  # of such a model
    template: tuple[str, str] | None = None  # around one text and around a pair; None: as settings say
    around: tuple[str, ...] = ()  # roles around each text, where there is no template
    keeps_frame: bool = False  # it takes what a tokenizer.json puts around a text
    reads_unknown: bool = False  # its model looks up the unknown token by its text
    mask_takes_space: bool = False  # the one before it, unless a file says otherwise
    own_roles: Mapping[str, str] = field(default_factory=dict)  # special tokens of further roles, by key


BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
FAIRSEQ = {
    **{"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>"},
    **{"unk": "<unk>", "pad": "<pad>", "mask": "<mask>"},
}
LLAMA = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}
END = "<|endoftext|>"
CLS_SEP = ("cls $A sep", "cls $A sep $B:1 sep:1")
BOS_EOS, EOS = ("bos $A eos", "bos $A eos eos $B eos"), ("$A eos", "$A eos $B eos")
CLASSES: dict[str, TokenizerClass] = {
    "Bert": TokenizerClass(
        BERT, ("bert", "distilbert", "electra"), "WordPiece", template=CLS_SEP, reads_unknown=True
    ),
    "Roberta": TokenizerClass(FAIRSEQ, ("roberta", "bart", "longformer"), "BPE", around=("cls", "sep")),
    "XLMRoberta": TokenizerClass(FAIRSEQ, ("xlm-roberta",), "Unigram", 3, BOS_EOS),
    "Camembert": TokenizerClass(
        FAIRSEQ, ("camembert",), "Unigram", 3, BOS_EOS, reads_unknown=True, mask_takes_space=True
    ),
    "MPNet": TokenizerClass(
        {**FAIRSEQ, "unk": "[UNK]"},
        ("mpnet",),
        "WordPiece",
        around=("cls", "sep"),
        reads_unknown=True,
        mask_takes_space=True,
    ),
    "GPT2": TokenizerClass(
        dict.fromkeys(("unk", "bos", "eos"), END),
        ("gpt2", "phi", "opt", "gptj", "gpt_neo", "starcoder2"),
        "BPE",
        keeps_frame=True,
    ),
    "Qwen2": TokenizerClass(
        dict.fromkeys(("unk", "eos", "pad"), END),
        ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        "BPE",
        keeps_frame=True,
    ),
    "GPTNeoX": TokenizerClass(
        {**dict.fromkeys(("unk", "bos", "eos"), END), "pad": "<|padding|>"}, ("gpt_neox", "olmoe"), "BPE"
    ),
    "T5": TokenizerClass(
        {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}, ("t5", "mt5"), "Unigram", 2, template=EOS
    ),
    "Siglip": TokenizerClass({"eos": "</s>", "unk": "<unk>", "pad": "</s>"}, ("siglip",), template=EOS),
    "CLIP": TokenizerClass(
        {**dict.fromkeys(("unk", "eos", "pad"), END), "bos": "<|startoftext|>"},
        ("clip",),
        "BPE",
        around=("bos", "eos"),
        reads_unknown=True,
    ),
    "Marian": TokenizerClass(
        {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
        ("marian",),
        template=("$A eos", "$A $B eos"),
        reads_unknown=True,
    ),
    "Llama": TokenizerClass(LLAMA, ("llama", "mistral", "mixtral"), "BPE", keeps_frame=True),
    "CodeLlama": TokenizerClass(
        LLAMA,
        units="BPE",
        reads_unknown=True,
        own_roles={
            **{"prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>"},
            **{"eot_token": "▁<EOT>", "fill_token": "<FILL_ME>"},
        },
    ),
    "Gemma": TokenizerClass(
        {"unk": "<unk>", "bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "mask": "<mask>"},
        ("gemma", "gemma2", "gemma3_text"),
        "BPE",
        keeps_frame=True,
        reads_unknown=True,
    ),
    "Albert": TokenizerClass(
        {**BERT, "unk": "<unk>", "pad": "<pad>", "bos": "[CLS]", "eos": "[SEP]"},
        *(("albert",), "Unigram", 1, CLS_SEP),
        keeps_frame=True,
    ),
    "BigBird": TokenizerClass(
        {**BERT, "unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"},
        *(("big_bird",), "Unigram", 0, CLS_SEP),
        reads_unknown=True,
        mask_takes_space=True,
    ),
    "DebertaV2": TokenizerClass(
        {**BERT, "bos": "[CLS]", "eos": "[SEP]"},
        *(("deberta-v2",), "Unigram", 1, CLS_SEP),
        reads_unknown=True,
    ),
}
UNKNOWN_CLASS = TokenizerClass()
CLASS_OF_MODEL = {model: name for name, entry in CLASSES.items() for model in entry.model_types}
LIKE = {
    **dict.fromkeys(("Bart", "Longformer", "LED"), "Roberta"),
    **dict.fromkeys(("DistilBert", "Electra"), "Bert"),
}
# Models whose tokenizer.json stands as it is, whatever class is named.
AS_IT_STANDS = ("mistral", "mixtral", "phi3", "olmo2", "stablelm", "granite")
NO_CLASS = ("", "PreTrained", "Tokenizers", "PreTrainedTokenizerFast", "TokenizersBackend")

# Special tokens ---------------------------------------------------------------------------------------------


def special_tokens(settings: Mapping[str, Any], kind: str = "") -> dict[str, str]:
    """Return special tokens by role, as text: what the files name, else what the class usually has."""
    named = {role: token_text(token) for role, token in _by_role(settings, kind).items()}
    return {role: text for role, text in named.items() if text}


def _by_role(settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return special tokens by role, as files state them: null is no token, not the one of the class."""
    usual = CLASSES.get(kind, UNKNOWN_CLASS).special
    return {role: settings.get(f"{role}_token", usual.get(role)) for role in ROLES}


def extra_tokens(settings: Mapping[str, Any], kind: str = "") -> list[Any]:
    """Return the special tokens that have no role, as the files state them."""
    listed = settings.get("extra_special_tokens")
    if isinstance(listed, list):
        return listed
    if listed is None and "extra_special_tokens" in settings:
        return []
    older = settings.get("additional_special_tokens")
    listed = older if isinstance(older, list) else []
    if kind == "Camembert" and older is None:
        return [*UNUSED]
    if kind == "T5" and not any("<extra_id_" in str(token_text(token)) for token in listed):
        return [*listed, *sentinels(dict(settings))]
    return listed


def _model_tokens(settings: Mapping[str, Any], kind: str) -> list[Any]:
    """Return special tokens whose role is the model's own, such as `image_token`."""
    roles = {f"{role}_token" for role in ROLES}
    stated = {**CLASSES.get(kind, UNKNOWN_CLASS).own_roles, **settings}
    own = [value for key, value in stated.items() if key.endswith("_token") and key not in roles]
    named = settings.get("extra_special_tokens")
    return [value for value in own if isinstance(value, str)] + [
        *(named if isinstance(named, dict) else {}).values()
    ]


def add_named(
    folder: Path, tokenizer: Tokenizer, kind: str, settings: Mapping[str, Any], stated: Tokenizer | None
) -> None:
    """Add tokens that are never split; those that the vocabulary lacks come after it, in transformers' order.

    First come those with a number: of `added_tokens_decoder`, or else of added_tokens.json and of `stated`,
    the tokenizer.json. Then special tokens by role, those of the model's own roles, and those without one.
    """
    roles = {role: settings.get(f"{role}_token") for role in ROLES}
    by_role = _by_role(settings, kind)
    if CLASSES.get(kind, UNKNOWN_CLASS).mask_takes_space and isinstance(by_role["mask"], str):
        by_role["mask"] = {"content": by_role["mask"], "lstrip": True}
    named = [*by_role.values(), *_model_tokens(settings, kind)]
    others = extra_tokens(settings, kind)
    numbered = settings.get("added_tokens_decoder")
    if numbered is None:
        special = {token_text(token) for token in (*roles.values(), *others)}
        added = read_json_if_any(folder / "added_tokens.json")
        numbers: dict[int, AddedToken] = {
            number: AddedToken(text, normalized=text not in special, special=text in special)
            for text, number in added.items()
        }
        numbers |= stated.get_added_tokens_decoder() if stated is not None else {}
    else:
        numbers = {int(number): _added(token) for number, token in numbered.items()}
    present = tokenizer.get_added_tokens_decoder().values()
    known = {token.content for token in present if token.special or tokenizer is stated}
    known |= {token.content for token in numbers.values()}
    wanted = [numbers[number] for number in sorted(numbers)]
    for token in (*named, *others):
        text = token_text(token)
        # Named again without a role, a token loses the flags that its role gave it.
        twice = token in others and any(
            isinstance(other, dict) and token_text(other) == text for other in named
        )
        if text and (text not in known or twice):
            wanted.append(_added(token, special=True))
            known.add(text)
    with_role = {token_text(token) for token in named}
    for token in wanted:
        token.special = token.special or token.content in with_role
    tokenizer.add_tokens(wanted)
    if kind == "Qwen2":
        again = [text for text in map(token_text, (*named, *others)) if text]
        tokenizer.add_tokens([AddedToken(text, special=True) for text in again])
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens", False))


def _added(token: Any, **flags: bool) -> AddedToken:
    """Return an added token that a file states as text or as an object with flags."""
    stated = token if isinstance(token, dict) else {}
    stated_flags = {name: bool(value) for name, value in stated.items() if name in FLAGS}
    return AddedToken(token_text(token), **stated_flags | flags)


# Vocabularies -----------------------------------------------------------------------------------------------


PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model")
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CLIP_SPLIT = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def from_folder(folder: Path, settings: Settings) -> Tokenizer | None:
    """Build the tokenizer of a directory from its vocabulary; None without one, or for an unknown class."""
    kind = class_of(folder, settings)
    pieces = next((folder / name for name in PIECES if (folder / name).exists()), None)
    if (folder / "vocab.txt").exists():
        return completed(
            folder,
            _wordpiece(WordPiece.read_file(str(folder / "vocab.txt")), settings),
            "MPNet" if kind == "MPNet" else "Bert",
            settings,
        )
    if (folder / "source.spm").exists() and (folder / "vocab.json").exists():
        return completed(folder, _marian(folder, settings), "Marian", settings)
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        kind = kind or "GPT2"
        units = BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        return completed(folder, _byte_level(*units, kind, settings), kind, settings)
    if pieces is not None and (kind in FAMILIES or CLASSES.get(kind, UNKNOWN_CLASS).units):
        family = kind if kind in FAMILIES else ""
        return completed(folder, from_pieces(pieces, family, settings), family, settings)
    return None


def from_piece_file(path: Path, folder: Path, settings: Settings) -> tuple[Tokenizer, Settings]:
    """Return the tokenizer of a SentencePiece or llama2.c file for the model in `folder`, and settings."""
    kind = class_of(folder, settings)
    if path.suffix == ".bin":
        kind = "Llama"
        settings = {
            **{f"{role}_token": text for role, text in CLASSES[kind].special.items()},
            **{"add_bos_token": True, **settings},
        }
    tokenizer = from_pieces(path, kind if kind in FAMILIES else "", settings)
    return completed(folder, tokenizer, kind, settings), settings


def class_of(folder: Path, settings: Settings, beside_json: bool = False) -> str:
    """Return the tokenizer's class: "Bert", "Roberta", "T5", ...; empty where no file names it.

    Next to a tokenizer.json, an empty class takes that file as it stands.
    """
    config = read_json_if_any(folder / "config.json")
    model_type = config.get("model_type")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    kind = named.removesuffix("Fast").removesuffix("Tokenizer") if isinstance(named, str) else ""
    if beside_json and (model_type in AS_IT_STANDS or (not named and model_type == "llama")):
        return ""
    if kind in NO_CLASS:
        kind = "" if beside_json and named else CLASS_OF_MODEL.get(str(model_type), "")
    elif model_type == "qwen2":  # whose files often name another
        kind = "Qwen2"
    return LIKE.get(kind, kind)


# Vocabularies -----------------------------------------------------------------------------------------------


def from_json(folder: Path, stated: Tokenizer, settings: Settings) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json as its class uses it."""
    kind = class_of(folder, settings, beside_json=True)
    if kind == "Llama" and '"ByteLevel"' in stated.to_str():  # Llama 3's, which names the class of Llama 2
        kind = ""
    # The file says what stands around a text.
    settings = {
        key: value for key, value in settings.items() if key not in ("add_bos_token", "add_eos_token")
    }
    frame = stated.post_processor
    pieces = from_folder(folder, settings) if kind == "Siglip" else None
    if pieces is not None:  # its class reads the SentencePiece file, whatever stands next to it
        return pieces
    if not CLASSES.get(kind, UNKNOWN_CLASS).units:
        _check_claims(folder, stated, kind, settings)
        add_named(folder, stated, "", settings, stated)
        if not kind and read_json_if_any(folder / "config.json").get("model_type") == "qwen2":
            _warn_of_qwen2(folder, stated, settings)
        return stated
    tokenizer = completed(folder, _surrounded(folder, stated, kind, settings), kind, settings, stated)
    if CLASSES[kind].keeps_frame and frame is not None:
        tokenizer.post_processor = frame
    return tokenizer


def _warn_of_qwen2(folder: Path, stated: Tokenizer, settings: Settings) -> None:
    """Warn of a file that transformers reads otherwise: whatever class it names, as Qwen2Tokenizer's."""
    file = stated.to_str()
    if '"BPE"' in file and not ('"NFC"' in file and json.dumps(QWEN2_SPLIT, ensure_ascii=False) in file):
        warnings.warn(
            f"{folder / 'tokenizer.json'} is read as it stands; transformers reads every file of a qwen2 as "
            "Qwen2Tokenizer's, and this one splits texts otherwise: its ids differ there",
            stacklevel=2,
        )


def _surrounded(folder: Path, stated: Tokenizer, kind: str, settings: Settings) -> Tokenizer:
    """Return a tokenizer with the vocabulary of `stated`, and a class's own parts around it."""
    model = json.loads(stated.model.__getstate__())
    wanted, unk_id = CLASSES[kind].units, CLASSES[kind].unk_id
    refuse(
        model["type"] != wanted,
        f"{folder / 'tokenizer.json'} holds a {model['type']} model and {kind}Tokenizer reads {wanted}: "
        'name its class in tokenizer_config.json; "tokenizer_class": "PreTrainedTokenizerFast" takes '
        "the file as it stands",
    )
    vocabulary = model["vocab"]
    if wanted == "WordPiece":
        return _wordpiece(vocabulary, settings)
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model.get("merges", ())]
    if kind not in FAMILIES:
        return _byte_level(vocabulary, merges, kind, settings)
    if wanted == "BPE":
        return FAMILIES[kind](PieceModel([], ids=vocabulary, merges=merges), settings)
    steps = json.loads(stated.normalizer.__getstate__()) if stated.normalizer is not None else {}
    maps = [step.get("precompiled_charsmap") for step in steps.get("normalizers", [steps])]
    charsmap = base64.b64decode(next((each for each in maps if each), ""))
    pieces = [(text, score, 1) for text, score in vocabulary]
    return FAMILIES[kind](PieceModel(pieces, unk_id=unk_id, charsmap=charsmap), settings)


def _check_claims(folder: Path, tokenizer: Tokenizer, kind: str, settings: Settings) -> None:
    """Refuse settings of a class that we do not know, where tokenizer.json does otherwise."""
    if not kind:  # the reference, too, takes the file as it stands
        return
    read = tokenizer.normalizer.normalize_str if tokenizer.normalizer is not None else str
    word = read("a")
    if tokenizer.pre_tokenizer is not None:
        word = "".join(text for text, _ in tokenizer.pre_tokenizer.pre_tokenize_str(word))
    done = {
        "do_lower_case": read("Q") == "q",
        "strip_accents": read("\u00e9") in ("e", "E"),
        "keep_accents": read("\u00e9") not in ("e", "E"),
        "tokenize_chinese_chars": " " in read("a\u4e2db"),
        "add_prefix_space": word[:1] in ("\u0120", "\u2581"),
        "src_lang": settings.get("src_lang") in tokenizer.encode("a").tokens,
    }
    for name, does in done.items():
        claimed = settings.get(name)
        refuse(
            claimed is not None and bool(claimed) != does,
            f"{folder / 'tokenizer_config.json'} says {name} {claimed!r} and tokenizer.json does otherwise; "
            f"how {kind}Tokenizer joins them is not known: change one of the two files",
        )


def _wordpiece(vocabulary: dict[str, int], settings: Settings) -> Tokenizer:
    return assembled(
        WordPiece(vocabulary, unk_token=special_tokens(settings, "Bert")["unk"]),
        normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
            strip_accents=settings.get("strip_accents"),
            lowercase=settings.get("do_lower_case", True),
        ),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(prefix="##"),
    )


def _clip(vocabulary: dict[str, int], merges: list[Any], settings: Settings) -> Tokenizer:
    """Return pieces of words in small letters, of which the last says that the word ends."""
    unknown = special_tokens(settings, "CLIP")["unk"]
    units = BPE(
        vocabulary,
        merges,
        continuing_subword_prefix="",
        end_of_word_suffix="</w>",
        fuse_unk=False,
        unk_token=unknown,
    )
    steps = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    words = [
        pre_tokenizers.Split(Regex(CLIP_SPLIT), behavior="removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    trimmed = decoders.Replace(Regex(r"^[\s\x1c-\x1f]+|[\s\x1c-\x1f]+$"), "")
    spelled = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("</w>", " "), trimmed])
    return assembled(units, normalizers.Sequence(steps), pre_tokenizers.Sequence(words), spelled)


def _byte_level(vocabulary: dict[str, int], merges: list[Any], kind: str, settings: Settings) -> Tokenizer:
    if kind == "CLIP":
        return _clip(vocabulary, merges, settings)
    units = BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    prefix = bool(settings.get("add_prefix_space", False))
    composed = normalizers.NFC() if kind in ("Qwen2", "GPTNeoX") else None
    if kind != "Qwen2":
        return assembled(
            units, composed, pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel()
        )
    words = [
        pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
    ]
    return assembled(units, composed, pre_tokenizers.Sequence(words), decoders.ByteLevel())


def _marian(folder: Path, settings: Settings) -> Tokenizer:
    vocabulary = read_json(folder / "vocab.json")
    unknown = special_tokens(settings, "Marian")["unk"]
    tokenizer = from_pieces_and_vocabulary(folder / "source.spm", vocabulary, unknown)
    tokenizer.add_special_tokens(
        [token for token in vocabulary if token.startswith(">>") and token.endswith("<<")]
    )
    return tokenizer


# Special tokens ---------------------------------------------------------------------------------------------


def completed(
    folder: Path, tokenizer: Tokenizer, kind: str, settings: Settings, stated: Tokenizer | None = None
) -> Tokenizer:
    """Add the tokens that files name besides the vocabulary, and put special tokens around each text."""
    special = special_tokens(settings, kind)
    known = CLASSES.get(kind, UNKNOWN_CLASS)
    around = known.around or ((known.template or ("",))[0].replace("$A", "").split())
    for role in (*around, *(["unk"] if known.reads_unknown else [])):
        refuse(
            role not in special,
            f"{folder / 'tokenizer_config.json'} has {role}_token {settings.get(f'{role}_token')!r}, and "
            f"{kind}Tokenizer needs one: name it, or leave the key out",
        )
    for role in known.special:
        refuse(
            settings.get(f"{role}_token") == "",
            f"{folder / 'tokenizer_config.json'} has an empty {role}_token: name a token, or null for none",
        )
    for key, usual in known.own_roles.items():
        refuse(
            settings.get(key) not in (None, usual),
            f"{folder / 'tokenizer_config.json'} has {key} {settings.get(key)!r}: "
            f"{kind}Tokenizer's own is {usual}; leave the key out",
        )
    add_named(folder, tokenizer, kind, settings, stated)
    ids = {role: tokenizer.token_to_id(text) for role, text in special.items()}
    if kind in ("Roberta", "MPNet"):
        _frame_roberta(tokenizer, settings if kind == "Roberta" else {}, special, ids)
    elif kind == "CLIP":
        ends = {"sep": special["eos"], "cls": special["bos"]}
        _frame_roberta(tokenizer, {"trim_offsets": False}, ends, {"sep": ids["eos"], "cls": ids["bos"]})
    else:
        _frame(tokenizer, kind, settings, special, ids)
    return tokenizer


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
    tokenizer: Tokenizer, kind: str, settings: Settings, special: dict[str, str], ids: dict[str, Any]
) -> None:
    """Put the special tokens of a template around each text, if the vocabulary has them all."""
    begin = "bos " if settings.get("add_bos_token", kind == "CodeLlama") else ""
    end = " eos" if settings.get("add_eos_token", False) else ""
    single = f"{begin}$A{end}"
    second = " ".join(f"{part}:1" for part in f"{begin}$B{end}".split())
    templates = CLASSES.get(kind, UNKNOWN_CLASS).template or (single, f"{single} {second}")
    parts = [[part.partition(":") for part in template.split()] for template in templates]
    names = {name for template in parts for name, _, _ in template} - {"$A", "$B"}
    if not names or any(ids.get(name) is None for name in names):
        return
    one, pair = ([f"{special.get(name, name)}:{type_id or 0}" for name, _, type_id in each] for each in parts)
    used = [(special[name], ids[name]) for name in sorted(names)]
    tokenizer.post_processor = processors.TemplateProcessing(single=one, pair=pair, special_tokens=used)
