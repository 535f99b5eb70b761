"""SentencePiece `.model` files as `tokenizers.Tokenizer`s.

The file is a protocol buffer of which we need a handful of fields, so it is read here, without the
sentencepiece and protobuf packages. What a family of models adds (order of the special tokens, spaces, the
frame around a text) follows.
"""

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from clearhead.hub.files import reading, refuse
from clearhead.hub.tokens.text import assembled

SPACE = "▁"
UNIGRAM, BYTE_PAIRS, CONTROL, USER_DEFINED = 1, 2, 3, 4  # of the file's two enumerations
Settings = dict[str, Any]
Scores = list[tuple[str, float]]


@dataclass(frozen=True)
class PieceModel:
    """What a SentencePiece file says."""

    pieces: list[tuple[str, float, int]]  # text, score, type
    unigram: bool = True
    byte_fallback: bool = False
    unk_id: int = 0
    charsmap: bytes = b""  # its normalisation, compiled
    dummy_prefix: bool = True  # a space before the first word
    collapse: bool = True  # runs of spaces become one
    ids: dict[str, int] | None = None  # None: the pieces are numbered as they stand
    merges: list[tuple[str, str]] | None = None  # None: they follow from the pieces

    @property
    def scores(self) -> Scores:
        """Return each piece with its score, in the order of the ids."""
        return [(text, score) for text, score, _ in self.pieces]


def read_pieces(path: Path) -> PieceModel:
    """Read a SentencePiece file."""
    refusal = "is no SentencePiece model, or is cut short"
    with reading(path, refusal):
        top = list(_fields(path.read_bytes()))
        entries = [dict(_fields(value)) for number, value in top if number == 1]
        pieces = [
            (entry[1].decode("utf-8"), struct.unpack("<f", entry.get(2, bytes(4)))[0], entry.get(3, 1))
            for entry in entries
        ]
        trainer, normalizer = (
            dict(_fields(next((value for number, value in top if number == wanted), b"")))
            for wanted in (2, 3)
        )
    kind = trainer.get(3, UNIGRAM)
    refuse(not pieces or kind not in (UNIGRAM, BYTE_PAIRS), f"{path} {refusal}")
    return PieceModel(
        pieces=pieces,
        unigram=kind == UNIGRAM,
        byte_fallback=bool(trainer.get(35, 0)),
        unk_id=trainer.get(40, 0),
        charsmap=normalizer.get(2, b""),
        dummy_prefix=bool(normalizer.get(3, 1)),
        collapse=bool(normalizer.get(4, 1)),
    )


def read_scores(path: Path) -> PieceModel:
    """Read llama2.c's `tokenizer.bin`: the longest length, then score, length and bytes of each piece."""
    refusal = "is no llama2.c tokenizer (three special tokens, 256 bytes, then the pieces), or is cut short"
    with reading(path, refusal):
        pieces = list(_scored_pieces(path.read_bytes()))
        if [text for text, _, _ in pieces[3:259]] != [f"<0x{byte:02X}>" for byte in range(256)]:
            raise ValueError
    # The file writes line breaks around the names of the special tokens.
    pieces[:3] = [("<unk>", 0.0, 2), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    return PieceModel(pieces, unigram=False, byte_fallback=True)


def _scored_pieces(data: bytes) -> Iterator[tuple[str, float, int]]:
    at = 4
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        raw = data[at + 8 : at + 8 + length]
        if length < 0 or len(raw) != length:
            raise ValueError
        yield raw.decode("utf-8").replace(" ", SPACE), score, 1
        at += 8 + length


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of one protocol buffer message: number and value, an int or bytes."""
    at = 0
    while at < len(data):
        tag, at = _number(data, at)
        value: Any
        if tag & 7 == 0:
            value, at = _number(data, at)
        else:
            size, at = _number(data, at) if tag & 7 == 2 else ({5: 4, 1: 8}[tag & 7], at)
            value, at = data[at : at + size], at + size
            if len(value) != size:
                raise ValueError
        yield tag >> 3, value


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


# Families ---------------------------------------------------------------------------------------------------


def xlm_roberta(model: PieceModel, settings: Settings) -> Tokenizer:
    """Build XLM-RoBERTa's."""
    return _words(model, prefix=settings.get("add_prefix_space", True))


def camembert(model: PieceModel, settings: Settings) -> Tokenizer:
    """Build CamemBERT's, whose unknown token is looked up by its text."""
    unknown = token_text(settings.get("unk_token", "<unk>"))
    unk_id = next((number for number, (text, _) in enumerate(model.scores) if text == unknown), 0)
    return xlm_roberta(replace(model, unk_id=unk_id), settings)


def siglip(model: PieceModel, settings: Settings) -> Tokenizer:
    """Build SigLIP's: small letters, unless the settings keep large ones, and no ASCII punctuation."""
    lower = [normalizers.Lowercase()] if settings.get("do_lower_case", True) else []
    return _words(model, [*lower, normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), "")])


