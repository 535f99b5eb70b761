"""BigBird held against transformers: every class, short and long rows, padding, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import clearhead as ch
from clearhead.hub.registry import ARCHITECTURES
from clearhead.variants.costs import cost
from tests.parity.encoders import check_back, check_text_encoder, said
from tests.parity.harness import LOGITS, batch, close, compare_gradients, reference, reopened

SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "block_size": 4,
    "num_random_blocks": 1,
    "sep_token_id": 60,
}
HEADS = {
    "Model": {"use_bias": False},
    "ForMaskedLM": {"num_random_blocks": 2, "use_bias": False, "rescale_embeddings": True},
    "ForPreTraining": {},
    "ForSequenceClassification": {"num_labels": 3, "hidden_act": "relu"},
    "ForTokenClassification": {"num_labels": 3, "num_random_blocks": 1, "block_size": 3},
    "ForQuestionAnswering": {},
}
POOLER = ("bert.pooler.*",)  # which every class of theirs has, and only the bare model uses
pytestmark = pytest.mark.ledger("L7")


def make(head: str, folder: Path, **options: Any) -> Any:
    return reference(f"BigBird{head}", transformers.BigBirdConfig(**{**SMALL, **options}), folder)


def answers(model: Any, folder: Path, **inputs: Tensor) -> Tensor:
    """What a fresh model of theirs says: after one short row, theirs reads every row in full for ever."""
    fresh = type(model).from_pretrained(folder, attn_implementation="eager").eval()
    out = fresh(**inputs)
    return out.prediction_logits if "prediction_logits" in out else said(out)


def tokens(rows: int, length: int) -> dict[str, Tensor]:
    """Ids without the separator, which would be the end of a question, and segments."""
    ids = torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "token_type_ids": (torch.arange(length) > 8).long().expand(rows, -1)}


@pytest.mark.parametrize("head", HEADS)
def test_rows_of_every_length(head: str, tmp_path: Path) -> None:
    """Short rows in full, whole blocks, a block cut short; 64 tokens are so long that keys are gathered."""
    folder = tmp_path / "reference"
    model = make(head, folder, **HEADS[head])
    ours = ch.load(folder)
    for length in (20, 28, 29, 41, 64, 90):
        given = tokens(2, length)
        with torch.no_grad():
            wanted = answers(model, folder, **given)
            found = ours.model(given["input_ids"], types=given["token_type_ids"]).logits
        close(f"{length} tokens", found, wanted, 1e-5)
    if head != "ForPreTraining":  # whose class is named only in a file that came with it
        theirs_in = tokens(2, 64)
        ours_in = {"ids": theirs_in["input_ids"], "types": theirs_in["token_type_ids"]}
        check_back(model, ours, tmp_path, theirs_in, ours_in, spared=POOLER)


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_full_attention(head: str, tmp_path: Path) -> None:
    options = dict(HEADS[head], attention_type="original_full")
    model = make(head, tmp_path / "reference", **options)
    ours = check_text_encoder(model, tmp_path / "reference", tmp_path, POOLER)
    assert ours.config.attention == "full"


def test_gradients(tmp_path: Path) -> None:
    """In evaluation mode, as in training theirs draws other blocks."""
    model = make("ForMaskedLM", tmp_path, **HEADS["ForMaskedLM"])
    ours, given = ch.load(tmp_path), tokens(2, 64)
    found = ours.model(given["input_ids"], types=given["token_type_ids"]).logits
    compared = compare_gradients(model, ours, model(**given).logits, found, given["input_ids"])
    assert len(compared) > 30


def test_a_padded_row_is_the_row_alone(tmp_path: Path) -> None:
    """Theirs moves the last block to the end of the padding; a row here does not know its neighbours."""
    model = make("ForMaskedLM", tmp_path)
    ours = ch.load(tmp_path)
    for side in ("right", "left"):
        ids, mask = batch(model.config, rows=4, length=66, side=side)
        with torch.no_grad():
            found = ours.model(ids, mask).logits
            for row in range(4):
                wanted = answers(model, tmp_path, input_ids=ids[row : row + 1, mask[row]])
                close(f"row {row}, padded {side}", found[row, mask[row]], wanted[0], LOGITS)
            padded = answers(model, tmp_path, input_ids=ids, attention_mask=mask.long())
        assert (padded[3, mask[3]] - found[3, mask[3]]).abs().max() > 1e-3, "theirs has mended its padding"


def test_released_files(tmp_path: Path) -> None:
    """Their config.json names ForPreTraining; the head for the next sentence is kept and written back."""
    model = make("ForPreTraining", tmp_path / "reference")
    ours = ch.load(tmp_path / "reference")
    ours.save(tmp_path / "saved")
    again = reopened(type(model), tmp_path / "saved")
    with torch.no_grad():
        wanted, found = model(**tokens(1, 40)), again(**tokens(1, 40))
    assert torch.equal(wanted.seq_relationship_logits, found.seq_relationship_logits)
    assert torch.equal(wanted.prediction_logits, found.prediction_logits)


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


@pytest.mark.parametrize("sizes", [{}, LARGE], ids=["base", "large"])
def test_published_sizes(sizes: dict[str, int]) -> None:
    """Base and large, with the head for masked tokens: as many parameters as theirs without the pooler."""
    config = transformers.BigBirdConfig(**sizes)
    with torch.device("meta"):
        theirs = transformers.BigBirdForMaskedLM(config)
    pooler = sum(weight.numel() for weight in theirs.bert.pooler.parameters())
    wanted = sum(weight.numel() for weight in theirs.parameters()) - pooler
    stated = dict(config.to_dict(), architectures=["BigBirdForMaskedLM"])
    ours = ARCHITECTURES["big_bird"].read(stated)
    assert cost(ours).parameters.total == wanted


WRONG = {
    "attention_type": ("sparse", "choose from block_sparse, original_full"),
    "block_size": (0, "it must be a whole number, 1 or more"),
    "num_random_blocks": (-1, "it must be a whole number, 0 or more"),
    "is_decoder": (True, "only False is supported"),
    "architectures": (["BigBirdForCausalLM"], "supported for big_bird are BigBirdForMaskedLM"),
}


@pytest.mark.parametrize("key", WRONG)
def test_what_is_not_honoured_is_named(key: str) -> None:
    value, says = WRONG[key]
    stated = {**transformers.BigBirdConfig().to_dict(), "architectures": ["BigBirdForMaskedLM"], key: value}
    with pytest.raises(ch.CheckpointError, match=says):
        ARCHITECTURES["big_bird"].read(stated)
