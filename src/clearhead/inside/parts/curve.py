"""Quality against heads removed: heads go one after another, those that count least first.

Heads are masked, not cut out, so that a layer may lose all of its own; `prune` is the same up to there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from clearhead.errors import InputError
from clearhead.inside.inputs import AnyModel
from clearhead.inside.names import HeadName, all_heads
from clearhead.inside.parts.ablate import HeadTable, OnProgress, ablate_each, ablating, opened
from clearhead.inside.parts.examples import Data, judge
from clearhead.inside.parts.importance import importance
from clearhead.inside.parts.prune import Unit, ordered
from clearhead.inside.results import Result

By = Literal["importance", "ablation", "random"]
WAYS = ("importance", "ablation", "random")


@dataclass(frozen=True)
class PruneCurve(Result):
    """Loss and accuracy after so many heads are gone."""

    by: By
    heads: int  # of the whole model
    removed: tuple[int, ...]  # heads gone at each point, from 0
    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    order: tuple[str, ...]  # names of the heads, first gone first


def scores(
    m: AnyModel,
    data: Data,
    by: By = "importance",
    seed: int = 0,
    on_progress: OnProgress = lambda stage, done, total: None,
    **options: Any,
) -> HeadTable:
    """Return how much each head counts: by gradient, by the loss without it, or drawn at random."""
    if by not in WAYS:
        raise InputError(f'by "{by}" is not known: choose {", ".join(WAYS)}')
    if by == "importance":
        return importance(m, data, on_progress=on_progress, **options).heads
    if by == "ablation":
        return ablate_each(m, data, on_progress=on_progress, **options)
    heads = all_heads(m.config)
    drawn = np.random.default_rng(seed).random(len(heads)).tolist()
    return HeadTable.of(m.config, "drawn at random", dict(zip(heads, drawn)))


def prune_curve(
    m: AnyModel,
    data: Data,
    steps: int | None = None,
    by: By = "importance",
    seed: int = 0,
    recompute: bool = False,
    ranked_on: Data | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
    **options: Any,
) -> PruneCurve:
    """Mask heads in the order in which they count, and measure loss and accuracy on the way.

    Args:
        m: what `load` gave; or a bare model, with `Examples`.
        data: what quality is measured on, and `options`, as for `examples_from`.
        steps: points after the first; None: one for each head, or for each group of heads that go together.
        by: what decides the order: importance (by gradient), ablation (of each alone), random.
        seed: of the random order.
        recompute: rank the heads that are left anew at each point.
        ranked_on: other data to rank the heads on; None: the same.
        on_progress: told how many points are done.
    """
    model, examples = opened(m, data, options)
    ranking = examples if ranked_on is None else opened(m, ranked_on, options)[1]
    if steps is not None and steps < 1:
        raise InputError(f"steps {steps} must be 1 or more")

    def ranked() -> list[Unit]:
        return ordered(model.config, scores(model, ranking, by, seed).numbers(model.config))

    waiting, gone = ranked(), list[HeadName]()
    count = len(waiting)
    shares = np.linspace(0, count, min(steps or count, count) + 1)
    points = sorted({round(share) for share in shares})
    removed, losses, accuracies = [], [], []
    for done, end in enumerate(points, start=1):
        going = end - (count - len(waiting))
        gone += [head for unit in waiting[:going] for head in unit]
        waiting = waiting[going:]
        with ablating(model, gone):
            found = judge(model, examples)
            if recompute and by != "random" and waiting:
                left = set(waiting)
                waiting = [unit for unit in ranked() if unit in left]
        removed.append(len(gone))
        losses.append(found.loss)
        accuracies.append(found.accuracy)
        on_progress("heads", done, len(points))
    return PruneCurve(by, len(gone), tuple(removed), tuple(losses), tuple(accuracies), tuple(map(str, gone)))
