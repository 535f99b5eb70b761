"""Stages of a pipeline: their layers, their turns, and that together they are the whole model."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import Any, cast

import pytest
import torch

from clearhead.core.config import RopeScaling
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError
from clearhead.learn.losses import arguments_for, batch_loss
from clearhead.learn.parallel import ParallelPlan
from clearhead.learn.parallel.pipeline import StageTransformer, check, cut, layers_of, schedule_1f1b, stage_of
from clearhead.learn.parallel.world import World
from clearhead.variants.routing import BALANCE
from tests.harness import build, config
from tests.training.test_losses import language_batch

pytestmark = pytest.mark.ledger("I3")
MODELS: dict[str, dict[str, Any]] = {
    "tied, learned positions": {},
    "untied, rope, window": {"tie_embeddings": False, "positions": "rope", "attention": "window(3)"},
    "relative, narrow table": {"positions": "relative", "d_embedding": 4},
    "mlm, post norm": {"family": "encoder", "norm_position": "post"},
    "pairs, one table": {"family": "encoder-decoder", "positions": "relative", "share_embeddings": True},
    "pairs, two tables": {"family": "encoder-decoder", "share_embeddings": False},
}


def world_of(stages: int, stage: int, **sizes: int) -> World:
    plan = ParallelPlan(pipeline=stages, data=sizes.get("data", 1), shard=1)
    return World(plan, rank=stage * (plan.data or 1), size=stages * (plan.data or 1))


class Wire:
    """What a `StageLinks` does, between stages in one process."""

    def __init__(self, stage: int, letters: dict[tuple[str, int], deque[Any]]) -> None:
        self.stage, self.letters, self.device = stage, letters, torch.device("cpu")

    def send_forward(self, key: object, tensors: Any) -> int:
        self.letters["on", self.stage + 1].append([tensor.detach().clone() for tensor in tensors])
        return len(tensors)

    def receive_forward(self, key: object) -> Any:
        return self.letters["on", self.stage].popleft()

    def send(self, tensors: Any, stage: int) -> None:
        self.letters["back", stage].append([tensor.clone() for tensor in tensors])

    def receive(self, shapes: Any, stage: int) -> Any:
        return self.letters["back", self.stage].popleft()


def chained(model: Transformer, stages: int) -> list[StageTransformer]:
    letters: dict[tuple[str, int], deque[Any]] = defaultdict(deque)
    made = [stage_of(model, stage, stages) for stage in range(stages)]
    for stage, one in enumerate(made):
        one.links = Wire(stage, letters)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_loss_and_gradients_of_the_whole(name: str, stages: int) -> None:
    """Every weight is in a stage under its name, and stages that hold the same one add up its gradient."""
    model = build(n_layers=5, **MODELS[name])
    batch, every = language_batch(model), dict(model.named_parameters())
    loss, _ = batch_loss(model, batch)
    wanted = torch.autograd.grad(loss, list(every.values()))
    own = chained(model, stages)
    held = [set(dict(stage.named_parameters())) for stage in own]
    assert set.union(*held) == set(every)
    blocks = [{name for name in names if ".blocks." in name} for names in held]
    assert all(not a & b for a, b in itertools.combinations(blocks, 2))
    assert all(blocks)
    assert all(names < set(every) for names in held)
    passed = [stage(**arguments_for(model, batch), logits="none").logits for stage in own[:-1]]
    passed.append(batch_loss(own[-1], batch)[0])
    assert passed[-1].item() == pytest.approx(loss.item(), rel=1e-6)
    for one in reversed(passed):
        one.backward()
    for name, gradient in zip(every, wanted):
        torch.testing.assert_close(every[name].grad, gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_the_balance_of_experts_is_that_of_the_whole_batch(family: str) -> None:
    """Choices of all layers and all pieces count, wherever they are made."""
    model = build(family=family, n_layers=3, n_experts=4, n_active_experts=2, positions="rope").train()
    batch, every = language_batch(model, rows=5), dict(model.named_parameters())
    loss, _ = batch_loss(model, batch, balance=BALANCE)
    wanted = torch.autograd.grad(loss, list(every.values()))
    own, world = chained(model, 3), world_of(3, 2)
    micro = cut(batch, world_of(3, 2), batches=4)
    passed = []
    for piece in micro:
        passed.append([stage(**arguments_for(model, piece), logits="none").logits for stage in own[:-1]])
    last = cast(Any, own[-1])
    last.set_is_last_backward = last.set_requires_gradient_sync = lambda final: None  # not sharded
    last.set_reshard_after_backward = lambda final, recurse: None
    losses = [batch_loss(last, piece, balance=0.0)[0] for piece in micro]
    total = 0.0
    for number, piece_loss in enumerate(losses):
        balanced = last.ready(piece_loss, number, micro, [len(micro)], world)
        total += balanced.item()
        for one in (balanced, *reversed(passed[number])):
            one.backward()
    assert len(micro) == 3 and total == pytest.approx(loss.item(), rel=1e-6)
    for name, gradient in zip(every, wanted):
        torch.testing.assert_close(every[name].grad, gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("cuts", [[1], [3], [1, 1, 1], [4, 2, 5], [2] * 8])
def test_turns_meet(stages: int, cuts: list[int], grouped: bool) -> None:
    """Every piece goes forward and back once, and no stage waits for a turn that waits for it."""
    plans = [list(schedule_1f1b(world_of(stages, stage), cuts, grouped)) for stage in range(stages)]
    count, ends = sum(cuts), list(itertools.accumulate(cuts))
    for stage, plan in enumerate(plans):
        for way in (True, False):
            assert [number for forward, number in plan if forward == way] == list(range(count))
        flying = list(itertools.accumulate(1 if forward else -1 for forward, _ in plan))
        assert max(flying) <= min(count, stages - stage + (max(cuts) - 1 if grouped else 0))
    if grouped:  # the last stage knows a whole batch before it goes back
        for number in range(count):
            end = next(end for end in ends if end > number)
            assert plans[-1].index((True, end - 1)) < plans[-1].index((False, number))
    done: set[tuple[int, bool, int]] = set()
    left = [deque(plan) for plan in plans]
    while any(left):
        before = len(done)
        for stage, plan in enumerate(left):
            while plan:
                forward, number = plan[0]
                other = stage - 1 if forward else stage + 1
                if 0 <= other < stages and (other, forward, number) not in done:
                    break
                done.add((stage, forward, number))
                plan.popleft()
        assert len(done) > before, "all stages wait"


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("shares", [1, 2, 3])
def test_pieces_have_every_row_once(rows: int, shares: int) -> None:
    batch = language_batch(build(), rows)
    parts = []
    for share in range(shares):
        world = World(ParallelPlan(pipeline=2, data=shares, shard=1), rank=share, size=2 * shares)
        parts.append(cut(batch, world, batches=2))
    assert len({len(some) for some in parts}) == 1, "shares take as many turns"
    flat = [one for some in parts for one in some if one.n_rows]
    assert torch.equal(torch.cat([one.ids for one in flat]), batch.ids)
    assert sum(one.n_targets for one in flat) == batch.n_targets
    assert {one.n_shared for one in flat} == {batch.n_targets}


@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (5, 2), (7, 3), (8, 8), (61, 16)])
def test_layers_are_shared_out_evenly(layers: int, stages: int) -> None:
    found = [layers_of(stage, stages, layers) for stage in range(stages)]
    assert [layer for some in found for layer in some] == list(range(layers))
    assert {len(some) for some in found} <= {layers // stages, -(-layers // stages)}


GROWING = {"positions": "rope", "rope_scaling": RopeScaling(kind="dynamic", factor=2.0)}


@pytest.mark.parametrize(
    ("model", "stages", "scaled", "words"),
    [
        ({}, 4, False, "parallel.pipeline 4 is more than the 3 layers: choose 3 or less"),
        ({"layer_groups": 1}, 2, False, "layers, and here they share weights (model.layer_groups 1)"),
        ({"depth_capacity": 0.5}, 2, False, "every layer, and model.depth_capacity is 0.5"),
        (
            GROWING,
            2,
            False,
            "rope scaling dynamic goes by the longest row of a batch: use data, shard or tensor",
        ),
        ({}, 2, True, "has no scaled loss (train.precision float16): use bfloat16 or float32"),
    ],
)
def test_what_stages_cannot_share_out_is_refused(model, stages, scaled, words):
    asked = config(n_layers=3, **model)
    check(asked, 1, scaled)
    with pytest.raises(ConfigError) as error:
        check(asked, stages, scaled)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
