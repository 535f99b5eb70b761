"""The effect of an ablation on one text: the model's next token, class or tag, with and without some of its parts.

    effect(m, "The cat sat on the", heads=["3.2"]).kl

Shapes: T tokens, C what is chosen from: the vocabulary, or the classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.bundle import Model
from clearhead.errors import InputError
from clearhead.inside.inputs import Prepared, prepare
from clearhead.inside.parts.ablate import (
    Averages,
    Heads,
    How,
    Layers,
    Means,
    ablating,
    as_heads,
    check_how,
    names_of,
)
from clearhead.model.transformer import Transformer
from clearhead.tokens.labels import label


@dataclass(frozen=True)
class Choice:
    """One of the things a model may say, with and without."""

    label: str
    id: int
    before: float  # its probability
    after: float


@dataclass(frozen=True)
class Effect:
    """What a model says of one text with and without some of its parts."""

    ablated: tuple[str, ...]
    how: How
    tokens: tuple[str, ...]  # what it read
    position: int | None  # of the token at which it was asked; None: of the whole text
    before: Tensor  # C logits
    after: Tensor  # C
    kl: float  # KL(before || after), nats
    top: tuple[Choice, ...]  # the likeliest of either, by their probability before

    def to_dict(self) -> dict[str, Any]:
        """For JSON; of the logits, only what `top` needs."""
        plain = {name: getattr(self, name) for name in ("how", "position", "kl")}
        return {
            "ablated": list(self.ablated),
            **plain,
            "tokens": list(self.tokens),
            "top": [asdict(one) for one in self.top],
        }


def effect(
    m: Model | Transformer,
    given: Any,
    heads: Heads = (),
    layers: Layers = (),
    feedforwards: Layers = (),
    how: How = "zero",
    means: Means | None = None,
    *,
    target: str | Sequence[int] | None = None,
    pair: str | None = None,
    position: int | None = None,
    top: int = 10,
) -> Effect:
    """The distribution over the next token, the class or the tag, with and without parts of a model.

    Args:
        m, given, target, pair: as for `prepare`.
        heads, layers, feedforwards: what is off together; see `ablating`.
        how: zero, or mean: of `means`, else of the tokens of this text.
        position: the token at which the model is asked, negative from the end; None: the last; of a masked language model the
            first mask, else the last.
        top: how many of the likeliest, before and after, are listed.
    """
    check_how(how)
    if top < 1:
        raise InputError(f"top {top} must be 1 or more")
    prepared = prepare(m, given, target, pair)
    config = prepared.m.config
    if config.head not in ("lm", "mlm", "classifier", "tagger"):
        raise InputError(
            f"a model with head {config.head} chooses nothing that could change: take one with lm, mlm, classifier or tagger"
        )
    chosen = as_heads(config, heads)
    ablated = names_of(config, chosen, layers, feedforwards)
    if not ablated:
        raise InputError("nothing is named to be ablated: name heads such as 0.1, layers or feed-forwards")
    where = None if config.head == "classifier" else _position(prepared, position)
    averages = Averages(prepared.model)
    if how == "mean" and means is None:
        averages.add(prepared.record(*averages.patterns)[1], None, None)
        means = averages.means()
    with torch.no_grad():
        before = _logits(prepared, where)
        with ablating(prepared.model, chosen, layers, feedforwards, means if how == "mean" else None):
            after = _logits(prepared, where)
    p, q = before.double().softmax(-1), after.double().softmax(-1)
    log_p, log_q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    kl = float((p * (log_p - log_q)).sum().clamp(min=0))
    count = min(top, len(p))
    best = {int(one) for row in (p, q) for one in row.topk(count).indices}
    listed = sorted(best, key=lambda one: float(-p[one]))
    choices = tuple(Choice(_label(prepared.m, one), one, float(p[one]), float(q[one])) for one in listed)
    return Effect(ablated, how, prepared.tokens.labels, where, before, after, kl, choices)


def _position(prepared: Prepared, position: int | None) -> int:
    """The place of a token, counted from the start."""
    length, mask = len(prepared.tokens), prepared.m.special.get("mask")
    if position is None:
        masked = prepared.m.config.head == "mlm" and mask in prepared.tokens.ids
        position = prepared.tokens.ids.index(mask) if masked and mask is not None else -1
    if not -length <= position < length:
        raise InputError(f"there is no token {position}: the text has tokens 0 to {length - 1}")
    return position % length


def _logits(prepared: Prepared, position: int | None) -> Tensor:
    """Scores at one token, or of the whole text: [C], on the CPU."""
    logits = prepared.run().required_logits[0]
    return (logits if position is None else logits[position]).float().cpu()


def _label(m: Model, number: int) -> str:
    if m.config.head in ("lm", "mlm"):
        return label(m.tokenizer, number)
    return m.labels[number] if m.labels else f"LABEL_{number}"
