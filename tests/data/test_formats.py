"""Each format, read from small files: the rows come out exactly, and what was guessed is said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from clearhead.learn.data.examples import Chunk, Corpus, Images, Labelled, Pair, Question, Tagged
from clearhead.learn.data.formats import find_source, same_way
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import open_data, task_of


def everything(folder: Path, *names: str, **settings) -> Corpus:
    """All examples of files in a folder, unsplit."""
    return open_data(DataPlan(paths=tuple(str(folder / name) for name in names), **settings), split=False)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_file_is_one_document(tmp_path):
    text = "First paragraph.\r\n\nSecond ünïcode.\n"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"Other"))
    write(tmp_path / "empty.txt", "")
    write(tmp_path / ".hidden", "no")
    corpus = everything(tmp_path, "")
    text = text.replace("\r", "")  # lines end with a line feed, wherever they were written
    assert list(corpus.validation) == [Chunk(text, True), Chunk("Other", True)]
    assert task_of(DataPlan(), corpus) == "lm"
    assert task_of(DataPlan(task="mlm"), corpus) == "mlm"
    assert [chunk.text for chunk in everything(tmp_path, "*.txt", lowercase=True).validation] == [
        text.lower()
    ]


@pytest.mark.parametrize("header", [True, False])
def test_labels_in_tsv(tmp_path, header):
    rows = ['a "good" one\t1', "bad, bad\t0", "so so\t0", "fine\t1"]
    write(tmp_path / "x.tsv", "\r\n".join(["sentence\tlabel"] * header + rows) + "\r\n")
    corpus = everything(tmp_path, "x.tsv")
    assert corpus.validation == [
        Labelled('a "good" one', "1"),
        Labelled("bad, bad", "0"),
        Labelled("so so", "0"),
        Labelled("fine", "1"),
    ]
    assert corpus.labels == ("0", "1")
    said = "2 columns with a header: text from `sentence`, label from `label`"
    assert (said if header else "2 columns without a header: text from `1`, label from `2`") in corpus.notes


def test_parallel_files(tmp_path):
    for language, words in (("en", "one\ntwo\n\n"), ("de", "eins\nzwei\nleer\n"), ("fr", "un\ndeux\nvide\n")):
        write(tmp_path / f"train.{language}", words)
    two = everything(tmp_path, "train.en", "train.de")
    assert two.validation == [Pair("one", "eins"), Pair("two", "zwei")]
    assert "1 row with an empty text left out" in two.notes
    assert everything(tmp_path, "train", columns={"source": "fr", "target": "de"}).validation[1] == Pair(
        "deux", "zwei"
    )
    assert everything(tmp_path, "train.fr", "train.de", columns={"source": "de", "target": "fr"}).validation[
        0
    ] == Pair("eins", "un")
    assert everything(tmp_path, "train.en", "train.de", task="lm").shape == "text"


@pytest.mark.parametrize(
    ("first", "second", "direction"),
    [
        ("src-train.txt", "tgt-train.txt", "first"),
        ("tgt-train.txt", "src-train.txt", "second"),
        ("train.src", "train.tgt", "first"),
        ("train.trg.gz", "train.src.gz", "second"),
        ("train_source.txt", "train_target.txt", "first"),
        ("train.output.txt", "train.input.txt", "second"),
        ("train.en.txt", "train.de.txt", "first"),
        ("de-train.txt", "en-train.txt", "first"),
        ("corpus_fr.txt", "corpus_it.txt", "first"),
    ],
)
def test_two_files_are_parallel_by_their_names(tmp_path, first, second, direction):
    for name, text in ((first, "eins\nzwei\n"), (second, "one\ntwo\n")):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    paths = (str(tmp_path / first), str(tmp_path / second))
    found = find_source(DataPlan(paths=paths), paths)
    order = (first, second) if direction == "first" else (second, first)
    assert (found.format, [path.name for path in found.files]) == ("parallel", list(order))
    turned = [name.replace("train", "dev").replace("corpus", "dev") for name in (second, first)]
    for name in turned:
        (tmp_path / name).write_bytes(b"x\ny\n" if not name.endswith("gz") else gzip.compress(b"x\ny\n"))
    there = [str(tmp_path / name) for name in turned]
    way = same_way(found, find_source(DataPlan(paths=tuple(there)), there))
    kept = [name.replace("train", "dev").replace("corpus", "dev") for name in order]
    assert [path.name for path in way.files] == kept  # whatever the order in which they are named


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a.txt", "b.txt"),
        ("train-1.txt", "train-2.txt"),
        ("src-a.txt", "tgt-b.txt"),
        ("src.txt", "source.txt"),
    ],
)
def test_other_two_files_are_not_parallel(tmp_path, first, second):
    paths = (str(tmp_path / first), str(tmp_path / second))
    for path in paths:
        Path(path).write_text("one\ntwo\n")
    assert find_source(DataPlan(paths=paths), paths).format == "text"


SENTENCES = [
    {"premise": "It rains.", "hypothesis": "It is wet.", "label": 1},
    {"premise": "Sun.", "hypothesis": "Rain.", "label": 0},
]
NUMBERED = "7\tGo.\tGeh.\n8\tRun!\tLauf!\n9\tStop.\tHalt.\n"
TRANSLATED = [{"translation": {"en": f"word {i}", "de": f"Wort {i}"}} for i in range(3)]
CAPITALS = "source\ttarget\nAB\tCD\nEF\tGH\n"
COMMANDS, PATTERN = "IN: jump twice OUT: J J\nIN: look OUT: L\n", "IN: (?P<source>.*) OUT: (?P<target>.*)"
ENTITIES = "-DOCSTART- -X- O\n\nU.N. NNP I-ORG\n# # O\n\n\nPeter NNP B-PER\nleft VBD O\nhome NN O\n"
CONLLU = """# sent_id = 1
# text = Don't go
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVB\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_
3.1\tyou\tyou\tPRON\t_\t_\t_\t_\t_\t_

