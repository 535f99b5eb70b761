"""Kernels for one new token per row: a linear layer with norm, gate and residual, and attention.

A decode step reads every weight once for a few rows, so its speed depends on how few kernels it takes and how
evenly each of them reads. Where Triton is installed and the tensors are on a GPU, each function here is a
single kernel; elsewhere it calls the model's own formulas. A compiler takes both as PyTorch operators, whole.

Shapes: B rows, D width in, N width out, H heads, K key/value heads, G = H/K, E head width, S slots, R rotated
columns.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core import attention, feedforward, norms, positions
from clearhead.run.kernels.fixed_cache import NOTHING, HeadConfig, MatmulConfig
from clearhead.run.quant.grid import Codes

MOST_ROWS = 2  # rows for which our matmul, with norm and gate in the same kernel, beats all others
MOST_TOGETHER = 32  # rows for which our matmul on matrix units, in bfloat16, beats the library's
MOST_BYTES = 4  # rows for which int8 matmuls beat matrix units, for quantized weights
MOST_FEW = 64  # rows for which codes are made numbers within the matmul
PLAIN = MatmulConfig()


def available(x: Tensor) -> bool:
    """Return True if there are kernels for this tensor's device and dtype."""
    on = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return (
        on and x.dtype in (torch.bfloat16, torch.float32) and importlib.util.find_spec("triton") is not None
    )


Given = ParamSpec("Given")


def operator(
    shaped: Callable[..., Tensor], mutates: Sequence[str] = ()
) -> Callable[[Callable[Given, Tensor]], Callable[Given, Tensor]]:
    """Let a compiler see a function as one operator; `shaped` makes an empty result of the same arguments.

    Outside a compiler the function runs by itself: to call an operator loads the compiler, in seconds.
    """

    def made(function: Callable[Given, Tensor]) -> Callable[Given, Tensor]:
        whole = torch.library.custom_op(
            f"clearhead::{function.__name__.strip('_')}", function, mutates_args=mutates
        )
        whole.register_fake(shaped)

        @functools.wraps(function)
        def call(*given: Given.args, **named: Given.kwargs) -> Tensor:
            way = whole if torch.compiler.is_compiling() else function
            return cast(Tensor, way(*given, **named))

        return call

    return made


