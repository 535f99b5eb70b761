"""Bad input: one line each, that says what is wrong and where."""

from __future__ import annotations

import builtins
import gzip
import importlib
import json
import re

import numpy as np
import pytest

from clearhead.errors import InputError, MissingExtraError
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import open_data, task_of

PAIRS = r"(?P<source>\S+) (?P<target>.+)"
FOUND = {"question": "q", "answers": [{"text": "abc", "answer_start": 0}]}
NOT_FOUND = {"question": "q", "answers": [{"text": "no", "answer_start": 0}]}
SQUAD = {
    "data": [
        {"paragraphs": [{"context": "abc", "qas": [FOUND]}, {"context": "abc", "qas": [FOUND, NOT_FOUND]}]}
    ]
}
TWO = "good\tyes\nbad\tno\nnice\tyes\n"


def case(files: dict[str, str | bytes], message: str, *paths: str, **settings):
    return pytest.param(files, paths or tuple(files)[:1], settings, message, id=message[:50])


CASES = [
    case({}, r"no file or folder .*inputs.txt$", "inputs.txt"),
    case({"input.txt": "x"}, r'no file or folder .*inputs.txt \(did you mean "input.txt"\?\)', "inputs.txt"),
    case({"a.txt": "x"}, r"no file matches .*\*\.md", "*.md"),
    case({"sub/.keep": ""}, r"the folder .*sub holds no files", "sub"),
    case({"a.txt": ""}, r"a.txt is empty: there is no text"),
    case({"a.txt": " \n\n"}, r"a.txt is empty: there is no text"),
    case({"a/1.txt": "", "a/2.txt": "\n"}, r"all files are empty", "a"),
    case({"a.txt": "x"}, r"the data has 1 characters: too few"),
    case(
        {"a.txt": b"abc\n" * 299_999 + "é".encode() * 2 + b"\xff"},
        r"a.txt is not UTF-8: byte 1200000 is 0xff; convert it to UTF-8, or name its encoding with --set",
    ),
    case(
        {"a.txt": "да, это так".encode("cp1251")}, r"a.txt is not UTF-8: byte 0 is 0xe4; .*data.encoding=NAME"
    ),
    case({"a.txt": "ab".encode("utf-16")[:-1]}, r"a.txt is not utf-16"),
    case({"a.txt": "öde"}, r"a.txt is not ascii: byte 0 is 0xc3", encoding="ascii"),
    case({"a.txt": b"abc\0"}, r"a.txt is a binary file of no known kind"),
    case({"a.txt": b"a" * 70_000 + b"\0"}, r"a.txt is no text: byte 70000 is zero"),
    case({"a.txt.gz": b"no gzip"}, r"a.txt.gz is a damaged gzip file"),
    case({"a.txt.gz": gzip.compress(b"hello hello" * 999)[:-9]}, r"a.txt.gz is a damaged gzip file"),
    case(
        {"d/a.tsv": TWO, "d/b.txt": "text"},
        r"several formats: tsv \(a.tsv\), text \(b.txt\); .* --set data.format=tsv",
        "d",
    ),
    case({"a.tsv": "text\tlabel\nx\t1\ny\n"}, r"a.tsv, line 3 has 1 column and line 1 has 2"),
    case({"a.csv": "text,label\nx,1\ny,2,3\n"}, r"a.csv, line 3 has 3 columns and line 1 has 2"),
    case({"a.csv": 'text,label\n"x,1\n'}, r"a.csv, line 2 is not CSV: a quote is opened and not closed"),
    case(
        {"a.csv": 'text,label\nx,1\n"y,2\nz,1\nw,2\n'},
        r"a.csv, line 3 is not CSV: a quote is opened and not closed",
    ),
    case(
        {"a.csv": 'text,label\n"y,2\nz,"1"\n'},
        r"a.csv, line 2 is not CSV: .* expected after .* \(in line 3\)",
    ),
    case(
        {"a.csv": "text,label\nx\ry,1\nz,2\n"},
        r"a.csv, line 2 is not CSV: a carriage return stands outside quotes$",
    ),
    case({"a.tsv": "text\ttext\nx\t1\n"}, r"names a column twice", header=True),
    case({"a.tsv": "text\tlabel\n"}, r"a.tsv is empty: there is no row in it below the header"),
    case(
        {"a.tsv": "sentence\tlabel\nx\t1\n"},
        r"""no column 'sentense' \(did you mean "sentence"\?\)""",
        columns={"text": "sentense"},
        header=True,
    ),
    case({"a.tsv": TWO}, r"columns knows no role 'lable' \(did you mean", columns={"lable": "2"}),
    case(
        {"a.tsv": TWO}, r"roles that do not go together: label, source", columns={"label": "1", "source": "2"}
    ),
    case({"a.csv": "foo,bar,baz\nq,w,e\nr,t,z\n"}, r"which columns hold text, text and label", header=True),
    case({"a.tsv": "text\tlabel\nx\t \ny\t1\n"}, r"a.tsv, line 2: the label in `label` must be"),
    case(
        {"a.tsv": "good\tyes\nfine\tyes\n"},
        r"every example has the label 'yes'",
        columns={"text": "1", "label": "2"},
    ),
    case(
        {"a.tsv": "a\t1\nb\t2\nc\t3\n"},
        r"the 3 examples have as many labels",
        task="classify",
        columns={"text": "1", "label": "2"},
    ),
    case(
        {"a.tsv": TWO, "v.tsv": "good\tyes\nso so\tperhaps\n"},
        r"v.tsv, line 2: the label 'perhaps' does not occur",
        validation="v.tsv",
        task="classify",
    ),
    case(
        {"a.conll": "a\tO\n\nb\tB-X\n", "v.conll": "c\tO\nd\tB-Y\n"},
        r"v.conll, line 1: the tag 'B-Y' does not occur",
        validation="v.conll",
    ),
    case({"a.conll": "a\tO\nb\n"}, r"a.conll, line 2 has 1 column in place of 2"),
    case({"a.conll": "a\nb\n"}, r"a.conll has one column"),
    case({"a.conll": "a O\n"}, r"no column 'upos'", columns={"tags": "upos"}),
    case({"a.conll": "a\tO\nb\t\n"}, r"a.conll, line 2 has no tag"),
    case(
        {"a.en": "x\ny\n", "a.de": "z\n"},
        r"a.en has 2 lines and .*a.de has 1: .*data.format=text",
        "a.en",
        "a.de",
    ),
    case(
        {"a.en": "x\n", "a.de": "z\n", "a.fr": "w\n"},
        r"is there in de, en, fr: choose two, such as --set data.columns=",
        "a",
    ),
    case(
        {"a.en": "x\n", "a.de": "z\n"}, r"is not there in 'it'", "a", columns={"source": "it", "target": "en"}
    ),
    case(
        {"a.txt": "one two\nthree\n"}, r"a.txt, line 2 does not match the pattern .*: 'three'", pattern=PAIRS
    ),
    case({"a.txt": "x" * 999}, r"'x{59}…'", pattern=PAIRS),
    case({"a.txt": "one two\n"}, r"no regular expression", pattern="("),
    case({"a.txt": "one two\n"}, r"has no named groups", pattern="(.*)"),
    case({"a.txt": "one two\n"}, r"needs a data.pattern", format="lines"),
    case({"a.txt": "one two\n"}, r"data.pattern goes with data.format", pattern=PAIRS, format="csv"),
    case({"a.jsonl": '{"text": "x"}\n{"text": \n'}, r"a.jsonl, line 2 is not JSON"),
    case({"a.jsonl": '{"text": "x"}\n[1]\n'}, r"a.jsonl, line 2 holds a list"),
    case(
        {"a.jsonl": '{"text": "x"}\n{"txt": "y"}\n'},
        r"""a.jsonl, line 2 has no field 'text' \(did you mean "txt"\?\)""",
    ),
    case({"a.jsonl": '{"text": "x"}\n{"text": 3}\n'}, r"a.jsonl, line 2: `text` must be text, not '3'"),
    case({"a.jsonl": '{"text": "\\ud800"}\n'}, r"a.jsonl, line 1 holds half of a surrogate pair"),
    case({"a.jsonl": "[" * 100_000}, r"a.jsonl, line 1 is not JSON"),
    case(
        {"a.jsonl": json.dumps({"question": "q", "context": "abc", "answer": "b", "answer_start": 0})},
        r"'b' is not at character 0 .* but at 1",
    ),
    case({"a.jsonl": json.dumps({"question": "q", "context": "abc", "answer": "z"})}, r"not in the context"),
    case(
        {"a.jsonl": json.dumps({"words": ["a"], "tags": ["X", "Y"]})},
        r"a.jsonl, line 1 has 1 words and 2 tags",
    ),
    case(
        {"a.json": json.dumps(SQUAD)},
        r"a.json, record 1, paragraph 2, question 2: the answer 'no' is not in the context",
    ),
    case(
        {"a.jsonl": '{"text": "x", "label": NaN}'},
        r"a.jsonl, line 1: the label in `label` must be text or a number, not 'nan'",
    ),
    case(
        {"a.json": '[\n{"text": "x"},\n{"text" "y"}\n]'},
        r"a.json is not JSON \(Expecting ':' delimiter: line 3",
    ),
    case({"a.json": '[\n{"text": "\\ud800"}\n]'}, r"a.json holds half of a surrogate pair"),
    case({"a.jsonl": "{}\n{}\n"}, r"a.jsonl, line 1 has no field, nor have those after it"),
    case(
        {"a.jsonl": '{"input": "", "output": "x"}\n'},
        r"a.jsonl: no row but 1 row with an empty text; .*data.columns",
    ),
    case(
        {"a.tsv": "text\tlabel\rx\t1\ry\t2\r"},
        r"a.tsv ends its lines with carriage returns alone: convert them",
    ),
    case({"a.txt": "some text"}, r"task classify needs labels, and .*a.txt holds text", task="classify"),
    case({"a.txt": "some text"}, r"lowercase 'source' lowers one side of pairs", lowercase="source"),
    case({"a.tsv": TWO}, r"is named to train on and to validate on", validation="a.tsv"),
    case(
        {"a.tsv": TWO, "v.txt": "text"},
        r"the data is tsv and the validation files are text: .*data.format=tsv",
        validation="v.txt",
    ),
    case(
        {"a.tsv": "same\tx\nsame\ty\n"},
        r"one example, or one many times",
        columns={"source": "1", "target": "2"},
    ),
    case({"p/a/1.png": b"no picture", "p/b/2.png": b"x"}, r"1.png cannot be read as a picture", "p"),
    case({"x.npz": b"PK no zip"}, r"x.npz cannot be read as npz"),
    case(
        {"x.npz": b"plain text"},
        r"x.npz cannot be read as npz: .*; write it with numpy.savez\(path, x=pictures, y=labels\)$",
    ),
    case(
        {"train-images-idx3-ubyte": b"\0\0\x08\x01\0\0\0\x02a"},
        r"stands alone: the file of its labels is missing",
    ),
    case(
        {"train-images-idx3-ubyte": b"\0\0\x08\x01\0\0\0\x02a", "train-labels-idx1-ubyte": b""},
        r"claims 2 bytes and holds 1",
    ),
    case(
        {"train-labels-idx1-ubyte": b"zzzz", "train-images-idx3-ubyte": b"\0\0\x08\x01\0\0\0\x01a"},
        r"labels-idx1-ubyte is no idx file",
    ),
]


