"""Tags for the words of a text, and the spans they make."""

import itertools
from collections.abc import Sequence

from tokenizers import Encoding
from torch import Tensor

from clearhead.bundle import Bundle
from clearhead.hub.encodings import encoding_of, windows
from clearhead.tasks.results import Span, Tags, Word
from clearhead.tasks.run import check_head, logits_of

STRIDE = 128  # tokens that two windows over a long text share


def tag(m: Bundle, texts: Sequence[str | Sequence[str]], batch_size: int = 32) -> list[Tags]:
    """Tag the words of each text, or of each list of words; see `Model.tag`."""
    check_head(m, "tag")
    tokenizer, room = m.text_tokenizer, m.max_length
    given = [text if isinstance(text, str) else list(text) for text in texts]
    whole = [encoding_of(tokenizer, text) for text in given]
    rows = [
        (number, *window)
        for number, text in enumerate(given)
        for window in windows(tokenizer, room, text, STRIDE)
    ]
    # Of each token: how far it is from a cut, and its probabilities [C].
    scores: list[dict[int, tuple[int, Tensor]]] = [{} for _ in texts]
    found = logits_of(m, [piece for _, _, piece in rows], batch_size)
    for (number, start, piece), logits in zip(rows, found):
        inner = [at for at, part in enumerate(piece.sequence_ids) if part == 0]
        for place, at in enumerate(inner):
            token, after = start + place, start + len(inner)
            depth = min(place if start else room, after - 1 - token if after < len(whole[number]) else room)
            # Of two windows, take the one that shows more on both sides.
            if depth >= scores[number].get(token, (0,))[0]:
                scores[number][token] = (depth, logits[at].softmax(-1))
    return [_tags(m, *one) for one in zip(given, whole, scores)]


def _tags(
    m: Bundle, text: str | list[str], encoding: Encoding, scores: dict[int, tuple[int, Tensor]]
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
    names, words = m.class_names, []
    for first, start, end in places:
        label, score = "O", 0.0  # for a word of which normalisation leaves nothing
        if first >= 0:
            best = int(scores[first][1].argmax())
            label, score = names[best], float(scores[first][1][best])
        words.append(Word(text[start:end], label, start, end, score))
    return Tags(words, spans_of(words, text))


def spans_of(words: Sequence[Word], text: str) -> list[Span]:
    """Join neighbours of one kind, from a B- tag or a change of kind on; O is no kind."""
    groups: list[tuple[str, list[Word]]] = []
    for word in words:
        begins = word.label.startswith("B-")
        kind = word.label[2:] if word.label[:2] in ("B-", "I-") else word.label
        if groups and groups[-1][0] == kind and not begins:
            groups[-1][1].append(word)
        else:
            groups.append((kind, [word]))
    spans = []
    for kind, group in groups:
        if kind != "O":
            start, end = group[0].start, group[-1].end
            score = sum(word.score for word in group) / len(group)
            spans.append(Span(kind, text[start:end], start, end, score))
    return spans
