"""PEFT adapters: low-rank updates on disk, both ways, and applied to a model, merged or next to its weights.

`adapter_config.json` has the settings, `adapter_model.safetensors` the tensors. A layer of theirs may be
several of ours, such as joined queries, keys and values: its A serves all of them, and its B is divided as
the weight is, by the rule of the architecture.

Shapes: R rank, D width in, N width out.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.core.dtypes import wide
from clearhead.core.transformer import Transformer
from clearhead.errors import CheckpointError, nearest
from clearhead.hub.architecture import Architecture
from clearhead.hub.checkpoint import empty_model, matching_rules, more
from clearhead.hub.files import read_json, refuse, refuse_key, whole_folder, write_json
from clearhead.hub.rules import JOINED_TRANSPOSED, TRANSPOSED, Rule
from clearhead.hub.weights import Entry, Outgoing, open_tensors, write_tensors
from clearhead.run.kernels.lora import LoraLinear, merge

# Settings ---------------------------------------------------------------------------------------------------


SETTINGS = "adapter_config.json"
MOST = 1e30  # a factor beyond it leaves no number
REPEATS = 6  # of an expression, at most: with more, or with one within another, a name could take years
# Fields that decide nothing once an adapter is trained, and those that are honoured.
WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "fan_in_fan_out", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_core", "qalora_group_size", "runtime_config", "layers_pattern"),
}
HONOURED = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules", "exclude_modules"),
    *("layers_to_transform", "peft_type", "bias", "init_lora_weights"),
}
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # others change the base model's weights


def checked_settings(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with defaults; refuse by name what is not honoured."""
    usual = {"r": 8, "lora_alpha": 8, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    settings = {**usual, **{key: value for key, value in given.items() if value is not None}}
    wrong = f"{folder / SETTINGS} has"
    only = {
        "peft_type": (("LORA",), "only LORA is supported"),
        "bias": (("none",), "only updates without biases are supported"),
        "init_lora_weights": (PLAIN_STARTS, "it changes the model's own weights: convert it with PEFT"),
    }
    for key, (supported, reason) in only.items():
        value = settings.get(key, supported[0])
        refuse_key(value not in supported, key, value, reason, folder / SETTINGS)
    for key, value in settings.items():
        unknown = key not in WITHOUT_EFFECT | HONOURED and value not in (False, [], {}, "")
        refuse_key(unknown, key, value, "not supported: merge the adapter with PEFT", folder / SETTINGS)
    numbers = [settings["r"], *_table(folder, settings, "rank_pattern").values()]
    refuse(
        not all(type(number) is int and number >= 1 for number in numbers),
        f"{wrong} a rank in r or rank_pattern that is no whole number from 1 on",
    )
    alphas = [settings["lora_alpha"], *_table(folder, settings, "alpha_pattern").values()]
    refuse(
        not all(type(alpha) in (int, float) and abs(alpha) < MOST for alpha in alphas),
        f"{wrong} a factor in lora_alpha or alpha_pattern that is no number below {MOST:.0e}",
    )
    refuse(type(settings["use_rslora"]) is not bool, f"{wrong} use_rslora that is neither true nor false")
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        names = settings.get(key, [] if key != "target_modules" else None)
        listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
        allowed = "they must be names of layers, or an expression"
        refuse_key(not listed and not isinstance(names, str), key, names, allowed, folder / SETTINGS)
    patterns = settings.get("layers_pattern", [])
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        refuse(
            _expression(pattern).groups,
            f"{wrong} layers_pattern {pattern!r:.60}: groups in it are not supported",
        )
    layers = settings.get("layers_to_transform", [])
    whole = all(type(layer) is int for layer in (layers if isinstance(layers, list) else [layers]))
    allowed = "it must be a number or a list of numbers"
    refuse_key(not whole, "layers_to_transform", layers, allowed, folder / SETTINGS)
    return settings


def _expression(text: str, around: str = "{}") -> re.Pattern[str]:
    refuse(
        _is_slow(text),
        f"{SETTINGS} has the expression {text!r:.60}, which repeats a repetition, "
        f"or has more than {REPEATS} of them: name the layers in a list",
    )
    try:
        return re.compile(around.replace("{}", text))
    except re.error as error:
        raise CheckpointError(f"{SETTINGS} has the expression {text!r:.60}: {error}") from None


def _is_slow(text: str) -> bool:
    """Return whether an expression has many repetitions, or one within another."""
    bare = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", text)  # without what stands for a letter
    many = len(re.findall(r"[*+{]", bare)) > REPEATS
    inner, groups = re.compile(r"\(([^()]*)\)"), 1
    while groups:  # a group becomes a letter, repeated where something in it is
        bare, groups = inner.subn(lambda group: "x*" if re.search(r"[*+{]", group[1]) else "x", bare)
    return many or re.search(r"\*[*+{]", bare) is not None


def _table(folder: Path, settings: dict[str, Any], key: str) -> dict[str, Any]:
    is_table = isinstance(settings[key], dict)
    refuse_key(not is_table, key, settings[key], "it must be a table", folder / SETTINGS)
    return dict(settings[key])


def is_target(settings: Mapping[str, Any], name: str) -> bool:
    """Return whether the settings choose a layer, by their own reading of names and expressions."""
    if is_named(settings.get("exclude_modules") or [], name):
        return False
    if settings["target_modules"] == "all-linear":
        return True
    numbers = settings.get("layers_to_transform")
    if numbers is None or numbers == []:
        return is_named(settings["target_modules"], name)
    patterns = settings.get("layers_pattern") or [r"[^.]*"]
    numbered = (
        re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name)
        for pattern in ([patterns] if isinstance(patterns, str) else patterns)
    )
    first = next(filter(None, numbered), None)
    chosen = numbers if isinstance(numbers, list) else [numbers]
    return first is not None and int(first.group(1)) in chosen and is_named(settings["target_modules"], name)


