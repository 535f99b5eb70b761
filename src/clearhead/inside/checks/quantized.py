"""Rows of the equality suite for a model of few bits: it computes with the weights that its codes stand for.

What the model itself computes is held to the same tolerance as any model, against the float64 loop over the
weights that its codes stand for. The products of generation round their inputs too: they are held to the
error that they state, and each row to what it is alone, bit for bit.

Shapes: B rows, D width in, N width out.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from clearhead.inside.checks.forward import forward_rows, inside_rows
from clearhead.inside.checks.plainly import plainly
from clearhead.inside.checks.rows import Comparison, Inputs, gap
from clearhead.run.api import Model, load
from clearhead.run.kernels.parts import Direct
from clearhead.run.kernels.prepare import prepared
from clearhead.run.quant.apply import dequantized
from clearhead.run.quant.layers import QuantizedLinear, quantized_parts, rounding_bound

REPLACED = ("fast copy = model", "saved = loaded", "built = config")
FAST_TOLERANCE = 5e-2  # of logits, relative to the largest: inputs have 8 bits in every layer
ROWS = 5  # of a product, whose tiles have four
SLACK = 1e-5  # of float32 sums, beside the stated error


def quantized_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows of a model of few bits."""
    row, fast = inputs.compare, "the products of generation"
    lens = [one for one in inside_rows(inputs, compile=False) if one.name.startswith("lens")]
    return [
        row("quantized = dequantized", "logits with those of its weights in floating point", _dequantized),
        row(
            "model = formula",
            "logits with those of a plain loop in float64 over the weights that the codes stand for",
            _formula,
            copies=True,
        ),
        *(one for one in forward_rows(inputs) if one.name not in REPLACED),
        *lens,
        row(
            "product = stated error",
            f"{fast} with those of the weights: the largest difference, as a share of the error they state",
            _stated,
            tolerance=1.0,
        ),
        row(
            "product: batched = alone",
            f"each row of {fast} with the row by itself, bit for bit",
            _alone,
            tolerance=0.0,
        ),
        row(
            "fast copy = model",
            "the copy that generation uses, which rounds inputs to 8 bits, with the model",
            lambda inputs: gap(inputs.of(prepared(inputs.model)).run(), inputs.run()),
            tolerance=FAST_TOLERANCE,
            fits=inputs.model.config.head == "lm",
        ),
        row("saved = loaded", "codes and logits of a copy on disk, bit for bit", _saved, tolerance=0.0),
    ]


def _dequantized(inputs: Inputs) -> float:
    return gap(inputs.run(), inputs.of(dequantized(inputs.model)).run())


def _formula(inputs: Inputs) -> float:
    model = dequantized(inputs.model)
    given: dict[str, Any] = dict(inputs.given)
    return gap(inputs.run(), plainly(model.config, model.state_dict(), **given))


def _products(inputs: Inputs) -> list[tuple[QuantizedLinear, Direct, torch.Tensor]]:
    """Return each layer of few bits, what generation has in its place, and random inputs [B, D]."""
    made, found = dict(prepared(inputs.model).named_modules()), []
    generator = torch.Generator().manual_seed(0)
    for name, part in quantized_parts(inputs.model).items():
        if isinstance(part, QuantizedLinear):
            x = torch.randn(ROWS, part.in_features, generator=generator).to(inputs.device, inputs.dtype)
            found.append((part, made[name], x))
    return found


def _stated(inputs: Inputs) -> float:
    worst = 0.0
    for layer, fast, x in _products(inputs):
        exact, allowed = layer(x).float(), rounding_bound(layer, x)
        slack = inputs_slack(inputs) * (1 + exact.abs())
        worst = max(worst, float(((fast(x).float() - exact).abs() / (allowed + slack)).max()))
    return worst


def inputs_slack(inputs: Inputs) -> float:
    """Return what the dtype of a model may add to the stated error, relative to an output."""
    return max(SLACK, float(torch.finfo(inputs.dtype).eps))


def _alone(inputs: Inputs) -> float:
    return max(
        float((fast(x) - torch.cat([fast(row[None]) for row in x])).abs().max())
        for _, fast, x in _products(inputs)
    )


def _saved(inputs: Inputs) -> float:
    with tempfile.TemporaryDirectory() as folder:
        Model(inputs.model).save(Path(folder) / "copy")
        loaded = load(Path(folder) / "copy").model.to(inputs.device)
        mine, theirs = quantized_parts(inputs.model), quantized_parts(loaded)
        same = mine.keys() == theirs.keys() and all(
            torch.equal(tensor, dict(theirs[name].named_buffers())[kind])
            for name, part in mine.items()
            for kind, tensor in part.named_buffers()
        )
        return gap(inputs.of(loaded).run(), inputs.run()) if same else torch.inf