def albert(model: PieceModel, settings: Settings) -> Tokenizer:
    """Build ALBERT's: plain quotes, accents and case removed unless the settings keep them."""
    quotes = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    accents = [normalizers.NFKD(), normalizers.StripAccents()]
    before = [
        *quotes,
        *([] if settings.get("keep_accents", False) else accents),
        *([normalizers.Lowercase()] if settings.get("do_lower_case", True) else []),
    ]
    return _words(model, before, settings.get("add_prefix_space", True))


def big_bird(model: PieceModel, settings: Settings) -> Tokenizer:
    """Build BigBird's: runs of spaces are one, and nothing else is normalised."""
    scheme = "always" if settings.get("add_prefix_space", True) else "never"
    return assembled(
        _unigram(model, settings, "<unk>", 100),
        normalizers.Replace(Regex(" {2,}"), SPACE),
        pre_tokenizers.Metaspace(SPACE, scheme, split=True),
        decoders.Metaspace(SPACE, scheme, split=True),
    )


def deberta(model: PieceModel, settings: Settings) -> Tokenizer:
    """Build DeBERTa's (v2 and v3): runs of spaces are one, and the file's own normalisation is not used."""
    steps = [
        *([normalizers.Lowercase()] if settings.get("do_lower_case", False) else []),
        normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "),
        *(normalizers.NFC(), normalizers.Strip(left=False, right=True)),
    ]
    scheme = "always" if settings.get("add_prefix_space", True) else "first"
    apart = [pre_tokenizers.Punctuation("isolated")] if settings.get("split_by_punct", False) else []
    return assembled(
        _unigram(model, settings, "[UNK]", 1),
        normalizers.Sequence(steps),
        pre_tokenizers.Sequence([*apart, pre_tokenizers.Metaspace(SPACE, scheme)]),
        decoders.Metaspace(SPACE, scheme),
    )


def llama(model: PieceModel, settings: Settings) -> Tokenizer:
    """Build Llama's (1 and 2) and Mistral's: unknown characters become bytes, and spaces stay as they are."""
    stated = settings.get("add_prefix_space")
    prefix = bool(model.dummy_prefix if stated is None else stated)
    with_prefix = "always" if settings.get("legacy", False) else "first"
    spaces = pre_tokenizers.Metaspace(SPACE, with_prefix if prefix else "never", split=False)
    return assembled(_bpe(model, fallback=True), None, spaces, _spell(strip=prefix))


def code_llama(model: PieceModel, settings: Settings) -> Tokenizer:
    """Build CodeLlama's: as Llama's, with a space before the first word of a text and nowhere else."""
    stated = settings.get("add_prefix_space", True)
    first = "first" if stated is None or stated else "never"
    units = _bpe(model, fallback=True, unk=token_text(settings.get("unk_token", "<unk>")))
    return assembled(units, None, pre_tokenizers.Metaspace(SPACE, first, split=False), _spell(strip=True))


def gemma(model: PieceModel, settings: Settings) -> Tokenizer:
    """Build Gemma's: as Llama's, without a space before the first word."""
    return assembled(
        _bpe(model, fallback=True, unk=token_text(settings.get("unk_token")) or "<unk>"),
        normalizers.Replace(" ", SPACE),
        decoder=_spell(strip=False),
    )


def plain(model: PieceModel, settings: Settings) -> Tokenizer:
    """Build any other family's: what the file alone says."""
    if model.unigram and not model.byte_fallback:
        return _words(model)
    collapsed = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    steps = [
        *_charsmap(model),
        normalizers.Replace(SPACE, " "),
        *(collapsed if model.collapse else ()),
        *([normalizers.Prepend(" ")] if model.dummy_prefix else ()),
        normalizers.Replace(" ", SPACE),
    ]
    if model.unigram:
        units: Any = Unigram(model.scores, model.unk_id, byte_fallback=True)
    else:
        units = _bpe(model, model.byte_fallback, unk=model.pieces[model.unk_id][0])
    return assembled(units, normalizers.Sequence(steps), None, _spell(strip=model.dummy_prefix))


FAMILIES: dict[str, Callable[[PieceModel, Settings], Tokenizer]] = {
    "T5": lambda model, settings: _words(model),
    "XLMRoberta": xlm_roberta,
    "Camembert": camembert,
    "Siglip": siglip,
    "Albert": albert,
    "BigBird": big_bird,
    "DebertaV2": deberta,
    "Llama": llama,
    "CodeLlama": code_llama,
    "Gemma": gemma,
    "": plain,
}


UNUSED = ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")  # CamemBERT's, besides those that are used
# What comes before the pieces of the file, and how many of those are left out.
FAIRSEQ_FIRST = {
    "XLMRoberta": (("<s>", "<pad>", "</s>", "<unk>"), 3),
    "Camembert": ((UNUSED[0], "<pad>", UNUSED[1], "<unk>", UNUSED[2]), 1),
}


