"""Prompts with images: their tokens, their pixels, and the vectors that the model reads in their places."""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clearhead.core.config import ModelConfig
from clearhead.errors import InputError, refuse
from clearhead.hub import preprocessor
from clearhead.hub.images import JoinedImages
from clearhead.hub.preprocessor import PREPROCESSOR
from clearhead.hub.tokens.chat import Message
from clearhead.hub.tokens.text import labels
from clearhead.learn.data.pictures import pixels_of
from clearhead.run.bundle import Bundle
from clearhead.run.generate.vectors import PromptVectors
from clearhead.variants.contexts import evaluating

MOST_PIXELS = 50_000_000  # of all images of one request that come as base64
DATA, URL, IMAGE = "data:image/", "image_url", "image"


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with images, each of which stands where the prompt has the model's image token."""

    prompt: str | Sequence[int]  # text such as "USER: <image>\\nWhat is this? ASSISTANT:", or ids
    images: Sequence[Any]  # paths, arrays, tensors, or pictures of Pillow


def encoder_of(m: Bundle) -> JoinedImages:
    """Return what makes vectors of images; refuse a model that reads text alone."""
    if m.image_encoder is None:
        raise InputError("images in a prompt: this model reads text alone; load one of LLaVA's")
    return m.image_encoder


def ids_of(m: Bundle, prompt: Any) -> list[int]:
    """Return the ids of a prompt, with as many image tokens as the images take.

    Without images, no image token may stand in it: it would stand for nothing.
    """
    images: Sequence[Any] = ()
    if isinstance(prompt, ImagePrompt):
        prompt, images = prompt.prompt, prompt.images
        encoder_of(m)
    ids = m.prompt_ids(prompt)
    return ids if m.image_encoder is None else expanded(m.image_encoder, ids, len(images))


def expanded(encoder: JoinedImages, ids: Sequence[int], images: int) -> list[int]:
    """Return ids in which each image has all of its tokens; they may have them already."""
    token, count = encoder.config.token_id, encoder.config.count
    stands = sum(one == token for one in ids)
    if stands == images * count:
        return list(ids)
    refuse(
        stands != images,
        f"the prompt has the image token (id {token}) {stands} times, for {images} images: give it once for "
        f"each image, or {count} times",
    )
    return [one for given in ids for one in ([given] * count if given == token else [given])]


@torch.inference_mode()
def vectors_of(m: Bundle, ids: Sequence[int], prompt: Any) -> PromptVectors | None:
    """Return the vectors of a prompt's images; None where it has none. `ids` are those of `ids_of`."""
    if not isinstance(prompt, ImagePrompt) or not prompt.images:
        return None
    encoder = encoder_of(m)
    config, weight = encoder.config, next(encoder.parameters())
    assert config.frame is not None
    tensors = []
    for image in prompt.images:
        image = (
            pixels_of(image, "L" if config.tower.n_channels == 1 else "RGB")
            if hasattr(image, "convert")
            else image
        )
        refuse(
            not isinstance(image, preprocessor.Image),
            f"an image is {image!r:.40}: give a path, an array, a tensor or a picture of Pillow",
        )
        pixels = preprocessor.pixels_for(image, config.tower.n_channels, config.frame, m.images)
        given = isinstance(image, torch.Tensor) and image.is_floating_point()
        refuse(
            not m.images and not given,
            f"this model has no {PREPROCESSOR}: add it, or give pixels as a tensor",
        )
        tensors.append(pixels)
    pixels = torch.stack(tensors)
    with evaluating(encoder):
        vectors = encoder(pixels.to(weight))
    return PromptVectors.of(ids, config.token_id, pixels, vectors)


def patch_names(config: ModelConfig) -> tuple[str, ...]:
    """Return a name for every token of an image: its patches by row and column, after the class token."""
    spec = config.stacks[0]
    rows, columns = (side // spec.patch_size for side in spec.image_size)
    patches = (f"{row},{column}" for row in range(rows) for column in range(columns))
    return ("[CLS]", *patches) if spec.class_token else tuple(patches)


def token_names(m: Bundle, ids: Sequence[int], images: int) -> tuple[str, ...]:
    """Return a name for each token: patches by row and column, of several images by number too."""
    config = encoder_of(m).config
    names = patch_names(config.tower)[config.skip_first :]
    patches = iter([f"{n}: {name}" if images > 1 else name for n in range(1, images + 1) for name in names])
    plain = labels(m.tokenizer, list(ids))
    return tuple(next(patches) if token == config.token_id else name for token, name in zip(ids, plain))


# Conversations ----------------------------------------------------------------------------------------------


def taken(m: Bundle, messages: Sequence[Message], files: bool = True) -> tuple[list[Message], list[Any]]:
    """Return the messages with a bare part of type image for each image, and the images in their order.

    Parts are {"type": "image", "image": ...} or, as OpenAI has them, {"type": "image_url", "image_url":
    {"url": "data:image/png;base64,..."}}. Without `files`, all must be of the latter kind, so that
    nothing of this machine is read. Nothing is ever fetched.
    """
    images: list[Any] = []
    left = MOST_PIXELS

    def part_of(part: Any, place: str) -> Any:
        nonlocal left
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in (IMAGE, URL):
            return part
        refuse(
            m.image_encoder is None, f"{place} has a part of the type {kind!r}: this model reads text alone"
        )
        more = next((name for name in part if name not in ("type", kind)), None)
        refuse(more, f'{place} has an image with "{more}", which is not read: leave it out')
        refuse(
            kind == IMAGE and not files, f"{place} has a part of type image: send image_url with a data: URI"
        )
        refuse(part.get(kind) is None, f"{place} has a part of type {kind} without its {kind}")
        channels = encoder_of(m).config.tower.n_channels
        if kind == IMAGE:
            images.append(part[kind])
        else:
            image = _of_url(part[kind], channels, place, left)
            left -= image.shape[0] * image.shape[1]
            images.append(image)
        return {"type": IMAGE}

    found: list[Message] = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            message = {
                **message,
                "content": [part_of(part, f"messages.{number}.content") for part in content],
            }
        found.append(message)
    return found, images


def _of_url(given: Any, channels: int, place: str, most: int) -> np.ndarray[Any, Any]:
    """Return the image of a data URI as an array of at most so many pixels."""
    detail = given.get("detail") if isinstance(given, Mapping) else None
    url: Any = given.get("url") if isinstance(given, Mapping) else given
    unknown = (
        next((name for name in given if name not in ("url", "detail")), None) if url is not given else None
    )
    refuse(unknown, f'{place} has an image_url with "{unknown}", which is not read: leave it out')
    refuse(
        detail not in (None, "auto"), f"{place}.image_url.detail {detail!r:.20}: images have one size here"
    )
    refuse(not isinstance(url, str), f"{place}.image_url must have a url, a text")
    refuse(
        not url.startswith(DATA),
        f"{place}.image_url {url[:40]!r} is not fetched: send the image itself, data:image/png;base64,...",
    )
    head, _, body = url.partition(",")
    refuse(not head.endswith(";base64"), f"{place}.image_url is no base64: send data:image/png;base64,...")
    try:
        raw = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{place}.image_url is no base64 behind its comma") from None
    return preprocessor.read_image(io.BytesIO(raw), channels, f"{place}.image_url", most)
