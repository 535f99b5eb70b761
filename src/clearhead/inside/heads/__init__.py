"""Head roles: what each attention head does, measured on texts, beside the score of a uniform head.

    found = head_roles(m)                      # or head_roles(m, ["The cat sat on the mat.", ...])
    found.role("3.2"), found.named("previous") # "first", [AttentionHead, ...]
    found.grid("induction")                    # [L, H], NaN where a head is pruned or the role cannot be

`roles` says what the roles are. A role is named only where it takes a clear part of the attention that a
uniform head would give elsewhere; a head with no such role is "mixed".
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch

from clearhead.errors import nearest, refuse
from clearhead.inside import inputs, results
from clearhead.inside.heads.roles import NARROW, ROLES, WIDE, Tally, repeated_rows, rows, samples, targets
from clearhead.inside.names import AttentionHead, heads_in, patterned

MIXED = "mixed"
CLEAR = 0.4  # of the attention that a uniform head gives elsewhere: from here on a role is named
EVEN = 0.9  # of the largest entropy: from here on a head is uniform


@dataclass(frozen=True)
class HeadRoles(results.Result):
    """The scores of every head; N heads."""

    heads: tuple[AttentionHead, ...]
    scores: dict[str, results.Floats]  # by role: [N], from 0 to 1; NaN where the role cannot be
    baselines: dict[str, results.Floats]  # by role: [N], what a uniform head would score
    entropy: results.Floats  # [N], bits, the mean over queries
    distances: tuple[int, ...]  # of the role `position`: key minus query, N of them
    texts: int  # rows that were looked at
    tokens: int

    def lift(self, role: str) -> results.Floats:
        """Return how far each head is from uniform, [N]: 0 uniform, 1 all attention on the role's keys."""
        refuse(
            role not in self.scores,
            f'there is no role "{role}"{nearest(role, self.scores)}: roles are {", ".join(self.scores)}',
        )
        score, baseline = self.scores[role], self.baselines[role]
        if role == "uniform":
            return score
        return np.asarray((score - baseline) / np.maximum(1 - baseline, 1e-6), dtype=np.float32)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The role of each head: induction if clear, else the clearest narrow role, a wide one, or mixed.

        Induction comes first since a head with nothing to match rests somewhere, mostly on the first token.
        """
        names = [MIXED] * len(self.heads)
        for group in (WIDE, NARROW, ("induction",)):  # the later one overrules
            lifts = np.stack([np.where(self.clear(role), self.lift(role), -1.0) for role in group])  # roles N
            for at in np.flatnonzero(lifts.max(0) >= 0):
                names[at] = group[int(lifts[:, at].argmax())]
        return tuple(names)

    def clear(self, role: str) -> results.Array:
        """Return whether the role is clearly above its baseline, [N]."""
        return np.nan_to_num(self.lift(role), nan=-1.0) >= (EVEN if role == "uniform" else CLEAR)

    def named(self, role: str) -> list[AttentionHead]:
        """Return the heads that clearly play a role, best first, whether or not they are named after it."""
        if role == MIXED:
            return [head for head, own in zip(self.heads, self.roles) if own == MIXED]
        best = np.argsort(-np.nan_to_num(self.lift(role), nan=-1.0), kind="stable")
        return [self.heads[at] for at in best if self.clear(role)[at]]

    def role(self, head: str | AttentionHead) -> str:
        """Return what one head does."""
        names = {str(one): role for one, role in zip(self.heads, self.roles)}
        refuse(
            str(head) not in names,
            f'there is no head "{head}"{nearest(str(head), names)}: heads are called layer.head',
        )
        return names[str(head)]

    def grid(self, role: str, kind: str = "self") -> results.Floats:
        """Return a role's scores [L, H]; NaN where a layer has fewer heads, or the role cannot be."""
        self.lift(role)
        own = [(head.layer, score) for head, score in zip(self.heads, self.scores[role]) if head.kind == kind]
        refuse(
            not own,
            f"this model has no {kind}-attention: "
            f"it has {', '.join(dict.fromkeys(head.kind for head in self.heads))}",
        )
        layers = [[score for _, score in layer] for _, layer in groupby(own, key=lambda pair: pair[0])]
        return results.filled(layers).astype(np.float32)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: a row for each head; a score that cannot be is null."""

        def number(value: Any) -> float | None:
            return None if np.isnan(value) else round(float(value), 6)

        table = [
            {
                "head": str(head),
                "role": self.roles[at],
                "scores": {role: number(self.scores[role][at]) for role in ROLES},
                "baselines": {role: number(self.baselines[role][at]) for role in ROLES},
                "entropy": number(self.entropy[at]),
                "distance": self.distances[at],
            }
            for at, head in enumerate(self.heads)
        ]
        return {"texts": self.texts, "tokens": self.tokens, "heads": table}


def head_roles(m: inputs.AnyModel, texts: Sequence[Any] | None = None, seed: int = 0) -> HeadRoles:
    """Measure every role on every head.

    Args:
        m: what `load` gave, or a bare model, which takes ids or pixels.
        texts: texts, lists of token ids, or images; None: sentences from the standard library's docstrings,
            random tokens for a model without a tokenizer, random pixels for a model of patches.
        seed: of what is random: those rows, and the repeated sequences that show induction.
    """
    m = inputs.as_model(m)
    config, given = m.config, rows(m, texts, seed)
    every = [tokens for row in given for tokens in (row.tokens, row.source_tokens) if tokens is not None]
    counts = Counter(token for tokens in every for token in tokens.ids)
    one_vocabulary = config.source_vocab_size in (None, config.vocab_size) and config.share_embeddings
    tallies = {name: Tally(name.n_heads, max(map(len, every))) for name in patterned(config)}
    for row in given:
        for sample in samples(row):
            tally = tallies[sample.name]
            for role, keys in targets(sample, counts, one_vocabulary).items():
                tally.add(role, sample, keys)
            tally.add_spread(sample)
    for row, starts, length in repeated_rows(m, seed):
        for sample in samples(row):
            if sample.name.kind != "cross":
                # From each token of the second copy to the one that came after it in the first.
                after = torch.arange(length) + starts[sample.name.kind] + 1
                wanted = torch.zeros_like(sample.allowed)
                wanted[after + length - 1, after] = True
                tallies[sample.name].add("induction", sample, wanted)
    distances = torch.cat(
        [tally.settle_distance(() if name.kind == "cross" else (-1, 0, 1)) for name, tally in tallies.items()]
    )
    tables = {  # 2 N: scores and baselines
        role: torch.cat([tally.score(role) for tally in tallies.values()], 1).numpy()
        for role in (*ROLES, "entropy")
    }
    return HeadRoles(
        heads=tuple(heads_in(tallies)),
        scores={role: tables[role][0] for role in ROLES},
        baselines={role: tables[role][1] for role in ROLES},
        entropy=tables["entropy"][0],
        distances=tuple(distances.tolist()),
        texts=len(given),
        tokens=sum(len(row.tokens) for row in given),
    )


heads = head_roles  # as the command is called
