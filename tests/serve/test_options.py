"""Options of a server, such as a draft model: what a request gets is what `generate` gives it alone."""

from __future__ import annotations

import copy

import pytest
import torch

import clearhead as ch
from clearhead.errors import InputError
from clearhead.run.generate.speculate import DraftModel
from clearhead.run.serve import limits as limiting
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.kv_cache import ALL
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.speculation import TRIED
from clearhead.run.serve.status import Metrics
from tests.serve import mixes
from tests.serve.test_engine import served

PROMPT = list(range(20, 60))


# Draft tokens of a draft model ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "seed"),
    [("rope-gqa", 5), ("windows", 3), ("learned", 4), ("experts", 1), ("relative", 5), ("translator", 3)],
)
def test_a_mix_with_a_draft_model_equals_each_alone(shape, seed, byte_tokenizer):
    m = mixes.model(shape, byte_tokenizer)
    engine = mixes.mixed(m, seed, exact=bool(seed % 2), draft=mixes.near(m, 0.15))
    assert engine.stats.drafted > engine.stats.accepted > 0


@pytest.mark.parametrize("rows", [True, False])
def test_a_draft_model_leaves_every_bit_of_the_logits_and_takes_fewer_steps(
    rows, every_guess_pays, byte_tokenizer
):
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.special.clear()
    found = []
    for draft in (None, mixes.near(m)):
        engine = ServeEngine(m, Limits(block=4, exact=True, rows=rows, lookup=0), draft=draft)
        if not engine.exact:
            pytest.skip("on this machine the library's products depend on the number of rows")
        shared = {"max_new_tokens": 30, "alternatives": mixes.V}
        drawn = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2}
        seqs = [engine.submit(PROMPT, shared), engine.submit(PROMPT[5:], shared | drawn)]
        found.append(served(engine, *seqs))
    for plain, drafted in zip(*found):
        assert (plain.ids, plain.alternatives) == (drafted.ids, drafted.alternatives)
    assert found[1][0].steps < found[0][0].steps == 30


def test_a_draft_model_draws_with_the_numbers_that_the_model_draws_with(every_guess_pays, byte_tokenizer):
    """Sampled from a flat distribution, where the best token is rarely drawn, most draft tokens are right."""
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.special.clear()
    options = {"max_new_tokens": 60, "temperature": 5.0, "seed": 5}
    engine = ServeEngine(m, Limits(block=8), draft=mixes.near(m, 0.001))
    alone = m.generate(PROMPT, alternatives=1, **options)
    assert served(engine, engine.submit(PROMPT, options))[0].ids == alone.ids
    best = sum(token == top for token, ((top, _),) in zip(alone.ids, alone.alternatives))
    assert best < 12
    assert engine.stats.accepted > 0.6 * engine.stats.drafted > 0
    page = Metrics().text({"m": engine})
    assert f'num_draft_tokens_total{{model_name="m"}} {engine.stats.drafted}\n' in page


@pytest.mark.parametrize("rows", [True, False])
def test_the_models_own_mtp_layers_change_no_token(rows, every_guess_pays, byte_tokenizer):
    """Greedy, sampled, constrained, after a shared prefix and preemptions; drafts as generate has them."""
    m = mixes.model("rope-gqa", byte_tokenizer, n_mtp_layers=2)
    for name, weight in m.model.named_parameters():
        if ".out." in name or ".down." in name:  # blocks say little, and both see the last token alone:
            weight.data *= 0.1
        elif name.endswith("project.weight"):  # most drafts are right
            weight.data = torch.eye(len(weight)).repeat(1, 2) * torch.tensor([1.0, 0.1]).repeat_interleave(
                len(weight)
            )
    engine = ServeEngine(m, Limits(block=8, rows=rows, cache_tokens=160), draft="mtp")
    asked = [
        (PROMPT, {"max_new_tokens": 60}),
        (PROMPT[:24] + [7, 8], {"max_new_tokens": 50, "temperature": 1.0, "seed": 3}),
        (PROMPT, {"max_new_tokens": 25, "regex": "(ab|cd)+x"}),
    ]
    seqs = [engine.submit(*one) for one in asked]
    found = served(engine, *seqs)
    assert [one.ids for one in found] == [m.generate(ids, **options).ids for ids, options in asked]
    assert engine.stats.drafted > 0 and engine.stats.preempted > 0
    alone = ServeEngine(m, Limits(block=8, rows=rows), draft="mtp")
    seq = served(alone, alone.submit(PROMPT, {"max_new_tokens": 60}))[0]
    drafted = m.generate(PROMPT, 60, draft="mtp")
    assert (seq.ids, seq.steps) == (drafted.ids, drafted.steps) and seq.steps < 50
    with pytest.raises(InputError, match='draft "mtp" is for a model with MTP layers'):
        ServeEngine(mixes.model("rope-gqa", byte_tokenizer), draft="mtp")


