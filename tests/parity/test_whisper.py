"""Whisper against transformers: logits, hidden states, gradients, and what each writes the other reads.

transformers reads whole windows of frames and masks none of them, so padding is the decoder's.
"""

from __future__ import annotations

import pathlib

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.run.generate.decode import greedy
from tests.parity.harness import HIDDEN, LOGITS, check_saved, close, compare_gradients, reference

SMALL = {
    **{"vocab_size": 67, "num_mel_bins": 11, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40},
    **{"decoder_ffn_dim": 40, "max_source_positions": 19, "max_target_positions": 23},
    **{"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2, "decoder_start_token_id": 3},
    "begin_suppress_tokens": None,
}
OPTIONS = {
    "even": SMALL,
    "unequal stacks": {
        **SMALL,
        **{"encoder_layers": 3, "decoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 33},
        **{"decoder_attention_heads": 6, "num_mel_bins": 5, "max_source_positions": 7},
    },
    "untied, relu, odd width": {
        **SMALL,
        **{"tie_word_embeddings": False, "activation_function": "relu", "d_model": 30, "num_mel_bins": 1},
        **{"encoder_attention_heads": 3, "decoder_attention_heads": 5, "max_target_positions": 41},
        **{"scale_embedding": True, "vocab_size": 131},  # transformers states the scale and applies none
    },
}


def inputs(config: transformers.WhisperConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Frames of a whole window [3, T, M], ids [3, 13] of unequal rows, padded at the right, their mask."""
    generator = torch.Generator().manual_seed(1)
    frames = torch.randn(3, 2 * config.max_source_positions, config.num_mel_bins, generator=generator)
    ids = torch.randint(4, config.vocab_size, (3, 13), generator=generator)
    mask = torch.arange(13) < torch.tensor([[13], [9], [4]])
    return frames, ids.masked_fill(~mask, 1), mask


@pytest.mark.ledger("L11", "E3")
@pytest.mark.parametrize("label", list(OPTIONS))
def test_whisper(label: str, tmp_path: pathlib.Path) -> None:
    config = transformers.WhisperConfig(**OPTIONS[label])
    model = reference("WhisperForConditionalGeneration", config, tmp_path / "reference")
    ours = ch.load(tmp_path / "reference")
    frames, ids, mask = inputs(config)

    def said(their_model: transformers.PreTrainedModel, **more: bool) -> object:
        columns = frames.transpose(1, 2)
        return their_model(
            columns,
            decoder_input_ids=ids,
            decoder_attention_mask=mask.long(),
            output_hidden_states=True,
            **more,
        )

    names = ("encoder.blocks.*.resid_pre", "encoder.hidden", "blocks.*.resid_pre", "hidden")
    theirs = said(model)
    with ch.record(ours.model, *names) as seen:
        out = ours.model(ids, mask, frames)
    close("logits", out.logits[mask], theirs.logits[mask], LOGITS)
    own = [
        *(seen[f"encoder.blocks.{i}.resid_pre"] for i in range(config.encoder_layers)),
        seen["encoder.hidden"],
    ]
    for depth, (a, b) in enumerate(zip(own, theirs.encoder_hidden_states, strict=True)):
        close(f"encoder state {depth}", a, b, HIDDEN)
    own = [*(seen[f"blocks.{i}.resid_pre"] for i in range(config.decoder_layers)), seen["hidden"]]
    for depth, (a, b) in enumerate(zip(own, theirs.decoder_hidden_states, strict=True)):
        close(f"decoder state {depth}", a[mask], b[mask], HIDDEN)
    # A row padded at the left is the row alone.
    last = torch.cat([ids[2:, 4:], ids[2:, :4]], dim=1), torch.cat([mask[2:, 4:], mask[2:, :4]], dim=1)
    close("padded left", ours.model(*last, frames[2:]).logits[0, 9:], theirs.logits[2, :4], LOGITS)
    labels = ids.roll(-1, 1)
    compare_gradients(model, ours, theirs.logits[mask], out.logits[mask], labels[mask])

    start = torch.full((3, 1), 3)
    written = transformers.GenerationMixin.generate(
        model,
        frames.transpose(1, 2),
        decoder_input_ids=start,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    assert greedy(ours.model, start, 12, source=frames).tolist() == written[:, 1:].tolist()

    check_saved(
        model, ours, tmp_path, lambda one: said(one).logits, lambda one: one(ids, mask, frames).logits
    )


@pytest.mark.ledger("L11")
def test_the_base_model_and_what_is_refused(tmp_path: pathlib.Path) -> None:
    config = transformers.WhisperConfig(**SMALL)
    model = reference("WhisperModel", config, tmp_path / "base")
    ours = ch.load(tmp_path / "base")
    frames, ids, mask = inputs(config)
    with torch.no_grad():
        theirs = model(frames.transpose(1, 2), decoder_input_ids=ids, decoder_attention_mask=mask.long())
        close("hidden", ours.model(ids, mask, frames).hidden[mask], theirs.last_hidden_state[mask], LOGITS)
    reference("WhisperForAudioClassification", config, tmp_path / "classifier")
    with pytest.raises(ch.CheckpointError, match='the class "WhisperForAudioClassification": supported'):
        ch.load(tmp_path / "classifier")


@pytest.mark.ledger("L11", "E6")
@pytest.mark.slow
def test_check_reference(tmp_path: pathlib.Path) -> None:
    reference(
        "WhisperForConditionalGeneration", transformers.WhisperConfig(**OPTIONS["unequal stacks"]), tmp_path
    )
    rows = {row.name: row for row in ch.check(ch.load(tmp_path), reference=True)}
    assert rows["greedy tokens = transformers"].difference == 0
    assert rows["clearhead = transformers"].passed
    assert all(row.passed for row in rows.values()), [row for row in rows.values() if not row.passed]
