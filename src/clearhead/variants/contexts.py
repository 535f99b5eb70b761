"""`with` blocks around a model: record or edit its activations, choose its attention kernel, evaluate.

    with record(model, "blocks.*.attention.pattern") as seen:
        model(ids)
    seen["blocks.0.attention.pattern"]                      # B H T S

The names of activations are public API: `tap_names` lists them, and a test freezes them.
"""

import fnmatch
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.core.attention import KERNELS, Attention
from clearhead.core.config import ModelConfig
from clearhead.core.taps import LISTENERS, Listener
from clearhead.errors import nearest, refuse

ATTENTION_TAPS = ("q", "k", "v", "scores", "pattern", "z", "out")
FEEDFORWARD_TAPS = ("pre", "post", "out")
WRAPPED = ("_orig_mod", "module", "model")  # where torch.compile, data parallelism and `Model` keep a model


def unwrapped(model: object) -> Any:
    """Return the Transformer in what `load` gives, in a wrapper such as `torch.compile`'s, or itself."""
    module, within = model, [model]
    while within:
        module = within[0]
        inner = (getattr(module, name, None) for name in WRAPPED)
        within = [part for part in inner if part is not None]
    refuse(
        not isinstance(module, nn.Module) or not isinstance(getattr(module, "config", None), ModelConfig),
        f"{type(model).__name__} is not a model of clearhead: give what ch.load returns, its .model, "
        "or a wrapper of that",
    )
    return module


class Recording(dict[str, Tensor]):
    """What `record` saw: by name, the tensor of the latest forward pass; `calls` has those of all passes."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Tensor]] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Append the tensor of one more forward pass."""
        self[name] = x
        self._calls.setdefault(name, []).append(x)

    def __missing__(self, name: str) -> Tensor:
        seen = ", ".join(self) or "nothing yet"
        raise KeyError(f'"{name}" was not seen{nearest(name, self)}; seen: {seen}')

    def calls(self, name: str) -> list[Tensor]:
        """Return the tensors seen under `name`, one per forward pass; generation makes one pass per token."""
        self[name]
        return self._calls[name]


@contextmanager
def record(model: object, *patterns: str, detach: bool = True) -> Iterator[Recording]:
    """Record the activations whose names match (`*` matches anything); `detach=False` keeps their graph.

    `model` is what `load` returns, a Transformer, or a wrapper of one. Of several forward passes, such as
    those of `generate`, `seen[name]` is the last and `seen.calls(name)` has all.
    """
    seen, listened = Recording(), unwrapped(model)

    def keep(name: str, x: Tensor) -> Tensor:
        seen.add(name, x.detach().clone() if detach else x)
        return x

    names = [name for pattern in patterns for name in matching(listened.config, pattern)]
    with listening(Listener(listened, dict.fromkeys(names, keep))):
        yield seen


@contextmanager
def edit(model: object, changes: Mapping[str, Callable[[Tensor], Tensor | None]]) -> Iterator[None]:
    """Replace each activation `x` whose name matches by `fn(x)`, of the same shape and dtype.

    Where `fn` returns None, `x` stays, as with PyTorch's hooks. `model` is as in `record`.
    """
    listened = unwrapped(model)

    def change(fn: Callable[[Tensor], Tensor | None], name: str, x: Tensor) -> Tensor:
        y = fn(x)
        if y is None:
            return x
        refuse(not isinstance(y, Tensor), f"edit of {name} gave {type(y).__name__}: return a tensor, or None")
        got, wanted = f"{y.dtype} {tuple(y.shape)}", f"{x.dtype} {tuple(x.shape)}"
        refuse(got != wanted, f"edit of {name} gave {got} for {wanted}: shape and dtype must stay")
        return y

    handlers = {
        name: functools.partial(change, fn)
        for pattern, fn in changes.items()
        for name in matching(listened.config, pattern)
    }
    with listening(Listener(listened, handlers)):
        yield


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Show every forward pass of its model to `listener` within the `with` block."""
    refuse(
        any(hasattr(weight, "device_mesh") for weight in unwrapped(listener.model).parameters()),
        "this model is split over processes, and each has some of its heads alone: load it in one process",
    )
    token = LISTENERS.set((*LISTENERS.get(), listener))
    try:
        with _uncompiled:
            yield
    finally:
        LISTENERS.reset(token)


class _Uncompiled:
    """Run compiled models uncompiled while somebody listens, in any thread.

    The compiler has one stance for the whole process, so the listening threads are counted. A process that
    has not imported the compiler, which is slow, has nothing compiled.
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
    """Return the tap names that match; where none does, raise an error with the nearest name."""
    names = tap_names(config)
    matches = fnmatch.filter(names, pattern)
    near = "" if matches else nearest(pattern, names)
    refuse(not matches, f'no activation is called "{pattern}"{near}: tap_names(model) lists them all')
    return matches


def tap_names(model: object) -> list[str]:
    """Return every activation name of a model, in the order of the forward pass.

    `model` is what `load` returns, a `Transformer`, a wrapper of it, or a config. A stack that feeds another
    has the prefix `encoder.`; the stack that feeds the head has none.
    """
    config = model if isinstance(model, ModelConfig) else unwrapped(model).config
    names = []
    for stack in config.stacks:
        blocks = []
        for layer, kind in enumerate(stack.kinds):
            own = [tap for tap in ATTENTION_TAPS if tap not in kind.untapped]
            own[-1:-1] = kind.also_tapped
            taps = {"attention": own, **({"cross": ATTENTION_TAPS} if stack.cross else {})}
            attention = [f"{part}.{tap}" for part, some in taps.items() for tap in some]
            inner = [f"{part}.{tap}" for part in stack.feedforwards(layer) for tap in FEEDFORWARD_TAPS]
            if "feedforward" not in stack.feedforwards(layer):
                inner = [*(["feedforward.router"] if inner else []), *inner, "feedforward.out"]
            after = [*([] if config.parallel else ["resid_mid"]), "feedforward.in", *inner]
            routed = ["router", "passed"] if stack.capacities[layer] < 1 else []
            block = ["resid_pre", *routed, *attention, *after, "resid_post"]
            blocks += [f"blocks.{layer}.{name}" for name in block]
        names += [f"{stack.prefix}{name}" for name in ("embedding", *blocks, "hidden")]
    return [*names, "logits"]


@contextmanager
def _with(parts: list[nn.Module], name: str, value: object) -> Iterator[None]:
    """Set one attribute of these parts within a `with` block; afterwards restore the value of each."""
    # By `vars`: a module makes four look-ups before it sets an attribute, and `generate` does it each time.
    others = [(vars(part), vars(part)[name]) for part in parts if vars(part)[name] != value]
    try:
        for attributes, _ in others:
            attributes[name] = value
        yield
    finally:
        for attributes, old in others:
            attributes[name] = old


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Put the model in evaluation mode within a `with` block; afterwards restore the mode of every part."""
    return _with(list(model.modules()), "training", False)


def attending(model: object, kernel: str) -> AbstractContextManager[None]:
    """Use one kernel in every attention of `model`, or of a part, in a `with` block.

    "fused" is the default, "eager" spells every step out, and "flex" has PyTorch's `flex_attention` attend in
    long rows of masked kinds, where it serves (`variants.blocks`). All give the same numbers.
    """
    refuse(
        kernel not in KERNELS, f'no attention kernel is called "{kernel}": choose from {", ".join(KERNELS)}'
    )
    parts = (model if isinstance(model, nn.Module) else unwrapped(model)).modules()
    return _with([part for part in parts if isinstance(part, Attention)], "kernel", kernel)
