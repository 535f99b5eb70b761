"""What is done for speed computes the same: joined projections, recomputed activations; and a GPU's kernels are asked for on GPUs alone."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import clearhead as ch
from clearhead.data.plan import DataPlan
from clearhead.train.lora import add_lora
from clearhead.train.machine import JoinedAttention, join_projections, pays, quick_attention, recompute
from clearhead.train.plan import TrainPlan
from tests.harness import build, some_ids, worst

MODELS = {
    "decoder": {},
    "grouped, rotary, no bias": {"n_kv_heads": 2, "positions": "rope", "bias": False, "norm": "rmsnorm"},
    "encoder": {"family": "encoder"},
    "encoder-decoder": {"family": "encoder-decoder", "positions": "relative"},
    "norm of queries and keys": {"qk_norm": "full"},
}


def learned(model: ch.Transformer) -> list[torch.Tensor]:
    """Logits and the gradient of every weight."""
    torch.manual_seed(1)
    more = {"source": some_ids(2, 7)} if model.config.family == "encoder-decoder" else {}
    logits = model(some_ids(2, 9), **more).logits
    model.zero_grad()
    logits.square().sum().backward()
    return [logits, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("change", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("make", [join_projections, recompute])
def test_made_quicker_or_smaller_it_learns_the_same(change, make):
    model = build(**change).double()
    before = learned(model)
    make(model)
    assert max(worst(a, b) for a, b in zip(before, learned(model), strict=True)) < 1e-10


def test_a_joined_model_speaks_and_is_saved_like_any_other(tmp_path):
    plain = build()
    joined = build()
    joined.load_state_dict(plain.state_dict())
    join_projections(joined)
    assert any(isinstance(part, JoinedAttention) for part in joined.modules())
    assert ch.Loaded(joined).generate([1, 2, 3], 12).ids == ch.Loaded(plain).generate([1, 2, 3], 12).ids
    ch.Loaded(joined).save(tmp_path / "saved")
    ids = some_ids(2, 9)
    assert torch.equal(ch.load(tmp_path / "saved").model(ids).logits, plain(ids).logits)


def test_projections_with_low_rank_updates_are_not_joined():
    model = build()
    add_lora(model, 2, 4.0, ("q", "v"), ())
    join_projections(model)
    assert not any(isinstance(part, JoinedAttention) for part in model.modules())


def test_nothing_is_done_for_a_gpu_on_a_cpu():
    cpu, plan = torch.device("cpu"), TrainPlan(steps=10**6)
    assert quick_attention("lm", DataPlan(), cpu) is nullcontext and not pays("lm", DataPlan(), plan, cpu)
