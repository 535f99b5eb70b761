"""Ablation: what a model does without some of its heads, layers or feed-forwards. Its weights do not change.

    with ablating(m, heads=["3.2", "encoder.0.5"]):       # whatever runs in here runs without them
        m.generate("Once upon")
    ablate(m, "test.txt", heads=["3.2"]).increase         # what the loss rises by
    ablate_each(m, "test.txt").values                     # the same for each head alone: layer x head

Something ablated gives zeros (`how="zero"`), or what it gives on average over some data (`how="mean"`):

    a head           what it read, `z`, before the output projection; that projection's bias stays
    a feed-forward   its answer, `out`, bias included
    a layer          the answers of all its sublayers: attention, cross-attention, feed-forward

An answer is replaced before the norm, if any, that stands between it and the residual stream (sandwich,
output), and the norm after the sum (post) still acts. So in a pre-norm model a layer set to zero leaves the
stream as it was; a norm with a bias that follows a sublayer adds that bias still. With shared weights, a
layer is one depth, not all that have its weights.

Shapes: B batch, T length, H heads, E head width, D model, L attentions of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.errors import InputError, nearest, refuse
from clearhead.inside.inputs import AnyModel, as_model, device_of, recorded
from clearhead.inside.names import AttentionHead, all_heads, attentions, find_heads, layer_names, spec_of
from clearhead.inside.parts.examples import Data, Examples, Quality, examples_from, judge
from clearhead.inside.results import Result, filled
from clearhead.losses import arguments_for
from clearhead.model.taps import edit
from clearhead.model.transformer import Transformer

How = Literal["zero", "mean"]
Heads = Iterable[AttentionHead | str] | AttentionHead | str
Layers = Iterable[int | str] | int | str  # 3 or "3" of the stack that feeds the head, else "encoder.3"
Means = Mapping[str, Tensor]  # by the name of the activation: H 1 E of a head's z, D of a sublayer's out
AVERAGED = ("*.attention.z", "*.attention.out", "*.feedforward.out")
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class HeadTable(Result):
    """One number for each head: a row for each attention in the order of the forward pass."""

    quantity: str  # what the numbers are
    rows: tuple[str, ...]  # "0", "1", ..., "encoder.0", ..., "cross.0", ...
    values: NDArray[np.float64]  # L, most heads; NaN where an attention has fewer heads

    @classmethod
    def of(cls, config: ModelConfig, quantity: str, numbers: Mapping[AttentionHead, float]) -> HeadTable:
        """Return the table of one number for each head."""
        found = attentions(config)
        rows = [[numbers[head] for head in one.heads] for one in found]
        return cls(quantity, tuple(map(str, found)), filled(rows))

    def numbers(self, config: ModelConfig) -> dict[AttentionHead, float]:
        """Return one number for each head of the model that the table is of."""
        return {
            head: float(value)
            for one, row in zip(attentions(config), self.values)
            for head, value in zip(one.heads, row)
        }


@dataclass(frozen=True)
class Ablation(Result):
    """What some examples cost with and without parts of a model."""

    json_names = ("ablated", "how", "rows", "targets", "increase", "before", "after")

    ablated: tuple[str, ...]  # names of what was off
    how: How
    rows: int
    targets: int
    before: Quality
    after: Quality

    @property
    def increase(self) -> float:
        """By how much the loss is higher without."""
        return self.after.loss - self.before.loss


# What is off ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Heads, layers and feed-forwards of a model that are off together; layers as activations are named."""

    heads: list[AttentionHead]
    layers: list[str]
    feedforwards: list[str]

    @classmethod
    def of(cls, config: ModelConfig, heads: Heads, layers: Layers, feedforwards: Layers) -> Selection:
        """Return what is named; an error says which heads and layers there are."""
        return cls(as_heads(config, heads), find_blocks(config, layers), find_blocks(config, feedforwards))

    def names(self) -> tuple[str, ...]:
        """Return what is off, in words; nothing at all is refused."""
        found = [f"head {head}" for head in self.heads]
        found += [f"layer {block.replace('blocks.', '')}" for block in self.layers]
        found += [f"feed-forward {block.replace('blocks.', '')}" for block in self.feedforwards]
        refuse(not found, "nothing is named to be ablated: name heads such as 0.1, layers or feed-forwards")
        return tuple(found)

    def off(self, model: Transformer, means: Means | None) -> AbstractContextManager[None]:
        """Return a context in which the model runs without these parts; see `ablating`."""
        gone: dict[str, Any] = {}  # by activation: which of its heads, or all of it
        for head in self.heads:
            gone.setdefault(f"{head.part}.z", []).append(head.number)
        cross = model.config.main.cross
        for block in self.layers:
            own = ("attention", "cross") if cross and not block.startswith("encoder.") else ("attention",)
            gone |= {f"{block}.{part}.out": slice(None) for part in own}
        gone |= {f"{block}.feedforward.out": slice(None) for block in (*self.layers, *self.feedforwards)}
        missing = [] if means is None else [name for name in gone if name not in means]
        if missing:
            raise InputError(
                f"the means hold nothing of {missing[0]}: make them by mean_activations of the same model"
            )
        found = means or {}
        changes = {
            name: partial(_replaced, heads=heads, mean=found.get(name)) for name, heads in gone.items()
        }
        return edit(model, changes)


