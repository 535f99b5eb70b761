"""Spans in every tagging scheme: encoded and found again, by their definition, and as seqeval counts them."""

from __future__ import annotations

import itertools
import random

import pytest

import clearhead as ch
from clearhead.learn.data.tagging import PREFIXES, Tagging, by_labels, recognise
from clearhead.learn.evaluation.metrics import METRICS
from clearhead.learn.tasks.reading import spans_of
from clearhead.learn.tasks.results import Word
from clearhead.learn.tasks.table import TASKS

SCHEMES = ("IO", "IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU")
TYPES = ("P", "work-of-art")
Found = set[tuple[str, int, int]]


def letters(scheme: str) -> str:
    return PREFIXES[{"IOB1": "IOB2", "IOE1": "IOE2"}.get(scheme, scheme)]


def encode(spans: list[tuple[str, int, int]], length: int, scheme: str) -> list[str]:
    """Tag the words of a sentence by its spans, which are in order and do not overlap."""
    tags = ["O"] * length
    for (kind, first, last), after, before in zip(spans, [*spans[1:], None], [None, *spans[:-1]]):
        prefixes = ["I"] * (last + 1 - first)
        follows = before is not None and before[0] == kind and before[2] == first - 1
        precedes = after is not None and after[0] == kind and after[1] == last + 1
        if scheme in ("IOB2", "IOBES", "BILOU") or (scheme == "IOB1" and follows):
            prefixes[0] = "B"
        if scheme in ("IOE2", "IOBES") or (scheme == "IOE1" and precedes):
            prefixes[-1] = "E"
        if scheme == "BILOU":
            prefixes[-1] = "L"
        if first == last and scheme in ("IOBES", "BILOU"):
            prefixes = ["S" if scheme == "IOBES" else "U"]
        tags[first : last + 1] = [f"{prefix}-{kind}" for prefix in prefixes]
    return tags


def drawn(draw: random.Random, scheme: str) -> tuple[list[tuple[str, int, int]], int]:
    """Some spans and the length of their sentence; spans of one type touch where the scheme allows it."""
    spans: list[tuple[str, int, int]] = []
    place = 0
    while place < 12:
        place += draw.choice((0, 0, 1, 3))
        kind, last = draw.choice(TYPES), place + draw.choice((0, 0, 1, 2))
        touches = bool(spans) and spans[-1][0] == kind and spans[-1][2] == place - 1
        # IO cannot tell two such spans apart, and seqeval's IOE1 does not see the first if it is one word.
        if touches and (scheme == "IO" or (scheme == "IOE1" and spans[-1][1] == spans[-1][2])):
            place += 1
            continue
        spans.append((kind, place, last))
        place = last + 1
    return spans, place + 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_encoded_is_recognised_and_found_again(scheme):
    draw = random.Random(SCHEMES.index(scheme))
    for _ in range(50):
        sentences = [drawn(draw, scheme) for _ in range(4)]
        tags = [encode(*one, scheme) for one in sentences]
        prefixes = {tag[0] for row in tags for tag in row} - {"O"}
        tagging = recognise(tags)
        if prefixes != {"I"}:  # without two neighbours of one type, IOB1 and IOE1 are IO
            assert tagging.scheme == scheme
        assert [tagging.spans(row) for row in tags] == [{*spans} for spans, _ in sentences]
        assert [{*tagging.joined(row)} for row in tags] == [{*spans} for spans, _ in sentences]
        for name in ("span_f1", "span_precision", "span_recall"):
            assert METRICS[name](tags, tags) == 1
        labels = sorted({"O"} | {tag for row in tags for tag in row})
        numbers = [[labels.index(tag) for tag in row] for row in tags]
        assert TASKS["tag"].default_metric(labels) == "span_f1"
        scores = TASKS["tag"].score(numbers, numbers, labels)
        assert {name: metric(*sides) for name, (metric, *sides) in scores.items()} == {
            "accuracy": 1,
            "span_f1": 1,
        }
        bare = [[tag[0] for tag in row] for row in tags if len({tag[1:] for tag in row} - {""}) == 1]
        for row in bare:  # without types: BioBERT's sets have B, I and O
            assert {kind for kind, _, _ in recognise([row]).spans(row)} <= {"_"}


def brute(tags: tuple[str, ...], scheme: str) -> Found:
    """Every stretch of one type that the scheme's own grammar spells as a span where it stands."""
    found = set()
    words = [("O", ""), *((tag[0], tag[2:]) for tag in tags), ("O", "")]
    for first, last in itertools.combinations_with_replacement(range(1, len(words) - 1), 2):
        inner, kind = "".join(prefix for prefix, _ in words[first : last + 1]), words[first][1]
        (before, left), (after, right) = words[first - 1], words[last + 1]
        if "O" in inner or any(other != kind for _, other in words[first : last + 1]):
            continue
        continued = right == kind and after == "I"
        middle = inner[1:-1].strip("I") == ""
        match scheme:
            case "IOB2":
                spelt = inner[0] == "B" and inner[1:].strip("I") == "" and not continued
            case "IOE2":
                spelt = (
                    inner[-1] == "E" and inner[:-1].strip("I") == "" and not (before == "I" and left == kind)
                )
            case "IOBES" | "BILOU":
                one, end = ("S", "E") if scheme == "IOBES" else ("U", "L")
                spelt = inner == one or (len(inner) > 1 and inner[0] == "B" and inner[-1] == end and middle)
        if spelt:
            found.add((kind, first - 1, last - 1))
    return found


