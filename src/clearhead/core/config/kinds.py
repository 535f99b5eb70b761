"""Kinds of attention: which keys a query sees, or what stands in for them. A config names one for each layer.

    full                     every key (in a decoder, every earlier one)
    window(128)              keys nearer than 128
    dilated(64, 4)           64 keys on each side, every fourth one
    strided(32)              keys nearer than 32, and every 32nd
    blocks(64, 3, 64, 0, 3)  blocks of 64: 3 around the query's own, 64 global tokens, 3 blocks at random
    global(257)              keys nearer than 257, and global tokens: the first, or those that a call names
    block-causal(4)          every key of the query's own block of 4 and of earlier ones (block diffusion)
    linear(elu)              a feature map in place of the softmax: elu, relu, or favor (Performer)
    low-rank(64)             64 mixtures of all keys (Linformer)
    gated-delta              a memory that forgets and corrects itself (Gated DeltaNet)
    latent(64)               every key, made of a latent of width 64, which a cache keeps (DeepSeek)
    mamba2(8, d_state=64)    a memory that decays by a scalar of each head: a state-space layer (Mamba-2)
    hybrid(8, d_state=64)    every key, and next to it a state-space layer of the same input (Falcon-H1)
    conv(3)                  a short convolution between two gates (LFM2)
    none                     nothing: the block has a feed-forward alone

The masked kinds take `sinks=4`: the first 4 tokens are always seen.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from clearhead.core.config.registry import Registry

SMALLEST, LARGEST = 32, 256  # tokens of a block, where a window is attended by blocks
# (query's position, key's position, tokens of the query's document) -> may attend; tensors that broadcast
Rule = Callable[[Any, Any, Any], Any]
Mistakes = Iterable[str]  # a line for each: what is wrong, what is allowed, the way out


@dataclass(frozen=True)
class Kind:
    """One kind of attention; its fields are what stands between the brackets, in this order."""

    name: ClassVar[str]
    # softmax attention over the keys that a mask leaves, kept in a cache; False: a formula of its own, and
    # linear or recurrent kinds keep a state in place of keys
    masked: ClassVar[bool] = True
    shares: ClassVar[bool] = True  # its weights are those of ordinary attention
    has_heads: ClassVar[bool] = True  # each writes to the stream by itself: none shares a gate or a norm
    both_sides: ClassVar[bool] = False  # it needs later tokens too: it is for encoders
    patterned: ClassVar[bool] = True  # each query has shares of the tokens, which a picture can show
    untapped: ClassVar[tuple[str, ...]] = ()  # activations of attention that it does not have
    also_tapped: ClassVar[tuple[str, ...]] = ()  # activations of attention that it alone has
    bounded: ClassVar[bool] = False  # it has weights for each position: none past max_positions can be read
    state_begins: ClassVar[tuple[float, ...]] = ()  # what fills each tensor of a state at first, if not 0

    @property
    def stateful(self) -> bool:
        """Whether a cache keeps a state of all earlier tokens, in place of keys or next to them."""
        return not self.masked

    @property
    def reach(self) -> int | None:
        """How many of the latest tokens a query may see, sinks not counted; None: all."""
        return None

    @property
    def nearby(self) -> int | None:
        """As `reach`, not counting global tokens."""
        return self.reach

    @property
    def global_tokens(self) -> str | None:
        """Which tokens see all and are seen by all, where a call names none; None: no tokens do."""
        return None

    @property
    def kept_first(self) -> int:
        """Number of first tokens that every query sees."""
        return int(getattr(self, "sinks", 0))

    @property
    def slots(self) -> int:
        """Number of keys that a ring holds: sinks, the reach, and one for what is not kept."""
        return self.kept_first + (self.reach or 0) + 1

    def sees_all(self, length: int) -> bool:
        """Return whether every query sees every key in rows of up to `length` tokens."""
        return False

    @property
    def block_size(self) -> int | None:
        """Number of tokens of a block, where long rows are attended by blocks; None: blocks do not pay."""
        if self.nearby is None:
            return None
        half = self.nearby // 2
        return min(LARGEST, max(SMALLEST, 1 << max(0, half - 1).bit_length()))

    def rule(self, causal: bool) -> Rule | None:
        """Return which keys a query sees, next to causality and padding; None: every one."""
        return None

    def describe(self, tokens: Any, causal: bool, ids: Any, global_mask: Any) -> Any:
        """Return the `TokenInfo` with what else the rule needs: their number, or which of them are global."""
        return tokens

    def with_counts(
        self, bias: Any, queries: Any, keys: Any, dtype: Any, name: str = "", tap: Any = None
    ) -> Any:
        """Add to a bias on the scores the log of how many times each key counts; default: nothing."""
        return bias

    def kept(self, spec: Any, attention: str) -> tuple[int, int, int]:
        """Return what a cache keeps of a token: heads, the width of a key, that of a value."""
        return spec.kv_heads_of(attention), spec.d_head, spec.d_value

    def state_shapes(self, spec: Any, heads: int) -> list[tuple[int, ...]]:
        """Return the shapes of what a row keeps in place of the keys of `heads`; none where it keeps keys."""
        return []

    def of_layer(self, layer: int) -> str:
        """Return how errors call this kind in a layer."""
        return f'attention "{self}" of layer {layer}'

    def mistakes(self, config: Any, stack: Any, layer: int) -> Mistakes:
        """Return what is wrong with this kind in a layer."""
        return ()

    def __str__(self) -> str:
        changed = [
            f"{entry.name}={getattr(self, entry.name)}"
            for entry in dataclasses.fields(self)
            if getattr(self, entry.name) != entry.default
        ]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


@dataclass(frozen=True)
class Full(Kind):
    """Every key."""

    name = "full"

    def sees_all(self, length: int) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True)
class Windowed(Kind):
    """Keys nearer than `size`, and the first `sinks` tokens."""

    name = "window"
    size: int = 128
    sinks: int = 0

    @property
    def reach(self) -> int | None:
        """The window."""
        return self.size

    def sees_all(self, length: int) -> bool:
        """Return whether the window is as wide as the row."""
        return length <= self.size

    def rule(self, causal: bool) -> Rule:
        """Return the window."""
        return near(self.size, self.sinks)


def near(size: int, sinks: int) -> Rule:
    """Return the rule of a window: keys nearer than `size`, and the first `sinks` tokens."""
    return with_sinks(lambda q, k, totals: (q - k).abs() < size, sinks)


def with_sinks(rule: Rule, sinks: int) -> Rule:
    """Return the rule that sees the first `sinks` tokens too."""
    return (lambda q, k, totals: rule(q, k, totals) | (k < sinks)) if sinks else rule


VARIANTS = "clearhead.variants.kinds"
OTHERS = {
    **{"dilated": "Dilated", "strided": "Strided", "blocks": "Blocks", "global": "GlobalKind"},
    "block-causal": "BlockCausal",
    **{"linear": "LinearKind", "low-rank": "LowRank", "gated-delta": "GatedDeltaKind", "latent": "Latent"},
    **{"mamba2": "Mamba2Kind", "hybrid": "HybridKind", "conv": "ShortConvKind", "none": "NoKind"},
}
# By the name that a config gives them, such as "window(128)", which `variants.checks.read_kind` takes apart.
KINDS: Registry[type[Kind]] = Registry(
    {"full": Full, "window": Windowed, **{name: f"{VARIANTS}:{kind}" for name, kind in OTHERS.items()}}
)
FULL = Full()
