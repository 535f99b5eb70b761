"""Prompts with images: their tokens, their pixels, and the vectors the model reads at their positions."""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.errors import InputError, refuse
from clearhead.hub import preprocessor
from clearhead.hub.preprocessor import PREPROCESSOR
from clearhead.hub.tokens.chat import Message
from clearhead.hub.tokens.text import labels
from clearhead.hub.towers import JoinedImages
from clearhead.learn.data.pictures import pixels_of
from clearhead.run.bundle import Bundle
from clearhead.run.generate.vectors import PromptVectors
from clearhead.variants.contexts import evaluating
from clearhead.variants.images import ImageConfig, prompt_axes

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
    return expanded(m, m.prompt_ids(prompt), images)


def expanded(m: Bundle, ids: Sequence[int], images: Sequence[Any]) -> list[int]:
    """Return ids in which each image has all of its tokens; they may have them already."""
    return [each for own in spread(m, ids, images) for each in own]


def spread(m: Bundle, ids: Sequence[int], images: Sequence[Any]) -> list[list[int]]:
    """Return the ids that each id becomes: an image token those of its image, unless they are there."""
    single = [[each] for each in ids]
    if m.image_encoder is None:
        return single
    token = m.image_encoder.config.token_id
    grids = [grid_of(m, image) for image in images]
    takes = [m.image_encoder.config.takes(grid) for grid in grids]
    seen = [place for place, each in enumerate(ids) if each == token]
    whole = len(seen) == sum(takes)
    refuse(
        not whole and len(seen) != len(images),
        f"the prompt has the image token (id {token}) {len(seen)} times, for {len(images)} images: give it "
        f"once for each image, or {' + '.join(map(str, takes)) or 0} times",
    )
    if whole and len(seen) != len(images):
        return single
    for place, grid in zip(seen, grids):
        tokens = _tokens_of(m, grid)
        start = place - tokens.index(token)
        if list(ids[max(0, start) : start + len(tokens)]) != tokens:  # else all is there
            single[place] = tokens
    return single


def grid_of(m: Bundle, image: Any) -> tuple[int, int]:
    """Return rows and columns of the tiles that an image is cut into; none where it is read whole.

    Of an image of any size, rows and columns of its tokens.
    """
    encoder = encoder_of(m)
    config = encoder.config
    if config.any_size:
        given = (config.tower.n_channels, config.multiple, m.images)
        return config.squares(preprocessor.sized_shape(_readable(m, image), *given))
    if encoder.table.prompt is None:
        return 0, 0
    assert config.frame is not None
    return preprocessor.tile_grid(_readable(m, image), config.tower.n_channels, config.frame[0], m.images)


def _tokens_of(m: Bundle, grid: tuple[int, int]) -> list[int]:
    """Return the ids that stand for an image."""
    encoder = encoder_of(m)
    token, takes, prompt = encoder.config.token_id, encoder.config.takes(grid), encoder.table.prompt
    if prompt is None:
        return [token] * takes
    text = prompt(*grid, encoder.config.count)
    ids = list(m.text_tokenizer.encode(text, add_special_tokens=False).ids)
    fits = ids.count(token) == takes
    refuse(not fits, f"the tokenizer has no token <image> of the id {token}: give the one of this model")
    return ids


def _readable(m: Bundle, image: Any) -> preprocessor.Image:
    """Return an image as something that becomes pixels; refuse what is none."""
    if hasattr(image, "convert"):
        image = pixels_of(image, "L" if encoder_of(m).config.tower.n_channels == 1 else "RGB")
    refuse(
        not isinstance(image, preprocessor.Image),
        f"an image is {image!r:.40}: give a path, an array, a tensor or a picture of Pillow",
    )
    given = isinstance(image, torch.Tensor) and image.is_floating_point()
    refuse(
        not m.images and not given, f"this model has no {PREPROCESSOR}: add it, or give pixels as a tensor"
    )
    return cast(preprocessor.Image, image)


def _sized(m: Bundle, image: Any) -> Tensor:
    """Return the pixels of an image of any size: [C, H, W]."""
    config = encoder_of(m).config
    return preprocessor.sized_pixels(_readable(m, image), config.tower.n_channels, config.multiple, m.images)


