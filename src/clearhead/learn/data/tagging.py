"""Tagging schemes: how the tags of words spell spans, such as B-PER I-PER for one PER.

| scheme | a span is tagged |
| --- | --- |
| IO | I I I |
| IOB1 | I I I, its first word B only right after a span of the same type (CoNLL-2003's own files) |
| IOB2 | B I I, also called BIO |
| IOE1 | I I I, its last word E only right before a span of the same type |
| IOE2 | I I E |
| IOBES | B I E, or S for one word |
| BILOU | B I L, or U for one word |

A tag is a prefix, a hyphen and a type; the type may be left out.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

PREFIXED = re.compile(r"([BIESLU])(?:-(.+))?", re.DOTALL)
UNTYPED = "_"  # the type of spans whose tags have none
FIRST, LAST = frozenset("BSU"), frozenset("ESLU")  # prefixes of a word that begins or ends a span for certain
Found = tuple[str, int, int]  # type, first and last place of a span


@dataclass(frozen=True)
class Rules:
    """Which neighbours begin, continue and end a span: pairs of prefixes, those of seqeval's strict mode.

    After a pair, = and ! ask for the same type and for another one; a point stands for any prefix.
    """

    starts: str
    continues: str
    ends: str

    def allow(self, name: str, before: tuple[str, str], word: tuple[str, str]) -> bool:
        """Return True if a word may follow the one before it in this way; each is a prefix and a type."""
        same = "=" if before[1] == word[1] else "!"
        pairs = (before[0] + word[0], "." + word[0], before[0] + ".")
        rules = getattr(self, name).split()
        return any(rule[:2] in pairs and rule[2:] in ("", same) for rule in rules)


WHOLE = "BI= BE= BL= II= IE= IL="  # how a span goes on that has a first and a last word
RULES = {
    "IOB1": Rules("OI II! BI IB= BB=", "BI= II=", "II! IO IB BO BI! BB="),
    "IOB2": Rules(".B", "BI= II=", "IO II! IB BO BI! BB"),
    # As seqeval has it, E is never the first word of a span, so that figures agree.
    "IOE1": Rules("OI II! EI EE=", "II= IE=", "II! IO IE! EI= EE="),
    "IOE2": Rules("OI OE EI EE II! IE!", "II= IE=", "E."),
    "IOBES": Rules(".B .S", WHOLE, "S. E."),
    "BILOU": Rules(".B .U", WHOLE, "U. L."),
}
RULES["IO"] = RULES["IOB1"]
PREFIXES = {"IO": "I", "IOB2": "BI", "IOE2": "IE", "IOBES": "BIES", "BILOU": "BILU"}  # the first that fits


@dataclass(frozen=True)
class Tagging:
    """The scheme of some tags; "" where none has a prefix, and each tag other than O is a span of its own."""

    scheme: str = ""
    prefixes: str = ""  # of the scheme, whether each occurs or not

    def split(self, tag: str) -> tuple[str, str]:
        """Return prefix and type of a tag; O has no type, and a tag without a prefix is a type."""
        match = PREFIXED.fullmatch(tag)
        if match is None or match[1] not in self.prefixes:
            return ("O", "") if tag == "O" else ("", tag)
        return match[1], match[2] or UNTYPED

    def spans(self, tags: Sequence[str]) -> set[Found]:
        """Return type, first and last place of each span of a sentence, strictly by the scheme."""
        outside, rules = ("O", ""), RULES.get(self.scheme, RULES["IOB2"])
        words = [*map(self.split, tags), outside]
        found: set[Found] = {(kind, at, at) for at, (prefix, kind) in enumerate(words) if not prefix}
        words = [word if word[0] else outside for word in words]
        place = 0
        while place < len(tags):
            first, before = place, words[place - 1] if place else outside
            place += 1
            if rules.allow("starts", before, words[first]):
                while rules.allow("continues", words[place - 1], words[place]):
                    place += 1
                if rules.allow("ends", words[place - 1], words[place]):
                    found.add((words[first][1], first, place - 1))
        return found

    def joined(self, tags: Sequence[str]) -> list[Found]:
        """Return the spans of tags that a model chose, also where they break the scheme, in their order.

        Neighbours of one type are a span, unless a prefix begins or ends one between them.
        """
        found: list[Found] = []
        before = ("O", "")
        for place, (prefix, kind) in enumerate(map(self.split, tags)):
            if prefix != "O":
                if before[1] == kind and prefix not in FIRST and before[0] not in LAST:
                    found[-1] = (kind, found[-1][1], place)
                else:
                    found.append((kind, place, place))
            before = prefix, kind
        return found


def by_labels(labels: Iterable[str]) -> Tagging:
    """Return the scheme of some tags as far as their prefixes show it."""
    tags = {*labels} - {"O"}
    matches = {match for match in map(PREFIXED.fullmatch, tags) if match is not None}
    prefixes = {match[1] for match in matches}
    named = next((name for name, letters in PREFIXES.items() if prefixes <= {*letters}), "")
    if len(matches) < len(tags) or not named:
        # Some tags are types, as E-mail may be beside Phone: only B- and I- are surely prefixes.
        prefixes = {tag[0] for tag in tags if tag[:2] in ("B-", "I-") and tag[2:]}
        named = "IOB2" if "B" in prefixes else "IO"
    return Tagging(named, PREFIXES["IOB2" if named == "IO" else named]) if prefixes else Tagging()


def recognise(sentences: Iterable[Sequence[str]]) -> Tagging:
    """Return the scheme of tagged sentences: by the prefixes, and by how most spans begin or end."""
    rows = [*sentences]
    tagging = by_labels({tag for row in rows for tag in row})
    if tagging.scheme == "IOB2" and _mostly_inside(rows, tagging, "B"):
        return replace(tagging, scheme="IOB1")
    if tagging.scheme == "IOE2" and _mostly_inside([row[::-1] for row in rows], tagging, "E"):
        return replace(tagging, scheme="IOE1")
    return tagging


def _mostly_inside(rows: Iterable[Sequence[str]], tagging: Tagging, letter: str) -> bool:
    """Return True if more spans that follow none of their type begin with I than with this letter."""
    inside = marked = 0
    for row in rows:
        before = ""
        for prefix, kind in map(tagging.split, row):
            if kind != before:
                inside, marked = inside + (prefix == "I"), marked + (prefix == letter)
            before = kind
    return inside > marked
