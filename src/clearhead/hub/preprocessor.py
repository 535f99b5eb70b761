"""Images and sound into what a model reads, as `preprocessor_config.json` says.

Images are resized, cropped and normalised; sound becomes a log-mel spectrogram.

Shapes: C channels, H height, W width; N samples, T frames, M mel bands, F frequencies.
"""

import functools
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.errors import CheckpointError, InputError, MissingExtraError, first_line, refuse
from clearhead.hub.files import read_json_if_any, refuse_key
from clearhead.learn.data.pictures import pixels_of
from clearhead.learn.data.sounds import Samples

# Images -----------------------------------------------------------------------------------------------------


PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # which newer directories have in its place
DEFAULTS: dict[str, Any] = {  # of ViTImageProcessor
    **{"size": {"height": 224, "width": 224}, "do_resize": True, "resample": 2},
    **{"do_rescale": True, "rescale_factor": 1 / 255},
    **{"do_normalize": True, "image_mean": 0.5, "image_std": 0.5},
}
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
# What differs elsewhere, and whether one number is the shorter side of an image, or both.
OWN_DEFAULTS: dict[str, tuple[dict[str, Any], bool]] = {
    "ViT": ({}, False),
    "CLIP": (
        {
            **{"size": {"shortest_edge": 224}, "resample": 3, "do_center_crop": True, "crop_size": 224},
            **{"image_mean": CLIP_MEAN, "image_std": CLIP_STD},
        },
        True,
    ),
    "Siglip": ({"resample": 3}, True),
}
TILED: dict[str, Any] = {
    **{"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}, "do_image_splitting": True},
    "resample": 1,
}
MOST_SIDE = 4096  # of an image that is cut into tiles
OWN_DEFAULTS |= {"Idefics3": (TILED, False), "SmolVLM": (TILED, False)}
QWEN = {
    **{"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "resample": 3},
    **{"patch_size": 14, "merge_size": 2, "image_mean": CLIP_MEAN, "image_std": CLIP_STD},
}
OWN_DEFAULTS |= {"Qwen2VL": (QWEN, False)}
LONGEST_RATIO = 200  # of the sides of an image of any size
ENDINGS = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
CLASSES = {family + ending: family for family in OWN_DEFAULTS for ending in ENDINGS}
Array = np.ndarray[Any, Any]
Image = str | Path | np.ndarray | Tensor


def read_preprocessor(folder: Path) -> dict[str, Any]:
    """Return how images, or sound, become what the model reads; empty where the directory does not say."""
    settings = read_json_if_any(folder / PREPROCESSOR)
    whole = {} if settings else read_json_if_any(folder / PROCESSOR)
    parts = (whole.get(name) for name in ("feature_extractor", "image_processor"))
    return settings or next((part for part in parts if isinstance(part, dict)), {})


def to_pixels(image: Image, config: ModelConfig, settings: Mapping[str, Any]) -> Tensor:
    """Return the pixels [C, H, W] of one image, for a model of images; see `pixels_for`."""
    assert config.image_size is not None
    return pixels_for(image, config.n_channels, config.image_size, settings)


def pixels_for(image: Image, channels: int, size: tuple[int, int], settings: Mapping[str, Any]) -> Tensor:
    """Return the pixels [C, *size] of one image.

    Whole numbers 0 to 255, with the channels first or last, are an image as files hold it: it is resized to
    what the model takes, scaled and normalised by `settings`; without settings, scaled to [0, 1].
    Floating-point numbers are pixels already.
    """
    pixels = _bytes_or_pixels(image, channels)
    if pixels.is_floating_point():
        refuse(
            tuple(pixels.shape[1:]) != size,
            f"pixels are {list(pixels.shape)} and the model reads {[channels, *size]}: "
            "give that size, or an image of whole numbers 0 to 255, which is resized",
        )
        return pixels.float()
    settings, shorter = _with_defaults(settings)
    refuse(
        "max_image_size" in settings,
        f"{PREPROCESSOR} cuts images into tiles, and this model reads them whole: give pixels",
        CheckpointError,
    )
    return _scaled(_framed(pixels, size, settings, shorter), settings)


def _bytes_or_pixels(image: Image, channels: int) -> Tensor:
    """Return an image as [C, H, W]: bytes as files hold them, or pixels in floating point."""
    if isinstance(image, str | Path):
        image = read_image(Path(image), channels, str(image))
    if isinstance(image, np.ndarray) and not image.flags.writeable:  # as Pillow gives it
        image = image.copy()
    # Arrays have their channels last, tensors first.
    pixels = _channels_first(torch.as_tensor(image), channels, last=not isinstance(image, Tensor))
    if pixels.is_floating_point():
        return pixels
    if pixels.dtype != torch.uint8 and not 0 <= int(pixels.min()) <= int(pixels.max()) <= 255:
        raise InputError(
            f"an image holds {int(pixels.min())} to {int(pixels.max())}: "
            "whole numbers must lie between 0 and 255"
        )
    return pixels.to(torch.uint8)


def _with_defaults(settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return all settings, and whether a size of one number is the shorter side of an image."""
    kind = (
        settings.get("image_processor_type") or settings.get("feature_extractor_type") or "ViTImageProcessor"
    )
    refuse(
        kind not in CLASSES,
        f"{PREPROCESSOR} is for {kind}: supported are {', '.join(f + ENDINGS[0] for f in OWN_DEFAULTS)}; "
        "give pixels",
        CheckpointError,
    )
    own, shorter = OWN_DEFAULTS[CLASSES[kind]]
    if settings:
        stated = {name: value for name, value in settings.items() if value is not None}
        settings = {**DEFAULTS, **own, **stated}
    return settings, shorter


def _scaled(image: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Scale and normalise bytes [C, H, W] as `settings` say."""
    pixels = image.float()
    if settings.get("do_rescale", True):
        pixels = (image.double() * settings.get("rescale_factor", DEFAULTS["rescale_factor"])).float()
    if settings.get("do_normalize"):
        mean, deviation = (
            _per_channel(settings[name], len(pixels), name) for name in ("image_mean", "image_std")
        )
        pixels = (pixels - mean) / deviation
    return pixels


def in_colours(pixels: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Return normalised pixels [C, H, W] in the colours of their image, as far as `settings` tell."""
    stated, _ = _with_defaults(settings)
    if not (stated.get("do_normalize") and stated.get("do_rescale", True)):
        return pixels
    mean, deviation = (_per_channel(stated[name], len(pixels), name) for name in ("image_mean", "image_std"))
    return (pixels * deviation + mean).clamp(0, 1)


def _framed(image: Tensor, size: tuple[int, int], settings: Mapping[str, Any], shorter: bool) -> Tensor:
    """Resize and crop bytes [C, H, W] -> [C, *size]; one number is the `shorter` side, or both."""
    stated, crop = settings.get("size", size), settings.get("do_center_crop", False)
    frame = _sides(stated, image, shorter)
    result = _sides(settings.get("crop_size", size), image, False) if crop else frame
    fixed = crop or frame == _sides(stated, image.transpose(1, 2), shorter)  # whatever image is given
    refuse(
        settings.get("do_pad") or (crop and "crop_size" not in settings) or (fixed and result != size),
        f"{PREPROCESSOR} makes images of size {stated}, not by a resize to {list(size)}: give pixels",
        CheckpointError,
    )
    if tuple(image.shape[1:]) != frame and settings.get("do_resize", True):
        image = _resized(image, frame, settings.get("resample", DEFAULTS["resample"]))
    if crop:
        image = _cropped(image, size)
    refuse(
        tuple(image.shape[1:]) != size,
        f"an image is {list(image.shape[1:])} and the model reads {list(size)}: "
        f"{PREPROCESSOR} says not to resize or crop it to that",
    )
    return image


# An image cut into tiles, and the whole image as one more ---------------------------------------------------


def tile_grid(image: Image, channels: int, side: int, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and columns of the tiles of an image; none where it is read whole."""
    if isinstance(image, Tensor) and image.is_floating_point():
        return 0, 0
    height, width = _bytes_or_pixels(image, channels).shape[1:]
    return _tile_plan(height, width, side, settings)[1]


def tiles_for(image: Image, channels: int, side: int, settings: Mapping[str, Any]) -> Tensor:
    """Return the tiles of an image, row by row, and the whole image last: [K, C, side, side].

    Pixels in floating point are one tile already.
    """
    pixels = _bytes_or_pixels(image, channels)
    if pixels.is_floating_point():
        return pixels_for(pixels, channels, (side, side), settings)[None]
    sizes, (rows, columns) = _tile_plan(pixels.shape[1], pixels.shape[2], side, settings)
    settings, _ = _with_defaults(settings)
    for size in sizes:
        pixels = _resized(pixels, size, settings["resample"])
    tiles = [
        pixels[:, row * side : (row + 1) * side, column * side : (column + 1) * side]
        for row in range(rows)
        for column in range(columns)
    ]
    whole = _resized(pixels, (side, side), settings["resample"]) if tiles else pixels
    return torch.stack([_scaled(tile, settings) for tile in (*tiles, whole)])


# An image of any size, resized to whole squares of patches --------------------------------------------------


def size_within(height: int, width: int, multiple: int, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the size that an image is resized to: multiples, of about its shape, of so many pixels."""
    settings, _ = _with_defaults(settings)
    least, most = (
        settings.get(f"{name}_pixels", (settings.get("size") or {}).get(f"{edge}_edge"))
        for name, edge in (("min", "shortest"), ("max", "longest"))
    )
    refuse(
        type(least) is not int
        or type(most) is not int
        or "merge_size" not in settings
        or min(least, most) < 1,
        f"{PREPROCESSOR} makes images of one size, and this model reads any: give pixels",
        CheckpointError,
    )
    square = settings["patch_size"] * settings["merge_size"]
    stated = f"{PREPROCESSOR} has squares of patch_size · merge_size = {square} pixels"
    refuse(square != multiple, f"{stated}, and the model reads squares of {multiple}", CheckpointError)
    long, short = max(height, width), min(height, width)
    refuse(
        long > LONGEST_RATIO * short,
        f"an image is {height} x {width}: no side may be {LONGEST_RATIO} times the other",
    )
    if not settings["do_resize"]:
        return height, width
    sides = [round(side / multiple) * multiple for side in (height, width)]
    if sides[0] * sides[1] > most:
        shrink = math.sqrt(height * width / most)
        sides = [max(multiple, math.floor(side / shrink / multiple) * multiple) for side in (height, width)]
    elif sides[0] * sides[1] < least:
        grow = math.sqrt(least / (height * width))
        sides = [math.ceil(side * grow / multiple) * multiple for side in (height, width)]
    return sides[0], sides[1]


def sized_shape(image: Image, channels: int, multiple: int, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape [C, H, W] of the pixels that `sized_pixels` gives."""
    pixels = _bytes_or_pixels(image, channels)
    _, height, width = pixels.shape
    if not pixels.is_floating_point():
        height, width = size_within(height, width, multiple, settings)
    return len(pixels), height, width


def sized_pixels(image: Image, channels: int, multiple: int, settings: Mapping[str, Any]) -> Tensor:
    """Return the pixels [C, H, W] of an image of any size; those in floating point stay as they are."""
    pixels = _bytes_or_pixels(image, channels)
    if pixels.is_floating_point():
        return pixels.float()
    size = size_within(pixels.shape[1], pixels.shape[2], multiple, settings)
    settings, _ = _with_defaults(settings)
    if size != tuple(pixels.shape[1:]):
        pixels = _resized(pixels, size, settings["resample"])
    return _scaled(pixels, settings)


def _tile_plan(
    height: int, width: int, side: int, settings: Mapping[str, Any]
) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Return the sizes that an image is resized to in turn, and rows and columns of its tiles."""
    settings, _ = _with_defaults(settings)
    tile = settings.get("max_image_size")
    refuse(
        tile != {"longest_edge": side},
        f"{PREPROCESSOR} has max_image_size {tile!r}: the model reads tiles of {side}, "
        f'supported is {{"longest_edge": {side}}}; give pixels',
        CheckpointError,
    )
    sizes = []
    if settings["do_resize"]:
        height, width = _within(height, width, settings["size"])
        sizes.append((height, width))
    if not settings["do_image_splitting"]:
        return [*sizes, (side, side)], (0, 0)
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(max(1, int(width / ratio)) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(max(1, int(height * ratio)) / side) * side
    grid = (height // side, width // side)
    return [*sizes, (height, width)], (0, 0) if grid == (1, 1) else grid


def _within(height: int, width: int, size: Any) -> tuple[int, int]:
    """Return the size that `size` of the settings gives: its longest side, the other one even, or both."""
    match size:
        case {"longest_edge": int() as longest} if longest > 0:
            for most in (longest, MOST_SIDE):
                ratio, even = width / height, most is longest
                if most is MOST_SIDE and max(height, width) <= MOST_SIDE:
                    break
                if width >= height:
                    height, width = int(most / ratio), most
                    height += even * height % 2
                else:
                    height, width = most, int(most * ratio)
                    width += even * width % 2
                height, width = max(height, 1), max(width, 1)
            return height, width
        case {"height": int() as height, "width": int() as width} if height > 0 and width > 0:
            return height, width
    raise CheckpointError(
        f"{PREPROCESSOR} has a size {size!r}: supported are longest_edge, or height and width; give pixels"
    )


def _sides(stated: Any, image: Tensor, shorter: bool) -> tuple[int, int]:
    """Return height and width that a size of the settings means, for an image [C, H, W]."""
    if isinstance(stated, int):
        stated = {"shortest_edge": stated} if shorter else (stated, stated)
    match stated:
        case {"shortest_edge": int() as short} if not stated.get("longest_edge") and short > 0:
            height, width = image.shape[1:]
            long = int(short * max(height, width) / min(height, width))
            return (long, short) if width <= height else (short, long)
        case {"height": int() as height, "width": int() as width} | [int() as height, int() as width]:
            return height, width
    raise CheckpointError(
        f"{PREPROCESSOR} has a size {stated!r}: supported are height and width, or shortest_edge alone; "
        "give pixels"
    )


def _cropped(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Take the middle of an image [C, H, W] -> [C, *size]; what is too small stands amid zeros."""
    for axis, wanted in enumerate(size, start=1):
        missing = max(wanted - image.shape[axis], 0)
        pads = (-(-missing // 2), missing // 2)  # before and after
        image = torch.nn.functional.pad(image, (0, 0, *pads) if axis == 1 else pads)
        image = image.narrow(axis, (image.shape[axis] - wanted) // 2, wanted)
    return image


def _resized(image: Tensor, size: tuple[int, int], resample: Any) -> Tensor:
    """Resize bytes [C, H, W] -> [C, *size] by Pillow, as transformers does; `resample` is its number."""
    pillow = _pillow("resizing images")
    known = {int(each): each.name.lower() for each in pillow.Resampling}
    if resample not in known:
        raise CheckpointError(f"{PREPROCESSOR} resizes by resample {resample!r}: known are {known}")
    channels = [pillow.fromarray(channel).resize(size[::-1], resample) for channel in image.numpy()]
    return torch.from_numpy(np.stack([np.array(channel) for channel in channels]))


def _pillow(action: str) -> Any:
    try:
        from PIL import Image as Picture
    except ImportError:
        raise MissingExtraError(
            f"{action} needs Pillow: pip install pillow; or give an array of the size that the model reads"
        ) from None
    return Picture


def _per_channel(values: Any, channels: int, name: str) -> Tensor:
    """Return one number for each channel: [C, 1, 1]."""
    listed = values if isinstance(values, list) else [values] * channels
    fits = len(listed) == channels and all(isinstance(value, int | float) for value in listed)
    refuse_key(not fits, name, values, f"it must be {channels} numbers, one per channel", PREPROCESSOR)
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
    pillow = _pillow("reading images")
    special = isinstance(file, Path) and file.exists() and not file.is_file()  # a pipe would be waited for
    refuse(special, f"{name} cannot be read as an image: it is a directory or a device, and no file")
    try:
        with pillow.open(file) as picture:
            if most is not None and picture.width * picture.height > most:
                raise InputError(
                    f"{name} has {picture.width} x {picture.height} pixels: at most {most:,} are read"
                )
            return np.array(pixels_of(picture, "L" if channels == 1 else "RGB"))
    except InputError:
        raise
    except (OSError, ValueError, pillow.DecompressionBombError) as error:  # no image, cut short, too large
        raise InputError(f"{name} cannot be read as an image: {first_line(error)}") from None


# Sound ------------------------------------------------------------------------------------------------------


CLASS = "WhisperFeatureExtractor"
HIGHEST = 8_000.0  # Hz, of the highest band, whatever the rate is
QUIETEST = 1e-10  # power that counts as silence
RANGE = 8.0  # powers of ten below the loudest moment that are told apart
# Slaney's scale is linear up to 1,000 Hz, which is 15 mel, and logarithmic above: 6.4 times in 27 steps.
KNEE, LINEAR, LOG_STEP = 1000.0, 15.0 / 1000.0, math.log(6.4) / 27.0


@dataclass(frozen=True)
class Spectrogram:
    """How sound becomes frames; the fields of preprocessor_config.json by their own names."""

    feature_size: int = 80  # M: bands of a frame
    sampling_rate: int = 16_000  # samples a second
    hop_length: int = 160  # samples from one frame to the next
    chunk_length: int = 30  # seconds of one window
    n_fft: int = 400  # samples that a frame is computed from
    padding_value: float = 0.0  # of samples after the end of a sound

    @property
    def window(self) -> int:
        """Samples of one window."""
        return self.chunk_length * self.sampling_rate

    @property
    def seconds(self) -> float:
        """Seconds from one frame to the next."""
        return self.hop_length / self.sampling_rate

    def frames(self, samples: Samples) -> Tensor:
        """Map [N] -> [T, M]: a whole window of frames for a short sound, as many as it has for a long one."""
        sound = torch.from_numpy(samples)
        sound = nnf.pad(sound, (0, max(0, self.window - len(sound))), value=self.padding_value)
        waves = torch.stft(
            sound, self.n_fft, self.hop_length, window=torch.hann_window(self.n_fft), return_complex=True
        )
        power = (waves[:, :-1].abs() ** 2).contiguous()  # F T
        bands = torch.from_numpy(mel_bands(self.feature_size, self.n_fft, self.sampling_rate)).float()
        loudness = (bands @ power).clamp(min=QUIETEST).log10()  # M T
        loudness = torch.maximum(loudness, loudness.max() - RANGE)
        return ((loudness + 4) / 4).T


def spectrogram_of(settings: Mapping[str, Any], config: ModelConfig) -> Spectrogram:
    """Return how a model's sound becomes frames, as preprocessor_config.json says, else as usual."""
    kind = settings.get("feature_extractor_type") or CLASS
    refuse(kind != CLASS, f"{PREPROCESSOR} is for {kind}: sound is read by {CLASS}", CheckpointError)
    dither = settings.get("dither")
    refuse_key(dither, "dither", dither, "only 0 is supported, which adds no noise", PREPROCESSOR)
    stated = {entry.name: settings[entry.name] for entry in fields(Spectrogram) if entry.name in settings}
    for name, value in stated.items():
        whole = name == "padding_value" or (type(value) is int and 1 <= value < 2**24)
        number = whole and isinstance(value, int | float) and math.isfinite(value)
        refuse_key(not number, name, value, "it must be a number, whole and 1 or more", PREPROCESSOR)
    spectrogram = Spectrogram(**{"feature_size": config.d_input, **stated})
    spec = config.stacks[0]
    positions = spec.n_tokens(spectrogram.window // spectrogram.hop_length)
    refuse(
        spectrogram.feature_size != config.d_input or positions != spec.max_positions,
        f"{PREPROCESSOR} makes {positions} positions of {spectrogram.feature_size} bands, and the model "
        f"reads {spec.max_positions} of {config.d_input}: change chunk_length, hop_length or feature_size",
        CheckpointError,
    )
    long = spectrogram.n_fft // 2 >= spectrogram.window
    refuse_key(long, "n_fft", spectrogram.n_fft, "it must be shorter than two windows", PREPROCESSOR)
    return spectrogram


@functools.lru_cache(maxsize=8)
def mel_bands(count: int, n_fft: int, rate: int) -> NDArray[np.float64]:
    """Return the weight of each frequency in each band: [M, F].

    A band is a triangle between the middles of its neighbours, of area one. The middles are evenly spaced on
    Slaney's mel scale.
    """
    frequencies = np.linspace(0, rate // 2, n_fft // 2 + 1)
    mels = np.linspace(0, KNEE * LINEAR + math.log(HIGHEST / KNEE) / LOG_STEP, count + 2)
    above = KNEE * np.exp(LOG_STEP * (np.maximum(mels, KNEE * LINEAR) - KNEE * LINEAR))
    edges = np.where(mels < KNEE * LINEAR, mels / LINEAR, above)  # in Hz
    width = np.diff(edges)
    rising = (frequencies - edges[:-2, None]) / width[:-1, None]
    falling = (edges[2:, None] - frequencies) / width[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return np.asarray(triangles * 2 / (edges[2:] - edges[:-2])[:, None])
