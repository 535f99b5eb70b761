"""`flex_attention` behind the predicates of the dense mask: its blocks, its mask, its numbers, its choice.

A CPU has no backward pass of it, and its plain form computes every pair: blocks are held to the mask by
themselves. `benchmarks/flex.py` compares times and gradients on a GPU.
"""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.core import masks
from clearhead.variants import block_attention, blocks
from clearhead.variants.blocks import plan_blocks
from tests.equality.test_kinds import model_of
from tests.harness import build, some_ids

KINDS = [
    "window(20, sinks=3)",
    "dilated(8, 3)",
    "blocks(32, 1, 5, 0, 1)",
    "blocks(24, 1, 1, 1, counted=blocks, full=100)",
    "global(20)",
]
LENGTH = 620  # no whole number of blocks


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "FLEX_BLOCK", 32)


def cases() -> dict[str, dict[str, torch.Tensor]]:
    """Plain rows, padding of many kinds, packed documents."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :90], mask[1, 300:320], mask[1, 550:] = False, False, False
    return {
        "plain": {},
        "padded": {"mask": mask},
        "packed": {"documents": (torch.arange(LENGTH) // 210)[None].expand(2, -1)},
    }


@pytest.mark.ledger("J1", "J2")
@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_blocks_and_mask_are_those_of_the_dense_mask(family, attention):
    model = model_of(attention, family=family, positions="rope")
    if model is None:
        return
    kind, causal, ids = model.config.main.kinds[0], family == "decoder", some_ids(2, LENGTH)
    for given in cases().values():
        tokens = masks.tokens_from(2, LENGTH, ids.device, **given)
        tokens = kind.describe(tokens, causal, ids, None)
        plan = plan_blocks(tokens, tokens, kind, causal, lambda q, k: None, flexible=True)
        if plan is None:  # a dense mask is as good: padded rows meet more blocks
            assert given
            continue
        dense, _ = masks.compose(tokens, tokens, causal=causal, kind=kind)
        rows, slots = torch.arange(len(plan.index))[:, None, None], torch.arange(LENGTH)
        said = plan.mask.mask_mod(rows, None, slots[:, None], slots)
        assert torch.equal(said.expand_as(dense[:, 0]), dense[:, 0])
        # Every pair lies in a block that is met, but for queries that see all, which are attended apart.
        met = plan.mask.to_dense()[:, 0].bool().repeat_interleave(blocks.FLEX_BLOCK, 1)
        met = met.repeat_interleave(blocks.FLEX_BLOCK, 2)[:, :LENGTH, :LENGTH]
        if plan.globals is not None:
            met = met.scatter(1, plan.globals[..., None].expand(-1, -1, LENGTH), True)
        assert not (dense[:, 0] & ~met & tokens.real_mask()[..., None]).any()
        assert met.float().mean() < 0.75


@pytest.mark.parametrize("attention", [KINDS[0], KINDS[4]])
def test_its_numbers_are_those_of_the_dense_mask(attention, monkeypatch):
    family = "decoder" if attention == KINDS[0] else "encoder"
    model = build(
        family=family, attention=attention, positions="rope", n_kv_heads=2, d_head=16, n_layers=1,
        max_positions=LENGTH,
    )  # fmt: skip
    ids, used, attend = some_ids(2, LENGTH), [], block_attention.attend_flex
    # Its plain form, not traced: a processor's compiler need not know it.
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(block_attention, "attend_flex", lambda *given: used.append(1) or attend(*given))
    for name, given in cases().items():
        real = given.get("mask", torch.ones(2, LENGTH, dtype=torch.bool))
        with torch.no_grad():
            plain, asked = model(ids, **given).logits[real], len(used)
            with ch.attending(model, "flex"):
                ours = model(ids, **given).logits[real]
            assert len(used) > asked or given
            with ch.attending(model, "eager"):
                dense = model(ids, **given).logits[real]
        assert max((ours - dense).abs().max(), (ours - plain).abs().max()) < 1e-5, name
    used.clear()
    with ch.attending(model, "flex"):  # with gradients a CPU gathers blocks
        assert (model(ids).logits - model(ids).logits.detach()).abs().max() == 0 and not used


def test_it_attends_where_it_serves():
    config = {"attention": "window(20)", "positions": "rope", "d_head": 32}
    count = torch.arange(8192)[None]

    def chosen(dtype: torch.dtype = torch.bfloat16, **changes) -> bool:
        training = changes.pop("training", False)
        spec = build(**{**config, **changes}).config.main
        tokens = masks.Tokens(count, count, None, None, plain=True)
        return blocks.flex_serves(spec, spec.kinds[0], tokens, dtype, training)

    assert not chosen(), "a CPU has no backward pass of it"
    with torch.no_grad():
        assert chosen() and chosen(training=True)
        assert not chosen(dtype=torch.float64)
        assert not any(
            chosen(**changes)
            for changes in (
                {"d_head": 4},
                {"positions": "alibi"},
                {"attention_softcap": 5.0},
                {"attention_sink": True},
                {"attention_dropout": 0.1, "training": True},
                {"attention": "blocks(64, 3, 2, repeat=1)"},
            )
        )
