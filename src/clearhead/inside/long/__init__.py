"""How a decoder language model does on long contexts: loss by position, retrieval, cost, scalings of RoPE.

found = long(m, "book.txt", scalings=("none", "yarn"))
found.perplexity.beyond.perplexity          # past the trained length
found.retrieval[0].right                    # passkey: length x depth
found.cost.slopes["seconds"]                # of log time against log length
found.scalings[1].perplexities              # yarn, at 1, 2 and 4 times the trained length
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clearhead.core.config import RopeScaling
from clearhead.errors import nearest, refuse
from clearhead.inside.inputs import AnyModel, as_model
from clearhead.inside.long.growth import Growth, measure_growth
from clearhead.inside.long.positions import (
    OnProgress,
    PositionLoss,
    ScalingTry,
    loss_by_position,
    trained_length,
    try_scalings,
)
from clearhead.inside.long.retrieval import RetrievalGrid, retrieve, words_of
from clearhead.inside.long.text import LongText, read_text
from clearhead.inside.results import Result
from clearhead.learn.tasks.reading import fitting

LongPart = Literal["perplexity", "retrieval", "cost"]
PARTS: tuple[LongPart, ...] = ("perplexity", "retrieval", "cost")
STRETCH = 2  # times the trained length, where positions have no end
LONGEST = 16_384  # tokens, where no length is asked for
SHARES = (4, 2, 1)  # lengths of contexts: the length divided by these


@dataclass(frozen=True, eq=False)
class LongReport(Result):
    """What a model does with long contexts; None or () for parts that were not asked for."""

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
        refuse(
            part not in PARTS,
            f'no part is called "{part}"{nearest(part, PARTS)}: choose from {", ".join(PARTS)}',
        )
    refuse(not parts and not scalings, f"nothing is to be done: choose parts from {', '.join(PARTS)}")
    refuse(rows < 1, f"rows {rows} must be 1 or more")
    refuse(bins < 1, f"bins {bins} must be 1 or more")
    refuse(trials < 1, f"trials {trials} must be 1 or more")
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
    name = None if read is None else read.name
    return LongReport(trained_length(config), tokens, name, by_position, grids, growth, tries, tuple(notes))


def _length(bounded: bool, positions: int, asked: int | None, text: LongText | None, notes: list[str]) -> int:
    """Return the length of rows: what was asked for, or as long as the model, the text and patience allow."""
    if asked is None:
        usual = positions if bounded else STRETCH * positions
        room = usual if text is None else text.room
        asked = min(usual, LONGEST, room)
        if asked < usual:
            why = "the text has no more" if asked == room else "--length chooses another"
            notes.append(f"rows of {asked:,} tokens, not {usual:,}: {why}")
    refuse(asked < 2, f"length {asked} leaves nothing to predict: choose 2 or more, or give a longer text")
    refuse(
        bounded and asked > positions,
        f"length {asked:,} is beyond the {positions:,} learned positions of this model: "
        f"choose up to {positions:,}",
    )
    if text is not None:
        text.starts(asked, 1)  # refuses a text that is shorter
    return asked
