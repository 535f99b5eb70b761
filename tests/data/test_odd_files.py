"""Read files as people have them: blank ones among others, links, old names, odd spaces, deep pictures.

Folders, links and globs that cannot be read are said, never left out.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

import clearhead as ch
from clearhead.app import cli
from clearhead.errors import InputError
from clearhead.hub.preprocessor import to_pixels
from clearhead.learn.data.examples import Chunk, Corpus, Labelled, Pair, Tagged
from clearhead.learn.data.files import RECIPE, expand
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import open_data
from tests.batches.toys import batches_of, corpus_of
from tests.data.test_formats import everything, idx, pixels, write

FILMS = [f"film {n}\t{'no' if n % 2 else 'yes'}" for n in range(8)]
SENTENCES = "a O\nb X\n\nc O\n"


@pytest.mark.parametrize(
    ("end", "text", "count"),
    [
        (".tsv", "\n".join(["text\tlabel", *FILMS]), 8),
        (".csv", "\n".join(["text,label", *FILMS]).replace("\t", ","), 8),
        (".dat", "\n".join(["text\tlabel", *FILMS]), 8),
        (".conll", SENTENCES, 2),
    ],
)
def test_a_blank_file_says_nothing_of_the_others(tmp_path, end, text, count):
    write(tmp_path / f"1{end}", "\n")
    write(tmp_path / f"2{end}", text)
    assert len(everything(tmp_path, "").validation) == count


def test_links_to_folders_are_followed_and_circles_are_not(tmp_path):
    write(tmp_path / "real" / "a.txt", "text")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "back").symlink_to(tmp_path / "data")
    assert expand([str(tmp_path / "data")]) == [tmp_path / "data" / "linked" / "a.txt"]


def test_capitals_at_the_end_of_names(tmp_path):
    rows = [{"text": "good", "label": "yes"}, {"text": "bad", "label": "no"}]
    write(tmp_path / "a.JSON", json.dumps(rows, indent=1))
    assert everything(tmp_path, "a.JSON").validation == [Labelled("good", "yes"), Labelled("bad", "no")]
    (tmp_path / "a.txt.GZ").write_bytes(gzip.compress(b"some text"))
    assert [chunk.text for chunk in everything(tmp_path, "a.txt.GZ").validation] == ["some text"]
    (tmp_path / "Train-Images-idx3-ubyte").write_bytes(idx(pixels(4, 2, 2)))
    (tmp_path / "Train-Labels-idx1-ubyte").write_bytes(idx(np.arange(4, dtype=np.uint8) % 2))
    assert len(everything(tmp_path, "Train-*").validation) == 4


@pytest.mark.parametrize("space", ["\u2028", "\x0b", "\x85"])
def test_a_line_ends_with_a_line_feed_alone(tmp_path, space):
    write(tmp_path / "a.txt", f"text\tlabel\none{space}two\tyes\nthree\tno\n")
    assert everything(tmp_path, "a.txt").validation[0] == Labelled(f"one{space}two", "yes")
    write(tmp_path / "b.txt", f'{{"text": "one{space}two"}}\n' if space != "\x0b" else '{"text": "one"}\n')
    assert "b.txt: read as jsonl" in everything(tmp_path, "b.txt").notes


def test_the_delimiter_is_none_of_those_in_quotes(tmp_path):
    write(tmp_path / "a.csv", '"one; two; three; four, five",yes\n"five",no\n"six\nseven; eight",yes\n')
    read = everything(tmp_path, "a.csv", columns={"text": "1", "label": "2"})
    assert read.validation[0] == Labelled("one; two; three; four, five", "yes")


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("10\u00a0000 O\nb X\n\nc O\n", Tagged(("10\u00a0000", "b"), ("O", "X"))),
        (
            "#begin document (x); part 000\na O\nb X\n\n#end document now\n\nc O\n",
            Tagged(("a", "b"), ("O", "X")),
        ),
        ("#text = a\n1\ta\t_\tX\t_\t_\t0\troot\t_\t_\n", Tagged(("a",), ("X",))),
        ("#happy O\n#me X\n", Tagged(("#happy", "#me"), ("O", "X"))),
    ],
)
def test_white_space_and_comments_in_conll(tmp_path, text, first):
    write(tmp_path / "a.conll", text)
    assert everything(tmp_path, "a.conll").validation[0] == first


def test_what_is_left_out_or_not_used_is_said(tmp_path):
    write(tmp_path / "d" / "a.md", "some text")
    write(tmp_path / "d" / "b.npz", "none")
    notes = everything(tmp_path, "d", format="text").notes
    assert f"1 file of another format left out: {tmp_path / 'd' / 'b.npz'}" in notes
    notes = everything(tmp_path, "d/a.md", columns={"text": "1"}).notes
    assert "data.columns is not used for text, as the format is text" in notes
    write(tmp_path / "a.conll", SENTENCES)
    notes = everything(tmp_path, "a.conll", columns={"label": "2"}).notes
    assert "data.columns is not used for label, as the format is conll" in notes
    write(tmp_path / "a.tsv", "\n".join(["text\tlabel", *FILMS]))
    write(tmp_path / "v.tsv", "text\tlabel\ngood\tyes\n\tno\n")
    said = open_data(DataPlan(paths=(str(tmp_path / "a.tsv"),), validation=(str(tmp_path / "v.tsv"),))).notes
    assert "1 row to validate on with an empty text left out" in said
    notes = open_data(DataPlan(paths=(str(tmp_path / "a.tsv"),), validation_share=0.005)).notes
    assert "12.5% of the examples for validation, chosen by their content" in notes  # the least there can be


@pytest.mark.parametrize("held", [("v",), ("v.de", "v.en"), ("v.en", "v.de")])
def test_validation_goes_the_way_of_training(tmp_path, held):
    for name, text in (("t.en", "a\nb\n"), ("t.de", "x\ny\n"), ("v.en", "c\n"), ("v.de", "z\n")):
        write(tmp_path / name, text)
    names = (str(tmp_path / "t.en"), str(tmp_path / "t.de"))
    corpus = open_data(DataPlan(paths=names, validation=tuple(str(tmp_path / name) for name in held)))
    assert corpus.validation == [Pair("c", "z")]


def test_a_plain_file_comes_before_its_gzip(tmp_path):
    write(tmp_path / "t.en", "a\n")
    write(tmp_path / "t.de", "x\n")
    (tmp_path / "t.en.gz").write_bytes(gzip.compress(b"old\n"))
    assert everything(tmp_path, "t").validation == [Pair("x", "a")]


def test_an_answer_in_no_window_is_said(tmp_path):
    said = batches_of("answer", tmp_path, length=16, stride=0).notes
    number = sum(bool(row.answer) for row in corpus_of("answer").train)
    wanted = "answers are in no window as a whole, and count as none: raise data.stride or data.max_length"
    lost = [line for line in said if wanted in line]
    assert lost and 0 < int(lost[0].split()[0]) < number
    assert not any("no window" in line for line in batches_of("answer", tmp_path, length=512).notes)


def test_a_text_of_unknown_words_has_nothing_to_guess(tmp_path):
    corpus = Corpus("text", [], [Chunk("中 文 字", True)], (), "unknown", (), 0)
    with pytest.raises(InputError, match="every word of the validation text is unknown to the tokenizer"):
        batches_of("mlm", tmp_path, training=False, corpus=corpus)


# Pictures ---------------------------------------------------------------------------------------------------


def test_pictures_of_sixteen_bits_keep_their_shades(tmp_path):
    image = pytest.importorskip("PIL.Image")
    deep = (pixels(2, 4, 4).astype(np.uint16) << 8) + 7
    for name, drawn in zip("ab", deep):
        (tmp_path / name).mkdir()
        image.fromarray(drawn).save(tmp_path / name / "1.png")
    assert np.array_equal(everything(tmp_path, "").validation.pixels[..., 0], deep >> 8)
    sizes = {"image_size": (4, 4), "n_channels": 1, "patch_size": 2}
    vit = ch.preset("micro-encoder").replace(input="patches", head="none", **sizes)
    used = to_pixels(tmp_path / "a" / "1.png", vit, {})[0]  # what a trained model is shown later
    assert np.array_equal((used * 255).round().numpy(), deep[0] >> 8)
    image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "a" / "2.tiff")
    line = r"a/2.tiff cannot be read as a picture: its numbers have 32 bits, .* convert it to"
    with pytest.raises(InputError, match=line):
        everything(tmp_path, "")


@pytest.mark.filterwarnings("error")
def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, colour in (("a", 10), ("b", 200)):
        (tmp_path / name).mkdir()
        drawn = image.new("P", (4, 4))
        drawn.putpalette([colour, 20, 30] * 256)
        drawn.save(tmp_path / name / "1.png", transparency=bytes([0, 128]))
    assert everything(tmp_path, "").validation.pixels[:, 0, 0].tolist() == [[10, 20, 30], [200, 20, 30]]


def test_pictures_on_both_sides_are_said(tmp_path):
    drawn = pixels(6, 4, 4)
    np.savez(tmp_path / "a.npz", x_train=drawn, y_train=[0, 1] * 3, x_test=drawn[:2], y_test=[0, 1])
    notes = open_data(DataPlan(paths=(str(tmp_path / "a.npz"),))).notes
    assert "2 of 2 inputs to validate on are in the training data too" in notes


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (np.array([1.0, 2.0]), ("1", "2")),
        (np.array(["ä".encode(), b"b"]), ("b", "ä")),
        (np.array(["", "b"]), None),
    ],
)
def test_labels_of_arrays(tmp_path, labels, names):
    np.savez(tmp_path / "a.npz", x=pixels(2, 4, 4), y=labels)
    if names is None:
        with pytest.raises(InputError, match=r"a.npz, array y, number 0 is empty"):
            everything(tmp_path, "a.npz")
    else:
        assert everything(tmp_path, "a.npz").labels == names


def test_arrays_of_other_channels_and_sets_of_one_name(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x=pixels(4, 4, 8, 8), y=np.arange(4))
    line = r"has the shape \(4, 4, 8, 8\): pictures are .* with or without 1 or 3 channels"
    with pytest.raises(InputError, match=line):
        everything(tmp_path, "a.npz")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-images-idx3-ubyte").write_bytes(idx(pixels(4, 2, 2)))
        (tmp_path / name / "train-labels-idx1-ubyte").write_bytes(idx(np.arange(4, dtype=np.uint8)))
    line = r"one/train-images-idx3-ubyte and .*two/train-images.* are the same part of two sets"
    with pytest.raises(InputError, match=line):
        everything(tmp_path, "one", "two")


@pytest.fixture
def locked(tmp_path, monkeypatch) -> Path:
    """A folder beside others that may not be listed, whoever runs the tests."""
    for name in ("open", "locked"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("text")
    real_scandir, real_listdir = os.scandir, os.listdir

    def refuse(path, real):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", lambda path=".": refuse(path, real_scandir))
    monkeypatch.setattr(os, "listdir", lambda path=".": refuse(path, real_listdir))
    return tmp_path / "locked"


@pytest.mark.parametrize("name", ["", "locked", "locked/*.txt", "*", "**/*.txt", "locked/b.txt"])
def test_folders_without_permission(locked, name):
    with pytest.raises(InputError, match=r"locked cannot be read: Permission denied"):
        open_data(DataPlan(paths=(str(locked.parent / name),)))


def test_a_glob_beside_a_locked_folder_reads_on(locked):
    assert expand([str(locked.parent / "op*/*.txt")]) == [locked.parent / "open" / "a.txt"]


def test_runs_and_hidden_files_are_left_out(tmp_path):
    for name in ("b/2.txt", "a/1.txt", ".git/x.txt", "a/.hidden", f"run/{RECIPE}", "run/deep/data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    assert expand([str(tmp_path)]) == [tmp_path / "a" / "1.txt", tmp_path / "b" / "2.txt"]
    assert expand([str(tmp_path / "**")]) == expand([str(tmp_path / "**/*.txt")]) == expand([str(tmp_path)])
    assert expand([str(tmp_path / "run" / "deep" / "*.txt")]) == [tmp_path / "run" / "deep" / "data.txt"]
    run = tmp_path / "run"
    assert expand([str(run)]) == [run / "deep" / "data.txt", run / RECIPE]


@pytest.mark.parametrize("target", ["link", "nowhere"])
@pytest.mark.parametrize("name", ["link", "l*"])
def test_broken_links(tmp_path, target, name):
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(InputError, match=f"link is a broken link: it leads to {target}, which is not there$"):
        expand([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("a.en", "a.de", "a.fr"), "there are 3 of them: name the two that go together"),
        (
            ("a.en", "b.de"),
            "their names differ before the language: if they go together, --set data.format=parallel",
        ),
        (("a.en", "b.en"), None),
        (("a.log", "b.cfg"), None),
    ],
)
def test_files_that_look_parallel_and_are_not_taken_so(tmp_path, names, why):
    for name in names:
        (tmp_path / name).write_text("a line of text\n")
    said = open_data(DataPlan(paths=tuple(str(tmp_path / name) for name in names)), split=False).notes
    assert [line for line in said if "parallel" in line] == (
        [f"not taken as parallel files, because {why}"] if why else []
    )


def test_a_fault_of_the_disk_is_one_line(monkeypatch, capsys):
    def fail() -> None:
        raise PermissionError(13, "Permission denied", "out/log.json")

    monkeypatch.setattr("clearhead.app.commands.models.demo", fail)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "clearhead: out/log.json: Permission denied\n"
