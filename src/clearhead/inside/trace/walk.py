"""A walk through the model, part by part: the forward pass of `model`, with every step between written down.

The walk calls the model's own parts, in the order of `Stack.forward` and `Block.forward`, and spells out what these do in
one line: splitting heads, scaling, masking, softmax. `trace` holds its result against that of the model itself.

Shapes: B batch (one row), T tokens of the stack, S tokens that attention looks at, D model, W token table,
H heads, K key/value heads, E head width, R rotated columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.inside.trace.blocks import block_steps
from clearhead.inside.trace.steps import Notebook
from clearhead.model.fronts import FrameFront, PatchFront, TokenFront
from clearhead.model.heads import Head, LanguageHead, Pooled, TokenHead, pool
from clearhead.model.masks import Tokens, View, compose, tokens_from
from clearhead.model.positions import Rotary
from clearhead.model.transformer import Stack


def stack_steps(
    note: Notebook, stack: Stack, inputs: Tensor, types: Tensor | None = None, memory: Tensor | None = None
) -> Tensor:
    """Inputs of one row -> [B, T, D]; `memory` [B, S, D] is what cross-attention reads."""
    plan, at = stack.plan, stack.plan.prefix
    tokens, x = _embedding(note, stack, inputs, types)
    note.tap(f"{at}embedding", f"{at}blocks.0.resid_pre")
    with note.group(f"{at}view"):
        views = _views(note, stack, tokens, x.dtype)
    for layer, (block, window) in enumerate(zip(stack.layers(), plan.windows)):
        name = f"{at}blocks.{layer}"
        x = block_steps(note, block, x, views(layer, window), memory, name)
        note.tap(
            f"{name}.resid_post",
            *([f"{at}blocks.{layer + 1}.resid_pre"] if layer + 1 < plan.n_layers else []),
        )
    if stack.norm is not None:
        x = note(f"{at}norm", "B T D", stack.norm, x)
    note.tap(f"{at}hidden")
    note.also(f"{at}hidden")
    return x


def _embedding(note: Notebook, stack: Stack, inputs: Tensor, types: Tensor | None) -> tuple[Tokens, Tensor]:
    """Front, segments, positions, norm, projection -> the tokens as masks see them, and [B, T, D]."""
    embedding, at = stack.embedding, stack.plan.prefix
    width = "D" if stack.plan.d_embedding == stack.positions.config.d_model else "W"
    wide_rows = f"B T {width}"
    with note.group(f"{at}embedding"):
        x = _front(note, embedding.front, inputs, f"{at}embedding.front", wide_rows)
        tokens = tokens_from(x.shape[0], x.shape[1], x.device)
        if embedding.types is not None:
            kinds = note(f"{at}embedding.types", wide_rows, _type_vectors, embedding.types, types, x)
            x = note(f"{at}embedding.typed", wide_rows, torch.add, x, kinds)
        scheme = {"learned": "table", "sinusoidal": "waves"}.get(stack.positions.config.positions)
        if scheme is not None:
            embed = cast(Callable[..., Tensor], stack.positions.embed)
            places = note(f"{at}positions.{scheme}", f"1 T {width}", embed, tokens.positions, stack.dtype)
            x = note(f"{at}embedding.placed", wide_rows, torch.add, x, places)
        if embedding.norm is not None:
            x = note(f"{at}embedding.norm", wide_rows, embedding.norm, x)
        if embedding.project is not None:
            x = note(f"{at}embedding.project", "B T D", embedding.project, x)
        note.also(f"{at}embedding.dropout")
    return tokens, x


def _front(note: Notebook, front: nn.Module, inputs: Tensor, at: str, wide_rows: str) -> Tensor:
    """Ids, pixels, vectors or frames -> [B, T, W]."""
    if isinstance(front, TokenFront):
        x = note(f"{at}.tokens", wide_rows, front.tokens, inputs.long())
        return note(f"{at}.scaled", wide_rows, torch.mul, x, front.scale) if front.scale != 1 else x
    if isinstance(front, PatchFront):
        patches = note(f"{at}.patches", "B N channels·patch·patch", _cut, inputs, front.patch)
        x = note(f"{at}.project", "B N D", front.project, patches)
        return (
            x
            if front.class_token is None
            else note(f"{at}.class_token", "B T D", _prepend, front.class_token, x)
        )
    if isinstance(front, FrameFront):
        x = note(f"{at}.first", "B D Tin", front.first, inputs.transpose(1, 2))
        x = note(f"{at}.first_bent", "B D Tin", nnf.gelu, x)
        x = note(f"{at}.second", "B D T", front.second, x)
        return note(f"{at}.second_bent", "B T D", lambda x: nnf.gelu(x).transpose(1, 2), x)
    return note(f"{at}.project", "B T D", cast(nn.Linear, front.project), inputs)


def _type_vectors(table: nn.Embedding, types: Tensor | None, x: Tensor) -> Tensor:
    """Segments [B, T], or the first one for every token -> [B, T, W]."""
    return table.weight[0].expand_as(x).clone() if types is None else cast(Tensor, table(types.long()))


def _cut(pixels: Tensor, side: int) -> Tensor:
    """[B, channels, height, width] -> [B, N, channels·side²]."""
    return nnf.unfold(pixels, side, stride=side).transpose(1, 2)


def _prepend(first: Tensor, x: Tensor) -> Tensor:
    """[D] before the rows [B, N, D] -> [B, N + 1, D]."""
    return torch.cat([first.expand(x.shape[0], 1, -1), x], dim=1)


def _views(
    note: Notebook, stack: Stack, tokens: Tokens, dtype: torch.dtype
) -> Callable[[int, int | None], View]:
    """Angles, bias and masks of the stack -> what the attention of a layer with a window may see, and how."""
    scheme, plan, at = stack.positions, stack.plan, stack.plan.prefix
    config, where = scheme.config, tokens.positions
    own_base = config.rope_local_base is not None  # layers with a window turn at another base
    turns: dict[bool, Rotary] = {}
    bias = None
    if config.positions == "rope":
        for local in sorted({own_base and window is not None for window in plan.windows}):
            window = 1 if local else None  # what its size is does not matter
            name = f"{at}positions.rotary" + ".local" * local
            cos, sin = note(
                name,
                "2 1 1 T R",
                lambda window: torch.stack(tuple(scheme.rotary(where, window) or ())),
                window,
            )
            note.also(f"{at}positions.rotary")
            turns[local] = Rotary(cos, sin)
    if config.positions in ("alibi", "relative"):
        formula = "−slope · distance" if config.positions == "alibi" else "table[bucket of distance]"
        bias = note(
            f"{at}positions.bias",
            "1 H T S",
            cast(Callable[..., Tensor], scheme.bias),
            where,
            where,
            dtype,
            bias=formula,
        )
        note.also(f"{at}positions.table")
    masks = {window: _mask(note, stack, tokens, window) for window in dict.fromkeys(plan.windows)}

    def view(layer: int, window: int | None) -> View:
        rotary = turns.get(own_base and window is not None) if layer not in stack.rope_skips else None
        return View(masks[window], False, bias, rotary)

    return view


def _mask(note: Notebook, stack: Stack, tokens: Tokens, window: int | None) -> Tensor | None:
    """Who sees whom in layers with this window, [1, 1, T, S]; None where everybody sees everybody."""
    plan = stack.plan
    name = f"{plan.prefix}mask" + (f".{window or 'full'}" if len(set(plan.windows)) > 1 else "")
    rule = ("earlier" if plan.causal else "all") + (f", nearer than {window}" if window is not None else "")
    length, device = tokens.length, tokens.positions.device

    def spelled_out() -> Tensor:
        mask, causal = compose(tokens, tokens, causal=plan.causal, window=window)
        everybody = torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
        return mask if mask is not None else everybody.tril() if causal else everybody

    mask = note(name, "1 1 T S", spelled_out, mask=rule)
    return None if bool(mask.all()) else mask


def head_steps(note: Notebook, head: Head, hidden: Tensor) -> Tensor:
    """[B, T, D] -> what the head says."""
    x = hidden
    if isinstance(head, LanguageHead):
        width = "B T D" if head.out.in_features == hidden.shape[-1] else "B T W"
        if head.transform is not None:
            x = note("head.transform", width, head.transform, x)
        if head.activation is not None and head.norm is not None:
            x = note("head.activation", width, head.activation, x)
            x = note("head.norm", width, head.norm, x)
        if head.scale != 1:
            x = note("head.scaled", width, torch.mul, x, head.scale)
        x = note("head.out", "B T V", head.out, x)
        if head.softcap is not None:
            cap = head.softcap
            x = note("head.softcapped", "B T V", lambda x: cap * torch.tanh(x / cap), x)
    elif isinstance(head, TokenHead):
        x = note("head.out", "B T C", head.out, x)
    elif isinstance(head, Pooled):
        x = note("head.pooled", "B D", pool, x, None, head.pooling or "mean")
        if head.pooler is not None:
            x = note("head.pooler", "B D", head.pooler, x)
            x = note("head.bent", "B D", head.bend, x)
        if isinstance(out := getattr(head, "out", None), nn.Module):
            x = note("head.out", "B C", out, x)
        elif getattr(head, "normalise", False):
            x = note("head.normalised", "B D", lambda x: nnf.normalize(x, dim=-1), x)
    note.tap("logits")
    return x
