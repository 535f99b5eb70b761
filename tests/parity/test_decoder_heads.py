"""Decoders with other heads, tensors that do not fit, and mixtures of experts, against transformers."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import clearhead as ch
from clearhead.errors import CheckpointError
from clearhead.learn.losses import balance_loss
from clearhead.variants.routing import Experts
from tests.parity.harness import (
    GRADIENTS,
    HIDDEN,
    LOGITS,
    batch,
    check_saved,
    close,
    config_of,
    positions_of,
    reference,
)
from tests.parity.test_decoders import DEEP, FALCON, GPT, GROUPED, NEW, NEXT, OSS, SMALL, WINDOW


@pytest.mark.ledger("L2", "L3", "L6")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", GROUPED),
        ("GPTNeoX", SMALL),
        ("Qwen2", dict(GROUPED | WINDOW, max_window_layers=1)),
        ("Gemma2", dict(GROUPED, head_dim=10, sliding_window=6)),
        ("Mixtral", dict(GROUPED, num_local_experts=3)),
        ("GptOss", OSS),
        ("Qwen3Next", NEXT),
        ("Falcon", FALCON),
        ("GPT2", GPT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_classifiers(kind, options, side, tmp_path):
    """Sequences (read at the last real token) and tokens."""
    for head in ("ForSequenceClassification", "ForTokenClassification"):
        folder = tmp_path / head
        model = reference(kind + head, config_of(kind, dict(options, num_labels=5)), folder)
        ours = ch.load(folder)
        ids, mask = batch(model.config, side=side)
        ids[~mask] = 0  # the reference finds the last real token by the padding id
        keep = slice(None) if "Sequence" in head else mask

        def logits(other, ids=ids, mask=mask, keep=keep):
            other.config.pad_token_id = 0  # which a config of ours does not know
            return other(ids, attention_mask=mask.long(), position_ids=positions_of(mask)).logits[keep]

        def said(other, ids=ids, mask=mask, keep=keep):
            return other(ids, mask).logits[keep]

        close(f"{kind}{head}", said(ours.model), logits(model), LOGITS)
        check_saved(model, ours, folder, logits, said)


@pytest.mark.ledger("L2", "L3", "L6")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LlamaModel", GROUPED),
        ("GPTNeoXModel", SMALL),
        ("Gemma3TextModel", dict(DEEP, sliding_window=8)),
        ("MixtralModel", dict(GROUPED, num_local_experts=3)),
        ("GptOssModel", OSS),
        ("Qwen3NextModel", NEXT),
        ("FalconModel", {**FALCON, **NEW}),
        ("PhiModel", SMALL),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_base_models(kind, options, tmp_path):
    """No head, and names without the prefix that they have under one."""
    model = reference(kind, config_of(kind.removesuffix("Model"), options), tmp_path / "reference")
    ours = ch.load(tmp_path / "reference")
    ids, mask = batch(model.config, side="left")

    def states(one):
        return one(ids, attention_mask=mask.long(), position_ids=positions_of(mask)).last_hidden_state[mask]

    close(kind, ours.model(ids, mask).hidden[mask], states(model), HIDDEN)
    assert torch.equal(ours.model(ids, mask).logits, ours.model(ids, mask).hidden)
    check_saved(model, ours, tmp_path, states, lambda one: one(ids, mask).hidden)


def test_a_head_for_several_tokens_is_carried(tmp_path):
    """Released files have tensors `mtp.*`, which the reference leaves out: they are written back."""
    model = reference("Qwen3NextForCausalLM", config_of("Qwen3Next", NEXT), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"mtp.fc.weight": torch.randn(32, 64), "mtp.layers.0.mlp.gate.weight": torch.randn(5, 32)}
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    ours = ch.load(tmp_path)
    ids = batch(model.config)[0]
    with torch.no_grad():
        close("logits", ours.model(ids).logits, model(ids).logits, LOGITS)
    ours.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == {**tensors, **more}.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in {**tensors, **more}.items())


@pytest.mark.ledger("L3", "L6")
@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        ("Qwen3", dict(GROUPED, head_dim=8), "model.layers.1.self_attn.q_norm.weight"),
        (
            "Mixtral",
            dict(GROUPED, num_local_experts=3),
            "model.layers.2.block_sparse_moe.experts.1.w3.weight",
        ),
        ("GptOss", OSS, "model.layers.1.mlp.experts.gate_up_proj"),
        ("GptOss", OSS, "model.layers.2.mlp.experts.down_proj_bias"),
        ("Qwen3Next", NEXT, "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        ("Qwen3Next", NEXT, "model.layers.1.self_attn.q_proj.weight"),
        ("Qwen3Next", NEXT, "model.layers.1.mlp.shared_expert.up_proj.weight"),
        ("GPTNeoX", SMALL, "gpt_neox.layers.0.attention.query_key_value.bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_and_an_unknown_tensor_are_named(kind, options, key, tmp_path):
    reference(f"{kind}ForCausalLM", config_of(kind, options), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    value = tensors.pop(key)
    save_file(tensors, tmp_path / "model.safetensors")
    layer = key.split("layers.")[1][0]
    with pytest.raises(CheckpointError, match=rf"no tensor fills decoder\.blocks\.{layer}\."):
        ch.load(tmp_path)
    save_file({**tensors, key: value, key + "_extra": value.clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"reads the tensor {key}_extra"):
        ch.load(tmp_path)
    save_file({**tensors, key: value[:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {key} has shape"):
        ch.load(tmp_path)


@pytest.fixture
def mixtral(tmp_path):
    config = config_of(
        "Mixtral", dict(GROUPED, num_local_experts=6, num_experts_per_tok=2, output_router_logits=True)
    )
    return reference("MixtralForCausalLM", config, tmp_path / "reference"), tmp_path


@pytest.mark.ledger("L6", "D5")
@pytest.mark.parametrize("padded", [False, True])
def test_the_balance_loss_and_its_router_gradients(mixtral, padded):
    model, folder = mixtral
    ours = ch.load(folder / "reference")
    ids, mask = batch(model.config)
    given = mask if padded else None
    theirs = model(
        ids,
        attention_mask=given.long() if padded else None,
        position_ids=positions_of(mask) if padded else None,
    )
    ours.model.train()
    ours.model(ids, given)
    loss = balance_loss(ours.model, given)
    close("balance loss", loss, theirs.aux_loss, 1e-5)
    theirs_of = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    close("as a function", loss, theirs_of(theirs.router_logits, 6, 2, given), 1e-5)
    loss.backward()
    theirs.aux_loss.backward()
    mixtures = [part for part in ours.model.modules() if isinstance(part, Experts)]
    for layer, part in enumerate(mixtures):
        wanted = model.model.layers[layer].mlp.gate.weight.grad
        assert float(wanted.abs().max()) > 0
        close(f"router gradient of layer {layer}", part.router.weight.grad, wanted, GRADIENTS)


@pytest.mark.ledger("L6")
def test_fused_experts_are_read(mixtral):
    """Transformers 5 can write its experts as it holds them: one tensor for all."""
    model, folder = mixtral
    model.save_pretrained(folder / "fused", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(folder / "fused" / "model.safetensors")
    ids, _ = batch(model.config)
    plain, fused = ch.load(folder / "reference"), ch.load(folder / "fused")
    assert torch.equal(plain.model(ids).logits, fused.model(ids).logits)
    tensors = load_file(folder / "fused" / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    save_file({**tensors, name: tensors[name][:5].clone()}, folder / "fused" / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {name} has shape"):
        ch.load(folder / "fused")
