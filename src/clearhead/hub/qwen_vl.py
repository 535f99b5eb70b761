"""Qwen2.5-VL: Qwen 2 with positions on three axes, and an image tower that reads images of any size.

The tower's input is patches of two frames, an image twice; a convolution over them is a linear layer. Patches
rotate by row and column. Most layers see windows: blocks of positions, which `ImageEncoder` counts so.
"""

import math
from dataclasses import replace

from clearhead.core.config import MOST_LAYERS, ModelConfig
from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import WHOLE_HEADS, ConfigPart, Json, fixed, keys, sliding_windows
from clearhead.hub.files import refuse_key
from clearhead.hub.llama import llama_like, shape
from clearhead.hub.rope import rope
from clearhead.hub.rules import Rule, joined, reshaped, same, stack_rules
from clearhead.hub.vision import FRONT, SECTIONS
from clearhead.hub.vision_language import ALIAS, ImagesTable
from clearhead.variants.images import ImageConfig
from clearhead.variants.kinds import Blocks

# The decoder ------------------------------------------------------------------------------------------------

SECTION_KEY, AXES = "mrope_section", 3  # time, height, width
PLAIN = rope(1_000_000.0, kinds=("linear", "llama3", "yarn"))


def _read_rope(theirs: Json) -> Json:
    stated = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    kind = stated.get("rope_type", stated.get("type"))
    plain = {**stated, "rope_type": "default" if kind == "mrope" else kind}
    values = PLAIN.read({**theirs, "rope_scaling": None, "rope_parameters": plain})
    sections = stated.get(SECTION_KEY, [16, 24, 24])
    whole = isinstance(sections, list) and len(sections) == AXES and all(type(n) is int for n in sections)
    refuse_key(
        not whole, SECTION_KEY, sections, "it must be three whole numbers: pairs by time, height, width"
    )
    return {**values, "rope_sections": tuple(sections)}


def _write_rope(config: ModelConfig) -> Json:
    written = PLAIN.write(config)
    parameters = {**written["rope_parameters"], SECTION_KEY: list(config.rope_sections)}
    return {**written, "rope_parameters": parameters, "rope_scaling": parameters}


QWEN2_5_VL_TEXT = replace(
    llama_like(
        "qwen2_5_vl_text",
        {"Qwen2_5_VLTextForCausalLM": {"head": "lm"}, "Qwen2_5_VLTextModel": {"head": "none"}},
        *shape(d_model=8192, d_ff=29568, n_layers=80, n_heads=64, n_kv_heads=8, norm_eps=1e-5),
        *keys(vocab_size=152064, max_positions=32768),
        WHOLE_HEADS,
        fixed({"qkv_bias": True}),
        ConfigPart(_read_rope, _write_rope),
        sliding_windows(default=4096, switch="use_sliding_window", full_below="max_window_layers", below=80),
    ),
    named=True,
)

# The image tower --------------------------------------------------------------------------------------------

FULL, WIDTH = "full", 3584


def _read_tower(theirs: Json) -> Json:
    """Return the width of a patch and the attention of each layer: full, or a window of so many patches."""
    numbers = {
        key: theirs.get(key, usual)
        for key, usual in (
            *(("in_channels", 3), ("patch_size", 14), ("temporal_patch_size", 2)),
            *(("spatial_merge_size", 2), ("window_size", 112)),
        )
    }
    for key, value in numbers.items():
        refuse_key(type(value) is not int or value < 1, key, value, "it must be one number, 1 or more")
    channels, patch, frames, merge, window = numbers.values()
    side = window // merge // patch * merge  # patches
    whole, layers = theirs.get("fullatt_block_indexes", (7, 15, 23, 31)), theirs.get("depth", 32)
    refuse_key(layers > MOST_LAYERS, "depth", layers, f"{MOST_LAYERS:,} is the most")
    few = side < 1 and not {*range(layers)} <= {*whole}
    refuse_key(few, "window_size", window, "it must hold a square of patches that are joined")
    near = str(Blocks(max(1, side) ** 2, window=1))
    pairs = theirs.get("hidden_size", WIDTH) // theirs.get("num_heads", 16) // 4
    stated = theirs.get("rope_parameters") or {}
    kind = stated.get("rope_type", "axial")
    refuse_key(kind != "axial", "rope_type", kind, "only axial is supported in the image tower")
    return {
        **{"n_channels": channels, "patch_size": patch, "d_input": channels * frames * patch**2},
        "attention": tuple(FULL if layer in whole else near for layer in range(layers)),
        "rope_sections": (pairs, pairs),
        "rope_base": float(stated.get("rope_theta") or theirs.get("rope_theta") or 10_000.0),
    }


