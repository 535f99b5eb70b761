"""Needles in a haystack: can a model give back what stands far behind in its context?

A needle is two words, the key, and a third, the value. It stands at some depth of a long context, whose end
is the key again: the next token should be the first of the value. Words are drawn from the text, so that any
tokenizer can write them, that of single characters too.

    passkey     one needle among a few tokens that repeat
    needle      one needle in running text
    needles     four needles in running text, one of which is asked for
    tracking    two chains of three needles: the value of the second is the key of the first, and so on; the
                last key is asked for, and the value at the beginning of its chain is right

A trial is right where the model finds the value more probable than those of seven others, whichever are in
the context; a model that does not look is right one time in eight. It is exact where no token at all is more
probable.

Shapes: B trials, V vocabulary, C choices.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.core.transformer import evaluating
from clearhead.errors import refuse
from clearhead.hub.tokens.text import VISIBLE, label
from clearhead.inside.long.positions import OnProgress
from clearhead.inside.long.text import LongText
from clearhead.inside.results import Result
from clearhead.learn.evaluation.evaluate import BATCH_TOKENS
from clearhead.run.api import Model
from clearhead.run.generate.decode import cache_for, prefill

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
    found = _words(m, text)
    different = len({word[0] for word in found.words})
    refuse(
        len(found.words) < NEEDED or different < CHOICES,
        f"{text.name} has {len(found.words)} different words with {different} different first tokens, "
        f"and the probes need {NEEDED} and {CHOICES}: give a longer text, or leave retrieval out",
    )
    return found


def _words(m: Model, text: LongText) -> Vocabulary:
    ids = text.ids[:SAMPLED].tolist()
    names = {token: label(m.tokenizer, token) for token in {*ids}}
    if not any(SPACE in name for name in names.values()):
        special = {*m.special.values()}
        alone = [token for token in names if m.tokenizer is None or names[token].isalpha()]
        return Vocabulary([(token,) for token in sorted(alone) if token not in special], ())
    found: dict[tuple[int, ...], None] = {}
    word: list[int] | None = None  # that goes on; None: no word
    for token in [*ids, -1]:
        name = names.get(token, SPACE)
        letters = name.removeprefix(SPACE)
        if name.startswith(SPACE) or not letters.isalpha():
            if word and sum(len(names[one].removeprefix(SPACE)) for one in word) >= SHORTEST:
                found[tuple(word)] = None
            word = [token] if letters.isalpha() else [] if name == SPACE else None
        elif word is not None:
            word.append(token)
    alone = [token for token, name in names.items() if name == SPACE]
    between = tuple(alone[:1]) if all(not names[word[0]].startswith(SPACE) for word in found) else ()
    return Vocabulary(list(found), between)


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
        places = np.sort(random.random(probe.links))
        if chain == 0:
            places, question = depth + (1 - depth) * places, (*vocabulary.space, *keys[-1])
            places[0] = depth
        said = [spaced[chosen[chain]], *keys]
        made = [(*vocabulary.space, *name, *what) for name, what in zip(keys, said)]
        needles += zip(places.tolist(), made)
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
                made = [
                    make_trial(text, vocabulary, probe, length, depth, (seed, number, row, column, trial))
                    for column, depth in enumerate(DEPTHS)
                    for trial in range(trials)
                ]
                fitting = [trial for trial in made if trial is not None]
                if len(fitting) == len(made):
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
