"""Random bytes in every reader: examples come out, or one line that says why not; never another error."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ClearheadError
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import open_data
from tests.harness import split

NAMES = split(
    "a.txt a.tsv a.csv a.jsonl a.json a.conll a.conllu a.unknown a.txt.gz a.npz a.tsv.gz",
    "c/a.png c/a.jpg c/a.gif train-images-idx3-ubyte train-labels-idx1-ubyte",
)
# Pieces that formats are made of, so that random content gets past the first check.
SIGNS = [b"\t", b"\n", b"\n\n", b",", b'"', b" ", b"{", b"}", b"[", b"]", b":", b"\r\n", b"\0", b"\xff"]
SIGNS += [
    b"\xef\xbb\xbf",
    b"\\ud800",
    b"1",
    b"-1e999",
    b"text",
    b"label",
    b"O",
    b"B-X",
    b"# x\n",
    b"\xc3\xbc",
]
SIGNS += [b'{"text": "a", "label": 1}\n', b'{"question": "q", "context": "c", "answer": ', b'{"data": [']
SIGNS += [b"a\tO\n", b"1\ta\t_\tX\t_\t_\t_\t_\t_\t_\n", b"\0\0\x08\x01", b"\0\0\x08\x03", b"\0\0\0\x02"]
SIGNS += [b"\xc3\xbc", b"PK\x03\x04", b"\x89PNG\r\n\x1a\n"]
PIECES = st.sampled_from(SIGNS)
CONTENT = st.one_of(st.binary(max_size=200), st.lists(PIECES, max_size=40).map(b"".join))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(content=CONTENT, other=CONTENT, split=st.booleans(), zipped=st.booleans())
def test_random_content(tmp_path: Path, name, content, other, split, zipped):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(content) if zipped and name.endswith(".gz") else content)
    if "idx" in name:
        partner = tmp_path / ("train-labels-idx1-ubyte" if "images" in name else "train-images-idx3-ubyte")
        partner.write_bytes(other)
    try:
        corpus = open_data(DataPlan(paths=(str(path),)), split=split)
        for side in (corpus.train, corpus.validation):
            if corpus.shape != "images":
                list(side)
    except ClearheadError as error:
        message = str(error)
    else:
        message = "fine"
    assert message and "\n" not in message


@settings(max_examples=100)
@given(
    content=CONTENT,
    format=st.sampled_from(
        ["text", "jsonl", "tsv", "csv", "conll", "parallel", "lines", "folders", "idx", "npz", None]
    ),
    task=st.sampled_from(["lm", "seq2seq", "classify", "tag", "answer", "image", None]),
    pattern=st.sampled_from(
        [None, "(?P<text>.*)", r"(?P<source>\S*) ?(?P<target>.*)", "(?P<text>.)*(?P<label>x)?"]
    ),
    header=st.sampled_from([None, True, False]),
)
def test_random_content_in_any_format(tmp_path, content, format, task, pattern, header):
    for name in ("a.en", "a.de"):
        (tmp_path / name).write_bytes(content)
    for paths in ((str(tmp_path / "a.en"),), (str(tmp_path / "a"),)):
        try:
            open_data(DataPlan(paths=paths, format=format, task=task, pattern=pattern, header=header))
        except ClearheadError as error:
            message = str(error)
        else:
            message = "fine"
        assert message and "\n" not in message
