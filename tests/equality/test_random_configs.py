"""Configs drawn at random from every choice that a user has: `ch.check` finds no fault in any of them.

A right model that fails is a fault of the suite: of its reference, its copies or its inputs.
`CLEARHEAD_CONFIGS=1000` tries as many; each takes half a second.
"""

from __future__ import annotations

import os
import random
from dataclasses import fields
from typing import Any

import pytest

import clearhead as ch
from clearhead.core.config.fields import Fields
from tests.equality.test_random_kinds import some_kind
from tests.harness import V, build

COUNT = int(os.environ.get("CLEARHEAD_CONFIGS", "0")) or 28
SCALINGS = (
    ch.RopeScaling(kind="linear", factor=2.0),
    ch.RopeScaling(kind="dynamic", factor=2.0, original_positions=16),
    ch.RopeScaling(kind="llama3", factor=8.0, original_positions=16),
    ch.RopeScaling(kind="yarn", factor=4.0, original_positions=16, mscale=1.0, mscale_all_dim=0.5),
    ch.RopeScaling(kind="longrope", short_factor=(1.0, 1.5), long_factor=(2.0, 3.0), original_positions=16),
)
FLAGS = (False, True)
# What each field may be beside its default, in a model of `some_config`'s size.
CHOICES: dict[str, tuple[Any, ...]] = {
    "n_kv_heads": (1, 2),
    "n_encoder_heads": (2,),
    "d_head": (6,),
    "d_encoder_head": (6,),
    "d_value": (3, 7),
    "d_ff": (20,),
    "d_encoder_ff": (18,),
    "d_expert": (9,),
    "n_encoder_layers": (1, 3),
    "layer_groups": (1, 2),
    "max_encoder_positions": (24,),
    "source_vocab_size": (11,),
    "pruned_heads": ({"blocks.0.attention": (0, 1)},),
    "embedding_scale": (4.0,),
    "embedding_norm": (True,),
    "project_tokens": (True,),
    "embedding_projection": (True,),
    "d_embedding": (8,),
    "share_embeddings": (False,),
    "tie_embeddings": (False,),
    "n_types": (2, 3),
    "positions": ("rope", "rope", "sinusoidal", "alibi", "relative", "learned+relative", "none"),
    "position_offset": (2,),
    "sinusoid_layout": ("half",),
    "sinusoid_ends": (True,),
    "rope_base": (500.0,),
    "rope_local_base": (100.0,),
    "rope_layout": ("interleaved",),
    "rope_fraction": (0.5,),
    "rope_scaling": SCALINGS,
    "rope_skips": ((1,),),
    "relative_buckets": (8,),
    "relative_max_distance": (16,),
    "relative_terms": ("c2p", "p2c"),
    "relative_norm": (True,),
    "window": (3, 6, 100),
    "attention_scale": (0.3, 1.0),
    "attention_softcap": (3.0,),
    "attention_sink": (True,),
    "attention_gate": (True,),
    "qk_norm": ("head", "full"),
    "activation": ("relu", "gelu_tanh", "quick_gelu", "silu", "relu2"),
    "gated": (True,),
    "gated_clamp": (0.3, 7.0),
    "gated_shift": (0.5,),
    "n_experts": (2, 4),
    "n_active_experts": (1, 2),
    "router_order": ("softmax_topk",),
    "router_renormalise": (False,),
    "router_bias": (True,),
    "d_shared_expert": (10,),
    "dense_layers": ((0,),),
    "depth_capacity": (0.5, (0.25, 1.0)),
    "norm": ("rmsnorm",),
    "norm_eps": (1e-6, 1e-12),
    "norm_unit_offset": (True,),
    "norm_position": ("post", "sandwich", "output"),
    "first_norm": (False,),
    "final_norm": FLAGS,
    "parallel": (True,),
    "parallel_norms": (2,),
    "residual_scale": (0.5,),
    "bias": (False,),
    "qkv_bias": FLAGS,
    "key_bias": (False,),
    "attention_out_bias": FLAGS,
    "feedforward_bias": FLAGS,
    "norm_bias": FLAGS,
    "dropout": (0.1,),
    "attention_dropout": (0.1,),
    "embedding_dropout": (0.1,),
    "feedforward_dropout": (0.1,),
    "layer_drop": (0.1,),
    "head": ("lm", "mlm", "classifier", "tagger", "span", "embedding", "none"),
    "pooling": ("cls", "mean", "last"),
    "pooler": ("tanh", "relu"),
    "pooler_bias": (False,),
    "pooler_norm": (True,),
    "normalise": (True,),
    "head_transform": FLAGS,
    "head_layer": (True,),
    "head_activation": ("relu", "silu"),
    "head_bias": FLAGS,
    "logit_scale": (0.25,),
    "logit_softcap": (3.0,),
    "patch_bias": (False,),
    "class_token": (True,),
    "n_channels": (1,),
    "conv_kernel": (5,),
    "conv_stride": (1, 3),
}
# Sizes that every model has, and how fresh weights are drawn, which `build` draws anew.
OF_SIZE = {
    "vocab_size",
    "d_model",
    "n_layers",
    "n_heads",
    "max_positions",
    "family",
    "attention",
    "n_classes",
}
OF_SIZE |= {"input", "patch_size", "image_size", "d_input", "init", "init_std"}


# What many of these need, or what is rarely met by chance: each model begins with two of them.
FIRST: tuple[dict[str, Any], ...] = (
    {"gated": True},
    {"n_experts": 4, "n_active_experts": 1},
    {"positions": "rope"},
    {"n_types": 2},
    {"depth_capacity": 0.5},
    {"window": 6},
    {"family": "encoder-decoder"},
    {"family": "encoder", "positions": "disentangled"},
    {"family": "encoder", "head": "tagger", "n_classes": 3},
    {"family": "encoder", "head": "classifier", "n_classes": 3, "pooler": "tanh"},
    {"family": "encoder", "head": "embedding"},
    {"head": "classifier", "n_classes": 3},
    {"family": "encoder", "input": "patches", "image_size": (8, 12), "patch_size": 4, "head": "none"},
    {"family": "encoder-decoder", "input": "frames", "d_input": 5},
    {"family": "encoder", "input": "vectors", "d_input": 5, "head": "none"},
)
SIZE = {"vocab_size": V, "d_model": 16, "n_heads": 4, "d_ff": 24, "max_positions": 32}


def some_config(draw: random.Random) -> dict[str, Any]:
    """Return what a config accepts: the first choices, then a tenth of the others, each where it may be."""
    chosen: dict[str, Any] = {"n_layers": draw.choice((2, 3))}
    drawn = draw.sample(FIRST, 2)
    drawn += [{name: draw.choice(values)} for name, values in CHOICES.items() if draw.random() < 0.1]
    if draw.random() < 0.4:
        causal = not any(first.get("family") == "encoder" for first in drawn)
        drawn.append({"attention": tuple(some_kind(draw, causal) for _ in range(chosen["n_layers"]))})
    for more in drawn:
        try:
            ch.ModelConfig(**{**SIZE, **more, **chosen})
        except ch.ConfigError:  # what has no meaning together
            continue
        chosen = {**more, **chosen}
    return chosen


def test_every_field_of_a_config_is_drawn():
    assert {field.name for field in fields(Fields)} == CHOICES.keys() | OF_SIZE


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.usefixtures("short_pieces")
def test_a_right_model_of_any_config_passes(seed):
    chosen = some_config(random.Random(seed))
    failed = [
        (row.name, row.difference, row.note) for row in ch.check(build(seed, **chosen)) if not row.passed
    ]
    assert failed == [], chosen
