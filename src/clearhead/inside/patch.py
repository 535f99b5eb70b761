"""Activation patching: how much of an answer comes back with one activation of a clean run in a corrupt one.

Two prompts differ in a detail, and the model answers them differently. For each layer, token and part, the
corrupt run is repeated with that one activation taken from the clean run. What is measured is the logit of
the clean answer less that of the corrupt one, on a scale on which the corrupt run has 0 and the clean run 1.

    found = patch(m, "Lily had a red ball", "Lily had a big ball", parts=("residual", "heads"))
    found.maps[0].values                                    # [L + 1, T]
    patch(m, "Paris is in", "New York is in", align="words")                  # prompts of unequal length
    patch(m, "Paris is in", "New York is in", subject=("Paris", "New York"))  # the spans that differ, by name

Steering adds the difference of two texts to the stream of a third, at one layer:

    vector = steering_vector(m, "I love this", "I hate this", layer=2)
    with steering(m, vector, layer=2, strength=4):
        m.generate("The film was", 20)

Shapes: B rows of a batch, each patched in another place, T tokens, P pairs of tokens (T of prompts of equal
length), L layers, H heads, D model, E head width, N choices.
"""

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from clearhead.core.config import StackSpec
from clearhead.core.taps import edit
from clearhead.core.transformer import evaluating
from clearhead.errors import nearest, refuse
from clearhead.inside import inputs, names, results
from clearhead.inside.inputs import Choices, choices_of, find_column
from clearhead.run.api import Model

PARTS = ("residual", "attention", "feedforward", "heads")
TOKENS_AT_ONCE = 8192  # of all rows together: what one pass of patched rows may hold
SAME = 1e-6  # two runs whose measures differ by less have nothing to bring back


Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Site:
    """Where something is put: an activation by its name, perhaps one token and one head of it."""

    tap: str
    position: int | tuple[int, ...] | None = None  # of the run that is patched; None: every token
    head: int | None = None  # of a tap "z"; None: every head
    source: int | tuple[int, ...] | None = None  # of the other run; None: the same tokens


@dataclass(frozen=True)
class PatchMap(results.Result):
    """What came back, for one part of one stack."""

    part: str  # residual, attention, cross, feedforward, or heads, cross heads
    stack: str  # "encoder" or "decoder" where there are two, else ""
    rows: tuple[str, ...]  # layers; the residual's last row is the end of the stack
    columns: tuple[str, ...]  # pairs of tokens ("clean/corrupt" where they differ), or heads
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
    pairs: Pairs = ()  # numbers of the tokens that belong together, clean and corrupt, in order


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
    *,
    align: Literal["words"] | Sequence[tuple[int, int]] | None = None,
    subject: tuple[str, str] | None = None,
) -> Patching:
    """Patch every layer and token, or head, of the corrupt run, one at a time.

    Prompts of unequal length need to be told which tokens belong together, by `align` or `subject`; tokens
    that belong to no other are not patched. Spans of unequal length are aligned from their ends.

    Args:
        m: what `load` gave, or a bare model; see `prepare` for what may be given.
        clean: the prompt whose activations are put into the other run.
        corrupt: the prompt that is run.
        answer: what the clean run should say: a token, by its text or id, or a class. None: what it says.
        wrong: what the corrupt run says. None: that; where it is the answer too, what it says next.
        parts: of residual, attention (cross-attention too), feedforward and heads (at all tokens).
        position: where the answer is read; -1 is the last token.
        target: what the decoder of an encoder-decoder has written; None: what it writes for both alike.
        on_progress: told how many of all patches are done.
        align: which tokens of the two prompts, or of the two sources, belong together: "words", the words
            that both have and what stands between these; or pairs of token numbers, clean and corrupt. None:
            token by token, for prompts of equal length.
        subject: the text that differs, as it is in each prompt; what stands before and after it is the same.
    """
    refuse(not parts, f"no part is named: choose from {', '.join(PARTS)}")
    for part in parts:
        refuse(
            part not in PARTS,
            f'there is no part "{part}"{nearest(part, PARTS)}: choose from {", ".join(PARTS)}',
        )
    first, second = _prepare_both(m, clean, corrupt, target)
    pairs = aligned(first.first_tokens, second.first_tokens, align, subject)
    choices = choices_of(second)
    column = find_column(position, choices.columns)
    columns = _other_column(column, choices_of(first), choices, pairs), column
    tables = [
        table for spec in second.m.config.stacks for table in _tables(first, second, spec, parts, pairs)
    ]
    taps = {site.tap for _, sites in tables for row in sites for site in row if site is not None}
    _, seen = first.record(*taps)
    scores = [patched_scores(run, {}, [()], own)[0] for run, own in zip((first, second), columns)]  # N
    good, bad, note = _answers(choices, scores[0], scores[1], answer, wrong)
    top, bottom = (float(run[good] - run[bad]) for run in scores)
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
        pairs=pairs,
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

    `clean` has the activations of the other prompt by name; `column` is as in `Choices`; `on_progress` is
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
        head = slice(None) if site.head is None else site.head
        into, out_of = (
            (_index(tokens),) if x.ndim == 3 else (head, _index(tokens))
            for tokens in (site.position, site.position if site.source is None else site.source)
        )
        x[(row, *into)] = clean[(0, *out_of)]
    return x


