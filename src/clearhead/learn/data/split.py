"""Split training from validation by the content of examples, never by their order.

Equal examples are on one side, and so are those that differ only in case, white space or Unicode form. Plain
text is a stream of chunks, read again at each pass, never whole in memory, and split on the way.
"""

import hashlib
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from clearhead.errors import refuse
from clearhead.learn.data.examples import Chunk

KEYS = 1 << 64
CHUNK = 1_000_000  # characters
FEW = 20  # so many documents or more are split as wholes; of fewer each gives its end


def key_of(*parts: str | bytes) -> int:
    """Return a number below `KEYS` that depends on the content alone."""
    whole = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(whole.digest(), "little")


def normal(text: str) -> str:
    """Return a text without differences of case, white space and Unicode form."""
    if text.isascii():
        return " ".join(text.lower().split())
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split())


def near_key(*parts: str) -> int:
    """Return a key that is the same for near-duplicates."""
    return key_of(*map(normal, parts))


def joined(keys: Sequence[int], pairs: Sequence[int | None]) -> list[int]:
    """Return one key for all examples that share a key or a pair, directly or through others: the lowest."""
    parent: dict[tuple[str, int], tuple[str, int]] = {}

    def root(node: tuple[str, int]) -> tuple[str, int]:
        while (above := parent.setdefault(node, node)) != node:
            parent[node] = parent[above]
            node = above
        return node

    for key, pair in zip(keys, pairs):
        if pair is not None:
            parent[root(("key", key))] = root(("pair", pair))
    lowest: dict[tuple[str, int], int] = {}
    for key in keys:
        own = root(("key", key))
        lowest[own] = min(lowest.get(own, key), key)
    return [lowest[root(("key", key))] for key in keys]


def percent(share: float) -> str:
    """Return a share in percent: '10%', '0.4%'."""
    return f"{share * 100:.3g}%"


def bound(low: int, high: int, share: float) -> int:
    """Return the key below which examples validate: about `share` of them, and at least one on either side.

    `low` and `high` are the smallest and the largest key. An example keeps its side when others are added,
    unless it was alone on it.
    """
    refuse(
        low == high,
        "the data holds one example, or one many times: two that differ are needed to train and to validate",
    )
    return min(max(int(share * KEYS), low + 1), high)


def split_keys(keys: Sequence[int], share: float, names: Sequence[Sequence[str]] = ()) -> list[bool]:
    """Return for each example whether it validates.

    `names` are the labels or tags of each example: those of validation must occur in training. Where chance
    put all examples of a label among those to validate, they go back, with all that have the same key. If
    none is left then, those with the lowest key whose labels others have too take their place.
    """
    limit = bound(min(keys), max(keys), share)
    validates = [key < limit for key in keys]
    known = {name for own, is_validation in zip(names, validates) if not is_validation for name in own}
    back = {
        key
        for key, own, is_validation in zip(keys, names, validates)
        if is_validation and not known.issuperset(own)
    }
    validates = [is_validation and key not in back for key, is_validation in zip(keys, validates)]
    if not any(validates):
        own_names: dict[int, set[str]] = {}
        for key, own in zip(keys, names):
            own_names.setdefault(key, set()).update(own)
        count = Counter(name for own in own_names.values() for name in own)
        spare = [key for key, own in own_names.items() if all(count[name] > 1 for name in own)]
        refuse(
            not spare,
            "no example is left to validate on: "
            "each has a label that no other has; name files under validation",
        )
        validates = [key == min(spare) for key in keys]
    return validates


# Text ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """Chunks of text that can be iterated over again and again."""

    start: Callable[[], Iterator[Chunk]]
    empty: str = "there is no text"  # the error where it has none

    def __iter__(self) -> Iterator[Chunk]:
        return self.start()

    def size(self) -> int:
        """Return the number of bytes of the text."""
        return sum(len(chunk.text.encode()) for chunk in self)


def cut(texts: Iterable[str]) -> Iterator[Chunk]:
    """Yield the chunks of one document; none if it holds only white space."""
    rest, begun = "", False
    for text in texts:
        rest += text
        while len(rest) > CHUNK:
            # Words of many tokenizers begin with the space before them: so cut after a line, else before a
            # space.
            end = rest.rfind("\n", 0, CHUNK) + 1 or max(rest.rfind(" ", 0, CHUNK), 0) or CHUNK
            yield Chunk(rest[:end], False)
            rest, begun = rest[end:], True
    if begun or rest.strip():
        yield Chunk(rest, True)


def stream(
    documents: Callable[[], Iterable[Iterable[str]]], lowercase: bool, limit: int | None, empty: str
) -> Stream:
    """Return the chunks of the first `limit` documents; `empty` is the error where there is no text."""

    def chunks() -> Iterator[Chunk]:
        for texts in islice(documents(), limit):
            for chunk in cut(texts):
                yield Chunk(chunk.text.lower(), chunk.ends) if lowercase else chunk

    return Stream(chunks, empty)


@dataclass
class Seen:
    """What one pass over a text found."""

    lengths: list[int] = field(default_factory=list)  # characters of the first `FEW` documents
    documents: int = 0
    keys: "array[int]" = field(default_factory=lambda: array("Q"))  # of the documents


def look(source: Stream) -> Seen:
    """Read a text once, so that every fault of its files is found now."""
    seen, begins, length = Seen(), True, 0
    for chunk in source:
        if begins:
            seen.keys.append(near_key(chunk.text))
            length = 0
        length, begins = length + len(chunk.text), chunk.ends
        if chunk.ends:
            seen.documents += 1
            seen.lengths += [length] if seen.documents <= FEW else []
    refuse(not seen.documents, source.empty)
    return seen


def split_text(source: Stream, share: float) -> tuple[Stream, Stream, str]:
    """Split a text -> text to train on, text to validate on, and a note on how."""
    seen = look(source)
    cuts = [int(length * (1 - share)) for length in seen.lengths]
    if seen.documents >= FEW:
        limit = bound(min(seen.keys), max(seen.keys), share)
        side = partial(_by_key, source, limit)
        real = percent(sum(key < limit for key in seen.keys) / len(seen.keys))
        note = f"{seen.documents:,} documents, {real} of them for validation, chosen by their content"
    else:
        refuse(
            not sum(cuts) or cuts == seen.lengths,
            f"the data has {sum(seen.lengths)} characters: "
            "too few to train on some and to validate on others",
        )
        side = partial(_by_place, source, cuts)
        whose = "the characters" if len(cuts) == 1 else "each document"
        note = f"the last {percent(share)} of {whose} for validation"
    return Stream(partial(side, False)), Stream(partial(side, True)), note


def _by_key(source: Stream, limit: int, validation: bool) -> Iterator[Chunk]:
    """Yield whole documents of one side.

    The first chunk decides, so that a document need not be held in memory: equal ones begin with equal
    chunks.
    """
    begins, wanted = True, False
    for chunk in source:
        if begins:
            wanted = (near_key(chunk.text) < limit) is validation
        begins = chunk.ends
        if wanted:
            yield chunk


def _by_place(source: Stream, cuts: Sequence[int], validation: bool) -> Iterator[Chunk]:
    """Yield the beginnings of documents, or their ends, cut at the given characters."""
    number = place = 0
    for chunk in source:
        at = min(max(cuts[number] - place, 0), len(chunk.text))
        text = chunk.text[at:] if validation else chunk.text[:at]
        place += len(chunk.text)
        if text:
            yield Chunk(text, chunk.ends if validation else chunk.ends or place >= cuts[number])
        if chunk.ends:
            number, place = number + 1, 0
