"""GGUF files: metadata, tensors and the tokenizer. The gguf package knows the types.

Everything in a header is checked against the size of the file before anything of that size is made. A tensor
in a quantized type becomes float32 when it is read.
"""

import functools
import math
import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from clearhead.errors import CheckpointError, MissingExtraError, refusing
from clearhead.hub.files import reading, refuse
from clearhead.hub.sentencepiece import PieceModel, llama, merges_of
from clearhead.hub.tokens.text import assembled
from clearhead.hub.vocabularies import QWEN2_SPLIT, completed
from clearhead.hub.weights import Entry, Shape, map_file, stored_entry

SUFFIX, MAGIC, VERSIONS = ".gguf", b"GGUF", (2, 3)
SCALARS = {  # the kinds of values, by number
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i"},
    **{6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"},
}
TEXT, ARRAY, FLOAT = 8, 9, 6
MOST_AXES = 4
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
LONGEST_NAME = 65535


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, counted from the first byte of the data, and in which type."""

    kind: str
    shape: Shape
    start: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says before its data begins."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]
    body: int  # where the data begins

    @property
    def architecture(self) -> str:
        """The name of the architecture."""
        name = self.fields.get("general.architecture")
        refuse(not isinstance(name, str), f"{self.path} has no general.architecture: it holds no model")
        return str(name)


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file."""
    return path.suffix == SUFFIX and path.is_file()


def gguf_package() -> Any:
    """Return the gguf package."""
    try:
        import gguf
    except ImportError:
        raise MissingExtraError("GGUF files need the gguf package: pip install 'clearhead[gguf]'") from None
    return gguf


def read_header(path: Path) -> GgufHeader:
    """Return what the header of a file says; the last file's is kept."""
    with reading(path, "cannot be read"):
        stated = path.stat()
    return _kept_header(path, stated.st_mtime_ns, stated.st_size)


@functools.lru_cache(maxsize=1)
def _kept_header(path: Path, changed: int, size: int) -> GgufHeader:
    refuse(size < 24, f"{path} is no GGUF file: it has {size} bytes")
    with (
        reading(path, "is no GGUF file"),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
    ):
        return _Header(path, pages).read()


class _Header:
    """A place in a file that moves on as values are read."""

    def __init__(self, path: Path, pages: mmap.mmap) -> None:
        self.path, self.pages, self.at = path, pages, 0

    def read(self) -> GgufHeader:
        path, size = self.path, len(self.pages)
        refuse(self.bytes(4, "magic") != MAGIC, f"{path} is no GGUF file: it does not begin with GGUF")
        version = self.number("I")
        refuse(
            version not in VERSIONS,
            f"{path} is of GGUF version {version}: "
            f"supported are {VERSIONS[0]} and {VERSIONS[1]}, little-endian",
        )
        tensors, fields = self.number("Q"), self.number("Q")
        left = size - self.at  # each has a length, a kind and more
        refuse(
            tensors * 24 + fields * 13 > left,
            f"{path} claims {tensors:,} tensors and {fields:,} fields, and has {left:,} bytes: it is damaged",
        )
        stated: dict[str, Any] = {}
        for _ in range(fields):
            name = self.text("the name of a field")
            refuse(name in stated, f"{path} states {name} twice")
            stated[name] = self.value(self.number("I"), name)
        infos = [self._info() for _ in range(tensors)]
        refuse(len({info[0] for info in infos}) < len(infos), f"{path} has two tensors of one name")
        step = stated.get("general.alignment", 32)
        refuse(
            type(step) is not int or step < 1 or step & (step - 1) or step > 1 << 20,
            f"{path} has general.alignment {step!r}: it must be a power of two",
        )
        body = math.ceil(self.at / step) * step
        spans = {
            name: self._stored(name, shape, number, start, step, size - body)
            for name, shape, number, start in infos
        }
        end, before = 0, ""
        for name, stored in sorted(spans.items(), key=lambda item: item[1].start):
            refuse(stored.start < end, f"{path}: tensor {name} overlaps {before}: the file is damaged")
            end, before = stored.start + stored.size, name
        return GgufHeader(path, stated, spans, body)

    def bytes(self, count: int, what: str) -> bytes:
        if count > len(self.pages) - self.at:
            raise CheckpointError(f"{self.path} is cut short or damaged: it ends within {what}")
        self.at += count
        return self.pages[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}"), "a number"))[0]

    def text(self, what: str) -> str:
        length = self.number("Q")
        refuse(
            length > len(self.pages) - self.at,
            f"{self.path}: {what} claims {length:,} bytes, and {len(self.pages) - self.at:,} are left",
        )
        raw = self.bytes(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8: {raw[:24]!r}") from None

    def value(self, kind: int, name: str, deep: bool = False) -> Any:
        """Return a value of a kind; numbers in float32 as the decimals that people write."""
        if kind == TEXT:
            return self.text(name)
        if kind in SCALARS:
            scalar = self.number(SCALARS[kind])
            return _decimal(scalar) if kind == FLOAT else scalar
        refuse(kind != ARRAY or deep, f"{self.path}: {name} has a value of kind {kind}, which is not known")
        inner, count = self.number("I"), self.number("Q")
        least = 8 if inner == TEXT else struct.calcsize(f"<{SCALARS[inner]}") if inner in SCALARS else 1
        refuse(
            count * least > len(self.pages) - self.at,
            f"{self.path}: {name} claims {count:,} values, and {len(self.pages) - self.at:,} bytes are left",
        )
        if inner in SCALARS:
            raw = self.bytes(count * least, name)
            numbers = list(struct.unpack(f"<{count}{SCALARS[inner]}", raw))
            return [_decimal(number) for number in numbers] if inner == FLOAT and count < 1024 else numbers
        return [self.value(inner, name, deep=True) for _ in range(count)]

    def _info(self) -> tuple[str, Shape, int, int]:
        name = self.text("the name of a tensor")
        axes = self.number("I")
        refuse(
            not 1 <= axes <= MOST_AXES or len(name) > LONGEST_NAME,
            f"{self.path}: tensor {name[:60]} has {axes:,} axes: 1 to {MOST_AXES} are possible",
        )
        sizes = struct.unpack(f"<{axes}Q", self.bytes(8 * axes, "the shape of a tensor"))
        return name, tuple(reversed(sizes)), self.number("I"), self.number("Q")

    def _stored(self, name: str, shape: Shape, number: int, start: int, step: int, room: int) -> StoredTensor:
        wrong, package = f"{self.path}: tensor {name}", gguf_package()
        known = {kind.value: kind for kind in package.GGMLQuantizationType}
        refuse(number not in known, f"{wrong} is of type {number}, which the gguf package does not know")
        kind = known[number]
        block, bytes_of_block = package.GGML_QUANT_SIZES[kind]
        weights = math.prod(shape)
        refuse(
            weights < 1 or weights >= 1 << 62 or shape[-1] % block,
            f"{wrong} has shape {shape}: {kind.name} holds rows of a multiple of {block}",
        )
        size = weights // block * bytes_of_block
        refuse(
            start + size > room or start % step,
            f"{wrong} lies at bytes {start:,} to {start + size:,} of {room:,}: "
            "the file is cut short or damaged",
        )
        return StoredTensor(kind.name, shape, start, size)


def _decimal(value: float) -> float:
    """Return the shortest decimal number that is this one in float32."""
    if not math.isfinite(value):
        return value
    return next(
        short
        for digits in range(1, 10)
        if struct.unpack("f", struct.pack("f", short := float(f"{value:.{digits}g}")))[0] == value
    )


def open_gguf(header: GgufHeader, mapped: bool = True) -> dict[str, Entry]:
    """Return the tensors of a file by their names there."""
    pages = map_file(header.path) if mapped else None

    def entry(name: str, one: StoredTensor) -> Entry:
        place = (one.start, one.start + one.size)
        dtype, shape = (PLAIN[one.kind], one.shape) if one.kind in PLAIN else (torch.uint8, (one.size,))
        raw = stored_entry(header.path, pages, header.body, dtype, shape, *place)
        return raw if one.kind in PLAIN else _dequantized(f"{header.path}: tensor {name}", raw, one)

    return {name: entry(name, stored) for name, stored in header.tensors.items()}


def _dequantized(wrong: str, raw: Entry, stored: StoredTensor) -> Entry:
    """Return how to read a tensor of a quantized type, as float32."""

    def read() -> Tensor:
        package = gguf_package()
        kind = package.GGMLQuantizationType[stored.kind]
        rows = raw.read().numpy().reshape(*stored.shape[:-1], -1)
        try:
            numbers = package.dequantize(rows, kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{wrong} is of type {stored.kind}, which the gguf package does not turn into numbers"
            ) from None
        return torch.from_numpy(numbers).reshape(stored.shape)

    return replace(raw, shape=stored.shape, dtype=torch.float32, read=read)


# The tokenizer, byte-level BPE ("gpt2") and SentencePiece's BPE ("llama") -----------------------------------


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
# Of these, a word that is a token is not merged from parts.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3")
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
        tokenizer = _byte_level(header, tokens, kinds) if kind == "gpt2" else _pieces(header, tokens, kinds)
        for special in (False, True):
            wanted = CONTROL if special else USER_DEFINED
            listed = [text for text, token_kind in zip(tokens, kinds) if token_kind == wanted]
            tokenizer.add_tokens([AddedToken(text, normalized=False, special=special) for text in listed])
        return completed(header.path, tokenizer, "", gguf_settings(header))


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


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
    pairs: Any = [tuple(re.split(r"(?<=.) ", merge, maxsplit=1)) for merge in merges or ()]
    units = BPE({text: number for number, text in enumerate(tokens)}, pairs, ignore_merges=pre in WHOLE_WORDS)
    as_bytes = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    as_bytes = [] if None in SPLITS[split] else as_bytes  # GPT-2's expression has done so
    return assembled(
        units,
        normalizers.NFC() if pre == "qwen2" else None,
        pre_tokenizers.Sequence([*map(_split, SPLITS[split]), *as_bytes]),
        decoders.ByteLevel(),
    )


def _split(how: str | None) -> Any:
    if how is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if how == "digits":
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(how), behavior="isolated")


def _pieces(header: GgufHeader, tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores = header.fields.get(f"{FIELD}scores")
    refuse(
        not isinstance(scores, list) or len(scores) != len(tokens),
        f"{header.path} must have {FIELD}scores, one for each token",
    )
    numbers, ids = list(scores or ()), {text: number for number, text in enumerate(tokens)}
    merged = [text for text, kind in zip(tokens, kinds) if kind in (NORMAL, USER_DEFINED)]
    prefix = bool(header.fields.get(f"{FIELD}add_space_prefix", True))
    model = PieceModel(
        list(zip(tokens, numbers, kinds)),
        unigram=False,
        byte_fallback=True,
        dummy_prefix=prefix,
        ids=ids,
        merges=merges_of(sorted(merged, key=lambda text: -numbers[ids[text]]), ids),
    )
    return llama(model, {})