def _index(tokens: int | tuple[int, ...] | None) -> Any:
    """Return what a tensor is indexed by."""
    return slice(None) if tokens is None else list(tokens) if isinstance(tokens, tuple) else tokens


def _prepare_both(
    m: inputs.AnyModel, clean: inputs.Given, corrupt: inputs.Given, target: inputs.Target
) -> tuple[inputs.Prepared, inputs.Prepared]:
    """Return both prompts as inputs; targets that the model writes end where they differ."""
    first, second = inputs.prepare(m, clean, target), inputs.prepare(m, corrupt, target)
    if first.source is not None and target is None:
        written, other = first.tokens.ids, second.tokens.ids
        count = _apart(written, other)
        if count == len(written) == len(other):
            count -= 1  # so that there is something left to say
        alike = written[: max(1, count)]
        first, second = inputs.prepare(m, clean, alike), inputs.prepare(m, corrupt, alike)
    return first, second


# Which tokens belong together -------------------------------------------------------------------------------


def aligned(
    clean: inputs.InputTokens,
    corrupt: inputs.InputTokens,
    align: Literal["words"] | Sequence[tuple[int, int]] | None = None,
    subject: tuple[str, str] | None = None,
) -> Pairs:
    """Return the tokens of two prompts that belong together, as `patch` is asked to align them."""
    refuse(
        align is not None and subject is not None, "align and subject both align prompts: give one of them"
    )
    if subject is not None:
        return _around(clean, corrupt, subject)
    if align == "words":
        return _by_words(clean, corrupt)
    refuse(
        isinstance(align, str), f'align "{align}" is not known: choose words, or give pairs of token numbers'
    )
    if align is not None:
        return _checked(clean, corrupt, align)
    start = _apart(clean.labels, corrupt.labels)
    refuse(
        len(clean) != len(corrupt),
        f"the prompts have {len(clean)} and {len(corrupt)} tokens, and differ from token {start} on "
        f"({_few(clean, start)} / {_few(corrupt, start)}): align them by words (align), or name what differs "
        "in each (subject)",
    )
    return tuple((token, token) for token in range(len(clean)))


