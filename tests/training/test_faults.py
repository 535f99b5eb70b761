"""Planted faults are found where they were planted, and one line says what to change."""

from __future__ import annotations

import pytest
import torch

from clearhead.learn.batches.batch import Batch
from clearhead.learn.losses import batch_loss
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.tasks.table import TASKS
from clearhead.learn.training.faults import diagnose, find_fault
from clearhead.learn.training.machine import Precision
from tests.harness import build, some_ids

PLAN, FLOAT32, LM = TrainPlan(lr=0.5), Precision(torch.device("cpu"), None, ""), TASKS["lm"]


def a_batch() -> Batch:
    return Batch(some_ids(4), some_ids(4, seed=2), numbers=torch.tensor([10, 11, 12, 13]))


def loss_of(model, batch):
    return batch_loss(model, batch, chunk=5)[0]


def test_a_sound_model_has_no_fault_and_keeps_its_gradients():
    model = build()
    loss_of(model, a_batch()).backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert find_fault(model, a_batch(), loss_of).kind == "none"
    assert all(torch.equal(parameter.grad, before[name]) for name, parameter in model.named_parameters())
    assert not any(part._forward_hooks for part in model.modules())
    assert "computed again" in diagnose(model, [a_batch()], 3, FLOAT32, PLAN, LM)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["decoder.blocks.1.attention.k", "decoder.blocks.0.feedforward.down", "decoder.norm", "head.out"]
)
def test_a_weight_that_is_not_finite_is_named(name, value):
    model = build(tie_embeddings=False)
    model.get_submodule(name).weight.data.flatten()[3] = value
    fault = find_fault(model, a_batch(), loss_of)
    assert (fault.kind, fault.name, fault.weight) == ("output", name, f"{name}.weight")
    line = diagnose(model, [a_batch()], 7, FLOAT32, PLAN, LM)
    assert (
        line.startswith(f"step 7: the weight {name}.weight is not finite: ")
        and "train.lr (now 0.5)" in line
        and "\n" not in line
    )


def test_the_examples_that_break_are_named():
    model = build(tie_embeddings=False)
    batch = a_batch()
    batch.ids[:] = batch.ids % 12
    batch.ids[2, 5] = 12
    model.decoder.embedding.front.tokens.weight.data[12] = 3e38  # finite, and a sum with it is not
    model.decoder.positions.table.weight.data[5] = 3e38
    fault = find_fault(model, batch, loss_of)
    assert fault.kind == "output" and fault.weight is None and fault.examples == (12,)
    line = diagnose(model, [batch], 7, FLOAT32, PLAN, LM)
    assert (
        "decoder.embedding gave a number that is not finite" in line
        and "in example 12: lower train.lr" in line
    )


def test_an_overflow_of_float16_asks_for_another_precision():
    model = build()
    half = Precision(torch.device("cpu"), torch.float16, "")
    layer = model.decoder.blocks[1].feedforward.down
    layer.weight.data *= 1e5
    layer.bias.data.fill_(6e4)
    assert "computed again" in diagnose(model, [a_batch()], 7, FLOAT32, PLAN, LM)  # float32 can hold it
    line = diagnose(model, [a_batch()], 7, half, PLAN, LM)
    assert line.startswith(
        "step 7: decoder.blocks.1.feedforward.down passed 65504, where float16 ends, from an input of "
    )
    assert line.endswith("set train.precision to bfloat16 or float32")

    seen = {}
    layer.register_forward_pre_hook(lambda module, given: seen.update(largest=given[0].abs().max().item()))
    with half.autocast():
        fault = find_fault(model, a_batch(), loss_of)
    assert fault.largest == pytest.approx(seen["largest"])


def test_a_loss_of_finite_scores():
    model = build(family="encoder", head="span")
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    batch = Batch(some_ids(2), torch.tensor([[1, 2], [3, 7]]), mask)  # an answer that ends in padding
    assert find_fault(model, batch, loss_of).kind == "loss"
    assert "in examples 0, 1: look for a target" in diagnose(model, [batch], 7, FLOAT32, PLAN, LM)


class Cliff(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def test_a_gradient_that_is_not_finite_is_named_in_the_order_of_the_backward_pass():
    model = build()
    model.decoder.blocks[1].attention.out.register_forward_hook(lambda module, given, out: Cliff.apply(out))
    fault = find_fault(model, a_batch(), loss_of)
    assert fault.kind == "gradient" and fault.name == "decoder.blocks.1.attention.out.bias"
    line = diagnose(model, [a_batch()], 7, FLOAT32, TrainPlan(clip=0.0), LM)
    assert (
        "the gradient of decoder.blocks.1.attention.out.bias is not in examples 10, 11, 12, 13: "
        "set train.clip (now 0) to 1" in line
    )
