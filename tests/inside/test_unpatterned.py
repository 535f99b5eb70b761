"""Attention without a softmax: the shares that linear attention implies, and layers that have no pattern."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import clearhead as ch
from clearhead.app.explorer.record import record as record_page
from clearhead.errors import InputError
from clearhead.inside.ablation import effect
from clearhead.inside.attention import attention, read_maps
from clearhead.inside.attribution import paths
from clearhead.inside.checks.reference_float64 import features
from clearhead.inside.graph import graph
from clearhead.inside.heads import head_roles
from clearhead.inside.inputs import prepare
from clearhead.inside.lens import contributions, lens
from clearhead.inside.names import find_heads
from clearhead.inside.patch import patch
from clearhead.inside.trace import trace
from clearhead.variants.checks import read_kind
from tests.harness import build, in_pieces, some_ids, worst
from tests.inside.test_attention import of_words

pytestmark = pytest.mark.ledger("J1", "K1", "K2")

MIXED = ("full", "linear", "gated-delta", "window(3, sinks=1)")
NOTE = "layers without an attention pattern: 2 (gated-delta); layers with one: 0, 1, 3"
TEXT = "the dog ran to town at ten"
PART = "blocks.1.attention"


def mixed(attention=MIXED, **choices) -> ch.Transformer:
    return build(n_layers=len(attention), attention=attention, positions="rope", vocab_size=16, **choices)


@pytest.mark.parametrize("family", ["decoder", "encoder"])
@pytest.mark.parametrize("text", ["linear", "linear(relu)", "linear(favor, 20)"])
def test_linear_attention_shows_the_shares_that_it_implies(family: str, text: str) -> None:
    """Products of features, divided by their sum over the keys that are seen, whatever the row."""
    model = build(attention=text, family=family, n_kv_heads=2)
    ids, kind, spec = some_ids(2, 9), read_kind(text), model.main.spec
    mask, documents = torch.ones(2, 9, dtype=torch.bool), torch.tensor([[0] * 4 + [1] * 5, [2] * 9])
    mask[0, -2:] = False
    for given in ({}, {"mask": mask}, {"documents": documents}):
        with torch.no_grad():
            plain = model(ids, **given).logits
            with ch.record(model, f"{PART}.*") as seen:
                assert torch.equal(model(ids, **given).logits, plain)
        q, k, v = (seen[f"{PART}.{name}"].double() for name in "qkv")
        allowed = torch.ones(2, 9, 9, dtype=torch.bool) & given.get("mask", mask | True)[:, None]
        allowed = allowed.tril() if family == "decoder" else allowed
        if "documents" in given:
            allowed = allowed & (documents[:, :, None] == documents[:, None])
        pattern = torch.zeros(2, 4, 9, 9, dtype=torch.float64)
        for row, head in ((row, head) for row in range(2) for head in range(4)):
            phi = [
                features(kind, x, spec.attention_scale, kind.n_features(spec))
                for x in (q[row, head], k[row, head // 2])
            ]
            products = (phi[0] @ phi[1].T) * allowed[row]
            pattern[row, head] = products / products.sum(-1, keepdim=True)
        real = given.get("mask", mask | True)[:, None, :, None]
        assert worst(seen[f"{PART}.pattern"] * real, pattern * real) <= 1e-5
        assert worst(seen[f"{PART}.z"] * real, pattern @ v.repeat_interleave(2, 1) * real) <= 1e-5


def test_cached_steps_show_the_shares_of_their_own_tokens() -> None:
    model, ids = build(attention="linear(favor)"), some_ids(2, 6)
    with torch.no_grad():
        with ch.record(model, f"{PART}.pattern") as whole:
            plain = model(ids).logits
        with ch.record(model, f"{PART}.pattern") as steps:
            assert worst(in_pieces(model, ids, [3, 2, 1], ch.Cache()), plain) <= 1e-5
    for step, (start, stop) in zip(steps.calls(f"{PART}.pattern"), ((0, 3), (3, 5), (5, 6)), strict=True):
        assert worst(step, whole[f"{PART}.pattern"][:, :, start:stop, start:stop]) <= 1e-5


def test_an_edited_pattern_mixes_other_values() -> None:
    model = build(attention="linear", family="encoder", n_kv_heads=2)
    uniform = {f"{PART}.pattern": lambda p: torch.full_like(p, 1 / p.shape[-1])}
    with ch.edit(model, uniform), ch.record(model, f"{PART}.*") as seen:
        model(some_ids())
    mean = seen[f"{PART}.v"].mean(2, keepdim=True).repeat_interleave(2, 1)
    assert worst(seen[f"{PART}.z"], mean.expand_as(seen[f"{PART}.z"])) <= 1e-6


def test_low_rank_shows_the_shares_of_its_mixtures() -> None:
    model, ids = build(attention="low-rank(3)", family="encoder"), some_ids()
    with torch.no_grad():
        plain = model(ids).logits
        with ch.record(model, f"{PART}.*") as seen:
            assert worst(model(ids).logits, plain) <= 1e-5
    pattern, mix = seen[f"{PART}.pattern"], model.main.blocks[1].attention.v_mix[: ids.shape[1]].detach()
    assert pattern.shape == (2, 4, 8, 3)
    assert worst(pattern @ (mix.T @ seen[f"{PART}.v"]), seen[f"{PART}.z"]) <= 1e-5


# Tools that draw patterns -----------------------------------------------------------------------------------


def test_every_tool_goes_on_with_the_layers_that_have_a_pattern(tmp_path) -> None:
    m = of_words(mixed())
    assert "blocks.2.attention.pattern" not in ch.tap_names(m)
    maps = attention(m, TEXT)
    assert [each.layer for each in maps.maps] == [0, 1, 3]
    assert worst(torch.from_numpy(maps.layer(1).pattern).sum(-1), torch.ones(4, 7)) <= 1e-5
    for each in (maps, attention(m, TEXT, to=tmp_path / "maps"), read_maps(tmp_path / "maps")):
        with pytest.raises(InputError, match=r"these layers have none, or a state-space mixer next to it: 2"):
            each.rollout()
    with pytest.raises(InputError, match=r"2 \(gated-delta\); layers with one: 0, 1, 3"):
        attention(m, TEXT, layers=[2])
    assert {head.layer for head in head_roles(m, [TEXT]).heads} == {0, 1, 3}
    views = record_page(m, "mixed", TEXT)["views"]
    assert views["model"]["unpatterned"] == [NOTE]
    assert [entry["pattern"] for entry in views["model"]["attentions"]] == [True, True, False, True]
    assert views["run/recorded/thumbnails/self"]["layers"] == [0, 1, 3]
    low = of_words(mixed(("full", "low-rank(2)"), family="encoder"))
    assert [each.layer for each in attention(low, TEXT).maps] == [0]
    assert {head.layer for head in head_roles(low, [TEXT]).heads} == {0}


def test_a_model_without_any_pattern_is_refused_by_name() -> None:
    m = of_words(mixed(("gated-delta",) * 2))
    for call in (lambda: attention(m, TEXT), lambda: head_roles(m, [TEXT])):
        with pytest.raises(InputError, match=r"0, 1 \(gated-delta\); layers with one: none"):
            call()
    assert record_page(m, "delta", TEXT)["views"]["model"]["unpatterned"]


def test_the_commands_say_which_layers_have_none(tmp_path, clearhead) -> None:
    of_words(mixed()).save(tmp_path / "mixed")
    for command in (["attention", str(tmp_path / "mixed"), TEXT], ["heads", str(tmp_path / "mixed"), TEXT]):
        said = clearhead(*command, "--json")
        assert said.err.splitlines() == [NOTE]
        assert json.loads(said.out)


def test_a_trace_says_what_each_kind_computes() -> None:
    seen = trace(mixed(), [1, 2, 3, 4])
    assert seen["blocks.0.attention.pattern"].formula == "softmax(scores)"
    assert seen["blocks.1.attention.pattern"].formula == "φ(q) · φ(k) / their sum"
    low = trace(mixed(("full", "low-rank(2)"), family="encoder"), [1, 2, 3, 4])
    assert low["blocks.1.attention.pattern"].symbols == "1 4 4 2"
    assert low.flops == low.cost.flops.forward.total and seen.flops == seen.cost.flops.forward.total


def test_heads_by_themselves_have_their_layers_names() -> None:
    m = of_words(mixed())
    patched = patch(m, "the dog ran", "the dog sat", parts=("heads",))
    assert patched.maps[0].rows == ("0", "1", "3") and patched.maps[0].values.shape[0] == 3
    delta = of_words(mixed(("gated-delta",) * 2))
    for call in (
        lambda: patch(delta, "the dog ran", "the dog sat", parts=("heads",)),
        lambda: find_heads(delta.config, ["0.0"]),
    ):
        with pytest.raises(InputError, match="this model has no heads by themselves"):
            call()


@pytest.mark.ledger("W3")
@pytest.mark.parametrize("alone", [False, True])
def test_every_tool_goes_on_with_state_space_layers_and_half_blocks(alone) -> None:
    kinds = ("mamba2(d_state=5)",) * 4 if alone else ("mamba2(d_state=5)", "none", "conv", "full")
    m = of_words(mixed(kinds, feedforward_skips=(0, 2)))
    taps = ch.tap_names(m)
    assert {"blocks.0.attention.z", "blocks.0.feedforward.out", "blocks.1.attention.out"} <= {*taps}
    assert "blocks.0.feedforward.pre" not in taps
    with ch.record(m.model, "*") as seen:
        m.model(some_ids(1, 6, vocab=16))
    assert {*taps} == {*seen}
    assert lens(m, TEXT).layers[-1] == "block 3"
    sums = contributions(m, TEXT)
    assert sums.total == pytest.approx(sums.logit, abs=1e-4)
    lost = effect(m, TEXT, layers=[0])
    without = copy.deepcopy(m.model)
    without.main.blocks[0].attention.out.weight.data.zero_()  # the block has nothing else
    with torch.no_grad():
        expected = without(torch.tensor([prepare(m, TEXT).tokens.ids])).logits[0, -1]
    assert worst(lost.after, expected) <= 1e-5 and worst(lost.before, expected) > 1e-3
    assert paths(m, TEXT).logit == pytest.approx(sums.logit, abs=1e-4)
    page = record_page(m, "state spaces", TEXT)["views"]["model"]["unpatterned"]
    assert page[0].startswith("layers without an attention pattern: 0")


def test_hybrid_layers_show_the_patterns_of_their_heads(tmp_path, clearhead) -> None:
    """Falcon-H1: softmax attention next to a mixer, which no pattern shows, and every tool counts."""
    hybrid = "hybrid(d_state=5, attention_in=0.8, attention_out=0.7, k_scale=0.3)"
    m = of_words(mixed(("full", hybrid), n_kv_heads=2))
    assert [(each.layer, len(each.pattern)) for each in attention(m, TEXT).maps] == [(0, 4), (1, 4)]
    with ch.record(m.model, f"{PART}.*") as seen:
        m.model(torch.tensor([prepare(m, TEXT).tokens.ids]))
    q, k = (seen[f"{PART}.{name}"][0] for name in "qk")
    scores = q @ k.repeat_interleave(2, 0).mT * m.config.main.attention_scale
    future = torch.ones(scores.shape, dtype=torch.bool).triu(1)
    pattern = scores.masked_fill(future, -torch.inf).softmax(-1)
    assert worst(torch.from_numpy(attention(m, TEXT).layer(1).pattern), pattern) <= 1e-6
    assert {str(head) for head in head_roles(m, [TEXT]).heads} >= {"0.0", "1.3"}
    sums, carried = contributions(m, TEXT), paths(m, TEXT)
    assert sums.total == pytest.approx(sums.logit, abs=1e-4)
    assert {term.name for term in sums.terms} >= {"0.3", "attention 1"} and carried.direct.keys() == {"0"}
    assert all(comparison.passed for comparison in ch.check(m.model))
    for call, why in (
        (
            lambda: attention(m, TEXT).rollout(),
            "these layers have none, or a state-space mixer next to it: 1",
        ),
        (lambda: effect(m, TEXT, heads=["1.0"]), "head 1.0 has a state-space mixer next to it"),
        (lambda: graph(m, TEXT), "their heads, and not the state-space mixer next to them: 1"),
    ):
        with pytest.raises(InputError, match=why):
            call()
    views = record_page(m, "hybrid", TEXT)["views"]
    assert views["run/recorded/thumbnails/self"]["layers"] == [0, 1]
    assert [(one["heads"], one["removable"]) for one in views["model"]["attentions"]] == [
        (4, True),
        (4, False),
    ]
    m.save(tmp_path / "hybrid")
    said = clearhead("attention", tmp_path / "hybrid", TEXT, "--head", "1.2", "--json")
    assert said.err.strip() == views["model"]["unpatterned"][0]
    assert worst(torch.tensor(said.json["heads"][0]["pattern"]), pattern[2]) <= 1e-5
