"""Kinds drawn at random, one for each layer, in rows padded, packed and cut anyhow: the formula's numbers.

Sizes are odd, larger than the text, or one; rows may be empty or of one token. Blocks are as short as two
tokens, so that short rows are planned by blocks too. Models are float64: only a mistake differs.
"""

from __future__ import annotations

import random

import pytest
import torch

import clearhead as ch
from clearhead.core.config import kinds as config_kinds
from clearhead.inside.checks.reference_float64 import reference_logits
from clearhead.variants import blocks
from tests.harness import V, build, in_pieces, some_ids, worst

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
    ]
    if causal:
        sizes = f"key_heads=1, value_heads=3, d_key=5, d_value=3, kernel={one(2, 6)}"
        return one(*choices, "gated-delta", f"gated-delta({sizes})")
    return one(*choices, f"global({one(1, 2, 4, 50)}{sinks})", f"low-rank({one(1, 9)})")


def some_model(draw: random.Random, seed: int) -> ch.Transformer:
    """A model of one to three layers that its config allows."""
    while True:
        family, layers = draw.choice(("encoder", "decoder", "decoder")), draw.choice((1, 2, 3))
        choices = {
            "positions": draw.choice(POSITIONS),
            "n_kv_heads": draw.choice((1, 2, 4)),
            "attention_gate": draw.random() < 0.2,
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
    stateful = any(not kind.chooses for kind in model.config.decoder.kinds)
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