def test_a_constraint_holds_with_a_draft_model(every_guess_pays, byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    engine, shared = ServeEngine(m, Limits(block=8), draft=m), {"regex": "(ab|cd)+x", "max_new_tokens": 25}
    asked = [{**shared, "temperature": 1.0, "seed": seed} for seed in range(3)]
    found = served(engine, *[engine.submit(PROMPT, options) for options in asked])
    assert [one.ids for one in found] == [m.generate(PROMPT, **options).ids for options in asked]
    assert engine.stats.drafted > 0


def test_a_draft_model_reads_long_texts_in_parts_and_its_cache_goes_with_the_request(
    every_guess_pays, byte_tokenizer, monkeypatch
):
    m, read = mixes.model("rope-gqa", byte_tokenizer), []
    m.special.clear()
    engine = ServeEngine(m, Limits(block=8, tokens=64), draft=mixes.near(m))
    kind = type(engine.speculation.draft)
    forward = kind.forward

    def watched(self, ids, *more, **named):
        if self is engine.speculation.draft:
            read.append(ids.shape[1])
        return forward(self, ids, *more, **named)

    monkeypatch.setattr(kind, "forward", watched)
    seq = engine.submit(PROMPT, {"max_new_tokens": 20})
    left = engine.submit(PROMPT[1:], {"max_new_tokens": 80})
    while not seq.done:
        engine.step()
    assert left.drafts is not None
    left.cancel()
    engine.step()
    assert max(read) == engine.speculation.chunk < len(PROMPT)
    assert seq.wait(0).ids == m.generate(PROMPT, 20).ids
    assert seq.wait(0).steps < 20
    assert seq.drafts is left.drafts is None


def test_a_draft_model_that_fails_or_costs_too_much_is_left_alone(byte_tokenizer, monkeypatch):
    m, proposed = mixes.model("rope-gqa", byte_tokenizer), []
    m.special.clear()
    wanted, broken = m.generate(PROMPT, 70).ids, copy.deepcopy(m)
    for weight in broken.model.parameters():
        weight.data[:] = float("nan")
    engine = ServeEngine(m, Limits(block=8), draft=broken)
    assert served(engine, engine.submit(PROMPT, {"max_new_tokens": 70}))[0].ids == wanted
    assert engine.stats.drafted == 0
    propose = DraftModel.propose

    def watched(self, tokens, most, roll):
        proposed.append(most)
        return propose(self, tokens, most, roll)

    monkeypatch.setattr(DraftModel, "propose", watched)
    engine = ServeEngine(m, Limits(block=8), draft=m)
    engine.speculation.price.of_one_more = lambda *given: 2.0
    assert served(engine, engine.submit(PROMPT, {"max_new_tokens": 70}))[0].ids == wanted
    assert (sum(proposed), engine.stats.drafted) == (70 // (TRIED + 1), 0)


@pytest.mark.parametrize(
    ("given", "limits", "message"),
    [
        ({"vocab_size": 255}, {}, "draft's vocab_size is 255"),
        ({"positions": "none", "attention": ("gated-delta", "full")}, {}, "keeps a state"),
        ({}, {"lookup": 4}, "lookup 4 with a draft model"),
        ({"head": "none"}, {}, "draft's head is none"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(given, limits, message, byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    with pytest.raises(InputError, match=message):
        ServeEngine(m, Limits(**limits), draft=mixes.model("learned", byte_tokenizer, **given))


# The KV cache in 8 bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "seed"),
    [("rope-gqa", 3), ("windows", 3), ("sinks", 1), ("capped", 4), ("states", 2), ("translator", 3)],
)
def test_a_mix_with_keys_in_8_bits_equals_each_alone(shape, seed, byte_tokenizer):
    """Token for token as `generate` with the same cache: in float64 no last bit decides over a code."""
    m = mixes.model(shape, byte_tokenizer)
    m.model.double()
    engine = mixes.mixed(m, seed, cache="int8", draft=mixes.near(m) if seed == 3 else None)
    assert engine.stats.drafted > 0 or seed != 3
    assert {part.dtype for parts in engine.pool.layers.values() for part in parts} == {
        torch.int8,
        torch.bfloat16,
    }


def test_keys_in_8_bits_in_float32_shared_between_prompts(byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.special.clear()
    engine = ServeEngine(m, Limits(block=8, cache="int8"))
    assert engine.model_runner.decode_runner is None  # kernels that read the pool read floats
    seqs = [engine.submit(PROMPT, {"max_new_tokens": 20, "logprobs": True})]
    served(engine, *seqs)
    seqs.append(engine.submit(PROMPT, {"max_new_tokens": 20, "logprobs": True}))
    alone, wide = (m.generate(PROMPT, 20, cache=cache, logprobs=True) for cache in ("int8", None))
    for found in served(engine, *seqs):
        assert found.ids == alone.ids
        assert max(abs(a - b) for a, b in zip(found.logprobs, alone.logprobs)) < 1e-2
    assert alone.logprobs != wide.logprobs
    assert seqs[1].cached == 32


def test_a_pool_in_8_bits_holds_nearly_four_times_the_tokens_in_the_same_bytes(monkeypatch):
    config = ch.ModelConfig(
        family="decoder",
        vocab_size=16,
        d_model=128,
        n_layers=2,
        n_heads=2,
        max_positions=10**6,
        positions="rope",
    )
    monkeypatch.setattr(limiting, "CACHE_BYTES", 1 << 22)
    pools = [
        limiting.pool_for(config.main, Limits(cache=cache), 10**6, torch.float32, torch.device("cpu"))
        for cache in (None, "int8")
    ]
    tokens = [pool.blocks[ALL].count * pool.size for pool in pools]
    used = [sum(part.nbytes for parts in pool.layers.values() for part in parts) for pool in pools]
    assert max(used) < 1.1 * (1 << 22)
    assert 3.7 < tokens[1] / tokens[0] < 4


# What a request may say of them -----------------------------------------------------------------------------


@pytest.mark.cpu  # on a GPU nothing is looked up
@pytest.mark.parametrize("name", ["lookup", "draft_tokens"])
def test_a_request_bounds_its_draft_tokens(name, every_guess_pays, byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.special.clear()
    text, options = [40, 41, 42] * 6, {"max_new_tokens": 20}
    for most, draft in ((1, None), (3, None), (1, m), (2, m), (50, m)):
        engine = ServeEngine(m, Limits(block=8), draft=draft)
        seqs = [engine.submit(text, {**options, name: most}), engine.submit(text, {**options, "lookup": 0})]
        read = [0, 0]
        while engine.busy:
            before = [seq.drafts for seq in seqs]
            engine.step()
            read = [max(old, len(one.found) if one else 0) for old, one in zip(read, before)]
        assert read == [min(most, engine.speculation.most), 0]
        assert {tuple(seq.wait(0).ids) for seq in seqs} == {tuple(m.generate(text, **options).ids)}


def test_options_that_ask_for_what_the_server_does_are_taken(byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    wanted = m.generate(PROMPT, 9, cache="int8").ids
    nothing = {"num_beams": 1, "num_return": 1, "compile": False, "reuse": True, "early_exit": None}
    engine = ServeEngine(m, Limits(block=8, cache="int8"))
    seqs = [
        engine.submit(PROMPT, {"max_new_tokens": 9, **more}) for more in ({}, {"cache": "int8", **nothing})
    ]
    assert [found.ids for found in served(engine, *seqs)] == [wanted] * 2
    with pytest.raises(InputError, match="cache 'int4' is not known"):
        Limits(cache="int4")