def pixels_of_prompt(m: Bundle, images: Sequence[Any]) -> Tensor | list[Tensor]:
    """Return the pixels of images as the model reads them, with their tiles: [M, C, H, W].

    Of images of any size, [C, H, W] of each.
    """
    encoder = encoder_of(m)
    if encoder.config.any_size:
        return [_sized(m, image) for image in images]
    channels, frame = encoder.config.tower.n_channels, encoder.config.frame
    assert frame is not None
    readable = [_readable(m, image) for image in images]
    if encoder.table.prompt is None:
        return torch.stack([preprocessor.pixels_for(image, channels, frame, m.images) for image in readable])
    return torch.cat([preprocessor.tiles_for(image, channels, frame[0], m.images) for image in readable])


@torch.inference_mode()
def vectors_of(m: Bundle, ids: Sequence[int], prompt: Any) -> PromptVectors | None:
    """Return the vectors of a prompt's images; None where it has none. `ids` are those of `ids_of`."""
    if not isinstance(prompt, ImagePrompt) or not prompt.images:
        return None
    encoder = encoder_of(m)
    pixels = pixels_of_prompt(m, prompt.images)
    weight, config = next(encoder.parameters()), encoder.config
    with evaluating(encoder):
        if isinstance(pixels, Tensor):
            return PromptVectors.of(ids, config.token_id, pixels, encoder(pixels.to(weight)))
        vectors = [encoder(image[None].to(weight))[0] for image in pixels]
    axes = prompt_axes(ids, config.token_id, [config.squares(image.shape) for image in pixels])
    return PromptVectors.of(ids, config.token_id, pixels, vectors, axes)


def patch_names(config: ModelConfig) -> tuple[str, ...]:
    """Return a name for every token of an image: its patches by row and column, after the class token."""
    spec = config.stacks[0]
    rows, columns = (side // spec.patch_size for side in spec.image_size)
    patches = (f"{row},{column}" for row in range(rows) for column in range(columns))
    return ("[CLS]", *patches) if spec.class_token else tuple(patches)


def token_names(m: Bundle, ids: Sequence[int], images: Sequence[Any]) -> tuple[str, ...]:
    """Return a name for each token: patches by row and column, of several images by number too.

    Rows and columns of an image in tiles go on from tile to tile; the whole image comes last.
    """
    config, names = encoder_of(m).config, list[str]()
    for number, image in enumerate(images, start=1):
        of_image = image_names(config, grid_of(m, image))
        names += [f"{number}: {name}" if len(images) > 1 else name for name in of_image]
    of_tokens, plain = iter(names), labels(m.tokenizer, list(ids))
    return tuple(next(of_tokens) if token == config.token_id else name for token, name in zip(ids, plain))


def image_names(config: ImageConfig, grid: tuple[int, int]) -> list[str]:
    """Return a name for each vector of one image of so many rows and columns of tiles, or of squares."""
    if config.any_size:
        return [f"{y},{x}" for y in range(grid[0]) for x in range(grid[1])]
    height, width = (
        side // config.tower.patch_size // config.shuffle for side in config.tower.image_size or ()
    )
    tiles = [
        f"{row * height + y},{column * width + x}"
        for row in range(grid[0])
        for column in range(grid[1])
        for y in range(height)
        for x in range(width)
    ]
    whole = [f"{y},{x}" for y in range(height) for x in range(width)]
    whole = ["[CLS]", *whole] if config.tower.class_token else whole
    return [*tiles, *(f"whole {name}" if tiles else name for name in whole[config.skip_first :])]


def shown_picture(m: Bundle, image: Any) -> Tensor:
    """Return the pixels of an image that are read, its tiles put together: [C, H, W]."""
    if encoder_of(m).config.any_size:
        return _sized(m, image)
    height, width = encoder_of(m).config.tower.image_size or (0, 0)  # beyond whole patches nothing is read
    rows, columns = grid_of(m, image)
    pixels = torch.stack([*pixels_of_prompt(m, [image])])[..., :height, :width]
    if not rows:
        return pixels[0]
    tiles = pixels[:-1].reshape(rows, columns, -1, height, width)  # rows columns C H W
    return tiles.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)


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

    opened: list[Message] = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            message = {
                **message,
                "content": [part_of(part, f"messages.{number}.content") for part in content],
            }
        opened.append(message)
    return opened, images


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