def _checked(
    clean: inputs.InputTokens, corrupt: inputs.InputTokens, align: Sequence[tuple[int, int]]
) -> Pairs:
    """Return pairs of token numbers in order, each token once; negative ones count from the end."""
    sizes, pairs = (len(clean), len(corrupt)), []
    for pair in align:
        whole = (
            isinstance(pair, list | tuple) and len(pair) == 2 and all(type(token) is int for token in pair)
        )
        there = whole and all(-size <= token < size for token, size in zip(pair, sizes))
        refuse(
            not there,
            f"align has {pair!r}: give pairs of token numbers, clean (0 to {sizes[0] - 1}) and corrupt "
            f"(0 to {sizes[1] - 1})",
        )
        pairs.append((pair[0] % sizes[0], pair[1] % sizes[1]))
    refuse(not pairs, "align has no pairs: give one at least")
    times = Counter(position for _, position in pairs)
    twice = next((position for position, count in times.items() if count > 1), None)
    refuse(twice is not None, f"align names token {twice} of the corrupt prompt twice: give each one source")
    return tuple(sorted(pairs, key=lambda pair: pair[1]))


def _around(clean: inputs.InputTokens, corrupt: inputs.InputTokens, subject: tuple[str, str]) -> Pairs:
    """Return the pairs before two spans of text, of the spans, and after them."""
    (first, last), (start, end) = (_span(*prompt) for prompt in ((clean, subject[0]), (corrupt, subject[1])))
    sides = ((first, start, "before"), (len(clean) - last, len(corrupt) - end, "after"))
    for ours, theirs, side in sides:
        refuse(
            ours != theirs,
            f"{ours} and {theirs} tokens stand {side} the subject in the two prompts: align by words (align)",
        )
    inner = _from_the_end(range(first, last), range(start, end))
    after = zip(range(last, len(clean)), range(end, len(corrupt)))
    return (*((token, token) for token in range(first)), *inner, *after)


def _span(tokens: inputs.InputTokens, text: str) -> tuple[int, int]:
    """Return the first token of a text within a prompt, and the one after its last."""
    refuse(
        not tokens.spans, "subject is a text within each prompt, and these are no texts: give align, as pairs"
    )
    begin = tokens.text.find(text) if text.strip() else -1
    refuse(begin < 0, f'the subject "{text}" is not in "{tokens.text:.60}": write it as it is there')
    within = [
        number
        for number, (left, right) in enumerate(tokens.text_spans)
        if left < begin + len(text) and right > begin and right > left
    ]
    return within[0], within[-1] + 1


def _by_words(clean: inputs.InputTokens, corrupt: inputs.InputTokens) -> Pairs:
    """Return the pairs of words that both prompts have, in order, and of what stands in the same gap."""
    ours, theirs = _words(clean), _words(corrupt)
    matcher = difflib.SequenceMatcher(None, [word for word, _ in ours], [word for word, _ in theirs], False)
    pairs: list[tuple[int, int]] = []
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            for (_, mine), (_, other) in zip(ours[a:b], theirs[c:d]):
                pairs += _from_the_end(mine, other)
        elif kind == "replace":
            mine, other = (
                [token for _, some in words for token in some] for words in (ours[a:b], theirs[c:d])
            )
            pairs += _from_the_end(mine, other)
    return tuple(pairs)


def _words(tokens: inputs.InputTokens) -> list[tuple[str, list[int]]]:
    """Return the words between white space, each with its tokens; without a text, a token is a word."""
    words: list[tuple[str, list[int]]] = []
    end = 0  # of the characters of the last word
    for number, name in enumerate(tokens.labels):
        left, right = tokens.text_spans[number] if tokens.spans else (0, 0)
        text = tokens.text[left:right]
        left += len(text) - len(text.lstrip())  # of a space before the word
        if left < right and words and left == end and left:
            word, some = words.pop()
            words.append((word + tokens.text[left:right], [*some, number]))
        else:
            words.append((tokens.text[left:right] or name, [number]))
        end = right if left < right else 0
    return words


