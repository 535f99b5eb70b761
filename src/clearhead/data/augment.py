"""Changes to pictures that leave their class as it is, drawn anew each time they are shown.

Shapes: B pictures, C channels, H height, W width.
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
    moved: Pixels = views[np.arange(n), :, random.integers(2 * down + 1, size=n), random.integers(2 * right + 1, size=n)]
    return moved


def erase(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Blank a rectangle of every other picture, each side between a fifth and a half of the picture's."""
    n, _, height, width = pixels.shape
    blank = np.asarray(random.random(n) < 0.5)

    def stretch(size: int) -> NDArray[np.bool_]:
        length = np.maximum(1, random.uniform(0.2, 0.5, n) * size).astype(np.int64)
        start = (random.random(n) * (size - length + 1)).astype(np.int64)
        place = np.arange(size)
        covered: NDArray[np.bool_] = (place >= start[:, None]) & (place < (start + length)[:, None])
        return covered

    down, right = stretch(height), stretch(width)  # B H, B W
    hidden = down[:, :, None] & right[:, None, :] & blank[:, None, None]  # B H W
    return np.where(hidden[:, None], np.float32(0), pixels)


AUGMENTATIONS: dict[str, Callable[[Pixels, np.random.Generator], Pixels]] = {"flip": flip, "shift": shift, "erase": erase}


def augment(pixels: Pixels, names: Iterable[str], random: np.random.Generator) -> Pixels:
    """Normalised pictures [B, C, H, W], changed in each of the named ways."""
    for name in names:
        pixels = AUGMENTATIONS[name](pixels, random)
    return pixels
