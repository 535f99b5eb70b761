"""Encoding: what is written, when it is read again, when it is made anew, and how little memory it takes."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from itertools import chain

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from clearhead.errors import InputError
from clearhead.learn.batches import encoding as module
from clearhead.learn.data.examples import Chunk
from clearhead.learn.tasks.entries.text import CHUNK, chunks_of
from clearhead.learn.tasks.table import TASKS as SPECS
from tests.batches.toys import corpus_of, encoded_of, special_of, text_corpus, tokenizer_for

TASKS = ("lm", "mlm", "denoise", "seq2seq", "classify", "tag", "answer")


class Described:
    """A tokenizer that can only be asked what it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text = tokenizer.to_str()

    def to_str(self) -> str:
        return self.text


@pytest.mark.parametrize("task", TASKS)
def test_the_second_time_nothing_is_encoded(task, tmp_path, monkeypatch):
    corpus = corpus_of(task)
    first = encoded_of(task, tmp_path, corpus=corpus)
    monkeypatch.setattr(module, "_write_cache", None)  # would fail if it were called
    unread = dataclasses.replace(corpus, train=None)
    again = SPECS[task].encode_corpus(
        unread, "train", Described(tokenizer_for(task)), corpus.labels, tmp_path, special=special_of(task)
    )
    assert first.arrays.keys() == again.arrays.keys()
    assert all((first[name] == again[name]).all() for name in first.arrays)
    for name in ("vocab_size", "specials", "sentinels", "frame", "pair_frame", "notes", "task"):
        assert getattr(first, name) == getattr(again, name)


def test_whatever_changes_the_ids_changes_the_cache(tmp_path):
    corpus, special = corpus_of("classify"), special_of("classify")
    encoded_of("classify", tmp_path, corpus=corpus)
    encoded_of("classify", tmp_path, corpus=dataclasses.replace(corpus, fingerprint="other"))
    encoded_of("classify", tmp_path, "validation", corpus=corpus)
    encoded_of("classify", tmp_path, kind="char", corpus=corpus)
    turned_labels = (tokenizer_for("classify"), corpus.labels[::-1], tmp_path)
    turned = SPECS["classify"].encode_corpus(corpus, "train", *turned_labels, special=special)
    assert len(list(tmp_path.iterdir())) == 5
    assert (turned["labels"] == 1 - encoded_of("classify", tmp_path, corpus=corpus)["labels"]).all()


@pytest.mark.parametrize(
    "fault", ["cut", "changed", "longer", "missing", "no table", "half a table", "another key", "empty"]
)
def test_a_damaged_cache_is_made_anew(fault, tmp_path):
    corpus = corpus_of("seq2seq")
    arrays = encoded_of("seq2seq", tmp_path, corpus=corpus).arrays
    good = {name: array.copy() for name, array in arrays.items()}
    (place,) = tmp_path.iterdir()
    target, table = place / "target", place / "meta.json"
    data = target.read_bytes()
    match fault:
        case "cut":
            target.write_bytes(data[:-2])
        case "changed":
            target.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "longer":
            target.write_bytes(data + b"\0\0")
        case "missing":
            target.unlink()
        case "no table":
            table.unlink()
        case "half a table":
            table.write_text(table.read_text()[:100])
        case "another key":
            table.write_text(json.dumps(json.loads(table.read_text()) | {"key": "0"}))
        case "empty":
            for path in place.iterdir():
                path.write_bytes(b"")
    again = encoded_of("seq2seq", tmp_path, corpus=corpus)
    assert all((again[name] == good[name]).all() and len(again[name]) == len(good[name]) for name in good)
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


def test_a_fault_while_encoding_leaves_nothing_behind(tmp_path):
    class Broken:
        def __iter__(self):
            yield Chunk("the cat sat " * 30_000, True)
            raise InputError("the file ended early")

    broken = dataclasses.replace(text_corpus(), train=Broken(), fingerprint="broken")
    with pytest.raises(InputError, match="ended early"):
        encoded_of("lm", tmp_path, corpus=broken)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write encoded data to .*file.*set data.cache"):
        encoded_of("lm", tmp_path / "file")

    def full(self, *arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Path, "open", full)
    line = r"cannot write encoded data to .*: No space left on device; make room"
    with pytest.raises(InputError, match=line) as error:
        encoded_of("lm", tmp_path / "full")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "full").iterdir())


