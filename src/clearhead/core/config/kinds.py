"""Kinds of attention: which keys a query sees, or what stands in for them. A config names one for each layer.

    full                     every key (in a decoder, every earlier one)
    window(128)              keys nearer than 128
    dilated(64, 4)           64 keys on each side, every fourth one
    strided(32)              keys nearer than 32, and every 32nd
    blocks(64, 3, 64, 0, 3)  blocks of 64: 3 around the query's own, 64 global tokens, 3 blocks at random
    global(257)              keys nearer than 257, and global tokens: the first, or those that a call names
    linear(elu)              a feature map in place of the softmax: elu, relu, or favor (Performer)
    low-rank(64)             64 mixtures of all keys (Linformer)
    gated-delta              a memory that forgets and corrects itself (Gated DeltaNet)

The kinds that choose among keys take `sinks=4`: the first 4 tokens are always seen.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, get_args, get_type_hints

from clearhead.errors import ConfigError, nearest, refuse

FeatureMap = Literal["elu", "relu", "favor"]
GlobalTokens = Literal["first", "question", "given"]


@dataclass(frozen=True)
class Kind:
    """One kind of attention; its fields are what stands between the brackets, in this order."""

    name: ClassVar[str]
    chooses: ClassVar[bool] = True  # among keys, by a mask; else it has a formula of its own
    shares: ClassVar[bool] = True  # its weights are those of ordinary attention
    both_sides: ClassVar[bool] = False  # it needs later tokens too: it is for encoders
    patterned: ClassVar[bool] = True  # each query has shares of the tokens, which a picture can show
    untapped: ClassVar[tuple[str, ...]] = ()  # activations of attention that it does not have

    @property
    def reach(self) -> int | None:
        """Number of latest tokens among which are all the keys of a query, but for sinks; None: all."""
        return None

    @property
    def nearby(self) -> int | None:
        """The same but for global tokens too."""
        return self.reach

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

    def shortened(self, most: int) -> Self:
        """Return the same kind with sizes of at most `most` tokens, for tests on short inputs."""
        sizes = ("size", "step", "first", "last", "sinks", "full")
        held = {name: min(most, getattr(self, name)) for name in sizes if hasattr(self, name)}
        return dataclasses.replace(self, **held)

    def __str__(self) -> str:
        given = [
            f"{entry.name}={getattr(self, entry.name)}"
            for entry in dataclasses.fields(self)
            if getattr(self, entry.name) != entry.default
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name


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


@dataclass(frozen=True)
class Dilated(Kind):
    """Every `step`-th key on each side, `size` of them with the query's own, and the first `sinks` tokens."""

    name = "dilated"
    size: int = 128
    step: int = 2
    sinks: int = 0

    @property
    def reach(self) -> int | None:
        """The window that all of them lie in."""
        return (self.size - 1) * self.step + 1


@dataclass(frozen=True)
class Strided(Kind):
    """Keys nearer than `step`, and every key at a multiple of `step` from the query (Sparse Transformer)."""

    name = "strided"
    step: int = 128
    sinks: int = 0


