"""A sample of `mutations`: a changed config.json is read as transformers reads it, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.mutations import run
from tests.parity.settings_mutations import run as run_settings

# Fields that once made other numbers in silence.
FIELDS = {
    "GPT-2": ("num_attention_heads", "is_causal"),
    "GPT-NeoX": ("head_dim", "rotary_emb_base"),
    "Llama scaled": ("rope_scaling", "rope_theta"),
    "Mistral": ("layer_types", "per_layer_config"),
    "gpt-oss": ("swiglu_limit", "swiglu_alpha", "layer_types"),
    "Qwen3-Next": ("mlp_only_layers", "norm_topk_prob", "rms_norm_eps"),
    "DeepSeek-V2": ("topk_method", "norm_topk_prob"),
    "DeepSeek-V3": ("scoring_func", "num_key_value_heads"),
    "GLM-4-MoE-Lite": ("first_k_dense_replace", "mlp_layer_types"),
    "Gemma3": ("attn_logit_softcapping", "rope_local_base_freq"),
    "GPT-Neo": ("attention_layers", "attention_types"),
    "OLMo3": ("rope_local_base_freq", "rope_theta"),
    "Phi3 longrope": ("original_max_position_embeddings",),
    "SmolLM3 windows": ("layer_types", "use_sliding_window", "sliding_window"),
    "DistilBERT": ("num_hidden_layers",),
    "BigBird": ("attention_type", "block_size", "num_random_blocks", "use_bias"),
    "Longformer": ("attention_window", "attention_dilation"),
    "T5": ("dense_act_fn", "is_gated_act", "is_encoder_decoder"),
    "BART": ("num_attention_heads", "scale_embedding"),
    "LLaVA": (
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "image_token_id",
        "tie_word_embeddings",
    ),
    "Idefics3": ("scale_factor", "image_token_id", "tie_word_embeddings"),
    "Qwen2.5-VL": ("image_token_id", "tie_word_embeddings", "video_token_id"),
    "Whisper": ("num_key_value_heads", "scale_embedding", "max_source_positions"),
}
SECTION = {"Llama": ("rope_theta", "rope_parameters", "hidden_act"), "BERT": ("hidden_act", "layer_norm_eps")}


def wrong(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mutations that made other numbers, or an error that is not ours."""
    assert "equal" in {row["verdict"] for row in rows}
    return [row for row in rows if row["verdict"] in ("silent", "raw")]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.slow
def test_a_changed_config_is_read_as_the_reference_reads_it(name: str, tmp_path: Path) -> None:
    assert wrong(list(run(name, tmp_path, share=0.0, fields=FIELDS[name], pairs=1))) == []


@pytest.mark.parametrize("name", SECTION)
def test_our_section_yields_to_later_edits(name: str, tmp_path: Path) -> None:
    """Other tools keep our section and change their own fields: what they say counts."""
    assert wrong(list(run(name, tmp_path, share=0.01, fields=SECTION[name], pairs=1, section=True))) == []


# A sample of `settings_mutations` ------------------------------------------------------------------------


# Fields that once made other ids or vectors in silence.
TOKENS = ("pad_token", "bos_token", "unk_token", "cls_token", "truncation_side")
SETTINGS = {
    ("generation", "llama"): ("eos_token_id",),
    ("generation", "t5"): ("decoder_start_token_id", "eos_token_id"),
    ("tokenizer", "GPT-2"): TOKENS,
    ("tokenizer", "Qwen2"): (*TOKENS, "tokenizer_class"),
    ("tokenizer", "GPT-NeoX vocab.json"): TOKENS,
    ("tokenizer", "CamemBERT"): TOKENS,
    ("tokenizer", "MPNet"): TOKENS,
    ("tokenizer", "CodeLlama"): ("add_prefix_space", "add_bos_token", "prefix_token", "legacy"),
    ("tokenizer", "T5"): ("extra_special_tokens", "additional_special_tokens", "eos_token"),
    ("tokenizer", "ALBERT"): ("do_lower_case", "keep_accents"),
    ("sentences", "mean"): ("truncate_dim", "max_seq_length", "truncation_side", "model_type"),
}


@pytest.mark.parametrize(("kind", "name"), SETTINGS, ids=[" ".join(setting) for setting in SETTINGS])
@pytest.mark.slow
def test_changed_settings_are_read_as_the_reference_reads_them(kind: str, name: str, tmp_path: Path) -> None:
    if kind == "sentences":
        pytest.importorskip("sentence_transformers")
    rows = list(run_settings(kind, name, tmp_path, share=0.0, pairs=1, fields=SETTINGS[kind, name]))
    assert rows[0]["verdict"] == "equal" and not rows[0]["changes"]
    assert [row for row in rows if row["verdict"] in ("silent", "raw")] == []
