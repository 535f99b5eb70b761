"""What is asked of a pass that is kept equals what a pass of its own gives."""

import pytest
import torch

from clearhead.inside import inputs, names
from clearhead.inside.attribution import looks
from clearhead.inside.inputs import cached_pass, prepare
from clearhead.inside.lens import followed, stopped_at
from clearhead.inside.memories import memories, read_corpus
from clearhead.inside.trace import _peek
from tests.explorer.toys import toy

TEXT = "they shall speak of England"


@pytest.mark.ledger("K3")
@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
@pytest.mark.parametrize("largest", [2**24, 0])
def test_gradients_of_a_kept_pass(family, largest, monkeypatch):
    monkeypatch.setattr(inputs, "LARGEST_GRAPH", largest)
    m = toy(family)
    kept = cached_pass(prepare(m, TEXT, *(["it"] if family == "encoder-decoder" else [])))
    for head, reader, source in (("1.2", 1, 0), ("1.0", 1, 1)):
        fresh = looks(
            m,
            prepare(m, kept.tokens.ids if kept.source is None else TEXT, *_target(kept)),
            head,
            reader,
            source,
        )
        again = [looks(m, kept, head, reader, source) for _ in range(2)]
        for found in again:
            assert [edge.part for edge in found[:5]] == [edge.part for edge in fresh[:5]]
            assert [edge.value for edge in found] == pytest.approx([edge.value for edge in fresh], abs=1e-6)
    assert ("_graph" in kept.__dict__) == bool(largest)
    kept.forget()
    assert not {"_graph", "_pass"} & set(kept.__dict__)


def _target(kept):
    return [] if kept.source is None else [kept.tokens.ids]


@pytest.mark.ledger("K3")
def test_a_corpus_is_read_once_for_any_neurons():
    m, names = toy("decoder"), ["0.3", "1.7", "1.2"]
    texts = [TEXT, "the king's men shall not", "England"]
    whole, some = read_corpus(m, texts, top=3), memories(m, texts, top=3, neurons=names)
    found = whole.judged(names)
    assert (whole.texts, whole.tokens) == (3, some.tokens)
    assert [found.neuron(name) for name in names] == [some.neuron(name) for name in names]
    all_of_them = whole.judged().neuron("0.3")
    assert all_of_them.contexts == some.neuron("0.3").contexts
    assert [name for name, _ in all_of_them.promoted] == [name for name, _ in some.neuron("0.3").promoted]
    kept = read_corpus(m, [cached_pass(prepare(m, TEXT))], top=3).judged(names)
    assert kept.neuron("1.7").contexts == memories(m, [TEXT], top=3, neurons=names).neuron("1.7").contexts


@pytest.mark.ledger("K3")
@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder", "tagger"])
def test_a_second_choice_is_followed_without_reading_the_vocabulary_again(family, monkeypatch):
    """The shares are those of a softmax over every choice; a kept pass multiplies by one row for the next."""
    m = toy(family)
    kept = cached_pass(prepare(m, TEXT, *(["it"] if family == "encoder-decoder" else [])))
    states = names.states(m.model.main.spec)
    whole = torch.stack([stopped_at(m.model, kept.record(tap)[1][tap])[0].softmax(-1) for tap in states])
    widths = []
    monkeypatch.setattr(
        "clearhead.inside.lens.stopped_at",
        lambda *given: widths.append((made := stopped_at(*given)).shape[-1]) or made,
    )
    for choice in (1, 2):
        widths.clear()
        found = followed(m, kept, choice)
        torch.testing.assert_close(found, whole[..., choice], atol=1e-6, rtol=1e-5)
    assert set(widths) == ({m.config.n_classes} if family == "tagger" else {1})
    kept.forget()
    assert "log_sums" not in kept.__dict__


@pytest.mark.ledger("K3")
def test_some_columns_are_those_of_all_and_a_peek_leaves_out_what_is_masked():
    m = toy("decoder")
    assert followed(m, TEXT, 7, columns=[1, 3]) == pytest.approx(followed(m, TEXT, 7)[:, [1, 3]], abs=1e-6)
    x = torch.randn(3, 5, 5)
    masked = x.masked_fill(torch.ones(5, 5).triu(1).bool(), torch.finfo(x.dtype).min)
    seen = x[:, torch.ones(5, 5).tril().bool()].double()
    peek = _peek(masked)
    figures = [seen.mean(), seen.std(correction=0), seen.min(), seen.max()]
    assert [peek.mean, peek.std, peek.min, peek.max] == pytest.approx(
        [float(one) for one in figures], abs=1e-6
    )
