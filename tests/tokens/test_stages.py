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

from clearhead.app import cli
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
        assert (
            [each.id for each in part.tokens]
            == alone.ids
            == [each.id for each in seen.final if each.text == number]
        )
        assert [each.token for each in part.tokens] == [
            token if token in tokenizer.get_vocab() else token.strip() for token in alone.tokens
        ]
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
    for text in [*HARD, *LINES[:4], f"The{mark} king {mark}", mark]:
        if "\ud800" <= max(text, default="") <= "\udfff":
            continue
        agree(tokenizer, stages(tokenizer, text), text)
        agree(tokenizer, stages(tokenizer, text, "the pair"), text, "the pair")


@given(text=st.text())
@pytest.mark.slow
def test_stages_agree_on_any_unicode(text: str) -> None:
    for kind in ("bpe", "wordpiece", "unigram"):
        agree(trained(kind, "mlm"), stages(trained(kind, "mlm"), text), text)


def test_offsets_are_characters_of_the_text_as_given() -> None:
    text = "The  KÖNIG's[MASK] men\n北京"
    seen = stages(trained("wordpiece", "mlm", lowercase=True), text, "Speak")
    assert seen.text.normalised == "the  konig's[MASK] men  北  京 "
    assert [text[piece.start : piece.end] for piece in seen.text.pieces] == [
        "The",
        "KÖNIG",
        "'",
        "s",
        "[MASK]",
        "men",
        "北",
        "京",
    ]
    assert [piece.text for piece in seen.text.pieces][:2] == ["the", "konig"]
    assert [text[start:end] for start, end in seen.text.alignment[:7]] == ["T", "h", "e", " ", " ", "K", "Ö"]
    joined = "".join(text[token.start : token.end] for token in seen.text.tokens)
    assert joined == "TheKÖNIG's[MASK]men北京"
    assert [(each.token, each.type, each.text) for each in seen.final if each.text is None] == [
        ("[CLS]", 0, None),
        ("[SEP]", 0, None),
        ("[SEP]", 1, None),
    ]
    spaces = stages(trained("bpe"), "speak of\tit")
    assert [("speak of\tit"[each.start : each.end]) for each in spaces.text.pieces] == [
        "speak",
        " of",
        "\t",
        "it",
    ]


def test_an_added_token_that_takes_in_white_space_or_is_found_after_normalising() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[UNK]", AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("Wow", normalized=True)])
    text = "A  <mask> b WOWc [UNK]"
    seen = stages(tokenizer, text)
    agree(tokenizer, seen, text)
    assert [each.token for each in seen.text.tokens] == ["a", "<mask>", "b", "wow", "[UNK]", "[UNK]"]
    assert [text[each.start : each.end] for each in seen.text.pieces] == [
        "A",
        "  <mask> ",
        "b",
        "WOW",
        "c",
        "[UNK]",
    ]


def test_a_tokenizer_that_trims_offsets_at_the_end_shows_both() -> None:
    """RoBERTa's post-processing takes the space out of a word's offsets; the model's stage still has it."""
    made = Tokenizer.from_str(trained("bpe").to_str())
    made.decoder, made.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=True)
    seen = stages(made, "the king")
    agree(made, seen, "the king")
    first = next(each for each in seen.text.tokens if each.start == 3)
    assert first.start == 3 and min(each.start for each in seen.final if each.start >= 3) == (
        4 if first.end > 4 else 3
    )


def test_a_tokenizer_whose_normaliser_writes_spaces_as_letters() -> None:
    """As in Llama's: pieces are not cut, and the first letter of the normalised text is not in the text."""
    letters = ["<unk>", "<s>", *(f"<0x{value:02X}>" for value in range(256)), *"▁theking", "▁t", "▁th"]
    made = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(letters)},
            [("▁", "t"), ("▁t", "h")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
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


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = trained("wordpiece", "mlm")
    save_tokenizer(tmp_path, tokenizer, {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4})
    cli.main(["tokens", "The king\nspeak", "--model", str(tmp_path), "--json"])
    body = json.loads(capsys.readouterr().out)
    assert [each["id"] for each in body["final"]] == tokenizer.encode("The king\nspeak").ids
    assert body["text"]["pieces"][1] == {"text": "king", "start": 4, "end": 8}
    cli.main(["tokens", "The king\nspeak", "--model", str(tmp_path / "tokenizer.json")])
    shown = capsys.readouterr().out
    for wanted in (
        "1. normalise",
        "2. pre-split",
        "3. subword model",
        "4. post-process",
        "The·king↵speak",
        "[CLS]",
        "4:8",
    ):
        assert wanted in shown
    for kind in ("char", "byte", "word", "bpe", "wordpiece", "unigram"):
        cli.main(["tokens", "a rose [b] is a rose", "--kind", kind, "--json"])
        assert json.loads(capsys.readouterr().out)["text"]["tokens"]
    cli.main(["tokens", "é"])
    assert "as no --model is given" in capsys.readouterr().out


def test_the_command_reads_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hé"))
    cli.main(["tokens", "-", "--json"])
    assert [each["id"] for each in json.loads(capsys.readouterr().out)["final"]] == [
        2 + byte for byte in "hé".encode()
    ]


def test_the_command_says_mistakes_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    wrong = [
        (("a b", "--model", str(tmp_path / "none")), "no file and no directory"),
        (("a b", "--model", str(tmp_path)), "is no tokenizer"),
        (("a b", "--model", str(tmp_path / "tokenizer.json")), "is no tokenizer"),
        (("a b", "--model", str(tmp_path), "--kind", "bpe"), "one of the two"),
        (("a", "--kind", "bpe"), 'only the character "a"'),
    ]
    for arguments, message in wrong:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["tokens", *arguments])
        said = capsys.readouterr()
        assert (stopped.value.code, said.out) == (2, "")
        assert message in said.err and len(said.err.splitlines()) == 1


def test_characters_that_cannot_be_seen_are_written_out() -> None:
    assert visible("a \t\r\n\x07\U000e0067") == "a·→←↵\\u0007\\U000e0067"
