"""Tables as they are found: which first rows are headers, and which are examples."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from clearhead.data.examples import Corpus
from clearhead.data.layout import has_header
from clearhead.data.plan import DataPlan
from clearhead.errors import InputError
from clearhead.tasks.corpus import open_data

FILMS = [(f"a {'good' if i % 2 else 'bad'} film, number {i}", "pos" if i % 2 else "neg") for i in range(60)]
INDEXED = [(str(i), *film) for i, film in enumerate(FILMS)]
SPAM = [(label, text, "", "", "rest" if i == 7 else "") for i, (text, label) in enumerate(FILMS)]


def opened(path: Path, rows: list[tuple[str, ...]], **settings) -> Corpus:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return open_data(DataPlan(paths=(str(path),), **settings), split=False)


@pytest.mark.parametrize(
    ("header", "rows", "settings"),
    [
        (("", "text", "label"), INDEXED, {}),
        (("Unnamed: 0", "text", "label"), INDEXED, {}),
        (("", "Unnamed: 0", "text", "label"), [(row[0], *row) for row in INDEXED], {}),
        (("", "tweet", "airline_sentiment"), INDEXED, {}),
        (("tweet", "airline_sentiment"), FILMS, {}),
        (("id", "tweet", "airline_sentiment"), INDEXED, {}),
        (("v1", "v2", "", "", ""), SPAM, {"columns": {"text": "v2", "label": "v1"}}),
    ],
)
def test_a_header_is_no_example(tmp_path, header, rows, settings):
    corpus = opened(tmp_path / "x.csv", [header, *rows], **settings)
    assert [(row.text, row.label) for row in corpus.validation] == FILMS
    assert corpus.labels == ("neg", "pos")
    assert f"{len(header)} columns with a header" in " ".join(corpus.notes)


def test_names_that_say_nothing_are_asked_for(tmp_path):
    with pytest.raises(InputError, match=re.escape("""--set data.columns='{text = "v2", label = "v1"}'""")):
        opened(tmp_path / "x.csv", [("v1", "v2", "", "", ""), *SPAM])


def test_a_name_given_twice_is_an_error(tmp_path):
    with pytest.raises(InputError, match="line 1 names a column twice: text, label, text; rename one"):
        opened(
            tmp_path / "x.csv", [("text", "label", "text"), *((text, label, text) for text, label in FILMS)]
        )


@pytest.mark.parametrize("text", ["strange film number x", "an odd one"])
def test_a_rare_label_in_the_first_row_is_an_example(tmp_path, text):
    corpus = opened(tmp_path / "x.csv", [(text, "odd"), *FILMS])
    assert (corpus.validation[0].text, corpus.validation[0].label) == (text, "odd")
    assert (
        "no other row has the label 'odd' of the first: if that is a header, --set data.header=true"
        in corpus.notes
    )


@pytest.mark.parametrize(
    "rows",
    [
        [("message", "message"), ("house", "maison"), ("cat", "chat")],  # equal words of two languages
        [("", "fine"), ("7", "good"), ("7", "bad")],  # a missing number
        [("fine", "pos"), *FILMS],  # a short text, and a label that comes again
    ],
)
def test_examples_that_look_like_headers(rows):
    assert not has_header(rows, {})


def test_whole_numbers_name_the_same_class_however_they_are_written(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nx,0.0\ny,1.0\nz,1\nw,2.5\n")
    labels = [0.0, 1.0, 1, 2.5]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"text": text, "label": label}) for text, label in zip("xyzw", labels))
    )
    for name in ("a.csv", "a.jsonl"):
        corpus = open_data(DataPlan(paths=(str(tmp_path / name),)), split=False)
        assert [row.label for row in corpus.validation] == ["0", "1", "1", "2.5"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("names", [("sentence", "label"), ("Unnamed: 0", "sentence", "label")])
def test_files_with_and_without_the_header(tmp_path, first, names):
    """Also files to validate on; and the columns may be in another order where both files name them."""
    rows = [(str(i), *film)[-len(names) :] for i, film in enumerate(FILMS)]
    with_header, without = ([names, *rows[:40]], rows[40:])
    for name, lines in (
        ("a.csv", with_header if first else without),
        ("b.csv", without if first else with_header),
    ):
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows(lines)
    paths = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    together = open_data(DataPlan(paths=tuple(paths)), split=False)
    assert sorted((row.text, row.label) for row in together.validation) == sorted(FILMS)
    apart = open_data(DataPlan(paths=(paths[0],), validation=(paths[1],)))
    assert {(row.text, row.label) for row in (*apart.train, *apart.validation)} == set(FILMS)
    for corpus in (together, apart):
        assert (
            f"{'no' if first else 'a'} header in b.csv: columns taken in the order of a.csv" in corpus.notes
        )


def test_another_header_is_refused_not_read_as_an_example(tmp_path):
    (tmp_path / "a.tsv").write_text(
        "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in FILMS)
    )
    (tmp_path / "b.tsv").write_text(
        "film\tverdict\n" + "".join(f"{text}\t{label}\n" for text, label in FILMS)
    )
    with pytest.raises(InputError, match=r"b.tsv: no column 'sentence'; there are film, verdict"):
        open_data(DataPlan(paths=(str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv"))), split=False)
