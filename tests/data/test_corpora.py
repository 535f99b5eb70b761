"""The embedded corpora: what they hold, and that they are the same each time."""

from __future__ import annotations

import datetime
import unicodedata

import numpy as np
import pytest

from clearhead.learn.data.corpora import _FORMS, CORPORA, write_date
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import TASKS, open_data, task_of


@pytest.mark.parametrize("name", ["unicode-names", "dates"])
@pytest.mark.slow
def test_the_same_each_time(name):
    first, second = (open_data(DataPlan(paths=(name,))) for _ in range(2))
    assert first == second
    assert TASKS[task_of(DataPlan(), first)].shape is CORPORA[name].shape
    assert open_data(DataPlan(paths=(name,), lowercase=True)).fingerprint != first.fingerprint


@pytest.mark.slow
def test_library_docs_are_english_prose():
    corpus = open_data(DataPlan(paths=("stdlib-docs",)))
    train, validation = (
        ["".join(chunk.text for chunk in side)] for side in (corpus.train, corpus.validation)
    )
    text = train[0] + validation[0]
    assert 1_000_000 < len(text) < 4_000_000
    assert len(validation[0]) < 0.25 * len(text)
    words = text.split()
    assert sum(word in ("the", "a", "of", "to", "is", "and", "in") for word in words) > 0.1 * len(words)
    assert text.count("def __init__(self") < 20, "code in examples, no more"


def test_library_code_is_streamed():
    corpus = open_data(DataPlan(paths=("stdlib-code",), max_examples=40))
    texts = [chunk.text for side in (corpus.train, corpus.validation) for chunk in side]
    assert any("def " in text for text in texts)
    assert len(texts) == 40


def test_character_names():
    corpus = open_data(DataPlan(paths=("unicode-names",)))
    assert len(corpus.train) > 20_000
    for row in corpus.validation[:200]:
        assert unicodedata.category(unicodedata.lookup(row.text)) == row.label
    assert {"Lu", "Ll", "Sm", "Zs"} <= set(corpus.labels)


def test_dates_read_back():
    corpus = open_data(DataPlan(paths=("dates",)))
    assert len(corpus.train) + len(corpus.validation) == 20_000
    written = {row.source: row.target for row in corpus.train}
    assert len(written) == len(corpus.train), "no source twice"
    assert write_date(datetime.date(2011, 5, 3), "{d}{th} of {month} {y}") == "3rd of May 2011"
    assert [write_date(datetime.date(2011, 5, day), "{d}{th}") for day in (1, 2, 11, 13, 22, 30)] == [
        "1st",
        "2nd",
        "11th",
        "13th",
        "22nd",
        "30th",
    ]
    days = [
        datetime.date(1999, 12, 31),
        datetime.date(2000, 2, 29),
        datetime.date(2011, 5, 3),
        datetime.date(2011, 3, 5),
    ]
    forms = {form: {write_date(day, form) for day in days} for form in _FORMS}
    assert all(len(own) == len(days) for own in forms.values()), "a form must tell days apart"
    assert len(_FORMS) >= 20 and len(set().union(*forms.values())) >= len(_FORMS) * len(days) - 4


def test_digits():
    pytest.importorskip("sklearn")
    corpus = open_data(DataPlan(paths=("digits",)))
    assert len(corpus.train) + len(corpus.validation) == 1797
    assert corpus.train.pixels.shape[1:] == (8, 8, 1) and corpus.train.pixels.dtype == np.uint8
    assert corpus.train.pixels.max() == 255
    assert corpus.labels == tuple("0123456789")


def test_a_path_of_the_same_name_wins(tmp_path, monkeypatch):
    (tmp_path / "dates").write_text("not the corpus at all")
    monkeypatch.chdir(tmp_path)
    assert open_data(DataPlan(paths=("dates",))).shape == "text"
    assert open_data(DataPlan(paths=("dates",), format="corpus")).shape == "pairs"
