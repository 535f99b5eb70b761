"""Change fields of a config.json and ask transformers and clearhead what the model is now.

    python -m tests.parity.mutations [--only Mistral] [--share 0.1] [--fields is_causal rope_scaling]
        [--pairs 100] [--section] [--out OUT.json]

Every field is changed to several values, and left out; `--pairs` changes two fields at once. With
`--section`, clearhead has written the file, with a section of its own that transformers does not know.

Each mutation ends in one of:
    equal      both compute the same numbers
    refused    clearhead refuses the file by name
    reference  transformers refuses it, or has weights missing: there is nothing to compare with
    raw        clearhead raises something that is not one of its own errors
    silent     clearhead computes other numbers without a word
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.variants.images import placed, prompt_axes
from tests.parity import harness, seq2seq
from tests.parity.encoders import said

TOLERANCE = 1e-4
TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GROUPED = dict(TEXT, num_key_value_heads=2)
WINDOW = {"sliding_window": 7}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 5.0],
    "original_max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
DISTIL = {"vocab_size": 61, "dim": 32, "hidden_dim": 40, "n_layers": 3, "n_heads": 4}
T5 = {"vocab_size": 61, "d_model": 24, "d_kv": 7, "d_ff": 37, "num_layers": 2, "num_heads": 3}
BART = {
    "vocab_size": 61,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 29,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 64,
}
WHISPER = {
    **{name: size for name, size in BART.items() if name != "max_position_embeddings"},
    **{"num_mel_bins": 7, "max_source_positions": 11, "max_target_positions": 64, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 2, "begin_suppress_tokens": None},
}
MARIAN = dict(BART, pad_token_id=40, decoder_start_token_id=40, eos_token_id=0)
NEXT = {
    **GROUPED,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
    "mlp_only_layers": [2],
}
MIXED = {name: NEXT[name] for name in (*GROUPED, "num_experts", "num_experts_per_tok", "mlp_only_layers")}
MIXED |= {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 16}
SPARSE = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1}
SPARSE |= {"n_group": 3, "topk_group": 2}
LATENT = {
    **dict(TEXT, num_key_value_heads=4, kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=6),
    **dict(SPARSE, qk_rope_head_dim=4, v_head_dim=5),
}
MSCALE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 0.7}
LIMITED = {"topk_method": "group_limited_greedy", "first_k_dense_replace": 1}
MAMBA2 = dict(TEXT, num_heads=4, head_dim=16, state_size=7, n_groups=2, time_step_limit=(0.1, 0.9))
BAMBA = dict(GROUPED, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=7, attn_layer_indices=[1])
FALCON_H1 = {
    **dict(GROUPED, mamba_n_heads=4, mamba_d_head=10, mamba_d_ssm=40, mamba_d_state=7, mamba_rms_norm=True),
    **dict(mlp_multipliers=[1.4, 0.6], ssm_multipliers=[0.8, 1.3, 0.7, 1.2, 0.9], key_multiplier=0.7),
}
SUBLAYERS = {
    **{name: size for name, size in GROUPED.items() if name != "num_hidden_layers"},
    **{"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"], "head_dim": 8},
    **{"mamba_num_heads": 6, "mamba_head_dim": 5, "ssm_state_size": 7, "n_groups": 3},
    **{"n_routed_experts": 6, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20},
    **{"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "time_step_min": 0.3},
}
LFM2 = dict(GROUPED, layer_types=["conv", "full_attention", "conv"], block_multiple_of=4)
NEO = {"vocab_size": 61, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 128}
NEO |= {"attention_types": [[["local", "global", "local"], 1]], "window_size": 7}
DEBERTA = {
    **{"relative_attention": True, "position_biased_input": False, "share_att_key": True},
    **{"pos_att_type": ["p2c", "c2p"], "position_buckets": 6, "norm_rel_ebd": "layer_norm"},
}
VIT = dict(TEXT, image_size=28, patch_size=4, num_labels=5)
LLAVA = {
    "text_config": dict(GROUPED, model_type="llama"),
    "vision_config": dict(VIT, model_type="clip_vision_model", hidden_size=24),
    "image_token_index": 60,
}
IDEFICS3 = {
    "text_config": LLAVA["text_config"],
    "vision_config": dict(VIT, image_size=32, hidden_size=24, hidden_act="gelu"),
    **{"image_token_id": 60, "scale_factor": 2},
}
QWEN2_5_VL = {
    "text_config": dict(
        GROUPED,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]},
    ),
    "vision_config": {
        **{"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "patch_size": 4},
        **{"window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 32},
    },
    "image_token_id": 60,
}
LABELS = {"num_labels": 3}
BLOCKS = {"block_size": 4, "num_random_blocks": 1}
LONGFORMER = {"attention_window": [8, 4, 8], "max_position_embeddings": 130}


class Subject(NamedTuple):
    """A model whose config.json is changed: its class in transformers, and its options."""

    kind: str
    options: dict[str, Any]
    head: str = "ForCausalLM"

    @property
    def model(self) -> str:
        """Return the name of the class in transformers."""
        return self.kind + self.head


SUBJECTS = {
    "GPT-2": Subject("GPT2", GPT2, "LMHeadModel"),
    "GPT-NeoX": Subject("GPTNeoX", TEXT),
    "Llama": Subject("Llama", GROUPED),
    "Llama scaled": Subject("Llama", dict(GROUPED, rope_scaling={"rope_type": "linear", "factor": 3.0})),
    "Mistral": Subject("Mistral", {**GROUPED, **WINDOW}),
    "Mixtral": Subject("Mixtral", dict(GROUPED, num_local_experts=4)),
    "gpt-oss": Subject("GptOss", dict(GROUPED | WINDOW, head_dim=8, num_local_experts=4)),
    "Qwen2": Subject("Qwen2", GROUPED),
    "Qwen2 windows": Subject("Qwen2", dict(GROUPED | WINDOW, use_sliding_window=True, max_window_layers=1)),
    "Qwen3": Subject("Qwen3", dict(GROUPED, head_dim=8)),
    "Qwen3-Next": Subject("Qwen3Next", NEXT),
    "Qwen2-MoE": Subject("Qwen2Moe", MIXED),
    "Qwen3-MoE": Subject("Qwen3Moe", dict(MIXED, head_dim=8)),
    "DeepSeek-V2": Subject("DeepseekV2", {**LATENT, **LIMITED}),
    "DeepSeek-V3": Subject("DeepseekV3", dict(LATENT, first_k_dense_replace=1)),
    "DeepSeek-V3 yarn": Subject("DeepseekV3", dict(LATENT, q_lora_rank=None, rope_scaling=MSCALE)),
    "GLM-4-MoE-Lite": Subject("Glm4MoeLite", LATENT),
    "GLM-4-MoE": Subject("Glm4Moe", dict(GROUPED, head_dim=8, **SPARSE)),
    "Mamba-2": Subject("Mamba2", MAMBA2),
    "Bamba": Subject("Bamba", BAMBA),
    "Falcon-H1": Subject("FalconH1", FALCON_H1),
    "Nemotron-H": Subject("NemotronH", SUBLAYERS),
    "LFM2": Subject("Lfm2", LFM2),
    "OPT": Subject("OPT", dict(TEXT, ffn_dim=40, word_embed_proj_dim=32)),
    "OPT 350m": Subject("OPT", dict(TEXT, ffn_dim=40, word_embed_proj_dim=16, do_layer_norm_before=False)),
    "GPT-Neo": Subject("GPTNeo", NEO),
    "GPT-J": Subject("GPTJ", dict(GPT2, rotary_dim=4)),
    "BLOOM": Subject("Bloom", {"vocab_size": 61, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "StarCoder": Subject("GPTBigCode", GPT2),
    "StarCoder2": Subject("Starcoder2", {**GROUPED, **WINDOW}),
    "Cohere": Subject("Cohere", GROUPED),
    "Cohere2": Subject("Cohere2", dict(GROUPED | WINDOW, layer_types=KINDS)),
    "GLM": Subject("Glm", dict(GROUPED, head_dim=8)),
    "GLM4": Subject("Glm4", dict(GROUPED, head_dim=8)),
    "Nemotron": Subject("Nemotron", GROUPED),
    "OLMo3": Subject("Olmo3", dict(GROUPED | WINDOW, layer_types=KINDS)),
    "OLMoE": Subject("Olmoe", MIXED),
    "Granite-MoE": Subject("GraniteMoe", dict(GROUPED, num_local_experts=4)),
    "Gemma": Subject("Gemma", dict(GROUPED, head_dim=10)),
    "Gemma2": Subject("Gemma2", dict(GROUPED | WINDOW, head_dim=10)),
    "Gemma3": Subject("Gemma3", dict(GROUPED | WINDOW, head_dim=8)),
    "Phi": Subject("Phi", TEXT),
    "Phi3": Subject("Phi3", GROUPED),
    "Phi3 longrope": Subject(
        "Phi3", dict(GROUPED, rope_scaling=LONGROPE, original_max_position_embeddings=32)
    ),
    "OLMo2": Subject("Olmo2", GROUPED),
    "StableLM": Subject("StableLm", GROUPED),
    "Falcon": Subject("Falcon", TEXT),
    "Granite": Subject("Granite", GROUPED),
    "SmolLM3": Subject("SmolLM3", dict(GROUPED, no_rope_layers=[1, 0, 1])),
    "SmolLM3 windows": Subject("SmolLM3", dict(GROUPED | WINDOW, use_sliding_window=True, layer_types=KINDS)),
    "BERT": Subject("Bert", TEXT, "ForMaskedLM"),
    "BERT classifier": Subject("Bert", {**TEXT, **LABELS}, "ForSequenceClassification"),
    "BERT decoder": Subject("Bert", TEXT, "Model"),
    "RoBERTa": Subject("Roberta", dict(TEXT, max_position_embeddings=130), "ForMaskedLM"),
    "RoBERTa tagger": Subject("Roberta", {**TEXT, **LABELS}, "ForTokenClassification"),
    "XLM-RoBERTa": Subject("XLMRoberta", {**TEXT, **LABELS}, "ForSequenceClassification"),
    "CamemBERT": Subject("Camembert", TEXT, "ForMaskedLM"),
    "MPNet": Subject("MPNet", TEXT, "ForMaskedLM"),
    "ELECTRA": Subject("Electra", dict(TEXT, embedding_size=16), "ForMaskedLM"),
    "ELECTRA discriminator": Subject("Electra", TEXT, "ForPreTraining"),
    "ModernBERT": Subject("ModernBert", dict(TEXT, local_attention=8), "ForMaskedLM"),
    "ModernBERT classifier": Subject(
        "ModernBert", dict(TEXT | LABELS, local_attention=8), "ForSequenceClassification"
    ),
    "DeBERTa": Subject("DebertaV2", {**TEXT, **DEBERTA}, "ForMaskedLM"),
    "DeBERTa classifier": Subject("DebertaV2", {**TEXT, **DEBERTA, **LABELS}, "ForSequenceClassification"),
    "DistilBERT": Subject("DistilBert", DISTIL, "ForMaskedLM"),
    "DistilBERT spans": Subject("DistilBert", DISTIL, "ForQuestionAnswering"),
    "Longformer": Subject("Longformer", {**TEXT, **LONGFORMER}, "ForMaskedLM"),
    "Longformer classifier": Subject(
        "Longformer", {**TEXT, **LONGFORMER, **LABELS}, "ForSequenceClassification"
    ),
    "ALBERT": Subject("Albert", dict(TEXT, embedding_size=16), "ForMaskedLM"),
    "BigBird": Subject("BigBird", {**TEXT, **BLOCKS}, "ForMaskedLM"),
    "BigBird classifier": Subject("BigBird", {**TEXT, **BLOCKS, **LABELS}, "ForSequenceClassification"),
    "T5": Subject("T5", T5, "ForConditionalGeneration"),
    "T5 gated": Subject("T5", dict(T5, feed_forward_proj="gated-gelu"), "ForConditionalGeneration"),
    "MT5": Subject("MT5", T5, "ForConditionalGeneration"),
    "BART": Subject("Bart", BART, "ForConditionalGeneration"),
    "mBART": Subject("MBart", BART, "ForConditionalGeneration"),
    "Marian": Subject("Marian", MARIAN, "MTModel"),
    "M2M-100": Subject("M2M100", BART, "ForConditionalGeneration"),
    "Whisper": Subject("Whisper", WHISPER, "ForConditionalGeneration"),
    "ViT": Subject("ViT", VIT, "ForImageClassification"),
    "LLaVA": Subject("Llava", LLAVA, "ForConditionalGeneration"),
    "Idefics3": Subject("Idefics3", IDEFICS3, "ForConditionalGeneration"),
    "Qwen2.5-VL": Subject("Qwen2_5_VL", QWEN2_5_VL, "ForConditionalGeneration"),
}
# Fields that other tools write, that older files have, or that a neighbour's class knows.
EXTRA: dict[str, list[Any]] = {
    "rope_scaling": [
        {"rope_type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 50.0},
    ],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 77.0}],
    "rope_theta": [77.0],
    "rope_local_base_freq": [77.0],
    "rotary_emb_base": [77.0],
    "rotary_pct": [0.5],
    "partial_rotary_factor": [0.5, None],
    "original_max_position_embeddings": [16],
    "per_layer_config": [{"0": {"sliding_window": 3}}],
    "sliding_window_pattern": [2],
    "attention_chunk_size": [8],
    "num_kv_shared_layers": [1],
    "num_experts": [2],
    "n_embed": [16],
    "is_encoder_decoder": [False, True],
    "attention_window": [16, [8, 8, 8], [4, 8], 7, 0],
    "attention_dilation": [[1, 1, 1], [1, 2, 1]],
    "is_causal": [False, True, None],
    "is_decoder": [True],
    "add_cross_attention": [True],
    "layer_types": [KINDS, ["full_attention"] * 3, ["sliding_attention"] * 3],
    "sliding_window": [None, 5],
    "use_sliding_window": [True, False],
    "head_dim": [16],
    "attention_type": ["original_full", "block_sparse"],
    "dense_act_fn": ["relu", "silu"],
    "is_gated_act": [True, False],
    "hidden_activation": ["relu"],
    "hidden_act": ["relu", "silu"],
    "attn_logit_softcapping": [0.5],
    "final_logit_softcapping": [0.5],
    "query_pre_attn_scalar": [3],
    "num_attention_heads": [2],
    "num_hidden_layers": [2],
    "hidden_size": [16],
    "qk_layernorm": [True],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "scale_embedding": [True],
    "normalize_before": [True],
    "position_embedding_type": ["relative_key"],
    "scale_attn_by_inverse_layer_idx": [True],
    "scale_attn_weights": [False],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}],
    "auto_map": [{"AutoModel": "evil.Model"}],
    "torch_dtype": ["bfloat16"],
    "dtype": ["float16"],
    "scoring_func": ["softmax", "sigmoid"],
    "topk_method": ["greedy", "noaux_tc"],
    "moe_layer_freq": [1, 2],
    "mscale_all_dim": [1.0],
}
ABSENT = object()  # the field is left out
# Fields from which others follow: each is left out together with every other change of a field like these.
SOURCES = {
    "rope_parameters": ("rope", "rotary", "original_max"),
    "attention_types": ("attention_layers",),
    "layer_types": ("sliding_window", "window_layers", "every_n", "no_rope_layer"),
}
ACTIVATIONS = ["relu", "gelu", "gelu_new", "silu", "tanh", "no_such_activation"]


def values_for(name: str, value: Any) -> list[Any]:
    """Return other values for a field: near ones, edges, null and a wrong type."""
    if isinstance(value, bool):
        found: list[Any] = [not value, None]
    elif isinstance(value, int):
        found = [0, 1, value + 1, value * 2, -1, None, str(value)]
    elif isinstance(value, float):
        found = [0.0, value * 2, 1.0, None]
    elif isinstance(value, str):
        found = [*ACTIVATIONS, None] if "act" in name else ["no_such_value", None]
    elif isinstance(value, list):
        found = [value[::-1], [*value[1:], *value[:1]], value[:-1], None]
    elif isinstance(value, dict):
        found = [None, {}] + [
            {**value, key: other}
            for key, old in value.items()
            for other in values_for(key, old)[: None if isinstance(old, dict) else 3]
        ]
    else:
        found = [0, 1, 2.0, True]
    return [other for other in found if other != value or type(other) is not type(value)]


def mutations(written: dict[str, Any], config: Any) -> Iterator[tuple[str, Any]]:
    """Yield every field of a config with each value to try."""
    accepted = inspect.signature(type(config).__init__).parameters
    names = dict.fromkeys([*written, *accepted, *config.attribute_map, *EXTRA])
    skipped = {
        "architectures",
        "model_type",
        "transformers_version",
        "self",
        "kwargs",
        "id2label",
        "label2id",
    }
    for name in names:
        if name not in skipped:
            values = values_for(name, written.get(name, getattr(config, name, None)))
            default = getattr(type(config), name, None)
            if name in written and not (type(default) is int and default > 64 and name != "sliding_window"):
                yield name, ABSENT  # else the reference would build a model of its usual size
            seen: list[str] = []
            for value in [*values, *EXTRA.get(name, ())]:
                if (text := json.dumps(value)) not in seen and (
                    name not in written or value != written[name]
                ):
                    seen.append(text)
                    yield name, value


def derived(single: Sequence[tuple[str, Any]]) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Yield pairs of mutations: a field is left out, and one that may decide in its place is changed."""
    for source, words in SOURCES.items():
        if (source, ABSENT) in single:
            for name, value in single:
                if name != source and any(word in name for word in words):
                    yield (source, ABSENT), (name, value)