def _write_tower(config: ModelConfig) -> Json:
    kinds, squared = config.main.kinds, config.patch_size**2
    side = next((math.isqrt(kind.size) for kind in kinds if isinstance(kind, Blocks)), 8)
    return {
        **{"in_channels": config.n_channels, "patch_size": config.patch_size},
        "temporal_patch_size": config.d_input // (config.n_channels * squared),
        "window_size": side * config.patch_size,
        "spatial_merge_size": 1,  # of the tower alone: `_write_joint` says what follows
        "fullatt_block_indexes": [layer for layer, kind in enumerate(kinds) if str(kind) == FULL],
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_base},
    }


BLOCK = "encoder.blocks.{i}"


def image_tower() -> Architecture:
    """Return the table of the tower; it ends with the norm of what joins patches."""
    return Architecture(
        model_type="qwen2_5_vl_vision",
        classes={"Qwen2_5_VisionTransformerPretrainedModel": {"head": "none"}},
        prefix="visual.",
        config=(
            fixed({"family": "encoder", "input": "vectors", "patch_bias": False, "init": "bert"}),
            fixed({"positions": "rope", "rope_axial": True, "norm_position": "pre"}),
            fixed({"norm": "rmsnorm", "norm_eps": 1e-6, "gated": True}),
            fixed(only={"head_dim": None, "num_attention_heads": None, "in_chans": 3}),
            *keys({"n_layers": "depth", "n_heads": "num_heads"}, n_layers=32, n_heads=16, d_model=WIDTH),
            *keys(d_ff=3420, activation="silu", init_std=0.02),
            ConfigPart(_read_tower, _write_tower),
        ),
        rules=(
            Rule(
                "visual.patch_embed.proj.weight",
                (f"{FRONT}.project.weight",),
                reshaped(lambda config: (config.d_model, config.n_channels, -1, *(config.patch_size,) * 2)),
            ),
            *joined("visual.blocks.{i}.attn.qkv", [f"{BLOCK}.attention.{x}" for x in "qkv"]),
            *stack_rules(
                "encoder",
                "visual.blocks.{i}",
                **{"out": "attn.proj", "gated": "mlp.{gate,up,down}_proj", "pre_norms": "norm{1,2}"},
                norm="visual.merger.ln_q",
            ),
        ),
        named=True,
    )


# Both -------------------------------------------------------------------------------------------------------


def _read_joint(theirs: Json, model: ModelConfig, image: Json) -> Json:
    merge, width = image.get("spatial_merge_size", 2), image.get("out_hidden_size", WIDTH)
    key = "vision_config.out_hidden_size"
    refuse_key(width != model.d_model, key, width, f"it must be the decoder's hidden_size {model.d_model}")
    square = image.get("hidden_size", WIDTH) * merge**2
    return {"layers": (), "skip_first": False, "shuffle": merge, "hidden": square, "any_size": True}


def _write_joint(config: ImageConfig) -> Json:
    joint = {"spatial_merge_size": config.shuffle, "out_hidden_size": config.width}
    return {ALIAS: config.token_id, SECTIONS["image"]: joint}


QWEN2_5_VL = ImagesTable(
    model_type="qwen2_5_vl",
    named="Qwen2_5_VLForConditionalGeneration",
    texts=dict.fromkeys(("qwen2_5_vl_text", "qwen2_5_vl"), QWEN2_5_VL_TEXT),
    towers=dict.fromkeys(("qwen2_5_vl_vision", "qwen2_5_vl"), image_tower()),
    image_section=lambda stated: stated or {},
    read_joint=_read_joint,
    write_joint=_write_joint,
    processor=lambda config, token: {"processor_class": "Qwen2_5_VLProcessor"},
    rules=same({"merger.mlp.{0,2}": "{up,down}"}),
    places=(  # newer files, and those of the release
        (r"(?=lm_head\.)", "text", ""),
        (r"(model\.)?language_model\.", "text", "model."),
        (r"(model\.)?visual\.(?=merger\.mlp\.)", "joint", ""),
        (r"(model\.)?visual\.", "image", "visual."),
        (r"model\.", "text", "model."),
    ),
    written=(
        ("text", "model.", "model.language_model."),
        ("image", "", "model.visual."),
        ("joint", "", "model.visual."),
    ),
    flat=True,
)
