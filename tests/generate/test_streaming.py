"""Streaming: what is emitted is the text, for any text and any tokens; no part of a stop string gets out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import clearhead as ch
from clearhead.run.generate.stream import TextStream
from tests.harness import build

TEXTS = [
    "plain words, and more of them",
    "family 👨‍👩‍👧‍👦, wave 👋🏽, flags 🇩🇪🇯🇵",
    "e\u0301\u0323 a\u0308 n\u0303 combining",
    "naïve café — “quotes” …",
    "日本語のテキスト 한국어 ไทย हिन्दी",
    "שלום עולם مرحبا",
    " leading,  double,   triple, trailing ",
    "a\tb\n\n c\r\nd\u00a0e\u200bf\ufffdg",
    "\ufffd\ufffd",
]


def byte_level() -> Tokenizer:
    """GPT-2's kind, with a few merges, some of which end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama's kind: words with a mark for the space, bytes for unknown characters, first space stripped."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁a", "en", "d", "e", "é", "▁▁", "日", "x", "END"]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """SentencePiece's other kind, as in T5."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("▁cat", -3.0), (".", -3.0)]
    pieces += [("s", -4.0), ("日", -4.0), ("é", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT's kind: pieces within a word, and spaces that punctuation takes away."""
    pieces = ["[UNK]", "[SEP]", "the", "cat", "##s", "##ing", ".", ",", "do", "n't", "é"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tokenizer


def suffixed() -> Tokenizer:
    """The first BPE's kind: a mark at the end of each word."""
    pieces = ["un", "the</w>", "cat</w>", "s</w>", "ca", ".</w>"]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], end_of_word_suffix="</w>")
    )
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


KINDS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(),
    "metaspace": metaspace(),
    "wordpiece": wordpiece(),
    "suffixed": suffixed(),
}
texts = st.text(max_size=40) | st.lists(st.sampled_from(TEXTS), max_size=3).map("".join)


def streamed(
    kind: str, ids: list[int], prompt: list[int] = (), stop: tuple[str, ...] = ()
) -> tuple[list[str], TextStream]:
    stream = TextStream(KINDS[kind], prompt, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped_by:
            break
    return [*pieces, stream.finish()], stream


def whole(kind: str, ids: list[int], prompt: list[int] = ()) -> str:
    """All ids at once, after the text of the prompt."""
    tokenizer = KINDS[kind]
    return tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(list(prompt))) :]


@pytest.mark.ledger("G4")
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@settings(max_examples=60)
@given(text=texts)
def test_any_text(kind, text):
    ids = KINDS[kind].encode(text).ids
    pieces, stream = streamed(kind, ids)
    assert "".join(pieces) == stream.text == KINDS[kind].decode(ids)
    # Whole characters only.
    assert "\ufffd" in text or kind != "byte level" or not any("\ufffd" in piece for piece in pieces)


@pytest.mark.ledger("G4")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_any_tokens(kind, data):
    """Half characters, bytes that are no character, special tokens in between, unknown ids."""
    size = KINDS[kind].get_vocab_size()
    tokens = st.integers(0, size + 2)
    few = st.lists(tokens | st.integers(max(size - 12, 0), size - 1), max_size=25)
    ids, prompt = data.draw(few), data.draw(st.just([]) | few)
    pieces, stream = streamed(kind, ids, prompt)
    assert "".join(pieces) == stream.text == whole(kind, ids, prompt)
    at_once = TextStream(KINDS[kind], prompt)
    at_once.add(ids)
    assert at_once.text == at_once.finish() == stream.text


@pytest.mark.ledger("G4")
@pytest.mark.parametrize("between", ["<s>", None], ids=["special", "unknown"])
def test_what_leaves_no_text_breaks_no_run_of_bytes(between):
    """Two bytes that are no character are two signs of it, even with a token without a text between them."""
    tokenizer = KINDS["byte fallback"]
    gap = tokenizer.get_vocab_size() if between is None else tokenizer.token_to_id(between)
    ids = [tokenizer.token_to_id("<0x00>"), gap, tokenizer.token_to_id("<0x80>")]
    pieces, _ = streamed("byte fallback", ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "\ufffd\ufffd"


@pytest.mark.ledger("G4")
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@settings(max_examples=60)
@given(
    text=texts,
    extra=texts,
    stop=st.lists(st.text("END. 日👋é\n", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_no_part_of_a_stop_string_gets_out(kind, text, extra, stop):
    ids = KINDS[kind].encode(text + stop[0] + extra).ids
    pieces, stream = streamed(kind, ids, stop=tuple(stop))
    # The row ends with the token that completes a stop.
    heard = (KINDS[kind].decode(ids[:count]) for count in range(1, len(ids) + 1))
    cuts = next(cuts for said in heard if (cuts := [said.find(one) for one in stop if one in said]))
    said = KINDS[kind].decode(ids)
    assert "".join(pieces) == stream.text == said[: min(cuts)]
    assert stream.stopped_by in stop


@pytest.mark.ledger("G4")
def test_half_a_stop_string_is_no_stop():
    stop = ("END", "ENTER")
    pieces, stream = streamed("byte level", KINDS["byte level"].encode("an EN, an ENT").ids, stop=stop)
    assert "".join(pieces) == "an EN, an ENT"
    assert pieces[-1].startswith("ENT")  # it was held back to the end
    assert stream.stopped_by is None


@pytest.mark.ledger("G4")
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_a_model_that_says_anything(kind):
    """A random model over all tokens: streamed, not streamed and decoded at once are one text."""
    size = KINDS[kind].get_vocab_size()
    m = ch.Model(build(vocab_size=size, positions="rope", max_positions=256), KINDS[kind])
    for seed in range(4):
        seen: list[str] = []
        made = m.generate(
            "the café", 60, temperature=1.5, seed=seed, on_text=lambda _, new, seen=seen: seen.append(new)
        )
        plain = m.generate("the café", 60, temperature=1.5, seed=seed)
        prompt = m.prompt_ids("the café")
        assert "".join(seen) == made.text == plain.text == whole(kind, plain.ids, prompt)


def test_a_long_row_costs_a_token_no_more(monkeypatch):
    """What is decoded for a token does not grow with the row."""
    tokenizer, longest = KINDS["byte level"], []

    class Watched(TextStream):
        def _decode(self, ids):
            longest.append(len(ids))
            return super()._decode(ids)

    stream = Watched(tokenizer, stop=("never said",))
    generator = torch.Generator().manual_seed(0)
    words = tokenizer.encode(" plain words and more of them").ids
    for place in torch.randint(len(words), (2000,), generator=generator).tolist():
        stream.push(words[place])
    assert max(longest) <= 4