def is_named(names: str | Iterable[str], name: str) -> bool:
    """Return whether an expression, or one of several names, is that of a layer."""
    if isinstance(names, str):
        return _expression(names).fullmatch(name) is not None
    return any(name == known or name.endswith(f".{known}") for known in names)


def by_pattern(settings: Mapping[str, Any], key: str, name: str, usual: Any) -> Any:
    """Return the value of the first pattern that ends the name of a layer."""
    values = (
        value for pattern, value in settings[key].items() if _expression(pattern, r"(.*\.)?({})$").match(name)
    )
    return next(values, usual)


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
    layers, pairs = linear_layers(model, architecture), _paired(folder, entries)
    known = {name if name in layers else architecture.prefix + name: name for name in pairs}
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
        a, b = pairs[stored]
        rule = layers[name]
        sizes = [tuple(model.get_parameter(parameter).shape) for parameter in rule.ours]
        rank = by_pattern(settings, "rank_pattern", name, settings["r"])
        shapes = ((rank, sizes[0][1]), (sum(size[0] for size in sizes), rank))
        refuse(
            (a.shape, b.shape) != shapes,
            f"{folder}: the update of {stored} has shapes {a.shape} and {b.shape}, and the model and rank "
            f"{rank} need {shapes[0]} and {shapes[1]}",
        )
        kinds = {
            str(entry.dtype).removeprefix("torch.") for entry in (a, b) if not entry.dtype.is_floating_point
        }
        refuse(
            kinds,
            f"{folder}: the update of {stored} has numbers of {' and '.join(sorted(kinds))}: they must be "
            "floating-point",
        )
        down, up = (wide(entry.read()).clone() for entry in (a, b))
        refuse(
            not (down.isfinite().all() and up.isfinite().all()),
            f"{folder}: the update of {stored} holds NaN or infinite numbers: the file is broken, or the run "
            "that wrote it had diverged",
        )
        alpha = float(by_pattern(settings, "alpha_pattern", name, settings["lora_alpha"]))
        update = RankUpdate(down, up, alpha, settings["use_rslora"])
        updates |= _divided(rule, update, [size[0] for size in sizes], config)
    return updates


def linear_layers(model: Transformer, architecture: Architecture) -> dict[str, Rule]:
    """Return the rule for the weight of each linear layer, by its name in the architecture's own words."""
    return {
        rule.theirs.removesuffix(".weight"): rule
        for rule in matching_rules(model, architecture)
        if rule.theirs.endswith(".weight")
        and all(isinstance(model.get_submodule(_layer(parameter)), nn.Linear) for parameter in rule.ours)
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
        f"{PREFIX}{name}{end}": _written(matrix)
        for name, update in updates.items()
        for end, matrix in zip(ENDS, (update.a, update.b))
    }
    with whole_folder(folder) as work:
        write_tensors(work, STEM, tensors, lambda name, owner: None)
        write_json(work / SETTINGS, _settings(updates, layers, config, base))


def _written(tensor: Tensor) -> Outgoing:
    return Outgoing(tuple(tensor.shape), tensor.dtype, (), lambda sources: tensor)


