"""Log-probabilities: tokens put together are the text, their bytes its bytes, and no two have one name."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import clearhead as ch
from clearhead.hub.tokenizer import open_tokenizer
from clearhead.hub.tokens.text import decoded
from clearhead.run.generate.stream import TextStream, TokenTexts, token_texts
from clearhead.run.serve.answers import _named
from clearhead.run.serve.app import make_server
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.generate.test_streaming import KINDS, TEXTS
from tests.harness import build, word_tokenizer
from tests.serve import mixes

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁the", "▁cat", ".", "s", "日", "é", "▁▁", "a", "▁a"]


def unigram(scheme: str) -> Tokenizer:
    """SentencePiece's Unigram with bytes for unknown characters."""
    pieces = [("<unk>", 0.0), *((byte, -20.0) for byte in BYTES), *((piece, -3.0) for piece in PIECES)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    marks = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), marks])
    return tokenizer


def unstripped() -> Tokenizer:
    """Gemma's kind: spaces are marks, nothing is put before a text, and tokens may be added."""
    pieces = ["<unk>", "<s>", *BYTES, *PIECES]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.add_tokens(["<think>", " hi "])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def lowered() -> Tokenizer:
    """BERT's, trained: letters lose their case and accents."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        TEXTS * 3, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]"])
    )
    return tokenizer


TOKENIZERS = {
    **KINDS,
    "words": word_tokenizer(["a", "b", "c", "<e>"], "a"),
    **{f"unigram, {scheme}": unigram(scheme) for scheme in ("always", "first", "never")},
    "unstripped": unstripped(),
    "lowered": lowered(),
}
texts = st.text(max_size=30) | st.lists(
    st.sampled_from([*TEXTS, "<think>", " hi ", "the cats. ", "  "]), max_size=3
).map("".join)


@pytest.fixture(scope="module", params=[*TOKENIZERS, "stories260K"])
def tokenizer(request) -> Tokenizer:
    """Each of them; the last is Llama's kind, of real weights."""
    if request.param in TOKENIZERS:
        return TOKENIZERS[request.param]
    file = request.getfixturevalue("shared") / "weights" / "stories260K" / "tok512.bin"
    if not file.is_file():
        pytest.skip(f"no file {file}")
    return open_tokenizer(file, file.parent / "hf")[0]


def named(texts: TokenTexts) -> list[set[str]]:
    """The names of what is reported of each token: itself and the alternatives to it."""
    return [{*dict(_named(one, -0.5, others))} for one, others in zip(texts.tokens, texts.alternatives)]


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_text_is_its_tokens(tokenizer, data):
    """Of a text in two parts, a prompt and what goes on: text, bytes and names of the tokens of either."""
    ids = tokenizer.encode(data.draw(texts), add_special_tokens=data.draw(st.booleans())).ids
    cut, few = data.draw(st.integers(0, len(ids))), min(20, tokenizer.get_vocab_size())
    for before, own in (((), ids), (ids[:cut], ids[cut:])):
        stream, found = TextStream(tokenizer, before), TokenTexts(TextStream(tokenizer, before))
        whole = "".join(map(stream.push, own)) + stream.finish()
        for token in own:
            found.push(token, dict.fromkeys(range(few), -1.0))
        found.finish()
        assert "".join(one.text for one in found.tokens) == whole
        assert [len(names) for names in named(found)] == [len({*range(few), token}) for token in own]
        assert all(len(others) == few for others in found.alternatives)
        if "\ufffd" not in tokenizer.decode(before) + whole:  # no part of a character, and no such sign
            assert b"".join(one.bytes for one in found.tokens) == whole.encode()
    assert tokenizer.decode(ids) == decoded(tokenizer, ids)
    special = {number for number, one in tokenizer.get_added_tokens_decoder().items() if one.special}
    shown = zip(ids, token_texts(tokenizer, ids))
    assert "".join(text for token, text in shown if token not in special) == tokenizer.decode(ids)


