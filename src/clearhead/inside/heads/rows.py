"""What head roles are measured on: rows of inputs, the pattern of every attention over each, and what its mask leaves.

Where nothing is given, the rows are sentences that every machine has; for a model without a tokenizer random tokens, for
a model of patches random pixels. Induction has rows of its own: random tokens, twice.

Shapes: H heads, T queries, S keys.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.bundle import Model
from clearhead.errors import InputError
from clearhead.hub.encodings import framed
from clearhead.inside.inputs import Prepared, Tokens, prepare
from clearhead.inside.names import Head, attentions
from clearhead.model.masks import compose, tokens_from

COUNT, LENGTH = 24, 24  # rows made where none are given, and tokens of a random one
SMALL = 40_000  # bytes of a module that is read for sentences
REPEATED, SHORTEST, LONGEST = 8, 4, 24  # rows for induction, and the tokens that are repeated in one


@dataclass(frozen=True)
class View:
    """One attention over one row."""

    kind: str
    layer: int
    pattern: Tensor  # H T S, float32 on the CPU
    allowed: Tensor  # T S: what the mask leaves
    queries: Tokens
    keys: Tokens


def views(prepared: Prepared) -> Iterator[View]:
    """Every attention of the model over one row."""
    _, seen = prepared.record("*.pattern")
    config = prepared.model.config
    for kind, layer, _ in attentions(config):
        pattern = seen[f"{Head(kind, layer, 0).part}.pattern"][0].float().cpu()
        keys = prepared.tokens_of("encoder." if kind != "self" else "")
        queries = keys if kind == "encoder" else prepared.tokens
        yield View(
            kind, layer, pattern, _allowed(prepared.m, kind, layer, len(queries), len(keys)), queries, keys
        )


def _allowed(m: Model, kind: str, layer: int, queries: int, keys: int) -> Tensor:
    """[T, S], True where a query may look."""
    if kind == "cross":
        return torch.ones(queries, keys, dtype=torch.bool)
    plan = m.config.encoder if kind == "encoder" else m.model.main.spec
    assert plan is not None
    tokens = tokens_from(1, keys, torch.device("cpu"))
    mask, causal = compose(tokens, tokens, causal=plan.causal, window=plan.windows[layer])
    whole = torch.ones(keys, keys, dtype=torch.bool)
    return mask[0, 0] if mask is not None else whole.tril() if causal else whole


def rows(m: Model, given: Sequence[Any] | None, seed: int) -> list[Prepared]:
    """Texts, ids or images, ready to be read; those made here where none are given."""
    if isinstance(given, str):
        given = [given]
    if given is not None and not len(given):
        raise InputError("there is no text to look at: give at least one")
    first = m.config.encoder if m.config.family == "encoder-decoder" else m.model.main.spec
    assert first is not None
    if given is not None or first.input not in ("tokens", "patches"):
        return [_marked(prepare(m, one)) for one in (given or [""])]
    if first.input == "tokens" and m.tokenizer is not None:
        return [_marked(prepare(m, text)) for text in library_sentences(COUNT)]
    draw = torch.Generator().manual_seed(seed)
    if first.input == "patches":
        shape = (m.config.n_channels, *(m.config.image_size or ()))
        return [prepare(m, torch.randn(shape, generator=draw)) for _ in range(COUNT)]
    length = min(LENGTH, m.max_length)
    ids = torch.randint(first.vocab_size, (COUNT, length), generator=draw)
    return [_marked(_with_target(m, row, row)) for row in ids.tolist()]


def _with_target(m: Model, ids: list[int], target: list[int]) -> Prepared:
    """Ids for either stack; the decoder of two reads its beginning and then `target`."""
    if m.config.family != "encoder-decoder":
        return prepare(m, ids)
    written = [token % m.config.vocab_size for token in [*m._start(), *target]]
    return prepare(m, ids, target=written[: m.config.max_positions])


def _marked(prepared: Prepared) -> Prepared:
    """With its special tokens known, where ids alone were given: those that have a role of their own in the vocabulary."""
    known = set(prepared.m.special.values()) - {prepared.m.special.get("unk")}

    def mark(tokens: Tokens) -> Tokens:
        return (
            tokens
            if tokens.special
            else replace(tokens, special=tuple(token in known for token in tokens.ids))
        )

    source = prepared.source_tokens
    return replace(
        prepared, tokens=mark(prepared.tokens), source_tokens=None if source is None else mark(source)
    )


def repeated_rows(m: Model, seed: int) -> list[tuple[Prepared, dict[str, int], int]]:
    """Rows of random tokens, twice: the row, where its first copy begins for each kind of attention, how long a copy is.

    Tokens of a copy differ from each other, and copies from row to row differ in length, so that neither a look back at
    a fixed distance nor one at a fixed place finds what it is after. Empty where the model has no room for them.
    """
    plan = m.model.main.spec
    if plan.input != "tokens" or (m.config.encoder is not None and m.config.encoder.input != "tokens"):
        return []
    before, after = _frame(m)
    sizes = [plan.vocab_size] + ([m.config.encoder.vocab_size] if m.config.encoder is not None else [])
    special = {*m.special.values(), *before, *after}
    pool = torch.tensor([token for token in range(min(sizes)) if token not in special])
    longest = min(LONGEST, (m.max_length - len(before) - len(after)) // 2, len(pool))
    starts = {"self": len(before)}
    if m.config.family == "encoder-decoder":
        starts = {"encoder": len(before), "self": len(m._start())}
        longest = min(longest, (m.config.max_positions - len(m._start())) // 2)
    if longest < SHORTEST:
        return []
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(max(SHORTEST, longest // 2), longest, REPEATED).round().int().tolist()
    found = []
    for length in lengths:
        copy = pool[torch.randperm(len(pool), generator=draw)[:length]].tolist()
        found.append((_with_target(m, [*before, *copy, *copy, *after], [*copy, *copy]), starts, length))
    return found


def _frame(m: Model) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before a text and behind it."""
    if m.tokenizer is None:
        return [], []
    encoding = framed(m.tokenizer, m.max_length, "a")
    text = [place for place, mark in enumerate(encoding.special_tokens_mask) if not mark] or [
        len(encoding.ids)
    ]
    before, after = encoding.ids[: text[0]], encoding.ids[text[-1] + 1 :]
    return before, [token for token in after if m.config.family != "decoder" or token not in m.stops]


def library_sentences(count: int) -> list[str]:
    """English sentences that every machine has: from the docstrings of modules of Python's standard library."""
    found: list[str] = []
    small = (
        path for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py") if path.stat().st_size < SMALL
    )
    for path in sorted(small):
        try:
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        except (SyntaxError, ValueError, OSError):
            continue
        sentences = re.findall(r"(?<![^\s])[A-Z][a-z ][^.:;`*_<>|\n]*(?:\n[^.:;`*_<>|\n]+)*\.(?=\s|$)", text)
        found += [" ".join(sentence.split()) for sentence in sentences if 50 <= len(sentence) <= 200][:2]
        if len(found) >= count:
            break
    return found[:count]
