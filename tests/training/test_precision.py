"""Devices and precisions: chosen by facts, never by a clock; recorded; what is not to be had is refused."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

import clearhead as ch
from clearhead.errors import ConfigError, InputError
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.tasks.table import TASKS
from clearhead.learn.training import machine
from clearhead.learn.training.machine import choose_precision, cpu_has_bfloat16
from clearhead.run.bundle import best_device
from tests.training.test_run import TEXT, StopAt, run, same

pytestmark = pytest.mark.ledger("H4", "H8")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("has", [True, False, None])
def test_on_a_cpu_auto_is_float32_whatever_it_has(monkeypatch, has):
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda: has)
    chosen = choose_precision(TrainPlan(), CPU)
    assert chosen.dtype is None and not chosen.scaled and chosen.sentence == "float32 on cpu"
    with chosen.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert chosen.scaler().scale(torch.tensor(3.0)) == 3


@pytest.mark.parametrize(("has", "slow"), [(True, False), (False, True), (None, False)])
def test_bfloat16_is_had_on_a_cpu_where_it_is_asked_for(monkeypatch, has, slow):
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda: has)
    chosen = choose_precision(TrainPlan(precision="bfloat16"), CPU)
    assert chosen.dtype == torch.bfloat16 and not chosen.scaled
    assert ("no instructions for bfloat16 (float32 is faster)" in chosen.sentence) is slow
    with chosen.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("told", "has"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("Features\t: fp asimd asimddp", False),
        ("", None),
    ],
)
def test_what_linux_tells_of_a_cpu(monkeypatch, told, has):
    monkeypatch.setattr(machine.Path, "read_text", lambda self, **how: f"processor\t: 0\n{told}\n")
    assert cpu_has_bfloat16.__wrapped__() is has


def test_no_clock_is_read_to_choose(monkeypatch):
    """Not for any precision, nor for what else `machine` chooses."""

    def read() -> float:
        raise AssertionError("a clock was read")

    for name in ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "process_time"):
        monkeypatch.setattr(time, name, read)
    cpu_has_bfloat16.cache_clear()
    for wanted in ("auto", "float32", "bfloat16"):
        choose_precision(TrainPlan(precision=wanted), CPU)
    assert not machine.pays(TASKS["lm"], DataPlan(), TrainPlan(steps=1000), CPU)
    machine.quick_attention(TASKS["lm"], DataPlan(), CPU), machine.narrow(CPU)


CHOSEN = [("auto", True, torch.bfloat16), ("auto", False, torch.float16), ("float16", True, torch.float16)]


@pytest.mark.parametrize(("wanted", "has", "dtype"), [*CHOSEN, ("float32", True, None)])
def test_a_gpu_by_what_it_has(monkeypatch, wanted, has, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has)
    name = "NVIDIA H100 80GB HBM3" if has else "Tesla V100-SXM2"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    chosen = choose_precision(TrainPlan(precision=wanted), GPU)
    assert chosen.dtype == dtype and chosen.scaled == (dtype == torch.float16)
    assert chosen.peak == (None if dtype is None else 989e12 if has else 125e12)
    assert ("has no bfloat16" in chosen.sentence) == (not has)


@pytest.mark.parametrize(
    ("capability", "has"), [((9, 0), True), ((8, 9), True), ((8, 0), False), ((7, 0), False)]
)
def test_float8_where_a_gpu_has_it(monkeypatch, capability, has):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capability >= (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_precision(TrainPlan(), GPU).float8 is False  # only if asked for
    if has:
        chosen = choose_precision(TrainPlan(precision="float8"), GPU)
        assert chosen.name == "float8" and chosen.float8 and "float8 matmuls in blocks" in chosen.sentence
        return
    line = r"float8 is not to be had on some GPU: set train\.precision to auto"
    with pytest.raises(ConfigError, match=line):
        choose_precision(TrainPlan(precision="float8"), GPU)


def test_what_a_gpu_has_not_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2")
    with pytest.raises(ConfigError, match="bfloat16 is not to be had on Tesla V100-SXM2: set"):
        choose_precision(TrainPlan(precision="bfloat16"), GPU)


@pytest.mark.parametrize("wanted", ["float16", "float8"])
def test_a_precision_that_is_not_to_be_had_is_refused_and_nothing_is_written(tmp_path, clearhead, wanted):
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(TEXT)
    asked = ["--set", f"train.precision={wanted}", "--set", "train.device=cpu"]
    ran = clearhead("train", text, f"--out {out}", *asked)
    line = f"train.precision {wanted} is not to be had on cpu: set train.precision to float32 or bfloat16"
    assert ran.code == 2 and line in " ".join(ran.err.split())
    assert not out.exists()


@pytest.mark.parametrize("recorded", ["float16", "float8"])
def test_a_run_goes_on_in_its_precision_or_not_at_all(tmp_path, recorded):
    """A run that was begun on a GPU, and is resumed where there is none."""
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(TEXT)
    run(text, out, "train.device=cpu", stop=StopAt(2))
    recipe = out / "train.toml"
    assert 'precision = "float32"' in recipe.read_text()
    recipe.write_text(recipe.read_text().replace('precision = "float32"', f'precision = "{recorded}"'))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    line = rf"was begun in {recorded}, and a run goes on as it began .*model\.base="
    with pytest.raises(ConfigError, match=line):
        ch.train(resume=out)
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != "lock"}
    assert after.items() <= before.items()


def test_a_run_goes_on_in_bfloat16_where_auto_is_float32(tmp_path):
    text, out, said = tmp_path / "text.txt", tmp_path / "run", []
    text.write_text(TEXT)
    whole = run(text, tmp_path / "whole", "train.device=cpu", "train.precision=bfloat16")
    run(text, out, "train.device=cpu", "train.precision=bfloat16", stop=StopAt(5))
    done = ch.train(resume=out, on_event=lambda event: said.append(getattr(event, "line", "")))
    assert any("bfloat16 matmuls, float32 weights" in line for line in said)
    assert same(done.model.model.state_dict(), whole.model.model.state_dict())


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
