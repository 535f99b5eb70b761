"""The effect of an ablation on one text: the next token, class or tag, with and without parts of the model.

    effect(m, "The cat sat on the", heads=["3.2"]).kl

Shapes: T tokens, C what is chosen from: the vocabulary, or the classes.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import refuse
from clearhead.inside.choices import choices_of
from clearhead.inside.inputs import AnyModel, Prepared, Target, prepare
from clearhead.inside.parts.ablate import (
    Heads,
    How,
    Layers,
    Means,
    Selection,
    averaged,
    averaged_taps,
    means_for,
)
from clearhead.inside.results import Result


@dataclass(frozen=True)
class ChoiceEffect(Result):
    """One of the things a model may say, with and without."""

    label: str
    id: int
    before: float  # its probability
    after: float


@dataclass(frozen=True)
class Effect(Result):
    """What a model says of one text with and without some of its parts."""

    json_names = ("ablated", "how", "position", "kl", "tokens", "top")

    ablated: tuple[str, ...]
    how: How
    tokens: tuple[str, ...]  # what it read
    position: int | None  # of the token at which it was asked; None: of the whole text
    before: Tensor  # C logits
    after: Tensor  # C
    kl: float  # KL(before || after), bits
    top: tuple[ChoiceEffect, ...]  # the likeliest of either, by their probability before


def effect(
    m: AnyModel,
    given: Any,
    heads: Heads = (),
    layers: Layers = (),
    feedforwards: Layers = (),
    how: How = "zero",
    means: Means | None = None,
    *,
    target: Target = None,
    pair: str | None = None,
    position: int | None = None,
    top: int = 10,
) -> Effect:
    """Return the distribution over the next token, the class or the tag, with and without parts of a model.

    Args:
        m, given, target, pair: as for `prepare`.
        heads, layers, feedforwards: what is off together; see `ablating`.
        how: zero, or mean: of `means`, else of the tokens of this text.
        position: the token at which the model is asked, negative from the end; None: the last; of a masked
            language model the first mask, else the last.
        top: how many of the likeliest, before and after, are listed.
    """
    refuse(top < 1, f"top {top} must be 1 or more")
    prepared = prepare(m, given, target, pair)
    config = prepared.m.config
    refuse(
        config.head not in ("lm", "mlm", "classifier", "tagger"),
        f"a model with head {config.head} chooses nothing that could change: "
        "take one with lm, mlm, classifier or tagger",
    )
    selection = Selection.of(config, heads, layers, feedforwards)
    ablated, choices = selection.names(), choices_of(prepared)
    where = None if config.head == "classifier" else _position(prepared, position)

    def average() -> Means:
        _, seen = prepared.record(*averaged_taps(prepared.model))
        return averaged(config, [(seen, None, None)])

    def logits() -> Tensor:
        return choices.scores(prepared.run().required_logits)[0, where or 0].float().cpu()  # C

    means = means_for(how, means, average)
    with torch.no_grad():
        before = logits()
        with selection.off(prepared.model, means):
            after = logits()
    log_p, log_q = (x.double().log_softmax(-1) for x in (before, after))
    p, q = (x.double().softmax(-1) for x in (before, after))
    kl = float((p * (log_p - log_q)).sum().clamp(min=0)) / math.log(2)
    best = {int(one) for row in (p, q) for one in row.topk(min(top, len(p))).indices}
    listed = tuple(
        ChoiceEffect(choices.name(one), one, float(p[one]), float(q[one]))
        for one in sorted(best, key=lambda one: float(-p[one]))
    )
    return Effect(ablated, how, prepared.tokens.labels, where, before, after, kl, listed)


def _position(prepared: Prepared, position: int | None) -> int:
    """Return the place of a token, counted from the start."""
    ids, length, mask = prepared.tokens.ids, len(prepared.tokens), prepared.m.special.get("mask")
    if position is None:
        masked = prepared.m.config.head == "mlm" and mask in ids
        position = ids.index(mask) if masked and mask is not None else -1
    refuse(
        not -length <= position < length,
        f"there is no token {position}: the text has tokens 0 to {length - 1}",
    )
    return position % length
