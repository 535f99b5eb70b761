"""Each filter against the exact distribution it promises."""

import json
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import clearhead as ch
from clearhead.app import cli
from clearhead.errors import InputError
from clearhead.run.generate.request import Request, keep_min_p, keep_top_k, keep_top_p, keep_typical
from clearhead.run.generate.sequence import (
    History,
    adjust,
    adjust_by,
    argmax,
    distribution,
    draw,
)
from tests import harness

PROBABILITIES = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [1, 5, 97, 4097])
def test_argmax_is_the_first_of_the_largest(rows, width):
    torch.manual_seed(rows)
    odd = torch.tensor([-math.inf, math.inf, math.nan, 0.0, -0.0])
    for values in (torch.randn(7), odd[:1], odd[:2], odd[3:], odd):
        logits = values[torch.randint(len(values), (rows, width))]
        ranks = [[(x != x, x) if x == x else (True, 0.0) for x in row] for row in logits.tolist()]
        assert argmax(logits).tolist() == [row.index(max(row)) for row in ranks]


def kept(logits):
    return logits.isfinite().nonzero().flatten().tolist()


@pytest.mark.ledger("G1")
def test_each_filter_keeps_what_it_says():
    logits = PROBABILITIES.log()
    assert kept(keep_top_k(logits, 2)) == [0, 1]
    assert kept(keep_top_p(torch.tensor([0.5, 0.3, 0.1, 0.1]).log(), 0.6)) == [0, 1]
    assert kept(keep_top_p(logits, 0.5)) == [0]
    assert kept(keep_top_p(logits, 0.81)) == [0, 1, 2]
    assert kept(keep_min_p(logits, 0.19)) == [0, 1, 2]
    assert kept(keep_min_p(logits, 1.0)) == [0]
    assert kept(keep_typical(logits, 0.25)) == [1]  # nearest to the entropy, not the most probable


