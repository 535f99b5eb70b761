"""Changes to pictures, drawn anew each time they are shown. All but `mix` leave their class as it is.

Shapes: B pictures, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Pixels = NDArray[np.float32]


def flip(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Mirror every other picture, left to right."""
    mirrored = random.random(len(pixels)) < 0.5
    flipped = pixels.copy()
    flipped[mirrored] = pixels[mirrored][..., ::-1]
    return flipped


def shift(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Move each picture by up to an eighth of its size; what comes in from outside is 0, the mean colour."""
    n, _, height, width = pixels.shape
    down, right = height // 8, width // 8
    wide = np.pad(pixels, ((0, 0), (0, 0), (down, down), (right, right)))
    views = sliding_window_view(wide, (height, width), axis=(2, 3))  # B C shifts shifts H W
    moved: Pixels = views[
        np.arange(n), :, random.integers(2 * down + 1, size=n), random.integers(2 * right + 1, size=n)
    ]
    return moved


def erase(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Blank a rectangle of every other picture, each side between a fifth and a half of the picture's."""
    chosen = np.asarray(random.random(len(pixels)) < 0.5)
    hidden = _rectangles(pixels, 0.5, random) & chosen[:, None, None]
    return np.where(hidden[:, None], np.float32(0), pixels)


def mix(pixels: Pixels, labels: NDArray[np.int64], random: np.random.Generator) -> tuple[Pixels, Pixels]:
    """Paste a rectangle of another picture over every other one, each side between a fifth and nine tenths of the picture's.

    Labels [B] become shares of classes [B, K]: the pasted picture's class gets as much as it covers.
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
    """A rectangle somewhere in each picture, each side between a fifth and `largest` of the picture's: B H W, True inside."""
    n, _, height, width = pixels.shape

    def stretch(size: int) -> NDArray[np.bool_]:
        length = np.maximum(1, random.uniform(0.2, largest, n) * size).astype(np.int64)
        start = (random.random(n) * (size - length + 1)).astype(np.int64)
        place = np.arange(size)
        inside: NDArray[np.bool_] = (place >= start[:, None]) & (place < (start + length)[:, None])
        return inside

    down, right = stretch(height), stretch(width)  # B H, B W
    return down[:, :, None] & right[:, None, :]


AUGMENTATIONS: dict[str, Callable[[Pixels, np.random.Generator], Pixels]] = {
    "flip": flip,
    "shift": shift,
    "erase": erase,
}


def augment(pixels: Pixels, names: Iterable[str], random: np.random.Generator) -> Pixels:
    """Normalised pictures [B, C, H, W], changed in each of the named ways that leave labels alone."""
    for name in names:
        if name in AUGMENTATIONS:
            pixels = AUGMENTATIONS[name](pixels, random)
    return pixels