def inputs_of(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return one batch as the reference takes it, and as clearhead does."""
    config = model.config
    if config.model_type == "vit":
        pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": pixels}, {"ids": pixels}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 39, (2, 45), generator=generator)
    if config.model_type == "whisper":
        frames = torch.randn(2, 2 * config.max_source_positions, config.num_mel_bins, generator=generator)
        theirs = {"input_features": frames.transpose(1, 2), "decoder_input_ids": ids}
        return theirs, {"ids": ids, "source": frames}
    if config.model_type == "llava":
        pixels = torch.randn(2, 3, 28, 28, generator=generator)
        ids = torch.cat([ids[:, :3], torch.full((2, 49), 60), ids[:, 3:9]], dim=1)
        return {"input_ids": ids, "pixel_values": pixels}, {"ids": ids, "pixels": pixels}
    if config.model_type == "idefics3":
        pixels = torch.randn(2, 3, 32, 32, generator=generator)
        ids = torch.cat([ids[:, :3], torch.full((2, 16), 60), ids[:, 3:9]], dim=1)
        return {"input_ids": ids, "pixel_values": pixels[:, None]}, {"ids": ids, "pixels": pixels}
    if config.model_type == "qwen2_5_vl":  # images of 2 x 3 squares of 2 x 2 patches of 4 x 4 pixels
        pixels = torch.randn(2, 3, 16, 24, generator=generator)
        ids = torch.cat([ids[:, :3], torch.full((2, 6), 60), ids[:, 3:9]], dim=1)
        cut = pixels.view(2, 3, 2, 2, 4, 3, 2, 4).permute(0, 2, 5, 3, 6, 1, 4, 7)
        patches = cut[:, :, :, :, :, :, None].expand(-1, -1, -1, -1, -1, -1, 2, -1, -1).reshape(48, -1)
        theirs = {"input_ids": ids, "pixel_values": patches, "mm_token_type_ids": (ids == 60).int()}
        axes = torch.stack([prompt_axes(row, 60, [(2, 3)]) for row in ids.tolist()])
        mine = {"ids": ids, "pixels": pixels, "axes": axes}
        return {**theirs, "image_grid_thw": torch.tensor([[1, 4, 6]] * 2)}, mine
    if config.is_encoder_decoder:
        source = torch.randint(3, 39, (2, 40), generator=generator)
        return {"input_ids": source, "decoder_input_ids": ids}, {"ids": ids, "source": source}
    return {"input_ids": ids}, {"ids": ids}


def prepare(subject: Subject, folder: Path) -> Any:
    """Save a random model of this kind, and return it."""
    config = harness.config_of(subject.kind, subject.options)
    maker = seq2seq.reference if config.is_encoder_decoder else harness.reference
    return maker(subject.model, config, folder)


def judge(
    folder: Path, subject: Subject, inputs: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> tuple[str, str]:
    """Open a folder on both sides; return the verdict, and why."""
    try:
        reference, info = getattr(transformers, subject.model).from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
        )
        if info["missing_keys"] or info["mismatched_keys"]:
            return "reference", "weights missing"
        with torch.no_grad():
            wanted = said(reference.eval()(**inputs[0]))
        if not wanted.isfinite().all():
            return "reference", "not finite"
    except Exception as error:  # whatever the reference says to a broken file
        return "reference", first_line(error)
    try:
        ours = ch.load(folder)
        with torch.no_grad():
            found = answer(ours, **inputs[1])
    except ClearheadError as error:
        return "refused", str(error)
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    if found.shape != wanted.shape:
        return "silent", f"shape {tuple(found.shape)} for {tuple(wanted.shape)}"
    gap = float((found - wanted).abs().max() / max(1.0, float(wanted.abs().max())))
    return ("equal", "") if gap <= TOLERANCE else ("silent", f"off by {gap:.1e}")


def answer(m: ch.Model, ids: Tensor, pixels: Tensor | None = None, **more: Tensor) -> Tensor:
    """Return clearhead's logits, of images among the tokens too."""
    if pixels is not None and m.image_encoder is not None:
        front, token = m.model.float().main.embedding.front, m.image_encoder.config.token_id
        more["vectors"] = placed(front, ids, token, m.image_encoder.float()(pixels))
    return m.model.float()(ids, **more).logits


def add_section(folder: Path) -> None:
    """Save the model of a folder again, with a field that only a section of our own can express."""
    ours = ch.load(folder)
    model = ch.Transformer(ours.config.replace(layer_drop=0.125))
    model.load_state_dict(ours.model.state_dict())
    ch.Model(model).save(folder)


def run(
    name: str,
    folder: Path,
    share: float = 1.0,
    fields: Sequence[str] = (),
    pairs: int = 0,
    seed: int = 0,
    section: bool = False,
) -> Iterator[dict[str, Any]]:
    """Judge a share of the mutations of one subject, all those of some fields, and random pairs."""
    subject = SUBJECTS[name]
    model = prepare(subject, folder)
    if section:
        add_section(folder)
    inputs, path = inputs_of(model), folder / "config.json"
    written = json.loads(path.read_text())
    assert ("clearhead" in written) == section
    draw = random.Random(f"{seed} {name}")
    single = [mutation for mutation in mutations(written, model.config) if mutation[0] != "clearhead"]
    chosen = [(one,) for one in single if draw.random() < share or one[0] in fields]
    follow = [pair for pair in derived(single) if draw.random() < share or pair[1][0] in fields]
    for changes in [*chosen, *follow, *(draw.sample(single, 2) for _ in range(pairs))]:
        changed = {key: value for key, value in {**written, **dict(changes)}.items() if value is not ABSENT}
        path.write_text(json.dumps(changed))
        verdict, why = judge(folder, subject, inputs)
        stated = {key: "absent" if value is ABSENT else value for key, value in changes}
        yield {"subject": name, "changes": stated, "verdict": verdict, "why": why}


def first_line(error: BaseException) -> str:
    """Return what an error says, cut to one short line."""
    return str(error).strip().splitlines()[0][:100] if str(error).strip() else type(error).__name__


VERDICTS = ("equal", "refused", "reference", "raw", "silent")


def report(rows: Sequence[dict[str, Any]], out: Path | None = None) -> None:
    """Print the verdicts of each subject as a table, then what is silent or raw; save the table as JSON."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row["subject"], Counter())[row["verdict"]] += 1
    counts["all"] = sum(counts.values(), Counter())
    print(f"{'subject':<32}{'cases':>8}" + "".join(f"{verdict:>11}" for verdict in VERDICTS))
    for name, found in counts.items():
        print(f"{name:<32}{found.total():>8}" + "".join(f"{found[verdict]:>11}" for verdict in VERDICTS))
    wrong = [row for row in rows if row["verdict"] in ("silent", "raw")]
    for row in wrong:
        print(f"{row['subject']}: {row['verdict']} {json.dumps(row['changes'])}: {row['why']}")
    if out is not None:
        table = {
            name: {"cases": found.total(), **{v: found[v] for v in VERDICTS}}
            for name, found in counts.items()
        }
        out.write_text(json.dumps({"subjects": table, "wrong": wrong}, indent=1) + "\n")


def main() -> None:
    """Judge mutations and print those that are silent or raw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=SUBJECTS, help="these subjects")
    parser.add_argument("--share", type=float, default=1.0, help="of the mutations of one field, judge this")
    parser.add_argument("--fields", nargs="*", default=(), help="judge all mutations of these fields")
    parser.add_argument("--section", action="store_true", help="let clearhead write the file first")
    parser.add_argument("--pairs", type=int, default=0, help="judge so many pairs of mutations as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the table of verdicts as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    for name in options.only or SUBJECTS:
        with tempfile.TemporaryDirectory() as folder:
            sizes = (options.share, options.fields, options.pairs, options.seed, options.section)
            rows += run(name, Path(folder), *sizes)
    report(rows, options.out)


if __name__ == "__main__":
    main()
