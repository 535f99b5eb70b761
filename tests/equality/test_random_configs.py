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
import torch

import clearhead as ch
from clearhead.core.config import kinds as config_kinds
from clearhead.core.config.fields import Fields
from clearhead.inside.checks.reference_float64 import reference_logits
from clearhead.variants import blocks
from tests.harness import V, build, in_pieces, some_ids, worst
from tests.test_checks import SCALINGS

COUNT = int(os.environ.get("CLEARHEAD_CONFIGS", "0")) or 20
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
    "smear_gate": (5,),
    "bigrams": (7,),
    "positions": ("rope", "rope", "sinusoidal", "alibi", "relative", "learned+relative", "none"),
    "position_offset": (2,),
    "sinusoid_layout": ("half",),
    "sinusoid_ends": (True,),
    "rope_base": (500.0,),
    "rope_local_base": (100.0,),
    "rope_layout": ("interleaved",),
    "rope_fraction": (0.5,),
    "rope_scaling": tuple(SCALINGS),
    "rope_skips": ((1,),),
    "rope_sections": ((1, 1), (1, 2)),
    "rope_axial": (True,),
    "relative_buckets": (8,),
    "relative_max_distance": (16,),
    "relative_terms": ("c2p", "p2c"),
    "relative_norm": (True,),
    "window": (3, 6, 100),
    "attention_scale": (0.3, 0.6),
    "attention_softcap": (3.0,),
    "attention_sink": (True,),
    "attention_gate": (True,),
    "head_gate": (5,),
    "value_residual": (True,),
    "value_embeddings": ((0,), (0, 1)),
    "qk_norm": ("head", "full"),
    "activation": ("relu", "gelu_tanh", "quick_gelu", "silu", "relu2"),
    "gated": (True,),
    "gated_clamp": (0.3, 7.0),
    "gated_shift": (0.5,),
    "gate_scale": (0.7,),
    "up_scale": (1.3,),
    "n_experts": (2, 4),
    "n_active_experts": (1, 2),
    "router_order": ("softmax_topk", "sigmoid_topk"),
    "router_correction": (True,),
    "router_groups": (2,),
    "n_active_groups": (2,),
    "router_scale": (2.5,),
    "shared_expert_gate": (False,),
    "router_renormalise": (False,),
    "router_bias": (True,),
    "d_shared_expert": (10,),
    "dense_layers": ((0,),),
    "feedforward_skips": ((0,), (1,)),
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
    "input_skips": (True,),
    "mirror_skips": (True,),
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
    "loop": ((0, 1, 2), (1, 1, 3), (0, 2, 2)),
    "n_mtp_layers": (2,),
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
OF_SIZE |= {"zero_init", "input", "patch_size", "image_size", "d_input", "init", "init_std"}


