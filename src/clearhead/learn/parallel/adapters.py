"""Memory of a training step with low-rank updates, whose other weights are frozen and may be quantized.

Which tensors autograd then keeps follows from where the updates are. So the model is built of fake tensors,
which have sizes and no memory, and one forward pass of it is counted.
"""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clearhead.core.config import ModelConfig
from clearhead.core.masks import tokens_from
from clearhead.core.stack import Inputs
from clearhead.core.taps import SILENT
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.run.kernels.lora import add_lora
from clearhead.run.quant.apply import NAMES, QuantPlan, linear_names
from clearhead.run.quant.layers import QuantizedLinear, QuantizedTable, empty_layer, quantized_parts
from clearhead.variants.mtp import MTPLayers

FEW = 4  # layers that are all counted


@dataclass(frozen=True)
class Adapters:
    """Low-rank updates, and what the weights under them are kept in; fields are those of a recipe."""

    rank: int
    targets: tuple[str, ...] = ("q", "v")
    quantize: Literal["int8", "int4"] | None = None


class AdaptedBytes(NamedTuple):
    """What a step takes but for the loss."""

    weights: int  # bytes of all of them, as they are kept
    trained: int  # number of those that are trained
    kept: int  # bytes for the backward pass
    widest: int  # bytes of the largest weight that is dequantized, for one matmul at a time


def adapted(
    config: ModelConfig, length: int, rows: int, dtype: str, adapters: Adapters, mtp: bool = False
) -> AdaptedBytes:
    """Return the bytes of a step on `rows` of `length` tokens; what is kept grows evenly with the rows.

    `mtp`: the loss has that of MTP layers, which stay as they are.
    """
    one, two = (_of_layers(config, length, count, dtype, adapters, mtp) for count in (1, 2))
    return one._replace(kept=one.kept + (rows - 1) * (two.kept - one.kept))


def _of_layers(
    config: ModelConfig, length: int, rows: int, dtype: str, adapters: Adapters, mtp: bool
) -> AdaptedBytes:
    """Count all layers; of many that are alike two and three, which tell what each more takes."""
    spec, layers = config.main, config.n_layers
    some = spec.dense_layers or spec.feedforward_skips or spec.rope_skips or config.pruned_heads
    shared = len(set(spec.block_of)) < layers
    if layers <= FEW or some or shared or len({*spec.kinds, *spec.capacities}) > 2:
        return _counted(config, length, rows, dtype, adapters, mtp)
    fewer = (config.replace(n_layers=n, attention=str(spec.kinds[0]), depth_capacity=1.0) for n in (2, 3))
    two, three = (_counted(each, length, rows, dtype, adapters, mtp) for each in fewer)
    grown = (a + (layers - 2) * (b - a) for a, b in zip(two, three))
    return AdaptedBytes(*grown)


@functools.lru_cache(maxsize=64)
def _counted(
    config: ModelConfig, length: int, rows: int, dtype: str, adapters: Adapters, mtp: bool
) -> AdaptedBytes:
    refuse(
        config.family != "decoder" or config.head != "lm" or config.input != "tokens",
        f"low-rank updates are planned for language models, and this is an {config.family} with head "
        f"{config.head}: leave them out",
        ConfigError,
    )
    kept: dict[int, torch.UntypedStorage] = {}
    with FakeTensorMode():
        model = Transformer(config)
        if adapters.quantize is not None:
            _quantized(model, QuantPlan(NAMES[adapters.quantize]))
        add_lora(model, adapters.rank, 1.0, adapters.targets)
        own = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}

        def keep(tensor: Tensor) -> Tensor:
            if _key(tensor) not in own:
                kept[_key(tensor)] = tensor.untyped_storage()
            return tensor

        half = torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32")
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), half:
            ids = torch.zeros(rows, length, dtype=torch.long)
            inputs, tokens = Inputs(ids), tokens_from(rows, length, ids.device)
            states = [model.main(inputs, tokens)]
            if mtp:
                states += MTPLayers.states(model, states[0], inputs, tokens, None, SILENT)
            # As long as logits live, what they were made of does.
            logits = [model.head(hidden, None) for hidden in states]
            total = sum(storage.nbytes() for storage in kept.values())
    del logits
    parameters = list(model.parameters())
    quantized = {_key(part.codes): part for part in quantized_parts(model).values()}.values()
    value = 4 if dtype == "float32" else 4 + 2  # dequantized in float32, then cast
    return AdaptedBytes(
        weights=4 * sum(x.numel() for x in parameters) + sum(part.size for part in quantized),
        trained=sum(x.numel() for x in parameters if x.requires_grad),
        kept=total,
        widest=value * max((part.in_features * part.out_features for part in quantized), default=0),
    )


class _Sized(QuantizedLinear):
    """A quantized layer whose weight has a size alone: dequantizing fake codes takes time."""

    @property
    def weight(self) -> Tensor:
        """Return a weight [N, D] without values."""
        return self.place.new_empty(self.out_features, self.in_features)


def _key(tensor: Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


def _quantized(model: Transformer, plan: QuantPlan) -> None:
    """Put empty quantized layers and tables in place of those that `quantize_model` rounds."""
    tables: dict[Tensor, QuantizedTable] = {}
    for name in linear_names(model):
        layer, grid = cast(nn.Linear, model.get_submodule(name)), plan.grid(name)
        assert grid is not None
        empty = empty_layer(grid, layer.out_features, layer.in_features, False, layer.bias is not None)
        small = _Sized(empty.made, layer.bias)
        if layer is model.head.get_submodule("out"):
            tables[layer.weight] = QuantizedTable(small)
        model.set_submodule(name, small)
    for name, part in list(model.named_modules(remove_duplicate=False)):
        grid = plan.grid(name)
        if isinstance(part, nn.Embedding) and name.endswith(".tokens") and grid is not None:
            alone = empty_layer(grid, part.num_embeddings, part.embedding_dim, False, False)
            model.set_submodule(name, tables.get(part.weight) or QuantizedTable(alone))
