"""Folded norms: the same logits from norms of scale 1 and shift 0; centred writes change nothing."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.core.norms import Norm
from tests.harness import GROUPED_EXPERTS, LATENT, build, byte_tokenizer, scramble, some_ids, worst

GPT2, LLAMA = {}, {"norm": "rmsnorm", "positions": "rope", "gated": True, "bias": False, "n_kv_heads": 2}
PATCHES = {"input": "patches", "image_size": (8, 8), "patch_size": 4, "n_channels": 1, "class_token": True}
EXPERTS = {"n_experts": 3, "n_active_experts": 2, "d_shared_expert": 8}
CLASSES = {"family": "encoder", "n_classes": 3}
# By name: the config, and the norms of the copy that keep their scale.
MODELS = {
    "gpt2": (GPT2, set()),
    "gpt2 without biases but of norms": ({"bias": False, "norm_bias": True}, set()),
    "llama": (LLAMA, set()),
    "gemma": ({**LLAMA, "norm_unit_offset": True, "embedding_scale": 4.0, "logit_softcap": 3.0}, set()),
    "scaled logits": ({"logit_scale": 0.3}, set()),
    "parallel": ({"parallel": True, "positions": "rope"}, set()),
    "parallel, two norms": ({"parallel": True, "parallel_norms": 2}, set()),
    "mixture": ({**LLAMA, **EXPERTS}, set()),
    # The gate of the shared expert has no bias.
    "mixture with shifts": (EXPERTS, {"feedforward_residual.before"}),
    "shared blocks": ({"layer_groups": 1}, set()),
    "depth": ({"depth_capacity": 0.5}, set()),
    "gated delta": ({**LLAMA, "attention": ("gated-delta", "full")}, {"attention.norm"}),
    "state space": (
        {**LLAMA, "attention": ("mamba2(d_state=6)", "none"), "feedforward_skips": (0,)},
        {"attention.norm"},
    ),
    "latent": ({**LLAMA, **LATENT, **GROUPED_EXPERTS, "n_kv_heads": 4}, set()),
    "global": ({"family": "encoder", "attention": "global(4)"}, set()),
    "gated attention": ({"attention_gate": True}, set()),
    "gate of heads": ({"head_gate": 5}, set()),
    "masked": ({"family": "encoder", "n_types": 2}, set()),
    "masked, post": (
        {"family": "encoder", "norm_position": "post"},
        {"attention_residual.after", "feedforward_residual.after"},
    ),
    "sandwich": ({"norm_position": "sandwich"}, {"attention_residual.inside", "feedforward_residual.inside"}),
    "narrow table": ({"d_embedding": 8, "embedding_norm": True}, set()),
    "classifier": ({**CLASSES, "pooling": "mean"}, set()),
    "classifier with pooler": ({**CLASSES, "pooler": "tanh", "pooler_norm": True}, set()),
    "tagger": ({**CLASSES, "head": "tagger"}, set()),
    "tagger with a layer": ({**CLASSES, "head": "tagger", "head_layer": True}, {"norm", "head.norm"}),
    "span": ({"family": "encoder", "head": "span"}, set()),
    "images": ({**CLASSES, **PATCHES, "vocab_size": 0}, set()),
    "disentangled": ({"family": "encoder", "positions": "disentangled"}, {"attention_residual.before"}),
    "both": ({"family": "encoder-decoder", "n_encoder_layers": 1}, set()),
}
CENTRED = [
    "gpt2",
    "parallel",
    "mixture with shifts",
    "shared blocks",
    "masked",
    "narrow table",
    "tagger",
    "both",
]


def given_for(model: ch.Transformer) -> dict[str, torch.Tensor]:
    """Return the inputs of a call."""
    if model.config.input == "patches":
        return {"ids": torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))}
    both = model.config.family == "encoder-decoder"
    return {"ids": some_ids(), **({"source": some_ids(2, 5, seed=3)} if both else {})}


def kept_norms(model: ch.Transformer) -> set[str]:
    """Return the last words of the names of norms that scale or shift."""
    found = set()
    for name, part in model.named_modules():
        if isinstance(part, Norm):
            one = torch.zeros_like(part.weight) if part.unit_offset else torch.ones_like(part.weight)
            if not torch.equal(part.weight, one) or (part.bias is not None and part.bias.any()):
                found.add(name.partition("blocks.")[2].partition(".")[2] or name.removeprefix("encoder."))
    return found


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_folded_copy_gives_the_same_logits(name):
    changes, kept = MODELS[name]
    model = build(**changes).double()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    given = {key: x.double() if x.is_floating_point() else x for key, x in given_for(model).items()}
    wanted = model(**given).logits
    folded = ch.fold_norms(model).model
    assert worst(folded(**given).logits, wanted) <= 1e-5
    assert kept_norms(folded) == kept
    assert not folded.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    folded.head.requires_grad_(False)
    for weight in folded.parameters():
        weight.zero_()  # no weight is shared with the original
    assert torch.equal(model(**given).logits, wanted)


@pytest.mark.parametrize("name", CENTRED)
@torch.no_grad()
def test_centred_writes_have_mean_zero_and_change_no_logit(name):
    model = build(**MODELS[name][0])
    given = given_for(model)
    folded = ch.fold_norms(model, centre=True).model
    assert worst(folded(**given).logits, model(**given).logits) <= 1e-5
    stream = ["*resid_pre", "*resid_post"]
    with ch.record(model, *stream) as before, ch.record(folded, *stream) as after:
        model(**given), folded(**given)
    for tap in after:
        assert before[tap].mean(-1).abs().max() > 1e-3
        assert after[tap].mean(-1).abs().max() < 1e-6


@torch.no_grad()
def test_a_folded_copy_is_a_model_like_any_other(tmp_path):
    """It saves, loads and generates; what carries over is the tokenizer, not the folder."""
    m = ch.Model(
        scramble(ch.Transformer(ch.preset("micro-decoder").replace(vocab_size=257))).eval(), byte_tokenizer()
    )
    m.save(tmp_path / "whole")
    folded = ch.fold_norms(ch.load(tmp_path / "whole"))
    folded.save(tmp_path / "folded")
    again, ids = ch.load(tmp_path / "folded"), some_ids(1, 6, vocab=257)
    assert torch.equal(again.model(ids).logits, folded.model(ids).logits)
    assert worst(again.model(ids).logits, m.model(ids).logits) <= 1e-5
    assert again.generate("hello", 5).ids == m.generate("hello", 5).ids


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (LLAMA, "this model has norm rmsnorm"),
        ({"norm_position": "post"}, "norm_position post, final_norm false"),
        ({"depth_capacity": 0.5}, "depth_capacity"),
        ({"embedding_norm": True}, "embedding_norm"),
        ({**CLASSES, **PATCHES, "vocab_size": 0}, "input patches"),
    ],
)
def test_centring_that_would_change_the_logits_is_refused(changes, words):
    with pytest.raises(ch.InputError, match=words):
        ch.fold_norms(build(**changes), centre=True)


def test_quantized_weights_are_refused():
    m = ch.quantize(ch.Model(build(d_model=64, n_heads=4)), bits=8).model
    with pytest.raises(ch.InputError, match="folded"):
        ch.fold_norms(m)
