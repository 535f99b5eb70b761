"""Planted faults: each is caught by `ch.check`, in the rows that should see it, and no other row cries."""

from __future__ import annotations

import pytest

import clearhead as ch
from clearhead.run.kernels.kernels import available
from clearhead.run.kernels.library import library
from tests.faults import lengths
from tests.faults.plants import PLANTS
from tests.harness import build
from tests.test_checks import LLAMA

assert lengths  # which adds to the plants

WINDOWED = {**LLAMA, "n_layers": 2, "window": (4, None)}
T5 = {"family": "encoder-decoder", "positions": "relative", "attention_scale": 1.0, "norm": "rmsnorm"}
T5 |= {"bias": False, "activation": "relu"}
BUCKETS = {"relative_buckets": 8, "relative_max_distance": 16}
BART = {"family": "encoder-decoder", "position_offset": 2}
FACTORS = {"short_factor": (1.0, 1.5), "long_factor": (2.0, 3.0)}
LONGROPE = ch.RopeScaling(kind="longrope", original_positions=16, **FACTORS)
DYNAMIC = ch.RopeScaling(kind="dynamic", factor=2.0, original_positions=16)
CLASSIFIER = {"family": "encoder", "head": "classifier", "n_classes": 3, "pooling": "mean"}

LONG, FAR, PROMPTED = "model = formula (long)", "model = formula (far)", "cached = formula (long)"
SWITCH = "cached = formula (switch)"
SHORT = {"model = formula", "model = formula (lively)", "model = formula (quiet)"}
SHORT |= {"cached = formula (lively)"}
CODE = SHORT | {LONG, FAR, PROMPTED}
CACHED = {"cached = formula (lively)", PROMPTED}
PADDED = {f"padded = unpadded ({side})" for side in ("left", "right", "gaps")}
GROWING, RING, FIXED = (
    {f"cached = recomputed ({form}, {how})" for how in ("1", "3", "reordered")}
    for form in ("growing", "windowed", "fixed")
)
STREAMED = {"streamed = kept"}
CROPPED = {"cached = recomputed (cropped)"}
NEW = {"saved = loaded", "resumed = uninterrupted"}  # rows that build the model anew
DROPPED = {"saved = loaded", "accumulated = whole", "pruned = masked", "sampled = trained"}
EDGES = {"circuit of all edges = model", "circuit of no edges = corrupt run", "one edge cut = by hand"}
NOTHING_RANDOM = {"repeated = once", "fused = eager", "batched = alone", "past = whole", "fast copy = model"}
NOTHING_RANDOM |= EDGES | {"integrated gradients = difference", "contributions = logit"}
NOTHING_RANDOM |= {"graph = interventions", "replacement + error = model"}

