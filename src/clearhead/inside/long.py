"""How a decoder language model does on long contexts: loss by position, retrieval, cost, scalings of RoPE.

    result = long(m, "book.txt", scalings=("none", "yarn"))
    result.perplexity.beyond.perplexity          # past the trained length
    result.retrieval[0].right                    # passkey: length x depth
    result.cost.slopes["seconds"]                # of log time against log length
    result.scalings[1].perplexities              # yarn, at 1, 2 and 4 times the trained length

Retrieval asks for needles in a haystack. A needle is two words, the key, and a third, the value. It stands at
some depth of a long context, whose end is the key again: the next token should be the first of the value.
Words are drawn from the text, so that any tokenizer can write them, that of single characters too.

    passkey     one needle among a few tokens that repeat
    needle      one needle in running text
    needles     four needles in running text, one of which is the question
    tracking    two chains of three needles: the value of the second is the key of the first, and so on; the
                last key is length for, and the value at the beginning of its chain is right

A trial is right where the model finds the value more probable than those of seven others, whichever are in
the context: by chance one time in eight. It is exact where no token at all is more probable.

Shapes: B trials, V vocabulary, C choices.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.core.config import RopeScaling
from clearhead.errors import refuse, refuse_unknown
from clearhead.hub.tokens.text import VISIBLE, label
from clearhead.inside.inputs import AnyModel, as_model
from clearhead.inside.long_text import (
    Growth,
    LongText,
    PositionLoss,
    ScalingTry,
    loss_by_position,
    measure_growth,
    read_text,
    trained_length,
    try_scalings,
)
from clearhead.inside.results import Result
from clearhead.learn.evaluation.evaluate import BATCH_TOKENS
from clearhead.learn.evaluation.metrics import OnProgress
from clearhead.learn.tasks.reading import fitting
from clearhead.run.api import Model
from clearhead.run.generate.decode import cache_for, prefill
from clearhead.variants.contexts import evaluating

CHOICES = 8
KEY_WORDS = 2
SHORTEST = 3  # letters of a word
SAMPLED = 50_000  # tokens of the text whose words are taken
REPEATED = 32  # tokens that passkey repeats
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SPACE = VISIBLE[" "]


class Probe(NamedTuple):
    """How many needles a context has, and what is around them."""

    chains: int = 1
    links: int = 1  # needles of a chain
    repeated: bool = False  # a few tokens again and again in place of running text


PROBES = {
    "passkey": Probe(repeated=True),
    "needle": Probe(),
    "needles": Probe(chains=4),
    "tracking": Probe(chains=2, links=3),
}
NEEDED = CHOICES + KEY_WORDS * max(probe.chains * probe.links for probe in PROBES.values())


@dataclass(frozen=True, eq=False)
class RetrievalGrid(Result):
    """The share of right answers of one probe, by length of the context and depth of the needle."""

    probe: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]  # 0: at the beginning; 1: just before the question
    trials: int  # of each cell
    chance: float  # of `right`, for a model that does not look
    right: NDArray[np.float64]  # [lengths, depths]; NaN where the needles do not fit
    exact: NDArray[np.float64]


class Vocabulary(NamedTuple):
    """Different words as token ids, and the token that stands between two of them, where one does."""

    words: list[tuple[int, ...]]
    space: tuple[int, ...]


def words_of(m: Model, text: LongText) -> Vocabulary:
    """Return the words of a text; where no token tells of spaces, as with ids alone, each token is a word.

    A text that has too few for the probes is refused.
    """
    vocabulary = _words(m, text)
    different = len({word[0] for word in vocabulary.words})
    refuse(
        len(vocabulary.words) < NEEDED or different < CHOICES,
        f"{text.name} has {len(vocabulary.words)} different words with {different} different first tokens, "
        f"and the probes need {NEEDED} and {CHOICES}: give a longer text, or leave retrieval out",
    )
    return vocabulary


def _words(m: Model, text: LongText) -> Vocabulary:
    ids = text.ids[:SAMPLED].tolist()
    names = {token: label(m.tokenizer, token) for token in {*ids}}
    if not any(SPACE in name for name in names.values()):
        special = {*m.special.values()}
        alone = [token for token in names if m.tokenizer is None or names[token].isalpha()]
        return Vocabulary([(token,) for token in sorted(alone) if token not in special], ())
    words: dict[tuple[int, ...], None] = {}
    word: list[int] | None = None  # that goes on; None: no word
    for token in [*ids, -1]:
        name = names.get(token, SPACE)
        letters = name.removeprefix(SPACE)
        if name.startswith(SPACE) or not letters.isalpha():
            if word and sum(len(names[token].removeprefix(SPACE)) for token in word) >= SHORTEST:
                words[tuple(word)] = None
            word = [token] if letters.isalpha() else [] if name == SPACE else None
        elif word is not None:
            word.append(token)
    alone = [token for token, name in names.items() if name == SPACE]
    between = tuple(alone[:1]) if all(not names[word[0]].startswith(SPACE) for word in words) else ()
    return Vocabulary(list(words), between)


def make_trial(
    text: LongText, vocabulary: Vocabulary, probe: Probe, length: int, depth: float, seed: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Return a context of `length` tokens and the choices for its next one, the right one first.

    None where the needles do not fit, or the text is too short for that length.
    """
    random, words = np.random.default_rng(seed), vocabulary.words
    order = random.permutation(len(words)).tolist()
    values: dict[int, int] = {}  # by first token: the number of the word
    for number in order:
        values.setdefault(words[number][0], number)
    chosen = list(values.values())[:CHOICES]
    drawn = iter([number for number in order if number not in chosen])
    spaced = [(*words[number], *vocabulary.space) for number in range(len(words))]

    def key() -> tuple[int, ...]:
        return tuple(itertools.chain(*(spaced[number] for number in itertools.islice(drawn, KEY_WORDS))))

    needles: list[tuple[float, tuple[int, ...]]] = []
    question: tuple[int, ...] = ()
    for chain in range(probe.chains):
        keys = [key() for _ in range(probe.links)]
        depths = np.sort(random.random(probe.links))
        if chain == 0:
            depths, question = depth + (1 - depth) * depths, (*vocabulary.space, *keys[-1])
            depths[0] = depth
        follows = [spaced[chosen[chain]], *keys]
        inserted = [(*vocabulary.space, *name, *what) for name, what in zip(keys, follows)]
        needles += zip(depths.tolist(), inserted)
    needles.sort(key=lambda needle: needle[0])
    room = length - len(text.prefix) - len(question) - sum(len(needle) for _, needle in needles)
    if room < 0 or room > len(text.ids):
        return None
    start = int(random.random() * (len(text.ids) - room))
    hay = np.resize(text.ids[:REPEATED], room) if probe.repeated else text.ids[start : start + room]
    context, at = [*text.prefix], 0
    for place, needle in needles:
        context += [*hay[at : (at := round(place * room))].tolist(), *needle]
    return [*context, *hay[at:].tolist(), *question], [words[number][0] for number in chosen]


