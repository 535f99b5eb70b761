"""Well-known data sets from the folder beside the repository: the published counts come out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from clearhead.learn.data.examples import Corpus, Labelled, Pair
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import open_data, task_of

FASHION = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture
def sets(shared: Path) -> Path:
    folder = shared / "data"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}")
    return folder


def opened(folder: Path, train: str, validation: str | None = None, **settings) -> Corpus:
    held = (str(folder / validation),) if validation else ()
    return open_data(DataPlan(paths=(str(folder / train),), validation=held, **settings))


def test_tinyshakespeare_splits_as_published(sets):
    corpus = opened(sets, "tinyshakespeare/input.txt")
    whole = (sets / "tinyshakespeare" / "input.txt").read_text()
    assert len(whole) == 1_115_394
    assert "".join(chunk.text for chunk in corpus.train) == whole[:1_003_854]
    assert "".join(chunk.text for chunk in corpus.validation) == whole[1_003_854:]
    assert corpus.size == 1_003_854
    assert task_of(DataPlan(), corpus) == "lm"


def test_multi30k(sets):
    corpus = opened(sets, "multi30k/train", "multi30k/val", columns={"source": "en", "target": "de"})
    assert (len(corpus.train), len(corpus.validation)) == (29_000, 1_014)
    first = Pair(
        "Two young, White males are outside near many bushes.",
        "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    )
    assert corpus.train[0] == first
    # Words as the set's own description counts them.
    assert sum(len(row.source.split()) for row in corpus.train) == pytest.approx(377_534, rel=0.1)


@pytest.mark.parametrize(
    ("train", "validation", "counts", "held"),
    [
        ("sst2/train.tsv", "sst2/dev.tsv", (3_310, 3_610), (428, 444)),
        ("sst2/glue_train.tsv.gz", "sst2/glue_dev.tsv", (29_780, 37_569), (428, 444)),
    ],
)
@pytest.mark.slow
def test_sst2_with_and_without_a_header(sets, train, validation, counts, held):
    corpus = opened(sets, train, validation)
    assert corpus.labels == ("0", "1")
    for rows, expected in ((corpus.train, counts), (corpus.validation, held)):
        assert all(isinstance(row, Labelled) for row in rows)
        assert Counter(row.label for row in rows) == dict(zip("01", expected))
    assert task_of(DataPlan(), corpus) == "classify"


def test_wnut17(sets):
    corpus = opened(sets, "wnut17/wnut17train.conll", "wnut17/emerging.dev.conll")
    test = opened(sets, "wnut17/emerging.test.annotated", "wnut17/emerging.dev.conll").train
    found = [
        (len(rows), sum(len(row.words) for row in rows)) for rows in (corpus.train, corpus.validation, test)
    ]
    assert found == [(3_394, 62_730), (1_009, 15_733), (1_287, 23_394)]
    assert sum(tag.startswith("B-") for row in corpus.train for tag in row.tags) == 1_975
    assert corpus.labels[0] == "O" and len(corpus.labels) == 13


def test_universal_dependencies(sets):
    corpus = opened(sets, "ud_english_ewt/en_ewt-ud-test.conllu.gz", "ud_english_ewt/en_ewt-ud-dev.conllu.gz")
    found = [(len(rows), sum(len(row.words) for row in rows)) for rows in (corpus.train, corpus.validation)]
    assert found == [(2_077, 25_094), (2_001, 25_147)]
    assert len(corpus.labels) == 17
    xpos = opened(sets, "ud_english_ewt/en_ewt-ud-dev.conllu.gz", columns={"tags": "xpos"})
    assert len(xpos.labels) == 49


@pytest.mark.parametrize(
    ("name", "counts"),
    [("simple", (16_728, 4_182)), ("length", (16_990, 3_920)), ("addprim_jump", (14_670, 7_706))],
)
def test_scan(sets, name, counts):
    pattern = "IN: (?P<source>.*) OUT: (?P<target>.*)"
    corpus = opened(
        sets, f"scan/tasks_train_{name}.txt.gz", f"scan/tasks_test_{name}.txt.gz", pattern=pattern
    )
    assert (len(corpus.train), len(corpus.validation)) == counts
    assert task_of(DataPlan(), corpus) == "seq2seq"


def test_cmudict(sets):
    names = ("cmudict/cmudict-0.7b.test", "cmudict/cmudict-0.7b.train-dev-1-21")
    corpus = opened(sets, *names, pattern=r"(?P<source>\S+)  (?P<target>.+)")
    assert (len(corpus.train), len(corpus.validation)) == (12_855, 5_447)
    assert len({row.source for row in corpus.train}) == 11_994
    assert corpus.train[0] == Pair("ABADI", "AH B AE D IY")
    # Words with several pronunciations stay on one side of a split made here.
    alone = opened(sets, names[0], pattern=r"(?P<source>\S+)  (?P<target>.+)")
    assert not {row.source for row in alone.train} & {row.source for row in alone.validation}


def test_fashion_mnist():
    if not FASHION.is_dir():
        pytest.skip(f"no folder {FASHION}: install dataset-fashion-mnist")
    corpus = open_data(DataPlan(paths=(str(FASHION),)))
    assert corpus.train.pixels.shape == (60_000, 28, 28, 1)
    assert corpus.validation.pixels.shape == (10_000, 28, 28, 1)
    assert Counter(corpus.train.labels.tolist()) == dict.fromkeys(range(10), 6_000)
