"""The walk through one block: attention, perhaps cross-attention, feed-forward or experts, and how each joins the stream.

Shapes: B batch, T tokens that ask, S tokens that are asked, D model, H heads, K key/value heads, E head width,
Ev value width, F feed-forward, X experts, A active experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clearhead.inside.trace.steps import Notebook
from clearhead.model.attention import Attention
from clearhead.model.block import Block, Residual
from clearhead.model.dtypes import wide
from clearhead.model.experts import Experts
from clearhead.model.feedforward import FeedForward
from clearhead.model.masks import View
from clearhead.model.positions import rotate


def block_steps(
    note: Notebook, block: Block, x: Tensor, view: View, memory: Tensor | None, name: str
) -> Tensor:
    """[B, T, D] -> [B, T, D]; `memory` [B, S, D] is what cross-attention reads."""
    with note.group(name):
        if block.parallel:
            return _parallel(note, block, x, view, name)
        with note.group(f"{name}.attention"):
            read = _read(note, block.attention_residual, x, f"{name}.attention")
            y = _attention(note, block.attention, read, None, view, f"{name}.attention")
            x = _add(note, block.attention_residual, x, y, f"{name}.attention")
        if block.cross is not None and block.cross_residual is not None:
            with note.group(f"{name}.cross"):
                read = _read(note, block.cross_residual, x, f"{name}.cross")
                y = _attention(note, block.cross, read, memory, View(), f"{name}.cross")
                x = _add(note, block.cross_residual, x, y, f"{name}.cross")
        note.tap(f"{name}.resid_mid")
        with note.group(f"{name}.feedforward"):
            read = _read(note, block.feedforward_residual, x, f"{name}.feedforward")
            y = _feedforward(note, block.feedforward, read, f"{name}.feedforward")
            return _add(note, block.feedforward_residual, x, y, f"{name}.feedforward")


def _parallel(note: Notebook, block: Block, x: Tensor, view: View, name: str) -> Tensor:
    """Attention and feed-forward read the same stream, through one norm or one each; then both are added."""
    with note.group(f"{name}.attention"):
        read = _read(note, block.attention_residual, x, f"{name}.attention")
        attended = _attention(note, block.attention, read, None, view, f"{name}.attention")
    with note.group(f"{name}.feedforward"):
        if block.feedforward_residual.before is not None:
            read = _read(note, block.feedforward_residual, x, f"{name}.feedforward")
        expanded = _feedforward(note, block.feedforward, read, f"{name}.feedforward")
    with note.group(f"{name}.residual"):
        x = _add(note, block.attention_residual, x, attended, f"{name}.attention")
        return _add(note, block.feedforward_residual, x, expanded, f"{name}.feedforward")


def _read(note: Notebook, residual: Residual, x: Tensor, sublayer: str) -> Tensor:
    """What the sublayer gets to see: [B, T, D] -> [B, T, D]."""
    return x if residual.before is None else note(f"{sublayer}_residual.before", "B T D", residual.before, x)


def _add(note: Notebook, residual: Residual, x: Tensor, y: Tensor, sublayer: str) -> Tensor:
    """The stream with the sublayer's answer added: [B, T, D] twice -> [B, T, D]."""
    at = f"{sublayer}_residual"
    if residual.inside is not None:
        y = note(f"{at}.inside", "B T D", residual.inside, y)
    if residual.scale != 1:
        y = note(f"{at}.scaled", "B T D", torch.mul, y, residual.scale)
    x = note(f"{at}.add", "B T D", torch.add, x, y)
    note.also(f"{at}.read", f"{at}.dropout")  # which only training keeps
    return x if residual.after is None else note(f"{at}.after", "B T D", residual.after, x)


def _attention(
    note: Notebook, part: Attention, x: Tensor, memory: Tensor | None, view: View, at: str
) -> Tensor:
    """[B, T, D] -> [B, T, D]; keys and values come from `memory` [B, S, D], or from x itself."""
    source = x if memory is None else memory
    Ev = "E" if part.d_value == part.d_head else "Ev"
    q = note(f"{at}.q", "B T H·E", part.q, x)
    k = note(f"{at}.k", "B S K·E", part.k, source)
    v = note(f"{at}.v", f"B S K·{Ev}", part.v, source)
    if part.q_norm is not None and part.k_norm is not None and part.norm_over == "full":
        q = note(f"{at}.q_norm", "B T H·E", part.q_norm, q)
        k = note(f"{at}.k_norm", "B S K·E", part.k_norm, k)
    q = note(f"{at}.q_heads", "B H T E", part._heads, q, part.n_heads, None)
    k = note(f"{at}.k_heads", "B K S E", part._heads, k, part.n_kv_heads, None)
    v = note(f"{at}.v_heads", f"B K S {Ev}", part._heads, v, part.n_kv_heads, None)
    last = "heads"
    if part.q_norm is not None and part.k_norm is not None and part.norm_over == "head":
        q = note(f"{at}.q_norm", "B H T E", part.q_norm, q)
        k = note(f"{at}.k_norm", "B K S E", part.k_norm, k)
        last = "norm"
    if view.rotary is not None:
        q = note(f"{at}.q_rotated", "B H T E", rotate, q, view.rotary, part.layout)
        k = note(f"{at}.k_rotated", "B K S E", rotate, k, view.rotary, part.layout)
        last = "rotated"
    for projection, step in (("q", last), ("k", last), ("v", "heads")):
        note.tap(f"{at}.{projection}", step=f"{at}.{projection}_{step}")
    pattern = _pattern(note, part, q, k, view, at)
    z = note(f"{at}.z", f"B H T {Ev}", _per_group, pattern, v)
    note.tap(f"{at}.z")
    side_by_side = note(f"{at}.concat", f"B T H·{Ev}", lambda z: z.transpose(1, 2).flatten(2), z)
    y = note(f"{at}.out", "B T D", part.out, side_by_side)
    note.tap(f"{at}.out")
    return y


