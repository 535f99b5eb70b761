"""What fires neurons: a running top of activations over a corpus, in memory that does not grow with it.

Shapes: N neurons of one feed-forward, K contexts kept, T tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.api import Model
from clearhead.inside.memories.neurons import stack_of
from clearhead.inside.memories.passages import NOTE, NOTHING, Batch
from clearhead.model.experts import Experts
from clearhead.model.taps import Recording, record
from clearhead.model.transformer import evaluating


class Running:
    """The highest activations seen so far of each neuron of one feed-forward, with a note on each."""

    def __init__(self, shelf: tuple[str, int, int | None, Tensor], top: int) -> None:
        self.kind, self.layer, self.expert, self.units = shelf
        self.stack = "encoder." if self.kind == "encoder" else ""
        self.part = f"{self.stack}blocks.{self.layer}.feedforward"
        self.tap = f"{self.part}.post" if self.expert is None else f"{self.part}.experts.{self.expert}.post"
        self.values = torch.full((len(self.units), top), -torch.inf)
        self.notes = torch.full((len(self.units), top, NOTE), NOTHING, dtype=torch.int32)

    def take(self, activations: Tensor, notes: Tensor) -> None:
        """Activations [T, N] of a batch and a note on each token [T, NOTE]; of equal ones the earlier stays."""
        top = self.values.shape[1]
        values, places = activations.topk(min(top, len(activations)), dim=0)  # K N
        values = values.T.masked_fill(values.T <= 0, -torch.inf)
        both = torch.cat([self.values, values], 1)
        order = both.argsort(dim=1, descending=True, stable=True)[:, :top]
        self.values = both.gather(1, order)
        written = torch.cat([self.notes, notes[places.T]], 1).gather(
            1, order[:, :, None].expand(-1, -1, NOTE)
        )
        self.notes = written.masked_fill(self.values.isinf()[:, :, None], NOTHING)


def watch(m: Model, batch: Batch, shelves: Sequence[Running]) -> Recording:
    """One forward pass; only what the shelves need is recorded."""
    names = {
        name
        for shelf in shelves
        for name in ([shelf.tap] if shelf.expert is None else [shelf.tap, f"{shelf.part}.router"])
    }
    with torch.no_grad(), evaluating(m.model), record(m.model, *sorted(names)) as seen:
        m.model(batch.main, **batch.given, logits="none")
    return seen


def fired(m: Model, shelf: Running, seen: Recording, batch: Batch, notes: Tensor) -> tuple[Tensor, Tensor]:
    """Activations of a shelf's neurons at the real tokens that reached it, and the notes on them: [T, N], [T, NOTE]."""
    post = seen[shelf.tap].flatten(0, -2)[:, shelf.units.to(seen[shelf.tap].device)].float().cpu()
    real = batch.real(shelf.stack).flatten()
    if shelf.expert is not None:
        experts = stack_of(m, shelf.kind).layers()[shelf.layer].feedforward
        assert isinstance(experts, Experts)
        chosen = experts.choose(seen[f"{shelf.part}.router"].flatten(0, -2))[1].cpu()
        here = (chosen == shelf.expert).any(-1)  # an expert gets its tokens in their order
        return post[real[here]], notes[here[real]]
    return post[real], notes
