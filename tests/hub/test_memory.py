"""Loading costs the memory of the weights and hardly more, whatever the file's layout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clearhead as ch

pytestmark = pytest.mark.ledger("L2", "L3")

# About 200 MB of float32. The widest tensor is below the allowed surplus: it is there twice while transposed.
SHAPES = {
    "gpt2": ch.ModelConfig(
        vocab_size=4000, d_model=768, n_layers=7, n_heads=12, max_positions=128, activation="gelu_tanh"
    ),
    "llama": ch.ModelConfig(
        **{
            "vocab_size": 4000,
            "d_model": 768,
            "d_ff": 2048,
            "n_layers": 6,
            "n_heads": 12,
            "max_positions": 128,
            "tie_embeddings": False,
        },
        **{
            "positions": "rope",
            "norm": "rmsnorm",
            "gated": True,
            "bias": False,
            "activation": "silu",
            "norm_eps": 1e-6,
        },
    ),
}
MEASURE = """
import sys, torch
from clearhead import load
torch.set_num_threads(1)
def memory(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
torch.nn.functional.linear(torch.zeros(8, 8), torch.zeros(8, 8))
folder, dtype = sys.argv[1:]
before = memory("VmRSS")
model = load(folder, dtype=getattr(torch, dtype) if dtype != "None" else None).model
with torch.inference_mode():
    model(torch.arange(4)[None])
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("kind", SHAPES)
def test_peak_memory_of_loading(kind: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in ch.Transformer(SHAPES[kind]).parameters())
    assert 190e6 < 4 * count < 260e6
    ch.Model(ch.Transformer(SHAPES[kind])).save(tmp_path / "model")
    for dtype, width in (("None", 4), ("float64", 8)):  # as it stands, and each tensor converted
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "model"), dtype]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert peak <= 1.2 * count * width, (
            f"{kind} as {dtype}: peak is {peak / (count * width):.2f} times the weights"
        )


@pytest.mark.parametrize("kind", SHAPES)
def test_a_converted_dtype_has_the_same_weights(kind: str, tmp_path: Path) -> None:
    config = SHAPES[kind].replace(d_model=96, d_ff=128, n_layers=2)
    made = ch.Transformer(config)
    ch.Model(made).save(tmp_path / "model")
    wanted = dict(made.named_parameters())
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for name, parameter in ch.load(tmp_path / "model", dtype=dtype).model.named_parameters():
            assert torch.equal(parameter, wanted[name].to(dtype)), name