1\tHello\thello\tINTJ\tUH\t_\t0\troot\t_\t_
"""
ANSWERED = Question("Who?", "Ada wrote it.", "Ada", 0)
UNANSWERED = Question("When?", "Ada wrote it.", "", 0)
ASKED = {"question": "Who?", "id": "1", "answers": [{"text": "Ada", "answer_start": 0}]}
IMPOSSIBLE = {"question": "When?", "id": "2", "answers": [], "is_impossible": True}
SQUAD = {"title": "t", "paragraphs": [{"context": "Ada wrote it.", "qas": [ASKED, IMPOSSIBLE]}]}
LOWERED = {"question": "Q", "context": "İİ Ada", "answer": "Ada", "answer_start": 3}
QUESTIONS = "question,context,answer,answer_start"


def lines(rows: list[dict]) -> str:
    return "\n".join(map(json.dumps, rows))


# A file, how it is to be read, and the first rows that come out.
CASES = {
    "quotes": (
        *("x.csv", 'id;stars;text\n1;5;"two\nlines; and ""quotes"""\n2;1;plain\n3;5;more\n'),
        {"columns": {"label": "stars"}},
        [Labelled('two\nlines; and "quotes"', "5"), Labelled("plain", "1"), Labelled("more", "5")],
    ),
    "pairs with a label": (
        *("x.jsonl", lines(SENTENCES), {}),
        [Labelled("It rains.", "1", "It is wet."), Labelled("Sun.", "0", "Rain.")],
    ),
    "columns without names": ("x.tsv", NUMBERED, {}, [Pair("Go.", "Geh."), Pair("Run!", "Lauf!")]),
    "columns by number": (
        "x.tsv",
        NUMBERED,
        {"columns": {"source": "3", "target": "2"}},
        [Pair("Geh.", "Go.")],
    ),
    "a document a line": (
        *("x.jsonl", '{"text": "One\\n\\ntwo", "id": 1}\n\n{"text": "Three", "id": 2}\n', {}),
        [Chunk("One\n\ntwo", True), Chunk("Three", True)],
    ),
    "nested": ("x.jsonl", lines(TRANSLATED), {}, [Pair(f"word {i}", f"Wort {i}") for i in range(3)]),
    "nested, turned": (
        *("x.jsonl", lines(TRANSLATED), {"columns": {"source": "de", "target": "en"}}),
        [Pair(f"Wort {i}", f"word {i}") for i in range(3)],
    ),
    "source lowered": ("x.tsv", CAPITALS, {"lowercase": "source"}, [Pair("ab", "CD")]),
    "target lowered": ("x.tsv", CAPITALS, {"lowercase": "target"}, [Pair("AB", "cd")]),
    "both lowered": ("x.tsv", CAPITALS, {"lowercase": True}, [Pair("ab", "cd")]),
    "a pattern": ("x", COMMANDS, {"pattern": PATTERN}, [Pair("jump twice", "J J"), Pair("look", "L")]),
    "a pattern of other names": (
        *("x", COMMANDS),
        {"pattern": "IN: (?P<a>.*) OUT: (?P<b>.*)", "columns": {"source": "b", "target": "a"}},
        [Pair("J J", "jump twice"), Pair("L", "look")],
    ),
    "conllu": (
        *("x.conllu", CONLLU, {}),
        [Tagged(("Do", "n't", "go"), ("AUX", "PART", "VERB")), Tagged(("Hello",), ("INTJ",))],
    ),
    "conllu, other columns": (
        *("x.conllu", CONLLU, {"columns": {"words": "lemma", "tags": "deprel"}}),
        [Tagged(("do", "not", "go"), ("aux", "advmod", "root"))],
    ),
    "conll with spaces and marks of documents": (
        *("x.txt", ENTITIES, {"lowercase": True}),
        [Tagged(("u.n.", "#"), ("I-ORG", "O")), Tagged(("peter", "left", "home"), ("B-PER", "O", "O"))],
    ),
    "conll, other tags": (
        "x.txt",
        ENTITIES,
        {"columns": {"tags": "2"}},
        [Tagged(("U.N.", "#"), ("NNP", "#"))],
    ),
    "tags in jsonl": (
        *("x.jsonl", '{"tokens": ["a", "b"], "ner_tags": [0, 3]}\n', {}),
        [Tagged(("a", "b"), ("0", "3"))],
    ),
    "a start that a table wrote as a fraction": (
        *("x.csv", f"{QUESTIONS}\nWho?,Ada wrote it.,Ada,0.0\nWhen?,Ada wrote it.,,\n", {}),
        [ANSWERED, UNANSWERED],
    ),
    "a cell with line ends": (
        *("x.csv", f'{QUESTIONS}\r\nWho?,"By\r\nAda.\n",Ada,4\r\n', {}),
        [Question("Who?", "By\r\nAda.\n", "Ada", 4)],
    ),
    "squad": ("x.json", json.dumps({"version": "2", "data": [SQUAD]}), {}, [ANSWERED, UNANSWERED]),
    "a lowered context": (
        "x.jsonl",
        json.dumps(LOWERED),
        {"lowercase": True},
        [Question("q", "i̇i̇ ada", "ada", 5)],
    ),
}
LABELS = {
    "conllu": ("AUX", "INTJ", "PART", "VERB"),
    "conll with spaces and marks of documents": ("O", "B-PER", "I-ORG"),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_file(name, tmp_path):
    file, text, settings, rows = CASES[name]
    (tmp_path / file).write_bytes(text.encode())
    corpus = everything(tmp_path, file, **settings)
    assert list(corpus.validation)[: len(rows)] == rows
    assert name not in LABELS or corpus.labels == LABELS[name]


@pytest.mark.parametrize(
    "answers",
    [
        [{"answer": "Ada", "answer_start": 0}, {"answer": None}],
        [{"answer": "Ada"}, {"answer": ""}],
        [{"answers": [{"text": "Ada", "answer_start": 0}]}, {"answers": []}],
        [
            {"answers": {"text": ["Ada", "Ada wrote"], "answer_start": [0, 0]}},
            {"answers": {"text": [], "answer_start": []}},
        ],
    ],
)
def test_questions(tmp_path, answers):
    rows = [
        {"question": row.question, "context": row.context} | own
        for row, own in zip((ANSWERED, UNANSWERED), answers)
    ]
    write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    corpus = everything(tmp_path, "x.jsonl")
    assert corpus.validation == [ANSWERED, UNANSWERED]
    assert task_of(DataPlan(), corpus) == "answer"


# Pictures ---------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()
    )


