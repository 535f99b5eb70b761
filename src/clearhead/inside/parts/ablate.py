"""Ablation: what a model does without some of its heads, layers or feed-forwards. Nothing of its weights is changed.

    with ablating(m, heads=["3.2", "encoder.0.5"]):       # whatever runs in here runs without them
        m.generate("Once upon")
    ablate(m, "test.txt", heads=["3.2"]).increase         # what the loss rises by
    ablate_each(m, "test.txt").values                     # the same for each head alone: layer x head

Something ablated gives zeros (`how="zero"`), or what it gives on average over some data (`how="mean"`):

    a head           what it read, `z`, before the output projection; that projection's bias stays
    a feed-forward   its answer, `out`, bias included
    a layer          the answers of all its sublayers: attention, cross-attention where there is one, feed-forward

An answer is replaced before the norm, if any, that stands between it and the residual stream (sandwich, output), and the
norm after the sum (post) still acts. So in a pre-norm model a layer set to zero leaves the stream as it was; a norm with a
bias that follows a sublayer adds that bias still. With shared weights, a layer is one depth, not all that have its weights.

Shapes: B batch, T length, H heads, E head width, D model, L attentions of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.bundle import Model
from clearhead.config import ModelConfig
from clearhead.errors import InputError, nearest
from clearhead.inside.names import Head, all_heads, attentions, find_heads
from clearhead.inside.parts.examples import Data, Examples, Quality, examples_from, judge
from clearhead.model.taps import edit, record
from clearhead.model.transformer import Transformer, evaluating
from clearhead.training.losses import arguments_for

How = Literal["zero", "mean"]
Heads = Iterable[Head | str] | Head | str
Layers = (
    Iterable[int | str] | int | str
)  # 3 or "3" of the stack that feeds the head, "encoder.3" of the one before it
Means = Mapping[str, Tensor]  # by the name of the activation: H 1 E of a head's z, D of a sublayer's out
AVERAGED = ("*.attention.z", "*.cross.z", "*.attention.out", "*.cross.out", "*.feedforward.out")
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class HeadMap:
    """One number for each head: a row for each attention in the order of the forward pass."""

    quantity: str  # what the numbers are
    rows: tuple[str, ...]  # "0", "1", ..., "encoder.0", ..., "cross.0", ...
    values: NDArray[np.float64]  # L, most heads; NaN where an attention has fewer heads

    @classmethod
    def of(cls, config: ModelConfig, quantity: str, numbers: Mapping[Head, float]) -> HeadMap:
        """From one number for each head."""
        found = attentions(config)
        table = np.full((len(found), max(count for _, _, count in found)), np.nan)
        for row, (kind, layer, count) in enumerate(found):
            table[row, :count] = [numbers[Head(kind, layer, number)] for number in range(count)]
        return cls(
            quantity, tuple(str(Head(kind, layer, 0)).rpartition(".")[0] for kind, layer, _ in found), table
        )

    def numbers(self, config: ModelConfig) -> dict[Head, float]:
        """One number for each head of the model that the map is of."""
        place = {row: index for index, row in enumerate(self.rows)}
        return {
            head: float(self.values[place[str(head).rpartition(".")[0]], head.number])
            for head in all_heads(config)
        }

    def to_dict(self) -> dict[str, Any]:
        """For JSON; null where there is no head."""
        table = [[None if np.isnan(value) else float(value) for value in row] for row in self.values]
        return {"quantity": self.quantity, "rows": list(self.rows), "values": table}


@dataclass(frozen=True)
class Ablation:
    """What some examples cost with and without parts of a model."""

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

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = {name: getattr(self, name) for name in ("how", "rows", "targets", "increase")}
        return {
            "ablated": list(self.ablated),
            **plain,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
        }


@contextmanager
def ablating(
    model: Model | Transformer,
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
    model = model.model if isinstance(model, Model) else model
    config = model.config
    gone: dict[str, list[int]] = {}
    for head in as_heads(config, heads):
        gone.setdefault(head.part, []).append(head.number)
    changes: dict[str, Callable[[Tensor], Tensor]] = {}
    for part, numbers in gone.items():
        changes[f"{part}.z"] = partial(_without, gone=torch.tensor(numbers), mean=_mean(means, f"{part}.z"))
    sublayers = [
        f"{block}.{part}" for block in find_blocks(config, layers) for part in parts_of(config, block)
    ]
    for part in [*sublayers, *(f"{block}.feedforward" for block in find_blocks(config, feedforwards))]:
        changes[f"{part}.out"] = partial(_replaced, mean=_mean(means, f"{part}.out"))
    with edit(model, changes):
        yield


def _mean(means: Means | None, name: str) -> Tensor | None:
    if means is not None and name not in means:
        raise InputError(f"the means hold nothing of {name}: make them by mean_activations of the same model")
    return None if means is None else means[name]


def _without(z: Tensor, gone: Tensor, mean: Tensor | None) -> Tensor:
    """[B, H, T, E] with some heads at zero, or at their mean [H, 1, E]."""
    off = torch.zeros(z.shape[1], 1, 1, dtype=torch.bool, device=z.device).index_fill(
        0, gone.to(z.device), True
    )
    return torch.where(off, torch.zeros_like(z) if mean is None else mean.to(z), z)


def _replaced(answer: Tensor, mean: Tensor | None) -> Tensor:
    """[B, T, D] at zero, or everywhere at the mean [D]."""
    return torch.zeros_like(answer) if mean is None else mean.to(answer).expand_as(answer)


def as_heads(config: ModelConfig, heads: Heads) -> list[Head]:
    """Heads, given as such or by name; each once, in the order of the model."""
    given = [heads] if isinstance(heads, Head | str) else heads
    return sorted(set(find_heads(config, map(str, given))))


def find_blocks(config: ModelConfig, layers: Layers) -> list[str]:
    """Layers as activations are named: 3 is "blocks.3", "encoder.0" is "encoder.blocks.0"; an error says which there are."""
    plans = [plan for plan in (config.encoder, config.decoder) if plan is not None]
    known = {
        f"{plan.prefix}{layer}": f"{plan.prefix}blocks.{layer}"
        for plan in plans
        for layer in range(plan.n_layers)
    }
    found = []
    for layer in [layers] if isinstance(layers, int | str) else layers:
        if str(layer).strip() not in known:
            near = nearest(str(layer), known)
            raise InputError(
                f'there is no layer "{layer}"{near}: layers are called {", ".join(list(known)[:12])}'
            )
        found.append(known[str(layer).strip()])
    return list(dict.fromkeys(found))


def parts_of(config: ModelConfig, block: str) -> tuple[str, ...]:
    """The sublayers of a block."""
    plan = config.decoder or config.encoder
    crossing = plan is not None and plan.cross and not block.startswith("encoder.")
    return ("attention", "cross", "feedforward") if crossing else ("attention", "feedforward")


def names_of(config: ModelConfig, heads: Heads, layers: Layers, feedforwards: Layers) -> tuple[str, ...]:
    """What is off, in words."""
    blocks, inner = find_blocks(config, layers), find_blocks(config, feedforwards)
    short = [name.replace("blocks.", "") for name in (*blocks, *inner)]
    whole = [f"layer {name}" for name in short[: len(blocks)]] + [
        f"feed-forward {name}" for name in short[len(blocks) :]
    ]
    return (*(f"head {head}" for head in as_heads(config, heads)), *whole)


# Means ----------------------------------------------------------------------------------------------------------------


class Averages:
    """Means over real tokens of everything that can be ablated."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.sums, self.counts = model, dict[str, Tensor](), dict[str, int]()
        self.patterns = [pattern for pattern in AVERAGED if "cross" not in pattern or model.main.spec.cross]

    def add(self, seen: Mapping[str, Tensor], mask: Tensor | None, source_mask: Tensor | None) -> None:
        """Activations of one forward pass; the masks [B, T] say which tokens are real."""
        config = self.model.config
        for name, x in seen.items():
            inner = name.startswith("encoder.")
            real, plan = (source_mask, config.encoder) if inner else (mask, self.model.main.spec)
            if real is not None and plan is not None and plan.input == "frames":
                real = real[:, :: config.conv_stride]
            rows = x.transpose(1, 2) if name.endswith(".z") else x  # B T ...
            rows = rows.flatten(0, 1) if real is None else rows[real]  # N ...
            total = rows.double().sum(0).cpu()
            self.sums[name] = self.sums[name] + total if name in self.sums else total
            self.counts[name] = self.counts.get(name, 0) + len(rows)

    def means(self) -> dict[str, Tensor]:
        """By name: [H, 1, E] of heads, [D] of sublayers."""
        found = {name: (total / self.counts[name]).float() for name, total in self.sums.items()}
        return {name: mean[:, None] if name.endswith(".z") else mean for name, mean in found.items()}


