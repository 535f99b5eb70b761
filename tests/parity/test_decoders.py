"""Decoders, each against its reference in transformers: the same model here and there, odd ones included."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.errors import CheckpointError
from clearhead.hub.registry import ARCHITECTURES
from tests.parity.harness import LOGITS, batch, check_decoder, config_of, gap, reference

ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, **ENDS},
    **{"num_attention_heads": 4, "max_position_embeddings": 128},
}
GROUPED = dict(SMALL, num_key_value_heads=2)
NEOX_ODD = dict(SMALL, vocab_size=53, hidden_size=30, intermediate_size=37, num_attention_heads=5)
ODD = dict(NEOX_ODD, num_key_value_heads=1)
EVEN = dict(ODD, hidden_size=40, intermediate_size=36)  # experts of the reference want rows of 16 bytes
DEEP = dict(GROUPED, num_hidden_layers=7, head_dim=8)
TIGHT = dict(DEEP, query_pre_attn_scalar=1, attn_logit_softcapping=0.5)  # so that most scores feel the cap
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
HALF = {"partial_rotary_factor": 0.5}
FULL, DELTA = ["full_attention"], ["linear_attention"]
WINDOW = {"use_sliding_window": True, "sliding_window": 6}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": True}
YARN |= {"original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 2.0, 3.0, 5.0]}
MIXED = dict(GROUPED, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12)
OSS = dict(GROUPED, head_dim=8, num_local_experts=5, num_experts_per_tok=2, sliding_window=7)
NEXT = {
    **dict(MIXED, num_hidden_layers=2, layer_types=DELTA + FULL, head_dim=8),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6},
    **{"linear_value_head_dim": 5, "shared_expert_intermediate_size": 20},
}
SPARSE = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1}
LATENT = {
    **dict(SMALL | SPARSE, num_key_value_heads=4, kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=6),
    **dict(qk_rope_head_dim=4, v_head_dim=5),
}
LATENT_ODD = dict(LATENT, hidden_size=40, intermediate_size=36, num_attention_heads=5, num_key_value_heads=5)
GROUPS = {"n_group": 3, "topk_group": 2}
INDEX = {"index_topk": 5, "index_n_heads": 16, "index_head_dim": 10}
MSCALE = dict(YARN, mscale=1.3, mscale_all_dim=0.7)
FALCON = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
GPT = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 80, **ENDS}
J = dict(GPT, n_embd=32, rotary_dim=4)
TEXT = {"vocab_size": 61, "hidden_size": 24, **ENDS}
OPT = dict(TEXT, num_hidden_layers=3, num_attention_heads=4, ffn_dim=40, max_position_embeddings=80)
NEO = dict(TEXT, num_layers=3, num_heads=4, max_position_embeddings=80, window_size=7)
NEO |= {"attention_types": [[["global", "local"], 1], [["global"], 1]]}
BLOOM = dict(TEXT, n_layer=3, n_head=4)
MAMBA2 = dict(TEXT, num_hidden_layers=3, num_heads=4, head_dim=12, state_size=7, n_groups=2)
BAMBA = {
    **dict(GROUPED, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=7, attn_layer_indices=[1]),
    "rms_norm_eps": 1e-3,
}
NEMOTRON_H = {
    **{"mamba_num_heads": 6, "mamba_head_dim": 5, "ssm_state_size": 7, "n_groups": 3, "head_dim": 8},
    **{key: value for key, value in GROUPED.items() if key != "num_hidden_layers"},
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
}
MOE = {
    **dict(NEMOTRON_H, n_routed_experts=6, moe_intermediate_size=12, num_experts_per_tok=3),
    **{"moe_shared_expert_intermediate_size": 20, "routed_scaling_factor": 2.5},
    "layers_block_type": ["mlp", "moe", "linear_attention", "moe", "full_attention"],
}
FALCON_H1 = {
    **dict(GROUPED, mamba_n_heads=4, mamba_d_head=10, mamba_d_ssm=40, mamba_d_state=7, key_multiplier=0.7),
    **dict(mlp_multipliers=[1.4, 0.6], ssm_multipliers=[0.8, 1.3, 0.7, 1.2, 0.9], lm_head_multiplier=0.5),
    **dict(embedding_multiplier=2.5, attention_in_multiplier=1.2, attention_out_multiplier=0.8),
    **dict(ssm_in_multiplier=0.9, ssm_out_multiplier=1.1),
}
RECURRENT = ("Mamba2", "Bamba", "FalconH1", "NemotronH", "Lfm2")
LFM2 = dict(GROUPED, layer_types=["conv", "full_attention", "conv"], block_multiple_of=12)
PHI_FACTORS = {"by length": {}, "factor": {"factor": 6.0}, "attention factor": {"attention_factor": 1.2}}
CASES = {
    "GPT2": {
        "plain": GPT,
        "odd sizes, untied": dict(GPT | UNTIED, n_embd=30, n_head=5, n_inner=50, activation_function="gelu"),
        "one head": dict(GPT, n_head=1, n_layer=1, activation_function="relu", layer_norm_epsilon=1e-3),
    },
    "Llama": {
        "grouped": GROUPED,
        "multi-query, biases, tied": dict(
            SMALL | TIED, num_key_value_heads=1, attention_bias=True, mlp_bias=True
        ),
        "head_dim, base": dict(SMALL, head_dim=10, rope_theta=500.0, hidden_act="gelu"),
        "linear": dict(SMALL, rope_scaling=LINEAR),
        "dynamic": dict(
            SMALL, max_position_embeddings=32, rope_scaling={"rope_type": "dynamic", "factor": 2.0}
        ),
        "llama3": dict(SMALL, rope_scaling=LLAMA3),
        "yarn": dict(
            SMALL, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        ),
        "longrope": {
            **SMALL,
            "rope_scaling": {
                "rope_type": "longrope",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                **LONG,
            },
        },
    },
    "GPTNeoX": {
        "plain": SMALL,
        "sequential tied": dict(
            SMALL | TIED, use_parallel_residual=False, rotary_pct=0.5, hidden_act="gelu_new"
        ),
        "odd no bias": dict(NEOX_ODD, attention_bias=False, rotary_pct=0.7, rotary_emb_base=700.0),
        "scaled": dict(SMALL, rotary_pct=1.0, rope_scaling=LINEAR),
    },
    "Mistral": {
        "window": dict(GROUPED, sliding_window=7),
        "odd tied": dict(ODD | TIED, sliding_window=11, head_dim=8),
        "scaled": dict(GROUPED, sliding_window=9, rope_theta=500.0, rope_scaling=LLAMA3, hidden_act="gelu"),
        "no window": dict(GROUPED, sliding_window=None),
    },
    "Qwen2": {
        "plain": GROUPED,
        "odd tied late windows": dict(ODD | TIED | WINDOW, max_window_layers=1),
        "all windows": dict(GROUPED | WINDOW, max_window_layers=0, rope_theta=1000000.0),
        "layer types": dict(GROUPED | WINDOW, layer_types=KINDS),
    },
    "Qwen3": {
        "plain": dict(GROUPED, head_dim=8),
        "odd tied biases": dict(ODD | TIED, head_dim=10, attention_bias=True),
        "windows": dict(DEEP | WINDOW, max_window_layers=3),
    },
    "Gemma": {
        "plain": dict(GROUPED, head_dim=10),
        "odd untied biases": dict(ODD | UNTIED, head_dim=6, attention_bias=True),
        "said gelu": dict(GROUPED, head_dim=10, hidden_act="gelu", rope_theta=500.0, rope_scaling=LINEAR),
    },
    "Gemma2": {
        "plain": dict(GROUPED, head_dim=10, sliding_window=8, query_pre_attn_scalar=17),
        "odd untied no cap": dict(
            ODD | UNTIED, head_dim=8, sliding_window=5, attn_logit_softcapping=None, query_pre_attn_scalar=8
        ),
        "tight cap": dict(TIGHT, sliding_window=6, final_logit_softcapping=None, attention_bias=True),
        "no window": dict(GROUPED, head_dim=10, layer_types=["full_attention"] * 3),
    },
    "Gemma3": {
        "five of six": dict(DEEP, sliding_window=8, query_pre_attn_scalar=9),
        "scaled old keys": dict(
            DEEP, sliding_window=6, rope_scaling=LINEAR, rope_theta=500000.0, rope_local_base_freq=90.0
        ),
        "odd untied no window": dict(
            ODD | UNTIED, head_dim=8, layer_types=["full_attention"] * 3, final_logit_softcapping=4.0
        ),
        "one base": {
            **DEEP,
            "sliding_window": 6,
            "layer_types": [*KINDS, *KINDS, KINDS[0]],
            "rope_theta": 300.0,
            "rope_local_base_freq": 300.0,
        },
    },
    "Mixtral": {
        "two of five": dict(GROUPED, num_local_experts=5, num_experts_per_tok=2),
        "tied all of three": dict(EVEN | TIED, num_local_experts=3, num_experts_per_tok=3, sliding_window=8),
        "one of four": dict(
            GROUPED, num_local_experts=4, num_experts_per_tok=1, head_dim=10, rope_theta=500.0
        ),
    },
    "GptOss": {
        "two of five": OSS,
        "no attention bias tied": dict(OSS | TIED, attention_bias=False, num_experts_per_tok=5),
        "scaled": dict(OSS, rope_theta=500.0, rope_scaling=YARN, num_experts_per_tok=1),
        "full narrow limit": {
            **OSS,
            "layer_types": ["full_attention"] * 3,
            "swiglu_limit": 0.02,
            "swiglu_alpha": 1.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        },
    },
    "Qwen3Next": {
        "two of five": NEXT,
        "tied every other": {
            **dict(NEXT | TIED | HALF, num_hidden_layers=3, layer_types=FULL + DELTA * 2),
            **{
                "decoder_sparse_step": 2,
                "num_experts_per_tok": 5,
                "norm_topk_prob": False,
                "attention_bias": True,
                "rope_theta": 500.0,
            },
            **{"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2},
        },
        "dense": dict(NEXT, layer_types=FULL + DELTA, num_experts=0),
    },
    "DeepseekV2": {
        "groups": dict(LATENT | GROUPS, topk_method="group_limited_greedy", first_k_dense_replace=1),
        "no latent of queries, tied, biases, yarn": {
            **dict(LATENT_ODD | TIED, q_lora_rank=None, attention_bias=True, n_shared_experts=2),
            **{"rope_scaling": dict(MSCALE, rope_theta=500.0), "routed_scaling_factor": 3.0, "v_head_dim": 9},
        },
        "dense": dict(LATENT, first_k_dense_replace=3, qk_rope_head_dim=6, qk_nope_head_dim=2, v_head_dim=16),
    },
    "DeepseekV3": {
        "groups": dict(LATENT | GROUPS, first_k_dense_replace=1),
        "halves, tied, biases, yarn": {
            **dict(LATENT_ODD | TIED, rope_interleave=False, attention_bias=True, norm_topk_prob=False),
            **dict(q_lora_rank=None, rope_scaling=dict(MSCALE, rope_theta=500.0), n_group=1, topk_group=1),
            **{"first_k_dense_replace": 0, "n_shared_experts": 2},
        },
        "four of eight groups of two": {
            **dict(LATENT, n_routed_experts=16, n_group=8, topk_group=4, num_experts_per_tok=7),
            **{"first_k_dense_replace": 2, "rms_norm_eps": 1e-3, "rope_scaling": dict(YARN, mscale=0.5)},
        },
    },
    "DeepseekV32": {  # with few heads of the indexer, many scores are 0 at once: ties
        "groups": dict(LATENT | GROUPS | INDEX, first_k_dense_replace=1),
        "every other, biases, yarn": {
            **dict(LATENT | INDEX, attention_bias=True, rope_scaling=MSCALE, n_group=1, topk_group=1),
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        "all keys": dict(LATENT | GROUPS | INDEX, index_topk=99),
    },
    "Glm4MoeLite": {
        "first dense": dict(LATENT, rms_norm_eps=1e-3),
        "every other, tied, groups": {
            **dict(LATENT_ODD | TIED | GROUPS, mlp_layer_types=["sparse", "dense", "sparse"]),
            **dict(rope_interleave=False, q_lora_rank=None, routed_scaling_factor=0.7),
        },
        "biases, yarn": dict(LATENT, attention_bias=True, norm_topk_prob=False, rope_scaling=MSCALE),
    },
    "Glm4Moe": {
        "first dense": dict(GROUPED | SPARSE, head_dim=8, norm_topk_prob=False),
        "norms, biases, tied, groups": {
            **dict(GROUPED | SPARSE | TIED | GROUPS, use_qk_norm=True, attention_bias=True, head_dim=10),
            **dict(partial_rotary_factor=0.4, first_k_dense_replace=0, routed_scaling_factor=2.5),
        },
    },
    "Phi": {
        "plain": SMALL,
        "query norm tied": dict(GROUPED | TIED, hidden_size=40, partial_rotary_factor=0.4, qk_layernorm=True),
        "odd": dict(ODD, hidden_act="relu", partial_rotary_factor=1.0, rope_theta=900.0),
    },
    "Phi3": {
        "plain": GROUPED,
        "odd, tied, window": dict(ODD | TIED, sliding_window=7),
        "partial rotation": {**GROUPED, **HALF},
        **{
            f"beyond its trained length, {name}": {
                **dict(GROUPED, original_max_position_embeddings=32),
                "rope_scaling": {"type": "longrope", **LONG, **factor},
            }
            for name, factor in PHI_FACTORS.items()
        },
    },
    "Olmo2": {
        "grouped": GROUPED,
        "odd tied biases": dict(ODD | TIED, attention_bias=True),
        "scaled": dict(SMALL, rope_theta=500.0, rope_scaling=LINEAR, rms_norm_eps=0.001),
    },
    "StableLm": {
        "grouped": {**GROUPED, **HALF},
        "parallel multi query": dict(GROUPED | TIED, num_key_value_heads=1, use_parallel_residual=True),
        "odd biases": dict(ODD, partial_rotary_factor=1.0, use_qkv_bias=True, layer_norm_eps=0.001),
    },
    "Granite": {
        "factors": {
            **GROUPED,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 7.0,
        },
        "odd tied biases": dict(ODD | TIED, attention_bias=True, mlp_bias=True, attention_multiplier=0.1),
        "divided": dict(GROUPED, logits_scaling=3.0, rope_theta=500.0),
    },
    "SmolLM3": {
        "every fourth": dict(GROUPED, num_hidden_layers=5),
        "odd untied biases": dict(ODD | UNTIED, no_rope_layers=[0, 1, 0], attention_bias=True, mlp_bias=True),
        "windows": dict(GROUPED | WINDOW, no_rope_layer_interval=2, rope_theta=500.0),
    },
    "Falcon": {
        "multi-query": FALCON,
        "new": dict(FALCON | NEW | UNTIED, bias=True),
        "new, one norm": dict(FALCON | NEW, num_ln_in_parallel_attn=1, ffn_hidden_size=37),
        "all heads": dict(FALCON, multi_query=False),
        "sequential, multi-query": dict(FALCON, parallel_attn=False, activation="relu", rope_theta=500.0),
        "sequential, all heads": dict(FALCON, multi_query=False, parallel_attn=False, bias=True),
    },
    "OPT": {
        "no biases, untied": dict(OPT | UNTIED, enable_bias=False),
        "narrow table, norms after (350m)": dict(OPT, word_embed_proj_dim=10, do_layer_norm_before=False),
        "narrow table, no last norm, untied": {
            **dict(OPT | UNTIED, hidden_size=35, num_attention_heads=5, activation_function="gelu"),
            **{"word_embed_proj_dim": 11, "_remove_final_layer_norm": True},
        },
    },
    "GPTNeo": {
        "alternating windows": NEO,
        "all local": dict(NEO, attention_types=[[["local"], 3]], intermediate_size=37),
        "one head": dict(NEO, num_heads=1, activation_function="relu", layer_norm_epsilon=1e-3),
    },
    "GPTJ": {
        "odd share of a head": {**J, "n_embd": 98, "n_head": 2, "rotary_dim": 6, **TIED},
        "whole heads": dict(J, rotary_dim=8, n_inner=37, activation_function="relu"),
        "one head": dict(J, n_head=1, rotary_dim=12, layer_norm_epsilon=1e-3),
    },
    "Bloom": {
        "plain": BLOOM,
        "odd heads": dict(BLOOM, hidden_size=35, n_head=5, layer_norm_epsilon=1e-3),
        "one head, untied": dict(BLOOM | UNTIED, n_head=1),
    },
    "Qwen2Moe": {
        "shared expert": dict(MIXED, shared_expert_intermediate_size=20),
        "every other layer, no biases, windows": {
            **dict(MIXED | TIED | WINDOW, layer_types=KINDS, decoder_sparse_step=2, qkv_bias=False),
            **{"norm_topk_prob": True, "shared_expert_intermediate_size": 8},
        },
        "first layer dense": {
            **dict(MIXED, mlp_only_layers=[0], num_experts_per_tok=5, rope_theta=500.0),
            "shared_expert_intermediate_size": 12,
        },
    },
    "Qwen3Moe": {
        "sum of one": dict(MIXED, norm_topk_prob=True, head_dim=8),
        "every other layer, biases, window": {
            **dict(MIXED | TIED | WINDOW, decoder_sparse_step=2, attention_bias=True, head_dim=6),
            "num_experts_per_tok": 1,
        },
        "one layer dense": dict(MIXED, mlp_only_layers=[1], num_key_value_heads=1, rms_norm_eps=1e-3),
    },
    "GPTBigCode": {
        "one key head": dict(GPT, activation_function="relu"),
        "all key heads, untied": dict(GPT | UNTIED, multi_query=False, n_inner=37),
        "one key head of five": dict(GPT, n_embd=35, n_head=5, layer_norm_epsilon=1e-3),
    },
    "Cohere": {
        "untied, biases": dict(GROUPED | UNTIED, attention_bias=True, logit_scale=0.3),
        "one key head, scaled rotation": dict(ODD, rope_scaling=LINEAR, layer_norm_eps=1e-3),
        "every key head": dict(ODD, num_key_value_heads=None, hidden_act="relu", rope_theta=90.0),
    },
    "Cohere2": {
        "every other layer": dict(GROUPED, sliding_window=7, layer_types=KINDS),
        "three of four": dict(GROUPED, num_hidden_layers=5, sliding_window=6, num_key_value_heads=1),
        "no layer rotates, biases, untied": dict(
            ODD | UNTIED, layer_types=FULL * 3, attention_bias=True, logit_scale=2.0
        ),
    },
    "Starcoder2": {
        "window": dict(GROUPED, sliding_window=7),
        "no biases, untied": dict(GROUPED | UNTIED, use_bias=False, hidden_act="relu", head_dim=6),
        "one key head, scaled rotation": dict(
            ODD, rope_scaling=LLAMA3, hidden_act="gelu", sliding_window=9, norm_epsilon=1e-3
        ),
    },
    "Nemotron": {
        "plain": dict(GROUPED, head_dim=8),
        "whole heads, biases": {
            **dict(GROUPED | TIED, partial_rotary_factor=1.0, attention_bias=True, mlp_bias=True),
            **{"head_dim": 6, "norm_eps": 1e-3},
        },
        "one key head, part of six rotates": dict(ODD, partial_rotary_factor=0.34, hidden_act="gelu"),
    },
    "Glm": {
        "plain": dict(GROUPED, head_dim=8),
        "no biases": dict(GROUPED | TIED, head_dim=12, attention_bias=False, partial_rotary_factor=1.0),
        "one key head, scaled rotation": {
            **dict(ODD, head_dim=10, hidden_act="gelu", rope_scaling=LINEAR, rope_theta=90.0),
            "partial_rotary_factor": 0.4,
        },
    },
    "Glm4": {
        "plain": dict(GROUPED, head_dim=8, rms_norm_eps=1e-3),
        "no biases, tied": dict(ODD | TIED, head_dim=8, attention_bias=False, hidden_act="relu"),
        "scaled rotation, whole heads": dict(
            ODD, head_dim=10, partial_rotary_factor=1.0, rope_scaling=dict(YARN, rope_theta=500.0)
        ),
    },
    "Olmo3": {
        "three of four": dict(GROUPED, num_hidden_layers=5, sliding_window=6, attention_bias=True),
        "scaled where full": {
            **dict(GROUPED | TIED, sliding_window=7, layer_types=KINDS, num_key_value_heads=1),
            "rope_scaling": LINEAR,
        },
        "no window, one key head": dict(ODD, layer_types=FULL * 3, rope_scaling=dict(YARN, rope_theta=500.0)),
    },
    "Olmoe": {
        "plain": dict(MIXED, intermediate_size=12),
        "sum of one": dict(MIXED, norm_topk_prob=True, attention_bias=True, num_experts_per_tok=4),
        "one of three, tied": dict(
            EVEN | TIED, num_experts=3, num_experts_per_tok=1, hidden_act="gelu", rope_scaling=LLAMA3
        ),
    },
    "GraniteMoe": {
        "factors": {
            **dict(GROUPED, num_local_experts=3, embedding_multiplier=6.0, residual_multiplier=0.3),
            **{"attention_multiplier": 0.2, "logits_scaling": 7.0, "attention_bias": True},
        },
        "all of three, tied": {
            **dict(EVEN | TIED, num_local_experts=3, num_experts_per_tok=3, rms_norm_eps=1e-3),
            **{"attention_multiplier": 0.35, "logits_scaling": 0.3, "hidden_act": "gelu"},
        },
        "one of four, wide heads": {
            **dict(EVEN, num_local_experts=4, num_experts_per_tok=1, head_dim=12),
            **{"rope_theta": 90.0, "num_key_value_heads": 5, "residual_multiplier": 1.7},
        },
    },
    "Mamba2": {
        "groups": MAMBA2,
        "one group, biases, tied, steps within bounds": {
            **dict(MAMBA2 | TIED, n_groups=1, use_bias=True, time_step_limit=(0.02, 0.9), conv_kernel=3),
            **{"expand": 3, "num_heads": 3, "head_dim": 24, "layer_norm_epsilon": 1e-3},
        },
        "no bias of the convolution": dict(MAMBA2, use_conv_bias=False, state_size=16, num_hidden_layers=1),
    },
    "Bamba": {
        "attention in the middle": BAMBA,
        "odd, tied, biases": {
            **dict(ODD | TIED, mamba_n_heads=6, mamba_d_head="auto", mamba_d_state=5, mamba_n_groups=3),
            **dict(attention_bias=True, mlp_bias=True, mamba_proj_bias=True, attn_layer_indices=[0, 2]),
            **{"mamba_d_conv": 2, "time_step_limit": (0.1, 0.8), "hidden_size": 40, "mamba_expand": 3},
        },
        "attention first": dict(BAMBA, attn_layer_indices=[0], mamba_conv_bias=False, rope_theta=500.0),
    },
    "FalconH1": {
        "factors": FALCON_H1,
        "norm before the gate, groups, tied, biases": {
            **dict(ODD | TIED, mamba_n_heads=6, mamba_d_head="auto", mamba_d_ssm=None, mamba_expand=3),
            **dict(hidden_size=40, mamba_n_groups=3, mamba_d_state=5, mamba_d_conv=2, attention_bias=True),
            **dict(mlp_bias=True, mamba_proj_bias=True, projectors_bias=True, mamba_rms_norm=True),
            **dict(ssm_multipliers=[0.8, 1.3, 0.7, 1.2, 0.9], mlp_multipliers=[0.7, 1.0]),
        },
        "norm after the gate, one group, steps within bounds": {
            **dict(FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_conv_bias=False),
            **dict(num_key_value_heads=1, rope_theta=500.0, time_step_limit=(0.1, 0.8)),
        },
    },
    "NemotronH": {
        "one sublayer a block": NEMOTRON_H,
        "experts in groups": dict(MOE, n_group=3, topk_group=2),
        "biases, odd": {
            **dict(NEMOTRON_H, use_bias=True, mlp_bias=True, mlp_hidden_act="gelu", time_step_min=0.3),
            **dict(conv_kernel=3, n_groups=1, num_key_value_heads=1, use_conv_bias=False),
            "layers_block_type": ["full_attention", "linear_attention", "linear_attention", "mlp", "mlp"],
        },
    },
    "Lfm2": {
        "convolutions": LFM2,
        "untied, biases, wide kernel": {
            **dict(LFM2 | UNTIED, conv_bias=True, conv_L_cache=5, block_auto_adjust_ff_dim=False),
            **{"rope_theta": 500.0, "norm_eps": 1e-3},
        },
        "attention by index": {
            **dict(GROUPED, full_attn_idxs=[0, 2], block_multiple_of=7, block_ffn_dim_multiplier=1.3),
            "num_key_value_heads": 1,
        },
    },
}
# The architecture that the config alone leads to, where it is another that says the same.
FRESH = {
    ("Mistral", "no window"): "llama",
    ("Phi3", "plain"): "llama",
    ("Phi3", "odd, tied, window"): "mistral",
    **{("Phi3", f"beyond its trained length, {name}"): "llama" for name in PHI_FACTORS},
    ("Falcon", "sequential, all heads"): "gpt_neox",
    ("Glm4MoeLite", "first dense"): "deepseek_v3",
    ("Glm4MoeLite", "biases, yarn"): "deepseek_v3",
}


@pytest.mark.ledger("L1", "L2", "L3", "L6", "L9", "D5", "J2")
@pytest.mark.parametrize(("name", "label"), [(name, label) for name in CASES for label in CASES[name]])
def test_decoder(name, label, tmp_path):
    config = config_of(name, CASES[name][label])
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = reference(kind, config, tmp_path / "reference")
    # Llama's cached keys keep the angles of a shorter length; Phi-3, which has longrope, reads all anew.
    # With a cache, Mamba-2 takes steps without bounds.
    anew = (name, label) == ("Llama", "longrope") or "bounds" in label
    more: dict[str, Any] = {"use_cache": False} if anew else {}
    if "biases" in label and name in RECURRENT:
        more["sides"] = ("right",)  # the reference lets a bias of padding on the left into the convolution
    grows = label in ("dynamic", "longrope") or "beyond" in label  # with tokens that cross the trained length
    check_decoder(model, tmp_path / "reference", tmp_path, tokens=30 if grows else 12, **more)
    written = json.loads((tmp_path / "fresh" / "config.json").read_text())["model_type"]
    wanted = FRESH.get((name, label), config.model_type)
    assert written == wanted or (name in ("OPT", "GPTBigCode") and written == "gpt2")  # which may be both


NEOX_KEYS = {"rotary_pct": 0.5, "rotary_emb_base": 700.0}
QWEN_KEYS = dict(WINDOW, max_window_layers=2, rope_theta=5e5)
GEMMA3_KEYS = {
    **{"rope_theta": 5e5, "rope_local_base_freq": 90.0, "rope_scaling": LINEAR, "sliding_window": 8},
    "sliding_window_pattern": 3,
}


@pytest.mark.ledger("L2", "L3")
@pytest.mark.parametrize(
    ("kind", "options", "keys", "expected"),
    [
        ("GPTNeoX", SMALL, NEOX_KEYS, {"rope_fraction": 0.5, "rope_base": 700.0}),
        ("Qwen2", GROUPED, QWEN_KEYS, {"window": (None, None, 6), "rope_base": 5e5}),
        (
            "Gemma2",
            dict(GROUPED, head_dim=10),
            {"sliding_window": 8},
            {"window": (8, None, 8), "logit_softcap": 30.0},
        ),
        (
            "Gemma3",
            {**DEEP},
            GEMMA3_KEYS,
            {"window": (8, 8, None, 8, 8, None, 8), "rope_base": 5e5, "rope_local_base": 90.0},
        ),
        (
            "GptOss",
            OSS,
            {"rope_theta": 500.0, "rope_scaling": YARN},
            {"window": (7, None, 7), "rope_base": 500.0, "gated_clamp": 7.0},
        ),
        (
            "Qwen3Next",
            dict(SMALL, num_hidden_layers=6, mlp_only_layers=[0]),
            {"partial_rotary_factor": 0.5, "full_attention_interval": 3, "decoder_sparse_step": 2},
            {
                "attention": (
                    *(["gated-delta(key_heads=16, value_heads=32, d_key=128, d_value=128)"] * 2),
                    "full",
                )
                * 2,
                "rope_fraction": 0.5,
                "dense_layers": (0, 2, 4),
            },
        ),
    ],
    ids=["GPT-NeoX", "Qwen 2", "Gemma 2", "Gemma 3", "gpt-oss", "Qwen3-Next"],
)
def test_keys_of_older_files(kind, options, keys, expected):
    config = config_of(kind, {**options, **keys})
    architecture = ARCHITECTURES[config.model_type]
    theirs = json.loads(config.to_json_string())
    new = architecture.read(theirs)
    old = architecture.read(
        {
            **{key: value for key, value in theirs.items() if key not in ("rope_parameters", "layer_types")},
            **keys,
        }
    )
    assert old == new
    assert {name: getattr(new, name) for name in expected} == expected


@pytest.mark.ledger("L3")
@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("Llama", {"partial_rotary_factor": 0.5, "rope_parameters": None}, "partial_rotary_factor 0.5"),
        ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("StableLm", {"qk_layernorm": True}, "qk_layernorm True"),
        ("Falcon", {"alibi": True}, "alibi True"),
        ("Falcon", dict(NEW, parallel_attn=False), "not supported together"),
        ("Mixtral", {"num_local_experts": 0}, "num_local_experts 0"),
        ("GptOss", {"swiglu_alpha": 1.5}, "swiglu_alpha 1.5: supported are 1.702, 1.0"),
        ("GptOss", {"swiglu_limit": 0.0}, "gated_clamp 0.0 must be above 0"),
        ("Qwen3Next", {"hidden_act": "gelu"}, "hidden_act 'gelu': supported are silu"),
        ("Qwen3Next", {"layer_types": ["sliding_attention"] * 2}, r"layer_types \['sliding_attention'\]"),
        ("Qwen3Next", {"layer_types": FULL}, "1 layer_types for 2 layers"),
        ("Qwen3Next", {"linear_num_key_heads": 3}, "value heads that are no multiple"),
        ("Qwen3Next", {"linear_conv_kernel_dim": 1}, "kernel 1: it must be a whole number, 2 or more"),
        ("Qwen3Next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0"),
        ("OPT", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine False"),
        ("OPT", {"word_embed_proj_dim": 9, "architectures": ["OPTModel"]}, "word_embed_proj_dim 9.*OPTModel"),
        ("GPTNeo", {"attention_layers": ["near"] * 3}, "attention of kind.*near"),
        ("Cohere", {"use_qk_norm": True}, "use_qk_norm True"),
        ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("Bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
        ("Qwen2Moe", dict(WINDOW, layer_types=None), "state layer_types"),
    ],
)
def test_what_is_not_supported_is_named(kind, changes, said):
    config = config_of(kind, next(iter(CASES[kind].values())))
    theirs = {**config.to_dict(), "architectures": [f"{kind}ForCausalLM"], **changes}
    with pytest.raises(CheckpointError, match=said):
        ARCHITECTURES[theirs["model_type"]].read(theirs)


def options(**cases):
    return pytest.mark.parametrize("options", cases.values(), ids=cases.keys())


@options(
    no_betas={"beta_fast": 0.0, "beta_slow": 0},
    null_truncate={"truncate": None},
    ends_crossed={"original_max_position_embeddings": 1},
)
def test_yarn_at_its_edges(options, tmp_path):
    """0 stands for the usual beta, null for no rounding; with ends that cross, nothing is interpolated."""
    config = config_of("Llama", dict(GROUPED, rope_parameters={**YARN, "truncate": False, **options}))
    model = reference("LlamaForCausalLM", config, tmp_path)
    ids, _ = batch(config)
    with torch.no_grad():
        assert gap(ch.load(tmp_path).model(ids).logits, model(ids).logits) <= LOGITS


def test_a_scaling_without_its_factor_is_refused():
    theirs = config_of("Llama", dict(GROUPED, rope_parameters=YARN)).to_dict()
    theirs["rope_parameters"]["factor"] = None
    with pytest.raises(CheckpointError, match="rope_type yarn and no factor"):
        ARCHITECTURES["llama"].read(theirs)


@pytest.mark.ledger("L6", "J2", "M1")
def test_qwen3_next_continues_unequal_rows_as_the_reference_does(tmp_path):
    """Prompts of other lengths in one batch, which the reference pads on the left."""
    torch.manual_seed(0)
    theirs = transformers.Qwen3NextForCausalLM(config_of("Qwen3Next", NEXT)).eval()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    theirs.save_pretrained(tmp_path)
    m, prompts, new = ch.load(tmp_path), [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9]], 12
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    said = theirs.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    ours = m.generate(prompts, new, min_new_tokens=new)
    assert [row.ids for row in ours] == said[:, longest:].tolist()


def test_qwen3_next_has_its_published_size():
    """80 billion parameters, of which a token meets 3 billion, without the token table and the output."""
    config = config_of("Qwen3Next", {})
    with torch.device("meta"):
        model = transformers.Qwen3NextForCausalLM(config)
    counts = ch.cost(ARCHITECTURES["qwen3_next"].read(config.to_dict()), 64).parameters
    assert counts.total == sum(p.numel() for p in model.parameters())
    assert counts.total == pytest.approx(80e9, rel=0.01)
    assert counts.active - counts.embedding - counts.head == pytest.approx(3e9, rel=0.15)


@pytest.mark.ledger("I1")
@pytest.mark.parametrize(
    ("layers", "experts", "total", "active"),
    [(24, 32, 20_914_757_184, 3.61e9), (36, 128, 116_829_156_672, 5.13e9)],
    ids=["20b", "120b"],
)
def test_gpt_oss_has_its_published_size(layers, experts, total, active):
    """Active parameters are published without the token table."""
    config = config_of("GptOss", {"num_hidden_layers": layers, "num_local_experts": experts})
    counts = ch.cost(ARCHITECTURES["gpt_oss"].read(config.to_dict())).parameters
    assert counts.total == total
    assert counts.active - counts.embedding == pytest.approx(active, rel=1e-3)


def test_layers_that_skip_the_rotation_must_exist():
    with pytest.raises(ch.ConfigError, match="rope_skips names layer 3, and there are layers 0 to 2"):
        ch.ModelConfig(vocab_size=7, n_layers=3, positions="rope", rope_skips=(0, 3))
