"""OPT, GPT-Neo, GPT-J and BLOOM: the same model here and there."""

from __future__ import annotations

import json

import pytest
import transformers

import clearhead as ch
from tests.parity.harness import check_decoder, reference

TEXT = {"vocab_size": 61, "hidden_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPT = {**TEXT, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 40, "max_position_embeddings": 80}
NEO = {**TEXT, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 80, "window_size": 7}
NEO |= {"attention_types": [[["global", "local", "global"], 1]]}
J = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 80, "rotary_dim": 4}
J |= {"bos_token_id": 1, "eos_token_id": 2}
BLOOM = {**TEXT, "n_layer": 3, "n_head": 4}
CASES = {
    "OPT": {
        "plain": OPT,
        "no biases, untied": {**OPT, "enable_bias": False, "tie_word_embeddings": False},
        "odd sizes": {**OPT, "hidden_size": 35, "num_attention_heads": 5, "activation_function": "gelu"},
    },
    "GPTNeo": {
        "plain": NEO,
        "all local": {**NEO, "attention_types": [[["local"], 3]], "intermediate_size": 37},
        "one head": {**NEO, "num_heads": 1, "activation_function": "relu", "layer_norm_epsilon": 1e-3},
    },
    "GPTJ": {
        "plain": J,
        "whole heads": {**J, "rotary_dim": 8, "n_inner": 37, "activation_function": "relu"},
        "one head": {**J, "n_head": 1, "rotary_dim": 12, "layer_norm_epsilon": 1e-3},
    },
    "Bloom": {
        "plain": BLOOM,
        "odd heads": {**BLOOM, "hidden_size": 35, "n_head": 5, "layer_norm_epsilon": 1e-3},
        "one head, untied": {**BLOOM, "n_head": 1, "tie_word_embeddings": False},
    },
}


@pytest.mark.ledger("L1")
@pytest.mark.parametrize(("name", "label"), [(name, label) for name in CASES for label in CASES[name]])
def test_decoder(name, label, tmp_path):
    config = getattr(transformers, f"{name}Config")(**CASES[name][label])
    model = reference(f"{name}ForCausalLM", config, tmp_path / "reference")
    check_decoder(model, tmp_path / "reference", tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("OPT", {"word_embed_proj_dim": 12}, "a narrower token table"),
        ("OPT", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("Bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
    ],
)
def test_what_is_not_supported_is_named(name, changes, complaint, tmp_path):
    config = getattr(transformers, f"{name}Config")(**CASES[name]["plain"])
    reference(f"{name}ForCausalLM", config, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ch.CheckpointError, match=complaint):
        ch.load(tmp_path)
