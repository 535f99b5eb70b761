"""What sentence-transformers does with token states: poolings, and layers on the pooled vector.

Shapes: B batch, T length, D model, W width of a vector.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as nnf
from safetensors.torch import save_file
from torch import Tensor, nn

from clearhead.hub.files import WEIGHTS, read_json, read_json_if_any, reading, refuse, write_json
from clearhead.hub.weights import open_weights

NAME = "sentence_embedding"  # of what the modules after a pooling read and write

# Poolings ---------------------------------------------------------------------------------------------------


def _first(hidden: Tensor, counted: Tensor) -> Tensor:
    return _picked(hidden, counted.int().argmax(1))


def _last(hidden: Tensor, counted: Tensor) -> Tensor:
    place = counted.shape[1] - 1 - counted.flip(1).int().argmax(1)
    return _picked(hidden * counted[:, :, None], place)


def _largest(hidden: Tensor, counted: Tensor) -> Tensor:
    return hidden.masked_fill(~counted[:, :, None], -torch.inf).amax(1)


def _mean(hidden: Tensor, counted: Tensor) -> Tensor:
    return _weighed(hidden, counted.to(hidden.dtype))


def _root_mean(hidden: Tensor, counted: Tensor) -> Tensor:
    count = counted.sum(1, keepdim=True).to(hidden.dtype)
    return _mean(hidden, counted) * count.sqrt()


def _later_more(hidden: Tensor, counted: Tensor) -> Tensor:
    places = torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype)
    return _weighed(hidden, counted * places)


def _weighed(hidden: Tensor, weights: Tensor) -> Tensor:
    return (hidden * weights[:, :, None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1e-9)


def _picked(hidden: Tensor, places: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), places]


# Our name -> theirs in new files, theirs in old ones, the formula. Old files join several in this order.
POOLINGS: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Tensor]]] = {
    "cls": ("cls", "cls_token", _first),
    "max": ("max", "max_tokens", _largest),
    "mean": ("mean", "mean_tokens", _mean),
    "mean_sqrt_len": ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens", _root_mean),
    "weightedmean": ("weightedmean", "weightedmean_tokens", _later_more),
    "last": ("lasttoken", "lasttoken", _last),
}


def pooled(hidden: Tensor, counted: Tensor, pooling: str) -> Tensor:
    """Pool the `counted` [B, T] of states [B, T, D], padded on the right, by each name of `pooling`: [B, W].

    Names are joined by "+", as "mean+max", and so are the vectors.
    """
    return torch.cat([POOLINGS[name][2](hidden, counted) for name in pooling.split("+")], dim=-1)


# Layers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class VectorLayer:
    """A module on the pooled vector; `stated` is its config.json."""

    stated: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    kind: ClassVar[str] = ""
    tensors: ClassVar[tuple[str, ...]] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Map [B, W] -> [B, W']."""
        return x

    def width(self, before: int) -> int:
        """Return the width of what comes out, where `before` goes in."""
        return before

    def write(self, folder: Path) -> None:
        """Write the module as sentence-transformers does."""
        folder.mkdir()
        write_json(folder / "config.json", dict(self.stated))
        if self.weights:
            save_file({name: value.contiguous() for name, value in self.weights.items()}, folder / WEIGHTS)

    def _of(self, name: str, x: Tensor) -> Tensor | None:
        found = self.weights.get(name)
        return None if found is None else found.to(x)


class DroppedVector(VectorLayer):
    """Dropout, which does nothing but in training."""

    kind = "Dropout"


class UnitVector(VectorLayer):
    """Scale a vector to length one."""

    kind = "Normalize"

    def __call__(self, x: Tensor) -> Tensor:
        """Map [B, W] -> [B, W]."""
        return nnf.normalize(x, dim=-1)