def _same_shape(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator(_same_shape)
def materialise(x: Tensor) -> Tensor:
    """Return the same tensor, computed once: a compiler might compute it again wherever it is used."""
    return x.clone(memory_format=torch.contiguous_format)


def step_norm(x: Tensor, scale: Tensor, eps: float, unit_offset: bool) -> Tensor:
    """Apply RMS norm with `scale` [D]: [..., D] -> [..., D]."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not available(x):
        return norms.rms_norm(x, scale, eps, unit_offset)
    from clearhead.run.kernels import triton_step

    return triton_step.norm(x, scale, eps, unit_offset)


def step_linear(x: Tensor, weight: Tensor | Codes, form: MatmulConfig = PLAIN) -> Tensor:
    """Multiply x [B, 1, D] with `weight` [N, D], and do around it what `form` says: -> [B, 1, N].

    For a row or two, or a quantized weight, this is a single kernel; for more rows, a few, or steps that a
    compiler joins around the library's matmul. The result may take the place of `form.add`.
    """
    if isinstance(weight, Codes):
        bits, columns, words, scales, offsets = weight
        return _quantized(x, bits, columns, words, scales, offsets, *form)
    return _one_kernel(x, weight, *form) if x.shape[0] <= MOST_ROWS else _in_steps(x, weight, form)


def _in_steps(x: Tensor, weight: Tensor, form: MatmulConfig) -> Tensor:
    if not torch.compiler.is_compiling() and available(x):  # a compiler fuses as much by itself
        return _in_kernels(x, weight, form)
    bias, scale, eps, unit_offset, gate, add = form
    y = nnf.linear(x if scale is None else norms.rms_norm(x, scale, eps, unit_offset), weight, bias)
    if gate is not None:
        pre, up = y.chunk(2, dim=-1)
        y = feedforward.ACTIVATIONS[gate](pre) * up
    return y if add is None else y + add


def _in_kernels(x: Tensor, weight: Tensor, form: MatmulConfig) -> Tensor:
    """`_in_steps` with a kernel for the norm, and our matmul, or for more rows the library's.

    There a sum takes the place of `add`, which spares a copy: a residual stream has no other reader.
    """
    from clearhead.run.kernels import triton_rows, triton_step

    bias, scale, eps, unit_offset, gate, add = form
    if scale is not None:
        x = step_norm(x, scale, eps, unit_offset)
    rows = x.numel() // x.shape[-1]
    if rows <= MOST_TOGETHER and x.dtype == torch.bfloat16 and weight.is_contiguous():
        return triton_rows.wide(x, weight, bias, gate, add)
    if add is not None and bias is None and gate is None:
        sums = add.view(rows, -1)
        return torch.addmm(sums, x.view(rows, -1), weight.t(), out=sums).view_as(add)
    y = nnf.linear(x, weight, bias)
    if gate is not None:
        y = triton_step.gated(y, gate)
    return y if add is None else y + add


def _linear_shape(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
    gate = more[-2]
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (1 if gate is None else 2))


@operator(_linear_shape)
def _one_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    eps: float,
    unit_offset: bool,
    gate: str | None,
    add: Tensor | None,
) -> Tensor:
    if available(x) and weight.is_contiguous():
        from clearhead.run.kernels import triton_step

        return triton_step.linear(x, weight, MatmulConfig(bias, scale, eps, unit_offset, gate, add))
    add = None if add is None else add.clone()  # an operator may not write over what it is given
    return _in_steps(x, weight, MatmulConfig(bias, scale, eps, unit_offset, gate, add)).clone()


@operator(lambda x, bits, columns, words, *more: _linear_shape(x, words, *more))
def _quantized(
    x: Tensor,
    bits: int,
    columns: int,
    words: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    eps: float,
    unit_offset: bool,
    gate: str | None,
    add: Tensor | None,
) -> Tensor:
    """`step_linear` as an operator, whose arguments are the fields of `Codes` one by one."""
    weight, rows = Codes(bits, columns, words, scales, offsets), x.numel() // x.shape[-1]
    form = MatmulConfig(bias, scale, eps, unit_offset, gate, add)
    if not available(x):
        return _in_steps(x, weight.weight(x.dtype), form).clone()
    from clearhead.run.kernels import triton_codes, triton_rows

    if rows > MOST_FEW:
        form = form._replace(add=None if add is None else add.clone())
        return _in_kernels(x, triton_codes.spread(weight, x.dtype), form)
    way = triton_codes.linear if rows <= MOST_BYTES else triton_rows.linear
    return way(x, weight, form)


def step_attend(
    qkv: Tensor, keys: Tensor, values: Tensor, slot: Tensor, mask: Tensor, form: HeadConfig
) -> Tensor:
    """Attend with the packed queries, keys and values of one token: [B, 1, (H+K)·E + K·Ev] -> [B, 1, H·Ev].

    The keys and values go to `slot` [1] of the buffers [B, K, S, E] and [B, K, S, Ev]. `mask` [B|1, S] says
    which of the slots before it may be seen; the token sees itself.
    """
    return _attend(qkv, keys, values, slot, mask, *form)


def _attend_shape(qkv: Tensor, keys: Tensor, values: Tensor, *more: Any) -> Tensor:
    n_heads = more[2 + HeadConfig._fields.index("n_heads")]  # after slot and mask
    return qkv.new_empty(qkv.shape[0], 1, n_heads * values.shape[3])


@operator(_attend_shape, mutates=("keys", "values"))
def _attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slot: Tensor,
    mask: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    layout: str,
    n_heads: int,
    scale: float,
    softcap: float | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    unit_offset: bool,
) -> Tensor:
    """`step_attend` as an operator, whose arguments are the fields of a `HeadConfig` one by one."""
    if available(qkv):
        from clearhead.run.kernels import triton_attend

        form = HeadConfig(cos, sin, layout, n_heads, scale, softcap, q_norm, k_norm, eps, unit_offset)
        return triton_attend.attend(qkv, keys, values, slot, mask, form)
    B, K, _, E = keys.shape
    q, k, v = torch.split_with_sizes(qkv, [n_heads * E, K * E, K * values.shape[3]], dim=-1)
    q, k, v = q.view(B, n_heads, 1, E), k.view(B, K, 1, E), v.view(B, K, 1, -1)
    if q_norm is not None and k_norm is not None:
        q, k = (norms.rms_norm(x, norm, eps, unit_offset) for x, norm in ((q, q_norm), (k, k_norm)))
    if cos is not None and sin is not None:
        q, k = (positions.rotate(x, positions.Rotary(cos, sin), layout) for x in (q, k))
    keys.index_copy_(2, slot, k)
    values.index_copy_(2, slot, v)
    return (
        attention.eager(q, keys, values, mask[:, None, None], None, scale, softcap=softcap)
        .reshape(B, 1, -1)
        .clone()
    )


def paged_attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    place: Tensor,
    size: int,
    reach: int,
    form: HeadConfig,
) -> Tensor:
    """Attend as `step_attend`, to keys in a pool: [B, 1, (H+K)·E + K·Ev] -> [B, 1, H·Ev].

    The pool [1, K, S, E] has blocks of `size` slots. `table` [B, M] names the blocks of each row, and `place`
    [B] says where its new token stands. Keys further than `reach` before it are not seen; 0: all are.
    """
    if available(qkv):
        from clearhead.run.kernels import triton_attend

        return triton_attend.paged_attend(qkv, keys, values, table, place, size, reach, form)
    columns = torch.arange(table.shape[1] * size, device=table.device)[None]  # 1 M·size
    slots = (table[:, :, None] * size + torch.arange(size, device=table.device)).flatten(1)  # B M·size
    k, v = (x[0][:, slots].transpose(0, 1) for x in (keys, values))  # B K M·size E
    seen = columns < place[:, None]
    if reach:
        seen = seen & (columns > place[:, None] - reach)
    here = torch.arange(len(qkv), device=table.device)
    # The slots of the rows are looked up, and so copied: the new token goes to a slot after them.
    last = torch.full((1,), k.shape[2], device=table.device)
    k, v = nnf.pad(k, (0, 0, 0, 1)), nnf.pad(v, (0, 0, 0, 1))
    z = step_attend(qkv, k, v, last, nnf.pad(seen, (0, 1), value=True), form)
    slot = slots[here, place]
    for pool, buffer in ((keys, k), (values, v)):
        pool[0, :, slot] = buffer[:, :, -1].transpose(0, 1)
    return z


# The next token ---------------------------------------------------------------------------------------------


def choose(logits: Tensor, index: Tensor, made: Tensor, ids: Tensor, kept: Tensor) -> None:
    """Keep the most probable token of each row: logits [B, V] -> `made` [B, S] at `index` [1], `ids` [B, 1].

    `made` has -1 where a logit is not a number. The logits are kept too, in `kept` [B, V].
    """
    if not torch.compiler.is_compiling() and available(logits):
        from clearhead.run.kernels import triton_step

        return triton_step.choose(logits, index, made, ids, kept)
    chosen = logits.argmax(-1, keepdim=True)
    best = logits.gather(1, chosen)  # not a number where any logit is not
    kept.copy_(logits)
    made.index_copy_(1, index, torch.where(best.isnan(), NOTHING, chosen))
    ids.copy_(chosen)
