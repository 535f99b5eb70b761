"""Tables as they are found: which first rows are headers, and which are examples."""

from __future__ import annotations

import csv
import itertools
import json
import random
import re
from pathlib import Path

import pytest

from clearhead.errors import InputError
from clearhead.learn.data.examples import Corpus
from clearhead.learn.data.layout import has_header
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import open_data

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
    twice = [(text, label, text) for text, label in FILMS]
    with pytest.raises(InputError, match="line 1 names a column twice: text, label, text; rename one"):
        opened(tmp_path / "x.csv", [("text", "label", "text"), *twice])


@pytest.mark.parametrize("text", ["strange film number x", "an odd one"])
def test_a_rare_label_in_the_first_row_is_an_example(tmp_path, text):
    corpus = opened(tmp_path / "x.csv", [(text, "odd"), *FILMS])
    assert (corpus.validation[0].text, corpus.validation[0].label) == (text, "odd")
    line = "no other row has the label 'odd' of the first: if that is a header, --set data.header=true"
    assert line in corpus.notes


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
    rows = [{"text": text, "label": label} for text, label in zip("xyzw", [0.0, 1.0, 1, 2.5])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("a.csv", "a.jsonl"):
        corpus = open_data(DataPlan(paths=(str(tmp_path / name),)), split=False)
        assert [row.label for row in corpus.validation] == ["0", "1", "1", "2.5"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("names", [("sentence", "label"), ("Unnamed: 0", "sentence", "label")])
def test_files_with_and_without_the_header(tmp_path, first, names):
    """Also files to validate on; and the columns may be in another order where both files name them."""
    rows = [(str(i), *film)[-len(names) :] for i, film in enumerate(FILMS)]
    with_header, without = ([names, *rows[:40]], rows[40:])
    files = (with_header, without) if first else (without, with_header)
    for name, lines in zip(("a.csv", "b.csv"), files):
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows(lines)
    paths = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    together = open_data(DataPlan(paths=tuple(paths)), split=False)
    assert sorted((row.text, row.label) for row in together.validation) == sorted(FILMS)
    apart = open_data(DataPlan(paths=(paths[0],), validation=(paths[1],)))
    assert {(row.text, row.label) for row in (*apart.train, *apart.validation)} == set(FILMS)
    line = f"{'no' if first else 'a'} header in b.csv: columns taken in the order of a.csv"
    assert all(line in corpus.notes for corpus in (together, apart))


def test_another_header_is_refused_not_read_as_an_example(tmp_path):
    rows = "".join(f"{text}\t{label}\n" for text, label in FILMS)
    (tmp_path / "a.tsv").write_text(f"sentence\tlabel\n{rows}")
    (tmp_path / "b.tsv").write_text(f"film\tverdict\n{rows}")
    with pytest.raises(InputError, match=r"b.tsv: no column 'sentence'; there are film, verdict"):
        open_data(DataPlan(paths=(str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv"))), split=False)


# Headers in any language ------------------------------------------------------------------------------------

LANGUAGES = {  # words of texts, two labels, names of a column of text, names of a column of labels
    "en": (
        "the film was rather long and we left early because nobody laughed at all",
        ("good", "bad"),
        ("Review Text", "comments/feedback", "What did you think of the product you bought?", "reviewText"),
        ("Rating (pos/neg)", "overall_sentiment", "How satisfied are you with it, all in all?", "Label:"),
    ),
    "ru": (
        "фильм был слишком долгим и мы ушли раньше потому что никто не смеялся",
        ("хорошо", "плохо"),
        ("текст", "Отзыв (полностью)", "мнение"),
        ("метка", "Оценка/класс", "тональность [авто]"),
    ),
    "ja": (
        "この映画は とても長くて 私たちは 早く帰りました だれも 笑わなかった からです",
        ("良い", "悪い"),
        ("本文", "レビュー（全文）", "感想"),
        ("ラベル", "評価（良い／悪い）", "印象"),
    ),
    "ar": (
        "كان الفيلم طويلا جدا وخرجنا مبكرا لأن أحدا لم يضحك على الإطلاق",
        ("جيد", "سيئ"),
        ("النص", "التعليق"),
        ("التصنيف", "تقييم (آلي)"),
    ),
    "el": (
        "η ταινία ήταν πολύ μεγάλη και φύγαμε νωρίς γιατί κανείς δεν γέλασε",
        ("καλό", "κακό"),
        ("κείμενο", "σχόλιο"),
        ("ετικέτα", "γνώμη/τάξη"),
    ),
}
LAYOUTS = ("text label", "label text", "id text label", "# text date label", "id label text")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_headers_in_any_language_are_no_examples(tmp_path, language, suffix):
    """Generate tables with each pair of names, labels as words and as numbers; and the same without names."""
    words, labels, texts, classes = LANGUAGES[language]
    draw, path = random.Random(0), tmp_path / f"x.{suffix}"
    for text_name, label_name in itertools.product(texts, classes):
        for layout, numbers in zip(LAYOUTS * 2, (False, True) * 5):
            rows = []
            for number in range(draw.randint(8, 30)):
                own = draw.sample(words.split(), len(words.split()) - draw.randint(0, 3))
                label = str(number % 2) if numbers else labels[number % 2]
                cells = {"text": " ".join([*own, str(number)]), "label": label, "id": str(number)}
                rows.append({**cells, "#": str(number), "date": f"2024-01-{number + 1:02}"})
            names = {"text": text_name, "label": label_name}
            expected = [(row["text"], row["label"]) for row in rows]
            order = layout.split()
            for headed in (True, False):
                lines = [[names.get(role, role) for role in order]] * headed
                lines += [[row[role] for role in order] for row in rows]
                with path.open("w", newline="") as file:
                    csv.writer(file, delimiter="," if suffix == "csv" else "\t").writerows(lines)
                corpus = open_data(DataPlan(paths=(str(path),)), split=False)
                found = [(row.text, row.label) for row in corpus.validation]
                assert found == expected, (names, layout, headed, corpus.notes)


@pytest.mark.parametrize("header", ["id,Review Text,Rating (0/1)", "#,текст,метка", "№,本文,ラベル"])
def test_named_columns_are_trained_on(tmp_path, header):
    rows = "".join(f"{i},it was a rather long film {i},{i % 2}\n" for i in range(20))
    (tmp_path / "x.csv").write_text(f"{header}\n{rows}")
    corpus = open_data(DataPlan(paths=(str(tmp_path / "x.csv"),)))
    assert corpus.labels == ("0", "1") and len(corpus.train) + len(corpus.validation) == 20


def test_parallel_columns_of_unknown_names_are_pairs(tmp_path):
    rows = "".join(f"слово номер {i},word number {i} of them\n" for i in range(20))
    (tmp_path / "x.csv").write_text(f"русский,английский (GB)\n{rows}")
    corpus = open_data(DataPlan(paths=(str(tmp_path / "x.csv"),), header=True), split=False)
    assert corpus.shape == "pairs" and corpus.validation[0].source == "слово номер 0"
