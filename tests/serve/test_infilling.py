"""Fill-in-the-middle: prompts as model cards write them, in Python, the command and over HTTP."""

from __future__ import annotations

import json

import pytest
from tokenizers import processors

import clearhead as ch
from clearhead.hub.tokenizer import load_tokenizer, read_settings
from clearhead.learn.tasks.infilling import infilled, infilling_ends
from clearhead.run.serve.engine import ServeEngine
from tests import harness
from tests.serve import mixes
from tests.serve.served import serving
from tests.serve.test_http import call

# Of each family: a prompt of its model card, and what ends the text there.
CARDS = {
    "StarCoder": ("<fim_prefix>{before}<fim_suffix>{after}<fim_middle>", ["<|endoftext|>", "<file_sep>"]),
    "SantaCoder": ("<fim-prefix>{before}<fim-suffix>{after}<fim-middle>", ["<|endoftext|>"]),
    "Qwen-Coder": (
        "<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>",
        ["<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
    ),
    "CodeGemma": ("<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>", ["<|file_separator|>"]),
    "DeepSeek-Coder": ("<s><｜fim▁begin｜>{before}<｜fim▁hole｜>{after}<｜fim▁end｜>", ["<|EOT|>"]),
    "Codestral": ("<s>[SUFFIX]{after}[PREFIX]{before}", []),
}
BEFORE, AFTER = "def f(x):\n    ", "\n    return x  # é"


def coder(family: str) -> ch.Model:
    """A micro model of bytes, with the tokens of a family."""
    card, ends = CARDS[family]
    first, *parts = card.replace("{before}", "{after}").split("{after}")
    parts = [part.replace("><", "> <").replace(">[", "> [").split() for part in (first, *parts)]
    marks = [mark for part in parts for mark in part]
    tokenizer = harness.byte_tokenizer(special=(*marks, *ends))
    if "<s>" in marks:
        named = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", named)
    return mixes.model("rope-gqa", tokenizer, vocab_size=tokenizer.get_vocab_size())


@pytest.mark.parametrize("family", CARDS)
def test_a_prompt_is_the_one_of_the_model_card(family):
    m, (card, ends) = coder(family), CARDS[family]
    for before, after in ((BEFORE, AFTER), ("", AFTER), ("x", " ")):
        text = card.format(before=before, after=after)
        want = m.tokenizer.encode(text, add_special_tokens=False).ids
        assert infilled(m, before, after) == want
        assert infilled(m, m.prompt_ids(before) if before else [], after) == want  # of ids, too
    assert infilling_ends(m) == {m.tokenizer.token_to_id(end) for end in ends}
    made = m.generate(BEFORE, 20, suffix=AFTER)
    want = m.tokenizer.encode(card.format(before=BEFORE, after=AFTER), add_special_tokens=False).ids
    assert made.ids == m.generate(want, 20, stop_tokens=ends).ids
    for end in ends:  # each of them ends the text
        two = {"allowed": [65, m.tokenizer.token_to_id(end)], "temperature": 1.0, "seed": 2}
        made = m.generate(BEFORE, 40, suffix=AFTER, **two)
        assert (made.stop_reason, {*made.ids} <= {65}) == ("eos", True)
        assert m.generate(BEFORE, 40, **two).stop_reason == "length"


def test_codellama_s_prompt_is_the_one_of_its_authors(tmp_path):
    """Their code encodes what is before as any text, and what is after without the space before a text."""
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = ["def f(x):\n    return x + 1", "import os", "print('hello world')", "for i in range(10):"] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "tokenizer"), vocab_size=340,
        model_type="bpe", byte_fallback=True, remove_extra_whitespaces=False, minloglevel=2,
        normalization_rule_name="identity", hard_vocab_limit=False,
        user_defined_symbols=["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"],
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    settings = {"tokenizer_class": "CodeLlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text("{}")
    tokenizer = load_tokenizer(tmp_path)
    model = harness.build(vocab_size=tokenizer.get_vocab_size(), max_positions=128)
    m = ch.Model(model, tokenizer, settings=read_settings(tmp_path), special={"bos": 1, "eos": 2})
    mark = len(theirs.encode("☺"))
    texts = [(BEFORE, AFTER), ("x = ", "\nprint(x)"), (" a", " b"), ("", "x"), ("hello", " world")]
    for before, after in texts:
        wanted = [
            *(theirs.bos_id(), theirs.piece_to_id("▁<PRE>"), *theirs.encode(before)),
            *(theirs.piece_to_id("▁<SUF>"), *theirs.encode(f"☺{after}")[mark:], theirs.piece_to_id("▁<MID>")),
        ]
        assert infilled(m, before, after) == wanted
    assert infilling_ends(m) == {theirs.piece_to_id("▁<EOT>")}
    with pytest.raises(ch.InputError, match="<FILL_ME>, which asks for infilling: give what comes after it"):
        m.generate("a", suffix="b<FILL_ME>")


def test_what_cannot_be_filled_in_is_refused(writer, tmp_path, clearhead):
    m = coder("StarCoder")
    for asked, said in (
        (lambda: writer.generate("x", suffix="y"), "suffix with a model that does not fill in"),
        (lambda: m.generate("x", suffix="y", overflow="window"), 'suffix with overflow "window"'),
        (lambda: m.generate([999], suffix="y"), "ids contain 999"),
    ):
        with pytest.raises(ch.InputError, match=said):
            asked()
    writer.settings["chat_template"] = mixes.TEMPLATE
    with pytest.raises(ch.InputError, match="suffix with a conversation"):
        writer.chat([{"role": "user", "content": "x"}], suffix="y")
    assert m.generate("x", 5, suffix="").ids == m.generate("x", 5).ids  # nothing follows
    m.settings["chat_template"] = mixes.TEMPLATE
    m.save(tmp_path / "coder")
    given = ("--suffix", "y", "--max-new-tokens=9")
    code, out, _ = clearhead("generate", tmp_path / "coder", "x = ", *given)
    assert code == 0 and m.generate("x = ", 9, suffix="y").text in out
    code, _, err = clearhead("chat", tmp_path / "coder", "x", *given)
    assert code == 2 and "suffix with a conversation" in err and err.count("\n") == 1


def test_over_http(writer):
    m = coder("Qwen-Coder")
    with serving({"coder": ServeEngine(m), "writer": ServeEngine(writer)}) as at:
        body = {"model": "coder", "prompt": BEFORE, "suffix": AFTER, "max_tokens": 9, "temperature": 0}
        wanted = m.generate(BEFORE, 9, suffix=AFTER)
        found = call(at, "/v1/completions", body | {"logprobs": 1})[2]
        assert found["choices"][0]["text"] == wanted.text
        assert "".join(found["choices"][0]["logprobs"]["tokens"]) == wanted.text
        assert found["usage"]["prompt_tokens"] == len(infilled(m, BEFORE, AFTER))
        stream = call(at, "/v1/completions", body | {"stream": True})[2]
        chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted.text
        begin = call(at, "/v1/completions", body | {"prompt": ""})[2]["choices"][0]["text"]
        assert begin == m.generate("", 9, suffix=AFTER).text  # of the beginning of a file
        for nothing in ("", None):
            plain = call(at, "/v1/completions", body | {"suffix": nothing})
            assert plain[2]["choices"][0]["text"] == m.generate(BEFORE, 9).text
        chat = {"model": "writer", "messages": [{"role": "user", "content": "x"}], "suffix": "x"}
        for route, wrong, said in (
            ("/v1/completions", body | {"model": "writer"}, "suffix with a model that does not fill in"),
            ("/v1/completions", body | {"echo": True}, "echo with suffix"),
            ("/v1/completions", body | {"suffix": 5}, "suffix: Input should be a valid string"),
            ("/v1/completions", body | {"prompt": "", "suffix": ""}, "prompt is empty"),
            ("/v1/chat/completions", chat, "suffix with a conversation"),
        ):
            status, _, answer = call(at, route, wrong)
            assert (status, said in answer["error"]["message"]) == (400, True), answer
        assert answer["error"]["param"] == "suffix"