@torch.inference_mode()
def retrieve(
    m: Model,
    text: LongText,
    vocabulary: Vocabulary,
    lengths: Sequence[int],
    trials: int,
    seed: int,
    on_progress: OnProgress,
) -> tuple[RetrievalGrid, ...]:
    """Run every probe at each length and depth; a length at which the needles do not fit is NaN."""
    grids = []
    with evaluating(m.model):
        for number, (name, probe) in enumerate(PROBES.items()):
            shares = np.full((2, len(lengths), len(DEPTHS)), np.nan)
            for row, length in enumerate(lengths):
                drawn = [
                    make_trial(text, vocabulary, probe, length, depth, (seed, number, row, column, trial))
                    for column, depth in enumerate(DEPTHS)
                    for trial in range(trials)
                ]
                fitting = [trial for trial in drawn if trial is not None]
                if len(fitting) == len(drawn):
                    judged = np.array(list(_judged(m, fitting))).reshape(len(DEPTHS), trials, 2)
                    shares[:, row] = judged.mean(1).T
                on_progress(name, row + 1, len(lengths))
            grids.append(
                RetrievalGrid(name, tuple(lengths), DEPTHS, trials, 1 / CHOICES, shares[0], shares[1])
            )
    return tuple(grids)


def _judged(m: Model, trials: list[tuple[list[int], list[int]]]) -> Iterator[tuple[bool, bool]]:
    """Give, for each trial, whether the model is right, and whether exactly."""
    length = len(trials[0][0])
    size = max(1, BATCH_TOKENS // length)
    for start in range(0, len(trials), size):
        contexts, choices = zip(*trials[start : start + size])
        logits = prefill(m.model, contexts, cache_for(m.model, length))  # B V
        scores = logits.gather(-1, torch.tensor(choices, device=logits.device))  # B C
        right = scores[:, 0] > scores[:, 1:].amax(-1)
        exact = scores[:, 0] >= logits.amax(-1)
        yield from zip(right.tolist(), exact.tolist())


# The report -------------------------------------------------------------------------------------------------


LongPart = Literal["perplexity", "retrieval", "cost"]
PARTS: tuple[LongPart, ...] = ("perplexity", "retrieval", "cost")
STRETCH = 2  # times the trained length, where positions have no end
LONGEST = 16_384  # tokens, where no length is named
SHARES = (4, 2, 1)  # lengths of contexts: the length divided by these


@dataclass(frozen=True, eq=False)
class LongReport(Result):
    """What a model does with long contexts; None or () for parts that were not measured."""

    trained: int  # the length the model was made for
    length: int  # tokens of the longest rows, scalings apart
    text: str | None
    perplexity: PositionLoss | None
    retrieval: tuple[RetrievalGrid, ...]
    cost: Growth | None
    scalings: tuple[ScalingTry, ...]
    notes: tuple[str, ...]  # what was guessed or cut, a short sentence each


def long(
    m: AnyModel,
    text: str | Path | Sequence[str | Path] | Sequence[int] = (),
    *,
    length: int | None = None,
    parts: Sequence[LongPart] = PARTS,
    scalings: Sequence[str | RopeScaling | None] = (),
    rows: int = 8,
    bins: int = 16,
    trials: int = 10,
    seed: int = 0,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> LongReport:
    """Measure a decoder language model on long contexts, on the device that it is on.

    Args:
        m: what `load` gave; a bare model takes token ids as text.
        text: files, folders, globs, an embedded corpus, or token ids; none: what the run that made the model
            held out.
        length: tokens of a row; None: twice the trained length, or all learned positions, and 16,384 or the
            whole text at most.
        parts: of perplexity (loss by position), retrieval (needles by length and depth) and cost (time and
            memory by length).
        scalings: of rotary positions to try at 1, 2 and 4 times the trained length: "none", "own", "linear",
            "ntk", "yarn", "llama3", with a factor as in "yarn:8", or `RopeScaling`.
        rows: rows of text that losses are a mean over, at most.
        bins: of positions.
        trials: contexts of each probe, length and depth.
        seed: of needles and random tokens.
        on_progress: told what is being done, and how much of how much is.
    """
    m = as_model(m)
    config = m.config
    refuse(
        config.family != "decoder" or config.head != "lm",
        f"long measures a decoder language model, and this is a model of family {config.family} with head "
        f"{config.head}: {fitting(m)}",
    )
    for part in parts:
        refuse_unknown("part", part, PARTS)
    refuse(not parts and not scalings, f"nothing is to be done: choose parts from {', '.join(PARTS)}")
    for name, count in {"rows": rows, "bins": bins, "trials": trials}.items():
        refuse(count < 1, f"{name} {count} must be 1 or more")
    refuse(seed < 0, f"seed {seed} must be 0 or more")
    needs_text = bool(scalings) or {*parts} != {"cost"}
    read = read_text(m, text) if needs_text else None
    notes = [] if read is None else list(read.notes)
    tokens = _length(config.bounded, config.max_positions, length, read, notes)
    words = words_of(m, read) if read is not None and "retrieval" in parts else None
    by_position: PositionLoss | None = None
    grids: tuple[RetrievalGrid, ...] = ()
    tries: tuple[ScalingTry, ...] = ()
    if read is not None and scalings:
        tries = try_scalings(m.model, read, scalings, rows, bins, on_progress)
    if read is not None and "perplexity" in parts:
        by_position = loss_by_position(m.model, read, tokens, rows, bins, on_progress)
    if read is not None and words is not None:
        lengths = sorted({tokens // share for share in SHARES})
        grids = retrieve(m, read, words, lengths, trials, seed, on_progress)
    growth = measure_growth(m.model, tokens, seed, on_progress) if "cost" in parts else None
    source = None if read is None else read.name
    return LongReport(trained_length(config), tokens, source, by_position, grids, growth, tries, tuple(notes))


def _length(
    bounded: bool, positions: int, length: int | None, text: LongText | None, notes: list[str]
) -> int:
    """Return the length of rows: the argument, or as long as the model, the text and patience allow."""
    if length is None:
        usual = positions if bounded else STRETCH * positions
        room = usual if text is None else text.room
        length = min(usual, LONGEST, room)
        if length < usual:
            why = "the text has no more" if length == room else "--length chooses another"
            notes.append(f"rows of {length:,} tokens, not {usual:,}: {why}")
    refuse(length < 2, f"length {length} leaves nothing to predict: choose 2 or more, or give a longer text")
    refuse(
        bounded and length > positions,
        f"length {length:,} is beyond the {positions:,} learned positions of this model: "
        f"choose up to {positions:,}",
    )
    if text is not None:
        text.starts(length, 1)  # refuses a text that is shorter
    return length
