"""Which tokens an answer came from: by path through every head, by occlusion, by gradient x input.

    result = paths(m, "The cat sat on the", against=" floor")
    result.direct["3"]                     # [H, R, S] of layer 3: what each head brings, by source token
    result.sources, result.rest             # [T] by source token; what came by no head
    result.strongest(5)                    # edges, the largest first
    looks(m, "The cat sat on the", "3.1", reader=4, source=1).terms   # what made it look there
    reads(m, "The cat sat on the", layer=2, reader=4).edges           # what a feed-forward read
    result = occlusion(m, "a dull film", token="bad")
    result.units, result.dropped            # "a", "dull", "film"; what the logit loses without each
    result.gradient                        # a first-order estimate of the same, from one backward pass

A head's output at a reader is its pattern times its values. With every norm held at its actual size the logit
is linear in that output, so pattern x value x output, read on the logit, is one number for each source token.
These numbers and the terms of no head add up to the logit; see `lens.contributions`.

Why a head looks where it looks is in its scores: the log-odds of one weight are its score less those of all
other keys. With the norms held a score is bilinear: a sum over every part that made the query and every part
that made the key, which is what `looks` gives.

Occlusion puts the mask token in the place of a word's tokens, or the unknown or padding token where the model
has no mask; for a patch, the image's mean colour.

Shapes: H heads, T readers, S sources, R readers that the head of the model reads, E head width, U units.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from clearhead.errors import InputError, refuse
from clearhead.hub.tokens.text import labels
from clearhead.inside import held, inputs, names, results
from clearhead.inside.alignments import positions as token_positions
from clearhead.inside.features.dictionary import Dictionary
from clearhead.inside.interventions import patched_scores
from clearhead.inside.logit_attribution import (
    AddedPart,
    Compared,
    LogitQuery,
    Term,
    exact,
    parts_of,
    terms_of,
)
from clearhead.variants.contexts import Recording, record, tap_names

LOOKED_THROUGH = 300  # of the largest edges, where one that moved something is looked for


@dataclass(frozen=True)
class Edge:
    """What one part carried from one token to another; a feed-forward and an embedding stay at theirs."""

    part: str  # a head: "3.2", "cross.1.0", "encoder.0.1"; or "feedforward 3", "embedding"
    reader: int
    source: int
    value: float


@dataclass(frozen=True)
class Paths(results.Result, Compared):
    """A logit, taken apart by source token."""

    columns: tuple[str, ...]
    column: int  # where it is read
    choice: str
    against: str | None  # None: the logit is less the mean of all, where it is `centred`
    centred: bool
    probability: float | None
    tokens: tuple[str, ...]  # T
    rows: tuple[int, ...]  # R readers that the head of the model reads
    direct: dict[str, Tensor]  # [H, R, S] by attention: "3", "cross.3"
    # What no head carried: embeddings, feed-forwards, biases, layers without a pattern.
    terms: tuple[Term, ...]
    logit: float

    @cached_property
    def sources(self) -> Tensor:
        """What came from each token of the stack that feeds the head, by its own heads: [T]."""
        own = [table.sum((0, 1)) for name, table in self.direct.items() if "." not in name]
        return torch.stack(own).sum(0) if own else torch.zeros(len(self.tokens))

    @cached_property
    def memory(self) -> Tensor | None:
        """What came from each token of the encoder, by cross-attention: [S]; None without one."""
        own = [table.sum((0, 1)) for name, table in self.direct.items() if name.startswith("cross.")]
        return torch.stack(own).sum(0) if own else None

    @property
    def rest(self) -> float:
        """What came by no head."""
        return math.fsum(term.value for term in self.terms)

    @property
    def total(self) -> float:
        """The sum of everything: `logit`, except for rounding."""
        return math.fsum((self.rest, *(float(table.sum()) for table in self.direct.values())))

    def strongest(self, count: int) -> list[Edge]:
        """Return the largest edges of heads, of either sign."""
        return _largest(
            (
                Edge(f"{name}.{head}", self.rows[row], source, value)
                for name, table in self.direct.items()
                for head, row, source, value in _cells(table, count)
            ),
            count,
        )

    def leading(self) -> Edge | None:
        """Return what moved most to the choice: the largest edge for it that comes from another token.

        Where there is none, the largest for it; None where no head speaks for it.
        """
        positive = [edge for edge in self.strongest(LOOKED_THROUGH) if edge.value > 0]
        moved = (
            edge for edge in positive if "." in edge.part.rpartition(".")[0] or edge.source != edge.reader
        )
        return next(moved, positive[0] if positive else None)


@dataclass(frozen=True)
class ScoreTerm(results.Result):
    """What the query that one part makes and the key that another makes give together."""

    query: str  # "embedding", a head, "feedforward 3", "feature 3.17" with "error 3", "bias"
    key: str
    value: float


@dataclass(frozen=True)
class Looks(results.Result):
    """The score of a head from one token to another, as a sum over what made the query and the key."""

    head: str
    reader: int
    source: int
    score: float  # what the softmax gets = terms + rest + position
    position: float  # what the distance adds by itself
    terms: tuple[ScoreTerm, ...]  # the largest first
    rest: float  # all other terms
    # By one side alone: parts at the reader make the query, parts at the source the key.
    edges: tuple[Edge, ...]
    # Why it is no such sum; edges are then log-odds of the weight by gradient × activation, first order.
    inexact: str | None = None


def paths(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    token: str | int | None = None,
    position: int = -1,
    target: inputs.Target = None,
    against: str | int | None = None,
    pair: str | None = None,
) -> Paths:
    """Return what each head carried from each token, for one logit; the arguments are `contributions`'."""
    config = inputs.as_model(m).config
    own = {
        str(attention): attention
        for attention in names.patterned(config, required=False)
        if attention.kind != "encoder"
    }
    taps = [f"{attention.part}.{tap}" for attention in own.values() for tap in ("pattern", "v")]
    query = LogitQuery.of(m, given, token, position, target, against, pair, taps)
    direct: dict[str, Tensor] = {}
    others: list[AddedPart] = []
    for part in parts_of(query):
        name = part.terms[0].name.rpartition(".")[0]
        if part.terms[0].head is None or name not in own:
            others.append(part)
            continue
        direct[name] = _carried(query.seen, own[name], part.slope, query.read.rows)
    return Paths(
        columns=query.choices.columns,
        column=query.column,
        choice=query.name,
        against=query.against,
        centred=query.centred,
        probability=query.probability,
        tokens=query.prepared.tokens.labels,
        rows=tuple(query.read.rows.tolist()),
        direct=direct,
        terms=terms_of(query, others),
        logit=query.logit,
    )


