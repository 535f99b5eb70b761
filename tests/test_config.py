"""ModelConfig: every check speaks, every config survives JSON, and `replace` derives values anew."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import clearhead as ch
from tests.harness import config

WRONG = {  # what the line says: choices
    "d_model 100 is not divisible by n_heads 12: set d_head, .* 1, 2, 4, 5, 10, 20, 25": {
        "d_model": 100,
        "n_heads": 12,
    },
    "n_heads 4 is not divisible by n_kv_heads 3: choose n_kv_heads from 1, 2, 4": {"n_kv_heads": 3},
    "n_encoder_heads 3 is not divisible by n_kv_heads 2": {
        "family": "encoder-decoder",
        "n_kv_heads": 2,
        "n_encoder_heads": 3,
        "d_encoder_head": 4,
    },
    "d_model 16 is not divisible by n_encoder_heads 3": {"family": "encoder-decoder", "n_encoder_heads": 3},
    "d_embedding 4 .* d_model 16": {"d_embedding": 4, "embedding_projection": False},
    "project_tokens widens .* leave project_tokens out": {"project_tokens": True},
    "n_layers 0 must be 1 or more": {"n_layers": 0},
    "d_ff -1 must be 1 or more": {"d_ff": -1},
    "max_positions 0 must be 1 or more": {"max_positions": 0},
    "dropout 1.0 is not a probability: choose 0": {"dropout": 1.0},
    "attention_dropout -0.1 is not a probability": {"attention_dropout": -0.1},
    "layer_drop 2.0 is not a probability": {"layer_drop": 2.0},
    "norm_eps 0.0 must be above 0": {"norm_eps": 0.0},
    "rmsnorm has no bias": {"norm": "rmsnorm", "norm_bias": True},
    "layer_groups 3 must lie between 1 and n_layers 2": {"layer_groups": 3},
    "n_encoder_layers belongs to family encoder-decoder": {"n_encoder_layers": 2},
    "source_vocab_size belongs to": {"family": "encoder", "source_vocab_size": 2},
    "parallel has no place for cross-attention": {"family": "encoder-decoder", "parallel": True},
    "parallel needs norm_position pre or sandwich, not post": {"parallel": True, "norm_position": "post"},
    "window lists 3 layers and there are 2": {"window": (1, 2, 3)},
    "window lists 2 layers and there are 3": {
        "family": "encoder-decoder",
        "n_encoder_layers": 3,
        "window": (1, 2),
    },
    "window 0 must be 1 or more": {"window": 0},
    "window -1 must be 1 or more": {"window": (2, -1)},
    "rope_fraction 0.0 of d_head 4 rotates no pair": {"positions": "rope", "rope_fraction": 0.0},
    "rope_fraction 1.5": {"positions": "rope", "rope_fraction": 1.5},
    "rope rotates pairs, and 5 of d_head 5 is odd": {"positions": "rope", "d_head": 5},
    "rope_base 0.0 must be above 0": {"rope_base": 0.0},
    "attention_softcap -1.0 must be above 0": {"attention_softcap": -1.0},
    "logit_softcap 0.0 must be above 0": {"logit_softcap": 0.0},
    "relative_buckets 2 must lie between 4 and 255": {"positions": "relative", "relative_buckets": 2},
    "relative_buckets 32 must lie between 4 and 15": {"positions": "relative", "relative_max_distance": 8},
    "n_active_experts 3 must lie between 1 and n_experts 2": {"n_experts": 2, "n_active_experts": 3},
    "n_experts -1 must be 0 or more": {"n_experts": -1},
    "n_types -1 must be 0 or more": {"n_types": -1},
    "position_offset -2 must be 0 or more": {"position_offset": -2},
    'names "blocks.2.attention", which .*did you mean "blocks': {
        "pruned_heads": {"blocks.2.attention": (0,)}
    },
    r"are \[0, 0\]: name each of the heads 0 to 3 once": {"pruned_heads": {"blocks.0.attention": (0, 0)}},
    r"are \[4\]: name each of the heads 0 to 3": {"pruned_heads": {"blocks.0.attention": (4,)}},
    "leaves no head": {"pruned_heads": {"blocks.0.attention": (0, 1, 2, 3)}},
    "splits a key/value group": {"n_kv_heads": 2, "pruned_heads": {"blocks.0.attention": (0, 2)}},
    "layer_groups shares weights": {"layer_groups": 1, "pruned_heads": {"blocks.0.attention": (0,)}},
    "qk_norm full": {"qk_norm": "full", "pruned_heads": {"blocks.0.attention": (0,)}},
    "gated_clamp 7.0 needs a gate: set gated true": {"gated_clamp": 7.0},
    "gated_shift -1.0 needs a gate: set gated true": {"gated_shift": -1.0},
    "gated_clamp 0.0 must be above 0": {"gated": True, "gated_clamp": 0.0},
    "router_bias needs a router: set n_experts": {"router_bias": True},
    "d_shared_expert needs a router: set n_experts": {"d_shared_expert": 8},
    "dense_layers needs a router: set n_experts": {"dense_layers": (0,)},
    "dense_layers names layer 2, and there are layers 0 to 1": {"n_experts": 2, "dense_layers": (2,)},
    "leaves no layer to the experts": {"n_experts": 2, "dense_layers": (0, 1)},
    "layer 1 shares its weights by layer_groups with one of the dense_layers": {
        "n_experts": 2,
        "dense_layers": (0,),
        "layer_groups": 1,
    },
    "d_expert 0 must be 1 or more": {"n_experts": 2, "d_expert": 0},
    "vocab_size is not set": {"vocab_size": 0},
    "source_vocab_size 5 differs from vocab_size 13": {"family": "encoder-decoder", "source_vocab_size": 5},
    "input patches needs image_size": {"family": "encoder", "input": "patches", "n_classes": 2},
    "whole number of patches": {
        "family": "encoder",
        "input": "patches",
        "n_classes": 2,
        "image_size": (8, 9),
        "patch_size": 4,
    },
    "max_positions 32 is below the 37 positions of one image": {
        "family": "encoder",
        "input": "patches",
        "n_classes": 2,
        "image_size": (24, 24),
        "patch_size": 4,
        "class_token": True,
    },
    "d_input 0 must be 1 or more": {"family": "encoder", "input": "vectors", "n_classes": 2},
    "conv_kernel 4 is even": {"conv_kernel": 4},
    "head lm predicts ids and input is vectors": {"input": "vectors", "d_input": 3},
    "head mlm predicts ids and input is patches": {
        "family": "encoder",
        "input": "patches",
        "image_size": (8, 8),
        "patch_size": 4,
    },
    "class_token belongs to input patches": {"class_token": True},
    "head classifier needs n_classes": {"head": "classifier"},
    "head tagger needs n_classes": {"family": "encoder", "head": "tagger"},
    "head mlm reads both sides of a mask and family is decoder": {"head": "mlm"},
    'family .decodr. is not allowed: it must be one of .*did you mean "decoder"': {"family": "decodr"},
    'did you mean "rmsnorm"': {"norm": "rmsnrm"},
    "d_model '16' is not allowed: it must be a whole number": {"d_model": "16"},
    "n_layers 2.0 is not allowed: it must be a whole number": {"n_layers": 2.0},
    "n_layers True is not allowed": {"n_layers": True},
    "gated 1 is not allowed: it must be true or false": {"gated": 1},
    r"window \[1, 2\] is not allowed: it must be a whole number or a list of": {"window": [1, 2]},
    "image_size .* 2 values of a whole number": {"image_size": (1, 2, 3)},
    "rope_base inf is not a finite number": {"rope_base": float("inf")},
    "parallel_norms 3 is not allowed: it must be one of 1, 2": {"parallel_norms": 3},
    "it must be a table": {"pruned_heads": {"blocks.0.attention": 3}},
}


@pytest.mark.ledger("E5")
@pytest.mark.parametrize("says", WRONG)
def test_every_cross_check(says):
    with pytest.raises(ch.ConfigError, match=says) as caught:
        config(**WRONG[says])
    assert "\n" not in str(caught.value)


def test_derived_values_hold():
    plain = ch.ModelConfig(vocab_size=9, d_model=48, n_heads=6)
    expected = dict(
        d_head=8, d_value=8, d_ff=192, n_kv_heads=6, attention_scale=8**-0.5, head="lm", head_bias=False
    )
    expected |= dict(final_norm=True, pooling="last", head_transform=False, d_embedding=48, norm_bias=True)
    assert {name: getattr(plain, name) for name in expected} == expected
    masked = ch.ModelConfig(family="encoder", vocab_size=9, norm="rmsnorm", norm_position="post", bias=False)
    expected = dict(
        head="mlm", head_transform=True, head_bias=True, pooling="cls", final_norm=False, norm_bias=False
    )
    expected |= {"qkv_bias": False, "feedforward_bias": False, "n_encoder_layers": None}
    assert {name: getattr(masked, name) for name in expected} == expected
    assert ch.ModelConfig(vocab_size=9, n_classes=3).head == "classifier"
    both = ch.ModelConfig(family="encoder-decoder", vocab_size=9, d_ff=100)
    assert (both.d_encoder_ff, both.n_encoder_layers, both.source_vocab_size) == (100, 6, 9)


def test_replace_derives_anew_and_keeps_what_was_set():
    plain = config()
    assert plain.replace(d_model=32).d_head == 8
    assert plain.replace(n_heads=8).n_kv_heads == 8
    assert plain.replace(n_classes=3).head == "classifier"
    assert plain.replace(norm_position="post").final_norm is False
    assert plain.replace(dropout=0.1).attention_dropout == 0.1
    chosen = config(d_head=8, d_ff=20, head="none", attention_scale=1.0, n_kv_heads=2)
    again = chosen.replace(dropout=0.1)
    assert (again.d_head, again.d_ff, again.head, again.attention_scale, again.n_kv_heads) == (
        8,
        20,
        "none",
        1.0,
        2,
    )
    assert again.replace(dropout=0.0) == chosen
    odd = ch.ModelConfig(vocab_size=9, d_model=10, n_heads=3, d_head=4)
    assert odd.replace(n_layers=1).d_head == 4
    both = config(family="encoder-decoder", d_ff=20)
    assert both.replace(d_ff=40).d_encoder_ff == 40
    with pytest.raises(ch.ConfigError, match=r'unknown config key "n_layer" .did you mean "n_layers"'):
        plain.replace(n_layer=3)


def test_frozen_and_hashable():
    one, two = (
        config(pruned_heads={"blocks.0.attention": (1,)}),
        config(pruned_heads={"blocks.0.attention": (1,)}),
    )
    assert one == two
    assert hash(one) == hash(two)
    assert len({one, two, config()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.d_model = 3


def longrope(*factors: float) -> ch.ModelConfig:
    scaling = ch.RopeScaling(kind="longrope", short_factor=factors, long_factor=factors)
    return config(positions="rope", rope_scaling=scaling)


def read(**values: object) -> ch.ModelConfig:
    return ch.ModelConfig.from_dict(values)


MISTAKES = {
    "factor 0 must be positive": lambda: ch.RopeScaling(kind="linear", factor=0),
    "beta_slow 0 must be positive": lambda: ch.RopeScaling(kind="yarn", factor=2.0, beta_slow=0),
    "longrope needs short_factor and long_f": lambda: ch.RopeScaling(kind="longrope", short_factor=(1.0,)),
    'did you mean "linear"': lambda: ch.RopeScaling(kind="liner"),
    "2 pairs": lambda: longrope(1.0),
    " 2 pairs": lambda: longrope(1.0, 2.0, 3.0),
    r'unknown config key "n_head" .did you mean "n_heads"': lambda: read(n_head=3),
    "config is not JSON": lambda: ch.ModelConfig.from_json("{"),
    "must be a JSON object, not list": lambda: ch.ModelConfig.from_json("[1]"),
    r'unknown config key "kinds"': lambda: read(vocab_size=3, rope_scaling={"kinds": "linear"}),
    "missing 1 required keyword-only argument: 'kind'": lambda: read(
        vocab_size=3, rope_scaling={"factor": 2.0}
    ),
    "is not allowed": lambda: read(vocab_size=3, rope_scaling=4),
}


@pytest.mark.parametrize("says", MISTAKES)
def test_mistakes_in_scalings_and_in_json(says):
    with pytest.raises(ch.ConfigError, match=says):
        MISTAKES[says]()


probability = st.floats(0, 0.99)
CHOICES = {
    "family": st.sampled_from(["decoder", "encoder", "encoder-decoder"]),
    "n_layers": st.integers(1, 4),
    "n_kv_heads": st.sampled_from([None, 1, 2, 4]),
    "d_head": st.sampled_from([None, 2, 6]),
    "d_value": st.sampled_from([None, 3]),
    "d_ff": st.sampled_from([None, 7]),
    "d_embedding": st.sampled_from([None, 5]),
    "embedding_scale": st.floats(0.1, 100),
    "n_types": st.integers(0, 2),
    "tie_embeddings": st.booleans(),
    "positions": st.sampled_from(["learned", "sinusoidal", "rope", "alibi", "relative", "none"]),
    "rope_base": st.floats(1, 1e7),
    "rope_layout": st.sampled_from(["half", "interleaved"]),
    "rope_scaling": st.sampled_from(
        [
            None,
            ch.RopeScaling(kind="linear", factor=3.7),
            ch.RopeScaling(kind="yarn", factor=2.0, mscale=0.7, truncate=False),
            ch.RopeScaling(kind="longrope", short_factor=(1.0, 1.1), long_factor=(2.5, 1 / 3)),
        ]
    ),
    "window": st.one_of(st.none(), st.integers(1, 9)),
    "attention_softcap": st.one_of(st.none(), st.floats(0.1, 100)),
    "attention_scale": st.one_of(st.none(), st.floats(0.01, 1)),
    "qk_norm": st.sampled_from(["none", "head", "full"]),
    "bias": st.booleans(),
    "qkv_bias": st.sampled_from([None, True, False]),
    "activation": st.sampled_from(["relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "relu2"]),
    "gated": st.booleans(),
    "n_experts": st.sampled_from([0, 2, 5]),
    "attention_gate": st.booleans(),
    "norm": st.sampled_from(["layernorm", "rmsnorm"]),
    "norm_position": st.sampled_from(["pre", "post", "sandwich", "output"]),
    "norm_eps": st.floats(1e-12, 1e-3),
    "final_norm": st.sampled_from([None, True, False]),
    "dropout": probability,
    "embedding_dropout": st.one_of(st.none(), probability),
    "n_classes": st.integers(0, 3),
    "logit_softcap": st.one_of(st.none(), st.floats(0.1, 100)),
    "init": st.sampled_from(["xavier", "gpt2", "bert"]),
}


@pytest.mark.ledger("E5")
@settings(max_examples=300)
@given(st.fixed_dictionaries({}, optional=CHOICES))
@pytest.mark.slow
def test_json_round_trip_is_exact(choices):
    """Any config comes back from JSON equal, floats to the last bit, and writes the same text again."""
    scaling = choices.get("rope_scaling")
    pairs = (choices.get("d_head") or 4) // 2
    # Any other length is refused.
    assume(scaling is None or scaling.kind != "longrope" or pairs == len(scaling.short_factor))
    there = config(**choices)
    text = there.to_json()
    back = ch.ModelConfig.from_json(text)
    assert back == there
    assert hash(back) == hash(there)
    assert back.to_json() == text
    assert there.replace() == there
    assert json.loads(text)["family"] == there.family  # always said, so that a reader sees what it is


def test_json_of_nested_values():
    there = config(window=(None, 3), pruned_heads={"blocks.1.attention": (0, 2)})
    back = ch.ModelConfig.from_json(there.to_json())
    assert back == there
    assert back.window == (None, 3)
    assert back.pruned_heads == {"blocks.1.attention": (0, 2)}
    image = ch.ModelConfig(family="encoder", input="patches", image_size=(32, 16), n_classes=2)
    assert ch.ModelConfig.from_json(image.to_json()) == image
    assert "d_model" not in json.loads(image.to_json())  # what is at its default is left out