# Text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "wordpiece", "unigram", "word"])
def test_documents_are_joined_and_each_is_followed_by_the_separator(kind, tmp_path):
    corpus, tokenizer, special = text_corpus(30, 1, 40), tokenizer_for("lm", kind), special_of("lm", kind)
    encoded = encoded_of("lm", tmp_path, kind=kind, corpus=corpus)
    documents = "".join(chunk.text + "\0" * chunk.ends for chunk in corpus.train).split("\0")[:-1]
    wanted = [tokenizer.encode(text).ids + [special["eos"]] for text in documents]
    assert encoded["ids"].tolist() == list(chain.from_iterable(wanted))
    assert np.diff(encoded["ids_offsets"]).tolist() == [len(ids) for ids in wanted]
    assert encoded["ids"].dtype == np.uint16 and encoded["ids_offsets"].dtype == np.int64
    assert encoded.n_tokens == len(encoded["ids"])


def test_one_document_is_followed_by_nothing(tmp_path):
    tokenizer = tokenizer_for("lm")
    texts = [[Chunk("the cat", False), Chunk(" sat", ends)] for ends in (True, False)]
    texts.append([Chunk("", True), Chunk("the cat sat", True), Chunk(" ", True)])
    for number, train in enumerate(texts):
        corpus = dataclasses.replace(text_corpus(), train=train, fingerprint=f"one {number}")
        encoded = encoded_of("lm", tmp_path, corpus=corpus)
        assert encoded["ids"].tolist() == tokenizer.encode("the cat sat").ids
        assert encoded["ids_offsets"].tolist() == [0, len(encoded["ids"])]


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "wordpiece", "unigram", "word"])
def test_a_long_document_is_cut_where_the_tokenizer_cuts_too(kind, tmp_path):
    text = " ".join(chunk.text for chunk in text_corpus(800, 20, 60).train)
    assert len(text) > 6 * CHUNK
    train = [Chunk(text[:50_000], False), Chunk(text[50_000:50_001], False), Chunk(text[50_001:], True)]
    corpus = dataclasses.replace(text_corpus(), train=train, fingerprint="long")
    ids = encoded_of("lm", tmp_path, kind=kind, corpus=corpus)["ids"].tolist()
    assert ids == tokenizer_for("lm", kind).encode(text).ids


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "a\n" * 50_000, "word " * 20_000, " " * 70_000 + "x", "ab  cd\n\n" * 9_000]
)
def test_chunks_are_short_and_make_up_the_text(text):
    made = list(chunks_of([Chunk(text[:33_333], False), Chunk(text[33_333:], True), Chunk("next", True)]))
    assert "".join(piece.text for piece in made) == text + "next"
    assert max(len(chunk.text) for chunk in made) <= CHUNK
    assert [piece.ends for piece in made].count(True) == 2 and made[-1] == Chunk("next", True)
    assert len(made) < 4 + 2 * len(text) / CHUNK


def test_large_vocabularies_take_four_bytes(tmp_path):
    vocabulary = {f"w{number}": number for number in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    corpus = corpus_of("seq2seq", 4)
    rows = [dataclasses.replace(row, target="w69999") for row in corpus.train]
    rare = dataclasses.replace(corpus, train=rows)
    encoded = SPECS["seq2seq"].encode_corpus(rare, "train", tokenizer, (), tmp_path, special={})
    assert encoded["target"].dtype == np.uint32 and set(encoded["target"].tolist()) == {69_999}


def test_truncation_and_padding_of_the_tokenizer_are_not_applied(tmp_path):
    plain = encoded_of("seq2seq", tmp_path)
    tokenizer = Tokenizer.from_str(tokenizer_for("seq2seq").to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    corpus = corpus_of("seq2seq")
    strict = SPECS["seq2seq"].encode_corpus(corpus, "train", tokenizer, (), tmp_path, special={})
    assert all((plain[name] == strict[name]).all() for name in plain.arrays)
    # The user's own tokenizer stays as it was.
    assert tokenizer.truncation is not None and tokenizer.padding is not None


def test_memory_does_not_grow_with_the_text(tmp_path):
    status = pathlib.Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("no /proc: the memory of this process cannot be read")
    taken = []  # MB, as each chunk is asked for

    class Text:
        def __iter__(self):
            for number in range(6):
                yield Chunk(f"some words of number {number} " * 20_000, False)
                taken.append(int(status.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20)
            yield Chunk("end", True)

    corpus = dataclasses.replace(text_corpus(), train=Text(), fingerprint="endless")
    encoded = encoded_of("lm", tmp_path, kind="char", corpus=corpus)
    assert len(encoded["ids"]) > 2.5e6
    # Two million more tokens were encoded meanwhile; to keep them would take more than 100 MB.
    assert max(taken) - taken[0] < 20
