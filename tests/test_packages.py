"""Kinds of attention held against packages of the index, on the same weights; each skips where it is absent.

pip install --no-deps --target build/references -r requirements-references.txt
PYTHONPATH=build/references:src python -m pytest tests/test_packages.py tests/test_linear.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from clearhead.core.masks import View, tokens_from
from clearhead.variants import blocks
from clearhead.variants.gated_delta import gated_delta
from clearhead.variants.linear import FEATURES, attend_linear
from tests.harness import build, scramble, some_ids, worst


def equal(found: Tensor, right: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Compare answers and their gradients with regard to the same inputs."""
    assert worst(found, right) <= 1e-5
    probe = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)) / right.numel() ** 0.5
    mine, theirs = (
        torch.autograd.grad((out * probe).sum(), inputs, retain_graph=True) for out in (found, right)
    )
    assert max(worst(a, b) for a, b in zip(mine, theirs)) <= 1e-5


def naive(op: str) -> ModuleType:
    """The definition of an op of flash-linear-attention, read by itself: the package asks for Triton."""
    pytest.importorskip("einops")
    package = importlib.util.find_spec("fla")
    roots = [Path(root) for root in (package.submodule_search_locations if package else None) or ()]
    files = [root / "ops" / op / "naive.py" for root in roots]
    found = next((file for file in files if file.exists()), None)
    if found is None:
        pytest.skip("fla-core (flash-linear-attention) is not installed")
    spec = importlib.util.spec_from_file_location(f"naive_{op}", found)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.ledger("J2")
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("length", [32, 21])
def test_low_rank_equals_linformer(length, kv_heads):
    theirs = pytest.importorskip("linformer", reason="linformer is not installed")
    module = theirs.LinformerSelfAttention(16, seq_len=32, k=5, heads=4, one_kv_head=kv_heads == 1)
    scramble(module)
    model = build(family="encoder", attention="low-rank(5)", n_kv_heads=kv_heads, bias=False)
    mine, x = model.encoder.blocks[0].attention, torch.randn(2, length, 16, requires_grad=True)
    module.to_out.bias.data.zero_()
    for ours, other in zip(
        (mine.q.weight, mine.k.weight, mine.v.weight, mine.out.weight, mine.k_mix, mine.v_mix),
        (
            *(getattr(module, f"to_{name}").weight for name in ("q", "k", "v", "out")),
            module.proj_k,
            module.proj_v,
        ),
    ):
        ours.data.copy_(other.data)
    view = View(tokens=tokens_from(2, length, torch.device("cpu")))
    equal(mine(x, view), module(x), (x,))


@pytest.mark.ledger("J1")
@pytest.mark.parametrize("family", ["encoder", "decoder"])
@pytest.mark.parametrize("padded", [False, True])
def test_window_equals_local_attention(family, padded, monkeypatch):
    """Rows so long that keys are gathered by blocks."""
    theirs = pytest.importorskip("local_attention", reason="local-attention is not installed")
    plans, plan_blocks = [], blocks.plan_blocks
    monkeypatch.setattr(blocks, "plan_blocks", lambda *given: plans.append(plan_blocks(*given)) or plans[-1])
    size, length = 32, 20 * 32
    local = theirs.LocalAttention(size, causal=family == "decoder", exact_windowsize=True)
    model = build(family=family, attention=f"window({size + 1})", positions="none", max_positions=length)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, 600:] = not padded
    block = (model.encoder or model.decoder).blocks[0]
    called = []
    block.attention.register_forward_pre_hook(lambda module, given: called.append(given))
    model(some_ids(2, length), mask=mask if padded else None)
    (x, view, *_), plan = called[0], plans[0]
    assert plan is not None
    x = x.detach().requires_grad_()
    q, k, v = (
        part(x).unflatten(-1, (4, 4)).transpose(1, 2)
        for part in (block.attention.q, block.attention.k, block.attention.v)
    )
    right = block.attention.out(local(q, k, v, mask=mask).transpose(1, 2).flatten(2))
    equal(block.attention(x, view)[mask], right[mask], (x,))


@pytest.mark.ledger("J2")
@pytest.mark.parametrize("name", ["elu", "relu"])
def test_linear_equals_the_naive_ops_of_flash_linear_attention(name):
    ops = naive("linear_attn")
    q, k, v = (torch.randn(2, 3, 128, 8, requires_grad=True) for _ in range(3))
    fq, fk = FEATURES[name](q).values, FEATURES[name](k).values
    found, state = attend_linear(fq, fk, v, causal=True)
    given = [x.transpose(1, 2) for x in (fq, fk, v)]
    by_steps, (sums, norms) = ops.naive_recurrent_linear_attn(*given, normalize=True, output_final_state=True)
    assert worst(found, by_steps.transpose(1, 2)) <= 1e-5
    assert worst(state.sums[..., :-1], sums) <= 1e-4  # of 128 tokens
    assert worst(state.sums[..., -1], norms[:, 0]) <= 1e-4
    equal(found, ops.naive_chunk_linear_attn(*given, normalize=True).transpose(1, 2), (q, k, v))


@pytest.mark.ledger("J2")
@pytest.mark.parametrize("op", ["recurrent", "chunk"])
def test_gated_delta_equals_the_naive_ops_of_flash_linear_attention(op):
    rule = getattr(naive("gated_delta_rule"), f"naive_{op}_gated_delta_rule")
    q, k = (torch.nn.functional.normalize(torch.randn(2, 3, 70, 8), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(2, 3, 70, 5), -torch.rand(2, 3, 70), torch.rand(2, 3, 70)
    inputs = tuple(x.requires_grad_() for x in (q, k, v, g, beta))
    before = torch.randn(2, 3, 8, 5)
    given = dict(zip(("q", "k", "v", "g", "beta"), (x.transpose(1, 2) for x in inputs)))
    right, memory = rule(**given, initial_state=before, output_final_state=True)
    found, state = gated_delta(*inputs, before)
    assert worst(state, memory) <= 1e-5
    equal(found, right.transpose(1, 2), inputs)
