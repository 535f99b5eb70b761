"""What the tensors of a file decide, whatever config.json says: heads, tied tables, dtype and size."""

import functools
import math
from collections.abc import Iterable
from pathlib import Path

import torch

from clearhead.core.config import ModelConfig, StackSpec
from clearhead.hub.architecture import POOLER_KEY, SECTION, Architecture
from clearhead.hub.fields import Json
from clearhead.hub.files import refuse
from clearhead.hub.weights import Entry

Entries = dict[str, Entry]
MOST_EXPERTS = 4096  # of one block
TENSORS_OF_A_BLOCK = 4  # at least: queries, keys and values may be one, then two of the feed-forward


def as_stored(
    config: ModelConfig, theirs: Json, architecture: Architecture, entries: Entries
) -> tuple[ModelConfig, Entries]:
    """Return the config with what the file holds: a pooler, tables, an output layer, tied or not, its bias.

    Some config.json say "tied" of weights that are not: tensors that differ are several, whatever it says.
    The entries come back with the tables that the file leaves out because they are tied to one that it has.
    """
    pooled = config.head == "embedding" and config.pooler != "none" and SECTION not in theirs
    if pooled and not any(".pooler." in name for name in entries):
        config = architecture.read({**theirs, POOLER_KEY: False})
    tables = {name: entries[name] for name in architecture.tied if name in entries}
    if tables and config.family == "encoder-decoder" and config.share_embeddings and config.tie_embeddings:
        first = next(iter(tables.values()))
        inputs = {name: tables.get(name, first) for name in architecture.tied[:-1]}
        if not all(equal(first, table) for table in inputs.values()):
            config = config.replace(share_embeddings=False, tie_embeddings=False)
            entries = {**inputs, **entries}
            if config.head == "lm":
                entries.setdefault(architecture.tied[-1], first)
    if config.head in ("lm", "mlm"):
        stored = {
            rule.ours: entries[rule.theirs]
            for rule in reversed(architecture.rules_for(config))
            if rule.theirs in entries
        }
        source, target = (
            stored.get((f"{stack}.embedding.front.tokens.weight",)) for stack in ("encoder", "decoder")
        )
        table, out = target or source, stored.get(("head.out.weight",))
        if config.tie_embeddings and table and out and not equal(table, out):
            config = config.replace(tie_embeddings=False)
        if config.head_bias and "head_bias" in architecture.open and ("head.out.bias",) not in stored:
            config = config.replace(head_bias=False)
    return config, entries


def common_dtype(theirs: Json, entries: Iterable[Entry]) -> torch.dtype | None:
    """Return the dtype for weights of several: the one that config.json states, or one that holds them all.

    None where there is only one.
    """
    dtypes = {entry.dtype for entry in entries if entry.dtype.is_floating_point}
    stated = theirs.get("dtype") or theirs.get("torch_dtype")
    named = [dtype for dtype in dtypes if str(dtype) == f"torch.{stated}"]
    return None if len(dtypes) < 2 else named[0] if named else functools.reduce(torch.promote_types, dtypes)


def check_bounds(folder: Path, config: ModelConfig, entries: Entries) -> None:
    """Refuse a config of more weights than the file holds, before anything so large is built."""
    blocks = sum(len(set(stack.block_of)) for stack in config.stacks)
    needed = sum(map(_least_weights, config.stacks))
    stored = sum(math.prod(entry.shape) for entry in entries.values())
    wrong = f"{folder}: config.json says {blocks:,} layers"
    refuse(
        config.n_experts > MOST_EXPERTS,
        f"{wrong} of {config.n_experts:,} experts: {MOST_EXPERTS:,} is the most",
    )
    refuse(
        TENSORS_OF_A_BLOCK * blocks > len(entries) or needed > stored,
        f"{wrong} with {needed:,} weights at least, and the file has {len(entries):,} tensors "
        f"with {stored:,}: they do not belong together",
    )


def _least_weights(stack: StackSpec) -> int:
    """Return the number of feed-forward weights: each of them is in the file once."""
    matrices, blocks = 3 if stack.gated else 2, len(set(stack.block_of))
    dense = len({stack.block_of[layer] for layer in stack.dense_layers}) if stack.n_experts else blocks
    mixture = stack.n_experts * stack.d_expert + stack.d_shared_expert
    return (dense * stack.d_ff + (blocks - dense) * mixture) * matrices * stack.d_model


def equal(a: Entry, b: Entry) -> bool:
    """Return whether two tensors of a file are the same, in shape and every number."""
    return a is b or (a.shape == b.shape and torch.equal(a.read(), b.read()))
