"""Text in other encodings, and files that lie in a folder by accident: read or left out, and said."""

import gzip
import json
from pathlib import Path

import pytest

from clearhead.errors import ConfigError, InputError
from clearhead.learn.data.files import encoding_of
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import open_data

WORDS = ("Größe", "naïve", "garçon", "mañana", "œuvre", "“quoted” – text…", "5 €", "plain", "Ærø", "søster")
RUSSIAN = ("да", "нет", "хорошо", "плохо", "быстро", "медленно")
MARKED = ("utf-8", "utf-8-sig", "utf-16", "utf-32")


def plan(path: Path, **more) -> DataPlan:
    return DataPlan(paths=(str(path),), **more)


def rows_of(path: Path, **more) -> list:
    return list(open_data(plan(path, **more), split=False).validation)


def written(format: str, words: tuple[str, ...]) -> tuple[str, str]:
    """Return the name and the text of a file of some format that holds these words among others."""
    rows = [(f"a {word} in the house {n}", ("good", "bad")[n % 2]) for n, word in enumerate(words * 3)]
    if format == "jsonl":
        lines = [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in rows]
    elif format == "conll":
        lines = [line for text, _ in rows for line in (*(f"{word} X" for word in text.split()), "")]
    else:
        lines = {"csv": ["text,label"], "tsv": ["text\tlabel"], "txt": []}[format]
        form = {"csv": '"{}",{}', "tsv": "{}\t{}", "txt": "{}"}[format]
        lines += [form.format(*row) for row in rows]
    return f"x.{format}", "\r\n".join(lines) + "\r\n"


@pytest.mark.parametrize("encoding", [*MARKED, "cp1252"])
@pytest.mark.parametrize("format", ["txt", "csv", "tsv", "jsonl", "conll"])
def test_every_encoding_gives_the_rows_of_utf_8(format, encoding, tmp_path):
    name, text = written(format, WORDS)
    for folder, form in (("one", "utf-8"), ("two", encoding)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(text.encode(form))
    assert rows_of(tmp_path / "two" / name) == rows_of(tmp_path / "one" / name)
    notes = open_data(plan(tmp_path / "two" / name), split=False).notes
    told = [note for note in notes if "is not UTF-8" in note]
    assert len(told) == (not encoding.startswith("utf-8"))
    assert all(f"read as {encoding}; another one: --set data.encoding=NAME" in note for note in told)


def test_latin_1_is_read_as_the_superset_of_it(tmp_path):
    text = "".join(map(chr, range(0xA0, 0x100))) + " and much more text, as people write it, " * 20
    (tmp_path / "x.txt").write_bytes(text.encode("latin-1"))
    assert "".join(chunk.text for chunk in rows_of(tmp_path / "x.txt")) == text


@pytest.mark.parametrize("encoding", ["cp1251", "koi8-r", "iso8859-5", "utf-16-le"])
def test_other_alphabets_are_refused_until_their_encoding_is_named(encoding, tmp_path):
    for folder, form in (("one", "utf-8"), ("two", encoding)):
        (tmp_path / folder).mkdir()
        name, text = written("csv", RUSSIAN)
        text = text.replace(" in the house", " " + " ".join(RUSSIAN))
        (tmp_path / folder / name).write_bytes(text.encode(form))
    with pytest.raises(InputError, match=r"x.csv is (not UTF-8|no text|a binary file)"):
        open_data(plan(tmp_path / "two" / name))
    assert rows_of(tmp_path / "two" / name, encoding=encoding) == rows_of(tmp_path / "one" / name)


def test_an_encoding_is_looked_for_in_the_whole_file_and_again_when_it_changes(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"plain text here\n" * 200_000 + "Größe".encode("cp1252"))
    assert encoding_of(path) == "cp1252"
    path.write_bytes(b"plain text here\n")
    assert encoding_of(path) == "utf-8"
    with pytest.raises(ConfigError, match=r"data.encoding 'hex' is no encoding of text"):
        DataPlan(encoding="hex")


def test_excels_unicode_text_is_a_table(tmp_path):
    """Excel writes "Unicode Text" as UTF-16 with a byte order mark and tabs, into a .txt."""
    rows = "".join(f"Straße {n}\t{('gut', 'schlecht')[n % 2]}\r\n" for n in range(20))
    (tmp_path / "x.txt").write_bytes(f"text\tlabel\r\n{rows}".encode("utf-16"))
    corpus = open_data(plan(tmp_path / "x.txt"), split=False)
    assert corpus.labels == ("gut", "schlecht") and corpus.validation[3].text == "Straße 3"


# Strays -----------------------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
TEXTS = {f"{n}.txt": b"some text here\n" * 3 for n in range(3)}
TABLES = {f"{n}.csv": b"text,label\na,x\nb,y\nc,x\nd,y\n" for n in range(3)}


@pytest.mark.parametrize("kept", [TEXTS, TABLES], ids=["texts", "tables"])
@pytest.mark.parametrize(
    ("strays", "says"),
    [
        ({"photo.png": PNG}, "1 file of another format left out: "),
        ({"Thumbs.db": b"\xd0\xcf\0\0"}, "1 file of another format left out: "),
        ({"empty.txt": b""}, "1 file without content left out: "),
        ({"blank.csv": b" \n"}, "1 file without content left out: "),
        ({"a.png": PNG, "b.png": PNG}, "2 files of another format left out, the first "),
    ],
)
def test_a_stray_file_is_left_out_and_named(kept, strays, says, tmp_path):
    for name, data in {**kept, **strays, ".DS_Store": b"\0\0\0\1Bud1"}.items():
        (tmp_path / name).write_bytes(data)
    corpus = open_data(plan(tmp_path), split=False)
    assert [note for note in corpus.notes if "left out" in note] == [f"{says}{tmp_path / min(strays)}"]
    for name in strays:
        (tmp_path / name).unlink()
    assert list(open_data(plan(tmp_path), split=False).validation) == list(corpus.validation)


def test_files_of_two_formats_that_may_both_be_meant_are_refused(tmp_path):
    for name, data in {**TEXTS, **TABLES}.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=r"several formats: text \(0.txt\), csv \(0.csv\)|csv .* text"):
        open_data(plan(tmp_path))


