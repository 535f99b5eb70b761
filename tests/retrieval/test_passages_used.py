"""Passages for answers and for served prompts: the same as by hand, and cited."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.app.cli import main
from clearhead.hub.tokens.training import GENERATOR, READER, byte_tokenizer
from clearhead.labs.retrieval.index import Index, build_index
from clearhead.run.serve.app import ServedPassages
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.serve import mixes
from tests.serve.served import serving

ROWS = ("The mill burned down in the winter.", "Anna lives in Berlin.", "A new bridge was built of stone.")


def small(head: str) -> ch.Model:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(READER)
    config = ch.ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        family="encoder",
        head=head,
        d_model=16,
        n_layers=1,
        n_heads=2,
        max_positions=128,
        init_std=0.5,
    )
    return ch.Model(ch.Transformer(config), tokenizer)


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("passages")
    small("none").save(folder / "encoder")
    (folder / "notes.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    build_index(folder / "index", ch.load(folder / "encoder"), [folder / "notes.jsonl"])
    return folder / "index"


@pytest.mark.ledger("J4")
def test_answers_come_from_the_passage_that_is_cited_first(index, tmp_path, capsys):
    small("span").save(tmp_path / "reader")
    question = "Where does Anna live?"
    asked = ["answer", str(tmp_path / "reader"), question, "--retrieve", str(index), "--passages", "2"]
    main([*asked, "--json"])
    body = json.loads(capsys.readouterr().out)
    texts = [hit.passage.text for hit in Index(index).search(question, 2)]
    alone = {text: ch.load(tmp_path / "reader").answer(question, text) for text in texts}
    best = max(alone, key=lambda text: alone[text].score)
    assert [one["text"] for one in body["passages"]] == sorted(texts, key=lambda text: -alone[text].score)
    assert (body["text"], body["question"]) == (alone[best].text, question)
    assert best[body["start"] : body["end"]] == body["text"]
    main(asked)
    printed = capsys.readouterr()
    assert printed.out == f"{alone[best].text}\n" and "notes.jsonl line" in printed.err
    with pytest.raises(SystemExit) as stop:
        main([*asked[:3], "a context", *asked[3:]])
    assert stop.value.code == 2 and "leave CONTEXT out" in capsys.readouterr().err


def call(address: str, path: str, body: dict) -> str:
    request = urllib.request.Request(
        address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()


@pytest.mark.ledger("J4")
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