def _numbered(model: PieceModel, family: str, settings: Settings) -> PieceModel:
    """Return the pieces in the order that a family gives them ids, with those that the file lacks."""
    if family in FAIRSEQ_FIRST:  # the first ids are fairseq's, the pieces follow, the mask is last
        first, left_out = FAIRSEQ_FIRST[family]
        pieces = [(text, -100.0 if text == UNUSED[-1] else 0.0, 1) for text in first]
        pieces += [*model.pieces[left_out:], ("<mask>", 0.0, 1)]
        return replace(model, pieces=pieces, unk_id=3)
    if family == "T5":
        known = dict(model.scores)
        missing = [text for text in reversed(sentinels(settings)) if text not in known]
        return replace(model, pieces=model.pieces + [(text, 0.0, 1) for text in missing])
    return model


def sentinels(settings: Settings) -> list[str]:
    """Return the tokens that stand for what T5 must fill in: `<extra_id_0>`, `<extra_id_1>`, ..."""
    return [f"<extra_id_{number}>" for number in range(settings.get("extra_ids", 100))]


def from_pieces(path: Path, family: str, settings: Settings) -> Tokenizer:
    """Return the tokenizer of a `.model` file, or of llama2.c's `.bin`, as this family uses it."""
    model = read_scores(path) if path.suffix == ".bin" else read_pieces(path)
    tokenizer = FAMILIES[family](_numbered(model, family, settings), settings)
    known = tokenizer.get_vocab()
    for text, _, kind in model.pieces:
        if kind in (CONTROL, USER_DEFINED) and text in known:
            tokenizer.add_tokens([AddedToken(text, normalized=False, special=kind == CONTROL)])
    return tokenizer


def from_pieces_and_vocabulary(source: Path, vocabulary: dict[str, int], unk: str) -> Tokenizer:
    """Return Marian's tokenizer: `source.spm` splits the text, and `vocab.json` numbers the pieces.

    `vocab.json` also has the target's pieces. Those score so low that they are used only for a character that
    the source does not know; several such characters in a row are one unknown. Pieces of the source that
    `vocab.json` lacks are left out.
    """
    model = read_pieces(source)
    scores = dict(model.scores)
    refuse(
        sorted(vocabulary.values()) != list(range(len(vocabulary))) or unk not in vocabulary,
        f"{source.parent / 'vocab.json'} must number its tokens from 0 without a gap, and hold {unk}",
    )
    never = 100.0 * min(scores.values()) - 1000.0
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    pieces = [(text, scores.get(text, never * (len(text) - 0.5)), 1) for text in ordered]
    tokenizer = _words(replace(model, pieces=pieces, unk_id=vocabulary[unk]))
    strange = "[^" + "".join(re.escape(text) for text in sorted(scores) if len(text) == 1) + "\\s]"
    unknown = normalizers.Replace(Regex(f"(?<={strange}){strange}|{strange}(?={strange})"), "\ufffe")
    tokenizer.normalizer = normalizers.Sequence(
        [tokenizer.normalizer, unknown] if model.charsmap else [unknown]
    )
    return tokenizer


def token_text(token: Any) -> str | None:
    """Return a token that a file states as text or as an object; None for anything else."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


# Parts ------------------------------------------------------------------------------------------------------


def _unigram(model: PieceModel, settings: Settings, unknown: str, released: int) -> Unigram:
    """Return a Unigram model; `released` is the id of the unknown token where the file has no such piece."""
    piece = (token_text(settings.get("unk_token")) or unknown, 0.0)
    unk_id = model.scores.index(piece) if piece in model.scores else released
    return Unigram(model.scores, unk_id, byte_fallback=False)


def _words(model: PieceModel, before: list[Any] | None = None, prefix: bool = True) -> Tokenizer:
    """Return a Unigram model that reads word by word, with a space before each if `prefix`."""
    steps = [*(before or []), *_charsmap(model)]
    scheme = "always" if prefix else "never"
    return assembled(
        Unigram(model.scores, model.unk_id, byte_fallback=False),
        normalizers.Sequence(steps) if steps else None,
        pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, scheme, split=True)]
        ),
        decoders.Metaspace(SPACE, scheme, split=True),
    )


def _bpe(model: PieceModel, fallback: bool, unk: str | None = None) -> BPE:
    """Return a BPE model; without merges of its own, the pieces stand in the order of merging."""
    ids = model.ids or {text: index for index, (text, _) in enumerate(model.scores)}
    merges = merges_of(sorted(ids, key=ids.__getitem__), ids) if model.merges is None else model.merges
    return BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=fallback)


def merges_of(pieces: Iterable[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that make these pieces, in their order."""
    halves = ((text[:cut], text[cut:]) for text in pieces for cut in range(1, len(text)))
    return [(first, second) for first, second in halves if first in ids and second in ids]


def _charsmap(model: PieceModel) -> list[Any]:
    return [normalizers.Precompiled(model.charsmap)] if model.charsmap else []


def _spell(strip: bool) -> Any:
    """Return the decoder from pieces to text; `strip` removes the space before the first word."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] if strip else steps)