def mean_activations(m: Model | Transformer, data: Data, **options: Any) -> dict[str, Tensor]:
    """What every head and sublayer gives on average over the real tokens of some data; `options` as for `examples_from`."""
    model, examples = opened(m, data, options)
    averages, device = Averages(model), next(model.parameters()).device
    for batch in examples.batches:
        batch = batch.to(device)
        with torch.no_grad(), evaluating(model), record(model, *averages.patterns) as seen:
            model(**arguments_for(model, batch), logits="none")
        averages.add(seen, batch.mask, batch.source_mask)
    return averages.means()


def opened(m: Model | Transformer, data: Any, options: Mapping[str, Any]) -> tuple[Transformer, Examples]:
    """The model and the examples."""
    return m.model if isinstance(m, Model) else m, examples_from(m, data, **options)


def check_how(how: str) -> None:
    """Refuse a way to ablate that there is not."""
    if how not in ("zero", "mean"):
        raise InputError(f'how "{how}" is not known: choose zero or mean')


# Effect on loss -------------------------------------------------------------------------------------------------------


def ablate(
    m: Model | Transformer,
    data: Data,
    heads: Heads = (),
    layers: Layers = (),
    feedforwards: Layers = (),
    how: How = "zero",
    means: Means | None = None,
    **options: Any,
) -> Ablation:
    """Loss and accuracy with and without parts of a model.

    Args:
        m: what `load` gave; or a bare model, with `Examples`.
        data: what `examples_from` takes, and `options` as there.
        heads, layers, feedforwards: what is off together; see `ablating`.
        how: zero, or mean: of `means`, else of the same data.
    """
    check_how(how)
    model, examples = opened(m, data, options)
    heads = as_heads(model.config, heads)
    ablated = names_of(model.config, heads, layers, feedforwards)
    if not ablated:
        raise InputError("nothing is named to be ablated: name heads such as 0.1, layers or feed-forwards")
    if how == "mean" and means is None:
        means = mean_activations(model, examples)
    before = judge(model, examples)
    with ablating(model, heads, layers, feedforwards, means if how == "mean" else None):
        after = judge(model, examples)
    return Ablation(ablated, how, examples.rows, examples.targets, before, after)


def ablate_each(
    m: Model | Transformer,
    data: Data,
    how: How = "zero",
    means: Means | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
    **options: Any,
) -> HeadMap:
    """By how much the loss rises without each head alone: one pass over the data for each head."""
    check_how(how)
    model, examples = opened(m, data, options)
    if how == "mean" and means is None:
        means = mean_activations(model, examples)
    whole, increase, heads = judge(model, examples).loss, dict[Head, float](), all_heads(model.config)
    for done, head in enumerate(heads, start=1):
        with ablating(model, [head], means=means if how == "mean" else None):
            increase[head] = judge(model, examples).loss - whole
        on_progress("heads", done, len(heads))
    return HeadMap.of(model.config, "loss increase", increase)
