"""Norms folded into the linear maps that read them: a copy of a model with the same logits.

A norm scales and shifts what it has normalised, and linear maps read the result: W (s * x + b) is
(W diag(s)) x + W b. In the copy the maps have taken over scale and shift, so that a direction of the stream
means the same to every map that reads it.

    folded = fold_norms(m)                   # m stays as it is
    folded = fold_norms(m, centre=True)      # what is written to the stream has mean zero, too

Shapes: D model or width in, N width out.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from clearhead.core.attention import Attention
from clearhead.core.feedforward import FeedForward
from clearhead.core.heads import LanguageHead
from clearhead.core.norms import Norm
from clearhead.core.stack import Block, Stack
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.hub import checkpoint
from clearhead.inside.inputs import AnyModel, as_model
from clearhead.run.api import Model
from clearhead.run.kernels.lora import merged
from clearhead.run.quant.apply import refuse_quantized
from clearhead.variants.halves import NoAttention, NoFeedForward
from clearhead.variants.heads import ClassifierHead, PooledHead, TokenHead
from clearhead.variants.latent import LatentAttention
from clearhead.variants.positions import DisentangledAttention
from clearhead.variants.recurrent import RecurrentLayer
from clearhead.variants.routing import Experts
from clearhead.variants.state_space import HybridLayer

# The layers of a sublayer that read its input.
READERS = {
    LatentAttention: ("q_down", "kv_down", "k_shared", "gate"),
    Attention: ("q", "k", "v", "gate", "q_global", "k_global", "v_global"),
    RecurrentLayer: ("q", "k", "v", "gate", "beta", "decay", "dt"),
    **dict.fromkeys((NoAttention, NoFeedForward), ()),
    FeedForward: ("gate", "up"),
    Experts: ("router", "shared_gate"),
}
SHIFTED = ("qkv_bias", "key_bias", "feedforward_bias", "pooler_bias", "head_bias")  # biases that take a shift


class Folding(NamedTuple):
    """A norm, and all that reads it; what the norm gives may be multiplied by a number first."""

    norm: nn.Module
    readers: list[nn.Linear]
    factor: float = 1.0


def fold_norms(m: AnyModel, centre: bool = False) -> Model:
    """Return a copy whose norms have scale 1 and shift 0, with the same logits; `m` stays as it is.

    A norm stays as it is where its output is more than the input of linear maps: norms of post-norm models,
    the second ones of sandwich norms, a final norm without a head. An output layer that was tied to the token
    table becomes a matrix of its own.

    Args:
        m: what `load` gave, a bare model, or a compiled wrapper.
        centre: also subtract, from all that writes to the stream, its mean over the D columns, which every
            LayerNorm removes anyway. The output layer is not centred: that would shift the logits.
    """
    whole = as_model(m)
    refuse_quantized(whole.model, "folded")
    if centre:
        _check_centred(whole.model)
    with merged(whole.model), torch.no_grad():
        model = _copied(whole.model, centre)
        for folding in _foldings(model):
            _fold(folding)
        for weight, axis in _writers(model) if centre else ():
            wide = weight.double()
            weight.copy_(wide - wide.mean(axis, keepdim=True))
    return dataclasses.replace(whole, model=model, folder=None)


def _copied(whole: Transformer, centre: bool) -> Transformer:
    """Return a copy with a bias wherever a shift goes, and with its own output layer where that changes."""
    config, changes, head = whole.config, dict[str, bool](), whole.head
    if config.norm_bias:
        changes |= dict.fromkeys((*SHIFTED, *(["router_bias"] if config.n_experts else [])), True)
    if isinstance(head, LanguageHead) and (centre or head.norm is not None or whole.main.norm is not None):
        changes["tie_embeddings"] = False
    model = checkpoint.empty_model(config.replace(**changes))
    weights = {
        name: weight.detach().clone() for name, weight in whole.named_parameters(remove_duplicate=False)
    }
    for name, empty in model.named_parameters(remove_duplicate=False):
        if name not in weights:  # a new bias
            weights[name] = weights[f"{name.rpartition('.')[0]}.weight"].new_zeros(empty.shape)
    model.load_state_dict(weights, assign=True)
    model.tie()
    return model.train(whole.training)


# Which layers read a norm -----------------------------------------------------------------------------------


def _foldings(model: Transformer) -> Iterator[Folding]:
    """Yield each norm that linear layers alone read."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    for stack in stacks:
        if stack.embedding.norm is not None and stack.embedding.project is not None:
            yield Folding(stack.embedding.norm, [stack.embedding.project])
        for block in _blocks(stack):
            yield from _in_block(block)
    if len(stacks) == 2 and stacks[0].norm is not None:
        crosses = [block.cross for block in _blocks(stacks[1]) if block.cross is not None]
        yield Folding(stacks[0].norm, [layer for cross in crosses for layer in (cross.k, cross.v)])
    yield from _in_head(model)


def _blocks(stack: Stack) -> list[Block]:
    return cast(list[Block], list(stack.blocks))


