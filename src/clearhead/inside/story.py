"""Why this answer: the parts whose removal takes most from its probability, and what they read.

    result = explain(m, "Tom Miller came. Then Tom")
    result.sentence      # 'Head 4.4 copied “Miller” from 4 tokens back; without it 13 % → 1 %.'
    result.effects[0]    # the part with the largest effect: its name and the probability without it

Parts are heads and feed-forwards, each set to zero by itself, at every token, as `ablation.effect` does. Of a
large model only candidates are tried: the parts with the largest gradient × activation, the heads of the
strongest paths, every feed-forward, and the heads of the first layers, whose removal changes what all others
read, more than a gradient tells.

Shapes: B batch, H heads, T tokens, E head width, D model, N choices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.inside import names
from clearhead.inside.attribution import Edge, Paths, paths
from clearhead.inside.inputs import AnyModel, Given, Prepared, Target, choices_of, find_column, prepare
from clearhead.inside.interventions import OnRows, find_parts, removed_scores, single_parts
from clearhead.inside.logit_attribution import LogitQuery
from clearhead.inside.results import Result
from clearhead.variants.contexts import evaluating, record, tap_names

BY_GRADIENT = 24  # candidates among heads, by gradient × activation
BY_PATH = 8  # and by the strongest paths
FIRST_LAYERS = 2  # and all heads of these
DIRECT = (
    0.25  # of the loss in log-probability that a head must add to the logit itself, or its path says little
)
DECIDES = 0.25  # of its probability that an answer loses without a part that decides it


@dataclass(frozen=True)
class PartEffect(Result):
    """The probability of the answer without one part."""

    name: str  # a head "3.2", or "feedforward:1"
    after: float

    @property
    def is_head(self) -> bool:
        """Whether it is a head."""
        return ":" not in self.name

    @property
    def title(self) -> str:
        """The part as people read it."""
        return f"head {self.name}" if self.is_head else self.name.replace("feedforward:", "feed-forward ")


@dataclass(frozen=True)
class Story(Result):
    """Which parts an answer rests on."""

    json_names = ("column", "choice", "before", "effects", "parts", "head", "edge", "sentence")

    column: int
    choice: str
    before: float  # its probability
    effects: tuple[PartEffect, ...]  # the largest effect first
    parts: int  # how many there are; `effects` has those that were tried
    edge: Edge | None  # the strongest path of the head with the largest effect
    tokens: tuple[str, ...]
    source: tuple[str, ...]  # tokens of the encoder
    causal: bool

    @property
    def head(self) -> PartEffect | None:
        """The head with the largest effect."""
        return next((effect for effect in self.effects if effect.is_head), None)

    def decides(self, effect: PartEffect | None) -> bool:
        """Whether the answer loses much of its probability without a part."""
        return effect is not None and effect.after <= (1 - DECIDES) * self.before

    @property
    def sentence(self) -> str:
        """The story in one or two sentences, of which each number was measured."""
        most, head, answer = self.effects[0], self.head, f"“{spoken(self.choice)}”"
        if not self.decides(most):
            return (
                f"No single part decides {answer}: without {most.title}, the strongest, {self._change(most)}."
            )
        if most is head:
            return f"Head {most.name} {self._read()}; without it {self._change(most)}."
        first = f"{most.title.capitalize()} decides {answer}: without it {self._change(most)}."
        if head is None:
            return first
        if not self.decides(head):
            return f"{first} No head does: without {head.name}, the strongest, {self._change(head)}."
        return (
            f"Of the heads, {head.name} {self._read()}; without it {self._change(head)}. "
            f"{most.title.capitalize()} matters more: {self._change(most)}."
        )

    def _change(self, effect: PartEffect) -> str:
        return f"{percent(self.before)} → {percent(effect.after)}"

    def _read(self) -> str:
        """Return what the head with the largest effect did."""
        edge, answer = self.edge, f"“{spoken(self.choice)}”"
        if edge is None:
            return f"matters most to {answer}, through parts after it"
        if edge.part.startswith("cross."):
            return f"read “{spoken(self.source[edge.source])}” in the source for {answer}"
        token, back = spoken(self.tokens[edge.source]), edge.reader - edge.source
        if not back:
            return f"worked on “{token}” itself for {answer}"
        plural = "" if abs(back) == 1 else "s"
        where = f"{abs(back)} token{plural} {'back' if back > 0 else 'ahead'}" if self.causal else ""
        if edge.value > 0 and token.lower() == spoken(self.choice).lower():
            return f"copied “{token}” from {where or f'token {edge.source}'}"
        return f"read “{token}” {where or f'at token {edge.source}'} for {answer}"


def spoken(label: str) -> str:
    """Return a token's label without the marks of spaces."""
    return label.strip("·▁Ġ ").removeprefix("##") or label


def percent(p: float) -> str:
    """Return a probability with the digits that are read: "13 %", "1.3 %", "under 0.1 %"."""
    shown = 100 * p
    if shown < 0.1:
        return "0 %" if shown < 1e-4 else "under 0.1 %"
    return f"{shown:.0f} %" if shown >= 9.95 else f"{shown:.2g} %"