@pytest.mark.ledger("G1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_smallest_p_keeps_the_best_token(dtype):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = (torch.randn(1, 1000, generator=generator) * 3).to(dtype)
        for filtered in (keep_top_p(logits, 1e-8), keep_min_p(logits, 1.0), keep_top_k(logits, 1)):
            assert filtered[0, logits[0].argmax()] == logits.amax()
        one = distribution(adjust(logits, Request()), Request(temperature=1.0, top_p=1e-8))
        assert one.count_nonzero() == 1
        assert logits[0, one.argmax()] == logits.amax()


@pytest.mark.ledger("G1")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.15},
        {"typical_p": 0.6},
        {"temperature": 0.5, "top_k": 8, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 15, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9},
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(options):
    """A chi-squared test of 200,000 draws, at odds of one in a million of failing by chance."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(20, generator=generator) * 1.5
    sampling = Request(**{"temperature": 1.0, **options})
    exact = reference(logits, sampling)
    n = 200_000
    uniform = torch.rand(n, generator=generator, dtype=torch.float64)
    counts = draw(distribution(logits[None], sampling).expand(n, -1), uniform).bincount(minlength=20).double()
    assert counts[exact == 0].sum() == 0
    support = exact > 0
    statistic = ((counts - n * exact)[support] ** 2 / (n * exact[support])).sum()
    freedom = int(support.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 12


def reference(logits, sampling):
    """The same filters, written as loops over sorted lists."""
    scores = [value / sampling.temperature for value in logits.double().tolist()]
    kept = set(range(len(scores)))

    def normalised():
        weights = {i: math.exp(scores[i]) for i in kept}
        return {i: w / sum(weights.values()) for i, w in weights.items()}

    def until(order, share, limit):
        total, chosen = 0.0, set()
        for i in order:
            chosen.add(i)
            total += share[i]
            if total >= limit:
                break
        return chosen

    if sampling.top_k:
        kept = set(sorted(kept, key=lambda i: -scores[i])[: sampling.top_k])
    if sampling.top_p < 1:
        share = normalised()
        kept = until(sorted(kept, key=lambda i: -share[i]), share, sampling.top_p)
    if sampling.min_p:
        share = normalised()
        kept = {i for i in kept if share[i] >= sampling.min_p * max(share.values())}
    if sampling.typical_p < 1:
        share = normalised()
        surprise = {i: -math.log(share[i]) for i in kept}
        entropy = sum(share[i] * surprise[i] for i in kept)
        kept = until(sorted(kept, key=lambda i: abs(surprise[i] - entropy)), share, sampling.typical_p)
    out = torch.zeros(len(scores), dtype=torch.float64)
    for i, value in normalised().items():
        out[i] = value
    return out


@pytest.mark.ledger("G1")
@pytest.mark.cpu
def test_a_history_followed_is_a_history_read():
    """Counted token by token, or all at once: the same penalties."""
    options = Request(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, no_repeat_ngram=3)
    tokens = torch.randint(6, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    logits, history = torch.randn(1, 6), History(tokens[:10], options, 6, torch.device("cpu"))
    for end in range(10, 60):
        history.follow(tokens[10:end])
        assert torch.equal(
            adjust_by(logits, options, [history]), adjust(logits, options, [tokens[:end]], [10])
        )
        seen = tokens[:end]
        banned = {seen[i + 2] for i in range(end - 2) if seen[i : i + 2] == seen[-2:]}
        assert set(range(6)) - set(kept(adjust_by(logits, options, [history])[0])) == banned


def test_penalties_and_repeats():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    out = adjust(logits, Request(repetition_penalty=2.0), [[0, 1]], [2])
    assert out.tolist() == [[1.0, -4.0, 1.0, 0.5]]
    out = adjust(logits, Request(presence_penalty=0.5, frequency_penalty=0.25), [[0, 2, 2, 3]], [1])
    assert out.tolist() == [[2.0, -2.0, 0.0, -0.25]]
    assert kept(adjust(logits, Request(no_repeat_ngram=3), [[1, 2, 3, 1, 2]], [0])[0]) == [0, 1, 2]
    assert kept(adjust(logits, Request(no_repeat_ngram=3), [[1, 2]], [0])[0]) == [0, 1, 2, 3]
    assert kept(adjust(logits, Request(no_repeat_ngram=1), [[1, 2]], [1])[0]) == [0, 3]
    assert kept(adjust(logits, Request(no_repeat_ngram=2), [[0, 3, 0]], [0])[0]) == [0, 1, 2]
    assert kept(adjust(logits, Request(banned=(0,), allowed=(0, 1, 2)))[0]) == [1, 2]


def test_a_bias_is_added_to_logits_and_log_probabilities_stay_the_models():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    biases = Request(logit_bias={0: -1.5, 2: 0.25})
    assert adjust(logits, biases).tolist() == [[0.5, -2.0, 1.25, 0.5]]
    assert adjust(logits.half(), biases).tolist() == [[0.5, -2.0, 1.25, 0.5]]
    assert kept(adjust(logits, Request(logit_bias={0: 100.0}, banned=(0,)))[0]) == [1, 2, 3]
    after = adjust(logits, Request(logit_bias={0: -1.5}, repetition_penalty=2.0), [[0]], [1])
    assert after.tolist() == [[0.25, -2.0, 1.0, 0.5]]  # biased first, as in transformers
    m = ch.Model(model_of("learned, full"))
    free = m.generate([5, 6, 7], 12, logprobs=True)
    for options in ({}, {"temperature": 0.9, "seed": 4}):
        made = m.generate([5, 6, 7], 12, logprobs=True, logit_bias={free.ids[0]: -100, 9: 6.0}, **options)
        assert free.ids[0] not in made.ids and 9 in made.ids
        scored = m.score([5, 6, 7, *made.ids]).logprobs[3:]
        assert made.logprobs == pytest.approx(scored, abs=1e-5)
    assert m.generate([5, 6, 7], 12, logit_bias={9: 100}).ids == [9] * 12


# Text in, text out -----------------------------------------------------------------------------------------


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


def model_of(name, seed=0, vocab_size=256):
    torch.manual_seed(seed)
    model = ch.Transformer(
        SHAPES[name].replace(vocab_size=vocab_size, init_std=0.3, max_positions=128)
    ).eval()
    return model


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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.generate([1] * 200, 5), "positions"),
        (lambda m: m.generate("text"), "tokenizer"),
        (lambda m: m.generate([1], stop="x"), "tokenizer"),
        (lambda m: m.score([1]), "two tokens"),
        (lambda m: m.score([1, 999]), "999"),
        (lambda m: m.generate([1.5]), "whole numbers"),
        (lambda m: m.generate([1], banned=(999,)), "vocabulary"),
        (lambda m: m.generate([1], logit_bias={999: 1.0}), "logit_bias names a token outside the vocabulary"),
        (lambda m: m.generate([1], banned=tuple(range(256))), "no token"),
        (lambda m: m.generate([1], alternatives=999), "alternatives"),
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
