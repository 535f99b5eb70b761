"""The batches of a step: cut into pieces, and taken through the stages of a pipeline in turns.

Each stage takes as many pieces forward as there are stages behind it, then one back for each one forward
(1F1B). Without a pipeline, a batch is one piece, and goes back before the next one comes.
docs/decisions/pipeline.md says why the schedule is our own.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.learn.batches.batch import Batch
from clearhead.learn.parallel.pipeline import StageTransformer
from clearhead.learn.parallel.world import World

PIECES = 4  # of a step, for each stage, where there are as many rows: a fifth of the time is then waiting


@dataclass(frozen=True)
class Portion:
    """The batches of a step: the rows of this process, and what all processes have together."""

    batches: list[Batch]  # pieces, with a pipeline
    cuts: list[int]  # how many pieces each batch was cut into
    targets: int
    tokens: int


def portion(whole: Sequence[Batch], world: World, device: torch.device) -> Portion:
    """Return of the batches of a step the rows of this process."""
    counts = sum(batch.n_targets for batch in whole), sum(batch.n_tokens for batch in whole)
    cut = [pieces(batch, world, len(whole)) for batch in whole]
    return Portion([one.to(device) for some in cut for one in some], [len(some) for some in cut], *counts)


def pieces(batch: Batch, world: World, batches: int) -> list[Batch]:
    """Cut this process's share of one of the batches of a step; every share has as many pieces."""
    own, stages = world.rows(batch), world.extent("pipeline")
    wanted = math.ceil(PIECES * stages / batches) if stages > 1 else 1
    count = max(1, min(wanted, len(batch) // world.shares))
    if count == 1:
        return [own]
    ends = [len(own) * number // count for number in range(count + 1)]
    made = [own.rows(slice(begin, end)) for begin, end in itertools.pairwise(ends)]
    for piece in made:
        piece.__dict__["n_shared"] = own.n_shared
    return made


def turns(world: World, cuts: Sequence[int], grouped: bool = False) -> Iterator[tuple[bool, int]]:
    """Yield the turns of a stage on the pieces of a step: whether it goes forward, and the piece's number.

    `grouped`: all pieces of a batch go forward before the first one goes back.
    """
    count, behind = sum(cuts), world.extent("pipeline") - world.place("pipeline") - 1
    ahead = min(count, behind + (max(cuts) - 1 if grouped else 0))
    yield from ((True, number) for number in range(ahead))
    for number in range(count):
        if number + ahead < count:
            yield True, number + ahead
        yield False, number


def gradients(
    model: Transformer,
    work: Portion,
    world: World,
    loss_of: Callable[[Batch], Tensor],
    backward: Callable[[Tensor], None],
) -> Tensor:
    """Add up the gradients of a step; return its loss [], summed over the targets of this process.

    The balance of experts is over a batch, so its pieces stay together.
    """
    stage = model if isinstance(model, StageTransformer) else None
    total, losses = torch.zeros((), device=work.batches[0].ids.device), {}
    for forward, number in turns(world, work.cuts, grouped=bool(model.config.n_experts)):
        if forward:
            losses[number] = loss_of(work.batches[number])
            continue
        loss = losses.pop(number)
        if stage is not None:
            loss = stage.ready(loss, number, work.batches, work.cuts, world)
        backward(loss / max(1, work.targets))
        total += loss.detach()
    if stage is not None:
        stage.complete()
    return total
