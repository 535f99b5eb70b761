"""Ablation: what a model does without some of its heads, layers or feed-forwards. Its weights do not change.

    with ablating(m, heads=["3.2", "encoder.0.5"]):       # whatever runs in here runs without them
        m.generate("Once upon")
    ablate(m, "test.txt", heads=["3.2"]).increase         # what the loss rises by
    effect(m, "The cat sat on the", heads=["3.2"]).kl     # the next token, class or tag, with and without

Something ablated gives zeros (`how="zero"`), or what it gives on average over some data (`how="mean"`):

    a head           what it read, `z`, before the output projection; that projection's bias stays
    a feed-forward   its answer, `out`, bias included
    a layer          the answers of all its sublayers: attention, cross-attention, feed-forward

An answer is replaced before the norm, if any, that stands between it and the residual stream (sandwich,
output), and the norm after the sum (post) still acts. So in a pre-norm model a layer set to zero leaves the
stream as it was; a norm with a bias that follows a sublayer adds that bias still. With shared weights, a
layer is one depth, not all that have its weights.

Shapes: B batch, T length, H heads, E head width, D model, C what is chosen from: the vocabulary, or the
classes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.taps import edit
from clearhead.core.transformer import Transformer
from clearhead.errors import nearest, refuse
from clearhead.inside.choices import choices_of
from clearhead.inside.inputs import AnyModel, Prepared, Target, as_model, device_of, prepare, recorded
from clearhead.inside.names import AttentionHead, find_heads, layer_names, spec_of
from clearhead.inside.parts.examples import Data, Examples, Quality, examples_from, judge
from clearhead.inside.results import Result
from clearhead.learn.losses import arguments_for

How = Literal["zero", "mean"]
Heads = Iterable[AttentionHead | str] | AttentionHead | str
Layers = Iterable[int | str] | int | str  # 3 or "3" of the stack that feeds the head, else "encoder.3"
Means = Mapping[str, Tensor]  # by the name of the activation: H 1 E of a head's z, D of a sublayer's out
OnProgress = Callable[[str, int, int], None]
NOTHING_NAMED = "nothing is named to be ablated: name heads such as 0.1, layers or feed-forwards"


@dataclass(frozen=True)
class Ablation(Result):
    """What some examples cost with and without parts of a model."""

    ablated: tuple[str, ...]  # names of what was off
    how: How
    rows: int
    targets: int
    increase: float  # by how much the loss is higher without
    before: Quality
    after: Quality


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


# What is off ------------------------------------------------------------------------------------------------


def selected(
    config: ModelConfig, heads: Heads, layers: Layers, feedforwards: Layers
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return what is named, in words, and by activation which of its heads, or all of it."""
    own, blocks, inner = (
        as_heads(config, heads),
        find_blocks(config, layers),
        find_blocks(config, feedforwards),
    )
    names = (
        *(f"head {head}" for head in own),
        *(f"layer {block.replace('blocks.', '')}" for block in blocks),
        *(f"feed-forward {block.replace('blocks.', '')}" for block in inner),
    )
    found: dict[str, Any] = {f"{block}.feedforward.out": slice(None) for block in (*blocks, *inner)}
    for head in own:
        found.setdefault(f"{head.part}.z", []).append(head.number)
    for block in blocks:
        both = config.main.cross and not block.startswith("encoder.")
        found |= {f"{block}.{name}.out": slice(None) for name in ("attention", *(["cross"] if both else []))}
    return names, found


def ablating(
    model: AnyModel,
    heads: Heads = (),
    layers: Layers = (),
    feedforwards: Layers = (),
    means: Means | None = None,
) -> AbstractContextManager[None]:
    """Run the model without some of its parts for the length of a `with` block.

    Args:
        model: what `load` gave, or the model itself.
        heads: by their names, such as "3.2", "encoder.0.5", "cross.1.2".
        layers: by their numbers, or names such as "encoder.3".
        feedforwards: those of these layers.
        means: what takes the place of what they give, from `mean_activations`; None: zeros.
    """
    model = as_model(model).model
    return _off(model, selected(model.config, heads, layers, feedforwards)[1], means)


