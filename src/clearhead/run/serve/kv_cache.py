"""The paged KV cache: keys of many sequences in one pool of blocks, found through block tables.

A block holds the keys of as many tokens in every layer of its group. A block that prompts share is full and
is never written again, so that none is ever copied: what a sequence adds goes into blocks of its own.
Layers whose windows reach equally far form a group, which has blocks and tables of its own: a group with a
window frees the blocks before it. Cross-attention is one more group, which holds the keys of sources.
In 8 bits a pool holds codes and scales, those of `quant/cache.py`; keys of sources stay as they are.
`PagedCache` describes one step of the engine to the model: chunks of several sequences, side by side.

Shapes: K key/value heads, T new tokens, S slots of the pool, E head width.
"""

import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from clearhead.core.cache import Cache, LayerKV
from clearhead.core.config import StackSpec
from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.masks import TokenInfo
from clearhead.run.kernels.fixed_cache import FixedKV
from clearhead.run.quant.cache import rounded, widened
from clearhead.variants.caches import KeysAndState, LayerState


@dataclass(frozen=True)
class PrefixKey:
    """The tokens whose keys a block holds, and the digest of all that stands before them."""

    parent: bytes
    tokens: tuple[int, ...]

    @property
    def digest(self) -> bytes:
        """The name of this beginning of a prompt: that of its parent, continued by its tokens."""
        text = ",".join(map(str, self.tokens)).encode()
        return hashlib.sha256(self.parent + text).digest()


def chain(salt: str, prompt: Sequence[int], size: int) -> list[PrefixKey]:
    """Return the names of the full blocks of a prompt; prompts with another `salt` have others."""
    parent, names = hashlib.sha256(salt.encode()).digest(), []
    for start in range(0, len(prompt) - size + 1, size):
        names.append(PrefixKey(parent, tuple(prompt[start : start + size])))
        parent = names[-1].digest
    return names


class BlockPool:
    """The blocks of one pool. A block that nobody uses keeps its name until its room is needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.users = [0] * count
        self.free = set(range(count))  # without a user and without a name
        self.idle: OrderedDict[int, None] = OrderedDict()  # named, without a user, oldest first
        self.named: dict[int, PrefixKey] = {}
        self.found: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Number of blocks that can be taken."""
        return len(self.free) + len(self.idle)

    @property
    def used(self) -> int:
        """Number of blocks that requests use."""
        return self.count - self.available

    def take(self, after: int | None) -> int:
        """Take a block, the one right after block `after` where it is free: neighbours are read in place."""
        if after is not None and after + 1 in self.free:
            block = after + 1
        elif self.free:
            block = self._roomy()
        else:
            block, _ = self.idle.popitem(last=False)
            self._forget(block)
        self.free.discard(block)
        self.users[block] = 1
        return block

    def _roomy(self) -> int:
        """Return a block with room after it: the middle of the longest run of free blocks."""
        best, length, start = 0, 0, None
        for block in range(self.count + 1):
            if block in self.free:
                start = block if start is None else start
            elif start is not None:
                if block - start > length:
                    best, length = start, block - start
                start = None
        whole = best == 0 or best - 1 in self.named  # nobody is likely to grow into it
        return best if whole else best + length // 2

    def share(self, block: int) -> None:
        """Count one more user of a named block."""
        self.idle.pop(block, None)
        self.users[block] += 1

    def release(self, block: int) -> None:
        """Count one user less."""
        self.users[block] -= 1
        if self.users[block]:
            return
        if block in self.named:
            self.idle[block] = None
        else:
            self.free.add(block)

    def name(self, block: int, name: PrefixKey) -> None:
        """Let later prompts find this block, which is full."""
        if block not in self.named and name.digest not in self.found:
            self.named[block], self.found[name.digest] = name, block

    def find(self, name: PrefixKey) -> int | None:
        """Return the block with these tokens after the same beginning; equal digests alone do not count."""
        block = self.found.get(name.digest)
        return block if block is not None and self.named[block] == name else None

    def _forget(self, block: int) -> None:
        del self.found[self.named.pop(block).digest]


Slots = slice | Tensor  # of a pool: neighbours are read in place, others are gathered


def read_slots(x: Tensor, slots: Slots) -> Tensor:
    """Return slots of a pool: [1, K, S, E] -> [1, K, S', E]."""
    return x[:, :, slots] if isinstance(slots, slice) else x.index_select(2, slots)


Group = tuple[int | None, int] | None  # the reach of a window and its first tokens; None: cross-attention


def group_of(kind: Kind | None) -> Group:
    """Return the group of a layer of this kind; None: of cross-attention."""
    return None if kind is None else (kind.reach, kind.kept_first)


