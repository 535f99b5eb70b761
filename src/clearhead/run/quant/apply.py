"""A copy of a model whose linear layers and token tables are quantized. The model stays as it was.

How weights are rounded depends on what a layer reads: the second moment of its inputs on texts, or their mean
squares. Which inputs are large is much the same whatever a model reads. Tokens drawn at random tell it well
enough, and a model can be calibrated so without any text.

Shapes: N width out, D width in, T tokens.
"""

import copy
import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from clearhead.core.heads import LanguageHead
from clearhead.core.transformer import Transformer
from clearhead.errors import InputError, nearest, refuse
from clearhead.run.kernels.training import block_linears
from clearhead.run.quant.grid import Grid
from clearhead.run.quant.layers import QuantizedLinear, QuantizedTable, quantized_parts
from clearhead.run.quant.methods import CALIBRATED, METHODS, Rounding, hqq, output_error, rtn
from clearhead.variants.contexts import evaluating

DRAWN = 256  # tokens


@torch.no_grad()
def moments(model: Transformer, rows: Iterable[Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the mean of x xᵀ over what each named linear layer reads, by name: [D, D].

    `rows` are ids [1, T]. Layers that read the same tensor, such as queries, keys and values, share theirs.
    """
    sums: dict[str, tuple[Tensor, int]] = {}
    latest: list[tuple[Tensor, Tensor]] = []  # the input seen last, and its Gram matrix

    def see(name: str, part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        if not latest or latest[0][0] is not x:
            rows = x.reshape(-1, x.shape[-1]).float()
            latest[:] = [(x, rows.t() @ rows)]
        before, count = sums.get(name, (torch.zeros_like(latest[0][1]), 0))
        sums[name] = before + latest[0][1], count + x.numel() // x.shape[-1]

    with _watched(model, names, see):
        for row in rows:
            model(row.to(next(model.parameters()).device), logits="last")
    return {name: total / count for name, (total, count) in sums.items()}


@torch.no_grad()
def drawn_sizes(model: Transformer, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the mean squares of what each named layer reads of tokens drawn at random, by name: [D].

    Empty for a model that reads more than tokens, or no tokens.
    """
    config, sizes = model.config, dict[str, Tensor]()
    if config.family != "decoder" or config.head != "lm":
        return sizes
    length = min(DRAWN, config.max_positions)
    ids = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))

    def see(name: str, part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes[name] = inputs[0].reshape(-1, inputs[0].shape[-1]).float().square().mean(0)

    with _watched(model, names, see):
        model(ids.to(next(model.parameters()).device), logits="last")
    return sizes


@contextmanager
def _watched(model: Transformer, names: Iterable[str], see: Callable[..., None]) -> Iterator[None]:
    """Show the inputs of the named layers to `see` within a `with` block, in eval mode."""
    hooks = [model.get_submodule(name).register_forward_pre_hook(partial(see, name)) for name in names]
    try:
        with evaluating(model):
            yield
    finally:
        for hook in hooks:
            hook.remove()


MethodName = Literal["rtn", "hqq", "imatrix", "gptq", "awq"]
NAMES = {"int8": 8, "int4": 4}
OUTPUT = "head.out"


@dataclass(frozen=True)
class QuantPlan:
    """What to make of a model: weights of 4 or 8 bits, and how their codes are chosen.

    Layers whose names match one of `wide` keep 8 bits, or with 8 bits the dtype they have. The output layer
    and the token table keep 8 bits in any case. Without a choice, groups of 4 bits have an offset next to
    their scale, and those of 8 bits, which gain little by it, have none.
    """

    bits: int = 4
    group: int = 32
    symmetric: bool | None = None  # None: by the bits of a layer
    method: MethodName = "imatrix"
    wide: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        methods = get_args(MethodName)
        refuse(
            self.method not in methods,
            f'method "{self.method}" is not known: choose from {", ".join(methods)}',
        )
        self.grid_of(self.bits)

    @classmethod
    def named(cls, name: "str | QuantPlan") -> "QuantPlan":
        """Return the plan called "int8" or "int4"."""
        if isinstance(name, QuantPlan):
            return name
        refuse(
            name not in NAMES,
            f'quantize "{name}" is not known{nearest(str(name), NAMES)}: choose from {", ".join(NAMES)}',
        )
        return cls(NAMES[name])

    def grid(self, name: str) -> Grid | None:
        """Return the grid of the layer called `name`; None where it stays as it is."""
        chosen = any(fnmatch.fnmatch(name, pattern) for pattern in self.wide)
        if chosen and self.bits == 8:
            return None
        wide = chosen or name == OUTPUT or name.endswith("tokens")
        return self.grid_of(8 if wide else self.bits)

    def grid_of(self, bits: int) -> Grid:
        """Return the grid of layers that have this many bits."""
        return Grid(bits, self.group, bits == 8 if self.symmetric is None else self.symmetric)


@dataclass(frozen=True)
class LayerError:
    """What rounding did to one layer."""

    name: str
    bits: int
    weights: int
    bytes: int
    weight_error: float  # of the weight: length of the difference over the length
    output_error: float | None  # of the outputs on the data, likewise; None without data


@dataclass(frozen=True)
class Quantization:
    """A quantized model, and what became of each layer."""

    model: Transformer
    plan: QuantPlan
    layers: list[LayerError] = field(default_factory=list)


def plan_of(plan: str | QuantPlan | None, split: bool = False) -> QuantPlan | None:
    """Return the plan that was asked for, by its name or itself; refuse one for a model that is `split`."""
    refuse(
        plan is not None and split,
        "quantize and parallel were both given: a quantized model runs in one process",
    )
    return None if plan is None else QuantPlan.named(plan)


def rounded(model: Transformer, plan: QuantPlan | None) -> Transformer:
    """Return a copy of a model by a plan; without one the model itself."""
    return model if plan is None else quantize_model(model, plan).model


def linear_names(model: Transformer) -> list[str]:
    """Return the names of the linear layers that can be quantized: those of blocks, and the output layer.

    Routers, and layers of heads other than a language model's output, are small and decide much: they stay.
    """
    found = list(block_linears(model))
    return [*found, OUTPUT] if isinstance(model.head, LanguageHead) else found


@torch.no_grad()
def quantize_model(
    model: Transformer,
    plan: QuantPlan,
    rows: Iterable[Tensor] | None = None,
    on_layer: Callable[[str, int, int], None] = lambda name, done, total: None,
    seen: Mapping[str, Tensor] | None = None,
) -> Quantization:
    """Return a copy of a model by `plan`, which shares what it does not round with the model.

    Args:
        model: a model in floating point.
        plan: bits, groups and method; "imatrix" without rows reads tokens drawn at random, and where a model
            cannot, or has 8 bits, "hqq" or "rtn" takes its place.
        rows: ids [1, T] of texts to calibrate on, for a method that needs them.
        on_layer: told each layer, how many are done, and how many there are.
        seen: moments of the inputs by layer, where they were measured before; they take the place of rows.
    """
    refuse_quantized(model, "quantized again")
    names = linear_names(model)
    given = [name for name in names if plan.grid(name) is not None]
    refuse(not given, "no layer of this model can be quantized: choose fewer wide layers")
    for pattern in plan.wide:
        if not fnmatch.filter(names, pattern):
            raise InputError(f'no layer is called "{pattern}"{nearest(pattern, names)}')
    refuse(
        plan.method in CALIBRATED and rows is None and seen is None,
        f'method "{plan.method}" needs texts to calibrate on: give data, or choose imatrix, rtn or hqq',
    )
    sizes: Mapping[str, Tensor] = {}
    if plan.method == "imatrix" and rows is None and not seen:
        sizes = drawn_sizes(model, given) if plan.bits == 4 else {}
        plan = plan if sizes else dataclasses.replace(plan, method="hqq" if plan.bits == 4 else "rtn")
    if seen is None:
        seen = {} if rows is None else moments(model, rows, given)
    made, layers = shared_copy(model), []
    for number, name in enumerate(given):
        on_layer(name, number, len(given))
        layer = cast(nn.Linear, model.get_submodule(name))
        grid = cast(Grid, plan.grid(name))
        weight = layer.weight.detach().float().contiguous()
        choice = _chosen(plan, name, grid, weight, seen.get(name, sizes.get(name)))
        new = QuantizedLinear(choice.made, layer.bias, choice.smooth, layer.weight.dtype)
        made.set_submodule(name, new)
        layers.append(_error(name, new, weight, choice, seen.get(name)))
    _tie_tables(made, model, plan)
    on_layer("done", len(given), len(given))
    return Quantization(made.eval(), plan, layers)


def _chosen(plan: QuantPlan, name: str, grid: Grid, weight: Tensor, moment: Tensor | None) -> Rounding:
    """Choose the codes of one layer; one that no text reached (an idle expert) is rounded to nearest."""
    if name == OUTPUT and plan.method == "awq":  # its rows are a table too, which has no inputs to divide
        return rtn(grid, weight, None)
    if moment is None and plan.method not in ("rtn", "hqq"):
        return hqq(grid, weight, None) if plan.method == "imatrix" else rtn(grid, weight, None)
    return METHODS[plan.method](grid, weight, moment)


def _error(
    name: str, new: QuantizedLinear, weight: Tensor, choice: Rounding, moment: Tensor | None
) -> LayerError:
    difference = weight - choice.weight
    share = float(difference.norm() / weight.norm().clamp(min=1e-12))
    outputs = None
    if moment is not None:
        outputs = (output_error(difference, moment) / max(output_error(weight, moment), 1e-24)) ** 0.5
    return LayerError(name, choice.made.grid.bits, weight.numel(), new.size, share, outputs)


def shared_copy(model: Transformer) -> Transformer:
    """Return a copy of the parts of a model that has the same parameters."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _tie_tables(made: Transformer, model: Transformer, plan: QuantPlan) -> None:
    """Quantize token tables too: the one that is tied to the output layer has that layer's codes."""
    tables: dict[Tensor, QuantizedTable] = {}
    out = getattr(made.head, "out", None)
    if isinstance(out, QuantizedLinear):
        tables[cast(LanguageHead, model.head).out.weight] = QuantizedTable(out)
    for name, part in list(made.named_modules(remove_duplicate=False)):
        if isinstance(part, nn.Embedding) and name.endswith(".tokens"):
            grid = plan.grid(name)
            if part.weight not in tables and grid is not None:
                rounded = rtn(grid, part.weight.detach().float(), None).made
                tables[part.weight] = QuantizedTable(QuantizedLinear(rounded, dtype=part.weight.dtype))
            made.set_submodule(name, tables[part.weight])


def refuse_quantized(model: nn.Module, what: str) -> None:
    """Refuse to do with a quantized model what takes weights in floating point."""
    refuse(
        bool(quantized_parts(model)),
        f"this model's weights are quantized and cannot be {what}: use the model that it was made from",
    )


@torch.no_grad()
def dequantized(model: Transformer) -> Transformer:
    """Return a dequantized copy, in floating point."""
    made = shared_copy(model)
    for name, part in quantized_parts(model).items():
        weight = nn.Parameter(part.weight, requires_grad=False)
        if isinstance(part, QuantizedTable):
            new: nn.Module = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
        else:
            new = nn.Linear(part.in_features, part.out_features, device="meta", bias=False)
            new.register_parameter("bias", cast(QuantizedLinear, part).bias)
        new.register_parameter("weight", weight)
        made.set_submodule(name, new)
    made.tie()
    return made.eval()
