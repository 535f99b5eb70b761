"""Small models that read images, LLaVA's and Idefics3's kinds, of random weights; directories as released."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.parity.harness import reference

TEXT = {
    **{"vocab_size": 311, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 300,
    },
    **{"eos_token_id": None, "pad_token_id": 301},
}
IMAGE = {
    **{"hidden_size": 20, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"image_size": 16, "patch_size": 4},
}
TOKEN = 302
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Llama and CLIP": (dict(TEXT, model_type="llama"), dict(IMAGE, model_type="clip_vision_model"), {}),
    "Qwen2 and SigLIP, three layers, patches that leave a rest": (
        dict(TEXT, model_type="qwen2", tie_word_embeddings=True, hidden_size=28, num_attention_heads=7)
        | {"num_key_value_heads": 1},
        dict(IMAGE, model_type="siglip_vision_model", image_size=23, patch_size=5),
        {
            "vision_feature_layer": [0, -1, 2],
            "projector_hidden_act": "relu",
            "multimodal_projector_bias": False,
        },
    ),
    "Mistral and CLIP, one channel, the last layer with its class token": (
        dict(TEXT, model_type="mistral", sliding_window=7, head_dim=10),
        dict(IMAGE, model_type="clip_vision_model", num_channels=1, hidden_act="gelu"),
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
}
TILED = {"image_size": 16, "num_channels": 3, "patch_size": 4}
IDEFICS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Idefics3 of Llama, squares of two": (dict(TEXT, model_type="llama"), IMAGE | TILED, {"scale_factor": 2}),
    "Idefics3 of Qwen2, tied, squares of three, patches that leave a rest": (
        dict(TEXT, model_type="qwen2", tie_word_embeddings=True, hidden_size=28, num_attention_heads=7)
        | {"num_key_value_heads": 1},
        dict(IMAGE, image_size=47, patch_size=5, hidden_act="gelu", layer_norm_eps=1e-4),
        {"scale_factor": 3, "tie_word_embeddings": True},
    ),
    "SmolVLM, one channel, each patch alone": (
        dict(TEXT, model_type="llama", head_dim=10, attention_bias=True),
        dict(IMAGE, num_channels=1),
        {"scale_factor": 1},
    ),
}
# As llava-hf/llava-1.5-7b-hf has it.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


# Qwen2.5-VL: positions on three axes, and images of any size.

QWEN_IMAGE = {
    **{"depth": 3, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "patch_size": 4},
    **{"window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 24},
}


def rotary(*sections: int, **more: Any) -> dict[str, Any]:
    """Return rope_parameters with these pairs of time, height and width."""
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}


QWEN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-VL, windows of two squares a side": (
        dict(TEXT, rope_parameters=rotary(1, 1, 1)),
        QWEN_IMAGE,
        {},
    ),
    "Qwen2.5-VL, tied, yarn, grey, one frame, squares of three, windows alone": (
        dict(TEXT, hidden_size=36, num_attention_heads=3, num_key_value_heads=1)
        | {
            "rope_parameters": rotary(
                *(1, 3, 2), rope_type="yarn", factor=4.0, original_max_position_embeddings=64
            )
        },
        dict(QWEN_IMAGE, in_channels=1, temporal_patch_size=1, spatial_merge_size=3, patch_size=5)
        | {"window_size": 17, "out_hidden_size": 36, "depth": 2, "fullatt_block_indexes": []},
        {"tie_word_embeddings": True},
    ),
    "Qwen2.5-VL, a sliding window in the decoder, none in the tower": (
        dict(TEXT, use_sliding_window=True, sliding_window=7, max_window_layers=1)
        | {"rope_parameters": rotary(1, 1, 1)},
        dict(QWEN_IMAGE, fullatt_block_indexes=[0, 1, 2], hidden_act="gelu", num_heads=4),
        {},
    ),
}


def build(label: str, folder: pathlib.Path, seed: int = 0) -> Any:
    """Save a random model, and return it."""
    text, image, joint = (OPTIONS | IDEFICS | QWEN)[label]
    if label in QWEN:
        config = transformers.Qwen2_5_VLConfig(
            text_config=dict(text), vision_config=dict(image), image_token_id=TOKEN, **joint
        )
        return reference("Qwen2_5_VLForConditionalGeneration", config, folder, seed)
    if label in IDEFICS:
        kind = label.split()[0].rstrip(",")
        config = getattr(transformers, f"{kind}Config")(
            text_config=text, vision_config=image, image_token_id=TOKEN, **joint
        )
        return reference(f"{kind}ForConditionalGeneration", config, folder, seed)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=image, image_token_index=TOKEN, image_seq_length=16, **joint
    )
    return reference("LlavaForConditionalGeneration", config, folder, seed)


def tokenizer(*special: str, template: str = TEMPLATE) -> Any:
    """Return a tokenizer of bytes with these special tokens, the last one of the id `TOKEN`."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    bytewise = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(sorted(letters))}, merges=[]))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    spare = TOKEN + 1 - len(letters) - len(special) - 2
    extra = [f"<extra_{n}>" for n in range(spare)]
    bytewise.add_special_tokens([*extra, *special[:-1], "<s>", "<pad>", special[-1]])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, bos_token="<s>", pad_token="<pad>", chat_template=template
    )
    assert fast.convert_tokens_to_ids(special[-1]) == TOKEN
    return fast


def directory(folder: pathlib.Path) -> pathlib.Path:
    """Save a random LLaVA with a tokenizer of bytes, a chat template and image settings."""
    build("Llama and CLIP", folder)
    settings = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    transformers.LlavaProcessor(
        settings,
        tokenizer("<image>"),
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


def tiled_directory(folder: pathlib.Path) -> pathlib.Path:
    """Save a random Idefics3 in the same way; its images are cut into tiles of 16 pixels, three at most."""
    build("Idefics3 of Llama, squares of two", folder)
    settings = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 48}, max_image_size={"longest_edge": 16}
    )
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
    marks = ("<fake_token_around_image>", "<global-img>", *tiles)
    fast = tokenizer(*marks, "<end_of_utterance>", "<image>")
    transformers.Idefics3Processor(settings, fast, image_seq_len=4, chat_template=TEMPLATE).save_pretrained(
        folder
    )
    return folder


PICTURED = "<|vision_start|><|image_pad|><|vision_end|>"


def sized_directory(folder: pathlib.Path) -> pathlib.Path:
    """Save a random Qwen2.5-VL in the same way; its images have 4 to 24 squares of 8 pixels a side."""
    build(next(iter(QWEN)), folder)
    template = TEMPLATE.replace("<image>\n", PICTURED)
    marks = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|image_pad|>")
    tokenizer(*marks, template=template).save_pretrained(folder)
    processor(min_pixels=256, max_pixels=24 * 64).save_pretrained(folder)
    return folder


def processor(**changes: Any) -> Any:
    """Return the reference's image processor of Qwen2.5-VL, for patches of 4 pixels."""
    return transformers.Qwen2VLImageProcessorPil(**{"patch_size": 4, **changes})


def image(seed: int, height: int = 20, width: int = 31) -> np.ndarray[Any, Any]:
    """Return random bytes as an image."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def tensors(label: str, count: int, seed: int = 1) -> torch.Tensor:
    """Return pixels of images for a model of `OPTIONS`."""
    seen = (OPTIONS | IDEFICS)[label][1]
    shape = (count, seen.get("num_channels", 3), seen["image_size"], seen["image_size"])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
