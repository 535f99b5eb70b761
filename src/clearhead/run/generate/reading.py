"""Reading prompts of unequal length into a fixed cache, with little padding and, where that does, no mask.

Shapes: B rows, V vocabulary, D model.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.transformer import Transformer
from clearhead.learn.batches.padding import padded
from clearhead.run.generate import decode
from clearhead.run.generate.prompts import Prompts, steps_back
from clearhead.run.kernels.fixed_cache import FixedCache

TOGETHER = 8192  # tokens of prompts, padding included, that keep a GPU busy; more rows only add padding


def read_prompts(model: Transformer, prompts: Prompts, fixed: FixedCache) -> Tensor:
    """Read the prompts into a fixed cache, those of like length together; return the next logits [B, V]."""
    fixed.begin_at(prompts.longest)
    device, groups, logits = fixed.cursor.device, like_lengths([len(row) for row in prompts.ids]), []
    # A state would take up padding that comes last.
    right = prompts.source is None and model.main.spec.causal and steps_back(model)
    for numbers in groups:
        cache, rows, some = Cache(), torch.tensor(numbers, device=device), prompts.rows(numbers)
        if right and len({len(row) for row in some.ids}) > 1:
            logits.append(prefill_right(model, some.ids, cache))
            fixed.adopt_rows(cache, rows, torch.tensor([len(row) for row in some.ids], device=device))
        else:
            logits.append(decode.prefill(model, some.ids, cache, *some.sources))
            fixed.adopt_rows(cache, rows)
    places = torch.tensor([number for numbers in groups for number in numbers], device=device)
    return torch.cat(logits)[places.argsort()]


def like_lengths(lengths: list[int]) -> list[list[int]]:
    """Return the numbers of the rows in groups, each of `TOGETHER` tokens at least with its padding."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (lengths[number] == longest or longest * len(groups[-1]) < TOGETHER):
            groups[-1].append(number)
        else:
            groups.append([number])
    return [sorted(group) for group in groups]


def prefill_right(model: Transformer, prompts: Sequence[Sequence[int]], cache: Cache) -> Tensor:
    """`decode.prefill` with padding on the right, which no token before it sees: it takes no mask."""
    chunk = decode.PREFILL_CHUNK
    ids = padded(prompts, device=next(model.parameters()).device)
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=ids.device)
    rows = torch.arange(len(prompts), device=ids.device)
    states = torch.empty(0)
    for start in range(0, ids.shape[1], chunk):
        hidden = model(ids[:, start : start + chunk], cache=cache, logits="none").hidden
        found = hidden[rows, (last - start).clamp(0, hidden.shape[1] - 1)]  # B D
        states = found if start == 0 else torch.where((last >= start)[:, None], found, states)
    return cast(Tensor, model.head(states[:, None], None)[:, -1])
