"""Parts built from other parts: the same parameters under the same names, with another `forward`.

A replacement takes the place of the first part by ordinary assignment. The first part stays as it was, and
can be put back.
"""

import copy
import functools
from typing import Any, TypeVar

from torch import nn

Kind = TypeVar("Kind", bound=nn.Module)


def like(part: nn.Module, kind: type[Kind], **changes: object) -> Kind:
    """Return a module of class `kind` that shares all attributes of `part`, apart from `changes`."""
    new = kind.__new__(kind)
    state = part.__getstate__()  # type: ignore[no-untyped-call]
    new.__setstate__(  # type: ignore[no-untyped-call]
        {name: copy.copy(value) if isinstance(value, (dict, set)) else value for name, value in state.items()}
    )
    for name, value in changes.items():
        setattr(new, name, value)
    return new


class Direct(nn.Module):
    """A part for inference: calling it runs `forward` at once, without looking for hooks."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run `forward`."""
        return self.forward(*inputs, **named)

    def settle(self) -> None:
        """Keep parameters and submodules as ordinary attributes too, found without a search."""
        for name, value in (*self.named_parameters(recurse=False), *self.named_children()):
            object.__setattr__(self, name, value)


@functools.cache
def direct(kind: Any) -> Any:
    """Return a subclass of `kind`, a class of parts, that is `Direct`."""
    return type(kind.__name__, (Direct, kind), {})
