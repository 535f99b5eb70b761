"""Head roles: what each attention head does, measured on texts, with the score an indifferent head would have beside it.

    found = head_roles(m)                      # or head_roles(m, ["The cat sat on the mat.", ...])
    found.role("3.2"), found.named("previous") # "first", [Head, ...]
    found.grid("induction")                    # [L, H], NaN where a head is pruned or the role cannot be

`roles` says what the roles are. A role is named only where it takes a clear part of the attention that a uniform head
would give elsewhere; a head with no such role is "mixed".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.api import Model
from clearhead.errors import InputError, nearest
from clearhead.inside.heads.roles import NARROW, ROLES, WIDE, Tally, targets
from clearhead.inside.heads.rows import View, repeated_rows, rows, views
from clearhead.inside.names import Head, all_heads, attentions
from clearhead.model.transformer import Transformer

Array = NDArray[np.float32]
MIXED = "mixed"
CLEAR = 0.4  # of the attention that a uniform head gives elsewhere: from here on a role is named
EVEN = 0.9  # of the largest entropy: from here on a head is uniform


@dataclass(frozen=True)
class HeadRoles:
    """The scores of every head; N heads."""

    heads: tuple[Head, ...]
    scores: dict[str, Array]  # by role: [N], from 0 to 1; NaN where the role cannot be
    baselines: dict[str, Array]  # by role: [N], what a uniform head would score
    entropy: Array  # [N], bits, the mean over queries
    distances: tuple[int, ...]  # of the role `position`: key minus query, N of them
    roles: tuple[str, ...]  # the name of what each head does
    texts: int  # rows that were looked at
    tokens: int

    def lift(self, role: str) -> Array:
        """[N]: the part of what a uniform head gives elsewhere that goes to the role's keys; 0 uniform, 1 all of it."""
        if role not in self.scores:
            raise InputError(
                f'there is no role "{role}"{nearest(role, self.scores)}: roles are {", ".join(self.scores)}'
            )
        score, baseline = self.scores[role], self.baselines[role]
        if role == "uniform":
            return score
        return np.asarray((score - baseline) / np.maximum(1 - baseline, 1e-6), dtype=np.float32)

    def clear(self, role: str) -> NDArray[np.bool_]:
        """[N]: is the role clearly above its baseline?"""
        least = EVEN if role == "uniform" else CLEAR
        return np.nan_to_num(self.lift(role), nan=-1.0) >= least

    def named(self, role: str) -> list[Head]:
        """The heads that clearly play a role, best first, whether or not it is the one they are named after."""
        if role == MIXED:
            return [head for head, own in zip(self.heads, self.roles) if own == MIXED]
        clear, lift = self.clear(role), self.lift(role)
        return [
            self.heads[at] for at in np.argsort(-np.nan_to_num(lift, nan=-1.0), kind="stable") if clear[at]
        ]

    def role(self, head: str | Head) -> str:
        """What one head does."""
        names = {str(one): role for one, role in zip(self.heads, self.roles)}
        if str(head) not in names:
            raise InputError(
                f'there is no head "{head}"{nearest(str(head), names)}: heads are called layer.head'
            )
        return names[str(head)]

    def grid(self, role: str, kind: str = "self") -> Array:
        """[L, H] of a role's scores; NaN where a layer has fewer heads than another, or the role cannot be."""
        self.lift(role)
        mine = [head for head in self.heads if head.kind == kind]
        if not mine:
            kinds = dict.fromkeys(head.kind for head in self.heads)
            raise InputError(f"this model has no {kind}-attention: it has {', '.join(kinds)}")
        grid = np.full(
            (max(head.layer for head in mine) + 1, max(head.number for head in mine) + 1),
            np.nan,
            dtype=np.float32,
        )
        for head, score in zip(self.heads, self.scores[role]):
            if head.kind == kind:
                grid[head.layer, head.number] = score
        return grid

    def to_dict(self) -> dict[str, Any]:
        """For JSON: a row for each head; a score that cannot be is null."""

        def number(value: Any) -> float | None:
            return None if np.isnan(value) else round(float(value), 6)

        table = []
        for at, head in enumerate(self.heads):
            own = {role: number(self.scores[role][at]) for role in ROLES}
            base = {role: number(self.baselines[role][at]) for role in ROLES}
            row = {"head": str(head), "role": self.roles[at], "scores": own, "baselines": base}
            table.append(row | {"entropy": number(self.entropy[at]), "distance": self.distances[at]})
        return {"texts": self.texts, "tokens": self.tokens, "heads": table}


