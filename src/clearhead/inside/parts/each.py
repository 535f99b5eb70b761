"""Every part of a model off, one at a time, on one text: all of them as rows of a few batched passes.

    found = effect_of_each(m, "The cat sat on the")
    found.kl["3.2"], found.kl["feedforward:1"], found.kl["layer:0"]      # bits
    found.effects["3.2"].top                                             # what it says without head 3.2

A row of the batch is the text with one part replaced by zeros or its mean, put there as `patch` puts the
activations of another prompt; `effect` gives the same for one part, or for several together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.errors import refuse
from clearhead.inside import inputs, results
from clearhead.inside.names import attentions, heads_in, layer_names
from clearhead.inside.parts.ablate import Effect, How, asked_place, compared, means_of_text, selected
from clearhead.inside.patch import OnRows, Site, patched_scores


@dataclass(frozen=True)
class EachEffect(results.Result):
    """What a model says of one text without each of its parts."""

    effects: dict[str, Effect]  # by part: a head "3.2", "cross.1.0", "feedforward:1", "layer:encoder.0"

    @property
    def kl(self) -> dict[str, float]:
        """KL(before || after) of each part, bits."""
        return {name: one.kl for name, one in self.effects.items()}


def single_parts(config: ModelConfig) -> dict[str, dict[str, str]]:
    """Return every part that can be off by itself, by name, as an argument of `effect`."""
    layers = list(layer_names(config))
    return {
        **{str(head): {"heads": str(head)} for head in heads_in(attentions(config))},
        **{f"feedforward:{layer}": {"feedforwards": layer} for layer in layers},
        **{f"layer:{layer}": {"layers": layer} for layer in layers},
    }


def effect_of_each(
    m: inputs.AnyModel,
    given: Any,
    how: How = "zero",
    *,
    target: inputs.Target = None,
    pair: str | None = None,
    position: int | None = None,
    top: int = 10,
    on_progress: OnRows = lambda done, total: None,
) -> EachEffect:
    """Return the effect of each part alone; the arguments are `effect`'s.

    `on_progress` is told how many parts are done, after each batch.
    """
    prepared = inputs.prepare(m, given, target, pair)
    where = asked_place(prepared, position)
    parts = single_parts(prepared.m.config)
    found = {name: selected(prepared.m.config, **{**NOTHING, **one}) for name, one in parts.items()}
    sites = {name: _sites(taps) for name, (_, taps) in found.items()}
    replaced = _replacements(prepared, {site.tap for some in sites.values() for site in some}, how)
    rows: Sequence[Sequence[Site]] = [(), *sites.values()]
    scores = patched_scores(prepared, replaced, rows, where or 0, on_progress)  # [1 + parts, C]
    effects = {
        name: compared(prepared, found[name][0], how, where, scores[0], after, top)
        for name, after in zip(sites, scores[1:])
    }
    return EachEffect(effects)


NOTHING: dict[str, Any] = {"heads": (), "layers": (), "feedforwards": ()}


def _sites(taps: Mapping[str, Any]) -> tuple[Site, ...]:
    """Return where something is put, for what `selected` found."""
    return tuple(
        site
        for tap, heads in taps.items()
        for site in ([Site(tap, head=one) for one in heads] if isinstance(heads, list) else [Site(tap)])
    )


def _replacements(prepared: inputs.Prepared, taps: set[str], how: str) -> dict[str, Tensor]:
    """Return what takes the place of each activation, [1, ...] as the text has it: zeros, or means."""
    _, seen = prepared.record(*taps)
    if how == "zero":
        return {tap: torch.zeros_like(seen[tap]) for tap in taps}
    refuse(how != "mean", f'how "{how}" is not known: choose zero or mean')
    means = means_of_text(prepared)
    return {tap: means[tap].to(seen[tap]).expand(seen[tap].shape) for tap in taps}
