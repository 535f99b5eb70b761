"""Averaged weights against sums written out."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.errors import CheckpointError
from clearhead.learn.training.weights import Ema, average
from tests.harness import build, config, some_ids, worst


def stepped(model: ch.Transformer, step: int) -> None:
    """Other weights."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.ledger("H7")
@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_a_moving_average_is_the_sum_by_hand(decay):
    model = build()
    ema, name = Ema(model, decay), "decoder.blocks.0.attention.q.weight"
    weight = dict(model.named_parameters())[name]
    wanted = weight.detach().double()
    for step in range(1, 31):
        stepped(model, step)
        ema.update(model)
        kept = min(decay, step / (step + 9))
        wanted = kept * wanted + (1 - kept) * weight.detach().double()
    assert worst(ema.weights[name].double(), wanted) < 1e-5


def test_what_is_learned_from_the_start_soon_counts_little():
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    ema = Ema(model, 0.9999)
    model.weight.data.zero_()
    for _ in range(100):
        ema.update(model)
    assert ema.weights["weight"].item() < 1e-6  # at 0.9999 from the first step on, 0.99 of it would be left


@pytest.mark.ledger("H7")
def test_applied_weights_are_the_average_and_go_away_again():
    model, ids = build(), some_ids()
    ema = Ema(model, 0.5)
    stepped(model, 1)
    ema.update(model)
    before, own = {name: x.clone() for name, x in model.state_dict().items()}, model(ids).logits
    expected = build()
    expected.load_state_dict(
        {
            **model.state_dict(),
            **ema.weights,
            "head.out.weight": ema.weights["decoder.embedding.front.tokens.weight"],
        }
    )
    with ema.applied(model):
        assert torch.equal(model(ids).logits, expected(ids).logits)
        assert worst(model(ids).logits, own) > 0.01
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(model(ids).logits, own)
    with pytest.raises(ch.InputError), ema.applied(model):
        model(ids + 1000)
    assert torch.equal(model(ids).logits, own)  # an error inside leaves nothing behind


@pytest.mark.ledger("H7")
def test_a_moving_average_goes_on_from_its_state():
    models = [build(), build()]
    emas = [Ema(model, 0.9) for model in models]
    for step in range(6):
        for model, ema in zip(models, emas):
            stepped(model, step)
            ema.update(model)
        if step == 2:
            saved = {name: tensor.clone() for name, tensor in emas[1].state().items()}
            emas[1] = Ema(models[0], 0.9)
            emas[1].restore(saved)
    assert all(torch.equal(weight, emas[1].weights[name]) for name, weight in emas[0].weights.items())
    with pytest.raises(CheckpointError, match="updates"):
        emas[0].restore(emas[0].weights)


def test_frozen_and_half_precision_weights():
    model = build().bfloat16()
    model.decoder.embedding.requires_grad_(False)
    ema = Ema(model, 0.999)
    assert "decoder.embedding.front.tokens.weight" not in ema.weights
    # Small moves are not rounded away.
    assert {weight.dtype for weight in ema.weights.values()} == {torch.float32}
    ema.update(model)
    with ema.applied(model):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.ledger("H7")
def test_an_average_of_checkpoints_is_their_mean():
    states = [ch.Transformer(config()).state_dict() for _ in range(3)]
    found = average(dict(state) for state in states)
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, torch.stack([state[name] for state in states]).double().mean(0).float())
    ch.Transformer(config()).load_state_dict(found)
    assert average([{"count": torch.tensor(3)}, {"count": torch.tensor(4)}])["count"] == 4
    assert average([{"w": torch.ones(1, dtype=torch.bfloat16)}] * 2)["w"].dtype == torch.bfloat16


def test_checkpoints_that_do_not_fit_together():
    with pytest.raises(CheckpointError, match="b is not in all of them"):
        average([{"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}])
    with pytest.raises(CheckpointError, match=r"a has shapes \(2,\) and \(3,\)"):
        average([{"a": torch.ones(2)}, {"a": torch.ones(3)}])
    with pytest.raises(CheckpointError, match="no checkpoint to average"):
        average([])
