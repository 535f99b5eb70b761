"""A sample of `settings_mutations`: files beside the weights are read as the reference reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.settings_mutations import run

# Fields that once made other ids or vectors in silence.
TOKENS = ("pad_token", "bos_token", "unk_token", "cls_token", "truncation_side")
FIELDS = {
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


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=[" ".join(one) for one in FIELDS])
@pytest.mark.slow
def test_changed_settings_are_read_as_the_reference_reads_them(kind: str, name: str, tmp_path: Path) -> None:
    if kind == "sentences":
        pytest.importorskip("sentence_transformers")
    rows = list(run(kind, name, tmp_path, share=0.02, pairs=1, fields=FIELDS[kind, name]))
    assert rows[0]["verdict"] == "equal" and not rows[0]["changes"]
    assert [row for row in rows if row["verdict"] in ("silent", "raw")] == []
