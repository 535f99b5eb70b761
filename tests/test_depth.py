"""Mixture of depths: routed layers against a plain definition, however they are run; what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

import clearhead as ch
from clearhead.inside.checks.reference_float64 import reference_logits
from clearhead.inside.checks.reference_inputs import ReferenceInputs
from clearhead.inside.lens import contributions
from clearhead.inside.memories import memories
from clearhead.learn.batches.batch import Batch
from clearhead.learn.losses import batch_loss
from clearhead.run.kernels.lora import add_lora, merged
from clearhead.variants.costs import cost
from clearhead.variants.routing import PartKV, Router, router_loss
from tests.harness import LATENT, V, build, chunks, config, gradients, in_pieces, pad, some_ids, worst

DEEP = {"n_layers": 4, "depth_capacity": 0.5}
CASES = {
    "learned": {"family": "decoder"},
    "rope, window": {"positions": "rope", "window": 3, "n_kv_heads": 2, "norm": "rmsnorm", "gated": True},
    "alibi, sandwich": {"positions": "alibi", "norm_position": "sandwich", "depth_capacity": (0.3, 1.0)},
    "relative, parallel": {"positions": "relative", "parallel": True, "depth_capacity": (0.6,)},
    "mixed kinds": {"attention": ("full", "linear", "full", "gated-delta"), "positions": "rope"},
    "strided": {"attention": "strided(3, sinks=1)", "rope_skips": (1,), "positions": "rope"},
    "latent": LATENT,
    "encoder": {"family": "encoder"},
    "encoder, alibi": {"family": "encoder", "positions": "alibi", "window": 4},
}


def routed(**choices) -> ch.Transformer:
    """A model whose routers let some tokens through, and not others."""
    return build(**{**DEEP, **choices})


@pytest.mark.ledger("D8")
@pytest.mark.parametrize("name", CASES)
def test_routed_layers_are_the_same_however_they_are_run(name):
    model, ids = routed(**CASES[name]), some_ids(3, 11)
    with torch.no_grad():
        whole = model(ids).logits
        assert worst(whole.double(), reference_logits(model.config, model.state_dict(), ids)) < 1e-5
        assert worst(model(ids[1:2]).logits, whole[1:2]) < 1e-5
        for where in ("left", "right", "gaps"):
            padded, mask = pad(ids, where)
            assert worst(model(padded, mask=mask).logits[mask].view_as(whole), whole) < 1e-5
        with ch.record(model, "*.passed") as seen:  # while watched, every token is computed under a mask
            assert worst(model(ids).logits, whole) < 1e-5
        passed = torch.stack(list(seen.values())).flatten().tolist()
        assert any(passed) and not all(passed)
        if model.config.decoder is None:
            return
        changed = ids.clone()
        changed[:, 5:] = (changed[:, 5:] + 1) % V
        later, before = (model(x[:1]).logits[:, :5] for x in (changed, ids))
        assert worst(later, before) < 1e-6  # another number of later tokens is multiplied together
        with ch.record(model, "*.passed"):
            assert torch.equal(model(changed[:1]).logits[:, :5], model(ids[:1]).logits[:, :5])
        forms = (ch.Cache, ch.WindowCache)
        for form, size in ((form, size) for form in forms for size in (1, 4)):
            assert worst(in_pieces(model, ids, chunks(11, size), form()), whole) < 1e-5
        padded, mask = pad(ids, "gaps")
        cached = in_pieces(model, padded, [4, 1, 9], ch.Cache(), mask=mask)
        assert worst(cached[mask].view_as(whole), whole) < 1e-5


@pytest.mark.parametrize("name", [name for name in CASES if "mixed" not in name and "encoder" not in name])
def test_a_cache_steps_back_and_changes_rows(name):
    model, ids, rows = routed(**CASES[name]), some_ids(3, 11), torch.tensor([2, 0])
    with torch.no_grad():
        whole, cache = model(ids).logits, ch.Cache()
        model(ids, cache=cache)
        for split in (8, 5, 4, 1, 0):
            cache.crop(split)
            assert worst(model(ids[:, split:], cache=cache).logits, whole[:, split:]) < 1e-5
        cache.crop(6)
        cache.reorder(rows)
        assert worst(model(ids[rows, 6:], cache=cache).logits, whole[rows, 6:]) < 1e-5
        padded, mask = pad(ids, "left")
        model(padded, mask=mask, cache=(cache := ch.Cache()))
        cache.crop(8)
        assert worst(model(padded[:, 8:], mask=mask[:, 8:], cache=cache).logits, whole[:, 5:]) < 1e-5


def test_a_window_that_has_forgotten_does_not_step_back():
    model, cache = routed(window=(None, 3, None, 3)), ch.WindowCache()
    with torch.no_grad(), ch.edit(model, {"*.passed": torch.ones_like}):
        model(some_ids(2, 8), cache=cache)
    with pytest.raises(ch.InputError, match="has forgotten what a crop to"):
        cache.crop(5)


@pytest.mark.ledger("D8")
def test_a_cache_holds_the_tokens_that_went_through():
    model, ids, cache = routed(), some_ids(1, 20), ch.Cache()
    with torch.no_grad():
        for token in ids[0]:
            model(token.view(1, 1), cache=cache)
        with ch.record(model, "*.passed") as seen:
            model(ids)
    for layer in (1, 3):
        kept = cache.layers[layer]
        assert isinstance(kept, PartKV)
        assert kept.cache.length == int(seen[f"blocks.{layer}.passed"].sum())


@pytest.mark.ledger("D8")
@pytest.mark.parametrize("name", CASES)
def test_gradients_by_rank_are_those_of_the_plain_definition(name, monkeypatch):
    """In training the best tokens go through: float64 against a loop over tokens that shares no code."""
    model = routed(**CASES[name]).double().train()
    monkeypatch.setattr(ReferenceInputs, "weight", lambda self, name: self.weights[name])
    ids, mask = pad(some_ids(2, 9), "gaps")
    weights = torch.randn(2, 12, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    named = dict(model.named_parameters(remove_duplicate=False))
    expected = reference_logits(model.config, {**model.state_dict(), **named}, ids, mask, learns=True)
    found = model(ids, mask=mask).logits
    assert worst(found[mask], expected[mask]) < 1e-6  # angles are float32 in the model
    head = [name for name in named if name.startswith("head.") or name.endswith("tokens.weight")]
    mine, theirs = (gradients(model, (logits * weights)[mask].sum()) for logits in (found, expected))
    for name in mine.keys() - set(head):  # the reference reads the table of the head without a gradient
        assert mine[name] is not None and theirs[name] is not None, name
        assert worst(mine[name], theirs[name]) < 1e-5 * max(1.0, float(theirs[name].abs().max())), name
    assert all(mine[name].any() for name in mine if "router" in name)


@pytest.mark.parametrize("training", [False, True])
def test_documents_and_padding_take_no_places_of_each_other(training):
    model, ids = routed().train(training), some_ids(2, 11)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2]]).expand(2, -1)
    with torch.no_grad():
        alone = torch.cat([model(piece).logits for piece in ids.split((4, 2, 5), dim=1)], dim=1)
        assert worst(model(ids, documents=documents).logits, alone) < 1e-5
        padded, mask = pad(ids, "gaps")
        assert worst(model(padded, mask=mask).logits[mask].view_as(alone), model(ids).logits) < 1e-5


def test_places_are_a_share_of_the_real_tokens_rounded_up():
    model = routed(depth_capacity=0.3, max_positions=64).train()
    router = next(part for part in model.modules() if isinstance(part, Router))
    for length in (1, 3, 10, 20, 33):
        model(some_ids(2, length))
        assert router.routed[1].sum(1).tolist() == [math.ceil(round(0.3 * length, 6))] * 2
    ids, mask = pad(some_ids(2, 10), "left")
    model(ids, mask=mask)
    assert router.routed[1].sum(1).tolist() == [3, 3]
    assert not router.routed[1][~mask].any()


def test_the_router_learns_which_side_of_zero_a_token_is_on():
    model, ids = routed().train(), some_ids(2, 9)
    ids, mask = pad(ids, "right")
    loss, count = batch_loss(model, Batch(ids, ids, mask), balance=0.0)
    more, _ = batch_loss(model, Batch(ids, ids, mask), balance=0.1)
    routers = [part for part in model.modules() if isinstance(part, Router)]
    by_hand = []
    for router in routers:
        scores, passed, _ = router.routed
        p = scores[mask].sigmoid()
        by_hand.append(-torch.where(passed[mask], p.log(), (1 - p).log()).mean())
    assert worst(router_loss(model), torch.stack(by_hand).mean()) < 1e-6
    assert worst(more - loss, 0.1 * count * router_loss(model)) < 1e-3


@pytest.mark.ledger("D8")
def test_generation_goes_on_as_one_pass_says():
    m = ch.Model(routed(positions="rope"))
    text = [1, 2, 3]
    for token in m.generate(text, 8).ids:
        assert int(m.model(torch.tensor([text])).logits[0, -1].argmax()) == token
        text = [*text, token]
    for options in ({"lookup": 3}, {"reuse": True}, {"reuse": True}):
        assert m.generate(text[:3], 8, **options).ids == text[3:]
    found = m.generate(text[:3], 8, num_beams=3)
    logs = m.model(torch.tensor([[1, 2, 3, *found.ids]])).logits[0].log_softmax(-1).detach()
    total = sum(float(logs[place + 2, token]) for place, token in enumerate(found.ids))
    assert found.score == pytest.approx(total / len(found.ids), abs=1e-5)
    both = m.generate([[1, 2, 3], [4, 5]], 8)
    assert [row.ids for row in both] == [m.generate(one, 8).ids for one in ([1, 2, 3], [4, 5])]
    with pytest.warns(RuntimeWarning, match="its layers take some tokens alone"):
        m.generate([1, 2], 3, compile=True)


def test_what_is_watched_is_at_its_own_place():
    model, ids = routed(), some_ids(1, 9)
    with torch.no_grad(), ch.record(model, "blocks.1.*") as seen:
        model(ids)
    passed = seen["blocks.1.passed"][0]
    assert torch.equal(passed, seen["blocks.1.router"][0] > 0)
    pattern = seen["blocks.1.attention.pattern"][0]  # H T T
    assert not pattern[:, ~passed].any() and not pattern[:, :, ~passed].any()
    assert torch.allclose(pattern[:, passed].sum(-1), torch.ones(()))
    before, after = seen["blocks.1.resid_pre"][0], seen["blocks.1.resid_post"][0]
    assert torch.equal(before[~passed], after[~passed]) and not torch.equal(before[passed], after[passed])
    added = seen["blocks.1.attention.out"][0] + seen["blocks.1.feedforward.out"][0]
    assert (
        worst(after[passed], before[passed] + seen["blocks.1.router"][0][passed, None] * added[passed]) < 1e-5
    )
    for position in (0, 5, 8):
        parts = contributions(model, ids[0].tolist(), position=position)
        assert parts.total == pytest.approx(parts.logit, abs=1e-4)
    traced = ch.trace(model, ids[0].tolist())
    names = [step.name for step in traced.steps]
    assert {"blocks.1.router", "blocks.1.passed", "blocks.1.mixed"} <= set(names)
    assert sum(step.flops for step in traced.steps) == cost(model.config, 9).flops.forward.total
    everyone = {"*.passed": torch.ones_like}
    with torch.no_grad(), ch.edit(model, everyone), ch.record(model, "blocks.1.resid_post") as other:
        model(ids)
    assert not torch.equal(other["blocks.1.resid_post"][0][~passed], after[~passed])


def test_neurons_fire_for_tokens_that_go_through():
    model, ids = routed(), some_ids(1, 9)[0].tolist()
    with torch.no_grad(), ch.record(model, "blocks.1.passed") as seen:
        model(torch.tensor([ids]))
    places = seen["blocks.1.passed"][0].nonzero()[:, 0].tolist()
    found = memories(model, [ids], layer=1, top=9)
    fired = {context.place for neuron in found.ranked(count=None) for context in neuron.contexts}
    assert fired and fired <= set(places)


def test_low_rank_updates_and_saving(tmp_path):
    model, ids = routed(), some_ids(2, 9)
    ch.Model(model).save(tmp_path / "model")
    loaded = ch.load(tmp_path / "model")
    assert loaded.config.depth_capacity == 0.5
    with torch.no_grad():
        assert torch.equal(loaded.model.eval()(ids).logits, model(ids).logits)
        add_lora(model, 2, 4.0, ("q", "v", "up"))
        for name, weight in model.named_parameters():
            if name.endswith(".b"):
                weight.copy_(0.1 * torch.ones_like(weight))
        changed = model(ids).logits
        with merged(model):
            assert worst(model(ids).logits, changed) < 1e-5
    assert worst(changed, loaded.model(ids).logits) > 1e-3


@pytest.mark.ledger("D8", "I1")
def test_the_suite_and_the_costs_know_routers():
    model = routed(positions="rope", n_layers=2)
    assert [row.name for row in ch.check(model) if not row.passed] == []
    plain, half = (cost(config(n_layers=4, depth_capacity=share), 32) for share in (1.0, 0.125))
    layers = [sum(step.forward for step in half.within(f"blocks.{layer}")) for layer in range(4)]
    assert layers[1] < 0.2 * layers[0] and layers[1] == layers[3]
    assert half.memory.kv_cache == plain.memory.kv_cache * (1 + 0.125) / 2


WRONG = [
    ({"depth_capacity": 0.0}, "depth_capacity 0.0 is no share of the tokens"),
    ({"depth_capacity": (1.0, 1.5)}, "depth_capacity 1.5 is no share"),
    ({"depth_capacity": (0.5, 1.0, 1.0)}, "lists 3 layers, which do not repeat to 4"),
    ({"n_layers": 1}, "is for every second layer, and there is one"),
    ({"family": "encoder-decoder"}, "has no place for cross-attention"),
    ({"norm_position": "post"}, "a post-norm layer replaces it"),
    ({"n_experts": 4}, "two routers in one layer"),
    ({"layer_groups": 2}, "layer_groups shares them"),
    (
        {"positions": "rope", "rope_scaling": ch.RopeScaling(kind="dynamic", factor=2.0)},
        "rope scaling dynamic, which rotates keys by the longest row",
    ),
]


@pytest.mark.parametrize(("choices", "says"), WRONG, ids=[says for _, says in WRONG])
def test_routers_without_meaning_are_refused(choices, says):
    with pytest.raises(ch.ConfigError, match=says) as error:
        config(**{**DEEP, **choices})
    assert "\n" not in str(error.value)


def test_what_routed_layers_cannot_serve_is_refused():
    model, ids = routed(positions="rope"), some_ids(2, 5)
    with pytest.raises(ch.InputError, match="some pass a layer by"):
        model(ids, bias=torch.zeros(1, 1, 5, 5))
    with pytest.raises(ch.InputError, match=r"layer 1 keeps some of them .*use Cache"):
        model(ids, cache=ch.FixedCache(model.config, 2, 8))
    m = ch.Model(model)
    with pytest.raises(ch.InputError, match="streaming moves all"):
        m.generate([1, 2], 40, overflow="stream", stream_window=8)
    with pytest.raises(ch.InputError, match="whose routers skip layers already"):
        m.generate([1, 2], 4, early_exit=0.9)
