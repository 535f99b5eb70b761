"""Attribution: paths, occlusion, neurons and steering equal the loop or the sum that defines them; what is
computed from a cached pass equals a pass of its own.
"""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

import clearhead as ch
from clearhead.errors import InputError
from clearhead.inside.attention import attention
from clearhead.inside.attribution import Edge, looks, occlusion, paths, reads
from clearhead.inside.geometry import similarity
from clearhead.inside.inputs import cached_pass, choices_of, prepare
from clearhead.inside.interventions import steering, steering_vector
from clearhead.inside.lens import best_choices, contributions, followed, lens, stopped_at
from clearhead.inside.logit_attribution import LogitQuery, firing, parts_of
from clearhead.inside.memories import memories, read_corpus
from clearhead.inside.names import states
from clearhead.inside.trace import _peek
from tests.explorer.toys import TEXTS, picture, toy
from tests.harness import build
from tests.inside.test_lens import HEADS, IDS, PLACES, inputs

pytestmark = pytest.mark.ledger("K3", "K6")
CASES = {
    **{f"decoder, {place}": changes for place, changes in PLACES.items()},
    **{f"encoder, {place}": {"family": "encoder", **PLACES[place]} for place in ("pre", "post")},
    **{f"both, {place}": {"family": "encoder-decoder", **PLACES[place]} for place in ("pre", "post")},
    **HEADS,
    "rope, sink": {"positions": "rope", "attention_sink": True, "n_kv_heads": 2},
}


def test_sources_add_up_to_the_logit_and_to_each_head():
    for number, (name, changes) in enumerate(CASES.items()):
        model = build(**changes)
        given, more = inputs(model.config)
        against = [None, 1][number % 2]
        found = paths(model, given, 0, **more, against=against)
        assert found.total == pytest.approx(found.logit, abs=1e-4), name
        parts = contributions(model, given, 0, **more, against=against).terms
        listed = {term.name: term.value for term in parts}
        for part, table in found.direct.items():
            for head, value in enumerate(table.sum((1, 2)).tolist()):
                assert value == pytest.approx(listed.pop(f"{part}.{head}"), abs=1e-5), (name, part)
        assert {term.name: term.value for term in found.terms} == pytest.approx(listed, abs=1e-6), name
        memory = 0 if found.memory is None else float(found.memory.sum())
        assert (found.memory is not None) == (model.config.family == "encoder-decoder"), name
        assert memory + float(found.sources.sum()) == pytest.approx(found.total - found.rest, abs=1e-4), name


def test_what_moved_most_came_from_another_token():
    """A head that reads its own token moves nothing: it leads only where no other speaks for it."""
    made = paths(build(), IDS, 0)
    last = made.rows[0]
    table = torch.zeros(2, 1, len(IDS))
    table[0, 0, last], table[1, 0, 1], table[0, 0, 2] = 3.0, 2.0, -4.0

    def leading(name: str) -> Edge | None:
        return replace(made, direct={name: table}).leading()

    assert leading("1") == Edge("1.1", last, 1, 2.0)
    assert leading("cross.1") == Edge("cross.1.0", last, last, 3.0)  # the same number, another text
    table[1] = 0
    assert leading("1") == Edge("1.0", last, last, 3.0)
    table[0, 0, last] = 0
    assert leading("1") is None


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_looks_are_slopes_of_the_log_odds(family):
    """What an earlier head carried, times the slope: a finite difference of the log-odds gives the same."""
    model = build(
        family=family, n_experts=3
    ).double()  # mixtures are no sums: see test_graph for those that are
    given, more = inputs(model.config)
    head = "cross.1.2" if more else "1.2"
    tap = "blocks.1.cross" if more else "blocks.1.attention"
    found = looks(model, given, head, 3, 2, **more, count=10_000).edges
    assert [abs(edge.value) for edge in found] == sorted((abs(edge.value) for edge in found), reverse=True)
    edge = next(edge for edge in found if edge.part.startswith("encoder.0." if more else "0."))
    number, part = int(edge.part.split(".")[-1]), "encoder.blocks.0" if more else "blocks.0"
    main = {"source": torch.tensor([given])} if more else {}
    ids = torch.tensor([more.get("target", given)])

    def odds(step: float) -> float:
        def change(z):
            z = z.clone()
            z[0, number, edge.reader] += step * carried
            return z

        changes = ch.edit(model, {f"{part}.attention.z": change})
        with torch.no_grad(), changes, ch.record(model, f"{tap}.scores") as seen:
            model(ids, **main)
        scores = seen[f"{tap}.scores"][0, 2, 3]
        return float(scores[2] - torch.cat([scores[:2], scores[3:]]).logsumexp(0))

    with torch.no_grad(), ch.record(model, f"{part}.attention.*") as before:
        model(ids, **main)
    pattern, v = (before[f"{part}.attention.{name}"][0, number] for name in ("pattern", "v"))
    carried = pattern[edge.reader, edge.source] * v[edge.source]
    assert (odds(1e-4) - odds(-1e-4)) / 2e-4 == pytest.approx(edge.value, rel=1e-5, abs=1e-8)


