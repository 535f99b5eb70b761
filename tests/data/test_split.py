"""Training and validation: deterministic, disjoint, independent of order; text in bounded memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.learn.data import split as text_module
from clearhead.learn.data.examples import Chunk
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.data.split import Stream, cut, key_of, normal, split_keys, split_text
from clearhead.learn.tasks.table import open_data


def opened(path: Path, **plan):
    return open_data(DataPlan(paths=(str(path),), **plan))


def rows(count: int) -> list[str]:
    draw = random.Random(0)
    return [f"text number {draw.randrange(count)}\t{draw.randrange(3)}" for _ in range(count)]


def test_equal_rows_are_on_one_side_whatever_the_order(tmp_path):
    lines = rows(1000)
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    (tmp_path / "b.tsv").write_text("\n".join(reversed(lines)))
    first, second = opened(tmp_path / "a.tsv"), opened(tmp_path / "b.tsv")
    assert set(first.train) == set(second.train) and set(first.validation) == set(second.validation)
    assert not {row.text for row in first.train} & {row.text for row in first.validation}
    assert len(first.train) + len(first.validation) == 1000
    assert 60 <= len(first.validation) <= 140
    assert first.fingerprint != second.fingerprint


def test_an_example_keeps_its_side_when_others_come(tmp_path):
    lines = [f"text {i}\t{i % 2}" for i in range(2000)]
    (tmp_path / "a.tsv").write_text("\n".join(lines[:1000]))
    (tmp_path / "b.tsv").write_text("\n".join(lines))
    few, many = opened(tmp_path / "a.tsv"), opened(tmp_path / "b.tsv")
    assert set(few.validation) <= set(many.validation) and set(few.train) <= set(many.train)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=60), st.floats(0.01, 0.99))
def test_both_sides_have_examples_and_share_no_key(values, share):
    keys = [key_of(str(value)) for value in values]
    if len(set(keys)) < 2:
        return
    validates = split_keys(keys, share)
    sides = [{key for key, held in zip(keys, validates) if held is side} for side in (True, False)]
    assert sides[0] and sides[1] and not sides[0] & sides[1]


@given(st.permutations(range(6)), st.lists(st.sampled_from("ab"), min_size=6, max_size=6))
def test_few_examples_are_parted_where_a_label_occurs_twice(order, labels):
    keys, names = [key << 60 for key in order], [(label,) for label in (*labels[:5], "c")]
    if max(map(labels[:5].count, "ab")) > 1:
        validates = split_keys(keys, 0.001, names)
        assert 0 < sum(validates) < 6
        known = {own for own, held in zip(names, validates) if not held}
        assert all(own in known for own, held in zip(names, validates) if held)


def test_rare_labels_train(tmp_path):
    lines = [f"text {i}\t{i % 2}" for i in range(300)] + [f"odd {i}\trare{i}" for i in range(30)]
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    corpus = opened(tmp_path / "a.tsv")
    known = {row.label for row in corpus.train}
    assert len(known) == 32 == len(corpus.labels)
    assert {row.label for row in corpus.validation} <= known


# Text -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.text(st.sampled_from("ab \nü"), max_size=40), min_size=1, max_size=30),
    st.floats(0.05, 0.9),
    st.integers(1, 9),
)
def test_text_is_parted_without_loss(documents, share, size):
    """Every character on exactly one side, documents whole or cut once, whatever the size of chunks."""
    before, text_module.CHUNK = text_module.CHUNK, size
    try:
        chunks = [chunk for document in documents for chunk in cut([document[:3], document[3:]])]
        whole = ["".join(text) for text in joined(chunks)]
        assert whole == [document for document in documents if document.strip() or len(document) > size]
        assert all(len(chunk.text) <= size for chunk in chunks)
        if max(map(len, whole), default=0) < 20 or len(set(whole)) < 2:
            return
        train, validation, _ = split_text(Stream(lambda: iter(chunks), "empty"), share)
        parts = ["".join(text) for text in joined(train)], ["".join(text) for text in joined(validation)]
        if len(whole) >= text_module.FEW:
            assert sorted([*parts[0], *parts[1]]) == sorted(whole)
            assert parts[0] and parts[1] and not set(parts[0]) & set(parts[1])
        else:
            cuts = [int(len(document) * (1 - share)) for document in whole]
            assert parts[0] == [document[:at] for document, at in zip(whole, cuts) if at]
            assert parts[1] == [document[at:] for document, at in zip(whole, cuts) if at < len(document)]
    finally:
        text_module.CHUNK = before


def joined(chunks) -> list[list[str]]:
    """The pieces of each document, by the marks of their ends."""
    documents, rest = [], []
    for chunk in chunks:
        rest.append(chunk.text)
        if chunk.ends:
            documents.append(rest)
            rest = []
    assert not rest, "the last document has no end"
    return documents


def test_many_documents_are_kept_whole(tmp_path):
    for number in range(60):
        (tmp_path / f"{number:02}.txt").write_text(f"story {number % 50}\n" * 5)
    corpus = opened(tmp_path)
    train, validation = ({chunk.text for chunk in side} for side in (corpus.train, corpus.validation))
    assert len(train) + len(validation) == 50 and validation and not train & validation
    assert list(corpus.train) == list(corpus.train), "can be gone through again"
    assert corpus.size == sum(len(chunk.text) for chunk in corpus.train)


def test_few_documents_give_their_ends(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    corpus = opened(tmp_path, validation_share=0.25)
    assert list(corpus.train) == [Chunk("a" * 75, True), Chunk("b" * 75, True)]
    assert list(corpus.validation) == [Chunk("a" * 25, True), Chunk("b" * 25, True)]


def test_validation_files_are_left_out_of_a_folder(tmp_path):
    for name in ("train", "val"):
        (tmp_path / f"{name}.txt").write_text(f"this is {name}")
    corpus = opened(tmp_path, validation=(str(tmp_path / "val.txt"),))
    assert [chunk.text for chunk in corpus.train] == ["this is train"]
    assert [chunk.text for chunk in corpus.validation] == ["this is val"]
    assert "1 validation file left out of training" in corpus.notes


# Fingerprints -----------------------------------------------------------------------------------------------


def test_the_fingerprint_follows_content_and_settings(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(rows(50)))
    seen = {opened(path).fingerprint}
    assert opened(path, batch_size=7, max_length=3).fingerprint in seen, "batching changes no example"
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "b.tsv").write_bytes(path.read_bytes())
    assert opened(tmp_path / "moved" / "b.tsv").fingerprint in seen, "nor does the name of the file"
    turned = {"columns": {"source": "1", "target": "2"}}
    for change in ({"lowercase": True}, {"validation_share": 0.2}, {"max_examples": 40}, turned):
        seen.add(opened(path, **change).fingerprint)
    path.write_text(path.read_text() + "\nmore\t1\n")
    assert len({*seen, opened(path).fingerprint}) == 6


def test_the_fingerprint_follows_the_format_and_the_side_of_a_file(tmp_path):
    row = '{"text": "one"}\n'
    for name, text in (("1.txt", row), ("2.txt", "two"), ("3.txt", "three"), ("1.jsonl", row)):
        (tmp_path / name).write_text(text)

    def named(*names: str) -> tuple[str, ...]:
        return tuple(str(tmp_path / name) for name in names)

    plans = [DataPlan(task="lm", paths=named("[12].txt"), validation=named("3.txt"))]
    plans += [DataPlan(task="lm", paths=named("1.txt"), validation=named("[23].txt"))]
    plans += [DataPlan(task="lm", paths=named("1.txt")), DataPlan(task="lm", paths=named("1.jsonl"))]
    assert len({open_data(plan).fingerprint for plan in plans}) == 4


def test_the_fingerprint_follows_the_class_of_a_picture(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for number in range(12):
        (tmp_path / f"{'ab'[number // 6]}").mkdir(exist_ok=True)
        image.new("L", (2, 2), number).save(tmp_path / "ab"[number // 6] / f"{number:02}.png")
    before = opened(tmp_path).fingerprint
    (tmp_path / "a" / "05.png").rename(tmp_path / "b" / "05.png")
    assert opened(tmp_path).fingerprint != before


# Memory -----------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from clearhead.learn.tasks.table import open_data
from clearhead.learn.data.plan import DataPlan
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus = open_data(DataPlan(paths=(sys.argv[1],)))
length = sum(len(chunk.text) for side in (corpus.train, corpus.validation) for chunk in side)
print(length, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in other units elsewhere")
@pytest.mark.slow
def test_a_long_text_is_never_whole_in_memory(tmp_path):
    line = b"the quick brown fox jumps over the lazy dog and runs on\n"
    count = 60_000_000 // len(line)
    with (tmp_path / "long.txt").open("wb") as file:
        for _ in range(count // 10_000):
            file.write(line * 10_000)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "long.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    length, grown = map(int, done.stdout.split())
    assert length == count // 10_000 * 10_000 * len(line)
    assert grown < 50_000_000


VARIANTS = {
    "case": str.upper,
    "spaces": lambda text: "  " + text.replace(" ", " \t "),
    "nfd": lambda text: unicodedata.normalize("NFD", text),
    "nfkc": lambda text: text.replace("fi", "ﬁ"),
    "title": str.title,
}


@given(st.text())
def test_a_normal_text_is_that_of_its_variants(text):
    assert normal(normal(text)) == normal(text)
    assert normal(unicodedata.normalize("NFD", text)) == normal(unicodedata.normalize("NFC", text))
    assert normal(f" {text}\n") == normal(text)


@pytest.mark.parametrize("shape", ["labels", "pairs", "pairs with a label", "similar"])
def test_near_duplicates_are_on_one_side_and_counted(shape, tmp_path):
    """Rows come with variants of themselves, and pairs swapped: no validation row is like a training row."""
    texts = [f"Größe fin {n} çedilla" for n in range(150)]
    both = [(f"{text} one", f"{text} two") for text in texts]
    forms = list(VARIANTS.values())
    near = [(change(a), change(b)) for n, (a, b) in enumerate(both) for change in (forms[n % len(forms)],)]
    if shape != "labels":
        near += [(b, a) for a, b in both]
    names = {
        "labels": ("text",), "pairs": ("source", "target"), "pairs with a label": ("sentence1", "sentence2"),
        "similar": ("anchor", "positive"),
    }[shape]  # fmt: skip
    lines = [dict(zip(names, pair)) for pair in (*both, *near)]
    if "label" in shape:
        lines = [{**line, "label": n % 2} for n, line in enumerate(lines)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = opened(tmp_path / "x.jsonl", task="embed" if shape == "similar" else None)

    def key(row) -> frozenset[str]:
        names = ("text", "pair", "source", "target", "anchor", "positive")
        own = [getattr(row, name, None) for name in names]
        return frozenset(normal(text) for text in own if text)

    train, held = ({key(row) for row in side} for side in (corpus.train, corpus.validation))
    assert held and not train & held
    (note,) = [note for note in corpus.notes if "near-duplicate" in note]
    assert note.startswith("150 near" if shape == "labels" else "300 near"), note


def test_labels_that_may_be_missing_are_said(tmp_path):
    rows = ["good,a film", "bad,a book", "nan,a song", "NA,a play"] * 5
    (tmp_path / "x.csv").write_text("label,text\n" + "".join(f"{row} {n}\n" for n, row in enumerate(rows)))
    corpus = opened(tmp_path / "x.csv")
    line = "10 rows with the label NA, nan, taken as a class: remove them if their label is missing"
    assert line in corpus.notes
    assert corpus.labels == ("NA", "bad", "good", "nan")
