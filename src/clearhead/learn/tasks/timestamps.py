"""The times in a transcript: the rules by which they are written, and the segments that they make.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.run.generate.request import REMOVED


@dataclass(frozen=True)
class Timestamps:
    """The rules that a transcript with times keeps to, as a function of logits.

    Tokens from `first` on are times, in order. A transcript begins with one. They come in pairs, the end of
    one segment and the beginning of the next, and never go back. Where all times together are more probable
    than any single word, a time is generated.
    """

    first: int  # id of the first time; the one before it says that no times are written
    end: int  # id of the token that ends a transcript; those before it are words
    latest: int | None = None  # how many times after the first a transcript may begin with

    def __call__(self, logits: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """Remove what must not come next, given the new tokens of each row: [B, V] -> [B, V]."""
        logits, first = wide(logits).clone(), self.first
        logits[:, first - 1] = REMOVED
        for row, written in zip(logits, rows):
            times = [token for token in written if token >= first]
            after_time = len(written) > 0 and written[-1] >= first
            closed = len(written) < 2 or written[-2] >= first  # the time before it ended a segment
            if after_time and closed:
                row[first:] = REMOVED  # words come next
            elif after_time:
                row[: self.end] = REMOVED  # a second time, or the end
            if times:
                opens = after_time and not closed  # the next segment may begin where this one ended
                row[first : times[-1] + (0 if opens else 1)] = REMOVED
            if not written:
                row[:first] = REMOVED
                if self.latest is not None:
                    row[first + self.latest + 1 :] = REMOVED
        probable = logits.log_softmax(-1)
        timed = probable[:, first:].logsumexp(-1) > probable[:, :first].amax(-1)  # B
        logits[:, :first] = logits[:, :first].masked_fill(timed[:, None], REMOVED)
        return logits


def segments_of(
    tokens: Sequence[int], first: int, window: int
) -> tuple[list[tuple[int, int, list[int]]], int | None]:
    """Cut the tokens of one window into segments; return (start, end, tokens) of each, and how far it goes.

    Times are counted in steps of the encoder, `window` of them. A window that ends with a pair of times, or
    in the middle of a segment after one, goes as far as the last pair: the rest is left for the next window.
    None: it goes to its end.
    """
    timed = [token >= first for token in tokens]
    ends = [place + 1 for place in range(len(tokens) - 1) if timed[place] and timed[place + 1]]
    alone = timed[-2:] == [False, True]  # nothing is said after the last time
    if not ends:
        times = [token for token in tokens if token >= first]
        end = times[-1] - first if times and times[-1] != first else window
        return [(0, end, list(tokens))], None
    if alone:
        ends.append(len(tokens))
    else:
        ends[-1] += 1  # the second time of the last pair shows that no segment was left open
    segments, start = [], 0
    for end in ends:
        part = list(tokens[start:end])
        last = part[-1] if end != ends[-1] or alone else part[-2]
        segments.append((part[0] - first, last - first, part))
        start = end
    return segments, None if alone else max(1, tokens[start - 2] - first)
