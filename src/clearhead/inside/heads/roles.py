"""Roles that a head may play, as sets of (query, key) pairs, and how much of its attention falls on each.

A role's score is the mean attention that goes to its keys, over the queries that have such a key and another
one to choose from. Its baseline is what a head that looks everywhere alike would score, under the same mask.

    previous    the token before                 next        the token behind
    itself      the token itself                 first       the first token (a sink)
    separator   special tokens, but the first    same        other places of the same token
    rare        the rarest token of the row      position    one fixed distance, none of the above
    local       at most LOCAL tokens away        uniform     entropy, over the largest possible
    induction   in a sequence that is repeated: the token that came after this one the first time

Over an image, `local` goes by rows and columns, and words have no part. Cross-attention looks at another
text: it has no token before or behind, and `position` takes any distance.

Shapes: H heads, T queries, S keys.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.inside.heads.rows import AttentionSample
from clearhead.inside.inputs import InputTokens
from clearhead.inside.results import entropy_bits

NARROW = ("previous", "next", "itself", "first", "separator", "same", "rare", "position")
WIDE = ("local", "uniform")
ROLES = ("induction", *NARROW, *WIDE)
LOCAL = 2  # tokens, or rows and columns of patches
OFTEN = 0.5  # a fixed distance counts where this part of the queries has a key at it


def targets(sample: AttentionSample, counts: Counter[int], one_vocabulary: bool) -> dict[str, Tensor]:
    """Return which keys [T, S] are a role's own, for each role that fits this attention.

    `counts` says how often each token occurs in all rows.
    """
    queries, keys = sample.queries, sample.keys
    cross = sample.name.kind == "cross"
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
    if not keys.ids:
        return found
    special = torch.tensor(keys.special)
    plain = ~torch.tensor(queries.special)[:, None]
    found["separator"] = special[None] & (key > 0) & plain & other
    if one_vocabulary or not cross:
        found["same"] = (torch.tensor(queries.ids)[:, None] == torch.tensor(keys.ids)[None]) & other & plain
    # Of equally rare tokens the one with the highest id, as vocabularies list frequent tokens first.
    text = [place for place, mark in enumerate(keys.special) if not mark]
    if text:
        rarest = min(text, key=lambda place: (counts[keys.ids[place]], -keys.ids[place]))
        found["rare"] = (key == rarest) & other
    return found


def _near(tokens: InputTokens) -> Tensor:
    """Return the keys near each query, [T, T]; of patches those near in both directions."""
    if tokens.ids:
        place = torch.arange(len(tokens))
        return (place[:, None] - place[None]).abs() <= LOCAL
    places = [tuple(map(int, name.split(","))) if "," in name else (-9 * LOCAL, 0) for name in tokens.labels]
    return torch.cdist(torch.tensor(places).float(), torch.tensor(places).float(), p=float("inf")) <= LOCAL


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
        self.at = torch.zeros(self.heads, distances)
        self.at_chance, self.at_queries = torch.zeros(distances), torch.zeros(distances)

    def add(self, role: str, sample: AttentionSample, wanted: Tensor) -> None:
        """Count one role over one row: wanted [T, S]."""
        wanted = wanted & sample.allowed
        choices, hits = sample.allowed.sum(-1), wanted.sum(-1)  # T
        counted = (hits > 0) & (hits < choices)
        if counted.any():
            mass = (sample.pattern * wanted).sum(-1)[:, counted]  # H T
            self._add(role, mass, (hits / choices.clamp(min=1))[counted].sum().item())

    def _add(self, role: str, mass: Tensor, chance: float) -> None:
        self.mass[role] = self.mass.get(role, torch.zeros(self.heads)) + mass.sum(-1)
        self.queries[role] += mass.shape[1]
        self.chance[role] += chance

    def add_spread(self, sample: AttentionSample) -> None:
        """Count entropy, its share of the largest possible, and attention by distance, key minus query."""
        pattern, allowed = sample.pattern, sample.allowed
        choices = allowed.sum(-1)  # T
        bits = entropy_bits(pattern)  # H T
        self.entropy = self.entropy + bits[:, choices > 0].sum(-1)
        self.looking += int((choices > 0).sum())
        several = choices > 1
        if several.any():
            share = bits[:, several] / torch.log2(choices[several].float())
            self._add("uniform", share, int(several.sum()))
        counted = allowed & several[:, None]
        queries, keys = (torch.arange(size) for size in allowed.shape)
        distance = keys[None] - queries[:, None] + self.reach
        self.at.index_add_(1, distance.flatten(), (pattern * counted).flatten(1))
        chance = counted / choices.clamp(min=1)[:, None]
        self.at_chance.index_add_(0, distance.flatten(), chance.flatten())
        self.at_queries.index_add_(0, distance.flatten(), counted.float().flatten())

    def settle_distance(self, named: tuple[int, ...]) -> Tensor:
        """Make the best fixed distance of each head its role `position`, and return the distances [H].

        Those in `named` have a role of their own.
        """
        distances = torch.arange(-self.reach, self.reach + 1)
        often = (self.at_queries > 0) & (self.at_queries >= OFTEN * self.at_queries.max())
        usual = often & ~torch.isin(distances, torch.tensor(named))
        if not usual.any():
            return torch.zeros(self.heads, dtype=torch.long)
        score = self.at[:, usual] / self.at_queries[usual]  # H distances
        self.mass["position"], self.queries["position"] = score.max(1).values, 1
        self.chance["position"] = (self.at_chance[usual] / self.at_queries[usual]).max().item()
        return distances[usual][score.argmax(1)]

    def score(self, role: str) -> tuple[Tensor, Tensor]:
        """Return each head's mean attention to a role's keys and the baseline, [H] each; NaN: no such key."""
        count = self.queries[role] or float("nan")
        mass = self.mass.get(role, torch.zeros(self.heads))
        return mass / count, torch.full((self.heads,), self.chance[role] / count)
