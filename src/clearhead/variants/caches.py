"""Caches that forget: states in place of keys, `WindowCache`, and `StreamCache` for sequences without end.

`LayerState` are of constant size, for kinds of attention that keep a state of all earlier tokens.

A `WindowCache` keeps the keys of the window of each layer. A `StreamCache` keeps the first tokens of each
row, the sinks, and its last ones, and attends to them as if they were a sequence of their own: positions are
those within the cache (StreamingLLM). Keys in the ring stay rotated by the position of their token in the
whole sequence, as the query is, so distances among them are right already. The sinks alone move: for every
query they stand just before the ring.

Shapes: B batch, K key/value heads, T new tokens, S all tokens, N sinks, E head width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.core.cache import Cache, LayerKV
from clearhead.core.config import TABLES, ModelConfig
from clearhead.core.config.kinds import Full, Kind, Windowed
from clearhead.core.masks import TokenInfo, join, next_order
from clearhead.core.positions import Rotary, rotate
from clearhead.errors import InputError, refuse
from clearhead.variants.positions import AxesPositions


@dataclass(frozen=True)
class Slots(TokenInfo):
    """The tokens in the slots of a buffer: padding and documents are always spelled out."""

    real: Tensor
    documents: Tensor
    plain: bool = False


def empty_slots(batch: int, slots: int, device: torch.device | str) -> Slots:
    """Return slots that hold no token yet."""
    zeros = torch.zeros(batch, slots, dtype=torch.long, device=device)
    return Slots(zeros, zeros.clone(), torch.zeros_like(zeros, dtype=torch.bool), zeros.clone())


class LayerState(LayerKV):
    """What a layer keeps in place of keys: tensors of constant size, each with a row per row of the batch.

    `buffers` never move: states are copied into them, and `begins` are the values that they have at first.
    `chunks` are the states of several sequences that stand side by side in one row.
    """

    steps_back = False
    fixed_size = True

    def __init__(
        self,
        buffers: Sequence[Tensor] = (),
        begins: Sequence[float] = (),
        chunks: Sequence["LayerState"] = (),
    ) -> None:
        self.state, self.begins, self.chunks = tuple(buffers), begins, chunks
        self.k = self.v = self.state[0] if buffers else None  # for the number of rows

    def keep(self, *state: Tensor) -> None:
        """Keep this state, the answer of the call in progress."""
        if self.begins:
            for buffer, new in zip(self.state, state):
                buffer.copy_(new.detach())
            return
        # Copies, since each may be a part of all the states of a pass.
        self.state = tuple(part.detach().clone() for part in state)
        self.k = self.v = self.state[0]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all that is kept."""
        return self.state

    def follow(self, tokens: TokenInfo | None) -> None:
        """Reset the state if no token is left."""
        if tokens is None and self.begins:
            for buffer, value in zip(self.state, self.begins):
                buffer.fill_(value)
        elif tokens is None:
            self.state, self.k, self.v = (), None, None

    def reorder(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        if self.state:
            self.keep(*(part[rows] for part in self.state))


class KeysAndState(LayerKV):
    """What a layer keeps that has both."""

    def __init__(self, keys: LayerKV, state: LayerKV) -> None:
        self.keys, self.state = keys, state


def both(cache: Cache, index: int) -> KeysAndState:
    """Return the keys of a layer, and the state next to them, which is empty at first."""
    return KeysAndState(cache.layers[index], cache.layers.setdefault(~index, LayerState()))


def latest(tokens: TokenInfo, count: int) -> TokenInfo:
    """Return the last `count` slots, and before them the last real token of each row to count on from.

    As long as there are no more than twice as many, all are returned.
    """
    if tokens.length <= 2 * count:
        return tokens
    gone, kept = tokens.map(lambda x: x[:, :-count]), tokens.map(lambda x: x[:, -count:])
    last = torch.where(gone.real_mask(), gone.order, -1).argmax(1, keepdim=True)  # B 1
    return join(gone.map(lambda x: x.expand(len(last), -1).gather(1, last)), kept)


class WindowCache(Cache):
    """Layers with a window keep its keys, those of the last real tokens of each row; other layers grow.

    A token is written to slot `order % window` of its row, so each row forgets by its own count of real
    tokens. Sinks have slots of their own before these, by position. One more slot at the end takes what is
    not kept: padding, and tokens that leave the window within one call.
    """

    _new: TokenInfo  # those of the call in progress

    def __init__(self, reserve: int = 0) -> None:
        super().__init__(reserve)
        self.slots: dict[Kind, Tensor] = {}  # the slot of each new token, B T
        self._before: dict[Kind, TokenInfo] = {}  # the ring before the call in progress

    def policy(self, index: int, kind: Kind) -> LayerKV:
        """Choose a ring for a layer with a window."""
        return super().policy(index, kind) if kind.reach is None else RingKV(self, kind)

    def begin(self, tokens: TokenInfo) -> None:
        """Prepare for new tokens; each ring is written when the first layer with its window asks."""
        super().begin(tokens)
        self._new = tokens
        self.slots.clear()

    def visible(self, kind: Kind) -> TokenInfo:
        """Return the ring with one new token in it, or the ring before the call and several new tokens."""
        if kind.reach is None:
            return super().visible(kind)
        if kind not in self.slots:
            self._write(kind, kind.reach, self._new)
        return self.rings[kind] if self._new.length == 1 else join(self._before[kind], self._new)

    def aligned(self, bias: Tensor, kind: Kind) -> Tensor:
        """Return the bias in layers without a window; refuse it where a ring lacks some of its keys."""
        refuse(
            kind.reach is not None,
            f"bias speaks of keys that a window cache of {kind.reach} forgets: use Cache()",
        )
        return bias

    def _write(self, kind: Kind, window: int, tokens: TokenInfo) -> None:
        """Write the new tokens into the ring of this kind."""
        order, real, sinks, trash = tokens.order, tokens.real_mask(), kind.kept_first, kind.slots - 1
        old = self.rings.get(kind) or empty_slots(order.shape[0], kind.slots, order.device)
        batch = max(order.shape[0], old.order.shape[0])  # 1 on either side where all rows are alike
        last = torch.where(real, order, -1).amax(1, keepdim=True)
        slot = torch.where(real & (order > last - window), sinks + order % window, trash)
        if sinks:
            slot = torch.where(real & (tokens.positions < sinks), tokens.positions, slot)
        slot = slot.expand(batch, -1)

        def written(ring: Tensor, new: Tensor) -> Tensor:
            return ring.expand(batch, -1).scatter(1, slot, new.expand(batch, -1))

        order, positions, real, documents = map(written, old.tensors(), tokens.tensors())
        real[:, trash] = False
        self.rings[kind] = Slots(order, positions, real, documents)
        self._before[kind], self.slots[kind] = old, slot

    def reorder(self, rows: Tensor, cross: bool = True) -> None:
        """Replace row i by row `rows[i]` in every layer and ring."""
        super().reorder(rows, cross)
        self.rings = {kind: ring.of_rows(rows) for kind, ring in self.rings.items()}

    def crop(self, length: int) -> None:
        """Forget all, or all but the first `length` slots as long as no window has begun to forget."""
        for kind, ring in self.rings.items():
            refuse(
                0 < length < self.length and int(ring.order.max()) >= (kind.reach or 0),
                f"a window cache of {kind.reach} has forgotten what a crop to {length} needs: "
                "use Cache() to step back",
            )
        if length == self.length:
            return
        super().crop(length)
        real = self.tokens.real if self.tokens is not None else None
        count = length if real is None else next_order(self.tokens, real.shape[0], real.device)
        for kind, ring in self.rings.items():
            self.rings[kind] = replace(ring, real=ring.real_mask() & (ring.order < count))


class RingKV(LayerKV):
    """Keys of the sinks and of the last real tokens of each row, and one slot for what is not kept.

    In a stream, the sinks move: they are rotated anew for each query.
    """

    fixed_size = True
    cache: WindowCache
    first: Tensor | None = None  # B K N+1 E: the sinks where they stood, and one slot for all else

    def __init__(
        self, cache: WindowCache, kind: Kind, stream: "StreamCache | None" = None, rotated: Kind | None = None
    ) -> None:
        """Make the keys of a layer; in a `stream`, `rotated` is its kind of attention if it rotates keys."""
        super().__init__(cache)
        self.kind, self.stream, self.rotated = kind, stream, rotated

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write into the ring; return it, or for several tokens all that `visible` describes."""
        B, K, T, E = k.shape
        if self.k is None or self.v is None:
            self.k = k.new_zeros(B, K, self.kind.slots, E)
            self.v = v.new_zeros(B, K, self.kind.slots, v.shape[3])
        slot = self.cache.slots[self.kind].expand(B, T)[:, None, :, None]
        k, v = k.detach(), v.detach()
        keys, values = (self.k, self.v) if T == 1 else (torch.cat([self.k, k], 2), torch.cat([self.v, v], 2))
        self.k.scatter_(2, slot.expand(-1, K, -1, E), k)
        self.v.scatter_(2, slot.expand(-1, K, -1, v.shape[3]), v)
        N = 0 if self.stream is None else self.stream.n_sink_tokens
        if self.rotated is not None and N:
            if self.first is None:
                self.first = k.new_zeros(B, K, N + 1, E)
            self.first.scatter_(2, slot.clamp(max=N).expand(-1, K, -1, E), k)
        if self.stream is None or not self.stream.moves:
            return keys, values
        sinks = (self.k if self.first is None else self.first)[:, :, None, :N].expand(-1, -1, T, -1, -1)
        if self.rotated is not None:
            rotation = Rotary(*(part[..., None, :] for part in self.stream.rotations[self.rotated]))
            sinks = rotate(sinks, rotation, self.stream.spec.rope_layout)  # B K T N E
        if T == 1:
            self.k[:, :, :N] = sinks[:, :, 0]
            return keys, values
        kept = self.v[:, :, None, :N].expand(-1, -1, T, -1, -1)
        return torch.cat([keys, sinks.flatten(2, 3)], 2), torch.cat([values, kept.flatten(2, 3)], 2)

    def reorder(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        super().reorder(rows)
        self.first = None if self.first is None else self.first[rows]


def check_stream(config: ModelConfig, window: int, sinks: int) -> None:
    """Raise `InputError` where a model cannot attend to the first and the last tokens of a text alone."""
    for mistake in stream_mistakes(config, window, sinks):
        raise InputError(mistake)


def stream_mistakes(config: ModelConfig, window: int, sinks: int) -> Iterator[str]:
    """Yield what is wrong with streaming a model."""
    slide, scaling, most = 'use overflow="slide"', config.rope_scaling, config.max_positions
    if config.decoder is None or config.encoder is not None:
        yield "streaming is for a decoder alone, and this model has an encoder: leave it out"
    if config.positions in (*TABLES, "sinusoidal"):
        yield f"{config.positions} positions are added to a token when it is read, and cannot move: {slide}"
    if scaling is not None and config.rotates_by_length:
        rotates = f"{scaling.kind} scaling rotates keys by the length of a text"
        yield f"{rotates}, and this one has none: {slide}"
    if config.main.recalls:
        yield f"smear_gate and bigrams read the token before, which streaming may have moved: {slide}"
    if min(config.main.capacities) < 1:
        keeps = f"depth_capacity {config.depth_capacity} keeps other tokens in each layer"
        yield f"{keeps}, and streaming moves all of them alike: {slide}"
    if not 0 < window <= most:
        yield f"stream_window {window} must lie between 1 and the model's {most} positions"
    if not 0 <= sinks < window:
        room = f"sinks {sinks} leave no room for the last tokens"
        yield f"{room}: choose 0 to {window - 1}, below stream_window"
    streaming = [kind for kind in config.stacks[-1].kinds if sees_past(kind, window)]
    for kind in streaming:
        if not isinstance(kind, Full | Windowed):
            yield f"attention {kind} goes by positions in the whole text, which streaming forgets: {slide}"
    if sinks > 0 and not streaming:
        yield (
            f"sinks {sinks} change nothing: no layer of the model sees {window} tokens; "
            "choose sinks 0, or a smaller stream_window"
        )


def sees_past(kind: Kind, window: int) -> bool:
    """Return True if a layer of this kind sees more than `window` tokens; the others keep to their own."""
    return kind.masked and (kind.reach is None or kind.reach >= window)


class StreamCache(WindowCache):
    """The keys of the first `sinks` tokens of each row and of its last ones, `window` tokens in all."""

    def __init__(self, config: ModelConfig, window: int, sinks: int = 4) -> None:
        check_stream(config, window, sinks)
        super().__init__()
        self.window, self.n_sink_tokens, self.spec = window, sinks, config.stacks[-1]
        self.ring = Windowed(window - sinks, sinks)  # what each layer that streams holds
        self.rope = AxesPositions(self.spec) if self.spec.positions == "rope" else None
        self.rotations: dict[Kind, Rotary] = {}  # what moves the sinks

    @property
    def moves(self) -> bool:
        """Whether the sinks may have to move for a query of the call in progress."""
        return self.n_sink_tokens > 0 and self.length + self._new.length > self.window

    def policy(self, index: int, kind: Kind) -> LayerKV:
        """Choose a ring whose sinks move for a layer that sees past the window."""
        if not sees_past(kind, self.window):
            return super().policy(index, kind)
        rotates = self.rope is not None and index not in self.spec.rope_skips
        return RingKV(self, self.ring, self, kind if rotates else None)

    def begin(self, tokens: TokenInfo) -> None:
        """Prepare for new tokens."""
        refuse(
            tokens.documents is not None or tokens.positions is not tokens.order,
            "a stream cache gives positions itself, to one document a row: leave positions and documents out",
        )
        self._new = tokens
        self.slots.clear()
        self.rotations.clear()
        self._write(self.ring, self.ring.size, tokens)

    def visible(self, kind: Kind) -> TokenInfo:
        """Return the ring with one new token in it; for several, all that they see, and until when."""
        if not sees_past(kind, self.window):
            return super().visible(kind)
        ring, new, N = self.rings[self.ring], self._new, self.n_sink_tokens
        shift = (new.order - self.window + 1).clamp(min=0)  # B|1 T: how far the sinks have moved
        if self.moves and self.rope is not None:
            cos, sin = self.rope.rotary(shift, kind.reach)
            size = torch.hypot(cos, sin)  # a factor on all keys, which these have already
            self.rotations[kind] = Rotary(cos / size, sin / size)
        if new.length == 1:
            positions = ring.positions.clone()
            positions[:, :N] += shift
            return replace(ring, positions=positions)
        seen, copies = join(self._before[self.ring], new), new.length * N if self.moves else 0
        if copies:  # the sinks once more for each query past the window, which sees its own alone
            order = new.order.repeat_interleave(N, 1)  # B|1 T·N
            positions = order - self.window + 1 + torch.arange(N, device=order.device).repeat(new.length)
            real = new.real_mask().repeat_interleave(N, 1) & (order >= self.window)
            seen = join(seen, TokenInfo(order, positions, real, None, plain=False))
        until = torch.where(seen.order < N, self.window, seen.order + self.ring.size)
        own = until.shape[1] - copies
        until[:, own:] = seen.order[:, own:] + 1
        return replace(seen, until=until)

    def aligned(self, bias: Tensor, kind: Kind) -> Tensor:
        """Refuse a bias: it speaks of keys that are forgotten."""
        raise InputError("bias speaks of keys that a stream cache forgets: use Cache()")

    def advance(self) -> None:
        """Count the new tokens as read."""
        self.tokens, self.length = self.rings[self.ring], self.length + self._new.length

    def crop(self, length: int) -> None:
        """Forget all; refuse to forget the last tokens alone, since those before them are gone."""
        refuse(
            length not in (0, self.length),
            f"a stream cache of {self.length} tokens cannot be cropped to {length}: use Cache() to step back",
        )
        super().crop(length)
