"""Roles that a head may play, each as a set of (query, key) pairs, and how much of a head's attention falls on them.

A role's score is the mean attention that goes to its keys, over the queries that have such a key and another one to
choose from. Its baseline is what a head that looks everywhere alike would score, under the same mask.

    previous    the token before                 next        the token behind
    itself      the token itself                 first       the first token (a sink)
    separator   special tokens, but the first    same        other places of the same token
    rare        the rarest token of the row      position    one fixed distance, none of the above
    local       at most LOCAL tokens away        uniform     everywhere alike: entropy over the largest possible
    induction   in a sequence that is repeated: the token that came after this one the first time

Over an image, `local` goes by rows and columns, and words have no part. Cross-attention looks at another text: it has
no token before or behind, and `position` takes any distance.

Shapes: H heads, T queries, S keys.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.inside.heads.rows import View
from clearhead.inside.inputs import Tokens

NARROW = ("previous", "next", "itself", "first", "separator", "same", "rare", "position")
WIDE = ("local", "uniform")
ROLES = ("induction", *NARROW, *WIDE)
LOCAL = 2  # tokens, or rows and columns of patches
OFTEN = 0.5  # a fixed distance counts where this part of the queries has a key at it


def targets(view: View, counts: Counter[int], one_vocabulary: bool) -> dict[str, Tensor]:
    """For each role that fits this attention, which keys [T, S] are its keys. `counts`: how often each token occurs in all rows."""
    queries, keys = view.queries, view.keys
    cross = view.kind == "cross"
    query, key = torch.arange(len(queries))[:, None], torch.arange(len(keys))[None]
    other = torch.full((len(queries), len(keys)), True) if cross else query != key
    found = {"first": (key == 0) & other}
    if not cross:
        found |= {
            "previous": key == query - 1,
            "next": key == query + 1,
            "itself": key == query,
            "local": _near(queries),
        }
    special = torch.tensor(keys.special or [False] * len(keys))
    plain = torch.tensor([not mark for mark in queries.special] or [True] * len(queries))[:, None]
    if keys.ids:
        found["separator"] = special[None] & (key > 0) & plain & other
        if one_vocabulary or not cross:
            equal = torch.tensor(queries.ids)[:, None] == torch.tensor(keys.ids)[None]
            found["same"] = equal & other & plain
        rarest = _rarest(keys, counts)
        if rarest is not None:
            found["rare"] = (key == rarest) & other
    return found


def _near(tokens: Tokens) -> Tensor:
    """[T, T]: the keys near each query; of patches those near in both directions."""
    if tokens.ids:
        place = torch.arange(len(tokens))
        return (place[:, None] - place[None]).abs() <= LOCAL
    places = [tuple(map(int, name.split(","))) if "," in name else (-9 * LOCAL, 0) for name in tokens.labels]
    return torch.cdist(torch.tensor(places).float(), torch.tensor(places).float(), p=float("inf")) <= LOCAL


def _rarest(tokens: Tokens, counts: Counter[int]) -> int | None:
    """Where the rarest token stands; of equally rare ones that with the highest id, as vocabularies list frequent tokens first."""
    marks = tokens.special or (False,) * len(tokens)
    places = [place for place, mark in enumerate(marks) if not mark]
    return min(places, key=lambda place: (counts[tokens.ids[place]], -tokens.ids[place]), default=None)


@dataclass
class Tally:
    """Sums for one attention: of each role's attention, of its baseline, of the queries that counted."""

    heads: int
    reach: int  # the longest row's tokens
    mass: dict[str, Tensor] = field(default_factory=dict)  # H
    chance: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    queries: Counter[str] = field(default_factory=Counter)
    entropy: Tensor = field(default_factory=lambda: torch.zeros(()))  # H, bits
    looking: int = 0  # queries that may look anywhere

    def __post_init__(self) -> None:
        distances = 2 * self.reach + 1  # key minus query, from -reach to reach
        self.at, self.at_chance, self.at_queries = (
            torch.zeros(self.heads, distances),
            torch.zeros(distances),
            torch.zeros(distances),
        )

    def add(self, role: str, pattern: Tensor, allowed: Tensor, wanted: Tensor) -> None:
        """Count one role over one row: pattern [H, T, S], allowed and wanted [T, S]."""
        wanted = wanted & allowed
        choices, hits = allowed.sum(-1), wanted.sum(-1)  # T
        counted = (hits > 0) & (hits < choices)
        if counted.any():
            mass = (pattern * wanted).sum(-1)[:, counted].sum(-1)  # H
            self.mass[role] = self.mass.get(role, torch.zeros(self.heads)) + mass
            self.chance[role] += (hits / choices.clamp(min=1))[counted].sum().item()
            self.queries[role] += int(counted.sum())

    def add_spread(self, pattern: Tensor, allowed: Tensor) -> None:
        """Count entropy, and how near it is to the largest possible."""
        choices = allowed.sum(-1)  # T
        bits = -torch.xlogy(pattern, pattern).sum(-1) / torch.log(torch.tensor(2.0))  # H T
        self.entropy = self.entropy + bits[:, choices > 0].sum(-1)
        self.looking += int((choices > 0).sum())
        several = choices > 1
        if several.any():
            share = bits[:, several] / torch.log2(choices[several].float())
            self.mass["uniform"] = self.mass.get("uniform", torch.zeros(self.heads)) + share.sum(-1)
            self.queries["uniform"] += int(several.sum())
            self.chance["uniform"] += int(several.sum())

    def add_distances(self, pattern: Tensor, allowed: Tensor) -> None:
        """Count attention by distance, key minus query."""
        choices = allowed.sum(-1, keepdim=True)
        counted = allowed & (choices > 1)
        distance = (
            torch.arange(pattern.shape[2])[None] - torch.arange(pattern.shape[1])[:, None] + self.reach
        ).flatten()
        self.at.index_add_(1, distance, (pattern * counted).flatten(1))
        self.at_chance.index_add_(0, distance, (counted / choices.clamp(min=1)).flatten())
        self.at_queries.index_add_(0, distance, counted.float().flatten())

    def settle_distance(self, named: tuple[int, ...]) -> Tensor:
        """Make the best fixed distance of each head its role `position`; returns the distances [H].

        Those in `named` have a role of their own.
        """
        distances = torch.arange(-self.reach, self.reach + 1)
        usual = (
            (self.at_queries > 0)
            & (self.at_queries >= OFTEN * self.at_queries.max())
            & ~torch.isin(distances, torch.tensor(named))
        )
        if not usual.any():
            return torch.zeros(self.heads, dtype=torch.long)
        score = self.at[:, usual] / self.at_queries[usual]  # H distances
        self.mass["position"], self.queries["position"] = score.max(1).values, 1
        self.chance["position"] = (self.at_chance[usual] / self.at_queries[usual]).max().item()
        return distances[usual][score.argmax(1)]
