"""What the tasks share: which head is needed, and running it on many texts.

Shapes: B batch, T length, C classes.
"""

from collections.abc import Iterator, Sequence

import torch
from tokenizers import Encoding
from torch import Tensor

from clearhead.batches.padding import by_length, padded, real_tokens
from clearhead.bundle import Bundle
from clearhead.errors import InputError, refuse
from clearhead.model.transformer import Output, evaluating
from clearhead.tasks.spec import head_for, uses_of


def check_head(m: Bundle, task: str) -> None:
    """Raise `InputError` where the model lacks what the task needs."""
    if head_for(task) not in (None, m.config.head):
        raise InputError(
            f"{task} needs a model with head {head_for(task)}, and this one's head is {m.config.head}: "
            f"{fitting(m)}"
        )
    refuse(
        m.config.family == "encoder-decoder",
        f"{task} needs a model of one stack, and this is an encoder-decoder: choose an encoder or a decoder",
    )


def fitting(m: Bundle) -> str:
    """Return what the model is good for, as part of a message."""
    head = m.config.head or "none"
    both = m.config.family == "encoder-decoder" and head == "lm"
    return f"it is for {'translate, generate and score' if both else uses_of(head)}"


@torch.inference_mode()
def outputs_of(
    m: Bundle, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]], batch_size: int, logits: str
) -> Iterator[tuple[list[int], Output, Tensor]]:
    """Run the model on rows of like length: yield the places of a batch, the output and the mask [B, T]."""
    refuse(batch_size < 1, f"batch_size {batch_size} must be 1 or more")
    device = next(m.model.parameters()).device
    for places in by_length(list(map(len, rows)), lambda count, _: count <= batch_size):
        some = [rows[place] for place in places]
        ids, mask = padded(some, m.special.get("pad", 0)).to(device), real_tokens(some).to(device)
        more = {}
        if types and m.config.n_types > 1:
            more["types"] = padded([types[place] for place in places]).to(device)
        with evaluating(m.model):
            output = m.model(ids, mask, logits=logits, **more)
        yield places, output, mask


def logits_of(m: Bundle, rows: Sequence[Encoding], batch_size: int) -> list[Tensor]:
    """Return what the head says of each row: [C], or [T, C] of its own tokens; float32, on the CPU."""
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    ids, types = [row.ids for row in rows], [row.type_ids for row in rows]
    for places, output, _ in outputs_of(m, ids, types, batch_size, "all"):
        logits = output.required_logits.float().cpu()
        for place, row in zip(places, logits):
            found[place] = row if logits.ndim == 2 else row[: len(ids[place])]
    return found