CASES: dict[str, tuple[dict, set[str]]] = {
    # the seven: RoPE layout, mask offset, cache order, norm eps, tied weights, dropout, head repeat
    "rope_layout": (LLAMA, CODE | STREAMED),
    "sees_the_next": ({**LLAMA, "n_layers": 2}, CODE | GROWING | FIXED | STREAMED | {"past = whole"}),
    "misses_itself": (LLAMA, CODE | STREAMED),
    "misses_itself_in_a_cache": (LLAMA, CACHED | GROWING | FIXED | CROPPED | STREAMED),
    "cache_order": (LLAMA, CACHED | GROWING | CROPPED),
    "cache_rows": (LLAMA, {"cached = recomputed (growing, reordered)"}),
    "norm_eps": ({}, {"model = formula", "model = formula (quiet)"}),
    "untied": ({}, CODE - {LONG, FAR} | {"built = config", "pruned = masked"}),
    "untied_copy": ({}, CODE - {"model = formula", LONG, FAR} | {"built = config"}),
    "tied": ({"tie_embeddings": False}, NEW | {"built = config"}),
    "untied_when_loaded": ({}, {"built = config", "resumed = uninterrupted"}),
    "dropout": ({}, CODE | NOTHING_RANDOM | PADDED | GROWING | FIXED | CROPPED | DROPPED),
    "head_repeat": (LLAMA, CODE | {"pruned = masked"}),
    # others of the model
    "activation": ({}, CODE),
    "no_embedding_scale": ({"embedding_scale": 4.0}, CODE),
    "position_offset": ({}, CODE),
    "window": (WINDOWED, CODE | {"cached = recomputed (windowed, 1)"}),
    "queries_for_keys": ({}, CODE - {PROMPTED} | {"fast copy = model"}),
    "post_for_pre": ({}, CODE),
    "softmax_scale": ({}, CODE),
    "mean_subtracted": (LLAMA, CODE),
    "bucket_sides": ({**T5, **BUCKETS}, CODE),
    "padding_in_the_source": ({**T5, **BUCKETS}, PADDED | {"model = formula (lively)", LONG, PROMPTED}),
    "router_order": ({"n_experts": 4}, CODE),
    "gates_unclamped": ({**LLAMA, "gated_clamp": 7.0, "gated_shift": 1.0}, CODE - {"model = formula"}),
    "mean_over_padding": (CLASSIFIER, PADDED | {"model = formula (lively)", "accumulated = whole"}),
    "ring_forgets": (WINDOWED, RING | CACHED | STREAMED),
    "sinks_stand_still": (LLAMA, STREAMED),
    # from some distance or position on
    "learned_past_100": ({"max_positions": 128}, {LONG, FAR, PROMPTED}),
    "last_learned_position": ({"max_positions": 128}, {LONG, FAR, PROMPTED}),
    "offset_shortens_the_table": ({**BART, "max_positions": 128}, {LONG, FAR, PROMPTED}),
    "far_buckets_at_half_distance": ({**T5, "relative_max_distance": 128}, {LONG, FAR, PROMPTED}),
    "buckets_begin_again": ({**T5, "relative_max_distance": 128}, {LONG, FAR, PROMPTED}),
    "longrope_switches_early": ({**LLAMA, "rope_scaling": LONGROPE}, {FAR, SWITCH}),
    "dynamic_grows_late": ({**LLAMA, "rope_scaling": DYNAMIC}, {FAR, SWITCH}),
    "dynamic_stands_still_alone": ({**LLAMA, "rope_scaling": DYNAMIC}, {SWITCH}),
    "longrope_keeps_what_it_read": ({**LLAMA, "rope_scaling": LONGROPE}, {SWITCH}),
    "longrope_is_read_again_late": ({**LLAMA, "rope_scaling": LONGROPE}, {SWITCH}),
    # from some length on, for which rows have a thousand tokens
    "coarse_distances": ({"positions": "alibi"}, {LONG, PROMPTED}),
    "coarse_sinusoids": ({"positions": "sinusoidal"}, {LONG, PROMPTED}),
    "long_rows_lose_the_window": (WINDOWED, {LONG, PROMPTED}),
    "blocks_miss_the_farthest": (WINDOWED, {LONG, PROMPTED}),
    "blocks_of_queries": (LLAMA, {LONG}),
    "source_past_512": ({**T5, **BUCKETS}, {LONG, PROMPTED}),
    "sink_past_512": ({"attention_sink": True, "positions": "rope"}, {LONG, PROMPTED}),
    "prefill_keeps_the_last_1024": (LLAMA, {PROMPTED}),
    "padding_past_the_first_piece": (LLAMA, {PROMPTED}),
    "cache_grows_by_half": (LLAMA, {PROMPTED}),
    "ring_keeps_the_first": (WINDOWED, STREAMED | {PROMPTED, "cached = recomputed (windowed, reordered)"}),
    "biases_of_many_rows": ({"max_positions": 128}, {PROMPTED}),
    # of what is done with a model
    "forgotten_optimizer": ({}, {"resumed = uninterrupted"}),
    "mean_of_means": ({}, {"accumulated = whole"}),
    "lens_without_norm": ({}, {"lens at the last layer = logits"}),
    "another_head_pruned": ({}, {"pruned = masked"}),
}


def failed(model: ch.Transformer) -> set[str]:
    """The names of the rows that do not pass."""
    return {row.name for row in ch.check(model) if not row.passed}


ON_A_CPU = {"biases_of_many_rows"}  # its linear layers are others there alone
# The fast copy computes some parts by formulas of its own. Then it is right where the model is wrong, or
# wrong like the model where both share a formula.
IN_C = {"queries_for_keys": CODE, "ring_forgets": RING | CACHED - {PROMPTED} | STREAMED}
IN_KERNELS = {"mean_subtracted": CODE - {PROMPTED} | {"fast copy = model"} | STREAMED}


def otherwise(model: ch.Transformer) -> dict[str, set[str]]:
    """Return the cases whose rows are others, by how this machine's fast copy computes."""
    weight = next(model.parameters())
    if weight.is_cuda:
        return IN_KERNELS if available(weight) else {}
    return IN_C if library() is not None else {}


THOUSAND = [*CASES][[*CASES].index("coarse_distances") : [*CASES].index("forgotten_optimizer")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.cpu if name in ON_A_CPU else ()) for name in CASES]
)
@pytest.mark.slow
def test_a_planted_fault_is_caught_where_it_should_be(name, monkeypatch, request):
    (plant, wants_model), (changes, rows) = PLANTS[name], CASES[name]
    if name not in THOUSAND:
        request.getfixturevalue("short_pieces")
    if not wants_model:
        plant(monkeypatch)
    model = build(**{"n_layers": 1, **changes})
    if wants_model:
        plant(monkeypatch, model)
    found, rows = failed(model), otherwise(model).get(name, rows)
    on_a_device = {"device = CPU"} & found if name == "dropout" else set()  # random, so unlike the CPU's
    # Contributions read tables and norms by themselves, so they see some faults of these too.
    seen_apart = {"contributions = logit"} & found
    assert found == rows | on_a_device | seen_apart


def test_every_plant_has_a_case():
    assert CASES.keys() == PLANTS.keys()


def test_a_fault_too_small_for_the_weights_is_seen_in_a_copy(monkeypatch):
    """Tame weights hide which formula of GELU is used; large activations hide eps."""
    with monkeypatch.context() as patched:
        PLANTS["activation"][0](patched)
        assert failed(ch.Transformer(ch.preset("micro-decoder"))) == CODE - {"model = formula"}
    PLANTS["norm_eps"][0](monkeypatch)
    model = build()
    model.decoder.embedding.front.tokens.weight.data *= 30
    assert failed(model) == {"model = formula (quiet)"}
