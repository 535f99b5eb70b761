"""Batches of pictures, and the changes drawn each time one is shown. All but `mix` keep the class.

Shapes: B pictures, C channels, H height, W width, K classes.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from clearhead.learn.batches.batch import Batch
from clearhead.learn.batches.batching import Setting, tensor
from clearhead.learn.batches.even import EvenRows
from clearhead.learn.batches.rows import Ints

Pixels = NDArray[np.float32]


def flip(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Mirror half of the pictures, left to right."""
    mirrored = np.asarray(random.random(len(pixels)) < 0.5)
    return np.where(mirrored[:, None, None, None], pixels[..., ::-1], pixels)


def shift(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Move each picture by up to an eighth of its size; the border becomes 0, the mean colour."""
    n, _, height, width = pixels.shape
    down, right = height // 8, width // 8
    wide = np.pad(pixels, ((0, 0), (0, 0), (down, down), (right, right)))
    views = sliding_window_view(wide, (height, width), axis=(2, 3))  # B C shifts shifts H W
    rows, columns = random.integers(2 * down + 1, size=n), random.integers(2 * right + 1, size=n)
    return np.asarray(views[np.arange(n), :, rows, columns])


def erase(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Blank a rectangle of half of the pictures, each side between a fifth and a half of the picture's."""
    chosen = np.asarray(random.random(len(pixels)) < 0.5)
    hidden = _rectangles(pixels, 0.5, random) & chosen[:, None, None]
    return np.where(hidden[:, None], np.float32(0), pixels)


def mix(pixels: Pixels, labels: NDArray[np.int64], random: np.random.Generator) -> tuple[Pixels, Pixels]:
    """Paste a rectangle of another picture over half of the pictures.

    Each side is a fifth to nine tenths of the picture's. Labels [B] become shares of classes [B, K]: the
    class of the pasted picture gets the share that it covers.
    """
    n = len(pixels)
    other = random.permutation(n)
    pasted = _rectangles(pixels, 0.9, random) & (random.random(n) < 0.5)[:, None, None]  # B H W
    covered = pasted.mean((1, 2), dtype=np.float32)
    shares = np.zeros((n, int(labels.max()) + 1), np.float32)
    np.add.at(shares, (np.arange(n), labels), 1 - covered)
    np.add.at(shares, (np.arange(n), labels[other]), covered)
    return np.where(pasted[:, None], pixels[other], pixels), shares


def _rectangles(pixels: Pixels, largest: float, random: np.random.Generator) -> NDArray[np.bool_]:
    """Return a rectangle in each picture, [B, H, W], True inside; sides are 0.2 to `largest` of its own."""
    n, _, height, width = pixels.shape

    def stretch(size: int) -> NDArray[np.bool_]:
        length = np.maximum(1, random.uniform(0.2, largest, n) * size).astype(np.int64)
        start = (random.random(n) * (size - length + 1)).astype(np.int64)
        place = np.arange(size) - start[:, None]
        return np.asarray((place >= 0) & (place < length[:, None]))

    down, right = stretch(height), stretch(width)  # B H, B W
    return down[:, :, None] & right[:, None, :]


AUGMENTATIONS: dict[str, Callable[[Pixels, np.random.Generator], Pixels]] = {
    "flip": flip,
    "shift": shift,
    "erase": erase,
}


def augment(pixels: Pixels, names: Iterable[str], random: np.random.Generator) -> Pixels:
    """Change normalised pictures [B, C, H, W] in each of the named ways that keep labels."""
    for name in names:
        if name in AUGMENTATIONS:
            pixels = AUGMENTATIONS[name](pixels, random)
    return pixels


class PictureBatches(EvenRows):
    """Pictures and their classes.

    Pixels scaled to 0-1, less the mean of each channel, divided by its deviation.
    """

    def __init__(self, setting: Setting) -> None:
        encoded = setting.encoded
        self.pixels, self.labels = encoded["pixels"], encoded["labels"]
        self.scale = (1 / (255 * encoded["std"])).astype(np.float32)[:, None, None]  # C 1 1
        self.shift = (encoded["mean"] / encoded["std"]).astype(np.float32)[:, None, None]
        self.changes = setting.plan.augment if setting.training else ()
        super().__init__(len(self.labels), setting.plan.batch_size, setting.seed, setting.training)

    def _build(self, places: Ints, random: np.random.Generator) -> Batch:
        pixels = np.ascontiguousarray(self.pixels[places].transpose(0, 3, 1, 2)).astype(np.float32)  # B C H W
        pixels *= self.scale
        pixels -= self.shift
        pixels = augment(pixels, self.changes, random)
        targets = tensor(self.labels[places])
        if "mix" in self.changes:
            pixels, shares = mix(pixels, self.labels[places], random)
            targets = torch.from_numpy(shares)
        return Batch(torch.from_numpy(np.ascontiguousarray(pixels)), targets, numbers=tensor(places))