class Pool:
    """The keys and values of every layer, in blocks of `size` tokens."""

    def __init__(
        self,
        spec: StackSpec,
        size: int,
        counts: dict[Group, int],
        dtype: torch.dtype,
        device: torch.device,
        int8: bool = False,
        kv_heads: Mapping[str, int] | None = None,
    ) -> None:
        """`kv_heads`: how many an attention has in this process, by name; None: all of them."""
        self.size, self.device = size, device
        self.spare = max(counts.values(), default=0)  # the number of a block more, which nobody reads
        self.blocks = {group: BlockPool(count) for group, count in counts.items()}
        # Of each layer K and V, 1 K S E; in 8 bits codes and scales, 1 K S 1, of K and then those of V.
        self.layers: dict[int, tuple[Tensor, ...]] = {}
        self.cross: dict[int, tuple[Tensor, ...]] = {}

        def room(attention: str, group: Group, kind: Kind) -> tuple[Tensor, ...]:
            every, *widths = kind.kept(spec, attention)
            heads = every if kv_heads is None else kv_heads[attention]
            slots = (counts[group] + 1) * size
            kinds = [(width, dtype) for width in widths]
            if int8 and group is not None:
                kinds = [part for width, _ in kinds for part in ((width, torch.int8), (1, torch.bfloat16))]
            return tuple(
                torch.zeros(1, heads, slots, width, dtype=kind, device=device) for width, kind in kinds
            )

        for layer, group, attention, kind in attentions_of(spec):
            (self.cross if group is None else self.layers)[layer] = room(attention, group, kind)

    @property
    def used(self) -> int:
        """Number of blocks in use, of all groups."""
        return sum(blocks.used for blocks in self.blocks.values())

    @property
    def usage(self) -> float:
        """The share of blocks in use, of the group that has the fewest left."""
        return max((blocks.used / blocks.count for blocks in self.blocks.values()), default=0.0)


def attentions_of(spec: StackSpec) -> list[tuple[int, Group, str, Kind]]:
    """Return the attentions of a stack that keep keys: layer, group, name and kind of each."""
    blocks = [f"{spec.prefix}blocks.{layer}" for layer in range(len(spec.kinds))]
    kept: list[tuple[int, Group, str, Kind]] = [
        (layer, group_of(kind), f"{blocks[layer]}.attention", kind)
        for layer, kind in enumerate(spec.kinds)
        if kind.masked
    ]
    return kept + [(layer, None, f"{block}.cross", FULL) for layer, block in enumerate(blocks) if spec.cross]


def token_bytes(spec: StackSpec, size: int, int8: bool = False) -> dict[Group, int]:
    """Return the groups that a stack needs, and the bytes of a token in each.

    Numbers have `size` bytes; in 8 bits one, and two scales of each head two.
    """
    total: dict[Group, int] = {}
    for _, group, attention, kind in attentions_of(spec):
        heads, key, value = kind.kept(spec, attention)
        each = key + value + 2 * 2 if int8 and group is not None else (key + value) * size
        total[group] = total.get(group, 0) + heads * each
    return total


def blocks_for(tokens: int, size: int) -> int:
    """Return how many blocks hold so many tokens."""
    return math.ceil(tokens / size)


