"""Head roles: what each attention head does, measured on texts, next to the score of a uniform head.

    result = head_roles(m)                      # or head_roles(m, ["The cat sat on the mat.", ...])
    result.role("3.2"), result.named("previous") # "first", [AttentionHead, ...]
    result.grid("induction")                    # [L, H], NaN where a head is pruned or the role cannot be

A role is a set of (query, key) pairs. Its score is the mean attention that goes to its keys, over the queries
that have such a key and another one to choose from. Its baseline is the score of uniform attention under the
same mask. A role is named only where it takes a clear part of the attention that a uniform head would give
elsewhere; a head with no such role is "mixed".

    previous    the token before                 next        the token after
    itself      the token itself                 first       the first token (a sink)
    separator   special tokens, but the first    same        other positions of the same token
    rare        the rarest token of the row      position    one fixed distance, none of the above
    local       at most LOCAL tokens away        uniform     entropy, over the largest possible
    induction   in a sequence that is repeated: the token that came after this one the first time

Over an image, `local` goes by rows and columns, and words have no part. Cross-attention looks at another
text: it has no token before or after, and `position` takes any distance. Induction has rows of its own:
random tokens, twice.

Shapes: H heads, T queries, S keys.
"""

import ast
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.config.kinds import FULL
from clearhead.core.masks import compose, tokens_from
from clearhead.errors import refuse, refuse_unknown
from clearhead.inside import inputs, names, results
from clearhead.inside.names import AttentionHead, heads_in, patterned
from clearhead.run.api import Model

NARROW = ("previous", "next", "itself", "first", "separator", "same", "rare", "position")
WIDE = ("local", "uniform")
ROLES = ("induction", *NARROW, *WIDE)
LOCAL = 2  # tokens, or rows and columns of patches
OFTEN = 0.5  # a fixed distance counts where this part of the queries has a key at it
COUNT, LENGTH = 24, 24  # rows where none are given, and tokens of a random one
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
    kinds, attentions = names.kinds_of(prepared.model.config), names.patterned(prepared.model.config)
    _, seen = prepared.record(*(f"{name.part}.pattern" for name in attentions))
    for name in attentions:
        queries, keys = prepared.queries_and_keys(name.kind)
        allowed = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if name.kind != "cross":
            spec = names.spec_of(prepared.m.config, name.kind)
            kind = kinds[name] if kinds[name].masked else FULL
            own = tokens_from(1, len(keys), allowed.device)
            tokens = kind.describe(own, spec.causal, prepared.main, None)
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
    keys_of = {"first": (key == 0) & other}
    if not cross:
        keys_of |= {
            "previous": key == query - 1,
            "next": key == query + 1,
            "itself": key == query,
            "local": _near(queries),
        }
    if not keys.ids:
        return keys_of
    plain = ~torch.tensor(queries.special)[:, None]
    keys_of["separator"] = torch.tensor(keys.special)[None] & (key > 0) & plain & other
    if one_vocabulary or not cross:
        keys_of["same"] = (torch.tensor(queries.ids)[:, None] == torch.tensor(keys.ids)[None]) & other & plain
    # Of equally rare tokens the one with the highest id, as vocabularies list frequent tokens first.
    text = [place for place, mark in enumerate(keys.special) if not mark]
    if text:
        rarest = min(text, key=lambda place: (counts[keys.ids[place]], -keys.ids[place]))
        keys_of["rare"] = (key == rarest) & other
    return keys_of


def _near(tokens: inputs.InputTokens) -> Tensor:
    """Return the keys near each query, [T, T]; of patches those near in both directions."""
    corners: list[Any] = [(place, 0) for place in range(len(tokens))]
    if not tokens.ids:
        corners = [name.split(",") if "," in name else (-9 * LOCAL, 0) for name in tokens.labels]
    where = torch.tensor([[float(row), float(column)] for row, column in corners])
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
    """Return texts, ids or images, prepared; None: library sentences, or random rows."""
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
        _marked(inputs.prepare(m, text)) for text in (library_sentences()[:COUNT] if given is None else given)
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
    """Return what the tokenizer puts before a text and after it."""
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
    library: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            text = path.read_text(encoding="utf-8") if path.stat().st_size < SMALL else ""
            words = ast.get_docstring(ast.parse(text)) or ""
        except (SyntaxError, ValueError, OSError):
            continue
        sentences = re.findall(r"(?<![^\s])[A-Z][a-z ][^.:;`*_<>|\n]*(?:\n[^.:;`*_<>|\n]+)*\.(?=\s|$)", words)
        library += [" ".join(sentence.split()) for sentence in sentences if 50 <= len(sentence) <= 200][:2]
    return tuple(library)


# The roles of every head ------------------------------------------------------------------------------------


MIXED = "mixed"
CLEAR = 0.4  # of the attention that a uniform head gives elsewhere: from here on a role is named
EVEN = 0.9  # of the largest entropy: from here on a head is uniform


@dataclass(frozen=True)
class HeadRoles(results.Result):
    """The scores of every head; N heads."""

    json_names = ("texts", "tokens", "table as heads")

    heads: tuple[AttentionHead, ...]
    scores: dict[str, results.Floats]  # by role: [N], from 0 to 1; NaN where the role cannot be
    baselines: dict[str, results.Floats]  # by role: [N], what a uniform head would score
    entropy: results.Floats  # [N], bits, the mean over queries
    distances: tuple[int, ...]  # of the role `position`: key minus query, N of them
    texts: int  # rows that were looked at
    tokens: int

    def lift(self, role: str) -> results.Floats:
        """Return how far each head is from uniform, [N]: 0 uniform, 1 all attention on the role's keys."""
        refuse_unknown("role", role, self.scores)
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
        names = {str(head_name): role for head_name, role in zip(self.heads, self.roles)}
        refuse_unknown("head", str(head), names)
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

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each head; a score that cannot be is NaN."""
        return [
            {
                "head": str(head),
                "role": self.roles[at],
                "scores": {role: round(float(self.scores[role][at]), 6) for role in ROLES},
                "baselines": {role: round(float(self.baselines[role][at]), 6) for role in ROLES},
                "entropy": round(float(self.entropy[at]), 6),
                "distance": self.distances[at],
            }
            for at, head in enumerate(self.heads)
        ]


def head_roles(m: inputs.AnyModel, texts: Sequence[Any] | None = None, seed: int = 0) -> HeadRoles:
    """Measure every role on every head.

    Args:
        m: what `load` gave, or a bare model, which takes ids or pixels.
        texts: texts, lists of token ids, or images; None: sentences from the standard library's docstrings,
            random tokens for a model without a tokenizer, random pixels for a model of patches.
        seed: of what is random: those rows, and the repeated sequences that show induction.
    """
    m = inputs.as_model(m)
    config, prepared_rows = m.config, rows(m, texts, seed)
    every = [
        tokens for row in prepared_rows for tokens in (row.tokens, row.source_tokens) if tokens is not None
    ]
    counts = Counter(token for tokens in every for token in tokens.ids)
    one_vocabulary = config.source_vocab_size in (None, config.vocab_size) and config.share_embeddings
    tallies = {name: Tally(name.n_heads, max(map(len, every))) for name in patterned(config)}
    for row in prepared_rows:
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
        texts=len(prepared_rows),
        tokens=sum(len(row.tokens) for row in prepared_rows),
    )


heads = head_roles  # as the command is called