@pytest.mark.parametrize(("files", "paths", "settings", "message"), CASES)
def test_one_clear_line(tmp_path, files, paths, settings, message):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if "validation" in settings:
        settings = settings | {"validation": (str(tmp_path / settings["validation"]),)}
    plan = DataPlan(paths=tuple(str(tmp_path / path) for path in paths), **settings)
    with pytest.raises(InputError) as caught:
        open_data(plan)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a/1", "b/1"), "each of the 2 pictures is of a class of its own: .*"),
        (("flat/1", "flat/2"), "every picture is of the class 'flat': .*"),
    ],
)
def test_pictures_whose_folders_tell_nothing(tmp_path, names, message):
    image = pytest.importorskip("PIL.Image")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        image.new("L", (4, 4)).save(tmp_path / f"{name}.png")
    with pytest.raises(
        InputError, match=f"{message}; lay out a folder for each class, several pictures in each$"
    ):
        open_data(DataPlan(paths=(str(tmp_path),)))


def test_arrays_that_are_no_pictures(tmp_path):
    np.savez(tmp_path / "a.npz", foo=np.zeros(3))
    np.savez(tmp_path / "b.npz", x=np.full((3, 2, 2), -1.0), y=np.arange(3))
    np.savez(tmp_path / "c.npz", x=np.zeros((3, 2, 2), np.uint8), y=np.arange(2))
    for name, message in (
        ("a", r"holds foo \(3,\)"),
        ("b", "float64 from -1 to -1"),
        ("c", "one class for each of 3 pictures"),
    ):
        with pytest.raises(InputError, match=message):
            open_data(DataPlan(paths=(str(tmp_path / f"{name}.npz"),)))