# Tagged words -----------------------------------------------------------------------------------------------


def test_what_fails_in_tagged_words_shows_the_columns_that_were_taken(tmp_path):
    path = tmp_path / "x.conll"
    path.write_text("1 EU NNP B-ORG\n2 rejects VBZ O\n\n1 German JJ\n")
    with pytest.raises(
        InputError,
        match=r"line 4 has 3 columns in place of 4: .* \(4 columns: words from column `1` \(1\), "
        r"tags from `4` \(B-ORG\); if that is wrong, --set data.columns=",
    ):
        open_data(plan(path))
    path.write_text("".join(f"word{n} X lemma{n}\n\n" for n in range(200)))
    notes = open_data(plan(path), split=False).notes
    assert "3 columns: words from column `1` (word0), tags from `3` (lemma0)" in notes
    with pytest.raises(InputError, match=r"no example is left to validate on: .* tags from `3` \(lemma0\)"):
        open_data(plan(path))


PARALLEL = [
    ("train.en", "train.de"), ("src.txt", "tgt.txt"), ("a-en.txt", "a-de.txt"), ("a.en.txt", "a.de.txt"),
    ("en.txt", "de.txt"), ("train.en.gz", "train.de"), ("train.eng", "train.deu"), ("a.en", "a.pt_BR"),
]  # fmt: skip


@pytest.mark.parametrize("names", PARALLEL)
@pytest.mark.parametrize("how", ["files", "folder"])
def test_parallel_files_of_unequal_length_are_refused_with_both_counts(names, how, tmp_path):
    for name, count in zip(names, (5, 4)):
        text = ("a line of words\n" * count).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    paths = tuple(str(tmp_path / name) for name in names) if how == "files" else (str(tmp_path),)
    with pytest.raises(
        InputError, match=r"has [45] lines and .* has [45]: parallel files need a line for each"
    ):
        open_data(DataPlan(paths=paths))
