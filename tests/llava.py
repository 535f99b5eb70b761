"""Small models of LLaVA's kind, with random weights, and directories as released ones are."""

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


def build(label: str, folder: pathlib.Path, seed: int = 0) -> Any:
    """Save a random model, and return it."""
    text, image, joint = OPTIONS[label]
    config = transformers.LlavaConfig(
        text_config=text, vision_config=image, image_token_index=TOKEN, image_seq_length=16, **joint
    )
    return reference("LlavaForConditionalGeneration", config, folder, seed)


def directory(folder: pathlib.Path) -> pathlib.Path:
    """Save a random model with a tokenizer of bytes, a chat template and image settings."""
    build("Llama and CLIP", folder)
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: n for n, letter in enumerate(sorted(letters))}, merges=[])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<extra_{n}>" for n in range(256, 300)] + ["<s>", "<pad>", "<image>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", chat_template=TEMPLATE
    )
    assert fast.convert_tokens_to_ids("<image>") == TOKEN
    settings = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    transformers.LlavaProcessor(
        settings,
        fast,
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


def image(seed: int, height: int = 20, width: int = 31) -> np.ndarray[Any, Any]:
    """Return random bytes as an image."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def tensors(label: str, count: int, seed: int = 1) -> torch.Tensor:
    """Return pixels of images for a model of `OPTIONS`."""
    seen = OPTIONS[label][1]
    shape = (count, seen.get("num_channels", 3), seen["image_size"], seen["image_size"])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
