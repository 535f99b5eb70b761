"""Compare attention patterns with transformers' `output_attentions`: all architectures, kinds, paddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from tests.parity.test_encoders import IMAGES, make
from tests.parity.test_encoders import OPTIONS as ENCODERS

PATTERN = 1e-5

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", GPT),
    "Llama, grouped": ("Llama", dict(GROUPED, rope_scaling=LLAMA3)),
    "GPT-NeoX, parallel": ("GPTNeoX", SMALL),
    "Mistral, window": ("Mistral", dict(GROUPED, sliding_window=7)),
    "Qwen 2, window by layer": ("Qwen2", dict(GROUPED | WINDOW, layer_types=KINDS)),
    "Qwen 3, normed queries": ("Qwen3", dict(ODD, head_dim=10, attention_bias=True)),
    "Gemma": ("Gemma", dict(GROUPED, head_dim=10)),
    "Gemma 2, soft cap and windows": (
        "Gemma2",
        dict(DEEP, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, sliding_window=6),
    ),
    "Gemma 3, two bases": ("Gemma3", dict(DEEP, sliding_window=8, query_pre_attn_scalar=9)),
    "Mixtral": ("Mixtral", dict(GROUPED, num_local_experts=5, num_experts_per_tok=2)),
    "Phi, normed queries": (
        "Phi",
        dict(GROUPED, hidden_size=40, partial_rotary_factor=0.4, qk_layernorm=True),
    ),
    "Phi 3": ("Phi3", dict(ODD, sliding_window=7)),
    "OLMo 2": ("Olmo2", GROUPED),
    "StableLM": ("StableLm", {**GROUPED, **HALF}),
    "Granite": ("Granite", dict(GROUPED, attention_multiplier=0.2, residual_multiplier=0.3)),
    "SmolLM 3, layers without rotation": ("SmolLM3", dict(GROUPED, num_hidden_layers=5)),
    "Falcon, multi-query": ("Falcon", FALCON),
    "Falcon, new": ("Falcon", {**FALCON, **NEW}),
}
SEQ2SEQ: dict[str, tuple[str, str, dict[str, Any]]] = {
    "T5": ("T5ForConditionalGeneration", "T5", T5),
    "T5, few buckets": (
        "T5ForConditionalGeneration",
        "T5",
        dict(T5, relative_attention_num_buckets=8, num_heads=5),
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


Patterns = tuple[str, list[Tensor], list[Tensor], Tensor | None, Tensor | None]


def recorded(model: ch.Transformer, *parts: str, **inputs: Tensor) -> list[list[Tensor]]:
    """The patterns of every layer of each part."""
    with torch.no_grad(), ch.record(model, *(f"{part}.pattern" for part in parts)) as seen:
        model(**inputs)
    ends = [part.partition("*") for part in parts]
    return [
        [seen[name] for name in seen if name.startswith(start) and name.endswith(f"{end}.pattern")]
        for start, _, end in ends
    ]


def maps(found: AttentionMaps, kind: str, theirs: list[Tensor]) -> Patterns:
    """What `attention` returns for the first row alone, and the reference's patterns of that row."""
    mine = [torch.from_numpy(layer.pattern)[None] for layer in found.of(kind)]
    return f"{kind} maps", mine, [layer[:1] for layer in theirs], None, None


def of_decoder(name: str, folder: Path) -> Iterator[Patterns]:
    kind, options = DECODERS[name]
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = sharpened(reference(name, config_of(kind, options), folder), folder)
    ours = ch.load(folder)
    for side in ("right", "left"):
        ids, mask = batch(model.config, side=side)
        given = {"attention_mask": mask.long(), "position_ids": positions_of(mask)}
        theirs = model(ids, **given, output_attentions=True).attentions
        (mine,) = recorded(ours.model, "blocks.*.attention", ids=ids, mask=mask)
        yield f"padded {side}", mine, theirs, mask, mask
    yield maps(attention(ours, ids[0].tolist()), "self", theirs)


