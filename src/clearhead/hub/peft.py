"""PEFT adapters on disk, both ways: `adapter_config.json` and `adapter_model.safetensors`.

A layer of theirs may be several of ours, such as joined queries, keys and values: its A serves all of them,
and its B is divided as the weight is, by the rule of the architecture.

Shapes: R rank, D width in, N width out.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.core.dtypes import wide
from clearhead.core.transformer import Transformer
from clearhead.hub.architecture import Architecture
from clearhead.hub.checkpoint import empty_model, matching_rules, more
from clearhead.hub.files import read_json, refuse, whole_folder, write_json
from clearhead.hub.peft_settings import SETTINGS, by_pattern, checked_settings, is_named, is_target
from clearhead.hub.rules import JOINED_TRANSPOSED, TRANSPOSED, Rule
from clearhead.hub.weights import Entry, open_tensors
from clearhead.hub.writing import Outgoing, write_tensors

STEM = "adapter_model"
PREFIX, ENDS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
TASKS = {"decoder": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM"}


@dataclass(frozen=True)
class RankUpdate:
    """An update of one layer: scale · B A."""

    a: Tensor  # R D
    b: Tensor  # N R
    alpha: float
    rank_stabilized: bool = False  # rsLoRA

    @property
    def scale(self) -> float:
        """The factor of the update: alpha / R, or alpha / sqrt(R) with rsLoRA."""
        rank = self.a.shape[0]
        return self.alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


Adapter = Mapping[str, RankUpdate]  # by the name of our layer


# Reading ----------------------------------------------------------------------------------------------------


def read_adapter(folder: Path, config: ModelConfig, architecture: Architecture) -> Adapter:
    """Return the updates of an adapter's directory; refuse one that does not fit the model in every layer."""
    settings = checked_settings(folder, read_json(folder / SETTINGS))
    refuse(
        not (folder / f"{STEM}.safetensors").is_file(),
        f"{folder} holds {SETTINGS} and no {STEM}.safetensors: pickled adapters are not read",
    )
    entries = open_tensors(folder, STEM)
    model = empty_model(config)
    layers, found = linear_layers(model, architecture), _paired(folder, entries)
    known = {name if name in layers else architecture.prefix + name: name for name in found}
    wrong = sorted(name for name in known if name not in layers)
    refuse(
        wrong,
        f"{folder}: the adapter updates {wrong and known[wrong[0]]}{more(wrong)}, which is no linear layer "
        "of this model: it is an adapter of another one",
    )
    targeted = {name for name in layers if is_target(settings, name)}
    if settings["target_modules"] == "all-linear":
        targeted = {name for name in targeted if ".blocks." in f".{layers[name].ours[0]}"} | {*known}
    differing = sorted(targeted ^ {*known})
    refuse(not known, f"{folder}: the adapter has no weights: it would change nothing")
    refuse(
        differing,
        f"{folder}: {SETTINGS} {'names' if differing and differing[0] in targeted else 'does not name'} "
        f"{''.join(differing[:1])}{more(differing)} as a target, and {STEM}.safetensors differs",
    )
    updates: dict[str, RankUpdate] = {}
    for name, stored in known.items():
        a, b = found[stored]
        rule = layers[name]
        sizes = [tuple(model.get_parameter(one).shape) for one in rule.ours]
        rank = by_pattern(settings, "rank_pattern", name, settings["r"])
        shapes = ((rank, sizes[0][1]), (sum(size[0] for size in sizes), rank))
        refuse(
            (a.shape, b.shape) != shapes,
            f"{folder}: the update of {stored} has shapes {a.shape} and {b.shape}, and the model and rank "
            f"{rank} need {shapes[0]} and {shapes[1]}",
        )
        kinds = {str(one.dtype).removeprefix("torch.") for one in (a, b) if not one.dtype.is_floating_point}
        refuse(
            kinds,
            f"{folder}: the update of {stored} has numbers of {' and '.join(sorted(kinds))}: they must be "
            "floating-point",
        )
        down, up = (wide(one.read()).clone() for one in (a, b))
        refuse(
            not (down.isfinite().all() and up.isfinite().all()),
            f"{folder}: the update of {stored} holds NaN or infinite numbers: the file is broken, or the run "
            "that wrote it had diverged",
        )
        updates |= _divided(
            rule,
            RankUpdate(
                down,
                up,
                float(by_pattern(settings, "alpha_pattern", name, settings["lora_alpha"])),
                settings["use_rslora"],
            ),
            [size[0] for size in sizes],
            config,
        )
    return updates


def linear_layers(model: Transformer, architecture: Architecture) -> dict[str, Rule]:
    """Return the rule for the weight of each linear layer, by its name in the architecture's own words."""
    return {
        rule.theirs.removesuffix(".weight"): rule
        for rule in matching_rules(model, architecture)
        if rule.theirs.endswith(".weight")
        and all(isinstance(model.get_submodule(_layer(one)), nn.Linear) for one in rule.ours)
    }


def _layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _is_flipped(rule: Rule) -> bool:
    """Return whether their weight is stored [D, N]."""
    return rule.operation in (TRANSPOSED, JOINED_TRANSPOSED)


