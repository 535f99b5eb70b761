"""The embedded corpora: what they hold, and that they are the same each time."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import unicodedata

import numpy as np
import pytest

from clearhead.learn.data.corpora import _FORMS, CORPORA, write_date
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import TASKS, open_data, task_of


@pytest.fixture(scope="module")
def opened():
    """`opened(name)`: an embedded corpus, read once."""
    return functools.cache(lambda name: open_data(DataPlan(paths=(name,))))


@pytest.mark.parametrize("name", ["unicode-names", "dates"])
@pytest.mark.slow
def test_the_same_each_time(name, opened):
    first, second = opened(name), open_data(DataPlan(paths=(name,)))
    assert first == second
    assert TASKS[task_of(DataPlan(), first)].row is CORPORA[name].row


def test_in_lower_case_it_is_another_corpus():
    few = DataPlan(paths=("dates",), max_examples=100)
    assert open_data(dataclasses.replace(few, lowercase=True)).fingerprint != open_data(few).fingerprint


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


def test_character_names(opened):
    corpus = opened("unicode-names")
    assert len(corpus.train) > 20_000
    for row in corpus.validation[:200]:
        assert unicodedata.category(unicodedata.lookup(row.text)) == row.label
    assert {"Lu", "Ll", "Sm", "Zs"} <= set(corpus.labels)


def test_dates_read_back(opened):
    corpus = opened("dates")
    assert len(corpus.train) + len(corpus.validation) == 20_000
    written = {row.source: row.target for row in corpus.train}
    assert len(written) == len(corpus.train), "no source twice"
    assert write_date(datetime.date(2011, 5, 3), "{d}{th} of {month} {y}") == "3rd of May 2011"
    days = [write_date(datetime.date(2011, 5, day), "{d}{th}") for day in (1, 2, 11, 13, 22, 30)]
    assert " ".join(days) == "1st 2nd 11th 13th 22nd 30th"
    days = [datetime.date(*day) for day in ((1999, 12, 31), (2000, 2, 29), (2011, 5, 3), (2011, 3, 5))]
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
