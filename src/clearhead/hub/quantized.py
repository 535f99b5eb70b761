"""Quantized weights on disk: clearhead's own format, and MXFP4 as released models have it.

    "quantization_config": {"quant_method": "clearhead", "layers": {"head.out": [8, 32, true], ...}}

In our format tensors have our own names. A layer is named with its bits, its group and whether it is
symmetric. Its weight is the tensors `NAME.codes`, `NAME.scales` and, where it has them, `NAME.offsets` and
`NAME.smooth` (see `run/quant/grid.py`).
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.errors import CheckpointError, ClearheadError
from clearhead.hub.architecture import QUANTIZATION, SECTION
from clearhead.hub.fields import Json
from clearhead.hub.files import refuse, refuse_key
from clearhead.hub.weights import Entry, Outgoing
from clearhead.run.quant.grid import Grid
from clearhead.run.quant.layers import PARTS, QuantizedLinear, QuantizedTable, empty_layer, quantized_parts

METHOD = "clearhead"  # the quant_method that config.json names


def described(model: Transformer, config: ModelConfig) -> dict[str, Any]:
    """Return config.json of a quantized model: our own section, and its layers."""
    layers = {
        name: [part.grid.bits, part.grid.group, part.grid.symmetric] for name, part in _written(model).items()
    }
    return {
        "architectures": ["ClearheadModel"],
        "model_type": SECTION,
        SECTION: {"config": config.to_dict()},
        QUANTIZATION: {"quant_method": METHOD, "layers": layers},
    }


def outgoing_codes(model: Transformer) -> dict[str, Outgoing]:
    """Return the tensors of quantized layers, by name; their sources are the same names."""
    return {
        name: Outgoing(tuple(tensor.shape), tensor.dtype, (name,)) for name, tensor in code_tensors(model)
    }


def code_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of quantized layers, by name."""
    for name, part in _written(model).items():
        for kind in PARTS:
            tensor = getattr(part, kind)
            if tensor is not None:
                yield f"{name}.{kind}", tensor


def _written(model: Transformer) -> dict[str, Any]:
    """Return the parts whose codes are written: a table that is tied to the output layer is not."""
    parts = quantized_parts(model)
    out = parts.get("head.out") if model.config.tie_embeddings else None

    def tied(part: Any) -> bool:
        alike = out is not None and isinstance(part, QuantizedTable) and part.codes.shape == out.codes.shape
        return alike and out is not None and torch.equal(part.codes, out.codes)

    return {name: part for name, part in parts.items() if not tied(part)}


def is_packed(theirs: Mapping[str, Any]) -> bool:
    """Return True if config.json says that some layers are quantized, in our format."""
    stated = theirs.get(QUANTIZATION)
    mine = isinstance(stated, dict) and stated.get("quant_method") == METHOD
    foreign = bool(stated) and not mine and theirs.get("model_type") == SECTION
    refuse_key(foreign, QUANTIZATION, stated, f"the quant_method of our own files is {METHOD}")
    return mine


class Packed:
    """The quantized layers of a file, and its other tensors."""

    def __init__(self, folder: Path, theirs: Mapping[str, Any], entries: dict[str, Entry]) -> None:
        self.folder, self.grids = folder, _grids(folder, theirs)
        mine = {f"{name}.{kind}" for name in self.grids for kind in PARTS}
        self.codes = {name: entry for name, entry in entries.items() if name in mine}
        self.others = {name: entry for name, entry in entries.items() if name not in mine}

    def bounds(self) -> dict[str, Entry]:
        """Return every tensor as if codes were weights, to be counted."""
        counted = dict(self.others)
        for name, grid in self.grids.items():
            codes = self.codes.get(f"{name}.codes")
            if codes is not None:
                per_byte = 2 if grid.bits == 4 else 1
                counted[f"{name}.weight"] = Entry((*codes.shape, per_byte), torch.float32, codes.read)
        return counted

    def install(self, model: Transformer) -> None:
        """Put quantized layers, read from the file, in the place of a model's empty ones."""
        for name, grid in self.grids.items():
            try:
                old = model.get_submodule(name)
            except AttributeError:
                raise CheckpointError(
                    f"{self.folder / 'config.json'}: {QUANTIZATION} names {name}, which this model has not"
                ) from None
            refuse(
                not isinstance(old, nn.Linear | nn.Embedding),
                f"{self.folder / 'config.json'}: {QUANTIZATION} names {name}, which has no weight of rows",
            )
            model.set_submodule(name, self._layer(name, grid, old))
        out = getattr(model.head, "out", None)
        if isinstance(out, QuantizedLinear) and model.config.tie_embeddings:
            table = QuantizedTable(out)
            for name, part in list(model.named_modules(remove_duplicate=False)):
                if isinstance(part, nn.Embedding) and name.endswith(".tokens"):
                    model.set_submodule(name, table)

    def _layer(self, name: str, grid: Grid, old: Any) -> QuantizedLinear | QuantizedTable:
        rows, columns = old.weight.shape
        bias = getattr(old, "bias", None) is not None
        layer = empty_layer(grid, rows, columns, f"{name}.smooth" in self.codes, bias, device="meta")
        for kind in PARTS:
            wanted, entry = getattr(layer, kind), self.codes.get(f"{name}.{kind}")
            if wanted is None:
                refuse(
                    entry is not None, f"{self.folder}: {name}.{kind} has no place: config.json does not fit"
                )
                continue
            if entry is None:
                raise CheckpointError(f"{self.folder}: no tensor fills {name}.{kind}: the file is incomplete")
            refuse(
                entry.shape != wanted.shape or entry.dtype != wanted.dtype,
                f"{self.folder}: tensor {name}.{kind} has {entry.dtype} {entry.shape} and must have "
                f"{wanted.dtype} {tuple(wanted.shape)}: config.json does not fit",
            )
            setattr(layer, kind, entry.read().clone())
            entry.release()
        layer.place = torch.empty(0)
        if isinstance(old, nn.Embedding):
            return QuantizedTable(layer)
        return layer


