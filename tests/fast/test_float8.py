"""Products in float8, against float64 over the numbers that float8 holds; and models that train with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.embedding import Embedding
from clearhead.errors import ConfigError
from clearhead.learn.losses import batch_loss
from clearhead.learn.training import machine
from clearhead.run.kernels import float8
from clearhead.run.kernels.training import join_projections
from tests.harness import build, some_ids, worst
from tests.training.test_run import TEXT, StopAt, run, same, weights

SIZES = {"d_model": 32, "n_heads": 4, "d_ff": 64, "attention": "full"}
HALF = 2.0**-8  # of bfloat16: a rounding is half of its last bit
EIGHT = 2.0**-4  # of float8


def held(x: torch.Tensor) -> torch.Tensor:
    """What float8 holds of x, in float64."""
    values, scale = float8.scaled(x)
    return values.double() * scale.double()


def narrowed() -> torch.autocast:
    return torch.autocast(torch.zeros(()).device.type, torch.bfloat16)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


# Numbers ----------------------------------------------------------------------------------------------------


def test_each_row_is_held_to_four_bits_of_its_values_whatever_its_size():
    torch.manual_seed(0)
    x = torch.randn(6, 48) * torch.tensor([1e-20, 1e-3, 1.0, 1e4, 1e20, 0.0])[:, None]
    found = held(x)
    # Values below 2^-6 of the unit in which a row is held have fewer bits, evenly spaced.
    spacing = float8.scaled(x)[1].double() * 2.0**-10
    assert bool(((found - x.double()).abs() <= torch.maximum(EIGHT * x.double().abs(), spacing)).all())
    assert relative(found.abs().amax(1), x.double().abs().amax(1)) <= 1e-7 and not found[-1].any()


@pytest.mark.parametrize(("M", "D", "N"), [(16, 32, 48), (17, 64, 16), (1, 16, 16), (130, 96, 32)])
def test_a_product_and_its_gradients(M, D, N):
    torch.manual_seed(M)
    x = (torch.randn(M, D) * 10 ** torch.linspace(-3, 3, M)[:, None]).requires_grad_()
    layer = float8.like(nn.Linear(D, N).to(x.device), float8.TrainedLinear, matmul=float8.float8_linear)
    with narrowed():
        y = layer(x.view(1, M, D))
    assert y.shape == (1, M, N) and y.dtype == torch.bfloat16
    upstream = torch.randn(M, N).bfloat16()
    found = torch.autograd.grad(y[0], (x, *layer.parameters()), upstream)
    bias = layer.bias.detach().double()
    rows = held(x) @ held(layer.weight).T + bias
    size = held(x).abs() @ held(layer.weight).abs().T + bias.abs()
    assert bool(((y[0] - rows).abs() <= 2 * HALF * size).all())
    wanted = (
        held(upstream) @ held(layer.weight.t()).T,
        upstream.double().T @ x.bfloat16().double(),
        upstream.double().sum(0),
    )
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32 and relative(one, other) <= 2 * HALF


def test_what_is_not_finite_stays_so():
    weight = torch.randn(16, 32)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(4, 32)
        x[1, 3] = bad
        with narrowed():
            finite = float8.float8_linear(x, weight, None).isfinite().all(1)
        assert finite.tolist() == [True, False, True, True]


# Models -----------------------------------------------------------------------------------------------------


def test_a_model_has_the_same_names_and_without_autocast_the_same_numbers():
    plain, model = build(**SIZES), build(**SIZES)
    assert float8.suit(model) == (12, 12)
    assert float8.suit(model) == (12, 12)  # once more changes nothing
    assert [*model.state_dict()] == [*plain.state_dict()]
    ids = some_ids()
    assert worst(model(ids).logits, plain(ids).logits) == 0
    with narrowed():
        rounded, exact = model(ids, logits="none").hidden, plain(ids, logits="none").hidden
    assert 1e-3 < relative(rounded, exact) < 0.2


def test_joined_projections_are_the_same_product():
    apart, joined = build(**SIZES), build(**SIZES)
    join_projections(joined)
    for model in (apart, joined):
        float8.suit(model)
    ids = some_ids()
    with narrowed():
        assert worst(apart(ids).logits, joined(ids).logits) == 0


def test_routers_and_odd_widths_stay_wide():
    experts = build(**SIZES, n_experts=16, n_active_experts=2, d_expert=16)
    float8.suit(experts)
    kinds = {name.rpartition(".")[2]: type(part) for name, part in experts.named_modules()}
    assert kinds["router"] is nn.Linear and kinds["up"] is float8.TrainedLinear
    odd = build(**{**SIZES, "d_ff": 72})
    done, layers = float8.suit(odd)
    assert (done, layers) == (8, 12)
    assert type(odd.decoder.blocks[0].feedforward.up) is nn.Linear


def test_gradients_are_those_of_bfloat16_but_for_eight_bits():
    from clearhead.learn.batches.batch import Batch

    gradients = []
    for suited in (False, True):
        model = build(**SIZES).train()
        join_projections(model)
        if suited:
            float8.suit(model)
        ids = some_ids(4)
        with narrowed():
            loss, count = batch_loss(model, Batch(ids[:, :-1], ids[:, 1:]))
        (loss / count).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert 0 < relative(*gradients) < 0.15


# Runs -------------------------------------------------------------------------------------------------------


WIDE = ("model.d_model=32", "model.d_ff=64", "model.n_heads=4")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def in_float8(monkeypatch) -> None:
    """A CPU multiplies in float8 too, slowly: what a GPU does in a run can be tried there."""
    cpu = torch.device("cpu")
    made = machine.Precision(cpu, torch.bfloat16, "float8 on cpu", float8=True)
    monkeypatch.setattr(machine, "choose_precision", lambda *given, **more: made)


@pytest.mark.cpu
@pytest.mark.ledger("H4")
@pytest.mark.slow
def test_a_run_learns_as_well_as_in_float32_and_says_what_it_does(text, tmp_path, monkeypatch):
    longer = (*WIDE, "train.steps=60", "train.lr=1e-2")
    exact = run(text, tmp_path / "exact", *longer, "train.precision=float32")
    in_float8(monkeypatch)
    said: list[str] = []
    narrow = run(
        text, tmp_path / "narrow", *longer, on_event=lambda event: said.append(getattr(event, "line", ""))
    )
    assert narrow.metrics["loss"] == pytest.approx(exact.metrics["loss"], rel=0.05)
    assert any("linear layers of blocks multiply in float8" in line for line in said)
    assert 'precision = "float8"' in (tmp_path / "narrow" / "train.toml").read_text()
    assert type(ch.load(tmp_path / "narrow").model.decoder.embedding) is Embedding


@pytest.mark.cpu
@pytest.mark.ledger("H4")
@pytest.mark.slow
def test_stopped_and_resumed_it_ends_with_the_same_bits(text, tmp_path, monkeypatch):
    in_float8(monkeypatch)
    run(text, tmp_path / "whole", *WIDE)
    run(text, tmp_path / "cut", *WIDE, stop=StopAt(5))
    ch.train(resume=tmp_path / "cut")
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


@pytest.mark.cpu
@pytest.mark.ledger("H4")
def test_a_model_that_cannot_is_refused(text, tmp_path, monkeypatch):
    in_float8(monkeypatch)
    with pytest.raises(ConfigError, match=r"multiples of 16 .* set train.precision to bfloat16"):
        run(text, tmp_path / "run", "model.d_model=24", "model.d_ff=40", "model.n_heads=2")
    with pytest.raises(ConfigError, match="is for one device"):
        machine.suit_float8(build(**SIZES), split=True)
