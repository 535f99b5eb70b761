"""What a generation reads, and what becomes of a text that is longer than the model.

Shapes: B rows, S source length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.run.generate.request import SINKS, Request


@dataclass(frozen=True)
class Prompts:
    """What a generation reads: of each row the ids it goes on from, and, with an encoder, a source."""

    ids: Sequence[Sequence[int]]  # one token at least in each
    source: Tensor | None = None  # B S: what the encoder reads
    source_mask: Tensor | None = None  # B S: True for real tokens
    seeds: Sequence[int] | None = None  # of each row; None: the request's

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.ids))

    @property
    def sources(self) -> tuple[Tensor | None, Tensor | None]:
        """The source and its mask."""
        return self.source, self.source_mask

    @property
    def texts(self) -> list[list[int]]:
        """Of each row the ids of its source; without an encoder, of its prompt."""
        if self.source is None:
            return [list(row) for row in self.ids]
        real = (
            torch.ones_like(self.source, dtype=torch.bool) if self.source_mask is None else self.source_mask
        )
        return [row[kept].tolist() for row, kept in zip(self.source, real)]

    def rows(self, numbers: list[int]) -> "Prompts":
        """Return some rows alone; columns of the source that are padding in all of them are left out."""
        ids = [self.ids[number] for number in numbers]
        if self.source is None or self.source_mask is None:
            return Prompts(ids, None if self.source is None else self.source[numbers])
        columns = self.source_mask[numbers].any(0)
        source, mask = self.source[numbers][:, columns], self.source_mask[numbers][:, columns]
        return Prompts(ids, source, None if bool(mask.all()) else mask)


def steps_back(model: Transformer) -> bool:
    """Return True if a cache of the model can forget its last tokens: it holds keys alone, and no state."""
    return all(kind.chooses for kind in model.config.main.kinds)


def turns_by_length(model: Transformer) -> bool:
    """Return True where rotary angles depend on the length of the whole call, so on what is read together."""
    scaling = model.config.rope_scaling
    return scaling is not None and scaling.kind in ("dynamic", "longrope")


def slides(model: Transformer, request: Request, prompts: Prompts) -> bool:
    """Return True where a text may pass the model's positions, and its last tokens are to be read alone."""
    longest = prompts.longest + request.max_new_tokens - 1
    return request.overflow == "slide" and prompts.source is None and longest > model.config.max_positions


def stream_room(model: Transformer, request: Request) -> tuple[int, int]:
    """Return how many tokens a text that streams keeps, and how many of them are sinks."""
    sinks = SINKS if request.sinks is None else request.sinks
    return request.stream_window or model.config.max_positions, sinks


def streams(model: Transformer, request: Request, prompts: Prompts) -> bool:
    """Return True where a text may pass what is kept of it, and its first and last tokens are kept alone."""
    longest = prompts.longest + request.max_new_tokens - 1
    return request.overflow == "stream" and longest > stream_room(model, request)[0]


def is_stretched(model: Transformer, length: int) -> bool:
    """Return True where longrope takes its long divisors, which turn even the first tokens otherwise."""
    scaling = model.config.rope_scaling
    if scaling is None or scaling.kind != "longrope":
        return False
    return length > (scaling.original_positions or model.config.max_positions)
