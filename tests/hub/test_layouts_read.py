"""Weights that are transposed, split and converted are those of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import clearhead as ch
from clearhead.hub import checkpoint
from clearhead.run.kernels import transpose

transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.ledger("L2")

SIZES = {"vocab_size": 50, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "gpt2": transformers.GPT2Config(vocab_size=50, n_embd=40, n_layer=2, n_head=2, n_positions=16),
    "phi3": transformers.Phi3Config(
        **SIZES, num_key_value_heads=1, intermediate_size=72, max_position_embeddings=16, pad_token_id=0
    ),
}


def of_the_file(kind: str, path: Path) -> dict[str, torch.Tensor]:
    """Our parameters of the first block, cut from the tensors of the file."""
    tensors = load_file(path / "model.safetensors")
    names = [f"decoder.blocks.0.attention.{part}.weight" for part in "qkv"]
    feedforward = "decoder.blocks.0.feedforward."
    if kind == "gpt2":
        at = "transformer.h.0."
        joined, up = tensors[at + "attn.c_attn.weight"], tensors[at + "mlp.c_fc.weight"]
        bias = {
            name.replace("weight", "bias"): part
            for name, part in zip(names, tensors[at + "attn.c_attn.bias"].split(40))
        }
        parts = {name: part.t() for name, part in zip(names, joined.split(40, dim=1))}
        return {**parts, **bias, feedforward + "up.weight": up.t()}
    at = "model.layers.0."
    gate, up = tensors[at + "mlp.gate_up_proj.weight"].split(72)
    parts = dict(zip(names, tensors[at + "self_attn.qkv_proj.weight"].split([40, 20, 20])))
    return {**parts, feedforward + "gate.weight": gate, feedforward + "up.weight": up}


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("kind", MODELS)
def test_parameters_are_those_of_the_file(kind, compiled, mapped, tmp_path, monkeypatch):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[kind]).save_pretrained(tmp_path)
    wanted = of_the_file(kind, tmp_path)
    if not compiled:
        monkeypatch.setattr(transpose, "compiled_before", lambda: None)
    for small in (checkpoint.SMALL, 0):  # matrices that the file holds transposed are copied, or stay views
        monkeypatch.setattr(checkpoint, "SMALL", small)
        for dtype in (None, torch.float64, torch.bfloat16):
            found = dict(ch.load(tmp_path, dtype=dtype, mapped=mapped).model.named_parameters())
            for name, tensor in wanted.items():
                assert torch.equal(found[name], tensor.to(dtype or torch.float32)), (name, small, dtype)
                viewed = kind == "gpt2" and "weight" in name and not small and dtype is None
                assert found[name].is_contiguous() != viewed
