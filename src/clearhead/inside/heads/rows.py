"""What head roles are measured on: rows of inputs, with every attention's pattern and what its mask allows.

Where nothing is given, the rows are sentences that every machine has; for a model without a tokenizer random
tokens, for a model of patches random pixels. Induction has rows of its own: random tokens, twice.

Shapes: H heads, T queries, S keys.
"""

import ast
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from clearhead.api import Model
from clearhead.errors import refuse
from clearhead.hub.encodings import framed
from clearhead.inside.inputs import InputTokens, Prepared, prepare
from clearhead.inside.names import AttentionName, attentions, spec_of
from clearhead.inside.results import on_cpu
from clearhead.model.masks import compose, tokens_from

COUNT, LENGTH = 24, 24  # rows made where none are given, and tokens of a random one
SMALL = 40_000  # bytes of a module that is read for sentences
REPEATED, SHORTEST, LONGEST = 8, 4, 24  # rows for induction, and the tokens that are repeated in one
MaybeTokens = TypeVar("MaybeTokens", InputTokens, InputTokens | None)


@dataclass(frozen=True)
class AttentionSample:
    """One attention over one row."""

    name: AttentionName
    pattern: Tensor  # H T S, float32 on the CPU
    allowed: Tensor  # T S: what the mask allows
    queries: InputTokens
    keys: InputTokens


def samples(prepared: Prepared) -> Iterator[AttentionSample]:
    """Yield every attention of the model over one row."""
    _, seen = prepared.record("*.pattern")
    for name in attentions(prepared.model.config):
        keys = prepared.tokens_of("" if name.kind == "self" else "encoder.")
        queries = keys if name.kind == "encoder" else prepared.tokens
        pattern = on_cpu(seen[f"{name.part}.pattern"][0])
        yield AttentionSample(name, pattern, _allowed(prepared.m, name, queries, keys), queries, keys)


def _allowed(m: Model, name: AttentionName, queries: InputTokens, keys: InputTokens) -> Tensor:
    """Return [T, S], True where a query may look."""
    whole = torch.ones(len(queries), len(keys), dtype=torch.bool)
    if name.kind == "cross":
        return whole
    spec = spec_of(m.config, name.kind)
    tokens = tokens_from(1, len(keys), torch.device("cpu"))
    mask, causal = compose(tokens, tokens, causal=spec.causal, window=spec.windows[name.layer])
    if mask is not None:
        return mask[0, 0]
    return whole.tril() if causal else whole


def rows(m: Model, given: Sequence[Any] | None, seed: int) -> list[Prepared]:
    """Return texts, ids or images, ready to be read; those made here where none are given."""
    given = [given] if isinstance(given, str) else given
    refuse(given is not None and not len(given), "there is no text to look at: give at least one")
    first = m.config.stacks[0]
    if given is None and first.input == "tokens" and m.tokenizer is not None:
        given = library_sentences(COUNT)
    draw = torch.Generator().manual_seed(seed)
    if given is None and first.input == "patches":
        shape = (m.config.n_channels, *(m.config.image_size or ()))
        given = [torch.randn(shape, generator=draw) for _ in range(COUNT)]
    if given is not None or first.input != "tokens":
        return [_marked(prepare(m, one)) for one in given or [""]]
    ids = torch.randint(first.vocab_size, (COUNT, min(LENGTH, m.max_length)), generator=draw)
    return [_marked(_with_target(m, row, row)) for row in ids.tolist()]


def _with_target(m: Model, ids: list[int], target: list[int]) -> Prepared:
    """Return ids for either stack; the decoder of two reads its start and then `target`."""
    if m.config.family != "encoder-decoder":
        return prepare(m, ids)
    written = [token % m.config.vocab_size for token in [*m.start_ids, *target]]
    return prepare(m, ids, target=written[: m.config.max_positions])


def _marked(prepared: Prepared) -> Prepared:
    """Mark special tokens where ids alone were given: those with a role of their own in the vocabulary."""
    known = set(prepared.m.special.values()) - {prepared.m.special.get("unk")}

    def mark(tokens: MaybeTokens) -> MaybeTokens:
        if tokens is None or tokens.special:
            return tokens
        return replace(tokens, special=tuple(token in known for token in tokens.ids))

    return replace(prepared, tokens=mark(prepared.tokens), source_tokens=mark(prepared.source_tokens))


def repeated_rows(m: Model, seed: int) -> list[tuple[Prepared, dict[str, int], int]]:
    """Return rows of random tokens, twice, with the start of the first copy by kind, and a copy's length.

    Tokens of a copy differ from each other, and copies from row to row differ in length, so that neither a
    look back at a fixed distance nor one at a fixed place finds what it is after. Empty where the model has
    no room for them.
    """
    specs = m.config.stacks
    if any(spec.input != "tokens" for spec in specs):
        return []
    before, after = _frame(m)
    special = {*m.special.values(), *before, *after}
    sizes = min(spec.vocab_size for spec in specs)
    pool = torch.tensor([token for token in range(sizes) if token not in special])
    longest = min(LONGEST, (m.max_length - len(before) - len(after)) // 2, len(pool))
    starts = {"self": len(before)}
    if m.config.family == "encoder-decoder":
        starts = {"encoder": len(before), "self": len(m.start_ids)}
        longest = min(longest, (m.config.max_positions - len(m.start_ids)) // 2)
    if longest < SHORTEST:
        return []
    draw = torch.Generator().manual_seed(seed)
    found = []
    for length in torch.linspace(max(SHORTEST, longest // 2), longest, REPEATED).round().int().tolist():
        copy = pool[torch.randperm(len(pool), generator=draw)[:length]].tolist()
        found.append((_with_target(m, [*before, *copy, *copy, *after], [*copy, *copy]), starts, length))
    return found


def _frame(m: Model) -> tuple[list[int], list[int]]:
    """Return what the tokenizer puts before a text and behind it."""
    if m.tokenizer is None:
        return [], []
    encoding = framed(m.tokenizer, m.max_length, "a")
    text = [place for place, special in enumerate(encoding.special_tokens_mask) if not special]
    text = text or [len(encoding.ids)]
    before, after = encoding.ids[: text[0]], encoding.ids[text[-1] + 1 :]
    return before, [token for token in after if m.config.family != "decoder" or token not in m.stops]


def library_sentences(count: int) -> list[str]:
    """Return English sentences that every machine has: from the docstrings of Python's standard library."""
    found: list[str] = []
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(path for path in folder.glob("*.py") if path.stat().st_size < SMALL):
        try:
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        except (SyntaxError, ValueError, OSError):
            continue
        sentences = re.findall(r"(?<![^\s])[A-Z][a-z ][^.:;`*_<>|\n]*(?:\n[^.:;`*_<>|\n]+)*\.(?=\s|$)", text)
        found += [" ".join(sentence.split()) for sentence in sentences if 50 <= len(sentence) <= 200][:2]
        if len(found) >= count:
            break
    return found[:count]
