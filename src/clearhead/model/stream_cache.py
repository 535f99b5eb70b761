"""The streaming form of the cache: the first tokens and the last ones, for texts without end.

Each row keeps its first tokens, the sinks, and its last ones, and attends to them as if they were a text of
their own: positions are those within the cache (StreamingLLM). Keys in the ring stay rotated by the place of
their token in the whole text, as the query is, so distances among them are right already. The sinks alone
move: for every query they stand just before the ring.

Shapes: B batch, K key/value heads, T new tokens, S all tokens, N sinks, E head width.
"""

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.errors import InputError, refuse
from clearhead.model.cache import LayerKeys, RingKeys, WindowCache
from clearhead.model.masks import Tokens, join
from clearhead.model.positions import RopePositions, Rotary, rotate


def check_stream(config: ModelConfig, window: int, sinks: int) -> None:
    """Raise `InputError` where a model cannot attend to the first and the last tokens of a text alone."""
    refuse(
        config.family != "decoder",
        f"streaming is for a decoder, and this is a model of family {config.family}: leave it out",
    )
    refuse(
        config.positions in ("learned", "sinusoidal"),
        f"{config.positions} positions are added to a token when it is read, and cannot move: "
        'use overflow="slide"',
    )
    scaling = config.rope_scaling
    refuse(
        scaling is not None and scaling.kind in ("dynamic", "longrope"),
        f"{scaling.kind if scaling else ''} scaling turns keys by the length of the text, which streaming "
        'has none of: use overflow="slide"',
    )
    most = config.max_positions
    refuse(
        not 0 < window <= most,
        f"stream_window {window} must lie between 1 and the model's {most} positions",
    )
    refuse(
        not 0 <= sinks < window,
        f"sinks {sinks} leave no room for the last tokens: choose 0 to {window - 1}, below stream_window",
    )
    own = [layer for layer in config.stacks[-1].windows if layer is not None and layer < window]
    refuse(
        sinks > 0 and len(own) == config.n_layers,
        f"sinks {sinks} change nothing: each layer has a window of its own below stream_window {window}; "
        f"choose stream_window up to {max(own, default=0)}, or sinks 0",
    )


