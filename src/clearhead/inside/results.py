"""What looking inside gives back: values with named fields, which `to_dict` writes as plain JSON values.

    @dataclass(frozen=True)
    class Contributions(Result):
        json_names = ("logit", "sum_of_terms as total")

`json_names` lists fields, properties and methods in the order of the JSON object; without it, every field.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.hub.files import write_text

Array = np.ndarray[Any, Any]
Floats = NDArray[np.float32]


class Result:
    """The base of every result."""

    json_names: ClassVar[tuple[str, ...]] = ()  # "name", or "name as key"; (): every field of the dataclass

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values by name."""
        values = {}
        for entry in self.json_names or vars(self):
            name, _, key = entry.partition(" as ")
            value = getattr(self, name)
            values[key or name] = plain(value() if callable(value) else value)
        return values

    def save(self, path: str | Path) -> Path:
        """Write them as JSON."""
        write_text(Path(path), json.dumps(self.to_dict(), ensure_ascii=False, indent=1) + "\n")
        return Path(path)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: lists for arrays, None for NaN and infinity, objects for dataclasses."""
    match value:
        case Result():
            return value.to_dict()
        case Tensor():
            return plain(value.detach().cpu().numpy())
        case np.ndarray() | np.generic():
            finite = value.dtype.kind != "f" or np.isfinite(value).all()
            return value.tolist() if finite else plain(value.tolist())
        case Mapping():
            return {name: plain(item) for name, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case float():
            return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(item) for name, item in vars(value).items()}
    return value


def on_cpu(x: Tensor) -> Tensor:
    """Return a tensor in float32, on the CPU, without gradients."""
    return x.detach().float().cpu()


def entropy_bits(p: Tensor) -> Tensor:
    """Return the entropy of distributions in bits: [..., N] -> [...]."""
    return -torch.xlogy(p, p).sum(-1) / math.log(2)


def filled(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return rows of unequal length as one table, NaN where a row is shorter."""
    width = max(map(len, rows), default=0)
    return np.array([[*row, *[math.nan] * (width - len(row))] for row in rows]).reshape(len(rows), width)
