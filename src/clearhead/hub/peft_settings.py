"""The settings of a PEFT adapter, `adapter_config.json`: checked, and which layers they name."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clearhead.errors import CheckpointError
from clearhead.hub.files import refuse

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
    kind = settings.get("peft_type", "LORA")
    refuse(kind != "LORA", f"{wrong} peft_type {kind!r}: only LORA is supported")
    bias = settings.get("bias", "none")
    refuse(bias != "none", f"{wrong} bias {bias!r}: only updates without biases are supported")
    start = settings.get("init_lora_weights")
    refuse(
        start not in PLAIN_STARTS,
        f"{wrong} init_lora_weights {start!r}, which changes the model's own weights: convert it with PEFT",
    )
    for key, value in settings.items():
        refuse(
            key not in WITHOUT_EFFECT | HONOURED and value not in (False, [], {}, ""),
            f"{wrong} {key} {str(value)[:40]}, which is not supported: merge the adapter with PEFT instead",
        )
    numbers = [settings["r"], *_table(folder, settings, "rank_pattern").values()]
    refuse(
        not all(type(one) is int and one >= 1 for one in numbers),
        f"{wrong} a rank in r or rank_pattern that is no whole number from 1 on",
    )
    alphas = [settings["lora_alpha"], *_table(folder, settings, "alpha_pattern").values()]
    refuse(
        not all(type(one) in (int, float) and abs(one) < MOST for one in alphas),
        f"{wrong} a factor in lora_alpha or alpha_pattern that is no number below {MOST:.0e}",
    )
    refuse(type(settings["use_rslora"]) is not bool, f"{wrong} use_rslora that is neither true nor false")
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        found = settings.get(key, [] if key != "target_modules" else None)
        refuse(
            not (isinstance(found, str) or (isinstance(found, list) and all(map(_is_text, found)))),
            f"{wrong} {key} {str(found)[:40]}: they must be names of layers, or an expression",
        )
    patterns = settings.get("layers_pattern", [])
    for one in [patterns] if isinstance(patterns, str) else patterns:
        refuse(_expression(one).groups, f"{wrong} layers_pattern {one!r:.60}: groups in it are not supported")
    chosen = settings.get("layers_to_transform", [])
    refuse(
        not all(type(one) is int for one in (chosen if isinstance(chosen, list) else [chosen])),
        f"{wrong} layers_to_transform {str(chosen)[:40]}: it must be a number or a list of numbers",
    )
    return settings


def _is_text(value: object) -> bool:
    return isinstance(value, str)


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
    inner, found = re.compile(r"\(([^()]*)\)"), 1
    while found:  # a group becomes a letter, repeated where something in it is
        bare, found = inner.subn(lambda group: "x*" if re.search(r"[*+{]", group[1]) else "x", bare)
    return many or re.search(r"\*[*+{]", bare) is not None


def _table(folder: Path, settings: dict[str, Any], key: str) -> dict[str, Any]:
    found = settings[key]
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder / SETTINGS} has {key} {str(found)[:40]}: it must be a table")
    return found


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
    found = (
        re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name)
        for pattern in ([patterns] if isinstance(patterns, str) else patterns)
    )
    first = next(filter(None, found), None)
    chosen = numbers if isinstance(numbers, list) else [numbers]
    return first is not None and int(first.group(1)) in chosen and is_named(settings["target_modules"], name)


def is_named(names: str | Iterable[str], name: str) -> bool:
    """Return whether an expression, or one of several names, is that of a layer."""
    if isinstance(names, str):
        return _expression(names).fullmatch(name) is not None
    return any(name == one or name.endswith(f".{one}") for one in names)


def by_pattern(settings: Mapping[str, Any], key: str, name: str, usual: Any) -> Any:
    """Return the value of the first pattern that ends the name of a layer."""
    found = (value for one, value in settings[key].items() if _expression(one, r"(.*\.)?({})$").match(name))
    return next(found, usual)
