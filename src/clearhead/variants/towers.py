"""Two towers: a Transformer of texts and one of images, whose vectors meet in one space.

Each tower is a `Transformer` without a head. What is added here makes one vector of its states, projects it
to the common width, and compares vectors: their cosine times a learned scale, plus a learned bias.

Shapes: N texts, M images, T tokens, C channels, D model of a tower, P width of the common space.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.attention import Attention
from clearhead.core.config import ModelConfig, StackSpec
from clearhead.core.feedforward import FeedForward
from clearhead.core.masks import View
from clearhead.core.norms import make_norm
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse

SCALE, SIGMOID_SCALE, SIGMOID_BIAS = 1 / 0.07, 10.0, -10.0  # what training starts from, as published
HIGHEST = -1  # as `end_id`: the token of the highest id in a text ends it


@dataclass(frozen=True, kw_only=True)
class TowersConfig:
    """All that a model of two towers is built from."""

    text: ModelConfig  # without a head
    image: ModelConfig  # without a head; reads patches
    width: int  # of the common space
    loss: Literal["softmax", "sigmoid"]  # each text among all, or each pair on its own, which has a bias too
    # id of the token whose state is the text's; None: the last slot, padding too, as texts are of one length
    end_id: int | None = None
    pooling: Literal["cls", "attention"] = "cls"  # of an image: its class token, or a learned query of all
    text_projection: Literal["none", "linear", "bias"] = "linear"  # from the text's width to the common one
    image_projection: Literal["none", "linear", "bias"] = "linear"
    frame: tuple[int, int] | None = None  # height and width of images; None: as the image tower has it

    def __post_init__(self) -> None:
        if self.frame is None:
            object.__setattr__(self, "frame", self.image.image_size)
        towers = (("text", self.text, "tokens"), ("image", self.image, "patches"))
        for name, tower, reads in towers:
            refuse(
                tower.family == "encoder-decoder" or tower.head != "none" or tower.input != reads,
                f"the {name} tower is a {tower.family} of {tower.input} with head {tower.head}: "
                f"it must be one stack of {reads} with head none",
                ConfigError,
            )
            wide = getattr(self, f"{name}_projection") != "none" or tower.d_model == self.width
            refuse(
                not wide,
                f"width {self.width} differs from the {tower.d_model} of the {name} tower: "
                f"set {name}_projection, or width {tower.d_model}",
                ConfigError,
            )
        refuse(self.width < 1, f"width {self.width} must be 1 or more", ConfigError)
        refuse(
            self.pooling == "cls" and not self.image.class_token,
            "pooling cls needs class_token in the image tower: set it, or pooling attention",
            ConfigError,
        )

    def __getattr__(self, name: str) -> Any:
        """Say why a field of one Transformer is not here."""
        raise AttributeError(f"a model of two towers has no {name}: ask its text or image tower for it")


@dataclass
class TowersOutput:
    """What a forward pass of two towers returns."""

    logits: Tensor  # M N: how well each image and each text go together
    texts: Tensor  # N P, of length one
    images: Tensor  # M P, of length one


class Towers(nn.Module):
    """A text tower, an image tower, and what compares them."""

    def __init__(
        self, config: TowersConfig, text: Transformer | None = None, image: Transformer | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.text = Transformer(config.text) if text is None else text
        self.image = Transformer(config.image) if image is None else image
        spec = self.image.main.spec
        self.image_pool = AttentionPool(spec) if config.pooling == "attention" else None
        self.text_out = _projection(config.text_projection, config.text.d_model, config.width)
        self.image_out = _projection(config.image_projection, config.image.d_model, config.width)
        sigmoid = config.loss == "sigmoid"
        shape = (1,) if sigmoid else ()
        self.logit_scale = nn.Parameter(torch.full(shape, math.log(SIGMOID_SCALE if sigmoid else SCALE)))
        self.logit_bias = nn.Parameter(torch.full(shape, SIGMOID_BIAS)) if sigmoid else None

    def embed_texts(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map texts [N, T] to vectors [N, P], of any length; `mask` [N, T] is True for real tokens.

        Where an end token marks the state to take, it is the first of a text. Positions are slots.
        """
        slots = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        hidden = self.text(ids, mask, positions=slots, logits="none").hidden  # N T D
        end_id = self.config.end_id
        if end_id is None:
            pooled = hidden[:, -1]
        else:
            ends = ids if end_id == HIGHEST else (ids == end_id).int()
            pooled = hidden[torch.arange(len(ids), device=ids.device), ends.argmax(1)]
        return pooled if self.text_out is None else cast(Tensor, self.text_out(pooled))

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Map images [M, C, height, width] to vectors [M, P], of any length."""
        height, width = self.config.image.image_size or (0, 0)  # whole patches; what is beyond is not read
        hidden = self.image(pixels[..., :height, :width], logits="none").hidden  # M T D
        pooled = hidden[:, 0] if self.image_pool is None else cast(Tensor, self.image_pool(hidden))
        return pooled if self.image_out is None else cast(Tensor, self.image_out(pooled))

    def compare(self, texts: Tensor, images: Tensor) -> TowersOutput:
        """Compare vectors of texts [N, P] and of images [M, P]."""
        texts, images = nnf.normalize(texts, dim=-1), nnf.normalize(images, dim=-1)
        logits = images @ texts.t() * self.logit_scale.exp()  # M N
        return TowersOutput(logits if self.logit_bias is None else logits + self.logit_bias, texts, images)

    def forward(self, ids: Tensor, pixels: Tensor, mask: Tensor | None = None) -> TowersOutput:
        """Compare every one of N texts with every one of M images."""
        return self.compare(self.embed_texts(ids, mask), self.embed_images(pixels))

    def extra_repr(self) -> str:
        """Return the line that `print(model)` shows."""
        return f"{sum(p.numel() for p in self.parameters()):,} parameters"


class AttentionPool(nn.Module):
    """One learned query attends to all states; a feed-forward follows, with a norm before it."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(spec.d_model) * spec.d_model**-0.5)
        self.attention = Attention(dataclasses.replace(spec, attention_dropout=0.0), "pool")
        self.norm = make_norm(spec.norm, spec.d_model)
        self.feedforward = FeedForward(spec)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [M, T, D] -> [M, D]."""
        query = self.query.expand(hidden.shape[0], 1, -1)
        x = cast(Tensor, self.attention(query, View(), hidden))
        return (x + cast(Tensor, self.feedforward(self.norm(x))))[:, 0]


def _projection(kind: str, wide: int, width: int) -> nn.Linear | None:
    if kind == "none":
        return None
    layer = nn.Linear(wide, width, bias=kind == "bias")
    nn.init.normal_(layer.weight, std=wide**-0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def pair_loss(logits: Tensor, kind: str) -> Tensor:
    """Return the loss of N pairs, of which image i and text i belong together: logits [N, N].

    "softmax" is the mean of two cross entropies, of the right text for each image and of the right image for
    each text. "sigmoid" asks of each pair on its own whether it belongs together, summed over the images of
    a text.
    """
    if kind == "softmax":
        targets = torch.arange(len(logits), device=logits.device)
        return (nnf.cross_entropy(logits, targets) + nnf.cross_entropy(logits.t(), targets)) / 2
    signs = 2 * torch.eye(len(logits), device=logits.device, dtype=logits.dtype) - 1
    return -nnf.logsigmoid(signs * logits).sum() / len(logits)
