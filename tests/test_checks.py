"""The equality suite itself: healthy models of every kind pass.

`tests/faults` shows that broken ones do not.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

import clearhead as ch
from clearhead.core import positions
from clearhead.inside import checks
from clearhead.inside.checks.effects import edge_rows, effects_rows
from clearhead.inside.checks.independent import formula_rows
from clearhead.inside.checks.long import reach, thresholds
from clearhead.inside.checks.reference_float64 import reference_logits
from clearhead.inside.checks.rows import Comparison, Inputs, gap
from tests.harness import build, config, pad, some_ids, worst

GPT2 = {"activation": "gelu_tanh", "dropout": 0.1}
LLAMA = {
    "positions": "rope",
    "n_kv_heads": 2,
    "norm": "rmsnorm",
    "bias": False,
    "activation": "silu",
    "gated": True,
    "tie_embeddings": False,
}
GEMMA2 = {
    **LLAMA,
    "tie_embeddings": True,
    "norm_position": "sandwich",
    "norm_unit_offset": True,
    "norm_eps": 1e-6,
    "embedding_scale": 4.0,
    "attention_softcap": 5.0,
    "logit_softcap": 3.0,
    "window": (5, None),
    "activation": "gelu_tanh",
}
BERT = dict(
    family="encoder", norm_position="post", embedding_norm=True, n_types=2, norm_eps=1e-12, dropout=0.1
)
T5 = {
    "family": "encoder-decoder",
    "positions": "relative",
    "relative_buckets": 8,
    "relative_max_distance": 16,
    "attention_scale": 1.0,
    "norm": "rmsnorm",
    "bias": False,
    "activation": "relu",
    "logit_scale": 0.25,
}
BART = {"family": "encoder-decoder", "norm_position": "post", "embedding_norm": True, "position_offset": 2}
VIT = {
    "family": "encoder",
    "input": "patches",
    "vocab_size": 0,
    "image_size": (8, 12),
    "patch_size": 4,
    "class_token": True,
    "n_classes": 3,
}
FAMILIES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "gemma2": GEMMA2,
    "bert": BERT,
    "t5": T5,
    "bart": BART,
    "vit": VIT,
    "classifier": {**BERT, "head": "classifier", "n_classes": 3, "pooler": "tanh"},
    "tagger": {**BERT, "head": "tagger", "n_classes": 3},
    "span": {**BERT, "head": "span"},
    "experts": {**LLAMA, "n_experts": 4},
    "alibi": {"positions": "alibi", "n_heads": 6, "d_head": 4, "embedding_norm": True},
}
# What the families above do not have; held against the formula alone
SCALINGS = [
    ch.RopeScaling(kind="linear", factor=2.0),
    ch.RopeScaling(kind="dynamic", factor=2.0, original_positions=16),
    ch.RopeScaling(kind="llama3", factor=8.0, original_positions=16),
    ch.RopeScaling(kind="yarn", factor=4.0, original_positions=16, mscale=1.0, mscale_all_dim=0.5),
    ch.RopeScaling(kind="longrope", short_factor=(1.0, 1.5), long_factor=(2.0, 3.0), original_positions=16),
]
OTHERS = {
    "original": dict(
        family="encoder-decoder", positions="sinusoidal", embedding_scale=4.0, norm_position="post"
    ),
    "sinusoidal": {"positions": "sinusoidal", "sinusoid_layout": "half", "sinusoid_ends": True},
    "no positions": {"positions": "none", "activation": "relu2"},
    "interleaved": dict(positions="rope", rope_layout="interleaved", rope_fraction=0.5, rope_skips=(1,)),
    "output norms": {"norm_position": "output", "qk_norm": "full"},
    "norms of heads": dict(
        qk_norm="head", d_value=7, rope_local_base=100.0, window=(4, None), positions="rope"
    ),
    "parallel": {"parallel": True},
    "parallel, two norms": {"parallel": True, "parallel_norms": 2},
    "shared layers": {"layer_groups": 1, "d_embedding": 8},
    "looped layers": {"loop": (1, 2, 2), "n_layers": 6, "positions": "rope"},
    "hybrids": {
        **{"positions": "rope", "gated": True, "gate_scale": 1.3, "up_scale": 0.7, "n_layers": 3},
        "attention": (
            "hybrid(attention_in=1.2, attention_out=0.8, groups=2, d_state=5, norm=groups, norm_first=True)",
            "hybrid(3, d_head=4, d_state=5, mixer_in=1.3, mixer_out=0.6, gate_scale=1.2, dt_scale=0.8)",
            "hybrid(d_state=4, norm=none, v_scale=0.7, k_scale=1.3, q_scale=0.9)",
        ),
    },
    "clamped gates": {
        **{"gated": True, "gated_clamp": 0.3, "gated_shift": 0.5, "activation": "quick_gelu"},
        **{"n_experts": 3, "router_bias": True, "attention_sink": True, "window": (4, None)},
    },
    "gated heads, a shared expert": {
        **{"attention_gate": True, "d_value": 7, "n_kv_heads": 2, "gated": True, "norm_unit_offset": True},
        **{"n_experts": 3, "d_expert": 9, "d_shared_expert": 10, "dense_layers": (1,)},
    },
    "sinks of groups": {"attention_sink": True, "n_kv_heads": 2, "positions": "rope", "window": 3},
    "sinks under a soft-cap": {"attention_sink": True, "attention_softcap": 5.0, "positions": "alibi"},
    "sinks of two stacks": {"family": "encoder-decoder", "positions": "relative", "attention_sink": True},
    "sinks of pruned heads": {"attention_sink": True, "pruned_heads": {"blocks.0.attention": (1,)}},
    "all experts weighed": {"n_experts": 4, "router_order": "softmax_topk", "router_renormalise": False},
    "pruned": {"positions": "alibi", "n_kv_heads": 2, "pruned_heads": {"blocks.1.attention": (0, 1)}},
    "scaled residuals": dict(
        residual_scale=0.5, head_transform=True, head_activation="relu", tie_embeddings=False
    ),
    "vectors": dict(
        family="encoder", input="vectors", d_input=5, head="embedding", normalise=True, pooling="mean"
    ),
    "frames": dict(family="encoder", input="frames", d_input=5, head="none", positions="sinusoidal"),
    "last token": {"head": "classifier", "n_classes": 3, "pooler": "relu"},
    **{f"rope {scaling.kind}": {"positions": "rope", "rope_scaling": scaling} for scaling in SCALINGS},
}


pytestmark = pytest.mark.usefixtures("short_pieces")


def not_passed(rows: list[ch.Check]) -> list[ch.Check]:
    return [row for row in rows if not row.passed]


@pytest.mark.ledger("A4", "B8", "C4", "C5", "C7", "E1", "E2", "E3", "E4", "G2", "H3", "H8", "K7")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_healthy_model_of_every_family_passes(name):
    rows = ch.check(build(**FAMILIES[name]))
    assert not_passed(rows) == []
    assert all(row.verdict == "equal" for row in rows)


@pytest.mark.parametrize("name", {**FAMILIES, **OTHERS})
def test_what_parts_add_is_the_logit_for_every_choice(name):
    """Of contributions, of scores, and of slopes on the way to another input."""
    inputs = Inputs(build(**{**FAMILIES, **OTHERS}[name]))
    with torch.no_grad():
        rows = [*effects_rows(inputs)[:2], edge_rows(inputs)[-1]]
        assert [row.name for row in rows if row.fits and not row.run() <= row.tolerance] == []


@pytest.mark.slow
def test_rows_reach_the_lengths_at_which_something_changes(monkeypatch):
    """With the pieces that generation really reads: a thousand tokens and some."""
    monkeypatch.undo()
    rows = {
        row.name: row for row in checks.checks_for(build(**T5)) if "(long)" in row.name or "(far)" in row.name
    }
    assert "1032 tokens" in rows["model = formula (long)"].compared
    assert rows.keys() >= {"model = formula (far)", "cached = formula (long)"}
    with torch.no_grad():
        assert [row.name for row in rows.values() if row.fits and not row.run() <= row.tolerance] == []


def test_thresholds_are_those_of_the_config():
    scaling = ch.RopeScaling(kind="yarn", factor=4.0, original_positions=700)
    rope = {"positions": "rope", "window": (300, None), "rope_scaling": scaling}
    assert thresholds(config(**rope)) == [300, 700]
    assert thresholds(config(max_positions=4096)) == [4096]  # too long for a row: reached by position alone
    assert (reach(config(**rope), 1024), reach(config(max_positions=4096))) == (1032, 128)
    assert (reach(config(max_positions=77)), reach(config(**T5))) == (77, 128)


# The formula ------------------------------------------------------------------------------------------------


@pytest.mark.ledger("B1", "B2", "B4", "B5", "B6", "B7", "D1", "D2", "D3", "D5", "D6", "E6")
@pytest.mark.parametrize("name", OTHERS)
def test_the_formula_knows_every_choice_of_the_config(name):
    inputs = Inputs(build(**OTHERS[name]))
    with torch.no_grad():
        found = {row.name: row.run() for row in formula_rows(inputs) if row.fits}
    assert {name: difference for name, difference in found.items() if not difference <= 1e-5} == {}


@pytest.mark.cpu
def test_the_formula_and_the_model_agree_in_float64():
    """To the last digits: in float64 the only rounding left is that of RoPE's float32 tables."""
    for changes, allowed in ((BERT, 1e-13), (T5, 1e-13), (LLAMA, 1e-6)):
        model, (ids, mask) = build(**changes).double(), pad(some_ids(), "gaps")
        given = (
            {"source": some_ids(2, 5, seed=3)} if "family" in changes and model.decoder is not None else {}
        )
        with torch.no_grad():
            ours = model(ids, mask=mask, **given).logits
        assert (
            worst(
                ours[mask], reference_logits(model.config, model.state_dict(), ids, mask=mask, **given)[mask]
            )
            <= allowed
        )


