"""Activation patching: how much of an answer comes back with one activation of a clean run in a corrupt one.

Two prompts differ in a detail, and the model answers them differently. For each layer, token and part, the
corrupt run is repeated with that one activation taken from the clean run. What is measured is the logit of
the clean answer less that of the corrupt one, on a scale on which the corrupt run has 0 and the clean run 1.

    result = patch(m, "Lily had a red ball", "Lily had a big ball", parts=("residual", "heads"))
    result.maps[0].values                                    # [L + 1, T]
    patch(m, "Paris is in", "New York is in", align="words")                  # prompts of unequal length
    patch(m, "Paris is in", "New York is in", subject=("Paris", "New York"))  # the spans that differ, by name

Shapes: B rows of a batch, each patched in another place, T tokens, P pairs of tokens (T of prompts of equal
length), L layers, H heads, D model, E head width, N choices.
"""

import difflib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from clearhead.core.config import StackSpec
from clearhead.errors import refuse, refuse_unknown
from clearhead.inside import inputs, names, results
from clearhead.inside.alignments import positions
from clearhead.inside.inputs import Choices, choices_of, find_column
from clearhead.inside.interventions import OnRows, Site, patched_scores

PARTS = ("residual", "attention", "feedforward", "heads")
SAME = 1e-6  # two runs whose measures differ by less have nothing to bring back


Pairs = tuple[tuple[int, int], ...]


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
        refuse_unknown("part", part, PARTS)
    first, second = prepare_both(m, clean, corrupt, target)
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
    good, bad, note = answers_of(choices, scores[0], scores[1], answer, wrong)
    top, bottom = (float(run[good] - run[bad]) for run in scores)
    refuse(
        abs(top - bottom) < SAME,
        f'"{choices.name(good)}" leads "{choices.name(bad)}" by {top:.4f} in both runs: '
        "there is nothing to bring back; choose another answer, or prompts that differ",
    )

    every = [(site,) for _, sites in tables for row in sites for site in row if site is not None]
    lead = patched_scores(second, seen, every, column, on_progress, lambda x: x[:, good] - x[:, bad])  # B
    values = iter(((lead - bottom) / (top - bottom)).tolist())

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


def prepare_both(
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
    """Return the tokens of two prompts that belong together, by the arguments of `patch`."""
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
    (within,) = positions([(begin, begin + len(text))], tokens.text_spans)
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
    match = next((token for token, other in pairs if other == column), None)
    refuse(
        match is None,
        f"position {column}, {corrupt.columns[column]}, belongs to no token of the clean prompt: "
        "read the answer at another position, or align the prompts otherwise",
    )
    return cast(int, match)


def _tables(
    first: inputs.Prepared, second: inputs.Prepared, spec: StackSpec, parts: Sequence[str], pairs: Pairs
) -> Iterator[tuple[PatchMap, Sites]]:
    """Yield the map of each part of a stack, without values, and its sites."""
    config, both = first.m.config, second.source is not None
    stack = ("encoder" if spec.prefix else "decoder") if both else ""
    ours, theirs = (run.tokens_of(spec.prefix).labels for run in (first, second))
    if spec.prefix == "" and both:
        pairs = tuple((token, token) for token in range(len(theirs)))  # both read the same target
    labels = ((ours[source], theirs[position]) for source, position in pairs)
    tokens = tuple(a if a == b else f"{a}/{b}" for a, b in labels)
    sources, targets = tuple(source for source, _ in pairs), tuple(position for _, position in pairs)
    layers = tuple(map(str, range(spec.n_layers)))
    blocks = [f"{spec.prefix}blocks.{layer}" for layer in layers]
    taps = {
        name: [f"{block}.{name}.out" for block in blocks] for name in ("attention", "cross", "feedforward")
    }
    taps["residual"] = [*(f"{block}.resid_pre" for block in blocks), f"{blocks[-1]}.resid_post"]
    crosses = ("cross",) if spec.cross else ()
    for part in parts:
        if part == "heads":
            for kind in ("encoder" if spec.prefix else "self", *crosses):
                attentions = names.attentions(config, kind)
                heads = range(max(head.number for head in names.all_heads(config, kind)) + 1)
                sites: Sites = [
                    [
                        Site(f"{attention.part}.z", targets, head, sources)
                        if head < attention.n_heads
                        else None
                        for head in heads
                    ]
                    for attention in attentions
                ]
                rows = tuple(str(attention.layer) for attention in attentions)
                name = "cross heads" if kind == "cross" else part
                yield PatchMap(name, stack, rows, tuple(map(str, heads)), torch.empty(0)), sites
            continue
        for name in (part, *crosses) if part == "attention" else (part,):
            sites = [[Site(tap, token, source=source) for source, token in pairs] for tap in taps[name]]
            rows = (*layers, "end") if name == "residual" else layers
            yield PatchMap(name, stack, rows, tokens, torch.empty(0)), sites


def answers_of(
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
