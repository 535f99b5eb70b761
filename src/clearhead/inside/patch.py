"""Activation patching: how much of an answer comes back with one activation of a clean run in a corrupt one.

Two prompts of equal length differ in a detail, and the model answers them differently. For each layer, token
and part, the corrupt run is repeated with that one activation taken from the clean run. What is measured is
the logit of the clean answer less that of the corrupt one, on a scale on which the corrupt run has 0 and the
clean run 1.

    found = patch(m, "Lily had a red ball", "Lily had a big ball", parts=("residual", "heads"))
    found.maps[0].values                                    # [L + 1, T]

Shapes: B rows of a batch, each patched in another place, T tokens, L layers, H heads, D model, E head width,
N choices.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from clearhead.config import StackSpec
from clearhead.errors import nearest, refuse
from clearhead.inside import inputs, names, results
from clearhead.inside.choices import Choices, choices_of, find_column
from clearhead.model.taps import edit
from clearhead.model.transformer import evaluating

PARTS = ("residual", "attention", "feedforward", "heads")
TOKENS_AT_ONCE = 8192  # of all rows together: what one pass of patched rows may hold
SAME = 1e-6  # two runs whose measures differ by less have nothing to bring back


@dataclass(frozen=True)
class Site:
    """Where something is put: an activation by its name, perhaps one token and one head of it."""

    tap: str
    position: int | None = None  # None: every token
    head: int | None = None  # of a tap "z"; None: every head


@dataclass(frozen=True)
class PatchMap(results.Result):
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


@dataclass(frozen=True)
class Patching(results.Result):
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


Sites = list[list[Site | None]]  # of each cell of a map
OnRows = Callable[[int, int], None]  # rows that are done, of how many


def patch(
    m: inputs.AnyModel,
    clean: inputs.Given,
    corrupt: inputs.Given,
    answer: str | int | None = None,
    wrong: str | int | None = None,
    parts: Sequence[str] = ("residual", "attention", "feedforward"),
    position: int = -1,
    target: inputs.Target = None,
    on_progress: OnRows = lambda done, total: None,
) -> Patching:
    """Patch every layer and token, or head, of the corrupt run, one at a time.

    Args:
        m: what `load` gave, or a bare model; see `prepare` for what may be given.
        clean: the prompt whose activations are put into the other run.
        corrupt: the prompt that is run; as many tokens as the clean one.
        answer: what the clean run should say: a token, by its text or id, or a class. None: what it says.
        wrong: what the corrupt run says. None: that; where it is the answer too, what it says next.
        parts: of residual, attention (cross-attention too), feedforward and heads (at all tokens).
        position: where the answer is read; -1 is the last token.
        target: what the decoder of an encoder-decoder has written; None: what it writes for both alike.
        on_progress: told how many of all patches are done.
    """
    refuse(not parts, f"no part is named: choose from {', '.join(PARTS)}")
    for part in parts:
        refuse(
            part not in PARTS,
            f'there is no part "{part}"{nearest(part, PARTS)}: choose from {", ".join(PARTS)}',
        )
    first, second = _prepare_both(m, clean, corrupt, target)
    choices = choices_of(second)
    column = find_column(position, choices.columns)
    tables = [table for spec in second.m.config.stacks for table in _tables(first, second, spec, parts)]
    taps = {site.tap for _, sites in tables for row in sites for site in row if site is not None}
    _, seen = first.record(*taps)
    scores = [patched_scores(run, {}, [()], column)[0] for run in (first, second)]  # N
    good, bad, note = _answers(choices, scores[0], scores[1], answer, wrong)
    top, bottom = (float(one[good] - one[bad]) for one in scores)
    refuse(
        abs(top - bottom) < SAME,
        f'"{choices.name(good)}" leads "{choices.name(bad)}" by {top:.4f} in both runs: '
        "there is nothing to bring back; choose another answer, or prompts that differ",
    )

    every = [(site,) for _, sites in tables for row in sites for site in row if site is not None]
    patched = patched_scores(second, seen, every, column, on_progress, (good, bad))  # B 2
    values = iter(((patched[:, 0] - patched[:, 1] - bottom) / (top - bottom)).tolist())

    def filled(sites: Sites) -> Tensor:
        return torch.tensor([[math.nan if site is None else next(values) for site in row] for row in sites])

    return Patching(
        clean=first.first_tokens.labels,
        corrupt=second.first_tokens.labels,
        position=choices.columns[column],
        answer=choices.name(good),
        wrong=choices.name(bad),
        clean_difference=top,
        corrupt_difference=bottom,
        maps=tuple(replace(table, values=filled(sites)) for table, sites in tables),
        note=note,
    )


def patched_scores(
    corrupt: inputs.Prepared,
    clean: Mapping[str, Tensor],
    rows: Sequence[Sequence[Site]],
    column: int = -1,
    on_progress: OnRows = lambda done, total: None,
    kept: Sequence[int] | None = None,
) -> Tensor:
    """Run a prompt for each row of sites with the clean activations there; return one column's scores [B, N].

    `clean` has the activations of the other prompt by name; `column` is as in `choices`; `on_progress` is
    told after each batch how many rows are done; `kept` names the choices that are returned, None: all N.
    """
    choices, length = choices_of(corrupt), len(corrupt.tokens) + len(corrupt.source_tokens or ())
    column = find_column(column, choices.columns)
    count, found = max(1, TOKENS_AT_ONCE // length), []
    for start in range(0, len(rows), count):
        some = rows[start : start + count]
        places = [(row, site) for row, sites in enumerate(some) for site in sites]
        changes = {
            tap: partial(_put, clean=clean[tap], places=[place for place in places if place[1].tap == tap])
            for tap in {site.tap for _, site in places}
        }
        repeated = {
            name: x.expand(len(some), *x.shape[1:])
            for name, x in {"ids": corrupt.main, **corrupt.given}.items()
        }
        with torch.no_grad(), evaluating(corrupt.model), edit(corrupt.model, changes):
            hidden = corrupt.model(**repeated, logits="none").hidden
            scores = choices.column_scores(hidden, column).float()
            found.append(scores if kept is None else scores[:, list(kept)])
        on_progress(start + len(some), len(rows))
    return torch.cat(found).cpu()


def _put(x: Tensor, clean: Tensor, places: list[tuple[int, Site]]) -> Tensor:
    """Return x [B, T, D], or [B, H, T, E], with each row's site from the clean run [1, ...]."""
    x = x.clone()
    for row, site in places:
        token = slice(None) if site.position is None else site.position
        head = slice(None) if site.head is None else site.head
        where = (token,) if x.ndim == 3 else (head, token)
        x[(row, *where)] = clean[(0, *where)]
    return x


