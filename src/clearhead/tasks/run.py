"""What the tasks share: which head is needed, and what it says of many texts.

Shapes: B batch, T length, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tokenizers import Encoding
from torch import Tensor

from clearhead.errors import InputError
from clearhead.model.transformer import evaluating
from clearhead.tasks.spec import head_for, uses_of

if TYPE_CHECKING:
    from clearhead.bundle import Model


def check_head(loaded: Model, task: str) -> None:
    """Has the model what the task needs?"""
    if loaded.config.head != head_for(task):
        raise InputError(
            f"{task} needs a model with head {head_for(task)}, and this one's head is {loaded.config.head}: {fitting(loaded)}"
        )
    if loaded.config.family == "encoder-decoder":
        raise InputError(
            f"{task} needs a model of one stack, and this is an encoder-decoder: choose an encoder or a decoder"
        )


def fitting(loaded: Model) -> str:
    """What the model is good for."""
    head = loaded.config.head or "none"
    both = loaded.config.family == "encoder-decoder" and head == "lm"
    return f"it is for {'translate, generate and score' if both else uses_of(head)}"


def names_of(loaded: Model) -> tuple[str, ...]:
    """The names of the classes."""
    return loaded.labels or tuple(f"LABEL_{index}" for index in range(loaded.config.n_classes))


@torch.inference_mode()
def logits_of(loaded: Model, rows: Sequence[Encoding], batch_size: int) -> list[Tensor]:
    """What the head says of each row, in the order given: [C], or [T, C] of its own tokens; float32, on the CPU."""
    if batch_size < 1:
        raise InputError(f"batch_size {batch_size} must be 1 or more")
    device = next(loaded.model.parameters()).device
    said: list[Tensor] = [torch.empty(0)] * len(rows)
    order = sorted(range(len(rows)), key=lambda row: len(rows[row].ids))
    with evaluating(loaded.model):
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            longest = max(1, *(len(rows[row].ids) for row in chosen))
            ids = torch.full((len(chosen), longest), loaded.special.get("pad", 0))  # B T
            mask, types = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids)
            for place, row in enumerate(chosen):
                length = max(1, len(rows[row].ids))  # a row without tokens gets one of padding
                mask[place, :length] = True
                ids[place, : len(rows[row].ids)] = torch.tensor(rows[row].ids)
                types[place, : len(rows[row].ids)] = torch.tensor(rows[row].type_ids)
            more = {"types": types.to(device)} if loaded.config.n_types > 1 else {}
            logits = loaded.model(ids.to(device), mask.to(device), **more).logits.float().cpu()
            for place, row in enumerate(chosen):
                said[row] = logits[place] if logits.ndim == 2 else logits[place, : len(rows[row].ids)]
    return said
