"""Importance of heads and feed-forwards, and pruning: heads cut out of the weights.

    importance(m, "test.txt").heads.values                # layer x head, all by one backward pass
    ablate_each(m, "test.txt").values                     # the same by a pass without each head
    smaller = prune(m, ["0.1", "3.2", "cross.1.0"])       # a copy; `m` stays as it is
    smaller.save("smaller")

By gradient (Michel et al., 2019), each head's `z` is multiplied by a mask that is one, so nothing changes,
and the gradient with respect to that mask is taken. The mask has one entry for each row of a batch, so that
rows whose gradients have opposite signs do not cancel:

    importance = (sum over rows of |d loss of the row / d mask|) / number of targets

Pruning removes the rows of q, k and v and the columns of out that belong to a head; the smaller model
computes what the whole one does without them. Names count the heads that a layer has *now*: after "0.1" is
gone, what was "0.2" is called "0.1". `config.pruned_heads` keeps the first numbers, since a bias by head
(ALiBi, relative) goes by those. What is refused, because the smaller model would not be the same or could not
be built:

    part of a key/value group      heads that share keys and values go together: `whole_groups=True`
    one of several depths with     a head goes at all of them: `whole_groups=True`
    the same weights
    all heads of a layer           one must stay
    qk_norm "full"                 its norm is taken over all heads

`prune_curve` measures quality against heads removed, least important first. There heads are masked, not cut
out, so that a layer may lose all of its own.

Shapes: B rows, T length, H heads, K key/value heads, E head width, D model, L attentions of a model.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

from clearhead.core.attention import Attention
from clearhead.core.config import BIASES, ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse, refuse_unknown
from clearhead.hub import checkpoint, registry
from clearhead.inside import inputs, names, results
from clearhead.inside.ablation import Data, How, judge, mean_activations, means_for, opened
from clearhead.inside.interventions import Values, ablating
from clearhead.inside.names import AttentionHead, Heads, all_heads, as_heads, attentions, layer_names
from clearhead.learn.evaluation.metrics import OnProgress
from clearhead.learn.tasks.table import TASKS
from clearhead.run.api import Model
from clearhead.run.quant.apply import refuse_quantized
from clearhead.variants.contexts import edit, evaluating


@dataclass(frozen=True)
class HeadTable(results.Result):
    """One number for each head: a row for each attention in the order of the forward pass."""

    quantity: str  # what the numbers are
    rows: tuple[str, ...]  # "0", "1", ..., "encoder.0", ..., "cross.0", ...
    values: results.Array  # L, most heads; NaN where an attention has fewer heads

    @classmethod
    def of(cls, config: ModelConfig, quantity: str, numbers: Mapping[AttentionHead, float]) -> Self:
        """Return the table of one number for each head."""
        rows = [[numbers[head] for head in attention.heads] for attention in attentions(config)]
        return cls(quantity, tuple(map(str, attentions(config))), results.filled(rows))

    def numbers(self, config: ModelConfig) -> dict[AttentionHead, float]:
        """Return one number for each head of the model that the table is of."""
        return {
            head: float(value)
            for attention, row in zip(attentions(config), self.values)
            for head, value in zip(attention.heads, row)
        }


@dataclass(frozen=True)
class Importance(results.Result):
    """How much the loss depends on each head and each feed-forward."""

    heads: HeadTable
    feedforwards: Mapping[str, float]  # by layer: "0", "1", ..., "encoder.0", ...


def importance(
    m: inputs.AnyModel,
    data: Data,
    normalise: bool = False,
    on_progress: OnProgress = lambda stage, done, total: None,
    **options: Any,
) -> Importance:
    """Return |d loss / d mask| of every head and feed-forward, averaged over the rows of some data.

    Args:
        m, data, options: as for `examples_from`.
        normalise: divide the heads of each attention by their L2 norm, so that layers can be compared.
        on_progress: told how many batches are done.
    """
    model, examples = opened(m, data, options)
    all_heads(model.config)  # refuses a model without any
    masks, sums = dict[str, Tensor](), dict[str, Tensor]()

    def masked(x: Tensor, name: str) -> Tensor:
        # A head's z by ones B H 1 1, a feed-forward's output by ones B 1 1.
        shape = x.shape[:2] if name.endswith(".z") else x.shape[:1]
        masks[name] = torch.ones((*shape, 1, 1), dtype=x.dtype, device=x.device, requires_grad=True)
        return x * masks[name]

    changes = {
        name: partial(masked, name=name)
        for name in (
            *(f"{attention.part}.z" for attention in attentions(model.config)),
            *(f"{block}.feedforward.out" for block in layer_names(model.config).values()),
        )
    }
    for done, batch in enumerate(examples.batches, start=1):
        with torch.enable_grad(), evaluating(model), edit(model, changes):
            loss, _ = TASKS[examples.task].batch_loss(model, batch.to(inputs.device_of(model)))
            gradients = torch.autograd.grad(loss, list(masks.values()))
        for name, gradient in zip(masks, gradients):
            # H, or 1 of a feed-forward.
            sums[name] = sums.get(name, 0) + gradient.double().abs().sum(0).flatten().cpu()
        on_progress("gradients", done, len(examples.batches))
    means = {name: (total / examples.targets).numpy() for name, total in sums.items()}
    numbers: dict[AttentionHead, float] = {}
    for attention in attentions(model.config):
        row = means[f"{attention.part}.z"]
        row = row / (np.linalg.norm(row) or 1.0) if normalise else row
        numbers |= dict(zip(attention.heads, row.tolist()))
    inner = {
        name: float(means[f"{block}.feedforward.out"][0]) for name, block in layer_names(model.config).items()
    }
    quantity = "|d loss / d mask|, each layer of length 1" if normalise else "|d loss / d mask|"
    return Importance(HeadTable.of(model.config, quantity, numbers), inner)


def ablate_each(
    m: inputs.AnyModel,
    data: Data,
    how: How = "zero",
    means: Values | None = None,
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


# Pruning ----------------------------------------------------------------------------------------------------


By = Literal["importance", "ablation", "random"]
Unit = tuple[names.AttentionHead, ...]  # heads that can only go together


def prune(m: inputs.AnyModel, heads: Heads, whole_groups: bool = False) -> Model:
    """Return a smaller copy of a model, without some heads.

    Where every layer keeps as many heads and a Hugging Face architecture is exactly what is left, the copy is
    that: a model with fewer heads and no word of pruning. Otherwise `config.pruned_heads` says what is gone,
    in clearhead's own section of config.json.

    Args:
        m: what `load` gave, or a bare model; it stays as it is.
        heads: by their names, such as "3.2", "encoder.0.5", "cross.1.2".
        whole_groups: where heads can only go together with others, let those go too; otherwise say which they
            are.
    """
    whole = inputs.as_model(m)
    refuse_quantized(whole.model, "pruned")
    gone = _together(whole.config, as_heads(whole.config, heads), whole_groups)
    refuse(
        whole.config.qk_norm == "full",
        "this model has a norm over all heads of a layer (qk_norm full), which fewer heads would change: "
        "ablate instead",
    )
    for attention in names.attentions(whole.config):
        refuse(
            set(attention.heads) <= set(gone),
            f"all {attention.n_heads} heads of {attention.part} would go: keep one at least",
        )
    model = checkpoint.empty_model(_without(whole.config, gone))
    weights, even = _weights(whole.model, model), _evened(model.config)
    if even is not None and not registry.nearest_to(even)[1]:
        model = checkpoint.empty_model(even)
    model.load_state_dict(weights, assign=True)
    model.tie()
    model.train(whole.model.training)
    return dataclasses.replace(whole, model=model, folder=None)


# Which heads go ---------------------------------------------------------------------------------------------


def units(config: ModelConfig) -> list[Unit]:
    """Return heads in units that go together: a key/value group, at all depths that share the weights."""
    groups: dict[tuple[str, int, int], list[names.AttentionHead]] = {}
    for attention in names.attentions(config):
        spec = names.spec_of(config, attention.kind)
        first, size = spec.block_of.index(spec.block_of[attention.layer]), spec.n_heads // spec.n_kv_heads
        for head in attention.heads:
            groups.setdefault((attention.kind, first, head.number // size), []).append(head)
    return [tuple(unit) for unit in groups.values()]


def least(
    config: ModelConfig, numbers: Mapping[names.AttentionHead, float], keep: float
) -> list[names.AttentionHead]:
    """Return the heads to remove so that about a share of `keep` stays: those that count least.

    One unit at least is left to each layer.
    """
    refuse(not 0 < keep <= 1, f"keep {keep} is no share of the heads: choose above 0, up to 1")
    left = {attention.part: attention.n_heads for attention in names.attentions(config)}
    total = sum(left.values())
    gone: list[names.AttentionHead] = []
    for unit in ordered(config, numbers):
        here = {head.part for head in unit}
        size = len(unit) // len(here)
        if total - len(gone) - len(unit) >= keep * total - 1e-9 and all(left[part] > size for part in here):
            gone += unit
            left |= {part: left[part] - size for part in here}
    return sorted(gone)


def ordered(config: ModelConfig, numbers: Mapping[names.AttentionHead, float]) -> list[Unit]:
    """Return heads in the order in which they go: the least first, units by the sum over their heads."""
    return sorted(units(config), key=lambda unit: sum(numbers[head] for head in unit))


def _together(
    config: ModelConfig, heads: list[names.AttentionHead], whole: bool
) -> list[names.AttentionHead]:
    """Return the heads, with those they can only go with."""
    refuse(not heads, "no head is named: name those to remove, such as 0.1")
    gone = [unit for unit in units(config) if set(unit) & set(heads)]
    for unit in gone if not whole else ():
        others = [head for head in unit if head not in heads]
        named = next(head for head in unit if head in heads)
        refuse(
            others,
            f"head {named} shares weights with {', '.join(map(str, others))}: "
            "name those too, or let whole groups go (whole_groups)",
        )
    return sorted(head for unit in gone for head in unit)


# What is left -----------------------------------------------------------------------------------------------


def _without(config: ModelConfig, gone: Iterable[names.AttentionHead]) -> ModelConfig:
    """Return the config of the smaller model; numbers in it are those that heads had at first."""
    pruned = {name: set(heads) for name, heads in config.pruned_heads.items()}
    for head in gone:
        kept = names.spec_of(config, head.kind).heads_of(head.part)
        pruned.setdefault(head.part, set()).add(kept[head.number])
    return dataclasses.replace(
        config, pruned_heads={name: tuple(sorted(heads)) for name, heads in pruned.items()}
    )


def _evened(config: ModelConfig) -> ModelConfig | None:
    """Return a config with pruned heads as one with fewer heads in all layers.

    None where layers differ, or a bias tells heads apart.
    """
    sizes: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}  # heads; True: of an encoder
    for attention in names.attentions(config):
        n_kv_heads = names.spec_of(config, attention.kind).kv_heads_of(attention.part)
        sizes[attention.kind == "encoder"].add((attention.n_heads, n_kv_heads))
    grouped = config.n_kv_heads != config.n_heads and sizes[True]
    if config.positions in BIASES or grouped or any(len(several) > 1 for several in sizes.values()):
        return None
    ((n_heads, n_kv_heads),) = sizes[False]
    return dataclasses.replace(  # widths stay as they are: they are numbers by now
        config,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        n_encoder_heads=sizes[True].pop()[0] if sizes[True] else config.n_encoder_heads,
        pruned_heads={},
    )


def _weights(whole: Transformer, smaller: Transformer) -> dict[str, Tensor]:
    """Return a copy of every weight by name, with rows of q, k, v and columns of out cut."""
    weights = {
        name: weight.detach().clone() for name, weight in whole.named_parameters(remove_duplicate=False)
    }
    for name, part in smaller.named_modules(remove_duplicate=False):
        own = whole.get_submodule(name)
        if isinstance(part, Attention) and isinstance(own, Attention):
            kept = [own.heads.index(head) for head in part.heads]
            groups = sorted({place * own.n_kv_heads // own.n_heads for place in kept})
            for weight, (axis, grouped, width) in own.head_axes().items():
                tensor = weights.get(f"{name}.{weight}")
                if tensor is not None:
                    indices = torch.arange(tensor.shape[axis], device=tensor.device).view(-1, width)
                    cut = indices[groups if grouped else kept]  # rows, or columns, `width` for a head
                    weights[f"{name}.{weight}"] = tensor.index_select(axis, cut.flatten())
    return weights


# The curve --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PruneCurve(results.Result):
    """Loss and accuracy after so many heads are gone."""

    by: By
    heads: int  # of the whole model
    removed: tuple[int, ...]  # heads gone at each point, from 0
    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    order: tuple[str, ...]  # names of the heads, first gone first


def scores(
    m: inputs.AnyModel,
    data: Data,
    by: By = "importance",
    seed: int = 0,
    on_progress: OnProgress = lambda stage, done, total: None,
    **options: Any,
) -> HeadTable:
    """Return how much each head counts: by gradient, by the loss without it, or drawn at random."""
    refuse_unknown("by", by, get_args(By))
    if by == "importance":
        return importance(m, data, on_progress=on_progress, **options).heads
    if by == "ablation":
        return ablate_each(m, data, on_progress=on_progress, **options)
    heads = names.all_heads(m.config)
    drawn = np.random.default_rng(seed).random(len(heads)).tolist()
    return HeadTable.of(m.config, "drawn at random", dict(zip(heads, drawn)))


def prune_curve(
    m: inputs.AnyModel,
    data: Data,
    steps: int | None = None,
    by: By = "importance",
    seed: int = 0,
    recompute: bool = False,
    ranked_on: Data | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
    **options: Any,
) -> PruneCurve:
    """Mask heads in the order in which they count, and measure loss and accuracy on the way.

    Args:
        m, data, options: as for `examples_from`; quality is measured on this data.
        steps: points after the first; None: one for each head, or for each group of heads that go together.
        by: what decides the order: importance (by gradient), ablation (of each alone), random.
        seed: of the random order.
        recompute: rank the heads that are left anew at each point.
        ranked_on: other data to rank the heads on; None: the same.
        on_progress: told how many points are done.
    """
    model, examples = opened(m, data, options)
    ranking = examples if ranked_on is None else opened(m, ranked_on, options)[1]
    refuse(steps is not None and steps < 1, f"steps {steps} must be 1 or more")

    def ranked() -> list[Unit]:
        return ordered(model.config, scores(model, ranking, by, seed).numbers(model.config))

    waiting, gone = ranked(), list[names.AttentionHead]()
    count = len(waiting)
    points = sorted({round(share) for share in np.linspace(0, count, min(steps or count, count) + 1)})
    points_measured = []
    for done, end in enumerate(points, start=1):
        going = end - (count - len(waiting))
        gone += [head for unit in waiting[:going] for head in unit]
        waiting = waiting[going:]
        with ablating(model, gone):
            quality = judge(model, examples)
            if recompute and by != "random" and waiting:
                left = set(waiting)
                waiting = [unit for unit in ranked() if unit in left]
        points_measured.append((len(gone), quality.loss, quality.accuracy))
        on_progress("heads", done, len(points))
    removed, losses, accuracies = zip(*points_measured)
    return PruneCurve(by, len(gone), removed, losses, accuracies, tuple(map(str, gone)))
