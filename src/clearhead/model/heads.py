"""Heads: what the last hidden states are for.

Shapes: B batch, T length, D model, V vocabulary, C classes.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.feedforward import ACTIVATIONS
from clearhead.model.norms import make_norm


class Head(nn.Module):
    """The shape of every head, and the one that hands the hidden states through."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        """[B, T, D] and which tokens are real [B, T] -> what the head says."""
        return hidden


class LanguageHead(Head):
    """A score for every token of the vocabulary, at every position, from vectors as wide as the token table, to which it may be tied."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.d_embedding and config.head_activation
        width = config.d_embedding
        self.transform = (
            nn.Linear(config.d_model, width) if config.head_transform or width != config.d_model else None
        )
        self.activation = ACTIVATIONS[config.head_activation] if config.head_transform else None
        self.norm = make_norm(config, width) if config.head_transform else None
        self.out = nn.Linear(width, config.vocab_size, bias=bool(config.head_bias))
        self.scale, self.softcap = config.logit_scale, config.logit_softcap

    def forward(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        """[B, T, D] -> [B, T, V]."""
        x = hidden if self.transform is None else self.transform(hidden)
        if self.activation is not None and self.norm is not None:
            x = self.norm(self.activation(x))
        if self.scale != 1:
            x = x * self.scale
        logits = cast(Tensor, self.out(x))
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Pooled(Head):
    """One vector for the whole input: the first token's, the mean, or the last real token's; perhaps a dense layer on it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.pooling = config.pooling
        self.pooler = nn.Linear(config.d_model, config.d_model) if config.pooler != "none" else None
        self.bend = torch.tanh if config.pooler == "tanh" else torch.relu
        self.dropout = config.dropout

    def pool(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        """[B, T, D] -> [B, D]."""
        pooled = pool(hidden, real, self.pooling or "mean")
        if self.pooler is not None:
            pooled = self.bend(self.pooler(pooled))
        return nnf.dropout(pooled, self.dropout, self.training)


def pool(hidden: Tensor, real: Tensor | None, how: str) -> Tensor:
    """First real token, mean over real tokens, or last real token: [B, T, D] -> [B, D]."""
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    if how == "mean":
        if real is None:
            return hidden.mean(1)
        weight = real[:, :, None].to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
    if real is None:
        return hidden[:, 0] if how == "cls" else hidden[:, -1]
    slots = torch.arange(hidden.shape[1], device=hidden.device)
    if how == "cls":
        return hidden[rows, torch.where(real, slots, hidden.shape[1] - 1).amin(1)]
    return hidden[rows, torch.where(real, slots, 0).amax(1)]


class ClassifierHead(Pooled):
    """A score for each class of the whole input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.out = nn.Linear(config.d_model, config.n_classes, bias=bool(config.head_bias))

    def forward(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        """[B, T, D] -> [B, C]."""
        return cast(Tensor, self.out(self.pool(hidden, real)))


class EmbeddingHead(Pooled):
    """The pooled vector itself, perhaps scaled to length one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.normalise = config.normalise

    def forward(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        """[B, T, D] -> [B, D]."""
        pooled = self.pool(hidden, real)
        return nnf.normalize(pooled, dim=-1) if self.normalise else pooled


class TokenHead(Head):
    """A score for each class of every token; for spans, the two classes are "begins here" and "ends here"."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.dropout = config.dropout
        n_classes = 2 if config.head == "span" else config.n_classes
        self.out = nn.Linear(config.d_model, n_classes, bias=bool(config.head_bias))

    def forward(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        """[B, T, D] -> [B, T, C]."""
        return cast(Tensor, self.out(nnf.dropout(hidden, self.dropout, self.training)))


HEADS: dict[str, type[Head]] = {
    "lm": LanguageHead,
    "mlm": LanguageHead,
    "classifier": ClassifierHead,
    "tagger": TokenHead,
    "span": TokenHead,
    "embedding": EmbeddingHead,
    "none": Head,
}