@pytest.mark.parametrize("scheme", ["IOB2", "IOE2", "IOBES", "BILOU"])
def test_spans_of_every_sequence_valid_or_not_by_brute_force(scheme):
    tags = ["O", *(f"{letter}-{kind}" for letter in letters(scheme) for kind in TYPES)]
    tagging = Tagging(scheme, letters(scheme))
    for row in itertools.chain(*(itertools.product(tags, repeat=length) for length in (1, 2, 3, 4))):
        assert tagging.spans(row) == brute(row, scheme), row


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_spans_of_every_sequence_are_seqevals(scheme):
    theirs = pytest.importorskip("seqeval.scheme", reason="see requirements-references.txt")
    tags = ["O", *(f"{letter}-{kind}" for letter in letters(scheme) for kind in TYPES)]
    tagging = Tagging(scheme, letters(scheme))
    for row in itertools.chain(*(itertools.product(tags, repeat=length) for length in (1, 2, 3, 4))):
        found = theirs.Tokens(list(row), getattr(theirs, scheme)).entities
        assert tagging.spans(row) == {(one.tag, one.start, one.end - 1) for one in found}, row


@pytest.mark.parametrize(
    ("tags", "scheme", "wanted"),
    [
        # CoNLL-2003's own: B only between neighbours of one type; elsewhere it begins nothing.
        ("I-P I-P B-P O", "IOB1", {("P", 0, 1), ("P", 2, 2)}),
        ("I-P I-L O B-P", "IOB1", {("P", 0, 0), ("L", 1, 1)}),
        ("I-P E-P I-P O", "IOE1", {("P", 0, 1), ("P", 2, 2)}),
        ("I-P I-P E-L", "IOE1", {("P", 0, 1)}),
    ],
)
def test_the_schemes_that_mark_only_neighbours(tags, scheme, wanted):
    assert Tagging(scheme, letters(scheme)).spans(tags.split()) == wanted


def test_one_odd_tag_does_not_change_the_scheme():
    rows = [["B-P", "I-P", "O"], ["O", "I-P", "O"], ["B-P", "O", "B-P"]]
    assert recognise(rows).scheme == "IOB2"
    rows = [["I-P", "I-P", "O"], ["O", "B-P", "O"], ["I-P", "B-P", "I-L"]]
    assert recognise(rows).scheme == "IOB1"


@pytest.mark.parametrize(
    ("labels", "scheme", "metric"),
    [
        (["O"], "", "span_f1"),
        (["NOUN", "VERB", "-LRB-"], "", "accuracy"),
        (["O", "E-mail", "Phone"], "", "accuracy"),
        (["O", "B-P", "I-P", "X"], "IOB2", "accuracy"),
        (["O", "B-P", "E-P", "L-P", "U-P"], "IOB2", "accuracy"),
        (["O", "I-P"], "IO", "span_f1"),
        (["O", "S-P"], "IOBES", "span_f1"),
        (["O", "U-P"], "BILOU", "span_f1"),
        (["O", "B", "I"], "IOB2", "span_f1"),
    ],
)
def test_a_scheme_is_told_from_labels(labels, scheme, metric):
    assert by_labels(labels).scheme == scheme and TASKS["tag"].default_metric(labels) == metric


def test_a_type_or_prefix_that_is_not_wanted_is_only_a_wrong_span():
    wanted = [["S-P", "O", "O"]]
    assert METRICS["span_recall"]([["S-P", "S-new", "U-P"]], wanted) == 1
    assert METRICS["span_precision"]([["S-P", "S-new", "U-P"]], wanted) == pytest.approx(1 / 3)
    assert METRICS["span_f1"]([["B-P", "O", "O"]], [["O", "O", "O"]]) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_spans_of_a_tagger_have_clean_labels(scheme):
    text = "a b c d e f g"
    spans = [("P", 0, 2), ("work-of-art", 3, 3), ("P", 5, 5), ("P", 6, 6)]
    spans = spans[:3] if scheme == "IO" else spans
    tags = encode(spans, 7, scheme)
    words = [Word(text[2 * place], tag, 2 * place, 2 * place + 1, 0.5) for place, tag in enumerate(tags)]
    labels = ["O", *(f"{letter}-{kind}" for letter in letters(scheme) for kind in TYPES)]
    found = spans_of(words, text, by_labels(labels))
    assert [(one.label, one.text) for one in found] == [
        (kind, text[2 * first : 2 * last + 1]) for kind, first, last in spans
    ]


def test_evaluate_names_the_scheme_and_tag_gives_types(tmp_path):
    """A tagger of IOBES tags, trained for an instant: `eval` says the scheme, and no span has a prefix."""
    rows = [
        {"words": [*"abcd"], "tags": ["S-P", "B-L", "I-L", "E-L"]},
        {"words": [*"abca"], "tags": ["S-P", "B-L", "E-L", "S-P"]},
    ] * 10
    notes: list[str] = []
    settings = {"data.task": "tag", "train.steps": 2, "model.d_model": 16, "model.n_heads": 2}
    made = ch.train(
        rows, out=tmp_path / "run", settings=settings, on_event=lambda event: notes.append(str(event))
    )
    assert any("the tags follow IOBES" in line for line in notes)
    assert {one.label for one in made.model.tag([*"abcdabcd"]).spans} <= {"P", "L"}
    data = tmp_path / "data.conll"
    data.write_text("a\tS-P\nb\tB-L\nc\tE-L\n\n")
    assert any("the tags follow IOBES" in line for line in ch.evaluate(made.model, data).notes)
