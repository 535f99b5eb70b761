"""Decoders that read images: LLaVA, Idefics3, SmolVLM and Qwen2.5-VL.

Each is a decoder, an image tower, and linear layers that make tokens of what the tower saw. Decoder and tower
are read and written by their own tables; here is how one config.json and one set of tensors hold both.

Qwen2.5-VL is Qwen 2 with positions on three axes, and reads images of any size. The tower's input is patches
of two frames, an image twice; a convolution over them is a linear layer. Patches rotate by row and column.
Most layers see windows: blocks of positions, which `ImageEncoder` counts so.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from clearhead.core.config import MOST_LAYERS, ModelConfig
from clearhead.errors import CheckpointError
from clearhead.hub import llama, vision
from clearhead.hub.architecture import QUANTIZATION, Architecture, reading_config
from clearhead.hub.fields import ACTIVATIONS, WHOLE_HEADS, ConfigPart, Json, fixed, keys, sliding_windows
from clearhead.hub.files import refuse, refuse_key
from clearhead.hub.llama import llama_like, shape
from clearhead.hub.rope import rope
from clearhead.hub.rules import Rule, joined, reshaped, same, stack_rules
from clearhead.hub.vision import FRONT, SECTIONS, Tower
from clearhead.hub.weights import Entry
from clearhead.variants.images import ImageConfig
from clearhead.variants.kinds import Blocks

Owner = Tower | str  # "text", "image", or "joint" for neither


@dataclass(frozen=True)
class ImagesTable:
    """Data alone: the architectures that the decoder and the tower may have, and the tensors of neither."""

    model_type: str
    named: str  # the class of its checkpoints
    texts: Mapping[str, Architecture]  # by model_type; the first is that of a config.json that names none
    towers: Mapping[str, Architecture]
    image_section: Callable[[Json | None], Json]  # what config.json states of the tower, with its defaults
    read_joint: Callable[[Json, ModelConfig, Json], Json]  # config.json -> fields of ImageConfig
    write_joint: Callable[[ImageConfig], Json]  # further keys of config.json
    processor: Callable[[ImageConfig, str | None], Json]  # processor_config.json, given the image token
    rules: tuple[Rule, ...]
    owners: tuple[tuple[str, Owner, str], ...]  # how names begin, whose tensor that is, and its own name
    written: tuple[tuple[Owner, str, str], ...]  # how own names begin, and how they do in the file
    prompt: Callable[[int, int, int], str] | None = (
        None  # tokens of an image cut into rows x columns of tiles
    )
    flat: bool = False  # a config.json without a section of the decoder states it at its top

    def section(self, theirs: Json, name: Tower) -> Json:
        """Return the part of a config.json that is about the decoder or the tower, as if it were alone."""
        stated, tables = theirs.get(SECTIONS[name]), self.texts if name == "text" else self.towers
        refuse(
            not isinstance(stated, dict | None),
            f"config.json has a {SECTIONS[name]} that is no table of fields",
        )
        if name == "text" and stated is None and self.flat:
            apart = (*SECTIONS.values(), "model_type", "architectures")
            stated = {key: value for key, value in theirs.items() if key not in apart}
        stated = self.image_section(stated) if name == "image" else stated or {}
        kind = stated.get("model_type", next(iter(tables)))
        key = f"{SECTIONS[name]}.model_type"
        refuse_key(kind not in tables, key, kind, f"supported in {self.model_type} are {', '.join(tables)}")
        own: Json = {"model_type": tables[kind].model_type, "architectures": list(tables[kind].classes)[:1]}
        if name == "text" and theirs.get("tie_word_embeddings"):
            own["tie_word_embeddings"] = True
        without = ("vision_use_head",) if name == "image" else ()  # states are read, and no pooled vector
        return {**{key: value for key, value in stated.items() if key not in without}, **own}

    def read(self, theirs: Json) -> tuple[ModelConfig, ImageConfig]:
        """Return the configs of the decoder and of the image encoder, from a config.json."""
        stated = (theirs.get("architectures") or [self.named])[0]
        known = f"supported for {self.model_type} is {self.named}"
        refuse(stated != self.named, f'config.json names the class "{stated}": {known}')
        packed = theirs.get(QUANTIZATION)
        refuse_key(
            packed, QUANTIZATION, packed, "weights of a model that reads images must be floating point"
        )
        text, image = (self.section(theirs, name) for name in SECTIONS)
        texts, towers = (
            {kind.model_type: kind for kind in tables.values()} for tables in (self.texts, self.towers)
        )
        with reading_config():
            model = texts[text["model_type"]].read(text)
            tower = towers[image["model_type"]].read(image)
            joint = {"token_id": image_token(theirs, model), **self.read_joint(theirs, model, image)}
            return model, ImageConfig(tower=tower, width=model.d_model, **joint)

    def write(self, text: Json, model: ModelConfig, config: ImageConfig) -> Json | None:
        """Return the config.json of a decoder, whose own is `text`, with such an image encoder; or None."""
        towers = ((kind, one) for kind, one in self.towers.items() if one.differences(config.tower) == [])
        kind, tower = next(towers, ("", None))
        if tower is None:
            return None
        height, width = config.frame or (0, 0)
        side = {"model_type": kind, "image_size": height if height == width else [height, width]}
        if config.any_size:
            del side["image_size"]
        joint = self.write_joint(config)
        of_tower = {**(tower.write(config.tower) or {}), **side, **joint.pop(SECTIONS["image"], {})}
        sections = {"text_config": text, "vision_config": of_tower}
        theirs = {
            "architectures": [self.named],
            "model_type": self.model_type,
            **{
                name: {k: v for k, v in part.items() if k != "architectures"}
                for name, part in sections.items()
            },
            **joint,
            "tie_word_embeddings": model.tie_embeddings,
        }
        try:
            return theirs if self.read(theirs) == (model, config) else None
        except CheckpointError:
            return None

    def tensors(self, entries: Mapping[str, Entry], folder: Path) -> dict[str, dict[str, Entry]]:
        """Return the tensors of a file, under their own names, by where they belong; "joint" for neither."""
        found: dict[str, dict[str, Entry]] = {"text": {}, "image": {}, "joint": {}}
        for name, entry in entries.items():
            for beginning, owner, own in self.owners:
                if match := re.match(beginning, name):
                    found[owner][own + name[match.end() :]] = entry
                    break
            else:
                raise CheckpointError(f"{folder}: no rule of {self.model_type} reads the tensor {name}")
        return found

    def name_in_file(self, owner: Owner, own: str) -> str:
        """Return the name of a tensor in a file that we write."""
        prefixes = (
            (start, new) for where, start, new in self.written if where == owner and own.startswith(start)
        )
        start, new = next(prefixes, ("", ""))
        return new + own[len(start) :]


# Others scale what the table of tokens gives, or logits, elsewhere than transformers does it here.
TEXTS = {table.model_type: table for table in (llama.LLAMA, llama.MISTRAL, llama.QWEN2, llama.QWEN3)}
TOKEN, ALIAS = "image_token_index", "image_token_id"


def image_token(theirs: Json, model: ModelConfig) -> int:
    """Return the id of the token at whose positions images stand."""
    usual = {"llava": 32000, "qwen2_5_vl": 151655}.get(theirs.get("model_type", ""), 128257)
    token = theirs.get(ALIAS, theirs.get(TOKEN, usual))
    refuse_key(theirs.get(TOKEN, token) != token, TOKEN, theirs.get(TOKEN), f"and {ALIAS} is {token}")
    among = type(token) is int and 0 <= token < model.vocab_size
    refuse_key(not among, TOKEN, token, f"it must be an id of the vocabulary, 0 to {model.vocab_size - 1}")
    assert isinstance(token, int)
    return token


# LLaVA: `vision_feature_layer` and `vision_feature_select_strategy` say which states of the tower are read. -

LARGE: Json = {  # the tower of a config.json that states none
    **{"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14},
    **{"image_size": 336, "num_hidden_layers": 24, "num_attention_heads": 16},
}
STRATEGIES = {"default": True, "full": False}  # whether the first state of an image is left out


def _read_llava(theirs: Json, model: ModelConfig, image: Json) -> Json:
    layer, bias = theirs.get("vision_feature_layer", -2), theirs.get("multimodal_projector_bias", True)
    how = theirs.get("vision_feature_select_strategy", "default")
    act = theirs.get("projector_hidden_act", "gelu")
    for key, value, known in (
        ("vision_feature_select_strategy", how, STRATEGIES),
        ("projector_hidden_act", act, ACTIVATIONS),
        ("multimodal_projector_bias", bias, (True, False)),
    ):
        refuse_key(value not in known, key, value, f"choose from {', '.join(map(str, known))}")
    layers = layer if isinstance(layer, list) else [layer]
    whole = bool(layers) and all(type(number) is int for number in layers)
    refuse_key(not whole, "vision_feature_layer", layer, "it must be a whole number, or several")
    side = image.get("image_size", 224)
    return {
        **{"layers": tuple(layers), "skip_first": STRATEGIES[how], "bias": bool(bias)},
        "activation": ACTIVATIONS[act],
        "frame": (side, side) if isinstance(side, int) else tuple(side),
    }


def _write_llava(config: ImageConfig) -> Json:
    return {
        TOKEN: config.token_id,
        "image_seq_length": config.count,
        "vision_feature_layer": config.layers[0] if len(config.layers) == 1 else list(config.layers),
        "vision_feature_select_strategy": "default" if config.skip_first else "full",
        "projector_hidden_act": next(
            (act for act, ours in ACTIVATIONS.items() if ours == config.activation), None
        ),
        "multimodal_projector_bias": config.bias,
    }


def _llava_processor(config: ImageConfig, token: str | None) -> Json:
    return {
        "processor_class": "LlavaProcessor",
        "patch_size": config.tower.patch_size,
        "num_additional_image_tokens": int(config.tower.class_token),
        "vision_feature_select_strategy": "default" if config.skip_first else "full",
        **({} if token is None else {"image_token": token}),
    }


LLAVA = ImagesTable(
    model_type="llava",
    named="LlavaForConditionalGeneration",
    texts=TEXTS,
    towers={table.model_type: table for table in (vision.CLIP.image, vision.SIGLIP.image)},
    image_section=lambda stated: LARGE if stated is None else stated,
    read_joint=_read_llava,
    write_joint=_write_llava,
    processor=_llava_processor,
    rules=same({"multi_modal_projector.linear_{1,2}": "{up,down}"}),
    owners=(  # as they were written first, and as newer files have them
        (r"(model\.)?language_model\.(model\.)?(?=lm_head\.)|(?=lm_head\.)", "text", ""),
        (r"(model\.)?language_model\.(model\.)?", "text", "model."),
        (r"(model\.)?vision_tower\.(vision_model\.)?", "image", vision.PREFIXES["image"]),
        (r"(model\.)?(?=multi_modal_projector\.)", "joint", ""),
    ),
    written=(("text", "", "language_model."), ("image", "", "vision_tower.vision_model.")),
)

# Idefics3 and SmolVLM: SigLIP's tower to its end, squares of patches joined, one linear layer. An image is
# cut into tiles, and stands in the prompt with marks around it. ---------------------------------------------

IDEFICS: Json = {  # what a vision_config leaves out
    **{"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16},
    **{"patch_size": 32, "image_size": 224},
}
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


def _read_idefics(theirs: Json, model: ModelConfig, image: Json) -> Json:
    size, patch, factor = image["image_size"], image["patch_size"], theirs.get("scale_factor", 2)
    refuse_key(type(size) is not int, "vision_config.image_size", size, "it must be one number")
    refuse_key(type(factor) is not int or factor < 1, "scale_factor", factor, "it must be 1 or more")
    sides = size // patch
    # transformers finds the position of a patch by rounded fractions, which for some sides are another's.
    edges = torch.arange(1 / sides, 1.0, 1 / sides)
    fractions = (torch.arange(sides).float() * (1.0 / torch.tensor(sides))).clamp(max=1 - 1e-6)
    even = torch.bucketize(fractions, edges, right=True).tolist() == list(range(sides))
    refuse_key(
        not even,
        "vision_config.image_size",
        size,
        f"of {sides} patches a side the reference mixes up positions",
    )
    return {"layers": (), "skip_first": False, "shuffle": factor, "activation": None, "bias": False} | {
        "frame": (size, size)
    }


def _idefics_prompt(rows: int, columns: int, count: int) -> str:
    """Return the tokens of an image of rows x columns tiles and the whole; of none, of the whole alone."""
    tiles = "".join(
        "".join(f"{AROUND}<row_{row}_col_{column}>" + "<image>" * count for column in range(1, columns + 1))
        + "\n"
        for row in range(1, rows + 1)
    )
    return ("" if rows == 0 else tiles + "\n") + AROUND + WHOLE + "<image>" * count + AROUND


IDEFICS3 = ImagesTable(
    model_type="idefics3",
    named="Idefics3ForConditionalGeneration",
    texts=TEXTS,
    towers=dict.fromkeys(
        ("idefics3_vision", "idefics3", "smolvlm_vision", "siglip_vision_model"), vision.SIGLIP.image
    ),
    image_section=lambda stated: {**IDEFICS, **(stated or {})},
    read_joint=_read_idefics,
    write_joint=lambda config: {ALIAS: config.token_id, "scale_factor": config.shuffle},
    processor=lambda config, token: {"processor_class": "Idefics3Processor", "image_seq_len": config.count},
    rules=(Rule("connector.modality_projection.proj.weight", ("down.weight",)),),
    owners=(
        (r"(?=lm_head\.)", "text", ""),
        (r"(model\.)?text_model\.", "text", "model."),
        (r"(model\.)?vision_model\.", "image", vision.PREFIXES["image"]),
        (r"(model\.)?(?=connector\.)", "joint", ""),
    ),
    written=(
        ("text", "model.", "model.text_model."),
        ("image", "", "model.vision_model."),
        ("joint", "", "model."),
    ),
    prompt=_idefics_prompt,
)
SMOLVLM = replace(
    IDEFICS3,
    model_type="smolvlm",
    named="SmolVLMForConditionalGeneration",
    processor=lambda config, token: {"processor_class": "SmolVLMProcessor", "image_seq_len": config.count},
)


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
    owners=(  # newer files, and those of the release
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