def test_what_cannot_be_asked_is_said():
    with pytest.raises(InputError, match="no reader 99"):
        looks(build(), IDS, "0.0", 99, 0)
    with pytest.raises(InputError, match="no source -1"):
        looks(build(), IDS, "0.0", 2, -1)
    with pytest.raises(InputError, match=r'no head "7\.0"'):
        looks(build(), IDS, "7.0", 2, 1)


# Occlusion, neurons, directions, similarity -----------------------------------------------------------------


FAMILIES = ("decoder", "encoder", "encoder-decoder", "classifier", "tagger", "vit")


def given(family):
    return picture(3) if family == "vit" else TEXTS.get(family, "They shall speak of England")


def scores(m, prepared, main):
    """The scores of changed inputs, one forward pass each, less their mean."""
    with torch.no_grad():
        logits = m.model(**prepared.arguments | {"ids": main}).logits
    centred = choices_of(prepared).scores(logits)[0]
    return centred - centred.mean(-1, keepdim=True)


@pytest.mark.parametrize("family", ["classifier", "tagger", "encoder", "vit"])
def test_occlusion_is_a_loop_of_forward_passes(family):
    m = toy(family)
    prepared = prepare(m, given(family))
    found = occlusion(m, given(family), position=-1)
    column = found.column
    before = scores(m, prepared, prepared.main)[column]
    choice = int(before.argmax())
    assert found.choice == choices_of(prepared).name(choice)
    assert found.logit == pytest.approx(float(before[choice]), abs=1e-5)
    assert len(found.units) > 2
    for places, value in zip(found.places, found.dropped.tolist(), strict=True):
        changed = prepared.main.clone()
        if family == "vit":
            y, x = map(int, prepared.tokens.labels[places[0]].split(","))
            mean = changed[0].mean((1, 2))
            changed[0, :, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = mean[:, None, None]
        else:
            nothing = m.special.get("mask", m.special.get("unk", m.special.get("pad")))
            for place in places:
                changed[0, place] = nothing
        dropped = before[choice] - scores(m, prepared, changed)[column, choice]
        assert value == pytest.approx(float(dropped), abs=1e-5)


def test_gradient_times_input_is_the_slope_of_the_logit():
    """Against finite differences: all of one word's states a little larger."""
    m = toy("classifier")
    found = occlusion(m, given("classifier"))
    prepared = prepare(m, given("classifier"))
    double = ch.Model(m.model.double(), m.tokenizer, special=m.special, labels=m.labels)
    try:
        for places, value in zip(found.places, found.gradient.tolist(), strict=True):
            logits = []
            for size in (1 + 1e-6, 1 - 1e-6):
                scale = torch.ones(len(prepared.tokens), 1, dtype=torch.float64)
                scale[list(places)] = size
                with torch.no_grad(), ch.edit(double.model, {"embedding": lambda x, scale=scale: x * scale}):
                    logits.append(double.model(prepared.main).logits[0])
                    logits[-1] -= logits[-1].mean()
            slope = (logits[0] - logits[1]) / 2e-6
            assert value == pytest.approx(float(slope[m.labels.index(found.choice)]), abs=1e-4)
    finally:
        m.model.float()


def test_occlusion_refuses_what_it_cannot_leave_out():
    with pytest.raises(InputError, match="one stack"):
        occlusion(toy("encoder-decoder"), given("encoder-decoder"))


def test_similarity_is_the_cosine_of_what_embed_gives():
    m, texts = toy("vectors"), ["They shall speak", "England shall not"]
    found = similarity(m, *texts)
    vectors = m.embed(texts)
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(*vectors, dim=0)), abs=1e-5)
    with torch.no_grad():
        first, second = (m.model(prepare(m, text).main).hidden[0] for text in texts)
    for row, state in enumerate(first):
        for column, other in enumerate(second):
            expected = float(torch.cosine_similarity(state, other, dim=0))
            assert float(found.states[row, column]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", ["decoder", "encoder", "classifier", "vit"])
def test_neurons_and_the_bias_are_the_feedforward(family):
    m = toy(family)
    terms = {term.name: term.value for term in contributions(m, given(family)).terms}
    found = firing(m, given(family), count=3)
    assert len(found.neurons) == 3
    every = firing(m, given(family), count=10_000)
    parts = parts_of(LogitQuery.of(m, given(family), None, -1, None, None, None))
    slopes = {part.terms[0].name: part.slope for part in parts if part.terms[0].kind == "feedforward"}
    for layer, block in enumerate(m.model.main.layers()):
        name = f"feedforward {layer}"
        own = [neuron.value for neuron in every.neurons if neuron.name.startswith(f"{layer}.")]
        assert sum(own) == pytest.approx(found.sums[name], abs=1e-6)
        bias = 0.0 if block.feedforward.down.bias is None else block.feedforward.down.bias.detach().double()
        assert found.sums[name] + float((slopes[name] * bias).sum()) == pytest.approx(terms[name], abs=1e-5)


def test_steering_adds_the_difference_of_two_texts():
    m = toy("decoder")
    vector = steering_vector(m, "The king", "The men", 0)
    states = []
    for text in ("The king", "The men"):
        with torch.no_grad(), ch.record(m, "blocks.0.resid_post") as seen:
            m.model(prepare(m, text).main)
        states.append(seen["blocks.0.resid_post"][0, -1])
    assert vector.tolist() == pytest.approx((states[0] - states[1]).tolist(), abs=1e-6)
    ids = prepare(m, TEXTS["decoder"]).main
    with torch.no_grad(), ch.record(m, "blocks.1.resid_pre") as seen, steering(m, vector, 0, 3.0):
        m.model(ids)
    steered = seen["blocks.1.resid_pre"]
    with torch.no_grad(), ch.record(m, "blocks.1.resid_pre") as seen:
        m.model(ids)
    assert torch.allclose(steered - seen["blocks.1.resid_pre"], (3 * vector).expand_as(steered), atol=1e-5)
    with pytest.raises(InputError, match="there is no layer 7"):
        steering_vector(m, "a", "b", 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_recorded_pass_answers_as_passes_of_their_own(family, monkeypatch):
    m = toy(family)
    plain, kept = prepare(m, given(family)), cached_pass(prepare(m, given(family)))
    kept.record()
    monkeypatch.setattr(type(m.model), "forward", None)  # from here on nothing is run
    answers = paths(m, kept), lens(m, kept), lens(m, kept, columns=[0]), attention(m, kept)
    best = best_choices(m, kept, [0])[1]
    monkeypatch.undo()
    own = paths(m, plain)
    assert answers[0].logit == pytest.approx(own.logit, abs=1e-5)
    assert answers[0].sources.tolist() == pytest.approx(own.sources.tolist(), abs=1e-5)
    whole = lens(m, plain)
    assert torch.equal(answers[1].top, whole.top)
    assert torch.allclose(answers[1].entropy, whole.entropy, atol=1e-4)
    assert torch.equal(answers[2].top, whole.top[:, :1])
    assert torch.allclose(answers[2].chosen_probabilities, whole.chosen_probabilities[:, :1], atol=1e-5)
    assert torch.equal(best, whole.top[:, :1, 0])
    for mine, theirs in zip(answers[3].maps, attention(m, plain).maps, strict=True):
        assert mine.pattern == pytest.approx(theirs.pattern, abs=1e-6)
    kept.forget()
    assert paths(m, kept).logit == pytest.approx(own.logit, abs=1e-5)


# A cached pass ----------------------------------------------------------------------------------------------


TEXT = "they shall speak of England"


def kept_pass(m):
    """A text whose pass is kept; what a decoder of two stacks has written is given."""
    return cached_pass(prepare(m, TEXT, *(["it"] if m.config.family == "encoder-decoder" else [])))


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
@pytest.mark.parametrize("largest", [2**24, 0])
def test_gradients_of_a_kept_pass(family, largest, monkeypatch):
    monkeypatch.setattr("clearhead.inside.inputs.LARGEST_GRAPH", largest)
    m = toy(family)
    kept = kept_pass(m)
    for head, reader, source in (("1.2", 1, 0), ("1.0", 1, 1)):
        target = [] if kept.source is None else [kept.tokens.ids]
        own = prepare(m, TEXT if target else kept.tokens.ids, *target)
        fresh = looks(m, own, head, reader, source).edges
        again = [looks(m, kept, head, reader, source).edges for _ in range(2)]
        for found in again:
            assert [edge.part for edge in found[:5]] == [edge.part for edge in fresh[:5]]
            assert [edge.value for edge in found] == pytest.approx([edge.value for edge in fresh], abs=1e-6)
    assert ("_cut" in kept.__dict__) == bool(largest)
    kept.forget()
    assert not {"_cut", "_pass"} & set(kept.__dict__)


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


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder", "tagger"])
def test_a_second_choice_is_followed_without_reading_the_vocabulary_again(family, monkeypatch):
    """The shares are those of a softmax over every choice; a kept pass multiplies by one row for the next."""
    m = toy(family)
    kept = kept_pass(m)
    taps = states(m.model.main.spec)
    whole = torch.stack([stopped_at(m.model, kept.record(tap)[1][tap])[0].softmax(-1) for tap in taps])
    widths = []
    monkeypatch.setattr(
        "clearhead.inside.lens.stopped_at",
        lambda *given: widths.append((logits := stopped_at(*given)).shape[-1]) or logits,
    )
    for choice in (1, 2):
        widths.clear()
        found = followed(m, kept, choice)
        torch.testing.assert_close(found, whole[..., choice], atol=1e-6, rtol=1e-5)
    assert set(widths) == ({m.config.n_classes} if family == "tagger" else {1})
    kept.forget()
    assert "log_sums" not in kept.__dict__


def test_some_columns_are_those_of_all_and_a_peek_leaves_out_what_is_masked():
    m = toy("decoder")
    assert followed(m, TEXT, 7, columns=[1, 3]) == pytest.approx(followed(m, TEXT, 7)[:, [1, 3]], abs=1e-6)
    x = torch.randn(3, 5, 5)
    masked = x.masked_fill(torch.ones(5, 5).triu(1).bool(), torch.finfo(x.dtype).min)
    seen = x[:, torch.ones(5, 5).tril().bool()].double()
    peek = _peek(masked)
    figures = [seen.mean(), seen.std(correction=0), seen.min(), seen.max()]
    assert [peek.mean, peek.std, peek.min, peek.max] == pytest.approx(list(map(float, figures)), abs=1e-6)


def test_what_a_feedforward_reads_adds_up():
    """Shares are components along the normed stream, computed here from the activations of a plain pass."""
    m, at = build(norm="rmsnorm", n_layers=3, attention_out_bias=False), 3
    parts = {
        "embedding": "embedding",
        **{"0": "blocks.0.attention.out", "feedforward 0": "blocks.0.feedforward.out"},
        "1": "blocks.1.attention.out",
    }
    with torch.no_grad(), ch.record(m, "blocks.1.resid_mid", "blocks.1.feedforward.in", *parts.values()) as x:
        m(torch.tensor([IDS]))
    read = x["blocks.1.feedforward.in"][0, at].double()
    norm = read / x["blocks.1.resid_mid"][0, at].double()  # held: a factor for each number
    found = reads(m, IDS, 1, at, count=10_000)
    shares = defaultdict[str, float](float)
    for edge in found.edges:
        shares[edge.part.partition(".")[0]] += edge.value
    for name, tap in parts.items():
        expected = float((x[tap][0, at].double() * norm) @ read / (read @ read))
        assert shares[name] == pytest.approx(expected, abs=1e-5), name
    assert found.rest == pytest.approx(0, abs=1e-5)
    for layer, reader, message in ((9, at, "layer 9"), (1, 99, "reader 99")):
        with pytest.raises(InputError, match=message):
            reads(m, IDS, layer, reader)
