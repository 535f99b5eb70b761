"""Compare attention patterns with transformers' `output_attentions`: all architectures, kinds, paddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import clearhead as ch
from clearhead.inside.attention import AttentionMaps, attention
from tests.conftest import Differences
from tests.parity import seq2seq
from tests.parity.encoders import text_inputs
from tests.parity.harness import batch, config_of, positions_of, reference
from tests.parity.test_decoders import (
    DEEP,
    FALCON,
    GPT,
    GROUPED,
    HALF,
    KINDS,
    LLAMA3,
    NEW,
    ODD,
    SMALL,
    WINDOW,
)
from tests.parity.test_encoder_decoders import BART, MARIAN, T5
from tests.parity.test_encoder_decoders import DEEP as TALL
from tests.parity.test_encoders import OPTIONS as ENCODERS
from tests.parity.test_encoders import make
from tests.parity.test_vit import OPTIONS as IMAGES

PATTERN = 1e-5

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", GPT),
    "Llama, grouped": ("Llama", {**GROUPED, "rope_scaling": LLAMA3}),
    "GPT-NeoX, parallel": ("GPTNeoX", SMALL),
    "Mistral, window": ("Mistral", {**GROUPED, "sliding_window": 7}),
    "Qwen 2, window by layer": ("Qwen2", {**GROUPED, **WINDOW, "layer_types": KINDS}),
    "Qwen 3, normed queries": ("Qwen3", {**ODD, "head_dim": 10, "attention_bias": True}),
    "Gemma": ("Gemma", {**GROUPED, "head_dim": 10}),
    "Gemma 2, soft cap and windows": (
        "Gemma2",
        {**DEEP, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "sliding_window": 6},
    ),
    "Gemma 3, two bases": ("Gemma3", {**DEEP, "sliding_window": 8, "query_pre_attn_scalar": 9}),
    "Mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "Phi, normed queries": (
        "Phi",
        {**GROUPED, "hidden_size": 40, "partial_rotary_factor": 0.4, "qk_layernorm": True},
    ),
    "Phi 3": ("Phi3", {**ODD, "sliding_window": 7}),
    "OLMo 2": ("Olmo2", GROUPED),
    "StableLM": ("StableLm", {**GROUPED, **HALF}),
    "Granite": ("Granite", {**GROUPED, "attention_multiplier": 0.2, "residual_multiplier": 0.3}),
    "SmolLM 3, layers without rotation": ("SmolLM3", {**GROUPED, "num_hidden_layers": 5}),
    "Falcon, multi-query": ("Falcon", FALCON),
    "Falcon, new": ("Falcon", {**FALCON, **NEW}),
}
SEQ2SEQ: dict[str, tuple[str, str, dict[str, Any]]] = {
    "T5": ("T5ForConditionalGeneration", "T5", T5),
    "T5, few buckets": (
        "T5ForConditionalGeneration",
        "T5",
        {**T5, "relative_attention_num_buckets": 8, "num_heads": 5},
    ),
    "mT5": ("MT5ForConditionalGeneration", "MT5", T5),
    "BART": ("BartForConditionalGeneration", "Bart", BART),
    "mBART": ("MBartForConditionalGeneration", "MBart", {**BART, **TALL}),
    "M2M-100": ("M2M100ForConditionalGeneration", "M2M100", BART),
    "Marian": ("MarianMTModel", "Marian", MARIAN),
}


SHARP = ("query", "key", "q_proj", "k_proj", "qkv", "c_attn", "q_lin", "k_lin")


def sharpened(model: Any, folder: Path, factor: float = 6.0) -> Any:
    """Enlarge queries and keys: fresh ones are so small that every key gets about the same weight."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and any(part in name for part in SHARP):
                parameter.mul_(factor)
    model.save_pretrained(folder)
    return model


def recorded(model: ch.Transformer, *parts: str, **inputs: Tensor) -> list[list[Tensor]]:
    """The patterns of every layer of each part."""
    with torch.no_grad(), ch.record(model, *(f"{part}.pattern" for part in parts)) as seen:
        model(**inputs)
    return [[seen[name] for name in seen if _is_of(name, part)] for part in parts]


def _is_of(name: str, part: str) -> bool:
    start, _, end = part.partition("*")
    return name.startswith(start) and name.endswith(f"{end}.pattern")


def compare(
    differences: Differences,
    check: str,
    ours: list[Tensor],
    theirs: list[Tensor],
    queries: Tensor | None,
    keys: Tensor | None,
) -> None:
    """Compare at real queries and keys, and expect nothing at padding keys. Masks are [B, T] and [B, S]."""
    assert len(ours) == len(theirs)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.shape == wanted.shape
        q = torch.ones(mine.shape[0], mine.shape[2]).bool() if queries is None else queries
        k = torch.ones(mine.shape[0], mine.shape[3]).bool() if keys is None else keys
        real = (q[:, None, :, None] & k[:, None, None]).expand_as(mine)
        assert differences.see(check, mine[real], wanted[real]) <= PATTERN
        choices = (mine > 0).sum(-1).masked_fill(~q[:, None], 0)
        peaks = wanted.amax(-1) * choices  # the largest weight of each query, against an even share
        assert float(peaks[choices > 3].mean()) > 1.4, "even patterns would prove little"
        assert not mine[(q[:, None, :, None] & ~k[:, None, None]).expand_as(mine)].any()