def test_answers_of_every_tokenizer_report_their_own_text(tokenizer):
    """Over HTTP: what was asked for and what was written, as tokens, offsets and bytes."""
    size = tokenizer.get_vocab_size()
    m = ch.Model(build(vocab_size=size, positions="rope", max_positions=256), tokenizer)
    m.settings["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt, most = "the cats. a 日é.", min(20, size)
    drawn = {"max_tokens": 20, "temperature": 2.0, "seed": 3}
    with TestClient(make_server({"m": ServeEngine(m)}), base_url="http://127.0.0.1") as client:
        body = {"prompt": prompt, "logprobs": most, "echo": True, **drawn}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
        report = choice["logprobs"]
        assert "".join(report["tokens"]) == choice["text"]
        assert report["text_offset"] == [
            len("".join(report["tokens"][:n])) for n in range(len(report["tokens"]))
        ]
        first, *others = report["top_logprobs"]
        assert first is None and {len(best) for best in others} <= {most, most + 1}
        assert all(token in best for token, best in zip(report["tokens"][1:], others))
        body = {"messages": [{"role": "user", "content": prompt}], "logprobs": True, "top_logprobs": most}
        (choice,) = client.post("/v1/chat/completions", json={**body, **drawn}).json()["choices"]
        text, content = choice["message"]["content"], choice["logprobs"]["content"]
        assert "".join(one["token"] for one in content) == text
        assert {len(one["top_logprobs"]) for one in content} == {most}
        if "\ufffd" not in text:
            assert bytes(value for one in content for value in one["bytes"]) == text.encode()


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_tokens_put_together_are_the_text(tokenizer, data):
    """Half characters, bytes that are no character, special tokens in between."""
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=12)
    prompt, new = data.draw(ids), data.draw(ids)
    stream, texts = TextStream(tokenizer, prompt), TokenTexts(TextStream(tokenizer, prompt))
    whole = "".join(map(stream.push, new)) + stream.finish()
    for token in new:
        texts.push(token, dict.fromkeys(range(5), -1.0))
    texts.finish()
    assert [one.id for one in texts.tokens] == new
    assert "".join(one.text for one in texts.tokens) == whole
    assert all(len(others) == 5 for others in texts.alternatives)
    raw = b"".join(one.bytes for one in texts.tokens)
    # A prompt that ends within a character is completed by the first of the new tokens.
    if "\ufffd" not in whole + tokenizer.decode(prompt) or (tokenizer is KINDS["byte level"] and not prompt):
        assert raw.decode("utf-8", "replace") == whole


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_no_two_alternatives_have_one_name(tokenizer, data):
    size = tokenizer.get_vocab_size()
    others = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    texts = TokenTexts(TextStream(tokenizer, data.draw(st.lists(st.integers(0, size - 1), max_size=4))))
    chosen = data.draw(st.integers(0, size - 1))
    texts.push(chosen, {token: -float(place) for place, token in enumerate(others)})
    texts.finish()
    (names,) = named(texts)
    assert len(names) == len({*others, chosen})
    assert texts.tokens[0].text in names


def test_tokenize_shows_spaces_and_special_tokens():
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [tokenizer.token_to_id(token) for token in ("<s>", "▁the", "▁a", "en", "<0xC3>", "<0xA9>")]
    assert token_texts(tokenizer, ids) == ["<s>", "the", " a", "en", "", "é"]


@pytest.fixture(scope="module")
def client(byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.settings["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    with TestClient(
        make_server({"m": ServeEngine(m, Limits(block=8))}), base_url="http://127.0.0.1"
    ) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_reported_tokens_are_the_answer_also_with_a_stop(client, seed, stream):
    """A stop string cuts text off, and what it cuts is not reported."""
    body = {"prompt": "Hello", "max_tokens": 24, "seed": seed, "logprobs": 20, "temperature": 3.0}
    free = client.post("/v1/completions", json=body).json()["choices"][0]
    assert "".join(free["logprobs"]["tokens"]) == free["text"]
    assert all(len(best) in (20, 21) for best in free["logprobs"]["top_logprobs"])
    stop = next(free["text"][n : n + 2] for n in range(8, 24) if "\ufffd" not in free["text"][n : n + 2])
    text, tokens, offsets = "", [], []
    if stream:
        with client.stream("POST", "/v1/completions", json={**body, "stop": stop, "stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text += choice["text"]
                    tokens += (choice["logprobs"] or {}).get("tokens", [])
                    offsets += (choice["logprobs"] or {}).get("text_offset", [])
    else:
        choice = client.post("/v1/completions", json={**body, "stop": stop}).json()["choices"][0]
        text, tokens = choice["text"], choice["logprobs"]["tokens"]
        offsets = choice["logprobs"]["text_offset"]
    assert text == free["text"][: free["text"].index(stop)]
    assert "".join(tokens) == text
    assert offsets == [len("".join(tokens[:n])) for n in range(len(tokens))]


def test_bytes_of_an_answer_are_its_text(client):
    body = {"messages": [{"role": "user", "content": "é"}], "max_tokens": 30, "temperature": 3.0, "seed": 1}
    choice = client.post("/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 2}).json()
    content = choice["choices"][0]["logprobs"]["content"]
    raw = bytes(value for token in content for value in token["bytes"])
    assert raw.decode("utf-8", "replace") == choice["choices"][0]["message"]["content"]
