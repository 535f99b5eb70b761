"""Taps: every activation has a name, and can be recorded or changed while the model runs.

A forward pass says `q = tap("q", q)` wherever something worth seeing happens. When nobody listens, `tap` is `SILENT`
and hands the tensor straight back. `record` and `edit` put a listener in place for the length of a `with` block; the
listener is a context variable, so threads that serve other requests do not notice.

    with record(model, "blocks.*.attention.pattern") as seen:
        model(ids)
    seen["blocks.0.attention.pattern"]                      # B H T S

The names are public API: `tap_names` lists them, and a test freezes them.
"""

from __future__ import annotations

import fnmatch
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.errors import InputError, nearest

if TYPE_CHECKING:
    from clearhead.model.transformer import Transformer

ATTENTION_TAPS = ("q", "k", "v", "scores", "pattern", "z", "out")
FEEDFORWARD_TAPS = ("pre", "post", "out")


class Tap:
    """What a module calls to show a tensor. This base class is the silent one: nobody is listening."""

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """Show `x` under `name`; use what comes back in its place."""
        return x

    def inside(self, name: str) -> Tap:
        """The tap for a part called `name`."""
        return self

    def wants(self, *names: str) -> bool:
        """Is anybody listening to one of these names?"""
        return False


SILENT = Tap()


class Listener:
    """Somebody who wants to see, and perhaps change, activations whose names match."""

    def __init__(self, model: object, handlers: Mapping[str, Callable[[str, Tensor], Tensor]]) -> None:
        self.model, self.handlers = model, handlers  # handlers by exact name


class LiveTap(Tap):
    """A tap with listeners; `prefix` is where in the model it sits."""

    def __init__(self, listeners: tuple[Listener, ...], prefix: str = "") -> None:
        self.listeners, self.prefix = listeners, prefix

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """Show `x` to each listener in the order in which they began to listen."""
        full = self.prefix + name
        for listener in self.listeners:
            if full in listener.handlers:
                x = listener.handlers[full](full, x)
        return x

    def inside(self, name: str) -> Tap:
        """The same listeners, one level down."""
        return LiveTap(self.listeners, f"{self.prefix}{name}.")

    def wants(self, *names: str) -> bool:
        """Is anybody listening to one of these names?"""
        return any(self.prefix + name in listener.handlers for listener in self.listeners for name in names)


_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("clearhead_listeners", default=())


def tap_for(model: object) -> Tap:
    """The tap for one forward pass of `model`: silent unless somebody listens to this very model."""
    if torch.compiler.is_compiling():
        return SILENT  # see `_listening`: while somebody listens, nothing is compiled
    mine = tuple(listener for listener in _listeners.get() if listener.model is model)
    return LiveTap(mine) if mine else SILENT


class Recording(Mapping[str, Tensor]):
    """What `record` saw: by name, the tensor of the latest forward pass; `calls(name)` has those of all passes."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Tensor]] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Append the tensor of one more forward pass."""
        self._calls.setdefault(name, []).append(x)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._calls:
            raise KeyError(
                f'"{name}" was not seen{nearest(name, self._calls)}; seen: {", ".join(self._calls) or "nothing yet"}'
            )
        return self._calls[name][-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def calls(self, name: str) -> list[Tensor]:
        """The tensors seen under `name`, one per forward pass: under generation, one per step."""
        self[name]
        return self._calls[name]


@contextmanager
def record(model: Transformer, *patterns: str, detach: bool = True) -> Iterator[Recording]:
    """Record the activations whose names match (`*` stands for anything); `detach=False` keeps their gradients' graph."""
    seen = Recording()

    def keep(name: str, x: Tensor) -> Tensor:
        seen.add(name, x.detach().clone() if detach else x)
        return x

    names = [name for pattern in patterns for name in matching(model.config, pattern)]
    with _listening(Listener(model, dict.fromkeys(names, keep))):
        yield seen


@contextmanager
def edit(model: Transformer, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Put `fn(x)` in the place of each activation `x` whose name matches; shape and dtype must stay."""

    def handler(fn: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
        def change(name: str, x: Tensor) -> Tensor:
            y = fn(x)
            if y.shape != x.shape or y.dtype != x.dtype:
                raise InputError(
                    f"edit of {name} gave {y.dtype} {tuple(y.shape)} for {x.dtype} {tuple(x.shape)}: shape and dtype must stay"
                )
            return y

        return change

    handlers = {
        name: handler(fn) for pattern, fn in changes.items() for name in matching(model.config, pattern)
    }
    with _listening(Listener(model, handlers)):
        yield


@contextmanager
def _listening(listener: Listener) -> Iterator[None]:
    token = _listeners.set((*_listeners.get(), listener))
    try:
        with _uncompiled:
            yield
    finally:
        _listeners.reset(token)


class _Uncompiled:
    """A compiled model runs uncompiled while it is watched, by however many threads at once: the compiler's stance is one for all.

    Where the compiler was never imported (it is slow to), none is compiled.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.watchers = 0
        self.stance: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        with self.lock:
            self.watchers += 1
            if self.stance is None and "torch._dynamo" in sys.modules:
                self.stance = torch.compiler.set_stance("force_eager")
                self.stance.__enter__()

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.watchers -= 1
            if self.stance is not None and not self.watchers:
                self.stance.__exit__(None, None, None)
                self.stance = None


_uncompiled = _Uncompiled()


def matching(config: ModelConfig, pattern: str) -> list[str]:
    """The tap names that match; an error, with the nearest name, when none does."""
    names = tap_names(config)
    found = fnmatch.filter(names, pattern)
    if not found:
        raise InputError(
            f'no activation is called "{pattern}"{nearest(pattern, names)}: tap_names(config) lists them all'
        )
    return found


def tap_names(config: ModelConfig) -> list[str]:
    """Every activation name of a model, in the order of the forward pass.

    A stack that feeds another has the prefix `encoder.`; the stack that feeds the head has none.
    """
    names: list[str] = []
    for plan in (config.encoder, config.decoder):
        if plan is None:
            continue
        names.append(f"{plan.prefix}embedding")
        for layer in range(plan.n_layers):
            block = f"{plan.prefix}blocks.{layer}"
            attention = [f"{block}.attention.{tap}" for tap in ATTENTION_TAPS]
            cross = [f"{block}.cross.{tap}" for tap in ATTENTION_TAPS] if plan.cross else []
            experts = [
                f"experts.{number}.{tap}" for number in range(config.n_experts) for tap in FEEDFORWARD_TAPS
            ]
            inner = ["router", *experts, "out"] if config.n_experts else FEEDFORWARD_TAPS
            feedforward = [f"{block}.feedforward.{tap}" for tap in inner]
            middle = [] if config.parallel else [f"{block}.resid_mid"]
            names += [f"{block}.resid_pre", *attention, *cross, *middle, *feedforward, f"{block}.resid_post"]
        names.append(f"{plan.prefix}hidden")
    return [*names, "logits"]
