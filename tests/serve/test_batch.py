"""A file of requests, broken off and taken up again."""

from __future__ import annotations

import itertools
import json
import os
import sys

import pytest

from clearhead.errors import InputError, MissingExtraError
from clearhead.serve.batch import run_batch
from clearhead.serve.engine import ServeEngine
from clearhead.serve.limits import Limits
from clearhead.serve.shards import run_on_ray
from tests.serve import kills, mixes
from tests.serve.test_http import TEMPLATE


@pytest.fixture(scope="module")
def writer(byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.settings["chat_template"] = TEMPLATE
    return m


def answers(out) -> dict[str, dict]:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)  # none twice
    return {line["custom_id"]: line["response"] for line in lines}


def test_a_batch_broken_off_at_any_row_loses_and_repeats_nothing(writer, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [f"text {number}" for number in range(4)]
    rows = [{"prompt": text, "max_tokens": 3 + n, "temperature": 0} for n, text in enumerate(texts)]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    rows.append({"custom_id": "mine", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    rows.append({"custom_id": "wrong", "body": {"prompt": "x", "best_of": 2}})
    given.write_text("\n".join(map(json.dumps, rows)))
    for _ in range(9):  # each time a new process takes a row or two, and leaves half a line
        engine = ServeEngine(writer, Limits(block=4, running=3))
        list(itertools.islice(run_batch(engine, "m", given, out), 2))
        with out.open("a") as file:
            file.write('{"id": "batch-line-3", "custom')
        if len(out.read_text().splitlines()) > len(rows):
            break
    list(run_batch(ServeEngine(writer), "m", given, out))
    found = answers(out)
    assert len(found) == len(rows)
    for number, text in enumerate(texts):
        alone = writer.generate(text, 3 + number, num_beams=1).text
        assert found[f"line-{number + 1}"]["body"]["choices"][0]["text"] == alone
    assert found["mine"]["body"]["object"] == "chat.completion"
    assert found["wrong"]["status_code"] == 400
    assert "best_of" in found["wrong"]["body"]["error"]["message"]


def test_lines_that_cannot_be_are_refused(writer, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text('{"prompt": "x"}\nno json\n')
    with pytest.raises(InputError, match=r"in.jsonl:2 is not a JSON object"):
        list(run_batch(ServeEngine(writer), "m", given, out))
    given.write_text('{"custom_id": 1, "prompt": "x"}\n{"custom_id": 1, "prompt": "y"}\n')
    with pytest.raises(InputError, match="of an earlier line"):
        list(run_batch(ServeEngine(writer), "m", given, out))
    given.write_text('{"prompt": "x"}\n')
    out.write_text("something else\n")
    with pytest.raises(InputError, match="no answer of a batch"):
        list(run_batch(ServeEngine(writer), "m", given, out))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
def test_a_batch_killed_at_any_moment_loses_and_repeats_nothing(writer, tmp_path):
    assert kills.killed(writer, tmp_path, kills=4, seed=3)["half lines"] > 0


def test_two_batches_do_not_write_to_one_file(writer, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    kills.write_rows(given, 2)
    first = run_batch(ServeEngine(writer), "m", given, out)
    next(first)
    with pytest.raises(InputError, match="another batch is writing to"):
        next(run_batch(ServeEngine(writer), "m", given, out))
    assert len(list(first)) == 1


def test_ray_is_asked_for_by_name_where_it_is_missing(writer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    given = tmp_path / "in.jsonl"
    given.write_text('{"prompt": "x"}\n')
    with pytest.raises(MissingExtraError, match=r"clearhead\[ray\]"):
        list(run_on_ray(tmp_path, Limits(), {}, given, tmp_path / "out.jsonl", 1))
    assert not (tmp_path / "out.jsonl").exists()


def test_shards_of_a_file_as_actors_of_ray(writer, tmp_path):
    """Broken off after two answers, it goes on; texts are those of the library."""
    pytest.importorskip("ray.data", exc_type=ImportError)
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": f"text {number}", "max_tokens": 4, "temperature": 0} for number in range(5)]
    given.write_text("\n".join(map(json.dumps, rows)))
    writer.save(tmp_path / "m")
    work = (tmp_path / "m", Limits(), {}, given, out, 1)
    assert len(list(itertools.islice(run_on_ray(*work), 2))) == 2
    assert len(list(run_on_ray(*work))) == 3
    for number, row in enumerate(rows):
        alone = writer.generate(row["prompt"], 4).text
        assert answers(out)[f"line-{number + 1}"]["body"]["choices"][0]["text"] == alone
