"""The context axis: stacks that work on some of the tokens of each row, with attention over a ring.

Norms, feed-forwards and the loss of each token are local. The states of the last layer stay shared out for a
language head, and are gathered for heads that read whole rows. Outside of training every process reads whole
rows.

Shapes: B batch, T tokens of a row, t tokens of a row that are here, D model.
"""

import functools
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from clearhead.core.attention import Attention
from clearhead.core.cache import Cache
from clearhead.core.config.kinds import Kind
from clearhead.core.heads import Head, LanguageHead
from clearhead.core.masks import Tokens, View
from clearhead.core.positions import Rotary
from clearhead.core.stack import Memory, Stack
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.learn.parallel.ring import RingAttention
from clearhead.learn.parallel.rounds import Ring, ring_view
from clearhead.learn.parallel.tokens import OwnTokens, RowShares, own_tokens
from clearhead.run.kernels.parts import like
from clearhead.variants.fronts import PatchFront
from clearhead.variants.positions import RelativePositions


def share_tokens(model: Transformer, ring: Ring) -> None:
    """Let a model, in training, work on the tokens of this process; the others of the ring have the rest."""
    for name, stack in [(name, part) for name, part in model.named_children() if isinstance(part, Stack)]:
        _check(stack, ring.size)
        for inner, part in list(stack.named_modules()):
            if isinstance(part, Attention):
                stack.set_submodule(inner, like(part, _joined(cast(Any, type(part)), RingAttention)))
            elif isinstance(part, PatchFront):
                stack.set_submodule(inner, like(part, OwnPatches, place=ring.place, processes=ring.size))
        # A head of its own kind reads whole rows; a stage of a pipeline that passes states on has none.
        gathers = stack is model.main and type(model.head) is not Head
        gathers = gathers and not isinstance(model.head, LanguageHead)
        kind = _joined(cast(Any, type(stack)), RingStack)
        model.set_submodule(name, like(stack, kind, ring=ring, gathers=gathers, real=None))


@functools.cache
def _joined(kind: Any, own: Any) -> Any:
    """Return `own`, a class of ours, or a class that has the ways of both: of some heads, of some layers."""
    return own if kind in own.__mro__ else type(kind.__name__, (kind, own), {})


def _check(stack: Stack, size: int) -> None:
    """Refuse what the context axis cannot share out."""
    spec, axis = stack.spec, f"parallel.context {size}"
    for layer, kind in enumerate(spec.kinds):
        refuse(
            not (kind.chooses and kind.shares),
            f"{axis} shares out layers of full, window, dilated, strided and blocks attention, and layer "
            f"{layer} is {kind}: use data, shard or tensor",
            ConfigError,
        )
    for found, what in (
        (min(spec.capacities) < 1, "depth_capacity, which ranks the tokens of whole rows"),
        (spec.layer_drop > 0, f"layer_drop {spec.layer_drop}, which draws for whole rows"),
        (spec.positions == "disentangled", "positions disentangled, whose scores are made in each layer"),
        (spec.input == "frames", 'input "frames", whose convolutions reach over the ends of chunks'),
    ):
        refuse(found, f"{axis} cannot share out a model with {what}: use data, shard or tensor", ConfigError)


class OwnPatches(PatchFront):
    """Patches of which this process has some, in training."""

    place: int
    processes: int

    def forward(self, pixels: Tensor, real: Tensor | None = None, tap: Tap = SILENT) -> Tensor:
        """Map [B, C, height, width] -> [B, t, D]; outside of training, see `PatchFront`."""
        vectors = super().forward(pixels, real, tap)
        if not self.training:
            return vectors
        return RowShares(vectors.shape[1], self.processes, zigzag=False).pick(vectors, self.place)


