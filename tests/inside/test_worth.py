"""What words, patches, neurons and directions are worth: each equals the loop or the sum that defines it."""

import pytest
import torch

import clearhead as ch
from clearhead.errors import InputError
from clearhead.inside.attention import attention, maps_of
from clearhead.inside.attribution import occlusion, paths
from clearhead.inside.geometry import similarity
from clearhead.inside.inputs import cached_pass, choices_of, prepare
from clearhead.inside.lens import best_choices, contributions, lens
from clearhead.inside.logit_attribution import LogitQuery, firing, parts_of
from clearhead.inside.patch import steering, steering_vector
from tests.explorer.toys import TEXTS, picture, toy

FAMILIES = ("decoder", "encoder", "encoder-decoder", "classifier", "tagger", "vit")


def given(family):
    return picture(3) if family == "vit" else TEXTS.get(family, "They shall speak of England")


def scores(m, prepared, main):
    """The scores of changed inputs, one forward pass each."""
    with torch.no_grad():
        logits = m.model(main, **prepared.given).logits
    return choices_of(prepared).scores(logits)[0]


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
        assert value == pytest.approx(
            float(before[choice] - scores(m, prepared, changed)[column, choice]), abs=1e-5
        )


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
    parts, _ = parts_of(LogitQuery.of(m, given(family), None, -1, None, None, None))
    slopes = {part.terms[0].name: part.slope for part in parts if part.terms[0].kind == "feedforward"}
    for layer, block in enumerate(m.model.main.layers()):
        name = f"feedforward {layer}"
        own = [one.value for one in every.neurons if one.name.startswith(f"{layer}.")]
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
    plain, once = prepare(m, given(family)), cached_pass(prepare(m, given(family)))
    once.record()
    monkeypatch.setattr(type(m.model), "forward", None)  # from here on nothing is run
    answers = (
        paths(m, once),
        lens(m, once),
        lens(m, once, columns=[0]),
        maps_of(once),
        best_choices(m, once, [0])[1],
    )
    monkeypatch.undo()
    own = paths(m, plain)
    assert answers[0].logit == pytest.approx(own.logit, abs=1e-5)
    assert answers[0].sources.tolist() == pytest.approx(own.sources.tolist(), abs=1e-5)
    whole = lens(m, plain)
    assert torch.equal(answers[1].top, whole.top)
    assert torch.allclose(answers[1].entropy, whole.entropy, atol=1e-4)
    assert torch.equal(answers[2].top, whole.top[:, :1])
    assert torch.allclose(answers[2].chosen_probabilities, whole.chosen_probabilities[:, :1], atol=1e-5)
    assert torch.equal(answers[4], whole.top[:, :1, 0])
    for mine, theirs in zip(answers[3].maps, attention(m, plain).maps, strict=True):
        assert mine.pattern == pytest.approx(theirs.pattern, abs=1e-6)
    once.forget()
    assert paths(m, once).logit == pytest.approx(own.logit, abs=1e-5)