def _prepare_both(
    m: inputs.AnyModel, clean: inputs.Given, corrupt: inputs.Given, target: inputs.Target
) -> tuple[inputs.Prepared, inputs.Prepared]:
    """Return both prompts as inputs of one length; targets that the model writes end where they differ."""
    first, second = inputs.prepare(m, clean, target), inputs.prepare(m, corrupt, target)
    ours, theirs = first.first_tokens, second.first_tokens
    start = _apart(ours.labels, theirs.labels)
    refuse(
        len(ours) != len(theirs),
        f"the prompts have {len(ours)} and {len(theirs)} tokens, and differ from token {start} on "
        f"({_few(ours, start)} / {_few(theirs, start)}): "
        "patching goes token by token, so give prompts of equal length",
    )
    if first.source is not None and target is None:
        written, other = first.tokens.ids, second.tokens.ids
        count = _apart(written, other)
        if count == len(written) == len(other):
            count -= 1  # so that there is something left to say
        alike = written[: max(1, count)]
        first, second = inputs.prepare(m, clean, alike), inputs.prepare(m, corrupt, alike)
    return first, second


def _apart(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """Return the first place where two sequences differ, or the end of the shorter one."""
    pairs = enumerate(zip(ours, theirs))
    return next((place for place, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


def _few(tokens: inputs.InputTokens, start: int) -> str:
    """Return some tokens for a message."""
    more = ("...",) if len(tokens) > start + 8 else ()
    return " ".join((*tokens.labels[start : start + 8], *more))


def _tables(
    first: inputs.Prepared, second: inputs.Prepared, spec: StackSpec, parts: Sequence[str]
) -> Iterator[tuple[PatchMap, Sites]]:
    """Yield the map of each part of a stack, without values, and its sites."""
    stack = ""
    if second.source is not None:
        stack = "encoder" if spec.prefix else "decoder"
    pairs = zip(first.tokens_of(spec.prefix).labels, second.tokens_of(spec.prefix).labels)
    tokens = tuple(one if one == other else f"{one}/{other}" for one, other in pairs)
    layers = tuple(map(str, range(spec.n_layers)))
    taps = {
        "residual": [*(f"{layer}.resid_pre" for layer in layers), f"{layers[-1]}.resid_post"],
        "attention": [f"{layer}.attention.out" for layer in layers],
        "cross": [f"{layer}.cross.out" for layer in layers],
        "feedforward": [f"{layer}.feedforward.out" for layer in layers],
    }
    empty = PatchMap("", stack, layers, tokens, torch.empty(0))
    for part in parts:
        if part == "heads":
            own = "encoder" if spec.prefix else "self"
            for kind in (own, "cross") if spec.cross else (own,):
                found = names.attentions(first.m.config, kind)
                heads = range(max(head.number for head in names.all_heads(first.m.config, kind)) + 1)
                name = "cross heads" if kind == "cross" else part
                rows = tuple(str(one.layer) for one in found)
                yield (
                    replace(empty, part=name, rows=rows, columns=tuple(map(str, heads))),
                    [
                        [Site(f"{one.part}.z", head=head) if head < one.n_heads else None for head in heads]
                        for one in found
                    ],
                )
        else:
            for name in (part, "cross") if part == "attention" and spec.cross else (part,):
                sites: Sites = [
                    [Site(f"{spec.prefix}blocks.{tap}", token) for token in range(len(tokens))]
                    for tap in taps[name]
                ]
                rows = (*layers, "end") if name == "residual" else layers
                yield replace(empty, part=name, rows=rows), sites


def _answers(
    choices: Choices, clean: Tensor, corrupt: Tensor, answer: str | int | None, wrong: str | int | None
) -> tuple[int, int, str]:
    """Return the numbers of the answer and the wrong one, and a note on how the latter was found."""
    good = int(clean.argmax()) if answer is None else choices.find(answer)
    bad = int(corrupt.argmax()) if wrong is None else choices.find(wrong)
    if bad != good:
        return good, bad, ""
    refuse(wrong is not None, f'"{choices.name(good)}" is both the answer and the wrong one: name two')
    refuse(corrupt.numel() < 2, "this head has one choice alone: patching compares two")
    bad = int(corrupt.index_fill(0, torch.tensor([good]), -math.inf).argmax())
    return good, bad, f'both runs say "{choices.name(good)}": compared with the runner-up of the corrupt run'
