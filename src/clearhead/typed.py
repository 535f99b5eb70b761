"""Dataclasses as typed tables: plain values in and out, each held against its annotation.

`ModelConfig` and the sections of a recipe are such dataclasses; what is wrong is named in one line before it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from clearhead.errors import ConfigError, nearest

Table = TypeVar("Table")


def plain(value: Any) -> Any:
    """A value as JSON and TOML know it; fields of a nested dataclass that are at their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if getattr(value, f.name) != f.default
        }
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def from_plain(cls: type[Table], values: Mapping[str, Any], table: str = "config") -> Table:
    """A dataclass from plain values; an unknown name is an error that suggests the nearest known one."""
    check_names(cls, values, table)
    hints = hints_of(cls)
    try:
        return cls(**{name: shaped(value, hints[name]) for name, value in values.items()})
    except TypeError as error:
        raise ConfigError(str(error).replace(f"{cls.__name__}.__init__() ", "config is ")) from None


def check_names(cls: type, values: Mapping[str, Any], table: str = "config") -> None:
    """Every name must be a field's."""
    known = hints_of(cls)
    for name in values:
        if name not in known:
            raise ConfigError(
                f'unknown {table} key "{name}"{nearest(str(name), known)}: {table} has {", ".join(known)}'
            )


def shaped(value: Any, hint: Any) -> Any:
    """Lists as tuples, tables as the dataclass that the annotation names."""
    if isinstance(value, list):
        return tuple(shaped(item, hint) for item in value)
    if isinstance(value, Mapping):
        inner = next((choice for choice in (hint, *get_args(hint)) if dataclasses.is_dataclass(choice)), None)
        if isinstance(inner, type):
            return from_plain(inner, value)
        return {name: shaped(item, hint) for name, item in value.items()}
    return value


def check_types(table: Any) -> None:
    """Hold every field against its annotation, so that a wrong value is named before it is used."""
    for name, hint in hints_of(type(table)).items():
        check_type(name, getattr(table, name), hint)


def check_type(name: str, value: Any, hint: Any) -> None:
    """Hold one value against an annotation."""
    if not _fits(value, hint):
        raise ConfigError(
            f"{name} {value!r} is not allowed: it must be {_describe(hint)}{_suggest(value, hint)}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} {value} is not a finite number")


def check_least(table: Any, least: int, *names: str) -> None:
    """Numbers that must be `least` or more, where they are set."""
    for name in names:
        value = getattr(table, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} {value} must be {least} or more")


def hints_of(cls: type) -> dict[str, Any]:
    """The annotation of each field."""
    return _hints(cls)


_hints = functools.cache(typing.get_type_hints)


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in arguments)
    if origin is tuple:
        kinds = (
            arguments[:1] * len(value)
            if isinstance(value, tuple) and arguments[-1] is Ellipsis
            else arguments
        )
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(k, arguments[0]) and _fits(v, arguments[1]) for k, v in value.items()
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return value is None if hint is type(None) else isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(choice) for choice in arguments)
    if origin is tuple:
        inner = [_describe(argument) for argument in arguments if argument is not Ellipsis]
        return f"a list of {inner[0]}" if Ellipsis in arguments else f"{len(inner)} values of {inner[0]}"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "unset",
    }
    return names.get(hint, "a table" if origin is Mapping else str(getattr(hint, "__name__", hint)))


def _suggest(value: Any, hint: Any) -> str:
    options = [hint, *get_args(hint)]
    choices = [
        str(choice) for option in options if get_origin(option) is Literal for choice in get_args(option)
    ]
    return nearest(value, choices) if isinstance(value, str) else ""
