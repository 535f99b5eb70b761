"""Encoders that people download most, beside BERT's first relatives: the same model here and there."""

from __future__ import annotations

import json

import pytest
import transformers

import clearhead as ch
from tests.parity.encoders import check_text_encoder
from tests.parity.test_encoders import HEADS, SMALL, make

ODD = {**SMALL, "hidden_size": 35, "num_attention_heads": 5, "intermediate_size": 51}
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
}
# Every head of every architecture, and every configuration of it once at least.
CASES = [
    (name, head, [*options][number % len(options)])
    for name, options in OPTIONS.items()
    for number, head in enumerate(HEADS)
]
# Saved without the config.json it came with, a model is the best known one that is exactly it.
FRESH = dict.fromkeys(("XLMRoberta", "Camembert"), "Roberta")


@pytest.mark.ledger("L1")
@pytest.mark.ledger("E1")
@pytest.mark.parametrize(("name", "head", "label"), CASES)
def test_text_encoder(name, head, label, tmp_path):
    model = make(name, head, OPTIONS[name][label], tmp_path / "reference")
    fresh = FRESH[name] + head if name in FRESH else ""
    check_text_encoder(model, tmp_path / "reference", tmp_path, fresh=fresh)


@pytest.mark.ledger("L1")
@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("XLMRoberta", {"is_decoder": True}, "is_decoder"),
        ("Camembert", {"architectures": ["CamembertForMultipleChoice"]}, "CamembertForMultipleChoice"),
    ],
)
def test_what_is_not_supported_is_named(name, changes, complaint, tmp_path):
    make(name, "ForMaskedLM", OPTIONS[name]["plain"], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ch.CheckpointError, match=complaint):
        ch.load(tmp_path)
