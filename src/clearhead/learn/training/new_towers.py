"""Two towers from nothing, as CLIP or SigLIP: sizes and a tokenizer that fit captioned pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from clearhead.core.config import ModelConfig
from clearhead.errors import refuse
from clearhead.hub.preprocessor import read_image
from clearhead.hub.tokenizer import encode
from clearhead.hub.tokens import TokensPlan
from clearhead.hub.tokens.training import SpecialTokens, train_tokenizer
from clearhead.hub.towers import JoinedTowers
from clearhead.run.api import Model
from clearhead.variants.towers import TowersConfig

KINDS = ("clip", "siglip")
CAPTION = SpecialTokens({"pad": "<pad>", "eos": "</s>"}, "$A </s>", "$A </s> $B </s>")
LONGEST_TEXT, LARGEST_IMAGE, SMALL_IMAGE = 64, 224, 64  # tokens; pixels of a side
IMAGE_LAYERS = 2  # for each layer of texts, which are simpler


def new_towers(
    kind: str,
    captions: Sequence[str],
    picture: Path,
    d_model: int = 128,
    n_layers: int = 2,
    n_heads: int = 4,
    seed: int = 0,
) -> Model:
    """Return a model with random weights and a tokenizer of the captions; transformers opens what it saves.

    Args:
        kind: "clip" or "siglip".
        captions: texts, for the vocabulary and the longest length.
        picture: one of the images: its shorter side is that of all, 224 pixels at most.
        d_model: width of both towers and of the common space.
        n_layers: of the text tower; the image tower has twice as many.
        n_heads: of both.
        seed: of the weights.
    """
    refuse(kind not in KINDS, f'a new model is "clip" or "siglip", not "{kind}"')
    size = sum(len(caption.encode()) for caption in captions)
    tokenizer = train_tokenizer(captions, TokensPlan(kind="bpe", lowercase=True), CAPTION, size)
    known = tokenizer.get_vocab()
    special = {role: known[token] for role, token in CAPTION.tokens.items()}
    length = min(max(map(len, encode(tokenizer, set(captions)))), LONGEST_TEXT)
    side = min(*read_image(picture, 3, str(picture)).shape[:2], LARGEST_IMAGE)
    patch = 4 if side <= SMALL_IMAGE else 16
    side -= side % patch
    refuse(side < patch, f"{picture} is smaller than {patch} pixels: give larger pictures")
    clip = kind == "clip"
    shape: dict[str, Any] = {"d_model": d_model, "n_heads": n_heads, "head": "none", "init": "bert"}
    patches: dict[str, Any] = {"class_token": clip, "patch_bias": not clip, "embedding_norm": clip}
    shape |= {"activation": "quick_gelu" if clip else "gelu_tanh", "norm_eps": 1e-5 if clip else 1e-6}
    text = ModelConfig(
        family="decoder" if clip else "encoder",
        vocab_size=tokenizer.get_vocab_size(),
        max_positions=length,
        n_layers=n_layers,
        **shape,
    )
    image = ModelConfig(
        family="encoder",
        input="patches",
        image_size=(side, side),
        patch_size=patch,
        **patches,
        max_positions=(side // patch) ** 2 + clip,
        n_layers=IMAGE_LAYERS * n_layers,
        **shape,
    )
    joint: dict[str, Any] = {"loss": "softmax", "end_id": special["eos"]}
    if not clip:
        joint = {"loss": "sigmoid", "pooling": "attention"}
        joint |= {"text_projection": "bias", "image_projection": "none"}
    torch.manual_seed(seed)
    towers = JoinedTowers(TowersConfig(text=text, image=image, width=d_model, **joint))
    images = towers.description.table.settings(towers.config)
    settings = {} if clip else {"model_input_names": ["input_ids"]}  # padding is read
    return Model(
        towers.text, tokenizer, special=special, settings=settings, images=images, towers=towers.eval()
    )
