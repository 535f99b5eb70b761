"""How the pieces of a step go through the model: rows of one token in one way, longer pieces in another.

Which way a piece goes depends on its own length and request, and in a step that need not be exact on how many
such rows there are.

Shapes: T tokens of all pieces, D model, B texts, V vocabulary.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead.core.transformer import Transformer
from clearhead.run.serve.adapters import AdaptedRows, Updates, adapt
from clearhead.run.serve.graphs import GraphWriter
from clearhead.run.serve.jobs import Job
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.paged import PagedCache, Pool, TextPiece
from clearhead.run.serve.ragged import ragged, rows_agree
from clearhead.run.serve.rows import RowsWriter

Part = tuple[Job, int, int]  # a request, and where the tokens begin and end that it reads in a step
Read = list[tuple[Job, TextPiece]]
# cuDNN's is not among them: it makes a plan for each new length, which takes longer than the attention.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Passes:
    """The copies of a model that the steps of an engine run."""

    def __init__(self, model: Transformer, limits: Limits, adapters: Mapping[str, Updates]) -> None:
        spec = model.main.spec
        self.writer: RowsWriter | GraphWriter | None = None
        if spec.causal and model.config.head == "lm" and limits.rows:
            self.writer = RowsWriter.make(model, limits.exact) or GraphWriter.make(
                model, limits.running, limits.block
            )
        self.runner = ragged(model, limits.exact)
        self.rows = AdaptedRows()
        adapt(self.runner, model, adapters, self.rows)

    def run(self, pool: Pool, plan: Sequence[Part]) -> Iterator[tuple[Read, Read, Tensor | None]]:
        """Run a step: yield what was read, what of it a token is chosen behind, and its logits [B, V]."""
        rows = [part for part in plan if self._is_row(part)]
        if self.writer is not None and not self.writer.in_order:  # a row would not see those of its own text
            counts = Counter(id(job) for job, _, _ in rows)
            rows = [part for part in rows if counts[id(part[0])] == 1]
        if self.writer is None or len(rows) > self.writer.most:
            rows = []
        longer = [part for part in plan if part not in rows] if rows else plan
        if longer:  # first, since the rows of a text may follow in the same step
            yield self._together(pool, longer)
        if rows and self.writer is not None:
            read = [
                (job, TextPiece(slice(n, n + 1), a, job.tables, {})) for n, (job, a, _) in enumerate(rows)
            ]
            tokens = [token for part in rows for token in part[0].fed(*part[1:])]
            sources = [job.sources for job, _, _ in rows] if rows[0][0].sources else []
            hidden = self.writer(pool, [piece for _, piece in read], tokens, sources)  # B D
            few = len(rows) <= self.writer.head_rows
            logits = (self.writer.model if few else self.runner).head(hidden[:, None], None)[:, 0]
            for (job, piece), row in zip(read, logits):
                job.keep_prompt(row[None], piece.start)
            last = _last(read)
            yield read, last, logits[[piece.span.start for _, piece in last]]

    def agree(self, most: int) -> bool:
        """Return whether this machine gives a row the same bits whatever else is in a step of `most` rows."""
        writes = self.writer is None or (self.writer.alike and rows_agree(self.writer.model, most))
        return writes and rows_agree(self.runner, most)

    def _is_row(self, part: Part) -> bool:
        job, start, stop = part
        return stop - start == 1 and job.encoded and not job.asked.adapter

    def _together(self, pool: Pool, plan: Sequence[Part]) -> tuple[Read, Read, Tensor | None]:
        """Run pieces of any length, side by side in one row."""
        pieces, at = [], 0
        for job, start, stop in plan:
            pieces.append(TextPiece(slice(at, at + stop - start), start, job.tables, job.states))
            at += stop - start
        first, device = plan[0][0], next(self.runner.parameters()).device
        encoded = first.encoded
        sources = [job.sources for job, _, _ in plan] if first.sources and encoded else []
        self.rows.spans = [
            (piece.span if encoded else slice(None), job.asked.adapter)
            for (job, _, _), piece in zip(plan, pieces)
        ]
        ids = torch.tensor([[t for job, start, stop in plan for t in job.fed(start, stop)]], device=device)
        places = torch.tensor([[p for _, start, stop in plan for p in range(start, stop)]], device=device)
        source = None if encoded else first.prompts.source
        with sdpa_kernel(KERNELS) if device.type == "cuda" else contextlib.nullcontext():
            hidden = self.runner(
                ids, positions=places, source=source, cache=PagedCache(pool, pieces, sources), logits="none"
            ).hidden[0]  # T D
        self.rows.spans = ()
        read = [(job, piece) for (job, _, _), piece in zip(plan, pieces)]
        for job, piece in read:
            if job.asked.prompt_logprobs is not None and piece.start < len(job.row.prompt):
                job.keep_prompt(self.runner.head(hidden[None, piece.span], None)[0], piece.start)
        last = _last(read)
        if not last:
            return read, [], None
        logits = self.runner.head(hidden[[piece.span.stop - 1 for _, piece in last]][:, None], None)[:, 0]
        return read, last, logits


def _last(read: Read) -> Read:
    """Return the pieces that end where their text does, or behind it with a guess."""
    return [(job, piece) for job, piece in read if piece.stop >= len(job.tokens)]