def explain(
    m: AnyModel,
    given: Given | Prepared,
    token: str | int | None = None,
    position: int = -1,
    target: Target = None,
    pair: str | None = None,
    *,
    everything: bool = False,
    known: dict[str, Tensor] | None = None,
    on_progress: OnRows = lambda done, total: None,
) -> Story:
    """Return which parts an answer rests on; the arguments are `contributions`'.

    `everything` tries every part, not candidates alone; `on_progress` is told how many are done. `known` is
    as in `interventions.removed_scores`.
    """
    prepared = prepare(m, given, target, pair)
    choices, config = choices_of(prepared), prepared.m.config
    column = find_column(position, choices.columns)
    choice = LogitQuery.of(m, prepared, token, column, parts=False).choice
    carried = _paths(prepared, choice, column)
    parts = {name: part for name, part in single_parts(config).items() if not name.startswith("layer:")}
    tried = list(parts) if everything else candidates(prepared, column, choice, list(parts), carried)
    rows = {name: find_parts(config, **parts[name])[1] for name in tried}
    scores = removed_scores(prepared, rows, column, on_progress, known).double()  # [1 + parts, N]
    before, *after = scores.softmax(-1)[:, choice].tolist()
    odds = scores.log_softmax(-1)[:, choice]
    order = odds[1:].argsort(stable=True).tolist()
    effects = tuple(PartEffect(tried[place], after[place]) for place in order)
    head = next((effect.name for effect in effects if effect.is_head), None)
    edge = None
    if carried is not None and head is not None:
        edge = strongest_edge(carried, head, float(odds[0] - odds[1 + tried.index(head)]))
    return Story(
        column=column,
        choice=choices.name(choice),
        before=before,
        effects=effects,
        parts=len(parts),
        edge=edge,
        tokens=prepared.tokens.labels,
        source=prepared.source_tokens.labels if prepared.source_tokens else (),
        causal=config.main.causal,
    )


def _paths(prepared: Prepared, choice: int, column: int) -> Paths | None:
    """Return what heads carried; None where a logit is no sum of parts."""
    try:
        return paths(prepared.m, prepared, choice, column)
    except ClearheadError:
        return None


def strongest_edge(carried: Paths, head: str, lost: float) -> Edge | None:
    """Return the largest edge of a head; None where what it adds itself is little of the logits `lost`."""
    attention, _, number = head.rpartition(".")
    table = carried.direct[attention][int(number)] if attention in carried.direct else torch.zeros(1, 1)
    if float(table.sum()) < DIRECT * lost:
        return None
    row, source = divmod(int(table.argmax()), table.shape[1])
    return Edge(head, carried.rows[row], source, float(table[row, source]))


def candidates(
    prepared: Prepared, column: int, choice: int, parts: Sequence[str], carried: Paths | None
) -> list[str]:
    """Return the parts that may have the largest effect, the most promising first."""
    estimates = estimated_effects(prepared, column, choice)
    ranked = sorted(parts, key=lambda name: -abs(estimates.get(name, 0.0)))
    heads = [name for name in ranked if ":" not in name]
    named = [] if carried is None else [edge.part for edge in carried.strongest(BY_PATH)]
    early = [name for name in heads if int(name.split(".")[-2]) < FIRST_LAYERS]
    inner = [name for name in ranked if ":" in name]
    wanted = {*heads[:BY_GRADIENT], *named, *early, *inner}
    return [name for name in ranked if name in wanted]


def estimated_effects(prepared: Prepared, column: int, choice: int) -> dict[str, float]:
    """Return gradient × activation of every head and feed-forward: a first-order estimate of its effect.

    The gradient is of the log-odds of the choice, from one backward pass.
    """
    config, choices = prepared.m.config, choices_of(prepared)
    taps = {f"{attention.part}.z": str(attention) for attention in names.attentions(config)}
    taps |= {f"{block}.feedforward.out": layer for layer, block in names.layer_names(config).items()}
    known = set(tap_names(config))
    taps = {tap: part for tap, part in taps.items() if tap in known}
    with torch.enable_grad(), evaluating(prepared.model):
        with record(prepared.model, *taps, detach=False) as seen:
            hidden = prepared.run(logits="none").hidden
        scores = choices.column_scores(hidden, column)[0].float()
        others = scores.index_fill(0, torch.tensor([choice], device=scores.device), -math.inf)
        odds = scores[choice] - others.logsumexp(0)
        wanted = [tap for tap in taps if tap in seen and seen[tap].requires_grad]
        slopes = torch.autograd.grad(odds, [seen[tap] for tap in wanted], allow_unused=True)
    estimates: dict[str, float] = {}
    for tap, slope in zip(wanted, slopes):
        worth = 0 * seen[tap].detach()[0] if slope is None else (slope * seen[tap].detach())[0]
        if tap.endswith(".z"):
            by_head = worth.sum((1, 2)).tolist()
            estimates |= {f"{taps[tap]}.{number}": value for number, value in enumerate(by_head)}
        else:
            estimates[f"feedforward:{taps[tap]}"] = float(worth.sum())
    return estimates