def of_encoder(name: str, folder: Path) -> Iterator[Patterns]:
    kind, _, label = name.partition(", ")
    model = make(kind, "ForMaskedLM", ENCODERS[kind][label], folder)
    model, ours = sharpened(model, folder, 12.0 if kind == "Albert" else 6.0), ch.load(folder)
    for side in ("right", "left"):
        theirs_in, ours_in = text_inputs(model, side)
        theirs = model(**theirs_in, output_attentions=True).attentions
        (mine,) = recorded(ours.model, "blocks.*.attention", **ours_in)
        yield f"padded {side}", mine, theirs, ours_in["mask"], ours_in["mask"]
    row = {name: value[:1] for name, value in theirs_in.items() if name != "token_type_ids"}
    alone = model(**row, output_attentions=True).attentions
    yield maps(attention(ours, ours_in["ids"][0].tolist()), "self", alone)


def of_image(name: str, folder: Path) -> Iterator[Patterns]:
    config = transformers.ViTConfig(**IMAGES[name])
    model = sharpened(reference("ViTForImageClassification", config, folder), folder)
    ours = ch.load(folder)
    assert ours.config.image_size is not None
    pixels = torch.randn(2, ours.config.n_channels, *ours.config.image_size)
    theirs = model(pixels, output_attentions=True).attentions
    (mine,) = recorded(ours.model, "blocks.*.attention", ids=pixels)
    yield "no padding", mine, theirs, None, None
    yield maps(attention(ours.model, pixels[:1]), "self", theirs)


def of_encoder_decoder(name: str, folder: Path) -> Iterator[Patterns]:
    kind, config, options = SEQ2SEQ[name]
    model = seq2seq.reference(kind, getattr(transformers, f"{config}Config")(**options), folder)
    ours = ch.load(folder)
    parts = ("encoder.blocks.*.attention", "blocks.*.attention", "blocks.*.cross")
    for side in ("right", *(() if seq2seq.counts_padding(model) else ("left",))):
        source, source_mask, target, mask = seq2seq.pair(model.config, side)
        out = seq2seq.run(model, source, source_mask, target, mask, output_attentions=True)
        theirs = (out.encoder_attentions, out.decoder_attentions, out.cross_attentions)
        given = {"ids": target, "mask": mask, "source": source, "source_mask": source_mask}
        masks = ((source_mask, source_mask), (mask, mask), (mask, source_mask))
        for kind, mine, wanted, (queries, keys) in zip(
            KEPT, recorded(ours.model, *parts, **given), theirs, masks
        ):
            yield f"{kind} {side}", mine, wanted, queries, keys
    found = attention(ours, source[0].tolist(), target=target[0].tolist())
    assert found.kinds == KEPT
    for kind, wanted in zip(KEPT, theirs):
        yield maps(found, kind, wanted)


KEPT = ("encoder", "self", "cross")
# Longformer of transformers lays attentions out by distance in the window, not by token.
SQUARE = ("Bert", "Roberta", "DistilBert", "Albert")
CASES = [
    *((of_decoder, name) for name in DECODERS),
    *((of_encoder, f"{name}, {label}") for name in SQUARE for label in list(ENCODERS[name])[:2]),
    *((of_image, name) for name in IMAGES),
    *((of_encoder_decoder, name) for name in SEQ2SEQ),
]


@pytest.mark.ledger("K1", "K2")
@pytest.mark.parametrize(("run", "name"), CASES, ids=[name for _, name in CASES])
@torch.no_grad()
def test_patterns_are_those_of_transformers(
    run: Callable[[str, Path], Iterator[Patterns]], name: str, tmp_path: Path, differences: Differences
) -> None:
    """Compare at real queries and keys, and expect nothing at padding keys."""
    for check, ours, theirs, queries, keys in run(name, tmp_path):
        for mine, wanted in zip(ours, theirs, strict=True):
            assert mine.shape == wanted.shape
            q = torch.ones(mine.shape[0], mine.shape[2]).bool() if queries is None else queries
            k = torch.ones(mine.shape[0], mine.shape[3]).bool() if keys is None else keys
            real = (q[:, None, :, None] & k[:, None, None]).expand_as(mine)
            assert differences.see(check, mine[real], wanted[real]) <= PATTERN
            assert not mine[(q[:, None, :, None] & ~k[:, None, None]).expand_as(mine)].any()
            if "maps" not in check:
                choices = (mine > 0).sum(-1).masked_fill(~q[:, None], 0)
                peaks = wanted.amax(-1) * choices  # the largest weight of each query, against an even share
                assert float(peaks[choices > 3].mean()) > 1.4, "even patterns would prove little"