@dataclass(frozen=True)
class Blocks(Kind):
    """Blocks of keys around the query's own, global tokens, and blocks at random (BigBird, Longformer)."""

    name = "blocks"
    size: int = 64  # tokens of a block
    window: int = 3  # blocks around the query's own, which is one of them: an odd number
    first: int = 0  # tokens at the beginning that see all and are seen by all
    last: int = 0  # the same at the end
    random: int = 0  # blocks at random for each block of queries
    seed: int = 0
    sinks: int = 0
    counted: Literal["tokens", "blocks"] = "tokens"  # what first and last count
    repeat: int = 0  # how many times more the first ones stand in the softmax of the queries between the ends
    full: int = 0  # in rows of up to so many tokens, every query sees every key once

    def sees_all(self, length: int) -> bool:
        """Return whether the rows are short enough to be read in full."""
        return length <= self.full

    def shortened(self, most: int) -> Self:
        """Return the same with short blocks: several windows of them are to fit into a row."""
        return dataclasses.replace(super().shortened(most), size=min(self.size, max(1, most // 2)))


@dataclass(frozen=True)
class GlobalKind(Kind):
    """Keys nearer than `size`, and global tokens, which see all and are seen by all (Longformer).

    Global tokens attend through projections of their own. Which tokens are global is said by each call, as
    `global_mask`; `tokens` says it where a call does not.
    """

    name = "global"
    shares = False
    both_sides = True
    size: int = 257
    tokens: GlobalTokens = "first"  # the first; those before the first separator; none
    separator: int = 2  # question: the id that ends it; a row without one has no global tokens
    sinks: int = 0

    def sees_all(self, length: int) -> bool:
        """Return whether the window is as wide as the row."""
        return length <= self.size

    @property
    def nearby(self) -> int | None:
        """The window."""
        return self.size


@dataclass(frozen=True)
class LinearKind(Kind):
    """A feature map in place of the softmax, so that keys add up to a state."""

    name = "linear"
    chooses = False
    shares = False
    untapped = ("scores",)
    features: FeatureMap = "elu"
    count: int = 0  # favor: random features; 0: d_head · log(d_head), rounded up
    seed: int = 0  # favor: of these features


@dataclass(frozen=True)
class LowRank(Kind):
    """Keys and values mixed into `rank` of each by learned weights over positions (Linformer)."""

    name = "low-rank"
    shares = False
    both_sides = True
    chooses = patterned = False  # its shares are of mixtures
    rank: int = 64


@dataclass(frozen=True)
class GatedDeltaKind(Kind):
    """The gated delta rule, with a short convolution and an output gate (Gated DeltaNet)."""

    name = "gated-delta"
    shares = False
    chooses = patterned = False
    untapped = ("scores", "pattern")
    key_heads: int = 0  # 0: n_kv_heads
    value_heads: int = 0  # 0: n_heads
    d_key: int = 0  # of a head; 0: d_head
    d_value: int = 0  # 0: d_value
    kernel: int = 4  # tokens that the convolution sees


KINDS: dict[str, type[Kind]] = {
    kind.name: kind
    for kind in (Full, Windowed, Dilated, Strided, Blocks, GlobalKind, LinearKind, LowRank, GatedDeltaKind)
}
FULL = Full()
AT_LEAST = {"size": 1, "step": 1, "window": 1, "rank": 1, "kernel": 2}  # of a number; the others may be 0


def read_kind(text: str) -> Kind:
    """Return the kind that a text such as `window(128, sinks=4)` names."""
    parts = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text)
    name, inner = parts.groups() if parts else (text, None)
    known = ", ".join(KINDS)
    refuse(
        name not in KINDS,
        f'attention "{text}" is no kind of attention{nearest(str(name), KINDS)}: choose from {known}',
        ConfigError,
    )
    kind = KINDS[name]
    names = [entry.name for entry in dataclasses.fields(kind)]
    given: dict[str, int | str] = {}
    positional: list[str] = []
    for place, item in enumerate(part.strip() for part in (inner or "").split(",") if part.strip()):
        key, equals, value = (side.strip() for side in item.partition("="))
        refuse(
            not equals and place != len(positional),
            f'attention "{text}" has "{item}" after a number with a name: give it a name too',
            ConfigError,
        )
        positional += [] if equals else [item]
        key, value = (key, value) if equals else (names[place] if place < len(names) else "", key)
        takes = f"{name} takes {', '.join(names)}" if names else f"{name} takes nothing in brackets"
        refuse(key not in names, f'attention "{text}" has "{item}": {takes}', ConfigError)
        refuse(key in given, f'attention "{text}" gives {key} twice: {takes}', ConfigError)
        given[key] = _value(text, key, value, get_type_hints(kind)[key])
    return kind(**given)


def _value(text: str, key: str, value: str, hint: object) -> int | str:
    choices = get_args(hint)
    if choices:
        refuse(
            value not in choices,
            f'attention "{text}" has {key} "{value}": choose from {", ".join(choices)}',
            ConfigError,
        )
        return value
    least = AT_LEAST.get(key, 0)
    refuse(
        not value.isdecimal() or int(value) < least,
        f'attention "{text}" has {key} {value}: it must be a whole number, {least} or more',
        ConfigError,
    )
    return int(value)
