"""Data that is not a file, and rows that cannot be read."""

from __future__ import annotations

import datetime
import json
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import clearhead as ch
from clearhead.errors import InputError, MissingExtraError
from clearhead.learn.data.given import Given, given_or_paths
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import open_data
from tests.harness import split

ROWS = [{"text": f"a rather {'good' if i % 2 else 'bad'} film {i}", "label": str(i % 2)} for i in range(24)]
TUPLES = [(row["text"], row["label"]) for row in ROWS]
COLUMNS = {name: [row[name] for row in ROWS] for name in ("text", "label")}
TINY = ["model.d_model=8", "model.n_layers=1", "model.n_heads=1", "train.steps=2", "train.samples=0"]


class PandasLike:
    """What is asked of a frame of pandas, whose iteration gives the names of columns."""

    columns = ("text", "label")

    def __iter__(self):
        return iter(self.columns)

    def itertuples(self, index: bool, name: None):
        assert not index and name is None
        return iter([(text, np.int64(label)) for text, label in TUPLES])


class PolarsLike:
    """What is asked of a frame of polars, whose iteration gives columns."""

    def __iter__(self):
        return iter(COLUMNS.values())

    def iter_rows(self, named: bool):
        assert named
        return iter(ROWS)


class DatasetLike:
    """What is asked of a data set: rows, and features some of which name classes."""

    features = {"text": None, "label": type("ClassLabel", (), {"names": ["bad", "good"]})()}  # noqa: RUF012

    def __iter__(self):
        return iter([{**row, "label": int(row["label"])} for row in ROWS])


class ArrowLike:
    """What is asked of an Arrow table, which cannot be iterated over."""

    def to_batches(self):
        return [type("Batch", (), {"to_pylist": lambda self: ROWS})()]


class LazyLike:
    """What is asked of a lazy frame of polars, which cannot be iterated over either."""

    collect_schema = None

    def collect(self):
        return PolarsLike()


def read(data, tmp_path: Path, **plan):
    given = given_or_paths(data)
    assert isinstance(given, Given)
    return open_data(DataPlan(**given.write(tmp_path), **plan), split=False)


Row = namedtuple("Row", ["text", "label"])


@pytest.mark.parametrize(
    "data",
    [
        *(ROWS, tuple(ROWS), TUPLES, COLUMNS, [list(row) for row in TUPLES], [Row(*row) for row in TUPLES]),
        *((row for row in ROWS), iter(TUPLES), PandasLike(), PolarsLike(), LazyLike(), ArrowLike()),
        np.array(TUPLES),
    ],
    ids=split("dicts tuple tuples columns lists named generator iterator pandas polars lazy arrow numpy"),
)
def test_rows_in_memory_are_the_same_rows(data, tmp_path):
    found = read(data, tmp_path)
    assert [(row.text, row.label) for row in found.validation] == TUPLES
    assert found.labels == ("0", "1")


def test_the_classes_of_a_data_set_have_names(tmp_path):
    found = read(DatasetLike(), tmp_path)
    assert found.labels == ("bad", "good") and found.validation[1].label == "good"
    parts = given_or_paths({"train": DatasetLike(), "test": DatasetLike(), "extra": DatasetLike()})
    assert isinstance(parts, Given) and set(parts.write(tmp_path)) == {"paths", "validation"}
    assert parts.notes == ("the part test is validated on", "parts that are not used: extra")


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow", "datasets"])
def test_real_frames(library, tmp_path):
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    frame = {
        "pandas": lambda: module.DataFrame(COLUMNS),
        "polars": lambda: module.DataFrame(COLUMNS),
        "pyarrow": lambda: module.table(COLUMNS),
        "datasets": lambda: module.Dataset.from_dict(COLUMNS),
    }[library]()
    assert [(row.text, row.label) for row in read(frame, tmp_path).validation] == TUPLES


