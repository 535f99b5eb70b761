"""How much an engine takes on, how large its pool is, and what it has done."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from clearhead.core.config import StackSpec
from clearhead.errors import RequestError, refuse
from clearhead.run.generate.request import DEFAULTS
from clearhead.run.serve.kv_cache import Group, Pool, blocks_for, token_bytes

CHUNK_BLOCKS = 16  # blocks of a prompt that a GPU reads together
CHARACTERS = 256  # that a token of a text has on the average, and rather fewer
CACHE_BYTES = 1 << 30  # of the pool, where nothing else is stated


@dataclass(frozen=True)
class Limits:
    """How much the engine takes on."""

    tokens: int = 512  # of one step at most, but for a chunk that is longer
    running: int = 64  # sequences that decode at the same time
    waiting: int = 8  # requests that wait, besides those that can begin at once
    waiting_tokens: int = 1 << 18  # tokens of the prompts that wait
    block: int = 64  # tokens of a block
    cache_tokens: int | None = None  # that the pool holds; default: as many as 1 GiB holds
    exact: bool = False  # give each row the same bits whatever else is in the step; slower for one text alone
    chunk: int | None = None  # tokens of a prompt read together, a multiple of block; default: block; GPU: 16
    lookup: int | None = None  # draft tokens from a sequence's own text at most; default: 8; GPU: 0, none
    draft_tokens: int = DEFAULTS["draft_tokens"]  # of a draft model at a time, at most
    max_length: int | None = None  # tokens of a prompt and its answer together; default: the model's own
    cache: Literal["int8"] | None = None  # quantize the KV cache, as that option of generate does
    rows: bool = True  # take the last tokens of texts through the step in C, where it runs

    def __post_init__(self) -> None:
        refuse(
            self.cache not in (None, "int8"), f"cache {self.cache!r} is not known: int8 is, or leave it out"
        )
        for name, value in vars(self).items():
            least = 0 if name == "lookup" else 1
            refuse(type(value) is int and value < least, f"{name} {value} must be {least} or more")


@dataclass
class ServeStats:
    """What the engine has done so far."""

    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefix_asked: int = 0  # tokens of prompts that were looked for in the pool
    prefix_found: int = 0
    preempted: int = 0
    drafted: int = 0  # draft tokens that were verified
    accepted: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # by stop reason


def pool_for(
    spec: StackSpec,
    limits: Limits,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_heads: Mapping[str, int] | None = None,
) -> Pool:
    """Make the pool of a model; a group with a window gets no more blocks than its texts can use."""
    int8 = limits.cache == "int8"
    groups = token_bytes(spec, dtype.itemsize, int8)
    whole = sum(groups.values())
    usual = min(limits.running * max_positions, max(CACHE_BYTES // max(1, whole), limits.block))
    count = blocks_for(limits.cache_tokens or usual, limits.block)
    counts = dict.fromkeys(groups, count)
    for group in groups:
        if group is not None and group[0] is not None:
            each = window_blocks(group, limits)
            counts[group] = max(each, min(count, limits.running * each))
    return Pool(spec, limits.block, counts, dtype, device, int8, kv_heads)


def chunk_size(limits: Limits, gpu: bool) -> int:
    """Return how many tokens of a prompt are read together; a step takes one such chunk at least."""
    blocks = min(CHUNK_BLOCKS, max(1, limits.tokens // limits.block)) if gpu else 1
    chunk, most = limits.chunk or blocks * limits.block, max(limits.tokens, limits.block)
    refuse(
        chunk % limits.block or chunk > most,
        f"chunk {chunk} must be a multiple of block {limits.block}, and {most} at most",
    )
    return chunk


def check_fits(pool: Pool, tokens: int, group: Group) -> None:
    """Refuse a text that the pool could never hold."""
    room = pool.blocks[group].count if group in pool.blocks else 0
    if room and blocks_for(tokens, pool.size) > room:
        raise RequestError(
            f"a text of {tokens} tokens does not fit into the {room * pool.size} that the server holds: "
            "shorten it, or give the server a larger cache",
            "context_length_exceeded",
        )


def check_prompt(pool: Pool, prompt: str | Sequence[int], group: Group) -> None:
    """Refuse a prompt that is too long whatever its tokens are, before any work is done for it."""
    check_fits(pool, len(prompt) // CHARACTERS if isinstance(prompt, str) else len(prompt), group)


def window_blocks(group: Group, limits: Limits) -> int:
    """Return how many blocks of a group with a window one text needs at most, with a step's tokens."""
    reach, first = group or (0, 0)
    return 2 + sum(blocks_for(tokens, limits.block) for tokens in (reach or 0, first, limits.tokens))
