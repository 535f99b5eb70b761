"""Vectors in a prompt: those of its images, in the places of tokens.

They belong to one prompt and travel with it: ids alone never lead to them. What takes up the cache of an
earlier prompt compares `keys`, in which a digest of its pixels, which is no token id, stands for an image.

Shapes: B rows, T tokens, N places, D model.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from clearhead.core.transformer import Transformer


@dataclass(frozen=True, eq=False)
class PromptVectors:
    """The vectors of one prompt, and where they stand in it."""

    places: Tensor  # N: positions in the prompt, ascending
    vectors: Tensor  # N D
    keys: tuple[int, ...]  # the prompt, with a digest at each of these places

    @staticmethod
    def of(ids: Sequence[int], token_id: int, pixels: Tensor, vectors: Tensor) -> "PromptVectors":
        """Put the vectors [M, N, D] of images with pixels [M, C, H, W] where `token_id` stands in ids."""
        places = [place for place, token in enumerate(ids) if token == token_id]
        keys, count = list(ids), vectors.shape[1]
        digests = [digest(image) for image in pixels]
        for number, place in enumerate(places):
            keys[place] = digests[number // count]
        return PromptVectors(torch.tensor(places), vectors.flatten(0, 1), tuple(keys))

    def holds(self, start: int, stop: int) -> bool:
        """Return whether one of the places is among positions `start` to `stop`."""
        return bool(((self.places >= start) & (self.places < stop)).any())


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
        chosen = (own.places >= start) & (own.places < stop)
        columns = (own.places[chosen] - start + at).to(x.device)
        x[row, columns] = own.vectors[chosen.to(own.vectors.device)].to(x)
    return x