def head_roles(m: Model | Transformer, texts: Sequence[Any] | None = None, seed: int = 0) -> HeadRoles:
    """Measure every role on every head.

    Args:
        m: what `load` gave, or a bare model, which takes ids or pixels.
        texts: texts, lists of token ids, or images; None: sentences from the standard library's docstrings, random
            tokens for a model without a tokenizer, random pixels for a model of patches.
        seed: of what is random: those rows, and the repeated sequences that show induction.
    """
    m = m if isinstance(m, Model) else Model(m)
    given = rows(m, texts, seed)
    every = [tokens for row in given for tokens in (row.tokens, row.source_tokens) if tokens is not None]
    counts = Counter(token for tokens in every for token in tokens.ids)
    reach = max(map(len, every))
    tallies = {(kind, layer): Tally(count, reach) for kind, layer, count in attentions(m.config)}
    for row in given:
        for view in views(row):
            _count(tallies[view.kind, view.layer], view, targets(view, counts, _one_vocabulary(m)))
    for row, starts, length in repeated_rows(m, seed):
        for view in views(row):
            if view.kind != "cross":
                _count_induction(tallies[view.kind, view.layer], view, starts[view.kind], length)
    return _settled(m, tallies, len(given), sum(len(row.tokens) for row in given))


def _one_vocabulary(m: Model) -> bool:
    return m.config.source_vocab_size in (None, m.config.vocab_size) and m.config.share_embeddings


def _count(tally: Tally, view: View, wanted: dict[str, torch.Tensor]) -> None:
    for role, keys in wanted.items():
        tally.add(role, view.pattern, view.allowed, keys)
    tally.add_spread(view.pattern, view.allowed)
    tally.add_distances(view.pattern, view.allowed)


def _count_induction(tally: Tally, view: View, start: int, length: int) -> None:
    """From each token of the second copy to the one that came after it in the first."""
    wanted = torch.zeros_like(view.allowed)
    queries = torch.arange(start + length, start + 2 * length)
    wanted[queries, queries - length + 1] = True
    tally.add("induction", view.pattern, view.allowed, wanted)


def _settled(m: Model, tallies: dict[tuple[str, int], Tally], texts: int, tokens: int) -> HeadRoles:
    """Means from sums, and a name for every head."""
    named = {"self": (-1, 0, 1), "encoder": (-1, 0, 1), "cross": ()}
    distances = torch.cat([tally.settle_distance(named[kind]) for (kind, _), tally in tallies.items()])

    def joined(per_attention: list[torch.Tensor]) -> Array:
        return torch.cat(per_attention).numpy().astype(np.float32)

    scores, baselines = {}, {}
    for role in ROLES:
        parts, chances = [], []
        for tally in tallies.values():
            count = tally.queries[role] or float("nan")
            parts.append(tally.mass.get(role, torch.zeros(tally.heads)) / count)
            chances.append(torch.full((tally.heads,), tally.chance[role] / count))
        scores[role], baselines[role] = joined(parts), joined(chances)
    entropy = joined([tally.entropy / max(tally.looking, 1) for tally in tallies.values()])
    heads = tuple(all_heads(m.config))
    found = HeadRoles(
        heads, scores, baselines, entropy, tuple(distances.tolist()), (MIXED,) * len(heads), texts, tokens
    )
    return HeadRoles(heads, scores, baselines, entropy, found.distances, _names(found), texts, tokens)


def _names(found: HeadRoles) -> tuple[str, ...]:
    """The role of each head: induction where it is clear, else the clearest narrow role, else a wide one, else mixed.

    Induction comes first since a head with nothing to match rests somewhere, mostly on the first token.
    """
    names = [MIXED] * len(found.heads)
    for group in (WIDE, NARROW, ("induction",)):  # the later one overrules
        lifts = np.stack([np.where(found.clear(role), found.lift(role), -1.0) for role in group])  # roles N
        for at in range(len(names)):
            if lifts[:, at].max() >= 0:
                names[at] = group[int(lifts[:, at].argmax())]
    return tuple(names)
