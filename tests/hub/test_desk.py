"""Weights that are read piece by piece, turned, joined and converted, are those of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import clearhead as ch
from clearhead.hub import desk
from clearhead.hub.rules import Rule
from clearhead.hub.weights import open_safetensors
from clearhead.run.kernels import turning

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


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("kind", MODELS)
def test_pieces_make_the_same_weights(kind, compiled, tmp_path, monkeypatch):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[kind]).save_pretrained(tmp_path)
    wanted = of_the_file(kind, tmp_path)
    if not compiled:
        monkeypatch.setattr(turning, "compiled_before", lambda: None)
    monkeypatch.setattr(desk, "LINES", 4)
    read = []
    fill = desk.Desk.fill
    monkeypatch.setattr(desk.Desk, "fill", lambda self, source: read.append(1) or fill(self, source))
    for piece in (desk.PIECE, 600):  # whole matrices, and a few rows or numbers of each
        monkeypatch.setattr(desk, "PIECE", piece)
        for dtype in (None, torch.float64, torch.bfloat16):
            found = dict(ch.load(tmp_path, dtype=dtype).model.named_parameters())
            for name, tensor in wanted.items():
                assert torch.equal(found[name], tensor.to(dtype or torch.float32)), (name, piece, dtype)
                assert found[name].is_contiguous()
    # Where nothing is converted, the token table is read ahead.
    assert len(read) == 6 * len(load_file(tmp_path / "model.safetensors")) - 2


def test_a_table_read_ahead_becomes_one_parameter(tmp_path):
    table, name, path = torch.randn(50, 8), "tokens.weight", tmp_path / "model.safetensors"
    save_file({"wte": table, "other": torch.zeros(8, 50)}, path)
    entries = open_safetensors(path, mapped=False)

    def claimed(shape, dtype, *sources):
        ahead = desk.Ahead(entries.values(), (50, 8), None)
        return ahead.claim(list(sources), {name: shape}, {name: dtype})

    plain, other = (Rule("wte", (name,)), entries["wte"]), (Rule("other", (name,)), entries["other"])
    assert torch.equal(claimed((50, 8), torch.float32, other, plain)[name].result(), table)
    assert not claimed((50, 8), torch.float32, plain, plain)  # it becomes two tables
    assert not claimed((8, 50), torch.float32, other)
    assert not claimed((51, 8), torch.float32, plain)  # the other way refuses it
    assert not claimed((50, 8), torch.float64, plain)
    turned = (Rule("wte", (name,), desk.TRANSPOSED), entries["wte"])
    assert not claimed((50, 8), torch.float32, turned)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ch.ClearheadError, match="has become shorter while it was read"):
        claimed((50, 8), torch.float32, plain)[name].result()