def _off(model: Transformer, parts: Mapping[str, Any], means: Means | None) -> AbstractContextManager[None]:
    """Return a context in which the model runs without what `selected` found."""
    for name in parts:
        refuse(
            means is not None and name not in means,
            f"the means hold nothing of {name}: make them by mean_activations of the same model",
        )
    found = means or {}
    return edit(
        model, {name: partial(_replaced, heads=of, mean=found.get(name)) for name, of in parts.items()}
    )


def _replaced(x: Tensor, heads: Any, mean: Tensor | None) -> Tensor:
    """Return a head's z [B, H, T, E], or an answer [B, T, D], at zero or at its mean [H, 1, E], [D]."""
    x = x.clone()
    x[:, heads] = 0 if mean is None else mean.to(x)[heads]
    return x


def as_heads(config: ModelConfig, heads: Heads) -> list[AttentionHead]:
    """Return heads, given as such or by name; each once, in the order of their names."""
    given = [heads] if isinstance(heads, AttentionHead | str) else heads
    return sorted(set(find_heads(config, map(str, given))))


def find_blocks(config: ModelConfig, layers: Layers) -> list[str]:
    """Return layers as activations are named, each once: 3 is "blocks.3", "encoder.0" "encoder.blocks.0"."""
    known = layer_names(config)
    names = [str(layer).strip() for layer in ([layers] if isinstance(layers, int | str) else layers)]
    for name in names:
        refuse(
            name not in known,
            f'there is no layer "{name}"{nearest(name, known)}: '
            f"layers are called {', '.join(list(known)[:12])}",
        )
    return list(dict.fromkeys(known[name] for name in names))


# Means ------------------------------------------------------------------------------------------------------


def mean_activations(m: AnyModel, data: Data, **options: Any) -> dict[str, Tensor]:
    """Return the mean of what every head and sublayer gives; `options` are as for `examples_from`."""
    model, examples = opened(m, data, options)
    return _averaged(model, (arguments_for(model, batch.to(device_of(model))) for batch in examples.batches))