class Table:
    """The blocks of one request in one group, by number; None where a window has passed."""

    def __init__(self, pool: Pool, group: Group) -> None:
        self.pool, self.blocks = pool, pool.blocks[group]
        self.reach, self.first = (None, 0) if group is None else group
        self.ids: list[int | None] = []

    def missing(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens need beyond those there are."""
        return max(0, blocks_for(tokens, self.pool.size) - len(self.ids))

    def extend(self, tokens: int) -> None:
        """Take the blocks that are missing; there must be as many."""
        for _ in range(self.missing(tokens)):
            self.ids.append(self.blocks.take(self.ids[-1] if self.ids else None))

    def start(self, position: int) -> int:
        """Return the first position, at a block, that a query at `position` may see, but for sinks."""
        size = self.pool.size
        return 0 if self.reach is None else max(0, (position - self.reach + 1) // size * size)

    def _passed(self, position: int) -> range:
        """Return the numbers of the blocks that queries from `position` on do not see."""
        return range(math.ceil(self.first / self.pool.size), self.start(position) // self.pool.size)

    def trim(self, position: int) -> None:
        """Free the blocks that queries from `position` on do not see."""
        for number in self._passed(position):
            block = self.ids[number]
            if block is not None:
                self.blocks.release(block)
                self.ids[number] = None

    def adopt(self, names: Sequence[PrefixKey]) -> None:
        """Share the named blocks that a query right after them sees; the table must be empty."""
        passed = self._passed(len(names) * self.pool.size)
        for number, name in enumerate(names):
            block = None if number in passed else self.blocks.find(name)
            if block is not None:
                self.blocks.share(block)
            self.ids.append(block)

    def knows(self, names: Sequence[PrefixKey]) -> bool:
        """Return whether `adopt` finds all that it needs."""
        passed = self._passed(len(names) * self.pool.size)
        return all(n in passed or self.blocks.find(name) is not None for n, name in enumerate(names))

    def clear(self) -> None:
        """Release every block."""
        for block in self.ids:
            if block is not None:
                self.blocks.release(block)
        self.ids = []

    def slots(self, start: int, stop: int) -> Slots:
        """Return the slots of positions `start` to `stop`; a slice where they are neighbours."""
        size, first = self.pool.size, start // self.pool.size
        ids = [block for block in self.ids[first : math.ceil(stop / size)] if block is not None]
        within = slice(start - first * size, stop - first * size)
        if all(b == a + 1 for a, b in itertools.pairwise(ids)):
            return slice(ids[0] * size + within.start, ids[0] * size + within.stop)
        blocks = torch.tensor(ids, device=self.pool.device)[:, None] * size
        return (blocks + torch.arange(size, device=self.pool.device)).flatten()[within]

    def visible(self, start: int, stop: int) -> tuple[TokenInfo, Slots]:
        """Return the tokens that queries from `start` to `stop` read, and where their keys are."""
        size, first = self.pool.size, self.start(start)
        sinks = min(math.ceil(self.first / size) * size, first)
        count = torch.arange(first, stop, device=self.pool.device)
        slots = self.slots(first, stop)
        if sinks:
            count = torch.cat([torch.arange(sinks, device=self.pool.device), count])
            slots = torch.cat([spelled(self.slots(0, sinks), self.pool), spelled(slots, self.pool)])
        return TokenInfo(count[None], count[None], None, None, plain=not sinks or sinks == first), slots


def spelled(slots: Slots, pool: Pool) -> Tensor:
    """Return slots as numbers."""
    if isinstance(slots, Tensor):
        return slots
    return torch.arange(slots.start, slots.stop, device=pool.device)


States = dict[int, LayerState]  # by layer, of one request


class Owner(Protocol):
    """Whose tokens a chunk has: a sequence with its block tables and states."""

    tables: dict[Group, Table]
    states: States


Of = TypeVar("Of", bound=Owner)


class Chunk(Generic[Of]):
    """Tokens `start` to `stop` of one sequence, which a step runs together."""

    def __init__(self, seq: Of, start: int, stop: int) -> None:
        self.seq, self.start, self.stop = seq, start, stop
        self.span = slice(0, stop - start)  # where they stand in the row of the step
        self._read: dict[Group, tuple[TokenInfo, Slots]] = {}

    def placed(self, at: int) -> int:
        """Place the tokens in the row of the step; return where the next ones begin."""
        self.span = slice(at, at + self.stop - self.start)
        return self.span.stop

    def read(self, group: Group) -> tuple[TokenInfo, Slots]:
        """Return the tokens that layers of a group read, and where their keys are."""
        if group not in self._read:
            self._read[group] = self.seq.tables[group].visible(self.start, self.stop)
        return self._read[group]

    def visible(self, kind: Kind) -> TokenInfo:
        """Return the tokens whose keys layers of this kind read, as a cache of this chunk alone would."""
        return self.read(group_of(kind))[0]


@dataclass(frozen=True)
class SourceTokens(TokenInfo):
    """The sources of a step's chunks: where the keys of each are, and how many tokens its chunk has."""

    slots: tuple[Slots, ...] = ()
    lengths: tuple[int, ...] = ()


class Rows(NamedTuple):
    """What the rows of a step read in the blocks of a group."""

    tokens: TokenInfo  # B S
    table: Tensor  # B S/size: numbers of blocks
    new: Tensor  # B: slots of the new tokens


class Int8Slots(NamedTuple):
    """Keys or values of a pool in 8 bits: codes [1, K, S, E] and scales [1, K, S, 1]."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype  # of what is read

    def at(self, slots: Slots) -> Tensor:
        """Return the numbers of some slots: [1, K, S', E]."""
        return widened(read_slots(self.codes, slots), read_slots(self.scales, slots), self.dtype)


class PagedInt8KV(LayerKV):
    """Keys and values of one layer in a pool in 8 bits.

    They are no `FixedKV`, so that no kernel takes them for numbers of the model's dtype.
    """

    cache: "PagedCache"

    def __init__(self, cache: "PagedCache", kind: Kind, parts: Sequence[Tensor]) -> None:
        super().__init__(cache)
        self.kind, self.parts = kind, parts

    def update(self, k: Tensor, v: Tensor) -> tuple[Int8Slots, Int8Slots]:  # type: ignore[override]
        """Round and write the new keys and values; return the whole pool, of which each chunk reads some."""
        slots = self.cache.new_slots(self.kind, k.shape[2])
        for buffer, new in zip(self.parts, (*rounded(k), *rounded(v))):
            buffer.index_copy_(2, slots, new)
        codes, scales, v_codes, v_scales = self.parts
        return Int8Slots(codes, scales, k.dtype), Int8Slots(v_codes, v_scales, v.dtype)


class PagedCache(Cache):
    """The cache of one step: keys in a pool, in the blocks of the requests' tables.

    Chunks of several requests stand side by side in one row. With `by_rows`, each has one token and is a row.
    A captured step has `given` [B, 2 + M] on its device instead: of each row token, position and blocks.
    """

    def __init__(
        self,
        pool: Pool,
        chunks: Sequence[Chunk[Any]] = (),
        sources: Sequence[int] = (),
        by_rows: bool = False,
        given: Tensor | None = None,
    ) -> None:
        """Prepare a step; `sources` are the lengths of the chunks' sources, once their keys are there."""
        super().__init__()
        self.pool, self.chunks, self.by_rows, self.given = pool, chunks, by_rows, given
        self.sources, self.source_cached = sources, bool(sources)
        self._written: dict[Group, Tensor] = {}
        self._rows: dict[Group, Rows] = {}
        if by_rows:
            self.count_from(torch.tensor([[chunk.start] for chunk in chunks]))
        if sources and by_rows:
            self.source = self.rows_of(None, [length - 1 for length in sources]).tokens
        elif sources:
            slots = tuple(p.seq.tables[None].slots(0, length) for p, length in zip(chunks, sources))
            nothing = torch.zeros(1, 1, dtype=torch.long, device=pool.device)
            lengths = tuple(chunk.stop - chunk.start for chunk in chunks)
            self.source = SourceTokens(nothing, nothing, None, None, False, slots=slots, lengths=lengths)

    def count_from(self, positions: Tensor) -> None:
        """Let the next call count its tokens from these positions [B, 1]."""
        before = positions - 1
        self.tokens = TokenInfo(before, before, torch.ones_like(before, dtype=torch.bool), None, False)

    def new_slots(self, kind: Kind | None, count: int) -> Tensor:
        """Return the slots that the new tokens, or those of the one source of this step, are written to."""
        group = group_of(kind)
        if group not in self._written:
            spans = [(p, p.start, p.stop) if group is not None else (p, 0, count) for p in self.chunks]
            parts = [spelled(p.seq.tables[group].slots(start, stop), self.pool) for p, start, stop in spans]
            self._written[group] = torch.cat(parts)
        return self._written[group]

    def rows_of(self, group: Group, last: Sequence[int] = ()) -> Rows:
        """Return what rows read of a group, up to position `last` of each row."""
        if group not in self._rows:
            size, rows, new = self.pool.size, [], []
            for chunk, position in zip(self.chunks, last):
                ids = chunk.seq.tables[group].ids[: position // size + 1]
                rows.append([(number, block) for number, block in enumerate(ids) if block is not None])
                new.append(rows[-1][-1][1] * size + position % size)
            longest, beyond = max(map(len, rows)), max(last) // size + 1
            padded = torch.tensor([row + [(beyond, 0)] * (longest - len(row)) for row in rows])  # B S/size 2
            positions = (padded[:, :, :1] * size + torch.arange(size)).flatten(1)  # B S
            real = positions <= torch.tensor(last)[:, None]
            tokens = TokenInfo(positions, positions, real, None, False)
            self._rows[group] = Rows(tokens, padded[:, :, 1].contiguous(), torch.tensor(new))
        return self._rows[group]

    def visible(self, kind: Kind) -> TokenInfo:
        """Return the tokens in the blocks that rows read; in a captured step the new ones.

        There a kernel that knows their positions sees what is before them by itself.
        """
        if not self.by_rows:
            return self._visible
        return self.rows_of(group_of(kind), [chunk.start for chunk in self.chunks]).tokens

    def layer(self, index: int, kind: Kind) -> LayerKV:
        """Return the keys of one layer, or the state of each chunk."""
        if not kind.masked:
            return self._state(index)
        parts = self.pool.layers[index]
        keys = FixedKV(self, kind, parts) if len(parts) == 2 else PagedInt8KV(self, kind, parts)
        return KeysAndState(keys, self._state(~index)) if kind.stateful else keys

    def _state(self, index: int) -> LayerState:
        return LayerState(chunks=[chunk.seq.states.setdefault(index, LayerState()) for chunk in self.chunks])

    def cross_layer(self, index: int) -> LayerKV:
        """Return the keys of sources; those of a source that is being read are written into the pool."""
        return FixedKV(self, None, self.pool.cross[index], source_cached=self.source_cached)

    def begin(self, tokens: TokenInfo) -> None:
        """Keep the new tokens: the chunks describe what is before them."""
        self._visible = tokens

    def advance(self) -> None:
        """Count nothing: the engine counts for each request."""


ALL: Group = group_of(FULL)
