"""Images as vectors among the tokens of a decoder: an image tower, and linear layers to its width.

Shapes: M images, C channels, H height, W width; N vectors of an image, D model of the decoder; P patches,
E width of the tower, S patches a side of the square that makes one vector.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.core.feedforward import ACTIVATIONS
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.variants.contexts import record
from clearhead.variants.kinds import Blocks


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """All that an image encoder is built from."""

    tower: ModelConfig  # without a head; reads patches
    width: int  # D
    token_id: int  # of the token at whose positions the vectors of an image stand
    # Whose states are joined: 0 the embedding, 1 after the first block, -1 the last; (): the tower's output.
    layers: tuple[int, ...] = (-2,)
    skip_first: bool = True  # leave out the first state of an image, as a class token
    shuffle: int = 1  # S: squares of so many patches a side are joined (pixel shuffle)
    activation: str | None = "gelu"  # between two linear layers; None: there is one
    bias: bool = True  # of the linear layers
    frame: tuple[int, int] | None = None  # height and width of images; None: as the tower has it
    hidden: int | None = None  # width between two linear layers; None: D
    any_size: bool = False  # images of whole squares of any number, whose patches the tower reads as vectors

    def __post_init__(self) -> None:
        tower, states = self.tower, self.tower.n_layers + 1
        if self.any_size:
            patch, kind = tower.n_channels * tower.patch_size**2, (tower.family, tower.input, tower.head)
            refuse(
                kind != ("encoder", "vectors", "none")
                or bool(tower.d_input % patch)
                or len(tower.rope_sections) != 2
                or bool(self.layers)
                or self.skip_first,
                "images of any size need an encoder of vectors with head none, whose rope_sections are rows "
                f"and columns, d_input a multiple of n_channels · patch_size² = {patch}, and no layers",
                ConfigError,
            )
            return
        if self.frame is None:
            object.__setattr__(self, "frame", tower.image_size)
        refuse(
            tower.family != "encoder" or tower.head != "none" or tower.input != "patches",
            f"the image tower is a {tower.family} of {tower.input} with head {tower.head}: "
            "it must be one encoder of patches with head none",
            ConfigError,
        )
        wrong = next((layer for layer in self.layers if not -states <= layer < states), None)
        refuse(
            wrong is not None,
            f"layers {self.layers}: the tower has states {-states} to {states - 1}",
            ConfigError,
        )
        sides = [side // tower.patch_size for side in tower.image_size or (0, 0)]
        uneven = any(side % self.shuffle for side in sides) or (self.shuffle > 1 and self.patch_offset != 0)
        refuse(
            self.shuffle < 1 or uneven,
            f"shuffle {self.shuffle}: an image has {sides[0]} x {sides[1]} patches, which must be whole "
            "squares of so many a side, without a class token",
            ConfigError,
        )
        refuse(self.count < 1, "an image has one patch, which is left out: set skip_first False", ConfigError)

    @property
    def count(self) -> int:
        """N: tokens that an image takes, where all are of one size."""
        return (self.tower.stacks[0].n_tokens(1) - self.skip_first) // self.shuffle**2

    def takes(self, grid: tuple[int, int]) -> int:
        """Return the tokens of an image of so many tiles and the whole; of any size, of so many squares."""
        return grid[0] * grid[1] if self.any_size else self.count * (grid[0] * grid[1] + 1)

    @property
    def multiple(self) -> int:
        """Pixels of a side of the square of patches that makes one vector."""
        return self.tower.patch_size * self.shuffle

    def squares(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return rows and columns of squares of an image of any size, of pixels [C, H, W]."""
        rows, columns = (side / self.multiple for side in shape[-2:])
        uneven = shape[-3] != self.tower.n_channels or not rows.is_integer() or not columns.is_integer()
        refuse(
            uneven or rows * columns < 1,
            f"pixels are {list(shape[-3:])}: the model reads {self.tower.n_channels} channels of sides that "
            f"are multiples of {self.multiple}: give that, or an image of whole numbers 0 to 255",
        )
        return int(rows), int(columns)

    @property
    def patch_offset(self) -> int:
        """Number of vectors before that of the first patch; below 0, the first patch is left out."""
        return int(self.tower.class_token) - int(self.skip_first)