def _from_the_end(clean: Sequence[int], corrupt: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of two spans, last token with last token, as far as the shorter one goes."""
    count = min(len(clean), len(corrupt))
    return list(zip(clean[len(clean) - count :], corrupt[len(corrupt) - count :]))


def _apart(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """Return the first position where two sequences differ, or the end of the shorter one."""
    pairs = enumerate(zip(ours, theirs))
    return next((place for place, (x, y) in pairs if x != y), min(len(ours), len(theirs)))


def _few(tokens: inputs.InputTokens, start: int) -> str:
    """Return some tokens for a message."""
    more = ("...",) if len(tokens) > start + 8 else ()
    return " ".join((*tokens.labels[start : start + 8], *more))


def _other_column(column: int, clean: Choices, corrupt: Choices, pairs: Pairs) -> int:
    """Return the column of the clean run that belongs to one of the corrupt run."""
    refuse(
        corrupt.kind == "place" and len(clean.names) != len(corrupt.names),
        "a span head chooses among the tokens themselves: give prompts of equal length",
    )
    # Not by class, nor by tokens of a target.
    by_token = corrupt.columns == corrupt.prepared.first_tokens.labels
    if not by_token or column == len(corrupt.columns) - 1:
        return column - len(corrupt.columns) + len(clean.columns)
    found = next((token for token, other in pairs if other == column), None)
    refuse(
        found is None,
        f"position {column}, {corrupt.columns[column]}, belongs to no token of the clean prompt: "
        "read the answer at another position, or align the prompts otherwise",
    )
    return cast(int, found)


def _tables(
    first: inputs.Prepared, second: inputs.Prepared, spec: StackSpec, parts: Sequence[str], pairs: Pairs
) -> Iterator[tuple[PatchMap, Sites]]:
    """Yield the map of each part of a stack, without values, and its sites."""
    stack = ""
    if second.source is not None:
        stack = "encoder" if spec.prefix else "decoder"
    ours, theirs = (run.tokens_of(spec.prefix).labels for run in (first, second))
    if spec.prefix == "" and second.source is not None:
        pairs = tuple((token, token) for token in range(len(theirs)))  # both read the same target
    labels = ((ours[source], theirs[position]) for source, position in pairs)
    tokens = tuple(a if a == b else f"{a}/{b}" for a, b in labels)
    sources, positions = tuple(source for source, _ in pairs), tuple(position for _, position in pairs)
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
                rows = tuple(str(attention.layer) for attention in found)
                yield (
                    replace(empty, part=name, rows=rows, columns=tuple(map(str, heads))),
                    [
                        [
                            Site(f"{attention.part}.z", positions, head, sources)
                            if head < attention.n_heads
                            else None
                            for head in heads
                        ]
                        for attention in found
                    ],
                )
        else:
            for name in (part, "cross") if part == "attention" and spec.cross else (part,):
                sites: Sites = [
                    [Site(f"{spec.prefix}blocks.{tap}", token, source=source) for source, token in pairs]
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


# Steering ---------------------------------------------------------------------------------------------------


def steering_vector(m: inputs.AnyModel, toward: inputs.Given, away: inputs.Given, layer: int) -> Tensor:
    """Return the stream after a layer at the last token of one text, less that of another: [D]."""
    tap = _after(inputs.as_model(m), layer)
    last = [inputs.prepare(m, text).record(tap, logits="none")[1][tap][0, -1] for text in (toward, away)]
    return last[0] - last[1]


def steering(
    m: inputs.AnyModel, vector: Tensor, layer: int, strength: float = 1.0
) -> AbstractContextManager[None]:
    """Add `strength` times a vector [D] to the stream after a layer, at every token, in a `with` block."""
    m = inputs.as_model(m)
    return edit(m.model, {_after(m, layer): lambda x: x + strength * vector.to(x)})


def _after(m: Model, layer: int) -> str:
    """Return the name of the stream after a layer of the stack that feeds the head."""
    taps = names.states(m.model.main.spec)[1:]
    refuse(not 0 <= layer < len(taps), f"there is no layer {layer}: layers are 0 to {len(taps) - 1}")
    return taps[layer]
