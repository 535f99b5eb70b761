"""Vectors in a prompt: those of its images, at the positions of tokens.

They belong to one prompt and travel with it: ids alone never lead to them. What takes up the cache of an
earlier prompt compares `keys`, in which a digest of its pixels, which is no token id, stands for an image.

Shapes: B rows, T tokens, N image tokens, D model.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from clearhead.core.transformer import Transformer


@dataclass(frozen=True, eq=False)
class PromptVectors:
    """The vectors of one prompt, and where they stand in it."""

    positions: Tensor  # N: positions in the prompt, ascending
    vectors: Tensor  # N D
    keys: tuple[int, ...]  # the prompt, with a digest at each of these
    axes: Tensor | None = None  # T A: position of each token on each axis, of images of any size

    @staticmethod
    def of(
        ids: Sequence[int],
        token_id: int,
        pixels: Iterable[Tensor],
        vectors: Iterable[Tensor],
        axes: Tensor | None = None,
    ) -> "PromptVectors":
        """Put the vectors [N, D] of images with pixels [C, H, W] where `token_id` stands in ids."""
        positions = [place for place, token in enumerate(ids) if token == token_id]
        keys, vectors = list(ids), list(vectors)
        digests = [[digest(image)] * len(own) for image, own in zip(pixels, vectors)]
        for place, key in zip(positions, itertools.chain(*digests)):
            keys[place] = key
        return PromptVectors(torch.tensor(positions), torch.cat(vectors), tuple(keys), axes)

    def axes_at(self, start: int, stop: int) -> Tensor | None:
        """Return positions on each axis of tokens `start` to `stop`, past the prompt as of text: [N, A]."""
        if self.axes is None:
            return None
        length, width = self.axes.shape
        after = torch.arange(max(0, start - length), max(0, stop - length)) + int(self.axes.max()) + 1
        return torch.cat([self.axes[start:stop], after[:, None].expand(-1, width)])

    def holds(self, start: int, stop: int) -> bool:
        """Return whether one of them is among positions `start` to `stop`."""
        return bool(((self.positions >= start) & (self.positions < stop)).any())


def digest(pixels: Tensor) -> int:
    """Return a number for these pixels; below 0, as no token id is."""
    content = pixels.detach().float().cpu().contiguous()
    whole = hashlib.sha256(str(tuple(content.shape)).encode() + content.numpy().tobytes())
    return -1 - int.from_bytes(whole.digest())


class Span(NamedTuple):
    """Positions `start` to `stop` of a prompt, which stand in one row of a call from column `at` on."""

    vectors: PromptVectors | None
    start: int
    stop: int
    at: int = 0
    row: int = 0


def embedded(model: Transformer, ids: Tensor, spans: Iterable[Span]) -> Tensor | None:
    """Return the embedding of ids [B, T] with the vectors of prompts: [B, T, D]; None without any."""
    spans = [span for span in spans if span.vectors is not None and span.vectors.holds(span.start, span.stop)]
    if not spans:
        return None
    x = cast(Tensor, model.main.embedding.front(ids)).clone()
    for own, start, stop, at, row in spans:
        assert own is not None
        chosen = (own.positions >= start) & (own.positions < stop)
        columns = (own.positions[chosen] - start + at).to(x.device)
        x[row, columns] = own.vectors[chosen.to(own.vectors.device)].to(x)
    return x


def axes_of(spans: Iterable[Span], positions: Tensor) -> Tensor | None:
    """Return positions on each axis of tokens at `positions` [B, T], by the prompts in them: [B, T, A].

    None where no prompt has axes of its own: then positions are counted as ever.
    """
    known = [
        (span, span.vectors.axes_at(span.start, span.stop)) for span in spans if span.vectors is not None
    ]
    parts = [(span, axes) for span, axes in known if axes is not None]
    if not parts:
        return None
    found = positions[..., None].repeat(1, 1, parts[0][1].shape[-1])
    for span, axes in parts:
        found[span.row, span.at : span.at + len(axes)] = axes.to(found.device)
    return found
