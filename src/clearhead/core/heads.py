"""Heads map the last hidden states to what the task predicts.

Shapes: B batch, T length, D model, V vocabulary, C classes.
"""

import torch
from torch import Tensor, nn

from clearhead.core import feedforward, norms
from clearhead.core.config import HeadSpec
from clearhead.core.config.registry import Registry
from clearhead.core.taps import SILENT, Tap


class Head(nn.Module):
    """The base of every head, and the head that returns the hidden states themselves."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, real: Tensor | None, tap: Tap = SILENT) -> Tensor:
        """Map hidden states [B, T, D], of which some are `real` [B, T], to the output of the head."""
        return hidden


class LanguageHead(Head):
    """A score for every token of the vocabulary, at every position.

    The vectors are as wide as the token table, to which the output layer may be tied.
    """

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec)
        width, changes = spec.d_embedding, spec.transform or spec.d_embedding != spec.d_model
        self.transform = nn.Linear(spec.d_model, width, bias=spec.pooler_bias) if changes else None
        self.activation = feedforward.ACTIVATIONS[spec.activation] if spec.transform else None
        self.norm = norms.make_norm(spec.norm, width) if spec.transform else None
        self.out = nn.Linear(width, spec.vocab_size, bias=spec.bias)
        self.scale, self.softcap = spec.logit_scale, spec.logit_softcap

    def forward(self, hidden: Tensor, real: Tensor | None, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, T, V]."""
        x = hidden if self.transform is None else tap.step("transform", self.transform(hidden))
        if self.activation is not None and self.norm is not None:
            x = tap.step("norm", self.norm(tap.step("activation", self.activation(x))))
        if self.scale != 1:
            x = tap.step("scaled", x * self.scale)
        logits = tap.step("out", self.out(x))
        if self.softcap is None:
            return logits
        return tap.step("softcapped", self.softcap * torch.tanh(logits / self.softcap))


def pool(hidden: Tensor, real: Tensor | None, how: str) -> Tensor:
    """Return the first real token, the mean of real tokens or the last real token: [B, T, D] -> [B, D]."""
    if real is None:
        return hidden.mean(1) if how == "mean" else hidden[:, 0 if how == "cls" else -1]
    if how == "mean":
        weight = real[:, :, None].to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
    rows, slots = (torch.arange(size, device=hidden.device) for size in hidden.shape[:2])
    if how == "cls":
        return hidden[rows, torch.where(real, slots, real.shape[1] - 1).amin(1)]
    return hidden[rows, torch.where(real, slots, 0).amax(1)]


VARIANTS = "clearhead.variants.heads"
HEADS: Registry[type[Head]] = Registry(
    {
        "lm": LanguageHead,
        "mlm": LanguageHead,
        "classifier": f"{VARIANTS}:ClassifierHead",
        "tagger": f"{VARIANTS}:TokenHead",
        "span": f"{VARIANTS}:TokenHead",
        "embedding": f"{VARIANTS}:EmbeddingHead",
        "none": Head,
    }
)