# What many of these need, or what is rarely met by chance: each model begins with two of them.
FIRST: tuple[dict[str, Any], ...] = (
    {"gated": True},
    {"n_experts": 4, "n_active_experts": 1},
    {"n_experts": 4, "router_order": "sigmoid_topk", "router_groups": 2, "n_active_groups": 2},
    {"positions": "rope", "rope_fraction": 0.5, "attention": "latent(5, query_rank=7)"},
    {"positions": "rope"},
    {"positions": "rope", "rope_sections": (1, 1), "rope_axial": True},
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
@pytest.mark.slow
def test_a_right_model_of_any_config_passes(seed):
    chosen = some_config(random.Random(seed))
    failed = [
        (row.name, row.difference, row.note) for row in ch.check(build(seed, **chosen)) if not row.passed
    ]
    assert failed == [], chosen


# Kinds drawn at random, one for each layer, in rows padded, packed and cut anyhow ------------------------


POSITIONS = ("rope", "learned", "alibi", "none", "relative", "sinusoidal")


def some_kind(draw: random.Random, causal: bool) -> str:
    """The text of a kind of attention."""

    def one(*among: object) -> str:
        return str(draw.choice(among))

    sinks = f", sinks={one(0, 1, 2, 40)}"
    ends = "" if causal else f", last={one(0, 1, 50)}, full={one(0, 8, 100)}"
    more = f", random={one(0, 1, 3)}, seed={one(0, 3)}, counted={one('tokens', 'blocks')}, repeat={one(0, 3)}"
    choices = [
        "full",
        f"window({one(1, 2, 3, 7, 100)}{sinks})",
        f"dilated({one(1, 2, 5, 50)}, {one(1, 2, 3, 7)}{sinks})",
        f"strided({one(1, 2, 3, 5, 40)}{sinks})",
        f"blocks({one(1, 2, 3, 5, 30)}, {one(1, 3, 5)}, {one(1, 2, 7)}{ends}{more}{sinks})",
        one("linear", "linear(relu)", "linear(favor)", "linear(favor, 3, seed=2)"),
        one("latent(3)", "latent(9, query_rank=5)"),
    ]
    if causal:
        sizes = f"key_heads=1, value_heads=3, d_key=5, d_value=3, kernel={one(2, 6)}"
        states = (
            f"groups=2, d_state=3, kernel={one(2, 6)}, norm={one('all', 'groups')}, bias={one(True, False)}"
        )
        recurrent = one(
            f"mamba2(4, {states})", "mamba2(d_state=5, dt_min=0.1, dt_max=0.7)", "conv(2, bias=True)"
        )
        return one(*choices, "gated-delta", f"gated-delta({sizes})", recurrent, "none")
    return one(*choices, f"global({one(1, 2, 4, 50)}{sinks})", f"low-rank({one(1, 9)})")


def some_model(draw: random.Random, seed: int) -> ch.Transformer:
    """A model of one to three layers that its config allows."""
    while True:
        family, layers = draw.choice(("encoder", "decoder", "decoder")), draw.choice((1, 2, 3))
        choices = {
            "positions": draw.choice(POSITIONS),
            "n_kv_heads": draw.choice((1, 2, 4, 4)),
            "rope_fraction": draw.choice((1.0, 0.5)),
            "attention_gate": draw.random() < 0.2,
            "head_gate": draw.choice((0, 0, 0, 3)),
            "attention_sink": draw.random() < 0.1,
            "attention_softcap": draw.choice((None, None, None, 3.0)),
            "qk_norm": draw.choice(("none", "none", "head", "full")),
            "d_value": draw.choice((4, 6)),
        }
        kinds = tuple(some_kind(draw, family == "decoder") for _ in range(layers))
        try:
            return build(
                seed, family=family, n_layers=layers, attention=kinds, max_positions=64, **choices
            ).double()
        except ch.ConfigError:  # what has no meaning together
            continue


def some_rows(draw: random.Random, model: ch.Transformer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Ids, and perhaps a mask and documents; the id of padding says nothing."""
    kinds = model.config.attention
    B, T = draw.choice((1, 2, 3)), draw.choice((1, 2, 7, 16, 33))
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    given, mask = {}, torch.ones(B, T, dtype=torch.bool)
    how = draw.choice(("none", "left", "right", "gaps", "empty"))
    for row in range(B):
        count = draw.randrange(T)
        mask[row, {"left": slice(count), "right": slice(T - count, T)}.get(how, slice(0))] = False
    if how in ("gaps", "empty"):
        mask = torch.rand(B, T, generator=generator) < 0.7
    if how == "empty":
        mask[draw.randrange(B)] = False
    if how != "none":
        given["mask"] = mask
    if draw.random() < 0.4 and not any("low-rank" in kind for kind in kinds):
        named = 7 - (torch.rand(B, T, generator=generator) < 0.15).long().cumsum(1)
        given["documents"] = torch.where(mask, named, torch.randint(9, (B, T), generator=generator))
    if any("global" in kind for kind in kinds) and draw.random() < 0.5:
        given["global_mask"] = torch.rand(B, T, generator=generator) < 0.2
    return some_ids(B, T, seed=draw.randrange(10**6), vocab=V), given


def by_formula(model: ch.Transformer, ids: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of each document of each row by itself, in float64; zeros for padding."""
    real = given.get("mask", torch.ones_like(ids, dtype=torch.bool))
    logits = torch.zeros(*ids.shape, V, dtype=torch.float64)
    for row in range(len(ids)):
        documents = given["documents"][row] if "documents" in given else torch.zeros_like(ids[row])
        for document in documents[real[row]].unique():
            at = ((documents == document) & real[row]).nonzero().flatten()
            more = {name: x[row : row + 1, at] for name, x in given.items() if name == "global_mask"}
            alone = reference_logits(model.config, model.state_dict(), ids[row : row + 1, at], **more)
            logits[row, at] = alone[0]
    return logits


@pytest.mark.ledger("J1", "J2", "C2", "C5")
@pytest.mark.parametrize("seed", range(30))
def test_any_kinds_in_any_rows_are_their_formula(seed, monkeypatch):
    monkeypatch.setattr(config_kinds, "SMALLEST", 2)
    monkeypatch.setattr(blocks, "WORTH", 1)
    draw = random.Random(seed)
    model = some_model(draw, seed)
    ids, given = some_rows(draw, model)
    real = given.get("mask", torch.ones_like(ids, dtype=torch.bool))
    probe = torch.randn(*ids.shape, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    logits = model(ids, **given).logits
    assert logits.isfinite().all()
    assert worst(logits[real], by_formula(model, ids, given)[real]) < 1e-6  # random features are float32
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    found = {}
    for kernel in ("fused", "eager"):
        with ch.attending(model, kernel):
            loss = (model(ids, **given).logits * probe)[real].sum()
            found[kernel] = torch.autograd.grad(loss, weights, allow_unused=True)
    for mine, theirs in zip(*found.values()):
        mine, theirs = (torch.zeros(()) if one is None else one for one in (mine, theirs))
        assert (mine - theirs).abs().max() < 1e-6 * max(1.0, float(theirs.abs().max()))
    if model.config.decoder is None:
        return
    caches = [
        ch.Cache(),
        ch.WindowCache(),
        ch.FixedCache(model.config, len(ids), ids.shape[1], torch.float64),
    ]
    stateful = any(kind.stateful for kind in model.config.decoder.kinds)
    with torch.no_grad():
        for cache in caches[
            : 2 if stateful and "documents" in given else 3
        ]:  # the last refuses the two together
            sizes = []
            while sum(sizes) < ids.shape[1]:
                sizes.append(min(draw.choice((1, 1, 3, 20)), ids.shape[1] - sum(sizes)))
            again = in_pieces(model, ids, sizes, cache, **given)
            assert worst(again[real], logits[real]) < 1e-8, (type(cache).__name__, sizes)
            cache.crop(0)  # always has a meaning: the same text once more
            again = in_pieces(model, ids, sizes, cache, **given)
            assert worst(again[real], logits[real]) < 1e-8, (type(cache).__name__, sizes)


def test_an_id_of_documents_that_comes_back_is_refused():
    model, ids = build(attention=("window(3)", "linear")), some_ids(2, 6)
    documents = torch.tensor([[1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 4, 4]])
    with pytest.raises(ch.InputError, match="documents of row 1 come back to an id after another one"):
        model(ids, documents=documents)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 2:4] = False  # what stands there is padding, and its id says nothing
    with torch.no_grad():
        found = model(ids, documents=documents, mask=mask).logits[1, [0, 1, 4, 5]]
        assert worst(found, model(ids[1:, [0, 1, 4, 5]]).logits[0]) < 1e-5
        cache = ch.Cache()
        model(ids[:1, :4], documents=documents[:1, :4], cache=cache)
        with pytest.raises(ch.InputError, match="give each run its own"):
            model(ids[:1, 4:], documents=torch.ones(1, 2, dtype=torch.long), cache=cache)


def test_every_cache_crops_to_nothing():
    """A window that has forgotten, and a stream, begin anew."""
    model, ids = build(attention=("window(3, sinks=1)", "full"), positions="rope"), some_ids(2, 12)
    with torch.no_grad():
        for cache in (ch.WindowCache(), ch.StreamCache(model.config, 6, 2)):
            first = model(ids, cache=cache).logits
            cache.crop(0)
            assert cache.length == 0 and worst(model(ids, cache=cache).logits, first) < 1e-6
