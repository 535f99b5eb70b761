"""`Batching`: how examples become batches; `make_batches` makes them.

A task brings its `Batching`: the function that encodes its examples and the class of its batches. Whatever a
class of batches needs comes to it as one `Setting`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.errors import refuse
from clearhead.learn.batches.batch import Batches
from clearhead.learn.batches.encoding import Columns, Encoder
from clearhead.learn.batches.rows import BARE, Frame, Ints, Stretches
from clearhead.learn.data.examples import Shape
from clearhead.learn.data.plan import DataPlan


@dataclass(frozen=True, eq=False)
class Encoded:
    """The examples of one side as arrays. Rows `x` of unequal length are flat, with `x_offsets` [N + 1]."""

    task: str
    arrays: Mapping[str, NDArray[Any]]
    vocab_size: int = 0
    specials: tuple[int, ...] = ()  # ids of special tokens
    sentinels: tuple[int, ...] = ()  # ids of the tokens that stand for a span taken out
    frame: Frame = BARE  # around one text
    pair_frame: Frame = BARE  # around two
    n_unknown: int = 0  # tokens that stand for text the tokenizer has no token for
    notes: tuple[str, ...] = ()  # what the user should know, one sentence each

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[name]

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens of all examples, without special tokens; 0 for images."""
        ragged = [name.removesuffix("_offsets") for name in self.arrays if name.endswith("_offsets")]
        return sum(len(self.arrays[name]) for name in ragged)

    def stretches(self, name: str) -> Stretches:
        """Return the rows of a ragged column."""
        offsets = np.asarray(self[f"{name}_offsets"])
        return Stretches(self[name], offsets[:-1], np.diff(offsets))


@dataclass(frozen=True, eq=False)
class Setting:
    """What batches are made from.

    Args:
        encoded: the examples of one side.
        plan: batch size, packing and what else the recipe says of data.
        special: ids of special tokens by role: pad, bos, eos, cls, sep, mask.
        length: the most tokens of a row.
        seed: of the order of examples and of everything drawn at random.
        training: True: shuffled in each epoch; False: in one order, every example exactly once.
    """

    encoded: Encoded
    plan: DataPlan
    special: Mapping[str, int]
    length: int
    seed: int
    training: bool

    @property
    def pad(self) -> int:
        """Return the id of padding."""
        return self.special.get("pad", 0)

    @property
    def side(self) -> str:
        """Return the name of the side, for messages."""
        return "training" if self.training else "validation"

    def need(self, role: str, what: str | None = None) -> int:
        """Return the id of a special token that the task, or `what`, cannot do without."""
        refuse(
            role not in self.special,
            f"{what or self.encoded.task} needs a {role} token, and the tokenizer has "
            f"{', '.join(self.special) or 'none at all'}: train one for this task, or choose another task",
        )
        return self.special[role]

    def room(self, frame: Frame, what: str) -> int:
        """Return how many tokens of a row the frame leaves to the text."""
        refuse(
            self.length <= frame.size,
            f"rows of {self.length} tokens have no room for {what} beside {frame.size} special tokens: "
            "raise data.max_length",
        )
        return self.length - frame.size

    def rows(self, tokens: int) -> int:
        """Return how many rows of so many tokens a batch holds."""
        by_tokens = self.plan.batch_tokens
        return self.plan.batch_size if by_tokens is None else max(1, by_tokens // tokens)


@dataclass(frozen=True)
class Batching:
    """How examples of one task become batches."""

    task: str
    shape: Shape
    encode: Callable[[Any, Encoder], Iterator[Columns]] | None  # None: images, which are not encoded
    make: Callable[[Setting], Batches]
    separator: str | None = None  # text: the role of the token between documents
    sentinels: bool = False  # whether spans are replaced by sentinels


def make_batches(
    batching: Batching,
    encoded: Encoded,
    plan: DataPlan,
    *,
    special: Mapping[str, int],
    length: int,
    seed: int,
    training: bool,
) -> Batches:
    """Make the batches of one side.

    The arguments are those of `Setting`, and the plan may ask for shorter rows.
    """
    setting = Setting(encoded, plan, special, min(length, plan.max_length or length), seed, training)
    sizes = {name: len(array) for name, array in encoded.arrays.items() if name not in ("mean", "std")}
    refuse(
        not any(size - 1 if name.endswith("_offsets") else size for name, size in sizes.items()),
        f"there are no examples for {setting.side}: give more data",
    )
    batches = batching.make(setting)
    batches.notes = encoded.notes + batches.notes
    return batches


def tensor(array: NDArray[Any]) -> Tensor:
    """Return integers, truth values or numbers as a model takes them."""
    dtype = {"b": np.bool_, "f": np.float32}.get(array.dtype.kind, np.int64)
    return torch.from_numpy(array.astype(dtype))


def blank(lengths: Ints, pad: int) -> tuple[Ints, Tensor | None]:
    """Return padding for rows of the given lengths [B, T], and the mask where some of it will stay."""
    real = np.arange(int(lengths.max())) < lengths[:, None]
    return np.full(real.shape, pad, dtype=np.int64), None if real.all() else tensor(real)
