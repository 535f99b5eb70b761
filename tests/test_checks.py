"""The equality suite itself: healthy models of every kind pass, and a broken one does not."""

import pytest
import torch

import clearhead as ch
from clearhead.model import positions


@pytest.mark.parametrize("name", ["micro-decoder", "micro-encoder", "micro-encoder-decoder", "micro-vit"])
def test_healthy_models_pass(name):
    torch.manual_seed(0)
    rows = ch.check(ch.Transformer(ch.preset(name)))
    assert [row for row in rows if not row.passed] == []


@pytest.mark.parametrize("head", ["classifier", "tagger", "span", "embedding", "none"])
def test_every_head_can_be_checked(head):
    config = ch.preset("micro-encoder").replace(head=head, n_classes=3 if head in ("classifier", "tagger") else 0, pooling="mean")
    assert all(row.passed for row in ch.check(ch.Transformer(config)))


def test_half_precision_has_a_tolerance_of_its_own():
    rows = ch.check(ch.Transformer(ch.preset("micro-decoder")).bfloat16())
    assert all(row.passed for row in rows)
    assert max(row.tolerance for row in rows) > 1e-3


def test_a_fault_in_rotation_under_a_cache_is_caught(monkeypatch):
    model = ch.Transformer(ch.preset("micro-decoder").replace(positions="rope"))
    right = positions.RopePositions.rotary

    def from_zero(self, where, window):  # a cache that starts counting anew at each call
        return right(self, where - where[:, :1], window)

    monkeypatch.setattr(positions.RopePositions, "rotary", from_zero)
    failed = [row.name for row in ch.check(model) if not row.passed]
    assert failed
    assert all(name.startswith("cached") for name in failed)


def test_training_mode_is_left_as_it_was():
    model = ch.Transformer(ch.preset("micro-decoder").replace(dropout=0.5)).train()
    assert all(row.passed for row in ch.check(model))
    assert model.training
