"""Which parameters are trained, decayed and slowed; optimizer steps against loops written out by hand.

Learning-rate schedules against their closed forms and against transformers'.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.errors import InputError
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.training.optim import (
    COEFFICIENTS,
    batches_of,
    freeze,
    lr_at,
    make_optimizer,
    original_schedule,
    orthogonal,
    parameter_groups,
    set_lr,
    step_if_finite,
    warmup_steps,
)
from tests.harness import PATCHES, build, config, some_ids, worst

pytestmark = pytest.mark.ledger("H2", "H9")
CPU = torch.device("cpu")
MODELS = {
    "decoder": {},
    "untied": {"tie_embeddings": False},
    "encoder with types": {"family": "encoder", "n_types": 2, "embedding_norm": True},
    "encoder-decoder": {"family": "encoder-decoder", "n_encoder_layers": 3, "positions": "relative"},
    "experts": {"n_experts": 4, "gated": True, "norm": "rmsnorm", "positions": "rope"},
    "shared layers": {"layer_groups": 1},
    "patches": {**PATCHES, "family": "encoder", "n_classes": 3},
}


def names_of(model: torch.nn.Module, groups: list[dict]) -> list[set[str]]:
    """The names of each group's parameters."""
    name = {id(parameter): name for name, parameter in model.named_parameters()}
    return [{name[id(parameter)] for parameter in group["params"]} for group in groups]


def decayed_names(model: torch.nn.Module, plan: TrainPlan) -> set[str]:
    """The names of the parameters that decay."""
    groups = parameter_groups(model, plan)
    named = zip(names_of(model, groups), groups)
    return set().union(*(names for names, group in named if group["weight_decay"]))


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_every_parameter_is_in_one_group_and_only_matrices_decay(changes):
    model = ch.Transformer(config(**changes))
    groups = parameter_groups(model, TrainPlan(weight_decay=0.1, layer_decay=0.9))
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(members) == sorted(id(parameter) for parameter in model.parameters())  # each, once
    decayed = decayed_names(model, TrainPlan(weight_decay=0.1, layer_decay=0.9))
    tables = (
        "embedding.front.tokens.weight",
        "embedding.types.weight",
        "positions.table.weight",
        "class_token",
    )
    for name, parameter in model.named_parameters():
        plain = name.endswith(".bias") or "norm" in name or "residual" in name or name.endswith(tables)
        assert (name in decayed) == (not plain), name
        assert not (name in decayed and parameter.ndim < 2)


def test_rates_fall_layer_by_layer_from_the_head_down():
    model = ch.Transformer(config(family="encoder-decoder", n_layers=2, n_encoder_layers=3))
    groups = parameter_groups(model, TrainPlan(layer_decay=0.5))
    scale = {name: group["scale"] for names, group in zip(names_of(model, groups), groups) for name in names}
    assert scale["decoder.norm.weight"] == scale["encoder.norm.weight"] == 1
    assert [scale[f"decoder.blocks.{layer}.attention.q.weight"] for layer in (0, 1)] == [0.25, 0.5]
    assert [scale[f"encoder.blocks.{layer}.feedforward.up.bias"] for layer in (0, 1, 2)] == [0.125, 0.25, 0.5]
    assert scale["encoder.embedding.front.tokens.weight"] == 0.0625 == min(scale.values())
    assert scale["decoder.positions.table.weight"] == 0.125
    optimizer = make_optimizer(model, TrainPlan(layer_decay=0.5), CPU)
    set_lr(optimizer, 8.0)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert len(parameter_groups(model, TrainPlan())) == 2


def test_frozen_parameters_stay_and_the_rest_moves():
    model = build()
    plan = TrainPlan(freeze=("decoder.embedding", "decoder.blocks.0.*", "*.norm.weight"), lr=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, plan, CPU)
    model(some_ids()).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    stayed = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    frozen = {name for name in before if name.startswith(("decoder.embedding", "decoder.blocks.0."))}
    assert stayed == {*frozen, "decoder.norm.weight"}
    held = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    assert held == sum(before[name].numel() for name in before.keys() - stayed)


def test_a_shared_weight_freezes_by_either_name():
    model = ch.Transformer(config())
    freeze(model, ("head.out.weight",))
    assert not model.decoder.embedding.front.tokens.weight.requires_grad


