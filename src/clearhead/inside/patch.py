"""Activation patching: put one activation of a clean run into a corrupt one, and see how much of the answer comes back.

Two prompts of equal length differ in a detail, and the model answers them differently. For each layer, token and part,
the corrupt run is repeated with that one activation taken from the clean run. What is measured is the logit of the
clean answer less that of the corrupt one, on a scale on which the corrupt run has 0 and the clean run 1.

    found = patch(m, "Lily had a red ball", "Lily had a big ball", parts=("residual", "heads"))
    found.maps[0].values                                    # [L + 1, T]

Shapes: B rows of a batch, each patched in another place, T tokens, L layers, H heads, D model, E head width, N choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.bundle import Model
from clearhead.config import StackSpec
from clearhead.errors import InputError, nearest
from clearhead.hub.pixels import Image
from clearhead.inside.choices import Choices, choices_of, find_column, plain_numbers
from clearhead.inside.inputs import Prepared, Tokens, prepare
from clearhead.inside.names import attentions
from clearhead.model.taps import edit
from clearhead.model.transformer import Transformer, evaluating

PARTS = ("residual", "attention", "feedforward", "heads")
TOKENS_AT_ONCE = 8192  # of all rows together: what one pass of patched rows may hold
SAME = 1e-6  # two runs whose measures differ by less have nothing to bring back

Given = str | Sequence[int] | Tensor | Image


@dataclass(frozen=True)
class Site:
    """Where something is put: an activation by its name, perhaps one token and one head of it."""

    tap: str
    position: int | None = None  # None: every token
    head: int | None = None  # of a tap "z"; None: every head


@dataclass(frozen=True)
class PatchMap:
    """What came back, for one part of one stack."""

    part: str  # residual, attention, cross, feedforward, or heads, cross heads
    stack: str  # "encoder" or "decoder" where there are two, else ""
    rows: tuple[str, ...]  # layers; the residual's last row is the end of the stack
    columns: tuple[str, ...]  # tokens ("clean/corrupt" where they differ), or heads
    values: Tensor  # [rows, columns] 0: as in the corrupt run, 1: as in the clean run; NaN: no such head

    @property
    def title(self) -> str:
        """The stack and the part."""
        return f"{self.stack} {self.part}".strip()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "values": plain_numbers(self.values)}


@dataclass(frozen=True)
class Patching:
    """Two runs, and what each patch brings back."""

    clean: tuple[str, ...]  # what they read: the tokens; the source, where there is one
    corrupt: tuple[str, ...]
    position: str  # where the answer is read
    answer: str
    wrong: str
    clean_difference: float  # logit of the answer less that of the wrong one
    corrupt_difference: float
    maps: tuple[PatchMap, ...]
    note: str = ""  # how the answers were chosen, where that needs saying

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "maps": [table.to_dict() for table in self.maps]}


def patch(
    m: Model | Transformer,
    clean: Given,
    corrupt: Given,
    answer: str | int | None = None,
    wrong: str | int | None = None,
    parts: Sequence[str] = ("residual", "attention", "feedforward"),
    position: int = -1,
    target: str | Sequence[int] | None = None,
) -> Patching:
    """Patch every layer and token (or head) of the corrupt run, one at a time; see `prepare` for what may be given.

    Args:
        m: what `load` gave, or a bare model.
        clean: the prompt whose activations are put into the other run.
        corrupt: the prompt that is run; as many tokens as the clean one.
        answer: what the clean run should say: a token, by its text or id, or a class. None: what it says.
        wrong: what the corrupt run says. None: that; where it is the answer too, what it says next.
        parts: of residual, attention (cross-attention too), feedforward and heads (at all tokens).
        position: where the answer is read; -1 is the last token.
        target: what the decoder of an encoder-decoder has written; None: what it writes for both alike.
    """
    if not parts:
        raise InputError(f"no part is named: choose from {', '.join(PARTS)}")
    for part in parts:
        if part not in PARTS:
            raise InputError(
                f'there is no part "{part}"{nearest(part, PARTS)}: choose from {", ".join(PARTS)}'
            )
    first, second = _prepare_both(m, clean, corrupt, target)
    choices = choices_of(second)
    column = find_column(position, choices.columns)
    tables = [
        table
        for plan in (second.m.config.encoder, second.m.config.decoder)
        if plan
        for table in _tables(second, plan, parts)
    ]
    taps = {site.tap for _, sites in tables for row in sites for site in row if site is not None}
    _, seen = first.record(*taps)
    right, plainly = (patched_scores(run, {}, [()], column)[0] for run in (first, second))  # N
    good, bad, note = _answers(choices, right, plainly, answer, wrong)
    top, bottom = (float(scores[good] - scores[bad]) for scores in (right, plainly))
    if abs(top - bottom) < SAME:
        raise InputError(
            f'"{choices.name(good)}" leads "{choices.name(bad)}" by {top:.4f} in both runs: there is nothing to bring back; '
            "choose another answer, or prompts that differ"
        )

    def measure(sites: list[list[Site | None]]) -> Tensor:
        filled = [site for row in sites for site in row if site is not None]
        scores = patched_scores(second, seen, [(site,) for site in filled], column)  # B N
        values = iter(((scores[:, good] - scores[:, bad] - bottom) / (top - bottom)).tolist())
        return torch.tensor([[math.nan if site is None else next(values) for site in row] for row in sites])

    shown = _labels(first, second)
    return Patching(
        clean=(first.source_tokens or first.tokens).labels,
        corrupt=(second.source_tokens or second.tokens).labels,
        position=choices.columns[column],
        answer=choices.name(good),
        wrong=choices.name(bad),
        clean_difference=top,
        corrupt_difference=bottom,
        maps=tuple(
            replace(table, columns=table.columns or shown[table.stack], values=measure(sites))
            for table, sites in tables
        ),
        note=note,
    )


def patched_scores(
    corrupt: Prepared, clean: Mapping[str, Tensor], rows: Sequence[Sequence[Site]], column: int = -1
) -> Tensor:
    """Run a prompt once for each row of sites, with the clean activations there: what the head says in a column, [B, N].

    `clean` has the activations of the other prompt by name; `column` is as in `choices`.
    """
    choices, length = choices_of(corrupt), len(corrupt.tokens) + len(corrupt.source_tokens or ())
    column = find_column(column, choices.columns)
    count, said = max(1, TOKENS_AT_ONCE // length), []
    for start in range(0, len(rows), count):
        some = rows[start : start + count]
        places: dict[str, list[tuple[int, Site]]] = {}
        for row, sites in enumerate(some):
            for site in sites:
                places.setdefault(site.tap, []).append((row, site))
        changes = {tap: partial(_put, clean=clean[tap], places=where) for tap, where in places.items()}
        with torch.no_grad(), evaluating(corrupt.model), edit(corrupt.model, changes):
            given = {name: _repeat(x, len(some)) for name, x in corrupt.given.items()}
            hidden = corrupt.model(_repeat(corrupt.main, len(some)), **given, logits="none").hidden
            said.append(choices.column_scores(hidden, column).float())
    return torch.cat(said).cpu()


def _repeat(x: Tensor, rows: int) -> Tensor:
    return x.expand(rows, *x.shape[1:])


def _put(x: Tensor, clean: Tensor, places: list[tuple[int, Site]]) -> Tensor:
    """Each row's site from the clean run [1, ...]: x [B, T, D], or [B, H, T, E]."""
    x = x.clone()
    for row, site in places:
        token = slice(None) if site.position is None else site.position
        head = slice(None) if site.head is None else site.head
        where = (token,) if x.ndim == 3 else (head, token)
        x[(row, *where)] = clean[(0, *where)]
    return x