class ImageEncoder(nn.Module):
    """An image tower, and what makes vectors of a decoder's width of its states."""

    def __init__(self, config: ImageConfig, tower: Transformer | None = None) -> None:
        super().__init__()
        self.config = config
        self.tower = Transformer(config.tower) if tower is None else tower
        wide = config.tower.d_model * max(1, len(config.layers)) * config.shuffle**2
        two = config.activation is not None
        between = config.width if config.hidden is None else config.hidden
        self.up = nn.Linear(wide, between, bias=config.bias) if two else None
        self.down = nn.Linear(between if two else wide, config.width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation] if config.activation else None

    def forward(self, pixels: Tensor) -> Tensor:
        """Map images [M, C, H, W] to vectors [M, N, D]."""
        if self.config.any_size:
            return self._bent(self._squares(pixels))
        height, width = self.config.tower.image_size or (0, 0)  # whole patches; what is beyond is not read
        last = self.config.tower.n_layers
        numbers = [layer % (last + 1) for layer in self.config.layers]
        names = ["embedding" if n == 0 else f"blocks.{n - 1}.resid_post" for n in numbers]
        with record(self.tower, *names, detach=False) as seen:
            last_states = self.tower(pixels[..., :height, :width], logits="none").hidden
        states = torch.cat([seen[name] for name in names], dim=-1) if names else last_states
        return self._bent(self._joined(states[:, self.config.skip_first :]))

    def _squares(self, pixels: Tensor) -> Tensor:
        """Run the tower on images of one size: [M, C, H, W] -> states of each square [M, N, S·S·E]."""
        rows, columns = self.config.squares(pixels.shape)
        side, tower = self.config.shuffle, self.config.tower
        patches = patches_of(self.config, pixels)
        order, positions, axes = patch_places(rows, columns, side, window_side(tower) // side)
        order, positions, axes = (x.to(pixels.device) for x in (order, positions, axes))
        given = {"positions": positions[None], "axes": axes[None]}
        hidden = self.tower(patches[:, order], **given, logits="none").hidden
        return cast(Tensor, hidden[:, order.argsort()]).reshape(len(pixels), rows * columns, -1)

    def _bent(self, states: Tensor) -> Tensor:
        """Map joined states to vectors of the decoder's width: [M, N, S·S·E] -> [M, N, D]."""
        if self.up is not None and self.activation is not None:
            states = self.activation(self.up(states))
        return cast(Tensor, self.down(states))

    def _joined(self, states: Tensor) -> Tensor:
        """Join the states of each square of patches, row by row: [M, P, E] -> [M, N, S·S·E]."""
        side = self.config.shuffle
        if side == 1:
            return states
        tower, (images, _, width) = self.config.tower, states.shape
        rows, columns = (each // tower.patch_size // side for each in tower.image_size or (0, 0))
        squares = states.view(images, rows, side, columns, side, width).transpose(2, 3)
        return squares.reshape(images, rows * columns, side * side * width)


def patches_of(config: ImageConfig, pixels: Tensor) -> Tensor:
    """Cut images [M, C, H, W] into the tower's inputs, each patch in all frames: [M, P, C·frames·patch²].

    Patches come square by square of those that are joined, and row by row in each.
    """
    (rows, columns), side, tower = config.squares(pixels.shape), config.shuffle, config.tower
    (images, channels), patch = pixels.shape[:2], tower.patch_size
    cut = pixels.reshape(images, channels, rows, side, patch, columns, side, patch)
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)[:, :, :, :, :, :, None]  # M rows columns S S C 1 patch patch
    frames = tower.d_input // (channels * patch**2)
    return cut.expand(*[-1] * 6, frames, -1, -1).reshape(images, -1, tower.d_input)


def window_side(tower: ModelConfig) -> int:
    """Return the patches of a side of the windows of a tower's layers; 0: it has none."""
    return next((math.isqrt(kind.size) for kind in tower.main.kinds if isinstance(kind, Blocks)), 0)


def patch_places(rows: int, columns: int, side: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return in which order patches are read, window by window, and of each its position, row and column.

    Patches are counted square by square of `side` patches; a window is `window` squares a side (0: all is
    one), and has a block of positions of its own, which at an edge of the image is not full.
    """
    window = window or max(rows, columns)
    y, x = torch.meshgrid(torch.arange(rows * side), torch.arange(columns * side), indexing="ij")
    y, x = (each.view(rows, side, columns, side).transpose(1, 2).flatten() for each in (y, x))
    across = -(-columns // window)
    number = (y // side // window) * across + x // side // window  # of the window of each patch
    order = number.argsort(stable=True)
    number, y, x = number[order], y[order], x[order]
    first = torch.searchsorted(number, number)  # where its window begins
    positions = number * (window * side) ** 2 + torch.arange(len(number)) - first
    return order, positions, torch.stack([y, x], dim=-1)


def prompt_axes(ids: Sequence[int], token_id: int, grids: Sequence[tuple[int, int]]) -> Tensor:
    """Return time, height and width of each token of a prompt, whose images are squares of grids: [T, 3].

    A token of text is one further on each axis than all before it, and so is the first square of an image.
    """
    parts, place, start = [], 0, 0
    for rows, columns in grids:
        text = list(ids).index(token_id, place) - place
        parts.append(torch.arange(text)[:, None].expand(-1, 3) + start)
        place, start = place + text + rows * columns, start + text
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(torch.stack([torch.zeros_like(y), y, x], dim=-1).flatten(0, 1) + start)
        start += max(rows, columns)
    parts.append(torch.arange(len(ids) - place)[:, None].expand(-1, 3) + start)
    return torch.cat(parts)


def placed(front: nn.Module, ids: Tensor, token_id: int, vectors: Tensor) -> Tensor:
    """Return the embedding of ids [B, T] with `vectors` [M, N, D] where the token of images stands."""
    is_image = ids == token_id
    rows = vectors.flatten(0, 1)
    refuse(
        int(is_image.sum()) != len(rows),
        f"ids have {int(is_image.sum())} image tokens and the images {len(rows)} vectors: give as many",
    )
    embedded = cast(Tensor, front(ids)).clone()
    embedded[is_image] = rows.to(embedded.dtype)
    return embedded