def test_freezing_what_is_not_there_says_what_is():
    model = ch.Transformer(config())
    wrong = "decoder.blocks.0.atention.q.weight"
    with pytest.raises(
        InputError, match=f'"{wrong}" names no parameter .did you mean "decoder.blocks.0.atten'
    ):
        make_optimizer(model, TrainPlan(freeze=(wrong,)), CPU)
    with pytest.raises(InputError, match="nothing to train"):
        make_optimizer(model, TrainPlan(freeze=("*",)), CPU)


def adamw(weights: list[float], gradients: list[list[float]], plan: TrainPlan, decay: float) -> list[float]:
    """The paper's loop on plain numbers: decoupled decay, bias-corrected moments."""
    lr, betas, eps = plan.lr, plan.betas, plan.eps
    m, v = [0.0] * len(weights), [0.0] * len(weights)
    for step, gradient in enumerate(gradients, start=1):
        for i, g in enumerate(gradient):
            weights[i] *= 1 - lr * decay
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g * g
            m_hat, v_hat = m[i] / (1 - betas[0] ** step), v[i] / (1 - betas[1] ** step)
            weights[i] -= lr * m_hat / (math.sqrt(v_hat) + eps)
    return weights


@pytest.mark.parametrize(
    "plan",
    [TrainPlan(weight_decay=0.1, lr=0.01), TrainPlan(betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0, lr=0.01)],
    ids=["AdamW", "the original Adam"],
)
def test_adamw_is_the_loop_by_hand(plan):
    model = torch.nn.Linear(3, 2).double()
    model.weight.data.normal_(), model.bias.data.normal_()
    optimizer = make_optimizer(model, plan, CPU)
    drawn = [torch.randn(8, dtype=torch.float64) for _ in range(5)]
    parts = [[d[:6].tolist() for d in drawn], [d[6:].tolist() for d in drawn]]
    matrix = adamw(model.weight.flatten().tolist(), parts[0], plan, plan.weight_decay)
    vector = adamw(model.bias.tolist(), parts[1], plan, 0.0)
    for gradient in drawn:
        model.weight.grad, model.bias.grad = gradient[:6].view(2, 3).clone(), gradient[6:].clone()
        set_lr(optimizer, 0.01)
        optimizer.step()
    assert worst(model.weight.flatten(), torch.tensor(matrix, dtype=torch.float64)) < 1e-12
    assert worst(model.bias, torch.tensor(vector, dtype=torch.float64)) < 1e-12


@pytest.mark.parametrize(
    "size", [1.0, 1e-5], ids=["large gradients", "gradients as small as a language model's"]
)
def test_adafactor_is_transformers(size):
    ours, theirs = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours, TrainPlan(optimizer="adafactor", weight_decay=0.0, lr=0.01), CPU)
    reference = transformers.Adafactor(
        theirs.parameters(), lr=0.01, relative_step=False, scale_parameter=True, warmup_init=False
    )
    for _ in range(6):
        for mine, yours in zip(ours.parameters(), theirs.parameters()):
            mine.grad = size * torch.randn_like(mine)
            mine.grad[0] = 0  # a row of a table that no token used
            yours.grad = mine.grad.clone()
        set_lr(optimizer, 0.01)
        optimizer.step(), reference.step()
    for mine, yours in zip(ours.parameters(), theirs.parameters()):
        assert worst(mine, yours) < 1e-6
    kept = optimizer.state[ours.weight]
    assert kept["row_var"].numel() + kept["col_var"].numel() == 4 + 6  # not 24


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer):
    weight = torch.nn.Linear(3, 3)
    made = make_optimizer(weight, TrainPlan(optimizer=optimizer), CPU)
    set_lr(made, 1e-2)
    nan, inf = math.nan, math.inf
    steps = [(1.0, 2.0, True), (1.0, nan, False), (1.0, inf, False), (nan, 1.0, False), (-inf, inf, False)]
    scaler = torch.amp.GradScaler(enabled=False)
    for loss, norm, changed in [*steps, (1.0, 0.5, True)]:
        weight(torch.ones(1, 3)).sum().backward()
        before = weight.weight.detach().clone()
        found = step_if_finite(made, scaler, torch.tensor(loss), torch.tensor(norm))()
        assert str(found[:2]) == str([loss, norm]) and math.isfinite(found[2]) is changed
        assert torch.equal(before, weight.weight) is not changed


