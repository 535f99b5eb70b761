"""Latent attention and its routers, beyond the harness of kinds: both forms, caches, training, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead.core.masks import View
from clearhead.core.taps import SILENT
from clearhead.hub.registry import ARCHITECTURES
from clearhead.inside.checks import checks_for
from clearhead.inside.checks.rows import some_batch
from clearhead.learn.losses import batch_loss
from clearhead.learn.parallel.division import MeshSizes, refusal
from clearhead.run.quant.apply import quantize_model
from clearhead.run.quant.cache import Int8KV
from clearhead.run.serve.adapters import updates_of
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.sequence import ServeOptions
from clearhead.variants.contexts import attending
from clearhead.variants.routing import LEVELLED, Experts
from tests.harness import GROUPED_EXPERTS, LATENT, build, config, in_pieces, some_ids, worst
from tests.serve import mixes

INDEX = "index_heads=8, index_width=6"
OWN = {**LATENT, **GROUPED_EXPERTS, "norm": "rmsnorm"}


@pytest.mark.ledger("W1")
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_the_absorbed_form_is_the_naive_one(queries, bits, monkeypatch):
    """The same queries, shared keys and latents, with weights in float32 and in few bits."""
    model = build(**LATENT, d_value=7, attention_sink=True, attention_softcap=2.0)
    if bits is not None:
        quantize_model(model, ch.QuantPlan(bits, method="rtn"))
    draw = torch.Generator().manual_seed(0)
    for layer, C in enumerate((6, 5)):
        attention = model.main.blocks[layer].attention
        q, k, latent = (
            torch.randn(2, heads, length, width, generator=draw)
            for heads, length, width in ((4, queries, 4), (1, 50, 2), (1, 50, C))
        )
        mask = torch.ones(queries, 50, dtype=torch.bool).tril(50 - queries)[None, None]
        found = []
        for absorbs in (False, True):
            monkeypatch.setattr(attention, "_absorbs", lambda *sizes, absorbs=absorbs: absorbs)
            with torch.no_grad():
                found.append(attention.attend(q, k, latent, View(mask=mask), None, SILENT, q))
        assert worst(*found) <= 1e-5
        monkeypatch.undo()
        assert attention._absorbs(1, 50) and not attention._absorbs(50, 50)


@pytest.mark.ledger("W1")
@torch.no_grad()
def test_an_indexer_chooses_keys_and_all_of_them_are_full_attention(byte_tokenizer):
    """top >= length is full attention to the bit; below it, pieces, a server and the formula agree."""
    ids = some_ids(2, 12)
    wide = build(**{**LATENT, "attention": f"latent(5, query_rank=7, top=12, {INDEX})"})
    plain = build(**{**LATENT, "attention": "latent(5, query_rank=7)"})
    plain.load_state_dict({name: x for name, x in wide.state_dict().items() if ".index_" not in name})
    assert torch.equal(wide(ids).logits, plain(ids).logits)
    few = {**LATENT, "attention": (f"latent(5, query_rank=7, top=3, {INDEX})",)}
    model, shape = build(**few), config(**few)
    assert worst(model(ids).logits, wide(ids).logits) > 0.01
    assert worst(in_pieces(model, ids, [5, 1, 1, 3, 2], ch.Cache()), model(ids).logits) <= 1e-5
    formula = next(row for row in checks_for(model) if "float64" in row.name or "float64" in row.compared)
    assert formula.run() <= 1e-5
    cache, cost = ch.Cache(12), ch.cost(shape, 12, batch=2)
    model(ids, cache=cache)
    assert cache.nbytes == cost.memory.kv_cache == 2 * 2 * 12 * (5 + 2 + 6) * 4
    assert cost.parameters.total == sum(weight.numel() for weight in model.parameters())
    with attending(model, "eager"), FlopCounterMode(display=False) as counted:
        attended = model(ids)
    assert attended.logits.isfinite().all()
    assert counted.get_total_flops() == cost.flops.forward.total
    m = mixes.model("latent", byte_tokenizer, **few)
    engine, prompt = ServeEngine(m, Limits(block=8)), list(range(20, 60))
    seqs = [engine.submit(prompt[start:], {"max_new_tokens": 20}) for start in (0, 9)]
    while engine.busy:
        engine.step()
    assert [seq.wait(0).ids for seq in seqs] == [m.generate(prompt[start:], 20).ids for start in (0, 9)]
    for refused in ({"cache": "int8"}, {"early_exit": 0.5}):
        with pytest.raises(ch.InputError, match="indexer"):
            m.generate(prompt, 3, **refused)
    with pytest.raises(ch.InputError, match="indexer"):
        ServeEngine(m, Limits(block=8, cache="int8"))
    with pytest.raises(ch.ConfigError, match="set query_rank"):
        config(**{**LATENT, "attention": "latent(5, top=3)"})


@pytest.mark.ledger("W1", "M5")
def test_a_cache_keeps_the_latent_and_the_shared_key():
    """Bytes of every form are exact; next to keys and values of all heads they are few."""
    wide = config(**LATENT, d_model=64, n_heads=8, norm="rmsnorm").replace(attention="latent(24)")
    model, ids = build(**{**LATENT, "attention": "latent(24)", "d_model": 64, "n_heads": 8}), some_ids(2, 20)
    memory = ch.cost(wide, 20, batch=2).memory
    growing, fixed = ch.Cache(20), ch.FixedCache(model.config, 2, 20)
    with torch.no_grad():
        for cache in (growing, fixed):
            model(ids, cache=cache)
    held = [
        sum(x.nbytes for keys in cache.layers.values() for x in keys.tensors()) for cache in (growing, fixed)
    ]
    assert held == [memory.kv_cache] * 2 == [2 * 2 * 20 * (24 + 4) * 4] * 2
    full = wide.replace(attention="full")
    assert ch.cost(full, 20, batch=2).memory.kv_cache == 2 * 2 * 20 * 8 * (8 + 8) * 4
    narrow = ch.Cache(0, Int8KV)
    with torch.no_grad():
        found = in_pieces(model, ids, [7, 1, 12], narrow)
        assert worst(found, in_pieces(model, ids, [20], ch.Cache(0, Int8KV))) <= 1e-5
        assert 1e-6 < worst(found, model(ids).logits) < 0.1


def test_edits_of_keys_reach_the_pass_and_are_refused_with_a_cache():
    model, ids = build(**LATENT), some_ids()
    doubled = {"blocks.1.attention.v": lambda v: v * 2}
    louder = copy.deepcopy(model)
    louder.main.blocks[1].attention.v.weight.data *= 2
    with torch.no_grad(), ch.edit(model, doubled):
        assert worst(model(ids).logits, louder(ids).logits) <= 1e-5
        with pytest.raises(ch.InputError, match="a cache of latent attention keeps no keys"):
            model(ids, cache=ch.Cache())
    with torch.no_grad(), ch.record(model, "*.k", "*.v") as seen:
        in_pieces(model, ids, [5, 3], ch.Cache())
    assert [tuple(k.shape) for k in seen.calls("blocks.0.attention.k")] == [(2, 4, 5, 4), (2, 4, 3, 4)]


@pytest.mark.ledger("W1", "D5")
def test_corrections_move_against_the_load_and_no_loss_spreads_tokens():
    model = build(**OWN)
    batch = some_batch(model, 0)
    layers = [part for part in model.modules() if isinstance(part, Experts)]
    before = [part.correction.clone() for part in layers]
    alone, _ = batch_loss(model, batch)
    model.train()
    loss, _ = batch_loss(model, batch)
    assert torch.equal(loss, alone)  # no term for routers
    loss.backward()
    for part, old in zip(layers, before, strict=True):
        assert part.correction.grad is None
        logits = part.routed if batch.mask is None else part.routed[batch.mask.flatten()]
        scores = logits.sigmoid() + old
        groups = scores.view(-1, 3, 2).sum(-1).topk(2).indices
        left = torch.zeros(len(scores), 3, dtype=torch.bool).scatter(1, groups, True).repeat_interleave(2, 1)
        load = scores.masked_fill(~left, -1e9).topk(3).indices.flatten().bincount(minlength=6).float()
        assert load.std() > 0
        torch.testing.assert_close(part.correction.detach() - old, LEVELLED * (load.mean() - load).sign())


@pytest.mark.slow
def test_a_run_trains_latents_and_corrections_and_its_model_serves(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog lay by the door\n" * 60)
    own = {**OWN, "attention": "latent(8)", "d_model": 32, "n_layers": 1, "n_heads": 2, "n_active_experts": 2}
    sizes = [
        f"model.{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in own.items()
    ]
    done = ch.train(
        tmp_path / "text.txt", out=tmp_path / "run", settings=[*sizes, "train.steps=60", "train.device=cpu"]
    )
    m = ch.load(tmp_path / "run")
    correction = m.model.main.blocks[0].feedforward.correction
    assert not correction.requires_grad and 0 < correction.abs().max() <= 60 * LEVELLED + 1e-6
    assert done.model.generate("the cat", 8).ids == m.generate("the cat", 8, cache="int8").ids
    assert m.generate("the cat", 8, lookup=3).ids == m.generate("the cat", 8).ids


@pytest.mark.ledger("W1", "O1")
@pytest.mark.parametrize(("bits", "cache"), [(None, "int8"), (8, None), (4, None)])
def test_served_tokens_are_the_models_own(bits, cache, byte_tokenizer):
    """A pool of latents in 8 bits, and weights of few bits, in a mix of requests."""
    m = mixes.model("latent", byte_tokenizer)
    if bits is not None:
        quantize_model(m.model, ch.QuantPlan(bits, method="rtn"))
    engine = mixes.mixed(m, seed=3, cache=cache, most=1e-3)  # compares each request with itself alone
    assert not engine.busy and engine.limits.cache == cache


def test_adapters_of_what_is_made_of_kept_latents_are_refused_by_name(byte_tokenizer):
    m = mixes.model("latent", byte_tokenizer)
    for layer, served in (("kv_down", True), ("k", False), ("v", False)):
        other = copy.deepcopy(m)
        weight = other.model.main.blocks[0].attention.get_submodule(layer).weight
        weight.data += torch.outer(torch.randn(len(weight)), torch.randn(weight.shape[1])) * 0.1
        updates = updates_of(m.model, other.model, "one")
        if not served:
            with pytest.raises(ch.InputError, match=rf"updates .*attention\.{layer}, which cannot take"):
                ServeEngine(m, Limits(), {"one": updates})
            continue
        engine = ServeEngine(m, Limits(block=4), {"one": updates})
        seq = engine.submit([5, 6, 7], {"max_new_tokens": 9}, ServeOptions(adapter="one"))
        while engine.busy:
            engine.step()
        assert seq.wait(0).ids == other.generate([5, 6, 7], 9, num_beams=1).ids


REFUSED = {
    "columns that rotate: set positions rope": {"positions": "learned"},
    "rotates 4 of 4 columns of a head, .*: set rope_fraction": {"rope_fraction": 1.0},
    "makes keys for each of 4 heads: leave n_kv_heads out": {"n_kv_heads": 2},
    "has norms on its latents: leave qk_norm head out": {"qk_norm": "head"},
    "rank 0: it must be a whole number, 1 or more": {"attention": "latent(0)"},
    "router_groups 4 does not divide n_experts 6": {"router_groups": 4},
    "n_active_groups 4 must lie between 1 and router_groups 3": {"n_active_groups": 4},
    "n_active_experts 5 is more than the 4 experts of 2 of 3 groups": {"n_active_experts": 5},
    "router_groups 3 needs scores: choose router_order": {"router_order": "topk_softmax"},
    "router_correction belongs to router_order sigmoid_topk": {"router_order": "softmax_topk"},
    "router_scale 0.0 must be above 0": {"router_scale": 0.0},
    "router_scale needs a router": {"n_experts": 0},
    "shared_expert_gate needs a shared expert": {"d_shared_expert": 0},
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_has_no_meaning_is_refused_by_name(line):
    fields = {**OWN, **REFUSED[line]}
    if "needs a router" in line:
        fields = {**LATENT, "router_scale": 2.0}
    with pytest.raises(ch.ConfigError, match=line):
        config(**fields)


def test_a_mesh_that_cannot_divide_latents_says_so():
    line = refusal(config(**LATENT), MeshSizes(tensor=2), 16)
    assert line is not None and "keys of each head, and a layer is latent(rank=6)" in line


SIZES = {"DeepseekV3": (671e9, 37e9), "DeepseekV2": (236e9, 21e9), "Glm4MoeLite": (30e9, 3e9)}
V2 = {
    **{"hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128},
    **{"vocab_size": 102400, "intermediate_size": 12288, "moe_intermediate_size": 1536, "q_lora_rank": 1536},
    **{
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
    },
    **{"topk_method": "group_limited_greedy", "first_k_dense_replace": 1, "routed_scaling_factor": 16.0},
}


@pytest.mark.ledger("W1", "I1")
@pytest.mark.parametrize("name", SIZES)
def test_a_published_model_has_its_size(name):
    theirs = getattr(transformers, f"{name}Config")(**(V2 if name == "DeepseekV2" else {}))
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(theirs)
    config = ARCHITECTURES[theirs.model_type].read(theirs.to_dict())
    cost = ch.cost(config.replace(n_mtp_layers=0), 64)  # transformers leaves them out
    corrections = sum(x.numel() for name, x in model.named_buffers() if name.endswith("correction_bias"))
    assert cost.parameters.total == sum(p.numel() for p in model.parameters()) + corrections
    total, active = SIZES[name]
    assert cost.parameters.total == pytest.approx(total, rel=0.02)
    assert cost.parameters.active == pytest.approx(active, rel=0.3 if name == "Glm4MoeLite" else 0.04)
    kept = (theirs.kv_lora_rank + theirs.qk_rope_head_dim) * theirs.num_hidden_layers * 64 * 4
    assert cost.memory.kv_cache == kept