@contextmanager
def ablating(
    model: AnyModel,
    heads: Heads = (),
    layers: Layers = (),
    feedforwards: Layers = (),
    means: Means | None = None,
) -> Iterator[None]:
    """Run the model without some of its parts for the length of a `with` block.

    Args:
        model: what `load` gave, or the model itself.
        heads: by their names, such as "3.2", "encoder.0.5", "cross.1.2".
        layers: by their numbers, or names such as "encoder.3".
        feedforwards: those of these layers.
        means: what takes the place of what they give, from `mean_activations`; None: zeros.
    """
    model = as_model(model).model
    with Selection.of(model.config, heads, layers, feedforwards).off(model, means):
        yield


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
    found = []
    for layer in [layers] if isinstance(layers, int | str) else layers:
        name = str(layer).strip()
        if name not in known:
            raise InputError(
                f'there is no layer "{layer}"{nearest(str(layer), known)}: '
                f"layers are called {', '.join(list(known)[:12])}"
            )
        found.append(known[name])
    return list(dict.fromkeys(found))


# Means ------------------------------------------------------------------------------------------------------


def averaged(
    config: ModelConfig, passes: Iterable[tuple[Mapping[str, Tensor], Tensor | None, Tensor | None]]
) -> dict[str, Tensor]:
    """Return the mean of each activation over real tokens: [H, 1, E] of heads, [D] of sublayers.

    A pass has its activations by name, the mask and the source mask [B, T].
    """
    sums, counts = dict[str, Tensor](), Counter[str]()
    for seen, mask, source_mask in passes:
        for name, x in seen.items():
            kind, real = ("encoder", source_mask) if name.startswith("encoder.") else ("self", mask)
            if real is not None and spec_of(config, kind).input == "frames":
                real = real[:, :: config.conv_stride]
            rows = x.transpose(1, 2) if name.endswith(".z") else x  # B T ...
            rows = rows.flatten(0, 1) if real is None else rows[real]  # N ...
            sums[name] = sums.get(name, 0) + rows.double().sum(0).cpu()
            counts[name] += len(rows)
    means = {name: (total / counts[name]).float() for name, total in sums.items()}
    return {name: mean[:, None] if name.endswith(".z") else mean for name, mean in means.items()}


def averaged_taps(model: Transformer) -> tuple[str, ...]:
    """Return patterns for the names of everything that can be ablated."""
    return (*AVERAGED, "*.cross.z", "*.cross.out") if model.main.spec.cross else AVERAGED


def mean_activations(m: AnyModel, data: Data, **options: Any) -> dict[str, Tensor]:
    """Return the mean of what every head and sublayer gives; `options` are as for `examples_from`."""
    model, examples = opened(m, data, options)
    taps = averaged_taps(model)
    batches = (batch.to(device_of(model)) for batch in examples.batches)
    passes = (
        (recorded(model, taps, **arguments_for(model, batch)), batch.mask, batch.source_mask)
        for batch in batches
    )
    return averaged(model.config, passes)


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
        heads, layers, feedforwards: what is off together; see `ablating`.
        how: zero, or mean: of `means`, else of the same data.
    """
    model, examples = opened(m, data, options)
    selection = Selection.of(model.config, heads, layers, feedforwards)
    ablated = selection.names()
    means = means_for(how, means, lambda: mean_activations(model, examples))
    before = judge(model, examples)
    with selection.off(model, means):
        after = judge(model, examples)
    return Ablation(ablated, how, examples.rows, examples.targets, before, after)


def ablate_each(
    m: AnyModel,
    data: Data,
    how: How = "zero",
    means: Means | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
    **options: Any,
) -> HeadTable:
    """Measure by how much the loss rises without each head alone: one pass over the data for each head."""
    model, examples = opened(m, data, options)
    means = means_for(how, means, lambda: mean_activations(model, examples))
    whole, heads = judge(model, examples).loss, all_heads(model.config)
    increase: dict[AttentionHead, float] = {}
    for done, head in enumerate(heads, start=1):
        with ablating(model, [head], means=means):
            increase[head] = judge(model, examples).loss - whole
        on_progress("heads", done, len(heads))
    return HeadTable.of(model.config, "loss increase", increase)
