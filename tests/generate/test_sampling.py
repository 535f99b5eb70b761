"""Each filter against the exact distribution it promises."""

import math

import pytest
import torch

from clearhead.errors import InputError
from clearhead.run.generate.request import Request, keep_min_p, keep_top_k, keep_top_p, keep_typical
from clearhead.run.generate.sampling import (
    Dice,
    History,
    adjust,
    adjust_by,
    argmax,
    distribution,
    draw,
)

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


def test_temperature_zero_is_greedy():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(distribution(logits, Request()).argmax(-1), logits.argmax(-1))
    assert distribution(logits, Request()).max() == 1


def test_a_row_draws_the_same_alone_or_in_a_batch():
    alone = Dice([7])
    together = Dice([1, 7, 3])
    assert [alone.roll([0]).item() for _ in range(5)] == [
        together.roll([0, 1, 2])[1].item() for _ in range(5)
    ]


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


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"temperature": -1.0},
        {"min_p": 2.0},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"allowed": (1,), "banned": (1,)},
    ],
    ids=str,
)
def test_bad_options_are_one_line(options):
    with pytest.raises(InputError) as error:
        Request(**options)
    assert "\n" not in str(error.value)
