"""Images as vectors among the tokens of a decoder: an image tower, and linear layers to its width.

Shapes: M images, C channels, H height, W width; N vectors of an image, D model of the decoder; P patches,
E width of the tower, S patches a side of the square that makes one vector.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.core.feedforward import ACTIVATIONS
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.variants.contexts import record


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """All that an image encoder is built from."""

    tower: ModelConfig  # without a head; reads patches
    width: int  # D
    token_id: int  # of the token in whose places the vectors of an image stand
    # Whose states are joined: 0 the embedding, 1 after the first block, -1 the last; (): the tower's output.
    layers: tuple[int, ...] = (-2,)
    skip_first: bool = True  # leave out the first state of an image, as a class token
    shuffle: int = 1  # S: squares of so many patches a side are joined (pixel shuffle)
    activation: str | None = "gelu"  # between two linear layers; None: there is one
    bias: bool = True  # of the linear layers
    frame: tuple[int, int] | None = None  # height and width of images; None: as the tower has it

    def __post_init__(self) -> None:
        tower, states = self.tower, self.tower.n_layers + 1
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
        """N: tokens that an image takes."""
        return (self.tower.stacks[0].n_tokens(1) - self.skip_first) // self.shuffle**2

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
        self.up = nn.Linear(wide, config.width, bias=config.bias) if two else None
        self.down = nn.Linear(config.width if two else wide, config.width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation] if config.activation else None

    def forward(self, pixels: Tensor) -> Tensor:
        """Map images [M, C, H, W] to vectors [M, N, D]."""
        height, width = self.config.tower.image_size or (0, 0)  # whole patches; what is beyond is not read
        last = self.config.tower.n_layers
        numbers = [layer % (last + 1) for layer in self.config.layers]
        names = ["embedding" if n == 0 else f"blocks.{n - 1}.resid_post" for n in numbers]
        with record(self.tower, *names, detach=False) as seen:
            last_states = self.tower(pixels[..., :height, :width], logits="none").hidden
        states = torch.cat([seen[name] for name in names], dim=-1) if names else last_states
        states = self._joined(states[:, self.config.skip_first :])
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


def placed(front: nn.Module, ids: Tensor, token_id: int, vectors: Tensor) -> Tensor:
    """Return the embedding of ids [B, T] with `vectors` [M, N, D] where the token of images stands."""
    places = ids == token_id
    rows = vectors.flatten(0, 1)
    refuse(
        int(places.sum()) != len(rows),
        f"ids have {int(places.sum())} image tokens and the images {len(rows)} vectors: give as many",
    )
    embedded = cast(Tensor, front(ids)).clone()
    embedded[places] = rows.to(embedded.dtype)
    return embedded
