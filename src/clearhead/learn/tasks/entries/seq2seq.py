"""Pairs of texts: an encoder reads the source, a decoder writes the target.

Shapes: N examples, B rows, T tokens of the target, S tokens of the source.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from clearhead.hub.tokens.training import TRANSLATOR
from clearhead.learn.batches.batch import IGNORE, Batch, Batches
from clearhead.learn.batches.buckets import Bucketed, cut_note
from clearhead.learn.batches.encoding import Columns, Encoder, Setting, characters, flat, groups
from clearhead.learn.batches.ragged import Ints, blank, frame_rows, lay, tensor
from clearhead.learn.data.examples import PAIRS, Pair
from clearhead.learn.evaluation.metrics import Judged
from clearhead.learn.recipe import GeneratePlan
from clearhead.learn.tasks.task import ENCODER_DECODER, Task, sampled
from clearhead.run.api import Model


class PairBatches(Bucketed):
    """A source for the encoder; for the decoder bos and the target, whose targets are the target and eos.

    A target that is cut has no eos: the model must not learn to stop there.
    """

    def __init__(self, setting: Setting) -> None:
        length, self.frame = setting.length, setting.encoded.frame
        self.bos, self.eos = setting.need("bos"), setting.need("eos")
        room = setting.room(self.frame, "a source")
        source, target = setting.encoded.stretches("source"), setting.encoded.stretches("target")
        # A target is cut at its end whatever the tokenizer says: what is generated begins at its beginning.
        self.source, self.fed, self.asked = (
            setting.cut(source, room),
            target.cut(length - 1),
            target.cut(length),
        )
        self.whole = target.lengths < length
        cut_sources = cut_note(source.lengths > room, "sources", length)
        self.notes = cut_sources + cut_note(~self.whole, "targets", length)
        super().__init__(setting, self.source.lengths + self.frame.size, self.fed.lengths + 1)

    def _build(self, numbers: Ints) -> Batch:
        source, source_mask = blank(self.sizes[0][numbers], self.setting.pad)
        frame_rows(self.frame, [self.source.take(numbers)], source)
        asked, whole = self.asked.take(numbers), self.whole[numbers]
        decoder, mask = blank(self.sizes[1][numbers], self.setting.pad)
        targets = np.full_like(decoder, IGNORE)
        decoder[:, 0] = self.bos
        lay(decoder, 1, self.fed.take(numbers))
        lay(targets, 0, asked)
        targets[whole, asked.lengths[whole]] = self.eos
        return Batch(
            tensor(decoder), tensor(targets), mask, tensor(source), source_mask, numbers=tensor(numbers)
        )


class Seq2seq(Task):
    """Translate a source text into a target text."""

    name = "seq2seq"
    shape = PAIRS
    tokens = TRANSLATOR
    head = "lm"
    usual = ENCODER_DECODER
    reads = "vocabulary"
    metrics = ("loss", "exact", "bleu", "chrf")
    writes = True
    command = "translate {folder} TEXT"

    def encode(self, rows: Iterable[Pair], encoder: Encoder) -> Iterator[Columns]:
        """Encode sources and targets."""
        for group in groups(rows, characters):
            yield {
                "source": flat(encoder.ids(row.source for row in group)),
                "target": flat(encoder.ids(row.target for row in group)),
            }

    def batch(self, setting: Setting) -> Batches:
        """See `Task.batch`."""
        return PairBatches(setting)

    def judge(self, judged: Judged) -> list[str]:
        """Add exact match, edits per token, BLEU and chrF of what the model writes."""
        written = judged.write()
        judged.texts(written, judged.references, judged.tokenize, judged.lowercase)
        return written

    def sample(self, loaded: Model, row: Pair, plan: GeneratePlan, seed: int) -> str:
        """Return what the model writes for the source."""
        ids = loaded.encode([row.source], loaded.max_length)[0]
        room = max(1, min(plan.max_new_tokens, loaded.config.max_positions - 2))
        made: Any = loaded.generate(ids, room, num_beams=1)
        return sampled(row.source, made.text, row.target)
