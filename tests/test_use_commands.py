"""Commands that use a model print what the methods give: batches, streams, files; a mistake is one line."""

from __future__ import annotations

import gzip
import io
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.app.commands.common import writing
from clearhead.app.commands.texts import Input, results
from clearhead.errors import refuse
from clearhead.learn.tasks.reading import tag
from tests.harness import CommandLine, byte_tokenizer
from tests.test_tasks import LABELS, TEXTS, saved


def run(*arguments, capsys):
    """Exit code, stdout, stderr of one command."""
    return CommandLine(capsys)(*arguments)


def alike(one, other):
    """Whether what was printed is the same, numbers but for their last digits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == (pytest.approx(other, rel=1e-5) if isinstance(other, float) else other)


@pytest.fixture
def stdin(monkeypatch):
    """Let stdin hold these bytes."""

    def hold(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return hold


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> pathlib.Path:
    torch.manual_seed(0)
    config = ch.preset("micro-decoder").replace(vocab_size=257, init_std=0.3, max_positions=48)
    folder = tmp_path_factory.mktemp("decoder") / "model"
    ch.Model(ch.Transformer(config), byte_tokenizer(), special={"eos": 256}).save(folder)
    return folder


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> pathlib.Path:
    torch.manual_seed(0)
    config = ch.preset("micro-encoder-decoder").replace(vocab_size=257, init_std=0.3)
    folder = tmp_path_factory.mktemp("both") / "model"
    ch.Model(ch.Transformer(config), byte_tokenizer(), special={"eos": 256, "decoder_start": 0}).save(folder)
    return folder


@pytest.fixture(scope="module")
def readers(tmp_path_factory) -> dict[str, pathlib.Path]:
    """One model for each command that reads."""
    kinds = {
        "classify": ("BertForSequenceClassification", {"num_labels": 3}),
        "tag": (
            "BertForTokenClassification",
            {"id2label": dict(enumerate(LABELS)), "label2id": {n: i for i, n in enumerate(LABELS)}},
        ),
        "fill": ("BertForMaskedLM", {}),
        "answer": ("BertForQuestionAnswering", {}),
    }
    made = {
        name: saved(tmp_path_factory.mktemp(name), kind, **changes) for name, (kind, changes) in kinds.items()
    }
    return {**made, "embed": made["fill"]}


# Generate, translate, score ---------------------------------------------------------------------------------


@pytest.mark.ledger("G1")
def test_every_option_of_generate_reaches_the_model(decoder, clearhead):
    m = ch.load(decoder)
    drawn = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9}
    for options, flags in (
        (
            {**drawn, "seed": 3},
            "--temperature 1.3 --top-k 40 --top-p 0.9 --min-p 0.01 --typical-p 0.9 --seed 3",
        ),
        (
            {"repetition_penalty": 1.5, "presence_penalty": 0.4},
            "--repetition-penalty 1.5 --presence-penalty 0.4",
        ),
        ({"frequency_penalty": 0.7, "no_repeat_ngram": 2}, "--frequency-penalty 0.7 --no-repeat-ngram 2"),
        ({"num_beams": 3, "length_penalty": 0.3}, "--beams 3 --length-penalty 0.3"),
        ({"stop": "e"}, "--stop e"),
        ({"lookup": 3}, "--lookup 3"),
        ({"draft": m}, f"--draft {decoder}"),
        (
            {"stop_tokens": ["<|end|>"], "seconds": 60.0},
            "--stop-token <|end|> --seconds 60 --device cpu --dtype float32",
        ),
    ):
        ran = clearhead("generate", decoder, "hello", "--max-new-tokens 20 --json", flags)
        assert (ran.code, ran.err) == (0, "")
        wanted, body = m.generate("hello", 20, **options), ran.json
        assert body["ids"] == wanted.ids, flags
        assert (body["text"], body["stop_reason"], body["prompt"]) == (
            wanted.text,
            wanted.stop_reason,
            "hello",
        )


@pytest.mark.ledger("G1", "G5")
def test_several_beams_and_logprobs(decoder, clearhead):
    m = ch.load(decoder)
    found = clearhead("generate", decoder, "hello", "--max-new-tokens 8 --beams 3 --num-return 2 --json").json
    wanted = m.generate("hello", 8, num_beams=3, num_return=2)
    assert [result["ids"] for result in found["results"]] == [one.ids for one in wanted]
    found = clearhead("generate", decoder, "hello", "--max-new-tokens 4 --logprobs 2 --json").json
    wanted = m.generate("hello", 4, logprobs=True, alternatives=2)
    assert found["logprobs"] == pytest.approx(wanted.logprobs)
    assert [[token for token, _ in step] for step in found["alternatives"]] == [
        [token for token, _ in step] for step in wanted.alternatives
    ]


@pytest.mark.ledger("G3")
def test_a_file_stdin_and_arguments_agree(decoder, clearhead, stdin, tmp_path):
    prompts = ["one", "a longer prompt", "日本", "x", "five"]
    m = ch.load(decoder)
    wanted = [m.generate(prompt, 6).text for prompt in prompts]
    lines = "".join(f"{prompt}\n" for prompt in prompts).encode()
    (tmp_path / "prompts.txt").write_bytes(lines)
    (tmp_path / "prompts.txt.gz").write_bytes(gzip.compress(lines))
    rows = "".join(json.dumps({"prompt": prompt, "other": 1}) + "\n" for prompt in prompts)
    (tmp_path / "prompts.jsonl").write_text(rows)
    flags = "--max-new-tokens 6 --json"
    for name in ("prompts.txt", "prompts.txt.gz", "prompts.jsonl"):
        rows = clearhead("generate", decoder, f"--file {tmp_path / name}", flags, "--batch-size 2").json
        assert [(row["prompt"], row["text"]) for row in rows] == [*zip(prompts, wanted)]
    for arguments in ([], ["-"]):
        stdin(lines)
        rows = clearhead("generate", decoder, *arguments, flags, "--batch-size 4").json
        assert [row["text"] for row in rows] == wanted
    target = tmp_path / "out.jsonl"
    code, out, _ = clearhead("generate", decoder, f"--file {tmp_path}/prompts.txt --output {target}", flags)
    assert (code, out) == (0, "")
    assert [json.loads(line)["text"] for line in target.read_text().splitlines()] == wanted
    assert len([*tmp_path.iterdir()]) == 4  # nothing else is left


@pytest.mark.ledger("E3")
def test_translate(both, clearhead, tmp_path):
    m = ch.load(both)
    (tmp_path / "in.txt").write_text("ein Hund\nzwei\n")
    wanted = [m.translate(text, 9) for text in ("ein Hund", "zwei")]
    rows = clearhead("translate", both, "--file", tmp_path / "in.txt", "--max-new-tokens", 9, "--json").json
    assert [row["text"] for row in rows] == [one.text for one in wanted]
    assert [row["source"] for row in rows] == ["ein Hund", "zwei"]
    _, out, _ = clearhead("translate", both, "zwei", "--max-new-tokens", 9, "--beams", 1)
    assert out == f"{m.generate('zwei', 9).text}\n"


@pytest.mark.ledger("G5")
def test_score_lines(decoder, both, clearhead, stdin):
    m = ch.load(decoder)
    stdin(b"hello\nworld\n")
    rows = clearhead("score", decoder, "--json").json
    assert [row["total"] for row in rows] == pytest.approx(
        [m.score(text).total for text in ("hello", "world")], rel=1e-6
    )
    assert clearhead("score", both, "hello", "--source", "hallo", "--json").json["total"] == pytest.approx(
        ch.load(both).score("hello", "hallo").total, rel=1e-6
    )
    _, out, _ = clearhead("score", decoder, "hello")
    assert "perplexity" in out


@pytest.mark.ledger("L3")
def test_the_golden_story(shared, clearhead):
    folder = shared / "weights" / "stories260K"
    if not (folder / "tok512.bin").is_file():
        pytest.skip(f"no {folder / 'tok512.bin'}")
    golden = json.loads((folder / "hf" / "golden_greedy_200.json").read_text())["greedy_ids"]
    loaded = ch.load(folder / "hf", tokenizer=folder / "tok512.bin")
    text = loaded.tokenizer.decode(golden)
    prompt = "Once upon a time"
    assert loaded.encode([prompt])[0] == golden[:5]
    options = ["--tokenizer", folder / "tok512.bin", "--max-new-tokens"]
    code, out, err = clearhead("generate", folder / "hf", prompt, *options, len(golden) - 5)
    assert (code, err) == (0, "")
    assert out == text + "\n"
    _, out, _ = clearhead("generate", folder / "hf", prompt, *options, 200)
    assert out.startswith(text)
    _, out, _ = clearhead("generate", folder / "hf", prompt, *options, len(golden) - 5, "--stream")
    assert out == text + "\n"


# Reading ----------------------------------------------------------------------------------------------------


def test_of_many_texts_read_together_only_those_that_are_wrong_fail():
    given = [
        Input({"text": "bad" if place in (0, 77) else str(place)}, place=f"line {place}")
        for place in range(100)
    ]
    calls = []

    def compute(batch):
        calls.append(len(batch))
        refuse(any(one["text"] == "bad" for one in batch), "a bad text")
        return [one["text"] for one in batch]

    found = list(results(iter(given), compute, 1024))
    assert [item for item, _ in found] == given
    assert [result for _, result in found if isinstance(result, str)] == [
        str(place) for place in range(100) if place not in (0, 77)
    ]
    assert [str(result) for _, result in found if not isinstance(result, str)] == [
        "line 0: a bad text",
        "line 77: a bad text",
    ]
    assert len(calls) < 32  # halves of halves, and not one by one


@pytest.mark.ledger("E1")
def test_readers_say_what_the_methods_say(readers, clearhead, tmp_path):
    m = {name: ch.load(folder) for name, folder in readers.items()}
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    flags = ["--file", tmp_path / "in.txt", "--json", "--batch-size", 3]
    rows = {
        name: [json.loads(line) for line in clearhead(name, readers[name], *flags)[1].splitlines()]
        for name in ("classify", "tag", "embed")
    }
    for row, wanted in zip(rows["classify"], m["classify"].classify(TEXTS)):
        assert (row["label"], row["scores"]) == (wanted.label, pytest.approx(wanted.scores, abs=1e-5))
    for row, wanted in zip(rows["tag"], tag(m["tag"], TEXTS)):
        assert [word["label"] for word in row["words"]] == [word.label for word in wanted.words]
        assert [(span["start"], span["text"]) for span in row["spans"]] == [
            (span.start, span.text) for span in wanted.spans
        ]
    assert torch.allclose(
        torch.tensor([row["embedding"] for row in rows["embed"]]), m["embed"].embed(TEXTS), atol=1e-5
    )
    assert clearhead("classify", readers["classify"], "rain", "--pair", "two dogs", "--json").json[
        "scores"
    ] == pytest.approx(m["classify"].classify(("rain", "two dogs")).scores, abs=1e-5)
    _, out, _ = clearhead("fill", readers["fill"], "the [MASK] wait", "--k", 3, "--json")
    assert [mask["id"] for mask in json.loads(out)["masks"][0]] == [
        one.id for one in m["fill"].fill("the [MASK] wait", 3)
    ]
    (tmp_path / "asked.txt").write_text(f"who lives\t{TEXTS[0]}\nwhat waits\t{TEXTS[1]}\n")
    _, out, _ = clearhead("answer", readers["answer"], "--file", tmp_path / "asked.txt")
    wanted = m["answer"].answer(["who lives", "what waits"], TEXTS[:2])
    assert out.splitlines() == [one.text for one in wanted]
    assert (
        clearhead("answer", readers["answer"], "who lives", TEXTS[0], "--json").json["text"] == wanted[0].text
    )


@pytest.mark.parametrize("name", ["classify", "tag", "fill", "answer", "embed"])
def test_plain_output(name, readers, clearhead, stdin):
    given = {"fill": ["the [MASK] wait"], "answer": ["who", "Anna lives"]}.get(
        name, ["Anna lives near Berlin."]
    )
    code, out, err = clearhead(name, readers[name], *given)
    assert (code, err) == (0, "")
    assert out.strip()
    stdin(("\t".join(given) + "\n").encode() * 3)
    code, out, err = clearhead(name, readers[name])
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 3


# Mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "DECODER", ""], "a prompt is empty"),
        (["generate", "DECODER", "1 x", "--ids"], '"1 x" is not a list of token ids'),
        (["generate", "DECODER", "1 999", "--ids", "--max-new-tokens", "2"], "999"),
        (["embed", "READER", "a", "--output", "/nowhere/x.npy", "--json"], "x.npy"),
        (["generate", "DECODER", "a", "--output", "/nowhere/x.npy"], "x.npy: a .npy file holds vectors"),
        (["generate", "DECODER", "word " * 40, "--overflow", "refuse"], "48"),
        (["generate", "DECODER", "a", "--top-p", "1.5"], "top_p 1.5"),
        (["generate", "DECODER", "a", "--top-p", "0"], "top_p 0"),
        (["generate", "DECODER", "a", "--temperature", "-1"], "temperature -1"),
        (["generate", "DECODER", "a", "--beams", "3", "--temperature", "1"], "temperature with num_beams 3"),
        (["generate", "DECODER", "a", "--num-return", "2"], "num_return 2"),
        (["generate", "DECODER", "a", "--stop-token", "<|ende|>"], "<|ende|>"),
        (["generate", "DECODER", "a", "--max-new-tokens", "0"], "max_new_tokens 0"),
        (["generate", "DECODER", "a", "--device", "nowhere"], "nowhere"),
        (["generate", "DECODER", "a", "--file", "x.txt"], "choose one"),
        (["generate", "DECODER", "--file", "/nowhere/x.txt"], "/nowhere/x.txt cannot be read"),
        (["generate", "DECODER", "--file", "/dev/null"], "/dev/null is empty"),
        (["generate", "DECODER", "--file", sys.executable], "is a binary file: give texts, one per line"),
        (["generate", __file__, "a"], "is a file and no GGUF file: name a model directory"),
        (["generate", "DECODER", "a", "--output", "/nowhere/x.txt"], "/nowhere/x.txt cannot be written"),
        (["generate", "DECODER", "a", "--batch-size", "0"], "batch-size 0"),
        (["generate", "DECODER", "a", "--tokenizer", "/nowhere/tokenizer.json"], "/nowhere/tokenizer.json"),
        (["generate", "READER", "a"], "head"),
        (["translate", "DECODER", "a"], "encoder-decoder"),
        (["classify", "DECODER", "a"], "head classifier"),
        (["answer", "READER", "a"], "context"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_code_2(arguments, words, decoder, readers, clearhead):
    places = {"DECODER": decoder, "READER": readers["classify"]}
    code, out, err = clearhead(*(places.get(argument, argument) for argument in arguments))
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("clearhead: ")
    assert words in err


@pytest.mark.parametrize(
    ("name", "lines", "number", "words"),
    [
        ("in.txt", ["one", "two", "", "four"], 3, "blank"),
        ("in.txt", ["one", "two", "word " * 40, "four"], 3, "positions"),
        ("in.txt", ["one", b"\xff\xfe", "three"], 2, "UTF-8"),
        ("in.jsonl", ['{"prompt": "one"}', '{"prompt": 2}'], 2, "must be text"),
        ("in.jsonl", ['{"prompt": "one"}', "{"], 2, "not JSON"),
        ("in.jsonl", ['{"prompt": "one"}', "[1]"], 2, "JSON object"),
        ("in.jsonl", ['{"text": "one"}'], 1, "no prompt"),
    ],
)
def test_a_bad_line_says_so_and_the_rest_is_written(name, lines, number, words, decoder, clearhead, tmp_path):
    path, target = tmp_path / name, tmp_path / "out.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    m = ch.load(decoder)
    flags = ["--file", path, "--max-new-tokens", 4, "--overflow", "refuse"]
    for size in (1, 2):
        code, out, err = clearhead("generate", decoder, *flags, "--json", "--batch-size", size)
        assert code == 1
        assert err.count("\n") == 1 and f"1 of {len(lines)} inputs failed" in err and words in err
        rows = [json.loads(line) for line in out.splitlines()]
        assert [place for place, row in enumerate(rows, 1) if "error" in row] == [number]
        assert f"{name} line {number}: " in rows[number - 1]["error"] and words in rows[number - 1]["error"]
        good = [row for row in rows if "error" not in row]
        assert len(rows) == len(lines)
        assert [row["text"] for row in good] == [m.generate(row["prompt"], 4).text for row in good]
    code, text, _ = clearhead("generate", decoder, *flags)
    assert code == 1
    assert text.splitlines()[number - 1].startswith(f"error: {path} line {number}: ")
    code, silent, _ = clearhead("generate", decoder, *flags, "--json", "--output", target)
    assert (code, silent, target.read_text()) == (1, "", out)


@pytest.mark.parametrize("name", ["classify", "tag", "fill", "answer", "embed"])
def test_a_blank_line_ends_no_batch(name, readers, clearhead, stdin):
    line = {"fill": "the [MASK] wait", "answer": "who\tAnna lives"}.get(name, "Anna lives near Berlin.")
    stdin(f"{line}\n\n{line}\n".encode())
    code, out, err = clearhead(name, readers[name], "--json")
    rows = [json.loads(row) for row in out.splitlines()]
    assert (code, ["error" in row for row in rows]) == (1, [False, True, False])
    assert alike(rows[0], rows[2])  # last bits may depend on the place in a batch
    assert "stdin line 2: the line is blank" in err


def test_a_model_that_fits_no_input_is_refused_before_any(decoder, readers, clearhead, stdin, tmp_path):
    for command in (
        ("generate", readers["classify"]),
        ("score", readers["classify"]),
        ("translate", decoder),
        ("classify", decoder),
        ("tag", decoder),
        ("fill", decoder),
        ("predict", decoder),
        ("generate", decoder, "--stop-token", "<|ende|>"),
    ):
        stdin(b"one\ntwo\n")
        code, out, err = clearhead(*command, "--output", tmp_path / "out.txt")
        assert (code, out, err.count("\n")) == (2, "", 1), command
        assert not list(tmp_path.iterdir())


def test_unused_fields_of_json_lines_stay(readers, decoder, clearhead, tmp_path):
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"id": 7, "text": TEXTS[0], "label": "gold", "more": {"a": [1, None]}}) + "\n"
    )
    _, out, _ = clearhead("classify", readers["classify"], "--file", tmp_path / "in.jsonl", "--json")
    row, wanted = json.loads(out), ch.load(readers["classify"]).classify(TEXTS[0])
    assert (row["id"], row["more"], row["text"]) == (7, {"a": [1, None]}, TEXTS[0])
    assert (row["label"], row["given_label"]) == (wanted.label, "gold")


@pytest.mark.parametrize("command", ["generate", "translate", "score"])
def test_token_ids_give_what_the_methods_give(command, decoder, both, clearhead, tmp_path):
    folder = both if command == "translate" else decoder
    m, ids = ch.load(folder), [104, 101, 108]
    flags = [] if command == "score" else ["--max-new-tokens", 5]
    wanted = m.score(ids).total if command == "score" else getattr(m, command)(ids, 5).ids
    field, key = ("prompt" if command == "generate" else "text"), ("total" if command == "score" else "ids")
    (tmp_path / "in.jsonl").write_text(json.dumps({field: ids}) + "\n")
    for given in (["104 101,108", "--ids"], ["--file", tmp_path / "in.jsonl"]):
        code, out, err = clearhead(command, folder, *given, *flags, "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)[key]
        assert found == (pytest.approx(wanted, rel=1e-6) if command == "score" else wanted)
    code, out, _ = clearhead(command, folder, "104 101 108", "--ids", *flags)
    assert code == 0 and (command != "generate" or out.startswith(m.decode(ids)))


def test_ids_without_a_tokenizer(clearhead, tmp_path):
    torch.manual_seed(0)
    m = ch.Model(ch.Transformer(ch.preset("micro-decoder")))
    m.save(tmp_path / "model")
    wanted = m.generate([5, 6], 4).ids
    code, out, _ = clearhead("generate", tmp_path / "model", "5 6", "--ids", "--max-new-tokens", 4)
    assert (code, out) == (0, " ".join(map(str, [5, 6, *wanted])) + "\n")
    assert clearhead("score", tmp_path / "model", "5 6 7", "--ids")[0] == 0
    assert m.generate([]) == []


def test_an_empty_prompt_is_read_as_in_python(decoder, readers, clearhead, tmp_path):
    m = ch.load(decoder)
    m.special = {"eos": 256, "bos": 256}
    m.save(tmp_path / "model")
    m = ch.load(tmp_path / "model")
    code, out, _ = clearhead("generate", tmp_path / "model", "", "--max-new-tokens", 5)
    assert (code, out) == (0, m.generate("", 5).text + "\n")
    (tmp_path / "in.jsonl").write_text('{"prompt": ""}\n')
    flags = ["--file", tmp_path / "in.jsonl", "--max-new-tokens", 5, "--json"]
    assert clearhead("generate", tmp_path / "model", *flags).json["ids"] == m.generate("", 5).ids
    assert (
        clearhead("classify", readers["classify"], "", "--json").json["label"]
        == ch.load(readers["classify"]).classify("").label
    )


def test_vectors_as_an_array(readers, clearhead, tmp_path):
    m, target = ch.load(readers["embed"]), tmp_path / "x.npy"
    (tmp_path / "in.txt").write_text(f"{TEXTS[0]}\n\n{TEXTS[1]}\n")
    code, out, err = clearhead("embed", readers["embed"], "--file", tmp_path / "in.txt", "--output", target)
    found = np.load(target)
    assert (code, out, found.dtype) == (1, "", np.float32)
    assert "line 2" in err
    assert np.isnan(found[1]).all()
    np.testing.assert_allclose(found[[0, 2]], m.embed(TEXTS[:2]).numpy(), atol=1e-5)
    assert clearhead("embed", readers["embed"], TEXTS[0], "--output", target)[0] == 0
    assert np.load(target).shape == (1, m.config.d_model)


def test_a_file_cut_short(decoder, clearhead, tmp_path):
    packed = gzip.compress("".join(f"prompt {n}\n" for n in range(40)).encode())
    (tmp_path / "in.txt.gz").write_bytes(packed[:-10])
    code, _, err = clearhead(
        "score", decoder, "--file", tmp_path / "in.txt.gz", "--output", tmp_path / "out.txt"
    )
    assert code == 2
    assert "cannot be read after line" in err
    assert not (tmp_path / "out.txt").exists()
    (tmp_path / "bad.gz").write_bytes(b"no gzip\n")
    assert clearhead("score", decoder, "--file", tmp_path / "bad.gz")[0] == 2


def test_a_damaged_tokenizer_file(decoder, clearhead, tmp_path):
    for name, data in (
        ("a.bin", b"\x07\0\0\0abc"),
        ("b.model", b"\xff\xff"),
        ("c.json", b"{}"),
        ("d.txt", b""),
    ):
        (tmp_path / name).write_bytes(data)
        code, _, err = clearhead("generate", decoder, "a", "--tokenizer", tmp_path / name)
        assert (code, err.count("\n")) == (2, 1)
        assert name in err


def test_results_come_as_batches_finish():
    seen = []
    items = (seen.append(n) or Input({"text": str(n)}, place=f"line {n}") for n in range(6))
    made = results(items, lambda batch: [fields["text"] for fields in batch], 2)
    assert next(made)[1] == "0"
    assert seen == [0, 1]  # nothing beyond the first batch was read
    assert [result for _, result in made] == ["1", "2", "3", "4", "5"]


def test_progress_goes_to_the_terminal_alone(decoder, clearhead, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("one\ntwo\nthree\n")
    flags = ["--file", tmp_path / "in.txt", "--max-new-tokens", 3, "--json", "--batch-size", 1]
    _, plain, silent = clearhead("generate", decoder, *flags)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, shown = clearhead("generate", decoder, *flags)
    assert (code, out) == (0, plain)
    assert silent == ""
    assert "in.txt" in shown


def test_an_output_file_is_whole_or_absent(tmp_path):
    (tmp_path / "out.txt").write_text("before")

    def stop_halfway():
        with writing(tmp_path / "out.txt") as write:
            write("half")
            raise error

    for error in (ZeroDivisionError, ch.InputError):
        with pytest.raises(error):
            stop_halfway()
    assert (tmp_path / "out.txt").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


@pytest.mark.slow
def test_a_pipe(decoder):
    """A real process between two pipes: the first results are there before the input ends."""
    command = [
        sys.executable,
        "-m",
        "clearhead.app.cli",
        "generate",
        str(decoder),
        "--max-new-tokens",
        "3",
        "--json",
        "--batch-size",
        "1",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        process.stdin.write("one\ntwo\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["prompt"] == "one"
        process.stdin.close()
        assert json.loads(process.stdout.readline())["prompt"] == "two"
        assert process.wait(60) == 0


@pytest.mark.parametrize("command", ["trace", "attention", "lens"])
def test_looking_inside_takes_ids_and_an_empty_text_as_python_does(command, decoder, clearhead, tmp_path):
    m = ch.load(decoder)
    m.special = {"eos": 256, "bos": 256}
    m.save(tmp_path / "model")
    as_text = clearhead(command, tmp_path / "model", "hello", "--json").json
    ids = " ".join(map(str, m.encode(["hello"])[0]))
    as_ids = clearhead(command, tmp_path / "model", ids, "--ids", "--json").json
    assert set(as_text) == set(as_ids)
    assert command != "attention" or [head["entropy"] for head in as_ids["heads"]] == pytest.approx(
        [head["entropy"] for head in as_text["heads"]], abs=1e-5
    )
    assert command != "lens" or as_ids["top_names"] == as_text["top_names"]
    assert clearhead(command, tmp_path / "model", "", "--json")[0] == 0  # read as what begins a text
    code, out, err = clearhead(command, decoder, "")
    assert (code, out, err.count("\n")) == (2, "", 1) and "empty" in err