def _joined(rule: Rule, adapter: Adapter, model: Transformer) -> RankUpdate:
    """Return the updates of our layers as that of theirs: with one A where they share it, else with all."""
    updates = [adapter.get(_layer(name)) for name in rule.ours]
    present = [update for update in updates if update is not None]
    first = present[0]
    shared = len(present) == len(updates) and all(
        (update.alpha, update.rank_stabilized) == (first.alpha, first.rank_stabilized)
        and torch.equal(update.a, first.a)
        for update in present
    )
    if shared:
        a, alpha, stabilized = first.a, first.alpha, first.rank_stabilized
        blocks = [update.b for update in present]
    else:
        ranks = [0 if update is None else update.a.shape[0] for update in updates]
        a = torch.cat([update.a for update in present])
        alpha, stabilized, blocks, before = first.scale * sum(ranks), False, [], 0
        for update, name, rank in zip(updates, rule.ours, ranks):
            placed = a.new_zeros(model.get_parameter(name).shape[0], sum(ranks))
            if update is not None:
                placed[:, before : before + rank] = update.b * (update.scale / first.scale)
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
    ranks = {name: update.a.shape[0] for name, update in updates.items()}
    stabilized = any(update.rank_stabilized for update in updates.values())
    alphas = {
        name: update.scale * math.sqrt(ranks[name])
        if stabilized and not update.rank_stabilized
        else update.alpha
        for name, update in updates.items()
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
        "rank_pattern": {name: other for name, other in ranks.items() if other != rank},
        "alpha_pattern": {name: _number(other) for name, other in alphas.items() if other != alpha},
        "use_rslora": stabilized,
        "target_modules": short if fits else sorted(updates),
        "fan_in_fan_out": any(_is_flipped(layers[name]) for name in updates),
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": None,
    }


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


# Adapters of a model ----------------------------------------------------------------------------------------


class Adapters:
    """The adapters of one model, by name: any of them may be used at once, merged or next to the weights."""

    def __init__(self, model: Transformer, architecture: Architecture) -> None:
        self.model, self.architecture = model, architecture
        self.known: dict[str, Adapter] = {}
        self.used: tuple[str, ...] = ()
        self._plain: dict[str, nn.Module] = {}  # the layers without their updates

    def add(self, name: str, folder: str | Path) -> None:
        """Read an adapter from a directory of PEFT's; `use` applies it."""
        self.known[name] = read_adapter(Path(folder), self.model.config, self.architecture)

    def use(self, *names: str, merged: bool = False) -> None:
        """Apply these adapters and no others; without names, leave the model exactly as it was loaded.

        The updates of several add up. `merged` updates are added to the weights, which takes no time in a
        forward pass; the weights before are kept.
        """
        for name in names:
            refuse(
                name not in self.known,
                f'no adapter is called "{name}"{nearest(name, self.known)}: '
                f"there are {', '.join(self.known) or 'none: add one first'}",
            )
        for layer, part in self._plain.items():
            self.model.set_submodule(layer, part)
        self._plain = {layer: self.model.get_submodule(layer) for name in names for layer in self.known[name]}
        for name in names:
            for layer, update in self.known[name].items():
                part = self.model.get_submodule(layer)
                weight = next(part.parameters())
                wide = torch.promote_types(weight.dtype, update.a.dtype)
                a, b = (matrix.to(weight.device, wide) for matrix in (update.a, update.b))
                self.model.set_submodule(layer, LoraLinear.of(part, a, b, update.scale).eval())
        if merged:
            merge(self.model)
        self.used = names

    def scaled_matrices(self, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A and B of each layer, with the factor in A, in the model's dtype and on its device."""
        weight = next(self.model.parameters())
        return {
            layer: ((update.scale * update.a).to(weight), update.b.to(weight))
            for layer, update in self.known[name].items()
        }

    def save(self, name: str, folder: str | Path, base: str | Path | None = None) -> None:
        """Write an adapter as PEFT does; `base` is what it says of the model that it belongs to."""
        refuse(name not in self.known, f'no adapter is called "{name}"{nearest(name, self.known)}')
        write_adapter(Path(folder), self.known[name], self.model.config, self.architecture, base)


def is_adapter(folder: Path) -> bool:
    """Return whether a directory holds an adapter, and no model of its own."""
    return (folder / SETTINGS).is_file() and not (folder / "config.json").exists()


def base_of(folder: Path) -> Path:
    """Return the directory of the model that an adapter says it belongs to."""
    stated = read_json(folder / SETTINGS).get("base_model_name_or_path")
    folders = [Path(stated), folder / stated] if isinstance(stated, str) and stated else []
    base = next((path for path in folders if path.exists() and not is_adapter(path)), None)
    if base is None:
        raise CheckpointError(
            f"{folder} holds an adapter of {stated!r}, which is no model directory here: "
            "load the model, and add this directory to its adapters"
        )
    return base


def trained_updates(model: nn.Module, alpha: float) -> dict[str, RankUpdate]:
    """Return the updates that a model is trained with, by layer."""
    return {
        name: RankUpdate(part.a.detach().cpu(), part.b.detach().cpu(), alpha)
        for name, part in model.named_modules()
        if isinstance(part, LoraLinear)
    }