class RingStack(Stack):
    """A stack that, in training, works on the tokens of this process."""

    ring: Ring
    gathers: bool  # the states of whole rows
    real: Tensor | None  # B t, of the latest pass; None: all

    @property
    def copies(self) -> int:  # type: ignore[override]
        """Number of processes that return the same states in training."""
        return self.ring.size if self.gathers else 1

    def layout(self, length: int) -> RowShares:
        """Return how rows of some length are shared out."""
        return RowShares(length, self.ring.size, self.spec.causal)

    def own(self, x: Tensor, fill: float) -> Tensor:
        """See `Stack.own`."""
        return self.layout(x.shape[1]).pick(x, self.ring.place, fill) if self.training else x

    def worked_on(self, mask: Tensor | None) -> Tensor | None:
        """See `Stack.worked_on`."""
        return self.real

    def forward(
        self,
        inputs: Tensor,
        tokens: Tokens,
        memory: Memory | None = None,
        cache: Cache | None = None,
        types: Tensor | None = None,
        prefix: Tensor | None = None,
        bias: Tensor | None = None,
        input_mask: Tensor | None = None,
        global_mask: Tensor | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map the inputs of whole rows to the states of the tokens here [B, t, D], or of all of them."""
        if not self.training:
            return super().forward(
                inputs, tokens, memory, cache, types, prefix, bias, input_mask, global_mask, tap
            )
        refuse(
            any(one is not None for one in (cache, prefix, bias)),
            "cache, prefix and bias are not shared out: call model.eval() first, or train without context",
        )
        layout, place = self.layout(tokens.length), self.ring.place
        own = own_tokens(tokens, layout, place)
        self.real = None if own.real is None else own.real.expand(inputs.shape[0], -1)
        if self.spec.input != "patches":
            inputs = layout.pick(inputs, place)
        types = None if types is None else layout.pick(types.expand(inputs.shape[0], -1), place)
        hidden = super().forward(inputs, own, memory, types=types, tap=tap)
        if not self.gathers:
            return hidden
        # Each process computes the whole loss and counts one of `copies` shares of it.
        return layout.joined(self.ring.gathered(hidden).transpose(0, 1).flatten(1, 2))

    def _views(
        self,
        of: Iterable[Kind],
        tokens: Tokens,
        cache: Cache | None,
        prefix: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        tap: Tap,
        ids: Tensor,
        global_mask: Tensor | None,
    ) -> dict[Kind, View]:
        """Return views of the keys of all processes; outside of training, see `Stack`."""
        if not isinstance(tokens, OwnTokens):
            return super()._views(of, tokens, cache, prefix, bias, dtype, tap, ids, global_mask)
        scheme, causal = self.positions, self.spec.causal
        # Some scalings of rotation go by the last position of the row.
        last = tokens.whole.positions.amax().expand(tokens.positions.shape[0], 1)
        reached, views = torch.cat([tokens.positions, last], 1), {}
        for kind in dict.fromkeys(of):
            turns = scheme.rotary(reached, kind.reach)
            whole = kind.describe(tokens.whole, causal, ids, None)

            def biased(queries: Tokens, keys: Tokens, kind: Kind = kind) -> Tensor | None:
                total = scheme.bias(queries.positions, keys.positions, dtype)
                return cast(Tensor | None, kind.with_counts(total, queries, keys, dtype))

            views[kind] = ring_view(
                self.ring,
                (whole, tokens.layout),
                (whole, tokens.layout),
                kind,
                causal,
                width=ids.shape[0] * self.spec.n_heads,
                bias_of=biased,
                weights=self.of_bias,
                rotary=None if turns is None else Rotary(*(turn[:, :, :-1] for turn in turns)),
            )
        return cast(dict[Kind, View], views)

    def of_bias(self) -> list[Tensor]:
        """Return the weights that the bias of scores is made of, if they are trained."""
        made_of = self.positions.table.parameters() if isinstance(self.positions, RelativePositions) else ()
        return [weight for weight in made_of if weight.requires_grad]

    def cross_view(self, tokens: Tokens, source: Tokens, batch: int) -> View:
        """See `Stack.cross_view`; the source is shared out as the tokens of an encoder are."""
        if not isinstance(tokens, OwnTokens):
            return super().cross_view(tokens, source, batch)
        there = RowShares(source.length, self.ring.size, zigzag=False)
        return ring_view(
            self.ring, (tokens.whole, tokens.layout), (source, there), width=batch * self.spec.n_heads
        )
