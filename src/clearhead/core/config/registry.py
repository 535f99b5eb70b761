"""Registries: tables of parts, by the name that a config gives them.

The core has the common parts. A variant is stated as "module:name", and imported when it is first looked up:
so variants build on the core, and the core never imports them. A bare `REGISTRY[name]` imports a variant
ahead of time, where the pass that needs it may be compiled.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar, cast

Part = TypeVar("Part")


class Registry(Mapping[str, Part], Generic[Part]):
    """A table of parts, some of them stated by the module that they are in."""

    def __init__(self, parts: Mapping[str, Part | str]) -> None:
        self._parts = dict(parts)

    def register(self, name: str, part: Part) -> None:
        """Add a part, from inside or outside the package."""
        self._parts[name] = part

    def __getitem__(self, name: str) -> Part:
        part = self._parts[name]
        if isinstance(part, str):
            module, attribute = part.split(":")
            part = self._parts[name] = getattr(importlib.import_module(module), attribute)
        return cast(Part, part)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
