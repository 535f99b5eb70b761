"""Pruning: heads taken out of the weights. What is left is a smaller model that computes what the whole one does without them.

    smaller = prune(m, ["0.1", "3.2", "cross.1.0"])        # a copy; `m` stays as it is
    smaller.save("smaller")

The rows of q, k and v and the columns of out that belong to a head go. Names count the heads that a layer has *now*: after
"0.1" is gone, what was "0.2" is called "0.1". `config.pruned_heads` keeps the first numbers, since a bias by head (ALiBi,
relative) goes by those. What is refused, because the smaller model would not be the same or could not be built:

    part of a key/value group      heads that share keys and values go together: `whole_groups=True` takes the rest along
    one of several depths that     the weights are the same, so a head goes at all of them: `whole_groups=True` does that
    share their weights
    all heads of a layer           one must stay
    qk_norm "full"                 its norm is taken over all heads

Shapes: H heads, K key/value heads, E head width, D model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from clearhead.bundle import Model
from clearhead.config import ModelConfig, StackSpec
from clearhead.errors import InputError
from clearhead.hub.checkpoint import empty_model
from clearhead.hub.registry import nearest_to
from clearhead.inside.names import Head, attentions
from clearhead.inside.parts.ablate import Heads, as_heads
from clearhead.model.transformer import Transformer

Unit = tuple[Head, ...]  # heads that can only go together


def prune(m: Model | Transformer, heads: Heads, whole_groups: bool = False) -> Model:
    """A smaller copy of a model, without some heads.

    Where every layer keeps as many heads and a Hugging Face architecture is exactly what is left, the copy is that: a model with
    fewer heads and no word of pruning. Otherwise `config.pruned_heads` says what is gone, in clearhead's own section of config.json.

    Args:
        m: what `load` gave, or a bare model; it stays as it is.
        heads: by their names, such as "3.2", "encoder.0.5", "cross.1.2".
        whole_groups: where heads can only go together with others, let those go too; otherwise say which they are.
    """
    loaded = m if isinstance(m, Model) else Model(m)
    config = loaded.config
    gone = _together(config, as_heads(config, heads), whole_groups)
    _check(config, gone)
    config = _without(config, gone)
    even = _evened(config)
    if even is not None and not nearest_to(even)[1]:
        config = even
    model = empty_model(config)
    model.load_state_dict(_weights(loaded.model, gone), assign=True)
    model.tie()
    model.train(loaded.model.training)
    return dataclasses.replace(loaded, model=model, folder=None, _copy=None, _steps=None, _prefix=None)


# Which heads go -------------------------------------------------------------------------------------------------------


def units(config: ModelConfig) -> list[Unit]:
    """Every head of a model among those it can only go with: its key/value group, at all depths that share the weights."""
    found: dict[tuple[str, int, int], list[Head]] = {}
    for kind, layer, count in attentions(config):
        plan = plan_of(config, kind)
        first, size = plan.block_of.index(plan.block_of[layer]), plan.n_heads // plan.n_kv_heads
        for number in range(count):
            found.setdefault((kind, first, number // size), []).append(Head(kind, layer, number))
    return [tuple(unit) for unit in found.values()]


def plan_of(config: ModelConfig, kind: str) -> StackSpec:
    """The stack that heads of this kind belong to."""
    plan = config.encoder if kind == "encoder" or config.decoder is None else config.decoder
    assert plan is not None
    return plan


def least(config: ModelConfig, numbers: Mapping[Head, float], keep: float) -> list[Head]:
    """The heads to remove so that about a share of `keep` stays: those that count least, one unit at least left to each layer."""
    if not 0 < keep <= 1:
        raise InputError(f"keep {keep} is no share of the heads: choose above 0, up to 1")
    total = sum(count for _, _, count in attentions(config))
    left = {(kind, layer): count for kind, layer, count in attentions(config)}
    gone: list[Head] = []
    for unit in ordered(config, numbers):
        here = {(head.kind, head.layer) for head in unit}
        size = len(unit) // len(here)
        if total - len(gone) - len(unit) < keep * total - 1e-9 or any(left[place] <= size for place in here):
            continue
        gone += unit
        for place in here:
            left[place] -= size
    return sorted(gone)


def ordered(config: ModelConfig, numbers: Mapping[Head, float]) -> list[Unit]:
    """Heads in the order in which they are to go: the least first, units by the sum over their heads."""
    return sorted(units(config), key=lambda unit: sum(numbers[head] for head in unit))


def _together(config: ModelConfig, heads: list[Head], whole: bool) -> list[Head]:
    """The heads, with those they can only go with."""
    chosen = set(heads)
    if not chosen:
        raise InputError("no head is named: name those to remove, such as 0.1")
    for unit in units(config):
        missing = [head for head in unit if head not in chosen]
        if missing and len(missing) < len(unit) and not whole:
            named = next(head for head in unit if head in chosen)
            listed = ", ".join(map(str, missing))
            raise InputError(
                f"head {named} shares weights with {listed}: name those too, or let whole groups go (whole_groups)"
            )
        if len(missing) < len(unit):
            chosen |= set(unit)
    return sorted(chosen)


def _check(config: ModelConfig, gone: Iterable[Head]) -> None:
    if config.qk_norm == "full":
        raise InputError(
            "this model has a norm over all heads of a layer (qk_norm full), which fewer heads would change: ablate instead"
        )
    chosen = set(gone)
    for kind, layer, count in attentions(config):
        if all(Head(kind, layer, number) in chosen for number in range(count)):
            place = Head(kind, layer, 0).part
            raise InputError(f"all {count} heads of {place} would go: keep one at least")


# What is left ---------------------------------------------------------------------------------------------------------


def _without(config: ModelConfig, gone: Iterable[Head]) -> ModelConfig:
    """The config of the smaller model; numbers in it are those that heads had at first."""
    pruned = {name: set(heads) for name, heads in config.pruned_heads.items()}
    for head in gone:
        kept = plan_of(config, head.kind).heads_of(head.part)
        pruned.setdefault(head.part, set()).add(kept[head.number])
    return dataclasses.replace(
        config, pruned_heads={name: tuple(sorted(heads)) for name, heads in pruned.items()}
    )


def _evened(config: ModelConfig) -> ModelConfig | None:
    """The same model with fewer heads in all layers in place of pruned ones; None where layers differ, or a bias tells heads apart."""
    counts: dict[bool, set[int]] = {}
    for kind, _, count in attentions(config):
        counts.setdefault(kind == "encoder", set()).add(count)
    grouped = config.n_kv_heads != config.n_heads
    if (
        config.positions in ("alibi", "relative")
        or any(len(sizes) > 1 for sizes in counts.values())
        or (grouped and len(counts) > 1)
    ):
        return None
    main = plan_of(config, "self")
    heads = counts[False].pop()
    changes: dict[str, Any] = {"n_heads": heads, "n_kv_heads": heads * main.n_kv_heads // main.n_heads}
    if True in counts:
        changes["n_encoder_heads"] = counts[True].pop()
    return dataclasses.replace(
        config, pruned_heads={}, **changes
    )  # widths stay as they are: they are numbers by now


def _weights(model: Transformer, gone: list[Head]) -> dict[str, Tensor]:
    """Every weight of the smaller model, under its name: a copy."""
    made = {name: weight.detach().clone() for name, weight in model.named_parameters(remove_duplicate=False)}
    config, lost = model.config, dict[str, list[int]]()
    for head in gone:
        lost.setdefault(head.part, []).append(head.number)
    for stack, part in (("encoder", model.encoder), ("decoder", model.decoder)):
        if part is None:
            continue
        plan = part.spec
        own = sorted({plan.block_of.index(block) for block in plan.block_of})
        for place, layer in enumerate(own):
            for kind in ("attention", "cross"):
                numbers = lost.get(f"{plan.prefix}blocks.{layer}.{kind}")
                if numbers:
                    _cut(made, f"{stack}.blocks.{place}.{kind}", numbers, plan)
    return made


def _cut(weights: dict[str, Tensor], name: str, gone: list[int], plan: StackSpec) -> None:
    """Take heads out of the attention of this name: rows of q, k, v and columns of out."""
    size = plan.n_heads // plan.n_kv_heads
    shared = sorted({number // size for number in gone})
    for part, numbers, width, side in (
        ("q.weight", gone, plan.d_head, 0),
        ("q.bias", gone, plan.d_head, 0),
        ("k.weight", shared, plan.d_head, 0),
        ("k.bias", shared, plan.d_head, 0),
        ("v.weight", shared, plan.d_value, 0),
        ("v.bias", shared, plan.d_value, 0),
        ("out.weight", gone, plan.d_value, 1),
    ):
        weight = weights.get(f"{name}.{part}")
        if weight is not None:
            heads = weight.shape[side] // width
            kept = torch.tensor(
                [head for head in range(heads) if head not in set(numbers)], device=weight.device
            )
            place = (kept[:, None] * width + torch.arange(width, device=weight.device)).flatten()
            weights[f"{name}.{part}"] = weight.index_select(side, place)
