import pytest
import torch
from transformers import ViTConfig, ViTModel

import clearhead as ch
from tests.parity.encoders import check_back, check_backward, check_forward
from tests.parity.harness import reference

SMALL = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 4,
    "num_labels": 5,
}
OPTIONS = {
    "square": SMALL,
    "wide, grey, no query bias": {
        **SMALL,
        "image_size": [12, 36],
        "num_channels": 1,
        "qkv_bias": False,
        "hidden_act": "gelu_new",
    },
    "odd sizes": {
        **SMALL,
        "hidden_size": 35,
        "num_attention_heads": 5,
        "image_size": [35, 15],
        "patch_size": 5,
        "layer_norm_eps": 1e-3,
        "num_hidden_layers": 1,
    },
}


def check(model, folder, tmp_path, **build):
    ours = ch.load(folder)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, ours.config.n_channels, *ours.config.image_size, generator=generator)
    inputs = {"pixel_values": pixels}, {"ids": pixels}
    check_forward(model, ours, *inputs, side="nowhere")
    check_backward(model, ours, *inputs, tmp_path)
    check_back(model, ours, tmp_path, *inputs, **build)
    return ours


@pytest.mark.ledger("L8")
@pytest.mark.ledger("E4")
@pytest.mark.parametrize("kind", ["ViTForImageClassification", "ViTModel"])
@pytest.mark.parametrize("label", list(OPTIONS))
def test_vit(kind, label, tmp_path):
    options = {
        key: value for key, value in OPTIONS[label].items() if key != "num_labels" or kind != "ViTModel"
    }
    model = reference(kind, ViTConfig(**options), tmp_path / "reference")
    check(model, tmp_path / "reference", tmp_path)


@pytest.mark.ledger("L8")
def test_vit_without_its_pooler(tmp_path):
    torch.manual_seed(0)
    model = ViTModel(ViTConfig(**{**SMALL, "num_labels": 2}), add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path / "reference")
    ours = check(model, tmp_path / "reference", tmp_path, add_pooling_layer=False)
    assert ours.config.head == "none"


@pytest.mark.ledger("L8")
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"patch_size": [4, 2]}, "patch_size"), ({"image_size": 30}, "whole number of patches")],
)
def test_patches_that_do_not_fit_are_named(changes, complaint, tmp_path):
    reference("ViTForImageClassification", ViTConfig(**{**SMALL, **changes}), tmp_path)
    with pytest.raises(ch.CheckpointError, match=complaint):
        ch.load(tmp_path)