def compare_maps(differences: Differences, maps: AttentionMaps, kind: str, theirs: list[Tensor]) -> None:
    """What `attention` returns for one row alone, against the reference's patterns [H, T, S] of that row."""
    for mine, wanted in zip(maps.of(kind), theirs, strict=True):
        assert differences.see(f"{kind} maps", torch.from_numpy(mine.pattern), wanted) <= PATTERN


@pytest.mark.ledger("K1", "K2")
@pytest.mark.parametrize("name", list(DECODERS))
def test_decoders(name: str, tmp_path: Path, differences: Differences) -> None:
    kind, options = DECODERS[name]
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = sharpened(reference(name, config_of(kind, options), tmp_path), tmp_path)
    ours = ch.load(tmp_path)
    for side in ("right", "left"):
        ids, mask = batch(model.config, side=side)
        with torch.no_grad():
            theirs = model(
                ids, attention_mask=mask.long(), position_ids=positions_of(mask), output_attentions=True
            ).attentions
        (mine,) = recorded(ours.model, "blocks.*.attention", ids=ids, mask=mask)
        compare(differences, f"padded {side}", mine, theirs, mask, mask)
    compare_maps(differences, attention(ours, ids[0].tolist()), "self", [each[0] for each in theirs])


# Longformer of transformers lays attentions out by distance in the window, not by token.
SQUARE = [name for name in ENCODERS if name != "Longformer"]


@pytest.mark.ledger("K1", "K2")
@pytest.mark.parametrize(
    ("name", "label"), [(name, label) for name in SQUARE for label in list(ENCODERS[name])[:2]]
)
def test_encoders(name: str, label: str, tmp_path: Path, differences: Differences) -> None:
    model = sharpened(
        make(name, "ForMaskedLM", ENCODERS[name][label], tmp_path),
        tmp_path,
        12.0 if name == "Albert" else 6.0,
    )
    ours = ch.load(tmp_path)
    for side in ("right", "left"):
        theirs_in, ours_in = text_inputs(model, side)
        with torch.no_grad():
            theirs = model(**theirs_in, output_attentions=True).attentions
        (mine,) = recorded(ours.model, "blocks.*.attention", **ours_in)
        compare(differences, f"padded {side}", mine, theirs, ours_in["mask"], ours_in["mask"])
    row = {name: value[:1] for name, value in theirs_in.items() if name != "token_type_ids"}
    with torch.no_grad():
        alone = model(**row, output_attentions=True).attentions
    compare_maps(
        differences, attention(ours, ours_in["ids"][0].tolist()), "self", [each[0] for each in alone]
    )


@pytest.mark.ledger("K1", "K2")
@pytest.mark.parametrize("label", list(IMAGES))
def test_images(label: str, tmp_path: Path, differences: Differences) -> None:
    model = sharpened(
        reference("ViTForImageClassification", transformers.ViTConfig(**IMAGES[label]), tmp_path), tmp_path
    )
    ours = ch.load(tmp_path)
    assert ours.config.image_size is not None
    pixels = torch.randn(2, ours.config.n_channels, *ours.config.image_size)
    with torch.no_grad():
        theirs = model(pixels, output_attentions=True).attentions
    (mine,) = recorded(ours.model, "blocks.*.attention", ids=pixels)
    compare(differences, "no padding", mine, theirs, None, None)
    compare_maps(differences, attention(ours.model, pixels[:1]), "self", [each[0] for each in theirs])


@pytest.mark.ledger("K1", "K2")
@pytest.mark.parametrize("name", list(SEQ2SEQ))
def test_encoder_decoders(name: str, tmp_path: Path, differences: Differences) -> None:
    kind, config, options = SEQ2SEQ[name]
    model = seq2seq.reference(kind, getattr(transformers, f"{config}Config")(**options), tmp_path)
    ours = ch.load(tmp_path)
    for side in ("right", *(() if seq2seq.counts_padding(model) else ("left",))):
        source, source_mask, target, mask = seq2seq.pair(model.config, side)
        with torch.no_grad():
            theirs = seq2seq.run(model, source, source_mask, target, mask, output_attentions=True)
        parts = ("encoder.blocks.*.attention", "blocks.*.attention", "blocks.*.cross")
        encoder, decoder, cross = recorded(
            ours.model, *parts, ids=target, mask=mask, source=source, source_mask=source_mask
        )
        compare(differences, f"encoder {side}", encoder, theirs.encoder_attentions, source_mask, source_mask)
        compare(differences, f"self {side}", decoder, theirs.decoder_attentions, mask, mask)
        compare(differences, f"cross {side}", cross, theirs.cross_attentions, mask, source_mask)
    maps = attention(ours, source[0].tolist(), target=target[0].tolist())
    assert maps.kinds == ("encoder", "self", "cross")
    wanted = {
        "encoder": theirs.encoder_attentions,
        "self": theirs.decoder_attentions,
        "cross": theirs.cross_attentions,
    }
    for kind, patterns in wanted.items():
        compare_maps(differences, maps, kind, [each[0] for each in patterns])