def test_no_data_and_unknown_corpora():
    with pytest.raises(InputError, match=r"name files, a folder, or an embedded corpus .*stdlib-docs"):
        open_data(DataPlan())
    with pytest.raises(InputError, match=r'did you mean "unicode-names"\?'):
        open_data(DataPlan(paths=("unicode-name",)))
    with pytest.raises(InputError, match=r"no embedded corpus 'date' \(did you mean \"dates\"\?\)"):
        open_data(DataPlan(paths=("date",), format="corpus"))
    with pytest.raises(InputError, match="task classify needs labels, and the corpus dates holds pairs"):
        open_data(DataPlan(paths=("dates",), task="classify"))


def test_missing_packages_are_named(tmp_path, monkeypatch):
    real_import, real_module = builtins.__import__, importlib.import_module

    def refuse(name, *rest, **more):
        if name.startswith(("PIL", "sklearn")):
            raise ImportError(name)
        return (real_module if not rest and not more else real_import)(name, *rest, **more)

    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.setattr(builtins, "__import__", refuse)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"x")
    for paths in ((str(tmp_path),), ("digits",)):
        with pytest.raises(MissingExtraError, match=r"pip install 'clearhead\[train\]'"):
            open_data(DataPlan(paths=paths))


def test_a_task_that_does_not_fit(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    corpus = open_data(DataPlan(paths=(str(tmp_path / "a.txt"),)))
    with pytest.raises(InputError, match="task tag needs tags, and the data holds text"):
        task_of(DataPlan(task="tag"), corpus)
