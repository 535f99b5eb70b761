"""Every request comes out of the engine as it does alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import clearhead as ch
from clearhead.errors import BusyError, InputError
from clearhead.learn.tasks import reading, vectors
from clearhead.run.kernels import library
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.kv_cache import BlockPool, PrefixKey, chain
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.model_runner import CudaGraphRunner
from clearhead.run.serve.sequence import ServeOptions
from clearhead.run.serve.speculation import FEW, RowPrice
from clearhead.run.serve.status import Metrics
from tests import harness
from tests.serve import mixes

PROMPT = list(range(20, 60))


def served(engine: ServeEngine, *seqs):
    while engine.busy:
        engine.step()
    return [seq.wait(0) for seq in seqs]


@pytest.mark.parametrize("shape", mixes.SHAPES)
def test_a_mix_of_requests_equals_each_alone(shape, byte_tokenizer):
    assert mixes.mixed(mixes.model(shape, byte_tokenizer), seed=1).pool.used == 0


def heard(m: ch.Model, limits: Limits, texts: list[list[int]], watched: int, count: int):
    """Serve prompts together; return the log-probabilities of one of them, all tokens of each step."""
    engine = ServeEngine(m, limits)
    seqs = []
    for text in texts:
        seqs.append(
            engine.submit(text, {"max_new_tokens": count, "alternatives": mixes.V, "stop_tokens": []})
        )
        engine.step()
    found = served(engine, *seqs)[watched]
    return found.ids, found.alternatives, seqs[watched], engine


def products(enabled: bool):
    """A state of the process: a product in half precision that fails leaves plain ones to another library."""
    return torch.backends.mkldnn.flags(enabled=enabled)


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize(
    ("shape", "enabled", "cache"),
    [
        ("rope-gqa", True, None),
        ("windows", False, None),
        ("states", True, None),
        ("rope-gqa", True, "int8"),
        ("windows", False, "int8"),
    ],
)
@pytest.mark.slow
def test_logits_have_the_same_bits_whoever_is_in_the_batch(shape, enabled, cache, byte_tokenizer):
    """Alone, in company, after a preemption, and with a prefix that another request has read."""
    m = mixes.model(shape, byte_tokenizer)
    m.special.clear()
    with products(enabled):
        if not ServeEngine(m, Limits(exact=True)).exact:
            pytest.skip("on this machine the library's products depend on the number of rows")
        roomy = Limits(tokens=16, block=8, exact=True, cache=cache)
        ids, alone, *_ = heard(m, roomy, [PROMPT], 0, 12)
        others = [list(range(100 + n, 100 + n + 7 * n + 1)) for n in range(4)]
        assert heard(m, roomy, [*others, PROMPT], 4, 12)[:2] == (ids, alone)
        again = heard(m, roomy, [PROMPT[:33] + [5], *others, PROMPT], 5, 12)
        assert again[:2] == (ids, alone)
        assert (again[2].cached > 0) == (not any(kind.stateful for kind in m.config.main.kinds))
        tight = heard(m, replace(roomy, cache_tokens=80), [list(range(100, 130)), PROMPT], 1, 12)
        assert tight[:2] == (ids, alone)
        assert tight[2].preempted > 0


def test_blocks_are_found_by_their_tokens_and_never_by_their_digest_alone():
    blocks, (first, second) = BlockPool(4), chain("", [1, 2, 3, 4], 2)
    one = blocks.take(None)
    blocks.name(one, first)
    assert blocks.find(first) == one
    assert blocks.find(second) is None
    # A collision: another block under the same digest.
    blocks.named[one] = PrefixKey(first.parent, (9, 9))
    assert blocks.find(first) is None
    assert chain("a", [1, 2], 2)[0].digest != first.digest


def test_a_shared_prefix_is_read_once(byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    engine = ServeEngine(m, Limits(block=8))
    first = served(engine, engine.submit(PROMPT, {"max_new_tokens": 3}))[0]
    read = engine.stats.prompt_tokens
    seq = engine.submit(PROMPT, {"max_new_tokens": 3})
    assert served(engine, seq)[0].ids == first.ids
    assert (seq.cached, engine.stats.prompt_tokens - read) == (32, 8)
    other = engine.submit(PROMPT, {"max_new_tokens": 3}, ServeOptions(salt="another tenant"))
    assert served(engine, other)[0].ids == first.ids
    assert other.cached == 0


def test_a_window_frees_the_blocks_behind_it(byte_tokenizer):
    m = mixes.model("sinks", byte_tokenizer)
    m.special.clear()
    engine = ServeEngine(m, Limits(block=2, tokens=4, running=1))
    seq = engine.submit(PROMPT, {"max_new_tokens": 30})
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine.pool.used)
    assert seq.wait(0).ids == m.generate(PROMPT, max_new_tokens=30).ids
    assert most <= 8  # two tokens each: sinks, a window of 5, a step of 4, and cut blocks at both ends


def test_a_cancelled_request_frees_its_blocks_at_the_next_step(byte_tokenizer):
    engine = ServeEngine(mixes.model("learned", byte_tokenizer), Limits(block=4))
    seq = engine.submit(PROMPT, {"max_new_tokens": 50})
    engine.step()
    assert engine.pool.used > 0
    seq.cancel()
    engine.step()
    assert (engine.pool.used, engine.busy, seq.wait(0).stop_reason) == (0, False, "cancelled")


def test_a_deadline_ends_a_request_that_waits(byte_tokenizer):
    engine = ServeEngine(mixes.model("learned", byte_tokenizer))
    seq = engine.submit(PROMPT, {"seconds": 1e-9})
    engine.step()
    assert seq.wait(0).stop_reason == "time"


def test_the_line_has_an_end(byte_tokenizer):
    engine = ServeEngine(mixes.model("learned", byte_tokenizer), Limits(waiting=1, running=1))
    for _ in range(2):
        engine.submit(PROMPT)
    with pytest.raises(BusyError, match="2 requests with 80 tokens"):
        engine.submit(PROMPT)
    engine.submit(PROMPT, joined=True)  # one more text of a request that was let in
    engine = ServeEngine(mixes.model("learned", byte_tokenizer), Limits(waiting_tokens=60))
    engine.submit(PROMPT)
    with pytest.raises(BusyError, match="at most 8 and 60"):
        engine.submit(PROMPT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams 4 is not served"),
        ({"num_return": 2}, "num_return 2 is not served.*: send n"),
        ({"lookup": -1}, "lookup -1 must be"),
        ({"compile": True}, "compile True is not served"),
        ({"early_exit": 0.5}, "early_exit 0.5 is not served"),
        ({"cache": "int8"}, "cache int8 is not served.*: start it with --cache int8"),
        ({"overflow": "slide"}, 'overflow "slide" is not served'),
        ({"temprature": 1}, "did you mean"),
        ({"max_new_tokens": 120}, "maximum context length is 128"),
    ],
)
def test_what_is_not_served_is_refused_by_name(options, message, byte_tokenizer):
    engine = ServeEngine(mixes.model("learned", byte_tokenizer))
    with pytest.raises(InputError, match=message):
        engine.submit(PROMPT, options)
    assert not engine.busy


def test_a_text_longer_than_the_pool_is_refused(byte_tokenizer):
    engine = ServeEngine(mixes.model("alibi", byte_tokenizer), Limits(block=4, cache_tokens=40))
    with pytest.raises(InputError, match="does not fit into the 40"):
        engine.submit(PROMPT, {"max_new_tokens": 9})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"depth_capacity": 0.5}, "depth_capacity"),
        ({"positions": "rope", "rope_scaling": ch.RopeScaling(kind="dynamic", factor=2.0)}, "dynamic"),
    ],
)
def test_models_that_choose_tokens_or_angles_by_the_batch_are_refused(given, named):
    with pytest.raises(InputError, match=named):
        ServeEngine(ch.Model(harness.build(**given)))


def test_damaged_weights_end_one_request_and_not_the_others(byte_tokenizer):
    m = mixes.model("learned", byte_tokenizer)
    with torch.no_grad():
        m.model.main.embedding.front.tokens.weight[7] = float("nan")
    engine = ServeEngine(m)
    fine, ill = engine.submit(PROMPT, {"max_new_tokens": 4}), engine.submit([20, 7], {"max_new_tokens": 4})
    while engine.busy:
        engine.step()
    with pytest.raises(InputError, match="not numbers"):
        ill.wait(0)
    assert fine.error is None or "not numbers" in str(fine.error)  # tied weights: every logit of id 7
    assert engine.pool.used == 0


def test_log_probabilities_of_the_prompt_equal_scores(byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    engine = ServeEngine(m, Limits(block=8, tokens=16))
    serving = ServeOptions(prompt_logprobs=2, prefill_only=True)
    seqs = [engine.submit(PROMPT, {}, serving) for _ in range(2)]
    for seq, found in zip(seqs, served(engine, *seqs)):
        assert found.ids == []
        wanted = m.score(PROMPT).logprobs[1:]
        assert max(abs(a - b) for a, b in zip(seq.prompt_logprobs, wanted, strict=True)) < 1e-5
        assert [len(best) for best in seq.prompt_alternatives] == [2] * (len(PROMPT) - 1)


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("enabled", [True, False])
def test_requests_that_read_take_turns_with_those_that_write(enabled, byte_tokenizer):
    """Vectors of texts of unequal length have the same bits alone and in company."""
    m = mixes.model("learned", byte_tokenizer, family="encoder", head="none", n_types=2)
    engine = ServeEngine(m, Limits(exact=True))
    texts = ["a", "two words", "a longer text than the others " * 2]

    def embed(bundle, every):
        return vectors.embed(bundle, every)

    with products(enabled):
        exact = engine.exact
        both = engine.read(texts, embed), engine.read(texts[1:2], embed)
        engine.step()
        alone = engine.read(texts[1:2], embed)
        engine.step()
    together, more = (torch.stack(one.wait(0)) for one in both)
    assert harness.worst(together, m.embed(texts)) < 1e-5
    for one, other in ((more[0], alone.wait(0)[0]), (more[0], together[1])):
        assert torch.equal(one, other) if exact else harness.worst(one, other) < 1e-6


@pytest.mark.cpu  # a GPU reads larger portions
def test_many_texts_are_read_in_portions_between_which_others_get_their_turn(byte_tokenizer):
    """A request for many vectors does not keep others waiting, nor the server from ending."""
    m = mixes.model("learned", byte_tokenizer, family="encoder", head="none")
    engine, calls = ServeEngine(m), []

    def embed(bundle, every):
        calls.append(every)
        return vectors.embed(bundle, every)

    texts = [f"text {number}" for number in range(150)]
    many, few = engine.read(texts, embed), engine.read(["one"], embed)
    long = engine.read(["x" * 5000] * 4, embed)
    engine.step()
    assert not many.done.is_set() and engine.busy
    engine.step()
    assert few.done.is_set() and not many.done.is_set()
    while engine.busy:
        engine.step()
    assert max(map(len, calls)) == 64
    assert max(sum(map(len, every)) for every in calls) < 5000 + 8192
    assert harness.worst(torch.stack(many.wait(0)), m.embed(texts)) < 1e-5
    assert len(long.wait(0)) == 4
    left = engine.read(texts, embed)
    engine.close()
    with pytest.raises(BusyError, match="ended"):
        left.wait(0)


def test_a_reading_at_fault_leaves_the_others_alone(byte_tokenizer):
    m = mixes.model("learned", byte_tokenizer, family="encoder", head="mlm")
    m.special["mask"] = 1
    engine = ServeEngine(m)

    def fill(bundle, every):
        return reading.fill(bundle, every)

    masked = byte_tokenizer.decode([1])
    fine, ill = engine.read([f"x{masked}"], fill), engine.read(["nothing"], fill)
    engine.step()
    assert fine.wait(0)[0][0][0].text == m.fill(f"x{masked}")[0].text
    with pytest.raises(InputError, match="mask"):
        ill.wait(0)


def test_the_thread_serves_and_drains(byte_tokenizer):
    m = mixes.model("learned", byte_tokenizer)
    engine = ServeEngine(m)
    engine.start()
    told: list[str] = []
    seq = engine.submit("Hello", {"max_new_tokens": 8}, on_update=lambda seq, new: told.append(new))
    assert seq.wait(60).text == m.generate("Hello", 8).text == "".join(told)
    late = engine.submit("Hello", {"max_new_tokens": 8})
    engine.close(drain=60)
    assert late.wait(0).text == seq.wait(0).text
    with pytest.raises(BusyError, match="ending"):
        engine.submit("Hello")


@pytest.mark.cpu
@pytest.mark.skipif(library.library() is None, reason="no C compiler, or other threads than GNU's")
@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize(
    "shape", ["learned", "rope-gqa", "alibi", "windows", "sinks", "relative", "translator"]
)
def test_the_step_in_c_reads_the_pool_as_the_ragged_row_does(shape, rows, byte_tokenizer):
    """Logits of every step agree, in scattered blocks too, and their bits are those of any number of rows."""
    m = mixes.model(shape, byte_tokenizer)
    m.special.clear()
    texts = [list(range(30 + 3 * n, 47 + 5 * n)) for n in range(rows)]
    found = []
    for limits in (Limits(block=4, exact=True), Limits(block=4, exact=True, rows=False)):
        engine = ServeEngine(m, limits)
        assert (engine.model_runner.decode_runner is not None) == limits.rows
        seqs = [engine.submit(text, {"max_new_tokens": 9, "alternatives": mixes.V}) for text in texts]
        found.append([dict(best) for one in served(engine, *seqs) for best in one.alternatives])
        alone = engine.submit(texts[-1], {"max_new_tokens": 9, "alternatives": mixes.V})
        if engine.exact:
            assert served(engine, alone)[0].alternatives == seqs[-1].wait(0).alternatives
    for one, other in zip(*found, strict=True):
        assert max(abs(one[token] - other[token]) for token in other) < 2e-5


@pytest.mark.parametrize("shape", ["learned", "rope-gqa", "window"])
def test_recorded_steps_write_what_the_ragged_row_writes(shape, byte_tokenizer):
    """The formulas of the kernels, with rows and blocks that fill a size up; the kernels run on a GPU."""
    given = {"window": {**mixes.SHAPES["rope-gqa"], "attention": "window(5)", "qk_norm": "head"}}
    changes = given.get(shape, {"norm": "rmsnorm"})
    m = mixes.model("learned" if shape == "window" else shape, byte_tokenizer, **changes)
    m.special.clear()
    texts = [list(range(30 + 3 * n, 47 + 5 * n)) for n in range(5)]
    engine = ServeEngine(m, Limits(block=16, chunk=16, running=3))
    engine.model_runner.decode_runner = CudaGraphRunner(m.model, 3)
    seqs = [engine.submit(text, {"max_new_tokens": 12, "logprobs": True}) for text in texts]
    for text, found in zip(texts, served(engine, *seqs)):
        alone = m.generate(text, 12, logprobs=True)
        assert found.ids == alone.ids
        assert max(abs(a - b) for a, b in zip(found.logprobs, alone.logprobs)) < 1e-4
    assert engine.model_runner.decode_runner.steps.keys() >= {(4, 8), (2, 8)}
    assert engine.pool.used == 0


# Draft tokens from a request's own text change nothing but the number of steps ------------------------------


LOOP = [40, 41, 42] * 6


@pytest.mark.cpu  # on a GPU nothing is guessed
@pytest.mark.parametrize(
    ("shape", "seed"),
    [("rope-gqa", 12), ("windows", 82), ("sinks", 17), ("relative", 42), ("translator", 21)],
)
def test_a_mix_of_repeating_texts_equals_each_alone(shape, seed, byte_tokenizer):
    engine = mixes.mixed(mixes.model(shape, byte_tokenizer), seed, guessing=True, exact=bool(seed % 2))
    assert engine.stats.drafted > engine.stats.accepted > 0


@pytest.mark.parametrize("rows", [True, False])
def test_guesses_leave_every_bit_of_the_logits_and_take_fewer_steps(rows, every_guess_pays, byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.special.clear()
    found = []
    for lookup in (0, 5):
        engine = ServeEngine(m, Limits(block=4, exact=True, rows=rows, lookup=lookup))
        if not engine.exact:
            pytest.skip("on this machine the library's products depend on the number of rows")
        seqs = [
            engine.submit(text, {"max_new_tokens": 30, "alternatives": mixes.V}) for text in (LOOP, PROMPT)
        ]
        found.append(served(engine, *seqs))
    for plain, guessed in zip(*found):
        assert (plain.ids, plain.alternatives) == (guessed.ids, guessed.alternatives)
    assert found[1][0].steps < found[0][0].steps == 30


@pytest.mark.cpu  # on a GPU nothing is guessed
def test_a_stop_string_or_a_client_that_goes_ends_a_text_within_its_guesses(every_guess_pays, byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.special.clear()
    whole = m.generate(LOOP, 40)
    stops = [whole.text[place : place + 3] for place in range(8, 30, 3)]
    engine = ServeEngine(m, Limits(block=2, running=2, waiting=99))
    told = []

    def leave(seq, new):
        told.append(new)
        if len(told) == 17:
            seq.cancel()

    left = engine.submit(LOOP, {"max_new_tokens": 40}, on_update=leave)
    seqs = [engine.submit(LOOP, {"max_new_tokens": 40, "stop": [stop]}) for stop in stops]
    for stop, found in zip(stops, served(engine, *seqs)):
        alone = m.generate(LOOP, 40, stop=[stop])
        assert (found.ids, found.text, found.stop_reason) == (alone.ids, alone.text, "stop")
    assert left.wait(0).stop_reason == "cancelled"
    assert left.wait(0).ids == whole.ids[: len(left.wait(0).ids)]
    assert engine.stats.accepted > 0
    assert engine.pool.used == 0


@pytest.mark.parametrize("lookup", [0, pytest.param(6, marks=pytest.mark.cpu)])
def test_rows_of_one_text_see_each_other_in_recorded_steps(lookup, every_guess_pays, byte_tokenizer):
    """What was written is read again after a preemption, several tokens of a text in one step."""
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.special.clear()
    engine = ServeEngine(m, Limits(block=16, cache_tokens=96, lookup=lookup))
    engine.model_runner.decode_runner = CudaGraphRunner(m.model, 32)
    texts = [LOOP, LOOP[1:], PROMPT[:9]]
    seqs = [engine.submit(text, {"max_new_tokens": 25, "logprobs": True}) for text in texts]
    for text, found in zip(texts, served(engine, *seqs)):
        alone = m.generate(text, 25, logprobs=True)
        assert found.ids == alone.ids
        assert max(abs(a - b) for a, b in zip(found.logprobs, alone.logprobs)) < 1e-4
    assert engine.stats.preempted > 0
    assert (engine.stats.drafted > 0) == bool(lookup)


@pytest.mark.cpu  # on a GPU nothing is guessed
def test_a_guess_is_read_where_it_pays(byte_tokenizer):
    """A row has the price that steps had so far; drafts that fail, or come in a crowd, are not read."""
    price = RowPrice()
    for rows in (1, 1, 1, 3, 2):
        price.keep(rows, 0.024 + 0.008 * rows)
    assert price.of_one_more(1, 1.0) == pytest.approx(0.008 / 0.032)
    assert price.of_one_more(4, 3.0) == pytest.approx(3 * 0.008 / 0.056)
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.special.clear()

    def guessed(texts, **options):
        engine = ServeEngine(m, Limits(waiting=99))
        engine.speculation.price.of_one_more = lambda rows, tokens: 0.4
        seqs = [engine.submit(text, {"max_new_tokens": 40, **options}) for text in texts]
        served(engine, *seqs)
        page = Metrics().text({"m": engine})
        assert f'num_draft_tokens_total{{model_name="m"}} {engine.stats.drafted}\n' in page
        assert f'num_accepted_tokens_total{{model_name="m"}} {engine.stats.accepted}\n' in page
        return engine.stats

    circles = guessed([LOOP])
    assert circles.accepted > 20
    assert circles.steps < 25
    assert guessed([LOOP], temperature=50.0, seed=0).drafted == 0  # nothing comes twice
    assert guessed([LOOP] * (FEW + 1)).drafted == 0