class NormedVector(VectorLayer):
    """Layer norm of a vector."""

    kind, tensors = "LayerNorm", ("norm.weight", "norm.bias")

    def __call__(self, x: Tensor) -> Tensor:
        """Map [B, W] -> [B, W]."""
        return nnf.layer_norm(x, x.shape[-1:], self._of("norm.weight", x), self._of("norm.bias", x))

    def width(self, before: int) -> int:
        """Return the width, which the weights must have."""
        _check_shapes(self, {"norm.weight": (before,), "norm.bias": (before,)})
        return before


# Classes of torch.nn that need no arguments; the usual one comes first.
BENDS = (
    *("Tanh", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU", "SELU", "CELU", "ReLU6"),
    *("Mish", "Softplus", "Softsign", "Tanhshrink", "Hardswish", "Hardsigmoid", "Hardtanh", "LogSigmoid"),
)
DENSE_KEYS = (
    *("in_features", "out_features", "bias", "activation_function"),
    *("module_input_name", "module_output_name", "use_residual"),
)


class DenseVector(VectorLayer):
    """A linear layer and an activation, perhaps added to what went in."""

    kind, tensors = "Dense", ("linear.weight", "linear.bias", "residual.weight")

    def __call__(self, x: Tensor) -> Tensor:
        """Map [B, W] -> [B, W']."""
        weight = self.weights["linear.weight"].to(x)
        made: Tensor = _bend(self.stated)(nnf.linear(x, weight, self._of("linear.bias", x)))
        if not self.stated.get("use_residual"):
            return made
        wide = self._of("residual.weight", x)
        return made + (x if wide is None else nnf.linear(x, wide))

    def width(self, before: int) -> int:
        """Return out_features, which the weights must have."""
        after = int(self.stated["out_features"])
        wanted: dict[str, tuple[int, ...]] = {"linear.weight": (after, before)}
        if self.stated.get("bias", True):
            wanted["linear.bias"] = (after,)
        if self.stated.get("use_residual") and after != before:
            wanted["residual.weight"] = (after, before)
        _check_shapes(self, wanted)
        return after


LAYERS: dict[str, type[VectorLayer]] = {
    layer.kind: layer for layer in (DenseVector, NormedVector, DroppedVector, UnitVector)
}


def read_layer(kind: str, folder: Path) -> VectorLayer:
    """Read a module of this kind from its folder."""
    cls = LAYERS[kind]
    stated = read_json_if_any(folder / "config.json")
    for key in ("module_input_name", "module_output_name"):
        refuse(
            stated.get(key) not in (None, NAME),
            f"{folder} has {key} {stated.get(key)!r}: only {NAME} is supported",
        )
    if cls is DenseVector:
        stated = read_json(folder / "config.json")
        unknown = sorted({*stated} - {*DENSE_KEYS})
        refuse(unknown, f"{folder} has {', '.join(unknown)}: known of a Dense are {', '.join(DENSE_KEYS)}")
        with reading(folder, "is no Dense with in_features and out_features"):
            _bend(stated)
            int(stated["out_features"])
    return cls(stated, _read_weights(folder, cls.tensors) if cls.tensors else {})


def _bend(stated: Mapping[str, Any]) -> nn.Module:
    """Return the activation that a Dense names by its class."""
    path = str(stated.get("activation_function", f"torch.nn.{BENDS[0]}"))
    name = path.rpartition(".")[2]
    refuse(
        not path.startswith("torch.nn.") or name not in BENDS,
        f"a Dense has activation_function {path}: supported are torch.nn's {', '.join(BENDS)}",
    )
    made: nn.Module = getattr(nn, name)()
    return made


def _read_weights(folder: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    found = {name: entry.read().to(torch.float32, copy=True) for name, entry in open_weights(folder).items()}
    unknown = sorted({*found} - {*names})
    refuse(unknown, f"{folder} has the tensor {unknown[:1]}: known here are {', '.join(names)}")
    return found


def _check_shapes(layer: VectorLayer, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a layer whose tensors are not those of these names and shapes."""
    found = {name: tuple(value.shape) for name, value in layer.weights.items()}
    refuse(
        found != dict(wanted),
        f"a module {layer.kind} has tensors {found} where the pooled vector needs {dict(wanted)}",
    )
