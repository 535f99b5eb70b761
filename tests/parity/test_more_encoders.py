"""Encoders that people download most, beside BERT's first relatives: the same model here and there."""

from __future__ import annotations

import json

import pytest

import clearhead as ch
from tests.parity.encoders import check_text_encoder
from tests.parity.test_encoders import HEADS, SMALL, make

ODD = {**SMALL, "hidden_size": 35, "num_attention_heads": 5, "intermediate_size": 51}
MODERN = {
    **SMALL,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
FAR = {
    **{**SMALL, "relative_attention": True, "position_biased_input": False, "share_att_key": True},
    "pos_att_type": "p2c|c2p",
}
OPTIONS = {
    "XLMRoberta": {
        "plain": SMALL,
        "odd sizes, untied": {**ODD, "tie_word_embeddings": False, "type_vocab_size": 1},
        "other padding id and activation": {
            **SMALL,
            **{"pad_token_id": 2, "hidden_act": "silu", "layer_norm_eps": 1e-5, "num_hidden_layers": 1},
        },
    },
    "Camembert": {
        "plain": {**SMALL, "num_attention_heads": 1},
        "odd sizes": {**ODD, "pad_token_id": 0, "hidden_act": "relu"},
        "untied": {**SMALL, "tie_word_embeddings": False, "type_vocab_size": 3, "layer_norm_eps": 1e-3},
    },
    "MPNet": {
        "plain": SMALL,
        "odd sizes, untied": {**ODD, "tie_word_embeddings": False, "max_position_embeddings": 57},
        "one head": {**SMALL, "num_attention_heads": 1, "hidden_act": "relu", "layer_norm_eps": 1e-3},
    },
    "Electra": {
        "plain": {**SMALL, "embedding_size": 10},
        "as wide a table, untied": {**ODD, "embedding_size": 35, "tie_word_embeddings": False},
        "one type, one head": {
            **{**SMALL, "embedding_size": 13, "num_attention_heads": 1, "type_vocab_size": 1},
            **{"hidden_act": "relu", "layer_norm_eps": 1e-3},
        },
    },
    "ModernBert": {
        "plain": {**MODERN, "local_attention": 12},
        "biases, mean, scaled": {
            **{**MODERN, "hidden_size": 40, "num_attention_heads": 5, "local_attention": 7},
            **{"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True},
            **{"decoder_bias": False, "classifier_pooling": "mean", "classifier_activation": "silu"},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
        },
        "old keys": {
            **{
                **MODERN,
                "local_attention": 128,
                "global_attn_every_n_layers": 2,
                "hidden_activation": "relu",
            },
            **{"global_rope_theta": 333.0, "local_rope_theta": 77.0, "norm_eps": 1e-3},
        },
    },
    "DebertaV2": {
        "as v3": {**FAR, "position_buckets": 6, "norm_rel_ebd": "layer_norm"},
        "odd sizes, no buckets": {
            **{**FAR, "hidden_size": 35, "num_attention_heads": 5, "max_relative_positions": 11},
            **{"pos_att_type": "c2p", "type_vocab_size": 2, "pooler_hidden_act": "tanh"},
            "tie_word_embeddings": False,
        },
        "p2c alone": {
            **{**FAR, "position_buckets": 15, "max_relative_positions": 29, "pos_att_type": ["p2c"]},
            **{"num_attention_heads": 1, "hidden_act": "relu", "layer_norm_eps": 1e-3},
        },
    },
}
MORE = {"Electra": ("ForPreTraining", "ForPreTraining", "ForPreTraining")}  # heads that the others lack
# Every head of every architecture, and every configuration of it once at least.
CASES = [
    (name, head, [*options][number % len(options)])
    for name, options in OPTIONS.items()
    for number, head in enumerate((*HEADS, *MORE.get(name, ())))
]
# Saved without the config.json it came with, a model is the best known one that is exactly it.
ALIKE = ("XLMRoberta", "Camembert", "Electra")


@pytest.mark.ledger("L1")
@pytest.mark.ledger("E1")
@pytest.mark.parametrize(("name", "head", "label"), CASES)
@pytest.mark.slow
def test_text_encoder(name, head, label, tmp_path):
    model = make(name, head, OPTIONS[name][label], tmp_path / "reference")
    check_text_encoder(model, tmp_path / "reference", tmp_path, alike=name in ALIKE)


@pytest.mark.ledger("L1")
@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("XLMRoberta", {"is_decoder": True}, "is_decoder"),
        (
            "ModernBert",
            {"layer_types": ["chunked_attention"] * 3},
            "only sliding_attention and full_attention",
        ),
        ("DebertaV2", {"conv_kernel_size": 3}, "a convolution beside the first layer is not supported"),
        ("DebertaV2", {"share_att_key": False}, "share_att_key False: projections of positions apart"),
        ("DebertaV2", {"position_biased_input": True}, "a table of positions beside disentangled"),
        ("Camembert", {"architectures": ["CamembertForMultipleChoice"]}, "CamembertForMultipleChoice"),
    ],
)
def test_what_is_not_supported_is_named(name, changes, complaint, tmp_path):
    make(name, "ForMaskedLM", next(iter(OPTIONS[name].values())), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ch.CheckpointError, match=complaint):
        ch.load(tmp_path)