def looks(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    head: str,
    reader: int,
    source: int,
    target: inputs.Target = None,
    pair: str | None = None,
    count: int = 20,
    features: Sequence[str | Path | Dictionary] = (),
) -> Looks:
    """Return what made a head look from one token at another: its score as a sum over pairs of parts.

    The arguments are `prepare`'s, and a head by its name with its reader and source by their positions;
    `count` is how many terms and edges are kept, the largest first. `features`: folders of sparse
    dictionaries, or dictionaries, by which feed-forwards are taken apart.
    """
    prepared = inputs.prepare(m, given, target, pair)
    (looking,) = names.find_heads(prepared.m.config, [head])
    known = names.patterned(prepared.m.config, required=False)
    refuse(
        looking.part not in {attention.part for attention in known},
        f"head {head} has no attention pattern to look into",
    )
    refuse(
        f"{looking.part}.scores" not in tap_names(prepared.m.config),
        f"head {head} has no scores, by which it would look at one token and not at another: its shares come "
        "from features",
    )
    queries, keys = prepared.queries_and_keys(looking.kind)
    _check_place(reader, len(queries), "reader")
    _check_place(source, len(keys), "source")
    try:
        held.refuse_bent(prepared.model)
        held.refuse_unscored(prepared, looking.part)
    except InputError as why:
        edges = _odds_by_slope(prepared, looking, reader, source, count)
        return Looks(str(looking), reader, source, math.nan, math.nan, (), math.nan, tuple(edges), str(why))
    dictionaries = held.dictionaries_of(prepared.model, features)
    return _score_of(held.kept_cut(prepared), looking, reader, source, count, dictionaries)


