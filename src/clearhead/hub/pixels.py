"""Images into the pixels a model reads, as `preprocessor_config.json` says: resized, scaled, normalised.

Shapes: C channels, H height, W width.
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.data.pictures import pixels_of
from clearhead.errors import CheckpointError, InputError, MissingExtraError, refuse
from clearhead.hub.files import first_line

PREPROCESSOR = "preprocessor_config.json"
KERNELS = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers, which the file has
Array = np.ndarray[Any, Any]
Image = str | Path | np.ndarray | Tensor


def to_pixels(image: Image, config: ModelConfig, settings: Mapping[str, Any]) -> Tensor:
    """Return the pixels [C, H, W] of one image.

    Whole numbers 0 to 255, with the channels first or last, are an image as files hold it: it is resized to
    what the model takes, scaled and normalised by `settings`; without settings, scaled to [0, 1].
    Floating-point numbers are pixels already.
    """
    assert config.image_size is not None
    if isinstance(image, str | Path):
        image = read_image(Path(image), config.n_channels, str(image))
    # Arrays have their channels last, tensors first.
    pixels = _channels_first(torch.as_tensor(image), config.n_channels, last=not isinstance(image, Tensor))
    if pixels.is_floating_point():
        refuse(
            tuple(pixels.shape[1:]) != config.image_size,
            f"pixels are {list(pixels.shape)} and the model reads {[config.n_channels, *config.image_size]}: "
            "give that size, or an image of whole numbers 0 to 255, which is resized",
        )
        return pixels.float()
    if pixels.dtype != torch.uint8 and not 0 <= int(pixels.min()) <= int(pixels.max()) <= 255:
        raise InputError(
            f"an image holds {int(pixels.min())} to {int(pixels.max())}: "
            "whole numbers must lie between 0 and 255"
        )
    return _prepared(pixels.to(torch.uint8), config.image_size, settings)


def _prepared(image: Tensor, size: tuple[int, int], settings: Mapping[str, Any]) -> Tensor:
    """Resize, scale and normalise bytes [C, H, W] -> [C, *size], as `settings` say."""
    stated = settings.get("size")
    wanted = (stated, stated) if isinstance(stated, int) else size
    if isinstance(stated, dict):
        wanted = (stated.get("height", 0), stated.get("width", 0))
    refuse(
        wanted != size or settings.get("do_center_crop"),
        f"{PREPROCESSOR} makes images of size {stated}, not by a resize to {list(size)}: give pixels",
        CheckpointError,
    )
    if tuple(image.shape[1:]) != size:
        refuse(
            not settings.get("do_resize", True),
            f"an image is {list(image.shape[1:])} and the model reads {list(size)}: "
            f"{PREPROCESSOR} says not to resize",
        )
        kernel = KERNELS.get(settings.get("resample", 2))
        if kernel is None:
            raise CheckpointError(
                f"{PREPROCESSOR} resizes by resample {settings['resample']}: supported are {list(KERNELS)}"
            )
        image = nnf.interpolate(image[None], size, mode=kernel, antialias=kernel != "nearest")[0]
    pixels = image.float()
    if settings.get("do_rescale", True):
        pixels = pixels * settings.get("rescale_factor", 1 / 255)
    if settings.get("do_normalize", False):
        mean, deviation = (
            _per_channel(settings.get(name), len(pixels), name) for name in ("image_mean", "image_std")
        )
        pixels = (pixels - mean) / deviation
    return pixels


def _per_channel(values: Any, channels: int, name: str) -> Tensor:
    """Return one number for each channel: [C, 1, 1]."""
    listed = values if isinstance(values, list) else [values] * channels
    refuse(
        len(listed) != channels or not all(isinstance(value, int | float) for value in listed),
        f"{PREPROCESSOR} has {name} {values}: it must be {channels} numbers, one per channel",
        CheckpointError,
    )
    return torch.tensor(listed, dtype=torch.float32)[:, None, None]


def _channels_first(image: Tensor, channels: int, last: bool) -> Tensor:
    """Return the image as [C, H, W]; where either end could be the channels, `last` decides."""
    if image.ndim == 2:
        image = image[None].expand(channels, -1, -1)
    fits = image.ndim == 3 and channels in (image.shape[0], image.shape[2]) and 0 not in image.shape
    refuse(
        not fits,
        f"an image has shape {list(image.shape)}: "
        f"it must be [{channels}, H, W], [H, W, {channels}] or [H, W]",
    )
    if image.shape[2] == channels and (last or image.shape[0] != channels):
        return image.permute(2, 0, 1)
    return image


def read_image(file: Path | io.BytesIO, channels: int, name: str, most: int | None = None) -> Array:
    """Read an image file as bytes [H, W, C]; refuse one of more than `most` pixels. Errors call it `name`."""
    try:
        from PIL import Image as Picture
    except ImportError:
        raise MissingExtraError("reading images needs Pillow: pip install pillow; or give an array") from None
    try:
        with Picture.open(file) as picture:
            if most is not None and picture.width * picture.height > most:
                raise InputError(
                    f"{name} has {picture.width} x {picture.height} pixels: at most {most:,} are read"
                )
            return np.array(pixels_of(picture, "L" if channels == 1 else "RGB"))
    except InputError:
        raise
    except (OSError, ValueError, Picture.DecompressionBombError) as error:  # no image, cut short, too large
        raise InputError(f"{name} cannot be read as an image: {first_line(error)}") from None
