"""Adapters: low-rank updates of one model, of which each request of a step may have its own.

An adapter is PEFT's, or is told from the folder that a run with `train.lora` leaves: where its linear layers
differ from the model's, the difference is cut into two thin matrices. y = W x + B A x is then computed for
the rows of each request by itself, so that its numbers do not depend on the company.

Adapters are loaded and unloaded while the engine runs. A request keeps the adapter that its name meant when
it came: one that was unloaded, or replaced, is freed with its last request.

Shapes: T rows of a step, D width in, N width out, R rank.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.hub.peft import Adapters, is_adapter
from clearhead.run.api import Model, load
from clearhead.run.kernels.parts import Direct, JoinedLinear, PackedLinear, settle
from clearhead.variants.latent import LatentAttention

LARGEST_RANK = 512
Update = tuple[Tensor, Tensor]  # A [R, D] and B [N, R]
Updates = dict[str, Update]  # by the name of the layer


def open_adapter(m: Model, name: str, folder: Path) -> Updates:
    """Return the updates of a directory: PEFT's, or that of a model that was trained from this one."""
    if is_adapter(folder):
        adapters = Adapters(m.model, m.described().architecture)
        adapters.add(name, folder)
        return adapters.scaled_matrices(name)
    dtype = next(m.model.parameters()).dtype
    return updates_of(m.model, load(folder, dtype).model, name)


