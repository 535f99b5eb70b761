"""What is done for speed computes the same; and what is done for GPUs is asked for on GPUs alone."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import clearhead as ch
from clearhead.learn.batches.batch import Batch
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.tasks.table import TASKS
from clearhead.learn.training.machine import Precision, host_bound, least_seconds, pays, quick_attention
from clearhead.run.kernels import training as fast_training
from clearhead.run.kernels.lora import add_lora
from clearhead.run.kernels.training import (
    JoinedAttention,
    join_projections,
    narrow_gelu,
    narrow_linear,
    recompute,
    sigmoid_gelu,
    suit_compiled,
    suit_narrow,
    unjoined,
)
from tests.harness import build, some_ids, worst

MODELS = {
    "decoder": {},
    "grouped, rotary, no bias": {"n_kv_heads": 2, "positions": "rope", "bias": False, "norm": "rmsnorm"},
    "encoder": {"family": "encoder"},
    "encoder-decoder": {"family": "encoder-decoder", "positions": "relative"},
    "norm of queries and keys": {"qk_norm": "full"},
    "gelu by tanh": {"activation": "gelu_tanh"},
}


def learned(model: ch.Transformer) -> list[torch.Tensor]:
    """Logits and the gradient of every weight."""
    torch.manual_seed(1)
    more = {"source": some_ids(2, 7)} if model.config.family == "encoder-decoder" else {}
    logits = model(some_ids(2, 9), **more).logits
    model.zero_grad()
    logits.square().sum().backward()
    return [logits, *(p.grad.clone() for p in model.parameters())]


def joined_and_narrow(model: ch.Transformer) -> None:
    join_projections(model)
    suit_narrow(model)


MAKERS = [join_projections, recompute, suit_compiled, suit_narrow, joined_and_narrow]


@pytest.mark.parametrize("change", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("make", MAKERS)
def test_made_quicker_or_smaller_it_learns_the_same(change, make, monkeypatch):
    monkeypatch.setattr(fast_training, "MANY", 1)
    model = build(**change).double()
    before = learned(model)
    make(model)
    assert max(worst(a, b) for a, b in zip(before, learned(model), strict=True)) < 1e-10


def test_made_quicker_or_smaller_it_has_the_same_parameters_by_the_same_names():
    model = build()
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    join_projections(model)
    recompute(model)
    suit_narrow(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert list(model.state_dict()) == keys
    joined = [part for part in model.modules() if isinstance(part, JoinedAttention)]
    with unjoined(model):
        assert joined and not any(isinstance(part, JoinedAttention) for part in model.modules())
        assert list(model.state_dict()) == keys
    assert [part for part in model.modules() if isinstance(part, JoinedAttention)] == joined


def test_a_joined_model_speaks_and_is_saved_like_any_other(tmp_path):
    plain = build()
    joined = build()
    joined.load_state_dict(plain.state_dict())
    join_projections(joined)
    assert any(isinstance(part, JoinedAttention) for part in joined.modules())
    assert ch.Model(joined).generate([1, 2, 3], 12).ids == ch.Model(plain).generate([1, 2, 3], 12).ids
    ch.Model(joined).save(tmp_path / "saved")
    ids = some_ids(2, 9)
    assert torch.equal(ch.load(tmp_path / "saved").model(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_slope_of_gelu_from_its_value(approximate):
    """Everywhere, at nothing itself and beside it too; the reference is PyTorch's own, in float64."""
    small = torch.tensor([0.0, -0.0, 1e-20, -1e-30, 1e-38, -1e-42])
    x = torch.cat([torch.linspace(-30, 30, 100_001), small]).requires_grad_()
    exact = x.detach().double().requires_grad_()
    torch.nn.functional.gelu(exact, approximate=approximate).sum().backward()
    y = narrow_gelu(x, approximate)
    assert torch.equal(y, torch.nn.functional.gelu(x, approximate=approximate))
    y.sum().backward()
    assert worst(x.grad, exact.grad) < 5e-6


