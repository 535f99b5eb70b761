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

Where nothing is given, the roles are measured on sentences that every machine has; for a model without a
tokenizer on random tokens, for a model of patches on random pixels. Induction has rows of its own: random
tokens, twice.

Shapes: H heads, T queries, S keys.
"""

import ast
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.core.config.kinds import FULL
from clearhead.core.masks import compose, tokens_from
from clearhead.errors import refuse
from clearhead.inside import inputs, names, results
from clearhead.run.api import Model

NARROW = ("previous", "next", "itself", "first", "separator", "same", "rare", "position")
WIDE = ("local", "uniform")
ROLES = ("induction", *NARROW, *WIDE)
LOCAL = 2  # tokens, or rows and columns of patches
OFTEN = 0.5  # a fixed distance counts where this part of the queries has a key at it
COUNT, LENGTH = 24, 24  # rows made where none are given, and tokens of a random one
SMALL = 40_000  # bytes of a module that is read for sentences
REPEATED, SHORTEST, LONGEST = 8, 4, 24  # rows for induction, and the tokens that are repeated in one


@dataclass(frozen=True)
class AttentionSample:
    """One attention over one row."""

    name: names.AttentionName
    pattern: Tensor  # H T S, float32 on the CPU
    allowed: Tensor  # T S: what the mask allows
    queries: inputs.InputTokens
    keys: inputs.InputTokens


def samples(prepared: inputs.Prepared) -> Iterator[AttentionSample]:
    """Yield every attention of the model that has a pattern, over one row."""
    kinds, found = names.kinds_of(prepared.model.config), names.patterned(prepared.model.config)
    _, seen = prepared.record(*(f"{name.part}.pattern" for name in found))
    for name in found:
        keys = prepared.tokens_of("" if name.kind == "self" else "encoder.")
        queries = keys if name.kind == "encoder" else prepared.tokens
        allowed = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if name.kind != "cross":
            spec, tokens = (
                names.spec_of(prepared.m.config, name.kind),
                tokens_from(1, len(keys), allowed.device),
            )
            kind = kinds[name] if kinds[name].chooses else FULL
            tokens = kind.describe(tokens, spec.causal, prepared.main, None)
            mask, causal = compose(tokens, tokens, causal=spec.causal, kind=kind)
            whole = allowed.tril() if causal else allowed
            allowed = whole if mask is None else mask[0, 0]
        yield AttentionSample(name, results.on_cpu(seen[f"{name.part}.pattern"][0]), allowed, queries, keys)


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
    plain = ~torch.tensor(queries.special)[:, None]
    found["separator"] = torch.tensor(keys.special)[None] & (key > 0) & plain & other
    if one_vocabulary or not cross:
        found["same"] = (torch.tensor(queries.ids)[:, None] == torch.tensor(keys.ids)[None]) & other & plain
    # Of equally rare tokens the one with the highest id, as vocabularies list frequent tokens first.
    text = [place for place, mark in enumerate(keys.special) if not mark]
    if text:
        rarest = min(text, key=lambda place: (counts[keys.ids[place]], -keys.ids[place]))
        found["rare"] = (key == rarest) & other
    return found


def _near(tokens: inputs.InputTokens) -> Tensor:
    """Return the keys near each query, [T, T]; of patches those near in both directions."""
    places: list[Any] = [(place, 0) for place in range(len(tokens))]
    if not tokens.ids:
        places = [name.split(",") if "," in name else (-9 * LOCAL, 0) for name in tokens.labels]
    where = torch.tensor([[float(row), float(column)] for row, column in places])
    return torch.cdist(where, where, p=float("inf")) <= LOCAL


class Tally:
    """Sums for one attention, over rows of up to `reach` tokens.

    Rows of a sum are the attention of its H heads, the baseline and the queries that counted.
    """

    def __init__(self, heads: int, reach: int) -> None:
        self.heads, self.reach = heads, reach
        self.sums = defaultdict[str, Tensor](lambda: torch.zeros(heads + 2, dtype=torch.float64))  # by role
        # Key minus query, from -reach to reach.
        self.by_distance = torch.zeros(heads + 2, 2 * reach + 1, dtype=torch.float64)

    def add(self, role: str, sample: AttentionSample, wanted: Tensor) -> None:
        """Count one role over one row: wanted [T, S]."""
        wanted = wanted & sample.allowed
        choices, hits = sample.allowed.sum(-1), wanted.sum(-1)  # T
        counted = (hits > 0) & (hits < choices)
        mass = (sample.pattern * wanted).sum(-1)[:, counted]  # H T
        self._add(role, mass, (hits[counted] / choices[counted]).sum())

    def _add(self, role: str, mass: Tensor, chance: Tensor) -> None:
        self.sums[role] += torch.cat([mass.sum(-1), torch.stack([chance, torch.tensor(mass.shape[1])])])

    def add_spread(self, sample: AttentionSample) -> None:
        """Count entropy, its share of the largest possible, and attention by distance, key minus query."""
        choices, bits = sample.allowed.sum(-1), results.entropy_bits(sample.pattern)  # T, H T
        self._add("entropy", bits[:, choices > 0], torch.zeros(()))
        several = choices > 1
        self._add("uniform", bits[:, several] / torch.log2(choices[several].float()), several.sum())
        counted = sample.allowed & several[:, None]
        queries, keys = (torch.arange(size) for size in counted.shape)
        distance = keys[None] - queries[:, None] + self.reach
        chance = counted / choices.clamp(min=1)[:, None]
        rows = torch.cat([sample.pattern * counted, chance[None], counted[None]])
        self.by_distance.index_add_(1, distance.flatten(), rows.flatten(1).double())

    def settle_distance(self, named: tuple[int, ...]) -> Tensor:
        """Make the best fixed distance of each head its role `position`, and return the distances [H].

        Those in `named` have a role of their own.
        """
        distances, queries = torch.arange(-self.reach, self.reach + 1), self.by_distance[-1]
        often = (queries > 0) & (queries >= OFTEN * queries.max())
        usual = often & ~torch.isin(distances, torch.tensor(named))
        if not usual.any():
            return torch.zeros(self.heads, dtype=torch.long)
        shares = self.by_distance[:, usual] / queries[usual]  # H + 2 distances
        self.sums["position"] = shares.max(1).values
        return distances[usual][shares[: self.heads].argmax(1)]

    def score(self, role: str) -> Tensor:
        """Return each head's mean attention to a role's keys, and the baseline: [2, H]; NaN: no such key."""
        shares = self.sums[role] / self.sums[role][-1]
        return torch.stack([shares[:-2], shares[-2].expand(self.heads)]).float()


# What roles are measured on ---------------------------------------------------------------------------------


def rows(m: Model, given: Sequence[Any] | None, seed: int) -> list[inputs.Prepared]:
    """Return texts, ids or images, ready to be read; those made here where none are given."""
    given = [given] if isinstance(given, str) else given
    refuse(given is not None and not len(given), "there is no text to look at: give at least one")
    first, draw = m.config.stacks[0], torch.Generator().manual_seed(seed)
    if given is None and first.input == "tokens" and m.tokenizer is None:
        ids = torch.randint(first.vocab_size, (COUNT, min(LENGTH, m.max_length)), generator=draw)
        return [_marked(_with_target(m, row, row)) for row in ids.tolist()]
    if given is None and first.input == "patches":
        shape = (m.config.n_channels, *(m.config.image_size or ()))
        given = [torch.randn(shape, generator=draw) for _ in range(COUNT)]
    return [
        _marked(inputs.prepare(m, one)) for one in (library_sentences()[:COUNT] if given is None else given)
    ]


def _with_target(m: Model, ids: list[int], target: list[int]) -> inputs.Prepared:
    """Return ids for either stack; the decoder of two reads its start and then `target`."""
    if m.config.family != "encoder-decoder":
        return inputs.prepare(m, ids)
    written = [token % m.config.vocab_size for token in [*m.start_ids, *target]]
    return inputs.prepare(m, ids, target=written[: m.config.max_positions])


def _marked(prepared: inputs.Prepared) -> inputs.Prepared:
    """Mark special tokens where ids alone were given: those with a role of their own in the vocabulary."""
    known = set(prepared.m.special.values()) - {prepared.m.special.get("unk")}

    def mark(tokens: inputs.InputTokens) -> inputs.InputTokens:
        return replace(tokens, special=tokens.special or tuple(token in known for token in tokens.ids))

    return replace(
        prepared,
        tokens=mark(prepared.tokens),
        source_tokens=None if prepared.source_tokens is None else mark(prepared.source_tokens),
    )


def repeated_rows(m: Model, seed: int) -> Iterator[tuple[inputs.Prepared, dict[str, int], int]]:
    """Yield rows of random tokens, twice, with the start of the first copy by kind, and a copy's length.

    Tokens of a copy differ from each other, and copies from row to row differ in length, so that neither a
    look back at a fixed distance nor one at a fixed place finds what it is after. Empty where the model has
    no room for them.
    """
    specs = m.config.stacks
    if any(spec.input != "tokens" for spec in specs):
        return
    before, after = _frame(m)
    special = {*m.special.values(), *before, *after}
    size = min(spec.vocab_size for spec in specs)
    pool = torch.tensor([token for token in range(size) if token not in special])
    longest = min(LONGEST, (m.max_length - len(before) - len(after)) // 2, len(pool))
    starts = {"self": len(before)}
    if m.config.family == "encoder-decoder":
        starts = {"encoder": len(before), "self": len(m.start_ids)}
        longest = min(longest, (m.config.max_positions - len(m.start_ids)) // 2)
    if longest < SHORTEST:
        return
    draw = torch.Generator().manual_seed(seed)
    for length in torch.linspace(max(SHORTEST, longest // 2), longest, REPEATED).round().int().tolist():
        copy = pool[torch.randperm(len(pool), generator=draw)[:length]].tolist()
        yield _with_target(m, [*before, *copy, *copy, *after], [*copy, *copy]), starts, length


def _frame(m: Model) -> tuple[list[int], list[int]]:
    """Return what the tokenizer puts before a text and behind it."""
    if m.tokenizer is None:
        return [], []
    encoding = m.framed("a")
    text = [place for place, special in enumerate(encoding.special_tokens_mask) if not special]
    text = text or [len(encoding.ids)]
    before, after = encoding.ids[: text[0]], encoding.ids[text[-1] + 1 :]
    return before, [token for token in after if m.config.family != "decoder" or token not in m.stops]


@cache
def library_sentences() -> tuple[str, ...]:
    """Return English sentences that every machine has: from the docstrings of Python's standard library."""
    return tuple(_sentences())


def _sentences() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            text = path.read_text(encoding="utf-8") if path.stat().st_size < SMALL else ""
            words = ast.get_docstring(ast.parse(text)) or ""
        except (SyntaxError, ValueError, OSError):
            continue
        sentences = re.findall(r"(?<![^\s])[A-Z][a-z ][^.:;`*_<>|\n]*(?:\n[^.:;`*_<>|\n]+)*\.(?=\s|$)", words)
        yield from [" ".join(sentence.split()) for sentence in sentences if 50 <= len(sentence) <= 200][:2]
