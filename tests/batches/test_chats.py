"""Conversations: every form is read, the answers alone are targets, and packed ones do not see each other."""

import json

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

import clearhead as ch
from clearhead.errors import InputError
from clearhead.hub.tokens.chat import KNOWN, ChatTemplate
from clearhead.learn.batches.batch import IGNORE
from clearhead.learn.batches.encoding import Encoder
from clearhead.learn.data.corpus import open_corpus
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.entries.chats import ChatEncoder
from clearhead.learn.tasks.generation import chat_template, turn_end
from clearhead.learn.tasks.table import TASKS
from tests import harness
from tests.tokens.toys import TEMPLATES

CHAT = TASKS["chat"]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<tool>"]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
U, A = "user", "assistant"


@pytest.fixture(scope="module", params=[False, True], ids=["letters", "merged"])
def tokenizer(request) -> Tokenizer:
    """Bytes, alone or merged over spaces; the post-processor adds a bos token and trims offsets."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", "o"), ("o", "n"), ("Ġo", "n"), ("t", "w"), (":", "Ġ"), ("Ċ", "Ċ")]
    merges = pairs if request.param else []
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    vocabulary |= {a + b: len(alphabet) + number for number, (a, b) in enumerate(merges)}
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    bos = ("<s>", made.token_to_id("<s>"))
    made.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing("<s> $A", None, [bos])]
    )
    return made


def talk(*said: str) -> list[dict]:
    return [{"role": (U, A)[n % 2], "content": text} for n, text in enumerate(said)]


TALK = talk("hé\n", "one two", "b", "three\n\nfour")
# What each template makes of it, in pieces: those that begin with a star are learned.
PIECES = {
    "chatml": "<|im_start|>user\nhé\n<|im_end|>\n<|im_start|>assistant\n|*one two<|im_end|>|\n"
    "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n|*three\n\nfour<|im_end|>|\n",
    "llama2": "<s>[INST] hé [/INST]|* one two </s>|<s>[INST] b [/INST]|* three\n\nfour </s>",
    "mistral": "<s>[INST] hé\n [/INST]|*one two</s>|[INST] b [/INST]|*three\n\nfour</s>",
    "chatml_marked": "<|im_start|>user\nhé\n<|im_end|>\n<|im_start|>assistant\n|*one two<|im_end|>|\n"
    "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n|*three\n\nfour<|im_end|>|\n",
    "plain": "User: hé\n\n\nAssistant:|* one two</s>|\n\nUser: b\n\nAssistant:|* three\n\nfour</s>|\n\n",
    # No token ends a turn: the text ends with the eos token.
    "falcon": "User: hé\n\nFalcon:|* one two|\nUser: b\nFalcon:|* three\n\nfour</s>",
}


def split_pieces(written: str) -> list[tuple[str, bool]]:
    parts = written.replace("<|", "\x00").replace("|>", "\x01").split("|")
    plain = [part.replace("\x00", "<|").replace("\x01", "|>") for part in parts]
    return [(part.removeprefix("*"), part.startswith("*")) for part in plain]


@pytest.mark.parametrize("name", PIECES)
def test_answers_alone_are_targets_token_by_token(name, tokenizer, tmp_path):
    template = ChatTemplate((TEMPLATES | KNOWN)[name], NAMES)
    batches = batches_of([TALK], tokenizer, template, tmp_path)
    (batch,) = batches.all()
    ids, wanted = walked(tokenizer, PIECES[name])
    assert [*batch.ids[0].tolist(), ids[-1]] == ids  # once <s>, if the template writes it, and no more
    expected = [token if flag else IGNORE for token, flag in zip(ids, wanted)][1:]
    assert batch.targets[0].tolist() == expected
    ends = [tokenizer.token_to_id(token) for token in SPECIAL]
    last = [token for token in expected if token != IGNORE][-1]
    assert last in ends  # the end is learned


def walked(tokenizer: Tokenizer, written: str) -> tuple[list[int], list[bool]]:
    """Walk over the bytes: a token is learned if any byte of it is in a learned piece."""
    pieces = split_pieces(written)
    ids = tokenizer.encode("".join(text for text, _ in pieces), add_special_tokens=False).ids
    learned_bytes = [flag for text, flag in pieces for _ in text.encode()]
    wanted, at = [], 0
    for token in ids:
        size = len(bytes_of(tokenizer, token))
        wanted.append(any(learned_bytes[at : at + size]))
        at += size
    assert at == len(learned_bytes)
    return ids, wanted


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    written = tokenizer.id_to_token(token)
    return written.encode() if written in SPECIAL else b"x" * len(written)  # a letter for each byte


def batches_of(chats, tokenizer, template, folder, length=300, **plan):
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    corpus = open_corpus(DataPlan(paths=(str(folder / "rows.jsonl"),)), CHAT.row, split=False)
    special = {"bos": tokenizer.token_to_id("<s>"), "eos": tokenizer.token_to_id("</s>")}
    more = {"special": special, "template": template}
    rows = CHAT.encode_corpus(corpus, "validation", tokenizer, (), folder / "cache", **more)
    return CHAT.make_batches(rows, DataPlan(**plan), special=special, length=length, seed=0, training=False)


@pytest.mark.parametrize("name", ["chatml_marked", "marked_turns"])
def test_marked_templates_give_the_mask_of_transformers(name, tokenizer, tmp_path):
    template = ChatTemplate(TEMPLATES[name], NAMES)
    whole = Tokenizer.from_str(tokenizer.to_str())
    whole.post_processor = processors.ByteLevel(trim_offsets=False)  # else theirs loses leading spaces
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<s>", eos_token="</s>")
    given = talk("a", "one", "b", "two\n", "c", "tres")
    wanted = theirs.apply_chat_template(
        given, chat_template=TEMPLATES[name], return_dict=True, return_assistant_tokens_mask=True
    )
    (batch,) = batches_of([given], tokenizer, template, tmp_path).all()
    flagged = zip(wanted["input_ids"], wanted["assistant_masks"])
    targets = [token if flag else IGNORE for token, flag in flagged]
    assert batch.ids[0].tolist() == wanted["input_ids"][:-1]
    assert batch.targets[0].tolist() == targets[1:]


def test_earlier_thoughts_that_a_template_drops_have_rows_of_their_own(tokenizer, tmp_path):
    template = ChatTemplate(TEMPLATES["qwen3"], NAMES)
    thoughts = talk("a", "<think>\nhm\n</think>\n\none", "b", "two")
    batches = batches_of([thoughts], tokenizer, template, tmp_path)
    rows = [row[row != IGNORE].tolist() for batch in batches.all() for row in batch.targets]
    first, second = sorted(tokenizer.decode(row, skip_special_tokens=False) for row in rows)
    assert first == "<think>\n\n</think>\n\ntwo<|im_end|>"
    assert second == "<think>\nhm\n</think>\n\none<|im_end|>"


def test_packed_conversations_do_not_see_each_other(tokenizer, tmp_path):
    """Each loss in a packed row is that of the conversation alone, and every target is there once."""
    chats = [talk("a" * n, "b" * (7 - n)) for n in range(1, 7)] + [TALK, talk("x", "y" * 400)]
    template = ChatTemplate(KNOWN["chatml"], NAMES)
    model = harness.build(vocab_size=tokenizer.get_vocab_size(), max_positions=200, positions="learned")
    found = {}
    for packing in ("stream", "isolated"):
        batches = batches_of(chats, tokenizer, template, tmp_path, 120, packing=packing, batch_size=3)
        assert any("1 of 8 conversations are longer than 120" in note for note in batches.notes)
        found[packing] = []
        for batch in batches.all():
            with torch.no_grad():
                logits = model(**batch.arguments()).logits.double()
            asked = batch.targets != IGNORE
            losses = torch.nn.functional.cross_entropy(logits[asked], batch.targets[asked], reduction="none")
            found[packing] += losses.tolist()
    assert batches.per_epoch < 8
    assert np.allclose(sorted(found["stream"]), sorted(found["isolated"]), atol=1e-5)


FORMS = {
    "messages": {"messages": [{"role": "system", "content": "S"}, *talk("q", "a")]},
    "sharegpt": {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "q"},
                                   {"from": "gpt", "value": "a"}]},
    "prompt": {"prompt": "q", "completion": "a", "system": "S"},
    "prompt lists": {"prompt": [{"role": "system", "content": "S"}, *talk("q")],
                     "completion": talk("q", "a")[1:]},
    "alpaca": {"instruction": "q", "input": "", "output": "a", "system": "S"},
    "dolly": {"id": 3, "instruction": "q", "context": "", "response": "a", "system": "S"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_recognised(form, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(FORMS[form]) + "\n") * 2)
    corpus = open_corpus(DataPlan(paths=(str(path),)), split=False)
    assert corpus.shape == "chats"
    assert list(corpus.validation[0].messages) == FORMS["messages"]["messages"]


def test_input_goes_after_the_instruction_and_rows_without_an_answer_are_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"instruction": "q", "input": "i", "output": out} for out in ("a", " ", "b")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = open_corpus(DataPlan(paths=(str(path),)), split=False)
    assert corpus.validation[0].messages[0]["content"] == "q\n\ni"
    assert "1 row without an answer to learn from left out" in corpus.notes
    path.write_text(json.dumps({"messages": talk("q")}) + "\n")
    with pytest.raises(InputError, match="no row but 1 row without an answer to learn from"):
        open_corpus(DataPlan(paths=(str(path),)), split=False)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": "hello"}, r"line 1: `messages` must be a list of messages, not 'hello'"),
        ({"messages": [["user", "a"]]}, r"line 1: `messages`.0 must be an object"),
        (
            {"conversations": [{"from": "cat", "value": "a"}]},
            r"`conversations`.0.from 'cat' is not known: use",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, r"`messages`.0.content must be a text"),
        ({"prompt": 3, "completion": "a"}, r"`prompt` must be text, or a list of messages"),
        ({"chosen": "a", "rejected": "b"}, "nothing that they answer: add a prompt"),
    ],
)
def test_a_bad_row_is_named(row, says, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=says):
        open_corpus(DataPlan(paths=(str(path),)), split=False)


def test_what_a_template_refuses_is_named_by_its_place(tokenizer, tmp_path):
    system = [{"role": "system", "content": "S"}, *talk("q", "a")]
    with pytest.raises(InputError, match=r"rows.jsonl, line 2: the chat template refuses .* system role"):
        batches_of([TALK, system], tokenizer, ChatTemplate(TEMPLATES["gemma"], NAMES), tmp_path)
    with pytest.raises(InputError, match="conversations need a chat template"):
        list(CHAT.encode([], Encoder(tokenizer, {}, None)))


CALLS = [
    {"role": U, "content": "rain?"},
    {"role": A, "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "sky", "arguments": '{"day": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "sky", "arguments": {"day": 2}}},
    ]},
    {"role": "tool", "tool_call_id": "c1", "name": "sky", "content": "wet"},
    {"role": A, "content": "yes"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "sky", "parameters": {}}}]
# In the manner of Mistral: a special token stands before the calls.
TOOL_FIRST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% for c in m.tool_calls or [] %}"
    "{{ '<tool>' + (c.function | tojson) }}{% endfor %}{{ (m.content or '') + eos_token }}"
    "{% else %}{{ '[' + m.role + ']' + m.content }}{% endif %}{% endfor %}{{ '' if tools else '' }}"
)
WRITTEN_CALLS = {
    "chatml": '<|im_start|>tools\n[{"type": "function", "function": {"name": "sky", "parameters": {}}}]'
    "<|im_end|>\n"
    "<|im_start|>user\nrain?<|im_end|>\n<|im_start|>assistant\n|*\n<tool_call>\n"
    '{"name": "sky", "arguments": {"day": 1}}\n</tool_call>\n<tool_call>\n'
    '{"name": "sky", "arguments": {"day": 2}}\n</tool_call>'
    "<|im_end|>|\n<|im_start|>tool\nwet<|im_end|>\n<|im_start|>assistant\n|*yes<|im_end|>|\n",
    "special": '<s>[user]rain?|*<tool>{"name": "sky", "arguments": {"day": 1}}'
    '<tool>{"name": "sky", "arguments": {"day": 2}}</s>|[tool]wet|*yes</s>',
}


@pytest.mark.parametrize("name", WRITTEN_CALLS)
def test_tool_calls_are_written_and_learned_whole(name, tokenizer, tmp_path):
    """Arguments are objects in both forms, and a special token before a call does not end the turn."""
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CALLS, "tools": TOOLS}) + "\n")
    (row,) = open_corpus(DataPlan(paths=(str(tmp_path / "chats.jsonl"),)), split=False).validation
    template = ChatTemplate({**KNOWN, "special": TOOL_FIRST}[name], NAMES)
    encoder = ChatEncoder(Encoder(tokenizer, {}, None, template))
    ((ids, learned),) = encoder(row.messages, row.tools)
    assert (ids, learned) == walked(tokenizer, WRITTEN_CALLS[name])


SMALL = {
    "train.steps": 1, "train.threads": 1, "train.samples": 0,
    "model.max_positions": 256, "model.d_model": 16, "model.n_layers": 1, "model.n_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("template", ["plain", "chatml"])
def test_a_new_tokenizer_knows_all_that_its_template_writes(template, tmp_path):
    """No token of the training rows is unknown, and every turn ends with one special token."""
    rows = [{"messages": talk(f"was {n}?", f"es {n}", "ja?", "so"), "tools": TOOLS} for n in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes: list[object] = []
    settings = {**SMALL, "tokens.template": template}
    found = ch.train(tmp_path / "chats.jsonl", out=tmp_path / "run", settings=settings, on_event=notes.append)
    assert not any("unknown" in str(note) for note in notes)
    text = chat_template(found.model).render(rows[0]["messages"], False, tools=TOOLS)
    tokens = found.model.tokenizer.encode(text, add_special_tokens=False).tokens
    assert "<|unk|>" not in tokens and "".join(tokens) == text
    end = {"plain": "<|endoftext|>", "chatml": "<|im_end|>"}[template]
    assert tokens.count(end) == (2 if template == "plain" else 5)
    assert turn_end(found.model) == found.model.tokenizer.token_to_id(end)
    again = ch.train(  # a template beside the weights is the run's own file
        tmp_path / "chats.jsonl", out=tmp_path / "run", overwrite=True, settings=SMALL
    )
    assert again.step == 1


def test_a_chat_model_is_trained_saved_and_talks(tmp_path):
    """From rows in memory: what is left out is said, the answer and its end are learned, eval judges it."""
    words = ("red", "blue", "green", "black")
    rows = [{"prompt": f"say {word}", "completion": f"{word}!"} for word in words]
    empty = [{"prompt": "say nothing", "completion": ""}]
    notes: list[str] = []
    settings = {
        "tokens.kind": "char", "train.steps": 100, "train.lr": 6e-3, "data.batch_size": 2,
        "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 4, "model.max_positions": 64,
        "train.validate_every": 100, "generate.temperature": 0.0, "train.device": "cpu", "train.samples": 1,
    }  # fmt: skip
    done = ch.train(
        {"train": rows + empty, "validation": rows}, recipe="sft", out=tmp_path / "run", settings=settings,
        on_event=lambda event: notes.append(getattr(event, "line", "")),
    )  # fmt: skip
    assert "1 row without an answer to learn from left out" in notes
    assert any("chat template: plain" in note for note in notes)
    m = ch.load(tmp_path / "run")
    made = m.chat([{"role": "user", "content": "say blue"}], 20)
    assert (made.text.strip(), made.stop_reason) == ("blue!", "eos")
    assert done.metrics["loss"] < 0.2
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = ch.evaluate(m, tmp_path / "test.jsonl")
    assert (found.task, found.targets) == ("chat", sum(map(len, words)) + 3 * 4)
    assert abs(found.metrics["loss"] - done.metrics["loss"]) < 1e-4
