"""Adapters: low-rank updates of one model, of which each request of a step may have its own.

An adapter is told from the folder that a run with `train.lora` leaves: where its linear layers differ from
the model's, the difference is cut into two thin matrices. y = W x + B A x is then computed for the rows of
each request by itself, so that its numbers do not depend on the company.

Shapes: T rows of a step, D width in, N width out, R rank.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.run.kernels.parts import Direct, JoinedLinear, PackedLinear, settle

LARGEST_RANK = 512
Update = tuple[Tensor, Tensor]  # A [R, D] and B [N, R]
Updates = dict[str, Update]  # by the name of the layer


def updates_of(model: Transformer, tuned: Transformer, name: str) -> Updates:
    """Return in what another model of the same shape differs: low-rank updates of linear layers alone."""
    theirs, found = dict(tuned.named_parameters()), {}
    ours = dict(model.named_parameters())
    refuse(
        {key: one.shape for key, one in ours.items()} != {key: one.shape for key, one in theirs.items()},
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
        largest = max(float(one.detach().abs().max()) for one in (weight, theirs[key]))
        noise = torch.finfo(weight.dtype).eps * largest * sum(size**0.5 for size in weight.shape)
        rank = int((s > noise).sum())
        refuse(
            rank > min(LARGEST_RANK, min(weight.shape) // 2),
            f"adapter {name} differs from the model in {key} by rank {rank}, which is no low-rank update: "
            f"serve it as a model of its own, --model {name}=DIR",
        )
        found[layer] = ((s[:rank, None] * v[:rank]).to(weight), u[:, :rank].to(weight).contiguous())
    return found


class AdaptedRows:
    """Which rows of the step in progress have which adapter."""

    def __init__(self) -> None:
        self.spans: Sequence[tuple[slice, str]] = ()


class AdaptedLinear(Direct):
    """A linear layer, or several joined, with the updates of the adapters."""

    def __init__(self, base: nn.Module, updates: Mapping[str, Update], rows: AdaptedRows) -> None:
        super().__init__()
        self.base, self.updates, self.rows = base, updates, rows
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, D] -> [1, T, N]."""
        y: Tensor = self.base(x)
        for span, name in self.rows.spans:
            if name in self.updates:
                a, b = self.updates[name]
                y[:, span] += nnf.linear(nnf.linear(x[:, span], a), b)
        return y


def adapt(runner: nn.Module, model: Transformer, adapters: Mapping[str, Updates], rows: AdaptedRows) -> None:
    """Let the inference model of `model` add the updates to its layers, for the rows that `rows` names."""
    names = {id(part.weight): name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    left = {(adapter, layer) for adapter, updates in adapters.items() for layer in updates}
    for part in list(runner.modules()):
        for key, child in list(part.named_children()):
            layers = [names.get(id(one.weight), "") for one in _originals(child)]
            updates = {
                adapter: _joined([found.get(layer) for layer in layers], _originals(child))
                for adapter, found in adapters.items()
                if any(layer in found for layer in layers)
            }
            if updates:
                setattr(part, key, AdaptedLinear(child, updates, rows))
                left -= {(adapter, layer) for adapter in updates for layer in layers}
        settle(part)
    refuse(left, f"{', '.join(sorted(layer for _, layer in left)[:1])} cannot take an adapter on this model")


def _originals(part: nn.Module) -> list[nn.Linear]:
    """Return the model's own layers that a part of the inference model stands for."""
    if isinstance(part, PackedLinear):
        return _originals(part.made_of[0])
    if isinstance(part, JoinedLinear):
        return list(part.layers)
    return [part] if isinstance(part, nn.Linear) else []


def _joined(updates: Sequence[Update | None], layers: Sequence[nn.Linear]) -> Update:
    """Return the updates of several layers as that of their outputs side by side."""
    none = [
        (one.weight.new_zeros(0, one.in_features), one.weight.new_zeros(one.out_features, 0))
        for one in layers
    ]
    pairs = [given or empty for given, empty in zip(updates, none)]
    apart: Tensor = torch.block_diag(*(b for _, b in pairs))  # type: ignore[no-untyped-call]
    return torch.cat([a for a, _ in pairs]).detach(), apart.detach()