class StreamCache(WindowCache):
    """The keys of the first `sinks` tokens of each row and of its last ones, `window` tokens in all.

    Layers with a window of their own that is smaller keep to that.
    """

    def __init__(self, config: ModelConfig, window: int, sinks: int = 4) -> None:
        check_stream(config, window, sinks)
        super().__init__()
        self.window, self.sinks, self.spec = window, sinks, config.stacks[-1]
        self.rope = RopePositions(self.spec) if self.spec.positions == "rope" else None
        self.turns: dict[int | None, Rotary] = {}  # by window of the layer: what moves the sinks

    @property
    def moves(self) -> bool:
        """Whether the sinks may have to move for a query of the call in progress."""
        return self.sinks > 0 and self.length + self._new.length > self.window

    def layer(self, index: int, window: int | None) -> LayerKeys:
        """Return the self-attention keys of one layer."""
        if not self._streams(window):
            return super().layer(index, window)
        turned = self.rope is not None and index not in self.spec.rope_skips
        return self.layers.setdefault(index, StreamKeys(self, self.window, turned, window))

    def _streams(self, window: int | None) -> bool:
        return window is None or window >= self.window

    def begin(self, tokens: Tokens) -> None:
        """Prepare for new tokens."""
        refuse(
            tokens.documents is not None or tokens.positions is not tokens.order,
            "a stream cache gives positions itself, to one document a row: leave positions and documents out",
        )
        self._new = tokens
        self.slots.clear()
        self.turns.clear()

    def visible(self, window: int | None) -> Tokens:
        """Return the ring with one new token in it; before several, what each of them sees of it."""
        if not self._streams(window):
            return super().visible(window)
        if self.window not in self.slots:
            self._write(self.window, self._new)
        ring, new, N = self.rings[self.window], self._new, self.sinks
        shift = (new.order - self.window + 1).clamp(min=0)  # B|1 T: how far the sinks have moved
        if self.moves and self.rope is not None and window not in self.turns:
            cos, sin = self.rope.rotary(shift, window)
            size = torch.hypot(cos, sin)  # a factor on all keys, which these have already
            self.turns[window] = Rotary(cos / size, sin / size)
        if new.length == 1:
            positions = ring.positions.clone()
            positions[:, :N] += shift
            return Tokens(ring.order, positions, ring.real, None, plain=False)
        seen = join(self._before[self.window], new)
        copies = new.length * N if self.moves else 0
        if copies:  # the sinks once more for each query past the window, which sees its own alone
            order = new.order.repeat_interleave(N, 1)  # B|1 T·N
            places = order - self.window + 1 + torch.arange(N, device=order.device).repeat(new.length)
            real = new.real_mask().repeat_interleave(N, 1) & (order >= self.window)
            seen = join(seen, Tokens(order, places, real, None, plain=False))
        until = torch.where(seen.order < N, self.window, seen.order + self.window - N)
        until[:, until.shape[1] - copies :] = seen.order[:, until.shape[1] - copies :] + 1
        return replace(seen, until=until)

    def aligned(self, bias: Tensor, window: int | None) -> Tensor:
        """Refuse a bias: it speaks of keys that are forgotten."""
        raise InputError("bias speaks of keys that a stream cache forgets: use Cache()")

    def advance(self) -> None:
        """Count the new tokens as read."""
        self.tokens, self.length = next(iter(self.rings.values())), self.length + self._new.length

    def _slot(self, window: int, order: Tensor, last: Tensor) -> Tensor:
        """Return the slot of each token in a ring, [B|1, T]; the sinks come first and stay."""
        if window != self.window:
            return super()._slot(window, order, last)
        recent = window - self.sinks
        slot = torch.where(order > last - recent, self.sinks + (order - self.sinks) % recent, window)
        return torch.where(order < self.sinks, order, slot)

    def crop(self, length: int) -> None:
        """Refuse to forget the last tokens: those before them are gone."""
        refuse(
            length != self.length,
            f"a stream cache of {self.length} tokens cannot be cropped to {length}: use Cache() to step back",
        )


class StreamKeys(RingKeys):
    """The sinks and the last tokens of each row in one buffer; the sinks are rotated anew for each query."""

    cache: StreamCache
    first: Tensor | None = None  # B K N+1 E: the sinks where they stood, and one slot for all else

    def __init__(self, cache: StreamCache, window: int, turned: bool, own: int | None) -> None:
        """Make the keys of a layer that rotates keys if `turned`; `own` is the window of the layer."""
        super().__init__(cache, window)
        self.turned, self.own = turned, own

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write into the ring; return it, or for several tokens all that `StreamCache.visible` describes."""
        (B, K, T, E), N = k.shape, self.cache.sinks
        keys, values = super().update(k, v)
        if self.turned and N:
            if self.first is None:
                self.first = k.new_zeros(B, K, N + 1, E)
            slot = self.cache.slots[self.window].clamp(max=N).expand(B, T)[:, None, :, None]
            self.first.scatter_(2, slot.expand(-1, K, -1, E), k.detach())
        if not self.cache.moves:
            return keys, values
        buffer, held = self.read()
        sinks = (buffer if self.first is None else self.first)[:, :, None, :N].expand(-1, -1, T, -1, -1)
        if self.turned:
            turn = Rotary(*(part[..., None, :] for part in self.cache.turns[self.own]))
            sinks = rotate(sinks, turn, self.cache.spec.rope_layout)  # B K T N E
        if T == 1:
            if self.turned:
                buffer[:, :, :N] = sinks[:, :, 0]
            return keys, values
        held = held[:, :, None, :N].expand(-1, -1, T, -1, -1)
        return torch.cat([keys, sinks.flatten(2, 3)], 2), torch.cat([values, held.flatten(2, 3)], 2)

    def reorder(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        super().reorder(rows)
        self.first = None if self.first is None else self.first[rows]