def _prepare_both(
    m: Model | Transformer, clean: Given, corrupt: Given, target: str | Sequence[int] | None
) -> tuple[Prepared, Prepared]:
    """Both prompts as inputs of one length; two decoders that write by themselves are cut where they begin to differ."""
    first, second = prepare(m, clean, target), prepare(m, corrupt, target)
    ours, theirs = (one.source_tokens or one.tokens for one in (first, second))
    if len(ours) != len(theirs):
        start = _apart(ours.labels, theirs.labels)
        raise InputError(
            f"the prompts have {len(ours)} and {len(theirs)} tokens, and differ from token {start} on "
            f"({_few(ours, start)} / {_few(theirs, start)}): patching goes token by token, so give prompts of equal length"
        )
    if first.source is not None and target is None:
        alike = _common(first.tokens.ids, second.tokens.ids)
        first, second = prepare(m, clean, alike), prepare(m, corrupt, alike)
    return first, second


def _apart(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """The first place where two sequences differ; the shorter one's end if it is the beginning of the other."""
    return next(
        (place for place, (one, other) in enumerate(zip(ours, theirs)) if one != other),
        min(len(ours), len(theirs)),
    )


def _few(tokens: Tokens, start: int) -> str:
    """Some tokens for a message."""
    return " ".join(tokens.labels[start : start + 8]) + " ..." * (len(tokens) > start + 8)


def _common(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """What both begin with; short of the last token where they are the same, so that there is something left to say."""
    count = _apart(ours, theirs)
    return list(ours[: max(1, count - (count == len(ours) == len(theirs)))])


def _tables(
    prepared: Prepared, plan: StackSpec, parts: Sequence[str]
) -> list[tuple[PatchMap, list[list[Site | None]]]]:
    """The empty map of each part of a stack, and its sites."""
    stack = "" if prepared.source is None else "encoder" if plan.prefix else "decoder"
    tokens, layers, none = (
        range(len(prepared.tokens_of(plan.prefix))),
        tuple(map(str, range(plan.n_layers))),
        torch.empty(0),
    )
    found: list[tuple[PatchMap, list[list[Site | None]]]] = []

    def by_token(part: str, rows: tuple[str, ...], taps: list[str]) -> None:
        sites: list[list[Site | None]] = [
            [Site(f"{plan.prefix}blocks.{tap}", token) for token in tokens] for tap in taps
        ]
        found.append((PatchMap(part, stack, rows, (), none), sites))

    def by_head(part: str, module: str, kind: str) -> None:
        counts = [count for of, _, count in attentions(prepared.m.config) if of == kind]
        heads = range(max(counts))
        sites = [
            [
                Site(f"{plan.prefix}blocks.{layer}.{module}.z", head=head) if head < count else None
                for head in heads
            ]
            for layer, count in enumerate(counts)
        ]
        found.append((PatchMap(part, stack, layers, tuple(map(str, heads)), none), sites))

    for part in parts:
        if part == "residual":
            last = f"{plan.n_layers - 1}.resid_post"
            by_token(part, (*layers, "end"), [*(f"{layer}.resid_pre" for layer in layers), last])
        elif part == "heads":
            by_head(part, "attention", "encoder" if plan.prefix else "self")
        else:
            by_token(part, layers, [f"{layer}.{part}.out" for layer in layers])
        if part == "attention" and plan.cross:
            by_token("cross", layers, [f"{layer}.cross.out" for layer in layers])
        if part == "heads" and plan.cross:
            by_head("cross heads", "cross", "cross")
    return found


def _answers(
    choices: Choices, right: Tensor, plainly: Tensor, answer: str | int | None, wrong: str | int | None
) -> tuple[int, int, str]:
    """The numbers of the answer and of the wrong one, and how the latter was found where that needs saying."""
    good = int(right.argmax()) if answer is None else choices.find(answer)
    if wrong is not None:
        bad = choices.find(wrong)
        if bad == good:
            raise InputError(f'"{choices.name(good)}" is both the answer and the wrong one: name two')
        return good, bad, ""
    bad = int(plainly.argmax())
    if bad != good:
        return good, bad, ""
    if plainly.numel() < 2:
        raise InputError("this head has one choice alone: patching compares two")
    best = plainly.clone()
    best[good] = -math.inf
    bad = int(best.argmax())
    return good, bad, f'both runs say "{choices.name(good)}": compared with the runner-up of the corrupt run'


def _labels(first: Prepared, second: Prepared) -> dict[str, tuple[str, ...]]:
    """The tokens of each stack, both of them where they differ."""

    def joined(ours: Tokens, theirs: Tokens) -> tuple[str, ...]:
        return tuple(
            one if one == other else f"{one}/{other}" for one, other in zip(ours.labels, theirs.labels)
        )

    main = joined(first.tokens, second.tokens)
    if first.source_tokens is None or second.source_tokens is None:
        return {"": main}
    return {"decoder": main, "encoder": joined(first.source_tokens, second.source_tokens)}
