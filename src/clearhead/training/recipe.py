"""Recipes: every setting of a run, as TOML with the sections data, tokens, model, train and generate.

A recipe that comes with clearhead is given by its name, any other by its file. `--set train.steps=2000`
changes a key. `[model]` takes any field of `ModelConfig`, and `base`: a preset's name, or a model directory
to start from.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import os
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_origin

from clearhead.config import ModelConfig
from clearhead.data.plan import DataPlan
from clearhead.errors import ConfigError, InputError, nearest, refuse
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
Settings: TypeAlias = Mapping[str, Any] | Iterable[str]  # {"train.steps": 30}, or "train.steps=30" strings
# Settings that take the place of another key: of two that say the same thing, the last one counts.
REPLACES = {"train.steps": "epochs", "train.epochs": "steps", "data.batch_size": "batch_tokens"}


@dataclass(frozen=True)
class Recipe:
    """Every setting of a training run."""

    data: DataPlan = field(default_factory=DataPlan)
    tokens: TokensPlan = field(default_factory=TokensPlan)
    model: Mapping[str, Any] = field(default_factory=dict)  # fields of `ModelConfig`, and `base`
    train: TrainPlan = field(default_factory=TrainPlan)
    generate: GeneratePlan = field(default_factory=GeneratePlan)

    def __post_init__(self) -> None:
        hints = {BASE: str, **hints_of(ModelConfig)}
        for name, value in self.model.items():
            refuse(
                name not in hints,
                f'unknown [model] key "{name}"{nearest(name, hints)}: [model] has {", ".join(hints)}',
                ConfigError,
            )
            check_type(f"[model] {name}", shaped(value, hints[name]), hints[name])

    @classmethod
    def from_tables(cls, tables: Mapping[str, Mapping[str, Any]]) -> Recipe:
        """Build a recipe from plain values by section and key."""
        _check_sections(tables)
        made: dict[str, Any] = {
            section: from_plain(SECTIONS[section], values, f"[{section}]")
            for section, values in tables.items()
            if section != "model"
        }
        return cls(model=dict(tables.get("model", {})), **made)

    def to_toml(self) -> str:
        """Write the recipe as TOML: every key, its value and its meaning."""
        return "\n".join(_written(section, getattr(self, section)) for section in SECTIONS)

    def replace(self, section: str, **values: Any) -> Recipe:
        """Return a copy with some keys of one section changed."""
        old = getattr(self, section)
        changed: dict[str, Any] = {
            section: {**old, **values} if section == "model" else dataclasses.replace(old, **values)
        }
        return dataclasses.replace(self, **changed)


def read_recipe(name: str | Path | Recipe | None, settings: Settings = ()) -> Recipe:
    """Read a recipe and change some of its keys.

    Args:
        name: a recipe, its name, or its file; None: the defaults. settings: the changes, as a dictionary such
        as `{"train.steps": 2000}` or as strings such as `train.steps=2000`.
    """
    tables = _tables(name) if name is not None else {}
    _check_sections(tables)
    for section, key, value in _changes(settings):
        tables.setdefault(section, {})[key] = value
        tables[section].pop(REPLACES.get(f"{section}.{key}", ""), None)
    return Recipe.from_tables(tables)


def recipe_names() -> dict[str, str]:
    """Return the names of the recipes that come with clearhead, each with its first line."""
    folder = resources.files("clearhead") / "recipes"
    found = sorted(
        (path for path in folder.iterdir() if path.name.endswith(".toml")), key=lambda path: path.name
    )
    return {
        path.name.removesuffix(".toml"): path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for path in found
    }


def _tables(name: str | Path | Recipe) -> dict[str, dict[str, Any]]:
    if isinstance(name, Recipe):
        return {section: plain(getattr(name, section)) for section in SECTIONS}
    path, known = Path(name), recipe_names()
    if not path.is_file() and str(name) not in known:
        what = f'no recipe is called "{name}"{nearest(str(name), known)}: name a .toml file'
        if path.suffix == ".toml":
            what = f"there is no recipe {path}: name a .toml file that exists"
        raise InputError(f"{what}, or one of {', '.join(known)}")
    file = path if path.is_file() else resources.files("clearhead") / "recipes" / f"{name}.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"recipe {name} is not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {path} cannot be read: {error}") from None


def _check_sections(tables: Mapping[str, Any]) -> None:
    for section, values in tables.items():
        refuse(
            section not in SECTIONS,
            f'unknown section "{section}"{nearest(section, SECTIONS)}: a recipe has {", ".join(SECTIONS)}',
            ConfigError,
        )
        refuse(
            not isinstance(values, Mapping),
            f'"{section}" is a section, not a value: write [{section}] and its keys below it',
            ConfigError,
        )


def _changes(settings: Settings) -> Iterator[tuple[str, str, Any]]:
    """Yield section, key and value of each setting."""
    if isinstance(settings, Mapping):
        for place, value in settings.items():
            yield *_place(place, str(place)), os.fspath(value) if isinstance(value, os.PathLike) else value
        return
    for setting in settings:
        place, equals, text = setting.partition("=")
        section, key = _place(place if equals else "", setting)
        yield section, key, _parsed(section, key, text)


def _place(place: object, setting: str) -> tuple[str, str]:
    """Return section and key of `train.steps`."""
    section, _, key = place.strip().partition(".") if isinstance(place, str) else ("", "", "")
    refuse(
        not (section and key),
        f'setting "{setting}" is not understood: write section.key=value, such as train.steps=2000',
    )
    _check_sections({section: {}})
    return section, key


def _parsed(section: str, key: str, text: str) -> Any:
    """Parse the text of a setting by the type of its key."""
    hint = str if (section, key) == ("model", BASE) else hints_of(SECTIONS[section]).get(key)
    several = any(get_origin(choice) is tuple for choice in (hint, *get_args(hint)))
    value = _value(text, several)
    if hint in (str, str | None) and not isinstance(value, str):
        return text.strip()  # text that looks like a number
    if get_origin(hint) is tuple and not isinstance(value, list):
        return [] if value == "" else [value]
    return value


def _value(text: str, several: bool = False) -> Any:
    """Parse a TOML value; anything else is text or, where `several` are allowed, values between commas."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return [_value(part) for part in text.split(",")] if several and "," in text else text.strip()


def _written(section: str, table: Any) -> str:
    """Write one section as TOML; a key that is unset is written as a comment."""
    values = table if section == "model" else {name: getattr(table, name) for name in hints_of(type(table))}
    comments = _comments(type(table)) if section != "model" else {}
    lines = [f"[{section}]"]
    for name, value in values.items():
        note = f"  # {comments[name]}" if name in comments else ""
        lines.append(f"# {name} ={note}" if value is None else f"{name} = {_toml(plain(value))}{note}")
    return "\n".join([*lines, ""])


def _comments(cls: type) -> dict[str, str]:
    """Return the comment beside each field in the source, own or inherited, which explains the field."""
    try:
        source = "\n".join(inspect.getsource(each) for each in cls.__mro__ if dataclasses.is_dataclass(each))
    except OSError:
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {one.start[0]: one.string.lstrip("# ") for one in tokens if one.type == tokenize.COMMENT}
    return {
        node.target.id: comments[line]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if line in comments
    }


def _toml(value: Any) -> str:
    """Write a value as TOML: numbers, booleans and text are as in JSON, but for the character DEL."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
