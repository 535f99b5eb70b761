"""Taps: every activation has a name, and can be recorded or changed while the model runs.

The forward pass calls `q = tap("q", q)` for every activation worth seeing. When nobody listens, `tap` is
`SILENT` and hands the tensor straight back. `ch.record` and `ch.edit` (`variants.contexts`) put a listener in
place for the length of a `with` block; listeners are a context variable, so other threads do not notice.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor


class Tap:
    """What a module calls to show a tensor. This base class is the silent tap, with no listeners."""

    traced = False  # whether a trace follows this forward pass

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """Show `x` under `name`; the caller goes on with the returned tensor."""
        return x

    def step(self, name: str, x: Tensor) -> Tensor:
        """Show an intermediate value to a trace, and return it unchanged."""
        return x

    def part(self, name: str) -> "Tap":
        """Return the tap for a part called `name`."""
        return self

    def wants(self, *names: str) -> bool:
        """Return True if somebody listens to one of these names."""
        return False


SILENT = Tap()


class Listener(NamedTuple):
    """Functions that see, and may change, the activations of one model; handlers go by exact name.

    A `tracer` sees every value, in the order of the forward pass: the name, the value, and whether
    the value is an activation that `record` and `edit` know by that name.
    """

    model: object
    handlers: Mapping[str, Callable[[str, Tensor], Tensor]]
    tracer: Callable[[str, Tensor, bool], None] | None = None


class LiveTap(Tap):
    """A tap with listeners; `prefix` is where in the model it sits."""

    def __init__(self, listeners: tuple[Listener, ...], prefix: str = "") -> None:
        self.listeners, self.prefix = listeners, prefix
        self.traced = any(listener.tracer is not None for listener in listeners)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """Show `x` to each listener, in the order in which they began to listen."""
        full = self.prefix + name
        for listener in self.listeners:
            if full in listener.handlers:
                x = listener.handlers[full](full, x)
            if listener.tracer is not None:
                listener.tracer(full, x, True)
        return x

    def step(self, name: str, x: Tensor) -> Tensor:
        """Show `x` to the listeners that trace."""
        for listener in self.listeners:
            if listener.tracer is not None:
                listener.tracer(self.prefix + name, x, False)
        return x

    def part(self, name: str) -> "Tap":
        """Return a tap with the same listeners, one level down."""
        return LiveTap(self.listeners, f"{self.prefix}{name}.")

    def wants(self, *names: str) -> bool:
        """Return True if somebody listens to one of these names."""
        full = {self.prefix + name for name in names}
        return self.traced or any(full & listener.handlers.keys() for listener in self.listeners)


LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("clearhead_listeners", default=())


def tap_for(model: object) -> Tap:
    """Return the tap for one forward pass of `model`: silent unless somebody listens to this very model."""
    if torch.compiler.is_compiling():
        return SILENT  # see `variants.contexts`: while somebody listens, nothing is compiled
    mine = tuple(listener for listener in LISTENERS.get() if listener.model is model)
    return LiveTap(mine) if mine else SILENT
