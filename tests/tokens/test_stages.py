"""The four stages agree with the whole tokenizer; their offsets index the text; the command shows them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from clearhead.hub.tokenizer import save_tokenizer
from clearhead.hub.tokens.text import Stages, stages, visible
from tests.hub.corpus import HARD
from tests.tokens.toys import KINDS, LINES, trained

pytestmark = pytest.mark.ledger("A2")


def agree(tokenizer: Tokenizer, seen: Stages, text: str, pair: str | None = None) -> None:
    """What `stages` says is what encoding gives; offsets lie in the text and in the pieces."""
    assert [each.id for each in seen.final] == tokenizer.encode(text, pair).ids
    for number, part in ((0, seen.text), (1, seen.pair)):
        if part is None:
            continue
        given_text = pair if number else text
        assert part.text == given_text
        alone = tokenizer.encode(part.text, add_special_tokens=False)
        ids = [each.id for each in part.tokens]
        assert ids == alone.ids == [each.id for each in seen.final if each.text == number]
        vocabulary = tokenizer.get_vocab()
        tokens = [token if token in vocabulary else token.strip() for token in alone.tokens]
        assert [each.token for each in part.tokens] == tokens
        assert [each.piece for each in part.tokens] == alone.word_ids
        assert len(part.alignment) == len(part.normalised)
        for start, end in part.alignment:
            assert 0 <= start <= end <= len(part.text)
        for each in part.tokens:
            piece = part.pieces[each.piece]
            assert piece.start <= each.start <= each.end <= piece.end
    json.dumps(seen.to_dict())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["lm", "mlm", "seq2seq"])
def test_stages_agree_with_the_whole(kind: str, task: str) -> None:
    tokenizer = trained(kind, task, lowercase=True)
    mark = tokenizer.id_to_token(0)
    for number, text in enumerate([*HARD, *LINES[:4], f"The{mark} king {mark}", mark]):
        seen = stages(tokenizer, text)
        agree(tokenizer, seen, text)
        assert seen.text.text == text
        if number % 3 == 0:
            agree(tokenizer, stages(tokenizer, text, "the pair"), text, "the pair")


@given(text=st.text())
@pytest.mark.slow
def test_stages_agree_on_any_unicode(text: str) -> None:
    for kind in ("bpe", "wordpiece", "unigram"):
        seen = stages(trained(kind, "mlm"), text)
        agree(trained(kind, "mlm"), seen, text)
        assert seen.text.text == text and len(seen.final) >= len(seen.text.tokens)


def test_offsets_are_characters_of_the_text_as_given() -> None:
    text = "The  KÖNIG's[MASK] men\n北京"
    seen = stages(trained("wordpiece", "mlm", lowercase=True), text, "Speak")
    assert seen.text.normalised == "the  konig's[MASK] men  北  京 "
    assert " ".join(text[piece.start : piece.end] for piece in seen.text.pieces) == (
        "The KÖNIG ' s [MASK] men 北 京"
    )
    assert [piece.text for piece in seen.text.pieces][:2] == ["the", "konig"]
    assert [text[start:end] for start, end in seen.text.alignment[:7]] == ["T", "h", "e", " ", " ", "K", "Ö"]
    joined = "".join(text[token.start : token.end] for token in seen.text.tokens)
    assert joined == "TheKÖNIG's[MASK]men北京"
    special = [(each.token, each.type) for each in seen.final if each.text is None]
    assert special == [("[CLS]", 0), ("[SEP]", 0), ("[SEP]", 1)]
    spaces = stages(trained("bpe"), "speak of\tit")
    pieces = ["speak of\tit"[each.start : each.end] for each in spaces.text.pieces]
    assert pieces == ["speak", " of", "\t", "it"]


def test_an_added_token_that_takes_in_white_space_or_is_found_after_normalising() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[UNK]", AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("Wow", normalized=True)])
    text = "A  <mask> b WOWc [UNK]"
    seen = stages(tokenizer, text)
    agree(tokenizer, seen, text)
    assert [each.token for each in seen.text.tokens] == ["a", "<mask>", "b", "wow", "[UNK]", "[UNK]"]
    pieces = [text[each.start : each.end] for each in seen.text.pieces]
    assert pieces == ["A", "  <mask> ", "b", "WOW", "c", "[UNK]"]


def test_a_tokenizer_that_trims_offsets_at_the_end_shows_both() -> None:
    """RoBERTa's post-processing takes the space out of a word's offsets; the model's stage still has it."""
    made = Tokenizer.from_str(trained("bpe").to_str())
    made.decoder, made.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=True)
    seen = stages(made, "the king")
    agree(made, seen, "the king")
    first = next(each for each in seen.text.tokens if each.start == 3)
    assert first.start == 3
    assert min(each.start for each in seen.final if each.start >= 3) == (4 if first.end > 4 else 3)


def test_a_tokenizer_whose_normaliser_writes_spaces_as_letters() -> None:
    """As in Llama's: pieces are not cut, and the first letter of the normalised text is not in the text."""
    letters = ["<unk>", "<s>", *(f"<0x{value:02X}>" for value in range(256)), *"▁theking", "▁t", "▁th"]
    vocabulary = {token: index for index, token in enumerate(letters)}
    merges = [("▁", "t"), ("▁t", "h")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.add_special_tokens(["<unk>", "<s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    for text in ("the king", "the  KÖNIG<s>the", ""):
        agree(made, stages(made, text, "the"), text, "the")
    seen = stages(made, "the king")
    assert (seen.text.normalised, len(seen.text.pieces)) == ("▁the▁king", 1)
    assert [each.token for each in seen.final] == ["<s>", "▁th", "e", "▁", "k", "i", "n", "g"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clearhead) -> None:
    tokenizer, text = trained("wordpiece", "mlm"), "The king\nspeak"
    save_tokenizer(tmp_path, tokenizer, {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4})
    body = clearhead("tokens", text, "--model", tmp_path, "--json").json
    assert [each["id"] for each in body["final"]] == tokenizer.encode(text).ids
    assert body["text"]["pieces"][1] == {"text": "king", "start": 4, "end": 8}
    shown = clearhead("tokens", text, "--model", tmp_path / "tokenizer.json").out
    stages = ("1. normalise", "2. pre-split", "3. subword model", "4. post-process")
    assert all(wanted in shown for wanted in (*stages, "The·king↵speak", "[CLS]", "4:8"))
    for kind in ("char", "byte", "word", "bpe", "wordpiece", "unigram"):
        assert clearhead("tokens", "a rose [b] is a rose", f"--kind {kind} --json").json["text"]["tokens"]
    assert "as no --model is given" in clearhead("tokens", "é").out
    monkeypatch.setattr(sys, "stdin", io.StringIO("hé"))
    read = clearhead("tokens", "-", "--json").json
    assert [each["id"] for each in read["final"]] == [2 + byte for byte in "hé".encode()]
    (tmp_path / "tokenizer.json").write_text("{}")
    clearhead.refuses("no file and no directory", "tokens", "a b", "--model", tmp_path / "none")
    clearhead.refuses("is no tokenizer", "tokens", "a b", "--model", tmp_path)
    clearhead.refuses("is no tokenizer", "tokens", "a b", "--model", tmp_path / "tokenizer.json")
    clearhead.refuses("one of the two", "tokens", "a b", "--model", tmp_path, "--kind bpe")
    clearhead.refuses('only the character "a"', "tokens", "a", "--kind bpe")


def test_characters_that_cannot_be_seen_are_written_out() -> None:
    assert visible("a \t\r\n\x07\U000e0067") == "a·→←↵\\u0007\\U000e0067"
