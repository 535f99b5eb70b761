"""Activations of a model on texts, streamed: a shuffled block of tokens at a time, the same for a seed.

    rows = read_rows(m, ["book.txt"], length=128)
    stream = Stream(m, rows, reads, writes, seed=0)
    x, y = stream.block(3)                               # of that block's tokens, in random order

A row is a window of a text, or a source with its target. Rows are drawn in random order, without replacement
within an epoch, and the tokens of a block are shuffled together. A block is made from its number and the seed
alone, so a resumed run sees what it would have seen. The model runs as far as the last activation that is
wanted. The first token of a row is left out in causal stacks: attention rests there, and what it has there is
many times as large as elsewhere.

Shapes: N tokens, D of what is read (all taps joined), O of what is written.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import refuse
from clearhead.hub import tokenizer
from clearhead.inside.inputs import padded_rows
from clearhead.learn.data.examples import Pair, Question
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import open_data
from clearhead.run.api import Model
from clearhead.variants.contexts import edit, evaluating, record, tap_names

BLOCK = 2**15  # tokens that are shuffled together
AT_ONCE = 4096  # tokens of one forward pass
Row = tuple[tuple[int, ...], tuple[int, ...]]  # ids, and those of the source: () in a model of one stack
Data = str | Path | Iterable[Any]  # a file or folder, or several; or texts, or (source, target) pairs


def read_texts(m: Model, data: Data) -> Iterable[Any]:
    """Yield texts, or pairs of an encoder-decoder, of files, folders or rows in memory."""
    both = m.config.family == "encoder-decoder"
    refuse(m.config.main.input != "tokens", "features are trained on models that read tokens: "
           f"this one reads {m.config.main.input}")  # fmt: skip
    sources = [data] if isinstance(data, str | Path) else list(data)
    refuse(not sources, "no data was given: name a file or a folder, or give texts")
    paths = [str(path) for path in sources if isinstance(path, Path) or Path(str(path)[:255]).exists()]
    if not paths and not isinstance(data, str | Path):
        yield from sources
        return
    plan = DataPlan(paths=tuple(map(str, sources)), task="seq2seq" if both else None)
    for row in open_data(plan, split=False).validation:  # type: ignore[union-attr]
        if isinstance(row, Pair) and both:
            yield row.source, row.target
        else:
            yield row.context if isinstance(row, Question) else row.texts()[0]


def read_rows(m: Model, data: Data, length: int) -> list[Row]:
    """Return the rows of up to `length` tokens that texts make."""
    length, rows = min(length, m.max_length), list[Row]()
    for text in read_texts(m, data):
        if m.config.family == "encoder-decoder":
            source, target = text
            own = (token for token in m.prompt_ids(target) if token not in (*m.stops, *m.start_ids))
            rows.append(((*m.start_ids, *own)[:length], tuple(m.prompt_ids(source)[:length])))
        elif m.config.family == "encoder" and isinstance(text, str):
            windows = tokenizer.windows(m.text_tokenizer, length, text, 0) if text.strip() else ()
            rows += [(tuple(encoding.ids), ()) for _, encoding in windows]
        else:
            ids = m.prompt_ids(text) if len(text) else []
            begin = ids[:1] if ids[:1] == [m.special.get("bos")] else []  # every row begins so
            ids, step = ids[len(begin) :], length - len(begin)
            rows += [((*begin, *ids[at : at + step]), ()) for at in range(0, len(ids), step)]
    rows = [row for row in rows if len(row[0]) > 1]
    refuse(not rows, "the data has no text of two tokens: give more")
    return rows


@dataclass(eq=False)
class Stream:
    """The activations of a model on rows."""

    m: Model
    rows: Sequence[Row]
    reads: Sequence[str]
    writes: Sequence[str]
    seed: int = 0
    size: int = BLOCK  # tokens of a block
    read: int = field(default=0, init=False)  # tokens that the model has read

    def __post_init__(self) -> None:
        encoder = self.reads[0].startswith("encoder.") or self.m.config.family == "encoder"
        self.first = 0 if encoder else 1  # tokens of a row that are left out
        self.side = 1 if self.reads[0].startswith("encoder.") else 0
        order = tap_names(self.m.model)
        self.taps = list(dict.fromkeys([*self.reads, *self.writes]))
        self.last = max(self.taps, key=order.index)
        lengths = [len(row[self.side]) - self.first for row in self.rows]
        self.per_block = max(1, min(len(lengths), round(self.size / (sum(lengths) / len(lengths)))))

    def block(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the activations of a block's tokens that are read and written: [N, D], [N, O]."""
        n = len(self.rows)
        at, chosen, epochs = number * self.per_block, list[int](), dict[int, Tensor]()
        for place in range(at, at + self.per_block):
            epoch = place // n
            if epoch not in epochs:
                epochs[epoch] = torch.randperm(n, generator=_generator(self.seed, epoch, 1))
            chosen.append(int(epochs[epoch][place % n]))
        parts = [self.activations(rows) for rows in self.batches([self.rows[row] for row in chosen])]
        x = torch.cat([part[0] for part in parts])
        order = torch.randperm(len(x), generator=_generator(self.seed, number, 2)).to(x.device)
        x = x[order]
        return x, x if self.reads == self.writes else torch.cat([part[1] for part in parts])[order]

    def batches(self, rows: Sequence[Row], most: int = AT_ONCE) -> list[list[Row]]:
        """Return rows in batches of one pass, those of like length together."""
        batches: list[list[Row]] = [[]]
        for row in sorted(rows, key=lambda row: len(row[0]) + len(row[1])):
            if batches[-1] and (len(batches[-1]) + 1) * (len(row[0]) + len(row[1])) > most:
                batches.append([])
            batches[-1].append(row)
        return batches

    def arguments(self, rows: Sequence[Row]) -> tuple[dict[str, Tensor], Tensor]:
        """Return what the model is called with for rows, and which tokens count: [B, T]."""
        sources = [row[1] for row in rows if row[1]]
        arguments = padded_rows(self.m, [row[0] for row in rows], sources)
        counts = arguments["source_mask" if self.side else "mask"].clone()
        counts[:, : self.first] = False
        if all(len(row[0]) == len(rows[0][0]) for row in rows):
            del arguments["mask"]
        return arguments, counts

    @torch.no_grad()
    def activations(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Return the activations of the tokens of a batch that count, in order: [N, D], [N, O]."""
        arguments, counts = self.arguments(rows)
        self.read += sum(map(sum, (map(len, row) for row in rows)))
        model = self.m.model
        stopping = edit(model, {self.last: _stop})
        with suppress(_ReachedError), evaluating(model), record(model, *self.taps) as seen, stopping:
            model(**arguments, logits="none")
        x, y = (torch.cat([seen[tap][counts] for tap in taps], -1) for taps in (self.reads, self.writes))
        return x.float(), y.float()


class _ReachedError(Exception):
    """The last activation that is wanted has been computed."""


def _stop(x: Tensor) -> None:
    raise _ReachedError


def _generator(seed: int, number: int, purpose: int) -> torch.Generator:
    """Return a generator of its own for each purpose and number."""
    return torch.Generator().manual_seed((seed * 4 + purpose) * 1_000_003 + number)
