"""What a neuron of the feed-forward says: the straight way from what it writes to the scores of the head.

A neuron adds its column of `down` to the residual stream, as often as it fires. On its straight way to the head, that
vector passes norms and perhaps linear layers; what attention and later feed-forwards make of it is left out. Of a norm the
linear part is kept: the mean is taken off (layernorm) and the weight multiplied. Two things are taken as one: the size by
which a norm divides, which depends on the text, and the bend of a masked model's head. So the scores tell which tokens a
neuron promotes, not by how much.

Shapes: F neurons, D model, V tokens of the vocabulary or classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.bundle import Model
from clearhead.errors import InputError
from clearhead.inside.memories.neurons import feedforward
from clearhead.model.heads import ClassifierHead, LanguageHead, TokenHead
from clearhead.model.norms import LayerNorm
from clearhead.model.stack import Stack
from clearhead.tasks.run import names_of
from clearhead.tokens.labels import label

NEURONS = 1024  # scored at a time: their scores of all tokens are held at once


@dataclass(frozen=True)
class Readout:
    """The last layer of a head."""

    weight: Tensor  # [V, D]
    names: tuple[str, ...]  # of classes; none for a vocabulary
    note: str  # what to keep in mind


def readout(m: Model) -> Readout:
    """What turns the last state into scores; where no straight way leads there, an error says why."""
    head, config = m.model.head, m.config
    if isinstance(head, LanguageHead):
        bent = "; the bend in its head is taken as straight" if head.activation is not None else ""
        return Readout(_plain(head.out.weight), (), f"scores leave out what norms divide by{bent}")
    if isinstance(head, TokenHead):
        names = ("answer begins", "answer ends") if config.head == "span" else names_of(m)
        return Readout(_plain(head.out.weight), names, "scores leave out what norms divide by")
    if isinstance(head, ClassifierHead):
        if head.pooler is not None:
            raise InputError(
                "a pooler bends what the tokens say before the classes are scored: what a neuron promotes cannot be read off"
            )
        alone = "token alone: a neuron that fires elsewhere speaks through attention"
        where = {"cls": f"the first {alone}", "last": f"the last {alone}", "mean": "the mean of all tokens"}[
            head.pooling or "mean"
        ]
        return Readout(
            _plain(head.out.weight),
            names_of(m),
            f"scores leave out what norms divide by; classes are read from {where}",
        )
    raise InputError(
        f"head {config.head} scores no tokens and no classes: what a neuron promotes cannot be read off"
    )


def directions(m: Model, stack: Stack, layer: int, expert: int | None = None) -> Tensor:
    """What each neuron writes, as it arrives at the last layer of the head: [F, D]."""
    blocks, head = stack.layers(), m.model.head
    residual = blocks[layer].feedforward_residual
    written = _plain(feedforward(stack, layer, expert).down.weight).T  # F D
    written = _through(residual.after, _through(residual.inside, written) * residual.scale)
    for block in blocks[layer + 1 :]:
        for later in (block.attention_residual, block.cross_residual, block.feedforward_residual):
            written = _through(later.after if later is not None else None, written)
    written = _through(stack.norm, written)
    if isinstance(head, LanguageHead):
        if head.transform is not None:
            written = written @ _plain(head.transform.weight).T
        written = _through(head.norm, written) * head.scale
    return written


def extremes(written: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tokens each neuron promotes most and suppresses most, with their scores: four times [F, count]."""
    count = min(count, len(weight))
    parts = []
    for some in torch.split(written, NEURONS):
        scores = some @ weight.T  # F V
        high, low = scores.topk(count), scores.topk(count, largest=False)
        parts.append((high.indices, high.values, low.indices, low.values))
    first, second, third, fourth = (torch.cat(column) for column in zip(*parts))
    return first, second, third, fourth


def said(m: Model, names: tuple[str, ...], token: int) -> str:
    """A token or a class as people read it."""
    return names[token] if names else label(m.tokenizer, token)


def token_id(m: Model, token: str | int) -> int:
    """A token of the vocabulary: its number, its name in the tokenizer, or a text that is this one token."""
    size = m.config.vocab_size
    if isinstance(token, int):
        if not 0 <= token < size:
            raise InputError(f"token {token} is not in the vocabulary: ids go from 0 to {size - 1}")
        return token
    tokenizer = m.text_tokenizer
    named: int | None = tokenizer.token_to_id(token)
    if named is not None:
        return named
    for text in (token, " " + token):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) == 1 and ids[0] != m.special.get("unk"):
            return int(ids[0])
    pieces = tokenizer.encode(token, add_special_tokens=False).tokens
    raise InputError(
        f'"{token}" is no token of the vocabulary but {len(pieces)} ({" ".join(pieces[:8])}): name one of them'
    )


def _through(norm: nn.Module | None, written: Tensor) -> Tensor:
    """The linear part of a norm."""
    if norm is None:
        return written
    weight = _plain(norm.weight)  # type: ignore[arg-type]
    if isinstance(norm, LayerNorm):
        written = written - written.mean(-1, keepdim=True)
    return written * (1 + weight if norm.unit_offset else weight)


def _plain(weight: Tensor) -> Tensor:
    """A weight in float32, on the CPU."""
    return weight.detach().float().cpu()
