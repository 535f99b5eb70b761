"""Tags for the words of a text, and the spans they make."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding
from torch import Tensor

from clearhead.hub.encodings import encoding_of, windows
from clearhead.tasks.results import Span, Tags, Word
from clearhead.tasks.run import check_head, logits_of, names_of

if TYPE_CHECKING:
    from clearhead.bundle import Model

STRIDE = 128  # tokens that two windows over a long text share


def tag(loaded: Model, text: Any, batch_size: int = 32) -> Tags | list[Tags]:
    """A tag for each word of a text, or of a list of words; and the spans that B- and I- tags make.

    A word is what the tokenizer splits a text into before it looks for pieces; its tag is that of its first piece.
    A list of lists of words gives a list. Long texts are read in overlapping windows.
    """
    if not isinstance(text, str) and not text:
        return []
    single = isinstance(text, str) or isinstance(text[0], str)
    made = tag_all(loaded, [text] if single else text, batch_size)
    return made[0] if single else made


def tag_all(loaded: Model, texts: Sequence[str | Sequence[str]], batch_size: int = 32) -> list[Tags]:
    """`tag` of several texts, each a text or a list of words."""
    check_head(loaded, "tag")
    tokenizer, room = loaded.text_tokenizer, loaded.max_length
    given = [text if isinstance(text, str) else list(text) for text in texts]
    whole = [encoding_of(tokenizer, text) for text in given]
    rows = [
        (number, *window)
        for number, text in enumerate(given)
        for window in windows(tokenizer, room, text, STRIDE)
    ]
    scores: list[dict[int, tuple[int, Tensor]]] = [
        {} for _ in texts
    ]  # of each token: how far it is from a cut, and [C]
    for (number, start, piece), logits in zip(
        rows, logits_of(loaded, [piece for _, _, piece in rows], batch_size)
    ):
        inner = [at for at, part in enumerate(piece.sequence_ids) if part == 0]
        for place, at in enumerate(inner):
            token, after = start + place, start + len(inner)
            depth = min(place if start else room, after - 1 - token if after < len(whole[number]) else room)
            if (
                depth >= scores[number].get(token, (0,))[0]
            ):  # of two windows, the one that shows more on both sides
                scores[number][token] = (depth, logits[at].softmax(-1))
    return [_tags(loaded, text, encoding, found) for text, encoding, found in zip(given, whole, scores)]


def _tags(
    loaded: Model, text: str | list[str], encoding: Encoding, scores: dict[int, tuple[int, Tensor]]
) -> Tags:
    pieces: dict[int, tuple[int, int, int]] = {}  # of each word: its first token, where it starts and ends
    for token, (number, (start, end)) in enumerate(zip(encoding.word_ids, encoding.offsets)):
        if number is not None:
            first, start, _ = pieces.get(number, (token, start, end))
            pieces[number] = (first, start, end)
    if isinstance(text, str):
        places = list(pieces.values())
    else:
        ends = list(itertools.accumulate(len(word) + 1 for word in text))
        places = [
            (pieces.get(n, (-1,))[0], ends[n] - 1 - len(word), ends[n] - 1) for n, word in enumerate(text)
        ]
        text = " ".join(text)
    names, words = names_of(loaded), []
    for first, start, end in places:
        label, score = "O", 0.0  # for a word of which normalisation leaves nothing
        if first >= 0:
            best = int(scores[first][1].argmax())
            label, score = names[best], float(scores[first][1][best])
        words.append(Word(text[start:end], label, start, end, score))
    return Tags(words, spans_of(words, text))


def spans_of(words: Sequence[Word], text: str) -> list[Span]:
    """Neighbours of one kind, from a B- tag or a change of kind on; O is no kind."""
    groups: list[list[Word]] = []
    kinds: list[str] = []
    for word in words:
        begins, kind = (
            word.label.startswith("B-"),
            word.label[2:] if word.label[:2] in ("B-", "I-") else word.label,
        )
        if groups and kinds[-1] == kind and not begins:
            groups[-1].append(word)
        else:
            groups.append([word])
            kinds.append(kind)
    return [
        Span(
            kind,
            text[group[0].start : group[-1].end],
            group[0].start,
            group[-1].end,
            sum(word.score for word in group) / len(group),
        )
        for kind, group in zip(kinds, groups)
        if kind != "O"
    ]
