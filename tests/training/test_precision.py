"""Devices and precisions: what the hardware is bad at is never chosen, and what is chosen is said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from clearhead.bundle import best_device
from clearhead.errors import InputError
from clearhead.recipe import TrainPlan
from clearhead.training import machine
from clearhead.training.events import Note
from clearhead.training.machine import choose_precision, cpu_has_bfloat16
from tests.training.test_run import TEXT, run

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.ledger("H4")
@pytest.mark.parametrize("wanted", ["auto", "bfloat16", "float16"])
def test_a_cpu_that_is_slow_with_bfloat16_trains_in_float32_and_says_so(monkeypatch, wanted):
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda allowed=1.0: False)
    chosen = choose_precision(TrainPlan(precision=wanted), CPU)
    assert chosen.dtype is None and not chosen.scaled
    assert chosen.sentence.startswith("float32") and "\n" not in chosen.sentence
    with chosen.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert chosen.scaler().scale(torch.tensor(3.0)) == 3


@pytest.mark.ledger("H4")
def test_a_cpu_that_is_fast_with_bfloat16_uses_it(monkeypatch):
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda allowed=1.0: True)
    chosen = choose_precision(TrainPlan(), CPU)
    assert chosen.dtype == torch.bfloat16 and not chosen.scaled
    with chosen.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert choose_precision(TrainPlan(precision="float32"), CPU).dtype is None


@pytest.mark.ledger("H4")
@pytest.mark.parametrize(("slow", "verdict"), [(300.0, False), (1.3, False), (0.5, True)])
def test_the_clock_decides(monkeypatch, slow, verdict):
    monkeypatch.setattr(machine, "_seconds", lambda matrix: slow if matrix.dtype == torch.bfloat16 else 1.0)
    cpu_has_bfloat16.cache_clear()
    try:
        assert cpu_has_bfloat16() is verdict
    finally:
        cpu_has_bfloat16.cache_clear()


def test_the_clock_runs_here():
    assert cpu_has_bfloat16() in (True, False)  # whatever it is, nothing is raised or warned of


@pytest.mark.ledger("H4")
@pytest.mark.parametrize(
    ("wanted", "has", "dtype"),
    [
        ("auto", True, torch.bfloat16),
        ("auto", False, torch.float16),
        ("bfloat16", False, torch.float16),
        ("float16", True, torch.float16),
        ("float32", True, None),
    ],
)
def test_a_gpu_by_what_it_has(monkeypatch, wanted, has, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has)
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3" if has else "Tesla V100-SXM2"
    )
    chosen = choose_precision(TrainPlan(precision=wanted), GPU)
    assert chosen.dtype == dtype and chosen.scaled == (dtype == torch.float16)
    assert chosen.peak == (None if dtype is None else 989e12 if has else 125e12)
    assert ("has no bfloat16" in chosen.sentence) == (not has)


@pytest.mark.ledger("H4")
@pytest.mark.parametrize(
    ("capability", "has", "name", "said"),
    [
        ((9, 0), True, "float8", "products of blocks in float8"),
        ((8, 9), True, "float8", "products of blocks in float8"),
        ((8, 0), True, "bfloat16", "which has no float8"),
        ((7, 0), False, "float16", "which has no float8 and no bfloat16"),
    ],
)
def test_float8_where_a_gpu_has_it(monkeypatch, capability, has, name, said):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen = choose_precision(TrainPlan(precision="float8"), GPU)
    assert chosen.name == name and chosen.float8 == (name == "float8") and said in chosen.sentence
    assert choose_precision(TrainPlan(), GPU).float8 is False  # only if asked for
    on_cpu = choose_precision(TrainPlan(precision="float8"), CPU)
    assert on_cpu.name == "float32" and "float8 is for GPUs" in on_cpu.sentence


@pytest.mark.ledger("H4")
@pytest.mark.parametrize("wanted", ["float16", "float8"])
def test_a_run_says_that_it_has_not_the_precision_that_was_asked_for(tmp_path, wanted):
    text, said = tmp_path / "text.txt", []
    text.write_text(TEXT)
    run(text, tmp_path / "run", f"train.precision={wanted}", on_event=lambda event: said.append(event))
    lines = [event.line for event in said if isinstance(event, Note)]
    assert f"train.precision {wanted} is not to be had here: float32 on cpu: {wanted} is for GPUs" in lines
    assert 'precision = "float32"' in (tmp_path / "run" / "train.toml").read_text()


def test_a_scaler_goes_on_from_where_it_stood():
    chosen = machine.Precision(CPU, torch.float16, "")
    scaler = chosen.scaler(SimpleNamespace(scale=512.0, scale_age=7))
    assert scaler.get_scale() == 512 and scaler.state_dict()["_growth_tracker"] == 7
    assert chosen.scaler(SimpleNamespace(scale=None, scale_age=0)).get_scale() == 65536


def test_devices():
    assert best_device("cpu") == CPU
    assert best_device("auto").type in ("cpu", "cuda", "mps")
    for name in ("cuda:99", "gpu", "xla"):
        with pytest.raises(InputError, match=f'device "{name}" .*choose auto or one of .*cpu'):
            best_device(name)
