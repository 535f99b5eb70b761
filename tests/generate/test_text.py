"""Text in, text out: a batch is its rows, streaming is not streaming, and stops stop."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import clearhead as ch
from clearhead.app import cli
from clearhead.errors import InputError
from clearhead.run.generate.decode import Prompts, decode
from clearhead.run.generate.request import Request
from clearhead.run.generate.stream import TextStream
from tests import harness

SHAPES = {
    "learned, full": ch.preset("micro-decoder"),
    "rope, grouped": ch.preset("micro-decoder").replace(
        n_kv_heads=1, positions="rope", norm="rmsnorm", gated=True, bias=False
    ),
    "windows, soft-caps": ch.preset("micro-decoder").replace(
        positions="rope",
        norm="rmsnorm",
        norm_position="sandwich",
        window=(5, None),
        attention_softcap=20.0,
        logit_softcap=10.0,
        bias=False,
    ),
    "relative, two stacks": ch.preset("micro-encoder-decoder").replace(
        positions="relative", attention_scale=1.0
    ),
    "learned, two stacks": ch.preset("micro-encoder-decoder").replace(positions="learned"),
}
TEXTS = [
    "plain words",
    "naïve café",
    "日本語のテキスト",
    "family 👨‍👩‍👧‍👦 and flag 🇩🇪",
    "e\u0301\u0323 combining",
    "שלום עולם",
    "a\tb\n\nc  d",
    "🤖" * 5,
]


@pytest.fixture(scope="module")
def byte_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=256, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return tokenizer


def model_of(name, seed=0, vocab_size=256):
    torch.manual_seed(seed)
    model = ch.Transformer(
        SHAPES[name].replace(vocab_size=vocab_size, init_std=0.3, max_positions=128)
    ).eval()
    return model


@pytest.mark.ledger("G3")
@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_is_its_rows(name):
    """Prompts of 1 to 40 tokens in one batch, rows that end at different times: each as it is alone."""
    m = ch.Model(model_of(name))
    prompts = [
        torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for length in (1, 2, 7, 19, 40)
    ]
    m.special = {"eos": 17, "decoder_start": 3}
    for options in ({}, {"temperature": 0.9, "top_k": 50, "seed": 5}):
        together = m.generate(prompts, max_new_tokens=25, **options)
        for prompt, made in zip(prompts, together):
            alone = m.generate(prompt, max_new_tokens=25, **options)
            assert made.ids == alone.ids
            assert made.stop_reason == alone.stop_reason


@pytest.mark.ledger("G2")
def test_cached_is_recomputed():
    model = model_of("windows, soft-caps")
    rows = decode(model, Request(max_new_tokens=20), Prompts([[1, 2, 3], [4] * 9]))
    for row in rows:
        ids = list(row.prompt)
        for token in row.ids:
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)


@pytest.mark.ledger("G4")
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_whole_text(text, byte_tokenizer):
    """Every token is one byte here, so each character of more than one byte comes in pieces."""
    ids = byte_tokenizer.encode(text).ids
    stream = TextStream(byte_tokenizer)
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert "".join(pieces) == byte_tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 2


@pytest.mark.ledger("G4")
def test_a_stop_string_may_straddle_tokens(byte_tokenizer):
    ids = byte_tokenizer.encode("one END two").ids
    stream = TextStream(byte_tokenizer, stop=["END"])
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped_by:
            break
    assert "".join(pieces) == stream.text == "one "
    assert stream.stopped_by == "END"
    held = TextStream(byte_tokenizer, stop=["END"])
    pieces = [held.push(token) for token in byte_tokenizer.encode("the EN").ids]
    assert "".join(pieces) == "the "  # it may yet become END
    assert held.finish() == "EN"


@pytest.mark.ledger("G4")
def test_streaming_changes_nothing(byte_tokenizer):
    m = ch.Model(model_of("rope, grouped"), byte_tokenizer)
    seen = {0: "", 1: ""}

    def add(number, text):
        seen[number] += text

    prompts = ["hello", "日本"]
    streamed = m.generate(prompts, 40, temperature=1.0, seed=3, on_text=add)
    plain = m.generate(prompts, 40, temperature=1.0, seed=3)
    assert [row.ids for row in streamed] == [row.ids for row in plain]
    assert [seen[0], seen[1]] == [row.text for row in plain]


@pytest.mark.ledger("G5")
def test_logprobs_equal_a_teacher_forced_score():
    m = ch.Model(model_of("learned, full"))
    made = m.generate([5, 6, 7], 12, temperature=0.8, seed=1, logprobs=True, alternatives=3)
    scored = m.score([5, 6, 7, *made.ids])
    assert scored.logprobs[0] is None
    assert max(abs(a - b) for a, b in zip(made.logprobs, scored.logprobs[3:])) <= 1e-5
    assert all(len(best) == 3 and best[0][1] >= best[1][1] for best in made.alternatives)
    logits = m.model(torch.tensor([scored.ids])).logits[0, :-1].double().log_softmax(-1)
    exact = -logits.detach()[torch.arange(len(scored.ids) - 1), scored.ids[1:]].mean()
    assert abs(scored.perplexity - float(exact.exp())) <= 1e-5 * float(exact.exp())


def test_score_with_a_source():
    m = ch.Model(model_of("learned, two stacks"), special={"decoder_start": 3})
    scored = m.score([8, 9], source=[1, 2, 4])
    logits = m.model(torch.tensor([[3, 8]]), source=torch.tensor([[1, 2, 4]])).logits[0].log_softmax(-1)
    assert scored.logprobs == pytest.approx([logits[0, 8].item(), logits[1, 9].item()], abs=1e-5)


def test_the_fast_copy_follows_the_weights():
    m = ch.Model(model_of("learned, full"))
    before = m.generate([1, 2], 20).ids
    with torch.no_grad():
        for parameter in m.model.parameters():
            parameter.add_(torch.randn_like(parameter))
    plain = decode(m.model, Request(max_new_tokens=20), Prompts([[1, 2]]))[0].ids
    assert m.generate([1, 2], 20).ids == plain != before


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.generate([1] * 200, 5), "positions"),
        (lambda m: m.generate([1], 0), "max_new_tokens"),
        (lambda m: m.generate([1], top_p=2.0), "top_p"),
        (lambda m: m.generate([1], temprature=1.0), "temperature"),
        (lambda m: m.generate("text"), "tokenizer"),
        (lambda m: m.generate([1], stop="x"), "tokenizer"),
        (lambda m: m.score([1]), "two tokens"),
        (lambda m: m.score([1, 999]), "999"),
        (lambda m: m.generate([1.5]), "whole numbers"),
        (lambda m: m.generate([1], banned=(999,)), "vocabulary"),
        (lambda m: m.generate([1], banned=tuple(range(256))), "no token"),
        (lambda m: m.generate([1], alternatives=999), "alternatives"),
        (lambda m: m.generate([1], temperature="warm"), "temperature"),
        (lambda m: m.generate([1], seed=None), "seed"),
        (lambda m: ch.Model(ch.Transformer(ch.preset("micro-encoder"))).generate([1]), "head"),
    ],
)
def test_mistakes_are_one_line(call, words):
    with pytest.raises(ch.InputError, match=words) as error:
        call(ch.Model(model_of("learned, full")))
    assert "\n" not in str(error.value)


@pytest.mark.ledger("K1")
def test_what_watches_a_model_sees_it_generate():
    m = ch.Model(model_of("rope, grouped"))
    plain = m.generate([1, 2, 3], 6).ids
    with ch.record(m.model, "blocks.0.resid_post") as seen:
        assert m.generate([1, 2, 3], 6).ids == plain
    assert len(seen.calls("blocks.0.resid_post")) == 6
    with ch.edit(m.model, {"logits": torch.zeros_like}):
        assert m.generate([1, 2, 3], 6).ids == [0] * 6
    with ch.attending(m.model, "eager"):
        assert m.generate([1, 2, 3], 6).ids == plain
    called = []
    hook = m.model.register_forward_hook(lambda *_: called.append(1))
    m.generate([1, 2, 3], 6)
    hook.remove()
    assert len(called) == 6
    assert m.generate([1, 2, 3], 6).ids == plain


def test_a_model_in_training_is_used_without_dropout_and_goes_on_training():
    config = ch.preset("micro-decoder").replace(vocab_size=256, n_experts=4, dropout=0.5)
    m = ch.Model(ch.Transformer(config).train())
    m.model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert m.score([1, 2, 3, 4]) == m.score([1, 2, 3, 4])
    assert m.generate([1, 2], 5).ids == m.generate([1, 2], 5).ids
    assert m.model.training


def test_the_fast_copy_follows_dtype():
    m = ch.Model(model_of("learned, full"))
    ids = m.generate([1, 2], 8).ids
    m.model.double()
    assert m.generate([1, 2], 8).ids == ids


def test_a_forced_first_token_is_scored_once():
    m = ch.Model(model_of("learned, two stacks"), special={"decoder_start": 2, "forced_bos": 0})
    logits = m.model(torch.tensor([[2, 0, 5]]), source=torch.tensor([[3, 4]])).logits[0].log_softmax(-1)
    wanted = [logits[0, 0].item(), logits[1, 5].item(), logits[2, 6].item()]
    assert m.score([0, 5, 6], [3, 4]).logprobs == pytest.approx(wanted, abs=1e-5)
    assert m.score([5, 6], [3, 4]).logprobs == pytest.approx(wanted, abs=1e-5)


def test_generating_leaves_the_global_generator_alone():
    m = ch.Model(model_of("learned, full"))
    torch.manual_seed(0)
    m.generate([1, 2], 4, temperature=1.0)
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))


def test_prompts_may_be_tensors():
    m = ch.Model(model_of("learned, full"))
    wanted = m.generate([1, 2, 3], 4).ids
    assert m.generate(torch.tensor([1, 2, 3]), 4).ids == wanted
    assert [made.ids for made in m.generate(torch.tensor([[1, 2, 3]] * 2), 4)] == [wanted] * 2


@pytest.mark.ledger("G1")
def test_penalties_reach_the_loop():
    model = model_of("learned, full")
    plain = decode(model, Request(max_new_tokens=30), Prompts([[1, 2, 3]]))[0].ids
    without = decode(model, Request(max_new_tokens=30, no_repeat_ngram=1), Prompts([[1, 2, 3]]))[0].ids
    assert len(set(without) | {1, 2, 3}) == 33
    assert len(set(plain)) < 30


@pytest.mark.cpu
def test_commands(byte_tokenizer, tmp_path, capsys):
    m = ch.Model(model_of("rope, grouped"), byte_tokenizer)
    m.save(tmp_path / "model")
    wanted = m.generate("hello", 12)
    cli.main(["generate", str(tmp_path / "model"), "hello", "--max-new-tokens", "12", "--json"])
    assert json.loads(capsys.readouterr().out)["ids"] == wanted.ids
    cli.main(["generate", str(tmp_path / "model"), "hello", "--max-new-tokens", "12", "--stream"])
    assert capsys.readouterr().out.rstrip("\n") == ("hello" + wanted.text).rstrip("\n")
    cli.main(["score", str(tmp_path / "model"), "hello", "--json"])
    assert json.loads(capsys.readouterr().out)["perplexity"] == pytest.approx(
        m.score("hello").perplexity, rel=1e-6
    )


@pytest.mark.parametrize("template", [None, "<s> $A", "<s> $A </s>", "$A </s>"])
def test_only_an_end_that_the_tokenizer_adds_is_left_out(template):
    vocabulary = {"a": 0, "b": 1, "</s>": 2, "<s>": 3, "[UNK]": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if template is not None:
        tokens = [(name, vocabulary[name]) for name in ("<s>", "</s>") if name in template]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
    m = ch.Model(model_of("learned, full"), tokenizer, special={"eos": 2, "bos": 3})
    begun = [3] if template is not None and template.startswith("<s>") else []
    assert m.prompt_ids("a b") == [*begun, 0, 1]
    assert m.prompt_ids("a b</s>") == [*begun, 0, 1, 2]
    assert m.prompt_ids("a</s></s>") == [*begun, 0, 2, 2]
    assert len(m.score("a b</s>").logprobs) == len(m.score("a b").logprobs) + 1


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"num_beams": 3}, {"lookup": 2}, {"banned": [1]}]
)
def test_logits_that_are_not_numbers_are_said(options):
    m = ch.Model(model_of("learned, full"))
    m.model.head.out.weight.data[5] = float("nan")
    with pytest.raises(ch.InputError, match="logits are not numbers"):
        m.generate([1, 2, 3], 6, **options)


def test_a_seed_that_no_generator_takes_is_refused():
    m = ch.Model(model_of("learned, full"))
    for seed in (2**70, 2**64, -(2**63) - 1):
        with pytest.raises(ch.InputError, match=rf"seed {seed} does not fit into 64 bits"):
            m.generate([1, 2], 3, temperature=1.0, seed=seed)
    assert len(m.generate([1, 2], 3, temperature=1.0, seed=2**64 - 1).ids) == 3


ONE, MANY, NONE = "one", "many", "must be text or a list of token ids|ids contain|is empty"
KINDS_OF_PROMPTS = [
    *((given, ONE) for given in ([1, 2], (1, 2), range(1, 3), torch.tensor([1, 2]), np.array([1, 2]))),
    *((given, ONE) for given in ([torch.tensor(1), torch.tensor(2)], [np.int64(1), np.uint8(2)])),
    *((given, ONE) for given in (np.array([1, 2], dtype=np.uint8), np.array([1, 2], dtype=object))),
    *((given, MANY) for given in ([[1, 2]], ((1, 2),), torch.tensor([[1, 2]]), np.array([[1, 2]]))),
    *((given, MANY) for given in ([torch.tensor([1, 2])], [np.array([1, 2])])),
    ([[torch.tensor(1), np.int8(2)]], MANY),
    *((given, NONE) for given in (torch.tensor(5), np.int64(5), np.array(5), 5, 5.0, True, None, object())),
    *((given, NONE) for given in (b"ab", bytearray(b"ab"), [b"ab"], {1: 2}, {1, 2}, iter([1, 2]))),
    *((given, NONE) for given in ([1.0, 2.0], [1.5], [float("nan")], [None], [True, False], [[True]])),
    *((given, NONE) for given in (torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1j]))),
    *((given, NONE) for given in ([-1], [10**6], [2**70], [-(2**70)], torch.tensor([-1]), [[1], [10**6]])),
    *((given, NONE) for given in ([1, "a"], [1, [2]], [[1], 2], [[1], None], [[[1]]])),
    (torch.ones(1, 2, 3).long(), NONE),
    *((given, NONE) for given in ([[]], [[1], []], torch.zeros(2, 0).long())),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(KINDS_OF_PROMPTS)))
def test_every_kind_of_prompt_is_ids_or_one_clear_line(number):
    """A number of a tensor is a number; what is no list of whole numbers is refused by name."""
    m = ch.Model(harness.build(vocab_size=64))
    given, expected = KINDS_OF_PROMPTS[number]
    if expected is NONE:
        with pytest.raises(InputError, match=NONE):
            m.generate(given, 2)
        return
    wanted, made = m.generate([1, 2], 2), m.generate(given, 2)
    assert made == (wanted if expected is ONE else [wanted])
    if expected is ONE:
        assert m.score(given) == m.score([1, 2])
