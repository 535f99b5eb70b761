"""Indexes of passages: rankings equal plain loops, only changes are embedded, a kill leaves a whole index."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import CheckpointError, ClearheadError, InputError, MissingExtraError
from clearhead.hub import files as hub_files
from clearhead.hub.tokens.training import GENERATOR, READER, byte_tokenizer
from clearhead.labs.retrieval import index as indexing
from clearhead.labs.retrieval.index import Index, build_index
from clearhead.labs.retrieval.passages import read_passages
from clearhead.labs.retrieval.stores import fuse, nearest_rows
from clearhead.run.serve.app import ServedPassages
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.harness import split
from tests.serve import mixes
from tests.serve.served import serving

pytestmark = pytest.mark.ledger("J4")
WORDS = split(
    "river town bridge mill boat market tower bell baker horse winter harvest song letter stone lamp"
)


def of_bytes(task, **config) -> ch.Model:
    """A small random model that reads bytes."""
    tokenizer = byte_tokenizer(task)
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "d_model": 16, "n_layers": 1, "n_heads": 2}
    return ch.Model(ch.Transformer(ch.ModelConfig(**sizes, **config)), tokenizer)


def reader(head: str = "mlm", seed: int = 0) -> ch.Model:
    torch.manual_seed(seed)
    return of_bytes(READER, family="encoder", head=head, max_positions=128, init_std=0.5)


def embedder(folder: Path, seed: int = 0) -> ch.Model:
    made = reader(seed=seed)
    made.special = {role: made.tokenizer.token_to_id(f"[{role.upper()}]") for role in ("pad", "cls", "sep")}
    made.save(folder)
    return ch.load(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ch.Model:
    return embedder(tmp_path_factory.mktemp("model") / "encoder")


@pytest.fixture
def texts(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    folder = tmp_path / "texts"
    folder.mkdir()
    rows = [" ".join(rng.choice(WORDS, rng.integers(4, 12))) for _ in range(60)]
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"_id": f"d{n}", "text": t}) + "\n" for n, t in enumerate(rows[:40]))
    )
    (folder / "b.txt").write_text("\n\n".join(rows[40:]))
    return folder


def loop_bm25(query: str, rows: list[str]) -> list[float]:
    """The formula, one passage and one word at a time."""
    split = [re.findall(r"\w+", row.lower()) for row in rows]
    mean = sum(map(len, split)) / len(split)
    scores = []
    for words in split:
        score = 0.0
        for word in re.findall(r"\w+", query.lower()):
            holders = sum(word in other for other in split)
            times = words.count(word)
            score += math.log(1 + (len(rows) - holders + 0.5) / (holders + 0.5)) * times / (
                times + 0.9 * (1 - 0.4 + 0.4 * len(words) / mean)
            )  # fmt: skip
        scores.append(score)
    return scores


@pytest.mark.parametrize(("count", "k", "block"), [(0, 3, 2**24), (5, 9, 1), (41, 1, 100), (41, 7, 2**24)])
def test_nearest_rows_equal_a_sort(count, k, block, monkeypatch):
    """Of equal products the earlier row stands first, also where the k-th equals the next."""
    monkeypatch.setattr("clearhead.labs.retrieval.stores.SCORES", block)
    rng = np.random.default_rng(count + k)
    vectors = rng.integers(-1, 2, (count, 4)).astype(np.float32)  # many are equal, all products are exact
    asked = rng.integers(-1, 2, (6, 4)).astype(np.float32)
    found = nearest_rows(asked, vectors, k)
    for row, mine in zip(asked.tolist(), found, strict=True):
        scores = [sum(a * b for a, b in zip(row, other)) for other in vectors.tolist()]
        wanted = sorted(range(count), key=lambda number: (-scores[number], number))[:k]
        assert list(mine.items()) == [(number, scores[number]) for number in wanted]


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_other_encodings_are_read_and_told(encoding, tmp_path):
    path = tmp_path / "old.txt"
    path.write_bytes("Das Café schließt früh.".encode(encoding))
    with pytest.warns(UserWarning, match=f"old.txt is not UTF-8: read as {encoding}"):
        assert [one.text for one in read_passages(path)[1]] == ["Das Café schließt früh."]


def test_rankings_equal_plain_loops(model, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "BLOCK", 7)  # many parts
    index = build_index(tmp_path / "index", model, [texts], words=12)
    passages = [one for path in sorted(texts.iterdir()) for one in read_passages(path, 12)[1]]
    rows = [one.text for one in passages]
    assert len(index) == len(rows) > 50
    query = "a bell in the market tower, and a BOAT"
    vectors = torch.nn.functional.normalize(model.embed([query, *rows]), dim=-1)
    wanted = {"meaning": (vectors[1:] @ vectors[0]).tolist(), "words": loop_bm25(query, rows)}
    orders = {}
    for by, scores in wanted.items():
        hits = index.search(query, 10, by)
        orders[by] = sorted(range(len(rows)), key=lambda number: (-scores[number], number))
        assert [hit.passage for hit in hits] == [passages[number] for number in orders[by][:10]]
        assert [hit.score for hit in hits] == pytest.approx(sorted(scores, reverse=True)[:10], abs=1e-5)
    orders["words"] = [number for number in orders["words"] if wanted["words"][number] > 0]
    ranks = [{number: rank for rank, number in enumerate(order, 1)} for order in orders.values()]
    fused = {n: sum(1 / (60 + rank[n]) for rank in ranks if n in rank) for n in range(len(rows))}
    best = sorted(fused, key=lambda number: (-fused[number], number))[:10]
    assert [hit.passage for hit in index.search(query, 10)] == [passages[number] for number in best]
    assert fuse([{3: 0.9, 1: 0.1}, {1: 5.0}]) == pytest.approx({1: 1 / 62 + 1 / 61, 3: 1 / 61})
    reopened = Index(tmp_path / "index")  # loads the embedder that it names
    assert reopened.search(query, 4) == index.search(query, 4)


def test_only_what_has_changed_is_embedded_again(model, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "BLOCK", 10)
    seen: list[str] = []
    embedded = indexing.embedded

    def counting(model, texts, side):
        seen.extend(text for text in texts if text not in indexing.PROBES)
        return embedded(model, texts, side)

    monkeypatch.setattr(indexing, "embedded", counting)
    build_index(tmp_path / "index", model, [texts], words=12)
    first, seen[:] = len(seen), []
    build_index(tmp_path / "index")
    assert first > 50 and seen == []
    (texts / "b.txt").write_text("The miller sings.")
    (texts / "c.txt.gz").write_bytes(gzip.compress(b"A late song."))
    with pytest.raises(InputError, match=r"b.txt changed after .*clearhead index --out"):
        Index(tmp_path / "index")
    assert len(Index(tmp_path / "index", stale=True)) == first
    index = build_index(tmp_path / "index")
    assert sorted(seen) == ["A late song.", "The miller sings."]
    assert index.search("miller", 1, "words")[0].passage.place == f"{texts / 'b.txt'} line 1"
    kept = {part["name"] for source in index.manifest["sources"] for part in source["parts"]}
    assert {path.name for path in (tmp_path / "index" / "parts").iterdir()} == kept


class Killed(BaseException):
    """Stands for the end of the process."""


def test_an_index_survives_a_kill_at_any_write(model, texts, tmp_path, monkeypatch):
    """The process ends before and after each file is moved into place, and while old parts are removed."""
    monkeypatch.setattr(indexing, "BLOCK", 10)
    folder, left = tmp_path / "index", [0]
    real = {"replace": os.replace, "unlink": os.unlink}

    def dying(name):
        def act(*given, **more):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            real[name](*given, **more)
            left[0] -= 1
            if left[0] == 0:
                raise Killed

        return act

    for name in real:
        monkeypatch.setattr(hub_files.os, name, dying(name))
    (texts / "b.txt").write_text("The first song of the baker. " * 30)
    build_index(tmp_path / "old", model, [texts], words=12)
    (texts / "b.txt").write_text("The second song of the baker. " * 30)
    for moment in range(1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "old", folder)
        left[0] = moment
        try:
            build_index(folder, model)
            break
        except Killed:
            pass
        whole = Index(folder, model, stale=True)  # the old one or the new one
        found = "".join(hit.passage.text for hit in whole.search("first second", 5, "words"))
        assert ("first" in found) != ("second" in found)
        assert "second" in build_index(folder, model).search("second", 1, "words")[0].passage.text
    assert moment > 8


def test_a_killed_first_build_is_refused_and_goes_on(model, texts, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(indexing, "_part", lambda *given: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            build_index(tmp_path / "index", model, [texts])
    with pytest.raises(InputError, match="was not finished"):
        Index(tmp_path / "index")
    assert len(build_index(tmp_path / "index", model, [texts]))


def test_a_graph_finds_what_exact_search_finds(model, texts, tmp_path, monkeypatch):
    pytest.importorskip("usearch")
    monkeypatch.setattr(indexing, "BLOCK", 7)  # many parts
    monkeypatch.setattr("clearhead.labs.retrieval.stores.SEARCHING", 16)  # of 60 passages
    folder = tmp_path / "index"
    built = build_index(folder, model, [texts], words=12, nearest="hnsw")
    exact = Index(folder, model, exact=True)
    queries = [f"{one} {two}" for one, two in itertools.pairwise(WORDS)]
    assert built.graph is not None and exact.graph is None
    for by in ("meaning", "both"):
        found, wanted = (one.search_all(queries, 3, by) for one in (built, exact))
        shared = [hit for some, all_ in zip(found, wanted) for hit in some if hit.passage in
                  [one.passage for one in all_]]  # fmt: skip
        assert len(shared) >= 0.9 * 3 * len(queries)
    scores = {hit.passage: hit.score for hit in exact.search(queries[0], 60, "meaning")}
    for hit in built.search(queries[0], 3, "meaning"):
        assert hit.score == pytest.approx(scores[hit.passage], abs=1e-6)
    (texts / "b.txt").write_text("The miller sings.")
    again = build_index(folder, model)  # has a graph, as before
    assert len(again.graph) == len(again) and len(list((folder / "parts").glob("*.hnsw"))) == 1
    assert build_index(folder, model, nearest="exact").graph is None
    assert not list((folder / "parts").glob("*.hnsw"))


def test_a_graph_without_its_library_is_refused_by_name(model, texts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    with pytest.raises(MissingExtraError, match=r"HNSW needs usearch: pip install 'clearhead\[search\]'"):
        build_index(tmp_path / "index", model, [texts], nearest="hnsw")
    assert not (tmp_path / "index").exists()


def test_one_process_at_a_time_writes_an_index(model, texts, tmp_path):
    """A second one is refused with who holds the lock; a lock that a dead process left behind is free."""
    folder = tmp_path / "index"
    source = "import sys, time; from pathlib import Path; from clearhead.hub.files import locked_folder; "
    source += "held = locked_folder(Path(sys.argv[1]), 'clearhead index', print); held.__enter__(); "
    source += "print('held', flush=True); time.sleep(600)"
    held = subprocess.Popen([sys.executable, "-c", source, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert held.stdout.readline() == "held\n"
        refused = rf"another clearhead index is writing to .*index \(process {held.pid} on .*\): wait"
        with pytest.raises(CheckpointError, match=refused):
            build_index(folder, model, [texts])
        assert [path.name for path in folder.iterdir()] == [".lock"]
    finally:
        held.kill()
        held.communicate()
    assert (folder / ".lock").exists()
    assert len(build_index(folder, model, [texts], words=12)) > 50
    assert not (folder / ".lock").exists()


def test_a_changed_embedder_is_refused(texts, tmp_path):
    """The folder keeps its name, and its weights are others."""
    folder = tmp_path / "index"
    build_index(folder, embedder(tmp_path / "encoder"), [texts])
    embedder(tmp_path / "encoder", seed=1)
    for act in (lambda: build_index(folder), lambda: Index(folder).search("song")):
        with pytest.raises(InputError, match="embeds otherwise than the model that made"):
            act()


def test_what_does_not_fit_is_refused_by_name(model, texts, tmp_path):
    folder = tmp_path / "index"
    build_index(folder, model, [texts])
    other = embedder(tmp_path / "other", seed=1)
    for act in (lambda: Index(folder, other), lambda: build_index(folder, other, [texts])):
        with pytest.raises(InputError, match="other embeds otherwise than the model that made"):
            act()
    part = next((folder / "parts").iterdir())
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        Index(folder).search("song")
    part.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: make the index again"):
        Index(folder).search("song")
    (folder / "index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not the manifest of an index"):
        Index(folder)
    (texts / "raw.bin").write_bytes(b"\x00\x01")
    line = r"raw.bin is no text: byte 0 is zero \(a binary file\); leave it out, or skip"
    with pytest.raises(InputError, match=line):
        build_index(tmp_path / "new", model, [texts])
    assert not (tmp_path / "new").exists()  # nothing half-written
    with pytest.warns(UserWarning, match=r"left out: .*raw.bin is no text: byte 0"):
        assert len(build_index(tmp_path / "new", model, [texts], skip=True)) > 40
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"title": "no text"}\n')
    with pytest.raises(ClearheadError, match='line 1 is no JSON object with a "text"'):
        build_index(tmp_path / "bad", model, [bad])
    with pytest.raises(InputError, match="exists and is no index"):
        build_index(texts, model, [texts])


def test_commands_index_search_and_generate_with_passages(model, texts, tmp_path, clearhead):
    out = str(tmp_path / "index")
    made = clearhead("index", texts, "--model", model.folder, f"--out {out} --words 12 --json").json
    assert made["files"] == 2
    found = clearhead("search", out, "baker", "--by words --k 2 --json").json["passages"]
    assert len(found) == 2 and all("baker" in one["text"] for one in found)
    writer = of_bytes(GENERATOR, max_positions=256, positions="rope")
    writer.save(tmp_path / "writer")
    asked = ["generate", str(tmp_path / "writer"), "the baker", "--retrieve", out, "--max-new-tokens", "4"]
    body = clearhead(*asked, "--passages 2 --json").json
    assert len(body["passages"]) == 2 and body["prompt"] == "the baker"
    one, two = (passage["text"] for passage in body["passages"])
    assert writer.generate(f"[2] {two}\n\n[1] {one}\n\nthe baker", 4).text == body["text"]
    assert clearhead(*asked, "--passages 1").err.startswith("[1] ")
    clearhead.refuses("no passage fits before the prompt", *asked[:-1], "300")


def test_passages_are_as_long_as_the_embedder_reads(tmp_path, model, recwarn):
    """By default every passage is read whole and no word is lost; a longer one that was asked for is said."""
    words = [f"{WORDS[n % len(WORDS)]}{n}" for n in range(400)]
    (tmp_path / "a.txt").write_text(" ".join(words))
    made = build_index(tmp_path / "index", model, [tmp_path / "a.txt"])
    texts = [made.passage(number).text for number in range(len(made))]
    assert " ".join(texts).split() == words
    whole = len(model.encode([" ".join(words[:150])])[0])
    assert max(len(ids) for ids in model.encode(texts)) <= model.max_length < whole
    assert not [one for one in recwarn if "passages have more" in str(one.message)]
    with pytest.warns(UserWarning, match=rf"3 of 3 passages have more than the {model.max_length} tokens"):
        build_index(tmp_path / "long", model, [tmp_path / "a.txt"], words=150)


def test_search_prints_three_lines_a_hit_or_all(model, tmp_path, clearhead, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    file, out = tmp_path / "texts.jsonl", str(tmp_path / "index")
    long = " ".join(f"baker number {number}" for number in range(40))
    file.write_text("".join(json.dumps({"id": f"doc{n}", "text": f"{n} {long}"}) + "\n" for n in range(3)))
    index = build_index(out, model, [file])
    lines = clearhead("search", out, "baker", "--by words --k 2").out.splitlines()
    assert len(lines) == 6 and max(map(len, lines[1:3] + lines[4:6])) <= 80 and lines[2].endswith(" ...")
    hits = ch.Index(out).search("baker", 2, "words")
    for at, hit in enumerate(hits):
        assert lines[3 * at].startswith(f"{at + 1}. {hit.score:.4f}  ") and hit.name in lines[3 * at]
        assert (hit.name, hit.text, hit.line) == (hit.passage.name, hit.passage.text, hit.passage.line)
        assert hit.name.startswith("doc") and hit.file == str(file)
    out = clearhead("search", out, "baker", "--by words --k 2 --full").out
    assert all(hit.text in out for hit in index.search("baker", 2, "words"))


ROWS = ("The mill burned down in the winter.", "Anna lives in Berlin.", "A new bridge was built of stone.")


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("passages")
    reader("none").save(folder / "encoder")
    (folder / "notes.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    build_index(folder / "index", ch.load(folder / "encoder"), [folder / "notes.jsonl"])
    return folder / "index"


def test_answers_come_from_the_passage_that_is_cited_first(index, tmp_path, clearhead):
    reader("span").save(tmp_path / "reader")
    question = "Where does Anna live?"
    asked = ["answer", str(tmp_path / "reader"), question, "--retrieve", str(index), "--passages", "2"]
    body = clearhead(*asked, "--json").json
    texts = [hit.passage.text for hit in Index(index).search(question, 2)]
    alone = {text: ch.load(tmp_path / "reader").answer(question, text) for text in texts}
    best = max(alone, key=lambda text: alone[text].score)
    assert [one["text"] for one in body["passages"]] == sorted(texts, key=lambda text: -alone[text].score)
    assert (body["text"], body["question"]) == (alone[best].text, question)
    assert best[body["start"] : body["end"]] == body["text"]
    printed = clearhead(*asked)
    assert printed.out == f"{alone[best].text}\n" and "notes.jsonl line" in printed.err
    clearhead.refuses("leave CONTEXT out", *asked[:3], "a context", *asked[3:])


def call(address: str, path: str, body: dict) -> str:
    request = urllib.request.Request(
        address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()


def test_served_prompts_follow_their_passages(index):
    writer = mixes.model("rope-gqa", byte_tokenizer(GENERATOR), vocab_size=300)
    writer.settings["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
    opened = Index(index)
    engine = ServeEngine(writer, Limits(block=8))
    with serving({"writer": engine}, passages=ServedPassages(opened, 1)) as address:
        nearest = {text: opened.search(text, 1)[0] for text in ("Who built the bridge?", "Anna")}
        one, two = (f"[1] {hit.passage.text}\n\n{text}" for text, hit in nearest.items())
        body = {"prompt": list(nearest), "max_tokens": 4, "temperature": 0}
        made = json.loads(call(address, "/v1/completions", body))
        assert [choice["text"] for choice in made["choices"]] == [
            writer.generate(text, 4).text for text in (one, two)
        ]
        assert [(found["prompt"], found["number"], found["text"]) for found in made["passages"]] == [
            (number, 1, hit.passage.text) for number, hit in enumerate(nearest.values())
        ]
        system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Anna"}
        body = {"messages": [system, question], "max_tokens": 4, "temperature": 0}
        made = json.loads(call(address, "/v1/chat/completions", body))
        given = writer.generate(f"<system>Be brief.<user>{two}<a>", 4).text
        assert made["choices"][0]["message"]["content"] == given
        assert [found["file"] for found in made["passages"]] == [str(index.parent / "notes.jsonl")]
        events = call(address, "/v1/chat/completions", {**body, "stream": True})
        assert events.count('"passages"') == 1
        for wrong, line in (
            ({"prompt": [5, 6]}, "looks for passages by text"),
            ({"prompt": "Anna", "max_tokens": engine.longest - 4}, "no passage fits before the prompt"),
        ):
            assert line in json.loads(call(address, "/v1/completions", wrong))["error"]["message"]
        alone = {"messages": [system]}
        assert "the user's last message" in call(address, "/v1/chat/completions", alone)