def _averaged(model: Transformer, passes: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each activation over real tokens, from the inputs of some forward passes.

    [H, 1, E] of heads, [D] of sublayers.
    """
    config, sums, counts = model.config, dict[str, Tensor](), Counter[str]()
    taps = ["*.z", "*.attention.out", "*.feedforward.out", *(["*.cross.out"] if config.main.cross else [])]
    for given in passes:
        for name, x in recorded(model, taps, **given).items():
            kind, mask = ("encoder", "source_mask") if name.startswith("encoder.") else ("self", "mask")
            real = given.get(mask)
            if real is not None and spec_of(config, kind).input == "frames":
                real = real[:, :: config.conv_stride]
            rows = x.transpose(1, 2) if name.endswith(".z") else x  # B T ...
            rows = rows.flatten(0, 1) if real is None else rows[real]  # N ...
            sums[name] = sums.get(name, 0) + rows.double().sum(0).cpu()
            counts[name] += len(rows)
    means = {name: (total / counts[name]).float() for name, total in sums.items()}
    return {name: mean[:, None] if name.endswith(".z") else mean for name, mean in means.items()}


def means_for(how: str, means: Means | None, average: Callable[[], Means]) -> Means | None:
    """Return what replaces parts that are off: None for zeros, the means given, or those `average` makes."""
    refuse(how not in ("zero", "mean"), f'how "{how}" is not known: choose zero or mean')
    if how == "zero":
        return None
    return average() if means is None else means


def opened(m: AnyModel, data: Any, options: Mapping[str, Any]) -> tuple[Transformer, Examples]:
    """Return the model and the examples."""
    return as_model(m).model, examples_from(m, data, **options)


# Effect on loss ---------------------------------------------------------------------------------------------


def ablate(
    m: AnyModel,
    data: Data,
    heads: Heads = (),
    layers: Layers = (),
    feedforwards: Layers = (),
    how: How = "zero",
    means: Means | None = None,
    **options: Any,
) -> Ablation:
    """Measure loss and accuracy with and without parts of a model.

    Args:
        m: what `load` gave; or a bare model, with `Examples`.
        data: what `examples_from` takes, and `options` as there.
        heads: those that are off, together with what else is named; see `ablating`.
        layers: those that are off.
        feedforwards: those of these layers are off.
        how: zero, or mean: of `means`, else of the same data.
        means: mean activations, as `mean_activations` gives them.
        options: of `examples_from`.
    """
    model, examples = opened(m, data, options)
    ablated, parts = selected(model.config, heads, layers, feedforwards)
    refuse(not ablated, NOTHING_NAMED)
    means = means_for(how, means, lambda: mean_activations(model, examples))
    before = judge(model, examples)
    with _off(model, parts, means):
        after = judge(model, examples)
    return Ablation(
        ablated=ablated,
        how=how,
        rows=examples.rows,
        targets=examples.targets,
        increase=after.loss - before.loss,
        before=before,
        after=after,
    )


# Effect on one text -----------------------------------------------------------------------------------------


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
    where, model = asked_place(prepared, position), prepared.model
    choices = choices_of(prepared)
    ablated, parts = selected(prepared.m.config, heads, layers, feedforwards)
    refuse(not ablated, NOTHING_NAMED)

    def logits() -> Tensor:
        return choices.scores(prepared.run().required_logits)[0, where or 0].float().cpu()  # C

    means = means_for(how, means, lambda: means_of_text(prepared))
    with torch.no_grad():
        before = logits()
        with _off(model, parts, means):
            after = logits()
    return compared(prepared, ablated, how, where, before, after, top)


def means_of_text(prepared: Prepared) -> Means:
    """Return the mean of what every head and sublayer gives, over the tokens of one text."""
    return _averaged(prepared.model, [{"ids": prepared.main, **prepared.given}])


def compared(
    prepared: Prepared,
    ablated: tuple[str, ...],
    how: How,
    where: int | None,
    before: Tensor,
    after: Tensor,
    top: int,
) -> Effect:
    """Return what changed between logits [C] with and without some parts."""
    choices = choices_of(prepared)
    log_p, log_q = (x.double().log_softmax(-1) for x in (before, after))
    p, q = (x.double().softmax(-1) for x in (before, after))
    kl = float((p * (log_p - log_q)).sum().clamp(min=0)) / math.log(2)
    best = {int(one) for row in (p, q) for one in row.topk(min(top, len(p))).indices}
    listed = tuple(
        ChoiceEffect(choices.name(one), one, float(p[one]), float(q[one]))
        for one in sorted(best, key=lambda one: float(-p[one]))
    )
    return Effect(ablated, how, prepared.tokens.labels, where, before, after, kl, listed)


def asked_place(prepared: Prepared, position: int | None) -> int | None:
    """Return the token at which a model is asked, None: the whole text; refuse one that chooses nothing."""
    head, ids, length = prepared.m.config.head, prepared.tokens.ids, len(prepared.tokens)
    refuse(
        head not in ("lm", "mlm", "classifier", "tagger"),
        f"a model with head {head} chooses nothing that could change: "
        "take one with lm, mlm, classifier or tagger",
    )
    if head == "classifier":
        return None
    if position is None:
        mask = prepared.m.special.get("mask")
        position = ids.index(mask) if head == "mlm" and mask is not None and mask in ids else -1
    refuse(
        not -length <= position < length,
        f"there is no token {position}: the text has tokens 0 to {length - 1}",
    )
    return position % length