def pixels(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


def test_a_folder_for_each_class(tmp_path):
    image = pytest.importorskip("PIL.Image")
    drawn = pixels(6, 4, 5, 3)
    for number, name in enumerate(["cat", "dog"] * 3):
        (tmp_path / name).mkdir(exist_ok=True)
        image.fromarray(drawn[number]).save(tmp_path / name / f"{number}.png")
    corpus = everything(tmp_path, "")
    assert isinstance(corpus.validation, Images)
    assert corpus.labels == ("cat", "dog")
    assert corpus.validation.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(corpus.validation.pixels, drawn[[0, 2, 4, 1, 3, 5]])
    few = everything(tmp_path, "", max_examples=2)
    assert few.validation.labels.tolist() == [0, 1]


def test_folders_for_training_and_validation(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for number, grey in enumerate(pixels(2 if part == "val" else 3, 4, 4)):
                image.fromarray(grey).save(tmp_path / part / name / f"{number}.png")
    corpus = open_data(DataPlan(paths=(str(tmp_path),)))
    assert corpus.train.pixels.shape == (6, 4, 4, 1)
    assert corpus.validation.pixels.shape == (4, 4, 4, 1)


def test_idx_and_npz_agree(tmp_path):
    drawn, labels = pixels(40, 3, 3), np.arange(40, dtype=np.uint8) % 4 + 7
    for part, cut in (("train", slice(0, 30)), ("t10k", slice(30, 40))):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(drawn[cut])))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels[cut]))
    (tmp_path / "npz").mkdir()
    np.savez(
        tmp_path / "npz" / "x.npz",
        x_train=drawn[:30] / 255.0,
        y_train=labels[:30],
        x_test=drawn[30:],
        y_test=labels[30:, None],
    )
    first = open_data(DataPlan(paths=(str(tmp_path / "*-ubyte*"),)))
    second = open_data(DataPlan(paths=(str(tmp_path / "npz"),)))
    for corpus in (first, second):
        assert corpus.labels == ("7", "8", "9", "10")
        assert np.array_equal(corpus.train.pixels[..., 0], drawn[:30])
        assert np.array_equal(corpus.validation.pixels[..., 0], drawn[30:])
        assert np.array_equal(corpus.validation.labels, labels[30:].astype(np.int64) - 7)
    alone = open_data(DataPlan(paths=(str(tmp_path / "train-images-idx3-ubyte.gz"),)))
    assert len(alone.train) + len(alone.validation) == 30
