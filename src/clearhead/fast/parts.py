"""Parts built from other parts: the same parameters under the same names, with another `forward`.

A replacement takes the place of the first part by ordinary assignment. The first part stays as it was, and
can be put back.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, TypeVar, cast

from torch import nn

Part = TypeVar("Part", bound=nn.Module)


def like(part: nn.Module, kind: type[Part]) -> Part:
    """Return a module of class `kind` that shares the parameters, parts and attributes of `part`."""
    new = kind.__new__(kind)
    state = part.__getstate__()  # type: ignore[no-untyped-call]
    new.__setstate__(  # type: ignore[no-untyped-call]
        {name: copy.copy(value) if isinstance(value, (dict, set)) else value for name, value in state.items()}
    )
    return new


def original(part: nn.Module) -> type[nn.Module]:
    """Return the class that a replacement stands for, or the part's own."""
    kind: type[nn.Module] = getattr(type(part), "replaces", type(part))
    return kind


class Direct(nn.Module):
    """A part for inference: calling it runs `forward` at once, without looking for hooks."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run `forward`."""
        return self.forward(*inputs, **named)

    def settle(self) -> None:
        """Keep parameters and submodules as ordinary attributes too, found without a search."""
        for name, value in (*self.named_parameters(recurse=False), *self.named_children()):
            object.__setattr__(self, name, value)


def direct(part: Part) -> Part:
    """Return a `Direct` part that is all that `part` is."""
    return cast(Part, like(part, _direct_class(original(part))))  # type: ignore[arg-type]


@functools.cache
def _direct_class(kind: Any) -> type[Direct]:
    return type(kind.__name__, (Direct, kind), {})
