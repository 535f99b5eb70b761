"""Experts stored in 4 bits are read as transformers reads them, and saved in a plain dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import clearhead as ch
from clearhead.app.cli import main
from clearhead.errors import CheckpointError
from clearhead.hub.quantized import dequantise
from tests.parity.harness import reference, reopened

PACKED = ("gate_up_proj", "down_proj")
CONFIG = transformers.GptOssConfig(
    **{"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2},
    sliding_window=7,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A gpt-oss as it is released: experts in blocks of 4 bits, all else in bfloat16."""
    path = tmp_path / "packed"
    reference("GptOssForCausalLM", CONFIG, path)
    torch.manual_seed(3)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.endswith(PACKED):
            experts, width, out = tensor.shape
            stored[f"{name}_blocks"] = torch.randint(256, (experts, out, width // 32, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(118, 124, (experts, out, width // 32), dtype=torch.uint8)
        else:
            stored[name] = tensor.bfloat16()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    described = json.loads((path / "config.json").read_text())
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    described |= {"quantization_config": quantized, "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(described))
    return path


def test_every_byte_with_every_exponent_is_what_transformers_makes_of_it():
    blocks = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(2, 128, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).reshape(2, 128, 16).contiguous()
    ours, theirs = (
        dequantise(blocks, scales),
        transformers.integrations.mxfp4.convert_moe_packed_tensors(blocks, scales),
    )
    assert ours.shape == theirs.shape == (2, 512, 128)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(
        ours.nan_to_num(7).contiguous().view(torch.int16), theirs.nan_to_num(7).view(torch.int16)
    )


@pytest.mark.parametrize("mapped", [False, True])
def test_a_packed_checkpoint_is_read_as_transformers_reads_it_and_saved_plain(
    folder: Path, mapped: bool, tmp_path: Path
):
    plain = {"quantization_config": transformers.Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    model = reopened(transformers.GptOssForCausalLM, folder, **plain)
    with pytest.warns(
        UserWarning, match=r"4 tensors are stored in 4 bits \(mxfp4\): they are read as bfloat16"
    ):
        ours = ch.load(folder, mapped=mapped)
    assert {parameter.dtype for parameter in ours.model.parameters()} == {torch.bfloat16}
    ids = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model.float().eval()(ids).logits
        assert float((ours.model.float()(ids).logits - wanted).abs().max()) <= 1e-5 * float(
            wanted.abs().max()
        )

    ours.to("bfloat16").save(tmp_path / "plain")
    again = reopened(transformers.GptOssForCausalLM, tmp_path / "plain", dtype=torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    theirs = model.bfloat16().state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.state_dict().items())
    ch.load(tmp_path / "plain").save(tmp_path / "twice")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "twice"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.filterwarnings("ignore:\\d tensors are stored")
def test_the_dtype_asked_for_holds_the_same_numbers(folder: Path):
    half, single = ch.load(folder), ch.load(folder, dtype="float32")
    pairs = zip(half.model.parameters(), single.model.parameters())
    assert all(torch.equal(a.float(), b) for a, b in pairs)


def test_the_command_says_it_in_a_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["convert", str(folder), str(tmp_path / "out")])
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("warning: 4 tensors are stored in 4 bits (mxfp4)")]
    assert ch.load(tmp_path / "out").config.n_experts == 3


NAME = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.filterwarnings("ignore:\\d tensors are stored")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.pop(f"{NAME}_scales"), f"has {NAME}_blocks and not {NAME}_scales"),
        (lambda x: x.pop(f"{NAME}_blocks"), f"reads the tensor {NAME}_scales"),
        (
            lambda x: x.update({f"{NAME}_scales": x[f"{NAME}_scales"][:, 1:].clone()}),
            "do not belong together",
        ),
        (lambda x: x.update({f"{NAME}_blocks": x[f"{NAME}_blocks"].int()}), "do not belong together"),
        (
            lambda x: x.update(
                {f"{NAME}_{end}": x[f"{NAME}_{end}"][1:].clone() for end in ("blocks", "scales")}
            ),
            f"tensor {NAME} has shape",
        ),
    ],
    ids=["no scales", "no blocks", "fewer scales", "no bytes", "fewer experts"],
)
def test_what_does_not_fit_is_refused_by_name(folder: Path, change, said: str):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        ch.load(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "weights must be mxfp4 or floating point"),
        ({"quantization_config": "mxfp4"}, "weights must be mxfp4 or floating point"),
        ({"quantization_config": None}, "do not belong together"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "weights must be floating point"),
    ],
    ids=["another method", "no table", "not said", "another architecture"],
)
def test_another_quantization_is_refused_by_name(folder: Path, change: dict[str, object], said: str):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=said):
        ch.load(folder)
