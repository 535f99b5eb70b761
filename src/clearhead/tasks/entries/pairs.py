"""Text to text: translation, summaries, and whatever else maps a source to a target."""

from __future__ import annotations

from typing import Any

from clearhead.batches.batching import Batching
from clearhead.batches.bucketed import PairBatches
from clearhead.batches.encoding import encode_pairs
from clearhead.bundle import Model
from clearhead.data.examples import PAIRS, Pair
from clearhead.evaluation.judgement import Judgement
from clearhead.tasks.spec import ENCODER_DECODER, TaskSpec
from clearhead.tokens.training import TRANSLATOR
from clearhead.training.plan import GeneratePlan


def _translated(loaded: Model, row: Pair, plan: GeneratePlan, seed: int) -> str:
    ids = loaded.encode([row.source], loaded.max_length)[0]
    room = max(1, min(plan.max_new_tokens, loaded.config.max_positions - 2))
    made: Any = loaded.generate(ids, room)
    return f"{row.source} -> {made.text}  ({row.target})"


def _texts(judgement: Judgement) -> list[str]:
    """Add exact match, edits per token, BLEU and chrF."""
    written, options = judgement.written, judgement.options
    judgement.figures.texts(written, judgement.references, options.tokenize, options.lowercase)
    return written


TASKS = (
    TaskSpec(
        name="seq2seq",
        batching=Batching("seq2seq", PAIRS, encode_pairs, PairBatches),
        tokens=TRANSLATOR,
        head="lm",
        usual=ENCODER_DECODER,
        metrics=("loss", "exact", "bleu", "chrf"),
        writes=True,
        command="translate {folder} TEXT",
        sample=_translated,
        figures=_texts,
    ),
)