def _score_of(
    cut: held.CutPass,
    looking: names.AttentionHead,
    reader: int,
    source: int,
    count: int,
    dictionaries: Mapping[str, Dictionary],
) -> Looks:
    """Return the score of one query and key as a sum over pairs of parts."""
    scores, number = held.Scores.of(cut, looking.part), looking.number
    q, k, total = scores.q[number, reader], scores.k[number, source], scores.total[number, reader, source]
    factor = scores.factor if isinstance(scores.factor, float) else scores.factor[number, reader, source]
    group = number * cut[f"{looking.part}.k"].shape[1] // len(scores.q)
    sides, edges = [], list[Edge]()
    for tap, head, place, own, other in (("q", number, reader, q, k), ("k", group, source, k, q)):
        x = cut[f"{looking.part}.{tap}"]
        back = torch.zeros(len(own), *x.shape[1:], dtype=x.dtype, device=x.device)
        back[:, head, place] = torch.eye(len(own)).to(x)
        before = cut.slopes([x], [back[:, None]], cut.before(f"{looking.part}.out"))
        slopes = {name: slope[:, place] for name, slope in before.items()}  # E D
        parts: dict[str, Tensor] = {}  # by part, E: what it makes of the query, or of the key
        for name, slope in slopes.items():
            if not slope.any():
                continue
            short = name.replace("blocks.", "").replace(".feedforward.out", "")
            if not name.endswith(held.HEADS):
                part = name if name.endswith("embedding") else f"feedforward {short}"
                vectors = {part: cut.leaves[name][0, place].detach()}
                if name in dictionaries:
                    vectors = _features_of(cut, dictionaries[name], place, short)
                projected = {each: slope @ vector for each, vector in vectors.items()}
                parts |= projected
                edges += [
                    Edge(each, place, place, float(factor * (x @ other))) for each, x in projected.items()
                ]
                continue
            attention = next(
                each for each in names.patterned(cut.prepared.m.config) if f"{each.part}.out" == name
            )
            weight, z = cut.weight_out(name), cut[f"{attention.part}.z"][0, :, place].detach()
            added = torch.einsum("he,hed,fd->hf", z, weight, slope)
            parts |= {f"{attention}.{each}": x for each, x in enumerate(added)}
            slope_z = torch.einsum("f,fd,hed->he", factor * other, slope, weight)[:, None]
            table = _carried(cut.seen, attention, slope_z, torch.tensor([place]), lambda x: x.detach())
            edges += [
                Edge(f"{attention}.{each}", place, column, value)
                for each, _, column, value in _cells(table, count)
            ]
        parts["bias"] = own - sum(parts.values(), torch.zeros_like(own))
        sides.append(parts)
    table = factor * (torch.stack(list(sides[0].values())) @ torch.stack(list(sides[1].values())).T)
    cells = [(list(sides[0])[row], list(sides[1])[column], value)
             for _, row, column, value in _cells(table[None], count)]  # fmt: skip
    position = float(total) - float(factor * (q @ k))
    terms = tuple(ScoreTerm(*cell) for cell in cells if cell[2])
    rest = float(table.sum()) - math.fsum(term.value for term in terms)
    kept = _largest((edge for edge in edges if edge.value), count)
    return Looks(str(looking), reader, source, float(total), position, terms, rest, tuple(kept), None)


def _features_of(cut: held.CutPass, own: Dictionary, place: int, layer: str) -> dict[str, Tensor]:
    """Return what each feature of a feed-forward adds at one token, and what they leave over: [D] each."""
    whole = cut.leaves[own.out][0, place].detach()
    with torch.no_grad():
        active = own.encode(cut[own.at][0, place : place + 1].detach().double())[0]
        numbers = active.nonzero()[:, 0].tolist()
        added = {f"feature {layer}.{n}": (active[n] * own.W_dec[n]).to(whole) for n in numbers}
    return {**added, f"error {layer}": whole - sum(added.values(), torch.zeros_like(whole))}


def _odds_by_slope(
    prepared: inputs.Prepared, looking: names.AttentionHead, reader: int, source: int, count: int
) -> list[Edge]:
    """Return what moved the log-odds of a weight: the slope times what earlier parts carried."""
    config = prepared.m.config
    known = names.patterned(config, required=False)
    stacks = {spec.prefix: spec for spec in config.stacks}
    others = [
        f"{prefix}{tap}"
        for prefix, spec in stacks.items()
        for tap in ("embedding", *(f"blocks.{layer}.feedforward.out" for layer in range(spec.n_layers)))
    ]
    taps = [f"{attention.part}.{tap}" for attention in known for tap in ("z", "pattern", "v")]
    seen = prepared.record_graph(f"{looking.part}.scores", *taps, *others)
    with torch.enable_grad():
        scores = seen[f"{looking.part}.scores"][0, looking.number]
        rest = scores[reader].index_fill(0, torch.tensor([source], device=scores.device), -math.inf)
        odds = scores[reader, source] - rest.logsumexp(0)
        wanted = [
            name
            for name, x in seen.items()
            if name.endswith((".z", "embedding", "feedforward.out")) and x.requires_grad
        ]
        slopes = torch.autograd.grad(odds, [seen[name] for name in wanted], None, True, allow_unused=True)
    slope = {name: results.on_cpu(x[0]) for name, x in zip(wanted, slopes) if x is not None}
    edges: list[Edge] = []
    for attention in known:
        if f"{attention.part}.z" in slope and slope[f"{attention.part}.z"].any():
            table = _carried(seen, attention, slope[f"{attention.part}.z"], to=results.on_cpu)
            cells = _cells(table, count)
            edges += [Edge(f"{attention}.{number}", row, place, value) for number, row, place, value in cells]
    for name in others:
        if name in slope:
            part = name.replace("blocks.", "").replace(".feedforward.out", "")
            part = name if name.endswith("embedding") else f"feedforward {part}"
            values = (results.on_cpu(seen[name][0]) * slope[name]).sum(-1).tolist()
            edges += [Edge(part, place, place, value) for place, value in enumerate(values)]
    return _largest((edge for edge in edges if edge.value), count)


