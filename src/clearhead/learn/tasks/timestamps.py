"""When speech was spoken: the rules of times in a transcript, its segments, and the time of each word.

Times are tokens, from which segments follow. The time of a word follows from cross-attention: some heads of
the decoder look at the part of the sound that a token is spoken in. generation_config.json names them as
`alignment_heads`; without it, they are all heads of the upper half of the layers. Their attention is
normalised over the tokens, smoothed by a median filter over time, and averaged. The path through it that
gathers most, one step in tokens or in time after the other (dynamic time warping), says where each token
begins. Tokens and times are those of transformers, words are formed as by OpenAI's program.

Shapes: B rows, H heads that align, T tokens, S positions of the encoder, V vocabulary.
"""

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.errors import refuse
from clearhead.hub.tokens.text import decoded
from clearhead.run.bundle import Bundle
from clearhead.run.generate.request import REMOVED
from clearhead.variants.contexts import edit

MEDIAN_WIDTH = 7  # positions that the median filter looks at, where config.json does not say
UNSPACED = ("zh", "ja", "th", "lo", "my", "yue")  # languages whose words are not set apart by spaces
# Punctuation that belongs to the word after it, and to the word before it.
OPENING, CLOSING = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
PART = "\ufffd"  # what a tokenizer writes for part of a character
Heads = list[tuple[int, int]]  # layer and number of each


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


def alignment_heads(m: Bundle) -> Heads:
    """Return the heads of cross-attention that follow the sound, by layer and number."""
    spec = m.config.main
    layers, heads = spec.n_layers, spec.n_heads
    stated: Any = m.generation.get("alignment_heads")
    if stated is None:
        return [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
    known = [(layer, head) for layer in range(layers) for head in range(heads)]
    listed = stated if isinstance(stated, list) else []
    pairs: list[Any] = [tuple(pair) if isinstance(pair, list | tuple) else () for pair in listed]
    refuse(
        not pairs or not all(pair in known for pair in pairs),
        f"generation_config.json has alignment_heads {stated!r:.60}: they must be pairs of a layer below "
        f"{layers} and a head below {heads}",
    )
    return [(layer, head) for layer, head in pairs]


def read_again(m: Bundle, source: Tensor, ids: Sequence[int], heads: Heads) -> tuple[Tensor, Tensor]:
    """Read a window [1, T, M] and all of its tokens at once; return attention [H, T, S] and logits [T, V]."""
    seen: dict[tuple[int, int], Tensor] = {}

    def keep(layer: int) -> Any:
        def take(pattern: Tensor) -> None:  # 1 H T S
            seen.update({pair: pattern[0, pair[1]].float() for pair in heads if pair[0] == layer})

        return take

    with edit(m.model, {f"blocks.{layer}.cross.pattern": keep(layer) for layer, _ in heads}):
        logits = m.model(torch.tensor([list(ids)], device=source.device), source=source).logits[0]
    return torch.stack([seen[pair] for pair in heads]), logits


def token_positions(attention: Tensor, width: int) -> list[int]:
    """Return the position at which each token begins: attention [H, T, S] -> T."""
    if not attention.shape[1]:
        return []
    std, mean = attention.std(-2, keepdim=True, unbiased=False), attention.mean(-2, keepdim=True)
    normal = torch.where(std > 0, (attention - mean) / std, 0.0)  # a single token has nothing to differ from
    shared = median_filtered(normal, width).mean(0)  # T S
    return warped(-shared.double().cpu().numpy())


def median_filtered(x: Tensor, width: int) -> Tensor:
    """Replace each number by the median of the `width` around it; the ends are mirrored: [H, T, S]."""
    half = width // 2
    if x.shape[-1] <= half:
        return x
    padded = nnf.pad(x, (half, half, 0, 0), mode="reflect")
    return padded.unfold(-1, width, 1).sort(-1).values[..., half]


def warped(cost: NDArray[np.float64]) -> list[int]:
    """Return where each row of a cost [T, S] begins on the cheapest path from its first corner to its last.

    A step goes to the next row, to the next column, or to both. The cost of all cells of a diagonal is known
    at once, from the two diagonals before it. Sums are kept in float32 and ties decided as in the reference.
    """
    T, S = cost.shape
    steps = np.full((T + 1, S + 1), 2, np.int8)  # how a cell is reached: 0 both, 1 next row, 2 next column
    before = np.full(T + 1, np.inf, np.float32)  # sums of the diagonal before the last, by row
    last = before.copy()
    before[0] = 0
    for diagonal in range(2, T + S + 1):
        rows = np.arange(max(1, diagonal - S), min(T, diagonal - 1) + 1)
        both, row, column = before[rows - 1], last[rows - 1], last[rows]
        takes_both = (both < row) & (both < column)
        takes_row = ~takes_both & (row < both) & (row < column)
        sums = np.where(takes_both, both, np.where(takes_row, row, column))
        steps[rows, diagonal - rows] = np.where(takes_both, 0, np.where(takes_row, 1, 2))
        before, last = last, np.full(T + 1, np.inf, np.float32)
        last[rows] = cost[rows - 1, diagonal - rows - 1] + sums
    begins, i, j = [0] * T, T, S
    while i > 0 and j > 0:
        begins[i - 1] = j - 1
        step = int(steps[i, j])
        i, j = i - (step != 2), j - (step != 1)
    return begins


def median_width(m: Bundle) -> int:
    """Return how many positions the median filter looks at, as config.json says."""
    stated = {} if m.description is None else m.description.theirs
    width = stated.get("median_filter_width", MEDIAN_WIDTH)
    refuse(
        type(width) is not int or width < 1 or width % 2 == 0,
        f"config.json has median_filter_width {width!r}: it must be an odd number, 1 or more",
    )
    return int(width)


# Words ------------------------------------------------------------------------------------------------------


def split_words(tokenizer: Tokenizer, ids: Sequence[int], language: str | None) -> list[tuple[str, int]]:
    """Return the words of a text, spaces and punctuation with them, and how many tokens each has."""
    words: list[tuple[str, int]] = []
    for text, count in characters(tokenizer, ids):
        sign = text.strip() in string.punctuation  # or nothing but space
        if language in UNSPACED or text.startswith(" ") or sign or not words:
            words.append((text, count))
        else:
            words[-1] = words[-1][0] + text, words[-1][1] + count
    opened: list[tuple[str, int]] = []  # from the last word to the first
    for text, count in reversed(words):
        if opened and text.startswith(" ") and text.strip() in OPENING:
            opened[-1] = text + opened[-1][0], count + opened[-1][1]
        else:
            opened.append((text, count))
    closed: list[tuple[str, int]] = []
    for text, count in reversed(opened):
        if closed and not closed[-1][0].endswith(" ") and text in CLOSING:
            closed[-1] = closed[-1][0] + text, closed[-1][1] + count
        else:
            closed.append((text, count))
    return closed


def characters(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield the shortest runs of tokens that are whole characters: their text, and how many they are."""
    whole, at, run = decoded(tokenizer, list(ids)), 0, list[int]()
    for token in ids:
        run.append(token)
        text = decoded(tokenizer, run)
        part = text.find(PART)
        # The text itself may hold this sign, or end in the middle of a character.
        if part < 0 or at + part >= len(whole) or whole[at + part] == PART:
            yield text, len(run)
            at, run = at + len(text), []
    if run:
        yield decoded(tokenizer, run), len(run)
