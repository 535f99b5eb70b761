"""Recipes: everything that decides a training run, as TOML with the sections data, tokens, model, train and generate.

A recipe that comes with clearhead is called by its name; a file by its path. `--set train.steps=2000` changes a key.
`[model]` takes any field of `ModelConfig`, and `base`: a preset's name, or a model directory to go on from.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin

from clearhead.config import ModelConfig
from clearhead.data.plan import DataPlan
from clearhead.errors import ConfigError, InputError, nearest
from clearhead.tokens.plan import TokensPlan
from clearhead.training.plan import GeneratePlan, TrainPlan
from clearhead.typed import check_type, from_plain, hints_of, plain, shaped

SECTIONS = {
    "data": DataPlan,
    "tokens": TokensPlan,
    "model": ModelConfig,
    "train": TrainPlan,
    "generate": GeneratePlan,
}
BASE = "base"  # the one key of [model] that is no field of the config
# Settings that take another key's place: of two that say the same thing, the last one counts.
REPLACES = {"train.steps": "epochs", "train.epochs": "steps", "data.batch_size": "batch_tokens"}


@dataclass(frozen=True)
class Recipe:
    """A training run, described."""

    data: DataPlan = field(default_factory=DataPlan)
    tokens: TokensPlan = field(default_factory=TokensPlan)
    model: Mapping[str, Any] = field(default_factory=dict)  # fields of `ModelConfig`, and `base`
    train: TrainPlan = field(default_factory=TrainPlan)
    generate: GeneratePlan = field(default_factory=GeneratePlan)

    def __post_init__(self) -> None:
        hints = {BASE: str, **hints_of(ModelConfig)}
        for name, value in self.model.items():
            if name not in hints:
                raise ConfigError(
                    f'unknown [model] key "{name}"{nearest(name, hints)}: [model] has {", ".join(hints)}'
                )
            check_type(f"[model] {name}", shaped(value, hints[name]), hints[name])

    @classmethod
    def from_tables(cls, tables: Mapping[str, Mapping[str, Any]]) -> Recipe:
        """A recipe from plain values by section and key."""
        _check_sections(tables)
        made: dict[str, Any] = {}
        for section, values in tables.items():
            made[section] = (
                dict(values) if section == "model" else from_plain(SECTIONS[section], values, f"[{section}]")
            )
        return cls(**made)

    def to_toml(self) -> str:
        """The recipe as TOML with every key, its value and what it means."""
        return "\n".join(_written(section, getattr(self, section)) for section in SECTIONS)

    def replace(self, section: str, **values: Any) -> Recipe:
        """A copy with some keys of one section changed."""
        old = getattr(self, section)
        changed: dict[str, Any] = {
            section: {**old, **values} if section == "model" else dataclasses.replace(old, **values)
        }
        return dataclasses.replace(self, **changed)


def read_recipe(name: str | Path | None, settings: Iterable[str] = ()) -> Recipe:
    """The recipe of this name or file, changed by `section.key=value` settings; None: the defaults."""
    tables = _tables(name) if name is not None else {}
    _check_sections(tables)
    for setting in settings:
        section, key, value = _setting(setting)
        tables.setdefault(section, {})[key] = value
        tables[section].pop(REPLACES.get(f"{section}.{key}", ""), None)
    return Recipe.from_tables(tables)


def recipe_names() -> dict[str, str]:
    """The recipes that come with clearhead, each with its first line."""
    folder = resources.files("clearhead") / "recipes"
    found = sorted(
        (path for path in folder.iterdir() if path.name.endswith(".toml")), key=lambda path: path.name
    )
    return {
        path.name.removesuffix(".toml"): path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for path in found
    }


def _tables(name: str | Path) -> dict[str, dict[str, Any]]:
    path = Path(name)
    known = recipe_names()
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"recipe {path} cannot be read: {error}") from None
    elif str(name) in known:
        text = (resources.files("clearhead") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    elif path.suffix == ".toml":
        raise InputError(
            f"there is no recipe {path}: name a .toml file that exists, or one of {', '.join(known)}"
        )
    else:
        raise InputError(
            f'no recipe is called "{name}"{nearest(str(name), known)}: name a .toml file, or one of {", ".join(known)}'
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"recipe {name} is not TOML: {error}") from None


def _check_sections(tables: Mapping[str, Any]) -> None:
    for section, values in tables.items():
        if section not in SECTIONS:
            raise ConfigError(
                f'unknown section "{section}"{nearest(section, SECTIONS)}: a recipe has {", ".join(SECTIONS)}'
            )
        if not isinstance(values, Mapping):
            raise ConfigError(
                f'"{section}" is a section, not a value: write [{section}] and its keys below it'
            )


def _setting(text: str) -> tuple[str, str, Any]:
    """`train.steps=2000` as section, key and value."""
    place, equals, value = text.partition("=")
    section, dot, key = place.strip().partition(".")
    if not (equals and dot and section and key):
        raise InputError(
            f'setting "{text}" is not understood: write section.key=value, such as train.steps=2000'
        )
    if section not in SECTIONS:
        raise ConfigError(
            f'unknown section "{section}"{nearest(section, SECTIONS)}: a recipe has {", ".join(SECTIONS)}'
        )
    hint = str if (section, key) == ("model", BASE) else hints_of(SECTIONS[section]).get(key)
    several = any(get_origin(choice) is tuple for choice in (hint, *get_args(hint)))
    parsed = _parsed(value, several)
    if hint in (str, str | None) and not isinstance(parsed, str):
        parsed = value.strip()  # text that looks like a number
    if get_origin(hint) is tuple and not isinstance(parsed, list):
        parsed = [] if parsed == "" else [parsed]
    return section, key, parsed


def _parsed(text: str, several: bool = False) -> Any:
    """A TOML value; what is none is text, or, where `several` may stand, values with commas between them."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return [_parsed(part) for part in text.split(",")] if several and "," in text else text.strip()


def _written(section: str, table: Any) -> str:
    """One section as TOML; a key that is unset stands there as a comment."""
    if section == "model":
        lines = [f"{name} = {_toml(plain(value))}" for name, value in table.items()]
        return "\n".join([f"[{section}]", *lines, ""])
    comments = _comments(type(table))
    lines = []
    for entry in dataclasses.fields(table):
        value = plain(getattr(table, entry.name))
        note = f"  # {comments[entry.name]}" if entry.name in comments else ""
        lines.append(f"# {entry.name} ={note}" if value is None else f"{entry.name} = {_toml(value)}{note}")
    return "\n".join([f"[{section}]", *lines, ""])


def _comments(cls: type) -> dict[str, str]:
    """The comment beside each field in the source, which is where its meaning is written down."""
    try:
        source = inspect.getsource(cls)
    except OSError:
        return {}
    return dict(re.findall(r"^    (\w+): .*?  # (.+)$", source, flags=re.MULTILINE))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(
            f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else {"\\": "\\\\", '"': '\\"'}.get(c, c)
            for c in value
        )
        return f'"{escaped}"'
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)
