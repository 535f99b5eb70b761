"""The decode loop: prompt in one pass, then one token at a time with the cache.

Shapes: B batch, T prompt length, N new tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.errors import InputError
from clearhead.model.cache import Cache
from clearhead.model.transformer import Transformer


@torch.inference_mode()
def greedy(
    model: Transformer,
    ids: Tensor,
    max_new_tokens: int,
    mask: Tensor | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    stop: int | None = None,
    cache: Cache | None = None,
) -> Tensor:
    """The most probable token, again and again: prompt [B, T] -> new ids [B, N], N at most `max_new_tokens`.

    `stop` ends a row; a row that has ended is filled up with `stop`, and when all have, the loop ends. Padding of the
    prompt (`mask` False) may stand on either side. `source` feeds the encoder where there is one.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens} must be 1 or more")
    cache = Cache(reserve=ids.shape[1] + max_new_tokens) if cache is None else cache
    step, new, ended = ids, [], torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        out = model(step, mask, source, source_mask, cache=cache, logits="last")
        step, mask = out.logits.argmax(-1), None  # B 1
        if stop is not None:
            step = step.masked_fill(ended[:, None], stop)
            ended = ended | (step[:, 0] == stop)
        new.append(step)
        if stop is not None and bool(ended.all()):
            break
    return torch.cat(new, dim=1)