def test_texts_are_told_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").write_text("x")
    texts = ["It was a dark night", "ok", "The sea, the sea!", "two\nlines"]
    corpus = read(texts, tmp_path)
    assert [chunk.text for chunk in corpus.validation] == texts
    assert isinstance(given_or_paths(["この映画は長い", "とても良かった"]), Given)
    assert isinstance(given_or_paths(["ACGT" * 50, "TTGA" * 60]), Given)
    paths = (["a b", "and another text here"], ["x.txt", "y.txt"], ["my data.txt", "other data.csv"])
    for names in (*paths, ["one text alone"], ["dates"], ("data/*.txt",)):
        assert given_or_paths(names) == tuple(names)
    assert given_or_paths("a text alone") == ("a text alone",)
    assert given_or_paths(Path("x")) == ("x",) and given_or_paths(iter([Path("x")])) == ("x",)
    assert given_or_paths(()) == given_or_paths([]) == ()


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (5, "data is a int: give paths, texts, rows, a frame or a data set"),
        ([5, 6], "row 1 of the data is a int: give texts, dictionaries or tuples"),
        ([{"text": "x", "image": object()}], "row 1 of the data, `image` is a object: only text, numbers"),
        ({"text": ["a"], "label": [1, 2]}, r"columns of one length.*text \(1\), label \(2\)"),
        ({"text": "abc", "label": "abc"}, "columns of one length"),
    ],
)
def test_what_is_no_data_is_one_line(data, line, tmp_path):
    with pytest.raises(InputError, match=line) as error:
        ch.train(data, out=tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_cells_are_written_as_json_has_them(tmp_path):
    cells = {"text": "x", "a": np.float32(0.5), "b": float("nan"), "d": (1, None)}
    cells["c"] = datetime.date(2024, 1, 2)
    given_or_paths([cells, cells]).write(tmp_path)
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert first == {"text": "x", "a": 0.5, "b": None, "c": "2024-01-02", "d": [1, None]}


def test_a_run_on_rows_can_be_resumed_and_repeated(tmp_path):
    done = ch.train((row for row in ROWS), out=tmp_path / "run", settings=TINY)
    assert done.model.labels == ("0", "1") and done.model.classify("a good film").label in ("0", "1")
    assert ch.train(resume=done.folder, settings={"train.steps": 3}).step == 3
    again = ch.train(recipe=done.folder / "train.toml", out=tmp_path / "again")
    assert again.step == 3 and ch.train(ROWS, out=tmp_path / "run", settings=TINY, overwrite=True).step == 2


def test_arrow_files_need_pyarrow_and_spreadsheets_are_named(tmp_path):
    for name in ("x.xlsx", "x.ods", "x.xls"):
        (tmp_path / name).write_bytes(b"PK\0\0")
        with pytest.raises(InputError, match=rf"{name} is a spreadsheet.*save its sheet as CSV"):
            open_data(DataPlan(paths=(str(tmp_path / name),)))
    path = tmp_path / "x.parquet"
    try:
        import pyarrow as arrow
        import pyarrow.parquet
    except ImportError:
        path.write_bytes(b"PAR1\0")
        line = r"x.parquet needs pyarrow: pip install 'clearhead\[arrow\]'"
        with pytest.raises(MissingExtraError, match=line):
            open_data(DataPlan(paths=(str(path),)))
        return
    arrow.parquet.write_table(arrow.table(COLUMNS), path)
    found = open_data(DataPlan(paths=(str(path),)), split=False)
    assert [(row.text, row.label) for row in found.validation] == TUPLES


# Bad rows ---------------------------------------------------------------------------------------------------

GOOD = "".join(f"a rather long film {i},{'ab'[i % 2]}\n" for i in range(12))
BROKEN = 'not json\n{"text": 5, "label": "1"}\n[1]\n{"text": "x"}\n'
BAD = {  # a file with bad rows, the line of the first, how many are bad, how many are good
    "x.csv": ("text,label\n" + GOOD + "only one\n,,\nb,c,d\n" + GOOD, "x.csv, line 14 has 1 column", 2, 24),
    "x.tsv": ("text\tlabel\n" + GOOD.replace(",", "\t") + "a\tb\tc\n", "x.tsv, line 14 has 3 columns", 1, 12),
    "x.jsonl": (
        "".join(json.dumps(row) + "\n" for row in ROWS) + BROKEN,
        *("x.jsonl, line 25 is not JSON", 4, 24),
    ),
    "x.json": (json.dumps([*ROWS, 5, {"text": "x", "label": None}]), "x.json, record 25 holds a int", 2, 24),
    "x.conll": ("a O\nb X\n\n" * 9 + "a O\nb\n\n" + "c O\nd O\n", "x.conll, line 29 has 1 column", 1, 10),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_refused_or_skipped_and_counted(name, tmp_path):
    text, line, bad, good = BAD[name]
    (tmp_path / name).write_text(text)
    plan = DataPlan(paths=(str(tmp_path / name),))
    with pytest.raises(InputError, match=line.replace("`", ".")) as error:
        open_data(plan, split=False)
    assert "\n" not in str(error.value)
    found = open_data(DataPlan(paths=plan.paths, bad_rows="skip"), split=False)
    assert len(found.validation) == good
    count = "1 bad row" if bad == 1 else f"{bad} bad rows"
    note = next(note for note in found.notes if note.startswith(f"{count} skipped; the first: "))
    assert line in note


def test_documents_and_files_of_bad_rows_alone(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a text"}\n{"text": 7}\n{"text": "another"}\n')
    plan = DataPlan(paths=(str(path),), bad_rows="skip", task="lm")
    found = open_data(plan, split=False)
    assert [chunk.text for chunk in found.validation] == ["a text", "another"]
    assert any(note.startswith("1 bad row skipped") for note in found.notes)
    path.write_text("no\nno\n")
    with pytest.raises(InputError, match=r"there is no row but 2 bad rows; the first: .*x.jsonl, line 1"):
        open_data(plan, split=False)