def _grids(folder: Path, theirs: Mapping[str, Any]) -> dict[str, Grid]:
    """Return the grid of each quantized layer, as config.json says."""
    layers = theirs[QUANTIZATION].get("layers")
    wrong = f"{folder / 'config.json'}: {QUANTIZATION} must have layers, each as [bits, group, symmetric]"
    refuse(not isinstance(layers, dict) or not layers, wrong)
    try:
        return {
            str(name): Grid(int(bits), int(group), bool(symmetric))
            for name, (bits, group, symmetric) in layers.items()
        }
    except ClearheadError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
    except (TypeError, ValueError):
        raise CheckpointError(wrong) from None


def place_like(model: Transformer, dtype: torch.dtype) -> None:
    """Tell quantized layers the dtype of the rest of the model."""
    for part in quantized_parts(model).values():
        part.place = torch.empty(0, dtype=dtype)


# MXFP4 ------------------------------------------------------------------------------------------------------
#
# Experts whose weights are stored in 4 bits, 32 of them with one exponent, are read as bfloat16. A tensor
# `name` is two in the file: `name_blocks` [X, out, in/32, 16] has two numbers in each byte, the lower half
# first, and `name_scales` [X, out, in/32] the exponents, 127 more than they are. Every number of the
# format is one of bfloat16 too, but for exponents at the very end: nothing is rounded.


MXFP4 = "mxfp4"  # the quant_method that config.json names
BLOCKS, SCALES = "_blocks", "_scales"
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of 3 bits; the fourth is the sign


def unpacked(entries: dict[str, Entry], theirs: Json) -> tuple[dict[str, Entry], Json]:
    """Return tensors and config.json of a model whose weights are not quantized; warn where some were.

    Each pair of blocks and scales becomes the tensor that it stands for.
    """
    if not theirs.get(QUANTIZATION):
        return entries, theirs
    packed = [name.removesuffix(BLOCKS) for name in entries if name.endswith(BLOCKS)]
    if packed:
        warnings.warn(
            f"{len(packed)} tensors are stored in 4 bits ({MXFP4}): they are read as bfloat16, or as the "
            "dtype asked for, and saved as that",
            stacklevel=6,
        )
    halves = {name + half for name in packed for half in (BLOCKS, SCALES)}
    plain = {name: entry for name, entry in entries.items() if name not in halves}
    plain |= {name: _joined(name, entries) for name in packed}
    return plain, {key: value for key, value in theirs.items() if key != QUANTIZATION}


def _joined(name: str, entries: dict[str, Entry]) -> Entry:
    """Return the tensor [X, in, out] of a name whose blocks and scales the file has."""
    refuse(
        name + SCALES not in entries, f"the file has {name}{BLOCKS} and not {name}{SCALES}: fetch it again"
    )
    blocks, scales = entries[name + BLOCKS], entries[name + SCALES]
    fitting = len(blocks.shape) == 4 and blocks.shape[:-1] == scales.shape
    refuse(
        not fitting or {blocks.dtype, scales.dtype} != {torch.uint8},
        f"tensors {name}{BLOCKS} {blocks.shape} {blocks.dtype} and {name}{SCALES} {scales.shape} "
        f"{scales.dtype} do not belong together: MXFP4 has bytes, and one scale for each block",
    )
    X, out = blocks.shape[:2]

    def release() -> None:
        blocks.release()
        scales.release()

    return Entry(
        (X, 2 * math.prod(blocks.shape[2:]), out),
        torch.bfloat16,
        lambda: dequantise(blocks.read(), scales.read()),
        release,
    )


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Map bytes [X, out, G, 16] and exponents [X, out, G] to numbers in bfloat16 [X, in, out]."""
    values = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte % 16], values[byte // 16]], dim=1)
    whole = torch.empty(*blocks.shape, 2, dtype=torch.bfloat16)  # X out G 16 2
    for expert, into in enumerate(whole):  # one at a time: the indices take eight times their room
        into.copy_(pairs[blocks[expert].int()])
        into.copy_(torch.ldexp(into, scales[expert].int()[..., None, None] - 127))
    return whole.flatten(2).transpose(1, 2)
