"""DraftTokens from a request's own text change nothing but the number of steps."""

from __future__ import annotations

import pytest

from clearhead.run.serve.cuda_graph import CudaGraphRunner
from clearhead.run.serve.engine import FEW, RowPrice, ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.status import Metrics
from tests.serve import mixes
from tests.serve.test_engine import PROMPT, served

LOOP = [40, 41, 42] * 6


@pytest.fixture
def every_guess_pays(monkeypatch):
    monkeypatch.setattr(RowPrice, "of_one_more", lambda *given: -1.0)


@pytest.mark.cpu  # on a GPU nothing is guessed
@pytest.mark.parametrize(
    ("shape", "seed"),
    [("rope-gqa", 12), ("windows", 80), ("sinks", 15), ("relative", 42), ("translator", 21)],
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
    assert guessed([LOOP], temperature=50.0).drafted == 0  # nothing comes twice
    assert guessed([LOOP] * (FEW + 1)).drafted == 0
