"""A file of requests, broken off and taken up again."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys

import pytest

from clearhead.app.cli import main
from clearhead.errors import InputError, MissingExtraError
from clearhead.run.serve.batch import URLS, read_rows, run_batch, run_on_ray, unanswered
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.serve import kills


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
    rows.append({"custom_id": "wrong", "body": {"prompt": "x", "store": True}})
    rows.append({"custom_id": "other", "body": {"prompt": "x", "model": "gpt-4o"}})
    rows.append({"custom_id": "named", "body": {"prompt": "x", "model": "m"}})
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
    assert "store" in found["wrong"]["body"]["error"]["message"]
    assert 'model "gpt-4o" is not the model of this batch, "m"' in found["other"]["body"]["error"]["message"]
    assert found["named"]["status_code"] == 200


def test_lines_that_cannot_be_are_refused(writer, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text('{"prompt": "x"}\nno json\n')
    with pytest.raises(InputError, match=r"in.jsonl:2 is not a JSON object"):
        list(run_batch(ServeEngine(writer), "m", given, out))
    given.write_text('{"custom_id": 1, "prompt": "x"}\n{"custom_id": 1, "prompt": "y"}\n')
    with pytest.raises(InputError, match="of an earlier line"):
        list(run_batch(ServeEngine(writer), "m", given, out))
    for named in ("null", "true", "[1]", "1.5"):
        given.write_text(f'{{"prompt": "x"}}\n{{"custom_id": {named}, "prompt": "y"}}\n')
        with pytest.raises(InputError, match=r"in.jsonl:2 has the custom_id"):
            list(run_batch(ServeEngine(writer), "m", given, out))
    given.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match="is not UTF-8"):
        list(run_batch(ServeEngine(writer), "m", given, out))
    for empty in (b"", b"\xef\xbb\xbf", b"\n  \r\n\n"):
        given.write_bytes(empty)
        with pytest.raises(InputError, match=r"in.jsonl has no request"):
            list(run_batch(ServeEngine(writer), "m", given, out))
    assert not out.exists()


BODIES = [
    None,
    [],
    [1],
    5,
    1.5,
    True,
    "messages",
    "x",
    {},
    {"prompt": None},
    {"messages": 5},
    {"prompt": "\ud800"},
]
LINES = [
    *({"body": body} for body in BODIES),
    *({"url": url, "body": {"prompt": "x"}} for url in (None, 5, ["/v1/completions"], {}, URLS[1])),
    {"body": {"prompt": "x", "json_schema": {"not": {}}}},
    {"custom_id": "\ud800", "body": {"prompt": "x", "max_tokens": 1}},
    {"custom_id": "bare", "prompt": "x", "max_tokens": 2, "temperature": 0},
]


def test_a_line_that_is_no_request_gets_an_error_and_ends_nothing(writer, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("\n".join(map(json.dumps, LINES)))
    list(run_batch(ServeEngine(writer), "m", given, out))
    found = answers(out)
    assert len(found) == len(LINES)
    assert found["bare"]["body"]["choices"][0]["text"] == writer.generate("x", 2).text
    wrong = {name: one for name, one in found.items() if name.startswith("line-")}
    assert {one["status_code"] for one in wrong.values()} == {400}
    assert "body is null: give an object" in found["line-1"]["body"]["error"]["message"]
    assert not list(run_batch(ServeEngine(writer), "m", given, out))


def test_a_file_that_is_not_ours_keeps_every_byte(writer, tmp_path):
    """Text, one line, binary, JSON lines of others, and our own lines with anything strange among them."""
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    kills.write_rows(given, 3)
    engine = ServeEngine(writer)
    list(run_batch(engine, "m", given, out))
    ours, draw = out.read_bytes(), random.Random(0)
    first = ours.splitlines(keepends=True)[0]
    openai = b'{"id": "batch_req_1", "custom_id": "row-0", "response": {"status_code": 200}, "error": null}\n'
    earlier = b'{"id": "batch-row-0", "custom_id": "row-0", "response": {}, "error": null}\n'
    files = [
        *(b"a thesis", b"a thesis\n", b"one\ntwo\nthree", b"\n", b"\n\n", b"{}", b"[]\n", b"5", b"null\n"),
        *(b'{"custom_id": "row-0"}', b'{"custom_id": "row-0"}\n{"custom_id": "row-1"', openai, earlier),
        *(
            given.read_bytes(),
            given.read_bytes() + b"\n",
            b'{"id": "batch-',
            b'{"id": "b',
            b"{",
            b"\0" * 4096,
        ),
        *(
            ours + b"notes",
            ours + b"{",
            b"notes\n" + ours,
            ours + b"notes\n",
            ours + b"\n",
            ours + b"\n" + ours,
        ),
        *(ours + openai, ours + given.read_bytes(), first.replace(b"batch-", b"batch_"), first[1:]),
        *("Grüße\n".encode(kind) for kind in ("utf-8", "latin-1", "utf-16")),
        *(draw.randbytes(draw.randint(1, 300)) for _ in range(30)),
        *(ours + draw.randbytes(draw.randint(2, 300)) for _ in range(30)),
    ]
    for file in files:
        out.write_bytes(file)
        if file == ours + b"{":  # where the beginning of a line of ours may have been lost
            assert not list(run_batch(engine, "m", given, out))
            assert out.read_bytes() == ours
            continue
        with pytest.raises(InputError, match="is no answer of this command"):
            list(run_batch(engine, "m", given, out))
        assert out.read_bytes() == file
    for lost in range(1, len(ours), 9):  # our own file, broken off anywhere
        out.write_bytes(ours[:lost])
        try:
            left = unanswered(dict(read_rows(given)), out, "")
        except InputError:
            assert lost < len(first)
            assert out.read_bytes() == ours[:lost]
        else:
            kept = out.read_bytes()
            assert ours.startswith(kept) and kept.endswith(b"\n" if kept else b"")
            assert len(left) == 3 - kept.count(b"\n")
            assert len(kept) >= ours[:lost].rfind(b"\n") + 1


@pytest.mark.parametrize("change", ["prompt", "option", "model", "url", "shifted"])
def test_answers_to_other_requests_do_not_stay_under_their_names(writer, tmp_path, change):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": f"text {number}", "max_tokens": 2, "temperature": 0} for number in range(3)]
    given.write_text("\n".join(map(json.dumps, rows)))
    engine = ServeEngine(writer)
    list(run_batch(engine, "m", given, out, "one"))
    before = out.read_bytes()
    given.write_text("\n".join(json.dumps(dict(reversed(row.items()))) for row in [*rows, {"prompt": "new"}]))
    assert list(run_batch(engine, "m", given, out, "one")) == [
        "line-4"
    ]  # another order of fields is no other
    out.write_bytes(before)
    changed = {
        "prompt": [rows[0], rows[1] | {"prompt": "another"}, rows[2]],
        "option": [rows[0], rows[1] | {"max_tokens": 3}, rows[2]],
        "url": [rows[0], {"url": URLS[0], "body": rows[1]}, rows[2]],
        "shifted": [{"prompt": "first"}, *rows],
        "model": rows,
    }[change]
    given.write_text("\n".join(map(json.dumps, changed)))
    named = "line-2" if change not in ("model", "shifted") else "line-1, line-2, line-3"
    with pytest.raises(InputError, match=rf"under . of the names in this file \({named}\)"):
        list(run_batch(engine, "m", given, out, "two" if change == "model" else "one"))
    assert out.read_bytes() == before


def test_the_command_refuses_its_own_input_a_directory_and_a_text(writer, tmp_path, capsys):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    writer.save(tmp_path / "m")
    kills.write_rows(given, 2)
    (tmp_path / "linked.jsonl").symlink_to(given)
    os.link(given, tmp_path / "hard.jsonl")
    out.write_text("a thesis")
    here = tmp_path / "m" / ".." / "in.jsonl"
    wrong = [
        given,
        here,
        tmp_path / "linked.jsonl",
        tmp_path / "hard.jsonl",
        tmp_path,
        out,
        tmp_path / "x" / "o",
    ]
    before = given.read_bytes()
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for asked, one in [*((given, one) for one in wrong), (empty, tmp_path / "new")]:
        with pytest.raises(SystemExit) as ended:
            main(["batch", str(tmp_path / "m"), str(asked), str(one)])
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert (given.read_bytes(), out.read_text()) == (before, "a thesis")
    assert not (tmp_path / "new").exists()
    out.unlink()
    main(["batch", str(tmp_path / "m"), str(given), str(out)])
    main(["batch", str(tmp_path / "m"), str(given), str(out)])
    assert "0 answers added" in capsys.readouterr().err
    weights = tmp_path / "m" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1  # another model in the same directory
    weights.write_bytes(raw)
    with pytest.raises(SystemExit):
        main(["batch", str(tmp_path / "m"), str(given), str(out)])
    assert "another model's" in capsys.readouterr().err


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