def _paired(folder: Path, entries: Mapping[str, Entry]) -> dict[str, tuple[Entry, Entry]]:
    """Return A and B of each of their layers; refuse any other tensor by name."""
    names = [name.removeprefix(PREFIX) for name in entries]
    others = [name for name in names if not name.endswith(ENDS)]
    refuse(
        others,
        f"{folder}: the adapter has the tensor {''.join(others[:1])}{more(others)}: supported are the "
        "low-rank updates of linear layers, lora_A and lora_B",
    )
    bare = {name.removeprefix(PREFIX): entry for name, entry in entries.items()}
    stems = dict.fromkeys(name[: -len(ENDS[0])] for name in names)
    for stem in stems:
        missing = next((end for end in ENDS if stem + end not in bare), None)
        refuse(missing, f"{folder}: the adapter has only one of lora_A and lora_B of {stem}")
    return {stem: (bare[stem + ENDS[0]], bare[stem + ENDS[1]]) for stem in stems}


def _divided(rule: Rule, update: RankUpdate, widths: list[int], config: ModelConfig) -> dict[str, RankUpdate]:
    """Return the update of one of their layers as those of ours."""
    rank = update.a.shape[0]
    theirs = update.b.t() if _is_flipped(rule) else update.b
    parts = rule.operation.load([theirs], [(width, rank) for width in widths], config)
    return {
        _layer(name): RankUpdate(update.a, part.contiguous(), update.alpha, update.rank_stabilized)
        for name, part in zip(rule.ours, parts)
    }


# Writing ----------------------------------------------------------------------------------------------------


def write_adapter(
    folder: Path,
    adapter: Adapter,
    config: ModelConfig,
    architecture: Architecture,
    base: str | Path | None = None,
) -> None:
    """Write the updates as PEFT does: whole, or not at all."""
    model = empty_model(config)
    layers, left = linear_layers(model, architecture), {*adapter}
    updates: dict[str, RankUpdate] = {}
    for name, rule in layers.items():
        if left.intersection(map(_layer, rule.ours)):
            updates[name] = _joined(rule, adapter, model)
            left -= {*map(_layer, rule.ours)}
    refuse(left, f"no rule of {architecture.model_type} writes an update of {''.join(sorted(left)[:1])}")
    refuse(not updates, "the adapter has no updates: there is nothing to write")
    tensors = {
        f"{PREFIX}{name}{end}": _written(one)
        for name, update in updates.items()
        for end, one in zip(ENDS, (update.a, update.b))
    }
    with whole_folder(folder) as work:
        write_tensors(work, STEM, tensors, lambda name, owner: None)
        write_json(work / SETTINGS, _settings(updates, layers, config, base))


def _written(tensor: Tensor) -> Outgoing:
    return Outgoing(tuple(tensor.shape), tensor.dtype, (), lambda sources: tensor)


def _joined(rule: Rule, adapter: Adapter, model: Transformer) -> RankUpdate:
    """Return the updates of our layers as that of theirs: with one A where they share it, else with all."""
    given = [adapter.get(_layer(name)) for name in rule.ours]
    present = [one for one in given if one is not None]
    first = present[0]
    shared = len(present) == len(given) and all(
        (one.alpha, one.rank_stabilized) == (first.alpha, first.rank_stabilized)
        and torch.equal(one.a, first.a)
        for one in present
    )
    if shared:
        a, blocks, alpha, stabilized = first.a, [one.b for one in present], first.alpha, first.rank_stabilized
    else:
        ranks = [0 if one is None else one.a.shape[0] for one in given]
        a = torch.cat([one.a for one in present])
        alpha, stabilized, blocks, before = first.scale * sum(ranks), False, [], 0
        for one, name, rank in zip(given, rule.ours, ranks):
            placed = a.new_zeros(model.get_parameter(name).shape[0], sum(ranks))
            if one is not None:
                placed[:, before : before + rank] = one.b * (one.scale / first.scale)
            blocks.append(placed)
            before += rank
    theirs = rule.operation.save(blocks, model.config)[0]
    return RankUpdate(a, (theirs.t() if _is_flipped(rule) else theirs).contiguous(), alpha, stabilized)


def _settings(
    updates: Mapping[str, RankUpdate],
    layers: Mapping[str, Rule],
    config: ModelConfig,
    base: str | Path | None,
) -> dict[str, Any]:
    """Return adapter_config.json: the commonest rank and factor, and patterns for the others."""
    ranks = {name: one.a.shape[0] for name, one in updates.items()}
    stabilized = any(one.rank_stabilized for one in updates.values())
    alphas = {
        name: one.scale * math.sqrt(ranks[name]) if stabilized and not one.rank_stabilized else one.alpha
        for name, one in updates.items()
    }
    (rank, _), (alpha, _) = (Counter(some.values()).most_common(1)[0] for some in (ranks, alphas))
    short = sorted({name.rpartition(".")[2] for name in updates})
    fits = {name for name in layers if is_named(short, name)} == {*updates}
    return {
        "peft_type": "LORA",
        "task_type": TASKS.get(config.family) if config.head == "lm" else None,
        "base_model_name_or_path": None if base is None else str(base),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": {name: one for name, one in ranks.items() if one != rank},
        "alpha_pattern": {name: _number(one) for name, one in alphas.items() if one != alpha},
        "use_rslora": stabilized,
        "target_modules": short if fits else sorted(updates),
        "fan_in_fan_out": any(_is_flipped(layers[name]) for name in updates),
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": None,
    }


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value