@dataclass(frozen=True)
class ReadParts(results.Result):
    """What a feed-forward reads at one token, as a sum over the parts that made it."""

    layer: int
    reader: int
    # Each with its share of the vector, the largest first; a part that points against it has a negative one.
    edges: tuple[Edge, ...]
    rest: float  # the share of all others, and of biases: with `edges` it adds up to 1


def reads(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    layer: int,
    reader: int,
    target: inputs.Target = None,
    pair: str | None = None,
    count: int = 20,
) -> ReadParts:
    """Return which earlier parts made the vector that a feed-forward reads at one token.

    A part's share is its component along the vector, with the norm held: all shares add up to 1. Heads are
    listed by source token. The arguments are `prepare`'s, and a layer of the stack that feeds the head.
    """
    prepared = inputs.prepare(m, given, target, pair)
    _check_place(reader, len(prepared.tokens), "reader")
    cut, name = held.kept_cut(prepared), f"blocks.{layer}.feedforward"
    refuse(f"{name}.in" not in cut.seen, f"layer {layer} of this model has no feed-forward that can be read")
    x = cut[f"{name}.in"]
    back = torch.zeros_like(x)
    back[0, reader] = x[0, reader].detach() / x[0, reader].detach().square().sum().clamp(min=1e-30)
    edges: list[Edge] = []
    for tap, slopes in cut.slopes([x], [back], cut.before(f"{name}.out")).items():
        slope = slopes.reshape(-1, slopes.shape[-1])[reader]  # D
        if not slope.any():
            continue
        if not tap.endswith(held.HEADS):
            short = tap.replace("blocks.", "").replace(".feedforward.out", "")
            part = tap if tap.endswith("embedding") else f"feedforward {short}"
            edges.append(Edge(part, reader, reader, float(slope @ cut.leaves[tap][0, reader].detach())))
            continue
        known = names.patterned(prepared.m.config)
        attention = next((each for each in known if f"{each.part}.out" == tap), None)
        if attention is not None:
            slope_z = (cut.weight_out(tap) @ slope)[:, None]  # H 1 E
            table = _carried(cut.seen, attention, slope_z, torch.tensor([reader]), lambda x: x.detach())
            edges += [Edge(f"{attention}.{head}", reader, source, value)
                      for head, _, source, value in _cells(table, count)]  # fmt: skip
    kept = _largest(edges, count)
    return ReadParts(layer, reader, tuple(kept), 1 - math.fsum(edge.value for edge in kept))


def _check_place(place: int, count: int, what: str) -> None:
    refuse(not 0 <= place < count, f"there is no {what} {place}: tokens go from 0 to {count - 1}")