def _in_block(block: Block) -> Iterator[Folding]:
    """Yield the norms before the sublayers of a block."""
    first, second = block.attention_residual.before, block.feedforward_residual.before
    expands = _readers(block.feedforward)
    # A disentangled attention projects the vectors of distances by the same weights, without the norm.
    if first is not None and not isinstance(block.attention, DisentangledAttention):
        also = expands if block.parallel and second is None else []
        yield Folding(first, [*_readers(block.attention), *also])
    if isinstance(block.attention, LatentAttention):
        yield Folding(block.attention.kv_down_norm, [block.attention.k, block.attention.v])
        if block.attention.q_down_norm is not None:
            yield Folding(block.attention.q_down_norm, [block.attention.q])
    if second is not None:
        yield Folding(second, expands)
    if block.cross is not None and block.cross_residual is not None:
        before, reads = block.cross_residual.before, (block.cross.q, block.cross.gate)
        if before is not None:
            yield Folding(before, [layer for layer in reads if layer is not None])


def _readers(part: nn.Module) -> list[nn.Linear]:
    """Return the layers of a sublayer that read its input."""
    names = next(names for kind, names in READERS.items() if isinstance(part, kind))
    readers = [layer for name in names if (layer := getattr(part, name, None)) is not None]
    if isinstance(part, LatentAttention) and part.q_down is None:
        readers.append(part.q)
    if isinstance(part, HybridLayer):
        readers += _readers(part.mixer)
    if isinstance(part, Experts):
        experts = [*part.experts, *([] if part.shared is None else [part.shared])]
        readers += [layer for expert in experts for layer in _readers(expert)]
    return readers


def _in_head(model: Transformer) -> Iterator[Folding]:
    """Yield the final norm, and the norm within the head."""
    head, last = model.head, model.main.norm
    first: nn.Linear | None
    inner: nn.Module | None
    if isinstance(head, LanguageHead):
        first, inner = head.transform or head.out, head.norm
        factor = head.scale if head.transform is None else 1.0
    elif isinstance(head, PooledHead) and not (isinstance(head, TokenHead) and head.up is not None):
        out = head.out if isinstance(head, ClassifierHead | TokenHead) else None
        first, inner, factor = head.pooler or out, head.pooler_norm if out is not None else None, 1.0
    else:
        return
    if last is not None and first is not None:
        yield Folding(last, [first], factor)
    if inner is not None:
        yield Folding(
            inner, [cast(nn.Linear, head.out)], head.scale if isinstance(head, LanguageHead) else 1.0
        )


def _fold(folding: Folding) -> None:
    """Move the scale and the shift of a norm into the layers that read it."""
    norm, readers, factor = cast(Norm, folding.norm), folding.readers, folding.factor
    if norm.bias is not None and any(layer.bias is None for layer in readers):
        return  # such a layer has no place for the shift
    scale = norm.weight.double() + float(norm.unit_offset)  # D
    for layer in readers:
        weight = layer.weight.double()  # N D; of a gate of heads, as many leading columns as it reads
        read = slice(weight.shape[1])
        if norm.bias is not None:
            layer.bias.copy_(layer.bias.double() + weight @ norm.bias.double()[read] * factor)
        layer.weight.copy_(weight * scale[read])
    norm.weight.fill_(0.0 if norm.unit_offset else 1.0)
    if norm.bias is not None:
        norm.bias.zero_()


# Centring ---------------------------------------------------------------------------------------------------


def _check_centred(model: Transformer) -> None:
    """Refuse a model in which something but a LayerNorm reads the stream."""
    config = model.config
    wrong = {
        f"norm {config.norm}": config.norm != "layernorm",
        f"norm_position {config.norm_position}": config.norm_position != "pre",
        "final_norm false": not config.final_norm,
        "first_norm false": not config.first_norm,
        "embedding_norm": config.embedding_norm and not config.embedding_projection,
        "depth_capacity": any(share < 1 for stack in config.stacks for share in stack.capacities),
        f"input {config.input}": config.input != "tokens",
    }
    reasons = ", ".join(name for name, present in wrong.items() if present)
    refuse(
        reasons,
        f"centre needs tokens and a stream that LayerNorms alone read, and this model has {reasons}: "
        "fold without it",
    )


def _writers(model: Transformer) -> Iterator[tuple[Tensor, int]]:
    """Yield each weight that writes to a stream, with its axis of D columns."""
    for stack in (stack for stack in (model.encoder, model.decoder) if stack is not None):
        embedding, front = stack.embedding, stack.embedding.front
        if embedding.project is not None:
            yield from _written(embedding.project)
        else:
            tables = [embedding.types, getattr(stack.positions, "table", None)]
            if front.project is None:
                tables.append(cast(nn.Embedding, front.tokens))
            else:
                yield from _written(cast(nn.Linear, front.project))
            yield from ((table.weight, 1) for table in tables if table is not None)
        for part in stack.modules():
            if isinstance(part, Attention | RecurrentLayer):
                yield from _written(cast(nn.Linear, part.out))
            elif isinstance(part, FeedForward):
                yield from _written(part.down)


def _written(layer: nn.Linear) -> Iterable[tuple[Tensor, int]]:
    return [(weight, 0) for weight in (layer.weight, layer.bias) if weight is not None]