def _pattern(note: Notebook, part: Attention, q: Tensor, k: Tensor, view: View, at: str) -> Tensor:
    """How much each query takes from each key: [B, H, T, E] and [B, K, S, E] -> [B, H, T, S]."""
    square, mask, cap = "B H T S", view.mask, part.softcap
    scores = note(f"{at}.scores", square, lambda q, k: _per_group(q, k.transpose(-2, -1)), q, k)
    scores = note(f"{at}.scaled", square, torch.mul, scores, part.scale, scale=f"{part.scale:.4g}")
    if cap is not None:
        scores = note(f"{at}.softcapped", square, lambda scores: cap * torch.tanh(scores / cap), scores)
    if view.bias is not None:
        bias = view.bias[:, list(part.heads)] if part.pruned else view.bias
        scores = note(f"{at}.biased", square, torch.add, scores, bias)
    hidden = "nothing is hidden" if mask is None else "lowest number where hidden"
    scores = note(f"{at}.masked", square, _hide, scores, mask, torch.finfo(scores.dtype).min, hidden=hidden)
    note.tap(f"{at}.scores")
    pattern = note(
        f"{at}.pattern",
        square,
        lambda scores: _hide(torch.softmax(wide(scores), -1).to(q.dtype), mask, 0.0),
        scores,
    )
    note.tap(f"{at}.pattern")
    return pattern


def _per_group(a: Tensor, b: Tensor) -> Tensor:
    """Products where H / K heads of `a` share one of `b`: [B, H, T, n] and [B, K, n, m] -> [B, H, T, m]."""
    B, H, T, n = a.shape
    K = b.shape[1]
    return (a.reshape(B, K, H // K * T, n) @ b).view(B, H, T, b.shape[-1])


def _hide(x: Tensor, mask: Tensor | None, value: float) -> Tensor:
    """`value` where the mask [1, 1, T, S] does not allow to look: [B, H, T, S] -> [B, H, T, S]."""
    return x if mask is None else x.masked_fill(~mask, value)


def _feedforward(note: Notebook, part: nn.Module, x: Tensor, at: str) -> Tensor:
    """[B, T, D] -> [B, T, D]."""
    if isinstance(part, Experts):
        return _experts(note, part, x, at)
    assert isinstance(part, FeedForward)
    first = f"{at}.up" if part.gate is None else f"{at}.gate"
    y = _expand_and_contract(note, [part], [x], "B T", at)
    note.tap(f"{at}.pre", step=first)
    note.tap(f"{at}.post", step=f"{at}.activated" if part.gate is None else f"{at}.gated")
    note.tap(f"{at}.out")
    return y


def _expand_and_contract(
    note: Notebook, parts: Sequence[FeedForward], runs: Sequence[Tensor], rows: str, at: str
) -> Tensor:
    """Each part on its own run of rows, the answers end to end: [rows, D] -> [rows, D]."""

    def each(name: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [getattr(part, name)(run) for part, run in zip(parts, inputs)]

    lengths = [len(run) for run in runs]
    first = "up" if parts[0].gate is None else "gate"
    x = note(f"{at}.{first}", f"{rows} F", lambda: _joined(each(first, runs)))
    x = note(f"{at}.activated", f"{rows} F", parts[0].activation, x)
    if first == "gate":
        up = note(f"{at}.up", f"{rows} F", lambda: _joined(each("up", runs)))
        x = note(f"{at}.gated", f"{rows} F", torch.mul, x, up)
    note.also(f"{at}.dropout")
    return note(f"{at}.down", f"{rows} D", lambda: _joined(each("down", torch.split(x, lengths))))


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _experts(note: Notebook, part: Experts, x: Tensor, at: str) -> Tensor:
    """Each token goes to a few feed-forwards: [B, T, D] -> [B, T, D]."""
    rows = x.reshape(-1, x.shape[-1])  # B·T D
    logits = note(f"{at}.router", "B T X", part.router, x)
    note.tap(f"{at}.router")
    flat = logits.view(len(rows), -1)
    chosen = note(f"{at}.chosen", "B·T A", lambda: part.choose(flat)[1])
    weights = note(f"{at}.weights", "B·T A", lambda: part.choose(flat)[0])
    order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, sorted by expert
    token = order // part.n_active  # which row each pair belongs to
    gathered = note(f"{at}.sorted", "B·T·A D", lambda: rows[token])
    runs = torch.split(gathered, chosen.flatten().bincount(minlength=len(part.experts)).tolist())
    experts = [expert for expert in part.experts if isinstance(expert, FeedForward)]
    answers = _expand_and_contract(note, experts, runs, "B·T·A", f"{at}.experts")

    def mixed() -> Tensor:
        weighted = (answers * weights.flatten()[order, None]).to(rows.dtype)
        return torch.zeros_like(rows).index_add(0, token, weighted).view_as(x)

    y = note(f"{at}.mixed", "B T D", mixed)
    note.tap(f"{at}.out")
    return y