def test_a_scaled_gradient_may_be_infinite_and_a_loss_may_not():
    class Scaler(torch.amp.GradScaler):
        steps = 0

        def step(self, optimizer):
            self.steps += 1

        def update(self):
            self.updated = True

    scaler, weight = Scaler("cpu"), torch.nn.Linear(3, 3)
    made = make_optimizer(weight, TrainPlan(), CPU)
    assert math.isfinite(step_if_finite(made, scaler, torch.tensor(1.0), torch.tensor(math.inf))()[2])
    assert (scaler.steps, scaler.updated) == (1, True)  # and decides for itself
    assert math.isnan(step_if_finite(made, scaler, torch.tensor(math.nan), torch.tensor(1.0))()[2])
    assert scaler.steps == 1


def test_muon_is_torchs_for_matrices_of_blocks_and_adamw_for_the_rest():
    """PyTorch's own multiplies in bfloat16: its updates agree to a fiftieth of their size."""
    first = ch.Transformer(config(n_experts=2, d_shared_expert=8))
    ours, theirs, adamw = (copy.deepcopy(first) for _ in range(3))
    blocks = {name: one for name, one in theirs.named_parameters() if ".blocks." in name}
    matrices = {name: one for name, one in blocks.items() if one.ndim == 2 and min(one.shape) > 1}
    optimizers = [
        make_optimizer(ours, TrainPlan(optimizer="muon"), CPU),
        make_optimizer(adamw, TrainPlan(), CPU),
        torch.optim.Muon(matrices.values(), lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(3):
        for parameters in zip(ours.parameters(), theirs.parameters(), adamw.parameters()):
            gradient = torch.randn_like(parameters[0])
            for parameter in parameters:
                parameter.grad = gradient.clone()
        for optimizer in optimizers:
            if optimizer is not optimizers[-1]:
                set_lr(optimizer, 0.01)
            optimizer.step()
    before, named, other = (dict(model.named_parameters()) for model in (first, ours, adamw))
    for name, parameter in named.items():
        kept = optimizers[0].state[parameter].keys()
        if name in matrices:
            moved = (matrices[name] - before[name]).norm()
            assert (parameter - matrices[name]).norm() < 0.02 * moved, name
            assert kept == {"momentum"}
        else:
            assert worst(parameter, other[name]) < 1e-6, name
            assert kept == {"step", "exp_avg", "exp_avg_sq"}


def test_orthogonal_matrices_have_singular_values_near_one():
    for shape in ((24, 16), (16, 24), (16, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(1, *shape) * 1e-6))
        assert values.min() > 0.3 and values.max() < 1.3
    assert torch.equal(orthogonal(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))  # an expert without tokens


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_polar_express_ends_closer_to_an_orthogonal_matrix(shape):
    matrix = torch.randn((1, *shape), generator=torch.Generator().manual_seed(1)) * 1e-6
    spread = [(torch.linalg.svdvals(orthogonal(matrix, way)) - 1).abs().mean() for way in COEFFICIENTS]
    assert 1.8 * spread[1] < spread[0]


@pytest.mark.parametrize("optimizer", ["muon", "normuon"])
def test_normuon_and_cautious_decay_are_their_formulas(optimizer):
    """Three steps of one matrix, written out in float64, row by row."""
    plan = TrainPlan(optimizer=optimizer, weight_decay=0.5, cautious_decay=True)
    model = ch.Transformer(config(n_layers=1))
    weight = model.decoder.blocks[0].feedforward.up.weight
    made, wanted = make_optimizer(model, plan, CPU), weight.detach().double()
    momentum, rows = torch.zeros_like(wanted), torch.zeros(len(wanted), dtype=torch.float64)
    for step in range(3):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        gradient = weight.grad.double()
        set_lr(made, 0.02)
        made.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonal((0.05 * gradient + 0.95 * momentum).float()[None])[0].double()
        if optimizer == "normuon":
            rows = 0.95 * rows + 0.05 * (update**2).mean(1)
            update = torch.stack([row / total.sqrt() for row, total in zip(update, rows)])
            update *= 0.2 * math.sqrt(update.numel()) / update.norm()
        else:
            update *= 0.2 * math.sqrt(max(update.shape))
        kept = torch.where(update.sign() == wanted.sign(), 1 - 0.02 * 0.5, 1.0)
        wanted = wanted * kept - 0.02 * update
        assert worst(weight, wanted) < 1e-6


def test_batches_of_a_schedule_follow_each_other():
    plan = TrainPlan(accumulate_schedule=(1, 2, 4))
    found = [batches_of(plan, step, 10) for step in range(1, 11)]
    assert [len(each) for each in found] == [1, 1, 1, 1, 2, 2, 2, 4, 4, 4]
    assert [number for each in found for number in each] == list(range(22))


STEPS, WARMUP, LR = 200, 17, 3e-4


def rates(schedule: str, steps: int = STEPS, **changes) -> list[float]:
    """The rate of every step, 0 to `steps`."""
    plan = TrainPlan(**{"schedule": schedule, "lr": LR, "warmup": WARMUP, "floor": 0.0, **changes})
    return [lr_at(plan, step, steps, 64) for step in range(steps + 1)]


def theirs(make, **arguments) -> list[float]:
    """The rates of a transformers schedule, from before the first step on."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule, seen = make(optimizer, num_training_steps=STEPS, num_warmup_steps=WARMUP, **arguments), []
    for _ in range(STEPS + 1):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize(
    ("schedule", "reference"),
    [
        ("cosine", lambda: theirs(transformers.get_cosine_schedule_with_warmup)),
        ("linear", lambda: theirs(transformers.get_linear_schedule_with_warmup)),
        (
            "wsd",
            lambda: theirs(transformers.get_wsd_schedule, num_decay_steps=STEPS // 5, decay_type="linear"),
        ),
    ],
)
def test_transformers_gives_the_same_rates(schedule, reference):
    assert rates(schedule) == pytest.approx(reference(), abs=1e-15)


def test_original_is_the_papers_formula():
    plan = TrainPlan(schedule="original", lr=2.0, warmup=50)
    for step in (1, 49, 50, 51, 5000):
        wanted = 2.0 * 512**-0.5 * min(step**-0.5, step * 50**-1.5)
        assert lr_at(plan, step, 100, 512) == pytest.approx(wanted, rel=1e-12)
    every = [lr_at(plan, step, 100, 512) for step in range(1, 400)]
    assert every.index(max(every)) + 1 == 50
    assert original_schedule(4000, 512) == pytest.approx((512 * 4000) ** -0.5)
    # The warm-up of "original" is 4,000 steps.
    assert lr_at(TrainPlan(schedule="original", lr=1.0), 4000, 100, 512) == original_schedule(4000, 512)
    assert math.isfinite(lr_at(TrainPlan(schedule="original", warmup=0), 1, 100, 512))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_peak_floor_and_no_jumps(schedule):
    seen = rates(schedule, floor=0.1)
    assert seen[0] == 0 and seen[1] == pytest.approx(LR / WARMUP)  # the first step moves
    assert seen[WARMUP] == pytest.approx(LR) == pytest.approx(max(seen))
    assert seen[-1] == pytest.approx(LR if schedule == "constant" else 0.1 * LR)
    steepest = LR / min(WARMUP, STEPS // 5)
    assert max(abs(b - a) for a, b in itertools.pairwise(seen)) <= steepest * 1.0001
    plan = TrainPlan(schedule=schedule, lr=LR, warmup=WARMUP, floor=0.1)
    assert lr_at(plan, STEPS + 50, STEPS, 64) == pytest.approx(seen[-1])  # past the end, it stays


def test_wsd_is_stable_until_its_decay():
    seen = rates("wsd", decay=0.25, floor=0.2)
    assert set(seen[WARMUP:151]) == {LR}
    assert seen[175] == pytest.approx(LR * 0.6)


def test_warmup_by_default_is_a_twentieth():
    assert warmup_steps(TrainPlan(), 1000) == 50
    assert lr_at(TrainPlan(lr=LR), 50, 1000, 64) == LR
    # A run of 10 steps has no warm-up.
    first = LR * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 10)))
    assert lr_at(TrainPlan(lr=LR), 1, 10, 64) == pytest.approx(first)
    # The warm-up may be longer than the run.
    assert [lr_at(TrainPlan(warmup=100, lr=1.0), step, 10, 64) for step in (1, 10)] == [0.01, 0.1]
