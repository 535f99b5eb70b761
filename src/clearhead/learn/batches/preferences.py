"""Pairs of answers as batches: each row holds a prompt with the chosen answer, then with the rejected one.

The two are documents of one row, which do not see each other, so that a row is a pair and its loss its own.

Shapes: N pairs, B rows, T tokens of a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from clearhead.errors import refuse
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.batches.batching import Setting, blank, tensor
from clearhead.learn.batches.bucketed import Bucketed, cut_note
from clearhead.learn.batches.chats import ChatEncoder, Learned, targets_of
from clearhead.learn.batches.encoding import Columns, Encoder, characters, flat, groups
from clearhead.learn.batches.rows import Ints, Stretches, lay
from clearhead.learn.data.chats import Preference

SIDES = ("chosen", "rejected")


def encode_preferences(rows: Iterable[Preference], encoder: Encoder) -> Iterator[Columns]:
    """Encode both conversations of each pair, and whether each token is part of the answer."""
    made = ChatEncoder(encoder)
    for group in groups(rows, characters):
        columns: Columns = {}
        for side in SIDES:
            found = [_answer(made, row, getattr(row, side)) for row in group]
            columns[side] = flat([ids for ids, _ in found])
            columns[f"{side}_learned"] = np.array(
                [one for _, flags in found for one in flags], dtype=np.bool_
            )
        yield columns


def _answer(made: ChatEncoder, row: Preference, answer: Sequence[dict[str, Any]]) -> Learned:
    """Return the ids of a prompt and its answer; what the prompt itself holds of answers is not learned."""
    told = [{**one, "weight": 0} for one in row.prompt]
    return made([*told, *answer], row.tools, row.place)[-1]


class PreferenceBatches(Bucketed):
    """A pair in each row; `reference` [N, 2] is filled in before training."""

    def __init__(self, setting: Setting) -> None:
        length, encoded = setting.length, setting.encoded
        whole = [encoded.stretches(side) for side in SIDES]
        cut = [side.cut(length + 1) for side in whole]
        lost = np.zeros(len(cut[0].starts), dtype=np.bool_)
        targets = []
        for name, rows in zip(SIDES, cut):
            learned = np.asarray(encoded[f"{name}_learned"])
            counts = np.append(0, np.cumsum(learned))
            lost |= counts[rows.starts + rows.lengths] == counts[rows.starts]
            targets.append(targets_of(rows.values, learned))
        kept = np.flatnonzero(~lost)
        refuse(
            not len(kept),
            f"no pair for {setting.side} has both answers within {length:,} tokens: raise data.max_length",
        )
        longer = np.logical_or(*(side.lengths > length + 1 for side in whole))
        self.notes = cut_note(longer, "pairs", length)
        if lost.any():
            more = f"have an answer that begins after {length:,} tokens and are left out"
            self.notes += (f"{int(lost.sum()):,} of {len(lost):,} pairs {more}",)
        pairs = [side.take(kept) for side in cut]
        self.inputs = [Stretches(one.values, one.starts, one.lengths - 1) for one in pairs]
        self.targets = [
            Stretches(values, one.starts + 1, one.lengths - 1) for values, one in zip(targets, pairs)
        ]
        self.reference = np.zeros((len(kept), 2), dtype=np.float32)
        super().__init__(setting, self.inputs[0].lengths + self.inputs[1].lengths)

    def _build(self, numbers: Ints) -> Batch:
        ids, mask = blank(self.sizes[0][numbers], self.setting.pad)
        targets = np.full_like(ids, IGNORE)
        begin = self.inputs[0].lengths[numbers]  # the column at which the rejected answer's text begins
        for at, inputs, wanted in zip((0 * begin, begin), self.inputs, self.targets):
            lay(ids, at, inputs.take(numbers))
            lay(targets, at, wanted.take(numbers))
        documents = (np.arange(ids.shape[1]) >= begin[:, None]).astype(np.int64)
        return Batch(
            tensor(ids), tensor(targets), mask, documents=tensor(documents), numbers=tensor(numbers),
            reference=tensor(self.reference[numbers]),
        )  # fmt: skip