def updates_of(model: Transformer, tuned: Transformer, name: str) -> Updates:
    """Return in what another model of the same shape differs: low-rank updates of linear layers alone."""
    theirs, found = dict(tuned.named_parameters()), {}
    ours = dict(model.named_parameters())
    refuse(
        {key: w.shape for key, w in ours.items()} != {key: w.shape for key, w in theirs.items()},
        f"adapter {name} is of a model with other layers: it must be trained from the one that is served",
    )
    refuse(
        next(model.parameters()).dtype not in (torch.float32, torch.float64),
        f"adapter {name} cannot be told from weights in half precision, which round updates away: serve the "
        "model in float32",
    )
    for key, weight in ours.items():
        layer = key.removesuffix(".weight")
        difference = theirs[key].detach().to(weight) - weight.detach()
        if not difference.any():
            continue
        refuse(
            not difference.isfinite().all(),
            f"adapter {name} has NaN or infinite numbers in {key}: the run that wrote it had diverged",
        )
        linear = layer != key and isinstance(model.get_submodule(layer), nn.Linear)
        refuse(
            not linear or ".blocks." not in f".{key}",
            f"adapter {name} differs from the model in {key}, and adapters are updates of the blocks' linear "
            f"layers: serve it as a model of its own, --model {name}=DIR",
        )
        u, s, v = torch.linalg.svd(difference, full_matrices=False)
        # What is smaller than the rounding of the merged weight is no update.
        largest = max(float(side.detach().abs().max()) for side in (weight, theirs[key]))
        noise = torch.finfo(weight.dtype).eps * largest * sum(size**0.5 for size in weight.shape)
        rank = int((s > noise).sum())
        refuse(
            rank > min(LARGEST_RANK, min(weight.shape) // 2),
            f"adapter {name} differs from the model in {key} by rank {rank}, which is no low-rank update: "
            f"serve it as a model of its own, --model {name}=DIR",
        )
        found[layer] = ((s[:rank, None] * v[:rank]).to(weight), u[:, :rank].to(weight).contiguous())
    return found


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as the inference model adds it: the update of each part that stands for its layers."""

    name: str
    number: int  # of all that were loaded: a later adapter of the same name has another
    updates: Updates
    parts: Mapping["AdaptedLinear", Update]


class AdaptedLinear(Direct):
    """A linear layer, or several joined, with the updates of the adapters."""

    def __init__(self, base: nn.Module, layers: "AdaptedLayers") -> None:
        super().__init__()
        self.base, self.layers = base, layers
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, D] -> [1, T, N]."""
        y: Tensor = self.base(x)
        for span, adapter in self.layers.spans:
            update = adapter.parts.get(self)
            if update is not None:
                a, b = update
                y[:, span] += nnf.linear(nnf.linear(x[:, span], a), b)
        return y


class AdaptedLayers:
    """The linear layers of an inference model that adapters update, and which rows of a step have which."""

    def __init__(self, runner: nn.Module, model: Transformer) -> None:
        """`runner` is the inference model of `model`."""
        self.runner, self.model = runner, model
        self.spans: Sequence[tuple[slice, Adapter]] = ()  # of the step in progress
        self._count, self._lock = 0, threading.Lock()
        linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        # Elsewhere rows do not lie as `spans` says: the head reads some, an expert those that chose it.
        # And latents that are kept become keys of more rows than those of the step.
        parts = dict(model.named_modules())
        apart = {
            f"{name}.{own}"
            for name, part in parts.items()
            if isinstance(part, LatentAttention)
            for own in "kv"
        }
        inside = (name for name in linear if ".blocks." in f".{name}" and ".experts." not in name)
        fits = (name for name in inside if name not in apart)
        self._layers = {id(linear[name].weight): name for name in fits}

    @contextmanager
    def step(self, spans: Sequence[tuple[slice, Adapter]]) -> Iterator[None]:
        """Let these rows of a step have these adapters."""
        before, self.spans = self.spans, spans
        try:
            yield
        finally:
            self.spans = before

    def within(self, span: slice) -> AbstractContextManager[None]:
        """Let layers read the rows of one chunk of the step alone."""
        return self.step([(slice(None), adapter) for own, adapter in self.spans if own == span])

    def make(self, name: str, updates: Updates) -> Adapter:
        """Return the adapter of these updates; any thread may call it, also during a step.

        A layer that no adapter has updated before is wrapped. A step in progress meets it bare or wrapped,
        which is the same to all of its rows, since none has the new adapter.
        """
        with self._lock:
            parts, left = self._wrapped(updates), {*updates}
            for part in parts:
                left -= {*self._names(part)}
            refuse(
                left,
                f"adapter {name} updates {min(left, default='')}, which cannot take an adapter on this "
                f"model: serve it merged, as a model of its own, --model {name}=DIR",
            )
            self._count += 1
            return Adapter(name, self._count, updates, parts)

    def _wrapped(self, updates: Updates) -> dict[AdaptedLinear, Update]:
        """Wrap the parts that stand for these layers; return the update of each."""
        found: dict[AdaptedLinear, Update] = {}
        for part in list(self.runner.modules()):
            for key, child in [] if isinstance(part, AdaptedLinear) else list(part.named_children()):
                own = [updates.get(layer) for layer in self._names(child)]
                if not any(own):
                    continue
                if not isinstance(child, AdaptedLinear):
                    child = AdaptedLinear(child, self)
                    setattr(part, key, child)
                    settle(part)
                found[child] = _joined(own, _originals(child))
        return found

    def _names(self, part: nn.Module) -> list[str]:
        """Return the names of the layers that a part of the inference model stands for."""
        return [self._layers.get(id(layer.weight), "") for layer in _originals(part)]


def _originals(part: nn.Module) -> list[nn.Linear]:
    """Return the model's own layers that a part of the inference model stands for."""
    if isinstance(part, AdaptedLinear):
        return _originals(part.base)
    if isinstance(part, PackedLinear):
        return _originals(part.made_of[0])
    if isinstance(part, JoinedLinear):
        return list(part.layers)
    return [part] if isinstance(part, nn.Linear) else []


def _joined(updates: Sequence[Update | None], layers: Sequence[nn.Linear]) -> Update:
    """Return the updates of several layers as that of their outputs side by side."""
    none = [
        (layer.weight.new_zeros(0, layer.in_features), layer.weight.new_zeros(layer.out_features, 0))
        for layer in layers
    ]
    pairs = [given or empty for given, empty in zip(updates, none)]
    apart: Tensor = torch.block_diag(*(b for _, b in pairs))  # type: ignore[no-untyped-call]
    return torch.cat([a for a, _ in pairs]).detach(), apart.detach()
