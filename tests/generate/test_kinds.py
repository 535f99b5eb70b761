"""Generation with every kind of attention: the tokens of one plain pass after another."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from tests.harness import build

KINDS = [
    "window(3, sinks=1)",
    "dilated(2, 2)",
    "strided(3)",
    "blocks(2, 1, 1, 0, 1)",
    "linear",
    "linear(favor, 16)",
    ("full", "gated-delta"),
]


def plainly(model: ch.Transformer, prompt: list[int], new: int) -> list[int]:
    """The best token after the whole text, again and again."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.ledger("J1", "J2", "M1")
@pytest.mark.parametrize("attention", KINDS, ids=str)
def test_tokens_are_those_of_plain_passes(attention):
    m = ch.Model(build(attention=attention, positions="rope", max_positions=64))
    first, second = [1, 2, 3], [4, 5, 6, 7, 8]
    expected = plainly(m.model, first, 12)
    assert m.generate(first, 12).ids == expected
    assert [row.ids for row in m.generate([first, second], 12)] == [expected, plainly(m.model, second, 12)]
    m.generate([1, 2, 3, 5], 4, reuse=True)
    assert m.generate(first, 12, reuse=True).ids == expected
    assert m.generate(first, 12, num_beams=1).ids == expected


@pytest.mark.parametrize("attention", KINDS, ids=str)
def test_beams_are_those_of_every_continuation(attention):
    """As many beams as continuations of two tokens: the best of all of them is found."""
    m = ch.Model(build(attention=attention, positions="rope", vocab_size=5))
    found = m.generate([1, 2, 3], 3, num_beams=25).ids
    scores = {}
    with torch.no_grad():
        for a in range(5):
            for b in range(5):
                logits = m.model(torch.tensor([[1, 2, 3, a, b]])).logits[0].log_softmax(-1)
                for c in range(5):
                    scores[a, b, c] = float(logits[2, a] + logits[3, b] + logits[4, c])
    assert tuple(found) == max(scores, key=scores.get)


def test_speculation_over_a_state_is_refused():
    m = ch.Model(build(attention=("full", "linear")))
    with pytest.raises(ch.InputError, match="cannot take a rejected token back"):
        m.generate([1, 2, 3], 4, lookup=2)
    with pytest.raises(ch.InputError, match="cannot take a rejected token back"):
        ch.Model(build()).generate([1, 2, 3], 4, draft=m)


@pytest.mark.parametrize("attention", ["linear", ("full", "gated-delta")], ids=str)
def test_pairs_of_tokens_are_refused_where_a_layer_has_no_scores_of_them(attention):
    model, ids = build(attention=attention), torch.tensor([[1, 2, 3]])
    kind = "linear" if attention == "linear" else "gated-delta"
    for name, given in (("bias", torch.zeros(1, 1, 3, 3)), ("prefix", torch.tensor([2]))):
        with pytest.raises(ch.InputError, match=f"{name} speaks of pairs of tokens, and attention {kind}"):
            model(ids, **{name: given})