def test_a_gap_is_relative_to_large_values_only():
    assert gap(torch.tensor([101.0]), torch.tensor([100.0])) == pytest.approx(0.01)
    assert gap(torch.tensor([0.02]), torch.tensor([0.01])) == pytest.approx(0.01)
    assert gap(torch.tensor([0.02]), torch.tensor([0.01]), least=0.0) == pytest.approx(1.0)
    assert gap(torch.zeros(2), torch.zeros(3)) == math.inf


# The rows ---------------------------------------------------------------------------------------------------


def test_a_fault_in_rotation_under_a_cache_is_caught(monkeypatch):
    model = ch.Transformer(ch.preset("micro-decoder").replace(positions="rope"))
    right = positions.RopePositions.rotary

    def from_zero(self, where, window, tap):  # a cache that starts counting anew at each call
        return right(self, where - where[:, :1], window, tap)

    monkeypatch.setattr(positions.RopePositions, "rotary", from_zero)
    failed = [row.name for row in not_passed(ch.check(model))]
    assert failed
    assert all(name.startswith(("cached", "streamed")) for name in failed)


def test_a_model_is_left_as_it_was():
    model = build(dropout=0.5).train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.head.requires_grad_(False)
    assert not_passed(ch.check(model)) == []
    assert model.training
    assert not model.head.out.weight.requires_grad
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def fake_rows(monkeypatch, *rows: Comparison) -> list[ch.Check]:
    monkeypatch.setattr(checks, "checks_for", lambda model, compile: iter(rows))
    return ch.check(build())