def test_gelu_by_a_sigmoid():
    """The tanh formula and its slope, against PyTorch's own in float64; in half precision rounded once."""
    x = torch.linspace(-30, 30, 100_001).requires_grad_()
    exact = x.detach().double().requires_grad_()
    wanted = torch.nn.functional.gelu(exact, approximate="tanh")
    wanted.sum().backward()
    y = sigmoid_gelu(x)
    y.sum().backward()
    assert worst(y, wanted) < 5e-6 and worst(x.grad, exact.grad) < 5e-6
    half = x.detach().bfloat16()
    rounded = torch.nn.functional.gelu(half.double(), approximate="tanh").float()
    assert bool(((sigmoid_gelu(half) - rounded).abs() <= 2.0**-8 * rounded.abs() + 1e-12).all())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",), ("weight", "bias")])
def test_a_linear_layer_by_a_weight_laid_the_other_way(bias, frozen):
    torch.manual_seed(0)
    shapes = {"x": (3, 400, 24), "weight": (40, 24)} | ({"bias": (40,)} if bias else {})
    given = {name: torch.randn(shape).requires_grad_(name not in frozen) for name, shape in shapes.items()}
    exact = {name: part.detach().double().requires_grad_(part.requires_grad) for name, part in given.items()}
    found = [narrow_linear(**{"bias": None, **given})]
    expected = [torch.nn.functional.linear(exact["x"], exact["weight"], exact.get("bias"))]
    for outputs, parts in ((found, given), (expected, exact)):
        trained = [part for part in parts.values() if part.requires_grad]
        outputs += torch.autograd.grad((outputs[0] ** 2).mean(), trained)
    assert max(worst(a, b) for a, b in zip(found, expected, strict=True)) < 1e-5


def test_under_autocast_a_linear_layer_is_the_plain_one():
    x, weight = torch.randn(600, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = narrow_linear(x, weight, None)
        assert y.dtype == torch.bfloat16 and torch.equal(y, torch.nn.functional.linear(x, weight))
    y.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32


def test_projections_with_low_rank_updates_are_not_joined():
    model = build()
    add_lora(model, 2, 4.0, ("q", "v"), ())
    join_projections(model)
    assert not any(isinstance(part, JoinedAttention) for part in model.modules())


def test_nothing_is_done_for_a_gpu_on_a_cpu():
    cpu, plan = torch.device("cpu"), TrainPlan(steps=10**6)
    assert quick_attention(TASKS["lm"], DataPlan(), cpu) is nullcontext
    assert not pays(TASKS["lm"], DataPlan(), plan, cpu)


def test_compiling_must_save_more_than_it_takes_and_small_steps_are_bound_by_the_host():
    """At the peak: 3,000 steps of a millisecond are over before a compiler is; 3,000 of a tenth are not."""
    gpu, plan = torch.device("cuda"), TrainPlan(steps=3000)
    assert not pays(TASKS["lm"], DataPlan(), plan, gpu, 1e-3)
    assert pays(TASKS["lm"], DataPlan(), plan, gpu, 0.1)
    assert pays(TASKS["lm"], DataPlan(), plan, gpu)  # what a step takes is not known
    config = build().config
    assert host_bound(config, 1e-4) and host_bound(config, None) and not host_bound(config, 0.1)
    batch = Batch(some_ids(2, 9), some_ids(2, 9))
    half = Precision(gpu, torch.bfloat16, "", peak=1e6)
    assert least_seconds(100.0, batch, TrainPlan(accumulate=3), half) == pytest.approx(2 * 9 * 100 * 3 / 1e6)
    shortest = least_seconds(100.0, batch, TrainPlan(accumulate_schedule=(2, 5)), half)
    assert shortest == pytest.approx(2 * 9 * 100 * 2 / 1e6)
    assert least_seconds(0.0, batch, plan, half) is None
    assert least_seconds(1.0, batch, plan, Precision(gpu, None, "")) is None
