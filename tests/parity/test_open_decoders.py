"""Decoders that are tables after GPT-2, Llama and Qwen: the same model here and there, odd ones included."""

from __future__ import annotations

import json

import pytest

import clearhead as ch
from tests.parity.harness import check_decoder, config_of, reference

ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {"vocab_size": 61, "hidden_size": 24, **ENDS}
OPT = {**TEXT, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 40, "max_position_embeddings": 80}
NEO = {**TEXT, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 80, "window_size": 7}
NEO |= {"attention_types": [[["global", "local"], 1], [["global"], 1]]}
J = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 80, "rotary_dim": 4, **ENDS}
BLOOM = {**TEXT, "n_layer": 3, "n_head": 4}
SMALL = {**TEXT, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 128}
MIXED = {**SMALL, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
BIGCODE = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 80, **ENDS}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = {"use_sliding_window": True, "sliding_window": 6}
ODD = {**SMALL, "vocab_size": 53, "hidden_size": 30, "intermediate_size": 37, "num_hidden_layers": 2}
ODD |= {"num_attention_heads": 5, "num_key_value_heads": 1}
EVEN = {**ODD, "hidden_size": 40, "intermediate_size": 36}  # experts of the reference want rows of 16 bytes
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
CASES = {
    "OPT": {
        "no biases, untied": {**OPT, **UNTIED, "enable_bias": False},
        "narrow table, norms after (350m)": {**OPT, "word_embed_proj_dim": 10, "do_layer_norm_before": False},
        "narrow table, no last norm, untied": {
            **{**OPT, **UNTIED, "hidden_size": 35, "num_attention_heads": 5, "activation_function": "gelu"},
            **{"word_embed_proj_dim": 11, "_remove_final_layer_norm": True},
        },
    },
    "GPTNeo": {
        "alternating windows": NEO,
        "all local": {**NEO, "attention_types": [[["local"], 3]], "intermediate_size": 37},
        "one head": {**NEO, "num_heads": 1, "activation_function": "relu", "layer_norm_epsilon": 1e-3},
    },
    "GPTJ": {
        "odd share of a head": {**J, "n_embd": 98, "n_head": 2, "rotary_dim": 6, **TIED},
        "whole heads": {**J, "rotary_dim": 8, "n_inner": 37, "activation_function": "relu"},
        "one head": {**J, "n_head": 1, "rotary_dim": 12, "layer_norm_epsilon": 1e-3},
    },
    "Bloom": {
        "plain": BLOOM,
        "odd heads": {**BLOOM, "hidden_size": 35, "n_head": 5, "layer_norm_epsilon": 1e-3},
        "one head, untied": {**BLOOM, **UNTIED, "n_head": 1},
    },
    "Qwen2Moe": {
        "shared expert": {**MIXED, "shared_expert_intermediate_size": 20},
        "every other layer, no biases, windows": {
            **{**MIXED, **TIED, **WINDOW, "layer_types": KINDS, "decoder_sparse_step": 2, "qkv_bias": False},
            **{"norm_topk_prob": True, "shared_expert_intermediate_size": 8},
        },
        "first layer dense": {
            **{**MIXED, "mlp_only_layers": [0], "num_experts_per_tok": 5, "rope_theta": 500.0},
            "shared_expert_intermediate_size": 12,
        },
    },
    "Qwen3Moe": {
        "sum of one": {**MIXED, "norm_topk_prob": True, "head_dim": 8},
        "every other layer, biases, window": {
            **{**MIXED, **TIED, **WINDOW, "decoder_sparse_step": 2, "attention_bias": True, "head_dim": 6},
            "num_experts_per_tok": 1,
        },
        "one layer dense": {**MIXED, "mlp_only_layers": [1], "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    },
    "GPTBigCode": {
        "one key head": {**BIGCODE, "activation_function": "relu"},
        "all key heads, untied": {**BIGCODE, **UNTIED, "multi_query": False, "n_inner": 37},
        "one key head of five": {**BIGCODE, "n_embd": 35, "n_head": 5, "layer_norm_epsilon": 1e-3},
    },
    "Cohere": {
        "untied, biases": {**SMALL, **UNTIED, "attention_bias": True, "logit_scale": 0.3},
        "one key head, scaled rotation": {**ODD, "rope_scaling": LINEAR, "layer_norm_eps": 1e-3},
        "every key head": {**ODD, "num_key_value_heads": None, "hidden_act": "relu", "rope_theta": 90.0},
    },
    "Cohere2": {
        "every other layer": {**SMALL, "sliding_window": 7, "layer_types": KINDS},
        "three of four": {**SMALL, "num_hidden_layers": 5, "sliding_window": 6, "num_key_value_heads": 1},
        "no layer rotates, biases, untied": {
            **{**ODD, **UNTIED, "layer_types": ["full_attention"] * 2, "attention_bias": True},
            "logit_scale": 2.0,
        },
    },
    "Starcoder2": {
        "window": {**SMALL, "sliding_window": 7},
        "no biases, untied": {**SMALL, **UNTIED, "use_bias": False, "hidden_act": "relu", "head_dim": 6},
        "one key head, scaled rotation": {
            **{**ODD, "rope_scaling": LLAMA3, "hidden_act": "gelu", "sliding_window": 9},
            "norm_epsilon": 1e-3,
        },
    },
    "Nemotron": {
        "plain": {**SMALL, "head_dim": 8},
        "whole heads, biases": {
            **{**SMALL, **TIED, "partial_rotary_factor": 1.0, "attention_bias": True, "mlp_bias": True},
            **{"head_dim": 6, "norm_eps": 1e-3},
        },
        "one key head, part of six rotates": {**ODD, "partial_rotary_factor": 0.34, "hidden_act": "gelu"},
    },
    "Glm": {
        "plain": {**SMALL, "head_dim": 8},
        "no biases": {**SMALL, **TIED, "head_dim": 12, "attention_bias": False, "partial_rotary_factor": 1.0},
        "one key head, scaled rotation": {
            **{**ODD, "head_dim": 10, "hidden_act": "gelu", "rope_scaling": LINEAR, "rope_theta": 90.0},
            "partial_rotary_factor": 0.4,
        },
    },
    "Glm4": {
        "plain": {**SMALL, "head_dim": 8, "rms_norm_eps": 1e-3},
        "no biases, tied": {**ODD, **TIED, "head_dim": 8, "attention_bias": False, "hidden_act": "relu"},
        "scaled rotation, whole heads": {
            **{**ODD, "head_dim": 10, "partial_rotary_factor": 1.0, "rope_scaling": YARN},
        },
    },
    "Olmo3": {
        "three of four": {**SMALL, "num_hidden_layers": 5, "sliding_window": 6, "attention_bias": True},
        "scaled where full": {
            **{**SMALL, **TIED, "sliding_window": 7, "layer_types": KINDS, "num_key_value_heads": 1},
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        },
        "no window, one key head": {**ODD, "layer_types": ["full_attention"] * 2, "rope_scaling": YARN},
    },
    "Olmoe": {
        "plain": {**MIXED, "intermediate_size": 12},
        "sum of one": {**MIXED, "norm_topk_prob": True, "attention_bias": True, "num_experts_per_tok": 4},
        "one of three, tied": {
            **{**EVEN, **TIED, "num_experts": 3, "num_experts_per_tok": 1, "hidden_act": "gelu"},
            "rope_scaling": LLAMA3,
        },
    },
    "GraniteMoe": {
        "factors": {
            **{**SMALL, "num_local_experts": 3, "embedding_multiplier": 6.0, "residual_multiplier": 0.3},
            **{"attention_multiplier": 0.2, "logits_scaling": 7.0, "attention_bias": True},
        },
        "all of three, tied": {
            **{**EVEN, **TIED, "num_local_experts": 3, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3},
            **{"attention_multiplier": 0.35, "logits_scaling": 0.3, "hidden_act": "gelu"},
        },
        "one of four, wide heads": {
            **{**EVEN, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 12},
            **{"rope_theta": 90.0, "num_key_value_heads": 5, "residual_multiplier": 1.7},
        },
    },
}


@pytest.mark.ledger("L1", "L9")
@pytest.mark.parametrize(("name", "label"), [(name, label) for name in CASES for label in CASES[name]])
def test_decoder(name, label, tmp_path):
    config = config_of(name, CASES[name][label])
    model = reference(f"{name}ForCausalLM", config, tmp_path / "reference")
    check_decoder(model, tmp_path / "reference", tmp_path, tokens=12)
    written = json.loads((tmp_path / "fresh" / "config.json").read_text())
    assert written["model_type"] in (config.model_type, "gpt2")  # an OPT may be a GPT-2 too


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("OPT", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine False"),
        ("OPT", {"word_embed_proj_dim": 9, "architectures": ["OPTModel"]}, "word_embed_proj_dim 9.*OPTModel"),
        ("GPTNeo", {"attention_layers": ["near"] * 3}, "attention of kind.*near"),
        ("Cohere", {"use_qk_norm": True}, "use_qk_norm True"),
        ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("Bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
        ("Qwen2Moe", {**WINDOW, "layer_types": None}, "state layer_types"),
    ],
)
def test_what_is_not_supported_is_named(name, changes, complaint, tmp_path):
    config = config_of(name, next(iter(CASES[name].values())))
    theirs = {**config.to_dict(), "architectures": [f"{name}ForCausalLM"], **changes}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(ch.CheckpointError, match=complaint):
        ch.load(tmp_path)