def _cells(table: Tensor, count: int) -> list[tuple[int, int, int, float]]:
    """Return the largest cells of a table of either sign: three indices and the value."""
    best = table.abs().flatten().topk(min(count, table.numel())).indices
    _, rows, columns = table.shape
    indices = (best // (rows * columns), best // columns % rows, best % columns)
    return list(zip(*(place.tolist() for place in indices), table.flatten()[best].tolist()))


def _largest(edges: Iterable[Edge], count: int) -> list[Edge]:
    return sorted(edges, key=lambda edge: -abs(edge.value))[:count]


def _carried(
    seen: Recording,
    attention: names.AttentionName,
    slope: Tensor,
    rows: Tensor | None = None,
    to: Callable[[Tensor], Tensor] = exact,
) -> Tensor:
    """Return pattern x value x slope, slopes [H, R, E] -> [H, R, S].

    A gate after the values scales what every source gave.
    """
    z, pattern, v = (seen[f"{attention.part}.{tap}"][0] for tap in ("z", "pattern", "v"))
    if rows is not None:
        pattern, z = pattern[:, rows], z[:, rows]
    z, pattern, v = to(z), to(pattern), to(v)
    v = v.repeat_interleave(len(pattern) // len(v), 0)  # H S E
    mixed = pattern @ v
    gate = torch.where(mixed == 0, 0.0, z / torch.where(mixed == 0, 1.0, mixed))
    return pattern * ((slope * gate) @ v.transpose(1, 2))


# Occlusion --------------------------------------------------------------------------------------------------


STANDS_FOR_NOTHING = ("mask", "unk", "pad")


@dataclass(frozen=True)
class Occlusion(results.Result):
    """What each part of an input is worth to one logit."""

    units: tuple[str, ...]  # words, single tokens where only ids are known, or patches
    places: tuple[tuple[int, ...], ...]  # the tokens of each
    column: int
    choice: str
    logit: float  # less the mean of all, where a softmax follows
    without: str  # what stands in their place
    dropped: Tensor  # [U] the logit less the one without the unit
    gradient: Tensor  # [U] slope x input, added up over the unit's tokens


def occlusion(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    token: str | int | None = None,
    position: int = -1,
    pair: str | None = None,
) -> Occlusion:
    """Leave out each unit of an input, one at a time; `token` and `position` are as for `contributions`."""
    refuse(
        len(inputs.as_model(m).config.stacks) == 2,
        "occlusion is for a model of one stack: patch the two texts of an encoder-decoder instead",
    )
    query = LogitQuery.of(m, given, token, position, pair=pair, parts=False)
    prepared, choices, column = query.prepared, query.choices, query.column
    units = _units(prepared)
    rows, without = _left_out(prepared, [positions for _, positions in units])
    after = patched_scores(prepared, {}, [()] * len(units), column, figure=query.difference, ids=rows)  # U
    with torch.enable_grad(), record(prepared.model, "embedding", detach=False) as seen:
        logit = query.difference(choices.column_scores(prepared.run(logits="none").hidden, column)[0])
        (slope,) = torch.autograd.grad(logit, seen["embedding"])
    gradient = (slope * seen["embedding"].detach())[0].double().sum(-1).cpu()  # T
    return Occlusion(
        units=tuple(name for name, _ in units),
        places=tuple(positions for _, positions in units),
        column=column,
        choice=query.name,
        logit=query.output_logit,
        without=without,
        dropped=(query.output_logit - after.double()).float(),
        gradient=torch.stack([gradient[list(positions)].sum() for _, positions in units]).float(),
    )


Unit = tuple[str, tuple[int, ...]]


def _units(prepared: inputs.Prepared) -> list[Unit]:
    """Return words with their tokens; without a text each token by itself. Marks of the model are left in."""
    tokens = prepared.tokens
    special = tokens.special or (False,) * len(tokens)
    alone: list[Unit] = [(name, (place,)) for place, name in enumerate(tokens.labels) if not special[place]]
    if not tokens.text or not tokens.spans or (prepared.types is not None and bool(prepared.types.any())):
        return alone
    words = [(match[0], match.span()) for match in re.finditer(r"\w+|[^\w\s]", tokens.text)]
    word_tokens = token_positions([span for _, span in words], tokens.text_spans)
    units: dict[tuple[int, ...], str] = {}
    for (word, _), positions in zip(words, word_tokens):
        if positions:
            units[positions] = units.get(positions, "") + word
    return [(name, positions) for positions, name in units.items()] or alone


def _left_out(prepared: inputs.Prepared, units: list[tuple[int, ...]]) -> tuple[Tensor, str]:
    """Return the input without each unit, [U, T] or [U, C, height, width], and what stands in its place."""
    rows = prepared.main.repeat(len(units), *[1] * (prepared.main.ndim - 1))
    if prepared.main.is_floating_point():
        spec = prepared.m.config.stacks[0]
        side, across = spec.patch_size, spec.image_size[1] // spec.patch_size
        mean = prepared.main.mean((0, 2, 3))[:, None, None]
        for row, (place,) in zip(rows, units):
            y, x = divmod(place - int(spec.class_token), across)
            row[:, y * side : (y + 1) * side, x * side : (x + 1) * side] = mean
        return rows, "the mean colour"
    known = [name for name in STANDS_FOR_NOTHING if prepared.m.special.get(name) is not None]
    refuse(not known, "this model has no mask, unknown or padding token to put in the place of a word")
    nothing = prepared.m.special[known[0]]
    for row, positions in zip(rows, units):
        row[list(positions)] = nothing
    return rows, labels(prepared.m.tokenizer, [nothing])[0]