def broken() -> float:
    raise ValueError("something broke\nand a second line")


def test_a_row_that_cannot_run_has_failed_and_the_others_go_on(monkeypatch):
    rows = fake_rows(
        monkeypatch,
        Comparison("a", "", broken, 0.0),
        Comparison("b", "", lambda: math.nan, 1.0),
        Comparison("c", "", lambda: 0.5, 1.0),
    )
    assert [row.verdict for row in rows] == ["error", "differs", "equal"]
    assert [row.passed for row in rows] == [False, False, True]
    assert rows[0].note == "ValueError: something broke"
    written = json.loads(json.dumps([row.to_dict() for row in rows], allow_nan=False))
    assert [row["difference"] for row in written] == [None, None, 0.5]


def test_what_would_copy_a_large_model_is_left_out_unless_asked_for(monkeypatch):
    monkeypatch.setattr(checks, "LARGE", 100)
    monkeypatch.setattr(
        checks,
        "checks_for",
        lambda model, compile: iter([Comparison("a", "", lambda: 0.0, 0.0, copies=True)]),
    )
    (skipped,) = ch.check(build())
    assert (skipped.verdict, skipped.passed, skipped.difference) == ("skipped", True, None)
    assert "too large" in skipped.note
    (done,) = ch.check(build(), large=True)
    assert done.verdict == "equal"


def test_a_bare_model_has_nothing_that_transformers_could_open():
    with pytest.raises(ch.InputError, match="directory"):
        ch.check(build(), reference=True)


@pytest.mark.ledger("J2", "O1")
def test_relu_features_at_their_floor_are_held_to_what_float32_can_tell():
    """Rounding grows a thousandfold there; in float64 nothing is left of the difference."""
    model = build(seed=2, attention="linear(relu)")
    differences = {}
    for dtype in (torch.float32, torch.float64):
        rows = {row.name: row for row in checks.checks_for(model.to(dtype))}
        with torch.no_grad():
            differences[dtype] = rows["accumulated = whole"].run()
        assert differences[dtype] <= rows["accumulated = whole"].tolerance
    assert differences[torch.float64] <= 1e-13 and rows["resumed = uninterrupted"].tolerance == 0
