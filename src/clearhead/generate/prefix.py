"""What one generation leaves for the next: a prompt is read from where it differs from the last one."""

from collections.abc import Sequence

from clearhead.generate.decode import Continuation, turns_by_length
from clearhead.model.cache import Cache
from clearhead.model.transformer import Transformer


class Prefix:
    """The cache of a single row, and the tokens it has read."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.cache = Cache()
        self.tokens: list[int] = []

    def begin(self, prompt: Sequence[int], room: int) -> Cache:
        """Return a cache with what `prompt`, all but its last token, shares with the tokens read before."""
        # Where angles go by the length of a call, what was read with fewer tokens was turned otherwise.
        common = 0 if turns_by_length(self.model) else agreed(self.tokens, prompt[:-1])
        self.cache.crop(common)
        self.cache.reserve = room
        return self.cache

    def end(self, row: Continuation) -> None:
        """Remember what the cache holds now."""
        self.tokens = (row.prompt + row.ids)[: self.cache.length]


def agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens at the beginning of both are the same."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
